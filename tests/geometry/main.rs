//! Layer `geometry`: sizes, capacities and draft layouts.
#![allow(clippy::unwrap_used)]

mod cases;
