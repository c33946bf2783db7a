//! Memory of drafts: what is reported is what is allocated, and a bound holds over a million tokens.

use crate::common::Mix;
use crate::common::counting::held;
use specrs::draft::automaton::Automaton;
use specrs::draft::{FEWEST_BYTES, SuffixDrafts};

/// Text with the statistics of source code, roughly: pieces of earlier text, now and then changed, and new tokens.
fn text(mix: &mut Mix, tokens: usize) -> Vec<u32> {
    let mut text: Vec<u32> = vec![1, 2, 3];
    while text.len() < tokens {
        if mix.below(3) > 0 {
            let (at, n) = (mix.below(text.len()), 1 + mix.below(12));
            let piece: Vec<u32> = text[at..].iter().copied().take(n).collect();
            text.extend(piece);
        } else {
            let common = 1 << mix.below(13);
            text.push(mix.below(common) as u32);
        }
    }
    text.truncate(tokens);
    text
}

#[test]
fn bytes_are_what_the_allocator_gave() {
    let text = text(&mut Mix(5), 40_000);
    let before = held();
    let mut automaton = Automaton::new();
    for (i, &token) in text.iter().enumerate() {
        automaton.append(token);
        if i % 97 == 0 {
            // The root's list is the allocator's too; a heap of debts has room beyond what it reports at most once.
            assert_eq!(automaton.bytes() as isize, held() - before, "after {i} tokens");
        }
    }
    let per_token = automaton.bytes() as f64 / text.len() as f64;
    assert!(per_token < 70.0, "{per_token} bytes a token");
    (0..3000).for_each(|_| automaton.append(9));
    assert_eq!(automaton.bytes() as isize, held() - before, "with debts");
}

#[test]
fn a_limit_holds_over_a_million_tokens() {
    let limit = 4 << 20;
    let text = text(&mut Mix(11), 1_000_000);
    let before = held();
    let mut drafts = SuffixDrafts::new(1 << 13, limit, &text[..500]).unwrap();
    let (mut most, mut fewest) = (0, usize::MAX);
    for (i, piece) in text.chunks(50).enumerate() {
        drafts.extend(piece).unwrap();
        most = most.max(held() - before);
        assert_eq!(drafts.bytes() as isize, held() - before);
        if i > 10_000 {
            fewest = fewest.min(drafts.len());
        }
    }
    assert!(most <= limit as isize, "{most}");
    assert!(fewest * 70 * 4 > limit, "of {limit} bytes only {fewest} tokens were matched");
    assert!(!drafts.propose(16, 16).unwrap().is_empty());
}

#[test]
fn the_smallest_limit_holds_for_any_text() {
    for (seed, distinct) in [(1, 1), (2, 2), (3, 50), (4, 4_000_000)] {
        let (mut mix, before) = (Mix(seed), held());
        let mut drafts = SuffixDrafts::new(1 << 22, FEWEST_BYTES, &[]).unwrap();
        for _ in 0..20_000 {
            drafts.extend(&[mix.below(distinct) as u32]).unwrap();
            assert!(held() - before <= FEWEST_BYTES as isize);
            assert_eq!(drafts.bytes() as isize, held() - before);
        }
        assert!(drafts.len() > 300, "{}", drafts.len());
    }
}
