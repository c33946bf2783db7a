//! f16 to f32, exactly: by the processor's instruction where there is one, by arithmetic elsewhere.
//!
//! Eight f16 take one instruction of F16C, which is an extension beside AVX2, or about nine of AVX2. pulp gives it for
//! AVX-512 alone, so what reaches F16C is `unsafe` here. All of it rests on one fact: the processor has F16C wherever
//! this crate holds a `V3`, since `arch` in the module above makes them all and looks (clippy.toml lets nothing else).
#![allow(unsafe_code)]

#[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
pub(super) use x86::run;

use pulp::Simd;

/// Vector `v < 16 / width` of 16 f16, as their bits, in f32. NaN stays NaN, of whichever bits.
#[inline(always)]
pub(crate) fn widen<S: Simd>(s: S, halves: &[u16; 16], v: usize) -> S::f32s {
    #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
    if let Some(wide) = x86::widen(s, halves, v) {
        return wide;
    }
    by_arithmetic(s, halves, v)
}

/// True if [`widen`] is one instruction here.
#[inline(always)]
pub(crate) fn widens_at_once<S: Simd>(s: S) -> bool {
    #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
    return x86::widen(s, &[0; 16], 0).is_some();
    #[cfg(not(any(target_arch = "x86", target_arch = "x86_64")))]
    return (s, false).1;
}

/// [`widen`] by arithmetic that any vector has.
///
/// Exact for every value, whatever a thread does with subnormals: none occurs here.
#[inline(always)]
fn by_arithmetic<S: Simd>(s: S, halves: &[u16; 16], v: usize) -> S::f32s {
    let mut words = [0u32; 16];
    let words = &mut words[..S::U32_LANES];
    for (word, half) in words.iter_mut().zip(&halves[v * S::U32_LANES..]) {
        *word = u32::from(*half);
    }
    let words = S::as_simd_u32s(words).0[0];
    // Exponent and fraction to where f32 has them.
    let magnitude = s.and_u32s(s.wrapping_dyn_shl_u32s(words, s.splat_u32s(13)), s.splat_u32s(0x0fff_e000));
    let sign = s.and_u32s(s.wrapping_dyn_shl_u32s(words, s.splat_u32s(16)), s.splat_u32s(1 << 31));
    // The exponent of f32 is that of f16 and 112; of infinities and NaN 112 more.
    let more = s.splat_u32s(112 << 23);
    let bits = s.add_u32s(magnitude, more);
    let odd = s.greater_than_u32s(magnitude, s.splat_u32s((31 << 23) - 1));
    let bits = s.select_u32s(odd, s.add_u32s(bits, more), bits);
    // Subnormals are m 2^-24, and y is 2^-15 (1 + m / 1024) yet. For all others, 2 y - 2^-14 is y or more.
    let y = s.transmute_f32s_u32s(bits);
    let meant = s.mul_add_f32s(y, s.splat_f32s(2.0), s.splat_f32s(-1.0 / 16384.0));
    let y = s.select_f32s(s.less_than_f32s(meant, y), meant, y);
    s.transmute_f32s_u32s(s.or_u32s(s.transmute_u32s_f32s(y), sign))
}

#[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
mod x86 {
    use std::any::Any;
    #[cfg(target_arch = "x86")]
    use std::arch::x86::{__m256, _mm256_cvtph_ps};
    #[cfg(target_arch = "x86_64")]
    use std::arch::x86_64::{__m256, _mm256_cvtph_ps};

    use pulp::x86::{V3, V4};
    use pulp::{Simd, WithSimd};

    /// Run an operation on AVX2, compiled for F16C as well: the instruction of [`widen`] is inlined into nothing else.
    #[inline(always)]
    pub(in crate::simd) fn run<Op: WithSimd>(v3: V3, op: Op) -> Op::Output {
        #[inline]
        #[target_feature(enable = "avx2,bmi1,bmi2,f16c,fma,fxsr,lzcnt,popcnt")]
        fn compiled<Op: WithSimd>(v3: V3, op: Op) -> Op::Output {
            op.with_simd(v3)
        }
        // SAFETY: the processor has what `v3` proves, and F16C too, as the head of this file says.
        unsafe { compiled(v3, op) }
    }

    /// `None` where neither AVX-512 nor AVX2 is in use. The compiler knows which, so that one arm is left.
    #[inline(always)]
    pub(super) fn widen<S: Simd>(s: S, halves: &[u16; 16], v: usize) -> Option<S::f32s> {
        let s: &dyn Any = &s;
        if let Some(v4) = s.downcast_ref::<V4>() {
            return Some(bytemuck::cast(v4.avx512f._mm512_cvtph_ps(bytemuck::cast(*halves))));
        }
        let v3 = s.downcast_ref::<V3>()?;
        Some(bytemuck::cast(eight(*v3, halves.as_chunks().0[v])))
    }

    #[inline(always)]
    fn eight(_: V3, halves: [u16; 8]) -> __m256 {
        // SAFETY: the processor has F16C, as the head of this file says.
        unsafe { _mm256_cvtph_ps(bytemuck::cast(halves)) }
    }
}

#[cfg(test)]
mod tests {
    use pulp::{Scalar, WithSimd};

    use super::*;

    struct Every(fn(u16, u32));

    impl WithSimd for Every {
        type Output = ();

        fn with_simd<S: Simd>(self, s: S) {
            let halves: Vec<u16> = (0..=u16::MAX).collect();
            for sixteen in halves.as_chunks().0 {
                for v in 0..16 / S::F32_LANES {
                    for found in [widen(s, sixteen, v), by_arithmetic(s, sixteen, v)] {
                        let found: &[f32] = bytemuck::cast_slice(std::slice::from_ref(&found));
                        for (half, wide) in sixteen[v * S::F32_LANES..].iter().zip(found) {
                            (self.0)(*half, wide.to_bits());
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_f16_keeps_its_value() {
        let check = |half: u16, found: u32| {
            let want = half::f16::from_bits(half).to_f32();
            assert!(want.to_bits() == found || (want.is_nan() && f32::from_bits(found).is_nan()), "{half:#06x}");
        };
        super::super::run(Every(check));
        Every(check).with_simd(Scalar::new());
    }
}
