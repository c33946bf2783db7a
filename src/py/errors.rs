//! The one table from core errors to Python exceptions.
//!
//! Each row names a variant of [`Error`], its fields, and the exception class that carries it. Every field of the
//! variant is an attribute of the exception, `kind` is the variant's name, and `str()` is the core's message. The match
//! that the table expands to is exhaustive: a new variant does not compile until it has a row.

use pyo3::exceptions::{PyException, PyIndexError, PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};

use crate::error::Error;

/// The exception classes, built once per process.
struct Classes {
    base: Py<PyType>,
    config: Py<PyType>,
    exhausted: Py<PyType>,
    ledger: Py<PyType>,
    stale_handle: Py<PyType>,
    out_of_bounds: Py<PyType>,
    non_finite: Py<PyType>,
    grammar: Py<PyType>,
    grammar_failed: Py<PyType>,
    cuda: Py<PyType>,
    device_memory: Py<PyType>,
    stale_output: Py<PyType>,
    graph_capture: Py<PyType>,
}

static CLASSES: PyOnceLock<Classes> = PyOnceLock::new();

fn class(py: Python<'_>, name: &str, bases: &[Bound<'_, PyType>], doc: &str) -> PyResult<Py<PyType>> {
    let dict = PyDict::new(py);
    dict.set_item("__doc__", doc)?;
    dict.set_item("__module__", "specrs._specrs")?;
    let made = py.get_type::<PyType>().call1((name, PyTuple::new(py, bases)?, dict))?;
    Ok(made.cast_into::<PyType>()?.unbind())
}

fn classes(py: Python<'_>) -> PyResult<&Classes> {
    CLASSES.get_or_try_init(py, || {
        let base_py = class(
            py,
            "SpecrsError",
            &[py.get_type::<PyException>()],
            "Base of every error of specrs. `kind` names the core's variant (\"\" for one raised in Python); the operands \
             of the variant are attributes.",
        )?;
        let base = base_py.bind(py).clone();
        base.setattr("kind", "")?;
        let sub = |name: &str, also: Option<Bound<'_, PyType>>, doc: &str| {
            let mut bases = vec![base.clone()];
            bases.extend(also);
            class(py, name, &bases, doc)
        };
        let value = || Some(py.get_type::<PyValueError>());
        let index = || Some(py.get_type::<PyIndexError>());
        let runtime = || Some(py.get_type::<PyRuntimeError>());
        let config = sub("ConfigError", value(), "A value, size, shape or element type that cannot be honoured.")?;
        Ok(Classes {
            grammar: class(
                py,
                "GrammarError",
                &[config.bind(py).clone()],
                "A grammar that cannot be honoured: malformed, too large, or of a model without a tokenizer; raised before \
                 its request is queued.",
            )?,
            grammar_failed: sub(
                "GrammarFailedError",
                None,
                "The grammar of a request allows no token that the request could take, or following it met a limit.",
            )?,
            config,
            exhausted: sub("PoolExhaustedError", None, "Too few free pages or sequences; nothing was changed.")?,
            ledger: sub("LedgerError", None, "A double free, or pages whose account does not add up.")?,
            stale_handle: sub("StaleHandleError", None, "A sequence, lease or plan that is no longer live.")?,
            out_of_bounds: sub(
                "OutOfBoundsError",
                index(),
                "A computed index left its buffer; the access was skipped.",
            )?,
            non_finite: sub("NonFiniteError", value(), "NaN, or a row without a finite score.")?,
            cuda: sub("CudaError", runtime(), "CUDA is missing, or its driver refused a call.")?,
            device_memory: sub(
                "DeviceMemoryError",
                Some(py.get_type::<PyMemoryError>()),
                "A device has too little free memory; nothing was allocated.",
            )?,
            stale_output: sub("StaleOutputError", None, "A view of static buffers, or a graph's output, was read after a later write.")?,
            graph_capture: sub(
                "GraphCaptureError",
                None,
                "Work could not be captured into a graph; nothing of the graph is left, and its stream works as before.",
            )?,
            base: base_py,
        })
    })
}

