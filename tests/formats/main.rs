//! Layer `plan::formats`: the arrays of every attention backend.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;

mod allocations;
mod fixed_arrays;
mod paged;
mod paged_random;
mod slots;
mod slots_guards;
mod slots_random;
