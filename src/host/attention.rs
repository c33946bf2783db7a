//! Paged attention, one form for every phase: prefill in chunks, plain decode, draft steps and tree verification.
//!
//! Query j of a request attends row positions `[0, prefix)` and then, causally, `prefix ..= prefix + j`, or the
//! positions `prefix + bit` of its mask. Its keys are therefore a *list of logical keys*, and the arithmetic is a
//! function of that list alone: keys in order, in blocks of 32 counted from logical key 0, an online softmax over
//! the blocks of a span of 128 keys, spans merged in order. Paging, the other queries of the batch, the phase and the
//! number of threads change nothing, not even the last bit. So a node of a verified tree gets exactly the output that
//! plain decoding gives the same token later.
//!
//! The prefix is read once for all queries of a request: a tile holds up to 64 (query, head) rows of a key/value head
//! as the elements of its vectors, so that the softmax needs no sums within a vector.
//!
//! Online softmax: Milakov and Gimelshein 2018; splitting over keys: Flash-Decoding (Dao et al. 2023).

use super::attention_tile::{BLOCK, Keys, SPAN_BLOCKS, Tile};
use super::kv::{KvCache, index};
use super::threads;
use crate::bounds::PageSize;
use crate::error::{Error, Result};
use crate::simd;
use pulp::{Simd, WithSimd};

/// Plain arrays that a batch reads and writes: the kernels' own entry point. Everything in it is checked before it is
/// used.
#[derive(Debug, Clone, Copy)]
pub struct AttnView<'a> {
    /// First query of each request, and the end [B + 1]. Queries past the end are dead: their output is 0.
    pub qo_indptr: &'a [i32],
    /// Positions of each request that all its queries attend `[B]`, those before its first page included.
    pub prefix_lens: &'a [i32],
    /// Page column of each request that its keys begin at `[B]`: what stands in pages before it is not attended. Empty
    /// where all keys begin at the row's first page.
    pub first_pages: &'a [u32],
    /// Bit b of word w of a query's row: whether it attends position `prefix + 64 w + b` [Q, mask_words].
    pub mask: &'a [u64],
    /// Words of a mask row; 0 for a causal plan.
    pub mask_words: usize,
    /// Row of the page table of each request `[B]`.
    pub rows: &'a [u32],
    /// Page of each row and page column [rows, row_pages].
    pub table: &'a [i32],
    /// Page columns of a row.
    pub row_pages: usize,
    /// Tokens of a page.
    pub page: PageSize,
    /// RoPE position of each query `[Q]`.
    pub positions: &'a [i32],
    /// Slot that takes each query's KV `[Q]`; dead queries have 0, the sink.
    pub out_slots: &'a [i32],
}

impl<'a> AttnView<'a> {
    /// Requests.
    pub fn batch(&self) -> usize {
        self.prefix_lens.len()
    }

    /// Queries of request `i`; valid after [`check`](Self::check).
    pub(crate) fn queries(&self, i: usize) -> std::ops::Range<usize> {
        self.qo_indptr[i] as usize..self.qo_indptr[i + 1] as usize
    }

