//! The page tables of [`FlashAttention`], written.

use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::plan::form::{self, Step, tables};
use crate::plan::formats::flash_attention::{EXPAND_PAGE_TABLE, PAGE_TABLE, SPECS, sizes};
use crate::plan::write::lower::{Lower, hint, needs};
use crate::plan::write::table::Table;
use crate::plan::{Arrays, Extent, FlashAttention, Format, Phase, Plan};
use crate::pool::Tables;
use crate::simd::dispatch;

impl Lower for FlashAttention {
    fn lower(&self, plan: &Plan, tables: &Tables<'_>, geometry: &Geometry, arrays: &mut Arrays) -> Result<()> {
        let phase = plan.phase();
        let step = Step::new(geometry, phase);
        let asks = || hint(FlashAttention.name(), plan, geometry);
        let needs = needs(plan, geometry, &SPECS, sizes(geometry, phase))?;
        let [lens, table, cu, expand_lens, expand_table, expand_cu] = arrays.open(needs, asks)?;
        let cols = |array: usize| match needs[array].map(|n| n.used) {
            Some(Extent::Table { cols, .. }) => cols as usize,
            _ => 0,
        };
        cu.slice::<i32>()?.copy_from_slice(plan.qo_indptr());
        let at = Lowering { plan, tables, geometry, step };
        at.prefix(lens.slice()?, Table::new(SPECS[PAGE_TABLE].name, table, cols(PAGE_TABLE))?)?;
        if tables::passes(step) == tables::ONE {
            return Ok(());
        }
        for (q, first) in expand_cu.slice::<i32>()?.iter_mut().enumerate() {
            *first = q as i32; // a plan's queries fit i32
        }
        let width = cols(EXPAND_PAGE_TABLE);
        let table = Table::new(SPECS[EXPAND_PAGE_TABLE].name, expand_table, width)?;
        // Bit counts and short rows: several times as fast with the instructions of the machine at hand.
        let mut out = Expand { lens: expand_lens.slice()?, table };
        dispatch(
            #[inline(always)]
            || match phase {
                Phase::Draft { step: t } if tables::passes(step) == tables::PAGES => at.branches(t, &mut out),
                Phase::Draft { .. } => at.draft(&mut out),
                _ => at.verify(&mut out),
            },
        )?;
        out.table.end(plan.queries())
    }
}

/// Inputs and outputs of a lowering.
struct Lowering<'a> {
    plan: &'a Plan,
    tables: &'a Tables<'a>,
    geometry: &'a Geometry,
    step: Step,
}

/// The expand pass, one row a query.
struct Expand<'a> {
    lens: &'a mut [i32],
    table: Table<'a>,
}

/// A live request of the plan.
#[derive(Clone, Copy)]
struct LiveRequest<'a> {
    index: usize,
    /// First of the request's queries.
    first: usize,
    end: usize,
    /// L.
    prefix: u32,
    /// Slots that its queries write.
    nodes: &'a [i32],
    /// The request's row of the pool's table.
    line: &'a [i32],
}

impl<'a> Lowering<'a> {
    /// Request `i`; `None` if it attends to nothing (padding, the context wall, no queries).
    #[inline(always)]
    fn request(&self, i: usize) -> Option<LiveRequest<'a>> {
        let plan = self.plan;
        let (first, end) = (plan.qo_indptr()[i] as usize, plan.qo_indptr()[i + 1] as usize);
        if i >= plan.live_batch() || first == end || plan.out_slots()[first] == 0 {
            return None;
        }
        let line = self.tables.line(plan.rows()[i] as u32).unwrap_or(&[]);
        Some(LiveRequest {
            index: i,
            first,
            end,
            prefix: plan.prefix_lens()[i] as u32,
            nodes: &plan.out_slots()[first..end],
            line,
        })
    }

    /// Lengths and pages of the prefix pass, or of the only one.
    fn prefix(&self, lens: &mut [i32], mut table: Table<'_>) -> Result<()> {
        let page = self.geometry.page();
        for (i, len) in lens.iter_mut().enumerate() {
            let request = self.request(i);
            let mut tokens = 0;
            if let Some(r) = &request {
                if let (tables::ONE, Phase::Draft { step }) = (tables::passes(self.step), self.plan.phase()) {
                    self.check_lanes(r, step)?;
                }
                tokens = tables::len_at(self.step, r.prefix, (r.end - r.first) as u32);
            }
            *len = tokens as i32; // at most the context and the tree
            let line = request.map_or(&[][..], |r| r.line);
            let n = page.pages_for(tokens) as usize;
            table.put(i, n, |out| copy(out, line, 0, i), || self.whose(i, None))?;
        }
        table.end(lens.len())
    }

    /// A row of slots for each query: what `slot` finds for each set bit of its mask.
    #[inline(always)]
    fn slots(&self, out: &mut Expand<'_>, slot: impl Fn(&LiveRequest<'_>, usize) -> Result<i32>) -> Result<()> {
        let w = self.plan.mask_words() as usize;
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
                    |row: &mut [i32]| for_bits(mask, row, |bit| slot(r, bit)),
                    || self.whose(r.index, Some(q - r.first)),
                )?;
                Ok(n as u32)
            },
        )
    }

    /// Verify: the slots of each node's ancestors, which the plan writes.
    #[inline(always)]
    fn verify(&self, out: &mut Expand<'_>) -> Result<()> {
        self.slots(
            out,
            #[inline(always)]
            |r, node| match r.nodes.get(node) {
                Some(&slot) => Ok(slot),
                None => Err(outside("mask bits (nodes)", r.index, node, r.nodes.len())),
            },
        )
    }

    /// A draft step in the dense layout: bit b of the mask is row position L + b.
    #[inline(always)]
    fn draft(&self, out: &mut Expand<'_>) -> Result<()> {
        self.slots(
            out,
            #[inline(always)]
            |r, bit| {
                let pos = r.prefix + bit as u32;
                match r.line.get(form::column(self.step, pos) as usize) {
                    Some(&page) => Ok(form::slot(self.step, page, pos)),
                    None => Err(outside("row positions", r.index, pos as usize, r.line.len() << self.step.shift)),
                }
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
        mut row: impl FnMut(&mut Table<'_>, &LiveRequest<'_>, usize) -> Result<u32>,
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

    /// Refuse a draft mask that is not the lanes': no array of the format could express it.
    fn check_lanes(&self, r: &LiveRequest<'_>, step: u32) -> Result<()> {
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

    /// Owner of a row, and the configuration that asks for it.
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
