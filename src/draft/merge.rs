//! One tree from the proposals of many sources.
//!
//! Nodes that sources propose under equal tokens are one node of a shared prefix tree. Its probability is that of the
//! union, `1 - prod(1 - p_i)` over the sources that claim it, each claim corrected by the [`Calibration`]. The
//! probabilities of siblings sum to at most 1: where sources disagree, the likeliest keeps its probability, and the
//! others share what it leaves. A source that has nothing better to say is right less often where another one is sure
//! of something else; scaling all of them alike would make the sure one doubtful. The tree takes nodes best first by
//! cumulative log-probability: a parent's score is not below its child's, so the choice is closed under ancestors.
//!
//! **Order.** The root is node 0 and the deepest path chosen (ties: the one that scores higher), the *spine*, stands
//! right behind it, node by node; the others follow best first. So parents stand before their children, and the KV of
//! the spine lies at its logical positions. The GPU's attention keeps its bits where no path has more than
//! [`OFF_SPINE`](MergeLimits::off_spine) nodes off the spine (`cuda/attention.cu`): longer branches are cut there, and
//! what they leave of the budget goes to the next best nodes.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use super::calibration::{Calibration, MAX_SOURCES};
use super::proposal::Proposal;
use crate::bounds::MAX_DRAFT_TOKENS;
use crate::error::{Error, Result, in_range, listed};
use crate::round::MAX_VOCAB;

/// Probability that a certain node leaves to all of its siblings.
const LEFT: f64 = 1e-4;

/// Limits of a tree's size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MergeLimits {
    /// Nodes at most, the root included.
    pub nodes: u32,
    /// Levels below the root at most.
    pub depth: u32,
    /// Nodes that a path may have off the spine; 8 is what the GPU's attention takes (`ATTENTION_TAIL`).
    pub off_spine: u32,
    /// Smallest cumulative log-probability of a node.
    pub min_score: f32,
}

impl MergeLimits {
    /// Limits on nodes and levels alone, and what the GPU's attention needs.
    pub fn new(nodes: u32, depth: u32) -> Self {
        Self { nodes, depth, off_spine: 8, min_score: f32::NEG_INFINITY }
    }

    pub(super) fn check(self) -> Result<()> {
        in_range("nodes", self.nodes, 1, MAX_DRAFT_TOKENS.into())?;
        in_range("depth", self.depth, 0, MAX_DRAFT_TOKENS.into())?;
        in_range("off_spine", self.off_spine, 1, MAX_DRAFT_TOKENS.into())?;
        if self.min_score.is_nan() {
            return Err(Error::Invalid { what: "min_score", got: "NaN".into(), why: "it bounds nothing".into() });
        }
        Ok(())
    }
}

/// The claim of one source for one node.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Claim {
    node: u32,
    source: u8,
    bucket: u8,
    /// The probability as the source gave it, not corrected.
    prob: f32,
}

/// A merged tree; its arrays are what [`TreeBatch`](crate::round::TreeBatch) takes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MergedDrafts {
    parents: Vec<i32>,
    tokens: Vec<i32>,
    scores: Vec<f32>,
    sources: Vec<u32>,
    /// Nodes of the spine, root included; they are the first.
    spine: u32,
    /// Claims by node, ascending.
    claims: Vec<Claim>,
}

/// A node of the shared prefix tree under construction.
struct Shared {
    parent: i32,
    token: u32,
    /// Sum of `ln(1 - p)` over the sources.
    miss: f64,
    mask: u32,
    /// The node's last claim.
    claim: usize,
}

/// The tree of `root` and what `sources` propose below it, for a target of `vocab` tokens. A source that proposes one
/// token twice below one parent claims the sum.
///
/// # Errors
/// Those of [`Proposal::check`], for each source; [`Error::OutOfRange`] for `root`, `vocab`, a limit or too many sources;
/// [`Error::Mismatch`] where the calibration has fewer sources.
pub fn merge(
    root: u32,
    vocab: u32,
    sources: &[&Proposal],
    calibration: Option<&Calibration>,
    limits: MergeLimits,
) -> Result<MergedDrafts> {
    in_range("vocab", vocab, 1, MAX_VOCAB.into())?;
    in_range("root token", root, 0, i128::from(vocab) - 1)?;
    in_range("draft sources", sources.len() as u64, 0, MAX_SOURCES as i128)?;
    limits.check()?;
    calibration.map_or(Ok(()), |c| c.check(sources.len()))?;
    sources.iter().try_for_each(|s| s.check(vocab))?;
    Ok(union(root, sources, calibration).chosen(limits))
}

