//! Plans and moves: [`crate::plan`] over a pool.
//!
//! | file | what lives there |
//! |---|---|
//! | `mod` | `Plan` with the arrays of its format |
//! | `moves` | `Moves`: copies of KV rows, made by planners, leases and callers |
//! | `planner` | `Planner`, `DeviceLens` |
//! | `buffers` | `FormatBuffers`: static memory for the arrays of a format, and who may still read it |

mod buffers;
mod moves;
mod planner;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::arg::{Int, detached, u32s};
use super::dlpack::{Array, Buffer};
use crate::error::{Error, Result};
use crate::plan::{AnyFormat, AuditedPlan, Format, Phase};
use crate::pool;

pub(super) use self::buffers::{FormatBuffers, phase};
use self::buffers::{Written, view};
pub(super) use self::moves::Moves;
pub(super) use self::planner::{DeviceLens, Planner};

/// Plan of one step of a batch: the slots that it writes and attends to, checked against the pool, and the arrays of
/// the plan's format. Kernels refuse the plan (`StaleHandleError`) once a row's pages have changed, its lease has
/// ended, or more is committed than the plan was made for. B requests, Q queries.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct Plan {
    pub(super) plan: AuditedPlan<AnyFormat>,
    /// The pool whose rows the plan names.
    pub(super) pool: pool::Pool,
    format: AnyFormat,
    expand_page_size: Option<u32>,
    /// Page column at which the keys of each request begin; empty if all begin at the row's first page.
    pub(super) first_pages: Box<[u32]>,
    /// A mask word of each query in place of the plan's own masks (`attending_block`); empty if those count.
    block: Box<[u64]>,
    /// The write to static buffers that holds the arrays; `None` if the plan has its arrays itself.
    out: Option<Written>,
}

impl Plan {
    /// The plan for specrs's own kernel `who`, which reads the plan itself; a plan of another format is refused.
    pub(super) fn native(&self, who: &'static str) -> Result<AuditedPlan> {
        self.plan.native(&self.format).ok_or_else(|| {
            let got = format!("a plan of format {:?}", self.format.name());
            let want = format!("format \"native\": {who} reads no arrays of another backend");
            Error::Mismatch { operand: "plan", got, want }
        })
    }

    /// The masks of the queries, and their words.
    pub(super) fn masks(&self) -> (&[u64], usize) {
        match &*self.block {
            [] => (self.plan.mask(), self.plan.mask_words() as usize),
            block => (block, 1),
        }
    }
}

