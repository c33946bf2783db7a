//! Worked cases of the pool: what each call gives, and that a refused call changes nothing.

use specrs::Error;
use specrs::bounds::{PageId, PageSize};
use specrs::pool::{EventKind, Owner, Pool, PoolConfig};

fn pool(pages: u32, page: u32, max_seqs: u32, row_pages: u32) -> Pool {
    Pool::new(PoolConfig { num_pages: pages + 1, page: PageSize::new(page).unwrap(), max_seqs, row_pages }).unwrap()
}

fn ids(pages: &[PageId]) -> Vec<u32> {
    pages.iter().map(|p| p.get()).collect()
}

/// Everything observable, to show that a refused call changed nothing.
fn snapshot(p: &Pool) -> (specrs::pool::AuditReport, Vec<i32>, Vec<u64>) {
    let report = p.audit().unwrap();
    p.with_tables(|t| {
        let versions = (0..t.max_seqs()).map(|r| t.version(r).unwrap()).collect();
        (report, t.table().to_vec(), versions)
    })
    .unwrap()
}

fn refused<T: std::fmt::Debug>(p: &Pool, call: impl FnOnce() -> specrs::Result<T>) -> Error {
    let before = snapshot(p);
    let e = call().unwrap_err();
    assert_eq!(snapshot(p), before, "{e}");
    e
}

#[test]
fn reserve_commit_frees_overshoot() {
    let p = pool(8, 4, 2, 6);
    let s = p.create().unwrap();
    let lease = p.reserve(&[(s, 9)]).unwrap();
    assert_eq!(ids(&p.pages(s).unwrap()), [1, 2, 3]);
    assert_eq!((p.committed(s).unwrap(), p.allocated(s).unwrap(), p.stats().unwrap().free_pages), (0, 12, 5));
    lease.commit(&[5]).unwrap();
    assert_eq!(ids(&p.pages(s).unwrap()), [1, 2]);
    assert_eq!((p.committed(s).unwrap(), p.allocated(s).unwrap(), p.stats().unwrap().free_pages), (5, 8, 6));
    // Dead columns hold the sink.
    p.with_tables(|t| assert_eq!(t.line(s.row()).unwrap(), [1, 2, 0, 0, 0, 0])).unwrap();
    // The freed page is the next to be used again.
    let lease = p.reserve(&[(s, 24)]).unwrap();
    assert_eq!(ids(&p.pages(s).unwrap()), [1, 2, 3, 4, 5, 6]);
    drop(lease);
    assert_eq!(ids(&p.pages(s).unwrap()), [1, 2]);
    p.release(&[s]).unwrap();
    assert_eq!(p.audit().unwrap().free_pages, 8);
}

#[test]
fn slots_follow_the_table() {
    let p = pool(8, 4, 2, 6);
    let (a, b) = (p.create().unwrap(), p.create().unwrap());
    p.reserve(&[(a, 4), (b, 4)]).unwrap().commit(&[4, 4]).unwrap();
    let _lease = p.reserve(&[(a, 7)]).unwrap();
    p.with_tables(|t| {
        let row = t.seq(a).unwrap();
        assert_eq!(row.pages, [1, 3]);
        assert_eq!((row.slot(t.page(), 2).unwrap().get(), row.slot(t.page(), 6).unwrap().get()), (6, 14));
        let e = row.slot(t.page(), 8).unwrap_err();
        assert!(matches!(e, Error::OutOfBounds { request: 0, index: 8, bound: 8, .. }), "{e}");
    })
    .unwrap();
}

#[test]
fn exhaustion_changes_nothing() {
    let p = pool(6, 4, 3, 6);
    let (a, b) = (p.create().unwrap(), p.create().unwrap());
    p.reserve(&[(a, 5)]).unwrap().commit(&[5]).unwrap();
    // 2 more for a would fit, and 4 for b; 5 for b do not fit beside them.
    let e = refused(&p, || p.reserve(&[(a, 16), (b, 20)]).map(drop));
    assert_eq!(e, Error::PoolExhausted { need: 7, free: 4, total: 6 });
    let e = refused(&p, || p.alloc_pages(5));
    assert_eq!(e, Error::PoolExhausted { need: 5, free: 4, total: 6 });
    let e = refused(&p, || p.reserve(&[(b, 25)]).map(drop));
    assert!(matches!(e, Error::Capacity { need: 7, have: 6, .. }), "{e}");
    p.reserve(&[(b, 16)]).unwrap().commit(&[16]).unwrap();
    // There is not even one page for the copy of a shared tail.
    let c = p.fork(a, 5).unwrap();
    let e = refused(&p, || p.reserve(&[(c, 6)]).map(drop));
    assert_eq!(e, Error::PoolExhausted { need: 1, free: 0, total: 6 });
    let e = refused(&p, || p.create());
    assert_eq!(e, Error::TooManySequences { limit: 3 });
    let e = refused(&p, || p.fork(a, 1));
    assert_eq!(e, Error::TooManySequences { limit: 3 });
    let e = refused(&p, || p.cache_lookup(&[1, 2, 3, 4], 4, 0));
    assert_eq!(e, Error::TooManySequences { limit: 3 });
}

