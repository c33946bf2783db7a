//! Plans: the reads and writes of each step of a round, checked before any kernel may use them.
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
//! Each row is live, and in the batch once; every position written is within what its row's lease has reserved, on a page
//! of the pool that has no other owner, so that write slots are disjoint over the batch; a prefix ends where the committed
//! tokens do or, of a row whose rounds overlap, among those in flight (an extend alone may start before: the draft model
//! catches up); mask bits stay inside the region (draft: slots that earlier steps wrote, and the query's own; verify:
//! true ancestors by construction, parents before children); RoPE positions follow from the rest, below
//! `max_context_len`. These cost
//! O(1) a row beside the writing itself, because they rest on what the pool guarantees of a row. A debug planner
//! ([`Planner::set_debug`]) and [`AuditedPlan::audit`] check every query and every page from the arrays alone.
//!
//! A plan remembers its pool, its rows' versions and the committed length that it was made for; [`Plan::check_rows`]
//! refuses it over another pool, once a row's pages have changed or its lease has ended, and once more is committed.
//! [`Moves`] do too, and run once over a cache ([`Moves::claim`]).
//!
//! ## Padding
//!
//! A plan padded to a [`Bucket`] states each dead value: dead requests have row -1, version 0, prefix 0 and no
//! queries; dead ones have position 0, slot 0 (the sink) and mask 0, so they attend to nothing. Live and dead queries
//! are written in every round, and a debug planner poisons everything first, so that an element nobody wrote is seen.
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
mod audited;
mod body;
mod buf;
mod certify;
mod commit;
pub mod form;
mod format;
mod formats;
mod lens;
mod load;
mod moves;
mod size;
mod step;
pub mod write;

pub use crate::round::DraftMask;
pub use arrays::{ArrayRef, Arrays, DType, Element, Extent, Given, HostMemory, Memory, Need, Spec, View};
pub use audited::AuditedPlan;
pub use body::{Plan, PlanParts};
pub use certify::{
    Certificate, Failure, FormatArray, FormatCertificate, FormatLayout, LayoutSizes, MAX_FAILURES, certify,
    certify_with,
};
pub use commit::{AuditedCommit, Paths, Remap};
pub use format::Format;
pub use formats::{AnyFormat, FlashAttention, FlashInfer, MaskForm, Native, Triton, WritesOnly};
pub use lens::Lens;
pub use load::Load;
pub use moves::Moves;
pub use size::{Capacity, Columns, Count, Formula, Size};
pub use step::{Batch, Bucket, Phase, Trees, phases};
pub use write::{Lower, Planner};
