//! Memory as DLPack capsules: a buffer's own memory, or that of an object which an `Arc` keeps in place.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;

use super::abi::{
    DType, Device, DlTensor, Element, IS_COPIED, LEGACY, Legacy, READ_ONLY, VERSIONED, Version, Versioned,
};
use super::place::Place;
use crate::error::{Error, Result};

/// The owner that keeps the memory of a [`Buffer`] in place.
enum Storage {
    /// The buffer itself. The core never reads this memory as data, so a consumer that writes into it spoils only its
    /// own numbers.
    Own(#[allow(dead_code, reason = "held for its memory")] Box<[UnsafeCell<u64>]>),
    /// An object that lends a shared slice, such as a plan's arrays: read-only to consumers.
    Shared(#[allow(dead_code, reason = "held for its memory")] Arc<dyn Send + Sync>),
    /// Memory of a device, which kernels in flight may write. The host never reads it.
    Loan(#[allow(dead_code, reason = "held for its memory")] Box<dyn Send + Sync>),
    /// Static memory, which later calls write again.
    Static(#[allow(dead_code, reason = "held for its memory")] Arc<Place>),
}

/// A tensor that is handed to Python.
pub(in crate::py) struct Buffer {
    storage: Storage,
    data: *const u8, // what `storage` keeps; every element lies within it, see the constructors
    device: Device,
    dtype: DType,
    shape: Box<[i64]>,
    strides: Box<[i64]>, // elements; the last dimension's is 1
}

// SAFETY: the memory is kept by `storage`, which is Send and Sync or plain words. Rust only copies out of that memory,
// in `bytes`; consumers that write do so under DLPack's rules, not ours.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Copy `values` into a buffer of this shape.
    pub(in crate::py) fn new<T: Element>(values: &[T], shape: &[usize]) -> Result<Self> {
        // With a size of 0 there are no elements, even if the product of the other sizes overflows.
        let elements =
            if shape.contains(&0) { Some(0) } else { shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)) };
        if elements != Some(values.len()) {
            let (got, want) = (format!("{} values", values.len()), format!("shape {shape:?}"));
            return Err(Error::Mismatch { operand: "array", got, want });
        }
        Ok(Self::own(bytemuck::cast_slice(values), T::DTYPE, shape.iter().map(|&n| n as i64).collect()))
    }

    /// Copy `bytes`, the elements of `shape` in C order.
    pub(in crate::py) fn own(bytes: &[u8], dtype: DType, shape: Box<[i64]>) -> Self {
        let word = |chunk: &[u8]| {
            let mut w = [0u8; 8];
            w[..chunk.len()].copy_from_slice(chunk);
            UnsafeCell::new(u64::from_ne_bytes(w))
        };
        let words: Box<[_]> = bytes.chunks(8).map(word).collect();
        let mut strides = vec![1i64; shape.len()];
        for d in (1..shape.len()).rev() {
            strides[d - 1] = strides[d].saturating_mul(shape[d].max(1));
        }
        Self {
            data: words.as_ptr().cast(),
            storage: Storage::Own(words),
            device: Device::CPU,
            dtype,
            shape,
            strides: strides.into(),
        }
    }

    /// A tensor over the slice that `of` finds in `owner`, without a copy. A consumer on any thread keeps `owner`
    /// alive. Nothing may write to the slice meanwhile, which an `Arc` of plain data guarantees.
    ///
    /// # Errors
    /// [`Error::Capacity`] for a slice that is too short for `view`.
    pub(in crate::py) fn share<O: Send + Sync + 'static>(
        owner: Arc<O>,
        of: impl for<'a> FnOnce(&'a O) -> &'a [u8],
        view: View,
    ) -> Result<Self> {
        // The borrow ends here, but the memory stays where it is: nobody can get a `&mut O` while `owner` lives
        // (`Arc`), and `of` cannot lend memory from behind a lock (the slice has the lifetime of `&O`).
        let bytes = of(&owner);
        let data = bytes.as_ptr();
        view.fits(bytes.len())?;
        Ok(view.of(Storage::Shared(owner), data))
    }

    /// A tensor over a part of static memory, without a copy.
    ///
    /// # Errors
    /// [`Error::Capacity`] for memory that is too small for `view`.
    pub(in crate::py) fn of_place(place: Arc<Place>, view: View) -> Result<Self> {
        view.fits(place.len())?;
        let data = place.data();
        Ok(view.of(Storage::Static(place), data))
    }

    /// A tensor in C order over `bytes` bytes of a device's memory at `address`, without a copy. `loan` keeps the
    /// memory.
    ///
    /// # Errors
    /// [`Error::Capacity`] for memory that is too small for `shape`.
    ///
    /// # Safety
    /// The memory is `device`'s, aligned to `dtype`, and stays there while `loan` lives.
    pub(in crate::py) unsafe fn loaned(
        name: &'static str,
        (address, bytes): (usize, usize),
        loan: Box<dyn Send + Sync>,
        (device, dtype): (Device, DType),
        shape: &[usize],
    ) -> Result<Self> {
        let n = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        View::Line { name, dtype, n: n.unwrap_or(usize::MAX / dtype.size().max(1)) }.fits(bytes)?;
        let empty = Self::own(&[], dtype, shape.iter().map(|&n| n as i64).collect());
        Ok(Self { data: address as *const u8, storage: Storage::Loan(loan), device, ..empty })
    }

    /// Element type.
    pub(in crate::py) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Sizes of the dimensions.
    pub(in crate::py) fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// A copy of the elements, in C order. The memory is the CPU's; if it is static, no call may write to it meanwhile.
    pub(in crate::py) fn bytes(&self) -> Vec<u8> {
        let elements = if self.shape.contains(&0) { 0 } else { self.shape.iter().product::<i64>() as usize };
        if elements == 0 {
            return Vec::new();
        }
        // Rows are contiguous. The whole is contiguous too, unless it is a table within a wider one.
        let (rows, stride) = match (&*self.shape, &*self.strides) {
            (&[rows, cols], &[stride, _]) if stride != cols => (rows as usize, stride as usize),
            _ => (1, 0),
        };
        let (row, size) = (elements / rows, self.dtype.size());
        let mut out: Vec<u8> = Vec::with_capacity(elements * size);
        for r in 0..rows {
            let at = out.len();
            // SAFETY: the constructors checked that row `r` of a table, or all elements of anything else, lie in the
            // memory that `storage` keeps; all of it is initialised; no `&mut` to it exists (own and shared memory:
            // never; static memory: see above), and no `&` is made, since a device may write mapped memory meanwhile.
            // `out` has room for all rows, and `row * size` more of its bytes are initialised now.
            unsafe {
                std::ptr::copy_nonoverlapping(self.data.add(r * stride * size), out.as_mut_ptr().add(at), row * size);
                out.set_len(at + row * size);
            }
        }
        out
    }

    /// The description of the tensor for DLPack; its pointers live as long as `self`.
    pub(super) fn describe(&self) -> DlTensor {
        let data = if self.shape.contains(&0) { std::ptr::null_mut() } else { self.data.cast_mut().cast() };
        DlTensor {
            data, // own and static memory may be written: it is cells, or memory that was lent to be written
            device: self.device,
            ndim: self.shape.len() as i32,
            dtype: self.dtype,
            shape: self.shape.as_ptr().cast_mut(), // consumers do not write to these
            strides: self.strides.as_ptr().cast_mut(),
            byte_offset: 0,
        }
    }

    /// DLPack's flags of the memory.
    pub(super) fn flags(&self) -> u64 {
        if matches!(self.storage, Storage::Shared(_)) { READ_ONLY } else { 0 }
    }

    /// A capsule over this buffer, `dltensor_versioned` or `dltensor`; `copied` says that nobody else uses its memory.
    pub(in crate::py) fn capsule<'py>(
        self: Arc<Self>,
        py: Python<'py>,
        versioned: bool,
        copied: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (tensor, flags) = (self.describe(), if copied { IS_COPIED } else { self.flags() });
        let context = Arc::into_raw(self).cast_mut().cast::<c_void>();
        // SAFETY (both): the capsule owns the box, whose `context` owns one count of the buffer; a consumer renames the
        // capsule and calls the deleter later; without a consumer the capsule's destructor calls it.
        let capsule = if versioned {
            let version = Version { major: 1, minor: 0 };
            let t = Box::new(Versioned { version, context, deleter: Some(delete_versioned), flags, tensor });
            // SAFETY: see above.
            unsafe { ffi::PyCapsule_New(Box::into_raw(t).cast(), VERSIONED.as_ptr(), Some(drop_capsule)) }
        } else {
            let t = Box::new(Legacy { tensor, context, deleter: Some(delete_legacy) });
            // SAFETY: see above.
            unsafe { ffi::PyCapsule_New(Box::into_raw(t).cast(), LEGACY.as_ptr(), Some(drop_capsule)) }
        };
        // SAFETY: a new reference, or null with an exception set.
        unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
    }
}

