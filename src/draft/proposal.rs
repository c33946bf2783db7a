//! The proposal of a source: a tree below a request's last token.

use crate::error::{Error, Result, in_range, same_length};
use crate::round::TreeBatch;

/// Most nodes of one proposal.
pub const MAX_PROPOSED: usize = 4096;
/// Classes of nodes that a source can tell apart.
pub const BUCKETS: usize = 64;
/// Least probability that a proposal of a head's tree gives a node.
const LEAST: f64 = 1e-6;
/// Classes of a head's nodes.
const TENTHS: f64 = 10.0;

/// Nodes in lists of equal length, parents before their children.
///
/// A proposal from outside is checked by [`Proposal::check`] before anything reads it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Proposal {
    /// Index of each node's parent here; -1 for a child of the request's last token.
    pub parents: Vec<i32>,
    /// Token of each node.
    pub tokens: Vec<u32>,
    /// Probability that the node is accepted, given that its parent is; in (0, 1].
    pub probs: Vec<f32>,
    /// Class of each node for calibration, below [`BUCKETS`]. Empty: all are of class 0.
    pub buckets: Vec<u8>,
}

impl Proposal {
    /// Nodes.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// True if nothing is proposed.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Class of a node.
    pub fn bucket(&self, node: usize) -> u8 {
        self.buckets.get(node).copied().unwrap_or(0)
    }

    /// The likeliest next token: of equal ones, the first.
    pub fn first(&self) -> Option<u32> {
        let below = (0..self.len()).filter(|&node| self.parents[node] < 0);
        let best = below.reduce(|best, node| if self.probs[node] > self.probs[best] { node } else { best });
        best.map(|node| self.tokens[node])
    }

    /// True if there are at most so many nodes, all of a vocabulary of `vocab` tokens.
    pub fn fits(&self, nodes: usize, vocab: u32) -> bool {
        self.len() <= nodes && self.tokens.iter().all(|&token| token < vocab)
    }

    /// Append a node; returns its index.
    pub(super) fn push(&mut self, parent: i32, token: u32, prob: f32, bucket: u8) -> usize {
        self.parents.push(parent);
        self.tokens.push(token);
        self.probs.push(prob);
        self.buckets.push(bucket);
        self.tokens.len() - 1
    }

    /// The trees of a head below their roots: a node's probability is that of its score given its parent's, at least 1e-6,
    /// and its class the tenth that this lies in.
    pub fn of_trees(trees: &TreeBatch) -> Vec<Self> {
        let (parents, tokens, scores) = (trees.parents(), trees.tokens(), trees.scores());
        let mut end = 0;
        let each = trees.sizes().map(|size| {
            let (start, mut own) = (end, Self::default());
            end += size as usize;
            for node in start + 1..end {
                let (parent, score) = (parents[node], f64::from(scores[node]));
                let over = f64::from(scores[start + parent as usize]);
                let prob = if score > f64::NEG_INFINITY { (score - over).exp() } else { 0.0 };
                let prob = prob.clamp(LEAST, 1.0);
                own.push(parent - 1, tokens[node] as u32, prob as f32, ((prob * TENTHS) as u8).min(TENTHS as u8 - 1));
            }
            own
        });
        each.collect()
    }

    /// Check every node, for a vocabulary of `vocab` tokens.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for the number of nodes, a parent, token or bucket; [`Error::Mismatch`] for lists of other
    /// lengths; [`Error::Invalid`] for a probability outside (0, 1].
    pub fn check(&self, vocab: u32) -> Result<()> {
        let nodes = self.tokens.len();
        in_range("proposed nodes", nodes as u64, 0, MAX_PROPOSED as i128)?;
        same_length("proposal parents", self.parents.len(), nodes)?;
        same_length("proposal probs", self.probs.len(), nodes)?;
        if !self.buckets.is_empty() {
            same_length("proposal buckets", self.buckets.len(), nodes)?;
        }
        for (node, &parent) in self.parents.iter().enumerate() {
            in_range("proposal parent", parent, -1, node as i128 - 1)?;
        }
        self.tokens.iter().try_for_each(|&t| in_range("proposed token", t, 0, i128::from(vocab) - 1).map(drop))?;
        self.buckets.iter().try_for_each(|&b| in_range("proposal bucket", b, 0, BUCKETS as i128 - 1).map(drop))?;
        match self.probs.iter().position(|&p| !(p > 0.0 && p <= 1.0)) {
            None => Ok(()),
            Some(node) => Err(Error::Invalid {
                what: "proposal prob",
                got: format!("probs[{node}] = {}", self.probs[node]),
                why: "a probability is above 0 and at most 1".into(),
            }),
        }
    }
}
