//! The packed product: equal to its plain loops bit for bit, whatever the shape, the company of a row or the threads.

use crate::common::host::{bits, guarded, noise};
use half::{bf16, f16};
use proptest::prelude::*;
use specrs::Error;
use specrs::host::linear::{Add, PackedLinear, Storage, Weight};
use specrs::host::norm::{RmsNorm, rms_norm, rms_norm_reference};
use specrs::host::threads::set_num_threads;

#[derive(Debug, Clone)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    storage: Storage,
    gated: bool,
    norm: bool,
    bias: bool,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let size = || prop_oneof![1usize..70, Just(320), Just(448), Just(127), Just(128)];
    let storage = prop_oneof![Just(Storage::Bf16), Just(Storage::F16), Just(Storage::F32)];
    (1usize..=40, size(), size(), storage, any::<(bool, bool, bool)>(), any::<u64>()).prop_map(
        |(m, n, k, storage, (gated, norm, bias), seed)| Case {
            m,
            n: if gated { 2 * n } else { n },
            k,
            storage,
            gated,
            norm,
            bias,
            seed,
        },
    )
}

struct Made {
    w: PackedLinear,
    x: Vec<f32>,
    norm: Vec<f32>,
    residual: Vec<f32>,
}

impl Case {
    fn make(&self) -> Made {
        let weight = noise(self.n * self.k, self.seed);
        let bias = noise(self.n, self.seed ^ 1);
        let bias = self.bias.then_some(&bias[..]);
        let new = if self.gated { PackedLinear::new_gated } else { PackedLinear::new };
        let w = new(Weight::F32(&weight), self.n, self.k, bias, self.storage).unwrap();
        let residual = noise(self.m * w.out_width(), self.seed ^ 2);
        Made { w, x: noise(self.m * self.k, self.seed ^ 3), norm: noise(self.k, self.seed ^ 4), residual }
    }

