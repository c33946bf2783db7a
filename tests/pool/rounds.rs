//! Rounds that overlap, worked by hand: leases that are renewed, permutations that a device makes, changes that a
//! mirror asks for. `model` has the same at random.

use crate::common::counting::allocations;
use specrs::Error;
use specrs::bounds::PageSize;
use specrs::geometry::{Geometry, Layout, Limits, TreeShape};
use specrs::pool::{ChangeKind, Epoch, Lease, Pool, PoolConfig, SeqId};

fn pool(pages: u32, page: u32, max_seqs: u32, row_pages: u32) -> Pool {
    Pool::new(PoolConfig { num_pages: pages + 1, page: PageSize::new(page).unwrap(), max_seqs, row_pages }).unwrap()
}

/// Pages, committed length and version of a sequence, and free pages.
fn seen(p: &Pool, s: SeqId) -> (Vec<u32>, u32, u64, u32) {
    let pages = p.pages(s).unwrap().iter().map(|p| p.get()).collect();
    (pages, p.committed(s).unwrap(), p.version(s).unwrap(), p.audit().unwrap().free_pages)
}

fn pages(p: &Pool, s: SeqId) -> Vec<u32> {
    seen(p, s).0
}

/// Rounds of one request under one lease, as long as it generates: the host is always one round behind, and the round
/// in flight always has the pages that it needs, wherever the one before it ended.
#[test]
fn a_round_in_flight_has_its_pages_wherever_the_last_one_ended() {
    for (page_size, layout) in [(1, Layout::Dense), (4, Layout::Dense), (4, Layout::Holey), (16, Layout::Holey)] {
        let limits = Limits { max_batch: 1, max_context_len: 128, page_size };
        let g = Geometry::new(limits, TreeShape::new(2, 3, 5).unwrap(), layout).unwrap();
        let p = pool(g.pages_for_full_load().unwrap(), page_size, 1, g.row_pages());
        let s = p.create().unwrap();
        let mut lease = p.reserve(&[(s, g.alloc_target(0, 0).unwrap())]).unwrap();
        let mut device = 0; // end of the mirror as the round in flight begins
        for round in 0..30 {
            // The host has reserved for the length before.
            assert!(device + g.alloc_len_per_decode() <= p.allocated(s).unwrap(), "round {round}");
            let before = pages(&p, s);
            lease.advance(&[device]).unwrap();
            lease.renew(&[g.alloc_target(device, p.allocated(s).unwrap()).unwrap()]).unwrap();
            assert_eq!(pages(&p, s)[..before.len()], before);
            device += [1, 4, 2, 3][round % 4]; // at most S + 1
            p.audit().unwrap();
        }
        lease.commit(&[device]).unwrap();
        p.release(&[s]).unwrap();
        let report = p.audit().unwrap();
        assert_eq!(report.free_pages, report.total_pages);
    }
}

#[test]
fn a_renewal_is_all_or_nothing() {
    let p = pool(8, 4, 3, 4);
    let (a, b) = (p.create().unwrap(), p.create().unwrap());
    p.reserve(&[(a, 6)]).unwrap().commit(&[6]).unwrap(); // pages 1, 2
    let c = p.fork(a, 6).unwrap();
    let mut lease = p.reserve(&[(a, 7), (b, 3)]).unwrap(); // page 3 replaces 2; page 4
    let copies = lease.copies().to_vec();
    assert_eq!((pages(&p, a), pages(&p, b), copies.len()), (vec![1, 3], vec![4], 1));
    let before = (seen(&p, a), seen(&p, b));
    let mut refuse = |positions: &[u32]| {
        let e = lease.renew(positions).unwrap_err();
        assert_eq!((seen(&p, a), seen(&p, b), lease.copies()), (before.0.clone(), before.1.clone(), &copies[..]));
        e
    };
    assert_eq!(refuse(&[16, 16]), Error::PoolExhausted { need: 5, free: 4, total: 8 });
    assert!(matches!(refuse(&[17, 3]), Error::Capacity { need: 5, have: 4, .. }));
    assert!(matches!(refuse(&[5, 3]), Error::OutOfRange { what: "positions to reserve", got: 5, min: 6, .. }));
    assert_eq!(refuse(&[16]).to_string(), "positions to reserve: got 1, want 2");
    drop(lease);
    assert_eq!((pages(&p, a), pages(&p, b)), (vec![1, 2], vec![]));
    p.release(&[a, b, c]).unwrap();
    assert_eq!(p.audit().unwrap().free_pages, 8);
}

