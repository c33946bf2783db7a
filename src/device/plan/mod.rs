//! The device planner: plans of rounds whose lengths live on the device alone. The twin of the host's
//! [`plan::write`](crate::plan::write): the same arrays, bit for bit.
//!
//! ```text
//! DeviceTable, DeviceBatch, DeviceStep --DevicePlanner::plan--> DevicePlan --DevicePlanner::lower--> a format's arrays
//! ```
//!
//! Each launch reads lengths, counts, trees and masks from device memory. Grids and memory follow from the bucket, so a
//! captured launch serves every batch that fits it: nothing is allocated, nothing waited for. The kernels check what the
//! host cannot know (each length against the context, each position against the row's pages, each list against its
//! array), leave out what is wrong and record it for [`Device::check`](crate::device::Device::check).
//!
//! A [`DevicePlan`] is no [`AuditedPlan`](crate::plan::AuditedPlan): its guard runs inside the kernels. It can be audited
//! afterwards: copied to the host it is a [`Plan`](crate::plan::Plan) by
//! [`from_parts`](crate::plan::Plan::from_parts), which [`AuditedPlan::audit`](crate::plan::AuditedPlan::audit) checks query
//! by query.
//!
//! | file | what lives there |
//! |---|---|
//! | `mod` | the native form of every phase, and the copies of the holey layout |
//! | `lower` | the arrays of the other formats |

mod lower;

pub use lower::{DeviceArray, DeviceElements};

use super::devices::Device;
use super::driver::Stream;
use super::params::plan::{PlanArrays, PlanParams, TailCopyParams};
use super::params::{plan, table::PageTable};
use super::view::{DeviceSlice, MovesView, device_mismatch};
use crate::bounds::fits_i32;
use crate::error::{Error, Result, in_range, same_length};
use crate::geometry::Geometry;
use crate::overlap::{Operand, Span, disjoint};
use crate::plan::form::Step;
use crate::plan::{Bucket, Load, Phase};

/// The pool's page table on a device: int32 `[rows, columns]`, row-major, 0 where a row has no page.
#[derive(Debug, Clone, Copy)]
pub struct DeviceTable {
    pages: DeviceSlice<i32>,
    /// At least 1 where there are columns; `rows * columns` is the length of `pages`.
    rows: u32,
    columns: u32,
    /// Pages of the pool, the sink included; fits `i32`.
    num_pages: u32,
}

impl DeviceTable {
    /// View `pages` as a table of rows of `columns` entries, each below `num_pages`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for sizes that int32 does not index; [`Error::Mismatch`] where the rows are not whole.
    pub fn new(pages: DeviceSlice<i32>, columns: u32, num_pages: u32) -> Result<Self> {
        in_range("page table columns", columns, 1, i128::from(i32::MAX))?;
        in_range("num_pages", num_pages, 1, i128::from(i32::MAX))?;
        in_range("page table entries", pages.len() as u64, 0, i128::from(i32::MAX))?;
        if !pages.len().is_multiple_of(columns as usize) {
            let (got, want) = (format!("{} entries", pages.len()), format!("whole rows of {columns}"));
            return Err(Error::Mismatch { operand: "page table", got, want });
        }
        Ok(Self { pages, rows: (pages.len() / columns as usize) as u32, columns, num_pages })
    }

    /// The table as kernels take it.
    fn params(&self) -> PageTable {
        PageTable {
            pages: self.pages.address(),
            rows: self.rows as i32, // all three fit
            columns: self.columns as i32,
            num_pages: self.num_pages as i32,
            reserved: 0,
        }
    }

    /// Check that int32 counts the slots of the pool: of a page beyond, the product would be another page's slot.
    fn slots_fit(&self, page_size: u32) -> Result<()> {
        fits_i32("KV slots", u64::from(self.num_pages) * u64::from(page_size), || {
            format!("num_pages {} * page_size {page_size}", self.num_pages)
        })
        .map(|_| ())
    }
}

impl From<Step> for plan::Step {
    fn from(Step { phase, step, shift, topk, steps, nodes, context, holey }: Step) -> Self {
        Self { phase, step, shift, topk, steps, nodes, context, holey }
    }
}

