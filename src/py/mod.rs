//! The Python module `specrs._specrs`: thin, frozen newtypes over the core.
//!
//! | file | what lives there |
//! |---|---|
//! | `errors` | the one table from core errors to Python exceptions |
//! | `arg` | integers of any size with named errors; work without the GIL |
//! | `dlpack` | tensors in and out (`Array` is what specrs returns), memory that callers lend; the only place with `unsafe` |
//! | `cuda` | contents of a build with the feature `cuda`: devices and their memory, launches, graphs, products |
//! | `no_cuda` | replacement of `cuda` in a build without the feature: the same names, which all raise `CudaError` |
//! | `device` | availability of CUDA |
//! | `geometry` | tree shapes, sizes, draft layouts, token trees |
//! | `kv`, `attention` | the KV cache, its writes and moves, attention, RoPE |
//! | `grammar` | structured output: vocabularies, grammars, trackers of requests |
//! | `linear` | packed matrix products, RMSNorm |
//! | `threads` | number of threads that the kernels use |
//! | `pool` | the paged pool, sequences, leases |
//! | `plan` | planner, plans, the arrays of their formats, moves |
//! | `round_end` | the end of a round as the host computes it |
//! | `revert` | the registry of historical faults |
//! | `certify` | proofs of a configuration, as dictionaries |
//! | `draft_lists` | lists of a block drafter's levels, and the trees of them |
//! | `draft_merge` | proposals of drafters, their union in one tree, their calibration |
//! | `draft_nodes` | choice of the nodes of merged trees by their worth |
//! | `drafts` | sources of drafts: a request's text, recycled tokens, a corpus |
//! | `trees` | draft beams, the trees of a batch |
//! | `sampling` | samplers and verification |
//!
//! Every argument is checked before anything is allocated or written, every error is one of `errors`, and a panic,
//! which would be a fault of specrs, is caught at this boundary and raised as `SpecrsError`.

// Code that only `cuda` uses is dead in a build without that feature; a build with it still warns of dead code.
#![cfg_attr(not(feature = "cuda"), allow(dead_code, unused_imports))]

mod arg;
mod attention;
mod certify;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
mod cuda;
mod device;
mod dlpack;
mod draft_lists;
mod draft_merge;
mod draft_nodes;
mod drafts;
mod errors;
mod geometry;
mod grammar;
mod kv;
mod layer;
mod linear;
mod plan;
mod pool;
mod revert;
mod round_end;
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
    use super::device::{cuda_available, cuda_unavailable_reason};
    #[pymodule_export]
    use super::dlpack::{Array, as_array};
    #[pymodule_export]
    use super::draft_lists::DraftLists;
    #[pymodule_export]
    use super::draft_merge::{DraftCalibration, DraftProposal, MergedDrafts, merge_drafts};
    #[pymodule_export]
    use super::draft_nodes::choose_drafts;
    #[pymodule_export]
    use super::drafts::{CorpusDrafts, DraftCorpus, RecycledTokens, SuffixDrafts};
    #[pymodule_export]
    use super::errors::error_examples;
    #[pymodule_export]
    use super::geometry::{DraftRegion, Geometry, Tree, TreeShape};
    #[pymodule_export]
    use super::grammar::{Grammar, GrammarTracker, GrammarVocabulary, TokenMask};
    #[pymodule_export]
    use super::kv::{KvCache, kv_move, kv_write};
    #[pymodule_export]
    use super::layer::{DecoderLayers, Eagle3Layer, LayerTail};
    #[pymodule_export]
    use super::linear::{PackedLinear, all_finite, embed, rms_norm};
    #[pymodule_export]
    use super::plan::{DeviceLens, FormatBuffers, Moves, Plan, Planner};
    #[pymodule_export]
    use super::pool::{Lease, Pool, Sequence};
    #[pymodule_export]
    use super::revert::{faults, reverts_warning};
    #[pymodule_export]
    use super::round_end::_round_end;
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
        crate::py::cuda::register(module)?;
        crate::py::errors::register(module)
    }
}

/// Version of the core.
#[pyfunction]
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}
