//! A small RAII layer over the driver API: each resource has one owner, whose `Drop` gives it back.
//!
//! Everything that may load libcuda goes through [`libcuda::start`], because cudarc panics in its first call where the
//! library, or a function of it, is missing. Every call names itself in its error.

use std::ffi::{CString, c_void};

use cudarc::driver::{result, sys};

use super::fault::Faults;
use super::images::Image;
use super::libcuda;
pub(crate) use super::words::named;
use crate::error::{Error, Result};

/// A stream that somebody else owns (torch's current stream); work is put on it and it is never waited for. Kernels that
/// are launched on it leave what they skip in the device's fault record, or in one of the caller's.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    handle: sys::CUstream,
    faults: Option<&'static Faults>,
}

// SAFETY: a handle; the driver's calls on a stream may come from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the handle never changes.
unsafe impl Sync for Stream {}

impl Stream {
    /// Adopt a raw `cudaStream_t` / `CUstream`; 0 is the legacy default stream.
    ///
    /// # Safety
    /// `handle` is 0 or a live stream of the primary context of the device it is used with, and stays live until the
    /// work put on it has finished.
    pub unsafe fn from_raw(handle: usize) -> Self {
        Stream { handle: handle as sys::CUstream, faults: None }
    }

    /// The same stream, whose launches report skipped accesses to `faults`, of the same device.
    pub fn reporting_to(self, faults: &'static Faults) -> Self {
        Stream { faults: Some(faults), ..self }
    }

    /// The raw handle.
    pub fn raw(self) -> usize {
        self.handle as usize
    }

    /// The record that launches report to; the device's own record for `None`.
    pub(super) fn faults(self) -> Option<&'static Faults> {
        self.faults
    }
}

/// Name and compute capability (major * 10 + minor) of every GPU that the driver sees.
pub(super) fn gpus() -> Result<Vec<(String, i32)>> {
    libcuda::start()?;
    let count = named("cuDeviceGetCount", result::device::get_count())?;
    let gpu = |ordinal| {
        let device = named("cuDeviceGet", result::device::get(ordinal))?;
        Ok((named("cuDeviceGetName", result::device::get_name(device))?, capability(device)?))
    };
    (0..count).map(gpu).collect()
}

fn capability(device: sys::CUdevice) -> Result<i32> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    Ok(attribute(device, MAJOR)? * 10 + attribute(device, MINOR)?)
}

fn attribute(device: sys::CUdevice, attribute: sys::CUdevice_attribute) -> Result<i32> {
    // SAFETY: `device` comes from cuDeviceGet.
    named("cuDeviceGetAttribute", unsafe { result::device::get_attribute(device, attribute) })
}

/// A device's primary context, retained. It is the context that the CUDA runtime, and so torch, uses.
#[derive(Debug)]
pub(super) struct Primary {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: a CUcontext may be used from any thread; the driver locks it.
unsafe impl Send for Primary {}
// SAFETY: as above; nothing here is mutated after construction.
unsafe impl Sync for Primary {}

impl Primary {
    pub(super) fn retain(ordinal: i32) -> Result<Self> {
        libcuda::start()?;
        let count = named("cuDeviceGetCount", result::device::get_count())?;
        if ordinal < 0 || ordinal >= count {
            return Err(Error::OutOfRange {
                what: "CUDA device",
                got: ordinal.into(),
                min: 0,
                max: i128::from(count) - 1,
            });
        }
        let device = named("cuDeviceGet", result::device::get(ordinal))?;
        // SAFETY: `device` comes from cuDeviceGet.
        let context = named("cuDevicePrimaryCtxRetain", unsafe { result::primary_ctx::retain(device) })?;
        Ok(Self { device, context })
    }

    /// Compute capability, major * 10 + minor.
    pub(super) fn capability(&self) -> Result<i32> {
        capability(self.device)
    }

    /// The device's name.
    pub(super) fn name(&self) -> Result<String> {
        named("cuDeviceGetName", result::device::get_name(self.device))
    }

    /// Multiprocessors; at least 1.
    pub(super) fn multiprocessors(&self) -> Result<u32> {
        use sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as COUNT;
        Ok(attribute(self.device, COUNT)?.max(1) as u32)
    }

