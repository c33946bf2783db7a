//! `Planner`: the plans of a geometry over a pool, in the format of an attention backend.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping};

use super::Plan;
use super::buffers::{BufferPurpose, FormatBuffers, Static, phase};
use super::moves::Moves;
use crate::error::{Error, Result};
use crate::geometry;
use crate::plan::{
    self, AnyFormat, AuditedPlan, Batch, Bucket, DraftMask, Extent, FlashAttention, Format, Lens, Load, Paths, Phase,
    PlanParts, Trees,
};
use crate::pool;
use crate::py::arg::{Int, detached, same_len, u32s};
use crate::py::dlpack::{Call as Operands, Lender, Tensor};
use crate::py::geometry::Geometry;
use crate::py::pool::{Lease, Pool, Sequence, ids};
use crate::py::sampling::Accepts;
use crate::py::trees::{DraftBeams, TreeBatch};

/// Committed lengths of `batch` requests that live on the device: the host knows only that none exceeds `at_most`. They
/// can size buffers; the planner itself, which runs on the host and has to read lengths, refuses them.
#[pyclass(frozen, eq, hash, module = "specrs._specrs")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::py) struct DeviceLens {
    batch: u32,
    at_most: u32,
}

#[pymethods]
impl DeviceLens {
    #[new]
    #[pyo3(signature = (batch, at_most))]
    fn new(batch: Int, at_most: Int) -> PyResult<Self> {
        Ok(Self { batch: batch.u32("batch")?, at_most: at_most.u32("at_most")? })
    }

    /// Requests.
    #[getter]
    fn batch(&self) -> u32 {
        self.batch
    }

    /// A bound on every length.
    #[getter]
    fn at_most(&self) -> u32 {
        self.at_most
    }

    fn __repr__(&self) -> String {
        format!("DeviceLens(batch={}, at_most={})", self.batch, self.at_most)
    }
}

/// Lengths as an argument: a list, or `DeviceLens`.
enum LensArg {
    Host(Vec<u32>),
    Device(DeviceLens),
}

impl LensArg {
    fn take(what: &'static str, lens: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(device) = lens.cast::<DeviceLens>() {
            return Ok(LensArg::Device(*device.get()));
        }
        Ok(LensArg::Host(u32s(what, &lens.extract::<Vec<Int>>()?)?))
    }

    fn get(&self) -> Lens<'_> {
        match self {
            LensArg::Host(lens) => Lens::Host(lens),
            LensArg::Device(d) => Lens::Device { batch: d.batch, at_most: d.at_most },
        }
    }
}

/// The beams of a draft step as an argument: specrs's own, or their ancestors as bits.
enum Beams<'a> {
    Own(&'a DraftBeams),
    Bits { tensor: Box<Tensor>, shape: [usize; 2] },
}

impl<'a> Beams<'a> {
    fn take(
        given: Option<&'a Bound<'_, PyAny>>,
        batch: usize,
        geometry: &geometry::Geometry,
        out: Option<&FormatBuffers>,
    ) -> PyResult<Self> {
        let Some(given) = given else {
            let want = "DraftBeams or their ancestors, which only mode \"lane\" can do without".into();
            return Err(Error::Mismatch { operand: "beams", got: "None".into(), want }.into());
        };
        if let Ok(beams) = given.cast::<DraftBeams>() {
            same_len("sequences", batch, "the beams' batch", beams.get().batch())?;
            return Ok(Beams::Own(beams.get()));
        }
        let lenders = out.map(|out| out.0.lenders()).unwrap_or_default();
        let ([tensor], [], []) = Operands::on_host().reading(&lenders, &[]).take([("beams", given)], [], [])?;
        let tensor = Box::new(tensor);
        let shape = [batch * geometry.shape().topk() as usize, geometry.draft_mask_words() as usize];
        tensor.input::<i64>(&shape)?;
        Ok(Beams::Bits { tensor, shape })
    }

