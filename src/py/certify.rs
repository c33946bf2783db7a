//! `certify` for Python: [`crate::plan::certify`] as plain dictionaries.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::arg::{Int, detached};
use super::geometry::{TreeShape, layout_name};
use crate::geometry::{Buffer, Limits};
use crate::plan;

/// Prove a configuration in bounds: run the placements of every residue of the committed length in both layouts, and
/// plan and audit whole rounds.
///
/// Returns `holds` (bool), `failed` (their number), `failures` (the first of them: `what`, `layout`, `committed`,
/// `residue`, `branch`, `step`, `got`, `limit`), `residues`, `placements` and `plans` checked, `layouts` (`layout`,
/// `alloc_len_per_decode`, `reserve_per_decode`, `row_width`), `buffers` of the native format (`name`, `phase`,
/// `dtype`, `elements`, `bytes`, `formula`), `native_bytes`, and for comparison `per_branch` (a buffer) with
/// `per_branch_fits`. Raises `ConfigError` for a configuration that cannot be made.
#[pyfunction]
#[pyo3(signature = (max_batch, max_context_len, page_size, shape))]
pub(super) fn certify<'py>(
    py: Python<'py>,
    max_batch: Int,
    max_context_len: Int,
    page_size: Int,
    shape: &Bound<'py, TreeShape>,
) -> PyResult<Bound<'py, PyDict>> {
    let limits = Limits {
        max_batch: max_batch.u32("max_batch")?,
        max_context_len: max_context_len.u32("max_context_len")?,
        page_size: page_size.u32("page_size")?,
    };
    let shape = shape.get().0;
    let c = detached(py, || plan::certify(limits, shape))?;

    let failures = PyList::empty(py);
    for f in &c.failures {
        let d = PyDict::new(py);
        d.set_item("what", &f.what)?;
        d.set_item("layout", layout_name(f.layout))?;
        d.set_item("committed", f.committed)?;
        d.set_item("residue", f.residue)?;
        d.set_item("branch", f.branch)?;
        d.set_item("step", f.step)?;
        d.set_item("got", f.got)?;
        d.set_item("limit", f.limit)?;
        failures.append(d)?;
    }
    let layouts = PyList::empty(py);
    for l in &c.layouts {
        let d = PyDict::new(py);
        d.set_item("layout", layout_name(l.layout))?;
        d.set_item("alloc_len_per_decode", l.alloc_len_per_decode)?;
        d.set_item("reserve_per_decode", l.reserve_per_decode)?;
        d.set_item("row_width", l.row_width)?;
        layouts.append(d)?;
    }
    let buffers = PyList::empty(py);
    for b in &c.buffers {
        buffers.append(buffer(py, b)?)?;
    }

    let out = PyDict::new(py);
    out.set_item("holds", c.holds())?;
    out.set_item("failed", c.failed)?;
    out.set_item("failures", failures)?;
    out.set_item("residues", c.residues)?;
    out.set_item("placements", c.placements)?;
    out.set_item("plans", c.plans)?;
    out.set_item("layouts", layouts)?;
    out.set_item("buffers", buffers)?;
    out.set_item("native_bytes", c.native_bytes())?;
    out.set_item("per_branch", buffer(py, &c.per_branch)?)?;
    out.set_item("per_branch_fits", c.per_branch_fits)?;
    Ok(out)
}

fn buffer<'py>(py: Python<'py>, b: &Buffer) -> PyResult<Bound<'py, PyDict>> {
    let d = PyDict::new(py);
    d.set_item("name", b.name)?;
    d.set_item("phase", b.phase)?;
    d.set_item("dtype", b.dtype)?;
    d.set_item("elements", b.elements)?;
    d.set_item("bytes", b.bytes)?;
    d.set_item("formula", &b.formula)?;
    Ok(d)
}
