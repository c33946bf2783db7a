//! Plans and moves: [`crate::plan`] over a pool.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;

use super::arg::{Int, detached, i32s, same_len, u32s};
use super::array::Array;
use super::geometry::Geometry;
use super::pool::{Lease, Pool, Sequence, ids};
use super::sampling::Accepts;
use super::trees::{DraftBeams, TreeBatch};
use crate::bounds::Slot;
use crate::error::{Error, Result};
use crate::host::select;
use crate::plan::{self, AuditedPlan, Batch, DraftMask, Lens, Native, Paths, Phase, Trees};
use crate::pool;

/// What one step of a batch writes and attends to, checked against the pool. Kernels refuse it
/// (`StaleHandleError`) once a row's pages have changed. B requests, Q queries.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct Plan {
    pub(super) plan: AuditedPlan,
    /// The pool whose rows it speaks of.
    pub(super) pool: pool::Pool,
}

#[pymethods]
impl Plan {
    /// `"extend"`, `"draft"` or `"verify"`.
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

    /// Q.
    #[getter]
    fn queries(&self) -> usize {
        self.plan.queries()
    }

    /// Row of the pool's page table of each request, int32 [B].
    #[getter]
    fn rows(&self) -> PyResult<Array> {
        Ok(Array::line(self.plan.rows())?)
    }

    /// First query of each request, and Q: int32 [B + 1].
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

    /// int64 [Q, W]: bit b of a row says that the query attends row position `prefix + b`. W = 0 in a causal plan.
    #[getter]
    fn mask(&self) -> PyResult<Array> {
        let words: &[i64] = bytemuck::cast_slice(self.plan.mask());
        Ok(Array::new(words, &[self.plan.queries(), self.plan.mask_words() as usize])?)
    }

    /// Pages of each request, int32 [B, columns]; 0 where it has none.
    fn page_table(&self, py: Python<'_>) -> PyResult<Array> {
        detached(py, || {
            let mut table = Vec::new();
            let columns = self.pool.with_tables(|t| self.plan.page_table(&t, &mut table))??;
            Array::new(&table, &[self.plan.batch(), columns])
        })
    }

    fn __repr__(&self) -> String {
        format!("Plan(phase={:?}, batch={}, queries={})", self.phase(), self.batch(), self.queries())
    }
}

/// Copies of one token's KV, in every layer, for `kv_move` to run in order.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct Moves {
    pub(super) moves: plan::Moves,
    /// The pool whose rows it is tied to; `None` for raw slots.
    pub(super) pool: Option<pool::Pool>,
}

#[pymethods]
impl Moves {
    /// Moves between raw slots of a cache of `num_slots` slots, put into an order in which no move reads what an
    /// earlier one wrote. A ring of moves needs `scratch`, a slot that no move uses.
    #[new]
    #[pyo3(signature = (src, dst, num_slots, scratch=None))]
    fn new(py: Python<'_>, src: Vec<Int>, dst: Vec<Int>, num_slots: Int, scratch: Option<Int>) -> PyResult<Self> {
        let (src, dst) = (i32s("source slot", &src)?, i32s("destination slot", &dst)?);
        let num_slots = num_slots.within("num_slots", 0, i32::MAX.into())? as u32;
        let scratch = scratch.map(|s| Slot::new(s.u32("scratch slot")?)).transpose()?;
        let moves = detached(py, || plan::Moves::new(&src, &dst, num_slots, scratch))?;
        Ok(Self { moves, pool: None })
    }

    /// Source slots, int32.
    #[getter]
    fn src(&self) -> PyResult<Array> {
        Ok(Array::line(self.moves.src())?)
    }

    /// Destination slots, int32.
    #[getter]
    fn dst(&self) -> PyResult<Array> {
        Ok(Array::line(self.moves.dst())?)
    }

    fn __len__(&self) -> usize {
        self.moves.len()
    }

    fn __repr__(&self) -> String {
        format!("Moves(src={:?}, dst={:?})", self.moves.src(), self.moves.dst())
    }
}

/// Makes the plans of a geometry over a pool; its buffers are reused once the plans made of them are dropped.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct Planner {
    geometry: crate::geometry::Geometry,
    pool: pool::Pool,
    state: Mutex<plan::Planner<Native>>,
}

impl Planner {
    fn state(&self) -> MutexGuard<'_, plan::Planner<Native>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Run `f` with the planner and the page table, without the GIL.
    fn plan(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&mut plan::Planner<Native>, &pool::Tables<'_>) -> Result<AuditedPlan> + Send,
    ) -> PyResult<Plan> {
        let plan = detached(py, || {
            let mut planner = self.state();
            self.pool.with_tables(|t| f(&mut planner, &t))?
        })?;
        Ok(Plan { plan, pool: self.pool.clone() })
    }
}

