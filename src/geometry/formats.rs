//! Widths of the arrays of the slot-list formats (`flashinfer`, `triton`): the capacities that a configuration asks for,
//! each with the arithmetic it comes from.
//!
//! With B requests, K branches, S steps, V nodes and the context C, a request that drafts step t has `L + t < C`, one
//! that verifies has `L < C`, and one that n tokens are appended to has `L + n <= C`; one at the context wall has no
//! keys. So, at most:
//!
//! | array | phase | elements |
//! |---|---|---|
//! | `kv_indptr` | draft; others | `B*K + 1`; `B + 1` |
//! | `kv_indices` | draft | `B*K*C`: one list a branch, each inside the context ([`Geometry::per_branch_kv_indices`]) |
//! | `kv_indices` | decode; extend of `flashinfer` | `B*C` ([`Geometry::causal_kv_indices`]) |
//! | `kv_indices` | verify of `flashinfer` | `B*(C-1+V)` ([`Geometry::verify_kv_indices`]) |
//! | `kv_indices` | extend and verify of `triton` | `B*(C-1)`, the prefix alone ([`Geometry::prefix_kv_indices`]) |
//! | `custom_mask` | verify | `B*V*(C-1+V)` ([`Geometry::verify_mask_elements`]) |
//! | `packed_custom_mask` | verify of `flashinfer` | `B*ceil(V*(C-1+V)/8)` ([`Geometry::verify_mask_bytes`]) |
//!
//! What a batch uses is found from its plan, by other arithmetic (`plan::Load`); that it never exceeds these is tested
//! over random configurations and proved for given ones by `certify`.

use crate::bounds::fits_i32;
use crate::error::Result;
use crate::geometry::{Buffer, Geometry};

