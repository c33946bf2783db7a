//! The slot-list formats, `flashinfer` and `triton`: tables worked by hand.

use crate::common::plan::geometry;
use specrs::geometry::{Geometry, Layout};
use specrs::plan::{
    Arrays, AuditedPlan, Batch, Bucket, DraftMask, FlashInfer, Lens, Lower, MaskForm, Planner, Trees, Triton,
};
use specrs::pool::{Lease, Pool, PoolConfig, SeqId};

/// P = 4, K = 2, S = 3, V = 4, requests of 5 and 2 tokens on pages handed out in order.
struct Hand {
    g: Geometry,
    pool: Pool,
    seqs: Vec<SeqId>,
    _lease: Lease,
}

const LENS: [u32; 2] = [5, 2];

impl Hand {
    /// | layout | pages of request 0 | of request 1 |
    /// |---|---|---|
    /// | dense | 1 2 4 5 6 | 3 7 8 9 |
    /// | holey | 1 2 4 5 6 7 8 9 10 11 | 3 12 13 14 15 16 17 18 19 |
    fn new(layout: Layout) -> Self {
        let g = geometry(2, 3, 4, 4, 8, 32, layout);
        let pool =
            Pool::new(PoolConfig { num_pages: 60, page: g.page(), max_seqs: 3, row_pages: g.row_pages() }).unwrap();
        let seqs = vec![pool.create().unwrap(), pool.create().unwrap()];
        let pair = |n: [u32; 2]| [(seqs[0], n[0]), (seqs[1], n[1])];
        pool.reserve(&pair(LENS)).unwrap().commit(&LENS).unwrap();
        let lease = pool.reserve(&pair(LENS.map(|l| g.alloc_target(l, 0).unwrap()))).unwrap();
        let pages = |i: usize| pool.pages(seqs[i]).unwrap().iter().map(|p| p.get()).collect::<Vec<_>>();
        match layout {
            Layout::Dense => {
                assert_eq!(pages(0), [1, 2, 4, 5, 6]);
                assert_eq!(pages(1), [3, 7, 8, 9]);
            }
            Layout::Holey => {
                assert_eq!(pages(0), [1, 2, 4, 5, 6, 7, 8, 9, 10, 11]);
                assert_eq!(pages(1), [3, 12, 13, 14, 15, 16, 17, 18, 19]);
            }
        }
        Self { g, pool, seqs, _lease: lease }
    }

    fn plan<F: Lower>(
        &self,
        format: F,
        pad: Option<Bucket>,
        make: impl Fn(&mut Planner<F>, &specrs::pool::Tables<'_>, &Batch<'_>) -> specrs::Result<AuditedPlan<F>>,
    ) -> AuditedPlan<F> {
        let batch = Batch { seqs: &self.seqs, lens: Lens::Host(&LENS), pad };
        let mut planner = Planner::new(self.g, format).unwrap();
        planner.set_debug(true);
        self.pool.with_tables(|t| make(&mut planner, &t, &batch)).unwrap().unwrap()
    }
}

/// The names of the arrays that a phase has.
fn names(arrays: &Arrays) -> Vec<&'static str> {
    arrays.iter().map(|a| a.spec.name).collect()
}

/// Lists of a draft step in both formats, which differ in nothing but the type of the indices.
fn draft(layout: Layout, step: u32, mask: DraftMask<'_>, indptr: &[i32], indices: &[i32]) {
    let hand = Hand::new(layout);
    let plan = hand.plan(FlashInfer::default(), None, |p, t, b| p.draft(t, b, step, mask));
    let a = plan.arrays();
    assert_eq!(names(a), ["kv_indptr", "kv_indices", "kv_last_page_len"]);
    assert_eq!(a.line::<i32>("kv_indptr"), indptr);
    assert_eq!(a.line::<i32>("kv_indices"), indices);
    assert_eq!(a.line::<i32>("kv_last_page_len"), vec![1; indptr.len() - 1]);
    let plan = hand.plan(Triton, None, |p, t, b| p.draft(t, b, step, mask));
    let a = plan.arrays();
    assert_eq!(names(a), ["kv_indptr", "kv_indices"]);
    assert_eq!(a.line::<i32>("kv_indptr"), indptr);
    let wide: Vec<i64> = indices.iter().map(|&s| s.into()).collect();
    assert_eq!(a.line::<i64>("kv_indices"), wide);
}

