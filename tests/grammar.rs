//! Masks against languages that are written out: a token may come next where some text of the language goes on with it.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;

use proptest::prelude::*;
use specrs::Error;
use specrs::grammar::{Forced, Form, Grammar, MAX_NESTING, MAX_TEXT, Mark, Tracker, Vocabulary};
use specrs::host::sample::{Sampler, Scratch};
use specrs::host::verify::Verifier;
use specrs::round::{Accepts, SamplerConfig, TreeBatch};

/// Tokens of one to three letters; two of the same bytes; one that is no text; two endings.
const TOKENS: [&str; 16] =
    ["a", "b", "c", "ab", "bc", "abc", "ca", "a", "é", "", "\"", ":", "{", "}", "<end>", "<stop>"];
const END: u32 = 14;
const STOP: u32 = 15;
const NONE: u32 = 9;

fn vocabulary() -> Vocabulary {
    let tokens: Vec<Vec<u8>> = TOKENS.iter().map(|t| t.as_bytes().to_vec()).collect();
    Vocabulary::new(&tokens, &[END, STOP]).unwrap()
}

fn choice(texts: &[&str]) -> Grammar {
    Grammar::compile(&vocabulary(), &Form::Choice(texts.iter().map(|t| t.to_string()).collect()), None).unwrap()
}

fn lark(text: &str) -> specrs::Result<Grammar> {
    Grammar::compile(&vocabulary(), &Form::Lark(text.into()), None)
}

fn regex(text: &str) -> Grammar {
    Grammar::compile(&vocabulary(), &Form::Regex(text.into()), None).unwrap()
}

fn spelled(path: &[i32]) -> String {
    path.iter().map(|&t| TOKENS[t as usize]).collect()
}

/// The tokens that may come behind `path`, by the language.
fn expected(texts: &[String], path: &[i32], endings: &[u32]) -> BTreeSet<u32> {
    let text = spelled(path);
    let plain = (0..END).filter(|&t| t != NONE);
    let mut found: BTreeSet<u32> =
        plain.filter(|&t| texts.iter().any(|s| s.starts_with(&format!("{text}{}", TOKENS[t as usize])))).collect();
    if texts.contains(&text) {
        found.extend(endings);
    }
    found
}

fn allowed(tracker: &Tracker, path: &[i32]) -> BTreeSet<u32> {
    let mask = tracker.mask(path).unwrap().unwrap();
    (0..TOKENS.len() as u32).filter(|&t| mask.contains(t)).collect()
}

/// Every path of every text, in the order of a walk through the tree of all paths; a fresh tracker says the same of each.
#[test]
fn masks_are_those_of_the_language_at_every_path() {
    for texts in [&["abc", "abca", "b", "cab"][..], &["a"], &["aaaa", "aaab"], &["é", "éa", "\"a\":{}"]] {
        let grammar = choice(texts);
        let texts: Vec<String> = texts.iter().map(|t| t.to_string()).collect();
        for endings in [&[END][..], &[END, STOP], &[END, 0]] {
            let tracker = grammar.start(endings).unwrap();
            let (mut open, mut paths) = (vec![Vec::new()], 0);
            while let Some(path) = open.pop() {
                let want = expected(&texts, &path, endings);
                assert_eq!(allowed(&tracker, &path), want, "{texts:?} behind {:?}", spelled(&path));
                assert_eq!(allowed(&grammar.start(endings).unwrap(), &path), want);
                let ahead = tracker.mask_ahead(&path).unwrap();
                for token in 0..TOKENS.len() as u32 {
                    assert_eq!(ahead.contains(token), want.contains(&token));
                    let is_text = token != NONE || want.contains(&token);
                    assert!(
                        !is_text || tracker.allows(&path, token as i32) == want.contains(&token),
                        "{path:?} {token}"
                    );
                }
                paths += 1;
                let on = want.into_iter().filter(|t| !endings.contains(t));
                open.extend(on.map(|t| [&path[..], &[t as i32]].concat()));
            }
            assert!(paths > 1);
        }
    }
}

