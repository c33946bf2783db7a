//! The launches of `cuda/plan.cu`, `cuda/plan_lists.cu` and `cuda/plan_tables.cu`.
//! [`device::plan`](crate::device::plan), which knows geometries and formats, checks their operands.

use std::sync::Arc;

use crate::device::context::Context;
use crate::device::driver::{Function, Module, Stream};
use crate::device::images;
use crate::device::params::plan::{PlanListParams, PlanParams, PlanTableParams, TailCopyParams};
use crate::error::Result;

/// Largest `gridDim.y`; kernels stride over more requests than that.
const MAX_GRID_Y: u32 = 65_535;
/// CTAs of a fill, for each multiprocessor.
const FILLS_PER_MULTIPROCESSOR: u32 = 8;

/// The kernels that plan, on one device. Functions are valid while the modules are loaded.
#[derive(Debug)]
pub struct PlanKernels {
    native: Function,
    tail_copies: Function,
    starts: Function,
    fill: Function,
    tables: Function,
    _modules: [Module; 3],
    context: Arc<Context>,
}

impl PlanKernels {
    /// Load them into `context`, which is current.
    pub(super) fn load(context: Arc<Context>) -> Result<Self> {
        let load = |name| Module::load(images::select(name, context.capability())?);
        let (plan, lists, tables) = (load("plan")?, load("plan_lists")?, load("plan_tables")?);
        Ok(Self {
            native: plan.function("plan_native")?,
            tail_copies: plan.function("plan_tail_copies")?,
            starts: lists.function("plan_starts")?,
            fill: lists.function("plan_fill")?,
            tables: tables.function("plan_tables")?,
            _modules: [plan, lists, tables],
            context,
        })
    }

    /// Where the kernels are loaded.
    pub(in crate::device) fn context(&self) -> &Context {
        &self.context
    }

    /// A CTA a request; one where there is none, for the dead queries.
    ///
    /// Addresses and sizes of `params` come from views that were checked together.
    pub(in crate::device) fn launch_native(&self, stream: Stream, params: &PlanParams) -> Result<()> {
        self.launch(self.native, (params.plan.batch.max(1) as u32, 1, 1), 256, stream, params)
    }

    /// As [`Self::launch_native`].
    pub(in crate::device) fn launch_tail_copies(&self, stream: Stream, params: &TailCopyParams) -> Result<()> {
        self.launch(self.tail_copies, (params.batch.max(1) as u32, 1, 1), 256, stream, params)
    }

    /// The starts, then what the lists hold.
    pub(in crate::device) fn launch_lists(&self, stream: Stream, params: &PlanListParams) -> Result<()> {
        self.launch(self.starts, (1, 1, 1), 1024, stream, params)?;
        let rows = (params.plan.batch.max(1) as u32).min(MAX_GRID_Y);
        let columns = (self.context.multiprocessors() * FILLS_PER_MULTIPROCESSOR).div_ceil(rows);
        self.launch(self.fill, (columns, rows, 1), 256, stream, params)
    }

    /// A CTA a row.
    pub(in crate::device) fn launch_tables(&self, stream: Stream, params: &PlanTableParams) -> Result<()> {
        let expand = if params.expand_page_table == 0 { 0 } else { params.plan.queries as u32 };
        let rows = (params.plan.batch as u32).saturating_add(expand);
        self.launch(self.tables, (rows.max(1), 1, 1), 128, stream, params)
    }

    fn launch<P: Copy>(
        &self,
        function: Function,
        grid: (u32, u32, u32),
        block: u32,
        stream: Stream,
        params: &P,
    ) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the modules are loaded for the process and their context is current. Addresses and sizes come from views,
        // whose constructors' callers promised them; the fault record lives as long as the process.
        unsafe { function.launch(grid, block, stream, params) }
    }
}
