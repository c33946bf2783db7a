//! The class of bits that a weight gets, and the algorithms chosen for it. Pure: measurements in, a choice out.

use super::api::Config;
use super::library::Algo;
use super::shape::LinearShape;
use crate::device::kernels::LinearPlan;

/// The algorithm of one bucket.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Bucket {
    /// Most rows.
    pub(super) rows: u32,
    pub(super) algo: Algo,
    pub(super) config: Config,
    /// Microseconds at `rows` rows, by events around captured launches.
    pub(super) us: f32,
    /// Bytes.
    pub(super) workspace: usize,
    /// The package's own product of these rows, where it has one of the same class.
    pub(super) own: Option<Own>,
}

/// The package's own product beside the library's of one bucket. Times are microseconds at the bucket's most rows, in a chain
/// of launches, where the own one may begin early.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Own {
    pub(super) plan: LinearPlan,
    pub(super) us: f32,
    pub(super) library_us: f32,
}

impl Bucket {
    /// The package's own product, where it is the faster one.
    pub(super) fn own(&self) -> Option<LinearPlan> {
        self.own.filter(|own| own.us < own.library_us).map(|own| own.plan)
    }
}

/// Algorithms that the buckets of a weight may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Classes {
    /// Algorithms of one class of bits, the same in every bucket: a row's bits do not depend on how many rows there
    /// are.
    #[default]
    One,
    /// Algorithms of any class, in each bucket the fastest: a row's bits change with the number of rows. For
    /// measurements of the cost of [`One`], and for nothing else.
    ///
    /// [`One`]: Classes::One
    Any,
}

/// The choice for a shape: one class of bits, and the fastest algorithm of it in every bucket.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    pub(super) shape: LinearShape,
    /// Algorithms that the buckets may take.
    pub(super) classes: Classes,
    /// Fingerprint of the first row of the product of the reproducible operands: it names the class. 0 where there is no
    /// one class.
    pub(super) fingerprint: u64,
    pub(super) buckets: Vec<Bucket>,
    /// Algorithms that were tried.
    pub(super) candidates: usize,
    /// Runs whose rows differed from others of their class; their algorithms were not taken there.
    pub(super) dropped: usize,
    /// True if it was measured in this process; false if measured before, and checked in this one.
    pub(super) measured: bool,
}

impl Choice {
    /// The shape.
    pub fn shape(&self) -> &LinearShape {
        &self.shape
    }

    /// Parts that K is split into; for [`Classes::Any`], those of the fewest rows.
    pub fn split(&self) -> u32 {
        self.buckets.first().map_or(1, |b| b.config.split.max(1) as u32)
    }

    /// The class of bits by a number: equal on the same device, driver and library for the same class; 0 where the
    /// buckets are of [`Classes::Any`].
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Bytes of workspace that any launch of up to `max_rows` rows needs: what the caller's arena sets aside, once for
    /// all products of a stream.
    pub fn workspace_bytes(&self) -> usize {
        self.buckets.iter().map(|b| b.workspace).max().unwrap_or(0)
    }

    /// The bucket of `rows`, which is at most `max_rows`.
    pub(super) fn bucket(&self, rows: u32) -> Option<(usize, &Bucket)> {
        let index = self.buckets.partition_point(|b| b.rows < rows);
        self.buckets.get(index).map(|bucket| (index, bucket))
    }
}

/// Algorithms whose rows have the same bits.
#[derive(Debug)]
pub(super) struct Class {
    pub(super) fingerprint: u64,
    /// The least split of K among them.
    pub(super) split: i32,
    /// The fastest of them in each bucket; `None` where there is none.
    pub(super) us: Vec<Option<f32>>,
}

/// A class with a larger split of K must be this much faster: times differ by as much from run to run, and the bits of a
/// model should not.
const GAIN: f32 = 1.03;

