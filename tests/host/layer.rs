//! Decoder layers in one call: the bits of their steps one by one; and rows of an embedding.

use std::sync::Arc;

use crate::common::host::{Batch, World, bits, guarded, noise};
use half::{bf16, f16};
use proptest::prelude::*;
use specrs::Error;
use specrs::host::attention::{AttnView, Scores};
use specrs::host::embed::embed;
use specrs::host::layer::{DecoderLayer, Eagle3Layer, LayerTail, NormWeight, decoder_layers};
use specrs::host::linear::{Add, PackedLinear, Storage, Weight};
use specrs::host::norm::RmsNorm;
use specrs::host::rope::{RopeTable, Rotary, rope_attention};

/// Sizes of layers.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    kv: usize,
    group: usize,
    dim: usize,
    hidden: usize,
    inner: usize,
    normed: bool,
    cap: Option<f32>,
}

fn sizes() -> impl Strategy<Value = Sizes> {
    let dim = prop_oneof![Just(8usize), Just(16), Just(64)];
    let cap = prop_oneof![Just(None), Just(Some(5.0))];
    (1usize..=2, 1usize..=3, dim, 1usize..=70, 1usize..=50, any::<bool>(), cap)
        .prop_map(|(kv, group, dim, hidden, inner, normed, cap)| Sizes { kv, group, dim, hidden, inner, normed, cap })
}

fn linear(n: usize, k: usize, seed: u64, gated: bool) -> Arc<PackedLinear> {
    let (weight, bias) = (noise(n * k, seed), noise(n, seed ^ 5));
    let make = if gated { PackedLinear::new_gated } else { PackedLinear::new };
    Arc::new(make(Weight::F32(&weight), n, k, Some(&bias), Storage::F32).unwrap())
}

fn norm(n: usize, seed: u64) -> NormWeight {
    NormWeight { weight: noise(n, seed), eps: 1e-5 }
}

fn layer(s: Sizes, rope: &Arc<RopeTable>, seed: u64) -> DecoderLayer {
    let heads = s.kv * s.group;
    let of_heads = |seed| s.normed.then(|| norm(s.dim, seed));
    DecoderLayer {
        norm: norm(s.hidden, seed),
        qkv: linear((heads + 2 * s.kv) * s.dim, s.hidden, seed ^ 1, false),
        tail: Arc::new(LayerTail {
            o: linear(s.hidden, heads * s.dim, seed ^ 2, false),
            norm: norm(s.hidden, seed ^ 3),
            gate_up: linear(2 * s.inner, s.hidden, seed ^ 4, true),
            down: linear(s.hidden, s.inner, seed ^ 6, false),
            heads,
            rope: rope.clone(),
            q_norm: of_heads(seed ^ 7),
            k_norm: of_heads(seed ^ 8),
            scores: Scores { scale: 0.3, cap: s.cap },
        }),
    }
}

fn of(norm: &NormWeight) -> RmsNorm<'_> {
    RmsNorm { weight: &norm.weight, eps: norm.eps }
}

