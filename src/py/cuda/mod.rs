//! What a build with the feature `cuda` has: devices and their memory, launches on Python's tensors, graphs, products.
//!
//! | file | what lives there |
//! |---|---|
//! | `tensors` | imported CUDA tensors as the views that launches take; with `dlpack` the only place with `unsafe` |
//! | `device` | a device, streams, fault records, the KV move |
//! | `operands` | the operands of one launch, imported together |
//! | `rows`, `attention` | what a model's passes are made of |
//! | `plan`, `draft`, `verify`, `round` | what a round is made of beside them, from its plans to its end and the ring of results |
//! | `products` | products by cublasLt |
//! | `array`, `memory` | memory that torch shares: budgets, arenas, the page table's mirror |
//! | `graph` | CUDA graphs that keep Python's objects |
//!
//! A file registers its own names, and `no_cuda` has the same ones without the feature; with it, but without kernels, driver or
//! GPU, calls raise `CudaError` with the reason. Outputs of a launch are tensors that the call writes in full, apart from
//! every other operand. `live`, where it is given, is an int32 tensor whose last element counts what is live of a static
//! batch. `stream` is a raw stream of the tensors' device, or a `_DeviceStream`. The engine's passes and rounds
//! (`python/specrs/models/cuda.py`, `engine/devices/launches.py`) and the replay of recorded rounds (`capsule/on_device.py`) are made
//! of these calls.

/// `register`, which adds a file's functions and classes to the Python module.
macro_rules! register {
    ($(fn $($function:ident),+;)? $(class $($class:ident),+;)?) => {
        /// Add what Python gets of this file to the module.
        pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
            $($(module.add_function(wrap_pyfunction!($function, module)?)?;)+)?
            $($(module.add_class::<$class>()?;)+)?
            Ok(())
        }
    };
}

mod array;
mod attention;
mod device;
mod draft;
mod graph;
mod memory;
mod operands;
mod plan;
mod products;
mod round;
mod rows;
mod tensors;
mod verify;

use pyo3::prelude::*;

use crate::error::Result;

/// Whether kernels can run, or why not.
pub(super) fn available() -> Result<()> {
    crate::device::available()
}

/// The number of the rule that attention's bits follow.
pub(super) fn attention_rule() -> Option<i32> {
    Some(crate::device::params::attention::ATTENTION_NUMERICS_ID)
}

/// Add all of this to the Python module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let all = [
        array::register,
        attention::register,
        device::register,
        draft::register,
        graph::register,
        memory::register,
        plan::register,
        products::register,
        round::register,
        rows::register,
        verify::register,
    ];
    all.into_iter().try_for_each(|register| register(module))
}
