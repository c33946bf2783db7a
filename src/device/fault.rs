//! The fault record: an access that a kernel skipped, or scores that it could choose nothing from. The host reads it
//! without a synchronisation.
//!
//! Protocol (device side in `cuda/common.cuh`): the record carries the epoch that may be recorded next. The first thread
//! that raises the claim word in device memory to that epoch wins, writes the fields and then `ready = epoch`. The
//! host opens the next epoch only after it has read a ready record: every other thread of the old epoch has lost by then.

use std::sync::Mutex;
use std::sync::atomic::{Ordering, fence};

use super::params::faults::{FaultRecord, Report};
use super::params::{Table, text_of};
use super::words::{DeviceWords, Mapped};
use crate::error::{Error, Result};

/// Two records with their claim words, one for skipped accesses and one for findings of probes of scores: neither hides
/// the other. Each device has such a pair; a caller that shares a device gets one of its own by
/// [`Device::faults`](super::Device::faults), and launches on streams that report there ([`Stream::reporting_to`]).
///
/// [`Stream::reporting_to`]: super::Stream::reporting_to
#[derive(Debug)]
pub struct Faults {
    /// Accesses, then probes.
    records: Mapped<[FaultRecord; 2]>,
    claim: DeviceWords,
    ordinal: i32,
    /// Serialises readers, so that one fault is reported once.
    reader: Mutex<()>,
}

impl Faults {
    /// A record of device `ordinal`, whose context is current.
    pub(super) fn new(ordinal: i32) -> Result<Self> {
        let records = Mapped::new([FaultRecord { epoch: 1, ..FaultRecord::default() }; 2])?;
        Ok(Self { records, claim: DeviceWords::zeroed(2)?, ordinal, reader: Mutex::new(()) })
    }

    /// The device.
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// The place of the records and the claim words, for a kernel's parameters.
    pub(super) fn report(&self) -> Report {
        Report { record: self.records.device_address(), claim: self.claim.device_address() }
    }

    /// Raise what was recorded here since the last call, once: [`Error::OutOfBounds`] with kernel, buffer, request, step,
    /// index and bound, or [`Error::NonFinite`] with what a probe of scores found. Reads host memory and waits for
    /// nothing: it sees the faults of work that has finished, so call it where the stream is known to have got far enough
    /// (after a read-back or an event). The first access and the first probe in that time are kept; where there are both,
    /// the access is raised.
    pub fn check(&self) -> Result<()> {
        // A panic of another reader cannot have left anything half done: the guarded value is ().
        let _one = self.reader.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let [access, probe] = [0, 1].map(|which| self.take(which));
        access.or(probe).map_or(Ok(()), |record| Err(to_error(&record)))
    }

    /// Take the content of one of the two records, if it is complete, and open its next epoch. The caller holds
    /// `reader`.
    fn take(&self, which: usize) -> Option<FaultRecord> {
        debug_assert!(which < 2);
        // SAFETY: within the two records.
        let host = unsafe { self.records.host().as_ptr().cast::<FaultRecord>().add(which) };
        // SAFETY: the record lives as long as `self`; volatile, since the device writes it behind the compiler's back.
        let (epoch, ready) =
            unsafe { ((&raw const (*host).epoch).read_volatile(), (&raw const (*host).ready).read_volatile()) };
        if ready != epoch {
            return None;
        }
        fence(Ordering::Acquire); // the device wrote the fields before `ready`
        // SAFETY: as above; no device thread writes the fields of an epoch that is ready.
        let record = unsafe { host.read_volatile() };
        // SAFETY: as above; `epoch` is the one field that only the host writes. The claim word orders epochs by value, so
        // the count must not wrap: at its end it stays, and the last fault is reported again and again.
        unsafe { (&raw mut (*host).epoch).write_volatile(epoch.saturating_add(1)) };
        Some(record)
    }
}

/// The error that a record stands for: [`Error::NonFinite`] of a probe, else [`Error::OutOfBounds`].
fn to_error(record: &FaultRecord) -> Error {
    if record.probe != 0 {
        return Error::NonFinite {
            what: text_of(Table::Buffer, record.buffer),
            value: text_of(Table::Probe, record.probe),
            request: record.request.into(),
            row: record.step.into(),
            position: record.position.into(),
            index: record.index,
        };
    }
    Error::OutOfBounds {
        kernel: text_of(Table::Kernel, record.kernel),
        buffer: text_of(Table::Buffer, record.buffer),
        request: record.request.into(),
        step: record.step.into(),
        index: record.index,
        bound: record.bound,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_becomes_an_error_with_every_field() {
        let record = FaultRecord {
            epoch: 7,
            ready: 7,
            kernel: 1,
            buffer: 2,
            request: 3,
            step: 4,
            index: -5,
            bound: 6,
            probe: 0,
            position: -1,
        };
        let error = to_error(&record);
        let want = Error::OutOfBounds {
            kernel: "kv_move",
            buffer: "cache (destination slot)",
            request: 3,
            step: 4,
            index: -5,
            bound: 6,
        };
        assert_eq!(error, want);
        let probe = FaultRecord { buffer: 50, index: 9, bound: 0, probe: 2, position: 8, ..record };
        let want = Error::NonFinite { what: "target logits", value: "+inf", request: 3, row: 4, position: 8, index: 9 };
        assert_eq!(to_error(&probe), want);
    }
}
