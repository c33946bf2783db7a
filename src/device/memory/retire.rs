//! Memory that its owner has let go of and the device may still be at work on.
//!
//! Dropping a buffer neither waits nor frees: it may happen on any thread, in a DLPack deleter, between two launches
//! of a round. The memory goes on this list with the events of its last uses, and goes back to the driver at the next
//! allocation for which those have been reached.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

use super::raw::RawMemory;
use crate::device::stream::RawEvent;

/// Memory on its way back.
#[derive(Debug)]
pub(super) struct Retiring {
    pub(super) memory: RawMemory,
    pub(super) bytes: usize,
    /// Ends of the work that uses it.
    pub(super) uses: Vec<RawEvent>,
    /// Graphs of this crate's own that were captured over it.
    pub(super) graphs: Vec<Weak<()>>,
    /// True if another owner's graph was captured over it, or the end of a use could not be marked, so that no event
    /// says when the last use is over. The memory goes back when the process says that nothing is in flight and no such
    /// graph is left.
    pub(super) captured: bool,
}

/// The list of one device.
#[derive(Debug, Default)]
pub(in crate::device) struct Retired {
    blocks: Mutex<Vec<Retiring>>,
    /// Bytes that were allocated and not freed, on the list or not.
    owned: AtomicU64,
}

impl Retired {
    /// Lock the list. It is locked for moments only, by any thread that drops: nothing under it calls back. A panic
    /// cannot leave half of an entry.
    fn list(&self) -> MutexGuard<'_, Vec<Retiring>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Put memory on the list.
    pub(super) fn push(&self, block: Retiring) {
        self.list().push(block);
    }

    /// Free what the device is done with; with `wait`, wait for all of it but what graphs were captured over. Returns
    /// the bytes freed.
    pub(in crate::device) fn collect(&self, wait: bool) -> u64 {
        let (done, pending): (Vec<_>, Vec<_>) = std::mem::take(&mut *self.list()).into_iter().partition(|block| {
            // An event that cannot be asked tells nothing, so its memory stays.
            let over = |e: &RawEvent| if wait { e.wait().is_ok() } else { e.reached().unwrap_or(false) };
            let gone = |graph: &Weak<()>| graph.strong_count() == 0;
            !block.captured && block.graphs.iter().all(gone) && block.uses.iter().all(over)
        });
        self.list().extend(pending);
        self.free(done)
    }

    /// Free what graphs were captured over.
    pub(in crate::device) fn collect_captured(&self) -> u64 {
        let (done, pending): (Vec<_>, Vec<_>) = std::mem::take(&mut *self.list()).into_iter().partition(|b| b.captured);
        self.list().extend(pending);
        self.free(done)
    }

    /// Count an allocation.
    pub(super) fn allocated(&self, bytes: usize) {
        self.owned.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes of this crate's buffers on the device and of pinned ones for it, dropped ones included.
    pub(in crate::device) fn owned(&self) -> u64 {
        self.owned.load(Ordering::Relaxed)
    }

    fn free(&self, blocks: Vec<Retiring>) -> u64 {
        let free = |block: Retiring| {
            block.memory.free();
            block.bytes as u64
        };
        let bytes = blocks.into_iter().map(free).sum();
        self.owned.fetch_sub(bytes, Ordering::Relaxed);
        bytes
    }

    /// Bytes on the list.
    pub(in crate::device) fn bytes(&self) -> u64 {
        self.list().iter().map(|b| b.bytes as u64).sum()
    }
}