#[test]
fn double_free_even_twice_in_one_call() {
    let p = pool(6, 4, 2, 6);
    let got = p.alloc_pages(3).unwrap();
    assert_eq!(ids(&got), [1, 2, 3]);
    let e = refused(&p, || p.free_pages(&[got[0], got[1], got[0]]));
    let Error::DoubleFree { page: 1, owners: 1, frees: 2, history } = &e else { panic!("{e}") };
    assert!(history.contains("alloc by raw pages -> 1 owner(s)"), "{history}");
    p.free_pages(&got).unwrap();
    let e = refused(&p, || p.free_pages(&got[2..]));
    assert!(
        matches!(&e, Error::DoubleFree { page: 3, owners: 0, frees: 1, history } if history.contains("free by raw"))
    );
    // A page that a sequence owns is not the raw caller's to free, nor is the sink, nor one outside the pool.
    let s = p.create().unwrap();
    p.reserve(&[(s, 1)]).unwrap().commit(&[1]).unwrap();
    let page = p.pages(s).unwrap()[0];
    assert!(matches!(refused(&p, || p.free_pages(&[page])), Error::DoubleFree { owners: 0, .. }));
    assert!(matches!(refused(&p, || p.free_pages(&[PageId::SINK])), Error::DoubleFree { page: 0, .. }));
    let outside = PageId::new(7).unwrap();
    let e = refused(&p, || p.free_pages(&[outside]));
    assert_eq!(e, Error::OutOfRange { what: "page to free", got: 7, min: 1, max: 6 });
    // Twice retained, three frees.
    let q = p.alloc_pages(1).unwrap()[0];
    p.retain_pages(&[q, q]).unwrap();
    assert!(matches!(refused(&p, || p.free_pages(&[q; 4])), Error::DoubleFree { owners: 3, frees: 4, .. }));
    p.free_pages(&[q, q]).unwrap();
    p.free_pages(&[q]).unwrap();
    assert!(matches!(refused(&p, || p.retain_pages(&[q])), Error::Invalid { what: "retain_pages", .. }));
    p.release(&[s]).unwrap();
    assert_eq!(p.audit().unwrap().free_pages, 6);
}

#[test]
fn stale_and_foreign_handles() {
    let p = pool(6, 4, 2, 6);
    let a = p.create().unwrap();
    let e = refused(&p, || p.release(&[a, a]));
    assert!(matches!(&e, Error::Invalid { why, .. } if why.contains("twice")), "{e}");
    p.release(&[a]).unwrap();
    for e in [
        refused(&p, || p.release(&[a])),
        refused(&p, || p.fork(a, 0)),
        refused(&p, || p.reserve(&[(a, 1)]).map(drop)),
        refused(&p, || p.committed(a)),
        refused(&p, || p.cache_insert(a, &[], 0, 0)),
    ] {
        assert!(matches!(&e, Error::Dead { what: "sequence", id, .. } if id == "0.1"), "{e}");
    }
    let b = p.create().unwrap();
    assert_eq!((b.row(), b.generation()), (0, 2));
    let e = refused(&p, || p.allocated(a));
    assert!(matches!(&e, Error::Dead { why, .. } if why.contains("its row is now 0.2")), "{e}");
    let other = pool(6, 4, 2, 6);
    let _same_row = other.create().unwrap();
    let e = refused(&other, || other.release(&[b]));
    assert!(matches!(&e, Error::Dead { why, .. } if why.contains("another pool")), "{e}");
}

#[test]
fn a_leased_sequence_is_left_alone() {
    let p = pool(6, 4, 2, 6);
    let (a, b) = (p.create().unwrap(), p.create().unwrap());
    let lease = p.reserve(&[(a, 4)]).unwrap();
    for e in [refused(&p, || p.release(&[b, a])), refused(&p, || p.reserve(&[(b, 4), (a, 8)]).map(drop))] {
        assert!(matches!(&e, Error::Invalid { why, .. } if why.contains("lease")), "{e}");
    }
    let e = refused(&p, || p.reserve(&[(b, 4), (b, 8)]).map(drop));
    assert!(matches!(&e, Error::Invalid { why, .. } if why.contains("twice")), "{e}");
    lease.commit(&[0]).unwrap();
    p.release(&[b, a]).unwrap();
    assert_eq!(p.audit().unwrap().free_pages, 6);
}

