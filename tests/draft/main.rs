//! Layer `draft`: the automaton against a naive matcher, proposals, merged trees.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, outside `#[test]`

#[path = "../common/mod.rs"]
mod common;

mod automaton;
mod corpus;
mod lists;
mod memory;
mod merge;
mod recycle;
mod suffix;
