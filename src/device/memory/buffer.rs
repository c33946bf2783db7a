//! Memory that this crate owns: on the device, and pinned on the host.
//!
//! A buffer knows the ends of the work that uses it: each launch says so once ([`DeviceBuffer::used_on`]), behind the
//! launch. When the buffer is dropped its memory goes on its device's list of retired memory and is freed at an
//! allocation that finds that work done. Nothing waits, so a buffer may be dropped anywhere.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::raw::{self, RawMemory};
use super::retire::Retiring;
use crate::device::context::Context;
use crate::device::devices::Device;
use crate::device::driver::{Relaxed, Stream};
use crate::device::stream::{RawEvent, capturing_into};
use crate::device::view::DeviceSlice;
use crate::error::{Error, Result};

/// An allocation and the ends of its uses.
#[derive(Debug)]
struct Block {
    /// `Some` until it is dropped.
    memory: Option<RawMemory>,
    /// For the device.
    address: u64,
    bytes: usize,
    uses: Mutex<Uses>,
    context: Arc<Context>,
}

#[derive(Debug, Default)]
struct Uses {
    /// One event for each stream, by its handle: behind the last use that was told.
    ends: Vec<(usize, RawEvent)>,
    /// Graphs of this crate's own that use it: over once they are gone.
    graphs: Vec<Weak<()>>,
    /// True if a use is in a captured graph of another owner, which no event ends.
    captured: bool,
    /// True if the end of a use could not be marked: nobody knows when that use is over.
    unmarked: bool,
}

impl Block {
    fn new(context: &Arc<Context>, what: &str, bytes: usize, make: fn(usize) -> Result<RawMemory>) -> Result<Self> {
        let _relaxed = Relaxed::enter()?;
        let _current = context.enter()?;
        context.retired().collect(false);
        let memory = match make(bytes) {
            Err(e) if raw::is_out_of_memory(&e) => {
                context.retired().collect(true); // better to wait for work in flight than to give up
                make(bytes).map_err(|e| if raw::is_out_of_memory(&e) { none_left(context, what, bytes) } else { e })?
            }
            made => made?,
        };
        context.retired().allocated(bytes);
        let context = context.clone();
        let mut block = Self { memory: Some(memory), address: 0, bytes, uses: Mutex::default(), context };
        block.address = block.memory.as_ref().map_or(Ok(0), RawMemory::device_address)?;
        Ok(block)
    }

    fn uses(&self) -> MutexGuard<'_, Uses> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remember the end of the work that is on `stream` now. Where that fails, the use counts as one without an end.
    fn used_on(&self, stream: Stream) -> Result<()> {
        let mut uses = self.uses();
        let marked = self.mark(&mut uses, stream);
        uses.unmarked |= marked.is_err();
        marked
    }

    fn mark(&self, uses: &mut Uses, stream: Stream) -> Result<()> {
        let _current = self.context.enter()?;
        if stream.is_capturing()? {
            match capturing_into() {
                Some(graph) if uses.graphs.iter().any(|known| known.ptr_eq(&graph)) => {}
                Some(graph) => uses.graphs.push(graph),
                None => uses.captured = true,
            }
            return Ok(());
        }
        if let Some((_, end)) = uses.ends.iter().find(|(handle, _)| *handle == stream.raw()) {
            return end.record(stream);
        }
        let end = RawEvent::new(false)?;
        end.record(stream)?;
        uses.ends.push((stream.raw(), end));
        Ok(())
    }

