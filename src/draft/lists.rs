//! The best tree of a draft whose levels do not depend on each other.
//!
//! A block drafter says for each level which tokens are likely there, whatever stands before: a list a level, best first.
//! A path's score is the sum of its tokens' log-probabilities, so a child never scores above its parent, and taking the
//! best open node again and again gives the best tree of any size, closed under parents (DDTree, arXiv:2604.12989). A
//! node that is taken opens two others: its next sibling and its first child. So few are open, and no list is read
//! further than its tree needs.
//!
//! The nodes stand in the order of [`merge`](super::merge::merge): spine first, no path with more than `off_spine` nodes
//! off it.

use std::collections::BinaryHeap;

use super::merge::{MergeLimits, MergedDrafts};
use crate::error::{Error, Result, in_range, same_length};

/// The likeliest tokens of each level, best first.
#[derive(Debug, Clone, Copy)]
pub struct Lists<'a> {
    /// `[levels * width]` tokens.
    pub tokens: &'a [i32],
    /// `[levels * width]` log-probability of each, not rising within a level.
    pub log_probs: &'a [f32],
    /// Tokens of a level.
    pub width: usize,
}

impl Lists<'_> {
    pub(super) fn check(&self) -> Result<()> {
        in_range("width of lists", self.width as u64, 1, i128::from(u32::MAX))?;
        same_length("log-probabilities of lists", self.log_probs.len(), self.tokens.len())?;
        same_length("tokens of lists", self.tokens.len() % self.width, 0)?;
        self.tokens.iter().try_for_each(|&t| in_range("listed token", t, 0, i128::from(i32::MAX)).map(drop))?;
        let falling = |level: &[f32]| level.iter().all(|p| *p <= 0.0) && level.windows(2).all(|w| w[0] >= w[1]);
        match self.log_probs.chunks_exact(self.width).position(|level| !falling(level)) {
            None => Ok(()),
            Some(level) => Err(Error::Invalid {
                what: "log-probabilities of lists",
                got: format!("{:?} at level {level}", &self.log_probs[level * self.width..][..self.width]),
                why: "at most 0, and none above the one before".into(),
            }),
        }
    }

    fn levels(&self) -> usize {
        self.tokens.len() / self.width
    }
}

/// The best tree below `root` of at most `limits.nodes` nodes, in which a node has one of its level's tokens.
///
/// # Errors
/// [`Error::OutOfRange`] for a root, a token or a limit; [`Error::Mismatch`] for lists of other lengths;
/// [`Error::Invalid`] for a level that is not sorted, or NaN.
pub fn list_tree(root: i32, lists: Lists<'_>, limits: MergeLimits) -> Result<MergedDrafts> {
    in_range("root token", root, 0, i128::from(i32::MAX))?;
    limits.check()?;
    lists.check()?;
    let mut grown = Grown::new(root, lists, limits, None);
    let order: Vec<u32> = (0..grown.tree.len() as u32).collect();
    let mut spine = grown.tree.spine_of(&order);
    if grown.tree.farthest(&order, &spine) > limits.off_spine {
        let ranks: Vec<u32> = spine[1..].iter().map(|&node| grown.places[node as usize].rank).collect();
        grown = Grown::new(root, lists, limits, Some(&ranks));
        spine = (0..grown.tree.len() as u32).filter(|&node| grown.places[node as usize].off == 0).collect();
    }
    let order: Vec<u32> = (0..grown.tree.len() as u32).collect();
    Ok(grown.tree.numbered(&order, spine))
}

/// A node that may be taken next. The greatest is the best; ties go to the higher level, then to the better rank, then to
/// the parent that was taken first.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Open {
    score: f32,
    level: u32,
    rank: u32,
    parent: u32,
}

impl Eq for Open {}

impl Ord for Open {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let place = |open: &Self| (open.level, open.rank, open.parent);
        self.score.total_cmp(&other.score).then_with(|| place(other).cmp(&place(self)))
    }
}

