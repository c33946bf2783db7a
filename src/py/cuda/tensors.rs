//! Imported CUDA tensors as the typed views that device launches take.
//!
//! As for torch's own operations, the caller keeps a tensor's memory from being reused before the work on it is done:
//! torch's allocator does so for work on the stream that the tensor was made on; for another stream there is
//! `Tensor.record_stream`, and a captured graph's tensors are kept by whoever replays it.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::device::{
    AttentionOut, Choice, DeviceArray, DeviceElements, DeviceSlice, FloatType, HalfType, KvCacheView, KvLayerView,
    Linear, Loan, Products, RoundRing, Rows, Stream,
};
use crate::error::{Error, Result, in_range};
use crate::py::dlpack::{Buffer, DType, Output, Place, Tensor, TensorDevice as Device};

/// DLPack's device type of CUDA.
const CUDA: i32 = 2;

/// An element type of [`DeviceSlice`], and the type that tensors of it have.
pub(super) trait DeviceElement {
    /// The type as DLPack names it.
    const DTYPE: DType;
}

impl DeviceElement for i32 {
    const DTYPE: DType = DType::I32;
}

impl DeviceElement for u8 {
    const DTYPE: DType = DType::U8;
}

impl DeviceElement for f32 {
    const DTYPE: DType = DType::F32;
}

/// Words of bits: torch has no arithmetic on `uint64`, so they travel as `int64`.
impl DeviceElement for u64 {
    const DTYPE: DType = DType::I64;
}

impl DeviceElement for i64 {
    const DTYPE: DType = DType::I64;
}

impl Tensor {
    /// A contiguous tensor of integers or bytes on CUDA device `ordinal` as an array of a format: one of two dimensions is a
    /// table.
    pub(super) fn device_array(&self, ordinal: i32) -> Result<DeviceArray> {
        let elements = match self.dtype {
            DType::I32 => DeviceElements::I32(self.device_slice(ordinal)?),
            DType::I64 => DeviceElements::I64(self.device_slice(ordinal)?),
            DType::U8 | DType::BOOL => {
                self.check(Device::cuda(ordinal), self.dtype, self.shape())?;
                // SAFETY: as in `device_slice`.
                let bytes =
                    unsafe { DeviceSlice::from_raw(self.operand, self.address() as u64, self.elements, ordinal) };
                DeviceElements::U8(bytes?)
            }
            other => return Err(self.mismatch(other, "int32, int64, uint8 or bool")),
        };
        let columns = match *self.shape() {
            [_] => None,
            [_, columns] => Some(columns),
            ref other => return Err(self.mismatch(format_args!("shape {other:?}"), "a line or a table")),
        };
        Ok(DeviceArray { elements, columns })
    }

    /// A contiguous `int32` tensor of two dimensions, and the length of its rows.
    pub(super) fn device_table(&self, ordinal: i32) -> Result<(DeviceSlice<i32>, usize)> {
        let shape: [usize; 2] = self.dims("[rows, width]")?;
        self.check(Device::cuda(ordinal), DType::I32, &shape)?;
        // SAFETY: as in `device_slice`.
        let slice = unsafe { DeviceSlice::from_raw(self.operand, self.address() as u64, shape[0] * shape[1], ordinal) };
        Ok((slice?, shape[1]))
    }

    /// The 16-bit floating-point type of the elements.
    fn half_type(&self) -> Result<HalfType> {
        match self.dtype {
            DType::BF16 => Ok(HalfType::Bf16),
            DType::F16 => Ok(HalfType::F16),
            other => Err(self.mismatch(other, "bfloat16 or float16")),
        }
    }

    /// Layer `layer` of a contiguous KV cache `[layers, 2, num_slots, kv_heads, head_dim]` of `bfloat16` or `float16`.
    pub(super) fn device_kv_layer(&self, ordinal: i32, layer: usize) -> Result<KvLayerView> {
        let shape: [usize; 5] = self.dims("[layers, 2, num_slots, kv_heads, head_dim]")?;
        let element = self.half_type()?;
        self.check(Device::cuda(ordinal), self.dtype, &shape)?;
        if shape[1] != 2 {
            let want = "[layers, 2, num_slots, kv_heads, head_dim]";
            return Err(self.mismatch(format_args!("shape {shape:?}"), want));
        }
        in_range("layer", layer as u64, 0, shape[0] as i128 - 1)?;
        let plane = (shape[2] * shape[3] * shape[4] * self.dtype.size()) as u64; // the tensor's bytes fit isize
        let k = self.address() as u64 + 2 * layer as u64 * plane;
        // SAFETY: `check` saw the whole array contiguous on this device, and `layer` is in it; the module's contract with the
        // caller keeps it there.
        unsafe {
            KvLayerView::from_raw(k, k + plane, [shape[2], shape[3], shape[4]].map(|n| n as u64), element, ordinal)
        }
    }

