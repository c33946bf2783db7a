//! Plans of whole rounds, on a real pool and in debug mode, in which every query of every plan is audited.

use crate::error::Result;
use crate::geometry::{Geometry, Limits};
use crate::plan::certify::proof::{FailureSite, Proof};
use crate::plan::certify::{lengths, wall};
use crate::plan::{AuditedPlan, Batch, DraftMask, Lens, Paths, Planner, Trees, WritesOnly};
use crate::pool::{Pool, PoolConfig, SeqId};

impl Proof {
    /// Plan whole rounds for each residue, with two rows on one pool: a short row, and a row at the context wall.
    pub(super) fn rounds(&mut self, geometry: &Geometry) -> Result<()> {
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
            let seqs: Vec<SeqId> = lens.iter().map(|_| pool.create()).collect::<Result<_>>()?;
            if let Err(error) = self.round(&geometry, &pool, &mut planner, &seqs, &lens) {
                self.error("planner", FailureSite::behind(&geometry, committed), &error);
            }
            pool.release(&seqs)?;
            pool.audit()?;
        }
        Ok(())
    }

    fn round(
        &mut self,
        g: &Geometry,
        pool: &Pool,
        planner: &mut Planner<WritesOnly>,
        seqs: &[SeqId],
        lens: &[u32],
    ) -> Result<()> {
        let pair = |n: &[u32]| seqs.iter().copied().zip(n.iter().copied()).collect::<Vec<_>>();
        pool.reserve(&pair(lens))?.commit(lens)?;
        let targets: Vec<u32> = lens.iter().map(|&l| g.alloc_target(l, 0)).collect::<Result<_>>()?;
        let lease = pool.reserve(&pair(&targets))?;
        let batch = Batch::new(seqs, Lens::Host(lens));
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
        let copies = pool.with_tables(|t| planner.tail_copies(&t, &batch))??;
        let commit = pool.with_tables(|t| planner.commit(&t, &batch, paths))??;
        self.plans += 2;
        self.capacity(g, "commit", "move sources", commit.moves().len());
        self.capacity(g, "tail copy", "sources", copies.moves().len());
        let extend = pool.with_tables(|t| planner.extend(&t, &batch, &path_sizes))??;
        self.fits(g, &extend, "draft_extend");
        lease.commit(commit.new_lens())?;
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
            self.fail(format!("{phase} {name}"), FailureSite::behind(g, 0), used as u64, have);
        }
    }
}
