//! The KV cache of the CPU kernels: a tensor from Python behind a lock, and the calls that write to it.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use pyo3::prelude::*;

use super::arg::{Int, detached};
use super::dlpack::{Call, DType, Lender, Output, Tensor};
use super::plan::{Moves, Plan};
use crate::bounds::PageSize;
use crate::error::{Error, Result};
use crate::host::kv::{self, KvCacheMut, KvData, KvDataMut, KvShape};
use crate::overlap::{Operand, Span};

/// Keys and values of all layers: a CPU tensor [layers, 2, num_slots, kv_heads, head_dim], float32 or bfloat16, keys at
/// index 0 and values at 1. Slot s is position `s % page_size` of page `s // page_size`; page 0 is the sink.
///
/// The tensor's memory is shared and kept alive. Every call looks at the tensor again and raises `ConfigError` if its
/// storage was resized since (`resize_`, `set_`, numpy's `resize`), which frees the memory although the cache holds it.
/// Calls that write wait for each other; torch may use the tensor between calls, not during one. The tensor may not
/// require grad.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct KvCache {
    object: Py<PyAny>,
    shape: KvShape,
    dtype: DType,
    page: PageSize,
    tensor: RwLock<Output>,
    /// The tensor's memory, which stays where it is.
    span: Span,
    /// `None` for a tensor that cannot be resized.
    lender: Option<Lender>,
}

/// A cache to read, whose memory was found in place in this call.
pub(super) struct Readable<'a>(&'a KvCache);

/// A cache to write, whose memory was found in place in this call.
pub(super) struct Writable<'a>(&'a KvCache);

impl<'a> Readable<'a> {
    /// The tensor; waits for a writer, so the caller must not hold the GIL.
    pub(super) fn read(&self) -> RwLockReadGuard<'a, Output> {
        self.0.tensor.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<'a> Writable<'a> {
    /// The tensor; waits for other users, so the caller must not hold the GIL.
    pub(super) fn write(&self) -> RwLockWriteGuard<'a, Output> {
        self.0.tensor.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KvCache {
    /// The sizes.
    pub(super) fn shape(&self) -> KvShape {
        self.shape
    }

    /// Check that the tensor's memory is where it was when the cache was made. Reading calls reach the memory in no
    /// other way.
    ///
    /// # Errors
    /// Those of [`Lender::check`].
    pub(super) fn to_read(&self, py: Python<'_>) -> PyResult<Readable<'_>> {
        self.lender.as_ref().map_or(Ok(()), |lender| lender.check(py))?;
        Ok(Readable(self))
    }

    /// [`Self::to_read`] for calls that write the tensor.
    ///
    /// # Errors
    /// Those of [`Lender::touch`].
    pub(super) fn to_write(&self, py: Python<'_>) -> PyResult<Writable<'_>> {
        self.lender.as_ref().map_or(Ok(()), |lender| lender.touch(py))?;
        Ok(Writable(self))
    }

    /// The tensor's lender and its memory, for calls that take other tensors beside it.
    pub(super) fn beside(&self) -> (Option<&Lender>, [Span; 1]) {
        (self.lender.as_ref(), [self.span])
    }

    fn dims(&self) -> [usize; 5] {
        let KvShape { layers, slots, kv_heads, head_dim } = self.shape;
        [layers, 2, slots, kv_heads, head_dim]
    }

    /// View a locked tensor of this cache as the kernels read it.
    pub(super) fn view<'a>(&self, tensor: &'a Tensor) -> Result<kv::KvCache<'a>> {
        let data = match self.dtype {
            DType::F32 => KvData::F32(tensor.input(&self.dims())?),
            _ => KvData::Bf16(tensor.input(&self.dims())?),
        };
        kv::KvCache::new(self.shape, data)
    }

    /// View a locked tensor of this cache as the kernels write it. The call took its other tensors [`beside`](Self::beside)
    /// it.
    pub(super) fn view_mut<'a>(&self, tensor: &'a mut Output) -> Result<KvCacheMut<'a>> {
        let data = match self.dtype {
            DType::F32 => KvDataMut::F32(tensor.slice(&self.dims())?),
            _ => KvDataMut::Bf16(tensor.slice(&self.dims())?),
        };
        KvCacheMut::new(self.shape, data)
    }

    /// Check that `plan` was made for pages of this cache's size.
    pub(super) fn check_plan(&self, plan: &Plan) -> Result<()> {
        let (got, want) = (plan.plan.page().get(), self.page.get());
        if got == want {
            return Ok(());
        }
        let (got, want) = (format!("pages of {got} tokens"), format!("{want} (the cache's)"));
        Err(Error::Mismatch { operand: "plan", got, want })
    }
}

