//! The slot lists and masks of [`Triton`], written.

use crate::error::Result;
use crate::geometry::Geometry;
use crate::plan::formats::triton::ARRAYS;
use crate::plan::write::lower::{Lower, hint, needs};
use crate::plan::write::masks;
use crate::plan::write::slots::{self, RequestList};
use crate::plan::{Arrays, Phase, Plan, Triton};
use crate::pool::Tables;

impl Lower for Triton {
    fn lower(&self, plan: &Plan, tables: &Tables<'_>, geometry: &Geometry, arrays: &mut Arrays) -> Result<()> {
        let needs = needs(plan, geometry, &ARRAYS, Self::sizes_of(plan.phase()))?;
        let views = arrays.open(needs, || hint("triton", plan, geometry))?;
        let [kv_indptr, kv_indices, qo_indptr, extend_slots, mask_indptr, mask] = views;
        slots::lists::<i64>(plan, tables, geometry, RequestList::Prefix, [kv_indptr, kv_indices, qo_indptr])?;
        for (o, &slot) in extend_slots.slice::<i64>()?.iter_mut().zip(plan.out_slots()) {
            *o = slot.into();
        }
        if plan.phase() == Phase::Verify {
            masks::starts(plan, 1, mask_indptr.slice::<i64>()?);
            masks::in_bytes(plan, mask.slice()?)?;
        }
        Ok(())
    }
}
