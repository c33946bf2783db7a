//! The vocabulary of a round of speculation, the same for every device.
//!
//! Place in the flow: right of `geometry`, left of `plan`, `host` and `device`. Nothing here runs on a device or knows
//! of one; host and device make these values, hand them to each other, and agree on them to the bit.
//!
//! | item | what it is | made by | read by |
//! |---|---|---|---|
//! | [`DraftMask`] | which earlier draft tokens a branch sees | the draft's beams | `plan` |
//! | [`TreeBatch`] | the token tree of each request | the draft's selection, or any drafter | `plan`, verification |
//! | [`TokenEdits`] | bias and history of a request, by token | its sampler | verification on a device |
//! | [`SamplerConfig`] | sampling parameters of a request, and their limits | the caller | verification, plain decoding |
//! | [`philox`] | the random number of a position | | every draw |
//! | `weight` | the integer weight of a token, and what top-p, min-p and a draw make of it | | every draw |
//! | [`Accepts`] | the accepted path and the tokens of each request | verification | `plan`, which commits it |
//! | [`round_end`] | what becomes of each seat, and where a ring has a round's results | the end of a round | the next round, the host |
//!
//! ```
//! use specrs::host::{sample::Sampler, verify::Verifier};
//! use specrs::round::{Accepts, SamplerConfig, TreeBatch};
//! // One request: the root, token 3, has the children 1 and 2.
//! let trees = TreeBatch::from_parents(&[[-1, 0, 0]], &[[3, 1, 2]])?;
//! // The target's logits after each node, vocabulary 4: token 2 follows the root, token 0 follows node 2.
//! let logits = [0., 0., 9., 0., /* node 1 */ 9., 0., 0., 0., /* node 2 */ 9., 0., 0., 0.];
//! let greedy = Sampler::new(4, &[3], SamplerConfig::default())?;
//! let mut accepts = Accepts::default();
//! Verifier::default().verify(&trees, &logits, &[&greedy], &[0], &mut accepts)?;
//! assert_eq!((accepts.path(0), accepts.tokens(0)), (&[0, 2][..], &[2, 0][..]));
//! # Ok::<(), specrs::Error>(())
//! ```

pub(crate) mod accepts;
mod draft_mask;
pub mod philox;
pub mod round_end;
mod sampler_config;
mod token_edits;
mod token_mask;
mod tree_batch;
pub(crate) mod weight;

pub use accepts::Accepts;
pub use draft_mask::DraftMask;
pub use sampler_config::{MAX_BIAS, MAX_PENALTY, MAX_REPETITION, SamplerConfig};
pub use token_edits::TokenEdits;
pub use token_mask::{MAX_VOCAB, TokenMask};
pub use tree_batch::TreeBatch;