#[test]
fn endings_open_where_the_text_may_end_and_shut_everything_else_out() {
    let grammar = regex("a+(bc)?");
    let tracker = grammar.start(&[STOP]).unwrap();
    assert!(!tracker.mask(&[]).unwrap().unwrap().contains(STOP));
    let mask = tracker.mask(&[0]).unwrap().unwrap();
    assert!(
        mask.contains(STOP) && mask.contains(0) && mask.contains(3) && !mask.contains(END),
        "EOS is not its ending"
    );
    assert_eq!(allowed(&tracker, &[0, 4]), BTreeSet::from([STOP]));
    assert!(tracker.mask(&[0, STOP as i32]).unwrap().is_none(), "nobody reads what stands behind an ending");
    assert!(tracker.mask(&[0, STOP as i32, 1, 1]).unwrap().is_none());
    assert!(tracker.mask(&[STOP as i32]).is_err(), "the text cannot end here");
    assert!(!tracker.complete());
    tracker.commit(&[0, 4]).unwrap();
    assert!(tracker.complete());
    assert_eq!(tracker.forced(), [Forced::Token(STOP)]);
    tracker.commit(&[STOP as i32]).unwrap();
    assert!(tracker.complete() && tracker.mask(&[]).unwrap().is_none() && tracker.mask(&[3]).unwrap().is_none());
    // Without any ending a complete text has no next token.
    let tracker = grammar.start(&[]).unwrap();
    tracker.commit(&[0, 4]).unwrap();
    let Err(Error::GrammarFailed { why, .. }) = tracker.mask(&[]) else { panic!() };
    assert!(tracker.complete() && why.contains("complete"), "{why}");
}

#[test]
fn what_must_come_is_said_as_text_and_special_tokens() {
    let tracker = choice(&["abcab", "abcac"]).start(&[END]).unwrap();
    assert_eq!(tracker.forced(), [Forced::Text(b"abca".to_vec(), vec![5, 0])]);
    assert_eq!(allowed(&tracker, &[]), BTreeSet::from([0, 3, 5, 7]), "asking changes nothing");
    tracker.commit(&[5, 0]).unwrap();
    assert_eq!(tracker.forced(), []);
    let tracker = lark("start: \"ab\" <stop> \"c\"").unwrap().start(&[END]).unwrap();
    let Some(Forced::Text(text, _)) = tracker.forced().first().cloned() else { panic!() };
    assert_eq!(text, b"ab");
    tracker.commit(&[3]).unwrap();
    assert_eq!(tracker.forced().first(), Some(&Forced::Token(STOP)));
    assert_eq!(allowed(&tracker, &[]), BTreeSet::from([STOP]), "a grammar may name a special token");
    tracker.commit(&[STOP as i32, 2]).unwrap();
    assert!(tracker.complete());
}

/// Free text up to a mark, which may end within a token, and begin anew in itself.
#[test]
fn a_form_begins_behind_its_mark() {
    let form = Form::Choice(vec!["b".into(), "cab".into()]);
    let of_text = Grammar::compile(&vocabulary(), &form, Some(&Mark::Text("aab".into()))).unwrap();
    let mut paths = vec![Vec::new()];
    let mut seen = [0, 0];
    while let Some(path) = paths.pop() {
        let text = spelled(&path);
        let tracker = of_text.start(&[END]).unwrap();
        let mask = allowed(&tracker, &path);
        for token in (0..8).filter(|&t| t != 7) {
            let longer = format!("{text}{}", TOKENS[token as usize]);
            let want = match longer.split_once("aab") {
                None => true,
                Some((_, body)) => ["b", "cab"].iter().any(|t| t.starts_with(body)),
            };
            assert_eq!(mask.contains(&token), want, "{text:?} then {:?}", TOKENS[token as usize]);
        }
        let body = text.split_once("aab").map(|(_, body)| body);
        assert_eq!(mask.contains(&END), matches!(body, Some("b" | "cab")), "{text:?}");
        seen[usize::from(body.is_some())] += 1;
        if path.len() < 5 {
            paths.extend(mask.into_iter().filter(|&t| t < 6).map(|t| [&path[..], &[t as i32]].concat()));
        }
    }
    assert!(seen.iter().all(|&n| n > 100), "{seen:?}");
    // The mark gives the same by its tokens, which are a text; a special token is no text.
    let same = Grammar::compile(&vocabulary(), &form, Some(&Mark::Tokens(vec![0, 3]))).unwrap();
    assert_eq!(allowed(&same.start(&[END]).unwrap(), &[0, 0, 1]), BTreeSet::from([1, 2, 6]));
    let special = Grammar::compile(&vocabulary(), &form, Some(&Mark::Tokens(vec![STOP]))).unwrap();
    let tracker = special.start(&[END]).unwrap();
    assert!(allowed(&tracker, &[0, 1]).contains(&STOP) && !allowed(&tracker, &[0, 1]).contains(&END));
    assert_eq!(allowed(&tracker, &[STOP as i32]), BTreeSet::from([1, 2, 6]));
    assert_eq!(allowed(&tracker, &[0, 1, STOP as i32, 1]), BTreeSet::from([END]));
    for mark in [Mark::Tokens(vec![0, STOP]), Mark::Tokens(vec![]), Mark::Tokens(vec![99]), Mark::Text("".into())] {
        assert!(Grammar::compile(&vocabulary(), &form, Some(&mark)).is_err(), "{mark:?}");
    }
}

