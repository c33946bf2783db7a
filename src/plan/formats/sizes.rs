//! Sizes of the slot-list formats: from a load to what is opened, and what refuses a configuration.

use crate::bounds::fits_i32;
use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::plan::{Extent, Load, Need, Plan, Spec};

/// The arrays to open for `plan`: the sizes that its load has, and those of the largest batch as their limits.
pub(super) fn needs<const N: usize>(
    plan: &Plan,
    geometry: &Geometry,
    sizes: impl Fn(&Load) -> Result<[Option<u64>; N]>,
) -> Result<[Option<Need>; N]> {
    let used = sizes(&Load::of(plan))?;
    let limit = sizes(&Load::limit(geometry, plan.phase(), geometry.limits().max_batch)?)?;
    Ok(std::array::from_fn(|array| {
        let (used, limit) = (used[array]?, limit[array].unwrap_or(0));
        Some(Need { array, used: Extent::Line(used), limit: Extent::Line(limit) })
    }))
}

/// Index and size of the arrays that there are.
pub(super) fn extents<const N: usize>(sizes: [Option<u64>; N]) -> Vec<(usize, Extent)> {
    sizes.into_iter().enumerate().filter_map(|(i, n)| Some((i, Extent::Line(n?)))).collect()
}

/// Refuse sizes that int32, which indexes the arrays, does not hold.
pub(super) fn fit_i32(specs: &[Spec], sizes: &[Option<u64>], load: &Load) -> Result<()> {
    for (spec, size) in specs.iter().zip(sizes) {
        fits_i32(spec.name, size.unwrap_or(0), || {
            let Load { phase, requests, queries, prefix, .. } = load;
            format!("{phase} of {requests} requests, {queries} queries and {prefix} tokens of prefixes")
        })?;
    }
    Ok(())
}

/// What of a plan and its geometry asks for the sizes of its arrays.
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

/// A size of a format that its index type does not hold, as a refusal of the configuration.
pub(super) fn refuse(format: &'static str, instead: &'static str) -> impl Fn(Error) -> Error {
    move |error| match error {
        Error::Overflow { what, expr, ty, limit } => Error::Invalid {
            what: "format",
            got: format!("{format}, whose {what} has {expr} elements"),
            why: format!("{ty} indexes up to {limit} of them; {instead}"),
        },
        other => other,
    }
}
