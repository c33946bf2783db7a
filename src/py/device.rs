//! Availability of CUDA, which a build without the feature `cuda` answers too.

use pyo3::prelude::*;

use super::arg::detached;
use super::cuda::available;
use crate::error::Error;

/// Returns whether CUDA kernels can run in this process: the build has them, and there are a driver and a GPU.
#[pyfunction]
pub(super) fn cuda_available(py: Python<'_>) -> PyResult<bool> {
    detached(py, || Ok(available().is_ok()))
}

/// The reason why `cuda_available()` is false; `None` where it is true.
#[pyfunction]
pub(super) fn cuda_unavailable_reason(py: Python<'_>) -> PyResult<Option<String>> {
    detached(py, || {
        Ok(available().err().map(|e| match e {
            Error::CudaUnavailable(why) => why,
            other => other.to_string(),
        }))
    })
}
