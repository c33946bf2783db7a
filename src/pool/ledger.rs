//! The ledger: the owners of each page, the free list, and a ring of the last events. Always on.
//!
//! Every page movement of the pool goes through the functions of this file, so that the reference counts, the free
//! list and the history can't part ways. One record of 8 bytes a page and one event of 16 bytes a movement keep
//! the price at a few nanoseconds.

use std::fmt;

use crate::bounds::PageId;
use crate::error::{Error, Result};
use crate::pool::row::SeqId;

/// Effect of an event on its page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum EventKind {
    /// Taken from the free list.
    Alloc = 1,
    /// Taken from the free list as the private copy of a shared tail page.
    Copy = 2,
    /// One more owner.
    Share = 3,
    /// One owner fewer; others remain.
    Drop = 4,
    /// The last owner left; back on the free list.
    Free = 5,
    /// The prefix cache became an owner.
    Cache = 6,
    /// The prefix cache let go of it.
    Evict = 7,
}

impl EventKind {
    fn from_bits(bits: u8) -> Self {
        match bits {
            1 => EventKind::Alloc,
            2 => EventKind::Copy,
            3 => EventKind::Share,
            4 => EventKind::Drop,
            6 => EventKind::Cache,
            7 => EventKind::Evict,
            _ => EventKind::Free,
        }
    }

    fn name(self) -> &'static str {
        match self {
            EventKind::Alloc => "alloc",
            EventKind::Copy => "copy",
            EventKind::Share => "share",
            EventKind::Drop => "drop",
            EventKind::Free => "free",
            EventKind::Cache => "cache",
            EventKind::Evict => "evict",
        }
    }
}

/// Party on whose behalf a page moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Owner {
    /// A sequence: row and generation of its [`SeqId`].
    Sequence {
        /// Row of the page table.
        row: u32,
        /// Generation of that row.
        generation: u32,
    },
    /// A caller of [`alloc_pages`](crate::pool::Pool::alloc_pages), who keeps page ids itself.
    Raw,
    /// The prefix cache.
    Cache,
}

/// Row numbers that no sequence has (rows are below 2^31), for owners that are not sequences.
const RAW_ROW: u32 = u32::MAX;
const CACHE_ROW: u32 = u32::MAX - 1;

impl Owner {
    pub(super) fn of(seq: SeqId) -> Self {
        Owner::Sequence { row: seq.row(), generation: seq.generation() }
    }

    fn pack(self) -> u64 {
        match self {
            Owner::Sequence { row, generation } => u64::from(row) | u64::from(generation) << 32,
            Owner::Raw => RAW_ROW.into(),
            Owner::Cache => CACHE_ROW.into(),
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Owner::Sequence { row, generation } => write!(f, "sequence {row}.{generation}"),
            Owner::Raw => f.write_str("raw pages"),
            Owner::Cache => f.write_str("prefix cache"),
        }
    }
}

/// One movement of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Event {
    /// Position in the pool's whole history, from 0.
    pub serial: u64,
    /// The page.
    pub page: u32,
    /// Effect of the event.
    pub kind: EventKind,
    /// Party on whose behalf the page moved.
    pub owner: Owner,
    /// Owners of the page afterwards; counts above 2^24 - 1 are stored as that.
    pub refs: u32,
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} {} by {} -> {} owner(s)", self.serial, self.kind.name(), self.owner, self.refs)
    }
}

/// An [`Event`] in the ring, in two words that cost one store each; its serial follows from its place.
#[derive(Debug, Clone, Copy, Default)]
struct Packed {
    /// Page in the low half; above it 24 bits of owners afterwards and 8 bits of kind.
    what: u64,
    /// Row in the low half, generation above it.
    who: u64,
}

impl Packed {
    fn new(page: u32, kind: EventKind, refs: u32, who: u64) -> Self {
        let refs = u64::from(refs.min(0xff_ffff));
        Self { what: u64::from(page) | refs << 32 | (kind as u64) << 56, who }
    }

