//! Sizes of the slot-list formats: from a load to what is opened, and what refuses a configuration.

use crate::bounds::fits_i32;
use crate::error::{Error, Result};
use crate::plan::{Extent, Load, Spec};

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
