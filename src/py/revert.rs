//! The registry of historical faults for Python: [`crate::revert`].

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::arg::Int;
use crate::error::Result;
use crate::revert::{FAULTS, Reverts, VARIABLE};

/// The set of these ids; an unknown id is refused with the names of the known ones.
pub(super) fn set(ids: &[Int]) -> Result<Reverts> {
    let ids =
        ids.iter().map(|id| Ok(id.within("reverts", 0, u32::MAX.into())?.to_string())).collect::<Result<Vec<_>>>()?;
    Reverts::parse(&ids.join(","))
}

/// Registry of the historical faults that `SPECRS_DEBUG_REVERT` or `Geometry(reverts=)` can put back, for debugging and
/// tests: `id` (int), `title`, `report` (URL), `reverts` (what the switch puts back), `place` (where), `guard` (what stops it).
#[pyfunction]
pub(super) fn faults(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let all = PyList::empty(py);
    for f in FAULTS {
        let d = PyDict::new(py);
        d.set_item("id", f.id)?;
        d.set_item("title", f.title)?;
        d.set_item("report", f.report)?;
        d.set_item("reverts", f.reverts)?;
        d.set_item("place", f.place)?;
        d.set_item("guard", f.guard)?;
        all.append(d)?;
    }
    Ok(all)
}

/// Returns the line of a process under `SPECRS_DEBUG_REVERT` that names the faults put back, which is also written to
/// stderr once; `None` if no fault is put back. Raises `ConfigError` for an unknown id.
#[pyfunction]
#[pyo3(name = "_reverts_warning")]
pub(super) fn reverts_warning() -> PyResult<Option<String>> {
    let reverts = Reverts::from_env()?;
    Ok((!reverts.is_empty()).then(|| {
        format!("{VARIABLE}={reverts}: historical faults are put back, for debugging alone; see specrs.faults()")
    }))
}
