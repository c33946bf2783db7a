//! `Array`: results of specrs as tensors that any DLPack consumer takes without a copy.

use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::abi::{DType, Device, Element};
use super::buffer::Buffer;
use crate::error::Result;
use crate::py::arg::detached;

/// Guard of a view of memory that is written again and again: it tells whether the memory still holds the viewed
/// values.
pub(in crate::py) trait ViewGuard: Send + Sync {
    /// Check that the memory is still there: a caller's tensor that was resized since has freed it.
    ///
    /// # Errors
    /// `Error::Mismatch` if the memory is gone.
    fn check(&self, py: Python<'_>) -> PyResult<()>;

    /// Run `read` while nobody writes the memory.
    ///
    /// # Errors
    /// `Error::StaleOutput` once it was written again.
    fn hold(&self, read: &mut dyn FnMut()) -> Result<()>;
}

/// A small tensor of specrs on the CPU. `torch.from_dlpack(a)` and `numpy.from_dlpack(a)` share its memory (numpy has
/// no bfloat16 and refuses it); `tolist()` copies it. Writing into the shared memory changes this array and
/// nothing that specrs reads; numpy refuses to write into a plan's arrays.
#[pyclass(frozen, module = "specrs._specrs")]
pub(in crate::py) struct Array {
    buffer: Arc<Buffer>,
    /// `Some` for a view of static memory.
    guard: Option<Arc<dyn ViewGuard>>,
}

impl Array {
    /// Copy `values` into an array of this shape.
    pub(in crate::py) fn new<T: Element>(values: &[T], shape: &[usize]) -> Result<Self> {
        Ok(Self::of(Buffer::new(values, shape)?, None))
    }

    /// An array over `buffer`, readable for as long as `guard` allows.
    pub(in crate::py) fn of(buffer: Buffer, guard: Option<Arc<dyn ViewGuard>>) -> Self {
        Self { buffer: Arc::new(buffer), guard }
    }

    /// The buffer, if its memory is still there and still holds the array's values.
    pub(in crate::py) fn current(&self, py: Python<'_>) -> PyResult<&Arc<Buffer>> {
        if let Some(guard) = &self.guard {
            guard.check(py)?;
            detached(py, || guard.hold(&mut || ()))?;
        }
        Ok(&self.buffer)
    }

    /// A copy of the elements.
    fn bytes(&self, py: Python<'_>) -> PyResult<Vec<u8>> {
        let Some(guard) = &self.guard else { return Ok(self.buffer.bytes()) };
        guard.check(py)?;
        detached(py, || {
            let mut bytes = Vec::new();
            guard.hold(&mut || bytes = self.buffer.bytes())?;
            Ok(bytes)
        })
    }

    /// Copy `values` into an array of one dimension.
    pub(in crate::py) fn line<T: Element>(values: &[T]) -> Result<Self> {
        Self::new(values, &[values.len()])
    }
}

#[pymethods]
impl Array {
    /// Sizes of the dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, pyo3::types::PyTuple>> {
        pyo3::types::PyTuple::new(py, self.buffer.shape())
    }

    /// Element type: `"int32"`, `"int64"`, `"float32"`, `"bfloat16"`, ...
    #[getter]
    fn dtype(&self) -> String {
        self.buffer.dtype().to_string()
    }

    /// The values as (nested) lists.
    fn tolist<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let bytes = self.bytes(py)?;
        let size = self.buffer.dtype().size();
        let mut chunks = bytes.chunks_exact(size.max(1));
        nested(py, self.buffer.shape(), self.buffer.dtype(), &mut chunks)
    }

    fn __len__(&self) -> PyResult<usize> {
        let first = self.buffer.shape().first().copied();
        first.map(|n| n as usize).ok_or_else(|| pyo3::exceptions::PyTypeError::new_err("len() of a 0-d array"))
    }

    /// Export as a capsule (array API): `dltensor_versioned` where `max_version` is at least (1, 0), else `dltensor`.
    /// Raises `BufferError` for a `stream`, or a device other than the CPU.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if let Some(stream) = stream {
            return Err(PyBufferError::new_err(format!("stream = {stream}: a CPU array has no stream, want None")));
        }
        if let Some(device) = dl_device
            && device != (Device::CPU.kind, Device::CPU.index)
        {
            let message =
                format!("dl_device = {device:?}: a CPU array exports to (1, 0) only; copy it in the consumer");
            return Err(PyBufferError::new_err(message));
        }
        let buffer = match copy {
            // Copied by `bytes`, which keeps writers out.
            Some(true) => Arc::new(Buffer::own(&self.bytes(py)?, self.buffer.dtype(), self.buffer.shape().into())),
            _ => self.current(py)?.clone(),
        };
        buffer.capsule(py, max_version.is_some_and(|v| v.0 >= 1), copy == Some(true))
    }

    /// `(1, 0)`: the CPU.
    fn __dlpack_device__(&self) -> (i32, i32) {
        (Device::CPU.kind, Device::CPU.index)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Array({}, dtype={:?})", self.tolist(py)?, self.dtype()))
    }
}

/// Lists over the outermost dimension; scalars where there is none left.
fn nested<'py, 'b>(
    py: Python<'py>,
    shape: &[i64],
    dtype: DType,
    values: &mut impl Iterator<Item = &'b [u8]>,
) -> PyResult<Bound<'py, PyAny>> {
    if let Some((&n, rest)) = shape.split_first() {
        let list = PyList::empty(py);
        for _ in 0..n {
            list.append(nested(py, rest, dtype, values)?)?;
        }
        return Ok(list.into_any());
    }
    let b = values.next().unwrap_or_default();
    Ok(match dtype {
        DType::I32 => bytemuck::pod_read_unaligned::<i32>(b).into_pyobject(py)?.into_any(),
        DType::I64 => bytemuck::pod_read_unaligned::<i64>(b).into_pyobject(py)?.into_any(),
        DType::F32 => bytemuck::pod_read_unaligned::<f32>(b).into_pyobject(py)?.into_any(),
        DType::BF16 => bytemuck::pod_read_unaligned::<half::bf16>(b).to_f32().into_pyobject(py)?.into_any(),
        DType::F16 => bytemuck::pod_read_unaligned::<half::f16>(b).to_f32().into_pyobject(py)?.into_any(),
        DType::BOOL => pyo3::types::PyBool::new(py, b.first() != Some(&0)).to_owned().into_any(),
        _ => b.first().copied().unwrap_or_default().into_pyobject(py)?.into_any(),
    })
}
