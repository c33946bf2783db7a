//! CPU kernels at the shapes of the shipped model; `cargo bench --bench kernels`.
//!
//! Plain medians with a gap between calls rather than criterion: what matters is the latency of one call among
//! others, as in a decode pass, and not the throughput of a hot loop.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::hint::black_box;
use std::time::Instant;

use specrs::host::linear::{Add, PackedLinear, Storage, Weight};
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
    for storage in [Storage::Bf16, Storage::F32] {
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

fn main() {
    let threads = std::env::var("SPECRS_BENCH_THREADS").ok().and_then(|t| t.parse().ok()).unwrap_or(2);
    set_num_threads(threads).expect("a small number");
    println!("{threads} threads");
    linears();
}
