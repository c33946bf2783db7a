//! Words that a device and the host share or that lie on the device, and the driver's errors. The fault record is made
//! of them.

use std::ffi::CStr;
use std::ptr::NonNull;

use cudarc::driver::{result, sys};

use crate::error::{Error, Result};

/// `Err` with the driver's name and text for its code, under the name of the call that failed.
pub(crate) fn named<T>(call: &'static str, outcome: std::result::Result<T, result::DriverError>) -> Result<T> {
    outcome.map_err(|e| {
        let text = |t: std::result::Result<&CStr, result::DriverError>| {
            t.map_or_else(|_| "no text".to_owned(), |c| c.to_string_lossy().into_owned())
        };
        let message = format!("{} ({}): {}", text(e.error_name()), e.0 as u32, text(e.error_string()));
        Error::Cuda { call, message }
    })
}

/// One `T` in pinned host memory that the device reads and writes under its own address.
#[derive(Debug)]
pub(super) struct Mapped<T> {
    host: NonNull<T>,
    device: u64,
}

// SAFETY: the memory belongs to this value alone; accesses go through volatile reads and writes.
unsafe impl<T: Send> Send for Mapped<T> {}
// SAFETY: as above: shared access is volatile only.
unsafe impl<T: Send> Sync for Mapped<T> {}

impl<T: Copy> Mapped<T> {
    /// Allocate and fill.
    pub(super) fn new(value: T) -> Result<Self> {
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: a context is current (callers hold an `Entered`); the size is not zero.
        let raw = named("cuMemHostAlloc", unsafe { result::malloc_host(size_of::<T>().max(1), flags) })?;
        let Some(host) = NonNull::new(raw.cast::<T>()) else {
            return Err(Error::Cuda { call: "cuMemHostAlloc", message: "returned a null pointer".into() });
        };
        let mut mapped = Self { host, device: 0 };
        // SAFETY: freshly allocated, page-aligned, large enough, not yet known to the device.
        unsafe { mapped.host.as_ptr().write(value) };
        // SAFETY: `raw` was allocated with DEVICEMAP; `device` is a valid out pointer.
        named("cuMemHostGetDevicePointer", unsafe {
            sys::cuMemHostGetDevicePointer_v2(&mut mapped.device, raw, 0).result()
        })?;
        Ok(mapped)
    }

    pub(super) fn host(&self) -> NonNull<T> {
        self.host
    }

    pub(super) fn device_address(&self) -> u64 {
        self.device
    }
}

impl<T> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: allocated once in `new`, freed once here.
        let _ = unsafe { result::free_host(self.host.as_ptr().cast()) };
    }
}

/// A small zeroed buffer in device memory.
#[derive(Debug)]
pub(super) struct DeviceWords(sys::CUdeviceptr);

impl DeviceWords {
    /// `count` words of 4 bytes, zero.
    pub(super) fn zeroed(count: usize) -> Result<Self> {
        // SAFETY: a context is current (callers hold an `Entered`).
        let address = named("cuMemAlloc", unsafe { result::malloc_sync(count * 4) })?;
        let words = Self(address);
        // SAFETY: the range was just allocated.
        named("cuMemsetD8", unsafe { result::memset_d8_sync(address, 0, count * 4) })?;
        Ok(words)
    }

    pub(super) fn device_address(&self) -> u64 {
        self.0
    }
}

impl Drop for DeviceWords {
    fn drop(&mut self) {
        // SAFETY: allocated once in `zeroed`, freed once here.
        let _ = unsafe { result::free_sync(self.0) };
    }
}
