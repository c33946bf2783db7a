//! The launches of `cuda/fingerprint.cu`: reproducible operands, and fingerprints of a matrix's rows.

use std::sync::Arc;

use crate::device::context::Context;
use crate::device::driver::{Function, Module, Stream};
use crate::device::images;
use crate::device::params::fingerprint::{FillParams, FingerprintParams};
use crate::device::params::fingerprint::{MIRROR_EQUAL, MIRROR_NEGATED, MIRROR_NONE};
use crate::device::rows::{FloatType, Rows};
use crate::device::view::{DeviceSlice, device_mismatch};
use crate::error::{Error, Result, in_range};
use crate::overlap::{Operand, disjoint};

/// Threads of a block; `__launch_bounds__` of the kernels.
const BLOCK: u32 = 256;
/// Blocks of a fill, for each multiprocessor.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 8;

/// How the halves of a row of reproducible values go together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mirror {
    /// Not at all.
    None = MIRROR_NONE as isize,
    /// A row reads the same from both ends; the middle of an odd number is 0.
    Equal = MIRROR_EQUAL as isize,
    /// The second half is the first from its end, negated; the middle of an odd number is 0.
    Negated = MIRROR_NEGATED as isize,
}

/// The kernels of `cuda/fingerprint.cu` on one device.
#[derive(Debug)]
pub struct Fingerprint {
    fill: Function,
    rows: Function,
    _module: Module,
    context: Arc<Context>,
}

impl Fingerprint {
    /// Load them into `context`, which is current.
    pub(super) fn load(context: Arc<Context>) -> Result<Self> {
        let module = Module::load(images::select("fingerprint", context.capability())?)?;
        let (fill, rows) = (module.function("fill_random")?, module.function("row_fingerprint")?);
        Ok(Self { fill, rows, _module: module, context })
    }

    /// Fill `out`, of bf16 or f16, with values that depend on `seed` and the element's place alone, of magnitudes from
    /// 2^-8 to 2^8 times 2^`exponent` (from -32 to 8), mirrored within each row as asked for. The product of an equal and
    /// a negated row is rounding alone: it shows in which order a sum was taken.
    pub fn fill(&self, stream: Stream, out: &Rows, seed: u32, exponent: i32, mirror: Mirror) -> Result<()> {
        in_range("exponent", exponent, -32, 8)?;
        let context = &self.context;
        without_gaps(out)?;
        if out.device() != context.ordinal() {
            return Err(device_mismatch("out", out.device(), context.ordinal(), "the kernel is launched"));
        }
        let f16 = match out.float() {
            FloatType::Bf16 => 0,
            FloatType::F16 => 1,
            other => {
                return Err(Error::Mismatch {
                    operand: "out",
                    got: other.name().into(),
                    want: "bfloat16 or float16".into(),
                });
            }
        };
        let count = out.rows() as u64 * out.columns() as u64;
        if count == 0 {
            return Ok(());
        }
        let most = u64::from(context.multiprocessors() * BLOCKS_PER_MULTIPROCESSOR);
        let blocks = count.div_ceil(BLOCK.into()).min(most) as u32;
        let cols = in_range("columns", out.columns() as u64, 1, u32::MAX.into())? as u32;
        let mirror = mirror as i32;
        let params = FillParams { out: out.address(), count, cols, seed, exponent, f16, mirror, reserved: 0 };
        let _current = context.enter()?;
        // SAFETY: the module is loaded and its context current; the view's maker promised its memory.
        unsafe { self.fill.launch((blocks, 1, 1), BLOCK, stream, &params) }
    }

    /// Write the fingerprint of each of the first `rows` rows of `matrix` to `out`.
    pub fn rows(&self, stream: Stream, matrix: &Rows, rows: u32, out: &DeviceSlice<u64>) -> Result<()> {
        let context = &self.context;
        without_gaps(matrix)?;
        for (operand, on) in [("matrix", matrix.device()), ("out", out.device())] {
            if on != context.ordinal() {
                return Err(device_mismatch(operand, on, context.ordinal(), "the kernel is launched"));
            }
        }
        for (what, have) in [("matrix", matrix.rows() as u64), ("out", out.len() as u64)] {
            if u64::from(rows) > have {
                let hint = "one a row".into();
                return Err(Error::Capacity { what, need: rows.into(), have, hint });
            }
        }
        disjoint(&[&[out.span()]], &[&[matrix.span()]])?;
        if rows == 0 {
            return Ok(());
        }
        let row_units = matrix.columns() as u64 * matrix.float().bytes() / 2;
        let params = FingerprintParams { data: matrix.address(), out: out.address(), row_units };
        let _current = context.enter()?;
        // SAFETY: as in `fill`; both capacities were checked.
        unsafe { self.rows.launch((rows, 1, 1), BLOCK, stream, &params) }
    }
}

/// The kernels take rows that follow each other.
fn without_gaps(rows: &Rows) -> Result<()> {
    if rows.stride() == rows.columns() {
        return Ok(());
    }
    let (got, want) = (format!("{} elements from row to row", rows.stride()), format!("{}: no gaps", rows.columns()));
    Err(Error::Mismatch { operand: rows.what(), got, want })
}
