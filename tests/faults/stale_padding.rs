//! 23037: dead queries of a static buffer that keep what the last replay wrote. (The second half, outputs that are held
//! across replays, is a matter of the Python views: `tests/python/faults/test_faults.py`.)

use specrs::Error;
use specrs::geometry::Layout;
use specrs::plan::{AnyFormat, Batch, Bucket, FlashAttention, FlashInfer, Lens, MaskForm, Phase, Trees, Triton};
use specrs::revert::{Fault, Reverts};

use crate::common::plan::Batch as Case;
use crate::fixed::Fixed;
use crate::{Config, draft_into, planner, snapshot};

const REVERTED: Reverts = Reverts::NONE.and(Fault::StalePadding);
const FORMATS: [AnyFormat; 3] = [
    AnyFormat::FlashInfer(FlashInfer { mask: MaskForm::Both }),
    AnyFormat::FlashAttention(FlashAttention),
    AnyFormat::Triton(Triton),
];

/// Draft step 0 of `max_batch` requests of `len` tokens, then of the first `live` of them padded to as many.
fn replay(c: Config, format: AnyFormat, len: u32, live: usize, reverts: Reverts) -> Result<(), Error> {
    let g = c.geometry(reverts);
    let mut fixed = Fixed::new(&format, &g, Phase::Draft { step: 0 }, c.batch);
    let lens = vec![len; c.batch as usize];
    let case = Case::new(&g, &lens, 7);
    let mut planner = planner(g, format);
    planner.set_debug(false); // the guard does not need it
    draft_into(&mut planner, &case.pool, (&case.seqs, &lens), 0, None, &mut fixed.arrays)?;
    let pad = Some(Bucket { batch: c.batch, queries: c.batch * c.k });
    let got = draft_into(&mut planner, &case.pool, (&case.seqs, &lens[..live]), 0, pad, &mut fixed.arrays);
    fixed.finish();
    case.pool.audit().unwrap();
    got
}

/// The smallest by requests, draft slots, page size, length: an idle replay of a bucket of one.
#[test]
fn the_smallest_configuration() {
    let mut found = None;
    'search: for batch in 1..=3 {
        for k in 1..=2 {
            for p in [1, 2] {
                for len in 0..2 {
                    let c = Config { k, s: 1, v: 1, p, batch, context: 4, layout: Layout::Dense };
                    for live in 0..batch as usize {
                        if replay(c, FORMATS[0], len, live, REVERTED).is_err() {
                            found = Some((c, len, live));
                            break 'search;
                        }
                    }
                }
            }
        }
    }
    let c = Config { k: 1, s: 1, v: 1, p: 1, batch: 1, context: 4, layout: Layout::Dense };
    assert_eq!(found, Some((c, 0, 0)));
    for format in FORMATS {
        assert!(replay(c, format, 0, 0, REVERTED).is_err(), "{format:?}");
        assert_eq!(replay(c, format, 0, 0, Reverts::NONE), Ok(()), "{format:?}");
    }
}

/// A bucket of 3 with two live requests, behind a replay with three.
const CASE: Config = Config { k: 2, s: 2, v: 4, p: 2, batch: 3, context: 16, layout: Layout::Dense };

#[test]
fn the_guard_fires_and_nothing_around_it_changes() {
    let g = CASE.geometry(REVERTED);
    for format in FORMATS {
        let mut fixed = Fixed::new(&format, &g, Phase::Draft { step: 0 }, 3);
        let case = Case::new(&g, &[5, 4, 3], 5);
        let mut planner = planner(g, format);
        planner.set_debug(false);
        draft_into(&mut planner, &case.pool, (&case.seqs, &case.lens), 0, None, &mut fixed.arrays).unwrap();
        let before = snapshot(&case.pool, &case.seqs);
        let pad = Some(Bucket { batch: 3, queries: 6 });
        let got = draft_into(&mut planner, &case.pool, (&case.seqs, &[5, 4]), 0, pad, &mut fixed.arrays);
        // The third request's lists ended at 2 * (6 + 5) + 4 = 26 and 30; now there are 22 keys in all.
        let found = match format {
            AnyFormat::FlashInfer(_) => {
                "flashinfer draft step 0: padded query 4 reads what is not there: flashinfer: index 26 into kv_indices is \
                 outside 0..22 (request 4, step -1)"
            }
            AnyFormat::Triton(_) => {
                "triton draft step 0: padded query 4 reads what is not there: triton: index 26 into kv_indices is \
                 outside 0..22 (request 4, step -1)"
            }
            // The lengths are the old ones, 3 and 1, of rows that hold the sink by now.
            _ => "flash_attention draft step 0: padded query 4 reads slot 0, the first of 4",
        };
        let want = Error::Invalid {
            what: "dead query",
            got: found.into(),
            why: "a padded query attends to nothing; 2 of 3 requests and 4 of 6 queries are live".into(),
        };
        assert_eq!(got, Err(want));
        assert_eq!(snapshot(&case.pool, &case.seqs), before);
        fixed.finish();
    }
}

