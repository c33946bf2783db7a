//! The launch of `cuda/rope_kv.cu`: from the rows of a qkv product to queries, and keys and values in the cache.

use std::sync::Arc;

use super::check::{arrays, epsilon, half, norm_weight, on_device, rows_on_device};
use crate::device::context::Context;
use crate::device::driver::{Function, Module, Stream};
use crate::device::images;
use crate::device::params::rope_kv::RopeKvParams;
use crate::device::rows::{FloatType, Rows};
use crate::device::view::{DeviceSlice, KvCacheView};
use crate::error::{Error, Result, in_range};
use crate::overlap::{Operand, disjoint};

/// Threads of a block.
const BLOCK: u32 = 64;
/// Threads of a query head, or of a key head and its value head.
const LANES: u32 = 8;
/// Longest head of the functions that keep little of a head in registers, and so have many heads in flight.
const SHORT_HEAD: usize = 128;
/// Longest head, and most dimensions that are rotated.
pub const MAX_HEAD_DIM: usize = 512;

/// The kernels of `cuda/rope_kv.cu` on one device, by element type, for heads of up to `SHORT_HEAD` and for longer ones.
/// Functions are valid while `_module` is loaded.
#[derive(Debug)]
pub struct RopeKv {
    functions: [[Function; 2]; 2],
    _module: Module,
    context: Arc<Context>,
}

/// The operands of [`RopeKv::launch`]. Element type everywhere but in the table: that of `qkv`, bf16 or f16.
#[derive(Debug, Clone, Copy)]
pub struct RopeKvOperands<'a> {
    /// `[rows, (heads + 2 kv_heads) head_dim]`: queries, keys, values.
    pub qkv: &'a Rows,
    /// Query heads; 0 where only keys and values are wanted.
    pub heads: usize,
    /// Key heads, as many as value heads.
    pub kv_heads: usize,
    /// `[1, (heads + 2 kv_heads) head_dim]`, added first (Qwen2).
    pub bias: Option<&'a Rows>,
    /// RMSNorm of each query head before the rotation, `[1, head_dim]` (Qwen3), of the element type or of f32.
    pub q_norm: Option<&'a Rows>,
    /// RMSNorm of each key head before the rotation, `[1, head_dim]`, of the type of `q_norm`.
    pub k_norm: Option<&'a Rows>,
    /// Added to the mean square of a head.
    pub eps: f32,
    /// Cosines by position, f32 `[positions, half]`: element i of a head goes with element i + half. Scaled variants of
    /// RoPE differ in the table alone; what lies behind the first 2 half elements passes.
    pub cos: &'a Rows,
    /// Sines, as `cos`.
    pub sin: &'a Rows,
    /// RoPE position of each row.
    pub positions: &'a DeviceSlice<i32>,
    /// Slot of each row; 0, the sink, for a row whose key and value nobody needs.
    pub slots: &'a DeviceSlice<i32>,
    /// `[rows, heads * head_dim]`; `None` exactly where `heads` is 0.
    pub q: Option<&'a Rows>,
    /// `[layers, 2, num_slots, kv_heads, head_dim]`.
    pub cache: &'a KvCacheView,
    /// Layer that is written.
    pub layer: usize,
}

impl RopeKvOperands<'_> {
    /// Whether every operand can be read and written in vectors of 16 bytes, the two halves of a head each by itself.
    fn in_vectors(&self, head_dim: usize) -> bool {
        let rows = [Some(self.qkv), self.q, self.bias, self.q_norm, self.k_norm, Some(self.cos), Some(self.sin)];
        (self.cos.columns() | head_dim).is_multiple_of(8)
            && rows.into_iter().flatten().all(Rows::in_vectors)
            && self.cache.address().is_multiple_of(16)
    }
}

impl RopeKv {
    /// Load them into `context`, which is current.
    pub(super) fn load(context: Arc<Context>) -> Result<Self> {
        let module = Module::load(images::select("rope_kv", context.capability())?)?;
        let functions = [
            [module.function("rope_kv_bf16")?, module.function("rope_kv_bf16_long")?],
            [module.function("rope_kv_f16")?, module.function("rope_kv_f16_long")?],
        ];
        Ok(Self { functions, _module: module, context })
    }

