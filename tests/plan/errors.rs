//! Errors of the planner, with their operands; and the audit's findings in plans that were tampered with.

use crate::common::plan::{Batch as Case, geometry, pool};
use specrs::Error;
use specrs::bounds::PageSize;
use specrs::geometry::{Geometry, Layout};
use specrs::plan::{
    AuditedPlan, Batch, Bucket, DraftMask, Lens, Moves, Native, Paths, Phase, Plan, PlanParts, Planner, Trees,
    WritesOnly,
};
use specrs::pool::PoolConfig;

/// K = 3, S = 4, V = 10, P = 4, context 64, two requests at 7 and 12.
fn case() -> (Geometry, Case, Planner<Native>) {
    let g = geometry(3, 4, 10, 4, 2, 64, Layout::Dense);
    (g, Case::new(&g, &[7, 12], 5), Planner::new(g, Native).unwrap())
}

fn text<T: std::fmt::Debug>(r: Result<specrs::Result<T>, Error>) -> String {
    r.unwrap().unwrap_err().to_string()
}

#[test]
fn lengths_on_the_device_are_not_read() {
    let (_, c, mut planner) = case();
    let batch = Batch::new(&c.seqs, Lens::Device { batch: 2, at_most: 64 });
    let all = [
        text(c.pool.with_tables(|t| planner.extend(&t, &batch, &[1, 1]))),
        text(c.pool.with_tables(|t| planner.draft(&t, &batch, 0, DraftMask::Lane))),
        text(c.pool.with_tables(|t| planner.verify(&t, &batch, Trees { sizes: &[1, 1], parents: &[-1, -1] }))),
        text(c.pool.with_tables(|t| planner.commit(&t, &batch, Paths { sizes: &[1, 1], nodes: &[0, 0] }))),
        text(c.pool.with_tables(|t| planner.tail_copies(&t, &batch))),
    ];
    for (message, who) in all.iter().zip(["extend", "draft", "verify", "commit", "tail copy"]) {
        assert!(message.starts_with("lens = device lengths of 2 requests (<= 64)"), "{message}");
        assert!(message.contains(&format!("{who} on the host reads lengths")), "{message}");
    }
}

/// A bucket is memory that is taken: it is inside the limits, those of its phase.
#[test]
fn buckets_without_end() {
    let (g, c, mut planner) = case();
    for pad in [(3, 2), (u32::MAX, 2), (2, 3), (2, i32::MAX as u32), (2, u32::MAX)] {
        let b = Batch::new(&c.seqs, Lens::Host(&c.lens)).padded(Bucket { batch: pad.0, queries: pad.1 });
        let e = c.pool.with_tables(|t| planner.decode(&t, &b)).unwrap().unwrap_err();
        let (what, got) = if pad.0 > 2 { ("bucket requests", pad.0) } else { ("bucket queries", pad.1) };
        assert_eq!(e, Error::OutOfRange { what, got: got.into(), min: 0, max: 2 });
    }
    // Two requests: 3 branches, 10 nodes, 64 tokens each.
    for (phase, most) in [(0, 6), (1, 20), (2, 128)] {
        for queries in [most, most + 1] {
            let b = Batch::new(&c.seqs, Lens::Host(&c.lens)).padded(Bucket { batch: 2, queries });
            let trees = Trees { sizes: &[1, 1], parents: &[-1, -1] };
            let plan = c.pool.with_tables(|t| match phase {
                0 => planner.draft(&t, &b, 3, DraftMask::Lane),
                1 => planner.verify(&t, &b, trees),
                _ => planner.extend(&t, &b, &[1, 1]),
            });
            assert_eq!(plan.unwrap().is_ok(), queries == most, "{phase} {queries} of {g:?}");
        }
    }
    let mut verify = |batch: u32, queries: u32| {
        let b = Batch::new(&c.seqs, Lens::Host(&c.lens)).padded(Bucket { batch, queries });
        let trees = Trees { sizes: &[1, 1], parents: &[-1, -1] };
        text(c.pool.with_tables(|t| planner.verify(&t, &b, trees)))
    };
    assert_eq!(verify(65_537, 2), "bucket requests = 65537 is outside 0..=2");
    assert_eq!(verify(2, 1 << 31), "bucket queries = 2147483648 is outside 0..=20");
    assert!(verify(1, 2).starts_with("bucket requests: need 2 elements, have 1"));
}

