//! The KV cache as the kernels see it, and the two kernels that write it.
//!
//! One tensor [layers, 2, slots, kv_heads, head_dim] holds all layers, keys before values. A slot is
//! `page * page_size + offset`; slot 0 is in the sink page, where dead queries write.

use std::ops::Range;

use half::bf16;

use super::threads;
use crate::error::{Error, Result};

/// Sizes of a KV cache [layers, 2, slots, kv_heads, head_dim].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Layers of the model.
    pub layers: usize,
    /// Slots: pages x tokens per page, the sink's included.
    pub slots: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl KvShape {
    /// Elements of one token's keys in one layer.
    pub fn token(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Elements of the whole tensor, or `None` where that leaves `usize`.
    fn elements(&self) -> Option<usize> {
        [2, self.slots, self.kv_heads, self.head_dim].iter().try_fold(self.layers, |a, &b| a.checked_mul(b))
    }

    /// Elements `plane * slots * token ..` of the keys (`plane = 2 * layer`) or values (one more).
    fn plane(&self, plane: usize) -> Range<usize> {
        let n = self.slots * self.token();
        plane * n..(plane + 1) * n
    }

    fn check(&self, got: usize) -> Result<()> {
        if self.elements() == Some(got) {
            return Ok(());
        }
        let KvShape { layers, slots, kv_heads, head_dim } = self;
        Err(Error::Mismatch {
            operand: "kv cache",
            got: format!("{got} elements"),
            want: format!("[{layers}, 2, {slots}, {kv_heads}, {head_dim}]"),
        })
    }

    fn check_layer(&self, kernel: &'static str, layer: usize) -> Result<()> {
        index(kernel, "kv layers", -1, -1, layer as i64, self.layers).map(|_| ())
    }
}

/// Elements of a cache, to read.
#[derive(Debug, Clone, Copy)]
pub enum KvData<'a> {
    /// float32.
    F32(&'a [f32]),
    /// bfloat16.
    Bf16(&'a [bf16]),
}

/// Elements of a cache, to write.
#[derive(Debug)]
pub enum KvDataMut<'a> {
    /// float32.
    F32(&'a mut [f32]),
    /// bfloat16.
    Bf16(&'a mut [bf16]),
}

/// A cache to read.
#[derive(Debug, Clone, Copy)]
pub struct KvCache<'a> {
    shape: KvShape,
    /// Always `shape.elements()` long.
    data: KvData<'a>,
}

impl<'a> KvCache<'a> {
    /// A view of a contiguous tensor.
    pub fn new(shape: KvShape, data: KvData<'a>) -> Result<Self> {
        shape.check(match &data {
            KvData::F32(d) => d.len(),
            KvData::Bf16(d) => d.len(),
        })?;
        Ok(Self { shape, data })
    }

    /// Shape of the view.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Keys and values [slots, kv_heads, head_dim] of a layer.
    pub(crate) fn layer(&self, kernel: &'static str, layer: usize) -> Result<(KvData<'a>, KvData<'a>)> {
        self.shape.check_layer(kernel, layer)?;
        let (k, v) = (self.shape.plane(2 * layer), self.shape.plane(2 * layer + 1));
        Ok(match self.data {
            KvData::F32(d) => (KvData::F32(&d[k]), KvData::F32(&d[v])),
            KvData::Bf16(d) => (KvData::Bf16(&d[k]), KvData::Bf16(&d[v])),
        })
    }
}

/// A cache to write.
#[derive(Debug)]
pub struct KvCacheMut<'a> {
    shape: KvShape,
    /// Always `shape.elements()` long.
    data: KvDataMut<'a>,
}

impl<'a> KvCacheMut<'a> {
    /// A view of a contiguous tensor.
    pub fn new(shape: KvShape, data: KvDataMut<'a>) -> Result<Self> {
        shape.check(match &data {
            KvDataMut::F32(d) => d.len(),
            KvDataMut::Bf16(d) => d.len(),
        })?;
        Ok(Self { shape, data })
    }

    /// Shape of the view.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// The same cache, to read.
    pub fn as_ref(&self) -> KvCache<'_> {
        let data = match &self.data {
            KvDataMut::F32(d) => KvData::F32(d),
            KvDataMut::Bf16(d) => KvData::Bf16(d),
        };
        KvCache { shape: self.shape, data }
    }
}

/// `i` as an index below `bound`, or the kernel's fault.
pub(crate) fn index(
    kernel: &'static str,
    buffer: &'static str,
    request: i64,
    step: i64,
    i: i64,
    bound: usize,
) -> Result<usize> {
    match usize::try_from(i) {
        Ok(u) if u < bound => Ok(u),
        _ => Err(Error::OutOfBounds { kernel, buffer, request, step, index: i, bound: bound as i64 }),
    }
}

/// Check `slots[j]` against the cache; `qo_indptr` tells which request a row belongs to.
pub(crate) fn check_slots(kernel: &'static str, shape: &KvShape, slots: &[i32], qo_indptr: &[i32]) -> Result<()> {
    for (j, &slot) in slots.iter().enumerate() {
        if slot < 0 || slot as usize >= shape.slots {
            let request = qo_indptr.partition_point(|&first| first as i64 <= j as i64) as i64 - 1;
            let first = usize::try_from(request).ok().and_then(|r| qo_indptr.get(r)).copied().unwrap_or(0);
            return index(kernel, "kv slots", request, j as i64 - i64::from(first), i64::from(slot), shape.slots)
                .map(|_| ());
        }
    }
    Ok(())
}

