//! Slot lists and masks over the context: the arrays of `flashinfer` and `triton`.
//!
//! In a draft or decode step each query has a list, in other phases each request. A start (`kv_indptr`, `mask_indptr`,
//! `packed_mask_indptr`) is the sum of what the lists before it hold.

use crate::plan::form::{self, DECODE, DRAFT, Step};

/// True if each query has a list of its own.
#[inline]
pub fn per_query(s: Step) -> bool {
    s.phase == DRAFT || s.phase == DECODE
}

/// Slots in the list of a query.
#[inline]
pub fn query_len(s: Step, len: u32, mask: &[u64]) -> u32 {
    form::keys(s, len, 0, mask)
}

/// Slot `o` of the list of a query.
#[inline]
pub fn query_slot(s: Step, len: u32, row: &[i32], mask: &[u64], o: u32) -> i32 {
    form::row_slot(s, row, form::key_pos(s, len, mask, o))
}

/// Slots in the list of a request with `n` queries: the prefix, and with `own = 1` the request's own tokens.
#[inline]
pub fn request_len(len: u32, n: u32, own: u32) -> u32 {
    if n == 0 { 0 } else { len + own * n }
}

/// Slot `o` of the list of a request.
#[inline]
pub fn request_slot(s: Step, row: &[i32], o: u32) -> i32 {
    form::row_slot(s, row, o)
}

/// Elements of the mask of a request with `n` nodes: `[n, L + n]`, row-major.
#[inline]
pub fn mask_len(len: u32, n: u32) -> u64 {
    n as u64 * (len as u64 + n as u64)
}

/// Bytes of the same mask with 8 elements in each.
#[inline]
pub fn packed_len(len: u32, n: u32) -> u64 {
    (mask_len(len, n) + 7) >> 3
}

/// Element `e` of the mask of a request. `mask` is that of its nodes, [`form::mask_words`] words each.
#[inline]
pub fn mask_at(s: Step, len: u32, n: u32, mask: &[u64], e: u64) -> u8 {
    let width = len as u64 + n as u64;
    let (j, key) = (e / width, e % width);
    if key < len as u64 {
        return 1;
    }
    let bit = key - len as u64;
    (mask[(j * form::mask_words(s) as u64 + (bit >> 6)) as usize] >> (bit & 63) & 1) as u8
}

/// Byte `x` of the packed mask of a request: the first element lowest, and 0 behind the last.
#[inline]
pub fn packed_at(s: Step, len: u32, n: u32, mask: &[u64], x: u64) -> u8 {
    let mut byte = 0;
    let mut i = 0;
    while i < 8 && x * 8 + i < mask_len(len, n) {
        byte |= mask_at(s, len, n, mask, x * 8 + i) << i;
        i += 1;
    }
    byte
}