/// A pool that no plan of the geometry can use is known before the first one.
#[test]
fn pools_of_other_sizes() {
    let (g, c, planner) = case();
    let good = c.pool.config();
    planner.check_pool(&good).unwrap();
    planner.check_pool(&PoolConfig { row_pages: good.row_pages + 1, ..good }).unwrap();
    let page = PageSize::new(16).unwrap();
    let e = planner.check_pool(&PoolConfig { page, ..good }).unwrap_err().to_string();
    assert_eq!(e, "page size: got a pool with pages of 16, want 4, as the planner's geometry");
    // 64 tokens, twice 12 draft slots and a page's rest: 91 positions on 23 pages.
    let e = planner.check_pool(&PoolConfig { row_pages: 22, ..good }).unwrap_err();
    assert!(matches!(e, Error::Capacity { what: "row_pages", need: 23, have: 22, .. }), "{e}");
    let e = e.to_string();
    assert!(
        e.contains("max_context_len 64 and 24 positions") && e.contains("make the pool with row_pages = 23"),
        "{e}"
    );
    assert_eq!(g.row_pages(), 23);
}

/// The audit's last two checks: writes and rows are compared over the whole batch. A row that is there twice writes the
/// same slots twice, or, behind another prefix, slots of its own.
#[test]
fn a_row_audited_twice() {
    let (g, c, mut planner) = case();
    let batch = Batch::new(&c.seqs[..1], Lens::Host(&[7]));
    let plan = c.pool.with_tables(|t| planner.extend(&t, &batch, &[2])).unwrap().unwrap();
    let one = plan.to_parts();
    let audit = |second: u32| {
        let slots: Vec<i32> = (second..second + 2).map(|pos| c.slot(0, pos)).collect();
        let parts = PlanParts {
            rows: [one.rows[0]; 2].into(),
            versions: [one.versions[0]; 2].into(),
            qo_indptr: vec![0, 2, 4],
            prefix_lens: vec![7, second as i32],
            positions: vec![7, 8, second as i32, second as i32 + 1],
            out_slots: [&one.out_slots[..], &slots].concat(),
            ..one.clone()
        };
        let plan = Plan::from_parts(Phase::Extend, g.page(), parts);
        text(c.pool.with_tables(|t| AuditedPlan::audit(plan, &t, &g, &Native)))
    };
    let slot = |pos: u32| format!("slot written = {} twice: write slots are disjoint over the batch", c.slot(0, pos));
    assert_eq!(audit(8), slot(8));
    let both = [slot(7), slot(8)];
    assert!(both.contains(&audit(7)), "{}", audit(7));
    assert_eq!(audit(9), format!("row = {} twice: a sequence may be in a batch once", one.rows[0]));
}

#[test]
fn arrays_that_do_not_fit_the_batch() {
    let (_, c, mut planner) = case();
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    let short = Batch::new(&c.seqs, Lens::Host(&[7]));
    assert_eq!(
        text(c.pool.with_tables(|t| planner.extend(&t, &short, &[1, 1]))),
        "lens: got 1 lengths, want 2, one a request"
    );
    assert_eq!(text(c.pool.with_tables(|t| planner.extend(&t, &batch, &[1]))), "counts: got 1, want 2");
    let bits = DraftMask::Ancestors(&[1; 5]);
    assert_eq!(text(c.pool.with_tables(|t| planner.draft(&t, &batch, 0, bits))), "ancestor bits: got 5, want 6");
    let trees = Trees { sizes: &[1, 2], parents: &[-1, -1] };
    assert_eq!(text(c.pool.with_tables(|t| planner.verify(&t, &batch, trees))), "tree parents: got 2, want 3");
    let paths = Paths { sizes: &[1, 2], nodes: &[0, 0] };
    assert_eq!(text(c.pool.with_tables(|t| planner.commit(&t, &batch, paths))), "path nodes: got 2, want 3");
    let other = geometry(3, 4, 10, 16, 2, 64, Layout::Dense);
    let mut other = Planner::new(other, Native).unwrap();
    assert_eq!(
        text(c.pool.with_tables(|t| other.extend(&t, &batch, &[1, 1]))),
        "page size: got a pool with pages of 4, want 16, as the planner's geometry"
    );
    let three = [c.seqs[0]; 3];
    let batch = Batch::new(&three, Lens::Host(&[7; 3]));
    assert_eq!(text(c.pool.with_tables(|t| planner.extend(&t, &batch, &[1; 3]))), "batch = 3 is outside 0..=2");
}

