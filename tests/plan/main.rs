//! Layer `plan`: the native form, its elements, its checks, and what the planner refuses.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;

mod arrays;
mod errors;
mod form;
mod form_twin;
mod format;
mod golden;
mod load;
mod random;
mod stale_handles;
mod stale_rounds;