    fn page(self) -> u32 {
        self.what as u32
    }

    fn open(self, serial: u64) -> Event {
        let owner = match self.who as u32 {
            RAW_ROW => Owner::Raw,
            CACHE_ROW => Owner::Cache,
            row => Owner::Sequence { row, generation: (self.who >> 32) as u32 },
        };
        let (kind, refs) = (EventKind::from_bits((self.what >> 56) as u8), (self.what >> 32) as u32 & 0xff_ffff);
        Event { serial, page: self.page(), kind, owner, refs }
    }
}

/// The last events of all pages.
#[derive(Debug)]
struct Ring {
    /// Event with serial n at `n % len`; the length is a power of two.
    events: Vec<Packed>,
    /// Events so far.
    serial: u64,
}

/// Writes the events of one owner. The serial is kept beside the ring, not in it, while a loop writes: then it stays
/// in a register.
struct Pen<'a> {
    events: &'a mut [Packed],
    serial: u64,
    who: u64,
}

impl Ring {
    fn new(events: u32) -> Self {
        let len = (events.max(2) as usize).next_power_of_two();
        Self { events: vec![Packed::default(); len], serial: 0 }
    }

    /// The caller stores the pen's serial back.
    #[inline]
    fn pen(&mut self, owner: Owner) -> Pen<'_> {
        Pen { events: &mut self.events, serial: self.serial, who: owner.pack() }
    }

    /// Events that are still there, oldest first.
    fn iter(&self) -> impl Iterator<Item = (u64, Packed)> + '_ {
        let len = self.events.len() as u64;
        let first = self.serial.saturating_sub(len);
        (first..self.serial).map(move |serial| (serial, self.events[(serial % len) as usize]))
    }
}

impl Pen<'_> {
    #[inline(always)]
    fn note(&mut self, page: u32, kind: EventKind, refs: u32) {
        let at = self.serial as usize & (self.events.len() - 1); // a power of two
        self.events[at] = Packed::new(page, kind, refs, self.who);
        self.serial += 1;
    }
}

/// Record of a page in the ledger.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PageRec {
    /// Owners; 0 exactly for the pages on the free list (and the sink, which nobody owns).
    pub(super) refs: u32,
    /// [`RAW`] for a page whose owners are raw callers, all of them; else the cache node that is one of the owners,
    /// plus 1; else 0.
    pub(super) aux: u32,
}

/// See [`PageRec::aux`]. Never a node: nodes are fewer than pages, and those are below 2^31.
const RAW: u32 = u32::MAX;

impl PageRec {
    /// Owners that are raw callers: all or none of them.
    pub(super) fn raw(self) -> u32 {
        if self.aux == RAW { self.refs } else { 0 }
    }

    /// The cache node that owns the page.
    pub(super) fn node(self) -> Option<u32> {
        if self.aux == RAW { None } else { self.aux.checked_sub(1) }
    }
}

/// Reference counts, free list and history. Page 0, the sink, is never on the free list and has no owner.
#[derive(Debug)]
pub(super) struct Ledger {
    /// Indexed by page.
    pub(super) recs: Vec<PageRec>,
    /// Free pages, the next one to be taken last. Never has duplicates; every page in it has `refs == 0`.
    pub(super) free: Vec<u32>,
    ring: Ring,
    /// Cache nodes whose page went from one owner (the cache) to two, since the cache was last told.
    pub(super) pinned: Vec<u32>,
    /// Cache nodes whose page went from two owners to one (the cache), since the cache was last told.
    pub(super) unpinned: Vec<u32>,
}

/// Number of a page's events that an error prints.
const PRINTED_EVENTS: usize = 8;