/// A factor of a size and what it stands for.
type Factor = (&'static str, u32);

impl Geometry {
    /// Width of `kv_indices` where each of `requests` is listed once with all of its context:
    /// `requests * max_context_len`.
    ///
    /// # Errors
    /// [`Error::Overflow`](crate::Error::Overflow) where int32, which indexes it, does not hold it; with the numbers.
    pub fn causal_kv_indices(&self, requests: u32) -> Result<u32> {
        product("kv_indices", &self.causal(requests))
    }

    /// Width of `kv_indices` where each of `requests` is listed once with its prefix alone:
    /// `requests * (max_context_len - 1)`. A prefix that has anything behind it is shorter than the context.
    ///
    /// # Errors
    /// [`Error::Overflow`](crate::Error::Overflow) where int32, which indexes it, does not hold it; with the numbers.
    pub fn prefix_kv_indices(&self, requests: u32) -> Result<u32> {
        product("kv_indices", &self.prefixes(requests))
    }

    /// Width of `kv_indices` where each of `requests` is listed once with its prefix and the nodes of its tree:
    /// `requests * (max_context_len - 1 + V)`. The nodes' row positions may lie behind the context wall, their depths
    /// may not.
    ///
    /// # Errors
    /// [`Error::Overflow`](crate::Error::Overflow) where int32, which indexes it, does not hold it; with the numbers.
    pub fn verify_kv_indices(&self, requests: u32) -> Result<u32> {
        product("kv_indices", &self.verified(requests))
    }

    /// Elements of a verification's mask over the context: `requests * V * (max_context_len - 1 + V)`, one byte each
    /// and indexed by int64.
    pub fn verify_mask_elements(&self, requests: u32) -> u64 {
        elements(&self.mask(requests))
    }

    /// The same where int32 indexes it.
    ///
    /// # Errors
    /// [`Error::Overflow`](crate::Error::Overflow) where int32 does not hold it, with the numbers.
    pub fn verify_mask_elements_i32(&self, requests: u32) -> Result<u32> {
        product("custom_mask", &self.mask(requests))
    }

    /// Bytes of that mask with 8 elements in each, every request's padded to whole bytes:
    /// `requests * ceil(V * (max_context_len - 1 + V) / 8)`.
    ///
    /// # Errors
    /// [`Error::Overflow`](crate::Error::Overflow) where int32, which indexes it, does not hold it; with the numbers.
    pub fn verify_mask_bytes(&self, requests: u32) -> Result<u32> {
        product("packed_custom_mask", &self.packed(requests)?)
    }

    /// Capacity of every array of the `flashinfer` format for batches of `requests`, of both forms of the mask, one
    /// draft step.
    ///
    /// # Errors
    /// [`Error::Overflow`](crate::Error::Overflow) for a list or a packed mask that int32 does not index. (Of the mask in
    /// bytes this is [`Self::verify_mask_elements_i32`].)
    pub fn flashinfer_buffers(&self, requests: u32) -> Result<Vec<Buffer>> {
        let b = [("max_batch", requests)];
        let draft = self.draft_buffer(requests, "int32")?;
        self.causal_kv_indices(requests)?;
        self.verify_kv_indices(requests)?;
        self.verify_mask_bytes(requests)?;
        let lists = self.branches(requests);
        let mut all = vec![
            Buffer::new("draft", "kv_indptr", "int32", &lists, 1),
            draft,
            Buffer::new("draft", "kv_last_page_len", "int32", &lists, 0),
            Buffer::new("decode", "kv_indptr", "int32", &b, 1),
            Buffer::new("decode", "kv_indices", "int32", &self.causal(requests), 0),
            Buffer::new("decode", "kv_last_page_len", "int32", &b, 0),
        ];
        for (phase, list) in [("extend", self.causal(requests)), ("verify", self.verified(requests))] {
            all.extend([
                Buffer::new(phase, "qo_indptr", "int32", &b, 1),
                Buffer::new(phase, "kv_indptr", "int32", &b, 1),
                Buffer::new(phase, "kv_indices", "int32", &list, 0),
                Buffer::new(phase, "kv_last_page_len", "int32", &b, 0),
            ]);
        }
        all.extend([
            Buffer::new("verify", "mask_indptr", "int32", &b, 1),
            Buffer::new("verify", "custom_mask", "bool", &self.mask(requests), 0),
            Buffer::new("verify", "packed_mask_indptr", "int32", &b, 1),
            Buffer::new("verify", "packed_custom_mask", "uint8", &self.packed(requests)?, 0),
        ]);
        Ok(all)
    }

    /// Capacity of every array of the `triton` format for batches of `requests`, one draft step.
    ///
    /// # Errors
    /// [`Error::Overflow`](crate::Error::Overflow) for a list that int32, the type of `kv_indptr`, does not index.
    pub fn triton_buffers(&self, requests: u32) -> Result<Vec<Buffer>> {
        let b = [("max_batch", requests)];
        let draft = self.draft_buffer(requests, "int64")?;
        self.causal_kv_indices(requests)?;
        let mut all = vec![
            Buffer::new("draft", "kv_indptr", "int32", &self.branches(requests), 1),
            draft,
            Buffer::new("decode", "kv_indptr", "int32", &b, 1),
            Buffer::new("decode", "kv_indices", "int64", &self.causal(requests), 0),
        ];
        let nodes = [b[0], ("draft_tokens", self.shape().draft_tokens())];
        for (phase, queries) in [("extend", self.causal(requests)), ("verify", nodes)] {
            all.extend([
                Buffer::new(phase, "qo_indptr", "int64", &b, 1),
                Buffer::new(phase, "kv_indptr", "int32", &b, 1),
                Buffer::new(phase, "kv_indices", "int64", &self.prefixes(requests), 0),
                Buffer::new(phase, "extend_slots", "int64", &queries, 0),
            ]);
        }
        all.push(Buffer::new("verify", "mask_indptr", "int64", &b, 1));
        all.push(Buffer::new("verify", "custom_mask", "bool", &self.mask(requests), 0));
        Ok(all)
    }

    /// One step's `kv_indices` of a per-branch format.
    fn draft_buffer(&self, requests: u32, dtype: &'static str) -> Result<Buffer> {
        let (context, k) = (self.limits().max_context_len, self.shape().topk());
        // What the per-branch width adds for steps at the context wall no live branch needs.
        let inside = requests as u64 * k as u64 * context as u64;
        let elements = self.per_branch_elements(requests, context).min(inside);
        let formula = format!("max_batch {requests} * topk {k} * max_context_len {context}");
        fits_i32("per-branch kv_indices", elements, || formula.clone())?;
        Ok(Buffer::sized("draft", "kv_indices", dtype, elements, formula))
    }

    fn branches(&self, requests: u32) -> [Factor; 2] {
        [("max_batch", requests), ("topk", self.shape().topk())]
    }

    fn causal(&self, requests: u32) -> [Factor; 2] {
        [("max_batch", requests), ("max_context_len", self.limits().max_context_len)]
    }

    fn prefixes(&self, requests: u32) -> [Factor; 2] {
        [("max_batch", requests), ("(max_context_len - 1)", self.limits().max_context_len - 1)] // a context is >= 1
    }

    fn verified(&self, requests: u32) -> [Factor; 2] {
        // At most 2^24 and 1024: no overflow.
        let keys = self.limits().max_context_len - 1 + self.shape().draft_tokens();
        [("max_batch", requests), ("(max_context_len - 1 + draft_tokens)", keys)]
    }

    fn mask(&self, requests: u32) -> [Factor; 3] {
        let [b, keys] = self.verified(requests);
        [b, ("draft_tokens", self.shape().draft_tokens()), keys]
    }

    fn packed(&self, requests: u32) -> Result<[Factor; 2]> {
        let one = product("mask of a request", &self.mask(1))?.div_ceil(8);
        Ok([("max_batch", requests), ("ceil(draft_tokens * (max_context_len - 1 + draft_tokens) / 8)", one)])
    }
}

/// A product of sizes; far from overflowing, for every factor has a limit of its own.
fn elements(factors: &[Factor]) -> u64 {
    factors.iter().map(|&(_, n)| n as u64).product()
}

/// A product that int32 indexes.
fn product(what: &'static str, factors: &[Factor]) -> Result<u32> {
    let expr = || factors.iter().map(|(name, n)| format!("{name} {n}")).collect::<Vec<_>>().join(" * ");
    fits_i32(what, elements(factors), expr).map(|n| n as u32)
}
