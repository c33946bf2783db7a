//! Metadata formats: the arrays that an attention backend wants.
//!
//! The phases of the planner describe a step once, in the form of [`Plan`]: each query's row positions, to write and to
//! attend to. A [`Format`] derives its backend's arrays from that description and the page tables, so that a new
//! backend adds a type here and touches no phase.

use std::fmt::Debug;

use crate::error::Result;
use crate::geometry::Geometry;
use crate::plan::{Arrays, Capacity, DraftMask, Extent, Load, Phase, Plan, Size, Spec};

/// The arrays of one attention backend, derived from a plan.
pub trait Format: Send + Sync + Debug + 'static {
    /// Name, as users give it.
    fn name(&self) -> &'static str;

    /// Every array of the format, whatever the phase; an array is known by its index here.
    fn arrays(&self) -> &'static [Spec] {
        &[]
    }

    /// Check that the backend can run the geometry.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) that names the combination and what would work.
    fn supports(&self, geometry: &Geometry) -> Result<()>;

    /// Check that the format can express what the queries of a draft step attend to.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) that says what would work.
    fn supports_mask(&self, geometry: &Geometry, mask: DraftMask<'_>) -> Result<()> {
        let _ = (geometry, mask);
        Ok(())
    }

    /// Index and size of each array that `phase` has. Sizes to write and capacities follow from these alike.
    fn sizes(&self, geometry: &Geometry, phase: Phase) -> Vec<(usize, Size)> {
        let _ = (geometry, phase);
        Vec::new()
    }

    /// Index and elements of each array of the load's phase.
    ///
    /// # Errors
    /// A size that does not fit the format's index type.
    fn extents(&self, geometry: &Geometry, load: &Load) -> Result<Vec<(usize, Extent)>> {
        let extent = |(array, size): (usize, Size)| Ok((array, size.extent(geometry, load, &self.arrays()[array])?));
        self.sizes(geometry, load.phase).into_iter().map(extent).collect()
    }

    /// Capacity of each array of `phase` for batches of `requests`, with the arithmetic.
    ///
    /// # Errors
    /// Those of [`Format::extents`] and [`Load::limit`].
    fn capacities(&self, geometry: &Geometry, phase: Phase, requests: u32) -> Result<Vec<Capacity>> {
        let load = Load::limit(geometry, phase, requests)?;
        let capacity = |(array, size): (usize, Size)| {
            let extent = size.extent(geometry, &load, &self.arrays()[array])?;
            Ok(Capacity { array, extent, formula: size.formula(geometry, phase, requests) })
        };
        self.sizes(geometry, phase).into_iter().map(capacity).collect()
    }

    /// Append the slots whose keys the backend's kernel reads for query `q`, in order, to `out`: from the arrays (and
    /// the plan's `out_slots`, where the kernel is given them) **alone**, as the kernel would. The debug audit compares
    /// them with the plan. `None` where the format leaves reading to the plan itself.
    ///
    /// # Errors
    /// Arrays that the kernel could not use: an index outside of them, a missing one.
    fn reads(
        &self,
        plan: &Plan,
        geometry: &Geometry,
        arrays: &Arrays,
        q: usize,
        out: &mut Vec<i32>,
    ) -> Result<Option<()>> {
        let _ = (plan, geometry, arrays, q, out);
        Ok(None)
    }

    /// True if a draft step's branches read the tail of the prefix from their holes (the holey layout's copies).
    fn reads_holes(&self, geometry: &Geometry) -> bool {
        let _ = geometry;
        false
    }
}
