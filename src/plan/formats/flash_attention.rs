//! `flash_attention`: page tables for FlashAttention 3 and 4 (`flash_attn_with_kvcache`), in one pass or two.
//!
//! [`FlashAttention`] says what the arrays hold.

use crate::bounds::PageSize;
use crate::error::{Error, Result};
use crate::geometry::{Geometry, Layout};
use crate::plan::arrays::{Arrays, DType, Extent, Need, Spec};
use crate::plan::formats::sizes::hint;
use crate::plan::formats::table::Table;
use crate::plan::load::Load;
use crate::plan::wide::wide;
use crate::plan::{DraftMask, Format, Phase, Plan};
use crate::pool::Tables;

const CACHE_SEQLENS: usize = 0;
const PAGE_TABLE: usize = 1;
const CU_SEQLENS_Q: usize = 2;
const EXPAND_CACHE_SEQLENS: usize = 3;
const EXPAND_PAGE_TABLE: usize = 4;
const EXPAND_CU_SEQLENS_Q: usize = 5;

/// Of the prefix pass (or the only one), then of the expand pass.
static SPECS: [Spec; 6] = [
    Spec::new("cache_seqlens", DType::I32),
    Spec::new("page_table", DType::I32),
    Spec::new("cu_seqlens_q", DType::I32),
    Spec::new("expand_cache_seqlens", DType::I32),
    Spec::new("expand_page_table", DType::I32),
    Spec::new("expand_cu_seqlens_q", DType::I32),
];

/// Page tables of FlashAttention 3 and 4.
///
/// A kernel of this kind reads, for each row of a page table, the first `cache_seqlens` tokens of the row's pages, and
/// knows of no mask but the causal one. What the queries of a request attend to in common, the prefix, is one row; what
/// each query attends to by itself is a row of the **expand** table, one query a row. The outputs of the two passes are
/// merged by their log-sum-exp.
///
/// | phase | passes | `cache_seqlens[i]` | `expand_cache_seqlens[q]` | expand table of a query |
/// |---|---|---|---|---|
/// | extend, decode; draft with K = 1 | one, causal | all keys of the last query | | |
/// | draft, dense layout | two, neither causal | `L` | ancestors or lane, `t + 1` | slots |
/// | draft, holey layout | two, neither causal | `base` | `r + t + 1` | pages of the branch |
/// | verify | two, neither causal | `L` | ancestors | slots |
///
/// A table of slots is a page table for the same pool viewed with pages of one token
/// ([`FlashAttention::expand_page_size`] says which view): so ancestors, in any number and order, need no copy. A table
/// of the holey layout names whole pages; those of a branch b >= 1 begin with the hole that holds a copy of the
/// prefix's tail ([`Planner::tail_copies`](crate::plan::Planner::tail_copies), run before step 0), and the pages hold
/// the branch's own lane alone, so that ancestors cannot be named.
///
/// With B requests and Q queries, dead ones included, `cache_seqlens` is `[B]`, `page_table` `[B, columns]` of pages of P
/// tokens, `cu_seqlens_q` `[B + 1]`; the arrays of the expand pass are `[Q]`, `[Q, columns]` and `[Q + 1]`, with `t + 1`
/// columns in a draft step and as many in a verification as its deepest node has ancestors, V at most. All are int32.
/// Every cell of these shapes is written each time: entries behind a row's end are 0, the sink, and a dead request or
/// query has length 0 and a row of 0. Of a larger table nothing else is stated; specrs clears what it wrote there before.
#[derive(Debug, Clone, Copy, Default)]
pub struct FlashAttention;

/// How the keys of a phase are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Passes {
    /// Everything in one causal pass.
    One,
    /// The prefix, and a table of slots.
    Slots {
        /// Columns of the expand table.
        width: u32,
    },
    /// The prefix up to its tail page, and a table of pages.
    Pages {
        /// Columns of the expand table.
        width: u32,
    },
}

impl Passes {
    fn of(geometry: &Geometry, phase: Phase) -> Self {
        match (phase, geometry.layout()) {
            (Phase::Extend | Phase::Decode, _) => Passes::One,
            (Phase::Verify, _) => Passes::Slots { width: geometry.verify_expand_width() },
            (Phase::Draft { .. }, _) if geometry.shape().topk() == 1 => Passes::One,
            (Phase::Draft { step }, Layout::Dense) => Passes::Slots { width: geometry.draft_expand_width(step) },
            (Phase::Draft { step }, Layout::Holey) => Passes::Pages { width: geometry.draft_expand_width(step) },
        }
    }

