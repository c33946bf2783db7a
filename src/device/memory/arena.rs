//! One allocation with declared regions: the static memory of an engine.
//!
//! A plan takes regions by name; each call returns the region's place. The bytes that the plan counts are the end of its
//! last region, so what counts is what places: there is no second formula. Regions start on 256 bytes, and guarded
//! arenas keep a gap of known bytes around each, which shows whoever wrote beyond one.
//!
//! ```no_run
//! # use specrs::device::{ArenaPlan, Device, Guards, Stream};
//! # fn f(device: &Device, stream: Stream) -> specrs::Result<()> {
//! let mut plan = ArenaPlan::new(Guards::Off);
//! let tokens = plan.take::<i32>("tokens", 64)?;
//! let workspace = plan.take::<u8>("workspace", 1 << 20)?;
//! println!("{} bytes", plan.bytes()); // before the first one is allocated
//! let arena = plan.allocate(device)?;
//! // SAFETY: the arena outlives what is launched with the view.
//! let view = unsafe { arena.slice(tokens) }?;
//! # let _ = (view, workspace, stream);
//! # Ok(()) }
//! ```

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::budget::Budget;
use super::buffer::DeviceBuffer;
use crate::device::devices::Device;
use crate::device::driver::Stream;
use crate::device::view::DeviceSlice;
use crate::error::{Error, Result};

/// Bytes that every region starts on a multiple of: what any kernel and library asks for.
pub const REGION_ALIGN: usize = 256;
/// Bytes of a guard gap.
const GAP: usize = 256;
/// Byte that fills a guard gap.
const CANARY: u8 = 0xA5;
/// Byte that fills a poisoned region: NaN in every float type, -1 in every integer.
const POISON: u8 = 0xFF;

/// Guards of an arena: gaps of known bytes around its regions, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guards {
    /// Regions follow each other.
    Off,
    /// A gap before the first region and behind each.
    On,
}

/// `len` elements of `T` in the arena of the plan that gave it out.
#[derive(Debug)]
pub struct Region<T> {
    plan: u32,
    index: usize,
    len: usize,
    element: PhantomData<fn() -> T>,
}

impl<T> Clone for Region<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Region<T> {}

impl<T> Region<T> {
    /// Elements.
    pub fn len(self) -> usize {
        self.len
    }

    /// The same region as bytes.
    pub fn bytes(self) -> Region<u8> {
        Region { plan: self.plan, index: self.index, len: self.len * size_of::<T>(), element: PhantomData }
    }

    /// True if there are no elements.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }
}

/// A region as the arena keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Placed {
    name: &'static str,
    /// A multiple of [`REGION_ALIGN`].
    offset: usize,
    bytes: usize,
}

/// Regions that are declared and not allocated yet.
#[derive(Debug)]
pub struct ArenaPlan {
    id: u32,
    guards: Guards,
    placed: Vec<Placed>,
    /// One past the last byte, guard gap included; a multiple of [`REGION_ALIGN`].
    end: usize,
}