impl Ledger {
    /// `num_pages` with the sink; `events` is rounded up to a power of two.
    pub(super) fn new(num_pages: u32, events: u32) -> Self {
        Self {
            recs: vec![PageRec::default(); num_pages as usize],
            free: (1..num_pages).rev().collect(), // page 1 first
            ring: Ring::new(events),
            pinned: Vec::new(),
            unpinned: Vec::new(),
        }
    }

    pub(super) fn free_len(&self) -> u32 {
        self.free.len() as u32 // at most num_pages, a u32
    }

    pub(super) fn events(&self) -> u64 {
        self.ring.serial
    }

    /// Take `dst.len()` pages from the free list, each with one owner, and put them into `dst` as `entry` makes them.
    /// All or nothing.
    ///
    /// The caller has made sure that there are enough; a shortage here is a fault of the pool's own accounting.
    #[inline]
    pub(super) fn take_into<T>(
        &mut self,
        dst: &mut [T],
        kind: EventKind,
        owner: Owner,
        entry: impl Fn(u32) -> T,
    ) -> Result<()> {
        let Some(rest) = self.free.len().checked_sub(dst.len()) else {
            return Err(self.short(dst.len()));
        };
        let Self { recs, free, ring, .. } = self;
        let aux = if owner == Owner::Raw { RAW } else { 0 };
        let mut pen = ring.pen(owner);
        for (d, &page) in dst.iter_mut().zip(free[rest..].iter().rev()) {
            pen.note(page, kind, 1);
            recs[page as usize] = PageRec { refs: 1, aux };
            *d = entry(page);
        }
        ring.serial = pen.serial;
        free.truncate(rest);
        Ok(())
    }

    #[cold]
    fn short(&self, need: usize) -> Error {
        Error::Audit {
            what: format!("{need} pages promised, {} on the free list", self.free.len()),
            history: "the pool's own accounting is wrong".into(),
        }
    }

    /// Drop one reference to each page of `row`, last column first, and zero the columns. Going backwards makes
    /// the next allocation take the same pages in the same order.
    #[inline]
    pub(super) fn give_back(&mut self, row: &mut [i32], owner: Owner) -> Result<()> {
        let Self { recs, free, ring, .. } = self;
        let mut pen = ring.pen(owner);
        // Pages that nobody else has, which are nearly all, go in one piece: a push a page would carry the list's
        // length through memory from page to page.
        let mut alone = row.len();
        for &page in row.iter().rev() {
            let Some(rec) = recs.get_mut(page as usize).filter(|rec| rec.refs == 1) else { break };
            *rec = PageRec::default();
            pen.note(page as u32, EventKind::Free, 0);
            alone -= 1;
        }
        ring.serial = pen.serial;
        let (rest, alone) = row.split_at_mut(alone);
        free.extend(alone.iter().rev().map(|&page| page as u32));
        alone.fill(0);
        if rest.is_empty() {
            return Ok(());
        }
        self.drop_refs(rest.iter_mut().rev().map(|col| std::mem::take(col) as u32), owner)
    }

    /// Drop one reference to a page, which goes to the free list with its last owner.
    pub(super) fn drop_ref(&mut self, page: u32, owner: Owner) -> Result<()> {
        self.drop_refs(std::iter::once(page), owner)
    }

    /// Drop one reference to each page, in this order. The callers have seen that the owner has them; a page without
    /// an owner here is a fault of the pool's own accounting, and what precedes it is dropped.
    #[inline]
    pub(super) fn drop_refs(&mut self, pages: impl Iterator<Item = u32>, owner: Owner) -> Result<()> {
        let Self { recs, free, ring, unpinned, .. } = self;
        let mut pen = ring.pen(owner);
        let mut wrong = None;
        for page in pages {
            let Some(rec) = recs.get_mut(page as usize) else {
                wrong = Some(page);
                break;
            };
            if rec.refs == 1 {
                free.push(page);
                *rec = PageRec::default();
                pen.note(page, EventKind::Free, 0);
            } else if rec.refs > 1 {
                let kind = if owner == Owner::Cache { EventKind::Evict } else { EventKind::Drop };
                rec.refs -= 1;
                pen.note(page, kind, rec.refs);
                if rec.refs == 1 {
                    unpinned.extend(rec.node());
                }
            } else {
                wrong = Some(page);
                break;
            }
        }
        ring.serial = pen.serial;
        wrong.map_or(Ok(()), |page| Err(self.double_free(page, 0, 1)))
    }

