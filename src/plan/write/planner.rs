//! [`Planner`]: writes plans into buffers that it takes back, and checks what it writes while writing it.

use std::sync::Arc;

use crate::bounds::{PageSize, fits_i32};
use crate::error::{Error, Result, in_range};
use crate::geometry::Geometry;
use crate::plan::audit;
use crate::plan::audited::Filled;
use crate::plan::body::check_pool;
use crate::plan::commit::Commit;
use crate::plan::write::arena::Arena;
use crate::plan::write::draft_slots::DraftSlots;
use crate::plan::write::lower::Lower;
use crate::plan::write::place::Rows;
use crate::plan::{Arrays, AuditedPlan, Batch, Bucket, Load, Native, Need, Phase, Plan, Spec};
use crate::pool::{PoolConfig, Tables};
use crate::revert::Fault;

/// Plans the steps of rounds for one geometry and one format.
///
/// Warm, it allocates nothing: a plan's arrays return to the planner when the last handle is dropped.
#[derive(Debug)]
pub struct Planner<F: Lower = Native> {
    pub(super) geometry: Geometry,
    pub(super) format: F,
    debug: bool,
    /// Arrays are left to [`Planner::lower`].
    deferred: bool,
    plans: Arena<Filled>,
    pub(super) commits: Arena<Commit>,
    pub(super) scratch: Scratch,
}

/// Memory that a planner keeps between calls.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// The rows of the batch.
    pub(super) rows: Rows,
    /// Places of the draft's branches.
    pub(super) draft_slots: DraftSlots,
    /// Mask pattern of a draft step, `[K * words]`: own bits, or the lanes.
    pub(super) pattern: Vec<u64>,
    /// Bits that a draft query may have besides its own, `[words]`.
    pub(super) allowed: Vec<u64>,
    /// Ones: the counts of a decode.
    pub(super) ones: Vec<u32>,
}

impl<F: Lower> Planner<F> {
    /// A planner for `geometry` and `format`.
    ///
    /// # Errors
    /// The format's, where it cannot run the geometry.
    pub fn new(geometry: Geometry, format: F) -> Result<Self> {
        format.supports(&geometry)?;
        Ok(Self {
            geometry,
            format,
            debug: cfg!(debug_assertions),
            deferred: false,
            plans: Arena::default(),
            commits: Arena::default(),
            scratch: Scratch::default(),
        })
    }

    /// Check that plans can be made over a pool of `config`: pages of the geometry's size, and rows that hold a whole
    /// context and what a round reserves behind it.
    ///
    /// # Errors
    /// [`Error::Mismatch`] with both page sizes; [`Error::Capacity`] with the columns that a row needs.
    pub fn check_pool(&self, config: &PoolConfig) -> Result<()> {
        check_page(&self.geometry, config.page)?;
        let (need, have) = (self.geometry.row_pages(), config.row_pages);
        if have < need {
            let (limits, reserve) = (self.geometry.limits(), self.geometry.reserve_per_decode());
            let hint = format!(
                "columns of the pool's page table: max_context_len {} and {reserve} positions that rounds reserve, in \
                 pages of {}; make the pool with row_pages = {need}",
                limits.max_context_len, limits.page_size
            );
            return Err(Error::Capacity { what: "row_pages", need: need.into(), have: have.into(), hint });
        }
        Ok(())
    }

    /// The geometry.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Debug mode: buffers are filled with poison before they are written, an element that still holds poison afterwards
    /// is an error, and every plan is audited again in full from its arrays alone. On by default in debug builds.
    pub fn set_debug(&mut self, on: bool) {
        self.debug = on;
    }

    /// The format.
    pub fn format(&self) -> &F {
        &self.format
    }

    /// If on, plans carry no format arrays; fill your own with [`Planner::lower`].
    pub fn defer_arrays(&mut self, on: bool) {
        self.deferred = on;
    }

