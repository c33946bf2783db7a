//! Slot lists, which `flashinfer` and `triton` share. A kernel that reads KV by slot is given, for each list, the slots
//! of its keys one after the other (`kv_indices`) and where each list starts (`kv_indptr`).
//!
//! A list is never computed twice: the prefix of a request is expanded from its pages once, into the list of its first
//! branch, and the other branches copy it, so that the time of a draft step is that of writing its lists.
//!
//! The functions write slices that are exactly as long as what is written; each checks that in passing, so that a size
//! that disagrees with its writer is an error and never a gap.

use crate::error::{Error, Result};
use crate::geometry::{DraftRegion, Geometry};
use crate::plan::formats::index::Index;
use crate::plan::{Phase, Plan, View};
use crate::pool::Tables;
use crate::simd::dispatch;

/// The pages of one request.
#[derive(Debug, Clone, Copy)]
struct ListRow<'a> {
    kernel: &'static str,
    request: usize,
    pages: &'a [i32],
    /// log2 of the page size.
    shift: u32,
}

impl<'a> ListRow<'a> {
    /// The row of live request `i`, whatever its pages: an audited plan's are checked.
    #[inline(always)]
    fn of(plan: &Plan, tables: &Tables<'a>, i: usize) -> Self {
        let pages = u32::try_from(plan.rows()[i]).ok().and_then(|row| tables.line(row)).unwrap_or(&[]);
        Self { kernel: plan.phase().name(), request: i, pages, shift: tables.page().get().trailing_zeros() }
    }

    #[cold]
    fn outside(&self, pos: u64) -> Error {
        Error::OutOfBounds {
            kernel: self.kernel,
            buffer: "page table row",
            request: self.request as i64,
            step: -1,
            index: pos as i64,
            bound: (self.pages.len() as i64) << self.shift,
        }
    }

    #[inline(always)]
    fn slot(&self, pos: u32) -> Result<i32> {
        match self.pages.get((pos >> self.shift) as usize) {
            Some(&page) => Ok((page << self.shift) | (pos & ((1 << self.shift) - 1)) as i32),
            None => Err(self.outside(pos as u64)),
        }
    }

    /// Slots of the row positions `0..out.len()`.
    #[inline(always)]
    fn expand<I: Index>(&self, out: &mut [I]) -> Result<()> {
        let columns = out.len().div_ceil(1 << self.shift);
        let Some(pages) = self.pages.get(..columns) else {
            return Err(self.outside(out.len() as u64 - 1));
        };
        match self.shift {
            0 => {
                for (o, &page) in out.iter_mut().zip(pages) {
                    *o = I::of_slot(page);
                }
            }
            1 => expand_pages::<I, 2>(pages, out),
            2 => expand_pages::<I, 4>(pages, out),
            3 => expand_pages::<I, 8>(pages, out),
            4 => expand_pages::<I, 16>(pages, out),
            5 => expand_pages::<I, 32>(pages, out),
            shift => {
                for (out, &page) in out.chunks_mut(1 << shift).zip(pages) {
                    count(page << shift, out);
                }
            }
        }
        Ok(())
    }
}

/// Pages of `P` slots, the last one perhaps in part.
#[inline(always)]
fn expand_pages<I: Index, const P: usize>(pages: &[i32], out: &mut [I]) {
    let (whole, rest) = out.as_chunks_mut::<P>();
    for (out, &page) in whole.iter_mut().zip(pages) {
        count(page * P as i32, out);
    }
    if let Some(&page) = pages.get(whole.len()) {
        count(page * P as i32, rest);
    }
}

/// `first, first + 1, ...`
#[inline(always)]
fn count<I: Index>(first: i32, out: &mut [I]) {
    for (o, j) in out.iter_mut().zip(0i32..) {
        *o = I::of_slot(first + j);
    }
}

/// Take the first `n` elements off `rest`.
#[inline(always)]
pub(super) fn take<'a, T>(what: &'static str, rest: &mut &'a mut [T], n: usize) -> Result<&'a mut [T]> {
    match std::mem::take(rest).split_at_mut_checked(n) {
        Some((taken, left)) => {
            *rest = left;
            Ok(taken)
        }
        None => Err(disagree(what, n)),
    }
}

/// Everything was written.
pub(super) fn finish<T>(what: &'static str, rest: &[T]) -> Result<()> {
    if rest.is_empty() { Ok(()) } else { Err(disagree(what, rest.len())) }
}

#[cold]
pub(super) fn disagree(what: &'static str, n: usize) -> Error {
    Error::Mismatch {
        operand: what,
        got: format!("a size that is off by at least {n}"),
        want: "the size that the plan's load states".into(),
    }
}

/// Writes where each list starts: the first at 0, and behind the live lists the end, once for each dead one.
pub(super) struct Starts<'a, P>(std::slice::IterMut<'a, P>);

impl<'a, P: Index> Starts<'a, P> {
    #[inline(always)]
    pub(super) fn new(indptr: &'a mut [P]) -> Self {
        let mut all = Self(indptr.iter_mut());
        all.push(0);
        all
    }

    /// A list ends at `end`, which the caller has compared with the type's range.
    #[inline(always)]
    pub(super) fn push(&mut self, end: u64) {
        if let Some(start) = self.0.next() {
            *start = P::of_sum(end);
        }
    }