#[test]
fn refused_commit_keeps_the_lease() {
    let p = pool(6, 4, 2, 6);
    let s = p.create().unwrap();
    p.reserve(&[(s, 6)]).unwrap().commit(&[6]).unwrap();
    let lease = p.reserve(&[(s, 10)]).unwrap();
    let before = snapshot(&p);
    let r = lease.commit(&[5]).unwrap_err();
    assert_eq!(r.error, Error::OutOfRange { what: "committed length", got: 5, min: 6, max: 12 });
    let r = r.lease.commit(&[13]).unwrap_err();
    assert_eq!(r.error, Error::OutOfRange { what: "committed length", got: 13, min: 6, max: 12 });
    let r = r.lease.commit(&[7, 7]).unwrap_err();
    assert!(matches!(&r.error, Error::Mismatch { got, want, .. } if got == "2" && want == "1"));
    assert_eq!(snapshot(&p), before);
    r.lease.commit(&[12]).unwrap();
    // With `?` the refusal rolls back.
    let try_it = || -> specrs::Result<()> { Ok(p.reserve(&[(s, 20)])?.commit(&[99])?) };
    assert!(matches!(try_it().unwrap_err(), Error::OutOfRange { .. }));
    assert_eq!((p.allocated(s).unwrap(), p.audit().unwrap().leased_sequences), (12, 0));
    let e = refused(&p, || p.reserve(&[(s, 11)]).map(drop));
    assert_eq!(e, Error::OutOfRange { what: "positions to reserve", got: 11, min: 12, max: 24 });
}

/// Copy of a shared tail: for each page size, after commit, rollback, and a commit that accepts nothing.
#[test]
fn shared_tail_is_copied_before_writing() {
    for page in [1u32, 4, 16, 64] {
        let p = pool(32, page, 4, 8);
        let a = p.create().unwrap();
        let len = page + page / 2; // P = 1: one whole page, so there is no tail to copy
        p.reserve(&[(a, len)]).unwrap().commit(&[len]).unwrap();
        let b = p.fork(a, len).unwrap();
        assert_eq!(p.pages(a).unwrap(), p.pages(b).unwrap());
        let shared = p.pages(a).unwrap();
        let (version, used) = (p.version(b).unwrap(), p.audit().unwrap().owned_pages);
        let lease = p.reserve(&[(b, len + 1)]).unwrap();
        if page == 1 {
            assert!(lease.copies().is_empty());
            lease.commit(&[len + 1]).unwrap();
            continue;
        }
        let [copy] = lease.copies() else { panic!("{:?}", lease.copies()) };
        assert_eq!((copy.src, copy.dst, copy.len), (shared[1], p.pages(b).unwrap()[1], page / 2));
        assert_ne!(copy.src, copy.dst);
        assert_eq!((p.audit().unwrap().held_pages, p.audit().unwrap().owned_pages), (1, used + 1));
        assert!(p.version(b).unwrap() > version);
        // A fork of the leased sequence gets the page whose bytes are there already.
        let c = p.fork(b, len).unwrap();
        assert_eq!(p.pages(c).unwrap(), shared);
        p.release(&[c]).unwrap();
        let version = p.version(b).unwrap();
        drop(lease);
        assert_eq!(p.pages(b).unwrap(), shared);
        assert!(p.version(b).unwrap() > version);
        assert_eq!(p.audit().unwrap().owned_pages, used);
        // A commit that accepts nothing is the same as a rollback.
        p.reserve(&[(b, len + 1)]).unwrap().commit(&[len]).unwrap();
        assert_eq!(p.pages(b).unwrap(), shared);
        assert_eq!(p.audit().unwrap().held_pages, 0);
        p.reserve(&[(b, len + 1)]).unwrap().commit(&[len + 1]).unwrap();
        assert_eq!(p.pages(b).unwrap()[0], shared[0]);
        assert_ne!(p.pages(b).unwrap()[1], shared[1]);
        // Now each tail has one owner, and both write in place.
        let lease = p.reserve(&[(a, len + 1), (b, len + 2)]).unwrap();
        assert!(lease.copies().is_empty());
        lease.commit(&[len + 1, len + 2]).unwrap();
        p.release(&[a, b]).unwrap();
        assert_eq!(p.audit().unwrap().free_pages, 32);
    }
}

/// Reserving no further than what is committed promises not to write, so nothing is copied.
#[test]
fn no_copy_without_room_to_write() {
    let p = pool(8, 4, 4, 8);
    let a = p.create().unwrap();
    p.reserve(&[(a, 6)]).unwrap().commit(&[6]).unwrap();
    let b = p.fork(a, 6).unwrap();
    let lease = p.reserve(&[(b, 6)]).unwrap();
    assert!(lease.copies().is_empty());
    lease.commit(&[6]).unwrap();
    assert_eq!(p.pages(a).unwrap(), p.pages(b).unwrap());
    // A commit past the promise is refused, although the shared page has room.
    let lease = p.reserve(&[(b, 6)]).unwrap();
    let r = lease.commit(&[7]).unwrap_err();
    assert_eq!(r.error, Error::OutOfRange { what: "committed length", got: 7, min: 6, max: 6 });
}

