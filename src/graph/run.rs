//! A graph that can be launched, with everything that its work touches.

use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys;

use super::nodes::NodeCounts;
use super::retire::{self, Exec, Held, Retiring};
use crate::device::{Device, RawEvent, Relaxed, Stream, named};
use crate::error::{Error, Result};

/// State that changes with a launch.
#[derive(Debug)]
struct State {
    /// `None` once it was let go of.
    exec: Option<Exec>,
    /// Event behind the last launch; `None` with `exec`.
    end: Option<RawEvent>,
    /// True if the last launch may be under way and `end` does not say so.
    endless: bool,
    replays: u64,
}

/// Captured work. Launches of one graph follow each other on the device, whatever streams they are on.
pub struct Graph {
    state: Mutex<State>,
    nodes: NodeCounts,
    device: &'static Device,
    /// `None` once it was let go of.
    held: Mutex<Option<Held>>,
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph").field("state", &self.state).field("nodes", &self.nodes).finish_non_exhaustive()
    }
}

impl Graph {
    /// The owner of `exec`, which was instantiated in the context of `device`.
    pub(super) fn new(exec: Exec, end: RawEvent, nodes: NodeCounts, device: &'static Device, held: Held) -> Self {
        let state = State { exec: Some(exec), end: Some(end), endless: false, replays: 0 };
        Self { state: Mutex::new(state), nodes, device, held: Mutex::new(Some(held)) }
    }

    /// Put the captured work on `stream`. Waits for nothing.
    ///
    /// # Errors
    /// [`Error::Cuda`] for what the driver refuses, which may be a fault of earlier work; [`Error::GraphCapture`] on a
    /// stream that is being captured; [`Error::Dead`] for a graph that was let go of.
    pub fn launch(&self, stream: Stream) -> Result<()> {
        let _current = self.device.enter()?;
        if stream.is_capturing()? {
            let why =
                "the stream is being captured, and the end of a captured launch cannot be known; embed the graph that \
                       it was made of as a child node"
                    .into();
            return Err(Error::GraphCapture { call: "cuGraphLaunch", node: String::new(), path: String::new(), why });
        }
        // Held over both calls, so that the event is behind the launch that is counted last.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (Some(exec), Some(end)) = (&state.exec, &state.end) else {
            return Err(Error::Dead { what: "graph", id: String::new(), why: "it was released".into() });
        };
        // SAFETY: instantiated and not destroyed; what its work touches is held until `end` is reached.
        let launched = named("cuGraphLaunch", unsafe { sys::cuGraphLaunch(exec.raw, stream.handle()).result() });
        // The end is recorded behind a refused launch too: it may have begun.
        let marked = Relaxed::enter().and_then(|_relaxed| end.record(stream));
        state.endless |= marked.is_err();
        launched?;
        state.replays += 1;
        marked
    }

    /// Launches so far: the generation of what the graph writes.
    pub fn replays(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).replays
    }

    /// Number of the graph's nodes of each type.
    pub fn nodes(&self) -> &NodeCounts {
        &self.nodes
    }

    /// True if no launch is under way, on the host or on the device; false where that cannot be known.
    pub fn is_idle(&self) -> bool {
        let Ok(state) = self.state.try_lock() else { return false };
        let Some(end) = state.end.as_ref().filter(|_| state.replays > 0 || state.endless) else { return true };
        let reached = || {
            let _relaxed = Relaxed::enter()?;
            let _current = self.device.enter()?;
            end.reached()
        };
        !state.endless && reached().unwrap_or(false)
    }

    /// Run `f` on what the graph holds, unless it was let go of or another thread looks at it.
    pub fn with_held<R>(&self, f: impl FnOnce(&Held) -> R) -> Option<R> {
        self.held.try_lock().ok().and_then(|held| held.as_ref().map(f))
    }

    /// Let go of the graph and of the objects that it holds, as dropping it does: later launches are refused.
    pub fn release(&self) {
        let (exec, end, endless) = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            (state.exec.take(), state.end.take(), state.endless)
        };
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let (Some(exec), Some(end)) = (exec, end) {
            let held = held.unwrap_or_else(|| Box::new(()));
            retire::push(Retiring { exec, end, endless, held, device: self.device });
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.release();
    }
}
