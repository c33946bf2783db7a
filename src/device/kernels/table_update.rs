//! The launch of `cuda/table_update.cu`: changed columns of the page table, all rows in one kernel.

use std::sync::Arc;

use crate::device::context::Context;
use crate::device::driver::{Function, Module, Stream};
use crate::device::images;
use crate::device::params::table::{PageTable, TableUpdateParams};
use crate::device::view::{DeviceSlice, device_mismatch};
use crate::error::{Error, Result, in_range};
use crate::overlap::{Operand, disjoint};

/// Threads of a block; `__launch_bounds__` of the kernel.
const BLOCK: u32 = 128;
/// Words of a change's head in the staging slot: row, first column, columns, index of its first page id.
pub(in crate::device) const CHANGE_WORDS: usize = 4;

/// The kernel of `cuda/table_update.cu` on one device.
#[derive(Debug)]
pub struct TableUpdate {
    function: Function,
    _module: Module,
    context: Arc<Context>,
}

impl TableUpdate {
    /// Load it into `context`, which is current.
    pub(super) fn load(context: Arc<Context>) -> Result<Self> {
        let module = Module::load(images::select("table_update", context.capability())?)?;
        Ok(Self { function: module.function("table_update")?, _module: module, context })
    }

    /// Store `changes` changes into `table`, `rows` of `width` columns. `staged` begins with the changes' heads (row,
    /// first column, columns, index of the first page id) and holds their page ids. It may be pinned host memory under its
    /// device address, which is slow.
    ///
    /// A change whose row, columns or ids are not where they may be is left out whole, a page id outside `0..num_pages`
    /// alone; either is recorded for [`Device::check`](crate::device::Device::check).
    pub fn launch(
        &self,
        stream: Stream,
        table: &DeviceSlice<i32>,
        [rows, width]: [u32; 2],
        num_pages: u32,
        staged: &DeviceSlice<i32>,
        changes: u32,
    ) -> Result<()> {
        let context = &self.context;
        for (operand, on) in [("table", table.device()), ("staged", staged.device())] {
            if on != context.ordinal() {
                return Err(device_mismatch(operand, on, context.ordinal(), "the kernel is launched"));
            }
        }
        for (what, got) in [("table rows", rows), ("table columns", width), ("num_pages", num_pages)] {
            in_range(what, got, 0, i32::MAX.into())?;
        }
        in_range("staged words", staged.len() as u64, 0, i32::MAX.into())?;
        let capacity = |what, need: u64, have: usize, hint: String| {
            if need <= have as u64 { Ok(()) } else { Err(Error::Capacity { what, need, have: have as u64, hint }) }
        };
        capacity("table", u64::from(rows) * u64::from(width), table.len(), format!("{rows} rows of {width} columns"))?;
        let heads = u64::from(changes) * CHANGE_WORDS as u64;
        capacity("staged", heads, staged.len(), format!("heads of {changes} changes"))?;
        disjoint(&[&[table.span()]], &[&[staged.span()]])?;
        if changes == 0 {
            return Ok(());
        }
        let report = context.report(stream)?;
        let params = TableUpdateParams {
            table: PageTable {
                pages: table.address(),
                rows: rows as i32,
                columns: width as i32,
                num_pages: num_pages as i32,
                reserved: 0,
            },
            staged: staged.address(),
            report,
            staged_words: staged.len() as i32,
            reserved: 0,
        };
        let _current = context.enter()?;
        // SAFETY: the device's module is loaded for the process and its context is current; capacities were checked, and
        // the views' makers promised their memory.
        unsafe { self.function.launch((changes, 1, 1), BLOCK, stream, &params) }
    }
}
