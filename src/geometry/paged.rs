//! Widths of the expand tables that kernels over pages read. The code that fills a table asks the same functions that
//! size it.

use crate::geometry::Geometry;
use crate::revert::Fault;

impl Geometry {
    /// Columns of the expand table of draft step `step` (0-based): a branch has `step + 1` live draft tokens, each in
    /// a slot of its own (dense layout), or together with the `r` tokens of the prefix's tail on
    /// `ceil((r + step + 1) / P) <= step + 1` pages (holey layout). Never S slots' pages: the ones that no step has
    /// written yet do not fit (sglang pull request 27360).
    pub fn draft_expand_width(&self, step: u32) -> u32 {
        step + 1
    }

    /// Columns of the expand table of a verification: a node has at most all V nodes as ancestors, itself included.
    pub fn verify_expand_width(&self) -> u32 {
        self.shape().draft_tokens()
    }

    /// Draft tokens of a branch that a kernel may read at step `step`: those that steps 0 to `step` have written, not
    /// the S that are allocated.
    pub(crate) fn live_draft_tokens(&self, step: u32) -> u32 {
        if self.reverts().has(Fault::ExpandTable) { self.shape().steps() } else { step + 1 }
    }
}
