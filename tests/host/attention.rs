//! Paged attention: close to a softmax in float64, and the same bits for the same logical keys in every phase.

use crate::common::host::{Batch, World, bits, guarded, noise};
use proptest::prelude::*;
use specrs::Error;
use specrs::host::attention::{Scores, attention, attention_reference};
use specrs::host::kv::{kv_write, kv_write_reference};
use specrs::host::norm::RmsNorm;
use specrs::host::rope::{RopeTable, Rotary, rope_attention, rope_write};
use specrs::host::threads::set_num_threads;

/// Heads of a model.
#[derive(Debug, Clone, Copy)]
struct Heads {
    kv: usize,
    group: usize,
    dim: usize,
    cap: Option<f32>,
}

impl Heads {
    fn scores(self) -> Scores {
        Scores { scale: 1.0 / (self.dim as f32).sqrt(), cap: self.cap }
    }
}

/// A sequence's queries, keys and values, by position.
struct Sequence {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Sequence {
    fn new(len: usize, h: Heads, seed: u64) -> Self {
        // Large queries make peaked softmaxes, whose maxima move from block to block.
        let q = noise(len * h.kv * h.group * h.dim, seed).iter().map(|v| v * 6.0).collect();
        Self { q, k: noise(len * h.kv * h.dim, seed ^ 11), v: noise(len * h.kv * h.dim, seed ^ 12) }
    }
}

/// Rows `which` of a tensor with `width` elements a row.
fn pick(x: &[f32], width: usize, which: impl Iterator<Item = usize>) -> Vec<f32> {
    which.flat_map(|i| x[i * width..(i + 1) * width].to_vec()).collect()
}

/// Put the KV of tokens `tokens` of a sequence at positions `at..` of a row.
fn store(world: &mut World, row: usize, at: usize, s: &Sequence, tokens: impl Iterator<Item = usize> + Clone) {
    let width = world.shape.token();
    let slots: Vec<i32> = tokens.clone().enumerate().map(|(i, _)| world.slot(row, at + i)).collect();
    let (k, v) = (pick(&s.k, width, tokens.clone()), pick(&s.v, width, tokens));
    kv_write(&mut world.cache_mut(), 1, &slots, &[], &k, &v).unwrap();
}

fn run(world: &World, batch: &Batch, q: &[f32], h: Heads) -> Vec<f32> {
    guarded(q.len(), |out| {
        attention(&world.cache(), 1, &batch.view(world), q, h.kv * h.group, h.scores(), out).unwrap();
    })
}

fn heads() -> impl Strategy<Value = Heads> {
    let dim = prop_oneof![Just(64usize), Just(128), Just(8), Just(72), Just(16), Just(80)];
    let cap = prop_oneof![Just(None), Just(Some(50.0)), Just(Some(0.3))];
    (1usize..=3, prop_oneof![1usize..=8, Just(17)], dim, cap).prop_map(|(kv, group, dim, cap)| Heads {
        kv,
        group,
        dim,
        cap,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn close_to_a_softmax_in_float64(
        h in heads(),
        page in prop_oneof![Just(1u32), Just(4), Just(16), Just(64)],
        half in any::<bool>(),
        masked in any::<bool>(),
        requests in prop::collection::vec((0usize..300, 0usize..20, any::<u64>()), 0..4),
        threads in 1usize..=4,
        seed in any::<u64>(),
    ) {
        set_num_threads(threads).unwrap();
        let mut world = World::new(requests.len().max(1), 400, page, h.kv, h.dim, half, seed);
        let mut batch = Batch::new(usize::from(masked));
        for (row, &(prefix, count, bits)) in requests.iter().enumerate() {
            let s = Sequence::new(prefix + 64, h, seed ^ row as u64);
            store(&mut world, row, 0, &s, 0..prefix + 64);
            if masked {
                // Any masks, empty ones too: not only trees.
                for j in 0..count {
                    batch.mask.push(bits.rotate_left(j as u32 * 7) & bits.rotate_right(j as u32 * 3 + 1));
                    batch.positions.push(0);
                    batch.out_slots.push(0);
                }
                batch.close(row, prefix);
            } else {
                batch.extend(&world, row, prefix, count);
            }
        }
        // Two dead queries.
        batch.positions.extend([0, 0]);
        batch.out_slots.extend([0, 0]);
        batch.mask.extend(vec![u64::MAX; 2 * batch.mask_words]);
        let n = batch.positions.len() * h.kv * h.group * h.dim;
        let q: Vec<f32> = noise(n, seed ^ 5).iter().map(|v| v * 4.0).collect();
        let got = run(&world, &batch, &q, h);
        let want = guarded(n, |out| {
            attention_reference(&world.cache(), 1, &batch.view(&world), &q, h.kv * h.group, h.scores(), out).unwrap();
        });
        for (i, (g, w)) in got.iter().zip(&want).enumerate() {
            prop_assert!((g - w).abs() < 4e-6, "element {i}: {g} {w}");
        }
        prop_assert!(got[n - 2 * h.kv * h.group * h.dim..].iter().all(|&v| v == 0.0));
    }

    /// A row that is attended from a later page on is one that begins there; what stands before is never read: here it
    /// is NaN.
    #[test]
    fn a_request_may_begin_at_a_later_page(
        h in heads(),
        page in prop_oneof![Just(1u32), Just(4), Just(16), Just(64)],
        masked in any::<bool>(),
        (prefix, skipped) in (0usize..600).prop_flat_map(|n| (Just(n), 0..=n)),
        count in 1usize..20,
        threads in 1usize..=4,
        seed in any::<u64>(),
    ) {
        set_num_threads(threads).unwrap();
        let first = skipped / page as usize;
        let before = first * page as usize;
        let s = Sequence::new(prefix + 64, h, seed);
        let batch_of = |world: &World, prefix: usize| {
            let mut batch = Batch::new(usize::from(masked));
            if masked {
                batch.tree(world, 0, prefix, &(0..count).map(|j| j.saturating_sub(1) / 2).collect::<Vec<_>>());
            } else {
                batch.extend(world, 0, prefix, count);
            }
            batch
        };
        let (mut late, mut whole) = (World::new(1, 700, page, h.kv, h.dim, false, seed),
            World::new(1, 700, page, h.kv, h.dim, false, seed ^ 1));
        store(&mut late, 0, before, &s, before..prefix + 64);
        store(&mut whole, 0, 0, &s, before..prefix + 64);
        let mut begins = batch_of(&late, prefix);
        begins.first_pages = vec![first as u32];
        let q: Vec<f32> = noise(count * h.kv * h.group * h.dim, seed ^ 5).iter().map(|v| v * 4.0).collect();
        prop_assert_eq!(bits(&run(&late, &begins, &q, h)), bits(&run(&whole, &batch_of(&whole, prefix - before), &q, h)));
    }

    /// Plain decoding, chunked prefill and verification give a token the same bits, whatever else differs.
    #[test]
    fn a_token_has_the_same_bits_in_every_phase(
        h in heads(),
        half in any::<bool>(),
        len in 1usize..420,
        cuts in prop::collection::vec(1usize..90, 1..12),
        pages in prop::collection::vec(prop_oneof![Just(1u32), Just(4), Just(16), Just(64)], 3),
        threads in prop::collection::vec(1usize..=4, 3),
        tree in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
        seed in any::<u64>(),
    ) {
        let s = Sequence::new(len, h, seed);
        let width = h.kv * h.group * h.dim;

        // Decoding one token at a time: only positions up to its own hold anything but NaN.
        set_num_threads(threads[0]).unwrap();
        let mut world = World::new(1, len, pages[0], h.kv, h.dim, half, seed);
        let mut plain = Vec::new();
        for p in 0..len {
            store(&mut world, 0, p, &s, p..p + 1);
            if len - p > 40 && p % 13 != 0 {
                plain.push(Vec::new());
                continue;
            }
            let mut batch = Batch::new(0);
            batch.extend(&world, 0, p, 1);
            plain.push(bits(&run(&world, &batch, &s.q[p * width..(p + 1) * width], h)));
        }

        // In chunks, beside another request.
        set_num_threads(threads[1]).unwrap();
        let mut world = World::new(2, len + 100, pages[1], h.kv, h.dim, half, seed ^ 1);
        let other = Sequence::new(100, h, seed ^ 77);
        store(&mut world, 1, 0, &other, 0..100);
        let (mut at, mut cuts) = (0, cuts.iter().cycle());
        while at < len {
            let count = (*cuts.next().unwrap()).min(len - at);
            store(&mut world, 0, at, &s, at..at + count);
            let mut batch = Batch::new(0);
            batch.extend(&world, 1, 60, 7);
            batch.extend(&world, 0, at, count);
            let mut q = other.q[..7 * width].to_vec();
            q.extend(&s.q[at * width..(at + count) * width]);
            let out = run(&world, &batch, &q, h);
            for j in 0..count {
                if !plain[at + j].is_empty() {
                    prop_assert_eq!(&bits(&out[(7 + j) * width..(8 + j) * width]), &plain[at + j], "chunk at {}", at + j);
                }
            }
            at += count;
        }

        // The same tokens as a tree: nodes in any order below the root, each holding the token of its depth.
        set_num_threads(threads[2]).unwrap();
        let root = len - len.min(1 + tree.len() % 23);
        let (mut parents, mut depths) = (vec![0usize], vec![0usize]);
        for pick in &tree {
            let parent = pick.index(parents.len());
            if root + depths[parent] + 1 < len {
                parents.push(parent);
                depths.push(depths[parent] + 1);
            }
        }
        let mut world = World::new(2, len + 100, pages[2], h.kv, h.dim, half, seed ^ 2);
        store(&mut world, 1, 0, &other, 0..100);
        store(&mut world, 0, 0, &s, 0..root);
        store(&mut world, 0, root, &s, depths.iter().map(|d| root + d));
        let mut batch = Batch::new(2);
        batch.tree(&world, 0, root, &parents);
        batch.tree(&world, 1, 50, &[0, 0, 0, 1, 2, 2, 5]);
        let mut q = pick(&s.q, width, depths.iter().map(|d| root + d));
        q.extend(&other.q[..7 * width]);
        let out = run(&world, &batch, &q, h);
        for (j, d) in depths.iter().enumerate() {
            if !plain[root + d].is_empty() {
                prop_assert_eq!(&bits(&out[j * width..(j + 1) * width]), &plain[root + d], "node {} depth {}", j, d);
            }
        }
    }
}

#[test]
fn a_long_context_split_over_threads_is_the_same_and_close() {
    let h = Heads { kv: 1, group: 3, dim: 64, cap: None };
    let len = 131_072;
    let s = Sequence::new(len, h, 3);
    let mut world = World::new(1, len + 8, 64, h.kv, h.dim, true, 4);
    store(&mut world, 0, 0, &s, 0..len);
    let width = h.kv * h.group * h.dim;
    let mut batch = Batch::new(0);
    batch.extend(&world, 0, len - 1, 1);
    let q = &s.q[(len - 1) * width..];
    let mut seen = Vec::new();
    for threads in 1..=4 {
        set_num_threads(threads).unwrap();
        seen.push(run(&world, &batch, q, h));
    }
    assert!(seen.iter().all(|o| bits(o) == bits(&seen[0])));
    let want = guarded(width, |out| {
        attention_reference(&world.cache(), 1, &batch.view(&world), q, 3, Scores::scaled(0.125), out).unwrap();
    });
    for (g, w) in seen[0].iter().zip(&want) {
        assert!((g - w).abs() < 1e-6, "{g} {w}");
    }
}

#[test]
fn an_empty_batch_and_empty_requests() {
    let h = Heads { kv: 2, group: 2, dim: 64, cap: None };
    let world = World::new(1, 16, 4, h.kv, h.dim, false, 1);
    assert!(run(&world, &Batch::new(0), &[], h).is_empty());
    assert!(run(&world, &Batch::new(1), &[], h).is_empty());
    let mut batch = Batch::new(1);
    batch.close(0, 5); // no queries
    batch.positions.push(0);
    batch.out_slots.push(0);
    batch.mask.push(0);
    batch.close(0, 0); // a query without keys
    assert!(run(&world, &batch, &[1.0; 256], h).iter().all(|v| v.to_bits() == 0));
}

#[test]
fn indices_out_of_bounds_are_named_and_nothing_is_written() {
    let h = Heads { kv: 1, group: 1, dim: 8, cap: None };
    let mut world = World::new(2, 16, 4, h.kv, h.dim, false, 1);
    let mut good = Batch::new(0);
    good.extend(&world, 0, 3, 1);
    good.extend(&world, 1, 9, 2);
    let mut out = [7.0f32; 24];
    let mut refused = |world: &World, batch: &Batch, buffer: &str, request: i64, index: i64, bound: i64| {
        let error =
            attention(&world.cache(), 1, &batch.view(world), &[1.0; 24], 1, Scores::scaled(1.0), &mut out).unwrap_err();
        match error {
            Error::OutOfBounds { kernel: "attention", buffer: b, request: r, index: i, bound: n, .. } => {
                assert_eq!((b, r, i, n), (buffer, request, index, bound));
            }
            other => panic!("{other}"),
        }
        assert_eq!(out, [7.0; 24]);
    };
    let mut b = good.clone();
    b.prefix_lens[1] = 15;
    refused(&world, &b, "page table row", 1, 4, 4);
    let mut b = good.clone();
    b.first_pages = vec![0, 3]; // behind the page of the last position that all attend
    refused(&world, &b, "first page", 1, 3, 3);
    b.first_pages = vec![0, 2];
    b.prefix_lens[1] = 15;
    refused(&world, &b, "page table row", 1, 2, 2);
    let mut b = good.clone();
    b.rows[0] = 2;
    refused(&world, &b, "page table rows", 0, 2, 2);
    let mut b = good.clone();
    b.prefix_lens[0] = -1;
    refused(&world, &b, "prefix length", 0, -1, i64::from(i32::MAX));
    let mut b = good.clone();
    b.qo_indptr[2] = 4;
    refused(&world, &b, "queries", 1, 4, 4);
    let mut b = good.clone();
    b.qo_indptr[1] = 3;
    b.qo_indptr[2] = 2;
    refused(&world, &b, "qo_indptr", 1, -1, 4);
    // The last bit of a mask is one position behind the row, at a page of its own.
    let mut b = Batch::new(1);
    b.positions.extend([15; 3]);
    b.out_slots.extend([0; 3]);
    b.mask.extend([1, 2, 1]);
    b.close(0, 15);
    refused(&world, &b, "page table row", 0, 4, 4);
    // A row that only queries without keys name is checked too.
    let mut b = Batch::new(1);
    b.positions.extend([0; 3]);
    b.out_slots.extend([0; 3]);
    b.mask.extend([0; 3]);
    b.close(77, 0);
    refused(&world, &b, "page table rows", 0, 77, 2);
    world.table[5] = 9;
    refused(&world, &good, "pages", 1, 9, 9);
    assert!(attention(&world.cache(), 2, &Batch::new(0).view(&world), &[], 1, Scores::scaled(1.0), &mut []).is_err());
    assert!(attention(&world.cache(), 0, &Batch::new(0).view(&world), &[], 0, Scores::scaled(1.0), &mut []).is_err());
}

/// The fused step against its parts, done plainly.
#[test]
fn rope_attention_is_norm_rotation_write_and_attention() {
    for (half, rotary_dim, normed) in [(false, 64, true), (true, 64, false), (false, 32, true)] {
        let h = Heads { kv: 2, group: 3, dim: 64, cap: None };
        let (heads, d) = (h.kv * h.group, h.dim);
        let width = (heads + 2 * h.kv) * d;
        let inv_freq: Vec<f32> = (0..rotary_dim / 2).map(|i| 10_000f32.powf(-(i as f32) / 20.0)).collect();
        let table = RopeTable::new(&inv_freq, 200, 1.25).unwrap();
        assert_eq!((table.positions(), table.rotary_dim()), (200, rotary_dim));
        let (qw, kw) = (noise(d, 1), noise(d, 2));
        let norm = |w| normed.then_some(RmsNorm { weight: w, eps: 1e-6 });
        let rotary = Rotary { table: &table, q_norm: norm(&qw), k_norm: norm(&kw) };
        let mut world = World::new(2, 96, 16, h.kv, d, half, 3);
        let mut plain = World::new(2, 96, 16, h.kv, d, half, 3);
        let mut bare = World::new(2, 96, 16, h.kv, d, half, 3);
        for (seed, prefixes, count) in [(10, [0, 0], 41), (11, [41, 41], 5), (12, [46, 46], 1)] {
            let mut batch = Batch::new(0);
            for (row, prefix) in prefixes.into_iter().enumerate() {
                batch.extend(&world, row, prefix, count);
            }
            let rows = 2 * count;
            let qkv = noise(rows * width, seed);
            let got = guarded(rows * heads * d, |out| {
                let view = batch.view(&plain); // the same table
                rope_attention(&mut world.cache_mut(), 0, &view, &qkv, heads, &rotary, Scores::scaled(0.125), out)
                    .unwrap();
            });

            let turn = |x: &[f32], w: Option<&[f32]>, p: i32| -> Vec<f32> {
                let mut y: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
                if let Some(w) = w {
                    let scale = (y.iter().map(|v| v * v).sum::<f64>() / d as f64 + 1e-6).sqrt();
                    y.iter_mut().zip(w).for_each(|(v, &w)| *v *= f64::from(w) / scale);
                }
                let mut z = y.clone();
                for i in 0..rotary_dim / 2 {
                    let (s, c) = f64::from(p as f32 * inv_freq[i]).sin_cos();
                    let j = i + rotary_dim / 2;
                    z[i] = 1.25 * (y[i] * c - y[j] * s);
                    z[j] = 1.25 * (y[j] * c + y[i] * s);
                }
                z.into_iter().map(|v| v as f32).collect()
            };
            let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
            for (row, &p) in qkv.chunks_exact(width).zip(&batch.positions) {
                for (i, x) in row.chunks_exact(d).enumerate() {
                    match i {
                        i if i < heads => q.extend(turn(x, normed.then_some(&qw[..]), p)),
                        i if i < heads + h.kv => k.extend(turn(x, normed.then_some(&kw[..]), p)),
                        _ => v.extend(x),
                    }
                }
            }
            kv_write_reference(&mut plain.cache_mut(), 0, &batch.out_slots, &k, &v).unwrap();
            let want = guarded(rows * heads * d, |out| {
                attention_reference(&plain.cache(), 0, &batch.view(&plain), &q, heads, Scores::scaled(0.125), out)
                    .unwrap();
            });
            // bf16 keys may round differently where the rotation's last bit differs.
            let limit = if half { 2e-2 } else { 2e-6 };
            for (g, w) in got.iter().zip(&want) {
                assert!((g - w).abs() < limit, "{g} {w}");
            }
            // Without its queries, a row leaves the same bits behind.
            let kv: Vec<f32> = qkv.chunks_exact(width).flat_map(|row| &row[heads * d..]).copied().collect();
            rope_write(&mut bare.cache_mut(), 0, &batch.view(&plain), &kv, &rotary).unwrap();
            assert_eq!(bare.snapshot(), world.snapshot());
        }
        // A position past the table, a slot past the cache: refused, nothing written.
        let before = world.snapshot();
        let mut batch = Batch::new(0);
        batch.extend(&world, 0, 46, 2);
        let mut out = [7.0; 2 * 384];
        let qkv = vec![1.0; 2 * width];
        let kv = vec![1.0; 2 * 2 * h.kv * d];
        batch.positions[1] = 200; // the last row's
        let error = rope_attention(
            &mut world.cache_mut(),
            0,
            &batch.view(&plain),
            &qkv,
            heads,
            &rotary,
            Scores::scaled(0.125),
            &mut out,
        );
        assert!(matches!(error, Err(Error::OutOfBounds { buffer: "rope table", index: 200, bound: 200, .. })));
        let error = rope_write(&mut world.cache_mut(), 0, &batch.view(&plain), &kv, &rotary);
        assert!(matches!(error, Err(Error::OutOfBounds { kernel: "rope_write", buffer: "rope table", .. })));
        batch.positions[1] = 47;
        batch.out_slots[1] = world.shape.slots as i32;
        let error = rope_attention(
            &mut world.cache_mut(),
            0,
            &batch.view(&plain),
            &qkv,
            heads,
            &rotary,
            Scores::scaled(0.125),
            &mut out,
        );
        assert!(matches!(error, Err(Error::OutOfBounds { buffer: "kv slots", request: 0, step: 1, .. })));
        let error = rope_write(&mut world.cache_mut(), 0, &batch.view(&plain), &kv, &rotary);
        assert!(matches!(error, Err(Error::OutOfBounds { buffer: "kv slots", request: 0, step: 1, .. })));
        assert!(rope_write(&mut world.cache_mut(), 0, &batch.view(&plain), &kv[1..], &rotary).is_err());
        assert_eq!(world.snapshot(), before);
        assert_eq!(out, [7.0; 2 * 384]);
    }
}