/// Step 0: each branch has one slot of its own. Dense: positions L + b*3. Holey: 5 and 9, and 2 and 10.
#[test]
fn draft_step_0_by_hand() {
    draft(
        Layout::Dense,
        0,
        DraftMask::Lane,
        &[0, 6, 12, 15, 18],
        &[4, 5, 6, 7, 8, 9, 4, 5, 6, 7, 8, 16, 12, 13, 14, 12, 13, 29],
    );
    draft(
        Layout::Holey,
        0,
        DraftMask::Lane,
        &[0, 6, 12, 15, 18],
        &[4, 5, 6, 7, 8, 9, 4, 5, 6, 7, 8, 17, 12, 13, 14, 12, 13, 54],
    );
}

/// Step 1 by lanes. Dense: request 0 at positions 5 6 and 8 9, request 1 at 2 3 and 5 6. Holey: L = 5 has r = 1, n = 1, so
/// branch 1 starts at 4 + 4 + 1 = 9; L = 2 has r = 2, n = 2, so it starts at 0 + 8 + 2 = 10.
#[test]
fn draft_step_1_of_lanes_by_hand() {
    draft(
        Layout::Dense,
        1,
        DraftMask::Lane,
        &[0, 7, 14, 18, 22],
        &[4, 5, 6, 7, 8, 9, 10, 4, 5, 6, 7, 8, 16, 17, 12, 13, 14, 15, 12, 13, 29, 30],
    );
    draft(
        Layout::Holey,
        1,
        DraftMask::Lane,
        &[0, 7, 14, 18, 22],
        &[4, 5, 6, 7, 8, 9, 10, 4, 5, 6, 7, 8, 17, 18, 12, 13, 14, 15, 12, 13, 54, 55],
    );
}

/// Step 1 by ancestors: both beams of request 0 continue branch 1, both of request 1 branch 0. Draft slots are b*3 + s.
#[test]
fn draft_step_1_of_ancestors_by_hand() {
    let bits = [1 << 3 | 1 << 1, 1 << 3 | 1 << 4, 1 << 0 | 1 << 1, 1 << 0 | 1 << 4];
    let mask = DraftMask::Ancestors(&bits);
    draft(
        Layout::Dense,
        1,
        mask,
        &[0, 7, 14, 18, 22],
        &[4, 5, 6, 7, 8, 10, 16, 4, 5, 6, 7, 8, 16, 17, 12, 13, 14, 15, 12, 13, 14, 30],
    );
    draft(
        Layout::Holey,
        1,
        mask,
        &[0, 7, 14, 18, 22],
        &[4, 5, 6, 7, 8, 10, 17, 4, 5, 6, 7, 8, 17, 18, 12, 13, 14, 15, 12, 13, 14, 55],
    );
}

/// Chunks of 3 and 1 tokens: FlashInfer lists prefix and chunk, Triton the prefix, and the chunk's slots by themselves.
#[test]
fn extend_by_hand() {
    let hand = Hand::new(Layout::Dense);
    let plan = hand.plan(FlashInfer::default(), None, |p, t, b| p.extend(t, b, &[3, 1]));
    let a = plan.arrays();
    assert_eq!(names(a), ["kv_indptr", "kv_indices", "kv_last_page_len", "qo_indptr"]);
    assert_eq!(a.line::<i32>("kv_indptr"), [0, 8, 11]);
    assert_eq!(a.line::<i32>("kv_indices"), [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]);
    assert_eq!(a.line::<i32>("kv_last_page_len"), [1, 1]);
    assert_eq!(a.line::<i32>("qo_indptr"), [0, 3, 4]);
    let plan = hand.plan(Triton, None, |p, t, b| p.extend(t, b, &[3, 1]));
    let a = plan.arrays();
    assert_eq!(names(a), ["kv_indptr", "kv_indices", "qo_indptr", "extend_slots"]);
    assert_eq!(a.line::<i32>("kv_indptr"), [0, 5, 7]);
    assert_eq!(a.line::<i64>("kv_indices"), [4, 5, 6, 7, 8, 12, 13]);
    assert_eq!(a.line::<i64>("qo_indptr"), [0, 3, 4]);
    assert_eq!(a.line::<i64>("extend_slots"), [9, 10, 11, 14]);
}

/// One token each, at positions 5 and 2.
#[test]
fn decode_by_hand() {
    let hand = Hand::new(Layout::Dense);
    let plan = hand.plan(FlashInfer::default(), None, |p, t, b| p.decode(t, b));
    let a = plan.arrays();
    assert_eq!(names(a), ["kv_indptr", "kv_indices", "kv_last_page_len"]);
    assert_eq!(a.line::<i32>("kv_indptr"), [0, 6, 9]);
    assert_eq!(a.line::<i32>("kv_indices"), [4, 5, 6, 7, 8, 9, 12, 13, 14]);
    assert_eq!(a.line::<i32>("kv_last_page_len"), [1, 1]);
    let plan = hand.plan(Triton, None, |p, t, b| p.decode(t, b));
    let a = plan.arrays();
    assert_eq!(names(a), ["kv_indptr", "kv_indices"]);
    assert_eq!(a.line::<i32>("kv_indptr"), [0, 6, 9]);
    assert_eq!(a.line::<i64>("kv_indices"), [4, 5, 6, 7, 8, 9, 12, 13, 14]);
}

