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
//! Every name here is listed in `no_cuda.rs` too, for a build without the feature; with it, but without kernels, driver or
//! GPU, calls raise `CudaError` with the reason. Outputs of a launch are tensors that the call writes in full, apart from
//! every other operand. `live`, where it is given, is an int32 tensor whose last element counts what is live of a static
//! batch. `stream` is a raw stream of the tensors' device, or a `_DeviceStream`. The engine's passes and rounds
//! (`python/specrs/models/cuda.py`, `engine/devices/launches.py`) and the replay of recorded rounds (`capsule/on_device.py`) are made
//! of these calls.

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

/// Add functions to a module.
macro_rules! functions {
    ($module:ident: $($function:path),+ $(,)?) => { $($module.add_function(wrap_pyfunction!($function, $module)?)?;)+ };
}

/// Add classes to a module.
macro_rules! classes {
    ($module:ident: $($class:path),+ $(,)?) => { $($module.add_class::<$class>()?;)+ };
}

/// Add all of this to the Python module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    classes!(module: array::DeviceArray, device::DeviceFaults, device::DeviceStream, graph::Graph, memory::DeviceArena);
    classes!(module: memory::DeviceTable, products::DeviceLinear, products::DeviceProducts, round::RoundRing);
    functions!(module: attention::_device_attention, attention::_device_attention_workspace);
    functions!(module: device::_device_check, device::_device_init, device::_device_kv_move);
    functions!(module: draft::_device_draft_scratch, draft::_device_draft_select);
    functions!(module: draft::_device_tree_build, draft::_device_tree_unite);
    functions!(module: graph::_graph_child, graph::_graph_collect, graph::_graph_loop_count);
    functions!(module: memory::_device_budget, memory::_device_collect, memory::_device_collect_captured);
    functions!(module: memory::_device_memory, memory::_device_table_update);
    functions!(module: plan::_device_plan, plan::_device_tail_copies);
    functions!(module: products::_device_fill, products::_device_fingerprint);
    functions!(module: round::_device_round_end, round::_device_round_end_load);
    functions!(module: rows::_device_add_rms_norm, rows::_device_copy_rows, rows::_device_embed);
    functions!(module: rows::_device_gated_up, rows::_device_gather_rows, rows::_device_rope_kv);
    functions!(module: verify::_device_kv_commit, verify::_device_sample_verify, verify::_device_samplers);
    functions!(module: verify::_device_verify_greedy, verify::_device_verify_scratch);
    Ok(())
}
