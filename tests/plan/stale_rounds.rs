//! Rounds with stale and wrong calls of every kind among them: plans and moves of earlier rounds run again, steps planned
//! behind wrong lengths or without a lease. Whatever is accepted runs over a KV of marks: no settled mark ever changes.

use std::ops::Range;

use crate::common::plan::{geometry, pool};
use proptest::prelude::*;
use specrs::Error;
use specrs::geometry::{Geometry, Layout};
use specrs::plan::{AuditedPlan, Batch, DraftMask, Lens, Moves, Paths, Phase, Planner, Trees, WritesOnly};
use specrs::pool::{Lease, Pool, SeqId};

const CONTEXT: u32 = 96;

/// One cache of marks, a mark a slot; its address range, for moves.
struct Kv(Vec<u64>);

impl Kv {
    fn memory(&self) -> Range<u64> {
        let first = self.0.as_ptr() as u64;
        first..first + 8 * self.0.len() as u64
    }
}

/// A sequence as it should be.
struct Seq {
    id: SeqId,
    lease: Option<Lease>,
    /// The marks of its settled positions.
    settled: Vec<u64>,
    committed: usize,
    /// Positions that the newest pass of this lease writes.
    flight: Range<u32>,
}

struct World {
    g: Geometry,
    pool: Pool,
    planner: Planner<WritesOnly>,
    kv: Kv,
    seqs: Vec<Seq>,
    /// Everything that was ever planned, of any sequence.
    plans: Vec<(usize, AuditedPlan<WritesOnly>)>,
    moves: Vec<(usize, Moves)>,
    next: u64,
    /// Calls that were refused, and wrong or stale ones among those that were tried.
    refused: u32,
}

impl World {
    fn new(page: u32, layout: Layout) -> Self {
        let g = geometry(2, 2, 4, page, 3, CONTEXT, layout);
        let pool = pool(&g, 5);
        let slots = pool.config().num_pages * page;
        let seq =
            |pool: &Pool| Seq { id: pool.create().unwrap(), lease: None, settled: vec![], committed: 0, flight: 0..0 };
        let seqs = (0..3).map(|_| seq(&pool)).collect();
        let planner = Planner::new(g, WritesOnly).unwrap();
        let kv = Kv(vec![0; slots as usize]);
        Self { g, pool, planner, kv, seqs, plans: vec![], moves: vec![], next: 1, refused: 0 }
    }

    fn slot(&self, i: usize, pos: u32) -> usize {
        let p = self.pool.config().page.get();
        (self.pool.pages(self.seqs[i].id).unwrap()[(pos / p) as usize].get() * p + pos % p) as usize
    }

    /// Run a plan, if it may: its queries' slots get new marks, those of a pass behind what is settled. Whether it ran.
    fn run(&mut self, i: usize, plan: &AuditedPlan<WritesOnly>) -> bool {
        match self.pool.with_tables(|t| plan.check_rows(&t)).unwrap() {
            Ok(()) => {}
            Err(Error::Dead { .. }) => {
                self.refused += 1;
                return false;
            }
            Err(e) => panic!("{e}"),
        }
        // The draft model catches up in a cache of its own.
        if plan.phase() != Phase::Extend || plan.prefix_lens()[0] as usize >= self.seqs[i].settled.len() {
            for &slot in plan.out_slots() {
                self.kv.0[slot as usize] = self.next;
                self.next += 1;
            }
        }
        true
    }

    fn run_moves(&mut self, moves: &Moves) {
        let memory = self.kv.memory();
        match self.pool.with_tables(|t| moves.claim(&t, memory.start, memory.end)).unwrap() {
            Ok(()) => {
                for (&s, &d) in moves.src().iter().zip(moves.dst()) {
                    self.kv.0[d as usize] = self.kv.0[s as usize];
                }
            }
            Err(Error::Dead { .. }) => self.refused += 1,
            Err(e) => panic!("{e}"),
        }
    }

