//! [`Lower`]: a format whose arrays the CPU writes.

use crate::error::Result;
use crate::geometry::Geometry;
use crate::plan::{Arrays, Format, Load, Native, Need, Plan, Size, Spec, WritesOnly};
use crate::pool::Tables;

/// Writes the arrays of a format.
pub trait Lower: Format {
    /// Write the arrays of `plan`. The plan has been checked: its rows are live, its slots are in bounds.
    ///
    /// # Errors
    /// [`Error::Capacity`](crate::Error::Capacity) where an array is too small, before anything is written; a size that
    /// does not fit the format's index type.
    fn lower(&self, plan: &Plan, tables: &Tables<'_>, geometry: &Geometry, arrays: &mut Arrays) -> Result<()> {
        let _ = (plan, tables, geometry, arrays);
        Ok(())
    }
}

impl Lower for Native {}

impl Lower for WritesOnly {}

/// The arrays to open for `plan`: the sizes that its load needs, and those of the largest batch as their limits.
pub(super) fn needs<const N: usize>(
    plan: &Plan,
    geometry: &Geometry,
    specs: &[Spec; N],
    sizes: &[Option<Size>; N],
) -> Result<[Option<Need>; N]> {
    let load = Load::of(plan);
    let most = Load::limit(geometry, plan.phase(), geometry.limits().max_batch)?;
    let (mut needs, mut over) = ([None; N], false);
    for (array, (need, size)) in needs.iter_mut().zip(sizes).enumerate() {
        if let Some(size) = size {
            let (used, limit) = (size.unchecked(geometry, &load), size.unchecked(geometry, &most));
            over |= size.is_over(used) | size.is_over(limit);
            *need = Some(Need { array, used, limit });
        }
    }
    if over {
        for (size, spec) in sizes.iter().zip(specs) {
            for load in [&load, &most] {
                size.as_ref().map(|size| size.extent(geometry, load, spec)).transpose()?;
            }
        }
    }
    Ok(needs)
}

/// The parts of a plan and its geometry that ask for the sizes of its arrays.
pub(super) fn hint(format: &str, plan: &Plan, geometry: &Geometry) -> String {
    let (limits, shape) = (geometry.limits(), geometry.shape());
    let prefix: i64 = plan.prefix_lens().iter().map(|&len| len as i64).sum();
    format!(
        "{format} {} of {} requests, {} queries and {prefix} tokens of prefixes; max_batch {}, max_context_len {}, \
         page_size {}, topk {}, steps {}, draft_tokens {}, {} layout",
        plan.phase(),
        plan.batch(),
        plan.queries(),
        limits.max_batch,
        limits.max_context_len,
        limits.page_size,
        shape.topk(),
        shape.steps(),
        shape.draft_tokens(),
        geometry.layout(),
    )
}
