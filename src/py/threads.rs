//! The way the kernels run: number of threads ([`crate::host::threads`]), instruction set, rule of attention.

use pyo3::prelude::*;

use super::arg::Int;
use crate::host::threads;

/// Let the CPU kernels of this process use `n` threads, 1 to 64, the calling one included.
///
/// Results do not depend on `n`, to the bit. With 1 there are no other threads. Otherwise workers start when a kernel
/// first has enough work, poll within a pass, and sleep once no kernel has called them for about the time that waking
/// takes.
///
/// Without a call of this function (or `--threads` on the command line, which calls it), the number is the first of
/// these. (1) `torch.get_num_threads()` when an `LLM` is made, if somebody must have changed that number: it differs
/// from `OMP_NUM_THREADS`, or, without that variable, is below number 3 or above the machine's CPUs. (2) The first
/// number of `OMP_NUM_THREADS`, read once; a value that is not a list of positive numbers is ignored. (3) The CPUs that
/// the process may use, by affinity mask and cgroup quota, at most 8.
///
/// Raises `ConfigError` for an `n` out of range.
#[pyfunction]
pub(super) fn set_num_threads(n: Int) -> PyResult<()> {
    Ok(threads::set_num_threads(n.usize("num_threads")?)?)
}

/// Threads that the CPU kernels may use, the calling one included; `set_num_threads` says where the number comes from.
#[pyfunction]
pub(super) fn num_threads() -> usize {
    threads::num_threads()
}

/// Take over torch's number of threads if somebody must have changed that; `set_num_threads` has the rule.
#[pyfunction]
pub(super) fn _follow_torch(torch_threads: Int, machine_cpus: Int) -> PyResult<()> {
    threads::follow_torch(torch_threads.usize("torch_threads")?, machine_cpus.usize("machine_cpus")?);
    Ok(())
}

/// Returns `(instruction set, rule)`: the instruction set that the CPU kernels were dispatched to (`avx512`, `avx2`,
/// `neon` or `scalar`), and the number of the rule that attention's bits on a GPU follow, which changes with those
/// bits; `None` for the rule in a build without CUDA.
#[pyfunction]
pub(super) fn _numerics_ids() -> (&'static str, Option<i32>) {
    (crate::simd::name(), super::cuda::attention_rule())
}