    /// Bias, per-head norm and rotation of queries and keys, in f32 and rounded once; queries to `q`, keys and values to
    /// the cache. A row's bits depend on that row alone.
    ///
    /// A row whose slot is 0 writes no key and no value. A slot outside the cache is recorded (`cache (slot)`) and not
    /// written; a position outside the table is recorded (`rope table`), the row's queries are zeros then, and its key and
    /// value are not written.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for operands that do not fit each other; [`Error::OutOfRange`] for an odd or too long head, a
    /// table that rotates more than there is, or a layer that is not there.
    pub fn launch(&self, stream: Stream, operands: &RopeKvOperands<'_>) -> Result<()> {
        let o = operands;
        let context = &self.context;
        let [short, long] = half(o.qkv, self.functions[0], self.functions[1])?;
        let (rows, float) = (o.qkv.rows(), o.qkv.float());
        in_range("kv_heads", o.kv_heads as u64, 1, 65_535)?;
        in_range("heads", o.heads as u64, 0, 65_535)?;
        let all_heads = o.heads + 2 * o.kv_heads;
        let head_dim = o.qkv.columns() / all_heads;
        in_range("head_dim", head_dim as u64, 2, MAX_HEAD_DIM as i128)?;
        if head_dim % 2 == 1 {
            let why = "rotary positions turn pairs: must be even".into();
            return Err(Error::Invalid { what: "head_dim", got: head_dim.to_string(), why });
        }
        o.qkv.expect(rows, all_heads * head_dim, float)?;
        match (o.q, o.heads) {
            (Some(q), heads @ 1..) => q.expect(rows, heads * head_dim, float)?,
            (None, 0) => {}
            (q, heads) => {
                let got = if q.is_some() { "a tensor" } else { "none" };
                let want = format!("one exactly where there are query heads ({heads})");
                return Err(Error::Mismatch { operand: "q", got: got.into(), want });
            }
        }
        o.bias.map_or(Ok(()), |b| b.expect(1, all_heads * head_dim, float))?;
        let mut norm_f32 = None;
        for norm in [o.q_norm, o.k_norm].into_iter().flatten() {
            let wide = norm_weight(norm, head_dim, float)?;
            if *norm_f32.get_or_insert(wide) != wide {
                return Err(Error::Mismatch {
                    operand: norm.what(),
                    got: norm.float().name().into(),
                    want: "the type of q_norm".into(),
                });
            }
        }
        in_range("rotary pairs", o.cos.columns() as u64, 1, head_dim as i128 / 2)?;
        o.cos.expect(o.cos.rows(), o.cos.columns(), FloatType::F32)?;
        o.sin.expect(o.cos.rows(), o.cos.columns(), FloatType::F32)?;
        for table in [o.cos, o.sin] {
            if table.stride() != table.columns() {
                let got = format!("{} elements from row to row", table.stride());
                return Err(Error::Mismatch { operand: table.what(), got, want: table.columns().to_string() });
            }
        }
        arrays(context, rows, &[("positions", o.positions), ("slots", o.slots)])?;
        let row_bytes = (o.kv_heads * head_dim) as u64 * float.bytes();
        if o.cache.row_bytes() != row_bytes {
            return Err(Error::Mismatch {
                operand: "cache",
                got: format!("{} bytes a token and plane", o.cache.row_bytes()),
                want: format!("{row_bytes}: {} x {head_dim} of {}", o.kv_heads, float.name()),
            });
        }
        in_range("layer", o.layer as u64, 0, i128::from(o.cache.planes() / 2) - 1)?;
        rows_on_device(context, &[o.qkv, o.cos, o.sin])?;
        let optional = [o.bias, o.q_norm, o.k_norm, o.q];
        optional.into_iter().flatten().try_for_each(|r| rows_on_device(context, &[r]))?;
        on_device(context, &[("cache", o.cache.device())])?;
        let eps_bits = epsilon(o.eps)?;
        let read = [
            o.qkv.span(),
            o.bias.span(),
            o.q_norm.span(),
            o.k_norm.span(),
            o.cos.span(),
            o.sin.span(),
            o.positions.span(),
            o.slots.span(),
        ];
        disjoint(&[&[o.cache.span(), o.q.span()]], &[&read])?;
        if rows == 0 {
            return Ok(());
        }
        let address = |r: Option<&Rows>| r.map_or(0, Rows::address);
        let plane_bytes = o.cache.row_bytes() * o.cache.num_slots() as u64; // the view checked the product
        let cache_k = o.cache.address() + 2 * o.layer as u64 * plane_bytes;
        let report = context.report(stream)?;
        let params = RopeKvParams {
            qkv: o.qkv.address(),
            q: address(o.q),
            cache_k,
            cache_v: cache_k + plane_bytes,
            positions: o.positions.address(),
            slots: o.slots.address(),
            cos: o.cos.address(),
            sin: o.sin.address(),
            bias: address(o.bias),
            q_norm: address(o.q_norm),
            k_norm: address(o.k_norm),
            report,
            qkv_stride: o.qkv.stride() as u64,
            q_stride: o.q.map_or(0, |q| q.stride() as u64),
            rows: rows as i32, // the views checked that sizes fit
            heads: o.heads as i32,
            kv_heads: o.kv_heads as i32,
            head_dim: head_dim as i32,
            half: o.cos.columns() as i32,
            positions_in_table: o.cos.rows() as i32,
            num_slots: o.cache.num_slots(),
            eps_bits,
            wide: u32::from(o.in_vectors(head_dim)),
            norm_f32: u32::from(norm_f32 == Some(true)),
        };
        let blocks = ((o.heads + o.kv_heads) as u32).div_ceil(BLOCK / LANES);
        let function = if head_dim <= SHORT_HEAD { short } else { long };
        let _current = context.enter()?;
        // SAFETY: the module is loaded for the process and its context is current. Addresses and sizes come from views,
        // whose constructors' callers promised them; the fault record lives as long as the process.
        unsafe { function.launch((rows as u32, blocks, 1), BLOCK, stream, &params) }
    }
}
