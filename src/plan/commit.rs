//! [`AuditedCommit`]: how the accepted path of each tree becomes the dense end of its prefix; and the tail copies of the
//! holey layout, the other plan that moves KV.

use std::sync::Arc;

use crate::plan::Moves;
use crate::pool::SeqId;

/// Accepted paths of a batch, one a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paths<'a> {
    /// Nodes of each path, root included; at least 1.
    pub sizes: &'a [u32],
    /// Concatenated node indices, local to each tree: 0 (the root), then strictly increasing, as on every path of a
    /// tree whose parents come before their children.
    pub nodes: &'a [u32],
}

/// Moves of KV by a commit, and the new lengths.
#[derive(Debug, Default)]
pub(super) struct Commit {
    pub(super) moves: Moves,
    seqs: Vec<SeqId>,
    firsts: Vec<u32>,
    /// Paths of the requests to remap, concatenated, and where each ends.
    orders: Vec<u32>,
    ends: Vec<usize>,
    pub(super) new_lens: Vec<u32>,
}

/// A reordering of a sequence's speculative positions (pages of one token): the argument of
/// [`Lease::remap`](crate::pool::Lease::remap).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remap<'a> {
    /// The sequence.
    pub seq: SeqId,
    /// First row position: its committed length.
    pub first: u32,
    /// Position `first + i` gets the page of `first + order[i]`; the other pages stay in the row, behind them.
    pub order: &'a [u32],
}

/// A checked commit. A cheap handle; the planner takes the buffers back when the last one is dropped.
#[derive(Debug, Clone)]
pub struct AuditedCommit(pub(super) Arc<Commit>);

impl AuditedCommit {
    /// Moves to execute, in order, before the lease is committed; none with pages of one token.
    pub fn moves(&self) -> &Moves {
        &self.0.moves
    }

    /// Reorderings to give to the lease ([`Lease::remap_all`](crate::pool::Lease::remap_all)) before it is committed;
    /// none with larger pages.
    pub fn remaps(&self) -> impl Iterator<Item = Remap<'_>> + Clone {
        let c = &*self.0;
        c.seqs.iter().zip(&c.firsts).zip(&c.ends).scan(0, |start, ((&seq, &first), &end)| {
            let order = &c.orders[*start..end];
            *start = end;
            Some(Remap { seq, first, order })
        })
    }

    /// Committed length of each request afterwards: L plus the nodes of its path.
    pub fn new_lens(&self) -> &[u32] {
        &self.0.new_lens
    }
}

impl Commit {
    pub(super) fn begin(&mut self, pool: u32, batch: usize, nodes: usize) {
        self.moves.begin(pool);
        self.seqs.clear();
        self.firsts.clear();
        self.orders.clear();
        self.ends.clear();
        self.new_lens.clear();
        self.orders.reserve(nodes);
        self.new_lens.reserve(batch);
    }

    pub(super) fn remap(&mut self, seq: SeqId, first: u32, path: &[u32]) {
        self.seqs.push(seq);
        self.firsts.push(first);
        self.orders.extend_from_slice(path);
        self.ends.push(self.orders.len());
    }
}
