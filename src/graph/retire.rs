//! Graphs that were dropped and may be replaying.
//!
//! Dropping a graph neither waits nor frees: it may happen on any thread, in Python's collector, between a launch and its
//! end. The graph goes on this list with the event behind its last launch and with what it holds, and is destroyed by a
//! later [`collect`] that finds that event reached. At the end of the process the list is left as it is.

use std::any::Any;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;

use super::turn::Turn;
use crate::device::{Alive, Device, RawEvent, Relaxed};
use crate::error::Result;

/// An object that a graph keeps: memory, a module, an object of another language. Any thread may drop it, when it
/// collects dropped graphs.
pub type Held = Box<dyn Any + Send>;

/// An instantiated graph, without its owner, and what tells buffers that it is there.
#[derive(Debug)]
pub(super) struct Exec {
    pub(super) raw: sys::CUgraphExec,
    /// Dropped when nothing of the graph is left.
    pub(super) _alive: Alive,
}

// SAFETY: the driver's calls on an instantiated graph may come from any thread; `Graph` takes care that two never meet.
unsafe impl Send for Exec {}

/// A graph on its way out.
pub(super) struct Retiring {
    pub(super) exec: Exec,
    /// Event behind the last launch.
    pub(super) end: RawEvent,
    /// True if no event says when its last launch is over: it stays for the life of the process.
    pub(super) endless: bool,
    /// Given back after `exec` is destroyed.
    pub(super) held: Held,
    pub(super) device: &'static Device,
}

static LIST: Mutex<Vec<Retiring>> = Mutex::new(Vec::new());

/// Locked for moments only: nothing under it calls back, and nothing under it calls the driver.
fn list() -> MutexGuard<'static, Vec<Retiring>> {
    LIST.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn push(graph: Retiring) {
    list().push(graph);
}

/// Graphs that were dropped and are not destroyed yet.
pub fn waiting() -> usize {
    list().len()
}

/// Destroy the dropped graphs whose last launch has finished, and drop what they held; with `wait`, wait for it. Returns
/// how many. Does nothing on a thread that is capturing: what is dropped may make calls that would break the capture.
pub fn collect(wait: bool) -> Result<usize> {
    if Turn::is_mine() || waiting() == 0 {
        return Ok(0);
    }
    let mut held = Vec::new();
    let (mut pending, all) = (Vec::new(), std::mem::take(&mut *list()));
    for graph in all {
        match over(&graph, wait) {
            Ok(true) => held.push(destroy(graph)),
            // An event that cannot be asked tells nothing, so its graph stays.
            Ok(false) | Err(_) => pending.push(graph),
        }
    }
    list().extend(pending);
    // Memory that is freed here breaks no other owner's capture on this thread.
    let _relaxed = Relaxed::enter();
    Ok(held.into_iter().map(drop).count())
}

fn over(graph: &Retiring, wait: bool) -> Result<bool> {
    if graph.endless {
        return Ok(false);
    }
    let _relaxed = Relaxed::enter()?;
    let _current = graph.device.enter()?;
    if wait {
        graph.end.wait()?;
    }
    graph.end.reached()
}

fn destroy(graph: Retiring) -> Held {
    let Retiring { exec, end, held, device, .. } = graph;
    // Without relaxed mode the driver may refuse, and the graph's own memory would leak: no caller can act on that.
    let _relaxed = Relaxed::enter();
    let _current = device.enter();
    // SAFETY: instantiated once, on this list once, so destroyed once; its last launch is over.
    let _ = unsafe { sys::cuGraphExecDestroy(exec.raw) };
    drop(end);
    held
}
