//! Layer `host`: CPU kernels, tree building, sampling and verification, against plain references.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, outside `#[test]`

#[path = "../common/mod.rs"]
mod common;

mod attention;
mod kv;
mod layer;
mod linear;
mod round_end;
mod sample;
mod simd;
mod tree_allocations;
mod tree_select;
mod tree_verify;