    /// Columns of the expand table; `None` for one pass.
    fn expand_width(self) -> Option<u32> {
        match self {
            Passes::One => None,
            Passes::Slots { width } | Passes::Pages { width } => Some(width),
        }
    }

    /// Tokens that the prefix pass (or the only one) reads for a request of `prefix` tokens and `keys` in all.
    fn prefix_tokens(self, page: PageSize, prefix: u64, keys: u64) -> u64 {
        match self {
            Passes::One => keys,
            Passes::Slots { .. } => prefix,
            Passes::Pages { .. } => prefix - prefix % page.get() as u64,
        }
    }
}

impl FlashAttention {
    /// Page size with which the kernel views the pool in the expand pass of `phase`: 1 where its table holds slots, P
    /// where it holds pages; `None` where there is no such pass.
    pub fn expand_page_size(geometry: &Geometry, phase: Phase) -> Option<u32> {
        match Passes::of(geometry, phase) {
            Passes::One => None,
            Passes::Slots { .. } => Some(1),
            Passes::Pages { .. } => Some(geometry.page().get()),
        }
    }
}

/// Size of each array; `None` where the phase has no such array. Both what is used and what is needed at most.
fn sizes(geometry: &Geometry, load: &Load) -> [Option<Extent>; 6] {
    let passes = Passes::of(geometry, load.phase);
    let (b, q) = (load.requests, load.queries);
    let (expand, page) = (passes.expand_width(), geometry.page());
    // Longer prefixes have more tokens to read, whatever the pass reads of them.
    let tokens = passes.prefix_tokens(page, load.longest_prefix, load.longest);
    [
        Some(Extent::Line(b)),
        Some(Extent::Table { rows: b, cols: tokens.div_ceil(page.get() as u64) }),
        Some(Extent::Line(b + 1)),
        expand.map(|_| Extent::Line(q)),
        // A verification's rows are as long as its deepest node needs, V of a chain at most.
        expand.map(|width| match load.phase {
            Phase::Verify => Extent::Table { rows: q, cols: load.deepest },
            _ => Extent::Table { rows: q, cols: width as u64 },
        }),
        expand.map(|_| Extent::Line(q + 1)),
    ]
}

