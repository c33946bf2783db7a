//! The launches of `cuda/rows.cu`: gathers of rows, RMSNorm with the residual sum, SiLU(gate) * up, GELU(gate) * up,
//! convolutions over the rows of each request.
//!
//! A row's bits depend on that row and its length alone. `live` is an array whose last element counts the rows of a
//! static batch that are live (so the `offsets` of a ragged batch serve as they are); rows from there on are written as
//! zeros. A copy from table to table leaves them as they are. Without `live` all rows are.

use std::sync::Arc;

use super::check::{epsilon, half, length, live_address, norm_weight, on_device, rows_on_device};
use crate::bounds::MAX_BATCH;
use crate::device::context::Context;
use crate::device::driver::{Function, Module, Stream};
use crate::device::images;
use crate::device::params::rows::{self as params, AddRmsNormParams, GatedUpParams, GatherRowsParams, RowConvParams};
use crate::device::rows::Rows;
use crate::device::view::DeviceSlice;
use crate::error::{Error, Result, in_range};
use crate::overlap::{Operand, disjoint};

/// Elements of a vector.
const WIDTH: usize = 8;
/// Vectors that a thread of the norm keeps in registers.
const NORM_VECTORS: usize = 4;
/// Threads of a gather's block.
const THREADS: u32 = 256;
/// Vectors of a row that a thread of a gather moves, before the row is shared by more blocks.
const PART_VECTORS: u32 = 4;
/// Most blocks that share a row of a gather.
const MAX_PARTS: u32 = 64;
/// Longest row of the norm: what 1024 threads keep in registers.
pub const MAX_NORM_COLUMNS: usize = 1024 * NORM_VECTORS * WIDTH;

/// The kernels of `cuda/rows.cu` on one device. Functions are valid while `_module` is loaded.
#[derive(Debug)]
pub struct RowOps {
    gather: [Function; 2],
    norm: [Function; 2],
    silu: [Function; 2],
    gelu: [Function; 2],
    conv: [Function; 2],
    _module: Module,
    context: Arc<Context>,
}

/// What a gate goes through, as `config.json` calls it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu,
    /// GELU in its tanh form (<https://arxiv.org/abs/1606.08415>).
    GeluTanh,
}

impl std::str::FromStr for Activation {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "silu" => Ok(Self::Silu),
            "gelu_tanh" => Ok(Self::GeluTanh),
            _ => {
                let why = "must be \"silu\" or \"gelu_tanh\"".into();
                Err(Error::Invalid { what: "activation", got: name.into(), why })
            }
        }
    }
}

/// The operands of [`RowOps::add_rms_norm`].
#[derive(Debug, Clone, Copy)]
pub struct AddRmsNorm<'a> {
    /// The residual stream `[rows, columns]`; with `x` it is written.
    pub residual: &'a Rows,
    /// Added to it, `[rows, columns]`.
    pub x: Option<&'a Rows>,
    /// One factor a column, `[1, columns]`, of the element type or of f32.
    pub weight: &'a Rows,
    /// Added to the mean square.
    pub eps: f32,
    /// The norm of the sum, `[rows, columns]`.
    pub out: Option<&'a Rows>,
    /// The sum once more, `[rows, columns]`: features of a layer for a draft head.
    pub copy: Option<&'a Rows>,
    /// See the module.
    pub live: Option<&'a DeviceSlice<i32>>,
}

/// The operands of [`RowOps::conv`].
#[derive(Debug, Clone, Copy)]
pub struct RowConv<'a> {
    /// `[rows, columns]`.
    pub x: &'a Rows,
    /// `[taps, columns]`: what the factors of all rows have in common.
    pub base: &'a Rows,
    /// `[rows, taps * groups]`: what is added to a row's factors, for each group of columns.
    pub own: &'a Rows,
    /// First row of each request and the end of the last one's, of which there is at least one.
    pub starts: &'a DeviceSlice<i32>,
    /// Whether the sum is added to `out`, or replaces it.
    pub adds: bool,
    /// `[rows, columns]`; not `x`.
    pub out: &'a Rows,
}

