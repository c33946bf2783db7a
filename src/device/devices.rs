//! One [`Device`] per GPU of the process: its context with the kernels that are loaded into it.

use std::sync::{Arc, Mutex, OnceLock};

use super::context::Context;
use super::driver::{Primary, Relaxed};
use super::kernels::Kernels;
use super::{driver, libcuda, ptx};
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

/// Whether kernels can run in this process at all: `Ok`, or why not (no kernels in this build, no driver, no GPU).
pub fn available() -> Result<()> {
    if let Some(why) = ptx::ABSENT {
        return Err(Error::CudaUnavailable(format!("no CUDA kernels in this build: {why}")));
    }
    libcuda::start()?;
    match driver::named("cuDeviceGetCount", cudarc::driver::result::device::get_count())? {
        count if count > 0 => Ok(()),
        _ => Err(Error::CudaUnavailable("the driver sees no GPU".into())),
    }
}

impl Device {
    /// The device with the driver's (and torch's) number `ordinal`. The first call sets it up: retains the primary
    /// context, loads the kernels and allocates the fault record (48 bytes); later calls cost one atomic load.
    ///
    /// Safe to call for the first time while a stream is captured, though better before: loading takes milliseconds.
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
        // Guards before what is made under them: on an error, values are dropped while the context is still current.
        let relaxed = Relaxed::enter()?;
        let primary = Primary::retain(ordinal)?;
        let current = primary.enter()?;
        let context = Arc::new(Context::new(primary, ordinal)?);
        let kernels = Kernels::load(&context)?;
        drop(current);
        drop(relaxed);
        Ok(Device { kernels, context })
    }

    /// Compute capability, major * 10 + minor: 90 for Hopper.
    pub fn capability(&self) -> i32 {
        self.context.capability()
    }

    /// The kernels that were loaded for this device.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Raise what a kernel of this device recorded since the last call, once: [`Error::OutOfBounds`] with kernel, buffer,
    /// request, step, index and bound, or [`Error::NonFinite`] with what a probe of scores found. Reads host memory and waits for nothing: it sees the faults of work that has
    /// finished, so call it where the stream is known to have got far enough (after a read-back or an event).
    /// Of several faults in that time the first is kept.
    pub fn check(&self) -> Result<()> {
        self.context.check()
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
