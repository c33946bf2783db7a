//! Memory of ours as DLPack capsules.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;

use super::abi::{DType, Device, DlTensor, Element, IS_COPIED, LEGACY, Legacy, VERSIONED, Version, Versioned};
use crate::error::{Error, Result};

/// Memory that is handed to Python: nothing of the core reads it as data, so a consumer that writes into it (torch
/// ignores the read-only flag) spoils only its own numbers.
pub(in crate::py) struct Buffer {
    words: Box<[UnsafeCell<u64>]>,
    len: usize, // bytes in use; at most 8 * words.len()
    dtype: DType,
    shape: Box<[i64]>,
    strides: Box<[i64]>,
}

// SAFETY: plain memory; after construction Rust only copies out of it, under the GIL, in `bytes`.
unsafe impl Send for Buffer {}
// SAFETY: as above; consumers that write do so under DLPack's rules, not ours.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Copy `values` into a buffer of this shape.
    pub(in crate::py) fn new<T: Element>(values: &[T], shape: &[usize]) -> Result<Self> {
        // Nothing to multiply where a size is 0: the others may be anything.
        let elements =
            if shape.contains(&0) { Some(0) } else { shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)) };
        if elements != Some(values.len()) {
            let (got, want) = (format!("{} values", values.len()), format!("shape {shape:?}"));
            return Err(Error::Mismatch { operand: "array", got, want });
        }
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let word = |chunk: &[u8]| {
            let mut w = [0u8; 8];
            w[..chunk.len()].copy_from_slice(chunk);
            UnsafeCell::new(u64::from_ne_bytes(w))
        };
        let mut strides = vec![1i64; shape.len()];
        for d in (1..shape.len()).rev() {
            strides[d - 1] = strides[d].saturating_mul(shape[d].max(1) as i64);
        }
        Ok(Self {
            words: bytes.chunks(8).map(word).collect(),
            len: bytes.len(),
            dtype: T::DTYPE,
            shape: shape.iter().map(|&n| n as i64).collect(),
            strides: strides.into(),
        })
    }

    /// Element type.
    pub(in crate::py) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Sizes of the dimensions.
    pub(in crate::py) fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// A copy of the memory.
    pub(in crate::py) fn bytes(&self) -> Vec<u8> {
        // SAFETY: `words` covers `len` bytes (`new`), all written; no `&mut` to them exists.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast::<u8>(), self.len) }.to_vec()
    }

    /// A buffer with memory of its own.
    fn duplicate(&self) -> Self {
        // SAFETY: as in `bytes`.
        let words = self.words.iter().map(|w| UnsafeCell::new(unsafe { *w.get() })).collect();
        Self { words, len: self.len, dtype: self.dtype, shape: self.shape.clone(), strides: self.strides.clone() }
    }

    /// The description; its pointers live as long as `self`.
    pub(super) fn describe(&self) -> DlTensor {
        let data = if self.words.is_empty() { std::ptr::null_mut() } else { self.words.as_ptr().cast_mut().cast() };
        DlTensor {
            data, // may be written: the words are cells
            device: Device::CPU,
            ndim: self.shape.len() as i32,
            dtype: self.dtype,
            shape: self.shape.as_ptr().cast_mut(), // consumers do not write to these
            strides: self.strides.as_ptr().cast_mut(),
            byte_offset: 0,
        }
    }

    /// A capsule over this buffer, `dltensor_versioned` or `dltensor`; a `copy` has memory of its own.
    pub(in crate::py) fn capsule<'py>(
        self: &Arc<Self>,
        py: Python<'py>,
        versioned: bool,
        copy: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let buffer = if copy { Arc::new(self.duplicate()) } else { self.clone() };
        let tensor = buffer.describe();
        let context = Arc::into_raw(buffer).cast_mut().cast::<c_void>();
        // SAFETY (both): the capsule owns the box, whose `context` owns one count of the buffer; whoever consumes the
        // capsule renames it and calls the deleter, else the capsule's destructor does.
        let capsule = if versioned {
            let (version, flags) = (Version { major: 1, minor: 0 }, if copy { IS_COPIED } else { 0 });
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

unsafe extern "C" fn delete_versioned(t: *mut Versioned) {
    // SAFETY: `t` is the box that `capsule` made, given back once; the context holds one count of the buffer.
    unsafe {
        let t = Box::from_raw(t);
        drop(Arc::from_raw(t.context.cast::<Buffer>()));
    }
}

unsafe extern "C" fn delete_legacy(t: *mut Legacy) {
    // SAFETY: as in `delete_versioned`.
    unsafe {
        let t = Box::from_raw(t);
        drop(Arc::from_raw(t.context.cast::<Buffer>()));
    }
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
