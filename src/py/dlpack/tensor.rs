//! Tensors of any producer, as typed views that were checked.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;

use super::abi::{
    DType, Device, DlTensor, Element, IS_COPIED, LEGACY, LEGACY_USED, Legacy, MAX_VERSION, READ_ONLY, VERSIONED,
    VERSIONED_USED, Versioned,
};
use super::array::Array;
use super::buffer::Buffer;
use super::producer::{Producer, call_dlpack, known, refused};
use crate::error::{Error, Result};
use crate::overlap::{Operand, Span};

/// Largest rank that is imported.
const MAX_RANK: usize = 8;

/// The owner that keeps an imported tensor's memory alive.
enum Owner {
    Legacy(NonNull<Legacy>),
    Versioned(NonNull<Versioned>),
    Own(#[allow(dead_code, reason = "held for its memory")] Arc<Buffer>),
}

impl Drop for Owner {
    fn drop(&mut self) {
        match self {
            // SAFETY: the managed tensor is ours since import and not touched after this; DLPack lets any thread
            // call the deleter, once, and a null deleter means that there is nothing to do.
            Owner::Legacy(t) => unsafe {
                if let Some(delete) = t.as_ref().deleter {
                    delete(t.as_ptr());
                }
            },
            // SAFETY: as above; the deleter's place does not change between versions.
            Owner::Versioned(t) => unsafe {
                if let Some(delete) = t.as_ref().deleter {
                    delete(t.as_ptr());
                }
            },
            Owner::Own(_) => {}
        }
    }
}

/// A tensor of a Python object, imported: owned memory, and a description that was checked and copied.
pub(in crate::py) struct Tensor {
    #[allow(dead_code, reason = "held for its drop")]
    owner: Owner,
    described: Described,
}

impl Deref for Tensor {
    type Target = Described;

    fn deref(&self) -> &Described {
        &self.described
    }
}

/// The checked description of a tensor, without its owner.
pub(in crate::py) struct Described {
    pub(in crate::py) operand: &'static str,
    data: *mut u8, // byte_offset applied; may be null where `elements` is 0
    pub(in crate::py) dtype: DType,
    pub(super) device: Device,
    rank: usize, // <= MAX_RANK
    shape: [usize; MAX_RANK],
    strides: [i64; MAX_RANK],
    pub(in crate::py) elements: usize, // elements * dtype.size() fits isize
    pub(super) range: (usize, usize),  // first address and one past the last that an element may have
    unwritable: Option<&'static str>,  // why it may not be an output
}

// SAFETY: the pointers are to memory that `owner` keeps alive; DLPack's deleter may run on any thread; `&Tensor` only
// gives out `&[T]` of `Sync` elements, and `&mut Tensor` is needed for more.
unsafe impl Send for Tensor {}
// SAFETY: as above.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// Take a tensor from `obj`, called `operand` in errors. `stream` is the raw CUDA stream that will read it, for
    /// producers that need to be told; `None` for CPU work.
    ///
    /// # Errors
    /// `ConfigError` for an object that is not a tensor, that cannot be described, or that its own library refuses
    /// (then that library's error is the `__cause__`).
    pub(in crate::py) fn import(
        obj: &Bound<'_, PyAny>,
        operand: &'static str,
        stream: Option<isize>,
    ) -> PyResult<Self> {
        match known(obj)?.producer {
            Producer::Own => {
                let array = obj.cast::<Array>()?;
                let buffer = array.get().current(obj.py())?.clone();
                // SAFETY: the description is of memory that `buffer` keeps.
                let described = unsafe { Described::of(operand, &buffer.describe(), buffer.flags()) }?;
                Ok(Self { owner: Owner::Own(buffer), described })
            }
            Producer::Exchange(from_object) => {
                let mut out = std::ptr::null_mut();
                // SAFETY: the function is that of the object's own type; the GIL is held; 0 means `out` is ours.
                let status = unsafe { from_object(obj.as_ptr().cast(), &raw mut out) };
                match NonNull::new(out) {
                    Some(t) if status == 0 => Self::from_versioned(operand, t),
                    _ => Err(refused(obj, operand, PyErr::fetch(obj.py()))),
                }
            }
            Producer::Function(f) => {
                let capsule = f.bind(obj.py()).call1((obj,)).map_err(|e| refused(obj, operand, e))?;
                Self::from_capsule(operand, &capsule)
            }
            Producer::Protocol => {
                let capsule = call_dlpack(obj, operand, stream).map_err(|e| refused(obj, operand, e))?;
                Self::from_capsule(operand, &capsule)
            }
        }
    }

