//! Scalars from Python with errors that name the operand, and the one way to run work without the GIL.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

use super::errors;
use crate::error::{Error, Result, in_range};

/// A Python integer of any size. A value beyond `i128` saturates, so that the range check that follows reports it with
/// the operand's name, unlike Python's `OverflowError`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Int(i128);

impl<'a, 'py> FromPyObject<'a, 'py> for Int {
    type Error = PyErr;

    fn extract(obj: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(v) = obj.extract::<i64>() {
            return Ok(Self(v.into()));
        }
        match obj.extract::<i128>() {
            Ok(v) => Ok(Self(v)),
            Err(e) if e.is_instance_of::<PyOverflowError>(obj.py()) => {
                Ok(Self(if obj.lt(0)? { i128::MIN } else { i128::MAX }))
            }
            Err(e) => Err(e),
        }
    }
}

impl Int {
    /// 0, as a default.
    pub(super) const ZERO: Int = Int(0);

    /// 8, as a default.
    pub(super) const EIGHT: Int = Int(8);

    /// The value, if it is in `min..=max`.
    pub(super) fn within(self, what: &'static str, min: i128, max: i128) -> Result<i128> {
        in_range(what, self.0, min, max)
    }

    /// The value as `u32`.
    pub(super) fn u32(self, what: &'static str) -> Result<u32> {
        self.within(what, 0, u32::MAX.into()).map(|v| v as u32)
    }

    /// The value as `i32`.
    pub(super) fn i32(self, what: &'static str) -> Result<i32> {
        self.within(what, i32::MIN.into(), i32::MAX.into()).map(|v| v as i32)
    }

    /// The value as `u64`.
    pub(super) fn u64(self, what: &'static str) -> Result<u64> {
        self.within(what, 0, u64::MAX.into()).map(|v| v as u64)
    }

    /// The value as a size of something in memory.
    pub(super) fn usize(self, what: &'static str) -> Result<usize> {
        self.within(what, 0, isize::MAX as i128).map(|v| v as usize)
    }
}

/// A list of integers as `u32`.
pub(super) fn u32s(what: &'static str, values: &[Int]) -> Result<Vec<u32>> {
    values.iter().map(|v| v.u32(what)).collect()
}

/// A list of integers as `i32`.
pub(super) fn i32s(what: &'static str, values: &[Int]) -> Result<Vec<i32>> {
    values.iter().map(|v| v.i32(what)).collect()
}

/// Most entries of a list of lists.
const MAX_ENTRIES: i128 = 1 << 26;

/// Check, before the entries are taken, that a list of lists does not have too many. The same list may occur in it
/// again and again, so the caller's memory does not bound their number.
pub(super) fn check_entries(what: &'static str, lists: &Bound<'_, PyAny>) -> PyResult<()> {
    let mut entries = 0u64;
    for list in lists.try_iter()? {
        entries += list?.len()? as u64;
        in_range(what, entries, 0, MAX_ENTRIES)?;
    }
    Ok(())
}

/// Check that two lists that go together are equally long.
pub(super) fn same_len(operand: &'static str, got: usize, with: &'static str, want: usize) -> Result<()> {
    if got == want {
        return Ok(());
    }
    Err(Error::Mismatch { operand, got: format!("{got} entries"), want: format!("{want}, as {with} has") })
}

/// Run `f` without the GIL. A panic in it, which would be a fault of specrs, becomes a `SpecrsError`.
pub(super) fn detached<T: Send>(py: Python<'_>, f: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    py.detach(|| catch_unwind(AssertUnwindSafe(f))).map_or_else(|p| Err(panicked(py, &p)), |r| Ok(r?))
}

/// Run short work under the GIL. A panic in it, which would be a fault of specrs, becomes a `SpecrsError`.
pub(super) fn guarded<T>(py: Python<'_>, f: impl FnOnce() -> Result<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(f)).map_or_else(|p| Err(panicked(py, &p)), |r| Ok(r?))
}

fn panicked(py: Python<'_>, payload: &Box<dyn std::any::Any + Send>) -> PyErr {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    errors::internal(py, text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("panic"))
}
