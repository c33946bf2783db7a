//! # specrs
//!
//! Tree speculative decoding with a core that cannot corrupt memory silently: one algebra sizes and writes every
//! buffer, every page has one accounted owner, every index is checked before it is used.
//!
//! Data flows one way; a module imports only from those on its left:
//!
//! ```text
//! error, bounds, overlap, revert, simd -> geometry -> pool | round -> grammar -> plan -> plan::write -> plan::certify
//!     -> draft | host | device -> graph -> py
//! ```
//!
//! | module | what lives there |
//! |---|---|
//! | [`error`] | one error type; every variant carries the operand, its value and the limit |
//! | [`bounds`] | units as types (page, slot, token) and checked arithmetic |
//! | [`overlap`] | the one rule for memory that an operation writes |
//! | [`revert`] | named historical faults and the debug switch that puts one back |
//! | `simd` | the one place that picks the instruction set of the CPU |
//! | [`geometry`] | tree shapes, limits, capacities, draft layouts: pure arithmetic |
//! | [`pool`] | the paged KV allocator: reference counts, sequences, leases, prefix cache, ledger |
//! | [`round`] | what host and device both speak of: draft masks, trees, sampling parameters, accepted paths |
//! | [`grammar`] | structured output: which tokens may come next, by llguidance |
//! | [`plan`] | metadata of each phase, audited before anything may use it |
//! | [`plan::write`] | the host planner: how a CPU writes it |
//! | [`plan::certify`] | proofs that no step of a configuration leaves its buffers |
//! | [`draft`] | sources of drafts that need no head, and one tree from many sources |
//! | [`host`] | the CPU kernels: a plain reference and a fast path for each |
//! | `device` | CUDA kernels launched on the caller's stream (feature `cuda`) |
//! | `graph` | captured launches that own what they point at (feature `cuda`) |
//! | `py` | the Python module (feature `python`) |
//!
//! A round of speculative decoding in terms of these modules: [`pool::Pool::reserve`] takes pages for a batch, a
//! [`plan`] turns lengths and page tables into an audited description of what each kernel reads and writes,
//! [`host`] (or `device`) runs it, and the lease is committed with what was accepted, or dropped to roll back.
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod bounds;
pub mod draft;
pub mod error;
pub mod geometry;
pub mod grammar;
pub mod host;
pub mod overlap;
pub mod plan;
pub mod pool;
pub mod revert;
pub mod round;
mod simd;

#[cfg(feature = "cuda")]
pub mod device;
#[cfg(feature = "cuda")]
pub mod graph;
#[cfg(feature = "python")]
mod py;

pub use error::{Error, Result};
