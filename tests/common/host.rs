//! Batches over a scrambled page table, for the tests of the attention kernels.
#![allow(clippy::unwrap_used)] // a module of tests, which clippy takes for none

use half::bf16;
use specrs::bounds::PageSize;
use specrs::host::attention::AttnView;
use specrs::host::kv::{KvCache, KvCacheMut, KvData, KvDataMut, KvShape};

/// Deterministic values in -1..1 that are not symmetric in anything.
pub(crate) fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            ((s >> 40) as f32) / 8_388_608.0 - 1.0
        })
        .collect()
}

pub(crate) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

/// Run into the middle of a poisoned buffer; nothing of it may be left and nothing beside it touched.
pub(crate) fn guarded(n: usize, f: impl FnOnce(&mut [f32])) -> Vec<f32> {
    const GUARD: usize = 64;
    let canary = f32::from_bits(0x7fc0_dead);
    let mut buf = vec![canary; n + 2 * GUARD];
    f(&mut buf[GUARD..GUARD + n]);
    assert!(buf[..GUARD].iter().chain(&buf[GUARD + n..]).all(|v| v.to_bits() == canary.to_bits()), "written outside");
    let out = buf[GUARD..GUARD + n].to_vec();
    assert!(out.iter().all(|v| v.to_bits() != canary.to_bits()), "left unwritten");
    out
}

/// A cache of some sequences and the page table that finds them.
pub(crate) struct World {
    pub(crate) shape: KvShape,
    pub(crate) page: PageSize,
    pub(crate) row_pages: usize,
    pub(crate) table: Vec<i32>,
    f32s: Vec<f32>,
    bf16s: Option<Vec<bf16>>,
}

impl World {
    /// `rows` sequences of up to `positions` positions, pages scattered over the cache, unused slots NaN.
    pub(crate) fn new(
        rows: usize,
        positions: usize,
        page: u32,
        heads: usize,
        dim: usize,
        half: bool,
        seed: u64,
    ) -> Self {
        let page = PageSize::new(page).unwrap();
        let row_pages = page.pages_for(positions as u32) as usize;
        let pages = rows * row_pages;
        let mut order: Vec<i32> = (1..=pages as i32).collect();
        let keys = noise(pages, seed);
        order.sort_by(|&a, &b| keys[a as usize - 1].total_cmp(&keys[b as usize - 1]));
        let shape = KvShape { layers: 2, slots: (pages + 1) * page.get() as usize, kv_heads: heads, head_dim: dim };
        let n = 2 * 2 * shape.slots * heads * dim;
        let f32s = vec![f32::NAN; if half { 0 } else { n }];
        Self { shape, page, row_pages, table: order, f32s, bf16s: half.then(|| vec![bf16::NAN; n]) }
    }

    pub(crate) fn cache(&self) -> KvCache<'_> {
        let data = self.bf16s.as_ref().map_or(KvData::F32(&self.f32s), |b| KvData::Bf16(b));
        KvCache::new(self.shape, data).unwrap()
    }

    pub(crate) fn cache_mut(&mut self) -> KvCacheMut<'_> {
        let data = match &mut self.bf16s {
            Some(b) => KvDataMut::Bf16(b),
            None => KvDataMut::F32(&mut self.f32s),
        };
        KvCacheMut::new(self.shape, data).unwrap()
    }

    pub(crate) fn slot(&self, row: usize, position: usize) -> i32 {
        let p = self.page.get() as usize;
        self.table[row * self.row_pages + position / p] * p as i32 + (position % p) as i32
    }

    /// All elements, as bits.
    pub(crate) fn snapshot(&self) -> Vec<u32> {
        match &self.bf16s {
            Some(b) => b.iter().map(|v| u32::from(v.to_bits())).collect(),
            None => bits(&self.f32s),
        }
    }
}

/// Arrays of a batch.
#[derive(Debug, Clone, Default)]
pub(crate) struct Batch {
    pub(crate) qo_indptr: Vec<i32>,
    pub(crate) prefix_lens: Vec<i32>,
    pub(crate) mask: Vec<u64>,
    pub(crate) mask_words: usize,
    pub(crate) rows: Vec<u32>,
    /// Of each request; empty where all begin at their row's first page.
    pub(crate) first_pages: Vec<u32>,
    pub(crate) positions: Vec<i32>,
    pub(crate) out_slots: Vec<i32>,
}

impl Batch {
    pub(crate) fn new(mask_words: usize) -> Self {
        Self { qo_indptr: vec![0], mask_words, ..Self::default() }
    }

    /// `count` queries at positions `prefix ..`, causal.
    pub(crate) fn extend(&mut self, world: &World, row: usize, prefix: usize, count: usize) {
        for j in 0..count {
            self.positions.push((prefix + j) as i32);
            self.out_slots.push(world.slot(row, prefix + j));
        }
        self.close(row, prefix);
    }

    /// Nodes of a tree: parents (root: itself), in order.
    pub(crate) fn tree(&mut self, world: &World, row: usize, prefix: usize, parents: &[usize]) {
        let mut rows: Vec<Vec<u64>> = Vec::new();
        let mut depths: Vec<usize> = Vec::new();
        for (j, &parent) in parents.iter().enumerate() {
            let mut bits = if j == 0 { vec![0; self.mask_words] } else { rows[parent].clone() };
            bits[j / 64] |= 1 << (j % 64);
            depths.push(if j == 0 { 0 } else { depths[parent] + 1 });
            self.positions.push((prefix + depths[j]) as i32);
            self.out_slots.push(world.slot(row, prefix + j));
            rows.push(bits);
        }
        self.mask.extend(rows.into_iter().flatten());
        self.close(row, prefix);
    }

    pub(crate) fn close(&mut self, row: usize, prefix: usize) {
        self.qo_indptr.push(self.positions.len() as i32);
        self.prefix_lens.push(prefix as i32);
        self.rows.push(row as u32);
    }

    pub(crate) fn view<'a>(&'a self, world: &'a World) -> AttnView<'a> {
        AttnView {
            qo_indptr: &self.qo_indptr,
            prefix_lens: &self.prefix_lens,
            mask: &self.mask,
            mask_words: self.mask_words,
            rows: &self.rows,
            first_pages: &self.first_pages,
            table: &world.table,
            row_pages: world.row_pages,
            page: world.page,
            positions: &self.positions,
            out_slots: &self.out_slots,
        }
    }
}
