//! Loops over lanes, compiled for the widest vectors and the best shifts that the CPU has.

use pulp::{Arch, Simd, WithSimd};

/// Run `op` with the instruction set that was found when `arch` was made. What is inlined into `op` profits: mark it
/// `#[inline(always)]`, or it keeps the baseline's instructions.
#[inline(always)]
pub(super) fn wide<R>(arch: Arch, op: impl FnMut() -> R) -> R {
    struct Call<F>(F);
    impl<R, F: FnMut() -> R> WithSimd for Call<F> {
        type Output = R;
        #[inline(always)]
        fn with_simd<S: Simd>(mut self, _: S) -> R {
            (self.0)()
        }
    }
    arch.dispatch(Call(op))
}
