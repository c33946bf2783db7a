//! Memory that this crate owns. Its cost is known before the first byte is allocated.
//!
//! ```text
//! Budget                    what a configuration needs, line by line, against what is free
//! ArenaPlan -> Arena        declared regions of one allocation: what counts them places them
//! DeviceBuffer, PinnedBuffer   allocations; dropping one waits for nothing
//! ```
//!
//! | file | what lives there; each imports from those above it |
//! |---|---|
//! | `raw` | the driver's allocations, fills and copies |
//! | `retire` | memory that was let go of, until the device is done with it |
//! | `buffer` | owned memory, and the ends of the work that uses it |
//! | `budget` | bytes by what they are for, and what would fit |
//! | `arena` | declared regions, their guards, loans of them |

mod arena;
mod budget;
mod buffer;
mod raw;
pub(super) mod retire;

pub use arena::{Arena, ArenaPlan, Guards, Loan, REGION_ALIGN, Region};
pub use budget::Budget;
pub use buffer::{DeviceBuffer, PinnedBuffer};
pub(super) use raw::info as free_and_total;