#[test]
fn a_sequence_twice_or_dead() {
    let (g, c, mut planner) = case();
    let twice = [c.seqs[1], c.seqs[1]];
    let batch = Batch::new(&twice, Lens::Host(&[12, 12]));
    let message = text(c.pool.with_tables(|t| planner.draft(&t, &batch, 0, DraftMask::Lane)));
    assert!(message.starts_with(&format!("batch = sequence {} again at request 1", c.seqs[1])), "{message}");
    let paths = Paths { sizes: &[1, 1], nodes: &[0, 0] };
    let message = text(c.pool.with_tables(|t| planner.commit(&t, &batch, paths)));
    assert!(message.contains("again at request 1"), "{message}");
    let gone = c.pool.create().unwrap();
    c.pool.release(&[gone]).unwrap();
    let seqs = [gone];
    let batch = Batch::new(&seqs, Lens::Host(&[0]));
    let err = c.pool.with_tables(|t| planner.extend(&t, &batch, &[1])).unwrap().unwrap_err();
    assert!(matches!(err, Error::Dead { what: "sequence", .. }), "{err}");
    // Another pool's handle.
    let other = Case::new(&g, &[7], 1);
    let batch = Batch::new(&other.seqs, Lens::Host(&[7]));
    let err = c.pool.with_tables(|t| planner.extend(&t, &batch, &[1])).unwrap().unwrap_err();
    assert!(matches!(err, Error::Dead { what: "sequence", .. }), "{err}");
}

#[test]
fn positions_beyond_the_allocation_or_the_context() {
    let (g, c, mut planner) = case();
    let allocated = c.pool.allocated(c.seqs[0]).unwrap(); // alloc_target(7) = 7 + 24 up to pages = 32
    assert_eq!(allocated, 32);
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    assert!(c.pool.with_tables(|t| planner.extend(&t, &batch, &[25, 0])).unwrap().is_ok());
    assert_eq!(
        text(c.pool.with_tables(|t| planner.extend(&t, &batch, &[26, 0]))),
        "extend: index 32 into allocated positions is outside 0..32 (request 0, step -1); reserve them first (`Pool.reserve`)"
    );
    assert_eq!(
        text(c.pool.with_tables(|t| planner.extend(&t, &batch, &[0, 53]))),
        "extend: index 64 into context is outside 0..64 (request 1, step -1)"
    );
    // A prefix that nobody has written, without any token behind it.
    let far = Batch::new(&c.seqs, Lens::Host(&[33, 12]));
    assert_eq!(
        text(c.pool.with_tables(|t| planner.extend(&t, &far, &[0, 0]))),
        "length = extend: request 0, 33 tokens: 7 tokens are committed and 32 with those in flight: it would read what \
         nobody wrote"
    );
    let mut c = c;
    // The draft region from 24: branch 2, step 3 is 24 + 2*4 + 3 = 35, and the region is placed as a whole.
    c.lease.advance(&[24, 12]).unwrap();
    let far = Batch::new(&c.seqs, Lens::Host(&[24, 12]));
    assert_eq!(
        text(c.pool.with_tables(|t| planner.draft(&t, &far, 0, DraftMask::Lane))),
        "draft: index 35 into allocated positions is outside 0..32 (request 0, step -1); reserve them first (`Pool.reserve`)"
    );
    c.lease.advance(&[30, 12]).unwrap();
    let far = Batch::new(&c.seqs, Lens::Host(&[30, 12]));
    let paths = Paths { sizes: &[2, 1], nodes: &[0, 2, 0] };
    assert_eq!(
        text(c.pool.with_tables(|t| planner.commit(&t, &far, paths))),
        "commit: index 32 into allocated positions is outside 0..32 (request 0, step -1); reserve them first (`Pool.reserve`)"
    );
    c.lease.advance(&[31, 12]).unwrap();
    let far = Batch::new(&c.seqs, Lens::Host(&[31, 12]));
    let trees = Trees { sizes: &[2, 1], parents: &[-1, 0, -1] };
    assert_eq!(
        text(c.pool.with_tables(|t| planner.verify(&t, &far, trees))),
        "verify: index 32 into allocated positions is outside 0..32 (request 0, step -1); reserve them first (`Pool.reserve`)"
    );
    // At the wall: L = 62 with a child at 63 is inside, a grandchild at 64 is not, wide or deep.
    let mut w = Case::new(&g, &[62], 1);
    let batch = Batch::new(&w.seqs, Lens::Host(&[62]));
    for (parents, ok) in [(&[-1, 0, 0, 0][..], true), (&[-1, 0, 1], false), (&[-1, 0, 0, 2], false)] {
        let trees = Trees { sizes: &[parents.len() as u32], parents };
        match w.pool.with_tables(|t| planner.verify(&t, &batch, trees)).unwrap() {
            Ok(plan) => assert!(ok && plan.positions()[1..].iter().all(|&p| p == 63)),
            Err(e) => {
                assert!(!ok);
                assert_eq!(e.to_string(), "verify: index 64 into context is outside 0..64 (request 0, step -1)");
            }
        }
    }
    // A draft step behind the wall has dead queries; a length behind it is an error.
    let plan = w.pool.with_tables(|t| planner.draft(&t, &batch, 2, DraftMask::Lane)).unwrap().unwrap();
    assert_eq!(
        (plan.prefix_lens(), plan.out_slots(), plan.positions(), plan.mask()),
        (&[0][..], &[0; 3][..], &[0; 3][..], &[0; 3][..])
    );
    assert_eq!(
        text(w.pool.with_tables(|t| planner.draft(&t, &batch, 4, DraftMask::Lane))),
        "step = 4 is outside 0..=3"
    );
    assert_eq!(
        text(w.pool.with_tables(|t| planner.commit(&t, &batch, Paths { sizes: &[3], nodes: &[0, 1, 2] }))),
        "committed length = 65 is outside 0..=64"
    );
    w.lease.advance(&[64]).unwrap();
    assert_eq!(
        text(w.pool.with_tables(|t| planner.verify(
            &t,
            &Batch::new(&w.seqs, Lens::Host(&[64])),
            Trees { sizes: &[1], parents: &[-1] }
        ))),
        "verify: index 64 into context is outside 0..64 (request 0, step -1)"
    );
    w.lease.advance(&[65]).unwrap();
    let over = Batch::new(&w.seqs, Lens::Host(&[65]));
    assert_eq!(
        text(w.pool.with_tables(|t| planner.draft(&t, &over, 2, DraftMask::Lane))),
        "draft: index 65 into context is outside 0..64 (request 0, step -1)"
    );
}

