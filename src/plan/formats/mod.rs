//! The formats of attention kernels: one file each, with its arrays, their capacities, what it supports, and how its kernel
//! reads them. How a CPU writes them is in [`write`](crate::plan::write).

mod any;
pub(super) mod flash_attention;
pub(super) mod flashinfer;
pub(super) mod index;
mod native;
mod reader;
pub(super) mod triton;

pub use any::AnyFormat;
pub use flash_attention::FlashAttention;
pub use flashinfer::{FlashInfer, MaskForm};
pub use native::{Native, WritesOnly};
pub use triton::Triton;