/// All nodes of all sources, in the order in which they are first met.
fn union(root: u32, sources: &[&Proposal], calibration: Option<&Calibration>) -> MergedDrafts {
    let all = sources.iter().map(|s| s.len()).sum();
    let mut shared = vec![Shared { parent: -1, token: root, miss: 0.0, mask: 0, claim: usize::MAX }];
    let mut at: HashMap<(i32, u32), u32> = HashMap::with_capacity(all);
    let mut claims: Vec<Claim> = Vec::with_capacity(all);
    let mut place = Vec::new();
    for (source, proposal) in sources.iter().enumerate() {
        let first = claims.len();
        place.clear();
        for node in 0..proposal.len() {
            let parent = usize::try_from(proposal.parents[node]).map_or(0, |p| place[p]);
            let key = (parent, proposal.tokens[node]);
            let here = *at.entry(key).or_insert(shared.len() as u32);
            if here as usize == shared.len() {
                shared.push(Shared { parent, token: key.1, miss: 0.0, mask: 0, claim: usize::MAX });
            }
            place.push(here as i32);
            let (last, prob) = (shared[here as usize].claim, proposal.probs[node]);
            if last != usize::MAX && last >= first {
                claims[last].prob = (claims[last].prob + prob).min(1.0); // the same token twice
            } else {
                shared[here as usize].claim = claims.len();
                claims.push(Claim { node: here, source: source as u8, bucket: proposal.bucket(node), prob });
            }
        }
        for claim in &claims[first..] {
            let prob = calibration.map_or(claim.prob, |c| c.corrected(source, claim.bucket, claim.prob));
            let node = &mut shared[claim.node as usize];
            node.miss += f64::ln_1p(-f64::from(prob));
            node.mask |= 1 << source;
        }
    }
    let probs: Vec<f64> = shared.iter().map(|node| -node.miss.exp_m1()).collect();
    // A node's likeliest child (the first of equal ones), its probability, and the sum over all children.
    let mut children = vec![(0usize, 0.0f64, 0.0f64); shared.len()];
    for (i, (node, &prob)) in shared.iter().zip(&probs).enumerate().skip(1) {
        let (best, most, sum) = &mut children[node.parent as usize];
        *sum += prob;
        if prob > *most {
            (*best, *most) = (i, prob);
        }
    }
    let mut scores = vec![0.0f32; shared.len()];
    for (i, node) in shared.iter().enumerate().skip(1) {
        let ((best, most, sum), mut prob) = (children[node.parent as usize], probs[i]);
        if sum > 1.0 {
            let kept = most.min(1.0 - LEFT);
            prob = if i == best { kept } else { prob * f64::min((1.0 - kept) / (sum - most), 1.0) };
        }
        scores[i] = scores[node.parent as usize] + prob.ln() as f32;
    }
    claims.sort_by_key(|c| c.node); // stable: by source within a node
    MergedDrafts {
        parents: shared.iter().map(|n| n.parent).collect(),
        tokens: shared.iter().map(|n| n.token as i32).collect(),
        sources: shared.iter().map(|n| n.mask).collect(),
        scores,
        spine: 1,
        claims,
    }
}

impl MergedDrafts {
    /// A tree of a root alone.
    pub(super) fn of_root(token: i32) -> Self {
        let mut tree = Self { spine: 1, ..Self::default() };
        tree.push_scored(token, -1, 0.0);
        tree
    }

    /// Append a node that no source claims, with its cumulative log-probability.
    pub(super) fn push_scored(&mut self, token: i32, parent: i32, score: f32) {
        self.tokens.push(token);
        self.parents.push(parent);
        self.scores.push(score);
        self.sources.push(0);
    }

    /// Parent of each node; -1 for the root, node 0.
    pub fn parents(&self) -> &[i32] {
        &self.parents
    }

    /// Token of each node.
    pub fn tokens(&self) -> &[i32] {
        &self.tokens
    }

    /// Cumulative log-probability of each node; 0 for the root.
    pub fn scores(&self) -> &[f32] {
        &self.scores
    }

    /// The sources that proposed each node, a bit for each source; 0 for the root.
    pub fn sources(&self) -> &[u32] {
        &self.sources
    }