/// A tail page with two owners may be read, not written; a reserve replaces it, and then it may.
#[test]
fn shared_pages_are_not_written() {
    let g = geometry(3, 4, 10, 4, 4, 64, Layout::Dense);
    let pool = pool(&g, 3);
    let a = pool.create().unwrap();
    pool.reserve(&[(a, 7)]).unwrap().commit(&[7]).unwrap();
    let target = g.alloc_target(7, 0).unwrap();
    let lease = pool.reserve(&[(a, target)]).unwrap();
    let b = pool.fork(a, 6).unwrap(); // now the tail page that `a` is about to write has two owners
    let seqs = [a];
    let batch = Batch::new(&seqs, Lens::Host(&[7]));
    let mut planner = Planner::new(g, Native).unwrap();
    let page = pool.pages(a).unwrap()[1].get();
    let why = "only a page with one owner may be written: reserve the positions first (copy on write)";
    let refused =
        |who: &str| format!("write position = {who}: request 0, positions 4.. on page {page} with 2 owners: {why}");
    let trees = Trees { sizes: &[2], parents: &[-1, 0] };
    assert_eq!(text(pool.with_tables(|t| planner.extend(&t, &batch, &[1]))), refused("extend"));
    assert_eq!(text(pool.with_tables(|t| planner.draft(&t, &batch, 0, DraftMask::Lane))), refused("draft"));
    assert_eq!(text(pool.with_tables(|t| planner.verify(&t, &batch, trees))), refused("verify"));
    // Positions inside the committed prefix, on pages that are shared.
    let inside = Batch::new(&seqs, Lens::Host(&[2]));
    let message = text(pool.with_tables(|t| planner.extend(&t, &inside, &[3])));
    assert!(message.contains("positions 0.. on page") && message.contains("with 2 owners"), "{message}");
    drop(lease);
    // A commit into a page that was forked since its verification: node 2 would move to position 7.
    let six = pool.create().unwrap();
    pool.reserve(&[(six, 6)]).unwrap().commit(&[6]).unwrap();
    let _lease = pool.reserve(&[(six, target)]).unwrap();
    pool.fork(six, 6).unwrap();
    let page = pool.pages(six).unwrap()[1].get();
    let seqs = [six];
    let message = text(pool.with_tables(|t| {
        planner.commit(&t, &Batch::new(&seqs, Lens::Host(&[6])), Paths { sizes: &[2], nodes: &[0, 2] })
    }));
    assert!(message.contains(&format!("commit: request 0, positions 4.. on page {page} with 2 owners")), "{message}");
    let lease = pool.reserve(&[(a, target)]).unwrap(); // copy on write
    assert_eq!(lease.copies().len(), 1);
    assert!(pool.with_tables(|t| planner.verify(&t, &batch, trees)).unwrap().is_ok());
    drop(lease);
    pool.release(&[b]).unwrap();
    let lease = pool.reserve(&[(a, target)]).unwrap();
    assert!(lease.copies().is_empty());
    assert!(pool.with_tables(|t| planner.verify(&t, &batch, trees)).unwrap().is_ok());
}

