//! Launches of the device planner on Python's tensors: the engine's rounds on a GPU plan by them.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::device::StreamArg;
use super::operands::{Arg, At, Imported, MoveArrays, Operands, PlanArrays};
use crate::device::{Device, DeviceBatch, DevicePlanner, DeviceStep, DeviceTable};
use crate::error::{Error, Result};
use crate::geometry;
use crate::plan::{AnyFormat, Format, Phase};
use crate::py::arg::Int;
use crate::py::geometry::Geometry;

register! { fn _device_plan, _device_tail_copies; }

/// A planner, and the page table `at`.
fn planner(
    o: &Imported,
    geometry: geometry::Geometry,
    at: At,
    num_pages: u32,
    g: i32,
) -> Result<(DevicePlanner, DeviceTable)> {
    let table = DeviceTable::new(o.slice(at, g)?, o.columns(at)? as u32, num_pages)?;
    Ok((DevicePlanner::new(geometry, Device::get(g)?), table))
}

/// The format's arrays among `given`, in its order. Refuses others.
fn arrays_of<'py>(format: &AnyFormat, given: &Bound<'py, PyDict>) -> PyResult<Vec<Option<Bound<'py, PyAny>>>> {
    let specs = format.arrays();
    for name in given.keys() {
        let name: String = name.extract()?;
        if !specs.iter().any(|s| s.name == name) {
            let why = format!("{} has no such array", format.name());
            return Err(Error::Invalid { what: "arrays", got: name, why }.into());
        }
    }
    specs.iter().map(|s| given.get_item(s.name)).collect()
}

/// Plan a step on the device into `plan` (`PlanArrays`), whose sizes are the bucket, and the arrays of `format` if one is
/// given: `arrays` name to tensor. `rows`, `versions` (int64), `lens` and `live` are those of the batch, `table` is int32
/// [rows, columns]. `offsets`, `parents` and `ancestors` are those of the step, where its phase has them.
#[pyfunction]
#[pyo3(signature = (
    *, geometry, phase, draft_step, table, num_pages, rows, versions, lens, live, offsets=None, parents=None, ancestors=None,
    plan, format, masks, arrays, stream
))]
#[allow(clippy::too_many_arguments, reason = "operands, passed by name")]
fn _device_plan<'py>(
    py: Python<'py>,
    geometry: &Bound<'_, Geometry>,
    phase: &str,
    draft_step: Option<Int>,
    table: Arg<'_, 'py>,
    num_pages: Int,
    rows: Arg<'_, 'py>,
    versions: Arg<'_, 'py>,
    lens: Arg<'_, 'py>,
    live: Option<Arg<'_, 'py>>,
    offsets: Option<Arg<'_, 'py>>,
    parents: Option<Arg<'_, 'py>>,
    ancestors: Option<Arg<'_, 'py>>,
    plan: PlanArrays<'py>,
    format: &str,
    masks: &str,
    arrays: &Bound<'py, PyDict>,
    stream: StreamArg,
) -> PyResult<()> {
    let geometry = geometry.get().0;
    let phase = crate::py::plan::phase(phase, draft_step.map(|s| s.u32("step")).transpose()?)?;
    let (format, num_pages) = (AnyFormat::named(format, masks)?, num_pages.u32("num_pages")?);
    let given = arrays_of(&format, arrays)?;
    let mut call = Operands::named();
    let (rows, versions) = (call.reads("batch rows", rows), call.reads("batch versions", versions));
    let (lens, live) = (call.reads("lens", lens), call.reads("live", live));
    let offsets = call.reads("offsets", offsets);
    let (parents, ancestors) = (call.reads("tree parents", parents), call.reads("ancestor bits", ancestors));
    let table = call.reads("page table", table);
    let plan = plan.written(&mut call);
    let arrays: Vec<At> =
        format.arrays().iter().zip(&given).map(|(s, array)| call.writes(s.name, array.as_ref())).collect();
    call.launch(py, stream, |o, _, s, g| {
        let (planner, table) = planner(o, geometry, table, num_pages, g)?;
        let live = o.maybe(live, g)?;
        let batch = DeviceBatch {
            rows: &o.slice(rows, g)?,
            versions: &o.slice(versions, g)?,
            lens: &o.slice(lens, g)?,
            live: live.as_ref(),
        };
        let ancestors = o.maybe(ancestors, g)?;
        let (tree_offsets, tree_parents);
        let step = match phase {
            Phase::Extend => {
                tree_offsets = o.slice(offsets, g)?;
                DeviceStep::Extend { offsets: &tree_offsets }
            }
            Phase::Decode => DeviceStep::Decode,
            Phase::Draft { step } => DeviceStep::Draft { step, ancestors: ancestors.as_ref() },
            Phase::Verify => {
                (tree_offsets, tree_parents) = (o.slice(offsets, g)?, o.slice(parents, g)?);
                DeviceStep::Verify { offsets: &tree_offsets, parents: &tree_parents }
            }
        };
        let plan = planner.plan(s, &table, &batch, step, plan(o, g)?)?;
        let arrays = arrays.iter().map(|at| o.maybe_array(*at, g)).collect::<Result<Vec<_>>>()?;
        planner.lower(s, &format, &plan, &arrays)
    })
}

/// Copies of each prefix's tail into the holes of the holey layout, into `moves` (`MoveArrays`). `rows`, `lens` and `live` are
/// those of the batch.
#[pyfunction]
#[pyo3(signature = (*, geometry, table, num_pages, rows, lens, live, moves, stream))]
#[allow(clippy::too_many_arguments, reason = "operands, passed by name")]
fn _device_tail_copies<'py>(
    py: Python<'py>,
    geometry: &Bound<'_, Geometry>,
    table: Arg<'_, 'py>,
    num_pages: Int,
    rows: Arg<'_, 'py>,
    lens: Arg<'_, 'py>,
    live: Option<Arg<'_, 'py>>,
    moves: MoveArrays<'py>,
    stream: StreamArg,
) -> PyResult<()> {
    let (geometry, num_pages) = (geometry.get().0, num_pages.u32("num_pages")?);
    let mut call = Operands::named();
    let (rows, lens, live) = (call.reads("batch rows", rows), call.reads("lens", lens), call.reads("live", live));
    let table = call.reads("page table", table);
    let moves = moves.written(&mut call);
    call.launch(py, stream, |o, _, s, g| {
        let (planner, table) = planner(o, geometry, table, num_pages, g)?;
        let (rows, lens, live) = (o.slice(rows, g)?, o.slice(lens, g)?, o.maybe(live, g)?);
        planner.tail_copies(s, &table, &rows, &lens, live.as_ref(), &moves(o, g)?)
    })
}
