//! What a build without the feature `cuda` has in the place of `cuda`: the same names, so that the package imports the same
//! everywhere. Each of them raises `CudaError`.

use std::ffi::CStr;

use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict, PyTuple};

use crate::error::{Error, Result};

/// The functions and classes of `cuda`.
const NAMES: &[&CStr] = &[
    c"_DeviceArena",
    c"_DeviceArray",
    c"_DeviceFaults",
    c"_DeviceLinear",
    c"_DeviceProducts",
    c"_DeviceStream",
    c"_DeviceTable",
    c"_Graph",
    c"_RoundRing",
    c"_device_add_rms_norm",
    c"_device_attention",
    c"_device_attention_workspace",
    c"_device_budget",
    c"_device_check",
    c"_device_collect",
    c"_device_collect_captured",
    c"_device_copy_rows",
    c"_device_draft_scratch",
    c"_device_draft_select",
    c"_device_embed",
    c"_device_fill",
    c"_device_fingerprint",
    c"_device_gated_up",
    c"_device_gather_rows",
    c"_device_init",
    c"_device_kv_commit",
    c"_device_kv_move",
    c"_device_memory",
    c"_device_plan",
    c"_device_rope_kv",
    c"_device_round_end",
    c"_device_round_end_load",
    c"_device_sample_verify",
    c"_device_samplers",
    c"_device_table_update",
    c"_device_tail_copies",
    c"_device_tree_build",
    c"_device_tree_unite",
    c"_device_verify_greedy",
    c"_device_verify_scratch",
    c"_graph_child",
    c"_graph_collect",
    c"_graph_loop_count",
];

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
    for name in NAMES {
        let absent = |_: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| -> PyResult<()> { Ok(available()?) };
        module.add(&*name.to_string_lossy(), PyCFunction::new_closure(module.py(), Some(name), None, absent)?)?;
    }
    Ok(())
}