    /// Run `f` with the ancestors of each beam.
    fn with<T>(&self, f: impl FnOnce(&[u64]) -> Result<T>) -> Result<T> {
        match self {
            Beams::Own(beams) => f(beams.state().ancestors()),
            Beams::Bits { tensor, shape } => f(bytemuck::cast_slice(tensor.input::<i64>(shape)?)),
        }
    }
}

/// `(requests, queries)` to pad to.
type Pad = Option<(Int, Int)>;

fn bucket(pad: Pad) -> Result<Option<Bucket>> {
    let Some((batch, queries)) = pad else { return Ok(None) };
    Ok(Some(Bucket { batch: batch.u32("pad requests")?, queries: queries.u32("pad queries")? }))
}

/// Makes the plans of a geometry over a pool, in the format of an attention backend. It reuses its buffers once the
/// plans in them, and the arrays of those plans, are dropped.
///
/// `format` is `"native"`, `"flashinfer"`, `"flash_attention"` or `"triton"`; a format that cannot run the geometry
/// raises `ConfigError`, which says what would work. A pool of another page size, or with fewer `row_pages` than the
/// geometry's, raises it, too. `mask` chooses the masks of `"flashinfer"`: `"bool"`, `"packed"` bits, or `"both"`.
#[pyclass(frozen, module = "specrs._specrs")]
pub(in crate::py) struct Planner {
    geometry: geometry::Geometry,
    format: AnyFormat,
    pool: pool::Pool,
    state: Mutex<plan::Planner<AnyFormat>>,
}

/// The arguments that all plans have in common.
struct Call<'a> {
    phase: Phase,
    pad: Option<Bucket>,
    out: Option<&'a FormatBuffers>,
}

impl<'a> Call<'a> {
    /// Check the memory of `out`, before other operands are taken.
    fn new(phase: Phase, pad: Pad, out: Option<&'a Bound<'_, FormatBuffers>>) -> PyResult<Self> {
        out.map_or(Ok(()), |out| out.get().0.check_lenders(out.py()))?;
        Ok(Self { phase, pad: bucket(pad)?, out: out.map(|o| o.get()) })
    }
}

impl Planner {
    fn state(&self) -> MutexGuard<'_, plan::Planner<AnyFormat>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Run `f` with the planner, the page table and the batch, without the GIL.
    fn plan(
        &self,
        py: Python<'_>,
        seqs: &[Bound<'_, Sequence>],
        lens: &LensArg,
        call: &Call<'_>,
        f: impl FnOnce(&mut plan::Planner<AnyFormat>, &pool::Tables<'_>, &Batch<'_>) -> Result<AuditedPlan<AnyFormat>>
        + Send,
    ) -> PyResult<Plan> {
        let (seqs, pad) = (ids(seqs), call.pad);
        let out = call.out.map(|o| (&o.0, self.purpose(call.phase, false, self.geometry.limits().max_batch)));
        if let Some((memory, purpose)) = &out {
            memory.purpose().takes(purpose)?;
        }
        let (plan, out) = detached(py, || {
            let mut planner = self.state();
            self.pool.with_tables(|t| {
                planner.defer_arrays(out.is_some());
                let plan = f(&mut planner, &t, &Batch { seqs: &seqs, lens: lens.get(), pad })?;
                let out = out.map(|(memory, _)| memory.write(|arrays| planner.lower(&t, &plan, arrays))).transpose()?;
                Ok((plan, out))
            })?
        })?;
        let expand_page_size = match self.format {
            AnyFormat::FlashAttention(_) => FlashAttention::expand_page_size(&self.geometry, call.phase),
            _ => None,
        };
        Ok(Plan {
            plan,
            pool: self.pool.clone(),
            format: self.format,
            expand_page_size,
            first_pages: Box::default(),
            block: Box::default(),
            out,
        })
    }

    fn purpose(&self, phase: Phase, any_step: bool, max_batch: u32) -> BufferPurpose {
        BufferPurpose { format: self.format, geometry: self.geometry, phase, any_step, max_batch }
    }

    /// The purpose of buffers for a phase, step and batch from the arguments.
    fn parse(&self, name: &str, step: Option<Int>, max_batch: Option<Int>) -> Result<BufferPurpose> {
        let limit = self.geometry.limits().max_batch;
        let step = step.map(|s| s.within("step", 0, self.geometry.shape().steps() as i128 - 1)).transpose()?;
        let max_batch = max_batch.map(|b| b.within("max_batch", 0, limit.into())).transpose()?;
        let phase = phase(name, step.map(|s| s as u32))?;
        let any_step = step.is_none() && matches!(phase, Phase::Draft { .. });
        Ok(self.purpose(phase, any_step, max_batch.map_or(limit, |b| b as u32)))
    }

    /// `{name: {"shape", "dtype", "bytes"}}` for the sizes of arrays.
    fn describe<'py>(&self, py: Python<'py>, sizes: &[(usize, Extent)]) -> PyResult<Bound<'py, PyDict>> {
        let out = PyDict::new(py);
        for &(at, extent) in sizes {
            let Some(spec) = self.format.arrays().get(at) else { continue };
            let d = PyDict::new(py);
            d.set_item("shape", pyo3::types::PyTuple::new(py, extent.shape())?)?;
            d.set_item("dtype", spec.dtype.name())?;
            d.set_item("bytes", extent.elements() as u128 * spec.dtype.size() as u128)?;
            out.set_item(spec.name, d)?;
        }
        Ok(out)
    }
}

