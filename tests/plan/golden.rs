//! Plans of small cases worked by hand, as literals.

use crate::common::plan::{Batch as Case, geometry, pool};
use specrs::Error;
use specrs::geometry::{Geometry, Layout};
use specrs::plan::{Batch, Bucket, DraftMask, Lens, Native, Paths, Phase, Planner, Trees, WritesOnly};

fn planner(g: Geometry) -> Planner<Native> {
    Planner::new(g, Native).unwrap()
}

/// L = 7 and L = 2, P = 4; chunks of 3 and 1 tokens.
#[test]
fn extend_two_requests() {
    let g = geometry(3, 6, 16, 4, 4, 64, Layout::Dense);
    let c = Case::new(&g, &[7, 2], 5);
    let mut planner = planner(g);
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    let plan = c.pool.with_tables(|t| planner.extend(&t, &batch, &[3, 1])).unwrap().unwrap();
    assert_eq!((plan.phase(), plan.batch(), plan.queries(), plan.mask_words()), (Phase::Extend, 2, 4, 0));
    assert_eq!(plan.qo_indptr(), [0, 3, 4]);
    assert_eq!(plan.prefix_lens(), [7, 2]);
    assert_eq!(plan.positions(), [7, 8, 9, 2]);
    // Position 7 is offset 3 of page 1; 8 and 9 are offsets 0 and 1 of page 2; position 2 is offset 2 of page 0.
    let a: Vec<i32> = c.pool.pages(c.seqs[0]).unwrap().iter().map(|p| p.as_i32()).collect();
    let b: Vec<i32> = c.pool.pages(c.seqs[1]).unwrap().iter().map(|p| p.as_i32()).collect();
    assert_eq!(plan.out_slots(), [a[1] * 4 + 3, a[2] * 4, a[2] * 4 + 1, b[0] * 4 + 2]);
    assert!(plan.mask().is_empty());
    assert_eq!(plan.rows(), [c.seqs[0].row() as i32, c.seqs[1].row() as i32]);
    c.pool.with_tables(|t| plan.check_rows(&t)).unwrap().unwrap();
}

/// K = 2, S = 3, L = 5, step 1, P = 4: branches at 5 + 0*3 + 1 = 6 and 5 + 1*3 + 1 = 9, both at RoPE position 6.
#[test]
fn draft_step_with_ancestors_and_with_lanes() {
    let g = geometry(2, 3, 5, 4, 2, 64, Layout::Dense);
    let c = Case::new(&g, &[5], 9);
    let mut planner = planner(g);
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    // Both beams continue branch 1 of step 0 (slot 1*3 + 0 = 3); own slots 0*3+1 = 1 and 1*3+1 = 4.
    let bits = [1 << 3 | 1 << 1, 1 << 3 | 1 << 4];
    let plan = c.pool.with_tables(|t| planner.draft(&t, &batch, 1, DraftMask::Ancestors(&bits))).unwrap().unwrap();
    assert_eq!((plan.phase(), plan.mask_words()), (Phase::Draft { step: 1 }, 1));
    assert_eq!(plan.qo_indptr(), [0, 2]);
    assert_eq!(plan.prefix_lens(), [5]);
    assert_eq!(plan.positions(), [6, 6]);
    assert_eq!(plan.out_slots(), [c.slot(0, 6), c.slot(0, 9)]);
    assert_eq!(plan.mask(), [0b001010, 0b011000]);
    // Lane b has its own slots of steps 0 and 1: bits b*3 and b*3 + 1.
    let plan = c.pool.with_tables(|t| planner.draft(&t, &batch, 1, DraftMask::Lane)).unwrap().unwrap();
    assert_eq!(plan.mask(), [0b000011, 0b011000]);
}

