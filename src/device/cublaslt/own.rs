//! The package's own products of a few rows (`cuda/linear.cu`) beside the library's: where they have the class's bits, and
//! where they are faster.

use super::bench::{Bench, Ran, Way};
use super::cache::Saved;
use super::choice::{Bucket, Own};
use super::shape::LinearShape;
use crate::device::kernels::{LinearPlan, MAX_LINEAR_ROWS};
use crate::error::Result;

/// Times that a chain of launches is replayed.
const REPEATS: usize = 7;

/// Splits of K that the own kernel has.
const SPLITS: [u32; 2] = [1, 2];

/// Time the own product in every bucket that it covers, with the bits of `class`, or with any where no class is asked for.
pub(super) fn measure(
    bench: &mut Bench<'_>,
    class: Option<u64>,
    shape: &LinearShape,
    buckets: &mut [Bucket],
) -> Result<()> {
    let split = buckets.first().map_or(1, |b| b.config.split.max(1) as u32);
    let borders = shape.buckets();
    for (i, bucket) in buckets.iter_mut().enumerate().filter(|(_, b)| b.rows <= MAX_LINEAR_ROWS) {
        for split in SPLITS.into_iter().filter(|s| class.is_none() || *s == split) {
            let Some(plan) = bench.plan_of(split) else { continue };
            let runs = match class {
                Some(class) => bench.holds(Way::Own(plan), class, &shape.samples(&borders, i))?,
                None => bench.run(Way::Own(plan), bucket.rows, 0, None)? != Ran::Unable,
            };
            if !runs {
                continue;
            }
            let library_us = bench.time_in_chain(Way::Library(bucket.algo), bucket.rows, REPEATS)?;
            let us = bench.time_in_chain(Way::Own(plan), bucket.rows, REPEATS)?;
            if bucket.own.is_none_or(|own| us < own.us) {
                bucket.own = Some(Own { plan, us, library_us });
            }
        }
    }
    Ok(())
}

/// Give buckets the own products that were saved with them; false where one that is used has not the class's bits.
pub(super) fn restore(
    bench: &mut Bench<'_>,
    saved: &Saved,
    shape: &LinearShape,
    buckets: &mut [Bucket],
) -> Result<bool> {
    let split = buckets.first().map_or(1, |b| b.config.split.max(1) as u32);
    let plan: Option<LinearPlan> = bench.plan_of(split);
    let borders = shape.buckets();
    for (i, (bucket, (.., times))) in buckets.iter_mut().zip(&saved.buckets).enumerate() {
        let Some([us, library_us]) = *times else { continue };
        let Some(plan) = plan.filter(|_| bucket.rows <= MAX_LINEAR_ROWS) else { return Ok(false) };
        bucket.own = Some(Own { plan, us, library_us });
        if bucket.own().is_some() && !bench.holds(Way::Own(plan), saved.fingerprint, &shape.samples(&borders, i))? {
            return Ok(false);
        }
    }
    Ok(true)
}
