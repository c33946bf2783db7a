//! `certify` for Python: [`crate::plan::certify`] as plain dictionaries.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::arg::{Int, detached};
use super::geometry::TreeShape;
use crate::error::Result;
use crate::geometry::{Buffer, Limits};
use crate::plan::{self, AnyFormat, Failure, FormatArray, FormatCertificate, FormatLayout};

/// Prove a configuration in bounds: run the placements of every residue of the committed length in both layouts, and
/// plan and audit whole rounds. For each of `formats` (`"native"`, `"flashinfer"`, `"flash_attention"`, `"triton"`;
/// none by default) also count full batches, write the arrays of representative rows and read them back as the format's
/// kernel does.
///
/// Returns `holds` (bool: no check failed), `reverts` (ids of historical faults that `SPECRS_DEBUG_REVERT` puts back),
/// and for placements and rounds `failed` (number of failed checks), `failures` (the first failed checks: `what`,
/// `layout`, `committed`, `residue`, `branch`, `step`, `got`, `limit`), `residues`, `placements` and `plans` checked,
/// `layouts` (`layout`, `alloc_len_per_decode`, `reserve_per_decode`, `row_width`), `buffers` of the native format
/// (`name`, `phase`, `dtype`, `elements`, `bytes`, `formula`), `native_bytes`, and for comparison `per_branch` (a
/// buffer) with `per_branch_fits`. Then `formats`, a list of: `format`, `holds`, `usable` (in some layout) and
/// `layouts`, each with `layout`, `refused` (why the format cannot be used and what would work, or `None`), `arrays`
/// (`phase`, `step`, `name`, `dtype`, `shape`, `bytes`, `formula`), `bytes` of all rounds' arrays and `bytes_of` each
/// phase, `sizes` compared, `plans` written, `reads` (slots read back), `written_context`, `failed` and `failures`.
/// Raises `ConfigError` for a configuration that cannot be made.
#[pyfunction]
#[pyo3(signature = (max_batch, max_context_len, page_size, shape, formats=None))]
pub(super) fn certify<'py>(
    py: Python<'py>,
    max_batch: Int,
    max_context_len: Int,
    page_size: Int,
    shape: &Bound<'py, TreeShape>,
    formats: Option<Vec<String>>,
) -> PyResult<Bound<'py, PyDict>> {
    let limits = Limits {
        max_batch: max_batch.u32("max_batch")?,
        max_context_len: max_context_len.u32("max_context_len")?,
        page_size: page_size.u32("page_size")?,
    };
    let shape = shape.get().0;
    let formats: Vec<AnyFormat> =
        formats.unwrap_or_default().iter().map(|name| AnyFormat::named(name, "both")).collect::<Result<_>>()?;
    let c = detached(py, || plan::certify(limits, shape, &formats))?;

    let layouts = PyList::empty(py);
    for l in &c.layouts {
        let d = PyDict::new(py);
        d.set_item("layout", l.layout.name())?;
        d.set_item("alloc_len_per_decode", l.alloc_len_per_decode)?;
        d.set_item("reserve_per_decode", l.reserve_per_decode)?;
        d.set_item("row_width", l.row_width)?;
        layouts.append(d)?;
    }
    let out = PyDict::new(py);
    out.set_item("holds", c.holds())?;
    out.set_item("reverts", c.reverts.iter().map(|f| f.id).collect::<Vec<_>>())?;
    out.set_item("failed", c.failed)?;
    out.set_item("failures", list(py, &c.failures, failure)?)?;
    out.set_item("residues", c.residues)?;
    out.set_item("placements", c.placements)?;
    out.set_item("plans", c.plans)?;
    out.set_item("layouts", layouts)?;
    out.set_item("buffers", list(py, &c.buffers, buffer)?)?;
    out.set_item("native_bytes", c.native_bytes())?;
    out.set_item("per_branch", buffer(py, &c.per_branch)?)?;
    out.set_item("per_branch_fits", c.per_branch_fits)?;
    out.set_item("formats", list(py, &c.formats, format)?)?;
    Ok(out)
}

fn list<'py, T>(
    py: Python<'py>,
    all: &[T],
    one: impl Fn(Python<'py>, &T) -> PyResult<Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyList>> {
    let out = PyList::empty(py);
    for item in all {
        out.append(one(py, item)?)?;
    }
    Ok(out)
}

fn format<'py>(py: Python<'py>, f: &FormatCertificate) -> PyResult<Bound<'py, PyDict>> {
    let d = PyDict::new(py);
    d.set_item("format", f.format)?;
    d.set_item("holds", f.holds())?;
    d.set_item("usable", f.usable())?;
    d.set_item("layouts", list(py, &f.layouts, layout)?)?;
    Ok(d)
}

fn layout<'py>(py: Python<'py>, l: &FormatLayout) -> PyResult<Bound<'py, PyDict>> {
    let bytes_of = PyDict::new(py);
    for a in &l.arrays {
        bytes_of.set_item(a.phase, l.bytes(a.phase))?;
    }
    let d = PyDict::new(py);
    d.set_item("layout", l.layout.name())?;
    d.set_item("refused", l.refused.as_deref())?;
    d.set_item("arrays", list(py, &l.arrays, array)?)?;
    d.set_item("bytes", l.round_bytes())?;
    d.set_item("bytes_of", bytes_of)?;
    d.set_item("sizes", l.sizes)?;
    d.set_item("plans", l.plans)?;
    d.set_item("reads", l.reads)?;
    d.set_item("written_context", l.written_context)?;
    d.set_item("failed", l.failed)?;
    d.set_item("failures", list(py, &l.failures, failure)?)?;
    Ok(d)
}

fn array<'py>(py: Python<'py>, a: &FormatArray) -> PyResult<Bound<'py, PyDict>> {
    let d = PyDict::new(py);
    d.set_item("phase", a.phase)?;
    d.set_item("step", a.step)?;
    d.set_item("name", a.name)?;
    d.set_item("dtype", a.dtype)?;
    d.set_item("shape", &a.shape)?;
    d.set_item("bytes", a.bytes)?;
    d.set_item("formula", &a.formula)?;
    Ok(d)
}

fn failure<'py>(py: Python<'py>, f: &Failure) -> PyResult<Bound<'py, PyDict>> {
    let d = PyDict::new(py);
    d.set_item("what", &f.what)?;
    d.set_item("layout", f.layout.name())?;
    d.set_item("committed", f.committed)?;
    d.set_item("residue", f.residue)?;
    d.set_item("branch", f.branch)?;
    d.set_item("step", f.step)?;
    d.set_item("got", f.got)?;
    d.set_item("limit", f.limit)?;
    Ok(d)
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
