//! Merged trees: what they keep for any sources, and worked cases.

use std::collections::HashMap;

use proptest::collection::vec;
use proptest::prelude::*;
use specrs::draft::{Calibration, MergeLimits, MergedDrafts, Proposal, merge};
use specrs::round::TreeBatch;

const VOCAB: u32 = 50;

fn proposal(nodes: &[(i32, u32, f32)]) -> Proposal {
    Proposal {
        parents: nodes.iter().map(|n| n.0).collect(),
        tokens: nodes.iter().map(|n| n.1).collect(),
        probs: nodes.iter().map(|n| n.2).collect(),
        buckets: Vec::new(),
    }
}

fn chain(tokens: std::ops::Range<u32>, prob: f32) -> Proposal {
    proposal(&tokens.enumerate().map(|(i, t)| (i as i32 - 1, t, prob)).collect::<Vec<_>>())
}

fn merged(sources: &[&Proposal], limits: MergeLimits) -> MergedDrafts {
    merge(0, VOCAB, sources, None, limits).unwrap()
}

/// Tokens from the root to each node.
fn paths(parents: &[i32], tokens: &[u32]) -> Vec<Vec<u32>> {
    let mut paths: Vec<Vec<u32>> = Vec::new();
    for (&parent, &token) in parents.iter().zip(tokens) {
        let above = usize::try_from(parent).map_or(Vec::new(), |p| paths[p].clone());
        paths.push([above, vec![token]].concat());
    }
    paths
}

/// The same, of a merged tree, without the root.
fn merged_paths(tree: &MergedDrafts) -> Vec<Vec<u32>> {
    let tokens: Vec<u32> = tree.tokens().iter().map(|&t| t as u32).collect();
    paths(tree.parents(), &tokens).into_iter().map(|p| p[1..].to_vec()).collect()
}

#[test]
fn equal_nodes_are_one_and_its_probability_is_of_the_union() {
    let a = proposal(&[(-1, 5, 0.9), (0, 6, 0.8), (-1, 9, 0.05)]);
    let b = proposal(&[(-1, 5, 0.5), (0, 8, 0.3), (-1, 9, 0.04)]);
    let tree = merged(&[&a, &b], MergeLimits::new(9, 9));
    // The root's children claim 0.95 and 0.088, which sum to more than 1: the likeliest keeps its own, and the other
    // gets what is left.
    let [five, nine] = [0.95f32, 0.05];
    assert_eq!(tree.parents(), [-1, 0, 1, 1, 0]);
    assert_eq!(tree.tokens(), [0, 5, 6, 8, 9]);
    assert_eq!(tree.sources(), [0, 3, 1, 2, 3]);
    assert_eq!(tree.spine(), 3);
    let want = [0.0, five.ln(), (five * 0.8).ln(), (five * 0.2).ln(), nine.ln()];
    assert!(tree.scores().iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-5), "{:?}", tree.scores());
}

#[test]
fn a_sure_source_stays_sure_beside_guesses() {
    let sure = chain(1..6, 0.97);
    let guesses = proposal(&[(-1, 1, 0.3), (-1, 8, 0.3), (-1, 9, 0.3), (-1, 7, 0.25)]);
    let tree = merged(&[&sure, &guesses], MergeLimits::new(9, 9));
    let prob = |token: i32| tree.tokens().iter().position(|&t| t == token).map(|i| tree.scores()[i].exp());
    let [first, a, b, c] = [1, 8, 9, 7].map(|t| prob(t).unwrap());
    assert!((first - (1.0 - 0.03 * 0.7)).abs() < 1e-5, "the union of both: {first}");
    assert!((first + a + b + c - 1.0).abs() < 1e-5 && (a - b).abs() < 1e-6 && (c / a - 0.25 / 0.3).abs() < 1e-4);
    // A certain one leaves the others next to nothing, but no impossible score; all by itself it is certain.
    assert_eq!(merged(&[&proposal(&[(-1, 1, 1.0)])], MergeLimits::new(9, 9)).scores(), [0.0, 0.0]);
    let certain = proposal(&[(-1, 1, 1.0)]);
    let tree = merged(&[&certain, &guesses], MergeLimits::new(9, 9));
    assert!((tree.scores()[1].exp() - 0.9999).abs() < 1e-6);
    assert!(tree.scores()[2..].iter().all(|s| s.is_finite() && *s < -9.0), "{:?}", tree.scores());
    // If their sum is not above 1, all claims stand.
    let tree = merged(&[&proposal(&[(-1, 1, 0.6), (-1, 2, 0.3)])], MergeLimits::new(9, 9));
    assert!((tree.scores()[1].exp() - 0.6).abs() < 1e-6 && (tree.scores()[2].exp() - 0.3).abs() < 1e-6);
}