impl PartialOrd for Open {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// Place of a node of a tree that grows.
#[derive(Debug, Clone, Copy)]
struct Place {
    level: u32,
    rank: u32,
    /// Nodes off the spine on its path; 0 on the spine, and where there is none.
    off: u32,
}

/// Nodes in the order in which they were taken, best first.
struct Grown {
    tree: MergedDrafts,
    places: Vec<Place>,
}

impl Grown {
    /// Take the best nodes. With a `spine`, the ranks of its nodes, a path ends where it would have more than `off_spine`
    /// nodes off it; the spine itself grows by the best child of its end.
    fn new(root: i32, lists: Lists<'_>, limits: MergeLimits, spine: Option<&[u32]>) -> Self {
        let levels = (lists.levels() as u32).min(limits.depth);
        let mut tree = MergedDrafts::of_root(root);
        let mut places = vec![Place { level: 0, rank: 0, off: 0 }];
        let (mut tip, mut open) = (0, BinaryHeap::new());
        let above = |scores: &[f32], level: u32, rank: u32, parent: u32| {
            if level >= levels || rank >= lists.width as u32 {
                return None;
            }
            let score = scores[parent as usize] + lists.log_probs[level as usize * lists.width + rank as usize];
            let good = score >= limits.min_score && score > f32::NEG_INFINITY;
            good.then_some(Open { score, level, rank, parent })
        };
        open.extend(above(tree.scores(), 0, 0, 0));
        while tree.len() < limits.nodes as usize
            && let Some(Open { score, level, rank, parent }) = open.pop()
        {
            let from = places[parent as usize];
            let on_spine = spine.is_some_and(|ranks| {
                parent == tip && ranks.get(level as usize).is_none_or(|&of_spine| of_spine == rank)
            });
            let off = if spine.is_none() || on_spine { 0 } else { from.off + 1 };
            open.extend(above(tree.scores(), level, rank + 1, parent));
            if off > limits.off_spine {
                continue;
            }
            let node = tree.len() as u32;
            if on_spine {
                tip = node;
            }
            tree.push_scored(lists.tokens[level as usize * lists.width + rank as usize], parent as i32, score);
            places.push(Place { level: level + 1, rank, off });
            open.extend(above(tree.scores(), places[node as usize].level, 0, node));
        }
        Self { tree, places }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lists(tokens: &'static [i32], log_probs: &'static [f32], width: usize) -> Lists<'static> {
        Lists { tokens, log_probs, width }
    }

    #[test]
    fn the_spine_stands_first_and_the_others_follow_best_first() {
        let two = lists(&[5, 6, 7, 8], &[-0.1, -0.2, -0.5, -0.55], 2);
        let tree = list_tree(9, two, MergeLimits::new(5, 7)).unwrap();
        assert_eq!((tree.tokens(), tree.parents(), tree.spine()), (&[9, 5, 7, 6, 8][..], &[-1, 0, 1, 0, 1][..], 3));
        assert_eq!(tree.scores(), [0.0, -0.1, -0.1 - 0.5, -0.2, -0.1 - 0.55]);
        let shallow = list_tree(9, two, MergeLimits::new(5, 1)).unwrap();
        assert_eq!(shallow.tokens(), [9, 5, 6]);
        let sure = list_tree(9, two, MergeLimits { min_score: -0.15, ..MergeLimits::new(5, 7) }).unwrap();
        assert_eq!(sure.tokens(), [9, 5]);
        assert_eq!(list_tree(9, two, MergeLimits::new(1, 7)).unwrap().len(), 1);
        assert_eq!(list_tree(9, lists(&[], &[], 2), MergeLimits::new(5, 7)).unwrap().len(), 1);
    }

    #[test]
    fn lists_that_are_none_are_refused() {
        let limits = MergeLimits::new(5, 7);
        for bad in [
            lists(&[1, 2], &[-0.5, -0.4], 2),
            lists(&[1, 2], &[0.1, -0.4], 2),
            lists(&[1, 2], &[f32::NAN, -0.4], 2),
            lists(&[1, -2], &[-0.1, -0.4], 2),
            lists(&[1, 2], &[-0.1], 2),
            lists(&[1, 2, 3], &[-0.1, -0.4, -0.1], 2),
            lists(&[1, 2], &[-0.1, -0.4], 0),
        ] {
            assert!(list_tree(9, bad, limits).is_err(), "{bad:?}");
        }
        let good = lists(&[1, 2], &[-0.1, f32::NEG_INFINITY], 2);
        assert_eq!(list_tree(9, good, limits).unwrap().len(), 2, "nothing of probability 0");
        assert!(list_tree(-1, good, limits).is_err());
        assert!(list_tree(9, good, MergeLimits { off_spine: 0, ..limits }).is_err());
    }
}
