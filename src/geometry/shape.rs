//! The shape of a dynamic draft tree: branches, steps and verified tokens.

use crate::bounds::{MAX_DRAFT_TOKENS, MAX_STEPS, MAX_TOPK};
use crate::error::{Error, Result, in_range};

/// `topk` (K) branches kept per draft step, `steps` (S) draft steps, and `draft_tokens` (V) tokens verified per
/// request, root included. Always satisfies `1 <= V <= 1 + K + (S-1)*K*K`.
///
/// Step 0 proposes K nodes; each later step proposes K children of each of the K best nodes of the step before, by
/// cumulative log-probability (EAGLE-2, arXiv:2406.16858).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TreeShape {
    topk: u32,
    steps: u32,
    draft_tokens: u32,
}

impl TreeShape {
    /// Check and wrap a shape.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a value outside its range, [`Error::Invalid`] where V exceeds the tree.
    pub fn new(topk: u32, steps: u32, draft_tokens: u32) -> Result<Self> {
        in_range("topk", topk, 1, MAX_TOPK as i128)?;
        in_range("steps", steps, 1, MAX_STEPS as i128)?;
        in_range("draft_tokens", draft_tokens, 1, MAX_DRAFT_TOKENS as i128)?;
        let shape = Self { topk, steps, draft_tokens };
        let max = 1 + shape.candidates();
        if draft_tokens > max {
            return Err(Error::Invalid {
                what: "draft_tokens",
                got: draft_tokens.to_string(),
                why: format!(
                    "the tree of topk={topk}, steps={steps} has {max} nodes, root included (1 + K + (S-1)*K*K)"
                ),
            });
        }
        Ok(shape)
    }

    /// K: branches kept per draft step.
    pub fn topk(self) -> u32 {
        self.topk
    }

    /// S: draft steps.
    pub fn steps(self) -> u32 {
        self.steps
    }

    /// V: tokens verified per request, root included.
    pub fn draft_tokens(self) -> u32 {
        self.draft_tokens
    }

    /// Candidate nodes that the draft proposes: `K + (S-1)*K*K`.
    pub fn candidates(self) -> u32 {
        self.topk + (self.steps - 1) * self.topk * self.topk // <= 64 + 63 * 4096
    }

    /// Draft slots of a request in the dense layout: `K*S`.
    pub fn draft_slots(self) -> u32 {
        self.topk * self.steps // <= 4096
    }

    /// The same tree with at most `depth` steps; V shrinks with it. `None` where no draft step fits, so that only
    /// the root is verified. Used near the context wall and near a request's `max_tokens`.
    pub fn clamp_depth(self, depth: u32) -> Option<Self> {
        let steps = self.steps.min(depth);
        if steps == 0 {
            return None;
        }
        let clamped = Self { steps, ..self };
        Some(Self { draft_tokens: self.draft_tokens.min(1 + clamped.candidates()), ..clamped })
    }
}