#[test]
fn the_deepest_path_stands_first_and_the_best_node_need_not() {
    let tree = merged(&[&proposal(&[(-1, 9, 0.6)]), &chain(1..6, 0.3)], MergeLimits::new(9, 9));
    assert_eq!(tree.tokens(), [0, 1, 2, 3, 4, 5, 9]);
    assert_eq!((tree.parents()[6], tree.spine()), (0, 6));
    let trees = TreeBatch::from_scored(&[tree.parents()], &[tree.tokens()], &[tree.scores()]).unwrap();
    assert_eq!(trees.next_child()[0], 1);
}

#[test]
fn branches_off_the_spine_are_cut_and_the_budget_goes_on() {
    // A spine of 12, a branch of 10 beside it.
    let (spine, branch) = (chain(1..13, 0.45), chain(20..30, 0.5));
    let mut limits = MergeLimits::new(23, 32);
    limits.off_spine = 4;
    let tree = merged(&[&spine, &branch], limits);
    assert_eq!(tree.spine(), 13);
    assert_eq!(tree.tokens()[13..], [20, 21, 22, 23], "four of the branch");
    // A budget that the branch would have used lets the spine grow.
    let tree = merged(&[&chain(1..19, 0.49), &chain(20..36, 0.5)], MergeLimits { nodes: 20, ..limits });
    assert_eq!((tree.len(), tree.spine()), (20, 16));
}

#[test]
fn outcomes_are_charged_to_those_who_claimed() {
    let (a, b) = (proposal(&[(-1, 5, 0.9), (0, 6, 0.8), (1, 7, 0.7)]), proposal(&[(-1, 8, 0.3), (-1, 5, 0.2)]));
    let tree = merged(&[&a, &b], MergeLimits::new(9, 9));
    let mut calibration = Calibration::new(2).unwrap();
    tree.settle(&[0, 1], &mut calibration).unwrap(); // 5 was accepted, 6 was not, 7 had no chance
    let account = |c: &Calibration, i| c.account(i).map(|a| (a.proposed, a.accepted));
    assert_eq!((account(&calibration, 0), account(&calibration, 1)), (Some((2, 1)), Some((2, 1))));
    for path in [&[][..], &[1], &[0, 2], &[0, 99], &[0, 0]] {
        assert!(tree.settle(path, &mut calibration).is_err(), "{path:?}");
    }
    assert!(tree.settle(&[0], &mut Calibration::new(1).unwrap()).is_err());
    assert_eq!(account(&calibration, 0), Some((2, 1)), "errors charge nobody");
    // Corrections enter the next tree.
    for _ in 0..500 {
        tree.settle(&[0], &mut calibration).unwrap();
    }
    let after = merge(0, VOCAB, &[&a], Some(&calibration), MergeLimits::new(9, 9)).unwrap();
    assert!(after.scores()[1] < -2.0, "{:?}", after.scores());
}

