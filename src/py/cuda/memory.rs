//! Device memory for Python: budgets, arenas whose regions torch shares, the page table's mirror.
//!
//! The classes are those of a build with CUDA; a budget is arithmetic and there in every build with the feature.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;

use super::array::{DeviceArray, element};
use super::device::StreamArg;
use super::tensors;
use crate::device::{Arena, ArenaPlan, Budget, Device, Guards, Region, TableMirror, TableShape};
use crate::error::{Error, Result, listed};
use crate::graph;
use crate::py::arg::{Int, detached};
use crate::py::dlpack::{Call, DType};
use crate::py::pool::Pool;

register! {
    fn _device_budget, _device_collect, _device_collect_captured, _device_memory, _device_table_update;
    class DeviceArena, DeviceTable;
}

/// A name for the life of the process; the same text is kept once.
fn named(name: &str) -> &'static str {
    static NAMES: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.iter().find(|n| **n == name) {
        return known;
    }
    let kept: &'static str = Box::leak(name.into());
    names.push(kept);
    kept
}

/// A region as it was declared.
struct Declared {
    name: &'static str,
    region: Region<u8>,
    dtype: DType,
    shape: Vec<usize>,
}

/// One allocation on CUDA device `ordinal` with regions `(name, dtype, shape)`, each on 256 bytes; with `guards` a gap
/// of known bytes around each. Raises `ConfigError` for what cannot be declared, `DeviceMemoryError` for what does not
/// fit, before anything is allocated.
#[pyclass(frozen, name = "_DeviceArena", module = "specrs._specrs")]
pub(super) struct DeviceArena {
    arena: Arc<Arena>,
    declared: Vec<Declared>,
}

/// The regions placed, not allocated.
fn declare(regions: &[(String, String, Vec<Int>)], guards: bool) -> Result<(ArenaPlan, Vec<Declared>)> {
    let mut plan = ArenaPlan::new(if guards { Guards::On } else { Guards::Off });
    let place = |(name, dtype, shape): &(String, String, Vec<Int>)| {
        let (name, dtype) = (named(name), element(dtype)?);
        let shape = shape.iter().map(|n| n.usize("dimension")).collect::<Result<Vec<_>>>()?;
        let bytes = shape.iter().try_fold(dtype.size(), |n, &d| n.checked_mul(d)).ok_or_else(|| {
            let expr = format!("{} of {dtype}", listed(&shape));
            Error::Overflow { what: name, expr, ty: "int64", limit: i64::MAX as u64 }
        })?;
        Ok(Declared { name, region: plan.take(name, bytes)?, dtype, shape })
    };
    let declared = regions.iter().map(place).collect::<Result<Vec<_>>>()?;
    Ok((plan, declared))
}

impl DeviceArena {
    fn find(&self, name: &str) -> Result<&Declared> {
        self.declared.iter().find(|d| d.name == name).ok_or_else(|| Error::Invalid {
            what: "arena region",
            got: name.into(),
            why: format!("the regions are {}", listed(&self.declared.iter().map(|d| d.name).collect::<Vec<_>>())),
        })
    }
}

#[pymethods]
impl DeviceArena {
    #[new]
    #[pyo3(signature = (ordinal, regions, guards=false))]
    fn new(py: Python<'_>, ordinal: Int, regions: Vec<(String, String, Vec<Int>)>, guards: bool) -> PyResult<Self> {
        let ordinal = ordinal.i32("CUDA device")?;
        detached(py, move || {
            let (plan, declared) = declare(&regions, guards)?;
            let device = Device::get(ordinal)?;
            let mut budget = Budget::new();
            plan.add_to(&mut budget);
            budget.check("the arena", ordinal, device.memory()?.0.saturating_add(device.retired_bytes()))?;
            Ok(Self { arena: Arc::new(plan.allocate(device)?), declared })
        })
    }

    /// Bytes that the allocation of these regions would take; needs no device.
    #[staticmethod]
    #[pyo3(signature = (regions, guards=false))]
    fn count(regions: Vec<(String, String, Vec<Int>)>, guards: bool) -> PyResult<u64> {
        Ok(declare(&regions, guards)?.0.bytes())
    }

    /// Bytes of the allocation.
    #[getter]
    fn bytes(&self) -> u64 {
        self.arena.bytes()
    }

