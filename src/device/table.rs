//! The page table on the device: a mirror that follows the pool's, in stream order.
//!
//! The pool knows which columns changed since a mirror looked last. The mirror writes them to a slot of a ring of pinned
//! memory while it holds the pool's read access, has the slot copied to the device, and launches one kernel that stores them:
//! behind the work that the stream has, which saw the table of its own plans, and before the next. A slot is written again
//! once its copy has finished. The kernel could read pinned memory itself, but only by reads that wait for one another.
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use specrs::device::{ArenaPlan, Device, Guards, Stream, TableMirror, TableShape};
//! # fn f(pool: &specrs::pool::Pool, device: &'static Device, stream: Stream) -> specrs::Result<()> {
//! let shape = TableShape::of(&pool.config());
//! let mut plan = ArenaPlan::new(Guards::Off);
//! let region = shape.declare(&mut plan)?;
//! let arena = Arc::new(plan.allocate(device)?);
//! let mut mirror = TableMirror::new(device, arena, region, shape, stream)?;
//! // each round, under the read access of its plans:
//! pool.with_tables(|tables| mirror.upload(&tables, stream, |_row| false))??;
//! # Ok(()) }
//! ```

use std::sync::Arc;

use super::devices::Device;
use super::driver::Stream;
use super::kernels::CHANGE_WORDS;
use super::memory::{Arena, ArenaPlan, DeviceBuffer, PinnedBuffer, Region};
use super::view::DeviceSlice;
use crate::error::{Error, Result};
use crate::pool::{ChangeKind, Epoch, PoolConfig, Tables};

/// Slots of the ring: uploads that may be under way at once.
const SLOTS: usize = 4;

/// Rows, columns and page ids of a pool's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableShape {
    /// Rows.
    pub max_seqs: u32,
    /// Columns.
    pub row_pages: u32,
    /// One past the largest page id.
    pub num_pages: u32,
}

impl TableShape {
    /// Shape of a pool's table.
    pub fn of(config: &PoolConfig) -> Self {
        Self { max_seqs: config.max_seqs, row_pages: config.row_pages, num_pages: config.num_pages }
    }

    /// Declare the table's region: `int32[max_seqs, row_pages]`.
    pub fn declare(&self, plan: &mut ArenaPlan) -> Result<Region<i32>> {
        plan.take("page table", self.max_seqs as usize * self.row_pages as usize)
    }

    /// Changes that a slot has heads for: what a round of all rows makes.
    fn slot_changes(&self) -> usize {
        (2 * self.max_seqs as usize).clamp(1, 1024)
    }

    /// Words of a slot: the heads, and page ids for a whole row or some columns of every row.
    fn slot_words(&self) -> usize {
        let ids = (self.row_pages as usize).max(16 * self.max_seqs as usize).clamp(1, 1 << 20);
        self.slot_changes() * CHANGE_WORDS + ids
    }
}

/// Result of an upload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Uploaded {
    /// Columns that were stored.
    pub columns: usize,
    /// Kernels that were launched.
    pub launches: usize,
    /// Times that the host waited for a slot: more uploads were under way than the ring has slots.
    pub waits: usize,
    /// True if nothing was stored, since whole rows must be and rounds in flight permute some of them: upload again
    /// once these have finished and been told to the pool.
    pub rounds_first: bool,
}

/// The mirror; its table's address stays for its life.
#[derive(Debug)]
pub struct TableMirror {
    device: &'static Device,
    arena: Arc<Arena>,
    region: Region<i32>,
    shape: TableShape,
    ring: Vec<PinnedBuffer>,
    /// The last slot that was sent, on the device.
    staged: DeviceBuffer,
    /// The slot that is written next.
    next: usize,
    /// The moment that the mirror has reached; `None` before the first upload.
    epoch: Option<Epoch>,
    /// Version of each row then.
    versions: Vec<u64>,
}

