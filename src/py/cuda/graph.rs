//! CUDA graphs for Python: captured work, and the objects that it must not outlive. `python/specrs/graph/` builds on it.

use std::collections::BTreeMap;
use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use super::device::StreamArg;
use super::tensors;
use crate::device::{Device, Stream};
use crate::error::Result;
use crate::graph::{self, Capture, Turn};
use crate::py::arg::{Int, detached};
use crate::py::dlpack::Call;

register! { fn _graph_child, _graph_collect, _graph_loop_count; class Graph; }

/// Python objects that a graph keeps. They may be let go of on any thread.
struct Objects(Vec<Py<PyAny>>);

impl Drop for Objects {
    fn drop(&mut self) {
        let objects = mem::take(&mut self.0);
        // An interpreter that has ended frees nothing more.
        let mut left = Some(objects);
        let _ = Python::try_attach(|_| drop(left.take()));
        mem::forget(left);
    }
}

/// Work captured from a raw stream into a CUDA graph, with every object that the work needs.
///
/// It may be dropped at any time, on any thread: the graph and what it keeps stay until the device has finished the last
/// launch, and go at a later capture, launch or `_graph_collect`.
#[pyclass(frozen, name = "_Graph", module = "specrs._specrs")]
pub(super) struct Graph {
    graph: graph::Graph,
    /// Calls of `launch` that are under way: it rises with the GIL held, so never while Python's collector looks.
    launching: AtomicUsize,
}

impl Graph {
    /// Capture what `work` puts on `stream`; `work` gets the loop's handle where there is one.
    fn made(
        py: Python<'_>,
        (ordinal, stream): (Int, StreamArg),
        keep: Vec<Py<PyAny>>,
        begin: fn(&'static Device, Stream, Turn) -> Result<Capture>,
        work: impl FnOnce(Option<u64>) -> PyResult<()>,
    ) -> PyResult<Self> {
        let (ordinal, stream) = (ordinal.i32("CUDA device")?, stream.get()?);
        // Without the GIL: the capture that is waited for may need it to end.
        let capture = detached(py, move || {
            graph::collect(false)?;
            let device = Device::get(ordinal)?;
            begin(device, stream, Turn::take()?)
        })?;
        if let Err(error) = work(capture.handle()) {
            detached(py, move || {
                drop(capture);
                Ok(())
            })?;
            return Err(error);
        }
        let held = Box::new(Objects(keep));
        let graph = detached(py, move || capture.finish(held))?;
        Ok(Self { graph, launching: AtomicUsize::new(0) })
    }
}

#[pymethods]
impl Graph {
    /// Capture what `work()` puts on the raw stream `stream` of CUDA device `ordinal`, which is not the default stream.
    /// Captures run one at a time in the process; the stream's other work and other threads go on. `keep`: objects that
    /// live until the graph is dropped and its last launch has finished.
    ///
    /// Raises what `work` raises, unchanged; `GraphCaptureError` for a capture that something broke, with the call, and for
    /// a node that may not be there its type and path. Either way nothing of the graph is left and the stream works as before.
    #[staticmethod]
    fn capture(
        py: Python<'_>,
        ordinal: Int,
        stream: StreamArg,
        work: &Bound<'_, PyAny>,
        keep: Vec<Py<PyAny>>,
    ) -> PyResult<Self> {
        Self::made(py, (ordinal, stream), keep, Capture::of_stream, |_| work.call0().map(drop))
    }

    /// As `capture`, of the body of a loop: it runs until the last kernel of the body sets the condition to 0, by
    /// `cudaGraphSetConditional(handle, 0)`, once at least. `work` gets the handle, an integer of 64 bits.
    ///
    /// The body holds kernels, copies, memsets, and graphs of these: no host functions, event waits, memory
    /// allocations or cooperative kernels, which raise `GraphCaptureError`.
    #[staticmethod]
    #[pyo3(name = "loop")]
    fn repeated(
        py: Python<'_>,
        ordinal: Int,
        stream: StreamArg,
        work: &Bound<'_, PyAny>,
        keep: Vec<Py<PyAny>>,
    ) -> PyResult<Self> {
        Self::made(py, (ordinal, stream), keep, Capture::of_loop, |handle| work.call1((handle,)).map(drop))
    }