#[test]
fn forks_of_forks() {
    let p = pool(16, 4, 6, 8);
    let a = p.create().unwrap();
    p.reserve(&[(a, 11)]).unwrap().commit(&[11]).unwrap();
    let b = p.fork(a, 10).unwrap();
    let c = p.fork(b, 9).unwrap();
    let d = p.fork(c, 4).unwrap();
    assert_eq!((p.audit().unwrap().owned_pages, p.audit().unwrap().table_entries), (3, 10));
    let e = refused(&p, || p.fork(c, 10));
    assert_eq!(e, Error::OutOfRange { what: "fork length", got: 10, min: 0, max: 9 });
    // The original goes; the forks keep its pages.
    let tail = p.pages(a).unwrap()[2];
    p.release(&[a]).unwrap();
    assert_eq!(p.audit().unwrap().owned_pages, 3);
    // Both hold the tail: each of a batch that writes gets its own, the old one goes with the last holder.
    let lease = p.reserve(&[(b, 12), (c, 12), (d, 5)]).unwrap();
    assert_eq!(lease.copies().iter().map(|c| (c.src, c.len)).collect::<Vec<_>>(), [(tail, 2), (tail, 1)]);
    assert_eq!(p.audit().unwrap().held_pages, 2);
    lease.commit(&[12, 12, 5]).unwrap();
    assert_eq!(p.history(tail).unwrap().last().unwrap().kind, EventKind::Free);
    p.release(&[d, b, c]).unwrap();
    assert_eq!(p.audit().unwrap().free_pages, 16);
}

/// A batch of reorderings of which one is refused changes no row.
#[test]
fn remaps_of_a_batch_are_all_or_nothing() {
    let p = pool(16, 1, 3, 16);
    let seqs = [p.create().unwrap(), p.create().unwrap(), p.create().unwrap()];
    let mut lease = p.reserve(&[(seqs[0], 3), (seqs[1], 3)]).unwrap();
    let good = (seqs[0], 0, &[0, 2][..]);
    for bad in [(seqs[1], 0, &[0, 3][..]), (seqs[1], 0, &[1, 1]), (seqs[1], 4, &[]), (seqs[2], 0, &[])] {
        refused(&p, || lease.remap_all([good, bad].into_iter()));
    }
    lease.remap_all([good, (seqs[1], 1, &[1])].into_iter()).unwrap();
    assert_eq!(seqs[..2].iter().map(|&s| ids(&p.pages(s).unwrap())).collect::<Vec<_>>(), [[1, 3, 2], [4, 6, 5]]);
    p.audit().unwrap();
}

#[test]
fn remap_reorders_pages_of_one_token() {
    let p = pool(16, 1, 2, 16);
    let s = p.create().unwrap();
    p.reserve(&[(s, 3)]).unwrap().commit(&[3]).unwrap();
    let mut lease = p.reserve(&[(s, 9)]).unwrap();
    assert_eq!(ids(&p.pages(s).unwrap()), [1, 2, 3, 4, 5, 6, 7, 8, 9]);
    let version = p.version(s).unwrap();
    lease.remap(s, 3, &[0, 2, 5]).unwrap();
    assert_eq!(ids(&p.pages(s).unwrap()), [1, 2, 3, 4, 6, 9, 5, 7, 8]);
    assert!(p.version(s).unwrap() > version);
    p.audit().unwrap();
    let other = p.create().unwrap();
    let before = snapshot(&p);
    assert!(matches!(lease.remap(s, 3, &[1, 1]).unwrap_err(), Error::Invalid { what: "position to remap", .. }));
    assert!(matches!(lease.remap(s, 2, &[0]).unwrap_err(), Error::OutOfRange { min: 3, max: 9, got: 2, .. }));
    assert!(matches!(lease.remap(s, 3, &[6]).unwrap_err(), Error::OutOfRange { got: 6, max: 5, .. }));
    assert!(matches!(lease.remap(s, 9, &[0]).unwrap_err(), Error::OutOfRange { got: 0, max: -1, .. }));
    assert!(matches!(lease.remap(other, 0, &[]).unwrap_err(), Error::Invalid { what: "remap", .. }));
    assert_eq!(snapshot(&p), before);
    lease.commit(&[6]).unwrap();
    assert_eq!(ids(&p.pages(s).unwrap()), [1, 2, 3, 4, 6, 9]);
    assert_eq!(p.audit().unwrap().free_pages, 10);
    let q = pool(16, 4, 2, 16);
    let s = q.create().unwrap();
    let mut lease = q.reserve(&[(s, 9)]).unwrap();
    assert!(matches!(lease.remap(s, 0, &[0]).unwrap_err(), Error::Invalid { what: "remap", .. }));
}

