//! The CPU kernels: a plain reference first, then the fast path, tested against each other.
//!
//! Everything here is safe Rust. Two properties hold for every kernel, because exact speculation rests on them:
//!
//! * **row invariance**: an output row depends on its own inputs only, bit for bit: not on how many rows share the
//!   call, on their order, on the tiling or on the number of threads. So a token verified in a tree of 16 has exactly
//!   the logits that plain decoding would have given it.
//! * **checked before written**: every index is compared with its bound before the first byte is written; on an error
//!   nothing has changed.
//!
//! | module | what it does |
//! |---|---|
//! | [`kv`] | the KV cache: writes and hazard-free moves |
//! | [`attention`] | paged attention over a prefix and causal or masked keys |
//! | [`rope`] | per-head norm, RoPE, KV write and attention in one call |
//! | [`embed`] | rows of an embedding |
//! | [`linear`] | matrix products with packed weights, RMSNorm before and residual or SwiGLU after |
//! | [`layer`] | decoder layers of these in one call |
//! | [`norm`], [`act`] | RMSNorm, exponential and SiLU |
//! | [`threads`] | the bounded pool that all kernels share, how many threads it has, and when it is worth waking |
//! | [`sample`] | bias, penalties, temperature, top-k, top-p, min-p, and the draw of a token |
//! | [`select`] | draft log-probabilities, beams, and the tree of a batch |
//! | [`verify`] | the walk that accepts drafts |

pub mod act;
pub mod attention;
mod attention_tile;
pub mod embed;
pub mod kv;
pub mod layer;
pub mod linear;
mod linear_memory;
mod linear_tile;
pub mod norm;
pub mod rope;
pub mod sample;
pub mod select;
mod thread_count;
pub mod threads;
pub mod verify;