impl ArenaPlan {
    /// No regions.
    pub fn new(guards: Guards) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let end = if guards == Guards::On { GAP } else { 0 };
        Self { id: NEXT.fetch_add(1, Ordering::Relaxed), guards, placed: Vec::new(), end }
    }

    /// Declare `len` elements of `T`. Names are distinct within a plan: errors and faults tell regions by them.
    ///
    /// # Errors
    /// [`Error::Overflow`] for a size that does not fit; [`Error::Invalid`] for a name that is taken.
    pub fn take<T>(&mut self, name: &'static str, len: usize) -> Result<Region<T>> {
        if self.placed.iter().any(|p| p.name == name) {
            let why = "a region of this name is declared already".into();
            return Err(Error::Invalid { what: "arena region", got: name.into(), why });
        }
        let overflow = || Error::Overflow {
            what: name,
            expr: format!("{} + {len} * {}", self.end, size_of::<T>()),
            ty: "int64",
            limit: i64::MAX as u64,
        };
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(overflow)?;
        let gap = if self.guards == Guards::On { GAP } else { 0 };
        let end = self.end.checked_add(bytes).and_then(|n| n.checked_next_multiple_of(REGION_ALIGN));
        let end = end.and_then(|n| n.checked_add(gap)).filter(|n| *n <= i64::MAX as usize).ok_or_else(overflow)?;
        let region = Region { plan: self.id, index: self.placed.len(), len, element: PhantomData };
        self.placed.push(Placed { name, offset: self.end, bytes });
        self.end = end;
        Ok(region)
    }

    /// Bytes of the allocation.
    pub fn bytes(&self) -> u64 {
        self.end as u64
    }

    /// Add a line to `budget` for each region, and one for the bytes of alignment and guards.
    pub fn add_to(&self, budget: &mut Budget) {
        for p in &self.placed {
            budget.fixed(p.name, p.bytes as u64);
        }
        let taken: usize = self.placed.iter().map(|p| p.bytes).sum();
        budget.fixed("alignment and guards", (self.end - taken) as u64);
    }

    /// Allocate. The content is undefined but for the guards.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn allocate(self, device: &Device) -> Result<Arena> {
        let buffer = Arc::new(DeviceBuffer::new(device, "the arena", self.end)?);
        let arena = Arena { buffer, plan: self };
        let legacy = Stream::legacy();
        for (_, offset, bytes) in arena.gaps() {
            arena.buffer.fill(offset, bytes, CANARY, legacy)?;
        }
        if arena.plan.guards == Guards::On {
            arena.buffer.read(0, 1, legacy)?; // streams that do not wait for the legacy one find the guards in place
        }
        Ok(arena)
    }
}

/// Memory with declared regions; every address stays for the arena's life.
#[derive(Debug)]
pub struct Arena {
    buffer: Arc<DeviceBuffer>,
    plan: ArenaPlan,
}

impl Arena {
    /// Bytes of the allocation.
    pub fn bytes(&self) -> u64 {
        self.plan.bytes()
    }

    /// The memory: its uses are told to it ([`DeviceBuffer::used_on`]).
    pub fn buffer(&self) -> &Arc<DeviceBuffer> {
        &self.buffer
    }

    fn placed<T>(&self, region: Region<T>) -> Result<Placed> {
        if region.plan != self.plan.id {
            return Err(Error::Mismatch {
                operand: "arena region",
                got: "a region of another plan".into(),
                want: "one of the plan that was allocated".into(),
            });
        }
        Ok(self.plan.placed[region.index]) // the plan gave the index out
    }

    /// The region's place.
    ///
    /// # Safety
    /// The arena lives until the last launch with the view, and `buffer().used_on` is called behind it.
    pub unsafe fn slice<T>(&self, region: Region<T>) -> Result<DeviceSlice<T>> {
        let placed = self.placed(region)?;
        // SAFETY: within the allocation; the rest is the caller's promise.
        unsafe { self.buffer.slice(placed.name, placed.offset, region.len) }
    }

    /// Fill a region with bytes that are NaN as floats and -1 as integers, on `stream`: a lane that nobody writes is
    /// seen where it is read.
    pub fn poison<T>(&self, region: Region<T>, stream: Stream) -> Result<()> {
        let placed = self.placed(region)?;
        self.buffer.fill(placed.offset, placed.bytes, POISON, stream)
    }

    /// Fill a region with zeros, on `stream`.
    pub fn zero<T>(&self, region: Region<T>, stream: Stream) -> Result<()> {
        let placed = self.placed(region)?;
        self.buffer.fill(placed.offset, placed.bytes, 0, stream)
    }

    /// Poison every region.
    pub fn poison_all(&self, stream: Stream) -> Result<()> {
        self.plan.placed.iter().try_for_each(|p| self.buffer.fill(p.offset, p.bytes, POISON, stream))
    }

    /// The region's bytes, once the work on `stream` has finished: the host waits.
    pub fn read<T>(&self, region: Region<T>, stream: Stream) -> Result<Vec<u8>> {
        let placed = self.placed(region)?;
        self.buffer.read(placed.offset, placed.bytes, stream)
    }

