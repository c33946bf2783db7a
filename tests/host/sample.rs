//! Sampling: the fast draw equals the plain one, the plain one means what it says, and draws follow its distribution.

use crate::common::{Mix, chi_square_accepts};
use proptest::prelude::*;
use specrs::Error;
use specrs::host::sample::{Sampler, Scratch, reference};
use specrs::round::philox::{Purpose, uniform53};
use specrs::round::{MAX_BIAS, MAX_PENALTY, MAX_REPETITION, SamplerConfig, TokenMask};

/// Rows that make trouble: ties, -inf, huge and tiny values, next to ordinary ones.
fn logits(vocab: usize, kind: u8, seed: u64) -> Vec<f32> {
    let mut mix = Mix(seed);
    let mut row: Vec<f32> = (0..vocab)
        .map(|_| match kind {
            0 => mix.normal() * 3.0,
            1 => mix.below(4) as f32 - 2.0,
            2 => {
                if mix.below(3) == 0 {
                    mix.normal()
                } else {
                    f32::NEG_INFINITY
                }
            }
            3 => [f32::MAX, f32::MIN, 1e30, -1e30, 0.0, -0.0, 1e-40][mix.below(7)],
            4 => 0.25,
            5 => mix.normal() * 1e-3 + 1000.0,
            _ => mix.normal() * 30.0,
        })
        .collect();
    let one = mix.below(vocab);
    row[one] = row[one].max(-1.0); // a finite value
    row
}

fn configs(vocab: usize) -> impl Strategy<Value = SamplerConfig> {
    let temperature = prop_oneof![Just(0.0), Just(1.0), 0.05..3.0f64, Just(1e-40), Just(1e300)];
    let top_k = prop_oneof![Just(0), Just(1), 1..100i64, (vocab as i64 - 2).max(0)..vocab as i64 + 2, Just(i64::MAX)];
    let top_p = prop_oneof![Just(1.0), Just(0.9), Just(0.5), 1e-12..1.0f64, Just(1.0 - 1e-12), Just(f64::MIN_POSITIVE)];
    let min_p = prop_oneof![Just(0.0), Just(1.0), 0.0..0.2f64, Just(1e-12), Just(1e-30)];
    let penalty = || prop_oneof![Just(0.0), -2.0..2.0f64];
    let repetition = prop_oneof![Just(1.0), 0.5..2.0f64];
    let bias = prop::collection::btree_map(0..vocab as i32, prop_oneof![-5.0..5.0f32, Just(f32::NEG_INFINITY)], 0..4);
    let allowed = prop::option::weighted(0.3, prop::collection::vec(0..vocab as u32, 1..=vocab.min(20)))
        .prop_map(move |tokens| tokens.map(|tokens| TokenMask::of(vocab as u32, tokens).unwrap()));
    (temperature, top_k, top_p, min_p, any::<u64>(), repetition, [penalty(), penalty()], bias, allowed).prop_map(
        |(temperature, top_k, top_p, min_p, seed, repetition_penalty, penalties, bias, allowed)| {
            let [presence_penalty, frequency_penalty] = penalties;
            SamplerConfig {
                temperature,
                top_k,
                top_p,
                min_p,
                seed,
                repetition_penalty,
                presence_penalty,
                frequency_penalty,
                logit_bias: bias.into_iter().collect(),
                allowed,
            }
        },
    )
}