    /// Bytes of shared memory that one block may have, and that all blocks of a multiprocessor share.
    pub(super) fn shared_memory(&self) -> Result<(u32, u32)> {
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as BLOCK,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR as MULTIPROCESSOR,
        };
        Ok((attribute(self.device, BLOCK)?.max(0) as u32, attribute(self.device, MULTIPROCESSOR)?.max(0) as u32))
    }

    /// Make this context the thread's current one until the guard is dropped. Costs one query where it is already.
    pub(super) fn enter(&self) -> Result<Entered> {
        let before = named("cuCtxGetCurrent", result::ctx::get_current())?;
        if before == Some(self.context) {
            return Ok(Entered { restore: None });
        }
        // SAFETY: the context is retained for as long as `self` lives.
        named("cuCtxSetCurrent", unsafe { result::ctx::set_current(self.context) })?;
        Ok(Entered { restore: Some(before.unwrap_or(std::ptr::null_mut())) })
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: retained once in `retain`, released once here. An error at this point has nobody to act on it.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Restores the thread's context that was current before [`Primary::enter`].
pub(crate) struct Entered {
    restore: Option<sys::CUcontext>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(before) = self.restore {
            // SAFETY: it was this thread's current context (or null: none) when the guard was made.
            let _ = unsafe { result::ctx::set_current(before) };
        }
    }
}

/// Lets this thread allocate and load while a stream is being captured (by this thread or, in torch's default mode, any):
/// without it such a call fails and takes the capture with it. None of the guarded calls touches a capturing stream.
pub(crate) struct Relaxed {
    before: sys::CUstreamCaptureMode,
}

impl Relaxed {
    pub(crate) fn enter() -> Result<Self> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: `mode` is a valid in-out pointer for the call.
        named("cuThreadExchangeStreamCaptureMode", unsafe {
            sys::cuThreadExchangeStreamCaptureMode(&mut mode).result()
        })?;
        Ok(Self { before: mode })
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as in `enter`; it puts back what `enter` found.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.before).result() };
    }
}

/// A loaded image.
#[derive(Debug)]
pub(super) struct Module {
    handle: sys::CUmodule,
    /// Its kernels have what an early launch needs.
    early: bool,
}

// SAFETY: modules may be used from any thread of the process.
unsafe impl Send for Module {}
// SAFETY: as above; the handle never changes.
unsafe impl Sync for Module {}

impl Module {
    /// Load an image into the current context; the driver compiles its PTX where it holds no code for this GPU.
    pub(super) fn load(image: &Image) -> Result<Self> {
        // SAFETY: a whole fat binary, whose header says where it ends; it lives for the process.
        let handle =
            named("cuModuleLoadData", unsafe { result::module::load_data(image.code.0.as_ptr().cast::<c_void>()) })?;
        Ok(Self { handle, early: image.arch >= 90 })
    }

    /// A kernel of the module. The handle is valid while the module is loaded, so keep it beside the module.
    pub(super) fn function(&self, name: &'static str) -> Result<Function> {
        let c = CString::new(name).map_err(|e| Error::Invalid {
            what: "kernel name",
            got: name.into(),
            why: e.to_string(),
        })?;
        // SAFETY: the module is loaded.
        let handle = named("cuModuleGetFunction", unsafe { result::module::get_function(self.handle, c) })?;
        Ok(Function { handle, early: false })
    }

    /// A kernel that waits by itself for the launch in front of it (`wait_for_previous` in `cuda/common.cuh`), so that it is
    /// launched early: once every block of that launch has let it begin, or has ended. Only images for compute capability
    /// 9.0 know the wait; those of others are launched as ever.
    pub(super) fn early_function(&self, name: &'static str) -> Result<Function> {
        Ok(Function { early: self.early, ..self.function(name)? })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once in `load`, unloaded once here.
        let _ = unsafe { result::module::unload(self.handle) };
    }
}

/// A kernel of a loaded module.
#[derive(Debug, Clone, Copy)]
pub(super) struct Function {
    handle: sys::CUfunction,
    /// Launches may begin while the launch in front of them still runs.
    early: bool,
}

// SAFETY: functions may be launched from any thread of the process.
unsafe impl Send for Function {}
// SAFETY: as above; the handle never changes.
unsafe impl Sync for Function {}

