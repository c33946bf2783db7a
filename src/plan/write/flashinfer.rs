//! The slot lists and masks of [`FlashInfer`], written.

use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::plan::formats::flashinfer::ARRAYS;
use crate::plan::write::lower::{Lower, hint, needs};
use crate::plan::write::masks;
use crate::plan::write::slots::{self, RequestList};
use crate::plan::{Arrays, FlashInfer, Phase, Plan};
use crate::pool::Tables;

impl Lower for FlashInfer {
    fn lower(&self, plan: &Plan, tables: &Tables<'_>, geometry: &Geometry, arrays: &mut Arrays) -> Result<()> {
        let needs = needs(plan, geometry, &ARRAYS, self.sizes_of(plan.phase()))?;
        let views = arrays.open(needs, || hint("flashinfer", plan, geometry))?;
        let [kv_indptr, kv_indices, last, qo_indptr, mask_indptr, mask, packed_indptr, packed] = views;
        let (masked, in_bits) = (mask.is_present(), packed.is_present());
        let half = masked != mask_indptr.is_present() || in_bits != packed_indptr.is_present();
        if plan.phase() == Phase::Verify && (half || !masked && !in_bits) {
            let all = [&mask_indptr, &mask, &packed_indptr, &packed];
            let there: Vec<&str> =
                (4..).zip(all).filter(|(_, v)| v.is_present()).map(|(i, _)| ARRAYS[i].name).collect();
            return Err(Error::Mismatch {
                operand: "custom_mask",
                got: if half { there.join(", ") } else { "no array for the tree's mask".into() },
                want: "custom_mask and mask_indptr, packed_custom_mask and packed_mask_indptr, or all four".into(),
            });
        }
        last.slice::<i32>()?.fill(1);
        slots::lists::<i32>(plan, tables, geometry, RequestList::All, [kv_indptr, kv_indices, qo_indptr])?;
        if masked {
            masks::starts(plan, 1, mask_indptr.slice::<i32>()?);
            masks::in_bytes(plan, mask.slice()?)?;
        }
        if in_bits {
            masks::starts(plan, 8, packed_indptr.slice::<i32>()?);
            masks::in_bits(plan, packed.slice()?)?;
        }
        Ok(())
    }
}
