//! `certify`: prove a configuration in bounds, for every residue of the committed length.
//!
//! Nothing is proved by formula against formula: the placement functions that the planner uses are run for every
//! residue `L mod P`, branch and step, in both layouts, and each position is looked up in a bitmap of the row; then
//! the planner itself plans whole rounds of representative rows on a real pool, in debug mode, so that every lane of
//! every plan is audited.

use std::fmt;

use crate::error::Result;
use crate::geometry::{Buffer, DraftRegion, Geometry, Layout, Limits, TreeShape};
use crate::plan::{AuditedPlan, Batch, DraftMask, Lens, Paths, Planner, Trees, WritesOnly};
use crate::pool::{Pool, PoolConfig, SeqId};

/// A position, size or write that breaks its limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What is wrong.
    pub what: String,
    /// Layout it was found in.
    pub layout: Layout,
    /// Committed length.
    pub committed: u32,
    /// `committed mod P`.
    pub residue: u32,
    /// Branch or node, -1 where none applies.
    pub branch: i64,
    /// Step, -1 where none applies.
    pub step: i64,
    /// The value.
    pub got: u64,
    /// Its limit.
    pub limit: u64,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { what, layout, committed, residue, branch, step, got, limit } = self;
        write!(
            f,
            "{what}: {got} against {limit} ({layout:?} layout, committed {committed}, residue {residue}, \
             branch {branch}, step {step})"
        )
    }
}

/// The sizes of one layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayoutSizes {
    /// The layout.
    pub layout: Layout,
    /// Positions that one round may write.
    pub alloc_len_per_decode: u32,
    /// Positions that are kept reserved.
    pub reserve_per_decode: u32,
    /// Positions of a row.
    pub row_width: u32,
}

/// What [`certify`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// The limits.
    pub limits: Limits,
    /// The tree.
    pub shape: TreeShape,
    /// Sizes of the layouts that were checked: dense, and holey where it differs.
    pub layouts: Vec<LayoutSizes>,
    /// Every array of the native format.
    pub buffers: Vec<Buffer>,
    /// The per-branch formats' `kv_indices`, for comparison; not needed by the native format.
    pub per_branch: Buffer,
    /// Whether one step's per-branch `kv_indices` fit `int32` indexing.
    pub per_branch_fits: bool,
    /// Residues checked: all P of them.
    pub residues: u32,
    /// Positions placed and looked up.
    pub placements: u64,
    /// Plans made and audited.
    pub plans: u64,
    /// The first failures, at most [`MAX_FAILURES`].
    pub failures: Vec<Failure>,
    /// Failures there were.
    pub failed: u64,
}

/// Failures that a certificate lists.
pub const MAX_FAILURES: usize = 32;

impl Certificate {
    /// Whether everything held.
    pub fn holds(&self) -> bool {
        self.failed == 0
    }

    /// Bytes of all arrays of the native format.
    pub fn native_bytes(&self) -> u64 {
        self.buffers.iter().map(|b| b.bytes).sum()
    }
}

/// Check `used <= capacity` and disjoint writes for every residue of the committed length, in both layouts.
///
/// Takes O(P * (K * S + V)) for the placements and O(max_context_len / P) pages for the planner's rows.
///
/// # Errors
/// A configuration that cannot be constructed, as [`Geometry::new`]. What breaks a limit is not an error of this
/// function but a [`Failure`] in the certificate.
pub fn certify(limits: Limits, shape: TreeShape) -> Result<Certificate> {
    let dense = Geometry::new(limits, shape, Layout::Dense)?;
    let holey = Geometry::new(limits, shape, Layout::Holey)?;
    let mut proof = Proof::default();
    let mut layouts = Vec::new();
    for geometry in [dense, holey] {
        if layouts.iter().any(|l: &LayoutSizes| l.layout == geometry.layout()) {
            continue; // holey is dense for K = 1 or P = 1
        }
        proof.layout = geometry.layout();
        layouts.push(LayoutSizes {
            layout: geometry.layout(),
            alloc_len_per_decode: geometry.alloc_len_per_decode(),
            reserve_per_decode: geometry.reserve_per_decode(),
            row_width: geometry.row_width(),
        });
        for residue in 0..geometry.page().get() {
            for committed in lengths(&geometry, residue) {
                proof.placements(&geometry, Capacity::of(&geometry, committed)?, committed)?;
            }
        }
        proof.index_widths(&geometry)?;
        proof.rounds(&geometry)?;
    }
    Ok(Certificate {
        limits,
        shape,
        layouts,
        buffers: dense.buffers(),
        per_branch: dense.per_branch_buffer()?,
        per_branch_fits: dense.per_branch_kv_indices().is_ok(),
        residues: dense.page().get(),
        placements: proof.placed,
        plans: proof.plans,
        failures: proof.failures,
        failed: proof.failed,
    })
}

