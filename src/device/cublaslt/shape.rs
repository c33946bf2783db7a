//! A weight's shape, and the numbers of rows at which the fastest algorithm is looked for.

use crate::device::rows::FloatType;
use crate::error::{Error, Result, in_range};

/// `y[M, outputs] = x[M, inputs] W[outputs, inputs]^T (+ bias)`, summed in float32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearShape {
    /// N, rows of the weight.
    pub outputs: u32,
    /// K, columns of the weight.
    pub inputs: u32,
    /// Element of weight and x: bf16 or f16.
    pub element: FloatType,
    /// True if y is float32, and not of the weight's type.
    pub f32_output: bool,
    /// True if a bias of y's type is added before the sum is rounded.
    pub bias: bool,
    /// Most rows of one launch.
    pub max_rows: u32,
}

/// Borders of the buckets.
const BORDERS: [u32; 14] = [1, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096];
/// Largest N and K.
const MAX_SIDE: i128 = 1 << 24;
/// Largest M.
const MAX_ROWS: i128 = 1 << 17;

impl LinearShape {
    /// Check it.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] or [`Error::Mismatch`] with the operand.
    pub fn check(&self) -> Result<()> {
        in_range("linear outputs", self.outputs, 1, MAX_SIDE)?;
        in_range("linear inputs", self.inputs, 1, MAX_SIDE)?;
        in_range("linear max_rows", self.max_rows, 1, MAX_ROWS)?;
        if self.element == FloatType::F32 {
            let (got, want) = (self.element.name().into(), "bfloat16 or float16".into());
            return Err(Error::Mismatch { operand: "weight", got, want });
        }
        if self.bias && self.f32_output {
            let why = "a bias goes with an output of the weight's type".into();
            return Err(Error::Invalid { what: "linear bias", got: self.to_string(), why });
        }
        Ok(())
    }

    /// Element of y.
    pub fn output(&self) -> FloatType {
        if self.f32_output { FloatType::F32 } else { self.element }
    }

    /// The buckets, as the most rows of each, rising to `max_rows`; every number of rows up to that is in one.
    pub fn buckets(&self) -> Vec<u32> {
        let mut borders: Vec<u32> = BORDERS.into_iter().filter(|b| *b < self.max_rows).collect();
        borders.push(self.max_rows);
        borders
    }

    /// Numbers of rows of bucket `i` at which its algorithm is checked: the least, the most and one between.
    pub(super) fn samples(&self, buckets: &[u32], i: usize) -> Vec<u32> {
        let (least, most) = (if i == 0 { 1 } else { buckets[i - 1] + 1 }, buckets[i]);
        let mut rows = vec![least, least + (most - least) / 2, most];
        rows.dedup();
        rows
    }

    /// Bytes of the weight.
    pub(super) fn weight_bytes(&self) -> usize {
        self.outputs as usize * self.inputs as usize * self.element.bytes() as usize
    }

    /// Key of a result in the file of choices: everything that it depends on.
    pub(super) fn key(&self) -> String {
        let Self { outputs, inputs, element, bias, max_rows, .. } = self;
        let bias = if *bias { " + bias" } else { "" };
        format!("{outputs} x {inputs} {} -> {}{bias}, {max_rows} rows", element.name(), self.output().name())
    }
}

impl std::fmt::Display for LinearShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.key())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(max_rows: u32) -> LinearShape {
        let element = FloatType::Bf16;
        LinearShape { outputs: 64, inputs: 32, element, f32_output: false, bias: false, max_rows }
    }

    #[test]
    fn every_number_of_rows_is_in_a_bucket_and_its_ends_are_checked() {
        for max_rows in [1, 2, 3, 4, 5, 64, 65, 128, 200, 2048, 4096, 5000, 1 << 17] {
            let (s, buckets) = (shape(max_rows), shape(max_rows).buckets());
            assert_eq!(buckets.last(), Some(&max_rows));
            assert!(buckets.windows(2).all(|w| w[0] < w[1]), "{buckets:?}");
            let mut next = 1;
            for i in 0..buckets.len() {
                let samples = s.samples(&buckets, i);
                assert_eq!((samples[0], samples[samples.len() - 1]), (next, buckets[i]));
                assert!(samples.windows(2).all(|w| w[0] < w[1]));
                next = buckets[i] + 1;
            }
        }
    }

    #[test]
    fn shapes_that_cannot_be_are_refused() {
        let text = |s: LinearShape| s.check().unwrap_err().to_string();
        assert!(text(shape(0)).contains("max_rows = 0 is outside 1..=131072"));
        assert!(text(LinearShape { outputs: 0, ..shape(1) }).contains("linear outputs = 0"));
        assert!(text(LinearShape { inputs: 1 << 25, ..shape(1) }).contains("linear inputs = 33554432"));
        assert!(text(LinearShape { element: FloatType::F32, ..shape(1) }).contains("weight: got float32"));
        assert!(text(LinearShape { bias: true, f32_output: true, ..shape(1) }).contains("linear bias"));
        assert!(shape(7).check().is_ok());
    }
}
