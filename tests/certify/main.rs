//! Layer `plan::certify`: configurations proved or refused over their whole domain.
#![allow(clippy::unwrap_used)]

mod cases;
mod formats;