/// Committed lengths of a residue that are checked: the smallest, the one a page later, and the largest from which a
/// round can start. Placement depends on the residue and adds the base, so that these stand for all.
fn lengths(geometry: &Geometry, residue: u32) -> Vec<u32> {
    let (p, last) = (geometry.page().get(), geometry.limits().max_context_len - 1);
    let mut all = vec![residue, residue + p];
    all.extend(last.checked_sub(residue).map(|room| residue + room / p * p));
    all.retain(|&l| l <= last);
    all.sort_unstable();
    all.dedup();
    all
}

/// What a round behind a committed length may use.
#[derive(Debug, Clone, Copy)]
struct Capacity {
    /// Positions that one round may write behind the tail page's start (holey) or the prefix (dense).
    alloc_len: u64,
    /// Positions that the row has allocated.
    allocated: u64,
    /// Positions of a row.
    row_width: u64,
}

impl Capacity {
    fn of(geometry: &Geometry, committed: u32) -> Result<Self> {
        Ok(Self {
            alloc_len: geometry.alloc_len_per_decode() as u64,
            allocated: geometry.alloc_target(committed, 0)? as u64,
            row_width: geometry.row_width() as u64,
        })
    }
}

#[derive(Debug)]
struct Proof {
    layout: Layout,
    placed: u64,
    plans: u64,
    failures: Vec<Failure>,
    failed: u64,
    /// Which positions of the region are taken; scratch.
    taken: Vec<bool>,
}

impl Default for Proof {
    fn default() -> Self {
        Self { layout: Layout::Dense, placed: 0, plans: 0, failures: Vec::new(), failed: 0, taken: Vec::new() }
    }
}

/// Where a failure is.
#[derive(Debug, Clone, Copy)]
struct At {
    committed: u32,
    residue: u32,
    branch: i64,
    step: i64,
}

impl Proof {
    fn fail(&mut self, what: impl Into<String>, at: At, got: u64, limit: u64) {
        self.failed += 1;
        if self.failures.len() < MAX_FAILURES {
            let At { committed, residue, branch, step } = at;
            let layout = self.layout;
            self.failures.push(Failure { what: what.into(), layout, committed, residue, branch, step, got, limit });
        }
    }

    /// `got <= limit`.
    fn at_most(&mut self, what: &'static str, at: At, got: u64, limit: u64) {
        if got > limit {
            self.fail(what, at, got, limit);
        }
    }

    /// Take position `pos` for one write: in bounds, behind the prefix, and free.
    fn take(&mut self, what: &'static str, at: At, pos: u64, base: u64, capacity: Capacity) {
        self.placed += 1;
        let end = capacity.allocated.min(capacity.row_width);
        if pos < at.committed as u64 {
            self.fail(format!("{what} inside the prefix"), at, pos, at.committed as u64);
        } else if pos >= end {
            self.fail(format!("{what} beyond the allocation"), at, pos, end);
        } else if let Some(taken) = self.taken.get_mut((pos - base) as usize) {
            if std::mem::replace(taken, true) {
                self.fail(format!("{what} placed on another"), at, pos, pos);
            }
        } else {
            self.fail(format!("{what} beyond the round's allocation length"), at, pos, base + capacity.alloc_len);
        }
    }

