//! The named historical faults (`src/revert.rs`, `docs/faults.md`), a file each: the smallest configuration that triggers
//! it, found by search; the guard that stops it, with the right operands and nothing around it touched; and the same
//! configuration without the switch. `tests/mutants.py` takes the guards out one by one and sees these tests fail.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;

mod branch_width;
mod expand_table;
mod fixed;
mod holey_reserve;
mod host_lengths;
mod stale_padding;
mod together;

use specrs::Error;
use specrs::geometry::{Geometry, Layout, Limits, TreeShape};
use specrs::plan::{AnyFormat, Arrays, Batch, Bucket, DraftMask, Lens, Planner};
use specrs::pool::{Pool, SeqId};
use specrs::revert::{FAULTS, Fault, Reverts};

/// A configuration of one of the faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Config {
    k: u32,
    s: u32,
    v: u32,
    p: u32,
    batch: u32,
    context: u32,
    layout: Layout,
}

impl Config {
    fn geometry(self, reverts: Reverts) -> Geometry {
        let limits = Limits { max_batch: self.batch, max_context_len: self.context, page_size: self.p };
        Geometry::with_reverts(limits, TreeShape::new(self.k, self.s, self.v).unwrap(), self.layout, reverts).unwrap()
    }
}

/// A planner whose arrays are written into memory of a caller.
fn planner(geometry: Geometry, format: AnyFormat) -> Planner<AnyFormat> {
    let mut planner = Planner::new(geometry, format).unwrap();
    planner.defer_arrays(true);
    planner
}

/// Plan draft step `step` of the first `lens.len()` of `seqs`, lanes, and write its arrays into `arrays`.
fn draft_into(
    planner: &mut Planner<AnyFormat>,
    pool: &Pool,
    (seqs, lens): (&[SeqId], &[u32]),
    step: u32,
    pad: Option<Bucket>,
    arrays: &mut Arrays,
) -> Result<(), Error> {
    let batch = Batch { seqs: &seqs[..lens.len()], lens: Lens::Host(lens), pad };
    let plan = pool.with_tables(|t| planner.draft(&t, &batch, step, DraftMask::Lane)).unwrap()?;
    pool.with_tables(|t| planner.lower(&t, &plan, arrays)).unwrap()
}

/// Every page of every sequence and the free pages, to compare before and after.
fn snapshot(pool: &Pool, seqs: &[SeqId]) -> (Vec<Vec<u32>>, u32) {
    pool.audit().unwrap();
    let pages = seqs.iter().map(|&s| pool.pages(s).unwrap().iter().map(|p| p.get()).collect()).collect();
    (pages, pool.stats().unwrap().free_pages)
}

/// A switch changes the sizes that its fault is about and no others.
#[test]
fn switches_change_no_other_sizes() {
    let c = Config { k: 3, s: 6, v: 16, p: 4, batch: 8, context: 2048, layout: Layout::Holey };
    let plain = c.geometry(Reverts::NONE);
    for f in FAULTS {
        let other = c.geometry(Reverts::NONE.and(f.fault));
        assert!(other != plain && other.reverts().has(f.fault));
        let sizes = |g: &Geometry| (g.alloc_len_per_decode(), g.row_width(), g.per_branch_kv_indices().unwrap());
        let same = !matches!(f.fault, Fault::BranchWidth | Fault::HoleyReserve);
        assert_eq!(sizes(&other) == sizes(&plain), same, "{f:?}");
        assert_eq!(other.draft_expand_width(3), plain.draft_expand_width(3));
    }
}
