//! The corpus: drafts against a scan of its documents, and files that lie.

use std::path::PathBuf;

use proptest::collection::vec;
use proptest::prelude::*;
use specrs::draft::{Corpus, CorpusDrafts, write_corpus};

use crate::common::Mix;

/// A file that goes when the test ends.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let id = format!("specrs-{}-{:?}-{name}", std::process::id(), std::thread::current().id());
        Self(std::env::temp_dir().join(id))
    }

    fn corpus(&self, documents: &[Vec<u32>]) -> Corpus {
        let all: Vec<&[u32]> = documents.iter().map(Vec::as_slice).collect();
        write_corpus(&self.0, 100, &all).unwrap();
        Corpus::open(&self.0, true).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn occurs(documents: &[Vec<u32>], string: &[u32]) -> bool {
    string.is_empty() || documents.iter().any(|d| d.windows(string.len()).any(|w| w == string))
}

#[test]
fn a_text_of_the_corpus_is_followed() {
    let scratch = Scratch::new("followed");
    let documents: Vec<Vec<u32>> = vec![(0..90).collect(), vec![5, 6, 60, 61, 62], vec![7; 30]];
    let corpus = scratch.corpus(&documents);
    assert_eq!((corpus.len(), corpus.documents(), corpus.vocab()), (125, 3, 100));
    let mut drafts = CorpusDrafts::new(&corpus, 120).unwrap();
    drafts.extend(&[99, 119, 10, 11, 12]).unwrap();
    assert_eq!(drafts.matched(), 3);
    let p = drafts.propose_after(&[], 32, 32).unwrap();
    p.check(100).unwrap();
    assert!(p.tokens.starts_with(&[13, 14, 15, 16]), "{:?}", p.tokens);
    // Both documents go on.
    drafts.extend(&[5, 6]).unwrap();
    let p = drafts.propose_after(&[], 8, 1).unwrap();
    let mut next = p.tokens.clone();
    next.sort();
    assert_eq!(next, [7, 60]);
    // The end of a document has no follower.
    drafts.extend(&[60, 61, 62]).unwrap();
    assert_eq!(drafts.matched(), 5);
    assert!(!drafts.propose_after(&[], 8, 8).unwrap().tokens.contains(&7));
    assert!(CorpusDrafts::new(&corpus, 99).is_err() && drafts.extend(&[120]).is_err());
}

#[test]
fn a_long_match_stays_long() {
    let scratch = Scratch::new("long");
    let mut mix = Mix(9);
    let document: Vec<u32> = (0..5000).map(|_| mix.below(64) as u32).collect();
    let corpus = scratch.corpus(std::slice::from_ref(&document));
    let mut drafts = CorpusDrafts::new(&corpus, 100).unwrap();
    for piece in document[..4000].chunks(7) {
        drafts.extend(piece).unwrap();
    }
    assert!(drafts.matched() >= 32, "{}", drafts.matched());
    let p = drafts.propose_after(&[], 80, 80).unwrap();
    let at = document[..4000].chunks(7).map(<[_]>::len).sum::<usize>();
    let along = |node: i32, token: &u32| (0..p.len()).find(|&n| p.parents[n] == node && p.tokens[n] == *token);
    let mut node = -1;
    for token in &document[at..at + 50] {
        node = along(node, token).unwrap() as i32;
    }
}

#[test]
fn files_that_lie_are_refused_by_name() {
    let scratch = Scratch::new("lies");
    scratch.corpus(&[(0..50).collect(), (10..20).collect()]);
    let good = std::fs::read(&scratch.0).unwrap();
    let open = |bytes: &[u8], verify: bool| {
        std::fs::write(&scratch.0, bytes).unwrap();
        Corpus::open(&scratch.0, verify).map(drop).map_err(|e| e.to_string())
    };
    let with = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] ^= value;
        bytes
    };
    assert!(open(&good, true).is_ok());
    for length in [0, 1, 63, 64, 65, good.len() - 1, good.len() - 4] {
        let error = open(&good[..length], false).unwrap_err();
        assert!(error.contains("corpus file"), "{length}: {error}");
    }
    assert!(open(&[&good[..], &[0]].concat(), false).unwrap_err().contains("cut short, or longer"));
    assert!(open(&with(0, 1), false).unwrap_err().contains("SPECRSTC"));
    assert!(open(&with(8, 2), false).unwrap_err().contains("version 3"));
    assert!(open(&with(15, 1), false).unwrap_err().contains("vocabulary"));
    assert!(open(&with(23, 0xff), false).unwrap_err().contains("tokens"));
    assert!(open(&with(31, 1), false).unwrap_err().contains("documents"));
    assert!(open(&with(32, 1), false).unwrap_err().contains("sorted"));
    assert!(open(&with(60, 1), false).unwrap_err().contains("version 1"));
    // Damage is found by whoever looks for it.
    for at in (16..48).chain(64..good.len()) {
        assert!(open(&with(at, 0x40), true).is_err(), "byte {at}");
    }
    assert!(Corpus::open(&scratch.0.join("none"), true).is_err() && Corpus::open(&std::env::temp_dir(), true).is_err());
}