    /// The region as a tensor that torch can share; work that writes it is on the raw stream `stream`.
    fn tensor(&self, name: &str, stream: StreamArg) -> PyResult<DeviceArray> {
        let (found, home) = (self.find(name)?, stream.get()?);
        let of = (found.dtype, found.shape.clone());
        Ok(DeviceArray::new(self.arena.clone(), found.region, found.name, of, home))
    }

    /// Fill the regions of these names, or every region, with bytes that are NaN and -1.
    #[pyo3(signature = (stream, names=None))]
    fn poison(&self, py: Python<'_>, stream: StreamArg, names: Option<Vec<String>>) -> PyResult<()> {
        let stream = stream.get()?;
        detached(py, || match names {
            None => self.arena.poison_all(stream),
            Some(names) => names.iter().try_for_each(|name| self.arena.poison(self.find(name)?.region, stream)),
        })
    }

    /// Raise `OutOfBoundsError`, with the region and the byte, where something was written outside every region.
    fn check_guards(&self, py: Python<'_>, stream: StreamArg) -> PyResult<()> {
        let stream = stream.get()?;
        detached(py, || self.arena.check_guards(stream))
    }
}

/// Free and total bytes of device `ordinal`; of specrs's own buffers the bytes that were dropped and wait for work in
/// flight, and all.
#[pyfunction]
fn _device_memory(py: Python<'_>, ordinal: Int) -> PyResult<(u64, u64, u64, u64)> {
    let ordinal = ordinal.i32("CUDA device")?;
    detached(py, move || {
        let device = Device::get(ordinal)?;
        let (free, total) = device.memory()?;
        Ok((free, total, device.retired_bytes(), device.owned_bytes()))
    })
}

/// Free memory of device `ordinal` that was dropped and is no longer in use; returns the bytes.
#[pyfunction]
fn _device_collect(py: Python<'_>, ordinal: Int) -> PyResult<u64> {
    let ordinal = ordinal.i32("CUDA device")?;
    detached(py, move || Device::get(ordinal)?.collect())
}

/// Free memory of device `ordinal` that was dropped and that captured graphs use; returns the bytes. The caller says by it
/// that no launch of such a graph is in flight or follows.
#[pyfunction]
fn _device_collect_captured(py: Python<'_>, ordinal: Int) -> PyResult<u64> {
    let ordinal = ordinal.i32("CUDA device")?;
    detached(py, move || {
        graph::collect(true)?; // what dropped graphs held is dropped memory from here on
        tensors::collect_captured(Device::get(ordinal)?)
    })
}

/// The table of a budget: `lines` are `(name, bytes)`, `scaled` is `(name, unit, bytes, count, least)`, a line that may be
/// made smaller down to `least` units. Raises `DeviceMemoryError` where it does not fit into `have` bytes of device `ordinal`.
#[pyfunction]
#[pyo3(signature = (lines, scaled=None, *, have=None, ordinal=Int::ZERO))]
fn _device_budget(
    py: Python<'_>,
    lines: Vec<(String, Int)>,
    scaled: Option<(String, String, Int, Int, Int)>,
    have: Option<Int>,
    ordinal: Int,
) -> PyResult<String> {
    let ordinal = ordinal.i32("CUDA device")?;
    detached(py, move || {
        let mut budget = Budget::new();
        for (name, bytes) in lines {
            budget.fixed(name, bytes.u64("bytes")?);
        }
        if let Some((name, unit, bytes, count, least)) = scaled {
            let [bytes, count, least] = [bytes.u64("bytes")?, count.u64("count")?, least.u64("least")?];
            budget.scaled(name, named(&unit), bytes, count, least);
        }
        if let Some(have) = have {
            budget.check("the engine", ordinal, have.u64("have")?)?;
        }
        Ok(budget.to_string())
    })
}

/// A copy of a pool's page table on CUDA device `ordinal`, which follows it on the raw stream `stream`.
#[pyclass(frozen, name = "_DeviceTable", module = "specrs._specrs")]
pub(super) struct DeviceTable {
    mirror: Mutex<TableMirror>,
    pool: crate::pool::Pool,
    arena: Arc<Arena>,
    region: Region<i32>,
}

