//! The way in which a Python object hands out its tensor, found once for each type.
//!
//! There are three ways, fastest first: the C exchange API of DLPack 1.3 (`__dlpack_c_exchange_api__`; torch has it;
//! about 0.2 us a tensor), `torch.utils.dlpack.to_dlpack` for older torch (0.4 us), and `__dlpack__` (numpy 0.7 us;
//! torch's is written in Python and takes 2.7). `benches/bench_calls.py` measures whole calls.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::{PyBufferError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyType};
use pyo3::{ffi, intern};

use super::abi::{EXCHANGE, ExchangeApi, FromObject, MAX_VERSION};
use super::array::Array;
use crate::error::Error;

/// The way in which objects of a type hand out their tensor.
#[derive(Clone)]
pub(super) enum Producer {
    Own,
    Exchange(FromObject),
    Function(Arc<Py<PyAny>>),
    Protocol,
}

/// The findings about a type of tensors.
#[derive(Clone)]
pub(super) struct Known {
    pub(super) producer: Producer,
    /// `torch.autograd.graph.increment_version`, for torch's tensors.
    pub(super) increment_version: Option<Arc<Py<PyAny>>>,
    /// True if taking such a tensor may run code of its class, which may do anything.
    runs_python: bool,
}

/// The types seen so far. Each entry keeps its type alive, so that no other type can get its address.
static KNOWN: Mutex<Vec<(Py<PyType>, Known)>> = Mutex::new(Vec::new());
/// Number of types that are remembered; in a program with more tensor types, the others are looked up each time.
const MAX_KNOWN: usize = 32;

/// The findings about the type of `obj`, looked up or found now.
pub(super) fn known(obj: &Bound<'_, PyAny>) -> PyResult<Known> {
    let ty = obj.get_type();
    let seen = |list: &Vec<(Py<PyType>, Known)>| {
        list.iter().find(|(t, _)| t.as_ptr() == ty.as_ptr()).map(|(_, known)| known.clone())
    };
    if let Some(k) = seen(&KNOWN.lock().unwrap_or_else(PoisonError::into_inner)) {
        return Ok(k);
    }
    // Both calls run Python code, so they are made outside the lock.
    let found = Known {
        producer: find_producer(obj, &ty)?,
        increment_version: increment_version(obj)?,
        runs_python: !is_native(obj, &ty)?,
    };
    let mut list = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if list.len() < MAX_KNOWN && seen(&list).is_none() {
        list.push((ty.unbind(), found.clone()));
    }
    Ok(found)
}

/// Returns whether taking the tensor of `obj` may run code of its class.
pub(super) fn runs_python(obj: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(known(obj)?.runs_python)
}

/// Returns whether the type is specrs's, torch's or numpy's own array type, which run compiled code alone; false for a
/// class derived from one of these.
fn is_native(obj: &Bound<'_, PyAny>, ty: &Bound<'_, PyType>) -> PyResult<bool> {
    if obj.cast_exact::<Array>().is_ok() {
        return Ok(true);
    }
    let modules = obj.py().import(intern!(obj.py(), "sys"))?.getattr(intern!(obj.py(), "modules"))?;
    for (module, class) in [("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("numpy", "ndarray")] {
        if let Some(module) = modules.cast::<PyDict>()?.get_item(module)?
            && module.getattr_opt(class)?.is_some_and(|class| class.is(ty))
        {
            return Ok(true);
        }
    }
    Ok(false)
}

fn find_producer(obj: &Bound<'_, PyAny>, ty: &Bound<'_, PyType>) -> PyResult<Producer> {
    let py = obj.py();
    if obj.cast::<Array>().is_ok() {
        return Ok(Producer::Own);
    }
    if let Ok(capsule) = ty.getattr(intern!(py, "__dlpack_c_exchange_api__"))
        && capsule.cast::<PyCapsule>().is_ok()
    {
        // SAFETY: the call checks the name, and returns null for a capsule of another name.
        let mut api: *const ExchangeApi =
            unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), EXCHANGE.as_ptr()) }.cast();
        if api.is_null() {
            return Err(PyErr::fetch(py));
        }
        // SAFETY: the table lives as long as the process (DLPack's rule); every version starts with this header,
        // and the rest is read only under the major version that is known.
        while let Some(table) = unsafe { api.as_ref() } {
            if table.version.major == MAX_VERSION.0
                && let Some(f) = table.from_object
            {
                return Ok(Producer::Exchange(f));
            }
            api = table.previous;
        }
    }
    let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?.cast_into::<PyDict>()?;
    if let Some(torch) = modules.get_item("torch")?
        && let (Ok(class), Ok(dlpack)) = (torch.getattr("Tensor"), modules.as_any().get_item("torch.utils.dlpack"))
        && obj.is_instance(&class)?
        && let Ok(f) = dlpack.getattr("to_dlpack")
    {
        return Ok(Producer::Function(Arc::new(f.unbind())));
    }
    Ok(Producer::Protocol)
}

