//! [`Size`]: how large an array is, said once. The elements that a step writes, the capacity of the largest step, and the
//! arithmetic of that capacity in words ([`Formula`]) all follow from one `Size`.
//!
//! With B requests, K branches, S steps, V nodes and the context C, a request that drafts step t has `L + t < C`, one
//! that verifies has `L < C`, and one that n tokens are appended to has `L + n <= C`; one at the context wall has no
//! keys. So each [`Count`] is at most:
//!
//! | count | extend | decode | draft | verify |
//! |---|---|---|---|---|
//! | [`Requests`](Count::Requests) | `B` | `B` | `B` | `B` |
//! | [`Queries`](Count::Queries) | `B*C` | `B` | `B*K` | `B*V` |
//! | [`Prefix`](Count::Prefix) | `B*(C-1)` | | | `B*(C-1)` |
//! | [`Keys`](Count::Keys) | `B*C` | `B*C` | | `B*(C-1+V)` |
//! | [`QueryKeys`](Count::QueryKeys) | | | `B*K*C` | |
//! | [`Mask`](Count::Mask) | | | | `B*V*(C-1+V)` |
//! | [`MaskBytes`](Count::MaskBytes) | | | | `B*ceil(V*(C-1+V)/8)` |
//!
//! [`Load::limit`] finds the same numbers by adding up requests. That the two agree, and that no batch exceeds them, is
//! tested over random configurations, and proved for given ones by `certify`.

use std::fmt;

use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::plan::form::{self, Step, tables};
use crate::plan::{Extent, Load, Phase, Spec};

/// A number of a [`Load`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// [`Load::requests`].
    Requests,
    /// [`Load::queries`].
    Queries,
    /// [`Load::prefix`].
    Prefix,
    /// [`Load::keys`].
    Keys,
    /// [`Load::query_keys`].
    QueryKeys,
    /// [`Load::mask`].
    Mask,
    /// [`Load::mask_bytes`].
    MaskBytes,
}

/// Columns of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Columns {
    /// Pages that the pass over the prefix, or the only one, reads of a request.
    Pages,
    /// Tokens that a query attends to behind the prefix: `t + 1` in a draft step, the deepest node's ancestors in a
    /// verification.
    Own,
}

/// Size of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// A line of as many elements as the count, and some more; int32 indexes them.
    Line(Count, u64),
    /// A line of as many elements as the count; int64 indexes them.
    Long(Count),
    /// A row for each of the count.
    Table(Count, Columns),
}

/// Derivation of an array's capacity: a product of named numbers, and what is added to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Formula {
    factors: Vec<(&'static str, u64)>,
    plus: u64,
}

/// Capacity of one array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capacity {
    /// Index of the array in [`Format::arrays`](crate::plan::Format::arrays).
    pub array: usize,
    /// Extent of the array.
    pub extent: Extent,
    /// Derivation of the size.
    pub formula: Formula,
}

impl Formula {
    /// Elements.
    pub fn elements(&self) -> u64 {
        self.factors.iter().map(|&(_, n)| n).product::<u64>() + self.plus
    }
}

/// With its numbers: `max_batch 4 * topk 2 + 1`.
impl fmt::Display for Formula {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let factors: Vec<String> = self.factors.iter().map(|(name, n)| format!("{name} {n}")).collect();
        f.write_str(&factors.join(" * "))?;
        if self.plus > 0 { write!(f, " + {}", self.plus) } else { Ok(()) }
    }
}

impl Load {
    /// One of the formula's numbers.
    #[inline]
    pub fn get(&self, count: Count) -> u64 {
        match count {
            Count::Requests => self.requests,
            Count::Queries => self.queries,
            Count::Prefix => self.prefix,
            Count::Keys => self.keys,
            Count::QueryKeys => self.query_keys,
            Count::Mask => self.mask,
            Count::MaskBytes => self.mask_bytes,
        }
    }
}

impl Count {
    /// The factors of its largest value.
    fn factors(self, geometry: &Geometry, phase: Phase, requests: u32) -> Vec<(&'static str, u64)> {
        let (limits, shape) = (geometry.limits(), geometry.shape());
        let b = ("max_batch", requests as u64);
        let (k, v) = (("topk", shape.topk() as u64), ("draft_tokens", shape.draft_tokens() as u64));
        let context = ("max_context_len", limits.max_context_len as u64);
        // A prefix that has anything behind it is shorter than the context.
        let prefix = ("(max_context_len - 1)", context.1 - 1);
        // The nodes' row positions may lie behind the context wall, their depths may not.
        let nodes = ("(max_context_len - 1 + draft_tokens)", context.1 - 1 + v.1);
        match (self, phase) {
            (Count::Requests, _) | (Count::Queries, Phase::Decode) => vec![b],
            (Count::Queries, Phase::Draft { .. }) => vec![b, k],
            (Count::Queries, Phase::Verify) => vec![b, v],
            (Count::Keys, Phase::Verify) => vec![b, nodes],
            (Count::Queries | Count::Keys, _) => vec![b, context],
            (Count::Prefix, _) => vec![b, prefix],
            (Count::QueryKeys, _) => vec![b, k, context],
            (Count::Mask, _) => vec![b, v, nodes],
            (Count::MaskBytes, _) => {
                let name = "ceil(draft_tokens * (max_context_len - 1 + draft_tokens) / 8)";
                vec![b, (name, (v.1 * nodes.1).div_ceil(8))]
            }
        }
    }
}

