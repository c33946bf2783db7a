//! Tests that need the inside of the pool: planted faults that the audit must name, and a panic under the lock.

use crate::bounds::PageSize;
use crate::error::Error;
use crate::pool::state::State;
use crate::pool::{Lease, Pool, PoolConfig, SeqId};

fn assert_send<T: Send>() {}
fn assert_sync<T: Sync>() {}

#[test]
fn handles_cross_threads() {
    assert_send::<Lease>();
    assert_send::<SeqId>();
    assert_send::<Pool>();
    assert_sync::<Pool>();
}

/// After a panic inside the pool every call is refused, and dropping a lease is silent.
#[test]
fn a_poisoned_pool_refuses() {
    let page = PageSize::new(4).unwrap();
    let pool = Pool::new(PoolConfig { num_pages: 9, page, max_seqs: 2, row_pages: 2 }).unwrap();
    let seq = pool.create().unwrap();
    let (dropped, explicit) = (pool.reserve(&[(seq, 3)]).unwrap(), pool.reserve(&[]).unwrap());
    let inside = pool.clone();
    std::thread::spawn(move || {
        let _guard = inside.state.write();
        panic!("inside the pool");
    })
    .join()
    .unwrap_err();
    drop(dropped);
    assert!(matches!(explicit.rollback(), Err(Error::Audit { .. })));
    assert!(matches!(pool.reserve(&[]), Err(Error::Audit { .. })));
    assert!(matches!(pool.audit(), Err(Error::Audit { .. })));
    assert!(matches!(pool.committed(seq), Err(Error::Audit { .. })));
}

/// The audit finds the faults that it is there to find.
#[test]
fn audit_names_the_fault() {
    let page = PageSize::new(4).unwrap();
    let make = || {
        let pool = Pool::new(PoolConfig { num_pages: 9, page, max_seqs: 3, row_pages: 4 }).unwrap();
        let (a, b) = (pool.create().unwrap(), pool.create().unwrap());
        pool.reserve(&[(a, 8), (b, 4)]).unwrap().commit(&[8, 4]).unwrap();
        pool.cache_insert(a, &[1, 2, 3, 4], 0, 0).unwrap();
        let lease = pool.reserve(&[(b, 9)]).unwrap();
        pool.audit().unwrap();
        (pool, lease)
    };
    type Fault = (&'static str, fn(&mut State));
    let faults: [Fault; 15] = [
        ("is wrongly or twice on the free list", |s| s.ledger.free.push(7)),
        ("is wrongly or twice on the free list", |s| s.ledger.free.push(0)),
        ("on the free list: false", |s| s.ledger.free.truncate(1)),
        ("the ledger has 3 owner(s), found 2", |s| s.ledger.recs[1].refs += 1),
        ("the ledger has 1 owner(s), found 2", |s| s.ledger.recs[3].aux = u32::MAX),
        ("dead column 3 holds 2", |s| s.table[3] = 2),
        ("has page 1 twice", |s| s.table[1] = 1),
        ("outside 1..9", |s| s.table[1] = 0),
        ("outside 1..9", |s| s.table[1] = 9),
        ("1 pages are committed", |s| s.rows[0].committed = 4),
        ("rows have a lease", |s| s.leased_rows = 0),
        ("list of free rows", |s| s.free_rows.push(0)),
        ("the ledger says None", |s| s.ledger.recs[1].aux = 0),
        ("neither live nor free", |s| s.free_rows.clear()),
        ("4 pages are free or evictable, 3 are not in use", |s| s.cache.spoil_idle()),
    ];
    for (what, spoil) in faults {
        let (pool, _lease) = make();
        spoil(&mut pool.write().unwrap());
        let e = pool.audit().unwrap_err().to_string();
        assert!(e.contains(what), "{e}, not {what}");
    }
}
