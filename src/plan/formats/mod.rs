//! The formats of other projects' attention kernels, each derived from the same [`Plan`].

mod flashinfer;
mod masks;
mod reader;
mod sizes;
mod slots;
mod triton;

pub use flashinfer::{FlashInfer, MaskForm};
pub use triton::Triton;

use crate::error::Result;
use crate::geometry::Geometry;
use crate::plan::{Arrays, DraftMask, Extent, Format, Load, Native, Plan, Spec};
use crate::pool::Tables;

/// A format chosen at run time.
#[derive(Debug, Clone, Copy)]
pub enum AnyFormat {
    /// specrs's own kernels.
    Native(Native),
    /// FlashInfer's wrappers.
    FlashInfer(FlashInfer),
    /// sglang's Triton backend.
    Triton(Triton),
}

impl AnyFormat {
    fn inner(&self) -> &dyn Format {
        match self {
            AnyFormat::Native(f) => f,
            AnyFormat::FlashInfer(f) => f,
            AnyFormat::Triton(f) => f,
        }
    }
}

impl Format for AnyFormat {
    fn name(&self) -> &'static str {
        self.inner().name()
    }

    fn arrays(&self) -> &'static [Spec] {
        self.inner().arrays()
    }

    fn supports(&self, geometry: &Geometry) -> Result<()> {
        self.inner().supports(geometry)
    }

    fn supports_mask(&self, geometry: &Geometry, mask: DraftMask<'_>) -> Result<()> {
        self.inner().supports_mask(geometry, mask)
    }

    fn extents(&self, geometry: &Geometry, load: &Load) -> Result<Vec<(usize, Extent)>> {
        self.inner().extents(geometry, load)
    }

    fn lower(&self, plan: &Plan, tables: &Tables<'_>, geometry: &Geometry, arrays: &mut Arrays) -> Result<()> {
        self.inner().lower(plan, tables, geometry, arrays)
    }

    fn reads(
        &self,
        plan: &Plan,
        geometry: &Geometry,
        arrays: &Arrays,
        q: usize,
        out: &mut Vec<i32>,
    ) -> Result<Option<()>> {
        self.inner().reads(plan, geometry, arrays, q, out)
    }

    fn reads_holes(&self, geometry: &Geometry) -> bool {
        self.inner().reads_holes(geometry)
    }
}