    /// [`Self::import`] for an optional argument.
    pub(in crate::py) fn import_option(
        obj: Option<&Bound<'_, PyAny>>,
        operand: &'static str,
    ) -> PyResult<Option<Self>> {
        obj.map(|o| Self::import(o, operand, None)).transpose()
    }

    fn from_capsule(operand: &'static str, capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = capsule.py();
        let named = |name: &CStr| {
            // SAFETY: any object may be asked; the GIL is held.
            unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) == 1 }
        };
        let take = |name: &CStr, used: &'static CStr| -> PyResult<NonNull<c_void>> {
            // SAFETY: `named` found a capsule of this name; its pointer is not null then.
            let p = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()) };
            let p = NonNull::new(p).ok_or_else(|| PyErr::fetch(py))?;
            // Renaming consumes the capsule: its destructor then frees nothing, and nobody can take the tensor again.
            // SAFETY: a valid capsule, and a name that lives forever.
            if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } != 0 {
                return Err(PyErr::fetch(py));
            }
            Ok(p)
        };
        if named(VERSIONED) {
            Self::from_versioned(operand, take(VERSIONED, VERSIONED_USED)?.cast())
        } else if named(LEGACY) {
            let t: NonNull<Legacy> = take(LEGACY, LEGACY_USED)?.cast();
            let owner = Owner::Legacy(t);
            // SAFETY: the capsule's name says what it holds, and it is ours now: `owner` gives it back behind this.
            let described = unsafe { Described::of(operand, &t.as_ref().tensor, 0) }?;
            Ok(Self { owner, described })
        } else {
            let got = if named(VERSIONED_USED) || named(LEGACY_USED) {
                "a DLPack capsule that was consumed before".to_string()
            } else {
                format!("{} from __dlpack__", capsule.get_type().name()?)
            };
            Err(Error::Mismatch { operand, got, want: "an unused DLPack capsule".into() }.into())
        }
    }

    fn from_versioned(operand: &'static str, t: NonNull<Versioned>) -> PyResult<Self> {
        let owner = Owner::Versioned(t);
        // SAFETY: the producer gave it to us; the version comes first in every version.
        let version = unsafe { t.as_ref().version };
        if version.major != MAX_VERSION.0 {
            let got = format!("a tensor of DLPack {}.{}", version.major, version.minor);
            let (major, minor) = MAX_VERSION;
            let want = format!("DLPack {major}.x: a producer that follows max_version, which is ({major}, {minor})");
            return Err(Error::Mismatch { operand, got, want }.into());
        }
        // SAFETY: a version whose layout is known; `owner` gives it back behind this.
        let described = unsafe { Described::of(operand, &t.as_ref().tensor, t.as_ref().flags) }?;
        Ok(Self { owner, described })
    }
}

