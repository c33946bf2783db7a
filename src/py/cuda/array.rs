//! Regions of an arena as CUDA tensors: lent to a consumer's stream, taken back behind its work there.

use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;

use super::tensors::{self, loaned};
use crate::device::{Arena, Region, Stream};
use crate::error::Error;
use crate::py::arg::detached;
use crate::py::dlpack::{DType, TensorDevice as Device};

register! { class DeviceArray; }

/// A region of device memory of specrs. `torch.from_dlpack(a)` shares it: torch's current stream waits for what the
/// region's own stream has then, and the memory stays until the work on that stream, as it is when torch drops the tensor,
/// has finished. Nothing waits on the host.
#[pyclass(frozen, name = "_DeviceArray", module = "specrs._specrs")]
pub(super) struct DeviceArray {
    arena: Arc<Arena>,
    region: Region<u8>,
    name: &'static str,
    dtype: DType,
    shape: Vec<usize>,
    /// The stream of the work that writes the region.
    home: Stream,
}

/// The element type of a name, such as `"float32"`.
pub(super) fn element(name: &str) -> Result<DType, Error> {
    let known = [DType::I32, DType::I64, DType::U8, DType::F32, DType::F16, DType::BF16];
    known.into_iter().find(|d| d.to_string() == name || (name == "bfloat16" && *d == DType::BF16)).ok_or_else(|| {
        Error::Invalid {
            what: "dtype",
            got: name.into(),
            why: "one of int32, int64, uint8, float32, float16, bfloat16 is wanted".into(),
        }
    })
}

impl DeviceArray {
    /// The region as a tensor of this type and shape, whose writers are on `home`.
    pub(super) fn new(
        arena: Arc<Arena>,
        region: Region<u8>,
        name: &'static str,
        (dtype, shape): (DType, Vec<usize>),
        home: Stream,
    ) -> Self {
        Self { arena, region, name, dtype, shape, home }
    }

    fn device(&self) -> Device {
        Device::cuda(self.arena.buffer().ordinal())
    }
}

#[pymethods]
impl DeviceArray {
    /// Export as a capsule (array API). `stream` is the consumer's: `None` and 1 are the legacy default stream, -1 asks
    /// for no order; from 3 on it is a raw handle. Raises `BufferError` for 0, which has no meaning for CUDA, for 2, the
    /// per-thread default stream, whose work cannot be followed from another thread, for a copy and for another device.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<isize>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let device = self.device();
        if let Some(asked) = dl_device
            && asked != (device.kind, device.index)
        {
            let message = format!("dl_device = {asked:?}: the memory is on {device}; copy it in the consumer");
            return Err(PyBufferError::new_err(message));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err("copy = True: device memory is lent as it is; copy it in the consumer"));
        }
        let refused = |error: Error| PyBufferError::new_err(error.to_string());
        let consumer = match stream {
            None => tensors::stream(1).map_err(refused)?,
            Some(-1) => self.home,
            Some(0) => {
                let message = "stream = 0: DLPack leaves its meaning open; 1 is the legacy default stream";
                return Err(PyBufferError::new_err(message));
            }
            Some(handle) if handle > 0 => tensors::stream(handle as usize).map_err(refused)?,
            Some(other) => return Err(PyBufferError::new_err(format!("stream = {other}: no stream"))),
        };
        let buffer = detached(py, || {
            let loan = self.arena.lend(self.region, self.home, consumer)?;
            loaned(self.name, loan, device, self.dtype, &self.shape)
        })?;
        Arc::new(buffer).capsule(py, max_version.is_some_and(|v| v.0 >= 1), false)
    }

    /// `(2, ordinal)`: CUDA.
    fn __dlpack_device__(&self) -> (i32, i32) {
        let device = self.device();
        (device.kind, device.index)
    }
}
