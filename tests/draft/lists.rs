//! Trees of a block's lists against all paths, and those of beams against an exhaustive search.

use proptest::collection::vec;
use proptest::prelude::*;
use specrs::draft::{ListBeams, Lists, MergeLimits, MergedDrafts, list_tree};

const WIDTH: usize = 4;

/// Log-probabilities of a level, best first, of which some are equal and some are 0.
fn level() -> impl Strategy<Value = Vec<f32>> {
    vec(prop_oneof![Just(-1.0f32), Just(-0.5), Just(f32::NEG_INFINITY), -6.0f32..0.0], WIDTH).prop_map(|mut all| {
        all.sort_by(|a, b| b.total_cmp(a));
        all
    })
}

fn tokens(levels: usize) -> Vec<i32> {
    (0..(levels * WIDTH) as i32).collect() // so that a token tells its level and its rank
}

/// Scores of all paths of all lengths, best first.
fn all_scores(levels: &[Vec<f32>]) -> Vec<f32> {
    let (mut all, mut ends) = (vec![0.0f32], vec![0.0f32]);
    for level in levels {
        ends = ends.iter().flat_map(|end| level.iter().map(move |p| end + p)).filter(|s| s.is_finite()).collect();
        all.extend(&ends);
    }
    all.sort_by(|a, b| b.total_cmp(a));
    all
}

/// Nodes off the spine of each node's path.
fn off_spine(tree: &MergedDrafts) -> Vec<u32> {
    let mut off = vec![0; tree.len()];
    for node in tree.spine() as usize..tree.len() {
        off[node] = off[tree.parents()[node] as usize] + 1;
    }
    off
}

