//! One file a kernel: its functions, loaded when a device is set up, and their safe launch.

mod attention;
mod attention_tiling;
mod check;
mod draft_select;
mod fingerprint;
mod kv_commit;
mod kv_move;
mod linear;
mod loop_count;
mod plan;
mod rope_kv;
mod round_end;
mod rows;
mod sample;
mod table_update;
mod tree_build;
mod tree_lists;
mod tree_unite;
mod verify_greedy;

pub use attention::{Attention, AttentionCall};
pub use attention_tiling::AttentionSize;
pub use draft_select::{DeviceBeams, DraftSelect, DraftSelectOperands, MAX_DEVICE_TOPK};
pub use fingerprint::{Fingerprint, Mirror};
pub use kv_commit::{CommitOperands, KvCommit};
pub use kv_move::KvMove;
pub(super) use linear::MAX_LINEAR_ROWS;
pub use linear::{LinearKernel, LinearPlan};
pub use loop_count::LoopCount;
pub use plan::PlanKernels;
pub use rope_kv::{MAX_HEAD_DIM, RopeKv, RopeKvOperands};
pub(super) use round_end::RingMemory;
pub use round_end::{CONTROL_WORDS, RoundEndKernels, RoundEndOperands};
pub use rows::{Activation, AddRmsNorm, MAX_NORM_COLUMNS, RowConv, RowOps};
pub use sample::{DeviceSamplers, MAX_SAMPLED_VOCAB, SAMPLER_ROW_WORDS, SampleVerify};
pub(super) use table_update::CHANGE_WORDS;
pub use table_update::TableUpdate;
pub use tree_build::{DeviceTrees, MAX_DEVICE_CANDIDATES, TreeBuild, TreeBuildOperands};
pub use tree_lists::{
    BlockRowsOperands, DeviceLists, ListBeamsOperands, MAX_BEAM_LIST, MAX_LISTED, TreeLists, TreeListsOperands,
};
pub use tree_unite::{GivenTrees, MAX_UNITED, TreeUnite, TreeUniteOperands};
pub use verify_greedy::{DeviceAccepts, VerifyGreedy, VerifyMode, VerifyOperands, verify_scratch};

use std::sync::Arc;

use super::context::Context;
use crate::error::Result;

/// The kernels of one device.
#[derive(Debug)]
pub struct Kernels {
    /// Paged attention of every phase.
    pub attention: Attention,
    /// Moves of KV rows between slots.
    pub kv_move: KvMove,
    /// Products of a few rows; `None` where the GPU is not of compute capability 9.0.
    pub linear: Option<LinearKernel>,
    /// Gathers, norms and activations of rows.
    pub rows: RowOps,
    /// From a qkv product to queries and the cache.
    pub rope_kv: RopeKv,
    /// Accepted paths by argmax.
    pub verify_greedy: VerifyGreedy,
    /// Accepted paths by drawn tokens.
    pub sample_verify: SampleVerify,
    /// Accepted paths into rows of the page table, or moves.
    pub kv_commit: KvCommit,
    /// Draft logits to beams.
    pub draft_select: DraftSelect,
    /// Candidates to trees.
    pub tree_build: TreeBuild,
    /// Lists of levels to trees or beams.
    pub tree_lists: TreeLists,
    /// Two trees to one.
    pub tree_unite: TreeUnite,
    /// The end of a round.
    pub round_end: RoundEndKernels,
    /// Reproducible operands, fingerprints of rows.
    pub fingerprint: Fingerprint,
    /// Changed columns of the page table.
    pub table_update: TableUpdate,
    /// The condition of a graph's loop.
    pub loop_count: LoopCount,
    /// Plans, for [`DevicePlanner`](super::plan::DevicePlanner).
    pub plan: PlanKernels,
}

impl Kernels {
    /// Load every kernel into `context`, which is current.
    pub(super) fn load(context: &Arc<Context>) -> Result<Self> {
        Ok(Self {
            attention: Attention::new(context.clone())?,
            kv_move: KvMove::load(context.clone())?,
            linear: LinearKernel::load(context.clone())?,
            rows: RowOps::load(context.clone())?,
            rope_kv: RopeKv::load(context.clone())?,
            verify_greedy: VerifyGreedy::load(context.clone())?,
            sample_verify: SampleVerify::load(context.clone())?,
            kv_commit: KvCommit::load(context.clone())?,
            draft_select: DraftSelect::load(context.clone())?,
            tree_build: TreeBuild::load(context.clone())?,
            tree_lists: TreeLists::load(context.clone())?,
            tree_unite: TreeUnite::load(context.clone())?,
            round_end: RoundEndKernels::load(context.clone())?,
            fingerprint: Fingerprint::load(context.clone())?,
            table_update: TableUpdate::load(context.clone())?,
            loop_count: LoopCount::load(context.clone())?,
            plan: PlanKernels::load(context.clone())?,
        })
    }
}
