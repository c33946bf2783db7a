//! Replacement of the module `cuda` in a build without that feature: the same names, so that the package's imports work
//! in every build. Each of them raises `CudaError`.

use std::ffi::CString;

use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict, PyTuple};

use crate::error::{Error, Result};

/// The stub of the Python module, which has all of its names.
const STUB: &str = include_str!("../../python/specrs/_specrs.pyi");

/// Beginnings of the names of `cuda`'s functions and classes; no other name of the module begins so.
const BEGINNINGS: [&str; 5] = ["_Device", "_Graph", "_RoundRing", "_device_", "_graph_"];

/// The error that says why kernels cannot run.
pub(super) fn available() -> Result<()> {
    Err(Error::CudaUnavailable("built without the feature `cuda`".into()))
}

/// `None`: there is no rule, since there is no attention on a GPU.
pub(super) fn attention_rule() -> Option<i32> {
    None
}

/// Add the names to the Python module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let defined = STUB.lines().filter_map(|line| line.strip_prefix("def ").or_else(|| line.strip_prefix("class ")));
    let names = defined.filter_map(|rest| rest.split(['(', ':']).next());
    for name in names.filter(|name| BEGINNINGS.iter().any(|begin| name.starts_with(begin))) {
        let absent = |_: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| -> PyResult<()> { Ok(available()?) };
        // A Python function needs its name for as long as the process runs; the module is made once in a process.
        let lasting = Box::leak(CString::new(name)?.into_boxed_c_str());
        module.add(name, PyCFunction::new_closure(module.py(), Some(lasting), None, absent)?)?;
    }
    Ok(())
}
