//! The suffix automaton against a matcher that scans the text.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use specrs::draft::automaton::{Automaton, Match};

/// A text; `None` is a boundary.
type Text = Vec<Option<u32>>;

/// Texts of few tokens: random ones, runs, repeated pieces, boundaries.
fn texts() -> impl Strategy<Value = Text> {
    let piece = prop_oneof![
        4 => vec(0u32..3, 1..12).prop_map(|t| t.into_iter().map(Some).collect::<Text>()),
        2 => (0u32..3, 1usize..90).prop_map(|(t, n)| vec![Some(t); n]),
        2 => (vec(0u32..3, 1..4), 1usize..30).prop_map(|(t, n)| t.repeat(n).into_iter().map(Some).collect()),
        1 => vec(0u32..40, 1..20).prop_map(|t| t.into_iter().map(Some).collect()),
        1 => Just(vec![None]),
    ];
    vec((piece, 1usize..3), 1..6).prop_map(|all| all.into_iter().flat_map(|(piece, n)| piece.repeat(n)).collect())
}

fn automaton(text: &[Option<u32>]) -> Automaton {
    let mut automaton = Automaton::new();
    for token in text {
        match token {
            Some(t) => automaton.append(*t),
            None => automaton.boundary(),
        }
    }
    automaton
}

fn find(automaton: &Automaton, string: &[Option<u32>]) -> Option<Match> {
    string.iter().try_fold(Match::EMPTY, |at, t| automaton.step(at, (*t)?))
}

/// Starts of a string in the text.
fn places<'a>(text: &'a [Option<u32>], string: &'a [Option<u32>]) -> impl Iterator<Item = usize> + 'a {
    text.windows(string.len()).enumerate().filter(move |(_, w)| *w == string).map(|(at, _)| at)
}

/// Length of the longest suffix without boundary that stands earlier too.
fn longest_earlier(text: &[Option<u32>]) -> usize {
    let last = text.iter().rev().take_while(|t| t.is_some()).count();
    (0..=last)
        .rev()
        .find(|&n| n == 0 || places(&text[..text.len() - 1], &text[text.len() - n..]).next().is_some())
        .unwrap()
}

/// Some of the strings of a text, and some that are none.
fn strings(text: &Text) -> Vec<Text> {
    let mut all: Vec<Text> = Vec::new();
    for length in (1..6).chain([8, 20, 33, 34, 70]) {
        all.extend(text.windows(length).map(<[_]>::to_vec));
    }
    all.retain(|s| s.iter().all(Option::is_some));
    let changed: Vec<Text> = all.iter().step_by(7).map(|s| s.iter().rev().copied().collect()).collect();
    all.extend(changed);
    all.sort();
    all.dedup();
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn strings_occurrences_and_followers_are_those_of_a_scan(text in texts()) {
        let mut automaton = automaton(&text);
        let strings = strings(&text);
        for string in &strings {
            let count = places(&text, string).count() as u32;
            match find(&automaton, string) {
                None => prop_assert_eq!(count, 0, "{:?} was not found", string),
                Some(found) => {
                    prop_assert_eq!(found.length() as usize, string.len());
                    let counted = automaton.count(found);
                    prop_assert!(counted >= 1 && counted <= count, "{} of {} {:?}", counted, count, string);
                    prop_assert!(automaton.owing() > 0 || counted == count, "nothing is owed");
                }
            }
        }
        automaton.settle();
        for string in &strings {
            let Some(found) = find(&automaton, string) else { continue };
            let mut followers = BTreeMap::new();
            let ends: Vec<_> = places(&text, string).map(|at| at + string.len()).collect();
            ends.iter().filter_map(|&e| *text.get(e)?).for_each(|t| *followers.entry(t).or_insert(0u32) += 1);
            prop_assert_eq!(automaton.count(found) as usize, ends.len(), "{:?}", string);
            let got = automaton.followers_of(found);
            prop_assert_eq!(got.len(), followers.len(), "no token twice");
            prop_assert_eq!(got.into_iter().collect::<BTreeMap<_, _>>(), followers);
        }
    }

    #[test]
    fn the_match_is_the_longest_suffix_that_stands_earlier(text in texts()) {
        let mut growing = Automaton::new();
        for n in 1..=text.len() {
            match text[n - 1] {
                Some(token) => growing.append(token),
                None => growing.boundary(),
            }
            let got = growing.matched();
            prop_assert_eq!(got.length() as usize, longest_earlier(&text[..n]), "of {:?}", &text[..n]);
            prop_assert_eq!(find(&growing, &text[n - got.length() as usize..n]), Some(got));
        }
        prop_assert_eq!(growing.len(), text.len());
    }

    #[test]
    fn what_is_said_to_fit_is_what_is_held(text in texts()) {
        let mut automaton = Automaton::new();
        for token in text.into_iter().flatten() {
            let held = automaton.bytes();
            // The smallest limit that the next token fits.
            let (mut low, mut high) = (held, 2 * held + 8192);
            prop_assert!(automaton.fits(token, high));
            while low < high {
                let middle = usize::midpoint(low, high);
                if automaton.fits(token, middle) { high = middle } else { low = middle + 1 }
            }
            automaton.append(token);
            let debts = 12 * (40 + automaton.owing()); // room for a debt that was not made
            prop_assert!((low - debts..=low).contains(&automaton.bytes()), "{} is not {}", automaton.bytes(), low);
        }
    }
}

#[test]
fn a_long_run_costs_no_more_than_other_text_and_is_paid_afterwards() {
    let mut automaton = automaton(&vec![Some(7); 5000]);
    assert!(automaton.owing() > 4000);
    for i in 0..200 {
        automaton.append(100 + i);
    }
    assert_eq!(automaton.owing(), 0, "other text pays what a run owes");
    for length in [1, 2, 31, 32, 33, 2500, 5000] {
        let found = find(&automaton, &vec![Some(7); length]).unwrap();
        assert_eq!(automaton.count(found) as usize, 5001 - length, "runs of {length}");
    }
}

#[test]
fn no_match_runs_across_a_boundary() {
    let text = [Some(1), Some(2), None, Some(3), Some(1), Some(2), None, Some(3)];
    let automaton = automaton(&text);
    assert_eq!(automaton.matched().length(), 1, "the boundaries are two");
    assert_eq!(find(&automaton, &[Some(2), Some(3)]), None);
    assert_eq!(automaton.followers_of(find(&automaton, &text[..2]).unwrap()), [], "boundaries follow");
}