#[test]
fn dropping_a_renewed_lease_keeps_what_was_committed_under_it() {
    let p = pool(9, 4, 1, 8);
    let s = p.create().unwrap();
    let mut lease = p.reserve(&[(s, 8)]).unwrap();
    lease.renew(&[16]).unwrap();
    assert_eq!(pages(&p, s), [1, 2, 3, 4]);
    lease.renew(&[3]).unwrap(); // fewer: no page goes
    assert_eq!(pages(&p, s), [1, 2, 3, 4]);
    assert!(matches!(lease.advance(&[17]), Err(Error::OutOfRange { what: "committed length", got: 17, max: 16, .. })));
    assert!(matches!(lease.advance(&[]), Err(Error::Mismatch { operand: "committed lengths", .. })));
    lease.advance(&[7]).unwrap();
    assert_eq!((pages(&p, s), p.committed(s).unwrap()), (vec![1, 2, 3, 4], 7));
    assert!(matches!(lease.advance(&[6]), Err(Error::OutOfRange { min: 7, .. })));
    assert!(matches!(p.reserve(&[(s, 8)]), Err(Error::Invalid { what: "reserve", .. })), "it is leased still");
    assert!(matches!(p.release(&[s]), Err(Error::Invalid { what: "release", .. })));
    drop(lease);
    assert_eq!((pages(&p, s), p.committed(s).unwrap()), (vec![1, 2], 7));
    assert_eq!(p.audit().unwrap().free_pages, 7);
}

/// The round in flight writes into the tail page that the fork shares, so the copy takes all of that page.
#[test]
fn a_renewal_copies_a_tail_that_was_forked_in_flight() {
    let p = pool(9, 4, 2, 8);
    let s = p.create().unwrap();
    let mut lease = p.reserve(&[(s, 8)]).unwrap();
    lease.advance(&[5]).unwrap();
    let fork = p.fork(s, 5).unwrap();
    lease.renew(&[5]).unwrap(); // nothing more to write: the page stays shared
    assert!(lease.copies().is_empty());
    lease.renew(&[6]).unwrap();
    let copies: Vec<_> = lease.copies().iter().map(|c| (c.src.get(), c.dst.get(), c.len)).collect();
    assert_eq!((copies, pages(&p, s), pages(&p, fork)), (vec![(2, 3, 4)], vec![1, 3], vec![1, 2]));
    p.release(&[fork]).unwrap();
    assert_eq!(p.audit().unwrap().held_pages, 1); // a rollback needs it
    lease.advance(&[5]).unwrap();
    assert_eq!(p.audit().unwrap().held_pages, 1);
    lease.advance(&[6]).unwrap();
    assert_eq!((p.audit().unwrap().held_pages, lease.copies().len(), pages(&p, s)), (0, 0, vec![1, 3]));
    lease.commit(&[6]).unwrap();
    assert_eq!(p.audit().unwrap().free_pages, 7);
}

/// A lease that could not write becomes one that may, with a copy of the committed part of the tail.
#[test]
fn a_renewal_may_be_the_first_to_write() {
    let p = pool(9, 4, 2, 8);
    let a = p.create().unwrap();
    p.reserve(&[(a, 4)]).unwrap().commit(&[4]).unwrap();
    p.cache_insert(a, &[1, 2, 3, 4], 0, 0).unwrap();
    let b = p.fork(a, 2).unwrap();
    p.release(&[a]).unwrap();
    let mut lease = p.reserve(&[(b, 2)]).unwrap();
    assert!(matches!(lease.advance(&[3]), Err(Error::OutOfRange { max: 2, .. })));
    lease.renew(&[3]).unwrap();
    assert_eq!(lease.copies().iter().map(|c| (c.src.get(), c.len)).collect::<Vec<_>>(), [(1, 2)]);
    assert_eq!(p.stats().unwrap().evictable_pages, 0); // the lease may have to bring it back
    lease.advance(&[3]).unwrap();
    assert_eq!(p.stats().unwrap().evictable_pages, 1); // the copy is committed
    drop(lease);
    assert_eq!((p.committed(b).unwrap(), pages(&p, b)), (3, vec![2]));
    p.audit().unwrap();
}

