//! [`AnyFormat`], written.

use crate::error::Result;
use crate::geometry::Geometry;
use crate::plan::write::lower::Lower;
use crate::plan::{AnyFormat, Arrays, Plan};
use crate::pool::Tables;

impl Lower for AnyFormat {
    fn lower(&self, plan: &Plan, tables: &Tables<'_>, geometry: &Geometry, arrays: &mut Arrays) -> Result<()> {
        match self {
            AnyFormat::Native(f) => f.lower(plan, tables, geometry, arrays),
            AnyFormat::FlashInfer(f) => f.lower(plan, tables, geometry, arrays),
            AnyFormat::FlashAttention(f) => f.lower(plan, tables, geometry, arrays),
            AnyFormat::Triton(f) => f.lower(plan, tables, geometry, arrays),
        }
    }
}
