//! Row positions to slots, checked as they are placed.
//!
//! The pool guarantees two things about a row ([`RowView`], and its own audit): each page is a page of the pool and
//! not the sink, and a column behind the committed prefix holds a page that the row's lease took fresh, with no
//! other owner (a fork or the prefix cache shares committed positions alone). So a write needs its positions
//! compared with the row's allocation once, and a look at the owners of those pages only that hold committed
//! positions: usually one, the tail. A debug planner looks at every page all the same (`plan::audit`).

use crate::error::{Error, Result};
use crate::pool::{RowView, Tables};

/// Who asks, for messages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Where {
    pub(super) kernel: &'static str,
    pub(super) request: usize,
}

impl Where {
    /// Refuse row positions `..end` beyond what the row has allocated.
    #[inline]
    pub(super) fn check_end(self, tables: &Tables<'_>, row: &RowView<'_>, end: u64) -> Result<()> {
        let allocated = row.allocated(tables.page());
        if end > allocated as u64 {
            return Err(self.outside("allocated positions", end as i64 - 1, allocated));
        }
        Ok(())
    }

    #[cold]
    pub(super) fn outside(self, buffer: &'static str, index: i64, bound: u32) -> Error {
        let Where { kernel, request } = self;
        Error::OutOfBounds { kernel, buffer, request: request as i64, step: -1, index, bound: bound as i64 }
    }

    /// Refuse to write positions `first..end` where a page of theirs has another owner.
    #[inline]
    pub(super) fn check_owned(self, tables: &Tables<'_>, row: &RowView<'_>, first: u32, end: u32) -> Result<()> {
        let page = tables.page();
        // Columns from here on are the lease's own.
        let fresh = page.pages_for(row.committed);
        let last = page.pages_for(end).min(fresh);
        for col in page.page_of(first)..last {
            self.check_page(tables, row, col)?;
        }
        Ok(())
    }

    fn check_page(self, tables: &Tables<'_>, row: &RowView<'_>, col: u32) -> Result<()> {
        let Some(&page) = row.pages.get(col as usize) else {
            return Err(self.outside("page table columns", col as i64, row.pages.len() as u32));
        };
        match tables.owners(page as u32) {
            Some(1) => Ok(()),
            None => Err(self.outside("pool pages", page as i64, tables.num_pages())),
            Some(owners) => Err(Error::Invalid {
                what: "write position",
                got: format!(
                    "{}: request {}, positions {}.. on page {page} with {owners} owners",
                    self.kernel,
                    self.request,
                    col as u64 * tables.page().get() as u64
                ),
                why: "only a page with one owner may be written: reserve the positions first (copy on write)".into(),
            }),
        }
    }
}

/// Slots of the row positions `first..first + out.len()`, to be written.
#[inline]
pub(super) fn run(tables: &Tables<'_>, row: &RowView<'_>, at: Where, first: u32, out: &mut [i32]) -> Result<()> {
    if out.is_empty() {
        return Ok(());
    }
    let end = first as u64 + out.len() as u64;
    at.check_end(tables, row, end)?;
    at.check_owned(tables, row, first, end as u32)?;
    let p = tables.page();
    let cols = p.page_of(first) as usize..p.pages_for(end as u32) as usize;
    let Some(pages) = row.pages.get(cols.clone()) else {
        return Err(at.outside("page table columns", cols.end as i64 - 1, row.pages.len() as u32));
    };
    if p.get() == 1 {
        out.copy_from_slice(pages);
        return Ok(());
    }
    let mut off = p.offset(first) as usize;
    let mut rest = out;
    for &page in pages {
        let n = (p.get() as usize - off).min(rest.len());
        let (head, tail) = rest.split_at_mut(n);
        let slot = page * p.get() as i32 + off as i32;
        for (i, o) in head.iter_mut().enumerate() {
            *o = slot + i as i32;
        }
        rest = tail;
        off = 0;
    }
    Ok(())
}

/// Slots of the row positions `first + b * stride`, to be written; `stride >= 1`.
#[inline]
pub(super) fn strided(
    tables: &Tables<'_>,
    row: &RowView<'_>,
    at: Where,
    first: u32,
    stride: u32,
    out: &mut [i32],
) -> Result<()> {
    let Some(last) = out.len().checked_sub(1) else { return Ok(()) };
    let end = first as u64 + last as u64 * stride as u64 + 1;
    at.check_end(tables, row, end)?;
    at.check_owned(tables, row, first, end as u32)?;
    let p = tables.page();
    let mut pos = first;
    for o in out {
        let Some(&page) = row.pages.get(p.page_of(pos) as usize) else {
            return Err(at.outside("page table columns", p.page_of(pos) as i64, row.pages.len() as u32));
        };
        *o = page * p.get() as i32 + p.offset(pos) as i32;
        pos += stride;
    }
    Ok(())
}

/// Slot of one row position, to be read or written (`write`).
#[inline]
pub(super) fn slot(tables: &Tables<'_>, row: &RowView<'_>, at: Where, pos: u32, write: bool) -> Result<i32> {
    at.check_end(tables, row, pos as u64 + 1)?;
    if write {
        at.check_owned(tables, row, pos, pos + 1)?;
    }
    let p = tables.page();
    match row.pages.get(p.page_of(pos) as usize) {
        Some(&page) => Ok(page * p.get() as i32 + p.offset(pos) as i32),
        None => Err(at.outside("page table columns", p.page_of(pos) as i64, row.pages.len() as u32)),
    }
}