/// A tail page that a rollback gives back to the row is shared again, and so is a page that the cache owns too.
#[test]
fn what_is_shared_again_is_not_written() {
    let g = geometry(3, 4, 10, 4, 4, 64, Layout::Dense);
    let pool = pool(&g, 3);
    let a = pool.create().unwrap();
    pool.reserve(&[(a, 7)]).unwrap().commit(&[7]).unwrap();
    let mut planner = Planner::new(g, Native).unwrap();
    let mut write = |seq, start: u32| {
        let (seqs, lens) = ([seq], [start]);
        let batch = Batch::new(&seqs, Lens::Host(&lens));
        pool.with_tables(|t| planner.extend(&t, &batch, &[1])).unwrap().map(|_| ()).map_err(|e| e.to_string())
    };
    let reserved = |seq| pool.reserve(&[(seq, 9)]).unwrap();
    assert_eq!(write(a, 2), Ok(()));
    let lease = reserved(a);
    assert_eq!((lease.copies().len(), write(a, 7)), (0, Ok(())));
    let fork = pool.fork(a, 7).unwrap();
    assert!(write(a, 7).unwrap_err().contains("with 2 owners"));
    drop(lease);
    let lease = reserved(a);
    assert_eq!((lease.copies().len(), write(a, 7)), (1, Ok(())));
    assert!(write(a, 2).unwrap_err().contains("with 2 owners")); // a full page, which is never copied
    drop(lease);
    assert!(write(a, 6).unwrap_err().contains("with 2 owners"));
    pool.release(&[fork]).unwrap();
    let lease = reserved(a);
    assert_eq!((lease.copies().len(), write(a, 2), write(a, 7)), (0, Ok(()), Ok(())));
    let b = pool.create().unwrap(); // a sequence that nobody has forked
    pool.reserve(&[(b, 7)]).unwrap().commit(&[7]).unwrap();
    assert_eq!((write(b, 2), pool.cache_insert(b, &[1, 2, 3, 4], 0, 0).unwrap()), (Ok(()), 1));
    assert!(write(b, 2).unwrap_err().contains("with 2 owners"));
    let other = reserved(b);
    assert_eq!(write(b, 7), Ok(()));
    drop((lease, other));
    pool.audit().unwrap();
}

/// Looked-up rows are as old as the pool's last change: a fork between two plans of a round changes no row of the
/// batch, and still its tail is shared from then on.
#[test]
fn a_change_of_the_pool_is_seen_at_once() {
    let (g, c, mut planner) = case();
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    let trees = Trees { sizes: &[2, 1], parents: &[-1, 0, -1] };
    let mut both = || {
        c.pool
            .with_tables(|t| {
                (planner.draft(&t, &batch, 1, DraftMask::Lane).is_ok(), planner.verify(&t, &batch, trees).is_ok())
            })
            .unwrap()
    };
    assert_eq!(both(), (true, true));
    let fork = c.pool.fork(c.seqs[0], 7).unwrap();
    assert_eq!(both(), (false, false));
    c.pool.release(&[fork]).unwrap();
    assert_eq!(both(), (true, true));
    // Another pool whose handles look the same.
    let other = Case::new(&g, &[7, 12], 6);
    let plan = other.pool.with_tables(|t| planner.verify(&t, &Batch::new(&other.seqs, batch.lens), trees)).unwrap();
    assert_eq!(plan.unwrap().out_slots()[0], other.slot(0, 7));
    // The same sequences at other lengths.
    let shorter = Batch::new(&c.seqs, Lens::Host(&[8, 12]));
    let plan = c.pool.with_tables(|t| planner.draft(&t, &shorter, 1, DraftMask::Lane)).unwrap().unwrap();
    assert_eq!(plan.out_slots()[..3], [9, 13, 17].map(|p| c.slot(0, p)));
}