    /// Every position that one round behind `committed` writes.
    fn placements(&mut self, geometry: &Geometry, capacity: Capacity, committed: u32) -> Result<()> {
        let (shape, page) = (geometry.shape(), geometry.page());
        let region = geometry.draft_region(committed)?;
        let residue = page.offset(committed);
        let at = At { committed, residue, branch: -1, step: -1 };
        self.at_most("allocation of a row", at, capacity.allocated, capacity.row_width);
        let base = match region.layout() {
            Layout::Dense => committed as u64,
            Layout::Holey => region.base() as u64,
        };
        // Draft slots and holes of one round, together.
        self.taken.clear();
        self.taken.resize(capacity.alloc_len as usize, false);
        for b in 0..shape.topk() {
            let at = At { branch: b as i64, ..at };
            for s in 0..shape.steps() {
                let at = At { step: s as i64, ..at };
                self.take("draft slot", at, region.pos(b, s)? as u64, base, capacity);
            }
            if let Some(hole) = region.hole(b)? {
                self.at_most("source of a tail copy", at, (hole.src + hole.len) as u64, committed as u64);
                for o in 0..hole.len {
                    self.take("hole", at, (hole.dst + o) as u64, base, capacity);
                }
            }
            self.branch_pages(at, geometry, &region)?;
        }
        self.at_most("end of the draft region", at, region.end()? as u64, base + capacity.alloc_len);
        // The verified nodes take the same positions again, after the draft is done.
        self.taken.clear();
        self.taken.resize(capacity.alloc_len as usize, false);
        for node in 0..shape.draft_tokens() {
            let at = At { branch: node as i64, ..at };
            self.take("verified node", at, committed as u64 + node as u64, committed as u64, capacity);
        }
        // The host's length may lag by one round: the next round still fits what was allocated for this one.
        for accepted in 1..=geometry.max_accepted() {
            let Some(later) = committed.checked_add(accepted).filter(|&l| l < geometry.limits().max_context_len) else {
                break;
            };
            let next = geometry.draft_region(later)?.end()?.max(later + shape.draft_tokens());
            self.at_most("the round after, on a lagging length", at, next as u64, capacity.allocated);
        }
        Ok(())
    }

    /// Pages that a kernel that reads whole pages sees of one branch: at step t `ceil((r + t + 1) / P)`, at most t + 1.
    fn branch_pages(&mut self, at: At, geometry: &Geometry, region: &DraftRegion) -> Result<()> {
        if region.layout() == Layout::Dense {
            return Ok(());
        }
        let page = geometry.page();
        let (b, mut last, mut distinct) = (at.branch as u32, None, 0u64);
        for t in 0..geometry.shape().steps() {
            let col = page.page_of(region.pos(b, t)?);
            distinct += u64::from(last != Some(col));
            last = Some(col);
            let at = At { step: t as i64, ..at };
            self.at_most("expand pages against steps", at, distinct, t as u64 + 1);
            self.at_most("expand pages against their number", at, distinct, page.pages_for(at.residue + t + 1) as u64);
        }
        Ok(())
    }

    /// Per-branch index width: what the last step uses with every request at its longest.
    fn index_widths(&mut self, geometry: &Geometry) -> Result<()> {
        let Ok(width) = geometry.per_branch_kv_indices() else { return Ok(()) };
        let (limits, shape) = (geometry.limits(), geometry.shape());
        let committed = limits.max_context_len;
        let at =
            At { committed, residue: geometry.page().offset(committed), branch: -1, step: shape.steps() as i64 - 1 };
        let (b, k, s) = (limits.max_batch as u64, shape.topk() as u64, shape.steps() as u64);
        self.at_most("per-branch kv_indices", at, k * b * committed as u64 + b * k * s, width as u64);
        Ok(())
    }

