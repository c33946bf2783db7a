//! `flash_attention`: page tables for FlashAttention 3 and 4 (`flash_attn_with_kvcache`), in one pass or two.
//!
//! [`FlashAttention`] says what the arrays hold.

use crate::error::{Error, Result};
use crate::geometry::{Geometry, Layout};
use crate::plan::form::{Step, tables};
use crate::plan::size::{Columns, Count, present};
use crate::plan::{Arrays, DType, DraftMask, Format, Phase, Plan, Size, Spec};

pub(in crate::plan) const CACHE_SEQLENS: usize = 0;
pub(in crate::plan) const PAGE_TABLE: usize = 1;
pub(in crate::plan) const CU_SEQLENS_Q: usize = 2;
pub(in crate::plan) const EXPAND_CACHE_SEQLENS: usize = 3;
pub(in crate::plan) const EXPAND_PAGE_TABLE: usize = 4;
pub(in crate::plan) const EXPAND_CU_SEQLENS_Q: usize = 5;

/// Arrays of the prefix pass (or the only one), then of the expand pass.
pub(in crate::plan) static SPECS: [Spec; 6] = [
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
/// knows of no mask but the causal one. The prefix, which all queries of a request attend to, is one row; the keys of
/// each query's own are a row of the **expand** table, one query a row. The outputs of the two passes are
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
/// query has length 0 and a row of 0. Nothing is stated of the rest of a larger table; specrs clears what it wrote there before.
#[derive(Debug, Clone, Copy, Default)]
pub struct FlashAttention;

impl FlashAttention {
    /// Page size with which the kernel views the pool in the expand pass of `phase`: 1 where its table holds slots, P
    /// where it holds pages; `None` where there is no such pass.
    pub fn expand_page_size(geometry: &Geometry, phase: Phase) -> Option<u32> {
        match tables::passes(Step::new(geometry, phase)) {
            tables::ONE => None,
            tables::SLOTS => Some(1),
            _ => Some(geometry.page().get()),
        }
    }
}

/// Size of each array; `None` where the phase has no such array.
pub(in crate::plan) fn sizes(geometry: &Geometry, phase: Phase) -> &'static [Option<Size>; 6] {
    const fn sizes(expand: bool) -> [Option<Size>; 6] {
        [
            Some(Size::Line(Count::Requests, 0)),
            Some(Size::Table(Count::Requests, Columns::Pages)),
            Some(Size::Line(Count::Requests, 1)),
            Size::Line(Count::Queries, 0).only(expand),
            Size::Table(Count::Queries, Columns::Own).only(expand),
            Size::Line(Count::Queries, 1).only(expand),
        ]
    }
    static ONE: [Option<Size>; 6] = sizes(false);
    static TWO: [Option<Size>; 6] = sizes(true);
    if tables::passes(Step::new(geometry, phase)) == tables::ONE { &ONE } else { &TWO }
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

    fn sizes(&self, geometry: &Geometry, phase: Phase) -> Vec<(usize, Size)> {
        present(sizes(geometry, phase))
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
        // Query q belongs to row `row - 1`; a padded query behind the last row belongs to none and reads nothing.
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