/// Nodes 1 and 2 under the root and 3 under 1; in the second request 1 under the root.
const PARENTS: [i32; 6] = [-1, 0, 0, 1, -1, 0];
/// The mask over 5 + 4 and over 2 + 2 keys.
#[rustfmt::skip]
const MASK: [u8; 44] = [
    1, 1, 1, 1, 1,  1, 0, 0, 0,
    1, 1, 1, 1, 1,  1, 1, 0, 0,
    1, 1, 1, 1, 1,  1, 0, 1, 0,
    1, 1, 1, 1, 1,  1, 1, 0, 1,
    1, 1,  1, 0,
    1, 1,  1, 1,
];
/// The same, lowest bit first: 0..8, 8..16, 16..24, 24..32 and 32..36 of the first request, 0..8 of the second.
const PACKED: [u8; 6] = [0b0011_1111, 0b1111_1110, 0b1111_1100, 0b1111_1010, 0b1011, 0b1111_0111];

#[test]
fn verify_by_hand() {
    let hand = Hand::new(Layout::Dense);
    let trees = Trees { sizes: &[4, 2], parents: &PARENTS };
    for form in [MaskForm::Both, MaskForm::Bool, MaskForm::Packed] {
        let plan = hand.plan(FlashInfer { mask: form }, None, |p, t, b| p.verify(t, b, trees));
        let a = plan.arrays();
        assert_eq!(a.line::<i32>("kv_indptr"), [0, 9, 13]);
        assert_eq!(a.line::<i32>("kv_indices"), [4, 5, 6, 7, 8, 9, 10, 11, 16, 12, 13, 14, 15]);
        assert_eq!(a.line::<i32>("kv_last_page_len"), [1, 1]);
        assert_eq!(a.line::<i32>("qo_indptr"), [0, 4, 6]);
        let (bytes, bits) = (form != MaskForm::Packed, form != MaskForm::Bool);
        assert_eq!(a.line::<i32>("mask_indptr"), if bytes { &[0, 36, 44][..] } else { &[] });
        assert_eq!(a.line::<u8>("custom_mask"), if bytes { &MASK[..] } else { &[] });
        assert_eq!(a.line::<i32>("packed_mask_indptr"), if bits { &[0, 5, 6][..] } else { &[] });
        assert_eq!(a.line::<u8>("packed_custom_mask"), if bits { &PACKED[..] } else { &[] });
        assert_eq!(a.iter().count(), 4 + 2 * usize::from(bytes) + 2 * usize::from(bits));
    }
    let plan = hand.plan(Triton, None, |p, t, b| p.verify(t, b, trees));
    let a = plan.arrays();
    assert_eq!(names(a), ["kv_indptr", "kv_indices", "qo_indptr", "extend_slots", "mask_indptr", "custom_mask"]);
    assert_eq!(a.line::<i32>("kv_indptr"), [0, 5, 7]);
    assert_eq!(a.line::<i64>("kv_indices"), [4, 5, 6, 7, 8, 12, 13]);
    assert_eq!(a.line::<i64>("qo_indptr"), [0, 4, 6]);
    assert_eq!(a.line::<i64>("extend_slots"), [9, 10, 11, 16, 14, 15]);
    assert_eq!(a.line::<i64>("mask_indptr"), [0, 36, 44]);
    assert_eq!(a.line::<u8>("custom_mask"), MASK);
}

