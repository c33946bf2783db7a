//! Layer `pool`: pages, sequences, leases, the prefix cache, and the table that mirrors follow.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, outside `#[test]`

#[path = "../common/mod.rs"]
mod common;

mod cases;
mod model;
mod rounds;
mod threads;
