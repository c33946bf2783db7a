//! Tree shapes, limits, draft layouts and capacities: pure arithmetic, the one algebra of specrs.
//!
//! Every row, region and buffer of a round is sized by a function of this module, and the code that writes it uses the
//! same functions to place what it writes. The arrays of a format follow from these by
//! [`plan::Size`](crate::plan::Size). All arithmetic is checked; a configuration whose sizes do not fit
//! `int32` indexing is refused at construction, with the numbers.
//!
//! ```
//! use specrs::geometry::{Geometry, Layout, Limits, TreeShape};
//! let tree = TreeShape::new(3, 6, 16)?; // topk, steps, draft tokens
//! let g = Geometry::new(Limits { max_batch: 8, max_context_len: 2048, page_size: 4 }, tree, Layout::Holey)?;
//! let region = g.draft_region(7)?; // committed length 7
//! assert_eq!((region.base(), region.pages_per_branch()), (4, 3));
//! assert_eq!((region.pos(0, 0)?, region.pos(1, 0)?, region.pos(2, 0)?), (7, 19, 31));
//! assert_eq!(region.end()?, 40);
//! assert_eq!(region.hole(1)?, Some(specrs::geometry::TailCopy { src: 4, dst: 16, len: 3 }));
//! # Ok::<(), specrs::Error>(())
//! ```

mod buffers;
mod capacity;
mod layout;
mod paged;
mod shape;
mod tree;

pub use buffers::Buffer;
pub use capacity::{Geometry, Limits};
pub use layout::{DraftRegion, Layout, TailCopy};
pub use shape::TreeShape;
pub use tree::{MaskWords, Tree, words_for};