#[test]
fn cache_keeps_full_pages() {
    let p = pool(8, 2, 4, 8);
    let tokens = [10, 11, 12, 13, 14];
    let a = p.create().unwrap();
    p.reserve(&[(a, 5)]).unwrap().commit(&[5]).unwrap();
    assert_eq!(p.cache_insert(a, &tokens, 0, 0).unwrap(), 2);
    assert_eq!(p.cache_insert(a, &tokens, 0, 0).unwrap(), 0);
    let e = refused(&p, || p.cache_insert(a, &[10, 11, 12, 13, 14, 15], 0, 0));
    assert_eq!(e, Error::OutOfRange { what: "tokens to cache", got: 6, min: 0, max: 5 });
    let e = refused(&p, || p.cache_insert(a, &[10, 11, 12, 99], 0, 0));
    assert!(matches!(e, Error::Invalid { what: "tokens to cache", .. }));
    let pages = p.pages(a).unwrap();
    p.release(&[a]).unwrap();
    assert_eq!((p.stats().unwrap().free_pages, p.stats().unwrap().evictable_pages), (6, 2));
    let (b, len, _) = p.cache_lookup(&[10, 11, 12, 13, 7], 4, 0).unwrap();
    assert_eq!((len, p.pages(b).unwrap().as_slice()), (4, &pages[..2]));
    let (c, len, _) = p.cache_lookup(&[10, 11, 12, 13], 3, 0).unwrap();
    assert_eq!((len, p.pages(c).unwrap().as_slice()), (2, &pages[..1]));
    let (d, len, _) = p.cache_lookup(&[12, 13], 2, 0).unwrap(); // the second page's tokens do not start a chain
    assert_eq!(len, 0);
    assert_eq!(p.stats().unwrap().evictable_pages, 0);
    p.audit().unwrap();
    // 6 pages are free, and while sequences hold the cached ones no more can be had.
    assert!(matches!(refused(&p, || p.alloc_pages(7)), Error::PoolExhausted { need: 7, free: 6, .. }));
    p.release(&[b, d]).unwrap();
    // The second page may go now, the first is still c's.
    assert_eq!(p.stats().unwrap().evictable_pages, 1);
    let raw = p.alloc_pages(7).unwrap();
    assert_eq!((p.stats().unwrap().cached_pages, p.audit().unwrap().free_pages), (1, 0));
    let kinds: Vec<_> = p.history(pages[1]).unwrap().iter().map(|e| (e.kind, e.owner)).collect();
    assert_eq!(kinds[kinds.len() - 2..], [(EventKind::Free, Owner::Cache), (EventKind::Alloc, Owner::Raw)]);
    p.free_pages(&raw).unwrap();
    assert_eq!(p.cache_clear().unwrap(), 1);
    p.release(&[c]).unwrap();
    assert_eq!(p.audit().unwrap().free_pages, 8);
}

/// A chain's full page that a fork cuts in the middle is a shared tail like any other.
#[test]
fn cached_page_is_never_written() {
    let p = pool(8, 4, 4, 8);
    let a = p.create().unwrap();
    p.reserve(&[(a, 4)]).unwrap().commit(&[4]).unwrap();
    p.cache_insert(a, &[1, 2, 3, 4], 0, 0).unwrap();
    let cached = p.pages(a).unwrap()[0];
    let b = p.fork(a, 2).unwrap();
    p.release(&[a]).unwrap();
    let lease = p.reserve(&[(b, 3)]).unwrap();
    assert_eq!(lease.copies().iter().map(|c| (c.src, c.len)).collect::<Vec<_>>(), [(cached, 2)]);
    assert_eq!(p.stats().unwrap().evictable_pages, 0); // the lease may have to bring it back
    lease.commit(&[3]).unwrap();
    assert_eq!(p.stats().unwrap().evictable_pages, 1);
    p.audit().unwrap();
}

/// Least recently used first, and leaves before what they hang from.
#[test]
fn cache_evicts_in_order() {
    let p = pool(6, 1, 4, 8);
    let prompts: [[u32; 2]; 3] = [[1, 2], [3, 4], [5, 6]];
    let seqs = prompts.map(|tokens| {
        let s = p.create().unwrap();
        p.reserve(&[(s, 2)]).unwrap().commit(&[2]).unwrap();
        p.cache_insert(s, &tokens, 0, 0).unwrap();
        s
    });
    let pages = seqs.map(|s| ids(&p.pages(s).unwrap()));
    for s in seqs {
        p.release(&[s]).unwrap();
    }
    let (s, len, _) = p.cache_lookup(&prompts[0], 2, 0).unwrap(); // used again: now the most recent
    assert_eq!(len, 2);
    p.release(&[s]).unwrap();
    let evicted: Vec<u32> = (0..6)
        .map(|_| {
            let page = p.alloc_pages(1).unwrap()[0].get();
            p.audit().unwrap();
            page
        })
        .collect();
    let [first, second, third] = pages;
    assert_eq!(evicted, [second[1], second[0], third[1], third[0], first[1], first[0]]);
}

