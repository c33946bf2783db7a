//! The allocator's share of a round, as `allocator.rs` (criterion) and `examples/allocator_driver.rs` time it: every
//! request of a batch reserves its next round, commits what was accepted, and gives the overshoot back.

use specrs::bounds::PageId;
use specrs::geometry::{Geometry, Layout, Limits, TreeShape};
use specrs::pool::{Pool, PoolConfig, SeqId};

/// Tree of the performance goals: K = 8, S = 6, V = 64.
pub(crate) const TREE: (u32, u32, u32) = (8, 6, 64);
const CONTEXT: u32 = 4096;

/// A batch of requests in the middle of generation.
pub(crate) struct Rounds {
    pub(crate) pool: Pool,
    pub(crate) geometry: Geometry,
    wants: Vec<(SeqId, u32)>,
    seqs: Vec<SeqId>,
    /// Committed lengths.
    pub(crate) lens: Vec<u32>,
}

/// Length of request i at the start: between 1k and 1.5k, every offset in a page.
pub(crate) fn start_len(i: u32) -> u32 {
    1024 + i * 37 % 512
}

/// Tokens that request i commits in each round.
pub(crate) fn accepted(i: u32) -> u32 {
    1 + i % 7
}

impl Rounds {
    /// `pages` without the sink. With `shuffled`, the free list is in random order, as in a pool that has served for
    /// a while; without, in order, as the peers' are.
    pub(crate) fn new(page_size: u32, batch: u32, pages: u32, shuffled: bool) -> specrs::Result<Self> {
        let limits = Limits { max_batch: batch, max_context_len: CONTEXT, page_size };
        let geometry = Geometry::new(limits, TreeShape::new(TREE.0, TREE.1, TREE.2)?, Layout::Holey)?;
        let (page, row_pages) = (geometry.page(), geometry.row_pages());
        let pool = Pool::new(PoolConfig { num_pages: pages + 1, page, max_seqs: batch, row_pages })?;
        if shuffled {
            shuffle(&pool, pages)?;
        }
        let mut rounds = Self { pool, geometry, wants: Vec::new(), seqs: Vec::new(), lens: Vec::new() };
        rounds.start(batch)?;
        Ok(rounds)
    }

    fn start(&mut self, batch: u32) -> specrs::Result<()> {
        self.pool.release(&self.seqs)?;
        self.seqs = (0..batch).map(|_| self.pool.create()).collect::<specrs::Result<_>>()?;
        self.lens = (0..batch).map(start_len).collect();
        let wants: Vec<_> = self.seqs.iter().copied().zip(self.lens.iter().copied()).collect();
        Ok(self.pool.reserve(&wants)?.commit(&self.lens)?)
    }

    /// One round; returns the pages that it took (and, but for those it kept, gave back).
    pub(crate) fn round(&mut self) -> specrs::Result<u64> {
        let page = self.geometry.page();
        let mut pages = 0;
        self.wants.clear();
        for (&seq, &len) in self.seqs.iter().zip(&self.lens) {
            let allocated = page.round_up(len)?;
            let target = self.geometry.alloc_target(len, allocated)?;
            pages += u64::from((target - allocated) / page.get());
            self.wants.push((seq, target));
        }
        let lease = self.pool.reserve(&self.wants)?;
        for (i, len) in self.lens.iter_mut().enumerate() {
            *len += accepted(i as u32);
        }
        lease.commit(&self.lens)?;
        Ok(pages)
    }

    /// Back to the first lengths, when the next `rounds` rounds would leave the context.
    pub(crate) fn rewind(&mut self, rounds: u32) -> specrs::Result<()> {
        let longest = self.lens.iter().copied().max().unwrap_or(0);
        if longest + rounds * 7 > CONTEXT { self.start(self.seqs.len() as u32) } else { Ok(()) }
    }
}

/// Put the free list into random order.
pub(crate) fn shuffle(pool: &Pool, pages: u32) -> specrs::Result<()> {
    let mut ids: Vec<PageId> = pool.alloc_pages(pages)?;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for i in (1..ids.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ids.swap(i, (state >> 33) as usize % (i + 1));
    }
    pool.free_pages(&ids)
}