    /// Add one owner to a page that has one already.
    #[inline]
    pub(super) fn add_ref(&mut self, page: u32, kind: EventKind, owner: Owner) -> Result<()> {
        let refs = self.recs.get(page as usize).map_or(0, |r| r.refs);
        if refs == 0 || refs == u32::MAX {
            return Err(Error::Audit {
                what: format!("page {page} with {refs} owner(s) can't get another one"),
                history: self.history_text(page),
            });
        }
        let mut pen = self.ring.pen(owner);
        pen.note(page, kind, refs + 1);
        self.ring.serial = pen.serial;
        let rec = &mut self.recs[page as usize];
        rec.refs = refs + 1;
        if refs == 1 {
            self.pinned.extend(rec.node());
        }
        Ok(())
    }

    /// Drop one raw owner of each page. All or nothing: a page given more often than it is owned shows, in one call
    /// too, since the owners come off before anything else happens.
    pub(super) fn free_raw(&mut self, pages: &[PageId]) -> Result<()> {
        for (i, page) in pages.iter().enumerate() {
            match self.recs.get_mut(page.get() as usize) {
                Some(rec) if rec.aux == RAW && rec.refs > 0 => rec.refs -= 1,
                _ => return Err(self.refuse_free(pages, i)),
            }
        }
        let Self { recs, free, ring, .. } = self;
        let mut pen = ring.pen(Owner::Raw);
        for page in pages.iter().rev().map(|p| p.get()) {
            let rec = &mut recs[page as usize];
            if rec.refs == 0 && rec.aux == RAW {
                rec.aux = 0; // given once more in this call, it is not pushed again
                free.push(page);
                pen.note(page, EventKind::Free, 0);
            } else {
                pen.note(page, EventKind::Drop, rec.refs);
            }
        }
        ring.serial = pen.serial;
        Ok(())
    }

    /// Undo the first `done` steps of a free and name the page that can't be freed.
    #[cold]
    fn refuse_free(&mut self, pages: &[PageId], done: usize) -> Error {
        for page in &pages[..done] {
            self.recs[page.get() as usize].refs += 1;
        }
        let page = pages[done].get();
        match self.recs.get(page as usize) {
            Some(rec) => {
                let frees = pages.iter().filter(|p| p.get() == page).count() as u32;
                self.double_free(page, rec.raw(), frees)
            }
            None => {
                let max = self.recs.len() as i128 - 1;
                Error::OutOfRange { what: "page to free", got: page.into(), min: 1, max }
            }
        }
    }

    /// The events of a page that the ring still holds, oldest first. Takes time linear in the ring.
    pub(super) fn history(&self, page: u32) -> Vec<Event> {
        let events = self.ring.iter().filter(|(_, e)| e.page() == page);
        events.map(|(serial, e)| e.open(serial)).collect()
    }

    /// The page's last events for an error message, oldest first.
    pub(super) fn history_text(&self, page: u32) -> String {
        let events = self.history(page);
        if events.is_empty() {
            let (seen, kept) = (self.ring.serial, self.ring.events.len());
            return format!("nothing among the last {kept} of {seen} events");
        }
        let from = events.len().saturating_sub(PRINTED_EVENTS);
        events[from..].iter().map(Event::to_string).collect::<Vec<_>>().join("; ")
    }

    /// The error for a page freed more often than it is owned.
    #[cold]
    pub(super) fn double_free(&self, page: u32, owners: u32, frees: u32) -> Error {
        Error::DoubleFree { page, owners, frees, history: self.history_text(page) }
    }
}