#[pymethods]
impl Plan {
    /// Format of the plan's arrays: `"native"` (none), `"flashinfer"`, `"flash_attention"` or `"triton"`.
    #[getter]
    fn format(&self) -> &'static str {
        self.format.name()
    }

    /// Tokens per page that `expand_page_table` names in format `"flash_attention"` (1: slots). `None` if the phase is
    /// one causal pass, and in other formats.
    #[getter]
    fn expand_page_size(&self) -> Option<u32> {
        self.expand_page_size
    }

    /// Returns the arrays of the plan's format by name, of exactly the length that is used, without a copy. Arrays in
    /// the plan's own memory keep their values for as long as anybody holds them; numpy may only read them. Writing
    /// into them by other means (torch, say) corrupts the plan. Arrays in `FormatBuffers` are views: reading them
    /// raises `StaleOutputError` once the buffers are written again.
    fn arrays<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        if let Some(out) = &self.out {
            out.check_lenders(py)?;
            for (name, array) in detached(py, || out.arrays())? {
                dict.set_item(name, array)?;
            }
            return Ok(dict);
        }
        for a in self.plan.arrays().iter() {
            let (name, body) = (a.spec.name, self.plan.0.clone());
            // The array is looked up again in the body, which `buffer` keeps alive.
            let buffer = Buffer::share(body, |b| b.arrays.get(name).map_or(&[], |a| a.bytes), view(&a, None))?;
            dict.set_item(name, Array::of(buffer, None))?;
        }
        Ok(dict)
    }

    /// Returns the same plan, except that live request i attends only its positions from `starts[i]` on: for a draft
    /// model that began in the midst of a request and never wrote the KV before. Each start is a multiple of the page
    /// size and at most the request's prefix. A request whose prefix is 0 begins there whatever its start is: all of its
    /// queries are behind the context wall. Positions do not change. The plan must be of format `"native"`.
    #[pyo3(signature = (starts))]
    fn attending_from(&self, starts: Vec<Int>) -> PyResult<Self> {
        let (plan, page) = (self.native("attending_from")?, self.plan.page().get());
        let starts = u32s("starts", &starts)?;
        if starts.len() != plan.live_batch() {
            let (got, want) =
                (format!("{} elements", starts.len()), format!("{}, one a live request", plan.live_batch()));
            return Err(Error::Mismatch { operand: "starts", got, want }.into());
        }
        for (&start, &prefix) in starts.iter().zip(plan.prefix_lens()) {
            if start % page != 0 || (prefix > 0 && i64::from(start) > i64::from(prefix)) {
                let why = format!("must be a multiple of the page size {page}, at most the prefix {prefix}");
                return Err(Error::Invalid { what: "starts", got: start.to_string(), why }.into());
            }
        }
        let mut first_pages = vec![0; plan.batch()];
        for ((first, &start), &prefix) in first_pages.iter_mut().zip(&starts).zip(plan.prefix_lens()) {
            *first = if prefix > 0 { start / page } else { 0 };
        }
        Ok(Self {
            plan: self.plan.clone(),
            pool: self.pool.clone(),
            format: self.format,
            expand_page_size: None,
            first_pages: first_pages.into(),
            block: self.block.clone(),
            out: None,
        })
    }

    /// Returns the same plan, except that each query attends all queries of its request, those behind it included: the
    /// plan of a block that is not causal. It must be of an `extend` in format `"native"`, with at most 64 queries of a
    /// request.
    fn attending_block(&self) -> PyResult<Self> {
        let block = self.native("attending_block")?.block_masks()?;
        Ok(Self {
            plan: self.plan.clone(),
            pool: self.pool.clone(),
            format: self.format,
            expand_page_size: None,
            first_pages: self.first_pages.clone(),
            block: block.into(),
            out: None,
        })
    }

    /// True if the plan's requests attend all of their positions (see `attending_from`).
    #[getter]
    fn whole(&self) -> bool {
        self.first_pages.is_empty()
    }

    /// Column of the page table at which the keys of each request begin, dead ones included (`attending_from`); empty where
    /// all begin at column 0.
    #[getter]
    fn first_pages(&self) -> Vec<u32> {
        self.first_pages.to_vec()
    }

    /// `"extend"`, `"decode"`, `"draft"` or `"verify"`.
    #[getter]
    fn phase(&self) -> &'static str {
        self.plan.phase().name()
    }

    /// Step of a draft plan, else `None`.
    #[getter]
    fn step(&self) -> Option<u32> {
        match self.plan.phase() {
            Phase::Draft { step } => Some(step),
            _ => None,
        }
    }

    /// B.
    #[getter]
    fn batch(&self) -> usize {
        self.plan.batch()
    }

    /// Requests that are not padding; they come first.
    #[getter]
    fn live_batch(&self) -> usize {
        self.plan.live_batch()
    }

    /// Q.
    #[getter]
    fn queries(&self) -> usize {
        self.plan.queries()
    }

    /// Queries of the live requests; they come first.
    #[getter]
    fn live_queries(&self) -> usize {
        self.plan.live_queries()
    }

    /// Row of the pool's page table of each request, int32 [B].
    #[getter]
    fn rows(&self) -> PyResult<Array> {
        Ok(Array::line(self.plan.rows())?)
    }

    /// Version of each row when the plan was made, int64 [B]; 0 for a dead request.
    #[getter]
    fn versions(&self) -> PyResult<Array> {
        Ok(Array::line(bytemuck::cast_slice::<u64, i64>(self.plan.versions()))?)
    }

    /// Committed length that each live request was planned for, int32 [live_batch]: kernels refuse the plan
    /// (`StaleHandleError`) once more is committed, or a commit of more is planned.
    #[getter]
    fn committed(&self) -> PyResult<Array> {
        Ok(Array::line(&self.plan.committed().map(|len| len as i32).collect::<Vec<_>>())?)
    }

    /// First query of each request, then Q: int32 [B + 1].
    #[getter]
    fn qo_indptr(&self) -> PyResult<Array> {
        Ok(Array::line(self.plan.qo_indptr())?)
    }

    /// Row positions before the queries, which all of them attend: int32 [B].
    #[getter]
    fn prefix_lens(&self) -> PyResult<Array> {
        Ok(Array::line(self.plan.prefix_lens())?)
    }

    /// RoPE position of each query, int32 [Q].
    #[getter]
    fn positions(&self) -> PyResult<Array> {
        Ok(Array::line(self.plan.positions())?)
    }

    /// Slot that each query's KV is written to, int32 [Q].
    #[getter]
    fn out_slots(&self) -> PyResult<Array> {
        Ok(Array::line(self.plan.out_slots())?)
    }

    /// Attention mask, int64 [Q, W]: bit b of a row says that the query attends row position `prefix + b`. W = 0 in a
    /// causal plan.
    #[getter]
    fn mask(&self) -> PyResult<Array> {
        let (mask, words) = self.masks();
        Ok(Array::new(bytemuck::cast_slice::<u64, i64>(mask), &[self.plan.queries(), words])?)
    }

    /// Returns the pages of each request, int32 [B, columns]; 0 in columns without a page.
    fn page_table(&self, py: Python<'_>) -> PyResult<Array> {
        detached(py, || {
            let mut table = Vec::new();
            let columns = self.pool.with_tables(|t| self.plan.page_table(&t, &mut table))??;
            Array::new(&table, &[self.plan.batch(), columns])
        })
    }

    fn __repr__(&self) -> String {
        let (phase, format) = (self.phase(), self.format.name());
        format!("Plan(phase={phase:?}, format={format:?}, batch={}, queries={})", self.batch(), self.queries())
    }
}