impl Columns {
    /// Columns that `load` uses. Longer prefixes have more tokens to read, whatever part of them the pass reads.
    #[inline(always)]
    fn of(self, geometry: &Geometry, load: &Load) -> u64 {
        match (self, load.phase) {
            (Columns::Own, Phase::Draft { step }) => geometry.draft_expand_width(step) as u64,
            (Columns::Own, _) => load.deepest,
            // No prefix exceeds the context.
            (Columns::Pages, _) => {
                let s = Step::new(geometry, load.phase);
                form::pages(s, tables::tokens(s, load.longest_prefix as u32, load.longest as u32)) as u64
            }
        }
    }

    /// The most columns.
    fn factor(self, geometry: &Geometry, phase: Phase) -> (&'static str, u64) {
        let (context, s) = (geometry.limits().max_context_len, Step::new(geometry, phase));
        let drafted = context.saturating_sub(s.step + 1); // behind the wall nothing is drafted
        let (name, columns) = match (self, tables::passes(s), phase) {
            (Columns::Own, _, Phase::Draft { step }) => ("step + 1", geometry.draft_expand_width(step)),
            (Columns::Own, ..) => ("draft_tokens", geometry.verify_expand_width()),
            (_, tables::ONE, _) => ("ceil(max_context_len / page_size)", form::pages(s, context)),
            (_, _, Phase::Verify) => ("ceil((max_context_len - 1) / page_size)", form::pages(s, context - 1)),
            (_, tables::SLOTS, _) => ("ceil((max_context_len - step - 1) / page_size)", form::pages(s, drafted)),
            _ => ("floor((max_context_len - step - 1) / page_size)", drafted >> s.shift),
        };
        (name, columns as u64)
    }
}

impl Size {
    /// For an array that is there if `there`.
    pub(super) const fn only(self, there: bool) -> Option<Self> {
        if there { Some(self) } else { None }
    }

    /// The size that `load` has of the array `spec`.
    ///
    /// # Errors
    /// [`Error::Overflow`] where int32, which indexes the array, does not hold it.
    #[inline]
    pub(super) fn extent(&self, geometry: &Geometry, load: &Load, spec: &Spec) -> Result<Extent> {
        let extent = self.unchecked(geometry, load);
        if self.is_over(extent) { Err(overflow(spec, load)) } else { Ok(extent) }
    }

    /// The size that `load` has, which int32 may not index.
    #[inline]
    pub(super) fn unchecked(&self, geometry: &Geometry, load: &Load) -> Extent {
        match *self {
            Size::Line(count, plus) => Extent::Line(load.get(count) + plus),
            Size::Long(count) => Extent::Line(load.get(count)),
            Size::Table(count, columns) => Extent::Table { rows: load.get(count), cols: columns.of(geometry, load) },
        }
    }

    /// True if int32, which indexes the array, does not hold `extent`.
    #[inline]
    pub(super) fn is_over(&self, extent: Extent) -> bool {
        matches!((self, extent), (Size::Line(..), Extent::Line(n)) if n > i32::MAX as u64)
    }

    /// Derivation of the capacity for `requests`.
    pub(super) fn formula(self, geometry: &Geometry, phase: Phase, requests: u32) -> Formula {
        let (Size::Line(count, _) | Size::Long(count) | Size::Table(count, _)) = self;
        let mut factors = count.factors(geometry, phase, requests);
        let plus = if let Size::Line(_, plus) = self { plus } else { 0 };
        if let Size::Table(_, columns) = self {
            factors.push(columns.factor(geometry, phase));
        }
        Formula { factors, plus }
    }
}

#[cold]
fn overflow(spec: &Spec, load: &Load) -> Error {
    let Load { phase, requests, queries, prefix, .. } = load;
    let expr = format!("{phase} of {requests} requests, {queries} queries and {prefix} tokens of prefixes");
    Error::Overflow { what: spec.name, expr, ty: "int32", limit: i32::MAX as u64 }
}

/// Refuse a configuration in which int32 does not index the array `what`: one of `count` elements for `requests`.
pub(super) fn indexable(
    (format, instead): (&str, &str),
    what: &str,
    geometry: &Geometry,
    phase: Phase,
    requests: u32,
    count: Count,
) -> Result<()> {
    let (elements, limit) = (Load::limit(geometry, phase, requests)?.get(count), i32::MAX as u64);
    if elements <= limit {
        return Ok(());
    }
    let formula = Size::Long(count).formula(geometry, phase, requests);
    Err(Error::Invalid {
        what: "format",
        got: format!("{format}, whose {what} has {formula} elements"),
        why: format!("int32 indexes up to {limit} of them; {instead}"),
    })
}

/// Index and size of the arrays that there are.
pub(super) fn present(sizes: &[Option<Size>]) -> Vec<(usize, Size)> {
    (0..).zip(sizes).filter_map(|(array, &size)| Some((array, size?))).collect()
}
