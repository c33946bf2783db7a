//! Page tables: the arrays of `flash_attention`. Entries behind a row's end are 0.

use crate::plan::form::{self, DRAFT, Step, VERIFY};

/// [`passes`]: everything in one causal pass.
pub const ONE: u32 = 0;
/// [`passes`]: the prefix, and a table of slots.
pub const SLOTS: u32 = 1;
/// [`passes`]: the prefix up to its tail page, and a table of pages.
pub const PAGES: u32 = 2;

/// Division of a step's keys: [`ONE`], [`SLOTS`] or [`PAGES`].
#[inline]
pub fn passes(s: Step) -> u32 {
    if s.phase == VERIFY {
        SLOTS
    } else if s.phase != DRAFT || s.topk == 1 {
        ONE
    } else if s.holey == 0 {
        SLOTS
    } else {
        PAGES
    }
}

/// Tokens that the pass over the prefix (or the only one) reads of a prefix of `prefix` tokens and `keys` keys in all.
#[inline]
pub fn tokens(s: Step, prefix: u32, keys: u32) -> u32 {
    let passes = passes(s);
    if passes == ONE {
        keys
    } else if passes == SLOTS {
        prefix
    } else {
        prefix - form::remainder(s, prefix)
    }
}

/// `cache_seqlens` of a request with `n` queries.
#[inline]
pub fn len_at(s: Step, len: u32, n: u32) -> u32 {
    let own = if s.phase == DRAFT { s.step + 1 } else { n };
    if n == 0 || !form::alive(s, len) { 0 } else { tokens(s, len, len + own) }
}

/// Column `c` of `page_table` of a request with `n` queries.
#[inline]
pub fn page_at(s: Step, len: u32, n: u32, row: &[i32], c: u32) -> i32 {
    if c < form::pages(s, len_at(s, len, n)) { row[c as usize] } else { 0 }
}

/// `expand_cache_seqlens` of a query; `mask` is its own.
#[inline]
pub fn expand_len_at(s: Step, len: u32, mask: &[u64]) -> u32 {
    if !form::alive(s, len) {
        0
    } else if passes(s) == PAGES {
        form::remainder(s, len) + s.step + 1
    } else {
        form::bits(mask, form::mask_words(s))
    }
}

/// Column `c` of `expand_page_table` of query `j`: a slot, or a page of branch `j`.
#[inline]
pub fn expand_at(s: Step, len: u32, row: &[i32], mask: &[u64], j: u32, c: u32) -> i32 {
    let n = expand_len_at(s, len, mask);
    if passes(s) == PAGES {
        let first = form::column(s, form::draft_pos(s, len, j, 0));
        return if c < form::pages(s, n) { row[(first + c) as usize] } else { 0 };
    }
    if c < n { form::row_slot(s, row, form::bit_pos(s, len, form::nth_bit(mask, c))) } else { 0 }
}