#[test]
fn configurations_are_checked() {
    let page = PageSize::new(64).unwrap();
    let ok = PoolConfig { num_pages: 10, page, max_seqs: 2, row_pages: 3 };
    let bad = [
        PoolConfig { num_pages: 1, ..ok },
        PoolConfig { max_seqs: 0, ..ok },
        PoolConfig { row_pages: 0, ..ok },
        PoolConfig { max_seqs: (1 << 20) + 1, ..ok },
    ];
    for c in bad {
        assert!(matches!(Pool::new(c).unwrap_err(), Error::OutOfRange { .. }), "{c:?}");
    }
    let e = Pool::new(PoolConfig { num_pages: 1 << 25, ..ok }).unwrap_err();
    let expr = "num_pages 33554432 * page_size 64".to_string();
    assert_eq!(e, Error::Overflow { what: "KV slots", expr, ty: "int32", limit: i32::MAX as u64 });
    let e = Pool::new(PoolConfig { max_seqs: 1 << 20, row_pages: 1 << 11, ..ok }).unwrap_err();
    assert!(matches!(e, Error::Overflow { what: "page table", .. }));
    let e = Pool::new(PoolConfig { row_pages: 1 << 25, ..ok }).unwrap_err();
    assert!(matches!(e, Error::Overflow { what: "row positions", .. }));
    assert!(matches!(Pool::with_history(ok, 0).unwrap_err(), Error::OutOfRange { .. }));
}

#[test]
fn empty_batches_are_valid() {
    let p = pool(2, 4, 1, 1);
    let lease = p.reserve(&[]).unwrap();
    assert!(lease.seqs().is_empty() && lease.copies().is_empty());
    lease.commit(&[]).unwrap();
    p.reserve(&[]).unwrap().rollback().unwrap();
    p.release(&[]).unwrap();
    p.free_pages(&[]).unwrap();
    assert_eq!(p.alloc_pages(0).unwrap(), []);
    assert_eq!(p.audit().unwrap().events, 0);
}

/// A short memory says that it forgot.
#[test]
fn history_is_bounded() {
    let config = PoolConfig { num_pages: 9, page: PageSize::new(4).unwrap(), max_seqs: 1, row_pages: 1 };
    let p = Pool::with_history(config, 4).unwrap();
    let first = p.alloc_pages(2).unwrap();
    for _ in 0..3 {
        let other = p.alloc_pages(1).unwrap();
        p.free_pages(&other).unwrap();
    }
    assert_eq!(p.history(first[1]).unwrap(), []);
    let e = refused(&p, || p.free_pages(&[first[1], first[1]]));
    assert!(
        matches!(&e, Error::DoubleFree { history, .. } if history.contains("nothing among the last 4 of 8 events")),
        "{e}"
    );
}

/// One script on pools of every size, so that the pages run out at each of its calls in turn: a call that does not
/// get its pages changes nothing, and afterwards nothing is missing.
#[test]
fn exhaustion_at_every_point() {
    for page in [1u32, 4, 16, 64] {
        let mut ran_out = std::collections::BTreeSet::new();
        for pages in 1..=30 {
            let p = pool(pages, page, 8, 12);
            let mut run = |at: u32, wants: &[(specrs::pool::SeqId, u32)], to: &[u32]| {
                let before = snapshot(&p);
                match p.reserve(wants) {
                    Ok(lease) => lease.commit(to).unwrap(),
                    Err(Error::PoolExhausted { need, free, total }) => {
                        assert!(need > free && total == u64::from(pages));
                        assert_eq!(snapshot(&p), before);
                        ran_out.insert(at);
                    }
                    Err(e) => panic!("{e}"),
                }
                p.audit().unwrap();
            };
            let (a, b) = (p.create().unwrap(), p.create().unwrap());
            let half = page.div_ceil(2);
            run(0, &[(a, 2 * page), (b, page + half)], &[2 * page, page + half]);
            let c = p.fork(b, p.committed(b).unwrap()).unwrap();
            let (lb, lc) = (p.committed(b).unwrap(), p.committed(c).unwrap());
            run(1, &[(b, lb + page), (c, lc + 2 * page)], &[lb + 1, lc + page]);
            let la = p.committed(a).unwrap();
            p.cache_insert(a, &vec![3; la as usize], 0, 0).unwrap();
            p.release(&[a]).unwrap();
            // Pages that the cache alone holds make room here.
            let lc = p.committed(c).unwrap();
            run(2, &[(c, lc + 4 * page)], &[lc + 4 * page]);
            let (d, ld, _) = p.cache_lookup(&vec![3; 2 * page as usize], 2 * page, 0).unwrap();
            run(3, &[(d, ld + 8 * page)], &[ld]);
            let before = snapshot(&p);
            match p.alloc_pages(9) {
                Ok(raw) => p.free_pages(&raw).unwrap(),
                Err(e) => {
                    assert!(matches!(e, Error::PoolExhausted { need: 9, .. }), "{e}");
                    assert_eq!(snapshot(&p), before);
                    ran_out.insert(4);
                }
            }
            p.release(&[b, c, d]).unwrap();
            p.cache_clear().unwrap();
            assert_eq!(p.audit().unwrap().free_pages, pages);
        }
        assert_eq!(ran_out.len(), 5, "P = {page}: the pages ran out only at {ran_out:?}");
    }
}

