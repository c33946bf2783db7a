//! The trees of a batch, as flat arrays.

use crate::bounds::{MAX_BATCH, fits_i32};
use crate::error::{Error, Result, in_range, listed, same_length};
use crate::geometry::Tree;

/// One token tree a request, ragged over the batch. Nodes of all requests lie behind one another; node 0 of each
/// request is its root, a parent's index is below its children's, and siblings are in increasing order.
///
/// All node indices (parents, links) are within the request's own tree. The ancestor bits of verification are part of
/// its plan ([`Planner::verify`](crate::plan::Planner::verify)), which makes them from the parents.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TreeBatch {
    tokens: Vec<i32>,
    depths: Vec<i32>,
    parents: Vec<i32>,
    next_child: Vec<i32>,
    next_sibling: Vec<i32>,
    /// Cumulative log-probability of each node, 0 for roots and where no drafter gave one.
    scores: Vec<f32>,
    /// Start of each request's nodes; the last entry is the number of nodes. Empty for an empty batch that was never
    /// begun; [`TreeBatch::offsets`] hides that.
    offsets: Vec<i32>,
}

impl TreeBatch {
    /// Trees of any shape, from any drafter: `parents[i]` is the parent array of request i (`-1` for the root, node 0;
    /// `parent < child`), `tokens[i]` its tokens.
    ///
    /// Siblings with equal tokens are allowed: verification follows the first.
    ///
    /// # Errors
    /// Those of [`Tree::from_parents`]; [`Error::Mismatch`] where lengths differ; [`Error::OutOfRange`] for more than
    /// [`MAX_BATCH`] trees, or a negative token.
    pub fn from_parents<P: AsRef<[i32]>, T: AsRef<[i32]>>(parents: &[P], tokens: &[T]) -> Result<Self> {
        if parents.len() != tokens.len() {
            let (got, want) = (format!("{} requests", tokens.len()), format!("{} (as parents)", parents.len()));
            return Err(Error::Mismatch { operand: "tree tokens", got, want });
        }
        in_range("requests", parents.len() as u64, 0, MAX_BATCH.into())?;
        let mut total = 0u64;
        for (parents, tokens) in parents.iter().zip(tokens) {
            let (parents, tokens) = (parents.as_ref(), tokens.as_ref());
            let tree = Tree::from_parents(parents)?;
            if tokens.len() != parents.len() {
                let (got, want) = (format!("{} nodes", tokens.len()), format!("{} (as its parents)", parents.len()));
                return Err(Error::Mismatch { operand: "tree tokens", got, want });
            }
            tokens.iter().try_for_each(|&t| in_range("tree token", t, 0, i128::from(i32::MAX)).map(|_| ()))?;
            total += u64::from(tree.len());
        }
        fits_i32("nodes of all trees", total, || total.to_string())?;
        let mut batch = Self::default();
        batch.clear();
        for (parents, tokens) in parents.iter().zip(tokens) {
            for (&parent, &token) in parents.as_ref().iter().zip(tokens.as_ref()) {
                batch.push_node(token, parent, 0.0);
            }
            batch.end_tree();
        }
        Ok(batch)
    }

    /// [`TreeBatch::from_parents`] with the cumulative log-probability of each node, 0 for roots.
    ///
    /// # Errors
    /// Those of [`TreeBatch::from_parents`]; [`Error::Mismatch`] where lengths differ; [`Error::Invalid`] for NaN.
    pub fn from_scored<P: AsRef<[i32]>, T: AsRef<[i32]>, S: AsRef<[f32]>>(
        parents: &[P],
        tokens: &[T],
        scores: &[S],
    ) -> Result<Self> {
        let mut batch = Self::from_parents(parents, tokens)?;
        same_length("tree scores", scores.len(), parents.len())?;
        for (scores, parents) in scores.iter().zip(parents) {
            same_length("tree scores", scores.as_ref().len(), parents.as_ref().len())?;
        }
        batch.scores.clear();
        batch.scores.extend(scores.iter().flat_map(|s| s.as_ref()));
        batch.scored()
    }

    /// The trees, where every score is a number.
    fn scored(self) -> Result<Self> {
        match self.scores.iter().position(|s| s.is_nan()) {
            None => Ok(self),
            Some(node) => Err(Error::Invalid {
                what: "tree score",
                got: format!("NaN at node {node} of all"),
                why: "a score is a log-probability".into(),
            }),
        }
    }

    /// Trees as a device holds them: nodes behind one another, `offsets` `[B + 1]`, the other arrays at least as long
    /// as its last entry; what lies behind that is not read.
    ///
    /// # Errors
    /// Those of [`TreeBatch::from_parents`]; [`Error::Mismatch`] for offsets that are none or leave an array;
    /// [`Error::Invalid`] for a score that is NaN.
    pub fn from_arrays(offsets: &[i32], tokens: &[i32], parents: &[i32], scores: &[f32]) -> Result<Self> {
        let ranges = ranges(offsets, tokens.len().min(parents.len()).min(scores.len()))?;
        let each = |array: &[i32]| ranges.iter().map(|r| array[r.clone()].to_vec()).collect::<Vec<_>>();
        let mut batch = Self::from_parents(&each(parents), &each(tokens))?;
        batch.scores.copy_from_slice(&scores[..batch.tokens.len()]);
        batch.scored()
    }

    /// Empty the batch; keeps the buffers.
    pub(crate) fn clear(&mut self) {
        self.tokens.clear();
        self.depths.clear();
        self.parents.clear();
        self.next_child.clear();
        self.next_sibling.clear();
        self.scores.clear();
        self.offsets.clear();
        self.offsets.push(0);
    }