/// The root has children 1 and 2, node 1 has child 3, and 3 has child 4; the second request verifies its root alone.
#[test]
fn verify_ragged_trees() {
    let g = geometry(3, 6, 16, 4, 4, 64, Layout::Dense);
    let c = Case::new(&g, &[7, 4], 3);
    let mut planner = planner(g);
    let trees = Trees { sizes: &[5, 1], parents: &[-1, 0, 0, 1, 3, -1] };
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    let plan = c.pool.with_tables(|t| planner.verify(&t, &batch, trees)).unwrap().unwrap();
    assert_eq!(plan.qo_indptr(), [0, 5, 6]);
    assert_eq!(plan.prefix_lens(), [7, 4]);
    assert_eq!(plan.positions(), [7, 8, 8, 9, 10, 4]); // L + depth, depths 0 1 1 2 3 and 0
    assert_eq!(plan.mask(), [0b00001, 0b00011, 0b00101, 0b01011, 0b11011, 0b1]);
    let slots: Vec<i32> = [7, 8, 9, 10, 11].map(|p| c.slot(0, p)).into_iter().chain([c.slot(1, 4)]).collect();
    assert_eq!(plan.out_slots(), slots);
}

/// A chain of 70 nodes needs two mask words: node 65 has bits 0..=65.
#[test]
fn verify_masks_of_two_words() {
    let g = geometry(4, 8, 70, 1, 1, 128, Layout::Dense);
    let c = Case::new(&g, &[3], 3);
    let parents: Vec<i32> = (0..70).map(|j| j - 1).collect();
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    let trees = Trees { sizes: &[70], parents: &parents };
    let plan = c.pool.with_tables(|t| planner(g).verify(&t, &batch, trees)).unwrap().unwrap();
    assert_eq!(plan.mask_words(), 2);
    assert_eq!(plan.mask()[2 * 63..2 * 66], [u64::MAX, 0, u64::MAX, 0b1, u64::MAX, 0b11]);
    assert_eq!(plan.positions()[69], 3 + 69);
}

/// P = 1: path 0, 2, 5 becomes an order of the row's columns, and no KV moves.
#[test]
fn commit_remaps_pages_of_one_token() {
    let g = geometry(3, 6, 16, 1, 4, 64, Layout::Dense);
    let mut c = Case::new(&g, &[7, 9], 3);
    let before = c.pool.pages(c.seqs[0]).unwrap();
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    let paths = Paths { sizes: &[3, 2], nodes: &[0, 2, 5, 0, 1] };
    let mut planner = planner(g);
    let commit = c.pool.with_tables(|t| planner.commit(&t, &batch, paths)).unwrap().unwrap();
    assert_eq!(commit.new_lens(), [10, 11]);
    assert!(commit.moves().is_empty());
    let remaps: Vec<_> = commit.remaps().map(|r| (r.seq, r.first, r.order.to_vec())).collect();
    assert_eq!(remaps, [(c.seqs[0], 7, vec![0, 2, 5])]); // the second path is in place already
    for r in commit.remaps() {
        c.lease.remap(r.seq, r.first, r.order).unwrap();
    }
    let after = c.pool.pages(c.seqs[0]).unwrap();
    assert_eq!(after[..7], before[..7]);
    assert_eq!(after[7..10], [before[7], before[9], before[12]]);
    assert_eq!(after.len(), before.len());
    c.lease.commit(commit.new_lens()).unwrap();
    c.pool.audit().unwrap();
}

/// P = 4: of path 0, 1, 3, 4 the first two are in place, then position L+3 moves to L+2 and L+4 to L+3, in this
/// order: the second move's destination is the first one's source.
#[test]
fn commit_moves_what_is_out_of_place() {
    let g = geometry(3, 6, 16, 4, 4, 64, Layout::Dense);
    let c = Case::new(&g, &[7, 9], 3);
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    let paths = Paths { sizes: &[4, 1], nodes: &[0, 1, 3, 4, 0] };
    let mut planner = planner(g);
    let commit = c.pool.with_tables(|t| planner.commit(&t, &batch, paths)).unwrap().unwrap();
    assert_eq!(commit.new_lens(), [11, 10]);
    assert_eq!(commit.remaps().count(), 0);
    assert_eq!(commit.moves().src(), [c.slot(0, 10), c.slot(0, 11)]);
    assert_eq!(commit.moves().dst(), [c.slot(0, 9), c.slot(0, 10)]);
}

