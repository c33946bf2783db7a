//! The description of a round's step: its phase, its requests, its trees. Known on the host even where lengths are not.

use std::fmt;

use crate::geometry::Geometry;
use crate::plan::Lens;
use crate::pool::SeqId;

/// The step of a round that a plan describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Tokens appended behind a prefix, attended causally: prefill chunks and the draft model's pass over the accepted
    /// tokens.
    Extend,
    /// One token behind each prefix.
    Decode,
    /// Draft step `step`: K branches per request, each with the ancestors that its mask names.
    Draft {
        /// 0-based step.
        step: u32,
    },
    /// The target's pass over a token tree.
    Verify,
}

impl Phase {
    /// Name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Extend => "extend",
            Phase::Decode => "decode",
            Phase::Draft { .. } => "draft",
            Phase::Verify => "verify",
        }
    }
}

/// The name, and of a draft the step: `draft step 3`.
impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        if let Phase::Draft { step } = self {
            write!(f, " step {step}")?;
        }
        Ok(())
    }
}

/// The phases of a round for `geometry`, each once: what a format is checked and sized for.
pub fn phases(geometry: &Geometry) -> impl Iterator<Item = Phase> + use<> {
    let steps = geometry.shape().steps();
    let drafts = (0..steps).map(|step| Phase::Draft { step });
    [Phase::Extend, Phase::Decode].into_iter().chain(drafts).chain([Phase::Verify])
}

/// The requests of a step and their committed lengths.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// One sequence a request, each at most once; none is a valid batch.
    pub seqs: &'a [SeqId],
    /// L of each request (of an `extend`: where its tokens start).
    pub lens: Lens<'a>,
    /// Bucket to pad to; `None` for no padding.
    pub pad: Option<Bucket>,
}

impl<'a> Batch<'a> {
    /// A batch without padding.
    pub fn new(seqs: &'a [SeqId], lens: Lens<'a>) -> Self {
        Self { seqs, lens, pad: None }
    }

    /// The same, padded.
    pub fn padded(self, bucket: Bucket) -> Self {
        Self { pad: Some(bucket), ..self }
    }
}

/// The fixed sizes that a plan is padded to, such as those of a captured graph. A bucket is within the limits: at most
/// `max_batch` requests, and at most the queries of so many requests in the phase ([`Load::limit`](crate::plan::Load::limit)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Bucket {
    /// Requests.
    pub batch: u32,
    /// Queries.
    pub queries: u32,
}

/// Token trees of a batch, one a request, of any form with parents before children.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trees<'a> {
    /// Nodes of each tree, root included; at least 1.
    pub sizes: &'a [u32],
    /// Concatenated parent arrays, each with indices local to its tree and -1 for the root.
    pub parents: &'a [i32],
}