    /// Write the arrays of `plan` into `arrays`, which were made for this planner's format.
    ///
    /// # Errors
    /// [`Error::Capacity`] with need, have and the configuration where an array is too small, before any is written;
    /// [`Error::Dead`] for a plan of another pool, and where a row's pages have changed since it was made;
    /// [`Error::Mismatch`] for a plan of another geometry or arrays of another format.
    pub fn lower(&self, tables: &Tables<'_>, plan: &AuditedPlan<F>, arrays: &mut Arrays) -> Result<()> {
        plan.check_rows(tables)?;
        if plan.0.geometry != Some(self.geometry) {
            return Err(Error::Mismatch {
                operand: "plan",
                got: plan.0.geometry.map_or("no geometry".into(), |g| format!("a plan for {g:?}")),
                want: format!("one for the planner's {:?}", self.geometry),
            });
        }
        if !arrays.specs().eq(self.format.arrays()) {
            let names = |all: &mut dyn Iterator<Item = &Spec>| all.map(|s| s.name).collect::<Vec<_>>().join(", ");
            let (got, want) = (names(&mut arrays.specs()), names(&mut self.format.arrays().iter()));
            let want = format!("those of {}: {want}", self.format.name());
            return Err(Error::Mismatch { operand: "arrays", got, want });
        }
        write_arrays(&self.format, plan, tables, &self.geometry, self.debug, arrays)
    }

    /// Bodies there are, in use or free: the largest number of plans that were alive at once.
    pub fn bodies(&self) -> usize {
        self.plans.len()
    }

    /// Write a plan of `queries` live queries with `fill`, pad it, check it and derive its format's arrays.
    pub(super) fn build(
        &mut self,
        tables: &Tables<'_>,
        batch: &Batch<'_>,
        phase: Phase,
        queries: u64,
        mask_words: u32,
        fill: impl FnOnce(&Geometry, &mut Scratch, &mut Plan) -> Result<()>,
    ) -> Result<AuditedPlan<F>> {
        let lens = batch.lens.host(phase.name())?;
        let Self { geometry, format, debug, deferred, plans, scratch, .. } = self;
        check_batch(geometry, tables, batch)?;
        scratch.rows.resolve(tables, batch.seqs)?;
        let behind_settled = scratch.rows.check_lens(tables, phase.name(), lens, phase == Phase::Extend)?;
        let filled = plans.fill(|body| {
            body.geometry = Some(*geometry);
            body.plan.pool = Some(tables.pool());
            shape(&mut body.plan, geometry, batch, phase, queries, mask_words, *debug)?;
            body.plan.rows.get_mut()[..batch.seqs.len()].copy_from_slice(&scratch.rows.ids);
            body.plan.versions.get_mut()[..batch.seqs.len()].copy_from_slice(&scratch.rows.versions);
            if !behind_settled {
                scratch.rows.write_settled(lens, &mut body.plan.settled)?;
            }
            fill(geometry, scratch, &mut body.plan)?;
            if *debug {
                check_poison(&body.plan)?;
                audit::check(&body.plan, tables, geometry)?;
            }
            if *deferred || format.arrays().is_empty() {
                return Ok(());
            }
            if body.arrays.is_empty() {
                body.arrays = Arrays::own(format.arrays());
            }
            write_arrays(format, &body.plan, tables, geometry, *debug, &mut body.arrays)
        })?;
        Ok(AuditedPlan::new(filled))
    }
}

impl<F: Lower> AuditedPlan<F> {
    /// Check a plan made elsewhere, in full, and derive its format's arrays, which are read back and checked too.
    ///
    /// # Errors
    /// The first fault of the plan, with operands: see [`crate::plan`] for the list of checks.
    pub fn audit(plan: Plan, tables: &Tables<'_>, geometry: &Geometry, format: &F) -> Result<Self> {
        format.supports(geometry)?;
        check_pool(tables, plan.phase.name(), plan.pool)?;
        audit::check(&plan, tables, geometry)?;
        let plan = Plan { pool: Some(tables.pool()), settled: audit::settled(&plan, tables).into(), ..plan };
        let mut arrays = Arrays::own(format.arrays());
        arrays.set_poison(true);
        format.lower(&plan, tables, geometry, &mut arrays)?;
        audit::check_reads(format, &plan, tables, geometry, &arrays, 0..plan.queries())?;
        Ok(Self::new(Arc::new(Filled { plan, arrays, geometry: Some(*geometry) })))
    }
}