/// The steps of a tail, each by a call of its own, for all rows.
fn steps(tail: &LayerTail, world: &mut World, at: usize, view: &AttnView<'_>, qkv: &[f32], x: &[f32]) -> Vec<f32> {
    let (q_norm, k_norm) = (tail.q_norm.as_ref().map(of), tail.k_norm.as_ref().map(of));
    let rotary = Rotary { table: &tail.rope, q_norm, k_norm };
    let rows = view.positions.len();
    let (mut attended, mut y) = (vec![0.0; rows * tail.o.k()], vec![0.0; x.len()]);
    rope_attention(&mut world.cache_mut(), at, view, qkv, tail.heads, &rotary, tail.scores, &mut attended).unwrap();
    tail.o.forward(&attended, None, Add::Rows(x), &mut y).unwrap();
    let mut act = vec![0.0; rows * tail.gate_up.out_width()];
    tail.gate_up.forward_swiglu(&y, Some(of(&tail.norm)), &mut act).unwrap();
    let mut out = vec![0.0; x.len()];
    tail.down.forward(&act, None, Add::Rows(&y), &mut out).unwrap();
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn layers_have_the_bits_of_their_steps(
        s in sizes(),
        half in any::<bool>(),
        counts in (1usize..=9, 1usize..=5),
        in_place in any::<bool>(),
        wanted in proptest::collection::vec(0usize..100, 0..6),
        seed in any::<u64>(),
    ) {
        let rope = Arc::new(RopeTable::new(&[1.0, 0.1, 0.01, 0.002], 64, 1.0).unwrap());
        let layers = [layer(s, &rope, seed), layer(s, &rope, seed ^ 99)];
        let new = || World::new(2, 32, 4, s.kv, s.dim, half, seed);
        let (table, mut world, mut plain) = (new(), new(), new());
        let mut batch = Batch::new(1);
        batch.tree(&table, 0, 0, &vec![0; counts.0]);
        batch.tree(&table, 1, 0, &vec![0; counts.1]);
        let (view, rows) = (batch.view(&table), counts.0 + counts.1);

        let x = noise(rows * s.hidden, seed ^ 10);
        let got = guarded(x.len(), |out| {
            if in_place {
                out.copy_from_slice(&x);
            }
            decoder_layers(&layers, &mut world.cache_mut(), 0, &view, (!in_place).then_some(&x), out).unwrap();
        });
        let (mut want, mut qkv) = (x, Vec::new());
        for (i, one) in layers.iter().enumerate() {
            qkv = vec![0.0; rows * one.qkv.n()];
            one.qkv.forward(&want, Some(of(&one.norm)), Add::Nothing, &mut qkv).unwrap();
            want = steps(&one.tail, &mut plain, i, &view, &qkv, &want);
        }
        prop_assert_eq!(bits(&got), bits(&want));
        prop_assert_eq!(world.snapshot(), plain.snapshot());

        let (x, tail) = (noise(rows * s.hidden, seed ^ 11), &layers[1].tail);
        let want = steps(tail, &mut plain, 1, &view, &qkv, &x);
        let picked: Vec<i64> = wanted.iter().map(|row| (row % rows) as i64).collect();
        let got = guarded(picked.len() * s.hidden, |out| {
            tail.forward(&mut world.cache_mut(), 1, &view, &qkv, Some(&x), Some(&picked), out).unwrap();
        });
        let want: Vec<f32> =
            picked.iter().flat_map(|&row| want[row as usize * s.hidden..][..s.hidden].to_vec()).collect();
        prop_assert_eq!(bits(&got), bits(&want));
        prop_assert_eq!(world.snapshot(), plain.snapshot());
        for bad in [-1, rows as i64] {
            let mut out = vec![0.0; s.hidden];
            let error = tail.forward(&mut world.cache_mut(), 1, &view, &qkv, Some(&x), Some(&[bad]), &mut out);
            let refused = matches!(error, Err(Error::OutOfRange { what: "row", .. }));
            prop_assert!(refused);
        }
    }

    #[test]
    fn a_head_has_the_bits_of_its_steps(
        s in sizes(),
        counts in (1usize..=5, 1usize..=5),
        vocab in 1usize..60,
        in_place in any::<bool>(),
        picks in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let rope = Arc::new(RopeTable::new(&[1.0, 0.1, 0.01, 0.002], 64, 1.0).unwrap());
        let (of_feature, embeds) = (layer(s, &rope, seed), layer(s, &rope, seed ^ 99));
        let head = Eagle3Layer {
            feature_norm: of_feature.norm.clone(),
            of_feature: of_feature.qkv.clone(),
            embedding_norm: embeds.norm.clone(),
            of_embedding: embeds.qkv.clone(),
            tail: of_feature.tail.clone(),
            norm: norm(s.hidden, seed ^ 20),
            lm_head: linear(vocab, s.hidden, seed ^ 21, false),
        };
        let new = || World::new(2, 32, 4, s.kv, s.dim, false, seed);
        let (table, mut world, mut plain) = (new(), new(), new());
        let mut batch = Batch::new(0);
        batch.extend(&table, 0, 0, counts.0);
        batch.extend(&table, 1, 0, counts.1);
        let (view, rows) = (batch.view(&table), counts.0 + counts.1);
        let (embedded, feature) = (noise(rows * s.hidden, seed ^ 22), noise(rows * s.hidden, seed ^ 23));
        let wanted = (picks && !in_place).then(|| vec![counts.0 as i64 - 1, rows as i64 - 1]);
        let count = wanted.as_ref().map_or(rows, Vec::len);
        let mut hidden = feature[..count * s.hidden].to_vec();
        let given = (!in_place).then_some(&feature[..]);
        let logits = guarded(count * vocab, |out| {
            let cache = &mut world.cache_mut();
            head.forward(cache, &view, &embedded, given, wanted.as_deref(), &mut hidden, out).unwrap();
        });

        let mut part = vec![0.0; rows * head.of_feature.n()];
        let mut qkv = part.clone();
        head.of_feature.forward(&feature, Some(of(&head.feature_norm)), Add::Nothing, &mut part).unwrap();
        head.of_embedding.forward(&embedded, Some(of(&head.embedding_norm)), Add::Rows(&part), &mut qkv).unwrap();
        let all = steps(&head.tail, &mut plain, 0, &view, &qkv, &feature);
        let picked = wanted.unwrap_or_else(|| (0..rows as i64).collect());
        let want: Vec<f32> =
            picked.iter().flat_map(|&row| all[row as usize * s.hidden..][..s.hidden].to_vec()).collect();
        let mut scores = vec![0.0; count * vocab];
        head.lm_head.forward(&want, Some(of(&head.norm)), Add::Nothing, &mut scores).unwrap();
        prop_assert_eq!(bits(&hidden), bits(&want));
        prop_assert_eq!(bits(&logits), bits(&scores));
        prop_assert_eq!(world.snapshot(), plain.snapshot());
    }

    #[test]
    fn rows_of_a_table_are_widened(
        vocab in 1usize..20, width in 1usize..40, tokens in proptest::collection::vec(0usize..100, 0..9), seed in any::<u64>(),
    ) {
        let table = noise(vocab * width, seed);
        let (b, f): (Vec<bf16>, Vec<f16>) =
            (table.iter().map(|&v| bf16::from_f32(v)).collect(), table.iter().map(|&v| f16::from_f32(v)).collect());
        let tokens: Vec<i64> = tokens.iter().map(|t| (t % vocab) as i64).collect();
        let at = |i: usize| tokens[i / width] as usize * width + i % width;
        let n = tokens.len() * width;
        let each: [(Weight<'_>, Vec<f32>); 3] = [
            (Weight::F32(&table), (0..n).map(|i| table[at(i)]).collect()),
            (Weight::Bf16(&b), (0..n).map(|i| b[at(i)].to_f32()).collect()),
            (Weight::F16(&f), (0..n).map(|i| f[at(i)].to_f32()).collect()),
        ];
        for (given, want) in each {
            let got = guarded(n, |out| embed(given, width, &tokens, out).unwrap());
            prop_assert_eq!(bits(&got), bits(&want));
            let short: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
            prop_assert_eq!(bits(&guarded(n, |out| embed(given, width, &short, out).unwrap())), bits(&want));
        }
        let mut out = vec![7.0; width];
        for bad in [-1, vocab as i64] {
            let error = embed(Weight::F32(&table), width, &[bad], &mut out);
            let refused = matches!(error, Err(Error::OutOfRange { what: "token", .. }));
            prop_assert!(refused);
        }
        prop_assert!(out.iter().all(|&v| v == 7.0));
        let error = embed(Weight::F32(&table), width, &[0i64, 0], &mut out);
        let refused = matches!(error, Err(Error::Mismatch { .. }));
        prop_assert!(refused);
    }
}