    /// Contiguous queries `[queries, heads, head_dim]` of the cache's element type and head_dim; and the heads.
    pub(super) fn device_queries(&self, cache: &KvLayerView) -> Result<(DeviceSlice<u16>, usize)> {
        let [queries, heads, head_dim] = self.dims("[queries, heads, head_dim]")?;
        let dtype = match cache.element() {
            HalfType::Bf16 => DType::BF16,
            HalfType::F16 => DType::F16,
        };
        let shape = [queries, heads, cache.head_dim() as usize];
        self.check(Device::cuda(cache.device()), dtype, &shape)?;
        // SAFETY: as in `device_slice`.
        let slice = unsafe {
            DeviceSlice::from_raw(self.operand, self.address() as u64, queries * heads * head_dim, cache.device())
        };
        Ok((slice?, heads))
    }

    /// The elements of a contiguous tensor of any shape on CUDA device `ordinal`.
    pub(super) fn device_slice<T: DeviceElement>(&self, ordinal: i32) -> Result<DeviceSlice<T>> {
        self.check(Device::cuda(ordinal), T::DTYPE, self.shape())?;
        // SAFETY: `check` saw `elements` contiguous, aligned elements on this device; the module's contract with the
        // caller keeps them there.
        unsafe { DeviceSlice::from_raw(self.operand, self.address() as u64, self.elements, ordinal) }
    }

    /// A contiguous float tensor [rows, columns], or a vector as one row, on CUDA device `ordinal`.
    pub(super) fn device_rows(&self, ordinal: i32) -> Result<Rows> {
        let float = match self.dtype {
            DType::F32 => FloatType::F32,
            DType::BF16 => FloatType::Bf16,
            DType::F16 => FloatType::F16,
            other => return Err(self.mismatch(other, "float32, bfloat16 or float16")),
        };
        self.check(Device::cuda(ordinal), self.dtype, self.shape())?;
        let shape = match *self.shape() {
            [columns] => [1, columns],
            [rows, columns] => [rows, columns],
            ref other => return Err(self.mismatch(format_args!("shape {other:?}"), "[rows, columns]")),
        };
        // SAFETY: as in `device_slice`.
        unsafe { Rows::from_raw(self.operand, self.address() as u64, shape, shape[1], float, ordinal) }
    }

    /// Ordinal of the CUDA device that the tensor is on.
    pub(super) fn cuda_ordinal(&self) -> Result<i32> {
        match self.device() {
            Device { kind: CUDA, index } => Ok(index),
            other => Err(self.mismatch(format_args!("a tensor on {other}"), "a tensor on a CUDA device")),
        }
    }

    /// A contiguous `int32` tensor of one dimension on CUDA device `ordinal`.
    pub(super) fn device_i32(&self, ordinal: i32) -> Result<DeviceSlice<i32>> {
        let [len] = self.dims("one dimension")?;
        self.check(Device::cuda(ordinal), DType::I32, &[len])?;
        // SAFETY: `check` saw `len` contiguous, aligned elements on this device; the module's contract with the caller
        // keeps them there.
        unsafe { DeviceSlice::from_raw(self.operand, self.address() as u64, len, ordinal) }
    }
}

/// A weight's product over a caller's tensors, which it keeps.
pub(super) struct LentLinear {
    linear: Linear,
    /// The weight and the bias: held for their memory.
    _tensors: (Tensor, Option<Tensor>),
}

impl LentLinear {
    /// The product with `weight`; `None` for a bias where the choice has none.
    pub(super) fn new(
        products: &Arc<Products>,
        choice: &Arc<Choice>,
        weight: Tensor,
        bias: Option<Tensor>,
    ) -> Result<Self> {
        let ordinal = weight.cuda_ordinal()?;
        let view = weight.device_rows(ordinal)?;
        let bias_view = bias.as_ref().map(|b| b.device_rows(ordinal)).transpose()?;
        // SAFETY: the tensors are kept beside the product; the module's contract with the caller covers work in flight
        // and captured graphs.
        let linear = unsafe { products.linear(choice, &view, bias_view.as_ref()) }?;
        Ok(Self { linear, _tensors: (weight, bias) })
    }

    /// The product.
    pub(super) fn linear(&self) -> &Linear {
        &self.linear
    }
}