/// Write the arrays of a plan. The dead queries of a padded one are read back always, as the kernel would; in debug mode
/// the arrays are poisoned first and every query is read back.
fn write_arrays<F: Lower>(
    format: &F,
    plan: &Plan,
    tables: &Tables<'_>,
    geometry: &Geometry,
    debug: bool,
    arrays: &mut Arrays,
) -> Result<()> {
    arrays.set_poison(debug);
    if geometry.reverts().has(Fault::StalePadding) && plan.is_padded() && arrays.is_fixed() {
        lower_stale(format, plan, tables, geometry, arrays)?;
    } else {
        format.lower(plan, tables, geometry, arrays)?;
    }
    if plan.is_padded() {
        audit::check_padding(format, plan, geometry, arrays)?;
    }
    if debug {
        audit::check_reads(format, plan, tables, geometry, arrays, 0..plan.queries())?;
    }
    Ok(())
}

/// The fault 23037: write the live queries of a padded plan, and leave in the dead ones what the last round left.
#[cold]
fn lower_stale<F: Lower>(
    format: &F,
    plan: &Plan,
    tables: &Tables<'_>,
    geometry: &Geometry,
    arrays: &mut Arrays,
) -> Result<()> {
    let live = plan.without_padding();
    format.lower(&live, tables, geometry, arrays)?;
    let written = format.extents(geometry, &Load::of(&live))?;
    let stated = format.extents(geometry, &Load::of(plan))?;
    let longer = stated.into_iter().filter(|s| !written.contains(s));
    let needs: Vec<Need> = longer.map(|(array, used)| Need { array, used, limit: used }).collect();
    arrays.claim(&needs, || format!("{} {} padded to {} requests", format.name(), plan.phase.name(), plan.batch()))
}

/// Limits that hold for the whole batch.
pub(super) fn check_batch(geometry: &Geometry, tables: &Tables<'_>, batch: &Batch<'_>) -> Result<()> {
    in_range("batch", batch.seqs.len() as i128, 0, geometry.limits().max_batch as i128)?;
    if batch.lens.batch() != batch.seqs.len() {
        return Err(Error::Mismatch {
            operand: "lens",
            got: format!("{} lengths", batch.lens.batch()),
            want: format!("{}, one a request", batch.seqs.len()),
        });
    }
    check_page(geometry, tables.page())
}

/// A pool has the pages that the geometry places by.
fn check_page(geometry: &Geometry, page: PageSize) -> Result<()> {
    if page == geometry.page() {
        return Ok(());
    }
    Err(Error::Mismatch {
        operand: "page size",
        got: format!("a pool with pages of {}", page.get()),
        want: format!("{}, as the planner's geometry", geometry.page().get()),
    })
}

