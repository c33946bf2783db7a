//! Draft selection, tree building, sampling and verification; `cargo bench --bench tree`.
#![allow(clippy::expect_used)] // a bench stops at its first error

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use specrs::geometry::TreeShape;
use specrs::host::sample::{Sampler, Scratch};
use specrs::host::select::{DraftBeams, TopK};
use specrs::host::threads::set_num_threads;
use specrs::host::verify::Verifier;
use specrs::round::{Accepts, SamplerConfig, TreeBatch};
use std::hint::black_box;
use std::time::Duration;

/// Logits with the spread of a language model's: normal, standard deviation 3, some tokens far above.
fn logits(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut unit = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..n)
        .map(|i| {
            let normal = (0..6).map(|_| unit()).sum::<f32>() - 3.0;
            normal * 4.2 + if i % 1000 == 7 { 8.0 } else { 0.0 }
        })
        .collect()
}

/// Log-softmax and top-8 of the rows of one draft step.
fn topk(c: &mut Criterion) {
    let mut group = c.benchmark_group("topk8");
    for (rows, vocab) in [(1, 8192), (8, 8192), (8, 32_000), (64, 32_000), (8, 128_256)] {
        let (logits, mut topk) = (logits(rows * vocab, 1), TopK::default());
        group.throughput(Throughput::Bytes((logits.len() * 4) as u64));
        group.bench_function(format!("{rows}x{vocab}"), |b| {
            b.iter(|| topk.compute(black_box(&logits), vocab, 8).expect("finite logits"));
        });
    }
}

/// A round's bookkeeping without its softmaxes (a draft vocabulary of K tokens), and the tree build alone.
fn trees(c: &mut Criterion) {
    let mut group = c.benchmark_group("trees");
    for batch in [1, 16] {
        for nodes in [16, 64] {
            let shape = TreeShape::new(8, 6, nodes).expect("a valid shape");
            let mut beams = DraftBeams::new(shape, 8, None).expect("a valid vocabulary");
            let (first, later) = (logits(batch * 8, 2), logits(batch * 64, 3));
            let mut trees = TreeBatch::default();
            let (roots, depths, sizes) = (vec![0; batch], vec![6; batch], vec![nodes; batch]);
            group.throughput(Throughput::Elements(batch as u64));
            group.bench_function(BenchmarkId::new("round", format!("B={batch} V={nodes}")), |b| {
                b.iter(|| {
                    beams.start(black_box(&first)).expect("finite logits");
                    (1..6).for_each(|_| beams.advance(black_box(&later)).expect("finite logits"));
                    beams.finish(&roots, &depths, &sizes, &mut trees).expect("operands that fit");
                });
            });
            group.bench_function(BenchmarkId::new("build", format!("B={batch} V={nodes}")), |b| {
                b.iter(|| beams.finish(&roots, &depths, black_box(&sizes), &mut trees).expect("operands that fit"));
            });
        }
    }
}

/// One token from a row of logits.
fn draws(c: &mut Criterion) {
    let base = SamplerConfig { temperature: 0.8, ..SamplerConfig::default() };
    let configs = [
        ("greedy", SamplerConfig::default()),
        ("penalised greedy", SamplerConfig { repetition_penalty: 1.1, ..SamplerConfig::default() }),
        ("temperature", base.clone()),
        ("top_k 50", SamplerConfig { top_k: 50, ..base.clone() }),
        ("top_p 0.9", SamplerConfig { top_p: 0.9, ..base.clone() }),
        ("top_k 50 top_p 0.9", SamplerConfig { top_k: 50, top_p: 0.9, ..base.clone() }),
        ("min_p 0.05", SamplerConfig { min_p: 0.05, ..base }),
    ];
    let mut group = c.benchmark_group("draw");
    for vocab in [8192, 32_000, 128_256] {
        let row = logits(vocab, 4);
        let history: Vec<i32> = (0..500).map(|i| i * 16).collect();
        for (name, config) in &configs {
            let sampler = Sampler::new(vocab as u32, &history, config.clone()).expect("a valid configuration");
            let (mut scratch, mut position) = (Scratch::default(), 0);
            group.throughput(Throughput::Bytes((vocab * 4) as u64));
            group.bench_function(BenchmarkId::new(*name, vocab), |b| {
                b.iter(|| {
                    position += 1;
                    sampler.draw(&mut scratch, black_box(&row), position, &[]).expect("finite logits")
                });
            });
        }
    }
}

/// Verification of a batch whose walks accept three drafts each.
fn verify(c: &mut Criterion) {
    let mut group = c.benchmark_group("verify");
    for (batch, vocab, nodes) in [(1, 8192, 16), (8, 8192, 16), (1, 128_256, 64), (16, 128_256, 16)] {
        // A chain of three good drafts, and bad ones under each of its nodes.
        let parents: Vec<i32> = (0..nodes).map(|i| if i < 4 { i - 1 } else { i % 4 }).collect();
        let mut rows = logits(batch * nodes as usize * vocab, 5);
        rows.chunks_mut(vocab).enumerate().for_each(|(row, x)| x[row % nodes as usize + 1] = 60.0);
        let tokens: Vec<i32> = (0..nodes).collect(); // node i of the chain is followed by token i + 1
        let trees = TreeBatch::from_parents(&vec![parents; batch], &vec![tokens; batch]).expect("valid trees");
        for (name, temperature) in [("greedy", 0.0), ("top_p 0.9", 0.8)] {
            let config = SamplerConfig { temperature, top_p: 0.9, ..SamplerConfig::default() };
            let sampler = Sampler::new(vocab as u32, &[], config).expect("a valid configuration");
            let (samplers, lens) = (vec![&sampler; batch], vec![100; batch]);
            let (mut verifier, mut accepts) = (Verifier::default(), Accepts::default());
            verifier.verify(&trees, &rows, &samplers, &lens, &mut accepts).expect("operands that fit");
            assert_eq!(accepts.path(0), [0, 1, 2, 3]);
            group.bench_function(BenchmarkId::new(name, format!("B={batch} vocab={vocab} V={nodes}")), |b| {
                b.iter(|| {
                    let rows = black_box(&rows);
                    verifier.verify(&trees, rows, &samplers, &lens, &mut accepts).expect("operands that fit");
                });
            });
        }
    }
}

fn all(c: &mut Criterion) {
    set_num_threads(2).expect("a small number"); // the machine of the committed results
    topk(c);
    trees(c);
    draws(c);
    verify(c);
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(600)).sample_size(30);
    targets = all
}
criterion_main!(benches);
