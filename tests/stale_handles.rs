//! What outlives the state it was made for is refused: plans, moves and copies after a fork, an insertion into the
//! prefix cache, the end of a lease, and before the rows of another pool.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod plan_support;

use plan_support::{Batch as Case, geometry};
use specrs::Error;
use specrs::geometry::{Geometry, Layout};
use specrs::plan::{AuditedPlan, Batch, Lens, Moves, Native, Paths, Planner};
use specrs::pool::{Pool, PoolConfig};

fn small() -> Geometry {
    geometry(2, 2, 4, 4, 2, 64, Layout::Dense)
}

/// Writes positions 4..6 of a sequence with 8 committed: allowed while nobody shares the page.
fn rewrite(c: &Case, planner: &mut Planner<Native>) -> AuditedPlan {
    let batch = Batch::new(&c.seqs, Lens::Host(&[4]));
    c.pool.with_tables(|t| planner.extend(&t, &batch, &[2])).unwrap().unwrap()
}

fn refused<T: std::fmt::Debug>(r: Result<specrs::Result<T>, Error>, what: &str) {
    match r.unwrap() {
        Err(Error::Dead { what: w, .. }) => assert_eq!(w, what),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_plan_made_before_a_fork_may_not_write_what_is_shared_now() {
    let c = Case::new(&small(), &[8], 3);
    let mut planner = Planner::new(small(), Native).unwrap();
    for _ in 0..2 {
        let plan = rewrite(&c, &mut planner);
        c.pool.with_tables(|t| plan.check_rows(&t)).unwrap().unwrap();
        let fork = c.pool.fork(c.seqs[0], 8).unwrap();
        refused(c.pool.with_tables(|t| plan.check_rows(&t)), "plan");
        c.pool.release(&[fork]).unwrap(); // once more: the columns were shared before
    }
}

#[test]
fn a_plan_made_before_a_cache_insertion_may_not_write_what_is_cached_now() {
    let c = Case::new(&small(), &[8], 3);
    let mut planner = Planner::new(small(), Native).unwrap();
    let plan = rewrite(&c, &mut planner);
    assert_eq!(c.pool.cache_insert(c.seqs[0], &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap(), 2);
    refused(c.pool.with_tables(|t| plan.check_rows(&t)), "plan");
    let version = c.pool.version(c.seqs[0]).unwrap();
    assert_eq!(c.pool.cache_insert(c.seqs[0], &[1, 2, 3, 4]).unwrap(), 0);
    assert_eq!(c.pool.version(c.seqs[0]).unwrap(), version, "nothing new is shared");
}

#[test]
fn plans_and_moves_do_not_fit_the_rows_of_another_pool() {
    let (a, b) = (Case::new(&small(), &[8], 3), Case::new(&small(), &[8], 3));
    assert_eq!(a.seqs[0].row(), b.seqs[0].row());
    let mut planner = Planner::new(small(), Native).unwrap();
    let plan = rewrite(&a, &mut planner);
    let batch = Batch::new(&a.seqs, Lens::Host(&a.lens));
    let paths = Paths { sizes: &[2], nodes: &[0, 2] };
    let commit = a.pool.with_tables(|t| planner.commit(&t, &batch, paths)).unwrap().unwrap();
    a.pool.with_tables(|t| plan.check_rows(&t).and(commit.moves().check_rows(&t))).unwrap().unwrap();
    refused(b.pool.with_tables(|t| plan.check_rows(&t)), "plan");
    refused(b.pool.with_tables(|t| commit.moves().check_rows(&t)), "plan");
}

#[test]
fn the_copies_of_a_lease_die_with_it() {
    let page = specrs::bounds::PageSize::new(4).unwrap();
    let pool = Pool::new(PoolConfig { num_pages: 9, page, max_seqs: 4, row_pages: 4 }).unwrap();
    let a = pool.create().unwrap();
    pool.reserve(&[(a, 6)]).unwrap().commit(&[6]).unwrap();
    let b = pool.fork(a, 6).unwrap();
    // Rolled back: the copy's page may be anybody's. Committed: the shared page may be.
    for commit in [None, Some(6), Some(7)] {
        let lease = pool.reserve(&[(b, 7)]).unwrap();
        let copies = pool.with_tables(|t| Moves::of_lease(&lease, &t)).unwrap().unwrap();
        assert_eq!(copies.len(), 2);
        pool.with_tables(|t| copies.check_rows(&t)).unwrap().unwrap();
        let other = Pool::new(pool.config()).unwrap();
        refused(other.with_tables(|t| Moves::of_lease(&lease, &t)), "sequence");
        match commit {
            None => drop(lease),
            Some(len) => lease.commit(&[len]).unwrap(),
        }
        refused(pool.with_tables(|t| copies.check_rows(&t)), "plan");
    }
}

/// The counts are looked at before any array is made as long as they ask for.
#[test]
fn counts_beyond_the_context_size_nothing() {
    let c = Case::new(&small(), &[8], 3);
    let mut planner = Planner::new(small(), Native).unwrap();
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    for count in [57, i32::MAX as u32, u32::MAX] {
        let e = c.pool.with_tables(|t| planner.extend(&t, &batch, &[count])).unwrap().unwrap_err();
        let index = 8 + i64::from(count) - 1;
        assert!(matches!(e, Error::OutOfBounds { buffer: "context", index: i, bound: 64, .. } if i == index), "{e}");
    }
    assert_eq!(planner.bodies(), 0);
}

/// A slot that breaks a ring is one of the pool, and not the sink.
#[test]
fn a_scratch_slot_is_checked() {
    let slot = |s| Some(specrs::bounds::Slot::new(s).unwrap());
    for (scratch, ok) in [(0, false), (1, false), (3, true), (9, true), (10, false), (1000, false)] {
        let moves = Moves::new(&[1, 2], &[2, 1], 10, slot(scratch));
        assert_eq!(moves.is_ok(), ok, "{scratch}: {moves:?}");
    }
}
