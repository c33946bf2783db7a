//! Threads that share a pool: nobody's speculative page is anybody else's, and nothing is lost at the end.

use std::sync::atomic::{AtomicU32, Ordering};

use specrs::Error;
use specrs::bounds::PageSize;
use specrs::pool::{Pool, PoolConfig};

const THREADS: u32 = 4;
const ROUNDS: u32 = 4000;

/// A small generator: the test needs variety, not quality.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32 % n
    }
}

#[test]
fn reserve_commit_and_drop_from_many_threads() {
    let (pages, page) = (20, PageSize::new(4).unwrap());
    let pool = Pool::new(PoolConfig { num_pages: pages + 1, page, max_seqs: 3 * THREADS, row_pages: 12 }).unwrap();
    // The thread that writes to a page now; 0 for none.
    let writers: Vec<AtomicU32> = (0..=pages).map(|_| AtomicU32::new(0)).collect();
    let (mut done, mut refused) = (0, 0);
    std::thread::scope(|scope| {
        let (pool, writers) = (&pool, &writers);
        let threads: Vec<_> = (1..=THREADS).map(|me| scope.spawn(move || work(pool, writers, me))).collect();
        // An auditor beside them: the accounts agree at every moment that a reader can see.
        for _ in 0..200 {
            pool.audit().unwrap();
        }
        for t in threads {
            let (d, r) = t.join().unwrap();
            done += d;
            refused += r;
        }
    });
    assert!(done > ROUNDS && refused > 0, "{done} leases, {refused} refused");
    pool.cache_clear().unwrap();
    let report = pool.audit().unwrap();
    assert_eq!((report.free_pages, report.sequences, report.leased_sequences), (pages, 0, 0));
}

/// Returns leases that ended well and reservations that found too few pages.
fn work(pool: &Pool, writers: &[AtomicU32], me: u32) -> (u32, u32) {
    let mut rng = Rng(u64::from(me) * 77);
    let (mut done, mut refused) = (0, 0);
    let page = pool.config().page;
    for round in 0..ROUNDS {
        let prompt = [rng.below(2); 8];
        let (a, _, _) = pool.cache_lookup(&prompt, 8, 0).unwrap();
        let b = pool.fork(a, pool.committed(a).unwrap()).unwrap();
        for _ in 0..3 {
            let (la, lb) = (pool.committed(a).unwrap(), pool.committed(b).unwrap());
            let lease = match pool.reserve(&[(a, la + rng.below(9)), (b, lb + rng.below(9))]) {
                Ok(lease) => lease,
                Err(Error::PoolExhausted { .. }) => {
                    refused += 1;
                    continue;
                }
                Err(e) => panic!("{e}"),
            };
            let mine: Vec<u32> = [(a, la), (b, lb)]
                .iter()
                .flat_map(|&(s, l)| pool.pages(s).unwrap().split_off(page.pages_for(l) as usize))
                .map(|p| p.get())
                .collect();
            for &p in &mine {
                assert_eq!(writers[p as usize].swap(me, Ordering::SeqCst), 0, "page {p} has two writers");
            }
            if round % 64 == 0 {
                std::thread::yield_now();
            }
            for &p in &mine {
                assert_eq!(writers[p as usize].swap(0, Ordering::SeqCst), me, "page {p} has two writers");
            }
            let (na, nb) = (pool.allocated(a).unwrap(), pool.allocated(b).unwrap());
            match rng.below(3) {
                0 => drop(lease),
                // To another thread's hands and back: a lease may end anywhere.
                1 => std::thread::scope(|s| s.spawn(move || drop(lease)).join().unwrap()),
                _ => {
                    let to = [la + rng.below(na - la + 1), lb + rng.below(nb - lb + 1)];
                    // Refused where the sequence was reserved no further than it was.
                    if let Err(r) = lease.commit(&to) {
                        assert!(matches!(r.error, Error::OutOfRange { .. }), "{}", r.error);
                    }
                }
            }
            done += 1;
        }
        let n = pool.committed(a).unwrap().min(8);
        match pool.cache_insert(a, &prompt[..n as usize], rng.below(2) * n, 0) {
            // Pages of a prompt that another thread cached meanwhile stay private; nothing else may go wrong.
            Ok(_) => {}
            Err(e) => panic!("{e}"),
        }
        pool.release(&[b, a]).unwrap();
    }
    (done, refused)
}