#[test]
fn documents_that_are_none_are_refused() {
    let scratch = Scratch::new("none");
    for documents in [&[][..], &[&[][..]], &[&[1, 2][..], &[]], &[&[1, 100][..]]] {
        assert!(write_corpus(&scratch.0, 100, documents).is_err(), "{documents:?}");
    }
    assert!(!scratch.0.exists() && write_corpus(&scratch.0, 0, &[&[0]]).is_err());
    assert!(write_corpus(&scratch.0.join("no/such"), 100, &[&[1]]).is_err());
}

#[test]
fn a_string_of_what_is_no_token_is_found_nowhere() {
    let scratch = Scratch::new("no-token");
    scratch.corpus(&[vec![1, 2, 3, 4]]);
    let mut bytes = std::fs::read(&scratch.0).unwrap();
    // Unsorted: the interval of token 1 begins with the suffix of a number that no token can be.
    let words = [0, u32::MAX, 1, 5, 9, 0, 1, 2, 3, 4].map(u32::to_le_bytes).concat();
    bytes[64..].copy_from_slice(&words);
    std::fs::write(&scratch.0, bytes).unwrap();
    let mut drafts = CorpusDrafts::new(&Corpus::open(&scratch.0, false).unwrap(), 100).unwrap();
    drafts.extend(&[1, 9]).unwrap();
    assert_eq!(drafts.matched(), 1);
}

#[test]
fn writers_at_once_do_not_disturb_each_other() {
    let all = ["writers.a", "writers.b", "writers"].map(Scratch::new);
    std::thread::scope(|threads| {
        for (token, Scratch(path)) in (0u32..).zip(&all).cycle().take(6) {
            threads.spawn(move || (0..5).for_each(|_| write_corpus(path, 100, &[&[token; 3000]]).unwrap()));
        }
    });
    for (token, Scratch(path)) in (0u32..).zip(&all) {
        let corpus = Corpus::open(path, true).unwrap();
        let mut drafts = CorpusDrafts::new(&corpus, 100).unwrap();
        drafts.extend(&[token; 8]).unwrap();
        assert_eq!((corpus.len(), drafts.matched()), (3000, 8));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn matches_are_those_of_a_scan(documents in vec(vec(0u32..4, 1..60), 1..5), text in vec(0u32..5, 0..80)) {
        let scratch = Scratch::new("scan");
        let corpus = scratch.corpus(&documents);
        let mut drafts = CorpusDrafts::new(&corpus, 100).unwrap();
        for n in 1..=text.len() {
            drafts.extend(&text[n - 1..n]).unwrap();
            let want = (0..=n.min(32)).rev().find(|&l| occurs(&documents, &text[n - l..n])).unwrap();
            let got = drafts.matched() as usize;
            let longer = got > 32 && want == 32 && occurs(&documents, &text[n - got..n]);
            prop_assert!(got == want || longer, "{got} {want}");
        }
        let p = drafts.propose_after(&[], 40, 40).unwrap();
        p.check(100).unwrap();
        // Each proposal follows the longest match somewhere, or a shorter one.
        for n in (0..p.len()).filter(|&n| p.parents[n] == -1) {
            let last = [&text[text.len().saturating_sub(1)..], &p.tokens[n..=n]].concat();
            prop_assert!(occurs(&documents, &last), "{last:?}");
        }
    }

    #[test]
    fn a_file_with_any_bytes_behind_a_sound_header_cannot_harm(
        junk in vec(prop_oneof![any::<u32>(), u32::MAX - 2..=u32::MAX, 0u32..62], 61 * 2), text in vec(0u32..60, 0..60),
    ) {
        let scratch = Scratch::new("junk");
        scratch.corpus(&[(0..60).collect()]);
        let mut bytes = std::fs::read(&scratch.0).unwrap();
        bytes[64..].copy_from_slice(&junk.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>());
        std::fs::write(&scratch.0, bytes).unwrap();
        prop_assert!(Corpus::open(&scratch.0, true).is_err());
        let corpus = Corpus::open(&scratch.0, false).unwrap();
        let mut drafts = CorpusDrafts::new(&corpus, 100).unwrap();
        drafts.extend(&text).unwrap();
        drafts.propose_after(&[1, 2], 64, 64).unwrap().check(100).unwrap();
    }
}