impl Format for FlashAttention {
    fn name(&self) -> &'static str {
        "flash_attention"
    }

    fn arrays(&self) -> &'static [Spec] {
        &SPECS
    }

    fn supports(&self, _: &Geometry) -> Result<()> {
        Ok(()) // K, P and layout in any combination: each has its passes
    }

    fn supports_mask(&self, geometry: &Geometry, mask: DraftMask<'_>) -> Result<()> {
        match (geometry.layout(), mask) {
            (Layout::Holey, DraftMask::Ancestors(_)) => Err(Error::Invalid {
                what: "draft attention",
                got: "ancestors".into(),
                why: format!(
                    "flash_attention reads whole pages of {} tokens in the holey layout, which hold one lane each; \
                     use lanes, the dense layout, or page_size = 1",
                    geometry.page().get()
                ),
            }),
            _ => Ok(()),
        }
    }

    fn extents(&self, geometry: &Geometry, load: &Load) -> Result<Vec<(usize, Extent)>> {
        Ok(sizes(geometry, load).into_iter().enumerate().filter_map(|(i, e)| e.map(|e| (i, e))).collect())
    }

    fn lower(&self, plan: &Plan, tables: &Tables<'_>, geometry: &Geometry, arrays: &mut Arrays) -> Result<()> {
        let phase = plan.phase();
        let passes = Passes::of(geometry, phase);
        let used = sizes(geometry, &Load::of(plan));
        let limit = sizes(geometry, &Load::limit(geometry, phase, geometry.limits().max_batch)?);
        let need = |array: usize| Some(Need { array, used: used[array]?, limit: limit[array]? });
        let asks = || hint(FlashAttention.name(), plan, geometry);
        let needs: [Option<Need>; 6] = std::array::from_fn(need);
        let [lens, table, cu, expand_lens, expand_table, expand_cu] = arrays.open(needs, asks)?;
        let cols = |array: usize| match used[array] {
            Some(Extent::Table { cols, .. }) => cols as usize,
            _ => 0,
        };
        cu.slice::<i32>()?.copy_from_slice(plan.qo_indptr());
        let at = At { plan, tables, geometry };
        at.prefix(passes, lens.slice()?, Table::new(SPECS[PAGE_TABLE].name, table, cols(PAGE_TABLE))?)?;
        if passes == Passes::One {
            return Ok(());
        }
        for (q, first) in expand_cu.slice::<i32>()?.iter_mut().enumerate() {
            *first = q as i32; // a plan's queries fit i32
        }
        let width = cols(EXPAND_PAGE_TABLE);
        let table = Table::new(SPECS[EXPAND_PAGE_TABLE].name, expand_table, width)?;
        // Bit counts and short rows: several times as fast with the instructions of the machine at hand.
        let mut out = Expand { lens: expand_lens.slice()?, table };
        wide(
            pulp::Arch::new(),
            #[inline(always)]
            || match (passes, phase) {
                (Passes::Pages { .. }, Phase::Draft { step }) => at.branches(step, &mut out),
                (_, Phase::Draft { .. }) => at.draft(&mut out),
                _ => at.verify(&mut out),
            },
        )?;
        out.table.end(plan.queries())
    }

    fn reads(
        &self,
        plan: &Plan,
        geometry: &Geometry,
        arrays: &Arrays,
        q: usize,
        out: &mut Vec<i32>,
    ) -> Result<Option<()>> {
        let phase = plan.phase();
        let page = geometry.page().get();
        let prefix = Pass { names: [CACHE_SEQLENS, PAGE_TABLE, CU_SEQLENS_Q], arrays, page };
        match Self::expand_page_size(geometry, phase) {
            None => prefix.read(q, true, out)?,
            Some(page) => {
                prefix.read(q, false, out)?;
                let names = [EXPAND_CACHE_SEQLENS, EXPAND_PAGE_TABLE, EXPAND_CU_SEQLENS_Q];
                Pass { names, arrays, page }.read(q, false, out)?;
            }
        }
        Ok(Some(()))
    }

    fn reads_holes(&self, geometry: &Geometry) -> bool {
        geometry.layout() == Layout::Holey
    }
}

/// One call of the kernel, as it reads its arguments.
struct Pass<'a> {
    /// Indices of lengths, table and `cu_seqlens_q`.
    names: [usize; 3],
    arrays: &'a Arrays,
    /// Page size of the kernel's view of the pool.
    page: u32,
}

impl Pass<'_> {
    /// Append the slots that query `q` reads. A causal kernel aligns the last query with the last key.
    fn read(&self, q: usize, causal: bool, out: &mut Vec<i32>) -> Result<()> {
        let [lens, table, cu] = self.names.map(|i| SPECS[i].name);
        let cu: &[i32] = self.arrays.line(cu);
        let row = cu.partition_point(|&first| first as usize <= q);
        // Query q is of row `row - 1`; a padded query behind the last row is of none and reads nothing.
        let (Some(row), Some(&end)) = (row.checked_sub(1), cu.get(row)) else { return Ok(()) };
        let outside = |buffer: &'static str, index: usize, bound: usize| Error::OutOfBounds {
            kernel: "flash_attention",
            buffer,
            request: row as i64,
            step: q as i64,
            index: index as i64,
            bound: bound as i64,
        };
        let all: &[i32] = self.arrays.line(lens);
        let Some(&len) = all.get(row) else { return Err(outside(lens, row, all.len())) };
        let hidden = if causal { end as usize - 1 - q } else { 0 };
        let keys = (len as usize).saturating_sub(hidden);
        let pages: &[i32] = self.arrays.row(table, row);
        let p = self.page as usize;
        for key in 0..keys {
            let Some(&page) = pages.get(key / p) else { return Err(outside(table, key / p, pages.len())) };
            out.push(page * p as i32 + (key % p) as i32);
        }
        Ok(())
    }
}

/// What is lowered, from where.
struct At<'a> {
    plan: &'a Plan,
    tables: &'a Tables<'a>,
    geometry: &'a Geometry,
}

/// The expand pass, one row a query.
struct Expand<'a> {
    lens: &'a mut [i32],
    table: Table<'a>,
}

/// A live request of the plan.
#[derive(Clone, Copy)]
struct Request<'a> {
    index: usize,
    /// Its queries.
    first: usize,
    end: usize,
    /// L.
    prefix: u32,
    /// Its row of the pool's table.
    line: &'a [i32],
}

