//! A verification's ancestors as a mask over the context: `[n, L + n]` for each request, row-major, in bytes or in
//! bits. Written in runs of ones, over the prefix, and in words of the plan's ancestor bits.

use crate::error::Result;
use crate::plan::Plan;
use crate::plan::formats::index::Index;
use crate::plan::write::slots::{Starts, finish, take};

/// Nodes and keys of live request `i` of a verification.
#[inline(always)]
fn shape_of(plan: &Plan, i: usize) -> (usize, usize, usize) {
    let (first, end) = (plan.qo_indptr()[i] as usize, plan.qo_indptr()[i + 1] as usize);
    (first, end - first, plan.prefix_lens()[i] as usize)
}

/// Write where each request's mask starts, `unit` elements counting as one (8 to a byte of the packed mask, each
/// request rounded up); the callers have compared the last one with the type's range.
pub(super) fn starts<I: Index>(plan: &Plan, unit: u64, out: &mut [I]) {
    let mut sum = 0;
    let mut starts = Starts::new(out);
    for i in 0..plan.live_batch() {
        let (_, n, len) = shape_of(plan, i);
        sum += (n as u64 * (len + n) as u64).div_ceil(unit);
        starts.push(sum);
    }
    starts.end(sum);
}

/// The mask of each request, `[n, L + n]` bytes, row-major: 1 over the prefix, then the ancestors.
#[inline(always)]
pub(super) fn in_bytes(plan: &Plan, out: &mut [u8]) -> Result<()> {
    const WHAT: &str = "custom_mask";
    let w = plan.mask_words() as usize;
    let mut rest = out;
    for i in 0..plan.live_batch() {
        let (first, n, len) = shape_of(plan, i);
        for q in first..first + n {
            let (prefix, own) = take(WHAT, &mut rest, len + n)?.split_at_mut(len);
            prefix.fill(1);
            for (own, &word) in own.chunks_mut(64).zip(&plan.mask()[q * w..(q + 1) * w]) {
                let (whole, rest) = own.as_chunks_mut::<8>();
                let bytes = word.to_le_bytes();
                for (eight, &byte) in whole.iter_mut().zip(&bytes) {
                    *eight = spread(byte).to_le_bytes();
                }
                if let Some(&last) = bytes.get(whole.len()) {
                    rest.copy_from_slice(&spread(last).to_le_bytes()[..rest.len()]);
                }
            }
        }
    }
    finish(WHAT, rest)
}

/// Bit b of `byte` as byte b, 0 or 1.
#[inline(always)]
fn spread(byte: u8) -> u64 {
    const LOW: u64 = 0x0101_0101_0101_0101;
    // Byte b keeps its own bit b alone; adding 127 carries any bit into the byte's top one and never further.
    let own = (byte as u64 * LOW) & 0x8040_2010_0804_0201;
    ((own + 0x7F * LOW) >> 7) & LOW
}

/// Write the same mask in bits, the first element in the lowest bit of a byte; each request starts at a byte, and the
/// rest of its last byte is 0.
#[inline(always)]
pub(super) fn in_bits(plan: &Plan, out: &mut [u8]) -> Result<()> {
    const WHAT: &str = "packed_custom_mask";
    let w = plan.mask_words() as usize;
    let mut rest = out;
    for i in 0..plan.live_batch() {
        let (first, n, len) = shape_of(plan, i);
        let mut bits = Bits { out: take(WHAT, &mut rest, (n * (len + n)).div_ceil(8))?, word: 0, used: 0 };
        for q in first..first + n {
            bits.ones(len);
            let mut left = n;
            for &word in &plan.mask()[q * w..(q + 1) * w] {
                bits.push(word, left.min(64) as u32);
                left -= left.min(64);
            }
        }
        bits.end();
    }
    finish(WHAT, rest)
}

/// Writes bits into bytes, the lowest first.
struct Bits<'a> {
    /// Bytes that are not written yet.
    out: &'a mut [u8],
    /// Bits that wait for the rest of their byte; those from `used` on are 0.
    word: u64,
    /// Always below 8.
    used: u32,
}

impl Bits<'_> {
    #[inline(always)]
    fn put(&mut self, bytes: &[u8]) {
        let n = bytes.len().min(self.out.len());
        let (now, later) = std::mem::take(&mut self.out).split_at_mut(n);
        now.copy_from_slice(&bytes[..n]);
        self.out = later;
    }

    /// The lowest `n <= 64` bits of `word`; those above are 0.
    #[inline(always)]
    fn push(&mut self, word: u64, n: u32) {
        let all = (self.word as u128) | (word as u128) << self.used;
        let bits = self.used + n;
        self.put(&all.to_le_bytes()[..(bits / 8) as usize]);
        self.word = (all >> (bits / 8 * 8)) as u64;
        self.used = bits % 8;
    }

    /// `n` ones.
    #[inline(always)]
    fn ones(&mut self, n: usize) {
        let head = n.min((8 - self.used as usize) % 8);
        self.push((1 << head) - 1, head as u32);
        let whole = ((n - head) / 8).min(self.out.len());
        let (now, later) = std::mem::take(&mut self.out).split_at_mut(whole);
        now.fill(0xFF);
        self.out = later;
        let tail = (n - head) % 8;
        self.push((1 << tail) - 1, tail as u32);
    }

    /// The last byte, filled up with zeros.
    #[inline(always)]
    fn end(mut self) {
        if self.used > 0 {
            let last = [self.word as u8];
            self.put(&last);
        }
    }
}
