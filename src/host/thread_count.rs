//! The number of threads of the kernels.
//!
//! The first of these that says something:
//!
//! 1. [`set_num_threads`], which `--threads` of the command line calls;
//! 2. torch's number as seen when an engine was made ([`follow_torch`]), where somebody must have changed it;
//! 3. the first number of `OMP_NUM_THREADS`; a list with anything but positive numbers is ignored, as OpenMP does;
//! 4. the CPUs that the process may use (affinity mask and cgroup quota), at most [`MAX_DEFAULT`].

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Result, in_range};

/// Largest number of threads the kernels may be given.
pub const MAX_THREADS: usize = 64;

/// Most threads that are taken unasked.
pub const MAX_DEFAULT: usize = 8;

/// The last argument of [`set_num_threads`]; 0 before the first.
static SET: AtomicUsize = AtomicUsize::new(0);
/// The last number that [`follow_torch`] derived from torch's; 0 before the first.
static TORCH: AtomicUsize = AtomicUsize::new(0);

/// Let the kernels use `n` threads, the caller's included (`1..=MAX_THREADS`). Results do not depend on `n`.
pub(super) fn set_num_threads(n: usize) -> Result<()> {
    in_range("num_threads", n as u64, 1, MAX_THREADS as i128)?;
    SET.store(n, Ordering::Relaxed);
    Ok(())
}

/// Threads the kernels may use, the caller's included.
pub fn num_threads() -> usize {
    [&SET, &TORCH].iter().map(|n| n.load(Ordering::Relaxed)).find(|&n| n > 0).unwrap_or_else(|| start().number)
}

/// Take over torch's number of threads if a caller must have changed it: torch starts with what `OMP_NUM_THREADS` says,
/// or else with the CPUs or cores of a machine that has `machine_cpus`.
pub(super) fn follow_torch(torch: usize, machine_cpus: usize) {
    TORCH.store(changed(torch, machine_cpus, start()).unwrap_or(0), Ordering::Relaxed);
}

/// The number that holds as long as no caller changes it.
#[derive(Debug, Clone, Copy)]
struct Start {
    number: usize,
    /// True if `OMP_NUM_THREADS` gives the number: then torch started with the same.
    from_openmp: bool,
}

/// Read once: asking the system reads cgroup files.
fn start() -> Start {
    static START: OnceLock<Start> = OnceLock::new();
    *START.get_or_init(|| {
        let openmp = std::env::var("OMP_NUM_THREADS").ok().and_then(|value| first_number(&value));
        let cpus = || std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_DEFAULT));
        Start { number: openmp.unwrap_or_else(cpus), from_openmp: openmp.is_some() }
    })
}

/// The number of threads of the outermost level in a value of `OMP_NUM_THREADS`, at most [`MAX_THREADS`].
fn first_number(value: &str) -> Option<usize> {
    let levels: Option<Vec<usize>> =
        value.split(',').map(|n| n.trim().parse().ok().filter(|&n: &usize| n > 0)).collect();
    levels?.first().map(|&n| n.min(MAX_THREADS))
}

/// torch's number, unless torch may have started with it.
///
/// Without `OMP_NUM_THREADS` torch's own choice is not known exactly (CPUs or cores, of the machine or of the affinity
/// mask, by build), so only two numbers tell: one below ours, which is then the wish of the user or of torch for fewer
/// threads, and one above all CPUs.
fn changed(torch: usize, machine_cpus: usize, start: Start) -> Option<usize> {
    let torch = torch.min(MAX_THREADS);
    let differs = match start.from_openmp {
        true => torch != start.number,
        false => torch < start.number || torch > machine_cpus.max(start.number),
    };
    (differs && torch > 0).then_some(torch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_threads_is_bounded() {
        assert!(set_num_threads(0).is_err());
        assert!(set_num_threads(MAX_THREADS + 1).is_err());
    }

    #[test]
    fn openmp_lists_give_their_first_number_and_bad_ones_nothing() {
        let read = [("3", 3), (" 4 ", 4), ("2,4,8", 2), ("2 , 1", 2), ("64", 64), ("65", 64), ("100000", 64)];
        for (value, want) in read {
            assert_eq!(first_number(value), Some(want), "{value:?}");
        }
        for value in ["", " ", "0", "-1", "two", "2,", "2,x", "2;3", "0x4", "99999999999999999999", "2.0"] {
            assert_eq!(first_number(value), None, "{value:?}");
        }
    }

    #[test]
    fn torch_is_followed_where_it_was_changed() {
        let ours = |number, from_openmp| Start { number, from_openmp };
        for (torch, cpus, start, want) in [
            (2, 2, ours(2, false), None),     // the state at the start
            (1, 2, ours(2, false), Some(1)),  // lowered
            (3, 2, ours(2, false), Some(3)),  // raised above all CPUs
            (16, 64, ours(8, false), None),   // a part of a large machine, or its cores
            (4, 64, ours(8, false), Some(4)), // below what would be taken unasked
            (64, 64, ours(4, false), None),   // a container's quota is ours to see, not torch's
            (3, 64, ours(3, true), None),     // OMP_NUM_THREADS, which torch started with too
            (4, 64, ours(3, true), Some(4)),  // changed since
            (100, 8, ours(8, false), Some(MAX_THREADS)),
            (100, 8, ours(MAX_THREADS, true), None), // OMP_NUM_THREADS=100
            (0, 8, ours(8, false), None),
        ] {
            assert_eq!(changed(torch, cpus, start), want, "torch {torch}, {cpus} CPUs, {start:?}");
        }
    }
}