/// A verification's requests share the queries out: a dead request with queries behind the last live one is seen too.
#[test]
fn stale_requests_behind_the_last_query() {
    for (reverts, fires) in [(REVERTED, true), (Reverts::NONE, false)] {
        let g = CASE.geometry(reverts);
        for format in FORMATS {
            let mut fixed = Fixed::new(&format, &g, Phase::Verify, 3);
            let case = Case::new(&g, &[5, 4, 3], 5);
            let mut planner = planner(g, format);
            planner.set_debug(false);
            let mut verify = |sizes: &[u32], pad| {
                let lens = &case.lens[..sizes.len()];
                let batch = Batch { seqs: &case.seqs[..sizes.len()], lens: Lens::Host(lens), pad };
                let parents: Vec<i32> = sizes.iter().flat_map(|&n| -1..n as i32 - 1).collect();
                let trees = Trees { sizes, parents: &parents };
                let plan = case.pool.with_tables(|t| planner.verify(&t, &batch, trees)).unwrap().unwrap();
                case.pool.with_tables(|t| planner.lower(&t, &plan, &mut fixed.arrays)).unwrap()
            };
            verify(&[4, 4, 4], None).unwrap();
            // One request of 4 nodes, padded to 3 requests and no further query: the old starts 8 and 12 lie behind them.
            let got = verify(&[4], Some(Bucket { batch: 3, queries: 4 }));
            assert_eq!(got.is_err(), fires, "{format:?}: {got:?}");
            if let Err(e) = got {
                assert!(e.to_string().contains("verify: padded query 4 "), "{e}");
                continue;
            }
            let starts = match format {
                AnyFormat::Triton(_) => fixed.arrays.line::<i64>("qo_indptr").to_vec(),
                AnyFormat::FlashInfer(_) => fixed.arrays.line("qo_indptr").iter().map(|&q: &i32| q.into()).collect(),
                _ => fixed.arrays.line("cu_seqlens_q").iter().map(|&q: &i32| q.into()).collect(),
            };
            assert_eq!(starts, [0, 4, 4, 4]);
            fixed.finish();
        }
    }
}

#[test]
fn the_same_configuration_without_the_switch() {
    let g = CASE.geometry(Reverts::NONE);
    for format in FORMATS {
        let mut fixed = Fixed::new(&format, &g, Phase::Draft { step: 0 }, 3);
        let case = Case::new(&g, &[5, 4, 3], 5);
        let mut planner = planner(g, format);
        planner.set_debug(false);
        draft_into(&mut planner, &case.pool, (&case.seqs, &case.lens), 0, None, &mut fixed.arrays).unwrap();
        let pad = Some(Bucket { batch: 3, queries: 6 });
        draft_into(&mut planner, &case.pool, (&case.seqs, &[5, 4]), 0, pad, &mut fixed.arrays).unwrap();
        match format {
            AnyFormat::FlashAttention(_) => {
                assert_eq!(fixed.arrays.line::<i32>("cache_seqlens"), [5, 4, 0]);
                assert_eq!(fixed.arrays.line::<i32>("expand_cache_seqlens"), [1, 1, 1, 1, 0, 0]);
            }
            _ => assert_eq!(fixed.arrays.line::<i32>("kv_indptr"), [0, 6, 12, 17, 22, 22, 22]),
        }
        fixed.finish();
    }
}