    /// Whole rounds by the planner, two rows a residue on one pool: a short one and one at the context wall.
    fn rounds(&mut self, geometry: &Geometry) -> Result<()> {
        let two = Limits { max_batch: 2, ..geometry.limits() };
        let geometry = Geometry::with_reverts(two, geometry.shape(), geometry.layout(), geometry.reverts())?;
        let pool = Pool::new(PoolConfig {
            num_pages: geometry.pages_for_full_load()? + 1,
            page: geometry.page(),
            max_seqs: 2,
            row_pages: geometry.row_pages(),
        })?;
        let mut planner = Planner::new(geometry, WritesOnly)?;
        planner.set_debug(true);
        for residue in 0..geometry.page().get() {
            let lens = lengths(&geometry, residue);
            let lens: Vec<u32> =
                lens.first().into_iter().chain(lens.get(1..).and_then(|l| l.last())).copied().collect();
            let committed = lens.last().copied().unwrap_or(0);
            if let Err(error) = self.round(&geometry, &pool, &mut planner, &lens) {
                let at = At { committed, residue, branch: -1, step: -1 };
                self.fail(format!("planner: {error}"), at, 0, 0);
            }
        }
        Ok(())
    }

    fn round(&mut self, g: &Geometry, pool: &Pool, planner: &mut Planner<WritesOnly>, lens: &[u32]) -> Result<()> {
        let seqs: Vec<SeqId> = lens.iter().map(|_| pool.create()).collect::<Result<_>>()?;
        let pair = |n: &[u32]| seqs.iter().copied().zip(n.iter().copied()).collect::<Vec<_>>();
        pool.reserve(&pair(lens))?.commit(lens)?;
        let targets: Vec<u32> = lens.iter().map(|&l| g.alloc_target(l, 0)).collect::<Result<_>>()?;
        let lease = pool.reserve(&pair(&targets))?;
        let batch = Batch::new(&seqs, Lens::Host(lens));
        for step in 0..g.shape().steps() {
            let plan = pool.with_tables(|t| planner.draft(&t, &batch, step, DraftMask::Lane))??;
            self.fits(g, &plan, "draft");
        }
        // A fan under the root as far as V goes (depth 1, inside the context), and a path to its last node.
        let sizes: Vec<u32> =
            lens.iter().map(|&l| g.shape().clamp_depth(wall(g, l)).map_or(1, |s| s.draft_tokens())).collect();
        let parents: Vec<i32> = sizes.iter().flat_map(|&n| (0..n).map(|j| if j == 0 { -1 } else { 0 })).collect();
        let plan = pool.with_tables(|t| planner.verify(&t, &batch, Trees { sizes: &sizes, parents: &parents }))??;
        self.fits(g, &plan, "verify");
        let path_sizes: Vec<u32> = sizes.iter().map(|&n| n.min(2)).collect();
        let nodes: Vec<u32> = sizes.iter().flat_map(|&n| [0, n - 1].into_iter().take(n.min(2) as usize)).collect();
        let paths = Paths { sizes: &path_sizes, nodes: &nodes };
        let commit = pool.with_tables(|t| planner.commit(&t, &batch, paths))??;
        let copies = pool.with_tables(|t| planner.tail_copies(&t, &batch))??;
        self.plans += 2;
        self.capacity(g, "commit", "move sources", commit.moves().len());
        self.capacity(g, "tail copy", "sources", copies.moves().len());
        let extend = pool.with_tables(|t| planner.extend(&t, &batch, &path_sizes))??;
        self.fits(g, &extend, "draft_extend");
        lease.commit(commit.new_lens())?;
        pool.release(&seqs)?;
        pool.audit()?;
        Ok(())
    }

    /// The arrays of a plan against the capacities of its phase.
    fn fits(&mut self, g: &Geometry, plan: &AuditedPlan<WritesOnly>, phase: &'static str) {
        self.plans += 1;
        self.capacity(g, phase, "positions", plan.positions().len());
        self.capacity(g, phase, "out_slots", plan.out_slots().len());
        self.capacity(g, phase, "mask", plan.mask().len());
        self.capacity(g, "each plan", "qo_indptr", plan.qo_indptr().len());
    }