#[pymethods]
impl DeviceTable {
    #[new]
    fn new(py: Python<'_>, pool: &Bound<'_, Pool>, ordinal: Int, stream: StreamArg) -> PyResult<Self> {
        let (ordinal, stream, pool) = (ordinal.i32("CUDA device")?, stream.get()?, pool.get().0.clone());
        detached(py, move || {
            let (device, shape) = (Device::get(ordinal)?, TableShape::of(&pool.config()));
            let mut plan = ArenaPlan::new(Guards::On);
            let region = shape.declare(&mut plan)?;
            let arena = Arc::new(plan.allocate(device)?);
            let mirror = TableMirror::new(device, arena.clone(), region, shape, stream)?;
            Ok(Self { mirror: Mutex::new(mirror), pool, arena, region })
        })
    }

    /// The table, int32 [rows, columns], whose writers are on the raw stream `stream`; its address stays.
    fn tensor(&self, stream: StreamArg) -> PyResult<DeviceArray> {
        let home = stream.get()?;
        let config = self.pool.config();
        let shape = vec![config.max_seqs as usize, config.row_pages as usize];
        Ok(DeviceArray::new(self.arena.clone(), self.region.bytes(), "page table", (DType::I32, shape), home))
    }

    /// Store what changed since the last upload. `permutes`: rows that a round in flight permutes itself. Returns
    /// `(columns stored, launches, waits, rounds_first)`.
    #[pyo3(signature = (stream, permutes=Vec::new()))]
    fn upload(&self, py: Python<'_>, stream: StreamArg, permutes: Vec<u32>) -> PyResult<(usize, usize, usize, bool)> {
        let stream = stream.get()?;
        detached(py, || {
            let mut mirror = self.mirror.lock().unwrap_or_else(PoisonError::into_inner);
            let rows = |row: u32| permutes.contains(&row);
            let done = self.pool.with_tables(|tables| mirror.upload(&tables, stream, rows))??;
            Ok((done.columns, done.launches, done.waits, done.rounds_first))
        })
    }

    /// The device's table may be another than the last upload left: the next one stores every row.
    fn forget(&self) {
        self.mirror.lock().unwrap_or_else(PoisonError::into_inner).forget();
    }

    /// The device's table, row by row, once the work on `stream` has finished.
    fn read(&self, py: Python<'_>, stream: StreamArg) -> PyResult<Vec<i32>> {
        let stream = stream.get()?;
        detached(py, || self.mirror.lock().unwrap_or_else(PoisonError::into_inner).read(stream))
    }

    /// The pool's own table, and the version of each of its rows.
    fn host(&self, py: Python<'_>) -> PyResult<(Vec<i32>, Vec<u64>)> {
        detached(py, || {
            self.pool.with_tables(|t| {
                let versions = (0..t.max_seqs()).map(|row| t.version(row).unwrap_or(0)).collect();
                (t.table().to_vec(), versions)
            })
        })
    }

    /// The version of each row at the last upload.
    fn versions(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        detached(py, || {
            let mirror = self.mirror.lock().unwrap_or_else(PoisonError::into_inner);
            Ok((0..self.pool.config().max_seqs).map(|row| mirror.version(row).unwrap_or(0)).collect())
        })
    }
}

/// Launch the update of a page table `table` (int32 `[rows * width]`) by `changes` changes in `staged` (int32), on the raw
/// stream `stream`.
#[pyfunction]
#[pyo3(signature = (table, rows, width, num_pages, staged, changes, stream))]
fn _device_table_update(
    table: &Bound<'_, PyAny>,
    rows: Int,
    width: Int,
    num_pages: Int,
    staged: &Bound<'_, PyAny>,
    changes: Int,
    stream: StreamArg,
) -> PyResult<()> {
    let py = table.py();
    let [rows, width, pages] = [rows.u32("table rows")?, width.u32("table columns")?, num_pages.u32("num_pages")?];
    let (changes, stream) = (changes.u32("changes")?, stream.get()?);
    let ([staged], [], [table]) = Call::on_device().take([("staged", staged)], [], [("table", table)])?;
    detached(py, || {
        let ordinal = table.cuda_ordinal()?;
        table.writable()?;
        let (to, from) = (table.device_i32(ordinal)?, staged.device_i32(ordinal)?);
        let kernel = &Device::get(ordinal)?.kernels().table_update;
        kernel.launch(stream, &to, [rows, width], pages, &from, changes)
    })
}