#[test]
fn owners_of_every_kind() {
    let p = pool(8, 4, 3, 6);
    let a = p.create().unwrap();
    p.reserve(&[(a, 6)]).unwrap().commit(&[6]).unwrap(); // pages 1, 2
    p.cache_insert(a, &[1, 2, 3, 4], 0, 0).unwrap();
    let b = p.fork(a, 5).unwrap();
    let _lease = p.reserve(&[(b, 9)]).unwrap(); // page 3 replaces the shared tail, which the lease holds; page 4
    let raw = p.alloc_pages(1).unwrap();
    p.retain_pages(&raw).unwrap();
    let owners: Vec<String> = p.owners().unwrap().iter().map(|(page, o)| format!("{} {o}", page.get())).collect();
    let want = [
        "1 sequence 0.1",
        "1 sequence 1.1",
        "1 prefix cache",
        "2 sequence 0.1",
        "2 sequence 1.1",
        "3 sequence 1.1",
        "4 sequence 1.1",
        "5 raw pages",
        "5 raw pages",
    ];
    assert_eq!(owners, want);
    // The table has as many as the ledger counts.
    p.with_tables(|t| {
        for page in 1..9 {
            let n = owners.iter().filter(|o| o.starts_with(&format!("{page} "))).count() as u32;
            assert_eq!(t.owners(page), Some(n), "page {page}");
        }
    })
    .unwrap();
}

#[test]
fn pages_in_a_given_order() {
    let p = pool(8, 4, 2, 6);
    let page = |n| PageId::new(n).unwrap();
    p.take_next(&[page(7), page(2), page(5)]).unwrap();
    let s = p.create().unwrap();
    p.reserve(&[(s, 20)]).unwrap().commit(&[20]).unwrap();
    assert_eq!(ids(&p.pages(s).unwrap()), [7, 2, 5, 1, 3]);
    p.audit().unwrap();
    let free = |p: &Pool| ids(&p.alloc_pages(3).inspect(|got| p.free_pages(got).unwrap()).unwrap());
    for (pages, message) in [
        (vec![page(4), page(5)], "page to take next = 5: it has 1 owner(s)"),
        (vec![page(4), page(6), page(4)], "page to take next = 4: it is given twice"),
        (vec![page(4), page(9)], "page to take next = 9 is outside 1..=8"),
        (vec![page(4), PageId::SINK], "page to take next = 0 is outside 1..=8"),
    ] {
        assert_eq!(refused(&p, || p.take_next(&pages)).to_string(), message);
    }
    p.take_next(&[]).unwrap();
    assert_eq!(free(&p), [4, 6, 8]);
    p.take_next(&[page(8), page(6), page(4)]).unwrap();
    assert_eq!(free(&p), [8, 6, 4]);
    p.audit().unwrap();
}

/// Two sequences compute the same prefix side by side; the cache has the pages of the first, and behind them the
/// second one's tail. Once the first is gone, the second has every page of the pool but its own to grow into.
#[test]
fn pages_of_the_cache_alone_can_be_had_while_others_hang_from_them() {
    let p = pool(12, 2, 4, 12);
    let tokens: Vec<u32> = (0..13).collect();
    let (a, b) = (p.create().unwrap(), p.create().unwrap());
    p.reserve(&[(a, 6), (b, 6)]).unwrap().commit(&[6, 6]).unwrap();
    assert_eq!(p.cache_insert(a, &tokens[..6], 0, 0).unwrap(), 3);
    assert_eq!(p.cache_insert(b, &tokens[..6], 0, 0).unwrap(), 0);
    p.reserve(&[(b, 11)]).unwrap().commit(&[11]).unwrap();
    assert_eq!(p.cache_insert(b, &tokens[..11], 0, 0).unwrap(), 2); // behind the pages of a
    let heads = p.pages(a).unwrap();
    p.release(&[a]).unwrap();
    let stats = p.stats().unwrap();
    assert_eq!((stats.free_pages, stats.cached_pages, stats.evictable_pages), (3, 5, 3));
    let e = refused(&p, || p.alloc_pages(7));
    assert_eq!(e, Error::PoolExhausted { need: 7, free: 6, total: 12 });
    // A reservation that fits the free list leaves the cache as it is.
    p.reserve(&[(b, 17)]).unwrap().commit(&[11]).unwrap();
    assert_eq!(p.stats().unwrap().cached_pages, 5);
    // One page more: the lowest head goes, and the pages that hung from it are b's alone.
    let version = p.version(b).unwrap();
    let raw = p.alloc_pages(4).unwrap();
    assert_eq!((p.stats().unwrap().cached_pages, p.stats().unwrap().evictable_pages), (2, 2));
    assert_eq!((raw[0], p.version(b).unwrap()), (heads[2], version));
    p.audit().unwrap();
    p.free_pages(&raw).unwrap();
    let (c, len, _) = p.cache_lookup(&tokens, 12, 0).unwrap();
    assert_eq!((len, p.pages(c).unwrap().as_slice()), (4, &heads[..2]));
    p.release(&[c]).unwrap();
    let lease = p.reserve(&[(b, 24)]).unwrap();
    assert_eq!((p.allocated(b).unwrap(), p.stats().unwrap().cached_pages), (24, 0));
    lease.commit(&[13]).unwrap();
    // The sequence's own pages again make the chain that others find.
    assert_eq!(p.cache_insert(b, &tokens, 0, 0).unwrap(), 6);
    let mine = p.pages(b).unwrap();
    let kinds: Vec<_> = p.history(mine[4]).unwrap().iter().map(|e| (e.kind, e.owner)).collect();
    assert_eq!(kinds[1..], [EventKind::Cache, EventKind::Evict, EventKind::Cache].map(|k| (k, Owner::Cache)));
    p.release(&[b]).unwrap();
    assert_eq!((p.audit().unwrap().free_pages, p.stats().unwrap().evictable_pages), (6, 6));
}