    /// Pages of request `i`, from the first one that it attends.
    fn pages(&self, i: usize) -> &'a [i32] {
        let row = self.rows[i] as usize * self.row_pages;
        &self.table[row + self.first_page(i)..row + self.row_pages]
    }

    /// Page column that the keys of request `i` begin at.
    fn first_page(&self, i: usize) -> usize {
        self.first_pages.get(i).map_or(0, |&page| page as usize)
    }

    /// Keys of the prefix of request `i`.
    fn prefix(&self, i: usize) -> usize {
        self.prefix_lens[i] as usize - self.first_page(i) * self.page.get() as usize
    }

    /// Mask words of query `q`.
    fn mask_row(&self, q: usize) -> &'a [u64] {
        &self.mask[q * self.mask_words..(q + 1) * self.mask_words]
    }

    /// One past the last key that a query of request `i` attends, counted from its first page.
    fn end(&self, i: usize) -> i64 {
        let (queries, prefix) = (self.queries(i), self.prefix(i) as i64);
        if queries.is_empty() {
            return 0;
        }
        if self.mask_words == 0 {
            return prefix + queries.len() as i64;
        }
        let mut any = vec![0u64; self.mask_words];
        for q in queries {
            any.iter_mut().zip(self.mask_row(q)).for_each(|(a, &w)| *a |= w);
        }
        let bits = any.iter().rposition(|&w| w != 0).map_or(0, |w| 64 * w + 64 - any[w].leading_zeros() as usize);
        prefix + bits as i64
    }

    /// Check every index that a kernel will compute from this view for `queries` rows and a cache of `slots` slots.
    pub(crate) fn check(&self, kernel: &'static str, queries: usize, slots: usize) -> Result<()> {
        let batch = self.batch();
        let fits = |operand, got: usize, want: usize| match got == want {
            true => Ok(()),
            false => Err(Error::Mismatch { operand, got: format!("{got} elements"), want: want.to_string() }),
        };
        fits("plan qo_indptr", self.qo_indptr.len(), batch + 1)?;
        fits("plan rows", self.rows.len(), batch)?;
        if !self.first_pages.is_empty() {
            fits("plan first pages", self.first_pages.len(), batch)?;
        }
        fits("plan positions", self.positions.len(), queries)?;
        fits("plan out_slots", self.out_slots.len(), queries)?;
        fits("plan mask", self.mask.len(), queries * self.mask_words)?;
        index(kernel, "qo_indptr", 0, -1, i64::from(self.qo_indptr[0]), 1)?;
        let table_rows = self.table.len().checked_div(self.row_pages).unwrap_or(0);
        let pages = slots / self.page.get() as usize;
        for i in 0..batch {
            let (row, first, last) = (i as i64, i64::from(self.qo_indptr[i]), i64::from(self.qo_indptr[i + 1]));
            index(kernel, "queries", row, -1, last, queries + 1)?;
            index(kernel, "qo_indptr", row, -1, last - first, queries + 1)?;
            index(kernel, "prefix length", row, -1, i64::from(self.prefix_lens[i]), i32::MAX as usize)?;
            let most = (self.prefix_lens[i] as usize / self.page.get() as usize).min(self.row_pages);
            index(kernel, "first page", row, -1, self.first_page(i) as i64, most + 1)?;
            if self.queries(i).is_empty() {
                continue; // no key to read: the row may be anything
            }
            index(kernel, "page table rows", row, -1, i64::from(self.rows[i]), table_rows)?;
            let end = self.end(i);
            if end == 0 {
                continue; // dead queries, which attend nothing
            }
            let last_page = i64::from(self.page.page_of(u32::try_from(end - 1).unwrap_or(u32::MAX)));
            index(kernel, "page table row", row, -1, last_page, self.row_pages - self.first_page(i))?;
            let used = &self.pages(i)[..=last_page as usize];
            if used.iter().any(|&p| p < 0 || p as usize >= pages) {
                let bad = used.iter().position(|&p| p < 0 || p as usize >= pages).unwrap_or(0);
                index(kernel, "pages", row, bad as i64, i64::from(used[bad]), pages)?;
            }
        }
        Ok(())
    }

    /// Slots of keys `from..to` of request `i`, counted from its first page, appended to `slots`.
    fn slots(&self, i: usize, from: usize, to: usize, slots: &mut Vec<usize>) {
        let (pages, size) = (self.pages(i), self.page.get() as usize);
        let shift = size.trailing_zeros();
        slots.extend((from..to).map(|p| ((pages[p >> shift] as usize) << shift) + (p & (size - 1))));
    }

    /// Logical keys of query `q` of request `i` from logical key `from <= prefix` on, as slots.
    fn tail(&self, i: usize, q: usize, from: usize, slots: &mut Vec<usize>) {
        slots.clear();
        let prefix = self.prefix(i);
        self.slots(i, from, prefix, slots);
        for (w, &word) in self.mask_row(q).iter().enumerate() {
            let mut word = word;
            while word != 0 {
                let p = prefix + 64 * w + word.trailing_zeros() as usize;
                self.slots(i, p, p + 1, slots);
                word &= word - 1;
            }
        }
    }
}

