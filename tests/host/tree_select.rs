//! Draft selection against a plain model of the dynamic tree.

use crate::common::plan::{Batch, geometry};
use crate::common::{Mix, random_parents};
use proptest::prelude::*;
use specrs::Error;
use specrs::geometry::{Layout, Tree, TreeShape};
use specrs::host::select::{DraftBeams, TopK, reference_topk};
use specrs::plan::{Lens, Native, Planner, Trees};
use specrs::round::TreeBatch;

/// A candidate of the plain model.
#[derive(Debug, Clone)]
struct Candidate {
    index: usize,
    parent: Option<usize>,
    token: i32,
    score: f32,
    depth: usize,
    /// Draft slot, for candidates that became beams.
    slot: Option<usize>,
}

/// The dynamic tree by its definition: lists and sorts.
struct PlainBeams {
    shape: TreeShape,
    candidates: Vec<Candidate>,
    beams: Vec<usize>,
}

impl PlainBeams {
    /// `top[b]` holds (token, log-probability) of the K best children of beam b, or of the root in the first step.
    fn step(&mut self, top: &[Vec<(i32, f32)>]) -> Vec<usize> {
        let k = self.shape.topk() as usize;
        let depth = self.candidates.last().map_or(1, |c| c.depth + 1);
        let parents: Vec<Option<usize>> = match depth {
            1 => vec![None],
            _ => self.beams.iter().map(|&b| Some(b)).collect(),
        };
        let first = self.candidates.len();
        for (parent, children) in parents.iter().zip(top) {
            for &(token, log_prob) in children {
                let score = parent.map_or(log_prob, |p| self.candidates[p].score + log_prob);
                let index = self.candidates.len();
                self.candidates.push(Candidate { index, parent: *parent, token, score, depth, slot: None });
            }
        }
        let mut order: Vec<usize> = (first..self.candidates.len()).collect();
        order
            .sort_by(|&a, &b| self.candidates[b].score.partial_cmp(&self.candidates[a].score).unwrap().then(a.cmp(&b)));
        order.truncate(k);
        for (b, &c) in order.iter().enumerate() {
            self.candidates[c].slot = Some(b * self.shape.steps() as usize + depth - 1);
        }
        let parent_beams = order.iter().map(|&c| (c - first) / k).collect();
        self.beams = order;
        parent_beams
    }

    fn ancestor_slots(&self, beam: usize) -> Vec<usize> {
        let mut slots = vec![];
        let mut at = Some(self.beams[beam]);
        while let Some(c) = at {
            slots.push(self.candidates[c].slot.expect("a parent is a beam"));
            at = self.candidates[c].parent;
        }
        slots.sort_unstable();
        slots
    }

    /// (tokens, parents, scores) of the tree.
    fn tree(&self, root: i32, max_depth: usize, max_nodes: usize, min_score: f32) -> (Vec<i32>, Vec<i32>, Vec<f32>) {
        let mut order: Vec<&Candidate> = self.candidates.iter().filter(|c| c.depth <= max_depth).collect();
        order.sort_by(|a, b| b.score.partial_cmp(&a.score).unwrap().then(a.index.cmp(&b.index)));
        order.truncate(max_nodes - 1);
        order.retain(|c| c.score >= min_score);
        order.sort_by_key(|c| c.index);
        let node = |c: usize| order.iter().position(|o| o.index == c).expect("closed under ancestors") as i32 + 1;
        let parents = order.iter().map(|c| c.parent.map_or(0, node));
        let (tokens, parents): (Vec<i32>, Vec<i32>) = order.iter().map(|c| c.token).zip(parents).unzip();
        let scores: Vec<f32> = order.iter().map(|c| c.score).collect();
        ([vec![root], tokens].concat(), [vec![-1], parents].concat(), [vec![0.0], scores].concat())
    }
}

fn slots_of(mask: &[u64], words: usize, row: usize) -> Vec<usize> {
    (0..words * 64).filter(|&i| mask[row * words + i / 64] >> (i % 64) & 1 == 1).collect()
}