    /// Check, once the work on `stream` has finished, that nothing was written outside the regions. The host waits, so
    /// this is for tests and for looking for a fault. Without guards, bytes that alignment left over are not checked.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] with the region before the first byte that differs, the byte's index from its start, and the
    /// region's bytes.
    pub fn check_guards(&self, stream: Stream) -> Result<()> {
        for (owner, offset, bytes) in self.gaps() {
            let found = self.buffer.read(offset, bytes, stream)?;
            if let Some(at) = found.iter().position(|b| *b != CANARY) {
                let (name, start, bound) =
                    owner.map_or(("the arena's first guard", 0, 0), |p| (p.name, p.offset, p.bytes));
                return Err(Error::OutOfBounds {
                    kernel: "arena guard",
                    buffer: name,
                    request: -1,
                    step: -1,
                    index: (offset + at - start) as i64,
                    bound: bound as i64,
                });
            }
        }
        Ok(())
    }

    /// `(region before it, offset, bytes)` of everything that no region has, where there are guards.
    fn gaps(&self) -> Vec<(Option<Placed>, usize, usize)> {
        if self.plan.guards == Guards::Off {
            return Vec::new();
        }
        let mut gaps = vec![(None, 0, GAP)];
        let starts = self.plan.placed.iter().skip(1).map(|p| p.offset).chain([self.plan.end]);
        for (p, next) in self.plan.placed.iter().zip(starts) {
            gaps.push((Some(*p), p.offset + p.bytes, next - p.offset - p.bytes));
        }
        gaps
    }

    /// Lend a region to a consumer whose work is on `stream`, and begins behind what `from` has now. The memory stays
    /// until the consumer's work on that stream, as it is when the loan is dropped, has finished.
    ///
    /// # Errors
    /// [`Error::Cuda`] where a stream cannot be made to wait.
    pub fn lend<T>(&self, region: Region<T>, from: Stream, stream: Stream) -> Result<Loan> {
        let placed = self.placed(region)?;
        self.buffer.follow(from, stream)?;
        let address = self.buffer.address() + placed.offset as u64;
        Ok(Loan { buffer: self.buffer.clone(), stream, address, bytes: placed.bytes })
    }
}

/// A region in use by a consumer. Dropping it waits for nothing and may happen on any thread.
#[derive(Debug)]
pub struct Loan {
    buffer: Arc<DeviceBuffer>,
    stream: Stream,
    address: u64,
    bytes: usize,
}

impl Loan {
    /// Device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.buffer.used_by_consumer(self.stream);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regions of a configuration, by the one function that an engine would have.
    fn declare(plan: &mut ArenaPlan, n: usize) -> Result<(Region<i32>, Region<u64>, Region<u8>)> {
        Ok((plan.take("tokens", n)?, plan.take("words", 3 * n)?, plan.take("space", 7)?))
    }

    #[test]
    fn regions_are_aligned_apart_and_counted_as_they_are_placed() {
        for guards in [Guards::Off, Guards::On] {
            for n in [0, 1, 63, 64, 65, 1000] {
                let mut plan = ArenaPlan::new(guards);
                let (tokens, words, space) = declare(&mut plan, n).unwrap();
                assert_eq!((tokens.len(), words.len(), space.len()), (n, 3 * n, 7));
                assert_eq!(tokens.is_empty(), n == 0);
                let gap = if guards == Guards::On { GAP } else { 0 };
                let mut end = gap;
                for (p, bytes) in plan.placed.iter().zip([4 * n, 24 * n, 7]) {
                    assert_eq!((p.offset, p.bytes), (end, bytes));
                    assert!(p.offset.is_multiple_of(REGION_ALIGN));
                    end = (end + bytes).next_multiple_of(REGION_ALIGN) + gap;
                }
                assert_eq!(plan.bytes(), end as u64);
                let mut budget = Budget::new();
                plan.add_to(&mut budget);
                assert_eq!(budget.bytes(), plan.bytes());
            }
        }
    }

    #[test]
    fn what_cannot_be_declared_is_refused() {
        let mut plan = ArenaPlan::new(Guards::On);
        plan.take::<i32>("a", 5).unwrap();
        let text = plan.take::<i32>("a", 5).unwrap_err().to_string();
        assert!(text.contains("arena region = a: a region of this name"), "{text}");
        for len in [usize::MAX, usize::MAX / 8, i64::MAX as usize] {
            let text = plan.take::<u64>("b", len).unwrap_err().to_string();
            assert!(text.contains("b = 768 + ") && text.contains("does not fit int64"), "{text}");
        }
        assert_eq!(plan.bytes(), 768, "a refused region takes nothing");
    }
}