    /// Put the captured work on the raw stream `stream`, and an event behind it. Waits for nothing. Raises `CudaError` for what
    /// the driver refuses, also for a fault of earlier work; `GraphCaptureError` on a stream that is being captured.
    fn launch(&self, py: Python<'_>, stream: StreamArg) -> PyResult<()> {
        let stream = stream.get()?;
        self.launching.fetch_add(1, Ordering::SeqCst);
        let launched = detached(py, || self.graph.launch(stream));
        self.launching.fetch_sub(1, Ordering::SeqCst);
        launched?;
        detached(py, || graph::collect(false).map(drop))
    }

    /// Launches so far: the generation of what the graph writes.
    #[getter]
    fn replays(&self) -> u64 {
        self.graph.replays()
    }

    /// Nodes by type, such as `{"kernel": 12, "memcpy": 1}`; those of child graphs and of a loop's body included, beside the
    /// `graph` and `conditional` nodes that hold them.
    #[getter]
    fn nodes(&self) -> BTreeMap<&'static str, u64> {
        self.graph.nodes().clone()
    }

    /// What the device is using is no garbage, so it is not shown to the collector, which would empty it. A graph that is
    /// idle stays so while the collector looks: its passes see the same, or more.
    fn __traverse__(&self, visit: PyVisit<'_>) -> std::result::Result<(), PyTraverseError> {
        if self.launching.load(Ordering::SeqCst) > 0 || !self.graph.is_idle() {
            return Ok(());
        }
        let visited = self.graph.with_held(|held| {
            held.downcast_ref::<Objects>().map_or(Ok(()), |objects| objects.0.iter().try_for_each(|o| visit.call(o)))
        });
        visited.unwrap_or(Ok(()))
    }

    fn __clear__(&self) {
        self.graph.release();
    }
}

/// Add the graph `raw` (a `cudaGraph_t` as an integer, such as `torch.cuda.CUDAGraph.raw_cuda_graph()`) to what is being
/// captured on the raw stream `stream`, by a capture of specrs on this thread, behind what is there. The caller keeps what it came from alive
/// through the call, and has what its work touches in `keep`. Raises `GraphCaptureError` where the stream is not being
/// captured, and for a node that no child graph may hold.
#[pyfunction]
fn _graph_child(py: Python<'_>, stream: StreamArg, raw: Int) -> PyResult<()> {
    let (stream, raw) = (stream.get()?, raw.usize("raw graph")?);
    detached(py, move || tensors::add_child(stream, raw))
}

/// Take one from `left` (int32[1] on a CUDA device) and set the condition `handle` of a loop to whether any is left and `stop`
/// (int32[1], or `None`) is 0: the last launch of the work that `_Graph.loop` captures, on the raw stream `stream`.
#[pyfunction]
#[pyo3(signature = (handle, left, stop, stream))]
fn _graph_loop_count(
    handle: Int,
    left: &Bound<'_, PyAny>,
    stop: Option<&Bound<'_, PyAny>>,
    stream: StreamArg,
) -> PyResult<()> {
    let py = left.py();
    let (handle, stream) = (handle.within("handle", 0, u64::MAX.into())? as u64, stream.get()?);
    let ([], [stop], [left]) = Call::on_device().take([], [("stop", stop)], [("left", left)])?;
    detached(py, || {
        let ordinal = left.cuda_ordinal()?;
        left.writable()?;
        let words = stop.as_ref().map(|stop| stop.device_i32(ordinal)).transpose()?;
        let kernel = &Device::get(ordinal)?.kernels().loop_count;
        kernel.launch(stream, handle, &left.device_i32(ordinal)?, words.as_ref())
    })
}

/// Destroy the dropped graphs whose last launch has finished, and let go of what they kept; with `wait`, wait for it first.
/// Returns how many were destroyed and how many are left.
#[pyfunction]
#[pyo3(signature = (wait=false))]
fn _graph_collect(py: Python<'_>, wait: bool) -> PyResult<(usize, usize)> {
    detached(py, move || Ok((graph::collect(wait)?, graph::waiting())))
}
