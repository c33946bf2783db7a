//! Typed views of device memory that somebody else owns: address, capacity and device travel together.
//!
//! A view is built once, by an `unsafe` constructor that states what must be true of the memory; the checks that need
//! no such promise (alignment, overflow, limits) are made there and come back as errors.

use std::marker::PhantomData;

use crate::error::{Error, Result, in_range};
use crate::overlap::{Operand, Span};

/// Largest `src`/`dst` array of a move, so that the kernel's 32-bit arithmetic on it cannot overflow.
pub const MAX_MOVES: usize = 1 << 30;

/// `len` elements of `T` at a device address, on CUDA device `device`.
#[derive(Debug, Clone, Copy)]
pub struct DeviceSlice<T> {
    /// The operand in errors.
    what: &'static str,
    /// Aligned for `T`; not null unless `len` is 0.
    address: u64,
    /// Elements.
    len: usize,
    /// Ordinal.
    device: i32,
    element: PhantomData<*const T>,
}

impl<T> DeviceSlice<T> {
    /// View `len` elements at `address`. `what` names the operand in errors.
    ///
    /// # Safety
    /// The range is allocated on `device` (or readable from it) and stays so until all work launched with the view has
    /// finished; nothing writes to it while a kernel that reads it runs.
    pub unsafe fn from_raw(what: &'static str, address: u64, len: usize, device: i32) -> Result<Self> {
        if len != 0 && (address == 0 || !address.is_multiple_of(align_of::<T>() as u64)) {
            return Err(Error::Mismatch {
                operand: what,
                got: format!("device address {address:#x}"),
                want: format!("an address aligned to {} bytes", align_of::<T>()),
            });
        }
        Ok(Self { what, address, len, device, element: PhantomData })
    }

    /// Device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// CUDA device ordinal.
    pub fn device(&self) -> i32 {
        self.device
    }
}

impl<T> Operand for DeviceSlice<T> {
    fn span(&self) -> Span {
        Span::new(self.what, self.address, self.len as u64 * size_of::<T>() as u64)
    }
}

/// A KV cache `[layers, 2, num_slots, kv_heads, head_dim]`, contiguous, of elements of any type of 1, 2, 4 or 8 bytes.
#[derive(Debug, Clone, Copy)]
pub struct KvCacheView {
    address: u64,
    /// `2 * layers`; at least 1.
    planes: u32,
    /// At least 1; fits `i32`.
    num_slots: i32,
    /// Bytes of one token in one plane, `kv_heads * head_dim * element`; at least 1.
    row_bytes: u64,
    device: i32,
}

impl KvCacheView {
    /// View a cache of `shape` at `address`.
    ///
    /// # Safety
    /// The whole contiguous array is allocated on `device`, writable, and stays so until all work launched with the view
    /// has finished.
    pub unsafe fn from_raw(address: u64, shape: [u64; 5], element_bytes: u64, device: i32) -> Result<Self> {
        let [layers, pair, num_slots, kv_heads, head_dim] = shape;
        if pair != 2 {
            return Err(Error::Mismatch {
                operand: "cache",
                got: format!("shape {shape:?}"),
                want: "[layers, 2, num_slots, kv_heads, head_dim]".into(),
            });
        }
        if !matches!(element_bytes, 1 | 2 | 4 | 8) {
            return Err(Error::Mismatch {
                operand: "cache",
                got: format!("elements of {element_bytes} bytes"),
                want: "elements of 1, 2, 4 or 8 bytes".into(),
            });
        }
        in_range("cache layers", layers, 1, i128::from(i32::MAX / 2))?;
        in_range("cache num_slots", num_slots, 1, i128::from(i32::MAX))?;
        in_range("cache kv_heads", kv_heads, 1, i128::from(i32::MAX))?;
        in_range("cache head_dim", head_dim, 1, i128::from(i32::MAX))?;
        let overflow = || Error::Overflow {
            what: "cache bytes",
            expr: format!("{layers} * 2 * {num_slots} * {kv_heads} * {head_dim} * {element_bytes}"),
            ty: "int64",
            limit: i64::MAX as u64,
        };
        let row_bytes =
            kv_heads.checked_mul(head_dim).and_then(|n| n.checked_mul(element_bytes)).ok_or_else(overflow)?;
        let total = row_bytes.checked_mul(num_slots).and_then(|n| n.checked_mul(layers * 2)).ok_or_else(overflow)?;
        if total > i64::MAX as u64 {
            return Err(overflow());
        }
        if address == 0 || !address.is_multiple_of(element_bytes) {
            return Err(Error::Mismatch {
                operand: "cache",
                got: format!("device address {address:#x}"),
                want: format!("an address aligned to its elements of {element_bytes} bytes"),
            });
        }
        Ok(Self { address, planes: (layers * 2) as u32, num_slots: num_slots as i32, row_bytes, device })
    }