impl Function {
    /// Launch with one by-value parameter struct.
    ///
    /// # Safety
    /// The function's module is loaded and its context current; `params` is the struct the kernel declares, and every
    /// address and capacity in it is true until the launch has finished on the device. What an early kernel touches
    /// before it waits was written before the launch in front of it began.
    pub(super) unsafe fn launch<P: Copy>(
        self,
        grid: (u32, u32, u32),
        block: u32,
        stream: Stream,
        params: &P,
    ) -> Result<()> {
        // SAFETY: the caller's promise, for a kernel without dynamic shared memory.
        unsafe { self.launch_with_shared(grid, block, 0, stream, params) }
    }

    /// The same kernel, launched behind the end of the launch in front of it.
    pub(super) fn late(self) -> Self {
        Self { early: false, ..self }
    }

    /// Allow launches with up to `bytes` of dynamic shared memory, which more than 48 KiB need.
    pub(super) fn allow_shared(self, bytes: u32) -> Result<()> {
        use sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED;
        // SAFETY: the function's module is loaded for as long as its owner lives.
        named("cuFuncSetAttribute", unsafe {
            result::function::set_function_attribute(self.handle, SHARED, bytes as i32)
        })
    }

    /// Allow clusters of more than 8 blocks, which not every GPU of a capability has room for.
    pub(super) fn allow_large_clusters(self) -> Result<()> {
        use sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED as LARGE;
        // SAFETY: the function's module is loaded for as long as its owner lives.
        named("cuFuncSetAttribute", unsafe { result::function::set_function_attribute(self.handle, LARGE, 1) })
    }

    /// Clusters of `cluster` blocks that the device runs at once; 0 where it has no room for one.
    pub(super) fn clusters_at_once(self, block: u32, cluster: u32, shared: u32) -> Result<u32> {
        let mut attribute = in_clusters(cluster);
        let config =
            launch_config((cluster, 1, 1), block, shared, std::ptr::null_mut(), std::slice::from_mut(&mut attribute));
        let mut count = 0;
        // SAFETY: the driver reads the configuration and writes the count during the call.
        named("cuOccupancyMaxActiveClusters", unsafe {
            sys::cuOccupancyMaxActiveClusters(&raw mut count, self.handle, &raw const config).result()
        })?;
        Ok(count.max(0) as u32)
    }

    /// [`launch`](Self::launch) with `shared` bytes of dynamic shared memory for each block.
    ///
    /// # Safety
    /// As there; the kernel stays within `shared` bytes.
    pub(super) unsafe fn launch_with_shared<P: Copy>(
        self,
        grid: (u32, u32, u32),
        block: u32,
        shared: u32,
        stream: Stream,
        params: &P,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_in_clusters(grid, block, (shared, 1), stream, params) }
    }

    /// [`launch_with_shared`](Self::launch_with_shared) in clusters of so many blocks.
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn launch_in_clusters<P: Copy>(
        self,
        grid: (u32, u32, u32),
        block: u32,
        (shared, cluster): (u32, u32),
        stream: Stream,
        params: &P,
    ) -> Result<()> {
        let early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let mut attributes = [early, in_clusters(cluster)];
        // Attributes that are not wanted are left out.
        let wanted = &mut attributes[usize::from(!self.early)..1 + usize::from(cluster > 1)];
        let config = launch_config(grid, block, shared, stream.handle, wanted);
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
        // SAFETY: the driver copies configuration and parameters during the call and writes to neither; the rest is the
        // caller's promise.
        named("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(&raw const config, self.handle, arguments.as_mut_ptr(), std::ptr::null_mut()).result()
        })
    }
}

/// The attribute of a launch in clusters of `blocks` blocks.
fn in_clusters(blocks: u32) -> sys::CUlaunchAttribute {
    let dimension = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: blocks, y: 1, z: 1 };
    sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { clusterDim: dimension },
    }
}

/// A launch with these attributes, which it points at.
fn launch_config(
    grid: (u32, u32, u32),
    block: u32,
    shared: u32,
    stream: sys::CUstream,
    attributes: &mut [sys::CUlaunchAttribute],
) -> sys::CUlaunchConfig {
    sys::CUlaunchConfig {
        gridDimX: grid.0,
        gridDimY: grid.1,
        gridDimZ: grid.2,
        blockDimX: block,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shared,
        hStream: stream,
        numAttrs: attributes.len() as u32,
        attrs: attributes.as_mut_ptr(),
    }
}