impl RowOps {
    /// Load them into `context`, which is current.
    pub(super) fn load(context: Arc<Context>) -> Result<Self> {
        let module = Module::load(images::select("rows", context.capability())?)?;
        let gather = [module.function("gather_rows_v16")?, module.function("gather_rows_v2")?];
        let norm = [module.function("add_rms_norm_bf16")?, module.function("add_rms_norm_f16")?];
        let silu = [module.function("silu_up_bf16")?, module.function("silu_up_f16")?];
        let gelu = [module.function("gelu_up_bf16")?, module.function("gelu_up_f16")?];
        let conv = [module.function("row_conv_bf16")?, module.function("row_conv_f16")?];
        Ok(Self { gather, norm, silu, gelu, conv, _module: module, context })
    }

    /// `out[i] = table[tokens[i]]`. A token of -1 is a lane without a token: its row is zeros. A token outside the table is
    /// recorded (`embedding table`), and its row is zeros.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for operands that do not fit each other.
    pub fn embed(
        &self,
        stream: Stream,
        table: &Rows,
        tokens: &DeviceSlice<i32>,
        live: Option<&DeviceSlice<i32>>,
        out: &Rows,
    ) -> Result<()> {
        out.expect(tokens.len(), table.columns(), table.float())?;
        let names = (params::KERNEL_EMBED, params::BUFFER_EMBEDDING);
        self.gather_as(stream, names, table, (Some(tokens), 0), live, out, (None, false))
    }

    /// `out[i] = from[indices[i] + shift]`: accepted rows by their indices, or with `shift` -1 the last row of each request
    /// by the second to last entries of its `offsets`. -1 and what lies outside `from` as in [`RowOps::embed`] (`rows`).
    ///
    /// # Errors
    /// [`Error::Mismatch`] for operands that do not fit each other.
    pub fn gather(
        &self,
        stream: Stream,
        from: &Rows,
        indices: &DeviceSlice<i32>,
        shift: i32,
        live: Option<&DeviceSlice<i32>>,
        out: &Rows,
    ) -> Result<()> {
        out.expect(indices.len(), from.columns(), from.float())?;
        let names = (params::KERNEL_GATHER_ROWS, params::BUFFER_ROWS);
        self.gather_as(stream, names, from, (Some(indices), shift), live, out, (None, false))
    }

    /// `out[targets[i]] = from[indices[i]]` of rows of two tables; `None` is row i. Rows that nothing goes to stay as they are.
    /// -1 in either list is nothing; what lies outside is recorded (`rows`, `rows (destination)`) and is nothing. No row of
    /// `out` is named twice.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for operands that do not fit each other.
    pub fn copy(
        &self,
        stream: Stream,
        (from, indices): (&Rows, Option<&DeviceSlice<i32>>),
        (out, targets): (&Rows, Option<&DeviceSlice<i32>>),
        live: Option<&DeviceSlice<i32>>,
    ) -> Result<()> {
        out.expect(out.rows(), from.columns(), from.float())?;
        let rows = indices.or(targets).map_or(from.rows(), DeviceSlice::len);
        for (operand, list, table) in [("src_rows", indices, from), ("dst_rows", targets, out)] {
            match list {
                Some(list) => length(operand, list.len(), rows, true)?,
                None if table.rows() < rows => {
                    let got = format!("{} rows", table.rows());
                    return Err(Error::Mismatch { operand: table.what(), got, want: format!("at least {rows}") });
                }
                None => {}
            }
        }
        if rows == 0 {
            return Ok(());
        }
        let names = (params::KERNEL_COPY_ROWS, params::BUFFER_ROWS);
        self.gather_as(stream, names, from, (indices, 0), live, out, (targets, true))
    }

