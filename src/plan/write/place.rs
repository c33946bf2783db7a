//! The rows of a batch, and row positions to slots, checked as they are placed.
//!
//! The pool guarantees two things about a row ([`RowView`](crate::pool::RowView), and its own audit): each page is a
//! page of the pool and not the sink, and the columns from `shared` on have no other owner (forks and the prefix cache
//! share leading columns alone). So a write needs its positions compared with the end of what the row's lease reserved and
//! with the first position that is surely the row's alone; both are looked up once for all plans between two changes of
//! the pool. Only a write before that position looks at the owners of its pages. A debug planner looks at every page
//! always (`plan::audit`).
//!
//! The lengths of a batch are compared with the rows' too ([`Rows::check_lens`]): most often they are what is settled, and
//! one comparison of two arrays tells.

use crate::error::{Error, Result};
use crate::plan::buf::Buf;
use crate::pool::{SeqId, Tables};

/// The rows of a batch, as long as the pool does not change.
#[derive(Debug, Default)]
pub(super) struct Rows {
    /// Pool and state of the pool that the rest was read in.
    stamp: Option<(u32, u64)>,
    /// Times that rows were looked up, so far.
    serial: u64,
    seqs: Vec<SeqId>,
    /// Row of each request.
    pub(super) ids: Vec<i32>,
    /// Version of each row.
    pub(super) versions: Vec<u64>,
    /// Settled length of each row.
    settled: Vec<u32>,
    spans: Vec<RowSpan>,
    /// Epoch in which each row of the table was last seen, to find a row that is in a batch twice.
    seen: Vec<u32>,
    epoch: u32,
}

/// Part of the table that is a request's.
#[derive(Debug, Clone, Copy, Default)]
struct RowSpan {
    /// Index of the row's first column in the whole table.
    start: u32,
    /// Columns that hold pages.
    columns: u32,
    /// Positions from here on may not be written.
    limit: u32,
    /// Positions from here on are on pages that have no other owner; a multiple of P.
    own_from: u32,
    /// Column of the first position that is not committed.
    next: u32,
}

/// The pages of one row, in reach.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowPages<'a> {
    /// Page of each column; those that hold pages.
    pages: &'a [i32],
    /// Positions from here on may not be written; at most those of `pages`.
    limit: u32,
    own_from: u32,
    /// log2 of the page size.
    shift: u32,
}

impl Rows {
    /// Look up the rows of `seqs`. Does nothing if sequences and pool are unchanged since the last call.
    pub(super) fn resolve(&mut self, tables: &Tables<'_>, seqs: &[SeqId]) -> Result<()> {
        let stamp = tables.stamp();
        if self.stamp == Some(stamp) && self.seqs == seqs {
            return Ok(());
        }
        self.stamp = None; // none until all rows are known
        self.begin(tables.max_seqs() as usize);
        self.seqs.clear();
        self.seqs.extend_from_slice(seqs);
        self.ids.resize(seqs.len(), 0);
        self.versions.resize(seqs.len(), 0);
        self.settled.resize(seqs.len(), 0);
        self.spans.resize(seqs.len(), RowSpan::default());
        let Self { ids, versions, settled, spans, seen, epoch, .. } = self;
        let (page, width) = (tables.page(), tables.row_pages());
        let out = ids.iter_mut().zip(versions).zip(settled).zip(spans);
        for (request, (&seq, (((id, version), settled), span))) in seqs.iter().zip(out).enumerate() {
            let row = tables.seq(seq)?;
            match seen.get_mut(row.row as usize) {
                Some(seen) if *seen != *epoch => *seen = *epoch,
                _ => return Err(twice(seq, request)),
            }
            (*id, *version) = (row.row as i32, row.version);
            *settled = tables.settled(row.row).unwrap_or(row.committed);
            *span = RowSpan {
                start: row.row * width, // the pool checked that the table fits int32
                columns: row.pages.len() as u32,
                limit: row.limit,
                own_from: row.shared * page.get(),
                next: page.page_of(row.committed),
            };
        }
        self.serial += 1;
        self.stamp = Some(stamp);
        self.read_ahead(tables);
        Ok(())
    }