#[test]
fn trees_masks_and_paths_that_are_none() {
    let (_, c, mut planner) = case();
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    let mut verify = |sizes: &[u32], parents: &[i32]| {
        text(c.pool.with_tables(|t| planner.verify(&t, &batch, Trees { sizes, parents })))
    };
    assert_eq!(verify(&[0, 1], &[-1]), "tree nodes = 0 is outside 1..=10");
    assert_eq!(verify(&[11, 1], &[-1; 12]), "tree nodes = 11 is outside 1..=10");
    assert_eq!(verify(&[1, 2], &[-1, 0, 0]), "tree parent = request 1: parents[0] = 0: the root's parent is -1");
    assert_eq!(verify(&[1, 2], &[-1, -1, 1]), "tree parent = request 1: parents[1] = 1: must be in 0..1");
    assert_eq!(verify(&[3, 1], &[-1, 0, -1, -1]), "tree parent = request 0: parents[2] = -1: must be in 0..2");
    assert_eq!(
        verify(&[2, 1], &[-1, i32::MIN, -1]),
        "tree parent = request 0: parents[1] = -2147483648: must be in 0..1"
    );
    // Step 1: own slots b*4 + 1, earlier slots b*4. Branch 1 of request 1 is the fifth query.
    let good: Vec<u64> = [0, 1, 2, 0, 1, 2].map(|b| 1 << (b * 4 + 1) | 1).to_vec();
    let mut draft = |change: &dyn Fn(&mut Vec<u64>)| {
        let mut bits = good.clone();
        change(&mut bits);
        c.pool
            .with_tables(|t| planner.draft(&t, &batch, 1, DraftMask::Ancestors(&bits)))
            .unwrap()
            .map(|_| ())
            .map_err(|e| e.to_string())
    };
    assert_eq!(draft(&|_| ()), Ok(()));
    assert_eq!(draft(&|bits| bits[4] |= 1 << 8), Ok(())); // branch 2, step 0
    let stray = |slot: u32| {
        Err(format!(
            "ancestor bits = request 1, branch 1, step 1: draft slot {slot} is 1: no earlier step has written it"
        ))
    };
    assert_eq!(draft(&|bits| bits[4] |= 1 << 1), stray(1)); // this step's, of another branch
    assert_eq!(draft(&|bits| bits[4] |= 1 << 6), stray(6)); // a later step's
    assert_eq!(draft(&|bits| bits[4] |= 1 << 12), stray(12)); // behind the region
    assert_eq!(draft(&|bits| bits[4] |= 1 << 63), stray(63));
    let missing = "ancestor bits = request 1, branch 1, step 1: draft slot 5 is 0: a query attends to itself";
    assert_eq!(draft(&|bits| bits[4] &= !(1 << 5)), Err(missing.to_string()));
    let mut commit = |nodes: &[u32]| {
        let sizes = [nodes.len() as u32, 1];
        let nodes = [nodes, &[0]].concat();
        let paths = Paths { sizes: &sizes, nodes: &nodes };
        c.pool.with_tables(|t| planner.commit(&t, &batch, paths)).unwrap().map(|_| ()).map_err(|e| e.to_string())
    };
    let why = "a path starts with the root, node 0, and its indices increase";
    for bad in [&[][..], &[1], &[0, 0], &[0, 2, 1], &[0, 3, 3]] {
        assert_eq!(commit(bad), Err(format!("accepted path = request 0: {bad:?}: {why}")));
    }
    assert_eq!(commit(&[0, 10]), Err("commit: index 10 into tree nodes is outside 0..10 (request 0, step -1)".into()));
    assert_eq!(commit(&[0, 9]), Ok(()));
}

/// Masks of more than one word are checked word by word: K*S = 72 draft slots.
#[test]
fn stray_bits_in_the_second_word() {
    let g = geometry(9, 8, 10, 4, 2, 64, Layout::Dense);
    let c = Case::new(&g, &[5], 1);
    let mut planner = Planner::new(g, Native).unwrap();
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    let mut bits = vec![0u64; 18];
    for b in 0..9 {
        bits[b * 2 + b * 8 / 64] |= 1 << (b * 8 % 64);
    }
    let mut plan = |bits: &[u64]| {
        c.pool
            .with_tables(|t| planner.draft(&t, &batch, 0, DraftMask::Ancestors(bits)))
            .unwrap()
            .map_err(|e| e.to_string())
    };
    assert_eq!(plan(&bits).unwrap().mask(), bits);
    bits[2 * 3 + 1] |= 1 << 2; // branch 3, slot 66 = branch 8, step 2
    assert_eq!(
        plan(&bits).unwrap_err(),
        "ancestor bits = request 0, branch 3, step 0: draft slot 66 is 1: no earlier step has written it"
    );
}