impl Described {
    /// Check and copy a description.
    ///
    /// # Safety
    /// The shape and the strides of `t`, where not null, have `ndim` entries.
    unsafe fn of(operand: &'static str, t: &DlTensor, flags: u64) -> Result<Self> {
        let bad = |got: String, want: &str| Error::Mismatch { operand, got, want: want.into() };
        let rank = usize::try_from(t.ndim).ok().filter(|&r| r <= MAX_RANK);
        let rank = rank.ok_or_else(|| bad(format!("{} dimensions", t.ndim), "0..=8 dimensions"))?;
        if rank > 0 && t.shape.is_null() {
            return Err(bad("a null shape".into(), "a shape"));
        }
        let (mut shape, mut strides) = ([0usize; MAX_RANK], [0i64; MAX_RANK]);
        let size = t.dtype.size();
        let mut elements = Some(1usize);
        for d in (0..rank).rev() {
            // SAFETY: not null and `rank` long, see above.
            let n = unsafe { *t.shape.add(d) };
            shape[d] = usize::try_from(n).map_err(|_| bad(format!("dimension {d} = {n}"), "a size >= 0"))?;
            // Before DLPack 1.2 null strides mean C order.
            strides[d] = match t.strides.is_null() {
                // SAFETY: not null and `rank` long.
                false => unsafe { *t.strides.add(d) },
                true => elements.unwrap_or(0) as i64,
            };
            elements = elements.and_then(|e| e.checked_mul(shape[d]));
        }
        if shape[..rank].contains(&0) {
            elements = Some(0);
        }
        let fits = |e: &usize| e.checked_mul(size).is_some_and(|b| b <= isize::MAX as usize);
        let elements = elements.filter(fits).ok_or_else(|| bad(format!("{:?}", &shape[..rank]), "a size in memory"))?;
        if t.data.is_null() && elements > 0 {
            return Err(bad("a null pointer".into(), "data"));
        }
        let data = t.data.cast::<u8>().wrapping_add(t.byte_offset as usize);
        let range = extent(data as usize, &shape[..rank], &strides[..rank], size, elements)
            .ok_or_else(|| bad(format!("strides {:?}", &strides[..rank]), "strides within the address space"))?;
        let (dtype, device) = (t.dtype, t.device);
        let unwritable = match flags {
            f if f & READ_ONLY != 0 => Some("a read-only tensor"),
            f if f & IS_COPIED != 0 => Some("a copy that its library made"), // writes would be lost
            _ => None,
        };
        Ok(Self { operand, data, dtype, device, rank, shape, strides, elements, range, unwritable })
    }
}

impl Tensor {
    /// Sizes of the dimensions.
    pub(in crate::py) fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// Element type.
    pub(in crate::py) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns whether `other` describes the same elements in the same memory.
    pub(super) fn is(&self, other: &Self) -> bool {
        let same = self.data == other.data && self.range == other.range && self.dtype == other.dtype;
        let layout = self.shape() == other.shape() && self.strides[..self.rank] == other.strides[..other.rank];
        same && layout && self.device == other.device
    }

    /// Device.
    pub(in crate::py) fn device(&self) -> Device {
        self.device
    }

    /// Address of the first element.
    pub(in crate::py) fn address(&self) -> usize {
        self.data as usize
    }

    /// The error for this operand.
    pub(in crate::py) fn mismatch(&self, got: impl fmt::Display, want: impl fmt::Display) -> Error {
        Error::Mismatch { operand: self.operand, got: got.to_string(), want: want.to_string() }
    }

    /// The shape as an array of rank `N`; an error that says `want` for another rank.
    pub(in crate::py) fn dims<const N: usize>(&self, want: &str) -> Result<[usize; N]> {
        self.shape().try_into().map_err(|_| self.mismatch(format_args!("shape {:?}", self.shape()), want))
    }

    /// Check device, element type, shape, C order and alignment.
    pub(in crate::py) fn check(&self, device: Device, dtype: DType, shape: &[usize]) -> Result<()> {
        if self.device != device {
            return Err(self.mismatch(self.device, format_args!("a tensor on {device}")));
        }
        if self.dtype != dtype {
            return Err(self.mismatch(self.dtype, dtype));
        }
        if self.shape() != shape {
            return Err(self.mismatch(format_args!("shape {:?}", self.shape()), format_args!("shape {shape:?}")));
        }
        let mut c_order = 1i64;
        for d in (0..self.rank).rev() {
            if self.elements > 0 && self.shape[d] != 1 && self.strides[d] != c_order {
                return Err(self.mismatch(
                    format_args!("strides {:?} for shape {shape:?}", &self.strides[..self.rank]),
                    "a contiguous tensor (C order)",
                ));
            }
            c_order = c_order.saturating_mul(self.shape[d] as i64);
        }
        if self.elements > 0 && !(self.data as usize).is_multiple_of(dtype.size()) {
            return Err(self.mismatch(format_args!("address {:p}", self.data), "data aligned to its element type"));
        }
        Ok(())
    }

