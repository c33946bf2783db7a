//! `FormatBuffers`: memory of fixed size and place for the arrays of one format and phase, which is written every
//! round.
//!
//! An engine that captures graphs, or keeps its own buffers, needs arrays that stay where they are. Their capacity is
//! compared with the configuration's largest sizes when they are made, and with a plan's sizes before each write. A
//! write makes a new generation. A view remembers its generation, so that reading it after the next write is refused
//! instead of showing another plan's values (sglang pull request 23037).

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::overlap::{Operand, disjoint};
use crate::plan::{self, AnyFormat, ArrayRef, Arrays, Extent, Format, Given, Load, Phase, Spec};
use crate::py::arg::detached;
use crate::py::dlpack::{Array, Buffer, DType, Lender, Lent, Place, Tensor, View, ViewGuard, check_lenders};
use crate::revert::Fault;

/// Element types that an array may have in a caller's memory; the first is the type that specrs's own memory has.
fn dtypes(dtype: plan::DType) -> &'static [DType] {
    match dtype {
        plan::DType::I32 => &[DType::I32],
        plan::DType::I64 => &[DType::I64],
        plan::DType::Bool => &[DType::BOOL, DType::U8],
        plan::DType::U8 => &[DType::U8],
    }
}

/// Describe an array of the core as a tensor; `dtype` is given if its memory has another element type.
pub(super) fn view(a: &ArrayRef<'_>, dtype: Option<DType>) -> View {
    let (name, dtype) = (a.spec.name, dtype.unwrap_or(dtypes(a.spec.dtype)[0]));
    match a.extent {
        Extent::Line(n) => View::Line { name, dtype, n: n as usize },
        Extent::Table { rows, cols } => {
            View::Table { name, dtype, rows: rows as usize, cols: cols as usize, stride: a.width as usize }
        }
    }
}

/// Parse a phase as users name it: only `"draft"` has a `step`.
pub(in crate::py) fn phase(name: &str, step: Option<u32>) -> Result<Phase> {
    let phase = match (name, step) {
        ("extend", _) => Phase::Extend,
        ("decode", _) => Phase::Decode,
        ("verify", _) => Phase::Verify,
        ("draft", _) => return Ok(Phase::Draft { step: step.unwrap_or(0) }),
        _ => {
            let why = "want \"extend\", \"decode\", \"draft\" or \"verify\"".into();
            return Err(Error::Invalid { what: "phase", got: format!("{name:?}"), why });
        }
    };
    match step {
        None => Ok(phase),
        Some(step) => Err(Error::Invalid {
            what: "step",
            got: step.to_string(),
            why: format!("{name} has no steps; leave it out"),
        }),
    }
}

/// The purpose of buffers: a format of a configuration, a phase, a number of requests.
#[derive(Debug, Clone, Copy)]
pub(super) struct BufferPurpose {
    pub(super) format: AnyFormat,
    pub(super) geometry: Geometry,
    pub(super) phase: Phase,
    /// True if any step of the draft may use the buffers, not only the phase's own step.
    pub(super) any_step: bool,
    pub(super) max_batch: u32,
}

impl BufferPurpose {
    /// The largest size of each array, by its index in the format.
    pub(super) fn limits(&self) -> Result<Vec<(usize, Extent)>> {
        let of = |phase| self.format.extents(&self.geometry, &Load::limit(&self.geometry, phase, self.max_batch)?);
        if !self.any_step {
            return of(self.phase);
        }
        let mut all: Vec<(usize, Extent)> = Vec::new();
        for step in 0..self.geometry.shape().steps() {
            for (array, extent) in of(Phase::Draft { step })? {
                match all.iter_mut().find(|(a, _)| *a == array) {
                    Some((_, largest)) => *largest = larger(*largest, extent),
                    None => all.push((array, extent)),
                }
            }
        }
        all.sort_unstable_by_key(|&(array, _)| array);
        Ok(all)
    }