/// Rows of a tile that the caches like.
const TILE_ROWS: usize = 64;

/// The rule that makes the score which the softmax sees of the product of a query and a key.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scores {
    /// Factor.
    pub scale: f32,
    /// c in c tanh(x / c) of a scaled product x (Gemma 2's `attn_logit_softcapping`); positive.
    pub cap: Option<f32>,
}

impl Scores {
    /// Scaled, not capped.
    pub fn scaled(scale: f32) -> Self {
        Self { scale, cap: None }
    }
}

/// Attention of q [Q, heads, head_dim] over a layer of the cache into `out` [Q, heads, head_dim]; query heads
/// `g * kv_heads ..` share key/value head g's group.
///
/// Every element of `out` is written: 0 for queries that attend nothing and for dead ones. On an error nothing is.
pub fn attention(
    cache: &KvCache<'_>,
    layer: usize,
    view: &AttnView<'_>,
    q: &[f32],
    heads: usize,
    scores: Scores,
    out: &mut [f32],
) -> Result<()> {
    check(cache, view, q, heads, out.len(), "attention")?;
    let (k, v) = cache.layer("attention", layer)?;
    let shape = cache.shape();
    let (hkv, d) = (shape.kv_heads, shape.head_dim);
    let group = heads / hkv;
    let ctx = Context { view, q, heads, group, scores, keys: Keys::new(k, v, hkv, d) };

    let total = view.batch();
    let live = view.qo_indptr[total] as usize;
    out[live * heads * d..].fill(0.0);

    // One thread does about 8 multiply-adds a nanosecond here; each (row, key) takes 2 d of them.
    let ends: Vec<usize> = (0..total).map(|i| view.end(i) as usize).collect();
    let work: usize = (0..total).map(|i| view.queries(i).len() * ends[i]).sum();
    let cost = work * heads * d / 4;
    let threads = if cost < threads::WORTH_A_REGION_NS { 1 } else { threads::num_threads() };

    // Tiles of queries: as many rows as fit, fewer where threads would be idle otherwise.
    let busy = (0..total).filter(|&i| !view.queries(i).is_empty()).count() * hkv;
    let share = threads.div_ceil(busy.max(1));
    let mut jobs = Vec::new();
    let mut rest = out[..live * heads * d].chunks_exact_mut(group * d);
    for i in 0..total {
        let queries = view.queries(i);
        let per_tile = (TILE_ROWS / group).max(1).min(queries.len().div_ceil(share)).max(1);
        let mut first = queries.start;
        while first < queries.end {
            let end = (first + per_tile).min(queries.end);
            let base = jobs.len();
            jobs.extend((0..hkv).map(|head| Job {
                request: i,
                head,
                queries: first..end,
                out: Vec::with_capacity(end - first),
                spans: Vec::new(),
            }));
            for _ in first..end {
                for job in &mut jobs[base..] {
                    job.out.extend(rest.next());
                }
            }
            first = end;
        }
    }

    // With too few tiles for the threads, whole spans of the prefix run first, in parallel, then the rest of each tile.
    if jobs.len() < threads {
        let mut parts = Vec::new();
        for job in &mut jobs {
            let spans = view.prefix(job.request) / (BLOCK * SPAN_BLOCKS);
            if spans > 1 {
                job.spans.resize_with(spans, || None);
                let (request, head, queries) = (job.request, job.head, job.queries.clone());
                parts.extend(job.spans.iter_mut().enumerate().map(|(span, done)| SpanJob {
                    request,
                    head,
                    queries: queries.clone(),
                    span,
                    done,
                }));
            }
        }
        threads::for_each(parts, cost, |part| simd::run(RunSpan { ctx: &ctx, part }));
    }
    threads::for_each(jobs, if threads == 1 { 0 } else { cost }, |job| simd::run(RunJob { ctx: &ctx, job }));
    Ok(())
}

