//! The bounded pool of the CPU kernels.
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Result, in_range};

/// Largest number of threads the kernels may be given.
pub const MAX_THREADS: usize = 64;

/// Threads asked for; 0 stands for the default.
static THREADS: AtomicUsize = AtomicUsize::new(0);

/// Let the kernels use `n` threads, the caller's included (`1..=MAX_THREADS`). Results do not depend on `n`.
pub fn set_num_threads(n: usize) -> Result<()> {
    in_range("num_threads", n as u64, 1, MAX_THREADS as i128)?;
    THREADS.store(n, Ordering::Relaxed);
    Ok(())
}

/// Threads the kernels may use, the caller's included: what [`set_num_threads`] set, or the machine's parallelism,
/// at most 8.
pub fn num_threads() -> usize {
    match THREADS.load(Ordering::Relaxed) {
        0 => std::thread::available_parallelism().map_or(1, |n| n.get().min(8)),
        n => n,
    }
}