#[test]
fn plans_and_moves_die_with_their_rows() {
    let (g, c, mut planner) = case();
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    let trees = Trees { sizes: &[3, 1], parents: &[-1, 0, 0, -1] };
    let plan = c.pool.with_tables(|t| planner.verify(&t, &batch, trees)).unwrap().unwrap();
    let mut table = Vec::new();
    let cols = c.pool.with_tables(|t| plan.page_table(&t, &mut table)).unwrap().unwrap();
    let paths = Paths { sizes: &[2, 1], nodes: &[0, 2, 0] };
    let commit = c.pool.with_tables(|t| planner.commit(&t, &batch, paths)).unwrap().unwrap();
    c.pool.with_tables(|t| commit.moves().check_rows(&t)).unwrap().unwrap();
    let want: Vec<Vec<i32>> =
        c.seqs.iter().map(|&s| c.pool.pages(s).unwrap().iter().map(|p| p.as_i32()).collect()).collect();
    assert_eq!((cols, &table[..want[0].len()], table.len()), (want[1].len(), &want[0][..], 2 * cols));
    assert!(table[want[0].len()..cols].iter().all(|&p| p == 0) && table[cols..] == want[1]);
    // The verification may not run again: the path that was accepted is dense now.
    let message = text(c.pool.with_tables(|t| plan.check_rows(&t)));
    assert!(message.contains("it was made for 7 committed tokens, and 9 are by now"), "{message}");
    drop(c.lease); // rolls back: the rows lose pages
    for message in [
        text(c.pool.with_tables(|t| plan.check_rows(&t))),
        text(c.pool.with_tables(|t| plan.page_table(&t, &mut table))),
        text(c.pool.with_tables(|t| commit.moves().check_rows(&t))),
    ] {
        assert!(
            message.contains("is not live: the row's pages changed or its lease ended: it was made for version"),
            "{message}"
        );
    }
    let _ = g;
}

/// A change to a plan's arrays.
type Change<'a> = Box<dyn Fn(&mut PlanParts) + 'a>;

/// Every field of a good plan, changed: the audit finds it.
#[test]
fn the_audit_finds_tampered_plans() {
    let g = geometry(3, 4, 10, 4, 3, 64, Layout::Dense);
    let c = Case::new(&g, &[7, 12], 5);
    let mut planner = Planner::new(g, Native).unwrap();
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens)).padded(Bucket { batch: 3, queries: 8 });
    let draft = batch.padded(Bucket { batch: 3, queries: 8 });
    let trees = Trees { sizes: &[4, 2], parents: &[-1, 0, 0, 1, -1, 0] };
    let plans = c
        .pool
        .with_tables(|t| {
            [
                planner.verify(&t, &batch, trees).unwrap(),
                planner.draft(&t, &draft, 1, DraftMask::Lane).unwrap(),
                planner.extend(&t, &batch, &[4, 2]).unwrap(),
            ]
        })
        .unwrap();
    let audit = |phase: Phase, parts: PlanParts| {
        let plan = Plan::from_parts(phase, g.page(), parts);
        c.pool.with_tables(|t| AuditedPlan::audit(plan, &t, &g, &Native)).unwrap().map_err(|e| e.to_string())
    };
    let slot = |i: usize, pos: u32| c.slot(i, pos);
    for plan in &plans {
        let (phase, good) = (plan.phase(), plan.to_parts());
        let again = audit(phase, good.clone()).unwrap();
        assert_eq!(again.to_parts(), good);
        let n = plan.live_queries();
        let mut bad: Vec<(&str, Change<'_>)> = vec![
            ("row", Box::new(|p| p.rows.swap(0, 1))),
            ("row of another", Box::new(|p| p.rows[0] = p.rows[1])),
            ("row outside", Box::new(|p| p.rows[1] = 99)),
            ("version", Box::new(|p| p.versions[1] += 1)),
            ("versions short", Box::new(|p| p.versions.truncate(2))),
            ("dead row", Box::new(|p| p.prefix_lens[2] = 4)),
            ("dead version", Box::new(|p| p.versions[2] = 1)),
            ("prefix", Box::new(|p| p.prefix_lens[0] += 1)),
            ("prefix negative", Box::new(|p| p.prefix_lens[0] = -1)),
            ("prefix beyond", Box::new(|p| p.prefix_lens[0] = 1000)),
            ("indptr start", Box::new(|p| p.qo_indptr[0] = 1)),
            ("indptr down", Box::new(|p| p.qo_indptr[1] = 9)),
            ("indptr end", Box::new(|p| p.qo_indptr[3] = 99)),
            ("indptr short", Box::new(|p| p.qo_indptr.truncate(3))),
            ("slot of another request", Box::new(move |p| p.out_slots[0] = slot(1, 20))),
            ("slot of the prefix", Box::new(move |p| p.out_slots[0] = slot(0, 3))),
            ("slot of a neighbour", Box::new(|p| p.out_slots[1] = p.out_slots[0])),
            ("slot outside", Box::new(|p| p.out_slots[0] = 1 << 30)),
            ("slot negative", Box::new(|p| p.out_slots[0] = -4)),
            ("slot sink", Box::new(|p| p.out_slots[0] = 0)),
            ("slots short", Box::new(|p| p.out_slots.truncate(3))),
            ("position at the wall", Box::new(|p| p.positions[2] = 64)),
            ("position negative", Box::new(|p| p.positions[2] = -1)),
            ("dead position", Box::new(|p| *p.positions.last_mut().unwrap() = 5)),
            ("dead slot", Box::new(|p| *p.out_slots.last_mut().unwrap() = 5)),
            ("mask words", Box::new(|p| p.mask_words += 1)),
        ];
        if plan.mask_words() > 0 {
            bad.push(("dead mask", Box::new(|p| *p.mask.last_mut().unwrap() = 1)));
            bad.push(("mask far", Box::new(|p| p.mask[0] |= 1 << 40)));
            bad.push(("mask own", Box::new(|p| p.mask[1] = 1)));
            bad.push((
                "mask later",
                Box::new(move |p| p.mask[n - 2] |= if phase == Phase::Verify { 2 } else { 1 << 7 }),
            ));
            if let Phase::Draft { .. } = phase {
                bad.push(("mask of this step, another branch", Box::new(|p| p.mask[0] |= 1 << 5)));
            }
            bad.push(("mask short", Box::new(|p| p.mask.truncate(3))));
        }
        for (name, change) in bad {
            let mut parts = good.clone();
            change(&mut parts);
            assert!(audit(phase, parts).is_err(), "{}: {name} passes", phase.name());
        }
    }
}