#[pymethods]
impl Planner {
    #[new]
    #[pyo3(signature = (geometry, pool, format="native", mask="both"))]
    fn new(geometry: &Bound<'_, Geometry>, pool: &Bound<'_, Pool>, format: &str, mask: &str) -> PyResult<Self> {
        let (geometry, pool) = (geometry.get().0, pool.get().0.clone());
        let format = AnyFormat::named(format, mask)?;
        let planner = plan::Planner::new(geometry, format)?;
        planner.check_pool(&pool.config())?;
        Ok(Self { geometry, format, pool, state: Mutex::new(planner) })
    }

    /// The geometry.
    #[getter]
    fn geometry(&self) -> Geometry {
        Geometry(self.geometry)
    }

    /// The format of the arrays of the planner's plans.
    #[getter]
    fn format(&self) -> &'static str {
        self.format.name()
    }

    /// Turn on or off a slow search for faults: checks of every query and every page of each plan from its arrays
    /// alone, and poison in reused buffers.
    fn set_debug(&self, on: bool) {
        self.state().set_debug(on);
    }

    /// Plan `counts[i]` tokens of sequence i at row positions `starts[i]...`, attended causally: prefill chunks, and
    /// the draft model's pass over accepted tokens.
    ///
    /// For every plan, `pad` is (requests, queries) to pad to, at most `max_batch` requests and the queries that so
    /// many requests have in the phase; `out` takes the arrays of the format, see `buffers`. A live lease must have
    /// reserved (`Pool.reserve`) the positions that the plan writes. They begin right after the committed positions and
    /// those in flight: a smaller length, which would overwrite committed KV, is a `ConfigError`, and so is a larger
    /// one, which would leave positions unwritten. Only `extend` may start earlier, for the draft model; up to the
    /// committed length it needs no lease.
    #[pyo3(signature = (seqs, starts, counts, *, out=None, pad=None))]
    #[allow(clippy::too_many_arguments, reason = "operands of an operation, by name")]
    fn extend(
        &self,
        py: Python<'_>,
        seqs: Vec<Bound<'_, Sequence>>,
        starts: &Bound<'_, PyAny>,
        counts: Vec<Int>,
        out: Option<&Bound<'_, FormatBuffers>>,
        pad: Pad,
    ) -> PyResult<Plan> {
        let (starts, counts) = (LensArg::take("starts", starts)?, u32s("counts", &counts)?);
        let call = Call::new(Phase::Extend, pad, out)?;
        self.plan(py, &seqs, &starts, &call, |p, t, batch| p.extend(t, batch, &counts))
    }

    /// Plan plain decoding: one token of each sequence after its `lens[i]` committed ones.
    #[pyo3(signature = (seqs, lens, *, out=None, pad=None))]
    fn decode(
        &self,
        py: Python<'_>,
        seqs: Vec<Bound<'_, Sequence>>,
        lens: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, FormatBuffers>>,
        pad: Pad,
    ) -> PyResult<Plan> {
        let lens = LensArg::take("committed length", lens)?;
        let call = Call::new(Phase::Decode, pad, out)?;
        self.plan(py, &seqs, &lens, &call, |p, t, batch| p.decode(t, batch))
    }

    /// Plan the forward of the beams of draft step `step` (0-based), K queries a request. A beam attends its true
    /// ancestors (`mode="ancestors"`), or the slots that its own lane has from the earlier steps (`"lane"`).
    ///
    /// `beams` are `DraftBeams`, or their ancestors: int64 [B * K, draft_mask_words], where bit b * S + s of a row
    /// stands for beam b of step s, and the row's own bit is set (`DraftBeams.ancestors`). With `"lane"` it may be
    /// `None`.
    #[pyo3(signature = (seqs, lens, step, beams, mode="ancestors", *, out=None, pad=None))]
    #[allow(clippy::too_many_arguments, reason = "operands of an operation, by name")]
    fn draft(
        &self,
        py: Python<'_>,
        seqs: Vec<Bound<'_, Sequence>>,
        lens: &Bound<'_, PyAny>,
        step: Int,
        beams: Option<&Bound<'_, PyAny>>,
        mode: &str,
        out: Option<&Bound<'_, FormatBuffers>>,
        pad: Pad,
    ) -> PyResult<Plan> {
        let (lens, step) = (LensArg::take("committed length", lens)?, step.u32("step")?);
        let lane = match mode {
            "ancestors" => false,
            "lane" => true,
            _ => {
                let why = "want \"ancestors\" or \"lane\"".into();
                return Err(Error::Invalid { what: "mode", got: format!("{mode:?}"), why }.into());
            }
        };
        let call = Call::new(Phase::Draft { step }, pad, out)?;
        if lane && beams.is_none() {
            return self.plan(py, &seqs, &lens, &call, |p, t, batch| p.draft(t, batch, step, DraftMask::Lane));
        }
        let beams = Beams::take(beams, seqs.len(), &self.geometry, call.out)?;
        self.plan(py, &seqs, &lens, &call, |p, t, batch| {
            beams.with(|bits| p.draft(t, batch, step, if lane { DraftMask::Lane } else { DraftMask::Ancestors(bits) }))
        })
    }

    /// Plan the target's pass over one tree for each request: node j is at row position `lens[i] + j` and attends the
    /// prefix and its ancestors.
    #[pyo3(signature = (seqs, lens, trees, *, out=None, pad=None))]
    fn verify(
        &self,
        py: Python<'_>,
        seqs: Vec<Bound<'_, Sequence>>,
        lens: &Bound<'_, PyAny>,
        trees: &Bound<'_, TreeBatch>,
        out: Option<&Bound<'_, FormatBuffers>>,
        pad: Pad,
    ) -> PyResult<Plan> {
        let (lens, trees) = (LensArg::take("committed length", lens)?, &trees.get().0);
        let sizes: Vec<u32> = trees.sizes().collect();
        let call = Call::new(Phase::Verify, pad, out)?;
        self.plan(py, &seqs, &lens, &call, |p, t, batch| {
            p.verify(t, batch, Trees { sizes: &sizes, parents: trees.parents() })
        })
    }

    /// Check a plan that was made elsewhere, such as on a device, from its arrays alone: each query, each page, each
    /// dead value. `arrays` are rows, versions, qo_indptr, prefix_lens, positions, out_slots and mask, each as in
    /// `Plan`; `step` is the step of a `"draft"`. The arrays that the planner's format derives from these are read back
    /// and checked, too.
    #[pyo3(signature = (phase, arrays, step=None))]
    fn audit(&self, py: Python<'_>, phase: &str, arrays: [Bound<'_, PyAny>; 7], step: Option<Int>) -> PyResult<Plan> {
        const NAMES: [&str; 7] = ["rows", "versions", "qo_indptr", "prefix_lens", "positions", "out_slots", "mask"];
        let phase = self.parse(phase, step, None)?.phase;
        let (tensors, [], []) = Operands::on_host().take(std::array::from_fn(|i| (NAMES[i], &arrays[i])), [], [])?;
        let tensors: [Tensor; 7] = tensors;
        let line = |i: usize| -> Result<Vec<i32>> { Ok(tensors[i].input::<i32>(tensors[i].shape())?.to_vec()) };
        let words = |i: usize| -> Result<Vec<u64>> {
            Ok(bytemuck::cast_slice(tensors[i].input::<i64>(tensors[i].shape())?).to_vec())
        };
        let [_, mask_words] = tensors[6].dims("[queries, words]")?;
        let parts = PlanParts {
            rows: line(0)?,
            versions: words(1)?,
            qo_indptr: line(2)?,
            prefix_lens: line(3)?,
            positions: line(4)?,
            out_slots: line(5)?,
            mask: words(6)?,
            mask_words: mask_words as u32,
        };
        let plan = detached(py, || {
            let plan = plan::Plan::from_parts(phase, self.geometry.page(), parts);
            self.pool.with_tables(|t| AuditedPlan::audit(plan, &t, &self.geometry, &self.format))?
        })?;
        let expand_page_size = match self.format {
            AnyFormat::FlashAttention(_) => FlashAttention::expand_page_size(&self.geometry, phase),
            _ => None,
        };
        Ok(Plan {
            plan,
            pool: self.pool.clone(),
            format: self.format,
            expand_page_size,
            first_pages: Box::default(),
            block: Box::default(),
            out: None,
        })
    }

    /// Returns copies of each prefix's tail into the holes before its draft branches, to be run on the draft model's
    /// cache before the first step; none in the dense layout.
    #[pyo3(signature = (seqs, lens))]
    fn tail_copies(&self, py: Python<'_>, seqs: Vec<Bound<'_, Sequence>>, lens: &Bound<'_, PyAny>) -> PyResult<Moves> {
        let (seqs, lens) = (ids(&seqs), LensArg::take("committed length", lens)?);
        let moves = detached(py, || {
            let mut planner = self.state();
            let copies = self.pool.with_tables(|t| planner.tail_copies(&t, &Batch::new(&seqs, lens.get())))??;
            Ok(copies.moves().clone())
        })?;
        Ok(Moves { moves, pool: Some(self.pool.clone()) })
    }

    /// Make the accepted nodes' KV the dense end of each prefix: with pages of one token the lease's rows are reordered
    /// and no KV moves; else the returned moves have to be run before the lease is committed. `lease` must be of the
    /// planner's pool and cover each of `seqs`, else this raises `ConfigError` and changes nothing. A second commit of
    /// a round is a `ConfigError`, too. The round's plans are refused after the commit.
    #[pyo3(signature = (lease, seqs, lens, accepts))]
    fn commit(
        &self,
        py: Python<'_>,
        lease: &Bound<'_, Lease>,
        seqs: Vec<Bound<'_, Sequence>>,
        lens: &Bound<'_, PyAny>,
        accepts: &Bound<'_, Accepts>,
    ) -> PyResult<Moves> {
        let (lease, accepts) = (lease.get(), &accepts.get().0);
        let (seqs, lens) = (ids(&seqs), LensArg::take("committed length", lens)?);
        let moves = detached(py, || {
            let sizes: Vec<u32> = (0..accepts.len()).map(|i| accepts.path(i).len() as u32).collect();
            let nodes: Vec<u32> = (0..accepts.len()).flat_map(|i| accepts.path(i)).copied().collect();
            let (batch, paths) = (Batch::new(&seqs, lens.get()), Paths { sizes: &sizes, nodes: &nodes });
            lease.with(|lease| {
                lease.check_covers(&self.pool, &seqs)?;
                let mut planner = self.state();
                let commit = self.pool.with_tables(|t| planner.commit(&t, &batch, paths))??;
                lease.remap_all(commit.remaps().map(|r| (r.seq, r.first, r.order)))?;
                Ok(commit.moves().clone())
            })
        })?;
        Ok(Moves { moves, pool: Some(self.pool.clone()) })
    }

    /// Make static memory for the arrays of `phase` (`"extend"`, `"decode"`, `"draft"`, `"verify"`), at the sizes that
    /// `capacities` returns, for plans made with `out=`. With `step` the memory is for that draft step alone.
    ///
    /// With `tensors`, name to tensor, the arrays are written into these. Each tensor is on the CPU, contiguous, and of
    /// the array's dtype (`custom_mask`: bool or uint8); it overlaps neither the others nor those of other buffers. A
    /// table may have more rows and columns than needed. The tensors are zeroed, kept alive, and written by later
    /// plans: no thread may use them during such a call. A tensor that was resized since is refused. `ConfigError`
    /// names the first tensor that is missing, unknown, of another kind or too small.
    #[pyo3(signature = (phase, step=None, max_batch=None, tensors=None))]
    fn buffers(
        &self,
        py: Python<'_>,
        phase: &str,
        step: Option<Int>,
        max_batch: Option<Int>,
        tensors: Option<&Bound<'_, PyMapping>>,
    ) -> PyResult<FormatBuffers> {
        let purpose = self.parse(phase, step, max_batch)?;
        let mut lenders = Vec::new();
        let import = |given: &Bound<'_, PyMapping>| -> PyResult<Vec<(&'static str, Tensor)>> {
            let mut all = Vec::new();
            for item in given.items()?.iter() {
                let (name, object): (String, Bound<'_, PyAny>) = item.extract()?;
                let name = purpose.array(&name)?;
                let tensor = Tensor::import(&object, name, None)?;
                lenders.extend(Lender::of(&object, &tensor)?);
                all.push((name, tensor));
            }
            Ok(all)
        };
        let tensors = tensors.map(import).transpose()?;
        let memory = detached(py, || Static::new(purpose, tensors, lenders))?;
        Ok(FormatBuffers(memory.into()))
    }

    /// Returns the largest size of each array of a phase, for `max_batch` requests: name to `shape`, `dtype`, `bytes`
    /// and `formula`, which tells where the size comes from.
    #[pyo3(signature = (phase, step=None, max_batch=None))]
    fn capacities<'py>(
        &self,
        py: Python<'py>,
        phase: &str,
        step: Option<Int>,
        max_batch: Option<Int>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let purpose = self.parse(phase, step, max_batch)?;
        let limits = purpose.limits()?;
        let out = self.describe(py, &limits)?;
        for (&(at, limit), d) in limits.iter().zip(out.values()) {
            d.set_item("formula", purpose.formula(at, limit))?;
        }
        Ok(out)
    }

    /// Returns the size of each array of a phase for requests of these lengths (a list, or `DeviceLens`, whose bound
    /// counts): name to `shape`, `dtype`, `bytes`. `"extend"` counts tokens up to the context limit; `"draft"` without
    /// `step` means the first step.
    #[pyo3(signature = (phase, lens, step=None))]
    fn sizes<'py>(
        &self,
        py: Python<'py>,
        phase: &str,
        lens: &Bound<'py, PyAny>,
        step: Option<Int>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let (purpose, lens) = (self.parse(phase, step, None)?, LensArg::take("committed length", lens)?);
        let load = Load::of_lens(&self.geometry, purpose.phase, &lens.get())?;
        self.describe(py, &self.format.extents(&self.geometry, &load)?)
    }
}