#[pymethods]
impl KvCache {
    #[new]
    #[pyo3(signature = (tensor, page_size))]
    fn new(tensor: Bound<'_, PyAny>, page_size: Int) -> PyResult<Self> {
        let page = PageSize::new(page_size.u32("page_size")?)?;
        let mut t = Output::import(&tensor, "kv cache", None)?;
        const WANT: &str = "shape [layers, 2, num_slots, kv_heads, head_dim], all sizes > 0";
        let [layers, two, slots, kv_heads, head_dim] = t.dims(WANT)?;
        if two != 2 || t.shape().contains(&0) {
            return Err(t.mismatch(format_args!("shape {:?}", t.shape()), WANT).into());
        }
        if !slots.is_multiple_of(page.get() as usize) {
            let want = format_args!("whole pages of {} tokens", page.get());
            return Err(t.mismatch(format_args!("{slots} slots"), want).into());
        }
        crate::bounds::fits_i32("KV slots", slots as u64, || slots.to_string())?;
        let dtype = t.dtype();
        if dtype != DType::F32 && dtype != DType::BF16 {
            return Err(t.mismatch(dtype, "float32 or bfloat16").into());
        }
        let shape = KvShape { layers, slots, kv_heads, head_dim };
        // Checked here rather than by the first kernel: contiguous, writable, on the CPU.
        let dims = t.shape().to_vec();
        match dtype {
            DType::F32 => t.slice::<f32>(&dims).map(|_| ())?,
            _ => t.slice::<half::bf16>(&dims).map(|_| ())?,
        }
        let lender = Lender::of(&tensor, &t)?;
        let span = t.span();
        Ok(Self { object: tensor.unbind(), shape, dtype, page, tensor: RwLock::new(t), span, lender })
    }

    /// The tensor it was made from.
    #[getter]
    fn tensor(&self, py: Python<'_>) -> Py<PyAny> {
        self.object.clone_ref(py)
    }

    /// Layers.
    #[getter]
    fn layers(&self) -> usize {
        self.shape.layers
    }

    /// Slots, those of the sink included.
    #[getter]
    fn num_slots(&self) -> usize {
        self.shape.slots
    }

    /// Key and value heads.
    #[getter]
    fn kv_heads(&self) -> usize {
        self.shape.kv_heads
    }

    /// Elements of a head.
    #[getter]
    fn head_dim(&self) -> usize {
        self.shape.head_dim
    }

    /// Tokens per page.
    #[getter]
    fn page_size(&self) -> u32 {
        self.page.get()
    }

    /// `"float32"` or `"bfloat16"`.
    #[getter]
    fn dtype(&self) -> String {
        self.dtype.to_string()
    }

    fn __repr__(&self) -> String {
        let (s, p) = (&self.shape, self.page.get());
        format!(
            "KvCache(layers={}, num_slots={}, kv_heads={}, head_dim={}, page_size={p}, dtype={:?})",
            s.layers,
            s.slots,
            s.kv_heads,
            s.head_dim,
            self.dtype()
        )
    }
}

/// Write keys and values, float32 [Q, kv_heads, head_dim], of `layer` to the plan's slots.
#[pyfunction]
#[pyo3(signature = (cache, layer, plan, k, v))]
pub(super) fn kv_write(
    py: Python<'_>,
    cache: &Bound<'_, KvCache>,
    layer: Int,
    plan: &Bound<'_, Plan>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let (cache, plan, layer) = (cache.get(), plan.get(), layer.usize("layer")?);
    let live = cache.to_write(py)?;
    let (lender, span) = cache.beside();
    let call = Call::on_host().writing(lender.as_slice(), &span);
    let ([k, v], [], []) = call.take([("k", k), ("v", v)], [], [])?;
    let shape = [plan.plan.queries(), cache.shape.kv_heads, cache.shape.head_dim];
    let (ks, vs) = (k.input(&shape)?, v.input(&shape)?);
    cache.check_plan(plan)?;
    detached(py, || {
        let mut tensor = live.write();
        let mut view = cache.view_mut(&mut tensor)?;
        plan.pool.with_tables(|t| {
            plan.plan.check_rows(&t)?;
            kv::kv_write(&mut view, layer, plan.plan.out_slots(), plan.plan.qo_indptr(), ks, vs)
        })?
    })
}

/// Copy the KV of each source slot to its destination slot, in every layer, in order. Moves that a planner or a lease
/// made run once over a cache: a second run raises `StaleHandleError`, and so does a run after their pages, their lease
/// or the committed length have changed.
#[pyfunction]
#[pyo3(signature = (cache, moves))]
pub(super) fn kv_move(py: Python<'_>, cache: &Bound<'_, KvCache>, moves: &Bound<'_, Moves>) -> PyResult<()> {
    let (cache, moves) = (cache.get(), moves.get());
    if moves.moves.is_empty() {
        return Ok(());
    }
    let live = cache.to_write(py)?;
    detached(py, || {
        let mut tensor = live.write();
        let first = tensor.address() as u64;
        let end = first + (tensor.shape().iter().product::<usize>() * cache.dtype.size()) as u64;
        let mut view = cache.view_mut(&mut tensor)?;
        let mut run = || kv::kv_move(&mut view, moves.moves.src(), moves.moves.dst());
        match &moves.pool {
            None => run(),
            Some(pool) => pool.with_tables(|t| {
                moves.moves.claim(&t, first, end)?;
                run()
            })?,
        }
    })
}
