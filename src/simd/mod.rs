//! The one place that picks the instruction set: AVX-512, AVX2 + FMA + F16C, NEON or plain scalar code, found at run time by
//! [`pulp`]. Results do not depend on it, since `mul_add` is one rounding everywhere.

mod f16;

use std::sync::OnceLock;

use pulp::{Arch, Simd, WithSimd};

pub(crate) use f16::{widen, widens_at_once};

/// The instruction set, detected once. `SPECRS_SIMD` asks for less than there is: `scalar`, or `avx2` on a machine
/// with AVX-512, to compare (the results are the same bits) or to work around a fault.
///
/// AVX2 and AVX-512 stand for F16C too, which every processor with AVX2 has: [`f16`] relies on it. Where something
/// hides it, scalar code runs.
#[expect(clippy::disallowed_methods, reason = "the one place that makes them")]
fn arch() -> Arch {
    static ARCH: OnceLock<Arch> = OnceLock::new();
    *ARCH.get_or_init(|| match std::env::var("SPECRS_SIMD").as_deref() {
        Ok("scalar") => Arch::Scalar,
        #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
        _ if !std::is_x86_feature_detected!("f16c") => Arch::Scalar,
        #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
        Ok("avx2") => pulp::x86::V3::try_new().map_or(Arch::Scalar, Arch::V3),
        _ => Arch::new(),
    })
}

/// Run `f`, compiled for the instruction set found: loops in `f` and in what is inlined into it vectorise.
///
/// Mark the closure `#[inline(always)]`: where the compiler leaves it a function of its own, that function has the
/// baseline's instructions, and each `mul_add` in it is a call. For the same reason `f` is an `FnMut`: called through
/// `FnOnce`, a closure that consumes nothing goes through a shim that the attribute does not reach.
#[inline(always)]
pub(crate) fn dispatch<R>(f: impl FnMut() -> R) -> R {
    struct Call<F>(F);
    impl<R, F: FnMut() -> R> WithSimd for Call<F> {
        type Output = R;
        #[inline(always)]
        fn with_simd<S: Simd>(mut self, _: S) -> R {
            (self.0)()
        }
    }
    run(Call(f))
}

/// Run an operation that is generic over the vector type.
#[inline(always)]
pub(crate) fn run<Op: WithSimd>(op: Op) -> Op::Output {
    match arch() {
        #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
        Arch::V3(v3) => f16::run(v3, op),
        other => other.dispatch(op),
    }
}

/// Elements of an `f32` vector: 16, 8, 4 or 1.
pub(crate) fn width() -> usize {
    struct Width;
    impl WithSimd for Width {
        type Output = usize;
        fn with_simd<S: Simd>(self, _: S) -> usize {
            S::F32_LANES
        }
    }
    static WIDTH: OnceLock<usize> = OnceLock::new();
    *WIDTH.get_or_init(|| run(Width))
}

/// The instruction set in use, by its vectors: what Python is told.
#[cfg(feature = "python")]
pub(crate) fn name() -> &'static str {
    match width() {
        16 => "avx512",
        8 => "avx2",
        4 => "neon",
        _ => "scalar",
    }
}