#[test]
fn refusals_name_the_operand() {
    let refused = |p: &Proposal| merge(0, VOCAB, &[p], None, MergeLimits::new(4, 4)).unwrap_err().to_string();
    let good = proposal(&[(-1, 5, 0.9), (0, 6, 0.8)]);
    let with = |change: &dyn Fn(&mut Proposal)| {
        let mut p = good.clone();
        change(&mut p);
        refused(&p)
    };
    assert_eq!(with(&|p| p.tokens[1] = VOCAB), "proposed token = 50 is outside 0..=49");
    assert_eq!(with(&|p| p.parents[1] = 1), "proposal parent = 1 is outside -1..=0");
    assert_eq!(with(&|p| p.parents[0] = -2), "proposal parent = -2 is outside -1..=-1");
    for bad in [0.0, -0.5, 1.5, f32::NAN, f32::INFINITY] {
        assert!(with(&|p| p.probs[1] = bad).starts_with("proposal prob = probs[1] = "), "{bad}");
    }
    assert!(with(&|p| p.buckets = vec![0, 64]).contains("proposal bucket = 64"));
    assert!(with(&|p| p.probs.truncate(1)).contains("proposal probs"));
    assert!(with(&|p| p.buckets = vec![0]).contains("proposal buckets"));
    let limit = |limits| merge(0, VOCAB, &[&good], None, limits).unwrap_err().to_string();
    assert!(limit(MergeLimits::new(0, 4)).starts_with("nodes = 0"));
    assert!(limit(MergeLimits::new(4, 4000)).starts_with("depth = 4000"));
    assert!(limit(MergeLimits { off_spine: 0, ..MergeLimits::new(4, 4) }).starts_with("off_spine = 0"));
    assert!(limit(MergeLimits { min_score: f32::NAN, ..MergeLimits::new(4, 4) }).starts_with("min_score"));
    assert!(merge(VOCAB, VOCAB, &[&good], None, MergeLimits::new(4, 4)).is_err());
    assert!(merge(0, VOCAB, &vec![&good; 33], None, MergeLimits::new(4, 4)).is_err());
}