impl TableMirror {
    /// A mirror in `region`, zeroed on `stream`, which is the pool's one stream.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a region of another arena or size; what allocating the ring raises.
    pub fn new(
        device: &'static Device,
        arena: Arc<Arena>,
        region: Region<i32>,
        shape: TableShape,
        stream: Stream,
    ) -> Result<Self> {
        let entries = shape.max_seqs as usize * shape.row_pages as usize;
        if region.len() != entries {
            let (got, want) =
                (region.len().to_string(), format!("{entries}, {} rows of {}", shape.max_seqs, shape.row_pages));
            return Err(Error::Mismatch { operand: "page table region", got, want });
        }
        let ring = (0..SLOTS).map(|_| PinnedBuffer::new(device, "staging of the page table", shape.slot_words() * 4));
        let ring = ring.collect::<Result<_>>()?;
        let staged = DeviceBuffer::new(device, "changes of the page table", shape.slot_words() * 4)?;
        arena.zero(region, stream)?;
        let versions = vec![0; shape.max_seqs as usize];
        Ok(Self { device, arena, region, shape, ring, staged, next: 0, epoch: None, versions })
    }

    /// The table, `int32[max_seqs, row_pages]`; columns that no sequence uses are 0, the sink.
    ///
    /// # Safety
    /// The mirror lives until the last launch with the view has finished.
    pub unsafe fn table(&self) -> Result<DeviceSlice<i32>> {
        // SAFETY: the mirror keeps the arena; the rest is the caller's promise.
        unsafe { self.arena.slice(self.region) }
    }

    /// Version of a row at the last upload: a plan of the row at another version sees another table.
    pub fn version(&self, row: u32) -> Option<u64> {
        self.versions.get(row as usize).copied()
    }

    /// Store what changed since the last upload, on `stream`. `permutes` says of a row whether a round in flight
    /// permutes it on the device: its new order is then there already, and only other changes are stored.
    ///
    /// # Errors
    /// [`Error::Dead`] for the tables of another pool; [`Error::Mismatch`] for a pool of another shape.
    pub fn upload(&mut self, tables: &Tables<'_>, stream: Stream, permutes: impl Fn(u32) -> bool) -> Result<Uploaded> {
        let of =
            TableShape { max_seqs: tables.max_seqs(), row_pages: tables.row_pages(), num_pages: tables.num_pages() };
        if of != self.shape {
            let (got, want) = (format!("{of:?}"), format!("{:?}", self.shape));
            return Err(Error::Mismatch { operand: "pool", got, want });
        }
        let changes = tables.changes(self.epoch)?;
        if changes.whole_rows() && (0..self.shape.max_seqs).any(&permutes) {
            return Ok(Uploaded { rounds_first: true, ..Uploaded::default() });
        }
        let mut done = Uploaded::default();
        let mut slot = Slot::empty(&self.shape);
        for change in changes.iter() {
            if change.kind == ChangeKind::Order && permutes(change.row) {
                continue;
            }
            let (mut first, mut pages) = (change.first, change.pages);
            while !pages.is_empty() {
                let room = slot.room();
                if room == 0 {
                    self.send(&mut slot, stream, &mut done)?;
                    continue;
                }
                let (now, later) = pages.split_at(room.min(pages.len()));
                slot.add(change.row, first, now);
                (first, pages) = (first + now.len() as u32, later);
            }
        }
        self.send(&mut slot, stream, &mut done)?;
        self.epoch = Some(changes.epoch());
        for (row, version) in self.versions.iter_mut().enumerate() {
            *version = tables.version(row as u32).unwrap_or(0);
        }
        Ok(done)
    }