#[pymethods]
impl Planner {
    #[new]
    #[pyo3(signature = (geometry, pool))]
    fn new(geometry: &Bound<'_, Geometry>, pool: &Bound<'_, Pool>) -> PyResult<Self> {
        let (geometry, pool) = (geometry.get().0, pool.get().0.clone());
        let state = Mutex::new(plan::Planner::new(geometry, Native)?);
        Ok(Self { geometry, pool, state })
    }

    /// The geometry.
    #[getter]
    fn geometry(&self) -> Geometry {
        Geometry(self.geometry)
    }

    /// Check every lane and every page of each plan from its arrays alone, and poison reused buffers: slow, to find
    /// faults.
    fn set_debug(&self, on: bool) {
        self.state().set_debug(on);
    }

    /// `counts[i]` tokens of sequence i at row positions `starts[i]...`, attended causally: prefill chunks, plain
    /// decoding (one token), and the draft model's pass over accepted tokens.
    #[pyo3(signature = (seqs, starts, counts))]
    fn extend(
        &self,
        py: Python<'_>,
        seqs: Vec<Bound<'_, Sequence>>,
        starts: Vec<Int>,
        counts: Vec<Int>,
    ) -> PyResult<Plan> {
        let (seqs, starts, counts) = (ids(&seqs), u32s("starts", &starts)?, u32s("counts", &counts)?);
        self.plan(py, |p, t| p.extend(t, &Batch::new(&seqs, Lens::Host(&starts)), &counts))
    }

    /// The forward of the beams of draft step `step` (0-based), K queries a request. A beam attends its true
    /// ancestors (`mode="ancestors"`), or its own lane's slots of the earlier steps (`"lane"`).
    #[pyo3(signature = (seqs, lens, step, beams, mode="ancestors"))]
    fn draft(
        &self,
        py: Python<'_>,
        seqs: Vec<Bound<'_, Sequence>>,
        lens: Vec<Int>,
        step: Int,
        beams: &Bound<'_, DraftBeams>,
        mode: &str,
    ) -> PyResult<Plan> {
        let (seqs, lens, step) = (ids(&seqs), u32s("committed length", &lens)?, step.u32("step")?);
        let lane = match mode {
            "ancestors" => false,
            "lane" => true,
            _ => {
                let why = "want \"ancestors\" or \"lane\"".into();
                return Err(Error::Invalid { what: "mode", got: format!("{mode:?}"), why }.into());
            }
        };
        let beams = beams.get();
        same_len("sequences", seqs.len(), "the beams' batch", beams.batch())?;
        self.plan(py, |p, t| {
            let state = beams.state();
            let mask = match lane {
                true => DraftMask::Lane,
                false => DraftMask::Ancestors(state.mask(select::DraftMask::Ancestors)),
            };
            p.draft(t, &Batch::new(&seqs, Lens::Host(&lens)), step, mask)
        })
    }

    /// The target's pass over one tree a request: node j at row position `lens[i] + j`, attending the prefix and its
    /// ancestors.
    #[pyo3(signature = (seqs, lens, trees))]
    fn verify(
        &self,
        py: Python<'_>,
        seqs: Vec<Bound<'_, Sequence>>,
        lens: Vec<Int>,
        trees: &Bound<'_, TreeBatch>,
    ) -> PyResult<Plan> {
        let (seqs, lens, trees) = (ids(&seqs), u32s("committed length", &lens)?, &trees.get().0);
        let sizes: Vec<u32> = trees.sizes().collect();
        self.plan(py, |p, t| {
            let trees = Trees { sizes: &sizes, parents: trees.parents() };
            p.verify(t, &Batch::new(&seqs, Lens::Host(&lens)), trees)
        })
    }

    /// Make the accepted nodes' KV the dense end of each prefix: with pages of one token the lease's rows are
    /// reordered and nothing moves; else the returned moves have to be run before the lease is committed.
    #[pyo3(signature = (lease, seqs, lens, accepts))]
    fn commit(
        &self,
        py: Python<'_>,
        lease: &Bound<'_, Lease>,
        seqs: Vec<Bound<'_, Sequence>>,
        lens: Vec<Int>,
        accepts: &Bound<'_, Accepts>,
    ) -> PyResult<Moves> {
        let (lease, accepts) = (lease.get(), &accepts.get().0);
        let (seqs, lens) = (ids(&seqs), u32s("committed length", &lens)?);
        let moves = detached(py, || {
            let sizes: Vec<u32> = (0..accepts.len()).map(|i| accepts.path(i).len() as u32).collect();
            let nodes: Vec<u32> = (0..accepts.len()).flat_map(|i| accepts.path(i)).copied().collect();
            let (batch, paths) = (Batch::new(&seqs, Lens::Host(&lens)), Paths { sizes: &sizes, nodes: &nodes });
            lease.with(|lease| {
                let mut planner = self.state();
                let commit = self.pool.with_tables(|t| planner.commit(&t, &batch, paths))??;
                lease.remap_all(commit.remaps().map(|r| (r.seq, r.first, r.order)))?;
                Ok(commit.moves().clone())
            })
        })?;
        Ok(Moves { moves, pool: Some(self.pool.clone()) })
    }
}
