//! One [`Device`] per GPU of the process: its context with the kernels that are loaded into it.

use std::sync::{Arc, Mutex, OnceLock};

use super::context::Context;
use super::driver::{Entered, Primary, Relaxed};
use super::fault::Faults;
use super::kernels::Kernels;
use super::{driver, images, memory};
use crate::error::{Error, Result, in_range};

/// Largest number of GPUs in a process that are told apart.
const MAX_DEVICES: usize = 64;

/// Devices in use, by ordinal. They live as long as the process: a kernel may be in flight, or captured in a graph that
/// torch owns, at any later time.
static DEVICES: [OnceLock<Device>; MAX_DEVICES] = [const { OnceLock::new() }; MAX_DEVICES];

/// Held while a device is set up, so that it is set up once.
static SETUP: Mutex<()> = Mutex::new(());

/// A GPU that kernels of this crate can run on. Get one with [`Device::get`].
#[derive(Debug)]
pub struct Device {
    kernels: Kernels,
    context: Arc<Context>,
}

/// Least compute capability that the kernels run on, major * 10 + minor: Ampere.
const LEAST_CAPABILITY: i32 = 80;

/// Check that kernels can run in this process at all: `Ok`, or the reason why not (no kernels in this build, no driver
/// or one that is too old, no GPU, none that is new enough), with what was found and what is needed.
pub fn available() -> Result<()> {
    if let Some(why) = images::ABSENT {
        return Err(Error::CudaUnavailable(format!("no CUDA kernels in this build: {why}")));
    }
    let gpus = driver::gpus()?;
    if gpus.is_empty() {
        return Err(Error::CudaUnavailable("the driver sees no GPU".into()));
    }
    if gpus.iter().any(|(_, capability)| *capability >= LEAST_CAPABILITY) {
        return Ok(());
    }
    let found: Vec<String> = gpus
        .iter()
        .enumerate()
        .map(|(i, (name, capability))| format!("cuda:{i} is {}", described(name, *capability)))
        .collect();
    Err(too_old(&found.join(", ")))
}

fn described(name: &str, capability: i32) -> String {
    format!("{name}, of compute capability {}.{}", capability / 10, capability % 10)
}

fn too_old(found: &str) -> Error {
    let (major, minor) = (LEAST_CAPABILITY / 10, LEAST_CAPABILITY % 10);
    Error::CudaUnavailable(format!("a GPU of compute capability {major}.{minor} (Ampere) or later is needed; {found}"))
}

impl Device {
    /// The device with the driver's (and torch's) number `ordinal`. The first call sets it up: retains the primary
    /// context, loads the kernels and allocates the fault records (96 bytes); later calls cost one atomic load.
    ///
    /// Safe to call for the first time while a stream is captured, though better before: loading takes milliseconds where
    /// this build holds code for this GPU (8.x and 9.x), or where the driver has compiled its PTX before, and tens of
    /// seconds where it has not.
    pub fn get(ordinal: i32) -> Result<&'static Device> {
        in_range("CUDA device", ordinal, 0, MAX_DEVICES as i128 - 1)?;
        let cell = &DEVICES[ordinal as usize]; // in range: just checked
        if let Some(device) = cell.get() {
            return Ok(device);
        }
        let _setup = SETUP.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(device) = cell.get() {
            return Ok(device); // another thread was first
        }
        available()?;
        let device = Device::set_up(ordinal)?;
        Ok(cell.get_or_init(|| device))
    }

    fn set_up(ordinal: i32) -> Result<Device> {
        // The guards come before values that are made under them: on an error, values are dropped while the context is
        // still current.
        let relaxed = Relaxed::enter()?;
        let primary = Primary::retain(ordinal)?;
        let current = primary.enter()?;
        let capability = primary.capability()?;
        if capability < LEAST_CAPABILITY {
            return Err(too_old(&format!("cuda:{ordinal} is {}", described(&primary.name()?, capability))));
        }
        let context = Arc::new(Context::new(primary, ordinal)?);
        let kernels = Kernels::load(&context)?;
        drop(current);
        drop(relaxed);
        Ok(Device { kernels, context })
    }

    /// The driver's name of the device, such as `NVIDIA H200`.
    pub fn name(&self) -> &str {
        self.context.name()
    }

    /// Compute capability, major * 10 + minor: 90 for Hopper.
    pub fn capability(&self) -> i32 {
        self.context.capability()
    }

    /// Context of the device.
    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Make its context this thread's current one until the guard is dropped.
    pub(crate) fn enter(&self) -> Result<Entered> {
        self.context.enter()
    }

    /// Free and total bytes of its memory, as the driver has them now: what torch caches is not free.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let _current = self.context.enter()?;
        memory::free_and_total()
    }

    /// Free memory that was dropped and is no longer in use. Allocations do so by themselves. Returns the bytes freed.
    pub fn collect(&self) -> Result<u64> {
        let _current = self.context.enter()?;
        Ok(self.context.retired().collect(false))
    }

    /// Free memory that was dropped and that captured graphs use.
    ///
    /// # Safety
    /// No launch of such a graph is in flight or follows.
    pub unsafe fn collect_captured(&self) -> Result<u64> {
        let _current = self.context.enter()?;
        Ok(self.context.retired().collect_captured())
    }

    /// Bytes of this crate's buffers, on the device and pinned for it: live ones, and those that were dropped and not
    /// freed yet.
    pub fn owned_bytes(&self) -> u64 {
        self.context.retired().owned()
    }

    /// Bytes that were dropped and not freed yet.
    pub fn retired_bytes(&self) -> u64 {
        self.context.retired().bytes()
    }

    /// The kernels that were loaded for this device.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Check as [`Faults::check`] does, in the device's own record: of launches on streams that report nowhere else.
    pub fn check(&self) -> Result<()> {
        self.context.faults().check()
    }

    /// A fault record beside the device's own, so that engines that share a device do not see each other's faults. It
    /// lives as long as the process: a kernel that reports to it may be in flight, or captured in a graph of torch's, at any
    /// later time.
    pub fn faults(&self) -> Result<&'static Faults> {
        Ok(Box::leak(Box::new(self.context.new_faults()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_gpu_gives_a_typed_error() {
        if available().is_ok() {
            return; // the GPU tests of tests/python cover this machine
        }
        assert!(matches!(Device::get(0), Err(Error::CudaUnavailable(_) | Error::Cuda { .. })));
        assert!(matches!(Device::get(-1), Err(Error::OutOfRange { got: -1, .. })));
        assert!(matches!(Device::get(64), Err(Error::OutOfRange { got: 64, .. })));
    }
}