/// The class for a weight: among those that cover every bucket, the one with the least time against each bucket's best,
/// decoding's buckets counting most. `None` where no class (of split `only`) covers them.
pub(super) fn pick(buckets: &[u32], classes: &[Class], only: Option<u32>) -> Option<usize> {
    let weight = |rows: u32| match rows {
        0..=256 => 1.0,
        257..=1024 => 0.5,
        _ => 0.25,
    };
    let best: Vec<f32> =
        (0..buckets.len()).map(|b| classes.iter().filter_map(|c| c.us[b]).fold(f32::INFINITY, f32::min)).collect();
    let cost = |class: &Class| {
        let mut sum = 0.0;
        for (b, rows) in buckets.iter().enumerate() {
            sum += weight(*rows) * class.us[b]? / best[b];
        }
        Some(sum / buckets.iter().map(|rows| weight(*rows)).sum::<f32>())
    };
    let wanted = |c: &Class| only.is_none_or(|s| c.split == s as i32);
    let mut found: Vec<(usize, f32)> =
        classes.iter().enumerate().filter(|(_, c)| wanted(c)).filter_map(|(i, c)| Some((i, cost(c)?))).collect();
    let least = found.iter().map(|(_, cost)| *cost).fold(f32::INFINITY, f32::min);
    found.retain(|(_, cost)| *cost <= least * GAIN);
    found
        .into_iter()
        .min_by(|(a, x), (b, y)| classes[*a].split.cmp(&classes[*b].split).then(x.total_cmp(y)))
        .map(|f| f.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::rows::FloatType;

    fn class(split: i32, us: &[f32]) -> Class {
        let us = us.iter().map(|t| (*t > 0.0).then_some(*t)).collect();
        Class { fingerprint: split as u64, split, us }
    }

    #[test]
    fn the_fastest_class_that_covers_every_bucket_is_taken() {
        let buckets = [1, 64, 2048];
        // Figures of a down projection 4096 x 14336 on an H200.
        let down = [class(1, &[54.7, 38.4, 291.2]), class(2, &[31.9, 34.5, 349.5]), class(4, &[31.4, 34.8, 369.6])];
        assert_eq!(pick(&buckets, &down, None), Some(1));
        assert_eq!(pick(&buckets, &down, Some(4)), Some(2));
        assert_eq!(pick(&buckets, &down, Some(3)), None);
        let hole = [class(1, &[20.0, 20.0, 20.0]), class(2, &[10.0, 10.0, 0.0])];
        assert_eq!(pick(&buckets, &hole, None), Some(0));
        assert_eq!(pick(&buckets, &[class(2, &[1.0, 0.0, 1.0])], None), None);
        assert_eq!(pick(&buckets, &[], None), None);
    }

    #[test]
    fn a_larger_split_must_gain_more_than_noise() {
        let (one, close, clear) = (class(1, &[10.0, 10.0]), class(2, &[9.8, 9.8]), class(2, &[9.0, 9.0]));
        assert_eq!(pick(&[1, 64], &[close, one], None), Some(1));
        assert_eq!(pick(&[1, 64], &[class(1, &[10.0, 10.0]), clear], None), Some(1));
    }

    #[test]
    fn large_batches_count_less() {
        let classes = [class(1, &[10.0, 30.0]), class(2, &[20.0, 10.0])];
        assert_eq!(pick(&[8, 4096], &classes, None), Some(0));
        assert_eq!(pick(&[8, 256], &[class(1, &[10.0, 30.0]), class(2, &[20.0, 10.0])], None), Some(1));
    }

    #[test]
    fn rows_find_their_bucket() {
        let element = FloatType::Bf16;
        let shape = LinearShape { outputs: 8, inputs: 8, element, f32_output: false, bias: false, max_rows: 64 };
        let config =
            Config { id: 0, tile: 0, split: 2, reduction: 2, swizzle: 0, custom: 0, stages: 0, inner: 0, cluster: 0 };
        let bucket = |rows, workspace| Bucket { rows, algo: Algo([0; 8]), config, us: 1.0, workspace, own: None };
        let (buckets, classes) = (vec![bucket(1, 5), bucket(8, 9), bucket(64, 7)], Classes::One);
        let choice = Choice { shape, fingerprint: 1, buckets, candidates: 3, dropped: 0, measured: true, classes };
        let rows = |rows| choice.bucket(rows).map(|(_, b)| b.rows);
        assert_eq!([1, 2, 8, 9, 64, 65].map(rows), [Some(1), Some(8), Some(8), Some(64), Some(64), None]);
        assert_eq!((choice.workspace_bytes(), choice.split()), (9, 2));
    }
}
