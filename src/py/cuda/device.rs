//! A device for Python: setting it up, streams and their fault records, the KV move. `python/specrs/device.py` is its face.

use pyo3::prelude::*;

use super::tensors;
use crate::device::{Device, Faults, MovesView, Stream};
use crate::error::Result;
use crate::py::arg::{Int, detached};
use crate::py::dlpack::Call;

register! { fn _device_check, _device_init, _device_kv_move; class DeviceFaults, DeviceStream; }

type Recorded = &'static Faults;

/// Set up CUDA device `ordinal`: retain torch's context, load the kernels, allocate the fault record. Returns its
/// compute capability, major * 10 + minor.
#[pyfunction]
fn _device_init(py: Python<'_>, ordinal: Int) -> PyResult<i32> {
    let ordinal = ordinal.i32("CUDA device")?;
    detached(py, move || Ok(Device::get(ordinal)?.capability()))
}

/// Raise `OutOfBoundsError` for what a kernel of device `ordinal` skipped since the last call, or `NonFiniteError` for
/// scores that it could choose nothing from.
#[pyfunction]
fn _device_check(py: Python<'_>, ordinal: Int) -> PyResult<()> {
    let ordinal = ordinal.i32("CUDA device")?;
    detached(py, move || Device::get(ordinal)?.check())
}

/// A fault record of its own on CUDA device `ordinal`, beside the device's: for an engine that shares the device.
#[pyclass(frozen, name = "_DeviceFaults", module = "specrs._specrs")]
pub(super) struct DeviceFaults(Recorded);

#[pymethods]
impl DeviceFaults {
    #[new]
    fn new(py: Python<'_>, ordinal: Int) -> PyResult<Self> {
        let ordinal = ordinal.i32("CUDA device")?;
        detached(py, move || Device::get(ordinal)?.faults().map(Self))
    }

    /// The raw stream `stream` for launches that report here; every `stream` argument takes it.
    fn on(&self, stream: Int) -> PyResult<DeviceStream> {
        stream.usize("stream")?;
        Ok(DeviceStream { handle: stream, faults: self.0 })
    }

    /// As `_device_check`, of this record.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.0.check())
    }
}

/// A raw stream whose launches report to a fault record (`_DeviceFaults.on`).
#[pyclass(frozen, name = "_DeviceStream", module = "specrs._specrs")]
pub(super) struct DeviceStream {
    handle: Int,
    faults: Recorded,
}

/// Where a launch goes: a raw stream, whose launches report to the device's own record, or a `_DeviceStream`.
pub(super) struct StreamArg {
    handle: Int,
    faults: Option<Recorded>,
}

impl<'a, 'py> FromPyObject<'a, 'py> for StreamArg {
    type Error = PyErr;

    fn extract(obj: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(stream) = obj.cast::<DeviceStream>() {
            let stream = stream.get();
            return Ok(Self { handle: stream.handle, faults: Some(stream.faults) });
        }
        Ok(Self { handle: obj.extract()?, faults: None })
    }
}

impl StreamArg {
    /// The stream.
    pub(super) fn get(self) -> Result<Stream> {
        let stream = tensors::stream(self.handle.usize("stream")?)?;
        Ok(self.faults.map_or(stream, |faults| stream.reporting_to(faults)))
    }
}

/// Launch the KV move on the raw stream `stream` of the cache's device.
#[pyfunction]
#[pyo3(signature = (cache, src, dst, offsets, stream))]
fn _device_kv_move(
    cache: &Bound<'_, PyAny>,
    src: &Bound<'_, PyAny>,
    dst: &Bound<'_, PyAny>,
    offsets: &Bound<'_, PyAny>,
    stream: StreamArg,
) -> PyResult<()> {
    let stream = stream.get()?;
    let py = cache.py();
    let read = [("src", src), ("dst", dst), ("offsets", offsets)];
    let ([src, dst, offsets], [], [cache]) = Call::on_device().take(read, [], [("cache", cache)])?;
    detached(py, || {
        let ordinal = cache.cuda_ordinal()?;
        let view = cache.device_kv_cache(ordinal)?;
        let slices = (src.device_i32(ordinal)?, dst.device_i32(ordinal)?, offsets.device_i32(ordinal)?);
        let moves = MovesView::new(slices.0, slices.1, slices.2)?;
        Device::get(ordinal)?.kernels().kv_move.launch(stream, &view, &moves)
    })
}