/// The requests of a step, in device memory. B entries each, B the bucket's requests.
#[derive(Debug, Clone, Copy)]
pub struct DeviceBatch<'a> {
    /// Row of the page table; negative for a dead request. Live ones come first.
    pub rows: &'a DeviceSlice<i32>,
    /// Version of the row.
    pub versions: &'a DeviceSlice<u64>,
    /// Committed length (of an extend: where its tokens start).
    pub lens: &'a DeviceSlice<i32>,
    /// An array whose last element counts the live requests; `None` where all with a row are.
    pub live: Option<&'a DeviceSlice<i32>>,
}

/// The step of a round that is planned, with its operands in device memory.
#[derive(Debug, Clone, Copy)]
pub enum DeviceStep<'a> {
    /// Tokens behind a prefix, attended causally: prefill, and the draft model's pass over accepted tokens.
    Extend {
        /// Differences are the tokens of each request, B + 1 entries. The offsets of accepted paths are such.
        offsets: &'a DeviceSlice<i32>,
    },
    /// One token behind each prefix.
    Decode,
    /// K branches a request.
    Draft {
        /// 0-based step.
        step: u32,
        /// Draft slots that each branch attends to, `B * K * draft_mask_words`; `None`: its own lane.
        ancestors: Option<&'a DeviceSlice<u64>>,
    },
    /// A token tree a request.
    Verify {
        /// First node of each tree, B + 1 entries.
        offsets: &'a DeviceSlice<i32>,
        /// Parent of each node within its tree, -1 for a root.
        parents: &'a DeviceSlice<i32>,
    },
}

impl DeviceStep<'_> {
    /// The memory of the operands.
    fn spans(&self) -> [Span; 2] {
        match *self {
            DeviceStep::Extend { offsets } => [offsets.span(), Span::NONE],
            DeviceStep::Decode => [Span::NONE; 2],
            DeviceStep::Draft { ancestors, .. } => [ancestors.span(), Span::NONE],
            DeviceStep::Verify { offsets, parents } => [offsets.span(), parents.span()],
        }
    }

    /// The phase.
    pub fn phase(&self) -> Phase {
        match *self {
            DeviceStep::Extend { .. } => Phase::Extend,
            DeviceStep::Decode => Phase::Decode,
            DeviceStep::Draft { step, .. } => Phase::Draft { step },
            DeviceStep::Verify { .. } => Phase::Verify,
        }
    }
}

/// Device memory of a plan's arrays, those of [`PlanParts`](crate::plan::PlanParts): B requests, Q queries, W mask words a
/// query. B and Q are the bucket.
#[derive(Debug, Clone, Copy)]
pub struct PlanMemory {
    /// `[B]` row of each request; -1 for a dead one.
    pub rows: DeviceSlice<i32>,
    /// `[B]` version of each row; 0 for a dead one.
    pub versions: DeviceSlice<u64>,
    /// `[B + 1]` first query of each request.
    pub qo_indptr: DeviceSlice<i32>,
    /// `[B]` prefix of each request.
    pub prefix_lens: DeviceSlice<i32>,
    /// `[Q]` RoPE positions.
    pub positions: DeviceSlice<i32>,
    /// `[Q]` slots that take the queries' KV; 0 for a dead query.
    pub out_slots: DeviceSlice<i32>,
    /// `[Q * W]` ancestor bits; empty in a causal phase.
    pub mask: DeviceSlice<u64>,
}

impl PlanMemory {
    /// The parts that formats are made of, as kernels take them; sizes were checked.
    fn arrays(&self) -> PlanArrays {
        PlanArrays {
            rows: self.rows.address(),
            qo_indptr: self.qo_indptr.address(),
            prefix_lens: self.prefix_lens.address(),
            out_slots: self.out_slots.address(),
            mask: self.mask.address(),
            batch: self.rows.len() as i32,
            queries: self.positions.len() as i32,
        }
    }

    /// The memory of all arrays.
    fn spans(&self) -> [Span; 7] {
        [
            self.rows.span(),
            self.versions.span(),
            self.qo_indptr.span(),
            self.prefix_lens.span(),
            self.positions.span(),
            self.out_slots.span(),
            self.mask.span(),
        ]
    }
}

/// A plan in device memory, or one that a launch in stream order will have written there.
#[derive(Debug, Clone, Copy)]
pub struct DevicePlan {
    memory: PlanMemory,
    phase: Phase,
    geometry: Geometry,
    table: DeviceTable,
}

impl DevicePlan {
    /// The arrays.
    pub fn memory(&self) -> &PlanMemory {
        &self.memory
    }