    /// Plan a step of sequence `i` behind `len` and run it; whether it was planned.
    fn step(&mut self, i: usize, kind: u32, len: u32, n: u32) -> bool {
        let ids = [self.seqs[i].id];
        let lens = [len];
        let batch = Batch::new(&ids, Lens::Host(&lens));
        let parents = [-1, 0, 0, 1];
        let planner = &mut self.planner;
        let plan = self.pool.with_tables(|t| match kind {
            0 => planner.decode(&t, &batch),
            1 => planner.extend(&t, &batch, &[n]),
            2 => planner.verify(&t, &batch, Trees { sizes: &[n.min(4)], parents: &parents[..n.min(4) as usize] }),
            _ => planner.draft(&t, &batch, 0, DraftMask::Lane),
        });
        let Ok(plan) = plan.unwrap() else {
            self.refused += 1;
            return false;
        };
        let seq = &self.seqs[i];
        let settled = seq.settled.len() as u32;
        let again = kind == 1 && len < settled;
        assert!(len >= settled || again, "{} behind {len} of {settled}", plan.phase());
        let reach = if seq.flight.start >= settled { seq.flight.end.max(settled) } else { settled };
        assert!(len <= reach, "behind {len}: {settled} are settled, {:?} is in flight", seq.flight);
        let queries = plan.queries() as u32;
        assert!(seq.lease.is_some() || (again && len + queries <= settled) || queries == 0, "without a lease");
        if kind != 3 && len + queries > settled {
            self.seqs[i].flight = len..len + queries;
        }
        assert!(self.run(i, &plan), "a plan just made");
        self.plans.push((i, plan));
        true
    }

    /// Plan a commit of sequence `i` behind `len`, and run it; whether it was planned.
    fn commit_path(&mut self, i: usize, len: u32, nodes: &[u32]) -> bool {
        let seq = &mut self.seqs[i];
        let Some(lease) = seq.lease.as_mut() else { return false };
        let ids = [seq.id];
        let lens = [len];
        let paths = Paths { sizes: &[nodes.len() as u32], nodes };
        let planner = &mut self.planner;
        let commit =
            self.pool.with_tables(|t| planner.commit(&t, &Batch::new(&ids, Lens::Host(&lens)), paths)).unwrap();
        let Ok(commit) = commit else {
            self.refused += 1;
            return false;
        };
        lease.remap_all(commit.remaps().map(|r| (r.seq, r.first, r.order))).unwrap();
        let moves = commit.moves().clone();
        self.run_moves(&moves);
        self.moves.push((i, moves));
        let seq = &self.seqs[i];
        assert!(len as usize >= seq.settled.len(), "a commit behind {len} of {}", seq.settled.len());
        let marks: Vec<u64> =
            (seq.settled.len() as u32..commit.new_lens()[0]).map(|pos| self.kv.0[self.slot(i, pos)]).collect();
        self.seqs[i].settled.extend(marks);
        true
    }

    /// Commit, advance or roll back; what is settled beyond the new length is not any more.
    fn end(&mut self, i: usize, how: u32, keep: u32) {
        let seq = &mut self.seqs[i];
        let Some(mut lease) = seq.lease.take() else { return };
        let len = seq.committed as u32 + keep.min(seq.settled.len() as u32 - seq.committed as u32);
        match how {
            0 => {
                lease.advance(&[len]).unwrap();
                if seq.flight.start < len {
                    seq.flight = 0..0;
                }
                seq.lease = Some(lease);
            }
            1 => lease.commit(&[len]).unwrap(),
            _ => drop(lease),
        }
        if how < 2 {
            seq.committed = len as usize;
        }
        if seq.lease.is_none() {
            seq.flight = 0..0;
        }
        seq.settled.truncate(seq.committed);
    }

    fn check(&self, what: &str) {
        for (i, seq) in self.seqs.iter().enumerate() {
            assert_eq!(self.pool.committed(seq.id).unwrap(), seq.committed as u32);
            for (pos, &mark) in seq.settled.iter().enumerate() {
                let now = self.kv.0[self.slot(i, pos as u32)];
                assert_eq!(now, mark, "{what}: sequence {i}, position {pos} of {}", seq.settled.len());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if std::env::var_os("SPECRS_TEST_LONG").is_some() { 4000 } else { 150 }))]

