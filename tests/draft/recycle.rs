//! Token recycling against a map of rows.

use std::collections::HashMap;

use proptest::collection::vec;
use proptest::prelude::*;
use specrs::draft::RecycledTokens;

use crate::common::Mix;
use crate::common::counting::held;

#[test]
fn drafts_follow_the_best_tokens_of_each_row() {
    let mut table = RecycledTokens::new(100, 1 << 16).unwrap();
    table.observe(&[1, 5], &[vec![5, 6, 7], vec![9, 9, 1]]).unwrap();
    let p = table.propose(1, 8, 2).unwrap();
    p.check(100).unwrap();
    assert_eq!(p.tokens, [5, 9, 6, 7, 1], "ranks 0, 0-0, 1, 2, 0-1: {:?}", p.probs);
    assert_eq!((&p.parents[..], &p.buckets[..]), (&[-1, 0, -1, -1, 0][..], &[0, 0, 1, 2, 1][..]));
    assert_eq!(table.propose(1, 8, 1).unwrap().tokens, [5, 6, 7]);
    assert!(table.propose(2, 8, 8).unwrap().is_empty());
    // The drawn token is the first choice; the others move back.
    table.follow(&[1, 7, 1, 8]).unwrap();
    assert_eq!(table.propose(1, 4, 1).unwrap().tokens, [8, 7, 5, 6]);
    // A cycle ends with the nodes or the levels.
    table.observe(&[30], &[[30]]).unwrap();
    assert_eq!(table.propose(30, 3, 64).unwrap().tokens, [30; 3]);
}

#[test]
fn refusals_change_nothing() {
    let mut table = RecycledTokens::new(10, 4096).unwrap();
    assert!(table.observe(&[1, 2], &[[3]]).is_err());
    assert_eq!(table.observe(&[1, 2], &[[3], [10]]).unwrap_err().to_string(), "token = 10 is outside 0..=9");
    assert!(table.observe(&[10], &[[3]]).is_err() && table.follow(&[1, 2, 10]).is_err());
    assert!(table.is_empty() && table.propose(10, 1, 1).is_err() && table.propose(1, 1 << 20, 1).is_err());
    assert!(RecycledTokens::new(10, 4095).is_err() && RecycledTokens::new(0, 4096).is_err());
}

#[test]
fn a_limit_holds_and_what_is_recent_stays() {
    for limit in [4096, 100_000, 1 << 20] {
        let (mut mix, before) = (Mix(3), held());
        let mut table = RecycledTokens::new(1 << 22, limit).unwrap();
        for i in 0..100_000u32 {
            let token = mix.below(1 << 22) as u32;
            table.observe(&[token], &[[i, i + 1]]).unwrap();
            assert_eq!(table.bytes() as isize, held() - before);
            assert!(table.bytes() <= limit);
            assert_eq!(table.propose(token, 1, 1).unwrap().tokens, [i]);
        }
        assert!(table.len() * 36 * 8 > limit, "{} rows in {limit} bytes", table.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn rows_are_those_of_a_map(rows in vec((0u32..60, vec(0u32..60, 0..12)), 0..200)) {
        let mut table = RecycledTokens::new(60, 1 << 20).unwrap();
        let mut map: HashMap<u32, Vec<u32>> = HashMap::new();
        for (token, best) in rows {
            table.observe(&[token], &[&best]).unwrap();
            let mut distinct = Vec::new();
            best.iter().for_each(|t| if !distinct.contains(t) && distinct.len() < 8 { distinct.push(*t) });
            map.insert(token, distinct);
        }
        for token in 0..60 {
            let want = map.get(&token).cloned().unwrap_or_default();
            prop_assert_eq!(table.propose(token, 8, 1).unwrap().tokens, want);
        }
        prop_assert_eq!(table.len(), map.len());
    }
}