    /// The step.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Bucket that the plan is padded to.
    pub fn bucket(&self) -> Bucket {
        Bucket { batch: self.memory.rows.len() as u32, queries: self.memory.positions.len() as u32 }
    }
}

/// Plans the steps of rounds for one geometry on a device.
#[derive(Debug, Clone, Copy)]
pub struct DevicePlanner {
    geometry: Geometry,
    device: &'static Device,
}

/// Every operand is on one device.
fn on_device(device: i32, operands: &[(&'static str, i32)]) -> Result<()> {
    match operands.iter().find(|(_, on)| *on != device) {
        Some(&(operand, on)) => Err(device_mismatch(operand, on, device, "the planner")),
        None => Ok(()),
    }
}

impl DevicePlanner {
    /// A planner for `geometry` on `device`.
    pub fn new(geometry: Geometry, device: &'static Device) -> Self {
        Self { geometry, device }
    }

    /// The geometry.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Address of the live count; 0 where there is none.
    fn live(&self, live: Option<&DeviceSlice<i32>>) -> Result<u64> {
        let Some(live) = live else { return Ok(0) };
        on_device(self.ordinal(), &[("live", live.device())])?;
        in_range("live entries", live.len() as u64, 1, i128::from(i32::MAX))?;
        Ok(live.address() + 4 * (live.len() as u64 - 1))
    }

    fn ordinal(&self) -> i32 {
        self.device.kernels().plan.context().ordinal()
    }

    /// Plan a step into `out`, whose sizes are the bucket. What the arrays hold is what
    /// [`Planner`](crate::plan::Planner) writes for the same batch, padded to that bucket.
    ///
    /// A request at fault (a length, a count, a position, a parent or a bit outside its limits) has row -1 and dead queries,
    /// in the place that its count gives it; queries that do not fit the bucket are cut off. Each is recorded. The kernel does
    /// not know how many owners a page has: the pool's lease guarantees that the pages behind a committed length have one.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for arrays that do not fit each other or lie elsewhere; [`Error::OutOfRange`] for a bucket beyond
    /// the geometry's limits, or a step that it does not have; [`Error::Overflow`] for a pool whose slots int32 does not count.
    pub fn plan(
        &self,
        stream: Stream,
        table: &DeviceTable,
        batch: &DeviceBatch<'_>,
        step: DeviceStep<'_>,
        out: PlanMemory,
    ) -> Result<DevicePlan> {
        let (geometry, phase) = (&self.geometry, step.phase());
        let (b, q) = (out.rows.len(), out.positions.len());
        let limit = Load::limit(geometry, phase, geometry.limits().max_batch)?;
        in_range("bucket requests", b as u64, 0, limit.requests.into())?;
        in_range("bucket queries", q as u64, 0, limit.queries.min(i32::MAX as u64).into())?;
        let words = match phase {
            Phase::Draft { .. } => geometry.draft_mask_words(),
            Phase::Verify => geometry.verify_mask_words(),
            Phase::Extend | Phase::Decode => 0,
        } as usize;
        in_range("mask words", (q * words) as u64, 0, i128::from(i32::MAX))?;
        table.slots_fit(geometry.page().get())?;
        same_length("batch rows", batch.rows.len(), b)?;
        same_length("batch versions", batch.versions.len(), b)?;
        same_length("lens", batch.lens.len(), b)?;
        same_length("versions", out.versions.len(), b)?;
        same_length("qo_indptr", out.qo_indptr.len(), b + 1)?;
        same_length("prefix_lens", out.prefix_lens.len(), b)?;
        same_length("out_slots", out.out_slots.len(), q)?;
        same_length("mask", out.mask.len(), q * words)?;
        let ordinal = self.ordinal();
        on_device(
            ordinal,
            &[
                ("page table", table.pages.device()),
                ("batch rows", batch.rows.device()),
                ("batch versions", batch.versions.device()),
                ("lens", batch.lens.device()),
                ("rows", out.rows.device()),
                ("versions", out.versions.device()),
                ("qo_indptr", out.qo_indptr.device()),
                ("prefix_lens", out.prefix_lens.device()),
                ("positions", out.positions.device()),
                ("out_slots", out.out_slots.device()),
                ("mask", out.mask.device()),
            ],
        )?;
        let read = [table.pages.span(), batch.rows.span(), batch.versions.span(), batch.lens.span(), batch.live.span()];
        disjoint(&[&out.spans()], &[&read, &step.spans()])?;
        let (mut offsets, mut parents, mut parents_len, mut ancestors) = (0, 0, 0, 0);
        match step {
            DeviceStep::Extend { offsets: given } => {
                same_length("offsets", given.len(), b + 1)?;
                on_device(ordinal, &[("offsets", given.device())])?;
                offsets = given.address();
            }
            DeviceStep::Verify { offsets: given, parents: tree } => {
                same_length("offsets", given.len(), b + 1)?;
                on_device(ordinal, &[("offsets", given.device()), ("tree parents", tree.device())])?;
                (offsets, parents, parents_len) = (given.address(), tree.address(), tree.len() as i64);
            }
            DeviceStep::Draft { ancestors: Some(given), .. } => {
                same_length("ancestor bits", given.len(), b * geometry.shape().topk() as usize * words)?;
                on_device(ordinal, &[("ancestor bits", given.device())])?;
                ancestors = given.address();
            }
            DeviceStep::Draft { ancestors: None, .. } | DeviceStep::Decode => {}
        }
        let kernels = &self.device.kernels().plan;
        let report = kernels.context().report(stream)?;
        let s = Step::new(geometry, phase);
        let params = PlanParams {
            rows: batch.rows.address(),
            versions: batch.versions.address(),
            lens: batch.lens.address(),
            offsets,
            parents,
            ancestors,
            table: table.params(),
            live: self.live(batch.live)?,
            plan: out.arrays(),
            out_versions: out.versions.address(),
            positions: out.positions.address(),
            report,
            parents_len,
            step: s.into(),
        };
        kernels.launch_native(stream, &params)?;
        Ok(DevicePlan { memory: out, phase, geometry: *geometry, table: *table })
    }

    /// Copies of each prefix's tail (`rows`, `lens` and `live` as in [`DeviceBatch`]) into the holes before its draft branches, into the arrays of `out`, as
    /// [`KvMove`](crate::device::KvMove) takes them; entries behind the last are 0. None in the dense layout.
    ///
    /// Copies that do not fit `out`, lengths and pages outside their limits are recorded; that request's are from the sink to
    /// the sink.
    ///
    /// # Errors
    /// As [`Self::plan`].
    pub fn tail_copies(
        &self,
        stream: Stream,
        table: &DeviceTable,
        rows: &DeviceSlice<i32>,
        lens: &DeviceSlice<i32>,
        live: Option<&DeviceSlice<i32>>,
        out: &MovesView,
    ) -> Result<()> {
        let b = rows.len();
        in_range("bucket requests", b as u64, 0, self.geometry.limits().max_batch.into())?;
        table.slots_fit(self.geometry.page().get())?;
        same_length("lens", lens.len(), b)?;
        same_length("offsets", out.offsets().len(), b + 1)?;
        on_device(
            self.ordinal(),
            &[
                ("page table", table.pages.device()),
                ("batch rows", rows.device()),
                ("lens", lens.device()),
                ("src", out.src().device()), // the three are on one device
            ],
        )?;
        disjoint(&[&out.spans()], &[&[table.pages.span(), rows.span(), lens.span(), live.span()]])?;
        let kernels = &self.device.kernels().plan;
        let report = kernels.context().report(stream)?;
        let s = Step::new(&self.geometry, Phase::Draft { step: 0 });
        let params = TailCopyParams {
            rows: rows.address(),
            lens: lens.address(),
            table: table.params(),
            live: self.live(live)?,
            src: out.src().address(),
            dst: out.dst().address(),
            offsets: out.offsets().address(),
            report,
            step: s.into(),
            batch: b as i32,
            copies: out.src().len() as i32, // at most MAX_MOVES
        };
        kernels.launch_tail_copies(stream, &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_whose_slots_do_not_fit_int32_is_refused() {
        // SAFETY: nothing is launched with it.
        let pages = unsafe { DeviceSlice::from_raw("pages", 64, 8, 0) }.unwrap();
        let table = |num_pages| DeviceTable::new(pages, 4, num_pages).unwrap();
        assert!(table(i32::MAX as u32).slots_fit(1).is_ok());
        assert!(table((1 << 27) - 1).slots_fit(16).is_ok());
        let error = table(1 << 27).slots_fit(16).unwrap_err().to_string();
        assert!(error.contains("num_pages 134217728 * page_size 16"), "{error}");
    }
}