/// Add every exception class to the module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let c = classes(module.py())?;
    for class in [
        &c.base,
        &c.config,
        &c.exhausted,
        &c.ledger,
        &c.stale_handle,
        &c.out_of_bounds,
        &c.non_finite,
        &c.grammar,
        &c.grammar_failed,
        &c.cuda,
        &c.device_memory,
        &c.stale_output,
        &c.graph_capture,
    ] {
        let class = class.bind(module.py());
        module.add(class.name()?, class)?;
    }
    Ok(())
}

macro_rules! table {
    ($($variant:ident { $($field:tt : $name:ident = $example:expr),+ } => $class:ident,)+) => {
        /// Build the exception for `error`, with its fields as attributes.
        fn exception<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
            let c = classes(py)?;
            let message = error.to_string();
            match error {
                $(Error::$variant { $($field: $name),+ } => {
                    let e = c.$class.bind(py).call1((message,))?;
                    e.setattr("kind", stringify!($variant))?;
                    $(e.setattr(stringify!($name), $name.clone())?;)+
                    Ok(e)
                })+
            }
        }

        /// One error of each variant.
        fn examples() -> Vec<Error> {
            vec![$(Error::$variant { $($field: $example),+ }),+]
        }
    };
}

table! {
    OutOfRange { what: what = "topk", got: got = 65, min: min = 1, max: max = 64 } => config,
    Invalid { what: what = "page_size", got: got = "3".into(), why: why = "must be a power of two".into() } => config,
    Overflow { what: what = "slots", expr: expr = "64 * 8".into(), ty: ty = "int32", limit: limit = 2_147_483_647 } => config,
    Capacity { what: what = "mask", need: need = 2, have: have = 1, hint: hint = "draft_tokens".into() } => config,
    Mismatch { operand: operand = "q", got: got = "float64".into(), want: want = "float32".into() } => config,
    PoolExhausted { need: need = 3, free: free = 1, total: total = 8 } => exhausted,
    TooManySequences { limit: limit = 4 } => exhausted,
    DoubleFree { page: page = 7, owners: owners = 1, frees: frees = 2, history: history = "alloc".into() } => ledger,
    Audit { what: what = "free pages".into(), history: history = "alloc".into() } => ledger,
    Dead { what: what = "sequence", id: id = "3.1".into(), why: why = "released".into() } => stale_handle,
    OutOfBounds { kernel: kernel = "kv_write", buffer: buffer = "cache", request: request = 1, step: step = -1,
        index: index = 99, bound: bound = 64 } => out_of_bounds,
    NonFinite { what: what = "target logits", value: value = "NaN", request: request = 0, row: row = 2,
        position: position = 7, index: index = 5 } => non_finite,
    Grammar { what: what = "regex", why: why = "unclosed group".into() } => grammar,
    GrammarFailed { why: why = "no token is allowed".into(), request: request = 0, row: row = 2, position: position = 7 } => grammar_failed,
    StaleOutput { what: what = "kv_indices".into(), held: held = 1, current: current = 2 } => stale_output,
    GraphCapture { call: call = "cuStreamEndCapture", node: node = "host".into(), path: path = "body / 0 host".into(),
        why: why = "host at body / 0 host: the body of a loop runs on the device".into() } => graph_capture,
    DeviceMemory { what: what = "the engine".into(), device: device = 0, need: need = 9, have: have = 8,
        hint: hint = "num_pages = 3 fits".into() } => device_memory,
    Cuda { call: call = "cuLaunchKernel", message: message = "CUDA_ERROR_INVALID_VALUE (1)".into() } => cuda,
    CudaUnavailable { 0: reason = "no libcuda".into() } => cuda,
}

impl From<Error> for PyErr {
    fn from(error: Error) -> PyErr {
        Python::attach(|py| exception(py, &error).map_or_else(|e| e, PyErr::from_value))
    }
}

/// A `SpecrsError` for a fault of specrs itself (a caught panic): `kind` is `Internal`.
pub(super) fn internal(py: Python<'_>, message: &str) -> PyErr {
    let build = || -> PyResult<PyErr> {
        let e = classes(py)?.base.bind(py).call1((format!("internal error, please report it: {message}"),))?;
        e.setattr("kind", "Internal")?;
        Ok(PyErr::from_value(e))
    };
    build().unwrap_or_else(|e| e)
}

/// One exception for each kind of core error, for tests and documentation.
#[pyfunction]
#[pyo3(name = "_error_examples")]
pub(super) fn error_examples(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyAny>>> {
    examples().iter().map(|e| exception(py, e)).collect()
}
