//! Draft-side selection: from the draft model's logits to the tree that the target verifies.
//!
//! One round for a batch of B requests (EAGLE-2, arXiv:2406.16858):
//!
//! 1. [`DraftBeams::start`] takes the logits `[B, Vd]` after the root: K candidates a request, all of them beams.
//! 2. [`DraftBeams::advance`] takes the logits `[B*K, Vd]` of the beams: K*K candidates a request; the K best by
//!    cumulative log-probability become the next beams. Repeated S-1 times, or fewer.
//! 3. [`DraftBeams::finish`] makes the tree of the V-1 best candidates of all steps under each root: a [`TreeBatch`](crate::round::TreeBatch).
//!
//! ```
//! use specrs::geometry::TreeShape;
//! use specrs::host::select::DraftBeams;
//! use specrs::round::TreeBatch;
//! let mut beams = DraftBeams::new(TreeShape::new(2, 2, 4)?, 5, None)?;
//! beams.start(&[0.0, 3.0, 0.0, 2.0, 0.0])?; // one request
//! assert_eq!(beams.tokens(), [1, 3]);
//! beams.advance(&[9.0, 0.0, 0.0, 0.0, 0.0, /* after token 3: */ 0.0, 0.0, 0.0, 0.0, 9.0])?;
//! let mut trees = TreeBatch::default();
//! beams.finish(&[4], &[2], &[4], &mut trees)?;
//! assert_eq!(trees.tokens(), [4, 1, 3, 0]); // root, its two children, and 0 under 1
//! assert_eq!(trees.parents(), [-1, 0, 0, 1]);
//! # Ok::<(), specrs::Error>(())
//! ```

mod beams;
mod topk;

pub use beams::{DraftBeams, check_batch};
pub use topk::{TopK, reference_topk};
