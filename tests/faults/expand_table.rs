//! 27360: the expand page table of a draft step filled with the pages of all S steps.

use specrs::Error;
use specrs::geometry::Layout;
use specrs::plan::{AnyFormat, Batch, DraftMask, Extent, FlashAttention, Lens, Phase, Planner};
use specrs::revert::{Fault, Reverts};

use crate::common::plan::Batch as Case;
use crate::fixed::{Fixed, capacity};
use crate::{Config, draft_into, planner, snapshot};

const REVERTED: Reverts = Reverts::NONE.and(Fault::ExpandTable);
const FORMAT: AnyFormat = AnyFormat::FlashAttention(FlashAttention);

fn draft(c: Config, len: u32, step: u32, reverts: Reverts) -> Result<(), Error> {
    let g = c.geometry(reverts);
    let case = Case::new(&g, &[len], 7);
    let mut planner = Planner::new(g, FORMAT)?;
    let batch = Batch::new(&case.seqs, Lens::Host(&case.lens));
    case.pool.with_tables(|t| planner.draft(&t, &batch, step, DraftMask::Lane))?.map(|_| ())
}

/// The smallest by draft slots, page size, length, step.
#[test]
fn the_smallest_configuration() {
    let mut found = None;
    'search: for slots in 1..=8u32 {
        for k in (1..=slots).filter(|k| slots % k == 0) {
            for p in [1, 2, 4] {
                for len in 0..p {
                    let s = slots / k;
                    let c = Config { k, s, v: 1, p, batch: 1, context: 2 * p, layout: Layout::Holey };
                    if let Some(step) = (0..s).find(|&step| draft(c, len, step, REVERTED).is_err()) {
                        found = Some((c, len, step));
                        break 'search;
                    }
                }
            }
        }
    }
    let c = Config { k: 2, s: 2, v: 1, p: 2, batch: 1, context: 4, layout: Layout::Holey };
    assert_eq!(found, Some((c, 1, 0)));
    assert_eq!(draft(c, 1, 0, Reverts::NONE), Ok(()));
}

/// Three requests, of which the second has r = 1: its branches have 2 pages for 2 steps, the table of step 0 one column.
const CASE: Config = Config { k: 2, s: 2, v: 1, p: 2, batch: 3, context: 8, layout: Layout::Holey };
const LENS: [u32; 3] = [4, 5, 2];

#[test]
fn the_guard_fires_and_nothing_around_it_changes() {
    let (g, phase) = (CASE.geometry(REVERTED), Phase::Draft { step: 0 });
    assert_eq!(capacity(&FORMAT, &g, phase, 3, "expand_page_table"), Extent::Table { rows: 6, cols: 1 });
    let mut fixed = Fixed::new(&FORMAT, &g, phase, 3);
    let case = Case::new(&g, &LENS, 5);
    let before = snapshot(&case.pool, &case.seqs);
    let got = draft_into(&mut planner(g, FORMAT), &case.pool, (&case.seqs, &LENS), 0, None, &mut fixed.arrays);
    let want = Error::Capacity {
        what: "expand_page_table",
        need: 2,
        have: 1,
        hint: "columns of request 1, query 0: flash_attention draft step 0 of 3 requests, 6 queries and 11 \
               tokens of prefixes; max_batch 3, max_context_len 8, page_size 2, topk 2, steps 2, draft_tokens 1, \
               holey layout"
            .into(),
    };
    assert_eq!(got, Err(want));
    assert_eq!(snapshot(&case.pool, &case.seqs), before);
    fixed.finish();
}

/// A step later the table has the two columns, so that the fault shows at step 0 alone: why it was not seen.
#[test]
fn later_steps_have_room() {
    let g = CASE.geometry(REVERTED);
    let case = Case::new(&g, &LENS, 5);
    let mut fixed = Fixed::new(&FORMAT, &g, Phase::Draft { step: 1 }, 3);
    draft_into(&mut planner(g, FORMAT), &case.pool, (&case.seqs, &LENS), 1, None, &mut fixed.arrays).unwrap();
    fixed.finish();
}

#[test]
fn the_same_configuration_without_the_switch() {
    let (g, phase) = (CASE.geometry(Reverts::NONE), Phase::Draft { step: 0 });
    let mut fixed = Fixed::new(&FORMAT, &g, phase, 3);
    let case = Case::new(&g, &LENS, 5);
    draft_into(&mut planner(g, FORMAT), &case.pool, (&case.seqs, &LENS), 0, None, &mut fixed.arrays).unwrap();
    // base and, with the step's own token, r + 1 of each request's branches.
    assert_eq!(fixed.arrays.line::<i32>("cache_seqlens"), [4, 4, 2]);
    assert_eq!(fixed.arrays.line::<i32>("expand_cache_seqlens"), [1, 1, 2, 2, 1, 1]);
    // Branch b begins n pages behind branch 0; n = ceil((r + 2) / 2) is 1, 2, 1.
    let page = |i: usize, pos: u32| case.slot(i, pos) / 2;
    let want = [(0, 4), (0, 6), (1, 4), (1, 8), (2, 2), (2, 4)].map(|(i, pos)| page(i, pos));
    let rows: Vec<i32> = (0..6).flat_map(|q| fixed.arrays.row::<i32>("expand_page_table", q)).copied().collect();
    assert_eq!(rows, want);
    fixed.finish();
}