#[test]
fn what_cannot_be_honoured_is_refused_with_a_reason() {
    let long = "a".repeat(MAX_TEXT + 1);
    let deep = |n: usize| format!("{}a{}", "(".repeat(n), ")".repeat(n));
    let forms = [
        Form::Regex("a(b".into()),
        Form::Regex(r"(a)\1".into()),
        Form::Regex("(?=a)b".into()),
        Form::Regex(long.clone()),
        Form::Regex(deep(MAX_NESTING + 1)),
        Form::Regex(deep(100_000)),
        Form::Lark("start: missing".into()),
        Form::Lark("start: \"a\" }".into()),
        Form::Lark("".into()),
        Form::Lark(format!("start: {}", deep(100_000))),
        Form::Choice(vec![]),
        Form::Choice(vec!["a".into(), "".into()]),
        Form::Json { schema: "[1".into(), whitespace: None },
        Form::Json { schema: "3".into(), whitespace: None },
        Form::Json { schema: "{\"type\":\"elephant\"}".into(), whitespace: None },
        Form::Json { schema: "{\"allOf\":[{\"type\":\"string\"},{\"type\":\"integer\"}]}".into(), whitespace: None },
        Form::Json { schema: "{\"$ref\":\"#/$defs/none\"}".into(), whitespace: None },
        Form::Json { schema: "{\"$ref\":\"https://example.com/a.json\"}".into(), whitespace: None },
        Form::Json { schema: "{\"type\":\"array\",\"uniqueItems\":true}".into(), whitespace: None },
        Form::Json { schema: "true".into(), whitespace: Some("(".into()) },
        Form::Json { schema: format!("{}1{}", "{\"items\":".repeat(100_000), "}".repeat(100_000)), whitespace: None },
    ];
    for form in forms {
        let Err(Error::Grammar { why, .. }) = Grammar::compile(&vocabulary(), &form, None) else {
            panic!("{form:?} is taken");
        };
        assert!(!why.is_empty() && why.len() < 1700 && !why.contains('\n'), "{why}");
    }
    assert!(regex(&deep(MAX_NESTING)).start(&[END]).is_ok());
    assert!(regex("a").start(&[99]).is_err());
    for (tokens, special) in [(vec![], vec![]), (vec![b"a".to_vec()], vec![1]), (vec![vec![b'a'; 1 << 20]; 8], vec![])]
    {
        _ = Vocabulary::new(&tokens, &special)
            .map(|v| assert!(v.size() > 0 && !tokens.is_empty() && special.is_empty()));
    }
}

/// If a vocabulary lacks the letters, the grammar ends in an error of its own, and stays there.
#[test]
fn text_without_a_choice_is_looked_at_as_far_as_it_is_cheap() {
    let regex = |text: &str| Grammar::compile(&vocabulary(), &Form::Regex(text.into()), None);
    let refused = regex("(a{1000}){1000}").unwrap_err();
    assert!(matches!(&refused, Error::Grammar { why, .. } if why.contains("65536 bytes")), "{refused}");
    // Behind a choice nobody knows before: it is looked at once.
    let tracker = regex("[bc](a{300}){300}").unwrap().start(&[END]).unwrap();
    assert_eq!(tracker.forced(), []);
    tracker.commit(&[1]).unwrap();
    assert_eq!(tracker.forced(), []);
    let began = std::time::Instant::now();
    for _ in 0..100 {
        tracker.commit(&[0]).unwrap();
        assert_eq!(tracker.forced(), []);
    }
    assert!(began.elapsed().as_secs() < 5, "{:?}", began.elapsed());
    assert_eq!(allowed(&tracker, &[]), BTreeSet::from([0, 7]));
}

#[test]
fn a_dead_end_is_an_error_of_the_request() {
    let tracker = regex("abz").start(&[END]).unwrap();
    let paths: [&[i32]; 3] = [&[3], &[0, 1], &[0]];
    let found: Vec<bool> = paths.iter().map(|p| tracker.mask(p).is_ok()).collect();
    assert_eq!(found, [false, false, false], "once it has no way on, it stays so");
    let tracker = regex("abz").start(&[END]).unwrap();
    assert!(tracker.mask(&[0]).is_ok());
    assert!(tracker.commit(&[2]).is_err(), "no token of it");
    let Err(Error::GrammarFailed { why, .. }) = tracker.mask(&[]) else { panic!() };
    assert!(why.contains("token 2"), "{why}");
    assert!(!tracker.complete());
}

