//! A GPU's primary context and fault record: where kernels are loaded and launched.

use super::driver::{Entered, Primary, Relaxed, Stream};
use super::fault::Faults;
use super::memory::retire::Retired;
use super::params::faults::Report;
use crate::error::{Error, Result};

/// The retained primary context of one GPU, with the fault record of launches that name no other.
#[derive(Debug)]
pub(super) struct Context {
    // Dropped before `primary`: it lives in the context.
    faults: Faults,
    /// Memory that was let go of and may be in use.
    retired: Retired,
    primary: Primary,
    ordinal: i32,
    name: String,
    capability: i32,
    multiprocessors: u32,
}

impl Context {
    /// The context `primary` of device `ordinal`, which is current; allocates the fault record.
    pub(super) fn new(primary: Primary, ordinal: i32) -> Result<Self> {
        let (capability, multiprocessors, name) = (primary.capability()?, primary.multiprocessors()?, primary.name()?);
        Ok(Self {
            faults: Faults::new(ordinal)?,
            retired: Retired::default(),
            primary,
            ordinal,
            name,
            capability,
            multiprocessors,
        })
    }

    /// The driver's number of the device.
    pub(super) fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// The driver's name of the device, such as `NVIDIA H200`.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Compute capability, major * 10 + minor.
    pub(super) fn capability(&self) -> i32 {
        self.capability
    }

    /// Multiprocessors: what a grid is sized by.
    pub(super) fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Memory that was let go of.
    pub(super) fn retired(&self) -> &Retired {
        &self.retired
    }

    /// Bytes of shared memory that one block may have, and that all blocks of a multiprocessor share.
    pub(super) fn shared_memory(&self) -> Result<(u32, u32)> {
        self.primary.shared_memory()
    }

    /// Make the context current for a launch.
    pub(super) fn enter(&self) -> Result<Entered> {
        self.primary.enter()
    }

    /// The report of launches on `stream`: the place of their faults, for a kernel's parameters.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a record of another device.
    pub(super) fn report(&self, stream: Stream) -> Result<Report> {
        let faults = stream.faults().unwrap_or(&self.faults);
        if faults.ordinal() != self.ordinal {
            let (got, want) = (format!("one of cuda:{}", faults.ordinal()), format!("one of cuda:{}", self.ordinal));
            return Err(Error::Mismatch { operand: "fault record", got, want });
        }
        Ok(faults.report())
    }

    /// The record of launches that name no other.
    pub(super) fn faults(&self) -> &Faults {
        &self.faults
    }

    /// One more record.
    pub(super) fn new_faults(&self) -> Result<Faults> {
        let _relaxed = Relaxed::enter()?;
        let _current = self.enter()?;
        Faults::new(self.ordinal)
    }
}