    #[allow(clippy::too_many_arguments)]
    fn gather_as(
        &self,
        stream: Stream,
        (kernel, buffer): (i32, i32),
        table: &Rows,
        (indices, shift): (Option<&DeviceSlice<i32>>, i32),
        live: Option<&DeviceSlice<i32>>,
        out: &Rows,
        (targets, keeps): (Option<&DeviceSlice<i32>>, bool),
    ) -> Result<()> {
        let context = &self.context;
        rows_on_device(context, &[table, out])?;
        let lists = [("indices", indices), ("targets", targets)];
        lists.iter().try_for_each(|(what, l)| l.map_or(Ok(()), |l| on_device(context, &[(what, l.device())])))?;
        disjoint(&[&[out.span()]], &[&[table.span(), indices.span(), targets.span(), live.span()]])?;
        let live = live_address(context, live)?;
        let rows = indices.or(targets).map_or(table.rows(), DeviceSlice::len);
        if rows == 0 {
            return Ok(());
        }
        in_range("rows", rows as u64, 0, i128::from(i32::MAX))?;
        let bytes = table.columns() as u64 * table.float().bytes();
        let wide = table.in_vectors() && out.in_vectors();
        let width = if wide { 16 } else { 2 };
        let columns = in_range("bytes of a row", bytes / width, 1, i128::from(u32::MAX))? as u32;
        let report = context.report(stream)?;
        let params = GatherRowsParams {
            table: table.address(),
            out: out.address(),
            indices: indices.map_or(0, DeviceSlice::address),
            targets: targets.map_or(0, DeviceSlice::address),
            live,
            report,
            table_stride: table.stride_bytes(),
            out_stride: out.stride_bytes(),
            table_rows: table.rows() as i32, // `Rows` checked that sizes fit
            out_rows: out.rows() as i32,
            rows: rows as i32,
            columns,
            shift,
            keeps: u32::from(keeps),
            kernel,
            buffer,
        };
        // A long row, such as one of logits, is shared by several blocks.
        let parts = columns.div_ceil(THREADS * PART_VECTORS).min(MAX_PARTS);
        let _current = context.enter()?;
        // SAFETY: the module is loaded for the process and its context is current. Addresses and sizes come from views,
        // whose constructors' callers promised them; the fault record lives as long as the process.
        unsafe { self.gather[usize::from(!wide)].launch((rows as u32, parts, 1), THREADS, stream, &params) }
    }

    /// `residual += x`, rounded to the element type; `copy = residual`; `out = residual / sqrt(mean(residual^2) + eps) *
    /// weight`. Sums in f32 in one order that the row's length decides.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for operands that do not fit each other; [`Error::OutOfRange`] for rows longer than
    /// [`MAX_NORM_COLUMNS`]; [`Error::Invalid`] for an epsilon that is none.
    pub fn add_rms_norm(&self, stream: Stream, operands: &AddRmsNorm<'_>) -> Result<()> {
        let AddRmsNorm { residual, x, weight, eps, out, copy, live } = *operands;
        let context = &self.context;
        let (rows, columns, float) = (residual.rows(), residual.columns(), residual.float());
        let function = half(residual, self.norm[0], self.norm[1])?;
        in_range("columns of a norm", columns as u64, 1, MAX_NORM_COLUMNS as i128)?;
        let weight_f32 = norm_weight(weight, columns, float)?;
        let given = [x, out, copy].into_iter().flatten();
        given.clone().try_for_each(|r| r.expect(rows, columns, float))?;
        rows_on_device(context, &[residual, weight])?;
        given.clone().try_for_each(|r| rows_on_device(context, &[r]))?;
        disjoint(&[&[residual.span(), out.span(), copy.span()]], &[&[x.span(), weight.span(), live.span()]])?;
        let (live, eps_bits) = (live_address(context, live)?, epsilon(eps)?);
        if rows == 0 {
            return Ok(());
        }
        let address = |r: Option<&Rows>| r.map_or(0, Rows::address);
        let stride = |r: Option<&Rows>| r.map_or(0, |r| r.stride() as u64);
        let report = context.report(stream)?;
        let params = AddRmsNormParams {
            residual: residual.address(),
            x: address(x),
            weight: weight.address(),
            out: address(out),
            copy: address(copy),
            live,
            report,
            residual_stride: residual.stride() as u64,
            x_stride: stride(x),
            out_stride: stride(out),
            copy_stride: stride(copy),
            rows: rows as i32, // `Rows` checked that sizes fit
            columns: columns as i32,
            eps_bits,
            wide: u32::from(given.clone().chain([residual, weight]).all(Rows::in_vectors)),
            weight_f32: u32::from(weight_f32),
            reserved: 0,
        };
        let _current = context.enter()?;
        // SAFETY: as in `gather_as`.
        unsafe { function.launch((rows as u32, 1, 1), norm_threads(columns), stream, &params) }
    }