#[test]
fn formats_refuse_layouts_they_cannot_read() {
    let g = geometry(3, 4, 10, 4, 2, 64, Layout::Holey);
    let err = Planner::new(g, Native).unwrap_err().to_string();
    assert_eq!(err, "layout = holey: the native format reads draft KV by position and needs the dense layout");
    assert!(Planner::new(g, WritesOnly).is_ok());
    // Holey without branches or with pages of one token is dense.
    assert!(Planner::new(geometry(1, 4, 5, 4, 2, 64, Layout::Holey), Native).is_ok());
}

#[test]
fn raw_moves_are_checked() {
    let new = |src: &[i32], dst: &[i32]| Moves::new(src, dst, 100, None).map(|m| m.len()).map_err(|e| e.to_string());
    assert_eq!(new(&[1, 2], &[3, 4]), Ok(2));
    assert_eq!(new(&[1, 2], &[1, 4]), Ok(1)); // a move to itself is none
    assert_eq!(new(&[], &[]), Ok(0));
    assert_eq!(new(&[1], &[]), Err("destination slots: got 0, want 1".into()));
    let outside = |buffer: &str, index: i32| {
        Err(format!("kv_move: index {index} into {buffer} slots is outside 0..100 (request -1, step 0)"))
    };
    assert_eq!(new(&[100], &[3]), outside("source", 100));
    assert_eq!(new(&[-1], &[3]), outside("source", -1));
    assert_eq!(new(&[1], &[100]), outside("destination", 100));
    assert_eq!(new(&[1], &[0]), outside("destination", 0)); // the sink
    assert_eq!(new(&[1, 2], &[5, 5]), Err("destination = slot 5 of moves 0 and 1: it may be written once".into()));
    assert_eq!(
        new(&[1, 2], &[2, 1]),
        Err("moves = a ring through slots 1 and 2: no order is safe; give a scratch slot".into())
    );
    let scratch = |s| Some(specrs::bounds::Slot::new(s).unwrap());
    let moves = Moves::new(&[1, 2], &[2, 1], 100, scratch(9)).unwrap();
    assert_eq!((moves.src(), moves.dst()), (&[2, 1, 9][..], &[9, 2, 1][..]));
    let err = Moves::new(&[1, 2], &[2, 1], 100, scratch(1)).unwrap_err().to_string();
    assert_eq!(err, "scratch slot = 1: a move uses it");
    // A destination that is a later source in the given order is put behind it.
    let moves = Moves::new(&[7, 3], &[3, 5], 100, None).unwrap();
    assert_eq!((moves.src(), moves.dst()), (&[3, 7][..], &[5, 3][..]));
}

/// Bodies come back when their plans are dropped; arrays are the same memory round after round.
#[test]
fn a_warm_planner_reuses_its_buffers() {
    let (_, c, mut planner) = case();
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    let trees = Trees { sizes: &[4, 2], parents: &[-1, 0, 0, 1, -1, 0] };
    let mut round = || {
        c.pool
            .with_tables(|t| {
                let drafts: Vec<_> = (0..3).map(|s| planner.draft(&t, &batch, s, DraftMask::Lane).unwrap()).collect();
                let verify = planner.verify(&t, &batch, trees).unwrap();
                let held: Vec<_> = drafts.iter().chain([&verify]).map(|p| p.positions().as_ptr()).collect();
                assert_eq!(planner.bodies(), 4);
                held
            })
            .unwrap()
    };
    let mut first = round();
    first.sort_unstable();
    for _ in 0..20 {
        let mut again = round();
        again.sort_unstable();
        assert_eq!(again, first);
    }
}
