//! Launches of the device planner on Python's tensors: the engine's rounds on a GPU plan by them.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::device::StreamArg;
use super::operands::{Arg, Operands, import};
use crate::device::{
    Device, DeviceArray, DeviceBatch, DevicePlan, DevicePlanner, DeviceStep, DeviceTable, MovesView, PlanMemory, Stream,
};
use crate::error::{Error, Result};
use crate::plan::{AnyFormat, Format, Phase};
use crate::py::arg::Int;
use crate::py::geometry::Geometry;

/// A planner, the page table in operand `n` and the number of its columns.
fn planner(
    o: &Operands,
    geometry: crate::geometry::Geometry,
    n: usize,
    num_pages: u32,
    g: i32,
) -> Result<(DevicePlanner, DeviceTable)> {
    let table = DeviceTable::new(o.slice(n, g)?, o.columns(n)? as u32, num_pages)?;
    Ok((DevicePlanner::new(geometry, Device::get(g)?), table))
}

/// The arrays of a plan from operand `n` on.
fn memory(o: &Operands, n: usize, g: i32) -> Result<PlanMemory> {
    Ok(PlanMemory {
        rows: o.slice(n, g)?,
        versions: o.slice(n + 1, g)?,
        qo_indptr: o.slice(n + 2, g)?,
        prefix_lens: o.slice(n + 3, g)?,
        positions: o.slice(n + 4, g)?,
        out_slots: o.slice(n + 5, g)?,
        mask: o.slice(n + 6, g)?,
    })
}

/// Launch the plan of a step whose operands are those of [`_device_plan`].
fn launch_plan(
    (o, s, g): (&Operands, Stream, i32),
    planner: &DevicePlanner,
    table: &DeviceTable,
    phase: Phase,
    out: PlanMemory,
) -> Result<DevicePlan> {
    let live = o.maybe(3, g)?;
    let batch =
        DeviceBatch { rows: &o.slice(0, g)?, versions: &o.slice(1, g)?, lens: &o.slice(2, g)?, live: live.as_ref() };
    let (offsets, parents, ancestors) = (o.maybe(4, g)?, o.maybe(5, g)?, o.maybe(6, g)?);
    let missing = || Error::Invalid { what: "step", got: "None".into(), why: "the phase needs the operand".into() };
    let step = match phase {
        Phase::Extend => DeviceStep::Extend { offsets: offsets.as_ref().ok_or_else(missing)? },
        Phase::Decode => DeviceStep::Decode,
        Phase::Draft { step } => DeviceStep::Draft { step, ancestors: ancestors.as_ref() },
        Phase::Verify => DeviceStep::Verify {
            offsets: offsets.as_ref().ok_or_else(missing)?,
            parents: parents.as_ref().ok_or_else(missing)?,
        },
    };
    planner.plan(s, table, &batch, step, out)
}

/// Plan a step on the device, and the arrays of `format` if one is given. `batch` are rows, versions (int64), lens and live
/// (or `None`); `step` are offsets, parents and ancestors, each a tensor or `None`; `table` is int32 [rows, columns]; `plan`
/// are rows, versions, qo_indptr, prefix_lens, positions, out_slots and mask, whose sizes are the bucket; `arrays` name to
/// tensor.
#[pyfunction]
#[pyo3(signature = (geometry, phase, draft_step, table, num_pages, batch, step, plan, format, masks, arrays, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_plan(
    py: Python<'_>,
    geometry: &Bound<'_, Geometry>,
    phase: &str,
    draft_step: Option<Int>,
    table: Arg<'_, '_>,
    num_pages: Int,
    batch: [Option<Bound<'_, PyAny>>; 4],
    step: [Option<Bound<'_, PyAny>>; 3],
    plan: [Bound<'_, PyAny>; 7],
    format: &str,
    masks: &str,
    arrays: &Bound<'_, PyDict>,
    stream: StreamArg,
) -> PyResult<()> {
    let geometry = geometry.get().0;
    let phase = crate::py::plan::phase(phase, draft_step.map(|s| s.u32("step")).transpose()?)?;
    let (format, num_pages) = (AnyFormat::named(format, masks)?, num_pages.u32("num_pages")?);
    let specs = format.arrays();
    for name in arrays.keys() {
        let name: String = name.extract()?;
        if !specs.iter().any(|s| s.name == name) {
            let why = format!("{} has no such array", format.name());
            return Err(Error::Invalid { what: "arrays", got: name, why }.into());
        }
    }
    let given = specs.iter().map(|s| arrays.get_item(s.name)).collect::<PyResult<Vec<_>>>()?;
    let mut outputs = vec![
        ("rows", Some(&plan[0])),
        ("versions", Some(&plan[1])),
        ("qo_indptr", Some(&plan[2])),
        ("prefix_lens", Some(&plan[3])),
        ("positions", Some(&plan[4])),
        ("out_slots", Some(&plan[5])),
        ("mask", Some(&plan[6])),
    ];
    outputs.extend(specs.iter().zip(&given).map(|(s, array)| (s.name, array.as_ref())));
    const INPUTS: usize = 8;
    let inputs: [_; INPUTS] = [
        ("batch rows", batch[0].as_ref()),
        ("batch versions", batch[1].as_ref()),
        ("lens", batch[2].as_ref()),
        ("live", batch[3].as_ref()),
        ("offsets", step[0].as_ref()),
        ("tree parents", step[1].as_ref()),
        ("ancestor bits", step[2].as_ref()),
        ("page table", Some(table)),
    ];
    let operands = import(&inputs, &outputs)?;
    operands.launch(py, stream, |o, _, s, g| {
        let (planner, table) = planner(o, geometry, 7, num_pages, g)?;
        let out = memory(o, INPUTS, g)?;
        let plan = launch_plan((o, s, g), &planner, &table, phase, out)?;
        let first = INPUTS + 7;
        let array = |i: usize| -> Result<Option<DeviceArray>> { o.maybe_array(first + i, g) };
        let arrays = (0..specs.len()).map(array).collect::<Result<Vec<_>>>()?;
        planner.lower(s, &format, &plan, &arrays)
    })
}

/// Copies of each prefix's tail into the holes of the holey layout, into `moves` (src, dst, offsets). `batch` are rows, lens
/// and live (or `None`).
#[pyfunction]
#[pyo3(signature = (geometry, table, num_pages, batch, moves, stream))]
pub(super) fn _device_tail_copies(
    py: Python<'_>,
    geometry: &Bound<'_, Geometry>,
    table: Arg<'_, '_>,
    num_pages: Int,
    batch: [Option<Bound<'_, PyAny>>; 3],
    moves: [Bound<'_, PyAny>; 3],
    stream: StreamArg,
) -> PyResult<()> {
    let (geometry, num_pages) = (geometry.get().0, num_pages.u32("num_pages")?);
    let operands = import(
        &[
            ("batch rows", batch[0].as_ref()),
            ("lens", batch[1].as_ref()),
            ("live", batch[2].as_ref()),
            ("page table", Some(table)),
        ],
        &[("src", Some(&moves[0])), ("dst", Some(&moves[1])), ("offsets", Some(&moves[2]))],
    )?;
    operands.launch(py, stream, |o, _, s, g| {
        let (planner, table) = planner(o, geometry, 3, num_pages, g)?;
        let (rows, lens, live) = (o.slice(0, g)?, o.slice(1, g)?, o.maybe(2, g)?);
        let moves = MovesView::new(o.slice(4, g)?, o.slice(5, g)?, o.slice(6, g)?)?;
        planner.tail_copies(s, &table, &rows, &lens, live.as_ref(), &moves)
    })
}
