//! CPU kernels at the shapes of the shipped model; `cargo bench --bench kernels`.
//!
//! Plain medians with a gap between calls rather than criterion: what matters is the latency of one call among
//! others, as in a decode pass, and not the throughput of a hot loop.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::hint::black_box;
use std::time::Instant;

use specrs::bounds::PageSize;
use specrs::host::attention::{AttnView, Scores};
use specrs::host::kv::{KvCacheMut, KvDataMut, KvShape};
use specrs::host::linear::{Add, PackedLinear, Storage, Weight};
use specrs::host::norm::RmsNorm;
use specrs::host::rope::{RopeTable, Rotary, rope_attention};
use specrs::host::threads::set_num_threads;

/// Median microseconds of `f`.
fn median(rounds: usize, mut f: impl FnMut()) -> f64 {
    for _ in 0..rounds / 4 + 1 {
        f();
    }
    let mut times: Vec<f64> = (0..rounds)
        .map(|_| {
            let t = Instant::now();
            f();
            t.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[rounds / 2]
}

fn noise(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0).collect()
}

fn linears() {
    println!("PackedLinear, us at 1/2/4/8/16 rows (copies rotated through 64 MB)");
    for storage in [Storage::Bf16, Storage::F16, Storage::F32] {
        for (n, k) in [(8192, 320), (448, 320), (1792, 320), (320, 896), (320, 320)] {
            let w = noise(n * k);
            let copies = (64 << 20) / (n * k * 4) + 1;
            let packed: Vec<_> = (0..copies)
                .map(|_| PackedLinear::new(Weight::F32(&w), n, k, None, storage).expect("shapes fit"))
                .collect();
            let mut times = Vec::new();
            for m in [1, 2, 4, 8, 16] {
                let (x, mut out, mut i) = (noise(m * k), vec![0.0; m * n], 0);
                times.push(median(400, || {
                    i = (i + 1) % copies;
                    packed[i].forward(black_box(&x), None, Add::Nothing, &mut out).expect("shapes fit");
                }));
            }
            println!("  {storage:?} {n:5} x {k:3}: {}", times.iter().map(|t| format!("{t:7.1}")).collect::<String>());
        }
    }
}

const LAYERS: usize = 12;
const HIDDEN: usize = 320;
const HEADS: usize = 5;
const DIM: usize = 64;
const FFN: usize = 896;
const VOCAB: usize = 8192;

/// A model of the shipped shape, random weights.
struct Model {
    layers: Vec<[PackedLinear; 4]>,
    head: PackedLinear,
    norm: Vec<f32>,
    rope: RopeTable,
}

/// Times of a pass's parts, in microseconds.
#[derive(Default, Clone, Copy)]
struct Parts {
    linear: f64,
    attention: f64,
    head: f64,
}

impl Model {
    fn new(storage: Storage) -> Self {
        let plain = |n, k| PackedLinear::new(Weight::F32(&noise(n * k)), n, k, None, storage).expect("shapes fit");
        let gated = |n, k| PackedLinear::new_gated(Weight::F32(&noise(n * k)), n, k, None, storage).expect("even");
        let qkv = (HEADS + 2) * DIM;
        let layer = || [plain(qkv, HIDDEN), plain(HIDDEN, HEADS * DIM), gated(2 * FFN, HIDDEN), plain(HIDDEN, FFN)];
        let inv_freq: Vec<f32> = (0..DIM / 2).map(|i| 10_000f32.powf(-(i as f32) / 32.0)).collect();
        Self {
            layers: (0..LAYERS).map(|_| layer()).collect(),
            head: plain(VOCAB, HIDDEN),
            norm: vec![1.0; HIDDEN],
            rope: RopeTable::new(&inv_freq, 4096, 1.0).expect("frequencies"),
        }
    }

    /// One pass over the rows of `view`.
    fn pass(&self, cache: &mut KvCacheMut<'_>, view: &AttnView<'_>, x: &[f32], logits: &mut [f32]) -> Parts {
        let m = view.positions.len();
        let mut parts = Parts::default();
        let mut h = x.to_vec();
        let mut qkv = vec![0.0; m * (HEADS + 2) * DIM];
        let (mut att, mut act) = (vec![0.0; m * HEADS * DIM], vec![0.0; m * FFN]);
        let norm = || Some(RmsNorm { weight: &self.norm, eps: 1e-5 });
        let rotary = Rotary { table: &self.rope, q_norm: None, k_norm: None };
        for (i, [qkv_w, o_w, gate_up, down]) in self.layers.iter().enumerate() {
            let t = Instant::now();
            qkv_w.forward(&h, norm(), Add::Nothing, &mut qkv).expect("shapes fit");
            let t1 = Instant::now();
            rope_attention(cache, i, view, &qkv, HEADS, &rotary, Scores::scaled(0.125), &mut att).expect("in bounds");
            let t2 = Instant::now();
            o_w.forward(&att, None, Add::Out, &mut h).expect("shapes fit");
            gate_up.forward_swiglu(&h, norm(), &mut act).expect("shapes fit");
            down.forward(&act, None, Add::Out, &mut h).expect("shapes fit");
            parts.attention += (t2 - t1).as_secs_f64() * 1e6;
            parts.linear += (t1 - t + t2.elapsed()).as_secs_f64() * 1e6;
        }
        let t = Instant::now();
        self.head.forward(&h, norm(), Add::Nothing, logits).expect("shapes fit");
        parts.head = t.elapsed().as_secs_f64() * 1e6;
        parts
    }
}

/// Plain decoding (1 row) and verification of trees (4 ..) at two context lengths.
fn passes() {
    println!("pass of 12 layers x 320, vocabulary 8192, f32 KV: us (products + attention + head)");
    for storage in [Storage::Bf16, Storage::F16, Storage::F32] {
        let model = Model::new(storage);
        let page = PageSize::new(16).expect("a power of two");
        let shape = KvShape { layers: LAYERS, slots: 16 * 128, kv_heads: 1, head_dim: DIM };
        let mut kv = noise(LAYERS * 2 * shape.slots * DIM);
        let table: Vec<i32> = (1..128).collect();
        for prefix in [200, 1000] {
            for m in [1, 4, 8, 16, 32, 64] {
                let mask: Vec<u64> = (0..m as u32).map(|j| 1 | (1 << (j / 2)) | (1 << j)).collect();
                let positions: Vec<i32> = (0..m).map(|j| prefix + i32::from(j > 0)).collect();
                let out_slots: Vec<i32> = (0..m).map(|j| 16 + prefix + j).collect();
                let view = AttnView {
                    qo_indptr: &[0, m],
                    prefix_lens: &[prefix],
                    first_pages: &[],
                    mask: if m == 1 { &[] } else { &mask },
                    mask_words: usize::from(m > 1),
                    rows: &[0],
                    table: &table,
                    row_pages: table.len(),
                    page,
                    positions: &positions,
                    out_slots: &out_slots,
                };
                let m = m as usize;
                let (x, mut logits) = (noise(m * HIDDEN), vec![0.0; m * VOCAB]);
                let mut cache = KvCacheMut::new(shape, KvDataMut::F32(&mut kv)).expect("shapes fit");
                let mut all: Vec<(f64, Parts)> = (0..300)
                    .map(|_| {
                        let t = Instant::now();
                        let parts = model.pass(&mut cache, &view, &x, &mut logits);
                        (t.elapsed().as_secs_f64() * 1e6, parts)
                    })
                    .collect();
                all.sort_by(|a, b| a.0.total_cmp(&b.0));
                let (total, p) = all[all.len() / 2];
                println!(
                    "  {storage:?} L {prefix:4} rows {m:2}: {total:7.0} ({:.0} + {:.0} + {:.0}), best {:.0}",
                    p.linear, p.attention, p.head, all[0].0
                );
            }
        }
    }
}

fn main() {
    let threads = std::env::var("SPECRS_BENCH_THREADS").ok().and_then(|t| t.parse().ok()).unwrap_or(2);
    set_num_threads(threads).expect("a small number");
    println!("{threads} threads");
    if std::env::args().all(|a| a != "pass") {
        linears();
    }
    passes();
}
