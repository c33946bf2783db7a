//! [`Load`]: a step of a batch in numbers, from which every array of every format is sized.
//!
//! The same function of a format turns a load into the sizes to write and into the capacities to allocate. Only the
//! load's source differs: a plan ([`Load::of`]), the lengths alone ([`Load::of_lens`]), or the limits of the
//! configuration ([`Load::limit`]). That a plan's numbers never exceed the limit's is what `certify` proves.

use crate::error::{Result, in_range};
use crate::geometry::Geometry;
use crate::plan::{Lens, Phase, Plan};
use crate::revert::Fault;
use crate::simd::dispatch;

/// A step of a batch in numbers. Requests behind the context wall, and padded ones, count as requests and queries and
/// attend to nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// The step.
    pub phase: Phase,
    /// Requests, B.
    pub requests: u64,
    /// Queries, Q.
    pub queries: u64,
    /// Sum over the requests of their prefix, L.
    pub prefix: u64,
    /// Sum over the requests of prefix and own queries, L + n: the keys of a request that is read once.
    pub keys: u64,
    /// Sum over the queries of the keys of each, where each is listed by itself: of a draft step, L + t + 1.
    pub query_keys: u64,
    /// Sum over the requests of n * (L + n): elements of a mask over the context.
    pub mask: u64,
    /// The same in bytes of 8 elements, each request rounded up.
    pub mask_bytes: u64,
    /// The largest prefix.
    pub longest_prefix: u64,
    /// The largest L + n; of a draft step, L + t + 1.
    pub longest: u64,
    /// The most ancestors, itself included, of a query of a verification; 0 for other phases.
    pub deepest: u64,
}

impl Load {
    fn new(phase: Phase, requests: u64, queries: u64) -> Self {
        Self {
            phase,
            requests,
            queries,
            prefix: 0,
            keys: 0,
            query_keys: 0,
            mask: 0,
            mask_bytes: 0,
            longest_prefix: 0,
            longest: 0,
            deepest: 0,
        }
    }

    /// Add `times` requests with a prefix of `prefix` and `n` queries each.
    fn add(&mut self, times: u64, prefix: u64, n: u64) {
        let own = match self.phase {
            Phase::Draft { step } => step as u64 + 1,
            _ => n,
        };
        let keys = prefix + own;
        self.prefix += times * prefix;
        self.keys += times * keys;
        self.query_keys += times * n * keys;
        self.mask += times * n * keys;
        self.mask_bytes += times * (n * keys).div_ceil(8);
        self.longest_prefix = self.longest_prefix.max(prefix);
        self.longest = self.longest.max(keys);
    }

    /// A batch of `n` times what this one holds.
    pub fn times(self, n: u64) -> Self {
        Self {
            requests: n * self.requests,
            queries: n * self.queries,
            prefix: n * self.prefix,
            keys: n * self.keys,
            query_keys: n * self.query_keys,
            mask: n * self.mask,
            mask_bytes: n * self.mask_bytes,
            ..self
        }
    }

    /// Load of `plan`.
    pub fn of(plan: &Plan) -> Self {
        let mut load = Self::new(plan.phase(), plan.batch() as u64, plan.queries() as u64);
        let mut prefixes = 0; // sum over the queries
        for i in 0..plan.live_batch() {
            let (first, end) = (plan.qo_indptr()[i] as usize, plan.qo_indptr()[i + 1] as usize);
            // A request behind the context wall writes to the sink.
            if first < end && plan.out_slots()[first] != 0 {
                let (prefix, n) = (plan.prefix_lens()[i] as u64, (end - first) as u64);
                load.add(1, prefix, n);
                prefixes += n * prefix;
            }
        }
        if let Phase::Draft { .. } = load.phase {
            // True ancestors and lanes are t + 1 slots; a caller's bits may name any slots of earlier steps.
            load.query_keys = prefixes + ancestors(plan, u64::saturating_add);
        }
        if plan.phase() == Phase::Verify {
            load.deepest = ancestors(plan, u64::max);
        }
        load
    }

    /// A batch of `requests` at their largest: the capacity of every array.
    ///
    /// # Errors
    /// A step that the tree does not have; more requests than `max_batch`.
    pub fn limit(geometry: &Geometry, phase: Phase, requests: u32) -> Result<Self> {
        Self::at_most(geometry, phase, requests, geometry.limits().max_context_len)
    }

