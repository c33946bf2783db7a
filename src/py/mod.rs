//! The Python module `specrs._specrs`: thin, frozen newtypes over the core.
//!
//! | file | what lives there |
//! |---|---|
//! | `errors` | the one table from core errors to Python exceptions |
//! | `arg` | integers of any size with named errors; work without the GIL |
//! | `dlpack` | tensors in and out (`Array` is what specrs returns), memory that callers lend; the only place with `unsafe` |
//! | `device` | CUDA launches; there in every build |
//! | `device_ops`, `device_attention`, `device_sample`, `device_plan` | launches that the engine's rounds on a GPU are made of |
//! | `device_round` | the end of a round and the ring that the host reads it from |
//! | `geometry` | tree shapes, sizes, draft layouts, token trees |
//! | `kv`, `attention` | the KV cache, its writes and moves, attention, RoPE |
//! | `grammar` | structured output: vocabularies, grammars, how far requests have come |
//! | `linear` | packed matrix products, RMSNorm |
//! | `threads` | how many threads the kernels use |
//! | `pool` | the paged pool, sequences, leases |
//! | `memory` | budgets, arenas, the page table's mirror; there in builds with CUDA |
//! | `graph` | CUDA graphs that keep Python's objects; there in builds with CUDA |
//! | `products` | products of the GPU by cublasLt |
//! | `plan` | planner, plans, the arrays of their formats, moves |
//! | `revert` | the registry of historical faults |
//! | `certify` | proofs of a configuration, as dictionaries |
//! | `draft_merge` | proposals of drafters, their union in one tree, their calibration |
//! | `draft_nodes` | nodes of merged trees by what they are worth |
//! | `drafts` | sources of drafts: a request's text, recycled tokens, a corpus |
//! | `trees` | draft beams, the trees of a batch |
//! | `sampling` | samplers and verification |
//!
//! Every argument is checked before anything is allocated or written, every error is one of `errors`, and a panic,
//! which would be a fault of specrs, is caught at this boundary and raised as `SpecrsError`.

mod arg;
mod attention;
mod certify;
mod device;
mod device_attention;
mod device_ops;
mod device_plan;
mod device_round;
mod device_sample;
mod device_trees;
mod dlpack;
mod draft_merge;
mod draft_nodes;
mod drafts;
mod errors;
mod geometry;
mod grammar;
#[cfg(feature = "cuda")]
mod graph;
mod kv;
mod linear;
#[cfg(feature = "cuda")]
mod memory;
mod plan;
mod pool;
mod products;
mod revert;
mod sampling;
mod threads;
mod trees;

use pyo3::prelude::*;

/// The Rust core of specrs: geometry, paged KV pool, plans, CPU kernels.
#[pymodule]
mod _specrs {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::attention::{RopeTable, attention, attention_reference, rope_attention, rope_write};
    #[pymodule_export]
    use super::certify::certify;
    #[pymodule_export]
    use super::device::{
        _device_check, _device_init, _device_kv_move, DeviceFaults, DeviceStream, cuda_available,
        cuda_unavailable_reason,
    };
    #[pymodule_export]
    use super::device_attention::{_device_attention, _device_attention_workspace};
    #[pymodule_export]
    use super::device_ops::{
        _device_add_rms_norm, _device_draft_scratch, _device_draft_select, _device_embed, _device_gated_up,
        _device_gather_rows, _device_kv_commit, _device_rope_kv, _device_verify_greedy, _device_verify_scratch,
    };
    #[pymodule_export]
    use super::device_plan::{_device_plan, _device_tail_copies};
    #[cfg(feature = "cuda")]
    #[pymodule_export]
    use super::device_round::RoundRing;
    #[pymodule_export]
    use super::device_round::{_device_copy_rows, _round_end};
    #[cfg(feature = "cuda")]
    #[pymodule_export]
    use super::device_round::{_device_round_end, _device_round_end_load};
    #[pymodule_export]
    use super::device_sample::{_device_sample_verify, _device_samplers};
    #[pymodule_export]
    use super::device_trees::{_device_tree_build, _device_tree_unite};
    #[cfg(feature = "cuda")]
    #[pymodule_export]
    use super::dlpack::DeviceArray;
    #[pymodule_export]
    use super::dlpack::{Array, as_array};
    #[pymodule_export]
    use super::draft_merge::{DraftCalibration, DraftProposal, MergedDrafts, merge_drafts};
    #[pymodule_export]
    use super::draft_nodes::DraftNodes;
    #[pymodule_export]
    use super::drafts::{CorpusDrafts, DraftCorpus, RecycledTokens, SuffixDrafts};
    #[pymodule_export]
    use super::errors::error_examples;
    #[pymodule_export]
    use super::geometry::{DraftRegion, Geometry, Tree, TreeShape};
    #[pymodule_export]
    use super::grammar::{Grammar, GrammarTracker, GrammarVocabulary, TokenMask};
    #[cfg(feature = "cuda")]
    #[pymodule_export]
    use super::graph::{_graph_child, _graph_collect, _graph_loop_count, Graph};
    #[pymodule_export]
    use super::kv::{KvCache, kv_move, kv_write};
    #[pymodule_export]
    use super::linear::{PackedLinear, rms_norm};
    #[cfg(feature = "cuda")]
    #[pymodule_export]
    use super::memory::{
        _device_budget, _device_collect, _device_collect_captured, _device_memory, _device_table_update, DeviceArena,
        DeviceTable,
    };
    #[pymodule_export]
    use super::plan::{DeviceLens, FormatBuffers, Moves, Plan, Planner};
    #[pymodule_export]
    use super::pool::{Lease, Pool, Sequence};
    #[pymodule_export]
    use super::products::{_device_fill, _device_fingerprint, DeviceLinear, DeviceProducts};
    #[pymodule_export]
    use super::revert::{faults, reverts_warning};
    #[pymodule_export]
    use super::sampling::{Accepts, Sampler, likeliest, verify};
    #[pymodule_export]
    use super::threads::{_follow_torch, _numerics_ids, num_threads, set_num_threads};
    #[pymodule_export]
    use super::trees::{DraftBeams, TreeBatch};
    #[pymodule_export]
    use super::version;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", crate::py::version())?;
        crate::py::errors::register(module)
    }
}

/// Version of the core.
#[pyfunction]
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}
