//! Widths of the expand tables that kernels over pages read. The code that fills a table asks the same functions that
//! size it.

use crate::error::{Result, in_range};
use crate::geometry::{Buffer, Geometry, Layout};
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

    /// Capacity of every array of the `flash_attention` format for batches of `requests`; of draft steps those of step
    /// `step`.
    ///
    /// # Errors
    /// A step that the tree does not have.
    pub fn flash_attention_buffers(&self, requests: u32, step: u32) -> Result<Vec<Buffer>> {
        let (shape, context, p) = (self.shape(), self.limits().max_context_len, self.page().get());
        in_range("step", step, 0, shape.steps() as i128 - 1)?;
        let b = ("max_batch", requests);
        let pages_of = |name: &'static str, tokens: u32| (name, self.page().pages_for(tokens));
        let whole = pages_of("ceil(max_context_len / page_size)", context);
        let prefix = pages_of("ceil((max_context_len - 1) / page_size)", context - 1); // a context is >= 1
        // Behind the wall nothing is drafted: L + t < max_context_len.
        let drafted = context.saturating_sub(step + 1);
        let one_pass = shape.topk() == 1;
        let draft = match self.layout() {
            _ if one_pass => whole,
            Layout::Dense => pages_of("ceil((max_context_len - step - 1) / page_size)", drafted),
            Layout::Holey => ("floor((max_context_len - step - 1) / page_size)", drafted / p),
        };
        let mut all = Vec::new();
        for (phase, columns) in [("extend", whole), ("decode", whole), ("draft", draft), ("verify", prefix)] {
            all.extend([
                Buffer::new(phase, "cache_seqlens", "int32", &[b], 0),
                Buffer::new(phase, "page_table", "int32", &[b, columns], 0),
                Buffer::new(phase, "cu_seqlens_q", "int32", &[b], 1),
            ]);
        }
        let draft = ("draft", [b, ("topk", shape.topk())], ("step + 1", self.draft_expand_width(step)));
        let v = ("draft_tokens", shape.draft_tokens());
        let verify = ("verify", [b, v], ("draft_tokens", self.verify_expand_width()));
        for (phase, [b, n], width) in [draft, verify].into_iter().skip(usize::from(one_pass)) {
            all.extend([
                Buffer::new(phase, "expand_cache_seqlens", "int32", &[b, n], 0),
                Buffer::new(phase, "expand_page_table", "int32", &[b, n, width], 0),
                Buffer::new(phase, "expand_cu_seqlens_q", "int32", &[b, n], 1),
            ]);
        }
        Ok(all)
    }
}