    /// Load of a step for a batch whose lengths are `lens`, with the most queries that the phase has (`extend`: up to
    /// the end of the context). Lengths on the device count with their bound: nothing on the host may read them (sglang
    /// pull request 26738).
    ///
    /// # Errors
    /// Those of [`Load::limit`].
    pub fn of_lens(geometry: &Geometry, phase: Phase, lens: &Lens<'_>) -> Result<Self> {
        let context = geometry.limits().max_context_len;
        let requests = lens.batch() as u64;
        check(geometry, phase, requests)?;
        match *lens {
            // The fault 26738: ask the host's mirror, which is not there.
            Lens::Device { .. } if geometry.reverts().has(Fault::HostLengths) => {
                Self::of_lens(geometry, phase, &Lens::Host(lens.host("sizing")?))
            }
            Lens::Device { at_most, batch } => {
                in_range("length bound", at_most, 0, context as i128)?;
                Self::at_most(geometry, phase, batch, at_most)
            }
            Lens::Host(all) => {
                let queries = all.iter().map(|&len| most_queries(geometry, phase, len) as u64).sum();
                let mut load = Self::new(phase, requests, queries);
                load.deepest = most_ancestors(geometry, phase);
                for &len in all {
                    in_range("committed length", len, 0, context as i128)?;
                    if alive(phase, len, context) {
                        load.add(1, len as u64, most_queries(geometry, phase, len) as u64);
                    }
                }
                Ok(load)
            }
        }
    }

    /// `requests` with prefixes of up to `len`.
    fn at_most(geometry: &Geometry, phase: Phase, requests: u32, len: u32) -> Result<Self> {
        let context = geometry.limits().max_context_len;
        check(geometry, phase, requests as u64)?;
        let (b, n) = (requests as u64, most_queries(geometry, phase, 0) as u64);
        let mut load = Self::new(phase, b, b * n);
        // The longest prefix behind which the phase still does something.
        let longest = match phase {
            Phase::Draft { step } => len.min(context.saturating_sub(step + 1)),
            _ => len.min(context - 1),
        };
        // The sum of a prefix and its chunk counts; there is no mask.
        let queries = most_queries(geometry, phase, longest) as u64;
        load.add(b, longest as u64, queries);
        load.longest_prefix = load.longest_prefix.max(longest as u64);
        if let Phase::Draft { .. } = phase {
            // A live branch stays inside the context, so that a buffer of an engine, `max_batch * topk * max_context_len`
            // long as sglang's, is enough.
            let inside = b * n * context as u64;
            load.query_keys = geometry.per_branch_elements(requests, len).min(inside);
            // Nor does a step that lies behind the wall for every prefix have keys there.
            load.longest = load.longest.min(context as u64);
        }
        load.deepest = most_ancestors(geometry, phase);
        Ok(load)
    }
}

/// The geometry has such a step, and batches of so many requests.
fn check(geometry: &Geometry, phase: Phase, requests: u64) -> Result<()> {
    in_range("requests", requests, 0, geometry.limits().max_batch as i128)?;
    if let Phase::Draft { step } = phase {
        in_range("step", step, 0, geometry.shape().steps() as i128 - 1)?;
    }
    Ok(())
}

/// The bits of each query's mask, put together over all queries; a dead query has none.
fn ancestors(plan: &Plan, fold: impl Fn(u64, u64) -> u64) -> u64 {
    let words = (plan.mask_words() as usize).max(1);
    dispatch(
        #[inline(always)]
        || {
            let bits = |mask: &[u64]| mask.iter().map(|word| word.count_ones() as u64).sum();
            plan.mask().chunks_exact(words).map(bits).fold(0, &fold)
        },
    )
}

/// The most ancestors of a node: a tree may be a chain.
fn most_ancestors(geometry: &Geometry, phase: Phase) -> u64 {
    if phase == Phase::Verify { geometry.verify_expand_width() as u64 } else { 0 }
}

/// The most queries of a request of `len` tokens.
fn most_queries(geometry: &Geometry, phase: Phase, len: u32) -> u32 {
    match phase {
        Phase::Extend => geometry.limits().max_context_len - len.min(geometry.limits().max_context_len),
        Phase::Decode => 1,
        Phase::Draft { .. } => geometry.shape().topk(),
        Phase::Verify => geometry.shape().draft_tokens(),
    }
}

/// True if a request of `len` tokens does something in the phase.
fn alive(phase: Phase, len: u32, context: u32) -> bool {
    match phase {
        Phase::Draft { step } => (len as u64) + (step as u64) < context as u64,
        _ => len < context,
    }
}