/// Operands of one call.
struct Context<'a> {
    view: &'a AttnView<'a>,
    q: &'a [f32],
    heads: usize,
    /// Query heads of a key/value head.
    group: usize,
    scores: Scores,
    keys: Keys<'a>,
}

impl Context<'_> {
    /// A tile of `rows` rows.
    fn tile(&self, rows: usize) -> Tile {
        Tile::new(rows, self.keys.dim(), self.scores.cap)
    }

    /// Put the queries' rows into a tile.
    #[inline(always)]
    fn load(&self, tile: &mut Tile, head: usize, queries: std::ops::Range<usize>) {
        let d = self.keys.dim();
        for (n, q) in queries.enumerate() {
            for g in 0..self.group {
                let at = (q * self.heads + head * self.group + g) * d;
                tile.load_query(n * self.group + g, &self.q[at..at + d], self.scores.scale);
            }
        }
    }
}

/// All that is left to do for a tile of queries and one key/value head.
struct Job<'o> {
    request: usize,
    head: usize,
    queries: std::ops::Range<usize>,
    /// Output of each query's group.
    out: Vec<&'o mut [f32]>,
    /// Tiles of the first spans, where those were done before.
    spans: Vec<Option<Tile>>,
}

/// One whole span of the prefix for a tile.
struct SpanJob<'o> {
    request: usize,
    head: usize,
    queries: std::ops::Range<usize>,
    span: usize,
    done: &'o mut Option<Tile>,
}

struct RunSpan<'c, 'o> {
    ctx: &'c Context<'c>,
    part: SpanJob<'o>,
}

impl WithSimd for RunSpan<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, s: S) {
        let RunSpan { ctx, part } = self;
        let mut tile = ctx.tile(part.queries.len() * ctx.group);
        ctx.load(&mut tile, part.head, part.queries);
        let mut slots = Vec::with_capacity(BLOCK);
        for block in part.span * SPAN_BLOCKS..(part.span + 1) * SPAN_BLOCKS {
            slots.clear();
            ctx.view.slots(part.request, block * BLOCK, (block + 1) * BLOCK, &mut slots);
            tile.block(s, &ctx.keys, part.head, &slots, |_| BLOCK);
        }
        *part.done = Some(tile);
    }
}

struct RunJob<'c, 'o> {
    ctx: &'c Context<'c>,
    job: Job<'o>,
}

impl WithSimd for RunJob<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, s: S) {
        let RunJob { ctx, mut job } = self;
        let (view, group, i) = (ctx.view, ctx.group, job.request);
        let mut tile = ctx.tile(job.queries.len() * group);
        ctx.load(&mut tile, job.head, job.queries.clone());
        let done = job.spans.len() * SPAN_BLOCKS;
        for span in job.spans.into_iter().flatten() {
            tile.merge(&span);
        }
        let prefix = view.prefix(i);
        let mut slots = Vec::with_capacity(BLOCK);
        if view.mask_words == 0 {
            // Query n of the tile attends `first + n` keys, one for each position.
            let first = prefix + (job.queries.start - view.queries(i).start) + 1;
            let end = first + job.queries.len() - 1;
            for block in done..end.div_ceil(BLOCK) {
                let from = block * BLOCK;
                slots.clear();
                view.slots(i, from, (from + BLOCK).min(end), &mut slots);
                tile.block(s, &ctx.keys, job.head, &slots, |row| (first + row / group).saturating_sub(from));
                if (block + 1).is_multiple_of(SPAN_BLOCKS) {
                    tile.end_span();
                }
            }
            tile.end_span();
            for (n, out) in job.out.iter_mut().enumerate() {
                tile.finish(n * group, out);
            }
            return;
        }
        // All queries share whole blocks of the prefix; from there on each query has keys of its own.
        let common = prefix / BLOCK;
        for block in done..common {
            slots.clear();
            view.slots(i, block * BLOCK, (block + 1) * BLOCK, &mut slots);
            tile.block(s, &ctx.keys, job.head, &slots, |_| BLOCK);
            if (block + 1).is_multiple_of(SPAN_BLOCKS) {
                tile.end_span();
            }
        }
        let mut own = ctx.tile(group);
        for (n, (q, out)) in job.queries.clone().zip(job.out.iter_mut()).enumerate() {
            own.copy_rows(&tile, n * group);
            ctx.load(&mut own, job.head, q..q + 1);
            view.tail(i, q, common * BLOCK, &mut slots);
            for (b, slots) in slots.chunks(BLOCK).enumerate() {
                own.block(s, &ctx.keys, job.head, slots, |_| BLOCK);
                if (common + b + 1).is_multiple_of(SPAN_BLOCKS) {
                    own.end_span();
                }
            }
            own.end_span();
            own.finish(0, out);
        }
    }
}