/// Write keys and values [rows, kv_heads, head_dim] of `layer` to `slots` `[rows]` (bf16 caches: to nearest even).
///
/// Rows go in order: where two name the same slot (the sink), the later one stays. `qo_indptr` (first row of each
/// request, and the end) only serves the error. Nothing is written unless every slot is in bounds.
pub fn kv_write(
    cache: &mut KvCacheMut<'_>,
    layer: usize,
    slots: &[i32],
    qo_indptr: &[i32],
    k: &[f32],
    v: &[f32],
) -> Result<()> {
    check_rows(cache, layer, slots, qo_indptr, k, v)?;
    let width = cache.shape.token();
    for (plane, x) in [(2 * layer, k), (2 * layer + 1, v)] {
        let range = cache.shape.plane(plane);
        for (&slot, row) in slots.iter().zip(x.chunks_exact(width.max(1))) {
            let at = range.start + slot as usize * width; // checked above
            write_row(&mut cache.data, at, row);
        }
    }
    Ok(())
}

/// The operands of a write against each other and the cache.
fn check_rows(
    cache: &KvCacheMut<'_>,
    layer: usize,
    slots: &[i32],
    qo_indptr: &[i32],
    k: &[f32],
    v: &[f32],
) -> Result<()> {
    for (operand, x) in [("k", k), ("v", v)] {
        if x.len() != slots.len() * cache.shape.token() {
            return Err(Error::Mismatch {
                operand,
                got: format!("{} elements", x.len()),
                want: format!("[{}, {}, {}]", slots.len(), cache.shape.kv_heads, cache.shape.head_dim),
            });
        }
    }
    cache.shape.check_layer("kv_write", layer)?;
    check_slots("kv_write", &cache.shape, slots, qo_indptr)
}

/// Store one row at element `at`.
#[inline]
pub(crate) fn write_row(data: &mut KvDataMut<'_>, at: usize, row: &[f32]) {
    match data {
        KvDataMut::F32(d) => d[at..at + row.len()].copy_from_slice(row),
        KvDataMut::Bf16(d) => {
            for (o, &v) in d[at..at + row.len()].iter_mut().zip(row) {
                *o = bf16::from_f32(v);
            }
        }
    }
}

impl KvCacheMut<'_> {
    /// Store the keys and the values of one head of one token; layer, slot and head have been checked by the caller.
    #[inline]
    pub(crate) fn put(&mut self, layer: usize, slot: usize, head: usize, k: &[f32], v: &[f32]) {
        let at = slot * self.shape.token() + head * self.shape.head_dim;
        let (kp, vp) = (self.shape.plane(2 * layer).start, self.shape.plane(2 * layer + 1).start);
        write_row(&mut self.data, kp + at, k);
        write_row(&mut self.data, vp + at, v);
    }
}

/// Copy the KV of slot `src[i]` to slot `dst[i]` in every layer, one move after the other in the order given (which
/// the planner chose so that no move reads what an earlier one overwrote). Nothing is moved unless every slot is in
/// bounds.
pub fn kv_move(cache: &mut KvCacheMut<'_>, src: &[i32], dst: &[i32]) -> Result<()> {
    if src.len() != dst.len() {
        return Err(Error::Mismatch {
            operand: "kv_move dst",
            got: format!("{} slots", dst.len()),
            want: format!("{} (as src)", src.len()),
        });
    }
    check_slots("kv_move", &cache.shape, src, &[])?;
    check_slots("kv_move", &cache.shape, dst, &[])?;
    let (width, plane) = (cache.shape.token(), cache.shape.slots * cache.shape.token());
    if plane == 0 || src.is_empty() {
        return Ok(());
    }
    match &mut cache.data {
        KvDataMut::F32(d) => move_planes(d, plane, width, src, dst),
        KvDataMut::Bf16(d) => move_planes(d, plane, width, src, dst),
    }
    Ok(())
}

/// Every plane (the keys or the values of a layer) is on its own: planes in parallel, moves in order.
fn move_planes<T: Copy + Send>(data: &mut [T], plane: usize, width: usize, src: &[i32], dst: &[i32]) {
    let planes: Vec<&mut [T]> = data.chunks_exact_mut(plane).collect();
    // A move of some hundred bytes misses the cache twice: about 100 ns.
    let cost = planes.len() * src.len() * (100 + width * size_of::<T>() / 8);
    threads::for_each(planes, cost, |plane| {
        for (&s, &d) in src.iter().zip(dst) {
            let (s, d) = (s as usize * width, d as usize * width); // checked by the caller
            plane.copy_within(s..s + width, d);
        }
    });
}

/// [`kv_write`] element by element through flat indices.
pub fn kv_write_reference(cache: &mut KvCacheMut<'_>, layer: usize, slots: &[i32], k: &[f32], v: &[f32]) -> Result<()> {
    let KvShape { slots: bound, kv_heads, head_dim, .. } = cache.shape;
    check_rows(cache, layer, slots, &[], k, v)?;
    for (row, &slot) in slots.iter().enumerate() {
        for head in 0..kv_heads {
            for d in 0..head_dim {
                for (which, x) in [k, v].into_iter().enumerate() {
                    let at = (((layer * 2 + which) * bound + slot as usize) * kv_heads + head) * head_dim + d;
                    let value = x[(row * kv_heads + head) * head_dim + d];
                    match &mut cache.data {
                        KvDataMut::F32(data) => data[at] = value,
                        KvDataMut::Bf16(data) => data[at] = bf16::from_f32(value),
                    }
                }
            }
        }
    }
    Ok(())
}
