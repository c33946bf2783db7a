//! 26972: the round's reserve without the holey layout's whole pages.

use specrs::Error;
use specrs::geometry::Layout;
use specrs::plan::{Batch, DraftMask, Lens, Planner, WritesOnly};
use specrs::revert::{Fault, Reverts};

use crate::common::plan::{Batch as Case, pool};
use crate::{Config, snapshot};

const REVERTED: Reverts = Reverts::NONE.and(Fault::HoleyReserve);

/// The result of a draft step of one request at `len`, with the reserve that `reverts` leaves; and the accounts after.
fn draft(c: Config, len: u32, reverts: Reverts) -> Result<(), Error> {
    let g = c.geometry(reverts);
    let case = Case::new(&g, &[len], 7);
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

/// Ordered by draft slots, then page size, then length.
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
    let pool = pool(&g, 3);
    let seqs: Vec<_> = (0..3).map(|_| pool.create().unwrap()).collect();
    pool.reserve(&[(seqs[0], 24), (seqs[2], 24)]).unwrap().commit(&[24, 24]).unwrap();
    let before = snapshot(&pool, &seqs);
    assert_eq!(g.alloc_target(0, 0).unwrap(), 4);
    let lease = pool.reserve(&[(seqs[1], 4)]).unwrap();
    let mut planner = Planner::new(g, WritesOnly).unwrap();
    let seq = [seqs[1]];
    let batch = Batch::new(&seq, Lens::Host(&[0]));
    let got = pool.with_tables(|t| planner.draft(&t, &batch, 0, DraftMask::Lane)).unwrap().unwrap_err();
    let want =
        Error::OutOfBounds { kernel: "draft", buffer: "allocated positions", request: 0, step: -1, index: 4, bound: 4 };
    assert_eq!(got, want);
    drop(lease);
    assert_eq!(snapshot(&pool, &seqs), before);
}

#[test]
fn the_same_configuration_without_the_switch() {
    let c = Config { k: 2, s: 1, v: 1, p: 4, batch: 3, context: 64, layout: Layout::Holey };
    let g = c.geometry(Reverts::NONE);
    assert_eq!((g.alloc_len_per_decode(), g.alloc_target(0, 0).unwrap()), (8, 16));
    let case = Case::new(&g, &[18, 0, 18], 3);
    let mut planner = Planner::new(g, WritesOnly).unwrap();
    let batch = Batch::new(&case.seqs, Lens::Host(&case.lens));
    let plan = case.pool.with_tables(|t| planner.draft(&t, &batch, 0, DraftMask::Lane)).unwrap().unwrap();
    // Branch 1 starts a page behind branch 0, at the same offset.
    let want = [(0, 18), (0, 22), (1, 0), (1, 4), (2, 18), (2, 22)].map(|(i, pos)| case.slot(i, pos));
    assert_eq!(plan.out_slots(), want);
    drop((plan, case.lease));
    case.pool.audit().unwrap();
}
