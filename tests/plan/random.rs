//! Plans over random geometries and batches against a plain reference that uses sets of row positions, and the moves of
//! a commit run on a model of the KV.

use std::collections::{BTreeSet, HashSet};

use crate::common::plan::random::{PAGES, Setting, path_to, setting};
use crate::common::plan::{Batch as Case, bucket, geometry, pool};
use proptest::prelude::*;
use specrs::bounds::Slot;
use specrs::geometry::Layout;
use specrs::plan::{
    AuditedPlan, Batch, Bucket, DraftMask, Lens, Moves, Paths, Phase, PlanParts, Planner, Trees, WritesOnly,
};
use specrs::pool::SeqId;

/// Row positions, RoPE positions and masks of one request's queries, as sets of bits.
struct Want {
    prefix: u32,
    queries: Vec<(u32, u32, BTreeSet<u32>)>,
    dead: usize,
}

/// The arrays that a plan must have.
fn parts(case: &Case, wants: &[Want], words: u32, bucket: Option<Bucket>) -> PlanParts {
    let mut p = PlanParts { qo_indptr: vec![0], mask_words: words, ..PlanParts::default() };
    for (i, want) in wants.iter().enumerate() {
        p.rows.push(case.seqs[i].row() as i32);
        p.versions.push(case.pool.version(case.seqs[i]).unwrap());
        p.prefix_lens.push(want.prefix as i32);
        for (pos, rope, bits) in &want.queries {
            p.positions.push(*rope as i32);
            p.out_slots.push(case.slot(i, *pos));
            for w in 0..words {
                p.mask.push((0..64).filter(|b| bits.contains(&(w * 64 + b))).map(|b| 1u64 << b).sum());
            }
        }
        for _ in 0..want.dead {
            p.positions.push(0);
            p.out_slots.push(0);
            p.mask.extend(vec![0; words as usize]);
        }
        p.qo_indptr.push(p.positions.len() as i32);
    }
    if let Some(bucket) = bucket {
        let last = p.positions.len() as i32;
        p.rows.resize(bucket.batch as usize, -1);
        p.versions.resize(bucket.batch as usize, 0);
        p.prefix_lens.resize(bucket.batch as usize, 0);
        p.qo_indptr.resize(bucket.batch as usize + 1, last);
        p.positions.resize(bucket.queries as usize, 0);
        p.out_slots.resize(bucket.queries as usize, 0);
        p.mask.resize(bucket.queries as usize * words as usize, 0);
    }
    p
}

/// Slots written are in the pool, not the sink, on pages with one owner, and no two are equal.
fn check_writes(case: &Case, plan: &AuditedPlan<WritesOnly>) {
    let p = case.pool.config().page.get();
    let mut seen = HashSet::new();
    for &slot in plan.out_slots().iter().filter(|&&s| s != 0) {
        assert!(seen.insert(slot), "slot {slot} twice");
        assert!(slot >= p as i32 && (slot as u32) < case.pool.config().num_pages * p);
        let owners = case.pool.with_tables(|t| t.owners(slot as u32 / p)).unwrap();
        assert_eq!(owners, Some(1));
    }
}

