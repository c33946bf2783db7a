//! The host planner: how a CPU writes plans, commits and the arrays of formats, in fused loops, with each check beside the
//! writing. [`form`](crate::plan::form) defines the elements; tests compare the two.
//!
//! Only the host's own code, [`certify`](crate::plan::certify()) and users import it; nothing else in
//! [`plan`](crate::plan) does, so that a device may plan by other code.

mod any;
mod arena;
mod commit;
mod draft_slots;
mod flash_attention;
mod flashinfer;
mod lower;
mod masks;
mod phases;
mod place;
mod planner;
mod slots;
mod table;
mod triton;

pub use lower::Lower;
pub use planner::Planner;