    /// Device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// K and V planes, `2 * layers`.
    pub fn planes(&self) -> u32 {
        self.planes
    }

    /// Slots of a plane.
    pub fn num_slots(&self) -> i32 {
        self.num_slots
    }

    /// Bytes of one token in one plane.
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    /// CUDA device ordinal.
    pub fn device(&self) -> i32 {
        self.device
    }
}

impl Operand for KvCacheView {
    fn span(&self) -> Span {
        // `from_raw` saw that the product fits.
        Span::new("cache", self.address, u64::from(self.planes) * self.num_slots as u64 * self.row_bytes)
    }
}

/// The moves of a batch: request `r` moves `src[m] -> dst[m]` for `m` in `offsets[r]..offsets[r + 1]`, in this order.
/// Values are the kernel's to check, since only the device can read them.
#[derive(Debug, Clone, Copy)]
pub struct MovesView {
    src: DeviceSlice<i32>,
    dst: DeviceSlice<i32>,
    offsets: DeviceSlice<i32>,
    /// `offsets.len() - 1`.
    requests: u32,
}

impl MovesView {
    /// Check that the three arrays fit each other. `offsets` of length 1 is an empty batch.
    pub fn new(src: DeviceSlice<i32>, dst: DeviceSlice<i32>, offsets: DeviceSlice<i32>) -> Result<Self> {
        if src.len() != dst.len() {
            return Err(Error::Mismatch {
                operand: "dst",
                got: format!("{} slots", dst.len()),
                want: format!("{}, as many as src has", src.len()),
            });
        }
        in_range("src and dst capacity", src.len() as u64, 0, MAX_MOVES as i128)?;
        in_range("offsets length (requests + 1)", offsets.len() as u64, 1, i128::from(crate::bounds::MAX_BATCH) + 1)?;
        for (operand, slice) in [("dst", &dst), ("offsets", &offsets)] {
            if slice.device() != src.device() {
                return Err(device_mismatch(operand, slice.device(), src.device(), "src"));
            }
        }
        Ok(Self { src, dst, offsets, requests: (offsets.len() - 1) as u32 })
    }

    /// The memory of the three arrays.
    pub fn spans(&self) -> [Span; 3] {
        [self.src.span(), self.dst.span(), self.offsets.span()]
    }

    /// Source slots.
    pub fn src(&self) -> &DeviceSlice<i32> {
        &self.src
    }

    /// Destination slots.
    pub fn dst(&self) -> &DeviceSlice<i32> {
        &self.dst
    }

    /// First move of each request, and one past the last of the last.
    pub fn offsets(&self) -> &DeviceSlice<i32> {
        &self.offsets
    }

    /// Rows of the batch.
    pub fn requests(&self) -> u32 {
        self.requests
    }
}

/// The error for an operand on another device than `other`.
pub(super) fn device_mismatch(operand: &'static str, got: i32, want: i32, other: &str) -> Error {
    Error::Mismatch { operand, got: format!("a tensor on cuda:{got}"), want: format!("cuda:{want}, where {other} is") }
}