    /// The elements of a contiguous CPU tensor of one dimension, to read.
    pub(in crate::py) fn line<T: Element>(&self) -> Result<&[T]> {
        let [n] = self.dims("shape [n]")?;
        self.input(&[n])
    }

    /// The elements of a contiguous CPU tensor of this shape, to read.
    pub(in crate::py) fn input<T: Element>(&self, shape: &[usize]) -> Result<&[T]> {
        let dtype = if T::views(self.dtype) { self.dtype } else { T::DTYPE };
        self.check(Device::CPU, dtype, shape)?;
        // SAFETY: `check` saw `elements` contiguous, aligned elements of a type whose every bit pattern is a `T`;
        // `owner` keeps them alive for `&self`; `&mut` slices of ours do not overlap them (`Call::take`).
        Ok(unsafe { std::slice::from_raw_parts(self.first(), self.elements) })
    }

    /// Check that the tensor may be written: it is neither read-only nor expanded.
    pub(in crate::py) fn writable(&self) -> Result<()> {
        if let Some(got) = self.unwritable {
            return Err(self.mismatch(got, "a writable tensor"));
        }
        for (d, &n) in self.shape().iter().enumerate() {
            if n > 1 && self.strides[d] == 0 && self.elements > 0 {
                return Err(self.mismatch("an expanded tensor (stride 0)", "a tensor whose elements are distinct"));
            }
        }
        Ok(())
    }

    /// Pointer to the first element, never null.
    pub(super) fn first<T>(&self) -> *mut T {
        if self.elements == 0 { NonNull::dangling().as_ptr() } else { self.data.cast() }
    }
}

impl Operand for Tensor {
    fn span(&self) -> Span {
        let (first, end) = self.range;
        Span::new(self.operand, first as u64, (end - first) as u64)
    }
}

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, end) = self.range;
        write!(f, "{} {:?} of {} bytes at {first:#x}", self.dtype, self.shape(), end - first)
    }
}

/// First address of the elements, and one past their last; equal where there are none. `None` if an element would lie
/// outside the address space.
fn extent(data: usize, shape: &[usize], strides: &[i64], size: usize, elements: usize) -> Option<(usize, usize)> {
    if elements == 0 {
        return Some((data, data));
    }
    let (mut low, mut high) = (0i128, 0i128);
    for (&n, &stride) in shape.iter().zip(strides) {
        let reach = (n as i128 - 1).checked_mul(stride as i128)?;
        if reach < 0 { low = low.checked_add(reach)? } else { high = high.checked_add(reach)? }
    }
    let at = |elements: i128| {
        let bytes = elements.checked_mul(size as i128)?;
        usize::try_from((data as i128).checked_add(bytes)?).ok()
    };
    Some((at(low)?, at(high.checked_add(1)?)?))
}

/// Copy the values of `tensor` (CPU, contiguous) into an array, to move a tensor between DLPack libraries.
#[pyfunction]
pub(in crate::py) fn as_array(tensor: &Bound<'_, PyAny>) -> PyResult<Array> {
    let t = Tensor::import(tensor, "tensor", None)?;
    let shape = t.shape();
    Ok(match t.dtype() {
        DType::F32 => Array::new(t.input::<f32>(shape)?, shape)?,
        DType::BF16 => Array::new(t.input::<half::bf16>(shape)?, shape)?,
        DType::F16 => Array::new(t.input::<half::f16>(shape)?, shape)?,
        DType::I32 => Array::new(t.input::<i32>(shape)?, shape)?,
        DType::I64 => Array::new(t.input::<i64>(shape)?, shape)?,
        DType::U8 => Array::new(t.input::<u8>(shape)?, shape)?,
        other => return Err(t.mismatch(other, "float32, bfloat16, float16, int32, int64 or uint8").into()),
    })
}
