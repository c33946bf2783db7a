//! The `flash_attention` format over random geometries, layouts, batches and phases, against a kernel written here, which
//! reads nothing but the arrays, and the specification's row positions.

use std::collections::HashSet;

use crate::common::plan::paged::{Got, Planned, fixed, got, pages, planner};
use crate::common::plan::{Batch as Case, bucket, geometry};
use proptest::prelude::*;
use specrs::geometry::{Geometry, Layout};
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

/// A geometry, the committed lengths of a batch, and random words.
#[derive(Debug, Clone)]
struct Setting {
    g: Geometry,
    lens: Vec<u32>,
    random: Vec<u32>,
    seed: u64,
    pad: Option<(u32, u32)>,
}

fn setting() -> impl Strategy<Value = Setting> {
    let shape = (1u32..=6, 1u32..=7, 1u32..=80, 0u32..=6, 1u32..=300, any::<bool>());
    let batch = (prop::collection::vec(any::<u32>(), 0..=4), prop::collection::vec(any::<u32>(), 64..=64));
    (shape, batch, any::<u64>(), prop::option::of((0u32..3, 0u32..9))).prop_map(
        |((k, s, v, shift, context, holey), (lens, random), seed, pad)| {
            let layout = if holey { Layout::Holey } else { Layout::Dense };
            let g = geometry(k, s, v.min(1 + k + (s - 1) * k * k), 1 << shift, 4, context, layout);
            let near = |n: &u32| if n.is_multiple_of(3) { context - 1 - n / 3 % context.min(4) } else { n % context };
            Setting { lens: lens.iter().map(near).collect(), g, random, seed, pad }
        },
    )
}

impl Setting {
    fn below(&self, i: usize, n: u32) -> u32 {
        let x = self.random[i % 64].wrapping_add(i as u32 / 64).wrapping_mul(2_654_435_761);
        ((x as u64 * n as u64) >> 32) as u32
    }

    /// A chain with random branches that stays inside the context.
    fn tree(&self, i: usize) -> Vec<i32> {
        let room = self.g.limits().max_context_len - self.lens[i];
        let nodes = 1 + self.below(i * 7 + 1, self.g.shape().draft_tokens());
        let mut depths = vec![0u32];
        let mut parents = vec![-1i32];
        for j in 1..nodes {
            let p = if self.below(i + j as usize, 2) == 0 { j - 1 } else { self.below(i * 31 + j as usize, j) };
            let p = if depths[p as usize] + 1 < room { p } else { 0 };
            if depths[p as usize] + 1 < room {
                parents.push(p as i32);
                depths.push(depths[p as usize] + 1);
            } else {
                break;
            }
        }
        parents
    }
}

/// Row positions that query q of request i reads, by the specification.
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
    // What is used is what the load says, and within what the geometry states.
    let used = FlashAttention.extents(&g, &Load::of(plan)).unwrap();
    let limit = FlashAttention.extents(&g, &Load::limit(&g, phase, 4).unwrap()).unwrap();
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
            let mut arrays = fixed(&s.g, plan.phase(), 4, s.seed % 3);
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
    fn the_kernel_reads_what_the_plan_says(s in setting()) {
        let (g, shape, context) = (s.g, s.g.shape(), s.g.limits().max_context_len);
        let (k, steps) = (shape.topk(), shape.steps());
        let case = Case::new(&g, &s.lens, s.seed);
        let mut planner = planner(g);
        planner.set_debug(s.seed % 2 == 0);

        // Extend of 0 to 5 tokens, and decode.
        let counts: Vec<u32> = s.lens.iter().enumerate()
            .map(|(i, &l)| s.below(i, 6).min(context - l).min(g.alloc_len_per_decode())).collect();
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
        let mut ancestors: Vec<Vec<u32>> = vec![vec![]; s.lens.len() * k as usize];
        for step in 0..steps {
            let before = ancestors.clone();
            for (x, bits) in ancestors.iter_mut().enumerate() {
                let (i, b) = (x as u32 / k, x as u32 % k);
                let parent = s.below(x + step as usize * 17, k);
                *bits = before[(i * k + parent) as usize].clone();
                bits.push(b * steps + step);
                bits.sort_unstable();
            }
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
                        let own = if lane {
                            (0..=step).map(|t| b * steps + t).collect()
                        } else {
                            ancestors[i * k as usize + b as usize].clone()
                        };
                        // Branch b >= 1 of the holey layout reads copies of the tail, before its own first token.
                        let tail = |pos| {
                            if holes && b > 0 && pos >= base { region.pos(b, 0).unwrap() - (l - pos) } else { pos }
                        };
                        let own = own.iter().map(|bit| region.pos(bit / steps, bit % steps).unwrap());
                        (0..l).map(tail).chain(own).collect()
                    }).collect()
                }).collect();
                let words = (k * steps).div_ceil(64);
                let bits: Vec<u64> = ancestors.iter().flat_map(|set| (0..words).map(move |w| {
                    (0..64).filter(|b| set.contains(&(w * 64 + b))).map(|b| 1u64 << b).sum()
                })).collect();
                let mask = if lane { DraftMask::Lane } else { DraftMask::Ancestors(&bits) };
                every_way(&s, &case, &mut planner, &wants, |planner, batch| {
                    case.pool.with_tables(|t| planner.draft(&t, batch, step, mask)).unwrap().unwrap()
                });
            }
        }

        // Verify: trees of any form.
        let trees: Vec<Vec<i32>> = (0..s.lens.len()).map(|i| s.tree(i)).collect();
        let sizes: Vec<u32> = trees.iter().map(|t| t.len() as u32).collect();
        let parents = trees.concat();
        let wants: Want = s.lens.iter().zip(&trees).map(|(&l, tree)| (0..tree.len()).map(|j| {
            let mut up = vec![];
            let mut at = j as i32;
            while at >= 0 {
                up.push(l + at as u32);
                at = tree[at as usize];
            }
            up.reverse();
            (0..l).chain(up).collect()
        }).collect()).collect();
        every_way(&s, &case, &mut planner, &wants, |planner, batch| {
            let trees = Trees { sizes: &sizes, parents: &parents };
            case.pool.with_tables(|t| planner.verify(&t, batch, trees)).unwrap().unwrap()
        });
        prop_assert_eq!(planner.bodies(), 1);
    }
}