impl<'a> At<'a> {
    /// Request `i`; `None` if it attends to nothing (padding, the context wall, no queries).
    #[inline(always)]
    fn request(&self, i: usize) -> Option<Request<'a>> {
        let plan = self.plan;
        let (first, end) = (plan.qo_indptr()[i] as usize, plan.qo_indptr()[i + 1] as usize);
        if i >= plan.live_batch() || first == end || plan.out_slots()[first] == 0 {
            return None;
        }
        let line = self.tables.line(plan.rows()[i] as u32).unwrap_or(&[]);
        Some(Request { index: i, first, end, prefix: plan.prefix_lens()[i] as u32, line })
    }

    /// Lengths and pages of the prefix pass, or of the only one.
    fn prefix(&self, passes: Passes, lens: &mut [i32], mut table: Table<'_>) -> Result<()> {
        let page = self.geometry.page();
        for (i, len) in lens.iter_mut().enumerate() {
            let request = self.request(i);
            let mut tokens = 0;
            if let Some(r) = &request {
                let own = match (passes, self.plan.phase()) {
                    (Passes::One, Phase::Draft { step }) => {
                        self.check_lanes(r, step)?;
                        step as u64 + 1
                    }
                    _ => (r.end - r.first) as u64,
                };
                tokens = passes.prefix_tokens(page, r.prefix as u64, r.prefix as u64 + own) as u32;
            }
            *len = tokens as i32; // at most the context and the tree
            let line = request.map_or(&[][..], |r| r.line);
            let n = page.pages_for(tokens) as usize;
            table.put(i, n, |out| copy(out, line, 0, i), || self.whose(i, None))?;
        }
        table.end(lens.len())
    }

    /// Verify: the slots of each node's ancestors, which the plan writes.
    #[inline(always)]
    fn verify(&self, out: &mut Expand<'_>) -> Result<()> {
        let (slots, w) = (self.plan.out_slots(), self.plan.mask_words() as usize);
        self.queries(
            out,
            #[inline(always)]
            |table, r, q| {
                let nodes = &slots[r.first..r.end];
                let mask = &self.plan.mask()[q * w..(q + 1) * w];
                let n = ones(mask);
                table.put(
                    q,
                    n,
                    #[inline(always)]
                    |row: &mut [i32]| {
                        for_bits(mask, row, |node| match nodes.get(node) {
                            Some(&slot) => Ok(slot),
                            None => Err(outside("mask bits (nodes)", r.index, node, nodes.len())),
                        })
                    },
                    || self.whose(r.index, Some(q - r.first)),
                )?;
                Ok(n as u32)
            },
        )
    }

    /// A draft step in the dense layout: bit b of the mask is row position L + b.
    #[inline(always)]
    fn draft(&self, out: &mut Expand<'_>) -> Result<()> {
        let (page, w) = (self.geometry.page(), self.plan.mask_words() as usize);
        let p = page.get();
        self.queries(
            out,
            #[inline(always)]
            |table, r, q| {
                let mask = &self.plan.mask()[q * w..(q + 1) * w];
                let n = ones(mask);
                table.put(
                    q,
                    n,
                    #[inline(always)]
                    |row: &mut [i32]| {
                        for_bits(mask, row, |bit| {
                            let pos = r.prefix + bit as u32;
                            match r.line.get(page.page_of(pos) as usize) {
                                Some(&id) => Ok(id * p as i32 + page.offset(pos) as i32),
                                None => Err(outside("row positions", r.index, pos as usize, r.line.len() * p as usize)),
                            }
                        })
                    },
                    || self.whose(r.index, Some(q - r.first)),
                )?;
                Ok(n as u32)
            },
        )
    }

    /// A draft step in the holey layout: the consecutive pages of each branch, as far as steps have written them.
    #[inline(always)]
    fn branches(&self, step: u32, out: &mut Expand<'_>) -> Result<()> {
        let page = self.geometry.page();
        let live = self.geometry.live_draft_tokens(step);
        self.queries(
            out,
            #[inline(always)]
            |table, r, q| {
                let branch = (q - r.first) as u32;
                if branch == 0 {
                    self.check_lanes(r, step)?;
                }
                let region = self.geometry.region(r.prefix);
                let keys = region.remainder() + step + 1;
                let first = (page.page_of(region.base()) + branch * region.pages_per_branch()) as usize;
                let n = page.pages_for(region.remainder() + live) as usize;
                table.put(
                    q,
                    n,
                    #[inline(always)]
                    |row: &mut [i32]| copy(row, r.line, first, r.index),
                    || self.whose(r.index, Some(branch as usize)),
                )?;
                Ok(keys)
            },
        )
    }

    /// Write the row of each query, and its length: 0 for a query that attends to nothing.
    #[inline(always)]
    fn queries(
        &self,
        out: &mut Expand<'_>,
        mut row: impl FnMut(&mut Table<'_>, &Request<'_>, usize) -> Result<u32>,
    ) -> Result<()> {
        let mut q = 0;
        for i in 0..self.plan.live_batch() {
            let end = self.plan.qo_indptr()[i + 1] as usize;
            match self.request(i) {
                Some(r) => {
                    for q in r.first..r.end {
                        out.lens[q] = row(&mut out.table, &r, q)? as i32;
                    }
                }
                None => out.dead(q..end)?,
            }
            q = end;
        }
        out.dead(q..self.plan.queries())
    }

    /// Refuse a draft mask that is not the lanes': there is no array that could say so.
    fn check_lanes(&self, r: &Request<'_>, step: u32) -> Result<()> {
        let (s, w) = (self.geometry.shape().steps() as usize, self.plan.mask_words() as usize);
        for q in r.first..r.end {
            let mask = &self.plan.mask()[q * w..(q + 1) * w];
            let branch = q - r.first;
            let lane = ones(mask) == step as usize + 1 && bits(mask).eq(branch * s..branch * s + step as usize + 1);
            if !lane {
                return Err(Error::Invalid {
                    what: "draft attention",
                    got: format!("request {}, branch {branch}, step {step}: mask {mask:x?}", r.index),
                    why: "flash_attention reads a lane's own tokens here, all of them; use lanes, or the dense \
                          layout and topk > 1"
                        .into(),
                });
            }
        }
        Ok(())
    }

    /// Whose row it is, and what configuration asks for it.
    #[cold]
    fn whose(&self, request: usize, query: Option<usize>) -> String {
        let query = query.map_or(String::new(), |j| format!(", query {j}"));
        format!("request {request}{query}: {}", hint(FlashAttention.name(), self.plan, self.geometry))
    }
}

