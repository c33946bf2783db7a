//! The ledger: who owns each page, the free list, and a ring of the last events. Always on.
//!
//! Every page movement of the pool goes through the functions of this file, so that the reference counts, the free
//! list and the history can't part ways. One record of 16 bytes a page and one event of 16 bytes a movement keep
//! the price at a few nanoseconds.

use std::fmt;

use crate::error::{Error, Result};
use crate::pool::SeqId;

/// What an event did to its page.
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
    fn from_bits(bits: u32) -> Self {
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

/// On whose behalf a page moved.
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

    fn pack(self) -> (u32, u32) {
        match self {
            Owner::Sequence { row, generation } => (row, generation),
            Owner::Raw => (RAW_ROW, 0),
            Owner::Cache => (CACHE_ROW, 0),
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
    /// What happened.
    pub kind: EventKind,
    /// On whose behalf.
    pub owner: Owner,
    /// Owners of the page afterwards; counts above 2^24 - 1 are stored as that.
    pub refs: u32,
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} {} by {} -> {} owner(s)", self.serial, self.kind.name(), self.owner, self.refs)
    }
}

/// An [`Event`] in the ring; its serial follows from its place.
#[derive(Debug, Clone, Copy, Default)]
struct Packed {
    page: u32,
    row: u32,
    generation: u32,
    /// Kind in the top 8 bits (0: never written), owners afterwards in the rest.
    kind_refs: u32,
}

/// What the ledger knows of a page.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PageRec {
    /// Owners; 0 exactly for the pages on the free list (and the sink, which nobody owns).
    pub(super) refs: u32,
    /// Owners that are raw callers; `<= refs`.
    pub(super) raw: u32,
    /// Cache node that owns the page, plus 1; 0 for none.
    pub(super) node: u32,
    /// Serial of the page's last event, low 32 bits.
    last: u32,
}

/// Reference counts, free list and history. Page 0, the sink, is never on the free list and has no owner.
#[derive(Debug)]
pub(super) struct Ledger {
    /// Indexed by page.
    pub(super) recs: Vec<PageRec>,
    /// Free pages, the next one to be taken last. Never has duplicates; every page in it has `refs == 0`.
    pub(super) free: Vec<u32>,
    ring: Vec<Packed>,
    /// `ring.len() - 1`; the length is a power of two.
    mask: u64,
    /// Events so far.
    serial: u64,
    /// Cache nodes whose page went from one owner (the cache) to two, since the cache was last told.
    pub(super) pinned: Vec<u32>,
    /// Cache nodes whose page went from two owners to one (the cache), since the cache was last told.
    pub(super) unpinned: Vec<u32>,
}

/// How many events of a page an error prints.
const PRINTED_EVENTS: usize = 8;

impl Ledger {
    /// `num_pages` with the sink; `events` is rounded up to a power of two.
    pub(super) fn new(num_pages: u32, events: u32) -> Self {
        let len = (events.max(2) as usize).next_power_of_two();
        Self {
            recs: vec![PageRec::default(); num_pages as usize],
            free: (1..num_pages).rev().collect(), // page 1 first
            ring: vec![Packed::default(); len],
            mask: len as u64 - 1,
            serial: 0,
            pinned: Vec::new(),
            unpinned: Vec::new(),
        }
    }

    pub(super) fn free_len(&self) -> u32 {
        self.free.len() as u32 // at most num_pages, a u32
    }

    pub(super) fn events(&self) -> u64 {
        self.serial
    }

    #[inline]
    fn note(&mut self, page: u32, kind: EventKind, (row, generation): (u32, u32), refs: u32) -> u32 {
        let at = (self.serial & self.mask) as usize;
        self.ring[at] = Packed { page, row, generation, kind_refs: (kind as u32) << 24 | refs.min(0xff_ffff) };
        let serial = self.serial as u32;
        self.serial += 1;
        serial
    }

