//! `Moves`: copies of KV rows, for `kv_move` to run.

use pyo3::prelude::*;

use crate::bounds::Slot;
use crate::plan;
use crate::pool;
use crate::py::arg::{Int, detached, i32s};
use crate::py::dlpack::Array;

/// Copies of one token's KV, in every layer, for `kv_move` to run in order.
#[pyclass(frozen, module = "specrs._specrs")]
pub(in crate::py) struct Moves {
    pub(in crate::py) moves: plan::Moves,
    /// The pool whose rows the moves belong to; `None` for raw slots.
    pub(in crate::py) pool: Option<pool::Pool>,
}

#[pymethods]
impl Moves {
    /// Moves between raw slots of a cache of `num_slots` slots, put into an order in which no move reads a slot that an
    /// earlier move wrote. A ring of moves needs `scratch`, a slot that no move uses.
    #[new]
    #[pyo3(signature = (src, dst, num_slots, scratch=None))]
    fn new(py: Python<'_>, src: Vec<Int>, dst: Vec<Int>, num_slots: Int, scratch: Option<Int>) -> PyResult<Self> {
        let (src, dst) = (i32s("source slot", &src)?, i32s("destination slot", &dst)?);
        let num_slots = num_slots.within("num_slots", 0, i32::MAX.into())? as u32;
        let scratch = scratch.map(|s| Slot::new(s.u32("scratch slot")?)).transpose()?;
        let moves = detached(py, || plan::Moves::new(&src, &dst, num_slots, scratch))?;
        Ok(Self { moves, pool: None })
    }

    /// Source slots, int32.
    #[getter]
    fn src(&self) -> PyResult<Array> {
        Ok(Array::line(self.moves.src())?)
    }

    /// Destination slots, int32.
    #[getter]
    fn dst(&self) -> PyResult<Array> {
        Ok(Array::line(self.moves.dst())?)
    }

    /// Check that the moves may run now over the KV cache whose memory is `nbytes` bytes at `address`, and count them
    /// as run there, as `kv_move` does: for a caller that runs them by a kernel of its own. Raises `StaleHandleError`
    /// if they have run there, or if their pages, their lease or the committed length have changed.
    #[pyo3(signature = (address, nbytes))]
    fn claim(&self, py: Python<'_>, address: Int, nbytes: Int) -> PyResult<()> {
        let address = address.within("address", 0, u64::MAX.into())? as u64;
        let nbytes = nbytes.within("nbytes", 0, i128::from(u64::MAX - address))? as u64;
        let Some(pool) = &self.pool else { return Ok(()) };
        detached(py, || pool.with_tables(|t| self.moves.claim(&t, address, address + nbytes))?)
    }

    fn __len__(&self) -> usize {
        self.moves.len()
    }

    fn __repr__(&self) -> String {
        format!("Moves(src={:?}, dst={:?})", self.moves.src(), self.moves.dst())
    }
}