    /// Stage and launch what `slot` has, and empty it.
    fn send(&mut self, slot: &mut Slot, stream: Stream, done: &mut Uploaded) -> Result<()> {
        if slot.changes == 0 {
            return Ok(());
        }
        let pinned = &mut self.ring[self.next];
        self.next = (self.next + 1) % SLOTS;
        if pinned.writable()?.is_none() {
            pinned.wait()?;
            done.waits += 1;
        }
        let Some(bytes) = pinned.writable()? else {
            return Err(Error::Cuda { call: "cuEventQuery", message: "a slot that was waited for is in use".into() });
        };
        let words = &slot.words[..slot.end];
        bytes[..words.len() * 4].copy_from_slice(bytemuck::cast_slice(words));
        let (rows, width) = (self.shape.max_seqs, self.shape.row_pages);
        self.staged.upload(0, pinned, words.len() * 4, stream)?;
        // SAFETY: the buffer and the arena live until `used_on`'s events, of the launch below, have been reached.
        let (staged, table) = unsafe { (self.staged.slice("staged", 0, words.len())?, self.arena.slice(self.region)?) };
        let kernel = &self.device.kernels().table_update;
        let launched = kernel.launch(stream, &table, [rows, width], self.shape.num_pages, &staged, slot.changes as u32);
        let told = [self.staged.used_on(stream), self.arena.buffer().used_on(stream)];
        told.into_iter().fold(launched, Result::and)?;
        done.columns += slot.end - slot.ids;
        done.launches += 1;
        *slot = Slot::empty(&self.shape);
        Ok(())
    }

    /// Treat the device's table as unknown: the next upload stores every row.
    pub fn forget(&mut self) {
        self.epoch = None;
    }

    /// The device's table, once the work on `stream` has finished: the host waits.
    pub fn read(&self, stream: Stream) -> Result<Vec<i32>> {
        let bytes = self.arena.read(self.region, stream)?;
        Ok(bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }
}

/// Content of one slot of the ring: heads from the front, page ids behind the room for all heads.
#[derive(Debug)]
struct Slot {
    words: Vec<i32>,
    changes: usize,
    /// Start of the page ids; `CHANGE_WORDS` times the changes that there is room for.
    ids: usize,
    /// One past the last page id.
    end: usize,
}

impl Slot {
    fn empty(shape: &TableShape) -> Self {
        let ids = shape.slot_changes() * CHANGE_WORDS;
        Self { words: vec![0; shape.slot_words()], changes: 0, ids, end: ids }
    }

    /// Page ids that another change may have.
    fn room(&self) -> usize {
        if self.changes * CHANGE_WORDS < self.ids { self.words.len() - self.end } else { 0 }
    }

    /// Add a change of at most [`Self::room`] columns.
    fn add(&mut self, row: u32, first: u32, pages: &[i32]) {
        let head = [row as i32, first as i32, pages.len() as i32, self.end as i32];
        self.words[self.changes * CHANGE_WORDS..][..CHANGE_WORDS].copy_from_slice(&head);
        self.words[self.end..][..pages.len()].copy_from_slice(pages);
        self.changes += 1;
        self.end += pages.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_holds_what_was_added_and_says_when_it_is_full() {
        for (max_seqs, row_pages) in [(1, 1), (3, 100), (64, 8192), (2000, 4)] {
            let shape = TableShape { max_seqs, row_pages, num_pages: 9 };
            let mut slot = Slot::empty(&shape);
            let (mut added, mut n) = (Vec::new(), 0);
            while slot.room() > 0 {
                let pages: Vec<i32> = (0..slot.room().min(1 + n % 7) as i32).map(|i| i + n as i32).collect();
                slot.add(n as u32, 2 * n as u32, &pages);
                added.push((n as i32, pages));
                n += 1;
            }
            assert_eq!(slot.changes, added.len());
            assert!(slot.end <= slot.words.len() && slot.changes * CHANGE_WORDS <= slot.ids);
            for (change, (row, pages)) in added.iter().enumerate() {
                let head = &slot.words[change * CHANGE_WORDS..][..CHANGE_WORDS];
                assert_eq!((head[0], head[1], head[2]), (*row, 2 * row, pages.len() as i32));
                assert!(head[3] as usize >= slot.ids);
                assert_eq!(&slot.words[head[3] as usize..][..pages.len()], &pages[..]);
            }
        }
    }

    #[test]
    fn a_whole_row_fits_a_slot_unless_it_is_huge() {
        let shape = TableShape { max_seqs: 2, row_pages: 50_000, num_pages: 9 };
        assert!(Slot::empty(&shape).room() >= 50_000);
        let huge = TableShape { max_seqs: 1, row_pages: 1 << 24, num_pages: 9 };
        assert_eq!(Slot::empty(&huge).room(), 1 << 20);
    }
}
