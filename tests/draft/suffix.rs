//! Proposals of a request's own text.

use proptest::collection::vec;
use proptest::prelude::*;
use specrs::draft::{FEWEST_BYTES, Proposal, SuffixDrafts};

const MIB: usize = 1 << 20;

fn drafts(prediction: &[u32], prompt: &[u32]) -> SuffixDrafts {
    let mut drafts = SuffixDrafts::new(1000, MIB, prediction).unwrap();
    drafts.prompt(prompt).unwrap();
    drafts
}

/// Tokens of the likeliest path from the root.
fn best_path(p: &Proposal) -> Vec<u32> {
    let (mut path, mut at) = (Vec::new(), -1);
    loop {
        let children = (0..p.len()).filter(|&n| p.parents[n] == at);
        let Some(next) = children.max_by(|&a, &b| p.probs[a].total_cmp(&p.probs[b])) else { return path };
        path.push(p.tokens[next]);
        at = next as i32;
    }
}

/// Conditions that every proposal keeps.
fn holds(p: &Proposal, nodes: usize, depth: usize) {
    p.check(1000).unwrap();
    assert!(p.len() <= nodes);
    let (mut level, mut path) = (vec![1; p.len()], vec![1.0f32; p.len()]);
    for n in 0..p.len() {
        path[n] = p.probs[n];
        if let Ok(parent) = usize::try_from(p.parents[n]) {
            (level[n], path[n]) = (level[parent] + 1, path[parent] * p.probs[n]);
        }
        assert!(level[n] <= depth);
        assert!(n == 0 || path[n] <= path[n - 1] * 1.0001, "best first");
        let siblings: Vec<_> = (0..p.len()).filter(|&m| p.parents[m] == p.parents[n]).collect();
        assert!(siblings.iter().map(|&m| p.probs[m]).sum::<f32>() <= 1.0001);
        assert_eq!(siblings.iter().filter(|&&m| p.tokens[m] == p.tokens[n]).count(), 1, "siblings differ");
    }
}

#[test]
fn what_followed_before_is_proposed_and_a_longer_match_claims_more() {
    let file: Vec<u32> = (100..160).collect();
    let prompt = |n: usize| [&file[..], &[1, 2, 3], &file[20 - n..20]].concat();
    let claim = |n: usize| {
        let p = drafts(&[], &prompt(n)).propose(32, 32).unwrap();
        holds(&p, 32, 32);
        assert_eq!(best_path(&p)[..3], file[20..23], "after {n} tokens");
        p.probs[0]
    };
    let claims = [1, 2, 4, 8, 16].map(claim);
    assert!(claims.windows(2).all(|w| w[0] < w[1]), "{claims:?}");
    assert!(claims[1] < 0.5 && claims[4] > 0.8, "{claims:?}");
    let deep = drafts(&[], &prompt(16)).propose(32, 32).unwrap();
    assert_eq!(best_path(&deep), &file[20..52], "a chain of 32");
}

#[test]
fn likelier_followers_come_first_and_shorter_matches_add_theirs() {
    // After 4 5 6: three times 7, once 8; after 5 6 alone: 9 as well.
    let prompt = [4, 5, 6, 7, 1, 4, 5, 6, 7, 2, 4, 5, 6, 8, 3, 4, 5, 6, 7, 0, 5, 6, 9, 10, 4, 5, 6];
    let p = drafts(&[], &prompt).propose(8, 1).unwrap();
    holds(&p, 8, 1);
    assert_eq!(p.tokens, [7, 8, 9]);
    assert!(p.probs[0] > 2.0 * p.probs[1]);
}

#[test]
fn a_prediction_is_proposed_before_anything_was_output_and_after_an_edit() {
    let prediction: Vec<u32> = (200..300).collect();
    let mut d = drafts(&prediction, &[1, 2, 3]);
    assert_eq!(best_path(&d.propose(16, 16).unwrap()), &prediction[..16]);
    d.extend(&prediction[..10]).unwrap();
    let p = d.propose(16, 16).unwrap();
    holds(&p, 16, 16);
    assert!(p.probs[0] > 0.9);
    // One token differs: the text goes on behind it.
    d.extend(&[999]).unwrap();
    assert_eq!(best_path(&d.propose(16, 16).unwrap())[..4], prediction[11..15]);
    // Two are left out: a match of `ANCHOR` finds the place again.
    d.extend(&prediction[13..20]).unwrap();
    assert_eq!(best_path(&d.propose(16, 16).unwrap()), &prediction[20..36]);
    // The end of the prediction is an end.
    d.extend(&prediction[20..]).unwrap();
    assert!(!d.propose(16, 16).unwrap().tokens.contains(&1), "the prompt does not follow the prediction");
}

#[test]
fn drafts_below_a_path_are_those_of_the_text_with_the_path() {
    let file: Vec<u32> = (100..160).collect();
    let d = drafts(&[], &[&file[..], &[1, 2], &file[10..14]].concat());
    let mut longer = drafts(&[], &[&file[..], &[1, 2], &file[10..14]].concat());
    longer.extend(&file[14..20]).unwrap();
    let (below, after) = (d.propose_after(&file[14..20], 8, 8).unwrap(), longer.propose(8, 8).unwrap());
    assert_eq!((&below.tokens, &below.parents), (&after.tokens, &after.parents));
    assert!(d.propose_after(&[500, 501], 8, 8).unwrap().is_empty(), "nothing is known of them");
}

