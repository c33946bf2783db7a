//! Draft tokens that a branch sees.

/// The draft tokens that the queries of a draft step attend to behind the prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftMask<'a> {
    /// The branch's true ancestors and itself: `[batch * K * draft_mask_words]` bits over the draft slots `b*S + s`.
    Ancestors(&'a [u64]),
    /// The branch's own slots of the earlier steps and itself, whoever its parent was (what sglang does at K > 1).
    Lane,
}
