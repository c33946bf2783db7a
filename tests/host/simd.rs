//! Every instruction set gives the same bits: the kernels run once in a process for each, which print digests.

use std::process::Command;

use crate::common::host::{Batch, World, guarded, noise};
use specrs::host::attention::{Scores, attention};
use specrs::host::kv::kv_write;
use specrs::host::linear::{Add, PackedLinear, Storage, Weight};
use specrs::host::norm::RmsNorm;
use specrs::host::rope::{RopeTable, Rotary, rope_attention};

/// Order-dependent digest of the bits (FNV-1a).
fn digest(x: &[f32]) -> u64 {
    x.iter().fold(0xcbf2_9ce4_8422_2325, |h, v| (h ^ u64::from(v.to_bits())).wrapping_mul(0x0100_0000_01b3))
}

/// A line for each kernel and shape.
fn digests() -> Vec<String> {
    let mut lines = Vec::new();
    for (n, k) in [(96, 64), (70, 33), (320, 127)] {
        let (weight, norm) = (noise(n * k, 1), noise(k, 2));
        for storage in [Storage::Bf16, Storage::F16, Storage::F32] {
            let plain = PackedLinear::new(Weight::F32(&weight), n, k, Some(&noise(n, 3)), storage).unwrap();
            let gated = PackedLinear::new_gated(Weight::F32(&weight), n, k, None, storage).unwrap();
            for m in 1..=17 {
                let (x, residual) = (noise(m * k, 4), noise(m * n, 5));
                let norm = (m % 2 == 0).then_some(RmsNorm { weight: &norm, eps: 1e-6 });
                let y = guarded(m * n, |o| plain.forward(&x, norm, Add::Rows(&residual), o).unwrap());
                let z = guarded(m * n / 2, |o| gated.forward_swiglu(&x, norm, o).unwrap());
                lines.push(format!("linear {storage:?} {m}x{n}x{k} {:x} {:x}", digest(&y), digest(&z)));
            }
        }
    }
    for (group, dim, half) in [(5, 64, false), (3, 128, true), (17, 72, false), (1, 8, true)] {
        let mut world = World::new(1, 400, 16, 2, dim, half, 6);
        let slots: Vec<i32> = (0..350).map(|p| world.slot(0, p)).collect();
        let (k, v) = (noise(350 * 2 * dim, 7), noise(350 * 2 * dim, 8));
        for layer in 0..2 {
            kv_write(&mut world.cache_mut(), layer, &slots, &[], &k, &v).unwrap();
        }
        let heads = 2 * group;
        let mut tree = Batch::new(1);
        tree.tree(&world, 0, 300, &[0, 0, 0, 1, 2, 4, 3, 6]);
        let mut chunk = Batch::new(0);
        chunk.extend(&world, 0, 250, 37);
        for batch in [&tree, &chunk] {
            let rows = batch.positions.len();
            let q: Vec<f32> = noise(rows * heads * dim, 9).iter().map(|v| v * 5.0).collect();
            let view = batch.view(&world);
            let y =
                guarded(q.len(), |o| attention(&world.cache(), 1, &view, &q, heads, Scores::scaled(0.2), o).unwrap());
            lines.push(format!("attention {group} {dim} {:x}", digest(&y)));
        }
        let table = RopeTable::new(&noise(dim / 2, 10), 400, 1.0).unwrap();
        let weight = noise(dim, 11);
        let norm = Some(RmsNorm { weight: &weight, eps: 1e-6 });
        let rotary = Rotary { table: &table, q_norm: norm, k_norm: norm };
        let qkv = noise(37 * (heads + 4) * dim, 12);
        let copy = World::new(1, 400, 16, 2, dim, half, 6); // the same page table
        let view = chunk.view(&copy);
        let y = guarded(37 * heads * dim, |o| {
            rope_attention(&mut world.cache_mut(), 0, &view, &qkv, heads, &rotary, Scores::scaled(0.2), o).unwrap();
        });
        lines.push(format!("rope {group} {dim} {:x}", digest(&y)));
    }
    lines
}

#[test]
fn print_digests() {
    digests().iter().for_each(|line| println!("digest {line}"));
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let here: Vec<String> = digests().iter().map(|line| format!("digest {line}")).collect();
    for simd in ["scalar", "avx2"] {
        let done = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "simd::print_digests", "--nocapture"])
            .env("SPECRS_SIMD", simd)
            .output()
            .unwrap();
        let text = String::from_utf8(done.stdout).unwrap();
        // The harness may put its own words before the first of them.
        let there: Vec<&str> = text.lines().filter_map(|l| l.find("digest ").map(|at| &l[at..])).collect();
        assert_eq!(there.len(), here.len(), "{simd}: {text}");
        for (there, here) in there.iter().zip(&here) {
            assert_eq!(there, here, "{simd}");
        }
    }
}