    /// True if every use that was told is over.
    fn idle(&self) -> Result<bool> {
        let _current = self.context.enter()?;
        let uses = self.uses();
        if uses.unmarked {
            return Ok(false);
        }
        for (_, end) in &uses.ends {
            if !end.reached()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn wait(&self) -> Result<()> {
        let _current = self.context.enter()?;
        let uses = self.uses();
        if uses.unmarked {
            let message = "the end of a use of the memory could not be marked, so that it cannot be waited for".into();
            return Err(Error::Cuda { call: "cuEventRecord", message });
        }
        uses.ends.iter().try_for_each(|(_, end)| end.wait())
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            let uses = std::mem::take(self.uses.get_mut().unwrap_or_else(PoisonError::into_inner));
            let ends = uses.ends.into_iter().map(|(_, end)| end).collect();
            let (graphs, captured) = (uses.graphs, uses.captured || uses.unmarked);
            self.context.retired().push(Retiring { memory, bytes: self.bytes, uses: ends, graphs, captured });
        }
    }
}

/// The error for an allocation that the device has no room for.
fn none_left(context: &Context, what: &str, bytes: usize) -> Error {
    let have = raw::info().map_or(0, |(free, _)| free);
    let retired = context.retired().bytes();
    let held = if retired > 0 {
        format!("; {retired} bytes wait for graphs that were captured over them")
    } else {
        String::new()
    };
    Error::DeviceMemory {
        what: what.into(),
        device: context.ordinal(),
        need: bytes as u64,
        have,
        hint: format!("other programs and torch's cache count as used{held}"),
    }
}

/// Device memory of fixed size and address.
#[derive(Debug)]
pub struct DeviceBuffer(Block);

impl DeviceBuffer {
    /// Allocate `bytes`, called `what` in errors. The content is undefined. First frees dropped memory of this device
    /// that is no longer in use. May be called while a stream is captured, whose graph knows nothing of it.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] with what is needed and what is free.
    pub fn new(device: &Device, what: &str, bytes: usize) -> Result<Self> {
        Self::in_context(device.context(), what, bytes)
    }

    pub(in crate::device) fn in_context(context: &Arc<Context>, what: &str, bytes: usize) -> Result<Self> {
        Block::new(context, what, bytes, RawMemory::device).map(Self)
    }

    /// Device address; aligned to 256 bytes at least.
    pub fn address(&self) -> u64 {
        self.0.address
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// The driver's number of the device.
    pub fn ordinal(&self) -> i32 {
        self.0.context.ordinal()
    }

    /// The work that is on `stream` now uses the buffer: its memory goes back no sooner than that work has finished.
    /// On a stream that is being captured the use is the graph's: the memory stays until a graph of
    /// [`graph`](crate::graph) is gone, and for somebody else's goes back with [`Device::collect_captured`] alone. So does
    /// memory for which this returned an error, whose work may be under way.
    pub fn used_on(&self, stream: Stream) -> Result<()> {
        self.0.used_on(stream)
    }

    /// Let the later work of `to` wait for the present work of `from`.
    pub(super) fn follow(&self, from: Stream, to: Stream) -> Result<()> {
        if from.raw() == to.raw() {
            return Ok(());
        }
        let _current = self.0.context.enter()?;
        let end = RawEvent::new(false)?;
        end.record(from)?;
        to.wait_for(&end)
    }

    /// [`Self::used_on`] for callers that cannot be told of an error.
    pub(super) fn used_by_consumer(&self, stream: Stream) {
        let _ = self.0.used_on(stream);
    }

    /// View `len` elements of `T` from byte `offset` on.
    ///
    /// # Safety
    /// The buffer lives until the last launch with the view, and [`Self::used_on`] is called behind it.
    pub unsafe fn slice<T>(&self, what: &'static str, offset: usize, len: usize) -> Result<DeviceSlice<T>> {
        let end = len.checked_mul(size_of::<T>()).and_then(|n| n.checked_add(offset));
        if end.is_none_or(|end| end > self.0.bytes) {
            return Err(Error::Capacity {
                what,
                need: (offset as u64).saturating_add((len as u64).saturating_mul(size_of::<T>() as u64)),
                have: self.0.bytes as u64,
                hint: format!("{len} elements of {} bytes from byte {offset} on, in bytes", size_of::<T>()),
            });
        }
        // SAFETY: within the allocation, as just checked; the rest is the caller's promise.
        unsafe { DeviceSlice::from_raw(what, self.0.address + offset as u64, len, self.ordinal()) }
    }

    /// Fill `bytes` from `offset` on with `byte`, on `stream`.
    pub fn fill(&self, offset: usize, bytes: usize, byte: u8, stream: Stream) -> Result<()> {
        self.within("fill", offset, bytes)?;
        let _current = self.0.context.enter()?;
        // SAFETY: within the allocation, which `used_on` keeps until the fill has finished.
        let filled = unsafe { raw::fill(self.0.address + offset as u64, byte, bytes, stream) };
        // The use is told behind a refused call, too: the call may have begun.
        self.used_on(stream).and(filled)
    }

    /// Copy `from`, pinned, to `offset`, on `stream`.
    pub fn upload(&self, offset: usize, from: &PinnedBuffer, bytes: usize, stream: Stream) -> Result<()> {
        self.within("upload", offset, bytes)?;
        from.within("upload", bytes)?;
        let _current = self.0.context.enter()?;
        // SAFETY: both within their allocations; `used_on` keeps both, and `PinnedBuffer::writable` keeps the host from
        // writing, until the copy has finished.
        let copied = unsafe { raw::upload(self.0.address + offset as u64, from.host(), bytes, stream) };
        let told = [self.used_on(stream), from.used_on(stream)];
        told.into_iter().fold(copied, Result::and)
    }

    /// Bytes from `offset` on, once the work on `stream` has finished: the host waits.
    pub fn read(&self, offset: usize, bytes: usize, stream: Stream) -> Result<Vec<u8>> {
        self.within("read", offset, bytes)?;
        let _current = self.0.context.enter()?;
        let mut out = vec![0; bytes];
        let end = RawEvent::new(false)?;
        // SAFETY: both ranges are there until `end` has been waited for.
        let asked = unsafe { raw::download(out.as_mut_ptr(), self.0.address + offset as u64, bytes, stream) };
        // Wait on an error, too: a copy may be under way. Where the wait fails, the copy may come at any time.
        if let Err(error) = end.record(stream).and_then(|()| end.wait()) {
            std::mem::forget(out);
            return Err(error);
        }
        asked.map(|()| out)
    }

    fn within(&self, what: &'static str, offset: usize, bytes: usize) -> Result<()> {
        if offset.checked_add(bytes).is_some_and(|end| end <= self.0.bytes) {
            return Ok(());
        }
        let need = (offset as u64).saturating_add(bytes as u64);
        Err(Error::Capacity { what, need, have: self.0.bytes as u64, hint: format!("{bytes} bytes from {offset} on") })
    }
}

/// Pinned host memory, which the device reads and writes at its own pace.
#[derive(Debug)]
pub struct PinnedBuffer(Block);

impl PinnedBuffer {
    /// Allocate `bytes` of zeros.
    pub fn new(device: &Device, what: &str, bytes: usize) -> Result<Self> {
        Self::in_context(device.context(), what, bytes)
    }

