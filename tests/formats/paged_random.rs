//! The `flash_attention` format over random geometries, layouts, batches and phases, against a kernel written here, which
//! reads nothing but the arrays, and the row positions that each query attends to.

use std::collections::HashSet;

use crate::common::plan::paged::{Got, Planned, fixed, got, pages, planner};
use crate::common::plan::random::{PAGES, Setting, path_to, setting};
use crate::common::plan::{Batch as Case, bucket};
use proptest::prelude::*;
use specrs::geometry::Layout;
use specrs::plan::{Arrays, Batch, DraftMask, Extent, FlashAttention, Format, Lens, Load, Phase, Planner, Trees};

/// The kernel: query q's slots, from the arrays and the page sizes of its two views of the pool.
fn kernel(arrays: &Got, q: usize, page: i32, expand_page: Option<i32>) -> Vec<i32> {
    let pass = |lens: &[i32], table: &[Vec<i32>], cu: &[i32], page: i32, causal: bool| {
        let row = cu.windows(2).position(|w| (w[0]..w[1]).contains(&(q as i32)));
        let Some(row) = row else { return vec![] };
        let hidden = if causal { cu[row + 1] - 1 - q as i32 } else { 0 };
        (0..lens[row] - hidden).map(|k| table[row][(k / page) as usize] * page + k % page).collect::<Vec<_>>()
    };
    let a = arrays;
    let mut slots = pass(&a.cache_seqlens, &a.page_table, &a.cu_seqlens_q, page, expand_page.is_none());
    if let Some(page) = expand_page {
        slots.extend(pass(&a.expand_cache_seqlens, &a.expand_page_table, &a.expand_cu_seqlens_q, page, false));
    }
    slots
}

const MAX_BATCH: u32 = 5;

/// Row positions that query q of request i reads.
type Want = Vec<Vec<Vec<u32>>>;

/// Check what a plan's arrays make the kernel read, and their form. `wants[i][j]`: query j of request i.
fn check(s: &Setting, case: &Case, plan: &Planned, arrays: &Arrays, wants: &Want) {
    let (g, phase, p) = (s.g, plan.phase(), s.g.page().get() as i32);
    let view = got(arrays);
    let expand = match phase {
        Phase::Extend | Phase::Decode => None,
        Phase::Draft { .. } if g.shape().topk() == 1 => None,
        Phase::Draft { .. } if g.layout() == Layout::Holey => Some(p),
        _ => Some(1),
    };
    assert_eq!(FlashAttention::expand_page_size(&g, phase).map(|p| p as i32), expand);
    let mut q = 0;
    for (i, queries) in wants.iter().enumerate() {
        for want in queries {
            let want: Vec<i32> = want.iter().map(|&pos| case.slot(i, pos)).collect();
            assert_eq!(kernel(&view, q, p, expand), want, "{phase:?} request {i} query {q}");
            let unique: HashSet<_> = want.iter().collect();
            assert_eq!(unique.len(), want.len());
            q += 1;
        }
    }
    for q in q..plan.queries() {
        assert_eq!(kernel(&view, q, p, expand), [0i32; 0]);
    }
    // Every row: as many entries as its length needs, then the sink. Pages are distinct and consecutive in the row.
    let rows = |lens: &[i32], table: &[Vec<i32>], page: i32, what: &str| {
        for (row, (&len, entries)) in lens.iter().zip(table).enumerate() {
            let n = ((len + page - 1) / page) as usize;
            assert!(entries[..n].iter().all(|&e| e >= if page == 1 { p } else { 1 }), "{what} {row}");
            assert!(entries[n..].iter().all(|&e| e == 0), "{what} {row} behind {n}: {entries:?}");
        }
        assert_eq!(lens.len(), table.len());
    };
    rows(&view.cache_seqlens, &view.page_table, p, "page_table");
    rows(&view.expand_cache_seqlens, &view.expand_page_table, expand.unwrap_or(1), "expand_page_table");
    if let (Phase::Draft { step }, Some(page)) = (phase, expand)
        && page > 1
    {
        for (q, row) in view.expand_page_table.iter().enumerate() {
            assert_eq!(row.len() as u32, step + 1);
            let i = q / g.shape().topk() as usize;
            let live: Vec<i32> = row.iter().copied().filter(|&e| e != 0).collect();
            if let (Some(&first), true) = (live.first(), i < case.seqs.len()) {
                let all = pages(case, i);
                let at = all.iter().position(|&id| id == first).unwrap();
                assert_eq!(live, all[at..at + live.len()]);
            }
        }
    }
    // The used part is what the load says, and within what the geometry states.
    let used = FlashAttention.extents(&g, &Load::of(plan)).unwrap();
    let limit = FlashAttention.extents(&g, &Load::limit(&g, phase, MAX_BATCH).unwrap()).unwrap();
    let now: Vec<Extent> = arrays.iter().map(|a| a.extent).collect();
    assert_eq!(used.iter().map(|u| u.1).collect::<Vec<_>>(), now);
    for ((array, used), (same, limit)) in used.iter().zip(&limit) {
        assert_eq!(array, same);
        let fits = used.shape().iter().zip(limit.shape()).all(|(&u, l)| u <= l);
        assert!(fits, "{array}: {used:?} of {limit:?}");
    }
}

