//! DLPack's C structures (dlpack.h 1.3; the layout of the 1.x versions and of the older unversioned capsule).

use std::ffi::{CStr, c_int, c_void};
use std::fmt;

pub(super) const LEGACY: &CStr = c"dltensor";
pub(super) const LEGACY_USED: &CStr = c"used_dltensor";
pub(super) const VERSIONED: &CStr = c"dltensor_versioned";
pub(super) const VERSIONED_USED: &CStr = c"used_dltensor_versioned";
pub(super) const EXCHANGE: &CStr = c"dlpack_exchange_api";
/// The newest version of DLPack that the structures below follow.
pub(super) const MAX_VERSION: (u32, u32) = (1, 3);
pub(super) const READ_ONLY: u64 = 1;
pub(super) const IS_COPIED: u64 = 2;
/// `DLDeviceType` and index.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::py) struct Device {
    /// 1 is the CPU, 2 is CUDA.
    pub(in crate::py) kind: i32,
    /// Index among the devices of its kind.
    pub(in crate::py) index: i32,
}

impl Device {
    /// The CPU.
    pub(in crate::py) const CPU: Device = Device { kind: 1, index: 0 };

    /// A CUDA device.
    pub(in crate::py) fn cuda(index: i32) -> Self {
        Device { kind: 2, index }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            1 => write!(f, "cpu"),
            2 => write!(f, "cuda:{}", self.index),
            kind => write!(f, "DLPack device {kind}:{}", self.index),
        }
    }
}

/// `DLDataType`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::py) struct DType {
    code: u8,
    bits: u8,
    lanes: u16,
}

impl DType {
    const fn new(code: u8, bits: u8) -> Self {
        Self { code, bits, lanes: 1 }
    }

    pub(in crate::py) const I32: DType = DType::new(0, 32);
    pub(in crate::py) const I64: DType = DType::new(0, 64);
    pub(in crate::py) const U8: DType = DType::new(1, 8);
    pub(in crate::py) const F16: DType = DType::new(2, 16);
    pub(in crate::py) const F32: DType = DType::new(2, 32);
    pub(in crate::py) const BF16: DType = DType::new(4, 16);
    pub(in crate::py) const BOOL: DType = DType::new(6, 8);

    /// Bytes of an element.
    pub(in crate::py) fn size(self) -> usize {
        (self.bits as usize * self.lanes as usize).div_ceil(8)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.code {
            0 => "int",
            1 => "uint",
            2 => "float",
            4 => "bfloat",
            5 => "complex",
            6 => return write!(f, "bool"),
            code => return write!(f, "DLPack type {code}, {} bits", self.bits),
        };
        write!(f, "{name}{}", self.bits)?;
        if self.lanes == 1 { Ok(()) } else { write!(f, "x{}", self.lanes) }
    }
}

/// Rust types that may view a tensor's elements: every bit pattern is a value.
pub(in crate::py) trait Element: bytemuck::Pod + Send + Sync {
    /// The type as DLPack names it.
    const DTYPE: DType;

    /// Returns whether a tensor of `dtype` may be viewed as this type.
    fn views(dtype: DType) -> bool {
        dtype == Self::DTYPE
    }
}

macro_rules! element {
    ($($t:ty => $d:ident),+) => { $(impl Element for $t { const DTYPE: DType = DType::$d; })+ };
}
element!(f32 => F32, half::f16 => F16, half::bf16 => BF16, i32 => I32, i64 => I64);

impl Element for u8 {
    const DTYPE: DType = DType::U8;

    // A foreign tensor may hold any byte as a bool, so bools are read as bytes.
    fn views(dtype: DType) -> bool {
        dtype == DType::U8 || dtype == DType::BOOL
    }
}

#[repr(C)]
pub(super) struct DlTensor {
    pub(super) data: *mut c_void,
    pub(super) device: Device,
    pub(super) ndim: i32,
    pub(super) dtype: DType,
    pub(super) shape: *mut i64,
    pub(super) strides: *mut i64,
    pub(super) byte_offset: u64,
}

#[repr(C)]
pub(super) struct Legacy {
    pub(super) tensor: DlTensor,
    pub(super) context: *mut c_void,
    pub(super) deleter: Option<unsafe extern "C" fn(*mut Legacy)>,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Version {
    pub(super) major: u32,
    pub(super) minor: u32,
}

#[repr(C)]
pub(super) struct Versioned {
    pub(super) version: Version,
    pub(super) context: *mut c_void,
    pub(super) deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    pub(super) flags: u64,
    pub(super) tensor: DlTensor,
}

pub(super) type FromObject = unsafe extern "C" fn(*mut c_void, *mut *mut Versioned) -> c_int;

#[repr(C)]
pub(super) struct ExchangeApi {
    pub(super) version: Version,
    pub(super) previous: *const ExchangeApi, // of an older major version, or null; only its header may be read before checking
    pub(super) allocator: *const c_void,
    pub(super) from_object: Option<FromObject>,
}
