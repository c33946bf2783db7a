//! What a build without the feature `cuda` has in the place of `cuda`: the same names, so that the package imports the same
//! everywhere. Each of them raises `CudaError`.

use std::ffi::CString;

use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict, PyTuple};

use crate::error::{Error, Result};

/// The stub of the Python module, which has every name of it.
const STUB: &str = include_str!("../../python/specrs/_specrs.pyi");

/// How the functions and classes of `cuda` begin, and nothing else of the module does.
const BEGINNINGS: [&str; 5] = ["_Device", "_Graph", "_RoundRing", "_device_", "_graph_"];

/// Why kernels cannot run.
pub(super) fn available() -> Result<()> {
    Err(Error::CudaUnavailable("built without the feature `cuda`".into()))
}

/// There is no rule, since there is no attention on a GPU.
pub(super) fn attention_rule() -> Option<i32> {
    None
}

/// Add the names to the Python module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let defined = STUB.lines().filter_map(|line| line.strip_prefix("def ").or_else(|| line.strip_prefix("class ")));
    let names = defined.filter_map(|rest| rest.split(['(', ':']).next());
    for name in names.filter(|name| BEGINNINGS.iter().any(|begin| name.starts_with(begin))) {
        let absent = |_: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| -> PyResult<()> { Ok(available()?) };
        // A function of Python's needs its name for as long as the process; the module is made once in one.
        let lasting = Box::leak(CString::new(name)?.into_boxed_c_str());
        module.add(name, PyCFunction::new_closure(module.py(), Some(lasting), None, absent)?)?;
    }
    Ok(())
}
