//! A format that the crate does not have, to show that formats add nothing to the phases: FlashInfer-style per-branch
//! indices of a draft step, checked against the closed form.

use crate::common::plan::{Batch as Case, geometry};
use specrs::error::{Error, Result};
use specrs::geometry::{Geometry, Layout};
use specrs::plan::{
    Arrays, Batch, DType, DraftMask, Extent, Format, Lens, Load, Lower, Need, Phase, Plan, Planner, Spec, Trees,
};
use specrs::pool::Tables;

const ARRAYS: &[Spec] = &[Spec::new("kv_indptr", DType::I32), Spec::new("kv_indices", DType::I32)];

/// `kv_indptr` of `queries + 1`, and `kv_indices`: each query's prefix, then what its mask names.
#[derive(Debug)]
struct PerBranch;

impl Format for PerBranch {
    fn name(&self) -> &'static str {
        "per branch"
    }

    fn arrays(&self) -> &'static [Spec] {
        ARRAYS
    }

    fn supports(&self, geometry: &Geometry) -> Result<()> {
        geometry.per_branch_kv_indices().map(|_| ())
    }

    fn extents(&self, _: &Geometry, load: &Load) -> Result<Vec<(usize, Extent)>> {
        Ok(vec![(0, Extent::Line(load.queries + 1)), (1, Extent::Line(load.query_keys))])
    }

    fn reads(&self, _: &Plan, _: &Geometry, arrays: &Arrays, q: usize, out: &mut Vec<i32>) -> Result<Option<()>> {
        let indptr = arrays.line::<i32>("kv_indptr");
        out.extend_from_slice(&arrays.line("kv_indices")[indptr[q] as usize..indptr[q + 1] as usize]);
        Ok(Some(()))
    }
}

impl Lower for PerBranch {
    fn lower(&self, plan: &Plan, tables: &Tables<'_>, geometry: &Geometry, arrays: &mut Arrays) -> Result<()> {
        let Phase::Draft { .. } = plan.phase() else {
            return Err(Error::Invalid { what: "phase", got: plan.phase().name().into(), why: "draft only".into() });
        };
        let used = self.extents(geometry, &Load::of(plan))?;
        let limit = self.extents(geometry, &Load::limit(geometry, plan.phase(), plan.batch() as u32)?)?;
        let need = |i: usize| Some(Need { array: used[i].0, used: used[i].1, limit: limit[i].1 });
        let [kv_indptr, kv_indices] = arrays.open([need(0), need(1)], || "a test".into())?;
        let (kv_indptr, kv_indices) = (kv_indptr.slice::<i32>()?, kv_indices.slice::<i32>()?);
        kv_indptr[0] = 0;
        let (p, w, steps) = (tables.page().get(), plan.mask_words() as usize, geometry.shape().steps());
        let mut n = 0;
        for i in 0..plan.live_batch() {
            let len = plan.prefix_lens()[i] as u32;
            let line = tables.line(plan.rows()[i] as u32).unwrap_or(&[]);
            let region = geometry.draft_region(len)?;
            let slot = |pos: u32| line[(pos / p) as usize] * p as i32 + (pos % p) as i32;
            for q in plan.qo_indptr()[i] as usize..plan.qo_indptr()[i + 1] as usize {
                let mask = &plan.mask()[q * w..(q + 1) * w];
                let bits = (0..w as u32 * 64).filter(|b| mask[(b / 64) as usize] >> (b % 64) & 1 == 1);
                let drafts = bits.map(|bit| region.pos(bit / steps, bit % steps).unwrap());
                for pos in (0..len).chain(drafts) {
                    kv_indices[n] = slot(pos);
                    n += 1;
                }
                kv_indptr[q + 1] = n as i32;
            }
        }
        Ok(())
    }
}

#[test]
fn per_branch_indices_follow_the_closed_form() {
    for layout in [Layout::Dense, Layout::Holey] {
        for p in [1, 4] {
            let (k, s) = (3, 4);
            let g = geometry(k, s, 10, p, 3, 64, layout);
            let c = Case::new(&g, &[7, 12, 0], 5);
            let mut planner = Planner::new(g, PerBranch).unwrap();
            let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
            for t in 0..s {
                let plan = c.pool.with_tables(|x| planner.draft(&x, &batch, t, DraftMask::Lane)).unwrap().unwrap();
                let kv_indptr = plan.arrays().line::<i32>("kv_indptr");
                let kv_indices = plan.arrays().line::<i32>("kv_indices");
                for i in 0..3usize {
                    let before: u32 = c.lens[..i].iter().map(|l| l + t + 1).sum();
                    let region = g.draft_region(c.lens[i]).unwrap();
                    for b in 0..k {
                        let z = i * k as usize + b as usize;
                        // K * sum_{j<i} (L_j + t + 1) + b * (L_i + t + 1)
                        let start = (k * before + b * (c.lens[i] + t + 1)) as i32;
                        assert_eq!(kv_indptr[z], start);
                        let row = &kv_indices[start as usize..kv_indptr[z + 1] as usize];
                        let lane = (0..=t).map(|u| region.pos(b, u).unwrap());
                        let want: Vec<i32> = (0..c.lens[i]).chain(lane).map(|pos| c.slot(i, pos)).collect();
                        assert_eq!(row, want);
                    }
                }
                let sum: u32 = c.lens.iter().sum();
                assert_eq!(kv_indices.len() as u32, k * sum + 3 * k * (t + 1));
                assert!(kv_indices.len() as u32 <= g.per_branch_kv_indices().unwrap());
            }
        }
    }
}

/// A format's refusal reaches the caller, and the planner goes on.
#[test]
fn a_format_may_refuse_a_phase() {
    let g = geometry(3, 4, 10, 4, 2, 64, Layout::Dense);
    let c = Case::new(&g, &[7], 5);
    let mut planner = Planner::new(g, PerBranch).unwrap();
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    let err = c.pool.with_tables(|t| planner.verify(&t, &batch, Trees { sizes: &[1], parents: &[-1] })).unwrap();
    assert_eq!(err.unwrap_err().to_string(), "phase = verify: draft only");
    assert!(c.pool.with_tables(|t| planner.draft(&t, &batch, 0, DraftMask::Lane)).unwrap().is_ok());
    assert_eq!(planner.bodies(), 1);
}