/// Plan three times: into arrays of specrs that a longer step has used, again, and into static ones.
fn every_way(
    s: &Setting,
    case: &Case,
    planner: &mut Planner<FlashAttention>,
    wants: &Want,
    make: impl Fn(&mut Planner<FlashAttention>, &Batch<'_>) -> Planned,
) {
    let queries: usize = wants.iter().map(Vec::len).sum();
    let lens = Lens::Host(&case.lens);
    let phase = make(planner, &Batch::new(&case.seqs, lens)).phase();
    let pad = s.pad.map(|more| bucket(&s.g, phase, case.lens.len(), queries, more));
    for pad in [None, pad] {
        let batch = Batch { seqs: &case.seqs, lens, pad };
        let plan = make(planner, &batch);
        check(s, case, &plan, plan.arrays(), wants);
        if pad.is_none() {
            let mut arrays = fixed(&s.g, plan.phase(), MAX_BATCH, s.seed % 3);
            for _ in 0..2 {
                case.pool.with_tables(|t| planner.lower(&t, &plan, &mut arrays)).unwrap().unwrap();
                check(s, case, &plan, &arrays, wants);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_kernel_reads_what_the_plan_says(s in setting(PAGES, MAX_BATCH)) {
        let (g, shape, context) = (s.g, s.g.shape(), s.g.limits().max_context_len);
        let (k, steps) = (shape.topk(), shape.steps());
        let case = Case::new(&g, &s.lens, s.seed);
        let mut planner = planner(g);
        planner.set_debug(s.seed % 2 == 0);

        // Extend of 0 to 5 tokens, and decode.
        let counts = s.counts();
        let wants: Want = s.lens.iter().zip(&counts)
            .map(|(&l, &n)| (0..n).map(|j| (0..=l + j).collect()).collect()).collect();
        every_way(&s, &case, &mut planner, &wants, |planner, batch| {
            case.pool.with_tables(|t| planner.extend(&t, batch, &counts)).unwrap().unwrap()
        });
        let wants: Want = s.lens.iter().map(|&l| vec![(0..=l).collect()]).collect();
        every_way(&s, &case, &mut planner, &wants, |planner, batch| {
            case.pool.with_tables(|t| planner.decode(&t, batch)).unwrap().unwrap()
        });

        // Draft: lanes, and in the dense layout the ancestors of re-ranked beams.
        let mut beams = vec![];
        for step in 0..steps {
            s.rerank(&mut beams, step, k > 1); // a chain reads all of its slots
            let bits = s.bits(&beams);
            for lane in [true, false] {
                if !lane && g.layout() == Layout::Holey {
                    continue;
                }
                let wants: Want = s.lens.iter().enumerate().map(|(i, &l)| {
                    let region = g.draft_region(l).unwrap();
                    let holes = g.layout() == Layout::Holey;
                    let base = l - l % g.page().get();
                    (0..k).map(|b| {
                        if l + step >= context {
                            return vec![];
                        }
                        let own: Vec<u32> = if lane {
                            (0..=step).map(|t| b * steps + t).collect()
                        } else {
                            beams[i * k as usize + b as usize].iter().copied().collect()
                        };
                        // Branch b >= 1 of the holey layout reads copies of the tail, before its own first token.
                        let tail = |pos| {
                            if holes && b > 0 && pos >= base { region.pos(b, 0).unwrap() - (l - pos) } else { pos }
                        };
                        let own = own.iter().map(|bit| region.pos(bit / steps, bit % steps).unwrap());
                        (0..l).map(tail).chain(own).collect()
                    }).collect()
                }).collect();
                let mask = if lane { DraftMask::Lane } else { DraftMask::Ancestors(&bits) };
                every_way(&s, &case, &mut planner, &wants, |planner, batch| {
                    case.pool.with_tables(|t| planner.draft(&t, batch, step, mask)).unwrap().unwrap()
                });
            }
        }

        // Verify: trees of any form.
        let trees = s.trees();
        let sizes: Vec<u32> = trees.iter().map(|t| t.len() as u32).collect();
        let parents = trees.concat();
        let wants: Want = s.lens.iter().zip(&trees).map(|(&l, tree)| (0..tree.len() as u32).map(|j| {
            (0..l).chain(path_to(tree, j).iter().map(|node| l + node)).collect()
        }).collect()).collect();
        every_way(&s, &case, &mut planner, &wants, |planner, batch| {
            let trees = Trees { sizes: &sizes, parents: &parents };
            case.pool.with_tables(|t| planner.verify(&t, batch, trees)).unwrap().unwrap()
        });
        prop_assert_eq!(planner.bodies(), 1);
    }
}
