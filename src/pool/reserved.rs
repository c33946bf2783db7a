//! The arrays of a lease: its sequences, the copies to make, and its permutations.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::bounds::PageId;
use crate::error::{Error, Result};
use crate::pool::row::SeqId;

/// KV to copy before anything more is written under a lease: a shared tail page into the page that replaces it. `len`
/// tokens from offset 0, in every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// The shared page; kept alive by the lease until it ends or commits what lies behind the copy.
    pub src: PageId,
    /// The fresh page; never the source of another copy of the same lease.
    pub dst: PageId,
    /// Tokens; in `1..=page_size`. The committed ones of the page, or all of it where a round in flight may be writing
    /// the others.
    pub len: u32,
}

/// The permutation that a remap made of a row, which copies of the page table repeat: position `first + i` got the page
/// that position `first + order[i]` had before. Nothing outside of `first..first + order.len()` changed.
///
/// `order` has each of `0..order.len()` once: the positions that the caller named, then the others up to the largest
/// named, ascending. So a device that knows an accepted path makes the same permutation by itself: the path, then what
/// it skips. For a tree's path the length is the index of its last node plus 1, at most V. The permutation is no
/// sequence of swaps: load all entries, then store all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permutation<'a> {
    /// The sequence.
    pub seq: SeqId,
    /// First row position that may have changed; at least the committed length.
    pub first: u32,
    /// Old places of the pages, from `first`.
    pub order: &'a [u32],
}

impl Permutation<'_> {
    /// Permute a copy of the row. Overwrites `scratch`.
    ///
    /// # Panics
    /// If `line` has fewer than `first + order.len()` columns.
    pub fn apply(&self, line: &mut [i32], scratch: &mut Vec<i32>) {
        let range = &mut line[self.first as usize..][..self.order.len()];
        scratch.clear();
        scratch.extend(self.order.iter().map(|&o| range[o as usize]));
        range.copy_from_slice(scratch);
    }
}

/// The caches that moves of KV have run over. Run twice, they would read what the first run, or a pass since, has written.
/// Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ran(Arc<Mutex<Vec<(u64, u64)>>>);

impl Ran {
    /// Count them as run over the memory `first..end`.
    ///
    /// # Errors
    /// [`Error::Dead`] where they have run over a part of it.
    pub(crate) fn over(&self, first: u64, end: u64) -> Result<()> {
        let mut ran = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if ran.iter().any(|&(f, e)| f < end && first < e) {
            let why = "they have run over this cache: a second run would overwrite what is there now".into();
            return Err(Error::Dead { what: "moves", id: format!("over the cache at {first:#x}"), why });
        }
        ran.push((first, end));
        Ok(())
    }

    /// Forget all caches; those of clones stay.
    pub(crate) fn clear(&mut self) {
        match Arc::get_mut(&mut self.0) {
            Some(ran) => ran.get_mut().unwrap_or_else(PoisonError::into_inner).clear(),
            None => *self = Self::default(),
        }
    }
}

/// Vectors that leases hand from one to the next, so that a warm pool allocates nothing.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    pub(super) seqs: Vec<SeqId>,
    pub(super) copies: Vec<PageCopy>,
    /// Record of where the copies have run; made when somebody asks for them as moves.
    pub(super) ran: OnceLock<Ran>,
    /// Orders of the last remap, concatenated.
    pub(super) orders: Vec<u32>,
    /// The permuted sequences, with their first positions, and ends in `orders`.
    pub(super) permuted: Vec<(SeqId, u32, usize)>,
}

impl Buffers {
    pub(super) fn clear(&mut self) {
        self.seqs.clear();
        self.clear_copies();
        self.clear_permutations();
    }

    pub(super) fn clear_copies(&mut self) {
        self.copies.clear();
        self.ran.take();
    }

    pub(super) fn clear_permutations(&mut self) {
        self.orders.clear();
        self.permuted.clear();
    }

    pub(super) fn permutations(&self) -> impl Iterator<Item = Permutation<'_>> + Clone {
        self.permuted.iter().scan(0, |start, &(seq, first, end)| {
            let order = &self.orders[*start..end];
            *start = end;
            Some(Permutation { seq, first, order })
        })
    }
}
