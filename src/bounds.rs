//! Units as types, limits declared once, and checked arithmetic.
//!
//! A page, a slot and a token count never share a bare integer: adding an element offset to a byte address is the
//! kind of fault this crate exists to rule out.
//!
//! ```
//! use specrs::bounds::{PageId, PageSize, Slot};
//! let p = PageSize::new(16)?;
//! assert_eq!(p.slot(PageId::new(3)?, 5)?, Slot::new(53)?);
//! assert_eq!(p.pages_for(33), 3);
//! # Ok::<(), specrs::Error>(())
//! ```

use crate::error::{Error, Result, in_range};

/// Largest number of branches kept per draft step.
pub const MAX_TOPK: u32 = 64;
/// Largest number of draft steps.
pub const MAX_STEPS: u32 = 64;
/// Largest number of tokens verified per request, root included.
pub const MAX_DRAFT_TOKENS: u32 = 1024;
/// Largest page, in tokens.
pub const MAX_PAGE_SIZE: u32 = 1024;
/// Largest batch.
pub const MAX_BATCH: u32 = 65_536;
/// Largest context, in tokens.
pub const MAX_CONTEXT_LEN: u32 = 1 << 24;

/// A page of the pool. Page 0 is the sink: padded queries write there and nothing reads it as data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct PageId(u32);

impl PageId {
    /// The sink.
    pub const SINK: PageId = PageId(0);

    /// A page index; fits `i32`, since page tables are `i32` on every device.
    pub fn new(id: u32) -> Result<Self> {
        in_range("page id", id, 0, i32::MAX as i128).map(PageId)
    }

    /// The page of a live page-table entry; such entries are `>= 0` by the pool's invariants.
    pub(crate) fn of_table(entry: i32) -> Self {
        PageId(entry as u32)
    }

    /// The index.
    pub fn get(self) -> u32 {
        self.0
    }

    /// The index as page tables hold it.
    pub fn as_i32(self) -> i32 {
        self.0 as i32 // `new` checked that it fits
    }
}

/// An index of one token's KV in the pool: `page * page_size + offset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct Slot(u32);

impl Slot {
    /// Slot 0, in the sink page: where dead queries write.
    pub const SINK: Slot = Slot(0);

    /// A slot index; fits `i32`.
    pub fn new(slot: u32) -> Result<Self> {
        in_range("slot", slot, 0, i32::MAX as i128).map(Slot)
    }

    /// The index.
    pub fn get(self) -> u32 {
        self.0
    }

    /// The index as metadata arrays hold it.
    pub fn as_i32(self) -> i32 {
        self.0 as i32 // `new` checked that it fits
    }
}

/// Tokens per page: a power of two in `1..=MAX_PAGE_SIZE`; 1 by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PageSize {
    /// log2 of the size; always `<= 10`.
    shift: u32,
}

impl PageSize {
    /// Check and wrap a page size in tokens.
    pub fn new(tokens: u32) -> Result<Self> {
        in_range("page_size", tokens, 1, MAX_PAGE_SIZE as i128)?;
        if !tokens.is_power_of_two() {
            return Err(Error::Invalid {
                what: "page_size",
                got: tokens.to_string(),
                why: "must be a power of two".into(),
            });
        }
        Ok(Self { shift: tokens.trailing_zeros() })
    }

    /// The size in tokens.
    pub fn get(self) -> u32 {
        1 << self.shift
    }

    /// Pages that hold `tokens` tokens.
    pub fn pages_for(self, tokens: u32) -> u32 {
        (tokens >> self.shift) + u32::from(self.offset(tokens) != 0)
    }

    /// `tokens` rounded up to whole pages, or an error where that leaves `u32`.
    pub fn round_up(self, tokens: u32) -> Result<u32> {
        mul("tokens rounded up to pages", self.pages_for(tokens), self.get())
    }

    /// Index in a sequence's page list of the page that holds row position `pos`.
    pub fn page_of(self, pos: u32) -> u32 {
        pos >> self.shift
    }

    /// Position within its page.
    pub fn offset(self, pos: u32) -> u32 {
        pos & (self.get() - 1)
    }

    /// First position of the page that holds `pos`.
    pub fn base(self, pos: u32) -> u32 {
        pos - self.offset(pos)
    }

    /// The slot at `offset` of `page`.
    pub fn slot(self, page: PageId, offset: u32) -> Result<Slot> {
        in_range("offset in page", offset, 0, self.get() as i128 - 1)?;
        Slot::new(add("slot", mul("slot", page.get(), self.get())?, offset)?)
    }
}

/// `a + b`, or an error that names the size and both operands.
pub fn add(what: &'static str, a: u32, b: u32) -> Result<u32> {
    a.checked_add(b).ok_or_else(|| overflow(what, format!("{a} + {b}")))
}

/// `a * b`, or an error that names the size and both operands.
pub fn mul(what: &'static str, a: u32, b: u32) -> Result<u32> {
    a.checked_mul(b).ok_or_else(|| overflow(what, format!("{a} * {b}")))
}

/// `v` as an index of an `i32` array, or an error that names the size and its arithmetic.
pub fn fits_i32(what: &'static str, v: u64, expr: impl FnOnce() -> String) -> Result<i32> {
    i32::try_from(v).map_err(|_| Error::Overflow { what, expr: expr(), ty: "int32", limit: i32::MAX as u64 })
}

fn overflow(what: &'static str, expr: String) -> Error {
    Error::Overflow { what, expr, ty: "uint32", limit: u32::MAX as u64 }
}
