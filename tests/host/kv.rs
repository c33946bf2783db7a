//! KV write and move: against plain loops, and all or nothing.

use crate::common::host::{World, noise};
use proptest::prelude::*;
use specrs::Error;
use specrs::host::kv::{KvCache, KvData, KvShape, kv_move, kv_write, kv_write_reference};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn write_equals_its_reference(
        half in any::<bool>(), layer in 0usize..2, heads in 1usize..4, dim in 1usize..20,
        picks in prop::collection::vec(0usize..40, 0..30), seed in any::<u64>(),
    ) {
        let mut fast = World::new(1, 40, 4, heads, dim, half, seed);
        let mut plain = World::new(1, 40, 4, heads, dim, half, seed);
        let slots: Vec<i32> = picks.iter().map(|&p| fast.slot(0, p)).collect();
        let (k, v) = (noise(slots.len() * heads * dim, seed), noise(slots.len() * heads * dim, seed ^ 9));
        kv_write(&mut fast.cache_mut(), layer, &slots, &[0, slots.len() as i32], &k, &v).unwrap();
        kv_write_reference(&mut plain.cache_mut(), layer, &slots, &k, &v).unwrap();
        prop_assert_eq!(fast.snapshot(), plain.snapshot());
    }

    #[test]
    fn moves_happen_in_order_in_every_layer(
        half in any::<bool>(), heads in 1usize..3, dim in 1usize..9,
        moves in prop::collection::vec((0i32..44, 0i32..44), 0..30), seed in any::<u64>(),
    ) {
        let mut world = World::new(1, 40, 4, heads, dim, half, seed);
        let width = heads * dim;
        let every: Vec<i32> = (0..44).collect();
        for layer in 0..2 {
            let (k, v) = (noise(44 * width, seed ^ layer), noise(44 * width, seed ^ layer ^ 99));
            kv_write(&mut world.cache_mut(), layer as usize, &every, &[], &k, &v).unwrap();
        }
        let mut want = world.snapshot();
        for plane in want.chunks_exact_mut(44 * width) {
            for &(s, d) in &moves {
                let row = plane[s as usize * width..][..width].to_vec();
                plane[d as usize * width..][..width].copy_from_slice(&row);
            }
        }
        let (src, dst): (Vec<i32>, Vec<i32>) = moves.into_iter().unzip();
        kv_move(&mut world.cache_mut(), &src, &dst).unwrap();
        prop_assert_eq!(world.snapshot(), want);
    }
}

#[test]
fn a_slot_out_of_bounds_is_named_and_nothing_is_written() {
    let mut world = World::new(1, 40, 4, 2, 8, false, 1);
    let before = world.snapshot();
    let x = noise(4 * 16, 1);
    // Row 3 is the second row of request 1 (request 0 has rows 0 and 1).
    for bad in [-1, 44] {
        let error = kv_write(&mut world.cache_mut(), 0, &[1, 2, 3, bad], &[0, 2, 4], &x, &x).unwrap_err();
        let want = Error::OutOfBounds {
            kernel: "kv_write",
            buffer: "kv slots",
            request: 1,
            step: 1,
            index: i64::from(bad),
            bound: 44,
        };
        assert_eq!(error, want);
        assert!(kv_move(&mut world.cache_mut(), &[1, bad], &[2, 3]).is_err());
        assert!(kv_move(&mut world.cache_mut(), &[1, 2], &[2, bad]).is_err());
    }
    assert!(kv_write(&mut world.cache_mut(), 2, &[1, 2, 3, 4], &[], &x, &x).is_err());
    assert!(kv_write(&mut world.cache_mut(), 0, &[1, 2, 3], &[], &x, &x).is_err());
    assert!(kv_move(&mut world.cache_mut(), &[1], &[2, 3]).is_err());
    assert_eq!(world.snapshot(), before);
    let shape = KvShape { layers: 1, slots: 2, kv_heads: 1, head_dim: 8 };
    assert!(KvCache::new(shape, KvData::F32(&[0.0; 31])).is_err());
    let shape = KvShape { layers: usize::MAX, slots: usize::MAX, kv_heads: 1, head_dim: 8 };
    assert!(KvCache::new(shape, KvData::F32(&[])).is_err());
}