/// `obj.__dlpack__(...)` with as many of the newer arguments as it takes.
pub(super) fn call_dlpack<'py>(
    obj: &Bound<'py, PyAny>,
    operand: &'static str,
    stream: Option<isize>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = obj.py();
    let Ok(method) = obj.getattr(intern!(py, "__dlpack__")) else {
        let got = obj.get_type().qualname()?.to_string();
        return Err(Error::Mismatch { operand, got, want: "a tensor (an object with __dlpack__)".into() }.into());
    };
    let kwargs = PyDict::new(py);
    if let Some(s) = stream {
        kwargs.set_item("stream", s)?;
    }
    let old = kwargs.copy()?;
    kwargs.set_item("max_version", MAX_VERSION)?;
    kwargs.set_item("copy", false)?; // with a copy, writes to an output would be lost
    let refused = |e: &PyErr| e.is_instance_of::<PyTypeError>(py);
    match method.call((), Some(&kwargs)) {
        Err(e) if refused(&e) => method.call((), Some(&old)),
        done => done,
    }
}

/// The exception of a producer as an error that names the operand. Interrupts and our own errors pass as they are.
pub(super) fn refused(obj: &Bound<'_, PyAny>, operand: &'static str, cause: PyErr) -> PyErr {
    let py = obj.py();
    let theirs = cause.is_instance_of::<PyBufferError>(py)
        || cause.is_instance_of::<PyRuntimeError>(py)
        || cause.is_instance_of::<PyTypeError>(py)
        || cause.is_instance_of::<PyValueError>(py) && cause.value(py).getattr("kind").is_err();
    if !theirs {
        return cause;
    }
    let text = cause.value(py).to_string();
    let class = obj.get_type().qualname().map_or_else(|_| "object".into(), |n| n.to_string());
    let got = format!("a {class} that cannot be exported: {}", text.lines().next().unwrap_or_default());
    let error: PyErr = Error::Mismatch { operand, got, want: "a dense tensor with memory of its own".into() }.into();
    error.set_cause(py, Some(cause));
    error
}

/// The function that counts up the version of `obj`; `None` if that is no tensor of torch's.
fn increment_version(obj: &Bound<'_, PyAny>) -> PyResult<Option<Arc<Py<PyAny>>>> {
    let py = obj.py();
    let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?.cast_into::<PyDict>()?;
    let Some(torch) = modules.get_item("torch")? else { return Ok(None) };
    let Some(class) = torch.getattr_opt(intern!(py, "Tensor"))? else { return Ok(None) };
    if !obj.is_instance(&class)? {
        return Ok(None);
    }
    // The function beneath `torch.autograd.graph.increment_version`, whose Python wrapper takes more than half of the
    // time. Both take tensors in a tuple.
    let found = match torch.getattr_opt(intern!(py, "_C"))?.map(|c| c.getattr_opt(intern!(py, "_increment_version"))) {
        Some(Ok(Some(function))) => function,
        _ => py.import(intern!(py, "torch.autograd.graph"))?.getattr(intern!(py, "increment_version"))?,
    };
    Ok(Some(Arc::new(found.unbind())))
}