fn told(lease: &Lease) -> Vec<(SeqId, u32, Vec<u32>)> {
    lease.permutations().map(|p| (p.seq, p.first, p.order.to_vec())).collect()
}

#[test]
fn a_remap_tells_the_permutation() {
    let p = pool(16, 1, 2, 10);
    let (a, b) = (p.create().unwrap(), p.create().unwrap());
    p.reserve(&[(a, 2)]).unwrap().commit(&[2]).unwrap();
    let mut lease = p.reserve(&[(a, 8), (b, 4)]).unwrap();
    let mut copy: Vec<i32> = p.with_tables(|t| t.table().to_vec()).unwrap();
    let remaps: [(SeqId, u32, &[u32]); 3] = [(a, 2, &[0, 2, 5]), (b, 0, &[]), (b, 1, &[2, 0])];
    lease.remap_all(remaps.into_iter()).unwrap();
    let want = [(a, 2, vec![0, 2, 5, 1, 3, 4]), (b, 0, vec![]), (b, 1, vec![2, 0, 1])];
    assert_eq!(told(&lease), want);
    for permutation in lease.permutations() {
        permutation.apply(&mut copy[permutation.seq.row() as usize * 10..][..10], &mut Vec::new());
    }
    p.with_tables(|t| assert_eq!(copy, t.table())).unwrap();
    // A refused one tells nothing, not even of the sequences before the one that was refused.
    lease.remap_all([(b, 0, &[1, 0][..]), (a, 2, &[6])].into_iter()).unwrap_err();
    assert_eq!(told(&lease), []);
    p.with_tables(|t| assert_eq!(copy, t.table())).unwrap();
}

/// `(row, first, pages, kind)` of each change since an epoch, and the next epoch.
type Told = (Vec<(u32, u32, Vec<i32>, ChangeKind)>, Epoch);

fn changes(p: &Pool, since: Epoch) -> Told {
    p.with_tables(|t| {
        let changes = t.changes(Some(since)).unwrap();
        assert!(!changes.whole_rows());
        (changes.iter().map(|c| (c.row, c.first, c.pages.to_vec(), c.kind)).collect(), changes.epoch())
    })
    .unwrap()
}

#[test]
fn changes_are_the_columns_that_changed() {
    use ChangeKind::{Order, Pages};
    let p = pool(16, 1, 3, 10);
    let (a, b) = (p.create().unwrap(), p.create().unwrap());
    let start = p.with_tables(|t| t.epoch()).unwrap();
    p.reserve(&[(a, 4)]).unwrap().commit(&[3]).unwrap();
    let mut lease = p.reserve(&[(a, 6), (b, 1)]).unwrap();
    let (first, one) = changes(&p, start);
    assert_eq!(first, [(0, 0, vec![1, 2, 3, 4, 5, 6], Pages), (1, 0, vec![7], Pages)]);
    // Changes are told once; a row's pages and its order apart.
    lease.remap(a, 3, &[1]).unwrap();
    lease.renew(&[8, 1]).unwrap();
    let (second, two) = changes(&p, one);
    assert_eq!(second, [(0, 6, vec![8, 9], Pages), (0, 3, vec![5, 4], Order)]);
    // A mirror that looked before sees both, with what the columns hold now.
    lease.commit(&[4, 1]).unwrap();
    let (third, _) = changes(&p, two);
    assert_eq!(third, [(0, 4, vec![0; 4], Pages)]);
    let (all, _) = changes(&p, start);
    let order = |e: &[(u32, u32, Vec<i32>, ChangeKind)]| e.iter().filter(|c| c.3 == Order).count();
    assert_eq!((all.len(), order(&all)), (5, 1));
    assert_eq!(all[0], (0, 0, vec![1, 2, 3, 5, 0, 0], Pages));
    // A call that leaves the table as it is is no change: sharing a row's pages, and lengths.
    let fork = p.fork(a, 2).unwrap();
    let (shared, now) = changes(&p, two);
    assert_eq!(shared[1..], [(2, 0, vec![1, 2], Pages)]);
    p.reserve(&[(fork, 2)]).unwrap().commit(&[2]).unwrap();
    p.cache_insert(a, &[1, 2, 3], 0, 0).unwrap();
    assert_eq!(changes(&p, now).0, []);
}