#[test]
fn refusals_name_the_operand() {
    assert!(SuffixDrafts::new(0, MIB, &[]).is_err() && SuffixDrafts::new(10, FEWEST_BYTES - 1, &[]).is_err());
    assert!(SuffixDrafts::new(10, usize::MAX, &[]).is_err() && SuffixDrafts::new(10, MIB, &[10]).is_err());
    let mut d = drafts(&[], &[1, 2, 1]);
    let error = d.extend(&[5, 1000, 6]).unwrap_err();
    assert_eq!(error.to_string(), "token = 1000 is outside 0..=999");
    assert_eq!(d.len(), 3, "nothing was appended");
    assert!(d.propose(5000, 1).is_err() && d.propose(1, 5000).is_err() && d.propose_after(&[1000], 1, 1).is_err());
    assert!(d.propose(0, 5).unwrap().is_empty() && d.propose(5, 0).unwrap().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn proposals_keep_what_they_promise(
        prediction in vec(0u32..6, 0..40), prompt in vec(0u32..6, 0..200), output in vec(0u32..6, 0..60),
        nodes in 0usize..80, depth in 0usize..40,
    ) {
        let mut d = drafts(&prediction, &prompt);
        for token in output {
            d.extend(&[token]).unwrap();
            holds(&d.propose(nodes, depth).unwrap(), nodes, depth);
        }
        holds(&d.propose(nodes, depth).unwrap(), nodes, depth);
        holds(&d.propose_after(&[1, 2, 3], nodes, depth).unwrap(), nodes, depth);
    }

    #[test]
    fn text_of_two_generations_is_matched(seed in 0u32..1000) {
        // Enough distinct text for an eviction, then a piece of the last tenth again.
        let mut d = SuffixDrafts::new(1 << 20, FEWEST_BYTES, &[]).unwrap();
        let token = |i: u32| i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 12;
        let text: Vec<u32> = (0..4000).map(token).collect();
        d.prompt(&text).unwrap();
        prop_assert!(d.len() < 3000);
        let last = 4000 - d.len() * 3 / 4;
        d.extend(&text[last..last + 12]).unwrap();
        prop_assert!(d.matched() >= 12);
        prop_assert_eq!(best_path(&d.propose(8, 8).unwrap()), &text[last + 12..last + 20]);
    }
}

/// A file of `lines` lines in which a name stands again and again, and the same with another name.
fn renamed(seed: u64, lines: usize, old: &[u32], new: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let mut mix = crate::common::Mix(seed);
    let (mut file, mut changed) = (Vec::new(), Vec::new());
    for _ in 0..lines {
        let mut words = |n: usize| (0..n).map(|_| 50 + mix.below(900) as u32).collect::<Vec<_>>();
        let (before, behind) = (words(5), words(4));
        file.extend([&before[..], old, &behind].concat());
        changed.extend([&before[..], new, &behind].concat());
    }
    (file, changed)
}

/// Rounds in which a text is output, each by the best path of at most 32 tokens and one more.
fn rounds(d: &mut SuffixDrafts, text: &[u32]) -> usize {
    let (mut at, mut rounds) = (0, 0);
    while at < text.len() {
        let drafted = best_path(&d.propose(32, 32).unwrap());
        let good = drafted.iter().zip(&text[at..]).take_while(|(a, b)| a == b).count();
        let end = (at + good + 1).min(text.len());
        d.extend(&text[at..end]).unwrap();
        (at, rounds) = (end, rounds + 1);
    }
    rounds
}

#[test]
fn a_change_that_recurs_is_expected() {
    for (old, new) in [(&[1][..], &[2][..]), (&[1, 2], &[3]), (&[1], &[2, 3, 4]), (&[1, 2, 3], &[4, 2])] {
        for seed in 0..8 {
            let (file, changed) = renamed(seed, 24, old, new);
            for prediction in [true, false] {
                let mut d =
                    if prediction { drafts(&file, &[7, 8]) } else { drafts(&[], &[&file[..], &[7, 8]].concat()) };
                let rounds = rounds(&mut d, &changed);
                // Some to find the copy and to learn; then 32 tokens a round, over 24 lines of 10 tokens and more.
                assert!(rounds <= 26, "{old:?} to {new:?}: {rounds} rounds");
            }
        }
    }
}

#[test]
fn what_is_left_out_or_put_in_does_not_lose_the_place() {
    let file: Vec<u32> = (100..400).collect();
    let mut changed = file.clone();
    changed.splice(200..200, [1, 2, 3]);
    changed.drain(100..104);
    changed.remove(50);
    let mut d = drafts(&file, &[7, 8]);
    let rounds = rounds(&mut d, &changed);
    assert!(rounds <= 24, "{rounds} rounds");
}

#[test]
fn a_change_that_is_made_no_more_is_forgotten() {
    let (mut file, mut changed) = renamed(3, 8, &[1], &[2]);
    let (more, _) = renamed(4, 24, &[1], &[1]);
    file.extend(&more);
    let at = changed.len();
    changed.extend(&more);
    let mut d = drafts(&file, &[7, 8]);
    rounds(&mut d, &changed[..at]);
    let rounds = rounds(&mut d, &changed[at..]);
    assert!(rounds <= 22, "{rounds} rounds");
}