    /// `out = activation(gate) * up` of `gate_up` `[rows, 2 * columns]`: all gates before all ups, or, `interleaved`, pairs
    /// gate, up, gate, up, ...; `out` is `[rows, columns]`. In f32, with the host's exponential, rounded once.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for operands that do not fit each other.
    pub fn gated_up(
        &self,
        stream: Stream,
        activation: Activation,
        gate_up: &Rows,
        interleaved: bool,
        live: Option<&DeviceSlice<i32>>,
        out: &Rows,
    ) -> Result<()> {
        let context = &self.context;
        let [bf16, f16] = if activation == Activation::Silu { self.silu } else { self.gelu };
        let function = half(out, bf16, f16)?;
        gate_up.expect(out.rows(), out.columns() * 2, out.float())?;
        rows_on_device(context, &[gate_up, out])?;
        disjoint(&[&[out.span()]], &[&[gate_up.span(), live.span()]])?;
        let live = live_address(context, live)?;
        if out.rows() == 0 {
            return Ok(());
        }
        let blocks = out.columns().div_ceil(256 * WIDTH);
        in_range("columns of gated_up", out.columns() as u64, 1, 65_535 * 256 * WIDTH as i128)?;
        let report = context.report(stream)?;
        let params = GatedUpParams {
            gate_up: gate_up.address(),
            out: out.address(),
            live,
            report,
            in_stride: gate_up.stride() as u64,
            out_stride: out.stride() as u64,
            rows: out.rows() as i32, // `Rows` checked that sizes fit
            columns: out.columns() as i32,
            interleaved: u32::from(interleaved),
            wide: u32::from(gate_up.in_vectors() && out.in_vectors()),
        };
        let _current = context.enter()?;
        // SAFETY: as in `gather_as`.
        unsafe { function.launch((out.rows() as u32, blocks as u32, 1), 256, stream, &params) }
    }

    /// `out = (out +) sum over t of (base[t] + own[t]) * x[row - t]`, of the taps t whose row is one of the same request.
    /// In f32, rounded once. Rows behind the last request get zeros, or keep what they have where the sum is added.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for operands that do not fit each other; [`Error::OutOfRange`] for sizes that no launch has.
    pub fn conv(&self, stream: Stream, operands: &RowConv<'_>) -> Result<()> {
        let RowConv { x, base, own, starts, adds, out } = *operands;
        let context = &self.context;
        let (rows, columns, float, taps) = (x.rows(), x.columns(), x.float(), base.rows());
        let function = half(x, self.conv[0], self.conv[1])?;
        in_range("taps", taps as u64, 1, 64)?;
        base.expect(taps, columns, float)?;
        out.expect(rows, columns, float)?;
        let groups = own.columns() / taps;
        if groups == 0 || !columns.is_multiple_of(groups) {
            let (got, want) = (format!("{} columns", own.columns()), format!("{taps} times a divisor of {columns}"));
            return Err(Error::Mismatch { operand: own.what(), got, want });
        }
        own.expect(rows, taps * groups, float)?;
        rows_on_device(context, &[x, base, own, out])?;
        on_device(context, &[("starts", starts.device())])?;
        length("starts", starts.len(), 2, false)?;
        let blocks = in_range("columns of a convolution", columns.div_ceil(256) as u64, 1, 65_535)? as u32;
        disjoint(&[&[out.span()]], &[&[x.span(), base.span(), own.span(), starts.span()]])?;
        if rows == 0 {
            return Ok(());
        }
        let params = RowConvParams {
            x: x.address(),
            base: base.address(),
            own: own.address(),
            starts: starts.address(),
            out: out.address(),
            x_stride: x.stride() as u64,
            base_stride: base.stride() as u64,
            own_stride: own.stride() as u64,
            out_stride: out.stride() as u64,
            requests: in_range("requests", starts.len() as u64 - 1, 1, MAX_BATCH.into())? as i32,
            columns: columns as i32, // `Rows` checked that sizes fit
            taps: taps as i32,
            groups: groups as i32,
            adds: u32::from(adds),
            reserved: 0,
        };
        let _current = context.enter()?;
        // SAFETY: as in `gather_as`.
        unsafe { function.launch((rows as u32, blocks, 1), 256, stream, &params) }
    }
}

/// Threads of the norm's block: a function of the row's length alone, since the order of sums depends on it.
fn norm_threads(columns: usize) -> u32 {
    (columns.div_ceil(WIDTH).next_multiple_of(32)).min(1024) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_norm_has_threads_for_every_vector_of_its_row() {
        assert_eq!(
            [1, 8, 256, 257, 4096, 14_336, MAX_NORM_COLUMNS].map(norm_threads),
            [32, 32, 32, 64, 512, 1024, 1024]
        );
        for columns in 1..=MAX_NORM_COLUMNS {
            assert!(norm_threads(columns) as usize * NORM_VECTORS * WIDTH >= columns);
        }
    }
}
