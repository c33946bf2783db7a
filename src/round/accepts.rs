//! The result of verification.

use super::tree_batch::ranges;
use crate::error::{Error, Result, in_range};

/// The accepted path of each request's tree, and the tokens that it emits.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Accepts {
    paths: Vec<u32>,
    /// The token drawn at each node of `paths`; [`NO_TOKEN`] at a node where none could be drawn.
    tokens: Vec<i32>,
    /// Start of each request's entries in both arrays, and the end of the last one's; empty without requests.
    offsets: Vec<usize>,
    /// Requests whose walk met a row that cannot be sampled, ascending.
    faults: Vec<(usize, Error)>,
}

/// The token of a node where none could be drawn: the last of its path.
pub(crate) const NO_TOKEN: i32 = -1;

impl Accepts {
    /// Accepted paths as a device holds them, without faults: `offsets` `[B + 1]`, nodes and tokens at least as many as its
    /// last entry; what lies behind that is not read.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for offsets that are none or leave an array; [`Error::OutOfRange`] for a path that is empty or
    /// does not begin at its root, and for a negative token.
    pub fn from_arrays(offsets: &[i32], paths: &[i32], tokens: &[i32]) -> Result<Self> {
        let mut accepts = Self::default();
        for range in ranges(offsets, paths.len().min(tokens.len()))? {
            let (path, tokens) = (&paths[range.clone()], &tokens[range]);
            in_range("accepted nodes", path.len() as u64, 1, i128::from(i32::MAX))?;
            in_range("first node of a path", path[0], 0, 0)?;
            for (&node, &token) in path.iter().zip(tokens) {
                in_range("accepted node", node, 0, i128::from(i32::MAX))?;
                in_range("accepted token", token, 0, i128::from(i32::MAX))?;
            }
            accepts.push(&path.iter().map(|&n| n as u32).collect::<Vec<_>>(), tokens);
        }
        Ok(accepts)
    }

    /// Requests.
    pub fn len(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    /// True if there are no requests.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Accepted nodes of request `i`, the root (0) first, each the parent of the next.
    pub fn path(&self, i: usize) -> &[u32] {
        self.range(i).and_then(|r| self.paths.get(r)).unwrap_or(&[])
    }

    /// Tokens that request `i` emits, as many as its path has nodes: the accepted drafts, and the token drawn at the last
    /// accepted node (the next root). After a fault the accepted drafts alone, one less than its path has nodes.
    pub fn tokens(&self, i: usize) -> &[i32] {
        let tokens = self.range(i).and_then(|r| self.tokens.get(r)).unwrap_or(&[]);
        tokens.strip_suffix(&[NO_TOKEN]).unwrap_or(tokens)
    }

    /// Reason why no token could be drawn at the last node of request `i`'s path: [`Error::NonFinite`] with the
    /// request, the row of `logits` and the position. Path and tokens are those of plain decoding up to there.
    pub fn fault(&self, i: usize) -> Option<&Error> {
        let at = self.faults.binary_search_by_key(&i, |&(request, _)| request).ok()?;
        self.faults.get(at).map(|(_, fault)| fault)
    }

    fn range(&self, i: usize) -> Option<std::ops::Range<usize>> {
        Some(*self.offsets.get(i)?..*self.offsets.get(i + 1)?)
    }

    /// Empty it; keeps the buffers.
    pub(crate) fn clear(&mut self) {
        self.paths.clear();
        self.tokens.clear();
        self.offsets.clear();
        self.faults.clear();
    }

    /// Append a request: the nodes of its walk and the token drawn at each, [`NO_TOKEN`] at a last one with a fault.
    pub(crate) fn push(&mut self, path: &[u32], tokens: &[i32]) {
        if self.offsets.is_empty() {
            self.offsets.push(0);
        }
        self.paths.extend_from_slice(path);
        self.tokens.extend_from_slice(tokens);
        self.offsets.push(self.paths.len());
    }

    /// Add the faults of requests, one each at most, in any order.
    pub(crate) fn add_faults(&mut self, faults: impl Iterator<Item = (usize, Error)>) {
        self.faults.extend(faults);
        self.faults.sort_unstable_by_key(|&(request, _)| request);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_of_a_device_are_paths_with_tokens() {
        let accepts = Accepts::from_arrays(&[0, 3, 4], &[0, 2, 5, 0, 9], &[7, 8, 9, 1, -3]).unwrap();
        assert_eq!((accepts.len(), accepts.path(0), accepts.tokens(0)), (2, &[0, 2, 5][..], &[7, 8, 9][..]));
        assert_eq!((accepts.path(1), accepts.tokens(1), accepts.fault(1)), (&[0][..], &[1][..], None));
        assert!(Accepts::from_arrays(&[0], &[], &[]).unwrap().is_empty());
        for (offsets, paths, tokens) in [
            (&[0, 0][..], [0, 1], [5, 5]), // no path
            (&[0, 3], [0, 1], [5, 5]),
            (&[0, 2], [1, 2], [5, 5]),
            (&[0, 2], [0, -1], [5, 5]),
            (&[0, 2], [0, 1], [5, -1]),
        ] {
            assert!(Accepts::from_arrays(offsets, &paths, &tokens).is_err(), "{offsets:?} {paths:?} {tokens:?}");
        }
    }
}