    #[test]
    fn no_stale_or_wrong_call_changes_a_settled_mark(
        page in prop::sample::select(vec![1u32, 4, 16]),
        holey in any::<bool>(),
        calls in prop::collection::vec((0u32..12, 0usize..3, any::<u32>()), 1..120),
    ) {
        let layout = if holey && page > 1 { Layout::Holey } else { Layout::Dense };
        let mut w = World::new(page, layout);
        for (call, i, r) in calls {
            let (settled, committed) = (w.seqs[i].settled.len() as u32, w.seqs[i].committed as u32);
            match call {
                // Pages for a round, or for a longer one while others are in flight.
                0 | 1 if w.seqs[i].lease.is_none() && settled + 24 < CONTEXT => {
                    let positions = w.g.alloc_target(committed, 0).unwrap() + r % 8;
                    w.seqs[i].lease = Some(w.pool.reserve(&[(w.seqs[i].id, positions)]).unwrap());
                }
                0 => {
                    let more = w.g.alloc_target(settled.min(CONTEXT - 24), 0).unwrap();
                    if let Some(lease) = w.seqs[i].lease.as_mut() {
                        lease.renew(&[more]).unwrap();
                    }
                }
                // A step where it belongs: behind what is settled, or at the end of what is in flight.
                1..=3 => {
                    let len = if r % 3 == 0 && w.seqs[i].flight.end > settled { w.seqs[i].flight.end } else { settled };
                    w.step(i, r / 3 % 4, len, 1 + r / 16 % 5);
                }
                // A step behind any length at all.
                4 | 5 => {
                    w.step(i, r % 4, r / 4 % (settled + 6), 1 + r / 512 % 5);
                }
                6 => {
                    let nodes = [&[0][..], &[0, 1], &[0, 2], &[0, 1, 3], &[0, 2, 3]][r as usize % 5];
                    let len = if r / 5 % 2 == 0 { settled } else { r / 10 % (settled + 6) };
                    // The nodes of a path were written by a pass, else marks of nobody are settled, which is its caller's.
                    w.commit_path(i, len, nodes);
                }
                7 => w.end(i, r % 3, r / 3 % 5),
                // A plan made at any time before runs again.
                8..=10 if !w.plans.is_empty() => {
                    let (of, plan) = w.plans[r as usize % w.plans.len()].clone();
                    w.run(of, &plan);
                }
                11 if !w.moves.is_empty() => {
                    let moves = w.moves[r as usize % w.moves.len()].1.clone();
                    if !moves.is_empty() {
                        w.run_moves(&moves);
                    }
                }
                _ => {}
            }
            w.check(&format!("call {call} {i} {r}"));
        }
        drop(w.seqs.drain(..).filter_map(|s| s.lease).collect::<Vec<_>>());
        w.pool.audit().unwrap();
    }
}

/// The reproducer of the finding, by hand: a round within one page, then all that may not be done after it.
#[test]
fn a_round_that_frees_no_page_leaves_no_plan_behind() {
    let mut w = World::new(16, Layout::Dense);
    let id = w.seqs[0].id;
    w.seqs[0].lease = Some(w.pool.reserve(&[(id, 4)]).unwrap());
    assert!(w.step(0, 1, 0, 4));
    w.seqs[0].settled = (0..4).map(|p| w.kv.0[w.slot(0, p)]).collect();
    w.end(0, 1, 4);
    w.seqs[0].settled = (0..4).map(|p| w.kv.0[w.slot(0, p)]).collect();
    w.seqs[0].committed = 4;
    w.seqs[0].lease = None;
    assert_eq!(w.pool.committed(id).unwrap(), 4);
    let target = w.g.alloc_target(4, 0).unwrap();
    w.seqs[0].lease = Some(w.pool.reserve(&[(id, target)]).unwrap());
    assert!(w.step(0, 2, 4, 4));
    assert!(w.commit_path(0, 4, &[0, 2, 3]));
    // Between the commit's plan and the lease's end: neither the plan, nor the moves, nor a second commit.
    let (verify, moves) = (w.plans.last().unwrap().1.clone(), w.moves.last().unwrap().1.clone());
    assert!(!w.run(0, &verify));
    let before = w.refused;
    w.run_moves(&moves);
    assert!(!w.commit_path(0, 4, &[0, 2]));
    assert!(!w.step(0, 0, 4, 1));
    assert_eq!(w.refused, before + 3);
    w.check("before the commit");
    w.end(0, 1, 3);
    w.check("after it");
    assert!(!w.run(0, &verify));
    w.run_moves(&moves);
    for kind in [0, 2, 3] {
        assert!(!w.step(0, kind, 7, 2), "no lease");
        assert!(!w.step(0, kind, 2, 2), "below, no lease");
    }
    let target = w.g.alloc_target(7, 0).unwrap();
    w.seqs[0].lease = Some(w.pool.reserve(&[(id, target)]).unwrap());
    for kind in [0, 2, 3] {
        assert!(!w.step(0, kind, 2, 2), "below");
        assert!(!w.step(0, kind, 9, 2), "beyond");
    }
    assert!(!w.commit_path(0, 2, &[0, 2, 3]));
    assert!(w.step(0, 1, 2, 5), "the draft model catches up");
    // A round in flight: the next is planned behind it, and lives on where the first is committed and the lease stays.
    assert!(w.step(0, 0, 7, 1));
    assert!(w.step(0, 0, 8, 1));
    assert!(!w.step(0, 0, 11, 1));
    let [first, second] = [w.plans.len() - 2, w.plans.len() - 1].map(|at| w.plans[at].1.clone());
    assert!(w.commit_path(0, 7, &[0]));
    w.end(0, 0, 1);
    assert!(!w.run(0, &first));
    assert!(w.run(0, &second));
    w.check("the end");
}