#[test]
fn an_epoch_is_one_of_its_pool() {
    let (p, q) = (pool(4, 1, 1, 4), pool(4, 1, 1, 4));
    let epoch = p.with_tables(|t| t.epoch()).unwrap();
    let e = q.with_tables(|t| t.changes(Some(epoch)).map(drop)).unwrap().unwrap_err();
    assert!(matches!(&e, Error::Dead { what: "epoch", why, .. } if why == "it belongs to another pool"), "{e}");
    p.with_tables(|t| t.changes(Some(epoch)).map(drop)).unwrap().unwrap();
}

/// The log is twice as long as there are rows: one mirror alone, and two that take turns, never get whole rows.
#[test]
fn a_mirror_that_looks_often_enough_gets_columns() {
    let p = pool(16, 1, 2, 4);
    let seqs = [p.create().unwrap(), p.create().unwrap()];
    let grow = |n| p.reserve(&seqs.map(|s| (s, n))).unwrap().commit(&[n, n]).unwrap();
    let start = p.with_tables(|t| t.epoch()).unwrap();
    for n in [1, 1, 2, 2] {
        grow(n);
    }
    let (_, other) = changes(&p, start);
    grow(3);
    assert_eq!(changes(&p, start).0.len(), 4);
    grow(4);
    p.with_tables(|t| {
        let late = t.changes(Some(start)).unwrap();
        let rows: Vec<_> = late.iter().map(|c| (c.row, c.first, c.pages.len())).collect();
        assert_eq!((late.whole_rows(), rows), (true, vec![(0, 0, 4), (1, 0, 4)]));
        assert!(!t.changes(Some(other)).unwrap().whole_rows());
    })
    .unwrap();
}

#[test]
fn a_warm_round_allocates_nothing() {
    let p = pool(64, 1, 3, 32);
    let seqs = [p.create().unwrap(), p.create().unwrap()];
    let mut epoch = None;
    let mut mirror = vec![0; 3 * 32];
    let mut round = |first: u32| {
        let mut lease = p.reserve(&[(seqs[0], first + 8), (seqs[1], first + 8)]).unwrap();
        lease.renew(&[first + 12, first + 16]).unwrap();
        let paths: [(SeqId, u32, &[u32]); 2] = [(seqs[0], first, &[0, 3]), (seqs[1], first, &[0, 1, 4])];
        lease.remap_all(paths.into_iter()).unwrap();
        lease.advance(&[first + 2, first + 2]).unwrap();
        p.with_tables(|t| {
            let changes = t.changes(epoch).unwrap();
            for c in changes.iter() {
                mirror[c.row as usize * 32 + c.first as usize..][..c.pages.len()].copy_from_slice(c.pages);
            }
            epoch = Some(changes.epoch());
            assert_eq!(mirror, t.table());
        })
        .unwrap();
        lease.commit(&[first + 3, first + 3]).unwrap();
    };
    assert!(allocations(|| round(0)) > 0, "the count works");
    for n in 1..4 {
        assert_eq!(allocations(|| round(3 * n)), 0, "round {n}");
    }
    // Copies of tails, too.
    let p = pool(64, 4, 3, 8);
    let a = p.create().unwrap();
    p.reserve(&[(a, 6)]).unwrap().commit(&[6]).unwrap();
    let b = p.fork(a, 6).unwrap();
    let turn = || {
        let mut lease = p.reserve(&[(b, 6)]).unwrap();
        lease.renew(&[9]).unwrap();
        assert_eq!(lease.copies().len(), 1);
    };
    turn();
    assert_eq!(allocations(turn), 0);
}