fn check(
    cache: &KvCache<'_>,
    view: &AttnView<'_>,
    q: &[f32],
    heads: usize,
    out: usize,
    kernel: &'static str,
) -> Result<()> {
    let shape = cache.shape();
    check_heads(heads, shape.kv_heads, shape.head_dim)?;
    let queries = view.positions.len();
    let want = queries * heads * shape.head_dim;
    for (operand, got) in [("q", q.len()), ("attention out", out)] {
        if got != want {
            return Err(Error::Mismatch {
                operand,
                got: format!("{got} elements"),
                want: format!("[{queries}, {heads}, {}]", shape.head_dim),
            });
        }
    }
    view.check(kernel, queries, shape.slots)
}

/// Heads that can share key/value heads. Their size may be any: tiles pad it to whole vectors.
pub(crate) fn check_heads(heads: usize, kv_heads: usize, head_dim: usize) -> Result<()> {
    if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(Error::Invalid {
            what: "num_heads",
            got: heads.to_string(),
            why: format!("must be a positive multiple of the {kv_heads} key/value heads"),
        });
    }
    if head_dim == 0 {
        return Err(Error::Invalid { what: "head_dim", got: "0".into(), why: "must be positive".into() });
    }
    Ok(())
}

/// [`attention`] as a plain softmax in f64, one query and head at a time.
pub fn attention_reference(
    cache: &KvCache<'_>,
    layer: usize,
    view: &AttnView<'_>,
    q: &[f32],
    heads: usize,
    scores: Scores,
    out: &mut [f32],
) -> Result<()> {
    check(cache, view, q, heads, out.len(), "attention_reference")?;
    let (k, v) = cache.layer("attention_reference", layer)?;
    let shape = cache.shape();
    let d = shape.head_dim;
    let keys = Keys::new(k, v, shape.kv_heads, d);
    out.fill(0.0);
    for i in 0..view.batch() {
        let queries = view.queries(i);
        for query in queries.clone() {
            let prefix = view.prefix(i);
            let mut slots = Vec::new();
            if view.mask_words == 0 {
                view.slots(i, 0, prefix + query - queries.start + 1, &mut slots);
            } else {
                view.tail(i, query, 0, &mut slots);
            }
            for h in 0..heads {
                let head = h / (heads / shape.kv_heads);
                let at = (query * heads + h) * d;
                let dot = |slot: usize| -> f64 {
                    (0..d).map(|j| f64::from(q[at + j]) * f64::from(keys.key(slot, head, j))).sum()
                };
                let score = |slot: usize| {
                    let x = dot(slot) * f64::from(scores.scale);
                    scores.cap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh())
                };
                let scores: Vec<f64> = slots.iter().map(|&s| score(s)).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                if slots.is_empty() {
                    continue;
                }
                for j in 0..d {
                    let y: f64 = slots.iter().zip(&weights).map(|(&s, w)| w * f64::from(keys.value(s, head, j))).sum();
                    out[at + j] = (y / sum) as f32;
                }
            }
        }
    }
    Ok(())
}
