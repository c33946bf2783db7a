//! Makes a graph of the work on a stream.

use std::cell::Cell;
use std::mem;
use std::ptr;
use std::slice;

use cudarc::driver::sys;

use super::nodes::{self, NodeCounts, Place};
use super::retire::{Exec, Held};
use super::run::Graph;
use super::turn::Turn;
use crate::device::{Alive, Device, RawEvent, Relaxed, Stream, capture_into, named};
use crate::error::{Error, Result};

/// Other threads may make any calls meanwhile; calls of this thread that cannot be captured fail.
const MODE: sys::CUstreamCaptureMode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;

/// The driver's answer to a call of a capture.
fn of_capture(error: Error) -> Error {
    match error {
        Error::Cuda { call, message } => {
            Error::GraphCapture { call, node: String::new(), path: String::new(), why: message }
        }
        other => other,
    }
}

thread_local! {
    /// The device on which this thread captures, and the place of its child graphs; left by a capture that another
    /// thread gave up, which becomes no graph.
    static OPEN: Cell<Option<(&'static Device, Place)>> = const { Cell::new(None) };
}

/// This thread captures from now on; child graphs of the work may hold what `place` allows.
fn opened(device: &'static Device, place: Place) -> Alive {
    let alive = Alive::default();
    OPEN.set(Some((device, place)));
    capture_into(Some(&alive));
    alive
}

/// A graph under construction.
#[derive(Debug)]
struct Draft(sys::CUgraph);

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: owned, destroyed once; child graphs and bodies go with it.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

/// A stream that is being captured, by the thread that began it. Dropping it there gives up: the stream works as before, and
/// nothing of the graph is left. The driver lets no other thread end it: dropped on one, it leaves the stream capturing, and
/// the graph as long as the process, since the driver goes on writing to it.
#[derive(Debug)]
pub struct Capture {
    stream: Stream,
    device: &'static Device,
    /// The graph around the body; `None` where the stream makes the graph itself.
    around: Option<Loop>,
    /// The driver has not been told to end.
    open: bool,
    /// Buffers that the work uses know the graph by it.
    alive: Alive,
    // Last: the next capture begins when nothing of this one is left.
    _turn: Turn,
}

// SAFETY: handles of the driver, which locks them. The driver wants the capture ended by the thread that began it: another
// gets its error, and `end` then lets the loop's graph be.
unsafe impl Send for Capture {}

/// A graph whose only node runs its body while a condition holds.
#[derive(Debug)]
struct Loop {
    graph: Draft,
    /// Part of `graph`.
    body: sys::CUgraph,
    handle: u64,
}

impl Capture {
    /// Begin to capture what is put on `stream`, which is not the legacy default stream.
    ///
    /// # Errors
    /// [`Error::GraphCapture`] for a stream that cannot be captured, or is.
    pub fn of_stream(device: &'static Device, stream: Stream, turn: Turn) -> Result<Self> {
        let _current = device.enter()?;
        // SAFETY: the stream lives by its own contract.
        let begun = unsafe { sys::cuStreamBeginCapture_v2(stream.handle(), MODE).result() };
        named("cuStreamBeginCapture", begun).map_err(of_capture)?;
        let alive = opened(device, Place::Child);
        Ok(Self { stream, device, around: None, open: true, alive, _turn: turn })
    }

    /// Begin to capture the body of a loop: its work runs until the condition of [`handle`](Self::handle) is 0, which is 1
    /// at each launch's start.
    ///
    /// # Errors
    /// As [`of_stream`](Self::of_stream).
    pub fn of_loop(device: &'static Device, stream: Stream, turn: Turn) -> Result<Self> {
        let _current = device.enter()?;
        let around = Loop::new().map_err(of_capture)?;
        // SAFETY: the stream lives by its own contract, the body as long as the graph around it; it has no nodes to depend on.
        let begun = unsafe {
            sys::cuStreamBeginCaptureToGraph(stream.handle(), around.body, ptr::null(), ptr::null(), 0, MODE).result()
        };
        named("cuStreamBeginCaptureToGraph", begun).map_err(of_capture)?;
        let alive = opened(device, Place::Body);
        Ok(Self { stream, device, around: Some(around), open: true, alive, _turn: turn })
    }

    /// The loop's condition, which the last kernel of the body sets by `cudaGraphSetConditional`; `None` without a loop.
    pub fn handle(&self) -> Option<u64> {
        self.around.as_ref().map(|around| around.handle)
    }

    /// Make the graph of the work that was put on the stream. `held` is kept until its last launch has finished.
    ///
    /// # Errors
    /// [`Error::GraphCapture`] where the work broke the capture, left another stream of it unjoined, or holds a node that
    /// may not be there; on another thread than the one that began it.
    pub fn finish(mut self, held: Held) -> Result<Graph> {
        let device = self.device;
        let _current = device.enter()?;
        let captured = self.end();
        let (graph, body) = match self.around.take() {
            Some(around) => {
                captured?;
                let body = around.body;
                (around.graph, Some(body))
            }
            None => (captured?, None),
        };
        let counts = match body {
            Some(body) => {
                let mut counts = nodes::inspect(body, Place::Body, Place::Body.root(), "cuGraphGetNodes")?;
                *counts.entry("conditional").or_default() += 1;
                counts
            }
            None => nodes::inspect(graph.0, Place::Top, Place::Top.root(), "cuGraphGetNodes")?,
        };
        instantiate(&graph, body, counts, device, held, self.alive.clone())
    }

    /// End the capture: the graph that the stream made, null in a loop.
    fn end(&mut self) -> Result<Draft> {
        self.open = false;
        OPEN.set(None);
        capture_into(None);
        let mut graph = ptr::null_mut();
        // SAFETY: begun by the constructor; `graph` is a valid out pointer.
        let ended = unsafe { sys::cuStreamEndCapture(self.stream.handle(), &mut graph).result() };
        if ended.is_err() && self.stream.is_capturing().unwrap_or(true) {
            // The driver refuses any thread but the one that began, and captures on: into the loop's body, which must not go.
            mem::forget(self.around.take());
        }
        // The body's graph belongs to the one around it.
        let graph = Draft(if self.around.is_some() { ptr::null_mut() } else { graph });
        named("cuStreamEndCapture", ended).map_err(of_capture)?;
        if self.around.is_none() && graph.0.is_null() {
            let why = "the driver gave no graph".into();
            return Err(Error::GraphCapture {
                call: "cuStreamEndCapture",
                node: String::new(),
                path: String::new(),
                why,
            });
        }
        Ok(graph)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if self.open {
            // Without its context the driver refuses, and the stream stays as it is: no caller can act on that.
            let _current = self.device.enter();
            let _ = self.end();
            drop(self.around.take());
        }
    }
}

impl Loop {
    /// A loop without a body, in the current context.
    fn new() -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is a valid out pointer; the flags must be 0.
        named("cuGraphCreate", unsafe { sys::cuGraphCreate(&mut raw, 0).result() })?;
        let graph = Draft(raw);
        let mut context = ptr::null_mut();
        // SAFETY: `context` is a valid out pointer.
        named("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut context).result() })?;
        let mut handle = 0;
        // Without the flag a second launch would begin with the last one's value.
        let assign = sys::CU_GRAPH_COND_ASSIGN_DEFAULT;
        // SAFETY: the graph lives, the context is current; `handle` is a valid out pointer.
        named("cuGraphConditionalHandleCreate", unsafe {
            sys::cuGraphConditionalHandleCreate(&mut handle, graph.0, context, 1, assign).result()
        })?;
        // SAFETY: plain C data, of which all zeros is a value; the fields of the node's type follow.
        let mut params: sys::CUgraphNodeParams = unsafe { std::mem::zeroed() };
        params.type_ = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL;
        params.__bindgen_anon_1.conditional = sys::CUDA_CONDITIONAL_NODE_PARAMS {
            handle,
            type_: sys::CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_WHILE,
            size: 1,
            phGraph_out: ptr::null_mut(),
            ctx: context,
        };
        let mut node = ptr::null_mut();
        // SAFETY: the graph lives; the parameters are those of a conditional node; the node depends on nothing.
        named("cuGraphAddNode", unsafe {
            sys::cuGraphAddNode_v2(&mut node, graph.0, ptr::null(), ptr::null(), 0, &mut params).result()
        })?;
        // SAFETY: the call above made it of this type and wrote the address of its array of bodies.
        let bodies = unsafe { params.__bindgen_anon_1.conditional.phGraph_out };
        if bodies.is_null() {
            return Err(Error::Cuda { call: "cuGraphAddNode", message: "gave no body of the loop".into() });
        }
        // SAFETY: an array of `size` = 1 graph, which lives as long as the node.
        Ok(Self { graph, body: unsafe { *bodies }, handle })
    }
}

/// Make a graph launchable. The caller destroys `graph`: the launched graph is a copy.
fn instantiate(
    graph: &Draft,
    body: Option<sys::CUgraph>,
    counts: NodeCounts,
    device: &'static Device,
    held: Held,
    alive: Alive,
) -> Result<Graph> {
    let _relaxed = Relaxed::enter()?;
    let end = RawEvent::new(false)?;
    // SAFETY: plain C data, of which all zeros is a value: no flags, no upload.
    let mut params: sys::CUDA_GRAPH_INSTANTIATE_PARAMS = unsafe { std::mem::zeroed() };
    let mut exec = ptr::null_mut();
    // SAFETY: a graph that was captured whole; both out pointers are valid.
    let made = unsafe { sys::cuGraphInstantiateWithParams(&mut exec, graph.0, &mut params).result() };
    named("cuGraphInstantiate", made).map_err(|error| {
        let bad = params.hErrNode_out;
        let inside = body.and_then(|body| nodes::locate(body, bad, Place::Body));
        match (of_capture(error), inside.or_else(|| nodes::locate(graph.0, bad, Place::Top))) {
            (Error::GraphCapture { call, why, .. }, Some((node, path))) => {
                let why = format!("{node} at {path}: {why}");
                Error::GraphCapture { call, node: node.into(), path, why }
            }
            (error, _) => error,
        }
    })?;
    Ok(Graph::new(Exec { raw: exec, _alive: alive }, end, counts, device, held))
}

/// Add another owner's graph to the stream that this thread's [`Capture`] captures, behind the work that is there: the
/// driver copies it. The holder of the graph that is being made keeps the memory that its nodes point at.
///
/// # Safety
/// `raw` is a `CUgraph` that lives through the call and that nobody changes meanwhile.
///
/// # Errors
/// [`Error::GraphCapture`] where this thread captures nothing or not this stream, and for a node that no child graph may hold.
pub unsafe fn add_child(stream: Stream, raw: usize) -> Result<()> {
    let child = raw as sys::CUgraph;
    let refuse = |call, why: &str| {
        Err(Error::GraphCapture { call, node: String::new(), path: String::new(), why: why.to_owned() })
    };
    let Some((device, place)) = OPEN.get() else {
        return refuse("cuGraphAddChildGraphNode", "this thread is capturing no graph of specrs");
    };
    let _current = device.enter()?;
    if child.is_null() {
        return refuse("cuGraphAddChildGraphNode", "the graph is null");
    }
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut id, mut graph, mut count) = (0, ptr::null_mut(), 0);
    let (mut behind, mut edges) = (ptr::null(), ptr::null());
    // SAFETY: every out pointer is valid; the stream lives by its own contract.
    let asked = unsafe {
        let (status, id, graph) = (&raw mut status, &raw mut id, &raw mut graph);
        let (behind, edges, count) = (&raw mut behind, &raw mut edges, &raw mut count);
        sys::cuStreamGetCaptureInfo_v3(stream.handle(), status, id, graph, behind, edges, count).result()
    };
    named("cuStreamGetCaptureInfo", asked).map_err(of_capture)?;
    match status {
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => {}
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => {
            return refuse("cuStreamGetCaptureInfo", "the stream is not being captured");
        }
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED => {
            return refuse("cuStreamGetCaptureInfo", "an earlier call has broken the capture of this stream");
        }
    }
    // The array lasts until the next call on the stream. The child waits for these nodes to end, whatever weaker edges the
    // next node of the stream would have had (`edges`).
    let behind = if count == 0 {
        Vec::new()
    } else {
        // SAFETY: the driver gave an array of `count` nodes, which stays until the next call on the stream.
        unsafe { slice::from_raw_parts(behind, count) }.to_vec()
    };
    // Checked before the driver, whose error would name no node.
    let path = format!("{} / {} graph", place.root(), nodes::count(graph)?);
    nodes::inspect(child, place, &path, "cuGraphAddChildGraphNode")?;
    let mut node = ptr::null_mut();
    // SAFETY: the graph under capture lives, the nodes are its own, and the child lives by the caller's promise.
    let added =
        unsafe { sys::cuGraphAddChildGraphNode(&mut node, graph, behind.as_ptr(), behind.len(), child).result() };
    named("cuGraphAddChildGraphNode", added).map_err(of_capture)?;
    let set = sys::CUstreamUpdateCaptureDependencies_flags::CU_STREAM_SET_CAPTURE_DEPENDENCIES;
    // SAFETY: one node of the graph under capture, with an edge of the default kind.
    let updated = unsafe {
        sys::cuStreamUpdateCaptureDependencies_v2(stream.handle(), &mut node, ptr::null(), 1, set as u32).result()
    };
    named("cuStreamUpdateCaptureDependencies", updated).map_err(of_capture)
}
