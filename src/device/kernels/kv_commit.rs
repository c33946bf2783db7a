//! The launches of `cuda/kv_commit.cu`: accepted nodes become the positions behind a request's committed length.

use std::sync::Arc;

use super::check::{arrays, length, live_address, on_device};
use crate::bounds::{MAX_BATCH, MAX_DRAFT_TOKENS, PageSize};
use crate::device::context::Context;
use crate::device::driver::{Function, Module, Stream};
use crate::device::images;
use crate::device::params::kv::KvCommitParams;
use crate::device::params::table::PageTable;
use crate::device::view::{DeviceSlice, MAX_MOVES, MovesView};
use crate::error::{Error, Result, in_range};
use crate::overlap::{Operand, disjoint};

/// The kernels of `cuda/kv_commit.cu` on one device. Functions are valid while `_module` is loaded.
#[derive(Debug)]
pub struct KvCommit {
    remap: Function,
    moves: Function,
    _module: Module,
    context: Arc<Context>,
}

/// The operands of a commit of B requests.
#[derive(Debug, Clone, Copy)]
pub struct CommitOperands<'a> {
    /// First entry of each request in `paths`, B + 1 entries.
    pub offsets: &'a DeviceSlice<i32>,
    /// Accepted nodes, each path from the root (0) on, increasing.
    pub paths: &'a DeviceSlice<i32>,
    /// Committed lengths with the accepted nodes, B entries.
    pub new_lens: &'a DeviceSlice<i32>,
    /// Page ids, rows of `table_width` columns; a remap writes it.
    pub table: &'a DeviceSlice<i32>,
    /// Columns of a row of the table.
    pub table_width: usize,
    /// The table's row of each request, B entries, each once.
    pub rows: &'a DeviceSlice<i32>,
    /// An array whose last element counts the live requests; `None` where all are.
    pub live: Option<&'a DeviceSlice<i32>>,
    /// Pages of the pool, the sink included.
    pub num_pages: usize,
    /// Tokens of a page.
    pub page: PageSize,
    /// Most nodes of a tree (V).
    pub max_nodes: usize,
}

impl KvCommit {
    /// Load them into `context`, which is current.
    pub(super) fn load(context: Arc<Context>) -> Result<Self> {
        let module = Module::load(images::select("kv_commit", context.capability())?)?;
        let (remap, moves) = (module.function("kv_commit_remap")?, module.function("kv_commit_moves")?);
        Ok(Self { remap, moves, _module: module, context })
    }

    /// Pages of one token: reorder each row's columns behind its old length L, the accepted nodes first, the others after
    /// them in their own order, as the pool's remap does. No KV moves.
    ///
    /// A path that is none, or that leaves its row, is recorded and its row left as it is.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for operands that do not fit each other; [`Error::Invalid`] for larger pages.
    pub fn remap(&self, stream: Stream, operands: &CommitOperands<'_>) -> Result<()> {
        if operands.page.get() != 1 {
            let why = "pages hold more than one token; move the KV instead".into();
            return Err(Error::Invalid { what: "page_size", got: operands.page.get().to_string(), why });
        }
        self.launch(stream, operands, None)
    }

    /// Larger pages: the moves that [`KvMove`](crate::device::KvMove) executes, in the order of the paths; entries behind
    /// the last are padding (slot 0 to slot 0). `moves` has room for a move of every entry of `paths`.
    ///
    /// A path that is none gives no moves; one that leaves its row, and a page that is not in the pool, give padding.
    /// Either is recorded.
    ///
    /// # Errors
    /// As [`KvCommit::remap`], but for any page.
    pub fn moves(&self, stream: Stream, operands: &CommitOperands<'_>, moves: &MovesView) -> Result<()> {
        length("moves", moves.src().len(), operands.paths.len(), false)?;
        length("move offsets", moves.offsets().len(), operands.new_lens.len() + 1, true)?;
        on_device(&self.context, &[("moves", moves.src().device())])?;
        self.launch(stream, operands, Some(moves))
    }

    fn launch(&self, stream: Stream, o: &CommitOperands<'_>, moves: Option<&MovesView>) -> Result<()> {
        let context = &self.context;
        let requests = o.new_lens.len();
        in_range("requests", requests as u64, 0, MAX_BATCH.into())?;
        in_range("path entries", o.paths.len() as u64, 0, MAX_MOVES as i128)?;
        in_range("max_nodes", o.max_nodes as u64, 1, MAX_DRAFT_TOKENS.into())?;
        let slots = i128::from(i32::MAX) / i128::from(o.page.get());
        in_range("table columns", o.table_width as u64, 1, slots)?;
        in_range("num_pages", o.num_pages as u64, 1, slots)?;
        if !o.table.len().is_multiple_of(o.table_width) || o.table.len() / o.table_width > i32::MAX as usize {
            return Err(Error::Mismatch {
                operand: "page table",
                got: format!("{} entries", o.table.len()),
                want: format!("rows of {}", o.table_width),
            });
        }
        arrays(context, requests + 1, &[("offsets", o.offsets)])?;
        arrays(context, requests, &[("new_lens", o.new_lens), ("rows of the page table", o.rows)])?;
        on_device(context, &[("paths", o.paths.device()), ("page table", o.table.device())])?;
        let live = live_address(context, o.live)?;
        let read = [o.offsets.span(), o.paths.span(), o.new_lens.span(), o.rows.span(), o.live.span()];
        match moves {
            Some(moves) => disjoint(&[&moves.spans()], &[&read, &[o.table.span()]])?,
            None => disjoint(&[&[o.table.span()]], &[&read])?,
        }
        if requests == 0 {
            return Ok(());
        }
        let report = context.report(stream)?;
        let params = KvCommitParams {
            offsets: o.offsets.address(),
            paths: o.paths.address(),
            new_lens: o.new_lens.address(),
            table: PageTable {
                pages: o.table.address(),
                rows: (o.table.len() / o.table_width) as i32,
                columns: o.table_width as i32,
                num_pages: o.num_pages as i32,
                reserved: 0,
            },
            rows: o.rows.address(),
            live,
            src: moves.map_or(0, |m| m.src().address()),
            dst: moves.map_or(0, |m| m.dst().address()),
            move_offsets: moves.map_or(0, |m| m.offsets().address()),
            report,
            requests: requests as i32,
            entries: o.paths.len() as i32,
            shift: o.page.get().trailing_zeros() as i32,
            max_nodes: o.max_nodes as i32,
            moves: moves.map_or(0, |m| m.src().len() as i32), // at most MAX_MOVES
            reserved: 0,
        };
        let function = if moves.is_some() { self.moves } else { self.remap };
        let _current = context.enter()?;
        // SAFETY: the module is loaded for the process and its context is current. Addresses and sizes come from views,
        // whose constructors' callers promised them; the fault record lives as long as the process.
        unsafe { function.launch((requests as u32, 1, 1), 128, stream, &params) }
    }
}