/// Size the arrays and write the dead queries of the padding.
fn shape(
    plan: &mut Plan,
    geometry: &Geometry,
    batch: &Batch<'_>,
    phase: Phase,
    queries: u64,
    words: u32,
    poison: bool,
) -> Result<()> {
    let live_q = fits_i32("queries", queries, || format!("{queries} queries of {} requests", batch.seqs.len()))?;
    let (b, q) = (batch.seqs.len(), live_q as usize);
    let bucket = batch.pad.unwrap_or(Bucket { batch: b as u32, queries: q as u32 });
    let (nb, nq) = (bucket.batch as usize, bucket.queries as usize);
    let largest = Load::limit(geometry, phase, geometry.limits().max_batch)?;
    in_range("bucket requests", bucket.batch, 0, largest.requests as i128)?;
    in_range("bucket queries", bucket.queries, 0, largest.queries as i128)?;
    fits_i32("mask words", bucket.queries as u64 * words as u64, || format!("{nq} queries of {words} words"))?;
    for (what, need, have) in [("bucket requests", b, nb), ("bucket queries", q, nq)] {
        if need > have {
            let hint = format!("{} of {b} requests and {q} queries", phase.name());
            return Err(Error::Capacity { what, need: need as u64, have: have as u64, hint });
        }
    }
    plan.phase = phase;
    plan.page = geometry.page();
    plan.mask_words = words;
    plan.live_batch = b;
    let w = words as usize;
    let rows = plan.rows.reset("rows", nb, poison)?;
    let versions = plan.versions.reset("versions", nb, poison)?;
    let prefix_lens = plan.prefix_lens.reset("prefix_lens", nb, poison)?;
    let indptr = plan.qo_indptr.reset("qo_indptr", nb + 1, poison)?;
    let positions = plan.positions.reset("positions", nq, poison)?;
    let out_slots = plan.out_slots.reset("out_slots", nq, poison)?;
    let mask = plan.mask.reset("mask", nq * w, poison)?;
    plan.settled.clear();
    indptr[0] = 0;
    if (nb, nq) != (b, q) {
        rows[b..].fill(-1);
        versions[b..].fill(0);
        prefix_lens[b..].fill(0);
        indptr[b + 1..].fill(live_q);
        positions[q..].fill(0);
        out_slots[q..].fill(0);
        mask[q * w..].fill(0);
    }
    Ok(())
}

/// Refuse a plan with an element that nobody wrote (debug mode).
fn check_poison(plan: &Plan) -> Result<()> {
    match plan.first_poison() {
        None => Ok(()),
        Some((buffer, at)) => Err(Error::Invalid {
            what: "plan",
            got: format!("{} leaves {buffer}[{at}] unwritten", plan.phase.name()),
            why: "every element, live or dead, is written in every round".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{Layout, Limits, TreeShape};
    use crate::plan::Lens;

    /// A body that held six live queries and is shaped for two: in debug mode every element that is not written again,
    /// live or dead, shows.
    #[test]
    fn an_element_that_nobody_wrote_is_seen() {
        let limits = Limits { max_batch: 4, max_context_len: 64, page_size: 4 };
        let g = Geometry::new(limits, TreeShape::new(2, 2, 4).unwrap(), Layout::Dense).unwrap();
        let pool = crate::pool::Pool::new(crate::pool::PoolConfig {
            num_pages: 64,
            page: g.page(),
            max_seqs: 4,
            row_pages: g.row_pages(),
        })
        .unwrap();
        let seqs = [pool.create().unwrap(), pool.create().unwrap()];
        let lens = [0, 0];
        let batch = Batch::new(&seqs, Lens::Host(&lens)).padded(Bucket { batch: 3, queries: 5 });
        let mut plan = Plan::default();
        shape(&mut plan, &g, &batch, Phase::Verify, 2, 1, true).unwrap();
        for name in ["rows", "versions", "qo_indptr", "prefix_lens", "positions", "out_slots", "mask"] {
            let err = check_poison(&plan).unwrap_err().to_string();
            // Elements behind the live ones are written already: the first poison is at 0 (of qo_indptr, at 1).
            let at = usize::from(name == "qo_indptr");
            assert!(err.starts_with(&format!("plan = verify leaves {name}[{at}] unwritten")), "{err}");
            match name {
                "rows" => plan.rows.get_mut()[..2].fill(1),
                "versions" => plan.versions.get_mut()[..2].fill(1),
                "qo_indptr" => plan.qo_indptr.get_mut()[1..3].fill(1),
                "prefix_lens" => plan.prefix_lens.get_mut()[..2].fill(1),
                "positions" => plan.positions.get_mut()[..2].fill(1),
                "out_slots" => plan.out_slots.get_mut()[..2].fill(1),
                _ => plan.mask.get_mut()[..2].fill(1),
            }
        }
        check_poison(&plan).unwrap();
        // Without poison the same hole would show the last round's values.
        shape(&mut plan, &g, &batch, Phase::Verify, 2, 1, false).unwrap();
        assert_eq!(plan.positions()[..2], [1, 1]);
        check_poison(&plan).unwrap();
    }
}