    /// The name of an array as the format spells it.
    pub(super) fn array(&self, name: &str) -> Result<&'static str> {
        let specs = self.format.arrays();
        specs.iter().map(|s| s.name).find(|n| *n == name).ok_or_else(|| {
            let known: Vec<&str> = specs.iter().map(|s| s.name).collect();
            let known = if known.is_empty() { "no arrays".into() } else { format!("the arrays {}", known.join(", ")) };
            let why = format!("{} has {known}", self.format.name());
            Error::Invalid { what: "tensors", got: format!("{name:?}"), why }
        })
    }

    /// The formula of the largest size of array `at`, with its numbers.
    pub(super) fn formula(&self, at: usize, limit: Extent) -> String {
        let phase = match self.phase {
            Phase::Draft { .. } if self.any_step => Phase::Draft { step: self.geometry.shape().steps() - 1 },
            phase => phase,
        };
        let listed = self.format.capacities(&self.geometry, phase, self.max_batch).unwrap_or_default();
        match listed.iter().find(|c| c.array == at) {
            Some(c) if c.extent.elements() == limit.elements() => c.formula.to_string(),
            // A draft step with a smaller size than the listed one.
            _ => limit.shape().iter().map(u64::to_string).collect::<Vec<_>>().join(" * "),
        }
    }

    /// The step that `phase` restricts the buffers to.
    fn step(&self) -> Option<u32> {
        match self.phase {
            Phase::Draft { step } if !self.any_step => Some(step),
            _ => None,
        }
    }

    /// The configuration, for errors.
    pub(super) fn describe(&self) -> String {
        let (l, s) = (self.geometry.limits(), self.geometry.shape());
        let step = self.step().map_or(String::new(), |t| format!(" step {t}"));
        format!(
            "{} {}{step} of max_batch {}, max_context_len {}, page_size {}, topk {}, steps {}, draft_tokens {}, {} layout",
            self.format.name(),
            self.phase.name(),
            self.max_batch,
            l.max_context_len,
            l.page_size,
            s.topk(),
            s.steps(),
            s.draft_tokens(),
            self.geometry.layout(),
        )
    }

    /// Check that a plan for `other` may be written here.
    pub(super) fn takes(&self, other: &BufferPurpose) -> Result<()> {
        let differ = |what: &'static str, got: String, want: String| {
            Err(Error::Mismatch { operand: "out", got: format!("buffers for {what} {got}"), want })
        };
        if self.format.name() != other.format.name() {
            return differ("format", self.format.name().into(), other.format.name().into());
        }
        if self.geometry != other.geometry {
            let want = "buffers that this planner, or one of the same geometry, made".into();
            return differ("another geometry:", self.describe(), want);
        }
        let same = match (self.phase, other.phase) {
            (Phase::Draft { .. }, Phase::Draft { .. }) if self.any_step => true,
            (mine, other) => mine == other,
        };
        if same {
            return Ok(());
        }
        let name = |u: &BufferPurpose| match u.phase {
            Phase::Draft { step } => format!("draft step {step}"),
            phase => phase.name().to_string(),
        };
        differ("phase", name(self), name(other))
    }
}

/// The larger of two sizes of an array, which holds both.
fn larger(a: Extent, b: Extent) -> Extent {
    match (a, b) {
        (Extent::Table { rows, cols }, Extent::Table { rows: r, cols: c }) => {
            Extent::Table { rows: rows.max(r), cols: cols.max(c) }
        }
        (a, b) if b.elements() > a.elements() => b,
        (a, _) => a,
    }
}

/// The memory of one array.
struct Slab {
    spec: &'static Spec,
    place: Arc<Place>,
    dtype: DType,
    extent: Extent,
}

/// State that `FormatBuffers`, the plans written into them, and the views of those plans share.
pub(super) struct Static {
    purpose: BufferPurpose,
    slabs: Vec<Slab>,
    /// Lenders of the caller's tensors that can be resized.
    lenders: Vec<Lender>,
    /// The arrays, locked by specrs's writers and readers.
    arrays: Mutex<Arrays>,
    /// Generation of the first write: a reader that never renews its lease holds this one (see
    /// [`Fault::StalePadding`]).
    first: OnceLock<u64>,
}

