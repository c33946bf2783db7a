//! Integers that index the pool or an array.

use crate::plan::Element;

/// Type of an index into the pool or into an array.
pub(in crate::plan) trait Index: Element {
    /// A slot.
    fn of_slot(slot: i32) -> Self;
    /// A sum of sizes that has been compared with the type's range.
    fn of_sum(sum: u64) -> Self;
    /// The index as a position, for reading back; a negative one becomes larger than any.
    fn position(self) -> usize;
    /// The index as a slot, for reading back; an invalid one becomes -1.
    fn slot(self) -> i32;
}

impl Index for i32 {
    #[inline(always)]
    fn of_slot(slot: i32) -> Self {
        slot
    }
    #[inline(always)]
    fn of_sum(sum: u64) -> Self {
        sum as i32
    }
    fn position(self) -> usize {
        usize::try_from(self).unwrap_or(usize::MAX)
    }
    fn slot(self) -> i32 {
        self
    }
}

impl Index for i64 {
    #[inline(always)]
    fn of_slot(slot: i32) -> Self {
        slot as i64
    }
    #[inline(always)]
    fn of_sum(sum: u64) -> Self {
        sum as i64
    }
    fn position(self) -> usize {
        usize::try_from(self).unwrap_or(usize::MAX)
    }
    fn slot(self) -> i32 {
        i32::try_from(self).unwrap_or(-1)
    }
}
