//! All host arrays of one round: the draft steps' plans, verify, commit and draft_extend, checks included.
//!
//! Rounds run on a live pool: pages in no order, a reservation before each round, a commit between verify and
//! draft_extend, so that the planner sees changed rows twice a round as in an engine. The pool's own work is not timed
//! here (goal 1, `benches/allocator.rs`), nor is the commit's remap, which is the pool's too.
//!
//! Goal 2 of `benches/README.md`: K = 8, S = 6, V = 64, L about 8k; <= 1.5 / 4 / 10 / 35 us at batch 1 / 16 / 64 / 256.
//! `cargo bench --bench planner`; `benches/bench_planner.py` runs it beside sglang's functions.
//!
//! The groups `format_*` are the same rounds with the arrays of another backend's format derived from each plan. Those
//! that list every branch's slots write O(B * K * L) of them a step: their throughput is that of writing memory.
#![allow(clippy::expect_used)]

#[path = "workload/planner.rs"]
mod workload;

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use specrs::geometry::Layout;
use specrs::plan::{
    AnyFormat, Batch, DraftMask, FlashAttention, FlashInfer, Lens, MaskForm, Native, Planner, Trees, Triton,
};
use workload::Round;

fn rounds(c: &mut Criterion) {
    for page_size in [1, 16, 64] {
        let mut group = c.benchmark_group(format!("round_p{page_size}"));
        for batch in [1, 16, 64, 256] {
            let mut round = Round::new(batch, page_size, Layout::Dense).expect("the shapes are in range");
            let mut planner = Planner::new(round.geometry, Native).expect("native takes the dense layout");
            group.bench_function(BenchmarkId::from_parameter(batch), |b| {
                let mut run = || round.run(&mut planner, false, false).expect("the round is in range").round;
                b.iter_custom(|n| (0..n).map(|_| run()).sum());
            });
        }
        group.finish();
    }
}

/// The parts of a round at batch 64 and 256, rows looked up before.
fn parts(c: &mut Criterion) {
    for batch in [64, 256] {
        let mut again = Round::new(batch, 1, Layout::Dense).expect("the shapes are in range");
        let mut group = c.benchmark_group(format!("parts_b{batch}"));
        let mut r = Round::new(batch, 1, Layout::Dense).expect("the shapes are in range");
        let mut planner = Planner::new(r.geometry, Native).expect("native takes the dense layout");
        let Round { pool, seqs, lens, bits, sizes, parents, path_sizes, .. } = &mut r;
        let b = Batch::new(seqs, Lens::Host(lens));
        group.bench_function("draft", |x| {
            x.iter(|| pool.with_tables(|t| black_box(planner.draft(&t, &b, 2, DraftMask::Ancestors(&bits[2])))));
        });
        group.bench_function("verify", |x| {
            x.iter(|| pool.with_tables(|t| black_box(planner.verify(&t, &b, Trees { sizes, parents }))));
        });
        group.bench_function("extend", |x| {
            x.iter(|| pool.with_tables(|t| black_box(planner.extend(&t, &b, path_sizes))));
        });
        // A round's commit is planned once: each is one of a new round, and looks its rows up.
        group.bench_function("commit", |x| {
            x.iter_custom(|n| (0..n).map(|_| again.run(&mut planner, false, true).expect("in range").commit).sum());
        });
        group.finish();
    }
}

/// Rounds with the arrays of other backends, in the layout that each reads.
fn formats(c: &mut Criterion) {
    let packed = FlashInfer { mask: MaskForm::Packed };
    let flash_attention = AnyFormat::FlashAttention(FlashAttention);
    let formats = [
        ("flashinfer", AnyFormat::FlashInfer(FlashInfer::default()), Layout::Dense),
        ("flashinfer_packed", AnyFormat::FlashInfer(packed), Layout::Dense),
        ("triton", AnyFormat::Triton(Triton), Layout::Dense),
        ("flash_attention", flash_attention, Layout::Dense),
        ("flash_attention_holey", flash_attention, Layout::Holey), // whole pages: lanes only
    ];
    for (name, format, layout) in formats {
        let mut group = c.benchmark_group(format!("format_{name}"));
        group.sample_size(20);
        for (page_size, batch) in [(1, 1), (1, 16), (16, 16), (64, 16), (64, 64)] {
            let mut round = Round::new(batch, page_size, layout).expect("the shapes are in range");
            let mut planner = Planner::new(round.geometry, format).expect("the arrays fit int32");
            let lanes = layout == Layout::Holey;
            let bytes = round.run(&mut planner, lanes, false).expect("the round is in range").bytes;
            group.throughput(Throughput::Bytes(bytes));
            group.bench_function(BenchmarkId::from_parameter(format!("p{page_size}_b{batch}")), |b| {
                let mut run = || round.run(&mut planner, lanes, false).expect("the round is in range").round;
                b.iter_custom(|n| (0..n).map(|_| run()).sum());
            });
        }
        group.finish();
    }
}

criterion_group!(benches, rounds, parts, formats);
criterion_main!(benches);
