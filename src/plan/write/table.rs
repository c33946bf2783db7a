//! Rows of page tables, in memory that is written whole or that keeps what earlier rounds left.
//!
//! The columns behind a row's entries hold the sink. Each write states every cell of the plan's own table, as many rows as
//! the padded batch and as many columns as its longest row, whatever stands there: between two writes the memory is its
//! owner's, and anyone may have written to it.
//!
//! A static table is as wide as a whole context and has rows for the largest batch; clearing all of it in every round would
//! write megabytes. A kernel goes by the lengths and reads nothing beyond the plan's own table. There each row remembers how
//! far it was written ([`View::marks`]), so that what an earlier, larger plan left is cleared.

use crate::error::{Error, Result};
use crate::plan::arrays::View;

/// An opened table of int32, to write row by row: each row in use, then [`Table::end`].
#[derive(Debug)]
pub(super) struct Table<'a> {
    name: &'static str,
    /// The rows in use; in fixed memory all rows of the capacity.
    cells: &'a mut [i32],
    /// Columns in use, at most `stride`.
    cols: usize,
    /// Distance of two rows.
    stride: usize,
    /// See [`View::marks`].
    marks: &'a mut [u32],
}

impl<'a> Table<'a> {
    /// The table `name`, of `cols` used columns.
    pub(super) fn new(name: &'static str, mut view: View<'a>, cols: usize) -> Result<Self> {
        let (stride, marks) = (view.width, std::mem::take(&mut view.marks));
        if stride < cols {
            let (got, want) = (format!("rows of {stride}"), format!("a table of {cols} columns"));
            return Err(Error::Mismatch { operand: name, got, want });
        }
        Ok(Self { name, cells: view.slice()?, cols, stride, marks })
    }

    /// Write row `row`: `n` entries by `fill`, and the sink behind them. `hint` says whose row it is.
    #[inline(always)]
    pub(super) fn put(
        &mut self,
        row: usize,
        n: usize,
        fill: impl FnOnce(&mut [i32]) -> Result<()>,
        hint: impl FnOnce() -> String,
    ) -> Result<()> {
        if n > self.cols {
            return Err(self.too_wide(n, hint()));
        }
        let (entries, behind) = self.row(row, self.cols)?.split_at_mut(n);
        let filled = fill(entries);
        behind.fill(0);
        // The mark is set where `fill` stops half way, too: it may have written any of its entries.
        if let Some(mark) = self.marks.get_mut(row) {
            *mark = n as u32;
        }
        filled
    }

    /// Clear what earlier writes left in the rows from `rows` on.
    pub(super) fn end(mut self, rows: usize) -> Result<()> {
        for row in rows..self.marks.len() {
            if self.marks[row] != 0 {
                self.row(row, 0)?.fill(0);
                self.marks[row] = 0;
            }
        }
        Ok(())
    }

    /// The columns of a row that are to be written: the first `cols`, and behind them what an earlier write left.
    #[inline(always)]
    fn row(&mut self, row: usize, cols: usize) -> Result<&mut [i32]> {
        let len = self.marks.get(row).map_or(cols, |&stale| cols.max(stale as usize));
        let rows = self.marks.len();
        let first = row * self.stride;
        match self.cells.get_mut(first..first + len) {
            Some(cells) => Ok(cells),
            None => Err(outside(self.name, row, rows)),
        }
    }

    #[cold]
    fn too_wide(&self, n: usize, hint: String) -> Error {
        let (need, have) = (n as u64, self.cols as u64);
        Error::Capacity { what: self.name, need, have, hint: format!("columns of {hint}") }
    }
}

#[cold]
fn outside(buffer: &'static str, row: usize, rows: usize) -> Error {
    Error::OutOfBounds {
        kernel: "flash_attention",
        buffer,
        request: -1,
        step: -1,
        index: row as i64,
        bound: rows as i64,
    }
}