impl Output {
    /// A contiguous, writable tensor of the shape and type of `q`, or of `float32`.
    pub(super) fn device_attention_out(&self, ordinal: i32, q: &Tensor) -> Result<AttentionOut> {
        let dtype = if self.dtype == DType::F32 { DType::F32 } else { q.dtype() };
        self.check(Device::cuda(ordinal), dtype, q.shape())?;
        self.writable()?;
        let (address, len) = (self.address() as u64, self.elements);
        // SAFETY: `check` saw the elements contiguous on this device and `writable` that they may be written; the module's
        // contract with the caller keeps them there.
        Ok(unsafe {
            match dtype {
                DType::F32 => AttentionOut::F32(DeviceSlice::from_raw(self.operand, address, len, ordinal)?),
                _ => AttentionOut::Half(DeviceSlice::from_raw(self.operand, address, len, ordinal)?),
            }
        })
    }

    /// Contiguous, writable bytes.
    pub(super) fn device_bytes(&self, ordinal: i32) -> Result<DeviceSlice<u8>> {
        let [len] = self.dims("one dimension")?;
        self.check(Device::cuda(ordinal), DType::U8, &[len])?;
        self.writable()?;
        // SAFETY: as in `device_attention_out`.
        unsafe { DeviceSlice::from_raw(self.operand, self.address() as u64, len, ordinal) }
    }

    /// A contiguous, writable KV cache `[layers, 2, num_slots, kv_heads, head_dim]` of any element type on CUDA device
    /// `ordinal`.
    pub(super) fn device_kv_cache(&self, ordinal: i32) -> Result<KvCacheView> {
        let shape: [usize; 5] = self.dims("[layers, 2, num_slots, kv_heads, head_dim]")?;
        self.check(Device::cuda(ordinal), self.dtype, &shape)?;
        self.writable()?;
        let element = self.dtype.size() as u64;
        // SAFETY: `check` saw the whole array contiguous on this device, and `writable` that it may be written; the
        // module's contract with the caller keeps it there.
        unsafe { KvCacheView::from_raw(self.address() as u64, shape.map(|n| n as u64), element, ordinal) }
    }
}

/// [`crate::device::Device::collect_captured`] for a caller in Python.
pub(super) fn collect_captured(device: &crate::device::Device) -> Result<u64> {
    // SAFETY: the caller's promise, as the function's text in Python asks for it.
    unsafe { device.collect_captured() }
}

/// [`crate::graph::add_child`] for a caller in Python.
pub(super) fn add_child(stream: Stream, raw: usize) -> Result<()> {
    // SAFETY: the caller's promise, as the function's text in Python asks for it.
    unsafe { crate::graph::add_child(stream, raw) }
}

/// The slots of a ring, which it keeps.
pub(super) fn ring_place(ring: Arc<RoundRing>) -> Place {
    let (data, len) = (ring.words().cast(), 4 * ring.layout().ring_words());
    // SAFETY: the ring's words are pinned and zeroed before anybody has the ring, and stay until it drops.
    unsafe { Place::mapped(data, len, Box::new(ring)) }
}

/// A loan of a device's memory as a tensor in C order, without a copy.
///
/// # Errors
/// [`Error::Capacity`] for a loan that is too small for `shape`.
pub(super) fn loaned(name: &'static str, loan: Loan, device: Device, dtype: DType, shape: &[usize]) -> Result<Buffer> {
    let memory = (loan.address() as usize, loan.bytes());
    // SAFETY: the loan keeps the region, which lies on 256 bytes of this device.
    unsafe { Buffer::loaned(name, memory, Box::new(loan), (device, dtype), shape) }
}

/// CUDA's name of the legacy default stream (`cudaStreamLegacy`), which 0 names too.
const LEGACY: usize = 1;
/// CUDA's name of each thread's own default stream (`cudaStreamPerThread`).
const PER_THREAD: usize = 2;

/// The stream behind `torch.cuda.Stream.cuda_stream`, which the caller holds.
///
/// # Errors
/// [`Error::Invalid`] for the per-thread default stream: it is as many streams as there are threads, and the end of work
/// there is known to the thread alone that put it there, while memory may be let go of on any.
pub(super) fn stream(handle: usize) -> Result<Stream> {
    let handle = match handle {
        LEGACY => 0,
        PER_THREAD => {
            let why = "the per-thread default stream is another one in each thread, so that work on it cannot be followed; \
                       pass the handle of a stream of your own (torch.cuda.Stream), or 1, the legacy default stream";
            return Err(Error::Invalid { what: "stream", got: handle.to_string(), why: why.into() });
        }
        handle => handle,
    };
    // SAFETY: the Python side of this package takes the handle from a stream object of torch for the tensors' device, and
    // torch never destroys its streams.
    Ok(unsafe { Stream::from_raw(handle) })
}
