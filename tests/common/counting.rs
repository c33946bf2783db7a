//! The system allocator, counted by thread: a test sees what a call allocates.
#![allow(unsafe_code)] // a global allocator cannot be written without it

use std::alloc::{GlobalAlloc, Layout as Block, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
    static HELD: Cell<isize> = const { Cell::new(0) };
}

fn count() {
    // A thread that ends allocates too, after its locals are gone.
    let _ = COUNT.try_with(|c| c.set(c.get() + 1));
}

fn hold(bytes: isize) {
    let _ = HELD.try_with(|c| c.set(c.get() + bytes));
}

// SAFETY: every call is the system allocator's own, with its arguments unchanged; counting touches no memory of theirs
// and does not allocate (a `Cell` that needs no initialisation and no destructor).
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, block: Block) -> *mut u8 {
        count();
        hold(block.size() as isize);
        // SAFETY: the caller's obligations are those of the system allocator.
        unsafe { System.alloc(block) }
    }

    unsafe fn dealloc(&self, at: *mut u8, block: Block) {
        hold(-(block.size() as isize));
        // SAFETY: `at` is from `alloc` or `realloc` above, so from the system allocator, with this block.
        unsafe { System.dealloc(at, block) }
    }

    unsafe fn realloc(&self, at: *mut u8, block: Block, size: usize) -> *mut u8 {
        count();
        hold(size as isize - block.size() as isize);
        // SAFETY: as `dealloc`; the new size is the caller's obligation.
        unsafe { System.realloc(at, block, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of this thread during `run`.
pub(crate) fn allocations(run: impl FnOnce()) -> usize {
    let before = COUNT.get();
    run();
    COUNT.get() - before
}

/// Bytes that this thread has allocated and not freed, since it began.
pub(crate) fn held() -> isize {
    HELD.get()
}
