//! Streams and events of this crate's own: order between pieces of work, and the time that they take.
//!
//! Callers of this file, and `graph`, hold an `Entered` guard of the context that the values belong to.

use std::cell::RefCell;
use std::ptr;
use std::sync::{Arc, Weak};

use cudarc::driver::sys;

use super::driver::{Relaxed, Stream, named};
use crate::error::Result;

/// A graph of this crate's own, as long as a launch of it may come or be under way.
pub(crate) type Alive = Arc<()>;

thread_local! {
    /// Capture of this thread, if it goes into a graph of this crate's own.
    static CAPTURING: RefCell<Weak<()>> = const { RefCell::new(Weak::new()) };
}

/// Work that this thread captures from now on is `graph`'s; `None` once it captures no more.
pub(crate) fn capture_into(graph: Option<&Alive>) {
    CAPTURING.set(graph.map_or_else(Weak::new, Arc::downgrade));
}

/// The graph that this thread captures into; `None` if the capture makes another owner's graph.
pub(super) fn capturing_into() -> Option<Weak<()>> {
    CAPTURING.with_borrow(|graph| (graph.strong_count() > 0).then(|| graph.clone()))
}

/// A point in a stream's work.
#[derive(Debug)]
pub(crate) struct RawEvent(sys::CUevent);

// SAFETY: events may be used from any thread; the driver locks them.
unsafe impl Send for RawEvent {}
// SAFETY: as above; the handle never changes.
unsafe impl Sync for RawEvent {}

impl RawEvent {
    /// An event; `timing` makes it slower to record and able to say when it was reached.
    pub(crate) fn new(timing: bool) -> Result<Self> {
        let flag =
            if timing { sys::CUevent_flags::CU_EVENT_DEFAULT } else { sys::CUevent_flags::CU_EVENT_DISABLE_TIMING };
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is a valid out pointer; a context is current (this file's rule).
        named("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flag as u32).result() })?;
        Ok(Self(raw))
    }

    /// Let the event be the present end of `stream`'s work.
    pub(crate) fn record(&self, stream: Stream) -> Result<()> {
        // SAFETY: the event lives; the stream does by its own contract.
        named("cuEventRecord", unsafe { sys::cuEventRecord(self.0, stream.handle()).result() })
    }

    /// True if the stream has got there; true for an event that was never recorded.
    pub(crate) fn reached(&self) -> Result<bool> {
        let _relaxed = Relaxed::enter()?; // in torch's mode, asking would break the capture of any other stream
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => named("cuEventQuery", code.result()).map(|()| true),
        }
    }

    /// Let the host wait until the stream has got there.
    pub(crate) fn wait(&self) -> Result<()> {
        let _relaxed = Relaxed::enter()?;
        // SAFETY: the event lives.
        named("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.0).result() })
    }

    /// Milliseconds from `earlier` to this one; both made with `timing` and reached.
    pub(super) fn milliseconds_since(&self, earlier: &Self) -> Result<f32> {
        let mut ms = 0.0;
        // SAFETY: both live; `ms` is a valid out pointer.
        named("cuEventElapsedTime", unsafe { sys::cuEventElapsedTime_v2(&mut ms, earlier.0, self.0).result() })?;
        Ok(ms)
    }
}

impl Drop for RawEvent {
    fn drop(&mut self) {
        // SAFETY: created once in `new`, destroyed once here; the driver keeps what is still recorded until it is reached.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

impl Stream {
    /// The legacy default stream, which other streams that block wait for.
    pub(super) fn legacy() -> Self {
        // SAFETY: always there, in every context.
        unsafe { Stream::from_raw(0) }
    }

    /// The handle for the driver's calls.
    pub(crate) fn handle(self) -> sys::CUstream {
        self.raw() as sys::CUstream
    }

    /// Let the stream's later work wait for `event`.
    pub(super) fn wait_for(self, event: &RawEvent) -> Result<()> {
        // SAFETY: the event lives; the stream does by its own contract.
        named("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.handle(), event.0, 0).result() })
    }

    /// True if all work of the stream has finished; an error where work of the context has failed. Not for a stream
    /// that is being captured, whose capture the call would break.
    pub(super) fn is_idle(self) -> Result<bool> {
        // SAFETY: the stream lives by its own contract.
        match unsafe { sys::cuStreamQuery(self.handle()) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => named("cuStreamQuery", code.result()).map(|()| true),
        }
    }

    /// True if work put on the stream is being captured into a graph.
    pub(crate) fn is_capturing(self) -> Result<bool> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: `status` is a valid out pointer; the stream lives by its own contract.
        named("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(self.handle(), &mut status).result() })?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }
}

/// A stream of this crate's own, which waits for no other.
#[derive(Debug)]
pub(super) struct OwnStream(Stream);

impl OwnStream {
    pub(super) fn new() -> Result<Self> {
        let mut raw = ptr::null_mut();
        let flag = sys::CUstream_flags::CU_STREAM_NON_BLOCKING;
        // SAFETY: `raw` is a valid out pointer; a context is current (this file's rule).
        named("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flag as u32).result() })?;
        // SAFETY: just created; destroyed when `self` is dropped, whose users hold it.
        Ok(Self(unsafe { Stream::from_raw(raw as usize) }))
    }

    /// The stream, for as long as `self` lives.
    pub(super) fn stream(&self) -> Stream {
        self.0
    }

    /// Let the host wait for all its work.
    pub(super) fn wait(&self) -> Result<()> {
        // SAFETY: the stream lives.
        named("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.0.handle()).result() })
    }

    /// Capture what `work` puts on the stream, to be launched at once and again.
    pub(super) fn record(&self, work: impl FnOnce() -> Result<()>) -> Result<Recording> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives and is not capturing: nobody else has it.
        named("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.0.handle(), mode).result() })?;
        let done = work();
        let mut graph = ptr::null_mut();
        // SAFETY: begun above, on this thread; `graph` is a valid out pointer.
        let ended =
            named("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(self.0.handle(), &mut graph).result() });
        let graph = OwnGraph(graph); // may be null where the capture broke
        done?;
        ended?;
        let mut exec = ptr::null_mut();
        // SAFETY: a graph that was captured whole; `exec` is a valid out pointer.
        named("cuGraphInstantiateWithFlags", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut exec, graph.0, 0).result()
        })?;
        Ok(Recording(exec))
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        // SAFETY: created once in `new`, destroyed once here; the driver finishes what is on it.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.0.handle()) };
    }
}

struct OwnGraph(sys::CUgraph);

impl Drop for OwnGraph {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: owned, destroyed once.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

/// Work that was captured on an [`OwnStream`]. Its owner keeps the memory that it points at until its last launch is
/// done.
#[derive(Debug)]
pub(super) struct Recording(sys::CUgraphExec);

impl Recording {
    /// Put the work on `stream`.
    ///
    /// # Safety
    /// What the captured work reads and writes is there until the launch has finished.
    pub(super) unsafe fn launch(&self, stream: Stream) -> Result<()> {
        // SAFETY: instantiated; the rest is the caller's promise.
        named("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.0, stream.handle()).result() })
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // SAFETY: instantiated once, destroyed once; the driver lets a launch in flight finish.
        let _ = unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}
