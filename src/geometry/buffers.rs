//! The capacity of every array that a configuration needs, with the arithmetic it comes from.

use crate::bounds::add;
use crate::error::Result;
use crate::geometry::{Geometry, Layout};

/// One array of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buffer {
    /// Name of the array.
    pub name: &'static str,
    /// Phase that writes it.
    pub phase: &'static str,
    /// Element type.
    pub dtype: &'static str,
    /// Elements.
    pub elements: u64,
    /// Bytes.
    pub bytes: u64,
    /// Derivation of `elements`, with the numbers.
    pub formula: String,
}

impl Buffer {
    fn new(phase: &'static str, name: &'static str, dtype: &'static str, factors: &[(&str, u32)], plus: u32) -> Self {
        let product = factors.iter().map(|&(_, n)| n as u64).product::<u64>();
        let mut formula = factors.iter().map(|(name, n)| format!("{name} {n}")).collect::<Vec<_>>().join(" * ");
        if plus > 0 {
            formula += &format!(" + {plus}");
        }
        Self::sized(phase, name, dtype, product + plus as u64, formula)
    }

    fn sized(phase: &'static str, name: &'static str, dtype: &'static str, elements: u64, formula: String) -> Self {
        let size = match dtype {
            "bool" | "uint8" => 1,
            "int64" | "uint64" => 8,
            _ => 4,
        };
        Self { name, phase, dtype, elements, bytes: elements * size, formula }
    }
}

impl Geometry {
    /// Nodes of the longest path that a verification can accept: `min(S + 1, V)`.
    pub fn max_accepted(&self) -> u32 {
        (self.shape().steps() + 1).min(self.shape().draft_tokens())
    }

    /// Capacity of every array of the `native` format, largest batch, in the order of a round. The draft arrays are
    /// one step's; a prefill chunk's arrays are as long as the chunk and not listed.
    pub fn buffers(&self) -> Vec<Buffer> {
        let (shape, b) = (self.shape(), ("max_batch", self.limits().max_batch));
        let k = ("topk", shape.topk());
        let v = ("draft_tokens", shape.draft_tokens());
        let accepted = ("min(steps + 1, draft_tokens)", self.max_accepted());
        let candidates = ("candidates", shape.candidates());
        let mut all = vec![
            Buffer::new("pool", "page_table", "int32", &[b, ("row_pages", self.row_pages())], 0),
            Buffer::new("each plan", "rows", "int32", &[b], 0),
            Buffer::new("each plan", "versions", "uint64", &[b], 0),
            Buffer::new("each plan", "qo_indptr", "int32", &[b], 1),
            Buffer::new("each plan", "prefix_lens", "int32", &[b], 0),
            Buffer::new("draft", "positions", "int32", &[b, k], 0),
            Buffer::new("draft", "out_slots", "int32", &[b, k], 0),
            Buffer::new("draft", "mask", "uint64", &[b, k, ("words", self.draft_mask_words())], 0),
            Buffer::new("select", "scores", "float32", &[b, candidates], 0),
            Buffer::new("select", "tokens", "int32", &[b, candidates], 0),
            Buffer::new("select", "parents", "int32", &[b, candidates], 0),
            Buffer::new("verify", "positions", "int32", &[b, v], 0),
            Buffer::new("verify", "out_slots", "int32", &[b, v], 0),
            Buffer::new("verify", "mask", "uint64", &[b, v, ("words", self.verify_mask_words())], 0),
            Buffer::new("commit", "new_lens", "uint32", &[b], 0),
            Buffer::new("draft_extend", "positions", "int32", &[b, accepted], 0),
            Buffer::new("draft_extend", "out_slots", "int32", &[b, accepted], 0),
        ];
        if self.page().get() == 1 {
            all.push(Buffer::new("commit", "remap order", "uint32", &[b, accepted], 0));
        } else {
            // The root is never out of place.
            let moved = ("min(steps, draft_tokens - 1)", self.max_accepted() - 1);
            all.push(Buffer::new("commit", "move sources", "int32", &[b, moved], 0));
            all.push(Buffer::new("commit", "move destinations", "int32", &[b, moved], 0));
        }
        if self.layout() == Layout::Holey {
            let holes = [b, ("topk - 1", k.1 - 1), ("page_size - 1", self.page().get() - 1)];
            all.push(Buffer::new("tail copy", "sources", "int32", &holes, 0));
            all.push(Buffer::new("tail copy", "destinations", "int32", &holes, 0));
        }
        all
    }

    /// The buffer that the per-branch formats need for their draft steps' `kv_indices`, one row a step: `S * max_batch
    /// * K * (max_context_len + S)` of int32. For comparison with [`Self::buffers`]; whether one step's row fits
    /// `int32` indexing is [`Self::per_branch_kv_indices`].
    pub fn per_branch_buffer(&self) -> Result<Buffer> {
        let shape = self.shape();
        let width = add("context and steps", self.limits().max_context_len, shape.steps())?;
        let factors = [
            ("steps", shape.steps()),
            ("max_batch", self.limits().max_batch),
            ("topk", shape.topk()),
            ("(max_context_len + steps)", width),
        ];
        Ok(Buffer::new("draft", "per-branch kv_indices", "int32", &factors, 0))
    }
}