    fn run(&self, made: &Made, x: &[f32], residual: &[f32], reference: bool) -> Vec<f32> {
        let norm = self.norm.then_some(RmsNorm { weight: &made.norm, eps: 1e-5 });
        guarded(residual.len(), |out| {
            if reference {
                made.w.reference(x, norm, Add::Rows(residual), out).unwrap();
            } else if self.gated {
                made.w.forward_swiglu(x, norm, out).unwrap();
            } else {
                made.w.forward(x, norm, Add::Rows(residual), out).unwrap();
            }
        })
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn fast_path_has_the_bits_of_the_plain_loops(case in cases(), threads in 1usize..=4) {
        set_num_threads(threads).unwrap();
        let made = case.make();
        let got = case.run(&made, &made.x, &made.residual, false);
        let want = case.run(&made, &made.x, &made.residual, true);
        prop_assert_eq!(bits(&got), bits(&want));
    }

    #[test]
    fn a_row_does_not_know_its_company(case in cases(), picks in prop::collection::vec(any::<prop::sample::Index>(), 1..130), threads in 1usize..=4) {
        let made = case.make();
        let (k, width) = (case.k, made.w.out_width());
        set_num_threads(1).unwrap();
        let all = case.run(&made, &made.x, &made.residual, false);
        let picks: Vec<usize> = picks.iter().map(|i| i.index(case.m)).collect();
        let x: Vec<f32> = picks.iter().flat_map(|&r| made.x[r * k..(r + 1) * k].to_vec()).collect();
        let residual: Vec<f32> = picks.iter().flat_map(|&r| made.residual[r * width..(r + 1) * width].to_vec()).collect();
        set_num_threads(threads).unwrap();
        let some = case.run(&made, &x, &residual, false);
        for (i, &r) in picks.iter().enumerate() {
            prop_assert_eq!(bits(&some[i * width..(i + 1) * width]), bits(&all[r * width..(r + 1) * width]));
        }
    }
}

#[test]
fn the_shapes_of_a_model_on_all_threads() {
    // Large enough for parts in both directions and blocks of rows.
    for (m, n, k) in [(1, 8192, 320), (7, 4096, 896), (16, 1792, 320), (130, 448, 320), (97, 320, 896)] {
        for storage in [Storage::Bf16, Storage::F16] {
            let case = Case { m, n, k, storage, gated: false, norm: true, bias: true, seed: 7 };
            let made = case.make();
            let want = case.run(&made, &made.x, &made.residual, true);
            for threads in [1, 2, 3, 4] {
                set_num_threads(threads).unwrap();
                let got = case.run(&made, &made.x, &made.residual, false);
                assert_eq!(bits(&got), bits(&want), "{storage:?} {m}x{n}x{k}, {threads} threads");
            }
        }
    }
}

/// Every f16 there is, by rows of x that show each of them, in tiles of every size: products over f16 weights have the
/// bits of those over the same weights in f32. NaN is NaN: where two meet, the processor picks one.
#[test]
fn every_f16_is_widened_exactly() {
    let all = || (0..=u16::MAX).map(f16::from_bits);
    let finite: Vec<f16> = all().filter(|w| w.is_finite()).collect();
    let odd: Vec<f16> = all().collect();
    for (weights, k) in [(&finite, 8), (&odd, 8), (&finite, 31), (&odd, 32)] {
        let n = weights.len() / k;
        let weights = &weights[..n * k];
        let [halves, wide] = [Storage::F16, Storage::F32]
            .map(|storage| PackedLinear::new(Weight::F16(weights), n, k, None, storage).unwrap());
        assert_eq!(halves.storage(), Storage::F16);
        assert_eq!(halves.bytes() * 2, wide.bytes());
        for (i, w) in weights.iter().enumerate() {
            let kept = halves.weight(i / k, i % k).unwrap();
            assert_eq!(kept.to_bits(), w.to_f32().to_bits(), "{:#06x}", w.to_bits());
        }
        for m in [1, 2, 3, 4, 5, 8, 9, 50] {
            // One column of the weight in each row, and then all of them.
            let shown: Vec<f32> = (0..m * k).map(|i| f32::from(u8::from(i % k == i / k))).collect();
            for x in [shown, noise(m * k, 3), vec![-0.0; m * k], vec![f32::MIN_POSITIVE / 3.0; m * k]] {
                let [got, want] =
                    [&halves, &wide].map(|w| guarded(m * n, |out| w.forward(&x, None, Add::Nothing, out).unwrap()));
                for (got, want) in got.iter().zip(&want) {
                    let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                    assert!(same, "{m} rows, k = {k}: {got:e}, not {want:e}");
                }
            }
        }
    }
}

#[test]
fn weights_of_other_types_are_rounded_to_f16_and_those_of_f16_to_bf16() {
    let (n, k) = (40, 24);
    let weights: Vec<f32> = noise(n * k, 8).into_iter().map(|w| w * 1e5).collect(); // some beyond what f16 has
    let w = PackedLinear::new(Weight::F32(&weights), n, k, None, Storage::F16).unwrap();
    for (i, v) in weights.iter().enumerate() {
        assert_eq!(w.weight(i / k, i % k), Some(f16::from_f32(*v).to_f32()));
    }
    assert!((0..n * k).any(|i| w.weight(i / k, i % k) == Some(f32::INFINITY)));
    let x = noise(k, 9);
    let [got, want] = [false, true].map(|plain| {
        guarded(n, |out| {
            if plain { w.reference(&x, None, Add::Nothing, out) } else { w.forward(&x, None, Add::Nothing, out) }
                .unwrap()
        })
    });
    assert_eq!(bits(&got), bits(&want));
}

#[test]
fn close_to_float64_and_exact_storage() {
    let (m, n, k) = (3, 100, 320);
    let source: Vec<bf16> = noise(n * k, 5).into_iter().map(bf16::from_f32).collect();
    let x = noise(m * k, 6);
    let mut both = Vec::new();
    for storage in [Storage::Bf16, Storage::F32] {
        let w = PackedLinear::new(Weight::Bf16(&source), n, k, None, storage).unwrap();
        for (i, v) in source.iter().enumerate() {
            assert_eq!(w.weight(i / k, i % k), Some(v.to_f32()));
        }
        both.push(guarded(m * n, |out| w.forward(&x, None, Add::Nothing, out).unwrap()));
    }
    assert_eq!(bits(&both[0]), bits(&both[1]), "bf16 weights lose nothing as bf16");
    for r in 0..m {
        for c in 0..n {
            let want: f64 = (0..k).map(|i| f64::from(x[r * k + i]) * source[c * k + i].to_f64()).sum();
            assert!((f64::from(both[0][r * n + c]) - want).abs() < 2e-5, "row {r} column {c}");
        }
    }
    let halves: Vec<f16> = noise(n * k, 5).into_iter().map(f16::from_f32).collect();
    let w = PackedLinear::new(Weight::F16(&halves), n, k, None, Storage::F32).unwrap();
    assert_eq!(w.weight(99, 319), Some(halves[n * k - 1].to_f32()));
    assert_eq!(w.weight(100, 0), None);
}

#[test]
fn adding_to_what_is_there() {
    let w = PackedLinear::new(Weight::F32(&noise(50 * 33, 1)), 50, 33, None, Storage::F32).unwrap();
    let (x, there) = (noise(4 * 33, 2), noise(4 * 50, 3));
    let mut out = there.clone();
    w.forward(&x, None, Add::Out, &mut out).unwrap();
    let rows = guarded(200, |o| w.forward(&x, None, Add::Rows(&there), o).unwrap());
    assert_eq!(bits(&out), bits(&rows));
}

#[test]
fn shapes_that_do_not_fit_are_refused_and_nothing_is_written() {
    let weight = noise(12, 1);
    assert!(matches!(
        PackedLinear::new(Weight::F32(&weight), 3, 5, None, Storage::F32),
        Err(Error::Mismatch { operand: "weight", .. })
    ));
    assert!(PackedLinear::new(Weight::F32(&[]), 3, 0, None, Storage::F32).is_err());
    assert!(PackedLinear::new(Weight::F32(&weight), 3, 4, Some(&[0.0; 4]), Storage::F32).is_err());
    assert!(PackedLinear::new_gated(Weight::F32(&weight), 3, 4, None, Storage::F32).is_err());
    let w = PackedLinear::new(Weight::F32(&weight), 3, 4, None, Storage::F32).unwrap();
    let mut out = [7.0; 6];
    let bad_norm = RmsNorm { weight: &[1.0; 3], eps: 0.0 };
    assert!(w.forward(&[0.0; 7], None, Add::Nothing, &mut out).is_err());
    assert!(w.forward(&[0.0; 4], None, Add::Nothing, &mut out).is_err());
    assert!(w.forward(&[0.0; 8], Some(bad_norm), Add::Nothing, &mut out).is_err());
    assert!(w.forward(&[0.0; 8], None, Add::Rows(&[0.0; 5]), &mut out).is_err());
    assert!(w.forward_swiglu(&[0.0; 8], None, &mut out[..3]).is_err());
    assert_eq!(out, [7.0; 6]);
    w.forward(&[], None, Add::Nothing, &mut []).unwrap(); // no rows: nothing to do
}

#[test]
fn rms_norm_agrees_with_float64() {
    for k in [1usize, 5, 16, 31, 320, 4096] {
        let (x, w) = (noise(3 * k, 9), noise(k, 10));
        let norm = RmsNorm { weight: &w, eps: 1e-6 };
        let got = guarded(3 * k, |o| rms_norm(&x, &norm, o).unwrap());
        let want = guarded(3 * k, |o| rms_norm_reference(&x, &norm, o).unwrap());
        for (g, w) in got.iter().zip(&want) {
            assert!((g - w).abs() <= 1e-5 * w.abs().max(1e-3), "{k}: {g} {w}");
        }
    }
    let mut out = [0.0; 4];
    assert!(rms_norm(&[0.0; 5], &RmsNorm { weight: &[1.0; 4], eps: 0.0 }, &mut out).is_err());
    assert!(rms_norm(&[0.0; 8], &RmsNorm { weight: &[1.0; 4], eps: 0.0 }, &mut out).is_err());
}