/// Padded to 4 requests and 8 queries: dead lists are empty, and a second, smaller round leaves nothing of the first.
#[test]
fn padded_plans_by_hand() {
    let hand = Hand::new(Layout::Dense);
    let batch = Batch::new(&hand.seqs, Lens::Host(&LENS)).padded(Bucket { batch: 4, queries: 8 });
    let mut planner = Planner::new(hand.g, FlashInfer::default()).unwrap();
    let mut triton = Planner::new(hand.g, Triton).unwrap();
    for (sizes, parents, kv, qo, mask, packed) in [
        ([4, 2], &PARENTS[..], [0, 9, 13, 13, 13], [0, 4, 6, 6, 6], [0, 36, 44, 44, 44], [0, 5, 6, 6, 6]),
        ([1, 1], &[-1, -1][..], [0, 6, 9, 9, 9], [0, 1, 2, 2, 2], [0, 6, 9, 9, 9], [0, 1, 2, 2, 2]),
    ] {
        let trees = Trees { sizes: &sizes, parents };
        let plan = hand.pool.with_tables(|t| planner.verify(&t, &batch, trees)).unwrap().unwrap();
        let a = plan.arrays();
        assert_eq!(a.line::<i32>("kv_indptr"), kv);
        assert_eq!(a.line::<i32>("kv_indices").len() as i32, kv[4]);
        assert_eq!(a.line::<i32>("kv_last_page_len"), [1; 4]);
        assert_eq!(a.line::<i32>("qo_indptr"), qo);
        assert_eq!(a.line::<i32>("mask_indptr"), mask);
        assert_eq!(a.line::<u8>("custom_mask").len() as i32, mask[4]);
        assert_eq!(a.line::<i32>("packed_mask_indptr"), packed);
        assert_eq!(a.line::<u8>("packed_custom_mask").len() as i32, packed[4]);
        let plan = hand.pool.with_tables(|t| triton.verify(&t, &batch, trees)).unwrap().unwrap();
        let a = plan.arrays();
        assert_eq!(a.line::<i32>("kv_indptr"), [0, 5, 7, 7, 7]);
        assert_eq!(a.line::<i64>("qo_indptr"), qo.map(i64::from));
        assert_eq!(a.line::<i64>("mask_indptr"), mask.map(i64::from));
        let mut slots = plan.out_slots().to_vec();
        assert_eq!(slots[qo[4] as usize..], vec![0; 8 - qo[4] as usize]);
        slots.truncate(8);
        assert_eq!(a.line::<i64>("extend_slots"), slots.iter().map(|&s| i64::from(s)).collect::<Vec<_>>());
    }
    // One list a query: four live ones and four dead.
    let plan = hand.pool.with_tables(|t| planner.draft(&t, &batch, 1, DraftMask::Lane)).unwrap().unwrap();
    assert_eq!(plan.arrays().line::<i32>("kv_indptr"), [0, 7, 14, 18, 22, 22, 22, 22, 22]);
    assert_eq!(plan.arrays().line::<i32>("kv_last_page_len"), [1; 8]);
    let plan = hand.pool.with_tables(|t| triton.decode(&t, &batch)).unwrap().unwrap();
    assert_eq!(plan.arrays().line::<i32>("kv_indptr"), [0, 6, 9, 9, 9, 9, 9, 9, 9]);
    assert_eq!(plan.arrays().line::<i64>("kv_indices"), [4, 5, 6, 7, 8, 9, 12, 13, 14]);
}

#[test]
fn no_request_is_a_batch() {
    let hand = Hand::new(Layout::Holey);
    let batch = Batch::new(&[], Lens::Host(&[]));
    let trees = Trees { sizes: &[], parents: &[] };
    for (pad, b, q) in [(None, 0, 0), (Some(Bucket { batch: 2, queries: 5 }), 2, 5)] {
        let batch = Batch { pad, ..batch };
        let mut planner = Planner::new(hand.g, FlashInfer::default()).unwrap();
        let mut triton = Planner::new(hand.g, Triton).unwrap();
        hand.pool
            .with_tables(|t| {
                for (plan, lists) in [
                    (planner.extend(&t, &batch, &[]).unwrap(), b),
                    (planner.decode(&t, &batch).unwrap(), q),
                    (planner.draft(&t, &batch, 2, DraftMask::Lane).unwrap(), q),
                    (planner.verify(&t, &batch, trees).unwrap(), b),
                ] {
                    let a = plan.arrays();
                    assert_eq!(a.line::<i32>("kv_indptr"), vec![0; lists + 1]);
                    assert_eq!(a.line::<i32>("kv_indices").len(), 0);
                    assert_eq!(a.line::<i32>("kv_last_page_len"), vec![1; lists]);
                    assert_eq!(a.line::<u8>("custom_mask").len() + a.line::<u8>("packed_custom_mask").len(), 0);
                }
                let plan = triton.verify(&t, &batch, trees).unwrap();
                assert_eq!(plan.arrays().line::<i32>("kv_indptr"), vec![0; b + 1]);
                assert_eq!(plan.arrays().line::<i64>("qo_indptr"), vec![0; b + 1]);
                assert_eq!(plan.arrays().line::<i64>("mask_indptr"), vec![0; b + 1]);
                assert_eq!(plan.arrays().line::<i64>("extend_slots"), vec![0; q]);
                let plan = triton.draft(&t, &batch, 0, DraftMask::Ancestors(&[])).unwrap();
                assert_eq!(plan.arrays().line::<i32>("kv_indptr"), vec![0; q + 1]);
            })
            .unwrap();
    }
}