    /// The dead lists.
    #[inline(always)]
    pub(super) fn end(self, end: u64) {
        self.0.for_each(|start| *start = P::of_sum(end));
    }
}

/// The lists of a step, whose starts are int32, and the starts of each request's queries where lists are of requests.
pub(super) fn lists<I: Index>(
    plan: &Plan,
    tables: &Tables<'_>,
    geometry: &Geometry,
    keys: RequestList,
    [indptr, indices, starts]: [View<'_>; 3],
) -> Result<()> {
    let (indptr, indices) = (indptr.slice::<i32>()?, indices.slice::<I>()?);
    match plan.phase() {
        Phase::Draft { .. } | Phase::Decode => dispatch(
            #[inline(always)]
            || lists_of_queries(plan, tables, geometry, indptr, indices),
        ),
        Phase::Extend | Phase::Verify => {
            dispatch(
                #[inline(always)]
                || lists_of_requests(plan, tables, keys, indptr, indices),
            )?;
            query_starts(plan, starts.slice::<I>()?)
        }
    }
}

/// One list a query: in a draft step the prefix and the query's ancestors, itself the last; in a decode step the prefix
/// and the token. Queries that attend to nothing, padded ones included, have empty lists.
#[inline(always)]
fn lists_of_queries<I: Index>(
    plan: &Plan,
    tables: &Tables<'_>,
    geometry: &Geometry,
    indptr: &mut [i32],
    indices: &mut [I],
) -> Result<()> {
    const INDICES: &str = "kv_indices";
    let w = plan.mask_words() as usize;
    let total = indices.len();
    let mut rest = indices;
    let mut starts = Starts::new(indptr);
    for i in 0..plan.live_batch() {
        let row = ListRow::of(plan, tables, i);
        let (first, end) = (plan.qo_indptr()[i] as usize, plan.qo_indptr()[i + 1] as usize);
        let len = plan.prefix_lens()[i] as u32;
        let region = geometry.draft_region(len)?;
        // The prefix as the request's first list has it.
        let mut prefix: &[I] = &[];
        for q in first..end {
            let mask = &plan.mask()[q * w..(q + 1) * w];
            let own = if w == 0 { (q - first) as u32 + 1 } else { mask.iter().map(|m| m.count_ones()).sum() };
            if own > 0 {
                let list = take(INDICES, &mut rest, (len + own) as usize)?;
                let (head, tail) = list.split_at_mut(len as usize);
                if prefix.len() == head.len() {
                    head.copy_from_slice(prefix);
                } else {
                    row.expand(head)?;
                }
                prefix = head;
                if w == 0 {
                    for (o, pos) in tail.iter_mut().zip(len..) {
                        *o = I::of_slot(row.slot(pos)?);
                    }
                } else {
                    ancestors(&row, &region, geometry.shape().steps(), mask, tail)?;
                }
            }
            starts.push((total - rest.len()) as u64);
        }
    }
    starts.end((total - rest.len()) as u64);
    finish(INDICES, rest)
}

/// Slots of the draft slots that `mask` names, in order; as many as it has bits.
#[inline(always)]
fn ancestors<I: Index>(row: &ListRow<'_>, region: &DraftRegion, steps: u32, mask: &[u64], out: &mut [I]) -> Result<()> {
    let (first, stride) = (region.pos(0, 0)?, region.stride());
    let mut n = 0;
    for (word, base) in mask.iter().zip((0u32..).step_by(64)) {
        let mut bits = *word;
        while bits != 0 {
            let bit = base + bits.trailing_zeros();
            bits &= bits - 1;
            let pos = first + if stride == steps { bit } else { bit / steps * stride + bit % steps };
            let slot = row.slot(pos)?;
            if let Some(o) = out.get_mut(n) {
                *o = I::of_slot(slot);
            }
            n += 1;
        }
    }
    Ok(())
}

/// Tokens of a request that its list names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestList {
    /// The prefix.
    Prefix,
    /// The prefix and the request's own tokens behind it.
    All,
}

/// One list a request; it is empty for a request without queries, such as a padded one.
#[inline(always)]
fn lists_of_requests<I: Index>(
    plan: &Plan,
    tables: &Tables<'_>,
    span: RequestList,
    indptr: &mut [i32],
    indices: &mut [I],
) -> Result<()> {
    const INDICES: &str = "kv_indices";
    let total = indices.len();
    let mut rest = indices;
    let mut starts = Starts::new(indptr);
    for i in 0..plan.live_batch() {
        let n = (plan.qo_indptr()[i + 1] - plan.qo_indptr()[i]) as usize;
        let len = match (n, span) {
            (0, _) => 0,
            (_, RequestList::Prefix) => plan.prefix_lens()[i] as usize,
            (n, RequestList::All) => plan.prefix_lens()[i] as usize + n,
        };
        ListRow::of(plan, tables, i).expand(take(INDICES, &mut rest, len)?)?;
        starts.push((total - rest.len()) as u64);
    }
    starts.end((total - rest.len()) as u64);
    finish(INDICES, rest)
}

/// Starts of each request's queries.
fn query_starts<I: Index>(plan: &Plan, out: &mut [I]) -> Result<()> {
    if out.len() != plan.qo_indptr().len() {
        return Err(disagree("qo_indptr", out.len().abs_diff(plan.qo_indptr().len())));
    }
    for (o, &q) in out.iter_mut().zip(plan.qo_indptr()) {
        *o = I::of_slot(q);
    }
    Ok(())
}