    /// Touch the table where each row will be written next. A large pool has pushed these lines out of the near cache;
    /// read here, one request's wait overlaps the others', which it does not among the work of the phases.
    fn read_ahead(&self, tables: &Tables<'_>) {
        const LINE: usize = 16; // entries a cache line
        let table = tables.table();
        let touched = self.spans.iter().fold(0, |sum, s| {
            let (first, end) = ((s.start + s.next) as usize, (s.start + s.columns) as usize);
            let ahead = table.get(first..end.min(first + 4 * LINE)).unwrap_or(&[]);
            ahead.iter().step_by(LINE).fold(sum, |sum, &page| sum ^ page)
        });
        std::hint::black_box(touched);
    }

    /// Tells one look-up from another; never 0 after one.
    pub(super) fn serial(&self) -> u64 {
        self.serial
    }

    /// Check that a pass, or a commit, of `kernel` may be planned behind `lens`: behind the settled tokens or those in
    /// flight, and not before, where it would overwrite committed KV. Only an extend may start there (`again`): it is
    /// the draft model's, which catches up. Returns whether `lens` are the settled lengths.
    #[inline]
    pub(super) fn check_lens(
        &self,
        tables: &Tables<'_>,
        kernel: &'static str,
        lens: &[u32],
        again: bool,
    ) -> Result<bool> {
        // A loop, since most batches are shorter than a call of memcmp is worth.
        let differ = self.settled.iter().zip(lens).fold(0, |bits, (a, b)| bits | (a ^ b));
        if differ == 0 { Ok(true) } else { self.check_each(tables, kernel, lens, again).map(|()| false) }
    }

    fn check_each(&self, tables: &Tables<'_>, kernel: &'static str, lens: &[u32], again: bool) -> Result<()> {
        for (i, ((&row, &settled), &len)) in self.ids.iter().zip(&self.settled).zip(lens).enumerate() {
            if len == settled || (again && len < settled) {
                continue;
            }
            if len < settled || tables.reach(row as u32).is_some_and(|reach| len > reach) {
                return Err(bad_length(kernel, i, len, tables, row as u32));
            }
        }
        Ok(())
    }

    /// The lengths that a plan behind `lens` is made for: what may be settled at most when it runs.
    pub(super) fn write_settled(&self, lens: &[u32], out: &mut Buf<u32>) -> Result<()> {
        let out = out.reset("settled", lens.len(), false)?;
        for ((out, &settled), &len) in out.iter_mut().zip(&self.settled).zip(lens) {
            *out = settled.max(len);
        }
        Ok(())
    }

    /// Note the pass that has been planned: it writes `counts[i]` positions behind the first `lens[i]` of request i. A
    /// pass that writes only settled positions is not in flight: it is the draft model's.
    #[inline]
    pub(super) fn note_pass(&self, tables: &Tables<'_>, lens: &[u32], counts: &[u32]) {
        for (((&row, &settled), &len), &count) in self.ids.iter().zip(&self.settled).zip(lens).zip(counts) {
            if len + count > settled {
                tables.note_pass(row as u32, len, len + count);
            }
        }
    }

    fn begin(&mut self, rows: usize) {
        if self.seen.len() < rows {
            self.seen.resize(rows, 0);
        }
        self.epoch = self.epoch.wrapping_add(1);
        if self.epoch == 0 {
            self.seen.fill(0);
            self.epoch = 1;
        }
    }

    /// The rows, in the order of the batch.
    #[inline]
    pub(super) fn each<'a>(&'a self, tables: &Tables<'a>) -> impl Iterator<Item = RowPages<'a>> {
        let (table, shift) = (tables.table(), tables.page().get().trailing_zeros());
        self.spans.iter().map(move |s| {
            let pages = table.get(s.start as usize..(s.start + s.columns) as usize).unwrap_or(&[]);
            RowPages { pages, limit: s.limit, own_from: s.own_from, shift }
        })
    }
}