/// A mask is that of its path, whatever other paths are asked in between; and commits go on from there.
fn any_order(texts: &[String], asked: Vec<(Vec<usize>, bool)>) {
    let grammar = Grammar::compile(&vocabulary(), &Form::Choice(texts.to_vec()), None).unwrap();
    let tracker = grammar.start(&[END]).unwrap();
    let mut output: Vec<i32> = Vec::new();
    for (picks, commits) in asked {
        let mut path: Vec<i32> = Vec::new();
        for pick in picks {
            let all = [&output[..], &path].concat();
            let next: Vec<u32> = expected(texts, &all, &[END]).into_iter().filter(|&t| t != END).collect();
            let Some(&token) = next.get(pick % next.len().max(1)) else { break };
            path.push(token as i32);
        }
        let all = [&output[..], &path].concat();
        assert_eq!(allowed(&tracker, &path), expected(texts, &all, &[END]), "{all:?}");
        assert_eq!(tracker.allowed(&path), path.len());
        _ = tracker.forced();
        if commits {
            tracker.commit(&path).unwrap();
            output = all;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn masks_do_not_depend_on_what_was_asked_before(
        texts in prop::collection::vec("[abc]{1,7}", 1..5),
        asked in prop::collection::vec((prop::collection::vec(0usize..8, 0..4), any::<bool>()), 1..12),
    ) {
        any_order(&texts, asked);
    }

    /// A tree of any drafts yields the tokens of plain decoding under the grammar, and these spell a text of the language.
    #[test]
    fn walks_under_a_grammar_are_plain_decoding(
        texts in prop::collection::vec("[abc]{1,6}", 1..4),
        logits in prop::collection::vec(prop::collection::vec(-3.0f32..3.0, 16), 24),
        drafts in prop::collection::vec((0usize..12, 0i32..16), 1..12),
        temperature in prop::sample::select(vec![0.0, 0.9]),
        top_k in 0i64..4,
        seed in 0u64..1000,
    ) {
        // The target's scores are a function of how many tokens came before.
        let row = |position: usize| &logits[position % logits.len()][..];
        let grammar = Grammar::compile(&vocabulary(), &Form::Choice(texts.clone()), None).unwrap();
        let config = SamplerConfig { temperature, top_k, seed, ..SamplerConfig::default() };
        let sampler = |tracker: &Tracker| Sampler::new(16, &[0], config.clone()).unwrap().under(tracker.clone()).unwrap();
        let tracker = grammar.start(&[END]).unwrap();
        let (plain, mut want, mut scratch) = (sampler(&tracker), Vec::new(), Scratch::default());
        while want.last() != Some(&(END as i32)) {
            let token = plain.draw(&mut scratch, row(want.len()), want.len() as u32 + 1, &[]).unwrap();
            tracker.commit(&[token]).unwrap();
            want.push(token);
        }
        prop_assert!(texts.contains(&spelled(&want[..want.len() - 1])));

        let tracker = grammar.start(&[END]).unwrap();
        let (speculative, mut got, mut verifier) = (sampler(&tracker), Vec::new(), Verifier::default());
        while got.last() != Some(&(END as i32)) {
            let (mut parents, mut tokens, mut depths) = (vec![-1], vec![*got.last().unwrap_or(&0)], vec![0usize]);
            for &(at, token) in &drafts {
                let parent = at % parents.len();
                // The best drafts there are: what comes, at times.
                let next = want.get(got.len() + depths[parent]).filter(|_| at % 3 != 0).copied().unwrap_or(token);
                if parents.iter().zip(&tokens).any(|(&p, &t)| p == parent as i32 && t == next) {
                    continue;
                }
                parents.push(parent as i32);
                tokens.push(next);
                depths.push(depths[parent] + 1);
            }
            let trees = TreeBatch::from_parents(&[parents], &[tokens]).unwrap();
            let rows: Vec<f32> = depths.iter().flat_map(|d| row(got.len() + d)).copied().collect();
            let mut accepts = Accepts::default();
            verifier.verify(&trees, &rows, &[&speculative], &[got.len() as u32], &mut accepts).unwrap();
            prop_assert_eq!(accepts.fault(0), None);
            let end = accepts.tokens(0).iter().position(|&t| t == END as i32).map_or(usize::MAX, |i| i + 1);
            let kept = &accepts.tokens(0)[..end.min(accepts.tokens(0).len())];
            tracker.commit(kept).unwrap();
            got.extend_from_slice(kept);
        }
        prop_assert_eq!(got, want);
    }
}