    /// Nodes of the deepest path, root included; they are the first.
    pub fn spine(&self) -> u32 {
        self.spine
    }

    /// Nodes, root included.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Never: a tree has its root.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The best nodes of this tree within closer limits; its spine is found anew.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a limit.
    pub fn pruned(&self, limits: MergeLimits) -> Result<Self> {
        limits.check()?;
        Ok(self.chosen(limits))
    }

    /// The same tree within closer limits, without the nodes that `keep` refuses and all nodes below them. `keep` gets
    /// the tokens from below the root down to a node's parent, and the node's own, for each node whose parent is kept.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a limit.
    pub fn kept(&self, limits: MergeLimits, mut keep: impl FnMut(&[i32], i32) -> bool) -> Result<Self> {
        limits.check()?;
        let mut tree = self.clone();
        let mut path = Vec::new();
        for node in 1..self.len() {
            path.clear();
            let mut above = self.parents[node] as usize;
            let lost = tree.scores[above] == f32::NEG_INFINITY;
            while above > 0 {
                path.push(self.tokens[above]);
                above = self.parents[above] as usize;
            }
            path.reverse();
            if lost || !keep(&path, self.tokens[node]) {
                tree.scores[node] = f32::NEG_INFINITY;
            }
        }
        Ok(tree.chosen(MergeLimits { min_score: limits.min_score.max(f32::MIN), ..limits }))
    }

    /// Tell the calibration what was accepted: `path` are the nodes that verification walked, from the root on. Nodes
    /// whose parent is on the path had their chance; of those, the ones on the path were accepted.
    ///
    /// # Errors [`Error::Invalid`] where `path` is no path from the root; [`Error::Mismatch`] where the calibration has
    /// fewer sources.
    pub fn settle(&self, path: &[u32], calibration: &mut Calibration) -> Result<()> {
        let joins = |w: &[u32]| self.parents.get(w[1] as usize).is_some_and(|&p| p == w[0] as i32);
        if path.first() != Some(&0) || !path.windows(2).all(joins) {
            let why = format!("the accepted nodes of a tree of {} are a path from node 0", self.len());
            return Err(Error::Invalid { what: "accepted path", got: listed(path), why });
        }
        calibration.check(self.claims.iter().map(|c| usize::from(c.source) + 1).max().unwrap_or(0))?;
        let mut walked = vec![false; self.len()];
        path.iter().for_each(|&node| walked[node as usize] = true);
        for claim in &self.claims {
            let node = claim.node as usize;
            if walked[self.parents[node] as usize] {
                calibration.observe(claim.source.into(), claim.bucket, claim.prob, walked[node]);
            }
        }
        Ok(())
    }

    /// The best nodes within the limits, numbered spine first.
    pub(super) fn chosen(&self, limits: MergeLimits) -> Self {
        let children = Children::of(&self.parents);
        let mut order = self.best_first(&children, limits, None);
        let spine = self.spine_of(&order);
        if self.farthest(&order, &spine) > limits.off_spine {
            order = self.best_first(&children, limits, Some(&spine));
        }
        self.numbered(&order, spine)
    }

    /// Nodes best first. With a spine, a path ends where it would have more than `off_spine` nodes off it.
    fn best_first(&self, children: &Children, limits: MergeLimits, spine: Option<&[u32]>) -> Vec<u32> {
        let mut on_spine = vec![false; self.len()];
        spine.unwrap_or_default().iter().for_each(|&n| on_spine[n as usize] = true);
        let mut tip = spine.and_then(|s| s.last().copied());
        let (mut depth, mut off) = (vec![0u32; self.len()], vec![0u32; self.len()]);
        let mut order = Vec::with_capacity(self.len().min(limits.nodes as usize));
        let mut open = BinaryHeap::from([Open { score: 0.0, node: Reverse(0) }]);
        while let Some(Open { node: Reverse(node), .. }) = open.pop() {
            let at = node as usize;
            if let Ok(parent) = usize::try_from(self.parents[at]) {
                depth[at] = depth[parent] + 1;
                if tip == Some(parent as u32) {
                    // The spine grows by the best child of its end.
                    tip = Some(node);
                    on_spine[at] = true;
                }
                off[at] = if on_spine[at] { 0 } else { off[parent] + 1 };
                if spine.is_some() && off[at] > limits.off_spine {
                    continue;
                }
            }
            order.push(node);
            if order.len() == limits.nodes as usize {
                break;
            }
            if depth[at] < limits.depth {
                let good = children.of_node(node).filter(|&c| self.scores[c as usize] >= limits.min_score);
                open.extend(good.map(|c| Open { score: self.scores[c as usize], node: Reverse(c) }));
            }
        }
        order
    }

