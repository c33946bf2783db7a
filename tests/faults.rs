//! The named historical faults (`src/revert.rs`): each put back, stopped by its guard with the right operands and
//! nothing around it touched; and the same configuration without the switch.
#![allow(clippy::unwrap_used)]

mod plan_support;

use specrs::Error;
use specrs::geometry::{Geometry, Layout, Limits, TreeShape};
use specrs::plan::{Batch, DraftMask, Lens, Planner, WritesOnly};
use specrs::pool::Pool;
use specrs::revert::{FAULTS, Fault, Reverts};

/// A configuration of one of the faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Config {
    k: u32,
    s: u32,
    v: u32,
    p: u32,
    batch: u32,
    context: u32,
    layout: Layout,
}

impl Config {
    fn geometry(self, reverts: Reverts) -> Geometry {
        let limits = Limits { max_batch: self.batch, max_context_len: self.context, page_size: self.p };
        Geometry::with_reverts(limits, TreeShape::new(self.k, self.s, self.v).unwrap(), self.layout, reverts).unwrap()
    }
}

/// Every page of every sequence, to compare before and after.
fn snapshot(pool: &Pool, seqs: &[specrs::pool::SeqId]) -> Vec<Vec<u32>> {
    seqs.iter().map(|&s| pool.pages(s).unwrap().iter().map(|p| p.get()).collect()).collect()
}

#[test]
fn geometries_without_a_switch_are_as_they_always_were() {
    let c = Config { k: 3, s: 6, v: 16, p: 4, batch: 8, context: 2048, layout: Layout::Holey };
    let plain = c.geometry(Reverts::NONE);
    for f in FAULTS {
        let other = c.geometry(Reverts::NONE.and(f.fault));
        assert!(other != plain && other.reverts().has(f.fault));
        let sizes = |g: &Geometry| (g.alloc_len_per_decode(), g.row_width(), g.per_branch_kv_indices().unwrap());
        let same = !matches!(f.fault, Fault::BranchWidth | Fault::HoleyReserve);
        assert_eq!(sizes(&other) == sizes(&plain), same, "{f:?}");
    }
}

mod holey_reserve {
    //! 26972.
    use super::*;

    const REVERTED: Reverts = Reverts::NONE.and(Fault::HoleyReserve);

    /// What a draft step of one request at `len` gives, with the reserve that `reverts` leaves; and the accounts after.
    fn draft(c: Config, len: u32, reverts: Reverts) -> Result<(), Error> {
        let g = c.geometry(reverts);
        let case = plan_support::Batch::new(&g, &[len], 7);
        let mut planner = Planner::new(g, WritesOnly).unwrap();
        let batch = Batch::new(&case.seqs, Lens::Host(&case.lens));
        let got = case.pool.with_tables(|t| planner.draft(&t, &batch, 0, DraftMask::Lane)).unwrap();
        drop(case.lease);
        case.pool.audit().unwrap();
        got.map(|_| ())
    }

    fn smallest() -> Option<(Config, u32)> {
        for slots in 2..=6u32 {
            for k in (2..=slots).filter(|k| slots % k == 0) {
                for p in [2, 4, 8, 16] {
                    for len in 0..p {
                        let c = Config { k, s: slots / k, v: 1, p, batch: 1, context: p, layout: Layout::Holey };
                        if draft(c, len, REVERTED).is_err() {
                            return Some((c, len));
                        }
                    }
                }
            }
        }
        None
    }

    /// By draft slots, then page size, then length.
    #[test]
    fn the_smallest_configuration() {
        let c = Config { k: 2, s: 1, v: 1, p: 4, batch: 1, context: 4, layout: Layout::Holey };
        assert_eq!(smallest(), Some((c, 0)));
    }

    #[test]
    fn the_guard_fires_and_nothing_around_it_changes() {
        // Two neighbours and the request that outgrows its reserve between them: 2 branches of a page of 4 each behind
        // an empty prefix are 8 positions; the reserve without the layout's pages is 2 * max(1 * 2, 1) = 4.
        let c = Config { k: 2, s: 1, v: 1, p: 4, batch: 3, context: 64, layout: Layout::Holey };
        let g = c.geometry(REVERTED);
        assert_eq!((g.alloc_len_per_decode(), g.reserve_per_decode()), (2, 4));
        let pool = plan_support::pool(&g, 3);
        let seqs: Vec<_> = (0..3).map(|_| pool.create().unwrap()).collect();
        pool.reserve(&[(seqs[0], 24), (seqs[2], 24)]).unwrap().commit(&[24, 24]).unwrap();
        let before = snapshot(&pool, &seqs);
        let free = pool.stats().unwrap().free_pages;
        assert_eq!(g.alloc_target(0, 0).unwrap(), 4);
        let lease = pool.reserve(&[(seqs[1], 4)]).unwrap();
        let mut planner = Planner::new(g, WritesOnly).unwrap();
        let seq = [seqs[1]];
        let batch = Batch::new(&seq, Lens::Host(&[0]));
        let got = pool.with_tables(|t| planner.draft(&t, &batch, 0, DraftMask::Lane)).unwrap().unwrap_err();
        let want = Error::OutOfBounds {
            kernel: "draft",
            buffer: "allocated positions",
            request: 0,
            step: -1,
            index: 4,
            bound: 4,
        };
        assert_eq!(got, want);
        drop(lease);
        assert_eq!(snapshot(&pool, &seqs), before);
        assert_eq!(pool.stats().unwrap().free_pages, free);
        pool.audit().unwrap();
    }

    #[test]
    fn the_same_configuration_without_the_switch() {
        let c = Config { k: 2, s: 1, v: 1, p: 4, batch: 3, context: 64, layout: Layout::Holey };
        let g = c.geometry(Reverts::NONE);
        assert_eq!((g.alloc_len_per_decode(), g.alloc_target(0, 0).unwrap()), (8, 16));
        let case = plan_support::Batch::new(&g, &[18, 0, 18], 3);
        let mut planner = Planner::new(g, WritesOnly).unwrap();
        let batch = Batch::new(&case.seqs, Lens::Host(&case.lens));
        let plan = case.pool.with_tables(|t| planner.draft(&t, &batch, 0, DraftMask::Lane)).unwrap().unwrap();
        // Branch 1 starts a page behind branch 0, at the same offset.
        let want = [(0, 18), (0, 22), (1, 0), (1, 4), (2, 18), (2, 22)].map(|(i, pos)| case.slot(i, pos));
        assert_eq!(plan.out_slots(), want);
        drop((plan, case.lease));
        case.pool.audit().unwrap();
    }
}
