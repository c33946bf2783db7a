//! Moves of KV between slots, in an order that is safe to execute one after the other.

use std::collections::HashMap;

use crate::bounds::Slot;
use crate::error::{Error, Result, in_range, same_length};
use crate::plan::body::{check_length, check_pool, check_version};
use crate::pool::{Lease, Ran, Tables};

/// Copies of one token's KV, in every layer: slot `src[i]` to slot `dst[i]`, for i in order.
///
/// Executed in that order, each move reads what the slot held before the first move, although a destination may be
/// the source of an **earlier** move. Different requests may run in parallel (they share no slot that is written); moves
/// of one request run in order. A kernel may instead read all of a request's sources before it writes any, except where
/// a scratch slot broke a ring: there a later move reads what an earlier one wrote.
///
/// Every slot is a slot of the pool, no destination is the sink or occurs twice.
#[derive(Debug, Clone, Default)]
pub struct Moves {
    src: Vec<i32>,
    dst: Vec<i32>,
    /// Identity of the pool that they were planned for; `None` for moves of raw slots.
    pool: Option<u32>,
    /// Empty for moves of raw slots.
    rows: Vec<MovedRow>,
    /// The caches that they have run over.
    ran: Ran,
}

/// State of a row for which moves were planned.
#[derive(Debug, Clone, Copy)]
struct MovedRow {
    row: i32,
    version: u64,
    /// Tokens that may be committed at most when the moves run.
    committed: u32,
}

impl Moves {
    /// Moves between raw slots of a pool with `num_slots` slots, put into a safe order.
    ///
    /// A ring of moves (a source of each is the destination of another, all around) has no safe order; `scratch`
    /// breaks rings: a slot that is nobody's source or destination, such as one of a page taken for it.
    ///
    /// # Errors
    /// A slot outside the pool, a destination or a needed `scratch` that is the sink, a destination that occurs
    /// twice, a ring without `scratch`, a `scratch` that a move uses.
    pub fn new(src: &[i32], dst: &[i32], num_slots: u32, scratch: Option<Slot>) -> Result<Self> {
        same_length("destination slots", dst.len(), src.len())?;
        let mut move_into = HashMap::with_capacity(dst.len()); // destination -> move
        for (i, (&s, &d)) in src.iter().zip(dst).enumerate() {
            for (buffer, slot, min) in [("source slots", s, 0), ("destination slots", d, 1)] {
                if slot < min || slot as u32 >= num_slots {
                    let (index, bound) = (slot as i64, num_slots as i64);
                    return Err(Error::OutOfBounds {
                        kernel: "kv_move",
                        buffer,
                        request: -1,
                        step: i as i64,
                        index,
                        bound,
                    });
                }
            }
            if let Some(other) = move_into.insert(d, i) {
                let got = format!("slot {d} of moves {other} and {i}");
                return Err(Error::Invalid { what: "destination", got, why: "it may be written once".into() });
            }
        }
        let (readers, done, out) = (HashMap::new(), vec![false; src.len()], Vec::new());
        let mut order = Order { src, dst, num_slots, readers, done, out };
        for (i, (s, d)) in src.iter().zip(dst).enumerate() {
            if s == d {
                order.done[i] = true; // the move has no effect
            } else {
                *order.readers.entry(*s).or_default() += 1;
            }
        }
        order.run(&move_into, scratch)?;
        let (src, dst): (Vec<i32>, Vec<i32>) = order.out.into_iter().unzip();
        Ok(Self { src, dst, ..Self::default() })
    }

    /// The page copies of a lease, token by token: what must be run before anything is written under it, once over each
    /// cache. They are refused once the lease has ended.
    ///
    /// # Errors
    /// [`Error::Dead`] where the lease is of another pool than `tables`.
    pub fn of_lease(lease: &Lease, tables: &Tables<'_>) -> Result<Self> {
        let page = tables.page();
        let (mut src, mut dst) = (Vec::new(), Vec::new());
        for copy in lease.copies() {
            for o in 0..copy.len {
                src.push(page.slot(copy.src, o)?.as_i32());
                dst.push(page.slot(copy.dst, o)?.as_i32());
            }
        }
        let mut rows = Vec::new();
        if !src.is_empty() {
            for &seq in lease.seqs() {
                let row = tables.seq(seq)?;
                rows.push(MovedRow { row: row.row as i32, version: row.version, committed: row.committed });
            }
        }
        // The order is kept: no page that is copied to is copied from.
        let (pool, ran) = (Some(tables.pool()), lease.ran());
        Ok(Self { rows, pool, ran, ..Self::new(&src, &dst, tables.num_pages() * page.get(), None)? })
    }