/// Rows of logits, with many ties or -inf now and then, so that tie rules matter.
fn draft_logits(mix: &mut Mix, rows: usize, vocab: usize) -> Vec<f32> {
    let coarse = mix.below(3) == 0;
    let mut values: Vec<f32> =
        (0..rows * vocab).map(|_| if coarse { mix.below(3) as f32 } else { mix.normal() * 4.0 }).collect();
    if mix.below(4) == 0 {
        (0..values.len() / 2).for_each(|_| values[mix.below(rows * vocab)] = f32::NEG_INFINITY);
        values.iter_mut().step_by(vocab).for_each(|v| *v = v.max(-9.0)); // each row keeps a finite value
    }
    values
}

/// Links, depths, and the ancestor bits that the planner makes of the trees.
fn assert_links(trees: &TreeBatch) {
    let g = geometry(8, 6, 256, 1, 4, 1024, Layout::Dense);
    let case = Batch::new(&g, &vec![3; trees.len()], 1);
    let sizes: Vec<u32> = trees.sizes().collect();
    let batch = specrs::plan::Batch::new(&case.seqs, Lens::Host(&case.lens));
    let planned = Trees { sizes: &sizes, parents: trees.parents() };
    let mut planner = Planner::new(g, Native).unwrap();
    let plan = case.pool.with_tables(|t| planner.verify(&t, &batch, planned)).unwrap().unwrap();
    let words = plan.mask_words() as usize;
    for i in 0..trees.len() {
        let range = trees.range(i);
        let tree = Tree::from_parents(&trees.parents()[range.clone()]).unwrap();
        assert_eq!(&trees.next_child()[range.clone()], tree.next_child());
        assert_eq!(&trees.next_sibling()[range.clone()], tree.next_sibling());
        let depths: Vec<i32> = tree.depths().iter().map(|&d| d as i32).collect();
        assert_eq!(&trees.depths()[range.clone()], depths);
        let bits = tree.ancestor_bits();
        for node in 0..tree.len() {
            for other in 0..words as u32 * 64 {
                let row = (range.start + node as usize) * words;
                let got = plan.mask()[row + other as usize / 64] >> (other % 64) & 1 == 1;
                assert_eq!(got, bits.get(node, other), "request {i}, node {node}, bit {other}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Beams, masks and trees equal the plain model's, over two rounds with the same buffers.
    #[test]
    fn beams_equal_the_plain_model(
        (k, s, v) in (1..9u32, 1..8u32).prop_flat_map(|(k, s)| (Just(k), Just(s), 1..=(1 + k + (s - 1) * k * k).min(130))),
        mapped in any::<bool>(),
        extra_vocab in 0..40usize,
        seed in any::<u64>(),
    ) {
        let mut mix = Mix(seed);
        let shape = TreeShape::new(k, s, v).unwrap();
        let (k, draft_vocab) = (k as usize, k as usize + extra_vocab);
        let vocab = draft_vocab as u32 + 50;
        let d2t: Vec<i64> = (0..draft_vocab).map(|id| mix.below(vocab as usize) as i64 - id as i64).collect();
        let target = |id: u32| if mapped { (i64::from(id) + d2t[id as usize]) as i32 } else { id as i32 };
        let mut beams = if mapped {
            DraftBeams::new(shape, vocab, Some(&d2t)).unwrap()
        } else {
            DraftBeams::new(shape, draft_vocab as u32, None).unwrap()
        };
        let mut trees = TreeBatch::default();
        for batch in [mix.below(4), 1 + mix.below(3)] {
            let mut plain: Vec<PlainBeams> =
                (0..batch).map(|_| PlainBeams { shape, candidates: vec![], beams: vec![] }).collect();
            let steps = 1 + mix.below(s as usize);
            for step in 0..steps {
                let rows = if step == 0 { 1 } else { k };
                let logits = draft_logits(&mut mix, batch * rows, draft_vocab);
                if step == 0 { beams.start(&logits).unwrap() } else { beams.advance(&logits).unwrap() }
                let mut topk = TopK::default();
                topk.compute(&logits, draft_vocab, k).unwrap();
                let top: Vec<Vec<(i32, f32)>> = topk.ids().chunks(k).zip(topk.log_probs().chunks(k))
                    .map(|(ids, lp)| ids.iter().map(|&id| target(id)).zip(lp.iter().copied()).collect())
                    .collect();
                for (i, plain) in plain.iter_mut().enumerate() {
                    let parents = plain.step(&top[i * rows..][..rows]);
                    for (b, &parent_beam) in parents.iter().enumerate() {
                        let row = i * k + b;
                        prop_assert_eq!(beams.tokens()[row], plain.candidates[plain.beams[b]].token);
                        let parent = if step == 0 { i } else { i * k + parent_beam };
                        prop_assert_eq!(beams.parents()[row], parent as i32);
                        let words = beams.mask_words();
                        prop_assert_eq!(slots_of(beams.ancestors(), words, row), plain.ancestor_slots(b));
                    }
                    let scores: Vec<f32> = plain.beams.iter().map(|&c| plain.candidates[c].score).collect();
                    prop_assert_eq!(beams.beam_scores(i).collect::<Vec<_>>(), scores);
                }
                prop_assert_eq!((beams.batch(), beams.steps_done()), (batch, step + 1));
            }
            let roots: Vec<i32> = (0..batch).map(|_| mix.below(draft_vocab) as i32).collect();
            let depths: Vec<u32> = (0..batch).map(|_| mix.below(s as usize + 2) as u32).collect();
            let nodes: Vec<u32> = (0..batch).map(|_| 1 + mix.below(v as usize) as u32).collect();
            let min_score = if mix.below(2) == 0 { f32::NEG_INFINITY } else { -(mix.below(80) as f32) / 10.0 };
            beams.finish_above(&roots, &depths, &nodes, min_score, &mut trees).unwrap();
            prop_assert_eq!(trees.len(), batch);
            for i in 0..batch {
                let (tokens, parents, scores) = plain[i].tree(roots[i], depths[i] as usize, nodes[i] as usize, min_score);
                prop_assert_eq!(&trees.tokens()[trees.range(i)], &tokens[..]);
                prop_assert_eq!(&trees.parents()[trees.range(i)], &parents[..]);
                prop_assert_eq!(&trees.scores()[trees.range(i)], &scores[..]);
            }
            prop_assert_eq!(trees.sizes().map(|n| n as usize).sum::<usize>(), trees.nodes());
            assert_links(&trees);
        }
    }

    #[test]
    fn topk_equals_a_sort(
        vocab in prop_oneof![1..20usize, 120..140usize, 1000..9000usize], rows in 0..4usize, k in 1..65usize, seed in any::<u64>(),
    ) {
        let k = k.min(vocab);
        let logits: Vec<f32> = (0..rows).flat_map(|r| draft_logits(&mut Mix(seed ^ r as u64), 1, vocab)).collect();
        let mut topk = TopK::default();
        topk.compute(&vec![1.0; vocab * 2], vocab, k).unwrap(); // buffers of an earlier call
        topk.compute(&logits, vocab, k).unwrap();
        prop_assert_eq!(topk.ids().len(), rows * k);
        for (r, row) in logits.chunks(vocab).enumerate() {
            for (j, (id, log_prob)) in reference_topk(row, k).into_iter().enumerate() {
                prop_assert_eq!(topk.ids()[r * k + j], id);
                let got = f64::from(topk.log_probs()[r * k + j]);
                prop_assert!(got <= 0.0 && (got == log_prob || (got - log_prob).abs() < 2e-6 * (1.0 - log_prob)), "{} {}", got, log_prob);
            }
        }
    }

    #[test]
    fn general_trees_are_linked(sizes in prop::collection::vec(1..200usize, 0..4), seed in any::<u64>()) {
        let mut mix = Mix(seed);
        let parents: Vec<Vec<i32>> = sizes.iter().map(|&n| random_parents(&mut mix, n)).collect();
        let tokens: Vec<Vec<i32>> = sizes.iter().map(|&n| (0..n).map(|_| mix.below(9) as i32).collect()).collect();
        let trees = TreeBatch::from_parents(&parents, &tokens).unwrap();
        prop_assert_eq!(trees.tokens(), &tokens.concat()[..]);
        prop_assert_eq!(trees.parents(), &parents.concat()[..]);
        prop_assert_eq!(trees.sizes().map(|n| n as usize).collect::<Vec<_>>(), sizes);
        assert_links(&trees);
    }
}

/// Rows enough that several threads share them.
#[test]
fn topk_over_threads_equals_one_row_at_a_time() {
    let (vocab, rows, k) = (8192, 37, 8);
    let logits: Vec<f32> = (0..rows).flat_map(|r| draft_logits(&mut Mix(r), 1, vocab)).collect();
    let (mut all, mut one) = (TopK::default(), TopK::default());
    all.compute(&logits, vocab, k).unwrap();
    for (r, row) in logits.chunks(vocab).enumerate() {
        one.compute(row, vocab, k).unwrap();
        assert_eq!(&all.ids()[r * k..][..k], one.ids());
        assert_eq!(&all.log_probs()[r * k..][..k], one.log_probs());
    }
    // Bad rows are listed; they hold placeholders, and the others what they hold without them.
    let mut bad = logits;
    bad[30 * vocab + 17] = f32::NAN;
    bad[35 * vocab] = f32::INFINITY;
    let sound = (all.ids().to_vec(), all.log_probs().to_vec());
    all.compute(&bad, vocab, k).unwrap();
    let fault = |value, row: usize, index| {
        let (what, request, position) = ("draft logits", -1, -1);
        (row, Error::NonFinite { what, value, request, row: row as i64, position, index })
    };
    assert_eq!(all.faults().collect::<Vec<_>>(), [fault("NaN", 30, 17), fault("+inf", 35, 0)]);
    for r in 0..rows as usize {
        let at = r * k..(r + 1) * k;
        if r == 30 || r == 35 {
            assert!(all.ids()[at.clone()].iter().enumerate().all(|(j, &id)| id as usize == j));
            assert!(all.log_probs()[at].iter().all(|&p| p == f32::NEG_INFINITY));
        } else {
            assert_eq!((&all.ids()[at.clone()], &all.log_probs()[at.clone()]), (&sound.0[at.clone()], &sound.1[at]));
        }
    }
    all.compute(&bad[..vocab], vocab, k).unwrap();
    assert_eq!(all.faults().count(), 0, "nothing stays of an earlier call");
}

/// NaN in one request's draft, at any step: its tree ends at the levels before, the others' trees are as without it.
#[test]
fn a_bad_draft_ends_its_own_tree_alone() {
    let (k, steps, vocab, batch) = (3usize, 4usize, 20usize, 3usize);
    let shape = TreeShape::new(k as u32, steps as u32, 16).unwrap();
    let mut beams = DraftBeams::new(shape, vocab as u32, None).unwrap();
    for (bad_step, bad_row) in (0..steps).flat_map(|s| (0..if s == 0 { 1 } else { k }).map(move |r| (s, r))) {
        let mut trees = vec![];
        let mut faults = vec![];
        for spoil in [false, true] {
            let mut mix = Mix(9);
            for step in 0..steps {
                let rows = if step == 0 { 1 } else { k };
                let mut logits: Vec<f32> = (0..batch * rows * vocab).map(|_| mix.normal() * 3.0).collect();
                if spoil && step == bad_step {
                    logits[(rows + bad_row) * vocab + 7] = f32::NAN;
                } else if spoil && step > bad_step {
                    logits[rows * vocab..][..vocab].fill(f32::NEG_INFINITY); // a request that is out already
                }
                if step == 0 {
                    beams.start(&logits).unwrap()
                } else {
                    beams.advance(&logits).unwrap()
                }
                assert!(beams.tokens().iter().all(|&t| (0..vocab as i32).contains(&t)), "placeholders are tokens");
                assert!((0..batch).all(|i| beams.beam_scores(i).all(|s| !s.is_nan())));
            }
            faults.push(beams.faults().to_vec());
            let mut out = TreeBatch::default();
            beams.finish(&[1; 3], &[4; 3], &[16; 3], &mut out).unwrap();
            trees.push(out);
        }
        let (sound, cut) = (&trees[0], &trees[1]);
        let rows = if bad_step == 0 { 1 } else { k };
        let (what, value, request, row) = ("draft logits", "NaN", 1, (rows + bad_row) as i64);
        assert_eq!(faults[0], []);
        assert_eq!(faults[1], [Error::NonFinite { what, value, request, row, position: -1, index: 7 }]);
        for i in [0, 2] {
            assert_eq!(sound.tokens()[sound.range(i)], cut.tokens()[cut.range(i)], "step {bad_step}");
            assert_eq!(sound.parents()[sound.range(i)], cut.parents()[cut.range(i)], "step {bad_step}");
        }
        // The tree has as many levels as were sound, with all that they have; the root alone after a fault at the
        // start.
        let depth = cut.depths()[cut.range(1)].iter().max().copied();
        assert!(depth <= Some(bad_step as i32) && cut.range(1).len() == 1 + [0, 3, 12, 15][bad_step], "{depth:?}");
    }
}

#[test]
fn selection_refuses_what_does_not_fit() {
    let shape = TreeShape::new(4, 3, 16).unwrap();
    assert!(matches!(DraftBeams::new(shape, 3, None), Err(Error::Invalid { what: "topk", .. })));
    assert!(matches!(DraftBeams::new(shape, 9, Some(&[0; 3])), Err(Error::Invalid { what: "topk", .. })));
    for offsets in [[0i64, 0, 0, 6], [0, -2, 0, 0], [0, 0, i64::MAX, 0], [i64::MIN, 0, 0, 0]] {
        let refused = DraftBeams::new(shape, 9, Some(&offsets));
        assert!(matches!(refused, Err(Error::OutOfRange { what: "d2t target id", .. })), "{offsets:?}");
    }
    let mut beams = DraftBeams::new(shape, 10, None).unwrap();
    let mut trees = TreeBatch::default();
    assert!(matches!(beams.advance(&[]), Err(Error::Invalid { what: "draft step", .. })));
    assert!(matches!(beams.start(&[0.0; 15]), Err(Error::Mismatch { operand: "draft logits", .. })));
    let logits: Vec<f32> = (0..20).map(|i| (i * 7 % 10) as f32).collect();
    beams.start(&logits).unwrap();
    assert!(matches!(beams.advance(&logits), Err(Error::Mismatch { operand: "draft logits", .. })));
    // A refused step leaves the beams as they were.
    let before = (beams.tokens().to_vec(), beams.steps_done(), beams.ancestors().to_vec());
    for refused in [beams.advance(&[0.0; 79]), beams.start(&[0.0; 21])] {
        assert!(matches!(refused, Err(Error::Mismatch { operand: "draft logits", .. })), "{refused:?}");
    }
    assert_eq!(before, (beams.tokens().to_vec(), beams.steps_done(), beams.ancestors().to_vec()));
    assert_eq!(beams.batch(), 2);
    let mut finish = |roots: &[i32], depths: &[u32], nodes: &[u32]| beams.finish(roots, depths, nodes, &mut trees);
    assert!(matches!(finish(&[0], &[3, 3], &[16, 16]), Err(Error::Mismatch { operand: "roots", .. })));
    assert!(matches!(finish(&[0, 1], &[3], &[16, 16]), Err(Error::Mismatch { operand: "max_depths", .. })));
    assert!(matches!(finish(&[0, 10], &[3, 3], &[16, 16]), Err(Error::OutOfRange { what: "root token", got: 10, .. })));
    assert!(matches!(finish(&[0, 1], &[3, 3], &[16, 17]), Err(Error::OutOfRange { what: "max_nodes", got: 17, .. })));
    assert!(matches!(finish(&[0, 1], &[3, 3], &[0, 16]), Err(Error::OutOfRange { what: "max_nodes", got: 0, .. })));
    let refused = beams.finish_above(&[0, 1], &[3, 3], &[16, 16], f32::NAN, &mut trees);
    assert!(matches!(refused, Err(Error::Invalid { what: "min_score", .. })));
    beams.finish(&[0, 1], &[0, 3], &[16, 16], &mut trees).unwrap();
    assert_eq!(trees.sizes().collect::<Vec<_>>(), [1, 5], "depth 0 is the root alone; one step has K candidates");
    let refused = TreeBatch::from_parents(&[[-1, 0]], &[[1, -4]]);
    assert!(matches!(refused, Err(Error::OutOfRange { what: "tree token", got: -4, .. })));
    assert!(TreeBatch::from_parents(&[vec![-1, 0]], &[vec![1]]).is_err());
    assert!(TreeBatch::from_parents(&[[-1, 1]], &[[1, 1]]).is_err());
    assert!(TreeBatch::from_parents(&[[-1, 0]], &[[1, 1], [1, 1]]).is_err());
}