/// Make the plan twice, of which the second reuses the buffers of the first, and compare with the reference.
fn compare(
    s: &Setting,
    case: &Case,
    planner: &mut Planner<WritesOnly>,
    wants: &[Want],
    words: u32,
    phase: Phase,
    make: impl Fn(&mut Planner<WritesOnly>, &Batch<'_>) -> AuditedPlan<WritesOnly>,
) {
    let lens = &s.lens;
    let queries: usize = wants.iter().map(|w| w.queries.len() + w.dead).sum();
    let pad = s.pad.map(|more| bucket(&s.g, phase, lens.len(), queries, more));
    let batch = Batch { seqs: &case.seqs, lens: Lens::Host(lens), pad };
    let want = parts(case, wants, words, pad);
    for _ in 0..2 {
        let plan = make(planner, &batch);
        assert_eq!(plan.phase(), phase);
        assert_eq!(plan.to_parts(), want);
        assert_eq!((plan.live_batch(), plan.live_queries()), (lens.len(), queries));
        check_writes(case, &plan);
    }
}

fn concat<T: Copy>(lists: &[Vec<T>]) -> (Vec<u32>, Vec<T>) {
    (lists.iter().map(|l| l.len() as u32).collect(), lists.concat())
}

/// The KV of a pool as one number a slot; row positions of the batch hold (request, position).
struct Kv(Vec<(usize, u32)>);

impl Kv {
    fn new(case: &Case) -> Self {
        let config = case.pool.config();
        let mut kv = Self(vec![(usize::MAX, 0); (config.num_pages * config.page.get()) as usize]);
        for (i, &seq) in case.seqs.iter().enumerate() {
            for pos in 0..case.pool.allocated(seq).unwrap() {
                kv.0[case.slot(i, pos) as usize] = (i, pos);
            }
        }
        kv
    }

    fn run(&mut self, moves: &Moves) {
        for (&s, &d) in moves.src().iter().zip(moves.dst()) {
            self.0[d as usize] = self.0[s as usize];
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_phase_equals_the_reference(s in setting(PAGES, 6)) {
        let (g, shape) = (s.g, s.g.shape());
        let mut case = Case::new(&g, &s.lens, s.seed);
        let mut planner = Planner::new(g, WritesOnly).unwrap();
        planner.set_debug(s.seed % 2 == 0);
        let context = g.limits().max_context_len;

        // Extend: up to 5 tokens behind each prefix.
        let counts = s.counts();
        let wants: Vec<Want> = s.lens.iter().zip(&counts).map(|(&l, &n)| Want {
            prefix: l, dead: 0, queries: (l..l + n).map(|p| (p, p, BTreeSet::new())).collect(),
        }).collect();
        compare(&s, &case, &mut planner, &wants, 0, Phase::Extend, |planner, batch| {
            case.pool.with_tables(|t| planner.extend(&t, batch, &counts)).unwrap().unwrap()
        });

        // Draft: every step, with lanes and with the ancestors of re-ranked beams.
        let mut beams = vec![];
        for step in 0..shape.steps() {
            s.rerank(&mut beams, step, true);
            let bits = s.bits(&beams);
            for lane in [false, true] {
                let wants: Vec<Want> = s.lens.iter().enumerate().map(|(i, &l)| {
                    if l + step >= context {
                        return Want { prefix: 0, queries: vec![], dead: shape.topk() as usize };
                    }
                    let region = g.draft_region(l).unwrap();
                    let queries = (0..shape.topk()).map(|b| {
                        let own = (0..=step).map(|t| b * shape.steps() + t).collect();
                        let given = beams[i * shape.topk() as usize + b as usize].clone();
                        (region.pos(b, step).unwrap(), l + step, if lane { own } else { given })
                    }).collect();
                    Want { prefix: l, queries, dead: 0 }
                }).collect();
                let words = g.draft_mask_words();
                let mask = if lane { DraftMask::Lane } else { DraftMask::Ancestors(&bits) };
                compare(&s, &case, &mut planner, &wants, words, Phase::Draft { step }, |planner, batch| {
                    case.pool.with_tables(|t| planner.draft(&t, batch, step, mask)).unwrap().unwrap()
                });
            }
        }

        // Verify: a random tree each.
        let trees = s.trees();
        let (sizes, parents) = concat(&trees);
        let words = shape.draft_tokens().div_ceil(64);
        let wants: Vec<Want> = s.lens.iter().zip(&trees).map(|(&l, tree)| {
            let queries = (0..tree.len()).map(|j| {
                let up: BTreeSet<u32> = path_to(tree, j as u32).into_iter().collect();
                (l + j as u32, l + up.len() as u32 - 1, up)
            }).collect();
            Want { prefix: l, queries, dead: 0 }
        }).collect();
        compare(&s, &case, &mut planner, &wants, words, Phase::Verify, |planner, batch| {
            let trees = Trees { sizes: &sizes, parents: &parents };
            case.pool.with_tables(|t| planner.verify(&t, batch, trees)).unwrap().unwrap()
        });

        // Tail copies: each hole gets the prefix's tail; nothing else changes.
        let batch = Batch::new(&case.seqs, Lens::Host(&s.lens));
        let copies = case.pool.with_tables(|t| planner.tail_copies(&t, &batch)).unwrap().unwrap();
        let mut kv = Kv::new(&case);
        let mut want = Kv::new(&case);
        kv.run(copies.moves());
        for (i, &l) in s.lens.iter().enumerate() {
            let (p, region) = (g.page().get(), g.draft_region(l).unwrap());
            for b in 1..shape.topk() {
                let first = region.pos(b, 0).unwrap();
                if g.layout() == Layout::Holey {
                    for o in 1..=l % p {
                        want.0[case.slot(i, first - o) as usize] = (i, l - o);
                    }
                }
            }
        }
        prop_assert_eq!(&kv.0, &want.0);

        // Commit: position L + i holds what L + n_i held, by moves or by a remap, and the prefix what it held.
        let paths = s.paths(&trees);
        let (sizes, nodes) = concat(&paths);
        let paths_of = Paths { sizes: &sizes, nodes: &nodes };
        let commit = case.pool.with_tables(|t| planner.commit(&t, &batch, paths_of)).unwrap().unwrap();
        let mut kv = Kv::new(&case);
        kv.run(commit.moves());
        for r in commit.remaps() {
            case.lease.remap(r.seq, r.first, r.order).unwrap();
        }
        prop_assert!(g.page().get() == 1 || commit.remaps().count() == 0);
        prop_assert!(g.page().get() > 1 || commit.moves().is_empty());
        for (i, (&l, path)) in s.lens.iter().zip(&paths).enumerate() {
            prop_assert_eq!(commit.new_lens()[i], l + path.len() as u32);
            for pos in 0..l {
                prop_assert_eq!(kv.0[case.slot(i, pos) as usize], (i, pos));
            }
            for (to, &from) in path.iter().enumerate() {
                prop_assert_eq!(kv.0[case.slot(i, l + to as u32) as usize], (i, l + from));
            }
        }
        case.lease.commit(commit.new_lens()).unwrap();
        case.pool.audit().unwrap();
        prop_assert_eq!(planner.bodies(), 1); // one plan alive at a time
    }

    /// Any moves with distinct destinations: afterwards each destination holds what its source held before.
    #[test]
    fn moves_are_ordered_or_refused(
        n in 1usize..30, order in any::<u64>(), spread in 1u32..4, with_scratch in any::<bool>(),
    ) {
        let mut x = order | 1;
        let mut below = |n: u32| {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((x >> 33) as u32) % n
        };
        // Few slots make rings and chains likely.
        let slots = n as u32 + 1 + below(n as u32 * spread);
        let mut dst: Vec<i32> = (1..slots as i32).collect();
        for i in (1..dst.len()).rev() {
            dst.swap(i, below(i as u32 + 1) as usize);
        }
        dst.truncate(n);
        let src: Vec<i32> = (0..n).map(|_| below(slots) as i32).collect();
        let scratch = with_scratch.then(|| Slot::new(slots).unwrap());
        let held: Vec<i32> = (0..=slots as i32).collect();
        // A ring: following sources back from a move comes back to it.
        let ring = (0..n).any(|i| {
            let mut at = src[i];
            for _ in 0..n {
                if at == dst[i] {
                    return src[i] != dst[i];
                }
                match dst.iter().position(|&d| d == at) {
                    Some(m) if src[m] != at => at = src[m],
                    _ => return false,
                }
            }
            false
        });
        match Moves::new(&src, &dst, slots + 1, scratch) {
            Ok(moves) => {
                prop_assert!(with_scratch || !ring);
                let mut now = held.clone();
                for (&s, &d) in moves.src().iter().zip(moves.dst()) {
                    now[d as usize] = now[s as usize];
                }
                for (slot, &holds) in now.iter().enumerate().take(slots as usize) {
                    let from = dst.iter().position(|&d| d == slot as i32).map_or(slot as i32, |m| src[m]);
                    prop_assert_eq!(holds, from);
                }
            }
            Err(e) => prop_assert!(ring && !with_scratch, "{e}"),
        }
    }
}

/// The rows of forks: what they share may be read, not written, and their writes do not meet.
#[test]
fn forks_write_apart() {
    for p in [1, 4, 16] {
        let g = geometry(3, 4, 10, p, 4, 200, Layout::Dense);
        let pool = pool(&g, 11);
        let a = pool.create().unwrap();
        pool.reserve(&[(a, 21)]).unwrap().commit(&[21]).unwrap();
        let seqs: Vec<SeqId> = [a].into_iter().chain((0..3).map(|_| pool.fork(a, 21).unwrap())).collect();
        let wants: Vec<_> = seqs.iter().map(|&s| (s, g.alloc_target(21, 0).unwrap())).collect();
        let lease = pool.reserve(&wants).unwrap();
        let case = Case { pool, seqs, lens: vec![21; 4], lease };
        let mut planner = Planner::new(g, WritesOnly).unwrap();
        let batch = Batch::new(&case.seqs, Lens::Host(&case.lens));
        let plan = case.pool.with_tables(|t| planner.verify(&t, &batch, Trees { sizes: &[1; 4], parents: &[-1; 4] }));
        check_writes(&case, &plan.unwrap().unwrap());
        let plan = case.pool.with_tables(|t| planner.draft(&t, &batch, 3, DraftMask::Lane));
        check_writes(&case, &plan.unwrap().unwrap());
        // The copies of a shared tail: 21 mod P tokens of each page that was replaced, none for P = 1.
        let moves = case.pool.with_tables(|t| Moves::of_lease(&case.lease, &t)).unwrap().unwrap();
        let tails = case.lease.copies().len() as u32;
        assert_eq!(moves.len() as u32, tails * (21 % p));
        assert!(p == 1 || tails >= 3, "{tails}");
    }
}