#[cold]
fn bad_length(kernel: &'static str, request: usize, len: u32, tables: &Tables<'_>, row: u32) -> Error {
    let committed = tables.row(row).map_or(0, |r| r.committed);
    let (settled, reach) = (tables.settled(row).unwrap_or(0), tables.reach(row).unwrap_or(0));
    let why = if len >= settled {
        format!("{committed} tokens are committed and {reach} with those in flight: it would read what nobody wrote")
    } else if settled > committed {
        format!("its commit to {settled} tokens has been planned: commit or advance the lease first")
    } else {
        format!("{committed} tokens are committed: it would overwrite them")
    };
    Error::Invalid { what: "length", got: format!("{kernel}: request {request}, {len} tokens"), why }
}

#[cold]
fn twice(seq: SeqId, request: usize) -> Error {
    Error::Invalid {
        what: "batch",
        got: format!("sequence {seq} again at request {request}"),
        why: "a sequence may be in a batch once: its writes would collide".into(),
    }
}

/// The caller of a write, for messages.
#[derive(Debug, Clone, Copy)]
pub(super) struct WriteSite<'a> {
    pub(super) kernel: &'static str,
    pub(super) request: usize,
    pub(super) tables: &'a Tables<'a>,
}

impl WriteSite<'_> {
    #[cold]
    pub(super) fn outside(self, buffer: &'static str, index: i64, bound: u32) -> Error {
        let WriteSite { kernel, request, .. } = self;
        Error::OutOfBounds { kernel, buffer, request: request as i64, step: -1, index, bound: bound as i64 }
    }
}

impl RowPages<'_> {
    /// Refuse row positions `..end` beyond what the row's lease has reserved.
    #[inline]
    pub(super) fn check_end(&self, at: WriteSite<'_>, end: u64) -> Result<()> {
        if end > u64::from(self.limit) {
            Err(at.outside("allocated positions", end as i64 - 1, self.limit))
        } else {
            Ok(())
        }
    }

    /// Refuse to write the reserved positions `first..end` where one of their pages has another owner.
    #[inline]
    fn check_owned(&self, at: WriteSite<'_>, first: u32, end: u32) -> Result<()> {
        if first >= self.own_from || first >= end { Ok(()) } else { self.check_pages(at, first, end) }
    }

    /// [`Self::check_owned`] page by page: writes among the committed positions, or to a shared tail.
    #[cold]
    fn check_pages(&self, at: WriteSite<'_>, first: u32, end: u32) -> Result<()> {
        let cols = (first >> self.shift) as usize..=((end - 1) >> self.shift) as usize;
        for (col, &page) in cols.clone().zip(self.pages.get(cols).unwrap_or(&[])) {
            match at.tables.owners(page as u32) {
                Some(1) => {}
                None => return Err(at.outside("pool pages", page as i64, at.tables.num_pages())),
                Some(owners) => {
                    let (kernel, request, pos) = (at.kernel, at.request, (col as u64) << self.shift);
                    return Err(Error::Invalid {
                        what: "write position",
                        got: format!(
                            "{kernel}: request {request}, positions {pos}.. on page {page} with {owners} owners"
                        ),
                        why: "only a page with one owner may be written: reserve the positions first (copy on write)"
                            .into(),
                    });
                }
            }
        }
        Ok(())
    }

    /// Slots of the row positions `first..first + out.len()`, to be written.
    #[inline(always)]
    pub(super) fn run(&self, at: WriteSite<'_>, first: u32, out: &mut [i32]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        let end = first as u64 + out.len() as u64;
        self.check_end(at, end)?;
        self.check_owned(at, first, end as u32)?;
        let cols = (first >> self.shift) as usize..((end - 1) >> self.shift) as usize + 1;
        let Some(pages) = self.pages.get(cols.clone()) else {
            return Err(at.outside("page table columns", cols.end as i64 - 1, self.pages.len() as u32));
        };
        if self.shift == 0 {
            out.copy_from_slice(pages);
            return Ok(());
        }
        fill_slots(pages, first & ((1 << self.shift) - 1), self.shift, out);
        Ok(())
    }

    /// Slot of one row position, to be read.
    #[inline]
    pub(super) fn read(&self, at: WriteSite<'_>, pos: u32) -> Result<i32> {
        self.check_end(at, pos as u64 + 1)?;
        self.slot_at(at, pos)
    }

    /// Slot of one row position, to be written.
    #[inline]
    pub(super) fn write(&self, at: WriteSite<'_>, pos: u32) -> Result<i32> {
        self.check_end(at, pos as u64 + 1)?;
        self.check_owned(at, pos, pos + 1)?;
        self.slot_at(at, pos)
    }

    #[inline]
    fn slot_at(&self, at: WriteSite<'_>, pos: u32) -> Result<i32> {
        match self.pages.get((pos >> self.shift) as usize) {
            Some(&page) => Ok((page << self.shift) | (pos & ((1 << self.shift) - 1)) as i32),
            None => Err(at.outside("page table columns", (pos >> self.shift) as i64, self.pages.len() as u32)),
        }
    }

    /// Refuse to reorder positions `first..end` unless they are the row's alone.
    pub(super) fn check_write(&self, at: WriteSite<'_>, first: u32, end: u32) -> Result<()> {
        self.check_end(at, end as u64)?;
        self.check_owned(at, first, end)
    }
}

