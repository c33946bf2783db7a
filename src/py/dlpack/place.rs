//! Memory of fixed size and place that is written again and again.
#![allow(unsafe_code)]

use std::alloc::Layout;
use std::ptr::NonNull;

/// Memory that stays where it is. Only [`Lent`](super::Lent) makes slices of it; other holders keep it alive and know
/// its address.
pub(in crate::py) struct Place {
    pub(super) data: NonNull<u8>, // `len` initialised bytes, aligned to the elements
    pub(super) len: usize,
    pub(super) source: Source,
}

/// The owner of the bytes.
pub(super) enum Source {
    /// A caller's tensor: contiguous, writable, on the CPU.
    Tensor(#[allow(dead_code, reason = "held for its memory")] Box<dyn Send + Sync>),
    /// Pinned memory that a device writes at its own pace; only consumers read it.
    Mapped(#[allow(dead_code, reason = "held for its memory")] Box<dyn Send + Sync>),
    /// `alloc_zeroed` of this layout at this address, which is at or before `data`.
    Heap(NonNull<u8>, Layout),
}

// SAFETY: the memory is plain bytes that `source` keeps; a DLPack deleter may run on any thread; `Place` itself never
// reads or writes them.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

impl Place {
    /// `len` bytes at `data` that a device writes at its own pace, in memory that `owner` keeps.
    ///
    /// # Safety
    /// The bytes are initialised, aligned to the elements that they are read as, and stay there while `owner` lives.
    pub(in crate::py) unsafe fn mapped(data: NonNull<u8>, len: usize, owner: Box<dyn Send + Sync>) -> Self {
        Self { data, len, source: Source::Mapped(owner) }
    }

    /// Address of the first byte; dangling where there is none.
    pub(super) fn data(&self) -> *mut u8 {
        self.data.as_ptr()
    }

    /// Bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// First address, and one past the last.
    pub(super) fn range(&self) -> (usize, usize) {
        let first = self.data.as_ptr() as usize;
        (first, first + self.len)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Source::Heap(at, layout) = self.source {
            // SAFETY: allocated with this layout in `Lent::zeroed`, and freed once.
            unsafe { std::alloc::dealloc(at.as_ptr(), layout) }
        }
    }
}