fn cases() -> impl Strategy<Value = (SamplerConfig, Vec<f32>, [Vec<i32>; 3])> {
    let vocab = prop_oneof![1..10usize, 100..150usize, 250..260usize, 1000..3000usize];
    vocab.prop_flat_map(|vocab| {
        let tokens = || prop::collection::vec(0..vocab as i32, 0..20);
        (
            configs(vocab),
            (0..7u8, any::<u64>()).prop_map(move |(kind, seed)| logits(vocab, kind, seed)),
            [tokens(), tokens(), tokens()],
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// Tokens and errors, for several positions, with scratch that other rows have used.
    #[test]
    fn fast_equals_reference((config, row, [prompt, output, path]) in cases(), position in any::<u32>()) {
        let mut sampler = Sampler::new(row.len() as u32, &prompt, config.clone()).unwrap();
        sampler.commit(&output).unwrap();
        let mut scratch = Scratch::default();
        let longer: Vec<f32> = (0..row.len() + 300).map(|i| (i % 7) as f32).collect();
        let other = SamplerConfig { allowed: None, ..config.clone() };
        Sampler::new(longer.len() as u32, &[], other).unwrap().draw(&mut scratch, &longer, 0, &[]).ok();
        for position in [position, position.wrapping_add(1), 0, 5] {
            let fast = sampler.draw(&mut scratch, &row, position, &path);
            let slow = reference::draw(&config, &prompt, &output, &row, position, &path);
            prop_assert_eq!(fast, slow);
        }
    }

    /// The path is the output that is not committed yet: committing it changes nothing.
    #[test]
    fn path_and_committed_output_are_the_same((config, row, [prompt, output, path]) in cases()) {
        let mut sampler = Sampler::new(row.len() as u32, &prompt, config).unwrap();
        sampler.commit(&output).unwrap();
        let mut scratch = Scratch::default();
        let on_path = sampler.draw(&mut scratch, &row, 9, &path);
        sampler.commit(&path).unwrap();
        prop_assert_eq!(on_path, sampler.draw(&mut scratch, &row, 9, &[]));
    }

    /// Checks the distribution of a draw by the reference's row and weights.
    #[test]
    fn processed_rows_are_what_draws_are_from((config, row, [prompt, output, path]) in cases()) {
        let mut sampler = Sampler::new(row.len() as u32, &prompt, config.clone()).unwrap();
        sampler.commit(&output).unwrap();
        let mut out = vec![f32::NAN; row.len()];
        let got = sampler.processed(&mut Scratch::default(), &row, &path, &mut out);
        let edited = reference::processed(&config, &prompt, &[output, path].concat(), &row);
        match reference::weights(&config, &edited) {
            Ok(weights) => {
                prop_assert_eq!(got, Ok(()));
                let max = edited.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let greedy = config.temperature == 0.0;
                // A temperature whose inverse leaves f32 counts as the nearest whose inverse does not.
                let (least, most) = (1.0 / f64::from(f32::MAX), 1.0 / f64::from(f32::MIN_POSITIVE));
                let over = if greedy { 1.0 } else { config.temperature.clamp(least, most) };
                let cut = config.top_k > 0 || config.top_p < 1.0 || config.min_p > 0.0;
                for (i, &x) in edited.iter().enumerate() {
                    let scaled = ((f64::from(x) - f64::from(max)) / over) as f32;
                    // A token whose weight vanishes may be among those that top-k keeps.
                    let gone = !greedy && cut && weights[i] == 0 && out[i] == f32::NEG_INFINITY;
                    prop_assert!(gone || out[i] == scaled, "token {}: {} for {} of {}", i, out[i], x, max);
                    prop_assert!(greedy || weights[i] == 0 || out[i] > f32::NEG_INFINITY);
                }
                if !greedy && config.top_k > 0 {
                    prop_assert!(out.iter().filter(|&&x| x > f32::NEG_INFINITY).count() as i64 <= config.top_k);
                }
            }
            Err(_) => prop_assert!(matches!(got, Err(Error::NonFinite { position: -1, .. })), "{:?}", got),
        }
    }

    /// A bad value anywhere is named, whatever would have been kept.
    #[test]
    fn non_finite_rows_are_refused((config, mut row, _) in cases(), at in any::<prop::sample::Index>(), nan in any::<bool>()) {
        let config = SamplerConfig { logit_bias: vec![], ..config };
        let at = at.index(row.len());
        row[at] = if nan { f32::NAN } else { f32::INFINITY };
        let got = Sampler::new(row.len() as u32, &[], config).unwrap().draw(&mut Scratch::default(), &row, 1, &[]);
        let value = if nan { "NaN" } else { "+inf" };
        prop_assert_eq!(got, Err(Error::NonFinite {
            what: "target logits", value, request: -1, row: -1, position: 1, index: at as i64,
        }));
    }
}

/// Softmax, top-k, top-p and min-p in f64 by their definitions, written without the crate's weights.
fn probabilities(config: &SamplerConfig, row: &[f32]) -> Vec<f64> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |i: usize| ((f64::from(row[i]) - f64::from(max)) / config.temperature).exp();
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
    if config.top_k > 0 {
        order.truncate(config.top_k as usize);
    }
    let total: f64 = order.iter().map(|&i| weight(i)).sum();
    let mut mass = 0.0;
    order.retain(|&i| {
        let keep = mass < config.top_p * total;
        mass += weight(i);
        keep
    });
    order.retain(|&i| weight(i) >= config.min_p);
    let total: f64 = order.iter().map(|&i| weight(i)).sum();
    let mut p = vec![0.0; row.len()];
    order.iter().for_each(|&i| p[i] = weight(i) / total);
    p
}

fn sampling_configs() -> Vec<SamplerConfig> {
    let base = SamplerConfig { temperature: 1.0, seed: 11, ..SamplerConfig::default() };
    vec![
        base.clone(),
        SamplerConfig { temperature: 0.7, seed: 12, ..base.clone() },
        SamplerConfig { temperature: 1.8, top_k: 5, seed: 13, ..base.clone() },
        SamplerConfig { temperature: 0.8, top_p: 0.9, seed: 14, ..base.clone() },
        SamplerConfig { min_p: 0.1, seed: 15, ..base.clone() },
        SamplerConfig { temperature: 1.2, top_k: 12, top_p: 0.85, min_p: 0.05, seed: 16, ..base },
    ]
}

#[test]
fn weights_are_the_distribution_in_f64() {
    for (n, config) in sampling_configs().into_iter().enumerate() {
        for vocab in [1, 7, 500, 4000] {
            let row = logits(vocab, 0, n as u64);
            let weights = reference::weights(&config, &row).unwrap();
            let total: u64 = weights.iter().sum();
            for (i, p) in probabilities(&config, &row).into_iter().enumerate() {
                let got = weights[i] as f64 / total as f64;
                // (x - max) / T is rounded to f32: up to 28 times 2^-23 relative, as far as weights do not vanish.
                assert!((got - p).abs() < 4e-6 * p + 1e-12, "{config:?}: token {i}: {got} against {p}");
            }
        }
    }
}

/// Tokens over positions, and tokens over seeds, follow the distribution.
#[test]
fn draws_follow_the_distribution() {
    const DRAWS: u32 = 40_000;
    let row = logits(24, 0, 3);
    let mut scratch = Scratch::default();
    for config in sampling_configs() {
        let p = probabilities(&config, &row);
        let mut by_position = vec![0u32; row.len()];
        let mut by_seed = vec![0u32; row.len()];
        let sampler = Sampler::new(24, &[], config.clone()).unwrap();
        for n in 0..DRAWS {
            by_position[sampler.draw(&mut scratch, &row, n, &[]).unwrap() as usize] += 1;
            let seeded = SamplerConfig { seed: u64::from(n) << 7, ..config.clone() };
            let seeded = Sampler::new(24, &[], seeded).unwrap();
            by_seed[seeded.draw(&mut scratch, &row, 77, &[]).unwrap() as usize] += 1;
        }
        assert!(chi_square_accepts(&by_position, &p), "{config:?}");
        assert!(chi_square_accepts(&by_seed, &p), "{config:?}");
    }
    // The test can fail: a distribution that is a little off is rejected.
    let config = sampling_configs().remove(0);
    let sampler = Sampler::new(24, &[], config.clone()).unwrap();
    let mut counts = vec![0u32; row.len()];
    (0..DRAWS).for_each(|n| counts[sampler.draw(&mut scratch, &row, n, &[]).unwrap() as usize] += 1);
    let warmer = probabilities(&SamplerConfig { temperature: 1.05, ..config }, &row);
    assert!(!chi_square_accepts(&counts, &warmer));
}

/// The largest vocabularies in use, through each path of the fast draw.
#[test]
fn large_vocabularies_equal_the_reference() {
    let row = logits(262_144, 0, 5);
    let mut scratch = Scratch::default();
    let mut configs = sampling_configs();
    configs.push(SamplerConfig { temperature: 0.9, top_k: 50_000, top_p: 0.999, seed: 21, ..SamplerConfig::default() });
    configs.push(SamplerConfig { temperature: 5.0, top_p: 0.99999, seed: 22, ..SamplerConfig::default() });
    for config in configs {
        let sampler = Sampler::new(262_144, &[], config.clone()).unwrap();
        let weights = reference::weights(&config, &row).unwrap();
        let total: u64 = weights.iter().sum();
        for position in 0..20 {
            let u = uniform53(config.seed, position, Purpose::TARGET);
            let target = ((u128::from(u) * u128::from(total)) >> 53) as u64;
            let mut above = 0;
            let want = weights.iter().position(|&w| {
                above += w;
                above > target
            });
            assert_eq!(sampler.draw(&mut scratch, &row, position, &[]).unwrap() as usize, want.unwrap(), "{config:?}");
        }
    }
}

#[test]
fn greedy_takes_the_lowest_id_on_ties_after_penalties() {
    let mut scratch = Scratch::default();
    let mut row = vec![0.0f32; 2000];
    row[1500] = 2.0;
    row[700] = 2.0;
    let greedy = Sampler::new(2000, &[], SamplerConfig::default()).unwrap();
    assert_eq!(greedy.draw(&mut scratch, &row, 0, &[]), Ok(700));
    let config = SamplerConfig { presence_penalty: 0.5, logit_bias: vec![(3, 1.75)], ..SamplerConfig::default() };
    let mut sampler = Sampler::new(2000, &[1500], config).unwrap();
    assert_eq!(sampler.draw(&mut scratch, &row, 0, &[]), Ok(700));
    assert_eq!(sampler.draw(&mut scratch, &row, 0, &[700]), Ok(1500), "presence ignores the prompt");
    sampler.commit(&[700]).unwrap();
    assert_eq!(sampler.draw(&mut scratch, &row, 0, &[1500, 1500]), Ok(3));
}

#[test]
fn parameters_out_of_range_are_named() {
    let base = SamplerConfig::default();
    let bad = [
        ("temperature", SamplerConfig { temperature: -0.1, ..base.clone() }),
        ("temperature", SamplerConfig { temperature: f64::INFINITY, ..base.clone() }),
        ("temperature", SamplerConfig { temperature: f64::NAN, ..base.clone() }),
        ("top_k", SamplerConfig { top_k: -1, ..base.clone() }),
        ("top_p", SamplerConfig { top_p: 0.0, ..base.clone() }),
        ("top_p", SamplerConfig { top_p: 1.5, ..base.clone() }),
        ("top_p", SamplerConfig { top_p: f64::NAN, ..base.clone() }),
        ("min_p", SamplerConfig { min_p: -1e-9, ..base.clone() }),
        ("min_p", SamplerConfig { min_p: 1.1, ..base.clone() }),
        ("repetition_penalty", SamplerConfig { repetition_penalty: 0.0, ..base.clone() }),
        ("repetition_penalty", SamplerConfig { repetition_penalty: 1e-300, ..base.clone() }),
        ("repetition_penalty", SamplerConfig { repetition_penalty: f64::INFINITY, ..base.clone() }),
        ("repetition_penalty", SamplerConfig { repetition_penalty: 1e6_f64.next_up(), ..base.clone() }),
        ("repetition_penalty", SamplerConfig { repetition_penalty: 1e-6_f64.next_down(), ..base.clone() }),
        ("presence_penalty", SamplerConfig { presence_penalty: -1e20_f64.next_up(), ..base.clone() }),
        ("frequency_penalty", SamplerConfig { frequency_penalty: 1e20_f64.next_up(), ..base.clone() }),
        ("logit_bias", SamplerConfig { logit_bias: vec![(0, 1e30_f32.next_up())], ..base.clone() }),
        ("logit_bias", SamplerConfig { logit_bias: vec![(0, f32::MIN)], ..base.clone() }),
        ("presence_penalty", SamplerConfig { presence_penalty: f64::NAN, ..base.clone() }),
        ("frequency_penalty", SamplerConfig { frequency_penalty: 1e300, ..base.clone() }),
        ("logit_bias", SamplerConfig { logit_bias: vec![(0, f32::NAN)], ..base.clone() }),
        ("logit_bias", SamplerConfig { logit_bias: vec![(0, f32::INFINITY)], ..base.clone() }),
        ("logit_bias", SamplerConfig { logit_bias: vec![(5, 1.0), (2, 0.0), (5, 1.0)], ..base.clone() }),
        ("logit_bias token", SamplerConfig { logit_bias: vec![(10, 1.0)], ..base.clone() }),
        ("logit_bias token", SamplerConfig { logit_bias: vec![(-1, 1.0)], ..base.clone() }),
    ];
    for (name, config) in bad {
        match Sampler::new(10, &[], config) {
            Err(Error::Invalid { what, .. } | Error::OutOfRange { what, .. }) => assert_eq!(what, name),
            other => panic!("{name}: {other:?}"),
        }
    }
    assert!(matches!(Sampler::new(0, &[], base.clone()), Err(Error::OutOfRange { what: "vocab", .. })));
}

/// At the limits of every parameter, in each combination of signs, logits up to 1e30 stay finite.
#[test]
fn no_parameters_within_their_limits_overflow() {
    let row = [1e30f32, -1e30, 0.0, 1e-30];
    let mut scratch = Scratch::default();
    for signs in 0..16u32 {
        let sign = |bit: u32| if signs >> bit & 1 == 1 { -1.0 } else { 1.0 };
        let config = SamplerConfig {
            repetition_penalty: if signs >> 3 & 1 == 1 { MAX_REPETITION } else { 1.0 / MAX_REPETITION },
            presence_penalty: MAX_PENALTY * sign(0),
            frequency_penalty: MAX_PENALTY * sign(1),
            logit_bias: (0..4).map(|t| (t, MAX_BIAS * sign(2) as f32)).collect(),
            ..SamplerConfig::default()
        };
        let mut sampler = Sampler::new(4, &[0, 1, 2, 3], config.clone()).unwrap();
        for _ in 0..100 {
            sampler.commit(&[0, 1, 2, 3]).unwrap();
        }
        assert!(sampler.draw(&mut scratch, &row, 500, &[]).is_ok(), "{config:?}");
        // The largest count there can be, by the formula itself.
        for x in row {
            let x = (f64::from(x) + f64::from(MAX_BIAS) * sign(2)).abs() * MAX_REPETITION;
            assert!(x + MAX_PENALTY * f64::from(u32::MAX) + MAX_PENALTY < f64::from(f32::MAX) / 10.0);
        }
    }
    // Beyond 1e30 the row is refused where it overflows, and the parameters are named, not the model.
    let config = SamplerConfig { repetition_penalty: 1e-6, ..SamplerConfig::default() };
    let got = Sampler::new(2, &[1], config).unwrap().draw(&mut scratch, &[0.0, 1e35], 3, &[]);
    let what = "target logits after logit_bias and penalties";
    let want = Error::NonFinite { what, value: "+inf", request: -1, row: -1, position: 3, index: 1 };
    assert_eq!(got, Err(want));
}

/// A token whose weight is exactly what min-p asks for stays, and goes where it asks for the next number above.
#[test]
fn min_p_keeps_a_token_of_exactly_its_weight() {
    const ONE: f64 = (1u64 << 40) as f64;
    let row = [0.0f32, -0.4, -1.1, -0.7];
    let base = SamplerConfig { temperature: 1.0, seed: 3, ..SamplerConfig::default() };
    let free = reference::weights(&base, &row).unwrap();
    let mut scratch = Scratch::default();
    for token in 0..4usize {
        for (top_k, top_p) in [(0, 1.0), (3, 1.0), (4, 1.0), (0, 0.999_999_999), (3, 0.999_999_999)] {
            if top_k == 3 && token == 2 {
                continue; // the lightest of four
            }
            let exact = free[token] as f64 / ONE; // both are powers of two apart from the integer: no rounding
            for (min_p, kept) in [(exact, true), (exact.next_up().min(1.0), token == 0)] {
                let config = SamplerConfig { min_p, top_k, top_p, ..base.clone() };
                let weights = reference::weights(&config, &row).unwrap();
                assert_eq!(weights[token] > 0, kept, "{config:?}: token {token}");
                let sampler = Sampler::new(4, &[], config.clone()).unwrap();
                let drawn = (0..400).any(|p| sampler.draw(&mut scratch, &row, p, &[]) == Ok(token as i32));
                assert_eq!(drawn, kept, "{config:?}: token {token}");
            }
        }
    }
}

#[test]
fn tokens_and_rows_that_do_not_fit_are_refused() {
    let config = SamplerConfig { frequency_penalty: 1.0, ..SamplerConfig::default() };
    assert!(matches!(
        Sampler::new(10, &[10], config.clone()),
        Err(Error::OutOfRange { what: "prompt token", got: 10, min: 0, max: 9 })
    ));
    let mut sampler = Sampler::new(4, &[], config).unwrap();
    let mut scratch = Scratch::default();
    assert!(matches!(sampler.commit(&[2, -1]), Err(Error::OutOfRange { what: "output token", got: -1, .. })));
    // Token 2 of the refused call was not counted.
    assert_eq!(sampler.draw(&mut scratch, &[0.0, 0.0, 0.5, 0.0], 0, &[]), Ok(2));
    assert!(matches!(
        sampler.draw(&mut scratch, &[0.0; 4], 0, &[4]),
        Err(Error::OutOfRange { what: "path token", got: 4, .. })
    ));
    assert!(matches!(
        sampler.draw(&mut scratch, &[0.0; 5], 0, &[]),
        Err(Error::Mismatch { operand: "logits row", .. })
    ));
    // Forbidding every token leaves nothing to draw.
    let ban = SamplerConfig { logit_bias: vec![(0, f32::NEG_INFINITY), (1, f32::NEG_INFINITY)], ..Default::default() };
    let banned = Sampler::new(2, &[], ban).unwrap();
    assert!(matches!(banned.draw(&mut scratch, &[0.0, 1.0], 0, &[]), Err(Error::NonFinite { value: "all -inf", .. })));
}