    fn capacity(&mut self, g: &Geometry, phase: &'static str, name: &'static str, used: usize) {
        let have = g.buffers().iter().find(|b| (b.phase, b.name) == (phase, name)).map_or(0, |b| b.elements);
        if used as u64 > have {
            let at = At { committed: 0, residue: 0, branch: -1, step: -1 };
            self.fail(format!("{phase} {name}"), at, used as u64, have);
        }
    }
}

/// Largest depth of a tree behind `committed` tokens: the deepest node stays inside the context.
fn wall(geometry: &Geometry, committed: u32) -> u32 {
    geometry.limits().max_context_len.saturating_sub(committed + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(layout: Layout) -> Geometry {
        let limits = Limits { max_batch: 4, max_context_len: 64, page_size: 4 };
        Geometry::new(limits, TreeShape::new(3, 6, 16).unwrap(), layout).unwrap()
    }

    /// What a proof says of capacities that are one or more positions short.
    fn failures(layout: Layout, committed: u32, short: impl Fn(&mut Capacity)) -> Vec<Failure> {
        let g = geometry(layout);
        let mut capacity = Capacity::of(&g, committed).unwrap();
        short(&mut capacity);
        let mut proof = Proof { layout, ..Proof::default() };
        proof.placements(&g, capacity, committed).unwrap();
        proof.failures
    }

    #[test]
    fn capacities_hold_as_they_are() {
        for (layout, committed) in [(Layout::Dense, 7), (Layout::Holey, 7), (Layout::Holey, 8), (Layout::Holey, 63)] {
            assert_eq!(failures(layout, committed, |_| ()), []);
        }
    }

    /// Dense: K*S = 18 positions from 7, so one less misses branch 2, step 5.
    #[test]
    fn an_allocation_length_one_short_is_found() {
        let f = failures(Layout::Dense, 7, |c| c.alloc_len -= 1);
        assert_eq!(f[0].what, "draft slot beyond the round's allocation length");
        assert_eq!((f[0].branch, f[0].step, f[0].got), (2, 5, 7 + 2 * 6 + 5));
        assert!(f[0].to_string().contains("residue 3"), "{}", f[0]);
    }

    /// Holey at L = 7: the last draft slot is 31 + 5 = 36; a row of 36 positions has none for it.
    #[test]
    fn a_row_too_narrow_for_the_holes_is_found() {
        let f = failures(Layout::Holey, 7, |c| (c.allocated, c.row_width) = (36, 36));
        assert_eq!(f[0].what, "draft slot beyond the allocation");
        assert_eq!((f[0].branch, f[0].step, f[0].got, f[0].limit), (2, 5, 36, 36));
    }

    /// The reserve is twice a round's length because the host's length may lag: once is too little.
    #[test]
    fn a_reserve_without_the_lag_is_found() {
        let g = geometry(Layout::Dense);
        let once = 7 + g.alloc_len_per_decode() as u64;
        let f = failures(Layout::Dense, 7, |c| c.allocated = once);
        assert!(f.iter().any(|f| f.what.starts_with("the round after")), "{f:?}");
    }

    #[test]
    fn a_position_taken_twice_or_inside_the_prefix_is_found() {
        let capacity = Capacity { alloc_len: 8, allocated: 64, row_width: 64 };
        let at = At { committed: 10, residue: 2, branch: 1, step: 2 };
        let mut proof = Proof { taken: vec![false; 8], ..Proof::default() };
        proof.take("draft slot", at, 12, 10, capacity);
        assert_eq!(proof.failed, 0);
        proof.take("draft slot", at, 12, 10, capacity);
        proof.take("draft slot", at, 9, 8, capacity);
        let what: Vec<_> = proof.failures.iter().map(|f| f.what.as_str()).collect();
        assert_eq!(what, ["draft slot placed on another", "draft slot inside the prefix"]);
    }

    #[test]
    fn a_list_of_failures_ends() {
        let mut proof = Proof::default();
        let at = At { committed: 0, residue: 0, branch: -1, step: -1 };
        (0..100).for_each(|i| proof.at_most("test", at, i + 1, 0));
        assert_eq!((proof.failures.len(), proof.failed), (MAX_FAILURES, 100));
    }
}