impl Static {
    /// Buffers for `purpose`, in specrs's own memory or, if `tensors` is given, in a caller's tensors.
    pub(super) fn new(
        purpose: BufferPurpose,
        tensors: Option<Vec<(&'static str, Tensor)>>,
        lenders: Vec<Lender>,
    ) -> Result<Self> {
        let specs = purpose.format.arrays();
        let limits = purpose.limits()?;
        let (mut given, mut slabs) = (Vec::new(), Vec::new());
        given.resize_with(specs.len(), || None);
        let mut hold = |at: usize, lent: Lent, dtype: DType, extent: Extent| {
            slabs.push(Slab { spec: &specs[at], place: lent.place(), dtype, extent });
            given[at] = Some(Given { memory: Box::new(lent), extent });
        };
        match tensors {
            None => {
                for &(at, extent) in &limits {
                    let bytes = extent.elements().saturating_mul(specs[at].dtype.size() as u64);
                    hold(at, Lent::zeroed(specs[at].name, bytes)?, dtypes(specs[at].dtype)[0], extent);
                }
            }
            Some(tensors) => {
                // All checks come before the first write to a tensor.
                let extents = check(&purpose, specs, &limits, &tensors)?;
                for ((name, tensor), extent) in tensors.into_iter().zip(extents) {
                    let Some(at) = specs.iter().position(|s| s.name == name) else { continue };
                    let dtype = tensor.dtype();
                    hold(at, Lent::tensor(tensor, dtypes(specs[at].dtype))?, dtype, extent);
                }
            }
        }
        let arrays = Mutex::new(Arrays::fixed(specs, given)?);
        Ok(Self { purpose, slabs, lenders, arrays, first: OnceLock::new() })
    }

    fn lock(&self) -> MutexGuard<'_, Arrays> {
        self.arrays.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lenders, which look at a caller's tensors again.
    pub(super) fn lenders(&self) -> Vec<&Lender> {
        self.lenders.iter().collect()
    }

    /// Check that the caller's tensors still have the same memory.
    ///
    /// # Errors
    /// Those of [`Lender::check`].
    pub(super) fn check_lenders(&self, py: Python<'_>) -> PyResult<()> {
        check_lenders(py, &self.lenders)
    }

    /// [`Self::check_lenders`] for the memory of one array.
    fn check_lender(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.lenders.iter().filter(|lender| lender.operand() == name).try_for_each(|lender| lender.check(py))
    }

    /// The purpose of the buffers.
    pub(super) fn purpose(&self) -> &BufferPurpose {
        &self.purpose
    }

    /// Write a plan, which the purpose takes, by `write`; returns the write that the plan remembers.
    pub(super) fn write(self: &Arc<Self>, write: impl FnOnce(&mut Arrays) -> Result<()>) -> Result<Written> {
        let mut arrays = self.lock();
        write(&mut arrays)?;
        let mut generation = arrays.generation();
        if self.purpose.geometry.reverts().has(Fault::StalePadding) {
            generation = *self.first.get_or_init(|| generation);
        }
        Ok(Written { memory: self.clone(), generation })
    }
}

/// Check the tensors of a caller against the arrays of the phase; returns the size of each.
fn check(
    purpose: &BufferPurpose,
    specs: &'static [Spec],
    limits: &[(usize, Extent)],
    tensors: &[(&'static str, Tensor)],
) -> Result<Vec<Extent>> {
    let mut extents = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        let Some(&(at, limit)) = limits.iter().find(|(at, _)| specs[*at].name == *name) else {
            let known: Vec<&str> = limits.iter().map(|&(at, _)| specs[at].name).collect();
            let why = format!("{} has the arrays {}", purpose.describe(), known.join(", "));
            return Err(Error::Invalid { what: "tensors", got: format!("{name:?}"), why });
        };
        tensor.lendable(dtypes(specs[at].dtype))?;
        extents.push(capacity(purpose, at, tensor, limit)?);
    }
    let spans: Vec<_> = tensors.iter().map(|(_, tensor)| tensor.span()).collect();
    disjoint(&[&spans], &[])?;
    for &(at, limit) in limits {
        if !specs[at].optional && !tensors.iter().any(|(name, _)| *name == specs[at].name) {
            let (dtype, shape) = (specs[at].dtype.name(), limit.shape());
            let want = format!("a tensor of {dtype}, shape {shape:?} at least, for {}", purpose.describe());
            return Err(Error::Mismatch { operand: specs[at].name, got: "none".into(), want });
        }
    }
    Ok(extents)
}

/// The size of a tensor, if that holds `limit`.
fn capacity(purpose: &BufferPurpose, at: usize, tensor: &Tensor, limit: Extent) -> Result<Extent> {
    let what = purpose.format.arrays().get(at).map_or("array", |s| s.name);
    let shape: Vec<u64> = tensor.shape().iter().map(|&n| n as u64).collect();
    let too_small = |need, have, of: &str| {
        let hint = format!("{of}[{}] for {}", purpose.formula(at, limit), purpose.describe());
        Err(Error::Capacity { what, need, have, hint })
    };
    match (limit, &shape[..]) {
        (Extent::Line(need), &[have]) if have < need => too_small(need, have, ""),
        (Extent::Line(_), &[have]) => Ok(Extent::Line(have)),
        (Extent::Table { rows: need, .. }, &[have, _]) if have < need => too_small(need, have, "rows of "),
        (Extent::Table { cols: need, .. }, &[_, have]) if have < need => too_small(need, have, "columns of "),
        (Extent::Table { .. }, &[rows, cols]) => Ok(Extent::Table { rows, cols }),
        (limit, _) => {
            let dims = limit.shape().len();
            Err(tensor
                .mismatch(format_args!("shape {shape:?}"), format_args!("{dims} dimension(s), as {:?}", limit.shape())))
        }
    }
}

/// One write to static buffers.
#[derive(Clone)]
pub(super) struct Written {
    memory: Arc<Static>,
    generation: u64,
}

impl Written {
    /// Same as [`Static::check_lenders`].
    pub(super) fn check_lenders(&self, py: Python<'_>) -> PyResult<()> {
        self.memory.check_lenders(py)
    }

    /// Views of the arrays that were written.
    pub(super) fn arrays(&self) -> Result<Vec<(&'static str, Array)>> {
        let arrays = self.memory.lock();
        self.current(&arrays, "arrays")?;
        let slab = |a: &ArrayRef<'_>| self.memory.slabs.iter().find(|s| s.spec.name == a.spec.name);
        let views = arrays.iter().filter_map(|a| slab(&a).map(|slab| (slab, view(&a, Some(slab.dtype)))));
        views
            .map(|(slab, view)| {
                let name = slab.spec.name;
                let guard = WriteGuard { write: self.clone(), name };
                Ok((name, Array::of(Buffer::of_place(slab.place.clone(), view)?, Some(Arc::new(guard)))))
            })
            .collect()
    }

    /// Refuse this write if a later one has overwritten it.
    fn current(&self, arrays: &Arrays, name: &str) -> Result<()> {
        let (held, current) = (self.generation, arrays.generation());
        if held == current {
            return Ok(());
        }
        let what =
            format!("{name} of {} buffers for {}", self.memory.purpose.format.name(), self.memory.purpose.phase.name());
        Err(Error::StaleOutput { what, held, current })
    }
}

/// Guards a view of one write.
struct WriteGuard {
    write: Written,
    name: &'static str,
}

impl ViewGuard for WriteGuard {
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.write.memory.check_lender(py, self.name)
    }

    fn hold(&self, read: &mut dyn FnMut()) -> Result<()> {
        let arrays = self.write.memory.lock();
        self.write.current(&arrays, self.name)?;
        read();
        Ok(())
    }
}

/// Guards a view of whole memory, which shows the last write.
struct MemoryGuard {
    memory: Arc<Static>,
    name: &'static str,
}

impl ViewGuard for MemoryGuard {
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.memory.check_lender(py, self.name)
    }