    /// Append a node to the tree under construction; `parent` is a node already there, or -1 for the root.
    pub(crate) fn push_node(&mut self, token: i32, parent: i32, score: f32) {
        let start = self.start();
        self.tokens.push(token);
        self.scores.push(score);
        self.parents.push(parent);
        self.depths.push(usize::try_from(parent).map_or(0, |p| self.depths[start + p] + 1));
    }

    /// Link the children of the tree under construction, and close it.
    pub(crate) fn end_tree(&mut self) {
        let (start, end) = (self.start(), self.tokens.len());
        self.next_child.resize(end, -1);
        self.next_sibling.resize(end, -1);
        // From the back, so that each list of children comes out in increasing order.
        for node in (1..end - start).rev() {
            let parent = start + self.parents[start + node] as usize;
            self.next_sibling[start + node] = self.next_child[parent];
            self.next_child[parent] = node as i32;
        }
        self.offsets.push(end as i32);
    }

    fn start(&self) -> usize {
        self.offsets.last().map_or(0, |&o| o as usize)
    }

    /// Requests (B).
    pub fn len(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    /// True if there are no requests.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Nodes of all requests.
    pub fn nodes(&self) -> usize {
        self.tokens.len()
    }

    /// Start of each request's nodes in the flat arrays, `[B + 1]`; the `qo_indptr` of verification.
    pub fn offsets(&self) -> &[i32] {
        if self.offsets.is_empty() { &[0] } else { &self.offsets }
    }

    /// Nodes of each request, root included.
    pub fn sizes(&self) -> impl ExactSizeIterator<Item = u32> {
        self.offsets().windows(2).map(|w| (w[1] - w[0]) as u32)
    }

    /// Token of each node.
    pub fn tokens(&self) -> &[i32] {
        &self.tokens
    }

    /// Cumulative log-probability that the draft model gave each node; 0 for roots, and for trees made elsewhere.
    pub fn scores(&self) -> &[f32] {
        &self.scores
    }

    /// Depth of each node, 0 for a root.
    pub fn depths(&self) -> &[i32] {
        &self.depths
    }

    /// Parent of each node, -1 for a root.
    pub fn parents(&self) -> &[i32] {
        &self.parents
    }

    /// First child of each node, -1 for a leaf.
    pub fn next_child(&self) -> &[i32] {
        &self.next_child
    }

    /// Next child of the same parent, -1 for the last.
    pub fn next_sibling(&self) -> &[i32] {
        &self.next_sibling
    }

    /// The nodes of request `i` in the flat arrays; empty where there is no such request.
    pub fn range(&self, i: usize) -> std::ops::Range<usize> {
        match self.offsets.get(i..i + 2) {
            Some(&[start, end]) => start as usize..end as usize,
            _ => 0..0,
        }
    }
}

/// The parts of an array of `len` entries that offsets divide it into, from its first entry on.
pub(super) fn ranges(offsets: &[i32], len: usize) -> Result<Vec<std::ops::Range<usize>>> {
    let part = |w: &[i32]| Some(usize::try_from(w[0]).ok()?..usize::try_from(w[1]).ok().filter(|_| w[0] <= w[1])?);
    let ranges: Option<Vec<_>> = offsets.windows(2).map(part).collect();
    let whole =
        |r: &Vec<std::ops::Range<usize>>| offsets.first() == Some(&0) && r.last().is_none_or(|last| last.end <= len);
    ranges.filter(whole).ok_or_else(|| Error::Mismatch {
        operand: "offsets",
        got: listed(offsets),
        want: format!("0, then ascending numbers up to {len}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_that_a_source_gives_are_the_nodes() {
        let (parents, tokens) = (vec![vec![-1, 0], vec![-1]], vec![vec![9, 1], vec![4]]);
        let got = TreeBatch::from_scored(&parents, &tokens, &[vec![0.0, -0.5], vec![0.0]]).unwrap();
        assert_eq!(got.scores(), [0.0, -0.5, 0.0]);
        assert_eq!(got.tokens(), TreeBatch::from_parents(&parents, &tokens).unwrap().tokens());
        for scores in [vec![vec![0.0, -0.5]], vec![vec![0.0], vec![0.0, -0.5]], vec![vec![0.0, f32::NAN], vec![0.0]]] {
            assert!(TreeBatch::from_scored(&parents, &tokens, &scores).is_err(), "{scores:?}");
        }
    }

    #[test]
    fn arrays_of_a_device_are_the_trees_that_parents_give() {
        let made = TreeBatch::from_parents(&[vec![-1, 0, 0, 2], vec![-1]], &[vec![9, 1, 2, 3], vec![4]]).unwrap();
        let (tokens, parents) = ([9, 1, 2, 3, 4, 77, -5], [-1, 0, 0, 2, -1, 0, 0]);
        let scores = [0., -0.5, -1., -1.25, 0., 3., 3.];
        let got = TreeBatch::from_arrays(&[0, 4, 5], &tokens, &parents, &scores).unwrap();
        assert_eq!(got, TreeBatch { scores: scores[..5].to_vec(), ..made });
        assert!(TreeBatch::from_arrays(&[0], &tokens, &parents, &scores).unwrap().is_empty());
        for offsets in [&[][..], &[1, 4], &[0, 4, 3], &[0, 8], &[0, -1], &[-1, 2]] {
            let error = TreeBatch::from_arrays(offsets, &tokens, &parents, &scores).unwrap_err();
            assert!(matches!(error, Error::Mismatch { operand: "offsets", .. }), "{offsets:?}: {error:?}");
        }
        assert!(TreeBatch::from_arrays(&[0, 4, 7], &tokens, &parents, &scores).is_err(), "a tree without root");
    }
}
