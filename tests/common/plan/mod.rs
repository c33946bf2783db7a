//! Pools for the planner's tests: page ids out of order, prompts committed, a round's positions reserved.
#![allow(unreachable_pub)]
#![allow(clippy::unwrap_used)] // a module of tests, which clippy takes for none

pub mod paged;
pub mod random;

use specrs::geometry::{Geometry, Layout, Limits, TreeShape};
use specrs::plan::{Bucket, Load, Phase};
use specrs::pool::{Lease, Pool, PoolConfig, SeqId};

pub fn geometry(k: u32, s: u32, v: u32, p: u32, max_batch: u32, context: u32, layout: Layout) -> Geometry {
    let limits = Limits { max_batch, max_context_len: context, page_size: p };
    Geometry::new(limits, TreeShape::new(k, s, v).unwrap(), layout).unwrap()
}

/// A pool of full load for `g` whose free list is shuffled by `seed`.
pub fn pool(g: &Geometry, seed: u64) -> Pool {
    let pool = Pool::new(PoolConfig {
        num_pages: g.pages_for_full_load().unwrap() + 1,
        page: g.page(),
        max_seqs: g.limits().max_batch + 2,
        row_pages: g.row_pages(),
    })
    .unwrap();
    let mut pages = pool.alloc_pages(pool.stats().unwrap().free_pages).unwrap();
    let mut x = seed | 1;
    for i in (1..pages.len()).rev() {
        x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        pages.swap(i, (x >> 33) as usize % (i + 1));
    }
    pool.free_pages(&pages).unwrap();
    pool
}

/// Live requests and queries, and some more of each, as far as the limits allow.
pub fn bucket(g: &Geometry, phase: Phase, requests: usize, queries: usize, more: (u32, u32)) -> Bucket {
    let largest = Load::limit(g, phase, g.limits().max_batch).unwrap();
    Bucket {
        batch: (requests as u32 + more.0).min(largest.requests as u32),
        queries: (queries as u32 + more.1).min(largest.queries as u32),
    }
}

/// A batch with the given committed lengths, each with a whole round reserved.
pub struct Batch {
    pub pool: Pool,
    pub seqs: Vec<SeqId>,
    pub lens: Vec<u32>,
    pub lease: Lease,
}

impl Batch {
    pub fn new(g: &Geometry, lens: &[u32], seed: u64) -> Self {
        let pool = pool(g, seed);
        let seqs: Vec<SeqId> = lens.iter().map(|_| pool.create().unwrap()).collect();
        let prompts: Vec<_> = seqs.iter().copied().zip(lens.iter().copied()).collect();
        pool.reserve(&prompts).unwrap().commit(lens).unwrap();
        let wants: Vec<_> = seqs.iter().zip(lens).map(|(&s, &l)| (s, g.alloc_target(l, 0).unwrap())).collect();
        let lease = pool.reserve(&wants).unwrap();
        Self { pool, seqs, lens: lens.to_vec(), lease }
    }

    /// Slot of a row position, from the pool's own page list.
    pub fn slot(&self, i: usize, pos: u32) -> i32 {
        let p = self.pool.config().page.get();
        let pages = self.pool.pages(self.seqs[i]).unwrap();
        (pages[(pos / p) as usize].get() * p + pos % p) as i32
    }
}