/// Slots of the run that starts `off` slots into `pages` and ends in the last of them; P > 1.
///
/// A run's start within its page is as good as random, so the CPU would mispredict both ends of loops that end at page
/// borders. Here every loop is as long as the run or the page.
#[inline(always)]
fn fill_slots(pages: &[i32], off: u32, shift: u32, out: &mut [i32]) {
    let (size, border) = (1usize << shift, (1 << shift) - off as i32);
    let count = |out: &mut [i32], from: i32| out.iter_mut().zip(from..).for_each(|(o, slot)| *o = slot);
    match *pages {
        [] => {}
        [a] => count(out, (a << shift) + off as i32),
        [a, b] => {
            let (a, b) = ((a << shift) + off as i32, (b << shift) - border);
            for (o, i) in out.iter_mut().zip(0i32..) {
                *o = if i < border { a } else { b } + i;
            }
        }
        [a, ref whole @ .., z] => {
            // Write a page's worth at either end, then the whole pages over the excess of that.
            let n = out.len();
            count(&mut out[..size], (a << shift) + off as i32);
            let used = n as i32 - border - ((whole.len() as i32) << shift); // slots of the last page
            count(&mut out[n - size..], (z << shift) + used - size as i32);
            for (out, &page) in out[border as usize..].chunks_exact_mut(size).zip(whole) {
                count(out, page << shift);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every start in a page, every length that all three ways of writing take, against the definition.
    #[test]
    fn runs_of_slots_in_every_form() {
        let pages: Vec<i32> = (0..40).map(|i| (i * 37 + 11) % 101 + 1).collect();
        for shift in [1, 2, 4, 6, 8] {
            let p = 1usize << shift;
            for off in 0..p {
                for n in [1, 2, 3, 5, 8, 17, 48, 64, 100, 255, 256, 257, 300] {
                    let used = &pages[..((off + n - 1) / p + 1).min(40)];
                    let n = n.min(used.len() * p - off);
                    let mut out = vec![-1; n];
                    fill_slots(used, off as u32, shift, &mut out);
                    let want = |j: usize| used[(off + j) / p] * p as i32 + ((off + j) % p) as i32;
                    assert_eq!(out, (0..n).map(want).collect::<Vec<_>>(), "P={p} off={off} n={n}");
                }
            }
        }
    }

    #[test]
    fn an_epoch_that_wraps_forgets_no_row() {
        let mut rows = Rows { epoch: u32::MAX, seen: vec![u32::MAX, 1, 0], ..Rows::default() };
        rows.begin(3);
        assert_eq!((rows.epoch, &*rows.seen), (1, &[0, 0, 0][..]));
    }
}
