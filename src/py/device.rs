//! CUDA for Python: whether it is there, kernel launches, the fault check. `python/specrs/device.py` is its face.
//!
//! These functions exist in every build, so that the package imports the same everywhere; without the feature `cuda`,
//! or without kernels, driver or GPU, they raise `CudaError` with the reason.

use pyo3::prelude::*;

use super::arg::{Int, detached};
#[cfg(feature = "cuda")]
use super::dlpack::{Output, Tensor, cuda};
#[cfg(feature = "cuda")]
use crate::device::{self, Device, MovesView};
use crate::error::{Error, Result};

#[cfg(feature = "cuda")]
fn available() -> Result<()> {
    device::available()
}

#[cfg(not(feature = "cuda"))]
pub(super) fn available() -> Result<()> {
    Err(Error::CudaUnavailable("built without the feature `cuda`".into()))
}

/// Whether CUDA kernels can run in this process: the build has them, and there are a driver and a GPU.
#[pyfunction]
pub(super) fn cuda_available(py: Python<'_>) -> PyResult<bool> {
    detached(py, || Ok(available().is_ok()))
}

/// Why `cuda_available()` is false; `None` where it is true.
#[pyfunction]
pub(super) fn cuda_unavailable_reason(py: Python<'_>) -> PyResult<Option<String>> {
    detached(py, || {
        Ok(available().err().map(|e| match e {
            Error::CudaUnavailable(why) => why,
            other => other.to_string(),
        }))
    })
}

/// Set up CUDA device `ordinal`: retain torch's context, load the kernels, allocate the fault record. Returns its
/// compute capability, major * 10 + minor.
#[pyfunction]
pub(super) fn _device_init(py: Python<'_>, ordinal: Int) -> PyResult<i32> {
    let ordinal = ordinal.i32("CUDA device")?;
    #[cfg(feature = "cuda")]
    return detached(py, move || Ok(Device::get(ordinal)?.capability()));
    #[cfg(not(feature = "cuda"))]
    detached(py, move || available().map(|()| ordinal))
}

/// Raise `OutOfBoundsError` for what a kernel of device `ordinal` skipped since the last call, or `NonFiniteError` for
/// scores that it could choose nothing from.
#[pyfunction]
pub(super) fn _device_check(py: Python<'_>, ordinal: Int) -> PyResult<()> {
    let ordinal = ordinal.i32("CUDA device")?;
    #[cfg(feature = "cuda")]
    return detached(py, move || Device::get(ordinal)?.check());
    #[cfg(not(feature = "cuda"))]
    detached(py, move || available().map(|()| _ = ordinal))
}

/// Launch the KV move on the raw stream `stream` of the cache's device.
#[pyfunction]
#[pyo3(signature = (cache, src, dst, offsets, stream))]
pub(super) fn _device_kv_move(
    cache: &Bound<'_, PyAny>,
    src: &Bound<'_, PyAny>,
    dst: &Bound<'_, PyAny>,
    offsets: &Bound<'_, PyAny>,
    stream: Int,
) -> PyResult<()> {
    let handle = stream.usize("stream")?;
    #[cfg(feature = "cuda")]
    {
        // -1: no ordering between streams is asked of the producer, the launch is on the caller's own.
        let import = |tensor, operand| Tensor::import(tensor, operand, Some(-1));
        let target = Output::import(cache, "cache", Some(-1))?;
        let tensors = [import(src, "src")?, import(dst, "dst")?, import(offsets, "offsets")?];
        detached(cache.py(), || {
            let (cache, [src, dst, offsets]) = (&target, &tensors);
            let ordinal = cache.cuda_ordinal()?;
            let view = cache.device_kv_cache(ordinal, &[src, dst, offsets])?;
            let slices = (src.device_i32(ordinal)?, dst.device_i32(ordinal)?, offsets.device_i32(ordinal)?);
            let moves = MovesView::new(slices.0, slices.1, slices.2)?;
            Device::get(ordinal)?.kernels().kv_move.launch(cuda::stream(handle), &view, &moves)
        })
    }
    #[cfg(not(feature = "cuda"))]
    {
        _ = (src, dst, offsets, handle);
        detached(cache.py(), available)
    }
}