/// What holds for every tree: parents stand before their children and score no lower, siblings differ, and the deepest
/// path stands first.
fn is_sound(tree: &MergedDrafts) -> Result<(), TestCaseError> {
    let mut depth = vec![0; tree.len()];
    let mut seen = std::collections::HashSet::new();
    for node in 1..tree.len() {
        let parent = tree.parents()[node] as usize;
        depth[node] = depth[parent] + 1;
        prop_assert!(parent < node && tree.scores()[node] <= tree.scores()[parent]);
        prop_assert!(seen.insert((parent, tree.tokens()[node])));
        if node < tree.spine() as usize {
            prop_assert_eq!(parent, node - 1);
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn a_tree_has_the_best_paths(levels in vec(level(), 0..6), nodes in 1u32..31, min in -9.0f32..0.0) {
        let (tokens, flat) = (tokens(levels.len()), levels.concat());
        let lists = Lists { tokens: &tokens, log_probs: &flat, width: WIDTH };
        for min_score in [f32::NEG_INFINITY, min] {
            let tree = list_tree(99, lists, MergeLimits { min_score, ..MergeLimits::new(nodes, 9) }).unwrap();
            is_sound(&tree)?;
            let mut scores = tree.scores().to_vec();
            scores.sort_by(|a, b| b.total_cmp(a));
            let mut want: Vec<f32> = all_scores(&levels).into_iter().filter(|s| *s >= min_score).collect();
            want.truncate(nodes as usize);
            prop_assert_eq!(scores, want);
            for node in 1..tree.len() {
                let (mut above, mut levels) = (node, 0);
                while above > 0 {
                    above = tree.parents()[above] as usize;
                    levels += 1;
                }
                prop_assert_eq!(tree.tokens()[node] as usize / WIDTH, levels - 1);
            }
        }
    }

    /// The best nodes among those that are allowed, once the spine is known: a search over all paths finds none better.
    #[test]
    fn no_path_is_far_off_the_spine(levels in vec(level(), 1..9), nodes in 1u32..40, most in 1u32..4) {
        let (tokens, flat) = (tokens(levels.len()), levels.concat());
        let lists = Lists { tokens: &tokens, log_probs: &flat, width: WIDTH };
        let tree = list_tree(99, lists, MergeLimits { off_spine: most, ..MergeLimits::new(nodes, 9) }).unwrap();
        is_sound(&tree)?;
        prop_assert!(off_spine(&tree).iter().all(|&off| off <= most));
        let free = list_tree(99, lists, MergeLimits::new(nodes, 9)).unwrap();
        prop_assert!(tree.spine() >= free.spine() && tree.tokens()[..free.spine() as usize] == free.tokens()[..free.spine() as usize]);
        let spine = &tree.tokens()[1..tree.spine() as usize];
        let mut open = vec![(0.0f32, 0usize, 0u32, true)]; // score, level, nodes off the spine, all on it so far
        let mut allowed = Vec::new();
        while let Some((score, at, off, on)) = open.pop() {
            allowed.push(score);
            for (rank, &p) in levels.get(at).into_iter().flatten().enumerate() {
                let on = on && spine.get(at) == Some(&((at * WIDTH + rank) as i32));
                let off = if on { 0 } else { off + 1 };
                if off <= most && (score + p).is_finite() {
                    open.push((score + p, at + 1, off, on));
                }
            }
        }
        allowed.sort_by(|a, b| b.total_cmp(a));
        allowed.truncate(nodes as usize);
        let mut scores = tree.scores().to_vec();
        scores.sort_by(|a, b| b.total_cmp(a));
        prop_assert_eq!(scores, allowed);
    }

    /// Where no level depends on the path, beams that are wide enough find the trees of the lists.
    #[test]
    fn beams_without_bias_are_the_lists(levels in vec(level(), 1..4), nodes in 1u32..25) {
        let tokens = tokens(levels.len());
        let whole = levels.iter().map(|level| {
            let sum: f32 = level.iter().map(|p| p.exp()).sum();
            level.iter().map(|p| p - sum.ln().max(0.0)).collect::<Vec<_>>() // a distribution sums to 1 at most
        });
        let whole: Vec<Vec<f32>> = whole.collect();
        let mut beams = ListBeams::new(99, 64).unwrap();
        for (i, level) in whole.iter().enumerate() {
            let list = Lists { tokens: &tokens[i * WIDTH..(i + 1) * WIDTH], log_probs: level, width: WIDTH };
            let bias = vec![0.0; beams.tokens().len() * WIDTH];
            beams.advance(list, &bias).unwrap();
        }
        let got = beams.tree(MergeLimits::new(nodes, 9)).unwrap();
        is_sound(&got)?;
        let mut scores = got.scores().to_vec();
        scores.sort_by(|a, b| b.total_cmp(a));
        let mut want = all_scores(&whole);
        want.truncate(nodes as usize);
        prop_assert_eq!(scores.len(), want.len());
        for (got, want) in scores.iter().zip(want) {
            prop_assert!((got - want).abs() < 1e-4, "{got} for {want}");
        }
    }

    /// Eight beams lose next to nothing against a search of all paths.
    #[test]
    fn few_beams_find_nearly_all_there_is(
        levels in vec(level(), 1..5),
        table in vec(-2.0f32..2.0, 25 * WIDTH),
        nodes in 2u32..25,
    ) {
        let biases = |token: i32| &table[(token + 1) as usize * WIDTH..][..WIDTH];
        let whole: Vec<Vec<f32>> = levels.iter().map(|level| {
            let sum: f32 = level.iter().map(|p| p.exp()).sum();
            level.iter().map(|p| p - sum.ln().max(0.0)).collect()
        }).collect();
        let tokens = tokens(levels.len());
        let yields = |width: usize| {
            let mut beams = ListBeams::new(99, width).unwrap();
            for (i, level) in whole.iter().enumerate() {
                let list = Lists { tokens: &tokens[i * WIDTH..(i + 1) * WIDTH], log_probs: level, width: WIDTH };
                let bias: Vec<f32> =
                    beams.tokens().flat_map(|t| biases(if t == 99 { -1 } else { t }).to_vec()).collect();
                beams.advance(list, &bias).unwrap();
            }
            beams.tree(MergeLimits::new(nodes, 9)).unwrap().scores().iter().map(|s| s.exp()).sum::<f32>()
        };
        let (few, all) = (yields(8), yields(64));
        prop_assert!(few >= 0.98 * all, "{few} of {all}");
    }
}