/// A source of up to 60 nodes: deep ones and bushy ones, tokens alike enough to meet.
fn sources() -> impl Strategy<Value = Vec<Proposal>> {
    let node = (any::<prop::sample::Index>(), 0u32..5, 0.001f32..=1.0, 0usize..4, 0u8..64);
    let source = vec(node, 0..60).prop_map(|nodes| {
        let mut p = Proposal::default();
        for (i, (parent, token, prob, deep, bucket)) in nodes.into_iter().enumerate() {
            p.parents.push(if deep > 0 { i as i32 - 1 } else { parent.index(i + 1) as i32 - 1 });
            p.tokens.push(token);
            p.probs.push(prob);
            p.buckets.push(bucket);
        }
        p
    });
    vec(source, 0..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_tree_keeps_what_it_promises(
        sources in sources(), nodes in 1u32..80, depth in 0u32..40, off_spine in 1u32..10, min_score in -12f32..0.0,
    ) {
        let limits = MergeLimits { nodes, depth, off_spine, min_score };
        let all: Vec<&Proposal> = sources.iter().collect();
        let tree = merge(7, VOCAB, &all, None, limits).unwrap();
        prop_assert!(tree.len() <= nodes as usize && tree.tokens()[0] == 7);
        let trees = TreeBatch::from_scored(&[tree.parents()], &[tree.tokens()], &[tree.scores()]).unwrap();
        let levels = trees.depths();
        // The spine is first, and everything is near to it.
        let spine = tree.spine() as usize;
        prop_assert!((1..spine).all(|n| tree.parents()[n] == n as i32 - 1));
        let mut off = vec![0; tree.len()];
        let mut sums = vec![0.0f64; tree.len()];
        for n in 1..tree.len() {
            let parent = tree.parents()[n] as usize;
            off[n] = if n < spine { 0 } else { off[parent] + 1 };
            prop_assert!(off[n] <= off_spine && levels[n] <= depth as i32);
            prop_assert!(tree.scores()[n] >= min_score && tree.scores()[n] <= tree.scores()[parent]);
            sums[parent] += f64::from(tree.scores()[n] - tree.scores()[parent]).exp();
        }
        prop_assert!(sums.iter().all(|&s| s <= 1.0001), "{sums:?}");
        let inner = tree.scores()[spine..].windows(2).all(|w| w[0] >= w[1]);
        prop_assert!(inner, "best first behind the spine");
        // Every node is one that its sources proposed, once, and no more are named than did.
        let mut proposed: HashMap<Vec<u32>, u32> = HashMap::new();
        for (i, s) in sources.iter().enumerate() {
            paths(&s.parents, &s.tokens).into_iter().for_each(|p| *proposed.entry(p).or_default() |= 1 << i);
        }
        let got = merged_paths(&tree);
        for (n, path) in got.iter().enumerate().skip(1) {
            prop_assert_eq!(proposed.remove(path), Some(tree.sources()[n]), "{:?}", path);
        }
        // Without the bound on branches nothing better was left out.
        let free = merge(7, VOCAB, &all, None, MergeLimits { off_spine: 1000, ..limits }).unwrap();
        let levels = TreeBatch::from_parents(&[free.parents()], &[free.tokens()]).unwrap();
        prop_assert_eq!(Some(free.spine() as i32 - 1), levels.depths().iter().max().copied(), "deepest");
        let whole = merge(7, VOCAB, &all, None, MergeLimits { nodes: 1024, off_spine: 1000, ..limits }).unwrap();
        prop_assert_eq!(free.len(), whole.len().min(nodes as usize));
        let mut best = whole.scores().to_vec();
        best.sort_by(|a, b| b.total_cmp(a));
        let mut taken = free.scores().to_vec();
        taken.sort_by(|a, b| b.total_cmp(a));
        prop_assert_eq!(&best[..taken.len()], &taken[..]);
        // Pruning takes the best of a tree; to its own limits it changes nothing.
        let same = free.pruned(MergeLimits { off_spine: 1000, ..limits }).unwrap();
        prop_assert_eq!(same.scores(), free.scores());
        let fewer = free.pruned(MergeLimits { nodes: nodes.div_ceil(2), off_spine: 1000, ..limits }).unwrap();
        let mut kept = fewer.scores().to_vec();
        kept.sort_by(|a, b| b.total_cmp(a));
        prop_assert_eq!(&kept[..], &taken[..kept.len()]);
    }
}

/// Parents of a tree, and scores that fall along its paths.
fn scored_tree() -> impl Strategy<Value = (Vec<i32>, Vec<f32>)> {
    vec((any::<u16>(), 0.0f32..20.0, any::<bool>()), 0..12).prop_map(|nodes| {
        let (mut parents, mut scores) = (vec![-1], vec![0.0]);
        for (parent, less, never) in nodes {
            let parent = usize::from(parent) % parents.len();
            parents.push(parent as i32);
            scores.push(if never && less < 2.0 { f32::NEG_INFINITY } else { scores[parent] - less });
        }
        (parents, scores)
    })
}

proptest! {
    #[test]
    fn trees_of_a_head_are_proposals(trees in vec(scored_tree(), 1..4)) {
        let (parents, scores): (Vec<_>, Vec<_>) = trees.into_iter().unzip();
        let tokens: Vec<Vec<i32>> = parents.iter().map(|p: &Vec<i32>| (0..p.len() as i32).map(|t| 3 * t).collect()).collect();
        let batch = TreeBatch::from_scored(&parents, &tokens, &scores).unwrap();
        let made = Proposal::of_trees(&batch);
        prop_assert_eq!(made.len(), parents.len());
        for (i, own) in made.iter().enumerate() {
            own.check(100).unwrap();
            prop_assert_eq!(own.len(), parents[i].len() - 1);
            for node in 1..parents[i].len() {
                let (parent, score) = (parents[i][node], f64::from(scores[i][node]));
                let chance = (score - f64::from(scores[i][parent as usize])).exp();
                let chance = if score == f64::NEG_INFINITY { 1e-6 } else { chance.clamp(1e-6, 1.0) };
                prop_assert_eq!((own.parents[node - 1], own.tokens[node - 1]), (parent - 1, 3 * node as u32));
                prop_assert_eq!(own.probs[node - 1], chance as f32);
                prop_assert_eq!(own.buckets[node - 1], ((chance * 10.0) as u8).min(9));
            }
        }
    }
}