/// One sequence caches a prompt without draft KV; another one has it, computed into pages of its own. The cache takes
/// those in place of the first one's, page by page, and what hangs from them stays.
#[test]
fn pages_with_draft_kv_replace_pages_without() {
    let p = pool(12, 2, 4, 12);
    let tokens: Vec<u32> = (0..9).collect();
    let (a, b) = (p.create().unwrap(), p.create().unwrap());
    p.reserve(&[(a, 8), (b, 6)]).unwrap().commit(&[8, 6]).unwrap();
    assert_eq!(p.cache_insert(a, &tokens[..8], 3, 0).unwrap(), 4); // one full page of draft KV
    let (first, second) = (p.pages(a).unwrap(), p.pages(b).unwrap());
    let found = |max| {
        let (s, len, drafted) = p.cache_lookup(&tokens, max, 0).unwrap();
        let pages = p.pages(s).unwrap();
        p.release(&[s]).unwrap();
        (len, drafted, pages)
    };
    assert_eq!(found(9), (8, 2, first.clone()));
    assert_eq!(found(1), (0, 0, vec![]));
    p.release(&[a]).unwrap();
    assert_eq!(p.stats().unwrap().evictable_pages, 4);
    // Without draft KV of its own, b has nothing to offer.
    let version = p.version(b).unwrap();
    assert_eq!((p.cache_insert(b, &tokens[..6], 3, 0).unwrap(), p.version(b).unwrap()), (0, version));
    let e = refused(&p, || p.cache_insert(b, &tokens[..6], 7, 0));
    assert_eq!(e, Error::OutOfRange { what: "drafted tokens to cache", got: 7, min: 0, max: 6 });
    // The second and third page of b go in, a's second and third are free; a plan that writes b's pages is refused now.
    assert_eq!(p.cache_insert(b, &tokens[..6], 6, 0).unwrap(), 2);
    assert!(p.version(b).unwrap() > version);
    let mixed = vec![first[0], second[1], second[2], first[3]];
    assert_eq!(found(9), (8, 6, mixed.clone()));
    let stats = p.stats().unwrap();
    assert_eq!((stats.cached_pages, stats.evictable_pages, stats.free_pages), (4, 2, 7));
    let kinds: Vec<_> = p.history(first[1]).unwrap().iter().map(|e| (e.kind, e.owner)).collect();
    assert_eq!(kinds.last(), Some(&(EventKind::Free, Owner::Cache)));
    p.audit().unwrap();
    // The last page is marked where it is: the sequence that found it has its draft KV now.
    let (c, len, _) = p.cache_lookup(&tokens, 8, 0).unwrap();
    assert_eq!((len, p.cache_insert(c, &tokens[..8], 8, 0).unwrap()), (8, 0));
    assert_eq!(found(9), (8, 8, mixed));
    // Pages that the cache has under other tokens can't go in.
    let e = refused(&p, || p.cache_insert(c, &[7, 7], 2, 0));
    assert!(matches!(e, Error::Invalid { what: "tokens to cache", .. }));
    p.release(&[b, c]).unwrap();
    assert_eq!(p.stats().unwrap().evictable_pages, 4);
    p.audit().unwrap();
    assert_eq!(p.cache_clear().unwrap(), 4);
    assert_eq!(p.audit().unwrap().free_pages, 12);
}

/// A page that the cache gives up for a better one stays with the sequences that read it.
#[test]
fn a_replaced_page_stays_with_its_owners() {
    let p = pool(6, 2, 4, 4);
    let (a, b) = (p.create().unwrap(), p.create().unwrap());
    p.reserve(&[(a, 2), (b, 2)]).unwrap().commit(&[2, 2]).unwrap();
    p.cache_insert(a, &[1, 2], 0, 0).unwrap();
    let (c, ..) = p.cache_lookup(&[1, 2], 2, 0).unwrap();
    assert_eq!(p.cache_insert(b, &[1, 2], 2, 0).unwrap(), 1);
    p.audit().unwrap();
    assert_eq!((p.pages(c).unwrap(), p.stats().unwrap().free_pages), (p.pages(a).unwrap(), 4));
    p.release(&[a]).unwrap();
    p.release(&[c]).unwrap();
    assert_eq!((p.stats().unwrap().free_pages, p.stats().unwrap().evictable_pages), (5, 0));
    p.release(&[b]).unwrap();
    assert_eq!((p.stats().unwrap().free_pages, p.stats().unwrap().evictable_pages), (5, 1));
    p.audit().unwrap();
}