    pub(in crate::device) fn in_context(context: &Arc<Context>, what: &str, bytes: usize) -> Result<Self> {
        let buffer = Self(Block::new(context, what, bytes, RawMemory::pinned)?);
        // SAFETY: freshly allocated, `bytes` long, not yet known to the device.
        unsafe { buffer.host().write_bytes(0, bytes) };
        Ok(buffer)
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// Address for kernels that read it where it is.
    pub fn device_address(&self) -> u64 {
        self.0.address
    }

    /// The work that is on `stream` now reads or writes the buffer.
    pub fn used_on(&self, stream: Stream) -> Result<()> {
        self.0.used_on(stream)
    }

    /// The bytes, to write; `None` while work that was told ([`Self::used_on`]) may still touch them.
    pub fn writable(&mut self) -> Result<Option<&mut [u8]>> {
        if !self.0.idle()? {
            return Ok(None);
        }
        // SAFETY: `bytes` initialised bytes of our own, no other borrow of them (`&mut self`), and the device is done.
        Ok(Some(unsafe { std::slice::from_raw_parts_mut(self.host(), self.0.bytes) }))
    }

    /// Let the host wait until [`Self::writable`] gives the bytes.
    pub fn wait(&self) -> Result<()> {
        self.0.wait()
    }

    /// Address of the first byte on the host, which stays as long as the buffer.
    pub(in crate::device) fn host(&self) -> *mut u8 {
        match &self.0.memory {
            Some(RawMemory::Pinned(host)) => host.as_ptr(),
            _ => std::ptr::NonNull::dangling().as_ptr(), // reached only once it is dropped
        }
    }

    fn within(&self, what: &'static str, bytes: usize) -> Result<()> {
        if bytes <= self.0.bytes {
            return Ok(());
        }
        let hint = "bytes of pinned memory".into();
        Err(Error::Capacity { what, need: bytes as u64, have: self.0.bytes as u64, hint })
    }
}