    /// Moves there are.
    pub fn len(&self) -> usize {
        self.src.len()
    }

    /// True if nothing is to be moved.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Source slots, in order.
    pub fn src(&self) -> &[i32] {
        &self.src
    }

    /// Destination slots, in order.
    pub fn dst(&self) -> &[i32] {
        &self.dst
    }

    /// Refuse the moves over another pool, if a row's pages have changed or its lease has ended since they were planned,
    /// and if more is committed by now than they were planned for.
    ///
    /// # Errors
    /// [`Error::Dead`] with both pools, or the row and what has changed of it.
    pub fn check_rows(&self, tables: &Tables<'_>) -> Result<()> {
        check_pool(tables, "moves", self.pool)?;
        self.rows.iter().try_for_each(|r| {
            check_version(tables, "moves", r.row, r.version)?;
            let committed = tables.row(r.row as u32).map_or(0, |now| now.committed);
            check_length("moves", r.row, r.committed, committed)
        })
    }

    /// Check that the moves may run now ([`Self::check_rows`]) over the KV cache in memory `first..end`, and count them as
    /// run there. Moves of raw slots may run as often as the caller likes.
    ///
    /// # Errors
    /// [`Error::Dead`] as [`Self::check_rows`], and where they have run over this memory.
    pub fn claim(&self, tables: &Tables<'_>, first: u64, end: u64) -> Result<()> {
        self.check_rows(tables)?;
        if self.pool.is_none() { Ok(()) } else { self.ran.over(first, end) }
    }

    /// Begin moves of `pool`, without any.
    pub(super) fn begin(&mut self, pool: u32) {
        self.pool = Some(pool);
        self.src.clear();
        self.dst.clear();
        self.rows.clear();
        self.ran.clear();
    }

    /// Add a move behind the others; the caller answers for the slots and the order.
    pub(super) fn push(&mut self, src: i32, dst: i32) {
        self.src.push(src);
        self.dst.push(dst);
    }

    /// Tie the moves to a version of a row and to a committed length.
    pub(super) fn guard(&mut self, row: i32, version: u64, committed: u32) {
        self.rows.push(MovedRow { row, version, committed });
    }
}

/// Puts moves into an order in which no move writes what a later one reads.
struct Order<'a> {
    src: &'a [i32],
    dst: &'a [i32],
    /// Slots of the pool.
    num_slots: u32,
    /// Moves not yet done that read a slot.
    readers: HashMap<i32, u32>,
    done: Vec<bool>,
    out: Vec<(i32, i32)>,
}

impl Order<'_> {
    fn run(&mut self, move_into: &HashMap<i32, usize>, scratch: Option<Slot>) -> Result<()> {
        let n = self.src.len();
        for i in 0..n {
            self.chain(i, move_into);
        }
        // Only rings are left: every destination is still to be read, by exactly one move.
        for i in 0..n {
            if self.done[i] {
                continue;
            }
            let (s, d) = (self.src[i], self.dst[i]);
            let Some(scratch) = scratch.map(Slot::as_i32) else {
                return Err(Error::Invalid {
                    what: "moves",
                    got: format!("a ring through slots {s} and {d}"),
                    why: "no order is safe; give a scratch slot".into(),
                });
            };
            in_range("scratch slot", scratch, 1, self.num_slots as i128 - 1)?;
            if move_into.contains_key(&scratch) || self.src.contains(&scratch) {
                let got = scratch.to_string();
                return Err(Error::Invalid { what: "scratch slot", got, why: "a move uses it".into() });
            }
            // Save what the first move would overwrite; its reader, the last of the ring, takes it from there.
            self.out.push((d, scratch));
            let mut at = i;
            loop {
                self.done[at] = true;
                let s = self.src[at];
                self.out.push(if s == d { (scratch, self.dst[at]) } else { (s, self.dst[at]) });
                match move_into.get(&s) {
                    Some(&next) if !self.done[next] => at = next,
                    _ => break,
                }
            }
        }
        Ok(())
    }

    /// Do move `i` if no other move is still to read its destination, then the move that this frees, and so on.
    fn chain(&mut self, mut i: usize, move_into: &HashMap<i32, usize>) {
        while !self.done[i] && self.readers.get(&self.dst[i]).is_none_or(|&r| r == 0) {
            self.done[i] = true;
            self.out.push((self.src[i], self.dst[i]));
            if let Some(r) = self.readers.get_mut(&self.src[i]) {
                *r -= 1;
            }
            match move_into.get(&self.src[i]) {
                Some(&next) => i = next,
                None => break,
            }
        }
    }
}