    /// Take `dst.len()` pages from the free list into `dst`, each with one owner. All or nothing.
    ///
    /// The caller has made sure that there are enough; a shortage here is a fault of the pool's own accounting.
    #[inline]
    pub(super) fn take_into(&mut self, dst: &mut [i32], kind: EventKind, owner: Owner) -> Result<()> {
        let Some(rest) = self.free.len().checked_sub(dst.len()) else {
            return Err(self.short(dst.len()));
        };
        let packed = owner.pack();
        for (d, i) in dst.iter_mut().zip((rest..self.free.len()).rev()) {
            let page = self.free[i];
            let last = self.note(page, kind, packed, 1);
            let rec = &mut self.recs[page as usize];
            rec.refs = 1;
            rec.last = last;
            *d = page as i32; // page ids fit i32: checked when the pool was made
        }
        self.free.truncate(rest);
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
        for col in row.iter_mut().rev() {
            self.drop_ref(*col as u32, owner)?;
            *col = 0;
        }
        Ok(())
    }

    /// Drop one reference; the page goes to the free list with its last owner. Returns the owners that remain.
    #[inline]
    pub(super) fn drop_ref(&mut self, page: u32, owner: Owner) -> Result<u32> {
        match self.recs.get(page as usize).map(|r| r.refs) {
            Some(1) => {
                self.free.push(page);
                let last = self.note(page, EventKind::Free, owner.pack(), 0);
                let rec = &mut self.recs[page as usize];
                rec.refs = 0;
                rec.last = last;
                Ok(0)
            }
            Some(refs @ 2..) => {
                let kind = if owner == Owner::Cache { EventKind::Evict } else { EventKind::Drop };
                let last = self.note(page, kind, owner.pack(), refs - 1);
                let rec = &mut self.recs[page as usize];
                rec.refs = refs - 1;
                rec.last = last;
                if rec.node != 0 && refs == 2 {
                    self.unpinned.push(rec.node - 1);
                }
                Ok(refs - 1)
            }
            _ => Err(self.double_free(page, 0, 1)),
        }
    }

    /// One more owner of a page that has one already.
    #[inline]
    pub(super) fn add_ref(&mut self, page: u32, kind: EventKind, owner: Owner) -> Result<()> {
        let refs = self.recs.get(page as usize).map_or(0, |r| r.refs);
        if refs == 0 || refs == u32::MAX {
            return Err(Error::Audit {
                what: format!("page {page} with {refs} owner(s) can't get another one"),
                history: self.history_text(page),
            });
        }
        let last = self.note(page, kind, owner.pack(), refs + 1);
        let rec = &mut self.recs[page as usize];
        rec.refs = refs + 1;
        rec.last = last;
        if rec.node != 0 && refs == 1 {
            self.pinned.push(rec.node - 1);
        }
        Ok(())
    }

    /// The events of a page that the ring still holds, oldest first. Takes time linear in the ring.
    pub(super) fn history(&self, page: u32) -> Vec<Event> {
        let first = self.serial.saturating_sub(self.mask + 1);
        (first..self.serial)
            .filter_map(|serial| {
                let e = self.ring[(serial & self.mask) as usize];
                (e.page == page && e.kind_refs != 0).then(|| Event {
                    serial,
                    page,
                    kind: EventKind::from_bits(e.kind_refs >> 24),
                    owner: match e.row {
                        RAW_ROW => Owner::Raw,
                        CACHE_ROW => Owner::Cache,
                        row => Owner::Sequence { row, generation: e.generation },
                    },
                    refs: e.kind_refs & 0xff_ffff,
                })
            })
            .collect()
    }

    /// The page's last events for an error message, oldest first.
    pub(super) fn history_text(&self, page: u32) -> String {
        let events = self.history(page);
        if events.is_empty() {
            return match self.recs.get(page as usize).map(|r| r.last) {
                Some(last) if last != 0 => format!("last event #{last} (mod 2^32), no longer in the ring"),
                _ => "no event on record".into(),
            };
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