/// Shape and element type that existing memory is given as a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::py) enum View {
    /// `[n]`.
    Line { name: &'static str, dtype: DType, n: usize },
    /// `[rows, cols]`; each row begins `stride` elements after the one before, `cols <= stride`.
    Table { name: &'static str, dtype: DType, rows: usize, cols: usize, stride: usize },
}

impl View {
    /// Check that memory of `bytes` holds every element.
    fn fits(self, bytes: usize) -> Result<()> {
        let (name, dtype, need, hint) = match self {
            View::Line { name, dtype, n } => (name, dtype, Some(n), format!("shape [{n}]")),
            View::Table { name, dtype, rows, cols, stride } => {
                let hint = format!("shape [{rows}, {cols}] in rows of {stride}");
                let last = match rows {
                    0 => Some(0),
                    _ => (rows - 1).checked_mul(stride).and_then(|n| n.checked_add(cols)),
                };
                (name, dtype, last.filter(|_| cols <= stride), hint)
            }
        };
        let have = bytes / dtype.size().max(1);
        match need {
            Some(need) if need <= have => Ok(()),
            _ => {
                Err(Error::Capacity { what: name, need: need.map_or(u64::MAX, |n| n as u64), have: have as u64, hint })
            }
        }
    }

    /// The buffer over memory that [`Self::fits`].
    fn of(self, storage: Storage, data: *const u8) -> Buffer {
        let (dtype, shape, strides) = match self {
            View::Line { dtype, n, .. } => (dtype, [n as i64].into(), [1].into()),
            View::Table { dtype, rows, cols, stride, .. } => {
                (dtype, [rows as i64, cols as i64].into(), [stride as i64, 1].into())
            }
        };
        Buffer { storage, data, device: Device::CPU, dtype, shape, strides }
    }
}

unsafe extern "C" fn delete_versioned(t: *mut Versioned) {
    // SAFETY: `t` is the box that `capsule` made, given back once; the context holds one count of the buffer.
    unsafe {
        let t = Box::from_raw(t);
        release(Arc::from_raw(t.context.cast::<Buffer>()));
    }
}

unsafe extern "C" fn delete_legacy(t: *mut Legacy) {
    // SAFETY: as in `delete_versioned`.
    unsafe {
        let t = Box::from_raw(t);
        release(Arc::from_raw(t.context.cast::<Buffer>()));
    }
}

/// Drop a count of the buffer, and perhaps a plan or a lent tensor with it. No unwinding may cross into C, and a leak
/// is better than an abort.
fn release(buffer: Arc<Buffer>) {
    let _ = catch_unwind(AssertUnwindSafe(|| drop(buffer)));
}

/// Destructor of our capsules: frees the tensor unless a consumer took it (and renamed the capsule).
unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with the capsule and the GIL; an unconsumed one still holds our box.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast());
        } else if ffi::PyCapsule_IsValid(capsule, LEGACY.as_ptr()) == 1 {
            delete_legacy(ffi::PyCapsule_GetPointer(capsule, LEGACY.as_ptr()).cast());
        }
    }
}
