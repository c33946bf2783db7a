//! 27338: the width of one draft step's per-branch `kv_indices` without topk.

use specrs::Error;
use specrs::geometry::Layout;
use specrs::plan::{AnyFormat, Batch, DraftMask, Extent, FlashInfer, Format, Lens, MaskForm, Phase, Planner, Triton};
use specrs::revert::{Fault, Reverts};

use crate::common::plan::Batch as Case;
use crate::fixed::{Fixed, capacity};
use crate::{Config, draft_into, planner, snapshot};

const REVERTED: Reverts = Reverts::NONE.and(Fault::BranchWidth);
const FORMATS: [AnyFormat; 2] = [AnyFormat::FlashInfer(FlashInfer { mask: MaskForm::Both }), AnyFormat::Triton(Triton)];

/// Draft step `step` of one request of `len` tokens, into arrays of the planner's own.
fn draft(c: Config, len: u32, step: u32, reverts: Reverts) -> Result<(), Error> {
    let g = c.geometry(reverts);
    let case = Case::new(&g, &[len], 7);
    let mut planner = Planner::new(g, FORMATS[0])?;
    let batch = Batch::new(&case.seqs, Lens::Host(&case.lens));
    case.pool.with_tables(|t| planner.draft(&t, &batch, step, DraftMask::Lane))?.map(|_| ())
}

/// The smallest by branches, steps, page size, batch, context, length.
#[test]
fn the_smallest_configuration() {
    let mut found = None;
    'search: for k in 1..=4 {
        for s in 1..=3 {
            for p in [1, 2, 4] {
                for context in 1..=6 {
                    for len in 0..context {
                        let c = Config { k, s, v: 1, p, batch: 1, context, layout: Layout::Dense };
                        if let Some(step) = (0..s).find(|&step| draft(c, len, step, REVERTED).is_err()) {
                            found = Some((c, len, step));
                            break 'search;
                        }
                    }
                }
            }
        }
    }
    let c = Config { k: 2, s: 1, v: 1, p: 1, batch: 1, context: 2, layout: Layout::Dense };
    assert_eq!(found, Some((c, 1, 0)));
    assert_eq!(draft(c, 1, 0, Reverts::NONE), Ok(()));
}

/// In static buffers at the capacity that the configuration states: the lists of two branches do not fit one's width.
#[test]
fn the_guard_fires_and_nothing_around_it_changes() {
    let c = Config { k: 2, s: 1, v: 1, p: 1, batch: 2, context: 4, layout: Layout::Dense };
    let (g, phase) = (c.geometry(REVERTED), Phase::Draft { step: 0 });
    for format in FORMATS {
        // 2 requests * (4 + 1), where the two branches of each need 2 * 2 * 4.
        assert_eq!(capacity(&format, &g, phase, 2, "kv_indices"), Extent::Line(10));
        let mut fixed = Fixed::new(&format, &g, phase, 2);
        let case = Case::new(&g, &[3, 3], 5);
        let mut planner = planner(g, format);
        // One request alone: 2 * (3 + 1) elements fit.
        draft_into(&mut planner, &case.pool, (&case.seqs, &[3]), 0, None, &mut fixed.arrays).unwrap();
        let before = (fixed.contents(), fixed.arrays.generation(), snapshot(&case.pool, &case.seqs));
        let got = draft_into(&mut planner, &case.pool, (&case.seqs, &[3, 3]), 0, None, &mut fixed.arrays);
        let want = Error::Capacity {
            what: "kv_indices",
            need: 16,
            have: 10,
            hint: format!(
                "{} draft step 0 of 2 requests, 4 queries and 6 tokens of prefixes; max_batch 2, max_context_len 4, \
                 page_size 1, topk 2, steps 1, draft_tokens 1, dense layout",
                format.name()
            ),
        };
        assert_eq!(got, Err(want));
        assert_eq!((fixed.contents(), fixed.arrays.generation(), snapshot(&case.pool, &case.seqs)), before);
        fixed.finish();
    }
}

#[test]
fn the_same_configuration_without_the_switch() {
    let c = Config { k: 2, s: 1, v: 1, p: 1, batch: 2, context: 4, layout: Layout::Dense };
    let (g, phase) = (c.geometry(Reverts::NONE), Phase::Draft { step: 0 });
    for format in FORMATS {
        assert_eq!(capacity(&format, &g, phase, 2, "kv_indices"), Extent::Line(16)); // 2 * 2 * 4
        let mut fixed = Fixed::new(&format, &g, phase, 2);
        let case = Case::new(&g, &[3, 3], 5);
        let mut planner = planner(g, format);
        draft_into(&mut planner, &case.pool, (&case.seqs, &[3, 3]), 0, None, &mut fixed.arrays).unwrap();
        assert_eq!(fixed.arrays.line::<i32>("kv_indptr"), [0, 4, 8, 12, 16]);
        // The list of each branch: the prefix, and its own slot.
        let list = |i: usize, b: u32| [0, 1, 2, 3 + b].map(|pos| case.slot(i, pos));
        let want = [list(0, 0), list(0, 1), list(1, 0), list(1, 1)].concat();
        match format {
            AnyFormat::Triton(_) => {
                let want: Vec<i64> = want.iter().map(|&s| s.into()).collect();
                assert_eq!(fixed.arrays.line::<i64>("kv_indices"), want);
            }
            _ => assert_eq!(fixed.arrays.line::<i32>("kv_indices"), want),
        }
        fixed.finish();
    }
}
