//! Drafts without a head: `cargo bench --bench drafts`. `benches/README.md` has the goals: append 500 ns, look-up 200 ns a
//! token.
//!
//! The text has the statistics of source code, roughly: pieces of earlier text, now and then changed, and tokens of a
//! vocabulary of 8192 with a few frequent ones. Criterion's throughput is in tokens.
#![allow(clippy::expect_used)] // a bench stops at its first error

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use specrs::draft::automaton::{Automaton, Match};
use specrs::draft::{Calibration, MergeLimits, Proposal, RecycledTokens, SuffixDrafts, merge};

const VOCAB: u32 = 8192;

fn text(tokens: usize) -> Vec<u32> {
    let mut state = 7u64;
    let mut below = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % n as u64) as usize
    };
    let mut text: Vec<u32> = vec![1, 2, 3];
    while text.len() < tokens {
        if below(3) > 0 {
            let (at, n) = (below(text.len()), 1 + below(12));
            text.extend_from_within(at..(at + n).min(text.len()));
        } else {
            let common = 1 << below(14);
            text.push(below(common) as u32);
        }
    }
    text.truncate(tokens);
    text
}

fn automaton(c: &mut Criterion) {
    let mut group = c.benchmark_group("automaton");
    for tokens in [4096, 65_536] {
        let text = text(tokens);
        group.throughput(Throughput::Elements(tokens as u64));
        group.bench_function(BenchmarkId::new("append", tokens), |b| {
            b.iter(|| {
                let mut automaton = Automaton::new();
                text.iter().for_each(|&t| automaton.append(t));
                automaton
            });
        });
        let mut whole = Automaton::new();
        text.iter().for_each(|&t| whole.append(t));
        println!("automaton of {tokens} tokens: {:.1} bytes a token", whole.bytes() as f64 / tokens as f64);
        group.bench_function(BenchmarkId::new("look-up", tokens), |b| {
            b.iter(|| {
                let walk = |at: Match, &t: &u32| match whole.step(at, t) {
                    Some(next) if next.length() < 8 => next,
                    _ => Match::EMPTY,
                };
                text.iter().fold(Match::EMPTY, walk)
            });
        });
    }
}

fn proposals(c: &mut Criterion) {
    let mut group = c.benchmark_group("propose");
    let text = text(65_536);
    let mut suffix = SuffixDrafts::new(VOCAB, 64 << 20, &[]).expect("valid limits");
    suffix.prompt(&text).expect("tokens of the vocabulary");
    suffix.extend(&text[1000..1010]).expect("tokens of the vocabulary");
    let mut recycled = RecycledTokens::new(VOCAB, 1 << 20).expect("valid limits");
    let rows: Vec<&[u32]> = text.windows(9).map(|w| &w[1..]).collect();
    recycled.observe(&text[..rows.len()], &rows).expect("tokens of the vocabulary");
    for nodes in [16, 64] {
        group.bench_function(BenchmarkId::new("suffix", nodes), |b| b.iter(|| suffix.propose(nodes, 32)));
        group.bench_function(BenchmarkId::new("recycled", nodes), |b| b.iter(|| recycled.propose(text[9], nodes, 6)));
        let sources: [Proposal; 2] =
            [suffix.propose(nodes, 32).expect("limits"), recycled.propose(text[9], nodes, 6).expect("limits")];
        let (all, calibration) = (sources.each_ref(), Calibration::new(2).expect("two sources"));
        group.bench_function(BenchmarkId::new("merge", nodes), |b| {
            let limits = MergeLimits::new(nodes as u32, 32);
            b.iter(|| merge(1, VOCAB, black_box(&all), Some(&calibration), limits));
        });
    }
}

criterion_group!(benches, automaton, proposals);
criterion_main!(benches);