    fn hold(&self, read: &mut dyn FnMut()) -> Result<()> {
        let _arrays = self.memory.lock();
        read();
        Ok(())
    }
}

/// Static memory for the arrays of one format and phase, made by `Planner.buffers` and written by plans made with
/// `out=`: it never moves and never grows. Each write makes a new generation, and arrays of earlier plans are stale
/// from then on.
#[pyclass(frozen, module = "specrs._specrs")]
pub(in crate::py) struct FormatBuffers(pub(super) Arc<Static>);

#[pymethods]
impl FormatBuffers {
    /// Format of the arrays.
    #[getter]
    fn format(&self) -> &'static str {
        self.0.purpose.format.name()
    }

    /// Phase whose plans may be written: `"extend"`, `"decode"`, `"draft"` or `"verify"`.
    #[getter]
    fn phase(&self) -> &'static str {
        self.0.purpose.phase.name()
    }

    /// The one draft step whose plans may be written; `None` for every step, and for other phases.
    #[getter]
    fn step(&self) -> Option<u32> {
        self.0.purpose.step()
    }

    /// Requests that are certain to fit, padded ones included.
    #[getter]
    fn max_batch(&self) -> u32 {
        self.0.purpose.max_batch
    }

    /// Number of writes to the arrays, including one that has begun; 0 before the first.
    #[getter]
    fn generation(&self, py: Python<'_>) -> PyResult<u64> {
        detached(py, || Ok(self.0.lock().generation()))
    }

    /// Returns the whole memory of each array by name, for users that keep addresses (a captured graph). These tensors
    /// never go stale: they show the last write. A write sets every element of the plan's own shapes (`Plan.arrays`)
    /// and no element beyond them: those keep the values of earlier writes, by specrs or by others. In tables specrs
    /// clears the elements that it wrote before.
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.0.check_lenders(py)?;
        let dict = PyDict::new(py);
        for slab in &self.0.slabs {
            let (name, dtype) = (slab.spec.name, slab.dtype);
            let view = match slab.extent {
                Extent::Line(n) => View::Line { name, dtype, n: n as usize },
                Extent::Table { rows, cols } => {
                    View::Table { name, dtype, rows: rows as usize, cols: cols as usize, stride: cols as usize }
                }
            };
            let guard: Arc<dyn ViewGuard> = Arc::new(MemoryGuard { memory: self.0.clone(), name });
            dict.set_item(name, Array::of(Buffer::of_place(slab.place.clone(), view)?, Some(guard)))?;
        }
        Ok(dict)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let p = &self.0.purpose;
        let step = p.step().map_or("None".into(), |t| t.to_string());
        Ok(format!(
            "FormatBuffers(format={:?}, phase={:?}, step={step}, max_batch={}, generation={})",
            p.format.name(),
            p.phase.name(),
            p.max_batch,
            self.generation(py)?
        ))
    }
}
