//! The driver's allocations, fills and copies. Callers hold an `Entered` guard of the context.

use std::ptr::NonNull;

use cudarc::driver::{result, sys};

use crate::device::driver::{Stream, named};
use crate::error::{Error, Result};

/// An allocation, given back by [`RawMemory::free`] alone: who drops it says when the device is done with it.
#[derive(Debug)]
pub(in crate::device) enum RawMemory {
    /// On the device.
    Device(u64),
    /// Pinned, on the host, mapped into the device's address space.
    Pinned(NonNull<u8>),
}

// SAFETY: an address; the memory behind it is accessed by whoever owns the value, under its rules.
unsafe impl Send for RawMemory {}
// SAFETY: as above.
unsafe impl Sync for RawMemory {}

/// True if the driver said that an allocation does not fit.
pub(super) fn is_out_of_memory(error: &Error) -> bool {
    matches!(error, Error::Cuda { message, .. } if message.starts_with("CUDA_ERROR_OUT_OF_MEMORY"))
}

impl RawMemory {
    /// `bytes`, at least 1, of device memory.
    pub(super) fn device(bytes: usize) -> Result<Self> {
        // SAFETY: a context is current (this file's rule); the size is not 0.
        named("cuMemAlloc", unsafe { result::malloc_sync(bytes.max(1)) }).map(Self::Device)
    }

    /// `bytes`, at least 1, of pinned memory.
    pub(super) fn pinned(bytes: usize) -> Result<Self> {
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: a context is current (this file's rule); the size is not 0.
        let raw = named("cuMemHostAlloc", unsafe { result::malloc_host(bytes.max(1), flags) })?;
        let null = || Error::Cuda { call: "cuMemHostAlloc", message: "returned a null pointer".into() };
        Ok(Self::Pinned(NonNull::new(raw.cast::<u8>()).ok_or_else(null)?))
    }

    /// Address for the device.
    pub(super) fn device_address(&self) -> Result<u64> {
        match self {
            Self::Device(address) => Ok(*address),
            Self::Pinned(host) => {
                let mut address = 0;
                // SAFETY: allocated with DEVICEMAP; `address` is a valid out pointer.
                named("cuMemHostGetDevicePointer", unsafe {
                    sys::cuMemHostGetDevicePointer_v2(&mut address, host.as_ptr().cast(), 0).result()
                })?;
                Ok(address)
            }
        }
    }

    /// Give it back. The driver may wait for work in flight.
    pub(super) fn free(self) {
        // Nobody can act on an error at this point.
        match self {
            Self::Device(address) => {
                // SAFETY: allocated once by `device`; taken by value, so freed once.
                let _ = unsafe { result::free_sync(address) };
            }
            Self::Pinned(host) => {
                // SAFETY: allocated once by `pinned`; taken by value, so freed once.
                let _ = unsafe { result::free_host(host.as_ptr().cast()) };
            }
        }
    }
}

/// Free and total bytes of the device's memory; its context is current.
pub(in crate::device) fn info() -> Result<(u64, u64)> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: both are valid out pointers; a context is current (this file's rule).
    named("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total).result() })?;
    Ok((free as u64, total as u64))
}

/// Fill `bytes` at `address` on `stream`.
///
/// # Safety
/// The range is allocated on the device until the fill has finished.
pub(super) unsafe fn fill(address: u64, byte: u8, bytes: usize, stream: Stream) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    named("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(address, byte, bytes, stream.handle()).result() })
}

/// Copy `bytes` from the host to the device on `stream`.
///
/// # Safety
/// Both ranges are there, and the source as it is, until the copy has finished.
pub(super) unsafe fn upload(to: u64, from: *const u8, bytes: usize, stream: Stream) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    named("cuMemcpyHtoDAsync", unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, stream.handle()).result() })
}

/// Copy `bytes` from the device to the host on `stream`.
///
/// # Safety
/// Both ranges are there, and nobody reads the destination, until the copy has finished.
pub(super) unsafe fn download(to: *mut u8, from: u64, bytes: usize, stream: Stream) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    named("cuMemcpyDtoHAsync", unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, stream.handle()).result() })
}