    /// The deepest path of some nodes, best first; among equally deep ones, the path whose end scores higher.
    pub(super) fn spine_of(&self, order: &[u32]) -> Vec<u32> {
        let mut depth = vec![0u32; self.len()];
        let mut end = 0;
        for &node in order {
            if let Ok(parent) = usize::try_from(self.parents[node as usize]) {
                depth[node as usize] = depth[parent] + 1;
            }
            // Best first: the first of a depth scores highest.
            if depth[node as usize] > depth[end as usize] {
                end = node;
            }
        }
        let mut spine = vec![end];
        while let Ok(parent) = u32::try_from(self.parents[spine[spine.len() - 1] as usize]) {
            spine.push(parent);
        }
        spine.reverse();
        spine
    }

    /// Most nodes that a path has off the spine.
    pub(super) fn farthest(&self, order: &[u32], spine: &[u32]) -> u32 {
        let mut off = vec![0u32; self.len()];
        let mut on_spine = vec![false; self.len()];
        spine.iter().for_each(|&n| on_spine[n as usize] = true);
        for &node in order.iter().filter(|&&n| !on_spine[n as usize]) {
            off[node as usize] = off[self.parents[node as usize] as usize] + 1;
        }
        off.into_iter().max().unwrap_or(0)
    }

    /// The nodes of `order`, those of the spine first.
    pub(super) fn numbered(&self, order: &[u32], mut spine: Vec<u32>) -> Self {
        const NONE: u32 = u32::MAX;
        let mut number = vec![NONE; self.len()];
        // Nodes that a second pass took behind the spine's end belong to the spine.
        for &node in order {
            if self.parents[node as usize] == spine[spine.len() - 1] as i32 {
                spine.push(node);
            }
        }
        let length = spine.len() as u32;
        for &node in &spine {
            number[node as usize] = NONE - 1;
        }
        let rest = order.iter().copied().filter(|&n| number[n as usize] == NONE);
        let all: Vec<u32> = spine.iter().copied().chain(rest).collect();
        all.iter().enumerate().for_each(|(i, &old)| number[old as usize] = i as u32);
        let mut claims: Vec<Claim> = self.claims.iter().filter(|c| number[c.node as usize] != NONE).copied().collect();
        claims.iter_mut().for_each(|c| c.node = number[c.node as usize]);
        claims.sort_by_key(|c| c.node);
        let parent = |&old: &u32| usize::try_from(self.parents[old as usize]).map_or(-1, |p| number[p] as i32);
        Self {
            parents: all.iter().map(parent).collect(),
            tokens: all.iter().map(|&old| self.tokens[old as usize]).collect(),
            scores: all.iter().map(|&old| self.scores[old as usize]).collect(),
            sources: all.iter().map(|&old| self.sources[old as usize]).collect(),
            spine: length,
            claims,
        }
    }
}

/// A node that may be taken next; the greatest is the best, ties go to the one that was met first.
#[derive(PartialEq)]
struct Open {
    score: f32,
    node: Reverse<u32>,
}

impl Eq for Open {}

impl Ord for Open {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.score.total_cmp(&other.score).then(self.node.cmp(&other.node))
    }
}

impl PartialOrd for Open {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// Lists of children, ascending.
struct Children {
    first: Vec<u32>,
    next: Vec<u32>,
}

impl Children {
    const END: u32 = u32::MAX;

    fn of(parents: &[i32]) -> Self {
        let (mut first, mut next) = (vec![Self::END; parents.len()], vec![Self::END; parents.len()]);
        for (node, &parent) in parents.iter().enumerate().rev() {
            if let Ok(parent) = usize::try_from(parent) {
                next[node] = std::mem::replace(&mut first[parent], node as u32);
            }
        }
        Self { first, next }
    }

    fn of_node(&self, node: u32) -> impl Iterator<Item = u32> + '_ {
        let some = |n: u32| (n != Self::END).then_some(n);
        std::iter::successors(some(self.first[node as usize]), move |&n| some(self.next[n as usize]))
    }
}
