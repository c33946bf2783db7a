//! Plans, moves and copies that outlive the state that they were made for are refused: after a fork, an insertion into
//! the prefix cache, the end of a lease, and before the rows of another pool.

use crate::common::plan::{Batch as Case, geometry};
use specrs::Error;
use specrs::geometry::{Geometry, Layout};
use specrs::plan::{
    AnyFormat, Arrays, AuditedPlan, Batch, FlashAttention, Format, Lens, Moves, Native, Paths, Phase, Plan, Planner,
    WritesOnly,
};
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
    assert_eq!(c.pool.cache_insert(c.seqs[0], &[1, 2, 3, 4, 5, 6, 7, 8], 0, 0).unwrap(), 2);
    refused(c.pool.with_tables(|t| plan.check_rows(&t)), "plan");
    let version = c.pool.version(c.seqs[0]).unwrap();
    assert_eq!(c.pool.cache_insert(c.seqs[0], &[1, 2, 3, 4], 0, 0).unwrap(), 0);
    assert_eq!(c.pool.version(c.seqs[0]).unwrap(), version, "nothing new is shared");
}

#[test]
fn plans_and_moves_do_not_fit_the_rows_of_another_pool() {
    let (a, b) = (Case::new(&small(), &[8], 3), Case::new(&small(), &[8], 3));
    assert_eq!(a.seqs[0].row(), b.seqs[0].row());
    let mut planner = Planner::new(small(), Native).unwrap();
    let plan = rewrite(&a, &mut planner);
    let batch = Batch::new(&a.seqs, Lens::Host(&a.lens));
    a.pool.with_tables(|t| plan.check_rows(&t)).unwrap().unwrap();
    refused(b.pool.with_tables(|t| plan.check_rows(&t)), "plan");
    let paths = Paths { sizes: &[2], nodes: &[0, 2] };
    let commit = a.pool.with_tables(|t| planner.commit(&t, &batch, paths)).unwrap().unwrap();
    a.pool.with_tables(|t| commit.moves().check_rows(&t)).unwrap().unwrap();
    refused(b.pool.with_tables(|t| commit.moves().check_rows(&t)), "plan");
}

/// A plan without a live row, and moves that move nothing, have no version to be told by.
#[test]
fn plans_without_rows_do_not_fit_another_pool() {
    let (a, b) = (Case::new(&small(), &[8], 3), Case::new(&small(), &[8], 3));
    let format = AnyFormat::FlashAttention(FlashAttention);
    let mut planner = Planner::new(small(), format).unwrap();
    let none = Batch::new(&[], Lens::Host(&[]));
    let plan = a.pool.with_tables(|t| planner.decode(&t, &none)).unwrap().unwrap();
    let commit = a.pool.with_tables(|t| planner.commit(&t, &none, Paths { sizes: &[], nodes: &[] })).unwrap().unwrap();
    let mut arrays = Arrays::own(format.arrays());
    a.pool.with_tables(|t| planner.lower(&t, &plan, &mut arrays)).unwrap().unwrap();
    a.pool.with_tables(|t| commit.moves().check_rows(&t)).unwrap().unwrap();
    refused(b.pool.with_tables(|t| planner.lower(&t, &plan, &mut arrays)), "plan");
    refused(b.pool.with_tables(|t| commit.moves().check_rows(&t)), "plan");
    assert_eq!(arrays.generation(), 1);
    // A plan that was made elsewhere is of the pool that audited it.
    let parts = || Plan::from_parts(Phase::Decode, small().page(), plan.to_parts());
    let audited = a.pool.with_tables(|t| AuditedPlan::audit(parts(), &t, &small(), &format)).unwrap().unwrap();
    a.pool.with_tables(|t| audited.check_rows(&t)).unwrap().unwrap();
    refused(b.pool.with_tables(|t| audited.check_rows(&t)), "plan");
    refused(b.pool.with_tables(|t| AuditedPlan::audit(Plan::clone(&plan), &t, &small(), &format)), "plan");
}

/// Each row that a tail copy touches ties it: both a row's source, the tail page, and its destinations may be another's
/// after a fork. A row whose prefix ends on a page has no holes, and may change.
#[test]
fn tail_copies_go_stale_with_each_row() {
    let g = geometry(2, 2, 4, 4, 3, 64, Layout::Holey);
    for (changed, stale) in [(None, false), (Some(0), true), (Some(1), false), (Some(2), true)] {
        let c = Case::new(&g, &[5, 8, 7], 3);
        let mut planner = Planner::new(g, WritesOnly).unwrap();
        let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
        let copies = c.pool.with_tables(|t| planner.tail_copies(&t, &batch)).unwrap().unwrap();
        assert_eq!(copies.moves().len(), 1 + 3);
        if let Some(i) = changed {
            c.pool.fork(c.seqs[i], c.lens[i]).unwrap();
        }
        let check = c.pool.with_tables(|t| copies.moves().check_rows(&t));
        if stale {
            refused(check, "plan");
        } else {
            check.unwrap().unwrap();
        }
    }
}

/// Checks the same for the moves of a commit: a path that is in place moves nothing.
#[test]
fn moves_go_stale_with_each_row() {
    let g = geometry(2, 2, 4, 4, 3, 64, Layout::Dense);
    for (changed, stale) in [(None, false), (Some(0), true), (Some(1), false), (Some(2), true)] {
        let c = Case::new(&g, &[5, 8, 7], 3);
        let mut planner = Planner::new(g, Native).unwrap();
        let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
        let paths = Paths { sizes: &[2, 2, 3], nodes: &[0, 2, 0, 1, 0, 1, 3] };
        let commit = c.pool.with_tables(|t| planner.commit(&t, &batch, paths)).unwrap().unwrap();
        assert_eq!(commit.moves().len(), 1 + 1);
        if let Some(i) = changed {
            c.pool.fork(c.seqs[i], c.lens[i]).unwrap();
        }
        let check = c.pool.with_tables(|t| commit.moves().check_rows(&t));
        if stale {
            refused(check, "plan");
        } else {
            check.unwrap().unwrap();
        }
    }
}

/// A commit's lease is one of the same pool, and covers every sequence.
#[test]
fn a_lease_covers_its_sequences() {
    let (c, other) = (Case::new(&small(), &[8, 9], 3), Case::new(&small(), &[8, 9], 3));
    let third = c.pool.create().unwrap();
    let [a, b] = [c.seqs[0], c.seqs[1]];
    for good in [&[][..], &[a, b], &[b, a], &[a], &[b], &[b, b, a, a]] {
        c.lease.check_covers(&c.pool, good).unwrap();
    }
    for bad in [&[third][..], &[a, third], &[a, b, third], &[third, a], &[a, other.seqs[1]]] {
        let e = c.lease.check_covers(&c.pool, bad).unwrap_err();
        assert!(matches!(&e, Error::Mismatch { operand: "lease", got, .. } if got.starts_with("one without")), "{e}");
    }
    // One without copies has no row to be told by either.
    let copies = c.pool.with_tables(|t| Moves::of_lease(&c.lease, &t)).unwrap().unwrap();
    assert!(copies.is_empty());
    c.pool.with_tables(|t| copies.check_rows(&t)).unwrap().unwrap();
    refused(other.pool.with_tables(|t| copies.check_rows(&t)), "plan");
    for seqs in [&[][..], &[a, b], &other.seqs[..]] {
        let e = c.lease.check_covers(&other.pool, seqs).unwrap_err().to_string();
        assert_eq!(e, "lease: got a lease of another pool, want one of the planner's pool");
    }
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
