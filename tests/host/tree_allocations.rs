//! A warm round of drafting allocates nothing: counted in an allocator, over rounds of any batch up to the largest seen.

use crate::common::Mix;
use crate::common::counting::allocations;
use specrs::geometry::TreeShape;
use specrs::host::select::DraftBeams;
use specrs::round::TreeBatch;

const K: usize = 2;
const STEPS: usize = 4;
const VOCAB: usize = 100; // small enough for one thread: a region of threads has its own account
const MOST: usize = 5;

/// One round of `batch` requests, every step with the same logits.
fn round(beams: &mut DraftBeams, trees: &mut TreeBatch, logits: &[f32], batch: usize) {
    beams.start(&logits[..batch * VOCAB]).unwrap();
    for _ in 1..STEPS {
        beams.advance(&logits[..batch * K * VOCAB]).unwrap();
    }
    beams.finish(&[1; MOST][..batch], &[STEPS as u32; MOST][..batch], &[9; MOST][..batch], trees).unwrap();
}

#[test]
fn a_warm_round_allocates_nothing() {
    let shape = TreeShape::new(K as u32, STEPS as u32, 9).unwrap();
    let d2t: Vec<i64> = (0..VOCAB as i64).collect();
    let mut beams = DraftBeams::new(shape, 2 * VOCAB as u32, Some(&d2t)).unwrap();
    let mut trees = TreeBatch::default();
    let mut mix = Mix(3);
    let mut logits: Vec<f32> = (0..MOST * K * VOCAB).map(|_| mix.normal()).collect();
    assert!(allocations(|| round(&mut beams, &mut trees, &logits, MOST)) > 0, "the count works");
    for batch in [MOST, 1, 3, 0, MOST] {
        assert_eq!(allocations(|| round(&mut beams, &mut trees, &logits, batch)), 0, "batch {batch}");
        assert_eq!((trees.len(), trees.nodes()), (batch, 9 * batch));
    }
    // A fault, met before, allocates no more either.
    logits[VOCAB + 3] = f32::NAN;
    round(&mut beams, &mut trees, &logits, MOST);
    assert_eq!(allocations(|| round(&mut beams, &mut trees, &logits, MOST)), 0);
    assert_eq!((beams.faults().len(), trees.range(1).len()), (2, 1), "row 1: request 1 at the start, then request 0");
}