impl Expand<'_> {
    /// Queries that attend to nothing.
    fn dead(&mut self, queries: std::ops::Range<usize>) -> Result<()> {
        for q in queries {
            self.lens[q] = 0;
            self.table.put(q, 0, |_| Ok(()), String::new)?;
        }
        Ok(())
    }
}

/// Copy the pages of columns `first..` of a row.
fn copy(out: &mut [i32], line: &[i32], first: usize, request: usize) -> Result<()> {
    match line.get(first..first + out.len()) {
        Some(pages) => out.copy_from_slice(pages),
        None => return Err(outside("page table columns", request, first + out.len() - 1, line.len())),
    }
    Ok(())
}

/// An entry of `row` for each set bit of `mask`, in increasing order; as many as it has.
#[inline(always)]
fn for_bits(mask: &[u64], row: &mut [i32], mut entry: impl FnMut(usize) -> Result<i32>) -> Result<()> {
    let mut out = row.iter_mut();
    for (i, &word) in mask.iter().enumerate() {
        let mut left = word;
        while left != 0 {
            let Some(o) = out.next() else { return Ok(()) };
            *o = entry(i * 64 + left.trailing_zeros() as usize)?;
            left &= left - 1;
        }
    }
    Ok(())
}

/// Set bits of a mask row.
#[inline(always)]
fn ones(mask: &[u64]) -> usize {
    mask.iter().map(|word| word.count_ones() as usize).sum()
}

/// Indices of the set bits of a mask row, in increasing order.
fn bits(mask: &[u64]) -> impl Iterator<Item = usize> {
    mask.iter().enumerate().flat_map(|(i, &word)| {
        let next = |&word: &u64| Some(word & word.wrapping_sub(1));
        std::iter::successors(Some(word), next)
            .take_while(|&word| word != 0)
            .map(move |word| i * 64 + word.trailing_zeros() as usize)
    })
}

#[cold]
fn outside(buffer: &'static str, request: usize, index: usize, bound: usize) -> Error {
    Error::OutOfBounds {
        kernel: "flash_attention",
        buffer,
        request: request as i64,
        step: -1,
        index: index as i64,
        bound: bound as i64,
    }
}