/// The worked case of `geometry`: L = 7, P = 4, K = 3, S = 6: positions 4..6 go to 16..18 and 28..30.
#[test]
fn tail_copies_of_the_worked_case() {
    let g = geometry(3, 6, 16, 4, 4, 64, Layout::Holey);
    let c = Case::new(&g, &[7, 8], 3); // r = 0 for the second: nothing to copy
    let mut planner = Planner::new(g, WritesOnly).unwrap();
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    let copies = c.pool.with_tables(|t| planner.tail_copies(&t, &batch)).unwrap().unwrap();
    assert_eq!(copies.moves().src(), [4, 5, 6, 4, 5, 6].map(|p| c.slot(0, p)));
    assert_eq!(copies.moves().dst(), [16, 17, 18, 28, 29, 30].map(|p| c.slot(0, p)));
    // The branches themselves start at 7, 19 and 31.
    let plan = c.pool.with_tables(|t| planner.draft(&t, &batch, 0, DraftMask::Lane)).unwrap().unwrap();
    assert_eq!(plan.out_slots()[..3], [7, 19, 31].map(|p| c.slot(0, p)));
}

#[test]
fn padding_states_every_dead_lane() {
    let g = geometry(2, 3, 5, 4, 4, 64, Layout::Dense);
    let c = Case::new(&g, &[5, 6], 9);
    let mut planner = planner(g);
    let bucket = Bucket { batch: 4, queries: 9 };
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens)).padded(bucket);
    for round in 0..2 {
        // The second round reuses the buffers of the first, which held more live queries.
        let trees = if round == 0 {
            Trees { sizes: &[3, 5], parents: &[-1, 0, 1, -1, 0, 1, 2, 3] }
        } else {
            Trees { sizes: &[1, 1], parents: &[-1, -1] }
        };
        let n = trees.parents.len();
        let plan = c.pool.with_tables(|t| planner.verify(&t, &batch, trees)).unwrap().unwrap();
        assert_eq!((plan.batch(), plan.queries(), plan.live_batch(), plan.live_queries()), (4, 9, 2, n));
        assert_eq!(plan.rows()[2..], [-1, -1]);
        assert_eq!(plan.prefix_lens()[2..], [0, 0]);
        assert_eq!(plan.versions()[2..], [0, 0]);
        assert_eq!(plan.qo_indptr()[2..], [n as i32; 3]);
        for q in n..9 {
            assert_eq!((plan.positions()[q], plan.out_slots()[q], plan.mask()[q]), (0, 0, 0));
        }
    }
    assert_eq!(planner.bodies(), 1);
    let small = Batch::new(&c.seqs, Lens::Host(&c.lens)).padded(Bucket { batch: 2, queries: 7 });
    let trees = Trees { sizes: &[3, 5], parents: &[-1, 0, 1, -1, 0, 1, 2, 3] };
    let err = c.pool.with_tables(|t| planner.verify(&t, &small, trees)).unwrap().unwrap_err();
    assert!(matches!(err, Error::Capacity { what: "bucket queries", need: 8, have: 7, .. }), "{err}");
}

#[test]
fn no_request_is_a_batch() {
    let g = geometry(2, 3, 5, 4, 4, 64, Layout::Dense);
    let pool = pool(&g, 1);
    let mut planner = planner(g);
    for pad in [None, Some(Bucket { batch: 2, queries: 4 })] {
        let batch = Batch { seqs: &[], lens: Lens::Host(&[]), pad };
        let (b, q) = pad.map_or((0, 0), |p| (p.batch as usize, p.queries as usize));
        pool.with_tables(|t| {
            let plans = [
                planner.extend(&t, &batch, &[]).unwrap(),
                planner.draft(&t, &batch, 0, DraftMask::Lane).unwrap(),
                planner.draft(&t, &batch, 2, DraftMask::Ancestors(&[])).unwrap(),
                planner.verify(&t, &batch, Trees { sizes: &[], parents: &[] }).unwrap(),
            ];
            for plan in &plans {
                assert_eq!((plan.batch(), plan.queries(), plan.live_batch()), (b, q, 0));
                assert_eq!(plan.qo_indptr(), vec![0; b + 1]);
                let mut table = Vec::new();
                assert_eq!(plan.page_table(&t, &mut table).unwrap(), 0);
            }
            let commit = planner.commit(&t, &batch, Paths { sizes: &[], nodes: &[] }).unwrap();
            assert!(commit.moves().is_empty() && commit.new_lens().is_empty());
            assert!(planner.tail_copies(&t, &batch).unwrap().moves().is_empty());
        })
        .unwrap();
    }
}
