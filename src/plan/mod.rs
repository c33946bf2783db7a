//! Plans: what each step of a round reads and writes, checked before any kernel may use it.
//!
//! Flow: `geometry` says where things lie, `pool` says which pages a row has, a [`Planner`] turns both into the
//! arrays of one step, and a kernel takes only an [`AuditedPlan`].
//!
//! ## The attention form of every phase
//!
//! Request i has the queries `qo_indptr[i]..qo_indptr[i+1]`. Its query j (0-based in the request) attends the row
//! positions `[0, prefix_lens[i])` and then
//!
//! * in a causal plan (`mask_words == 0`): `prefix_lens[i] ..= prefix_lens[i] + j`;
//! * in a masked plan: `prefix_lens[i] + b` for each set bit `b` of its mask row, in increasing order of `b`.
//!
//! Row position p lies in slot `table[row][p / P] * P + p % P`. Each query writes its own KV to `out_slots` before
//! anyone attends, and uses `positions` for RoPE.
//!
//! | phase | queries of a request | row position of query j | RoPE position | mask |
//! |---|---|---|---|---|
//! | [`extend`](Planner::extend) | the chunk | `start + j` | the same | none (causal) |
//! | [`decode`](Planner::decode) | one token | `L` | `L` | none |
//! | [`draft`](Planner::draft) step t | K branches | `region.pos(j, t)` | `L + t` | over the draft slots `b*S + s` |
//! | [`verify`](Planner::verify) | the tree's nodes | `L + j` | `L + depth(j)` | over the nodes |
//! | [`commit`](Planner::commit) | accepted nodes | moves `L + n_i` to `L + i` | | |
//!
//! In the dense layout draft slot `b*S + s` is row position `L + b*S + s`, so bit and position agree; a format that
//! uses the holey layout places bit `b*S + s` by [`DraftRegion::pos`](crate::geometry::DraftRegion::pos).
//!
//! ## Formats
//!
//! Every phase is planned once, in the form above; a [`Format`] derives the arrays of an attention backend from it:
//! [`Native`] none, the others ([`AnyFormat`]) what their kernels take. The sizes to write and the capacities come from
//! one function of a [`Load`]; the arrays ([`Arrays`]) are specrs's own or a caller's, checked before they are written.
//!
//! ## What is checked
//!
//! Each row is live, and in the batch once; every position written is within what its row has allocated, on a page
//! of the pool that has no other owner, so that write slots are disjoint over the batch; prefixes are within what is
//! allocated; mask bits stay inside the region (draft: slots that earlier steps wrote, and the query's own; verify:
//! true ancestors by construction, parents before children); RoPE positions are below `max_context_len`. These cost
//! O(1) a row beside the writing itself, because they rest on what the pool guarantees of a row. A debug planner
//! ([`Planner::set_debug`]) and [`AuditedPlan::audit`] check every lane and every page from the arrays alone.
//!
//! A plan remembers its pool and its rows' versions; [`Plan::check_rows`] refuses it over another pool, and once a row's
//! pages have changed.
//!
//! ## Padding
//!
//! A plan padded to a [`Bucket`] states each dead value: dead requests have row -1, version 0, prefix 0 and no
//! queries; dead lanes have position 0, slot 0 (the sink) and mask 0, so they attend to nothing. Live and dead lanes
//! are written in every round, and a debug planner poisons everything first, so that a lane nobody wrote is seen.
//!
//! ```
//! use specrs::geometry::{Geometry, Layout, Limits, TreeShape};
//! use specrs::plan::{Batch, Lens, Native, Planner, Trees};
//! use specrs::pool::{Pool, PoolConfig};
//! let geometry = Geometry::new(
//!     Limits { max_batch: 4, max_context_len: 256, page_size: 4 },
//!     TreeShape::new(2, 2, 4)?,
//!     Layout::Dense,
//! )?;
//! let pool = Pool::new(PoolConfig {
//!     num_pages: 100,
//!     page: geometry.page(),
//!     max_seqs: 4,
//!     row_pages: geometry.row_pages(),
//! })?;
//! let seq = pool.create()?;
//! pool.reserve(&[(seq, 3)])?.commit(&[3])?; // a prompt of 3 tokens
//! let lease = pool.reserve(&[(seq, geometry.alloc_target(3, 4)?)])?;
//! let mut planner = Planner::new(geometry, Native)?;
//! // A root with two children, one of which has a child, behind a prefix of 3 tokens.
//! let trees = Trees { sizes: &[4], parents: &[-1, 0, 0, 1] };
//! let plan = pool.with_tables(|t| planner.verify(&t, &Batch::new(&[seq], Lens::Host(&[3])), trees))??;
//! assert_eq!(plan.positions(), [3, 4, 4, 5]);
//! assert_eq!(plan.mask(), [0b0001, 0b0011, 0b0101, 0b1011]);
//! # drop(lease);
//! # Ok::<(), specrs::Error>(())
//! ```

mod arrays;
mod audit;
mod body;
mod buf;
mod certify;
mod commit;
pub mod form;
mod format;
mod formats;
mod lanes;
mod lens;
mod load;
mod moves;
mod phases;
mod place;
mod planner;
mod wide;

pub use crate::round::DraftMask;
pub use arrays::{ArrayRef, Arrays, DType, Element, Extent, Given, HostMemory, Memory, Need, Spec, View};
pub use body::{AuditedPlan, Phase, Plan, PlanParts};
pub use certify::{
    Certificate, Failure, FormatArray, FormatCertificate, FormatLayout, LayoutSizes, MAX_FAILURES, certify,
    certify_with,
};
pub use commit::{AuditedCommit, Paths, Remap};
pub use format::{Format, Native, WritesOnly, phases};
pub use formats::{AnyFormat, FlashAttention, FlashInfer, MaskForm, Triton};
pub use lens::Lens;
pub use load::Load;
pub use moves::Moves;
pub use planner::Planner;

use crate::pool::SeqId;

/// The requests of a step and their committed lengths.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// One sequence a request, each at most once; none is a valid batch.
    pub seqs: &'a [SeqId],
    /// L of each request (of an `extend`: where its tokens start).
    pub lens: Lens<'a>,
    /// What to pad to; `None` for no padding.
    pub pad: Option<Bucket>,
}

impl<'a> Batch<'a> {
    /// A batch without padding.
    pub fn new(seqs: &'a [SeqId], lens: Lens<'a>) -> Self {
        Self { seqs, lens, pad: None }
    }

    /// The same, padded.
    pub fn padded(self, bucket: Bucket) -> Self {
        Self { pad: Some(bucket), ..self }
    }
}

/// The fixed sizes that a plan is padded to, such as those of a captured graph. A bucket is within the limits: at most
/// `max_batch` requests, and at most the queries of so many requests in the phase ([`Load::limit`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Bucket {
    /// Requests.
    pub batch: u32,
    /// Queries.
    pub queries: u32,
}

/// Token trees of a batch, one a request, of any form with parents before children.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trees<'a> {
    /// Nodes of each tree, root included; at least 1.
    pub sizes: &'a [u32],
    /// Concatenated parent arrays, each with indices local to its tree and -1 for the root.
    pub parents: &'a [i32],
}
