//! The end of a round: the next state of each seat, and the slot of a ring from which the host reads it.
//!
//! `cuda/round_end.cu` computes on the device, to the bit, the same as [`end_round`] and [`RingLayout::publish`] here.

use crate::bounds::MAX_BATCH;
use crate::error::{Error, Result, in_range, same_length};

/// Bit of [`RoundEnd::exit`]: a live seat is done.
pub const EXIT_DONE: u32 = 1;
/// Bit of [`RoundEnd::exit`]: a seat's target scores were not numbers.
pub const EXIT_NAN: u32 = 2;
/// Bit of [`RoundEnd::exit`]: the draft scores of a seat's root give no distribution.
pub const EXIT_UNSOUND: u32 = 4;
/// Bit of [`RoundEnd::exit`]: an access was skipped and recorded, and the host has not read it yet.
pub const EXIT_FAULT: u32 = 8;
/// Bit of [`RoundEnd::exit`]: the host asked for an end.
pub const EXIT_ASKED: u32 = 16;
/// Bit of [`RoundEnd::exit`]: the rounds of the launch are used up.
pub const EXIT_BUDGET: u32 = 32;

/// Word of a slot: `r` while round `r` writes the slot, `r + 1` once all of it is there (modulo 2^32).
pub const SEQUENCE_AT: usize = 0;
/// Word of a slot: the round's number (modulo 2^32).
pub const ROUND_AT: usize = 1;
/// Word of a slot: live seats.
pub const LIVE_AT: usize = 2;
/// Word of a slot: [`RoundEnd::exit`].
pub const EXIT_AT: usize = 3;
/// Word of a slot: 1 where another round follows in the same launch.
pub const CONTINUES_AT: usize = 4;
/// First of two words of a slot: when the round was published, in nanoseconds of the device's clock, the low word first.
pub const TIME_AT: usize = 6;
/// Words of a slot before the seats' lengths; the words not named above are 0.
pub const HEADER_WORDS: usize = 16;

/// A slot begins at a multiple of so many words: a line of memory, so that no two rounds write the same line.
const SLOT_ALIGN: usize = 32;
/// Words of a vector: a round's results begin at a multiple of so many words within its slot.
const VECTOR: usize = 4;
/// Most slots of a ring.
const MAX_SLOTS: u64 = 1 << 16;
/// Most words of a ring, so that int32 arithmetic on them cannot overflow.
const MAX_WORDS: u64 = 1 << 28;

/// Places of a round's published values in a ring of slots, in words of 4 bytes. Only this type has the arithmetic.
///
/// ```text
/// slot:  header [16] | lens [batch] | depths [batch] | 0..3 unused | found [words] | unused, to a multiple of 32
/// ```
///
/// Round `r` has slot `r % slots`. `lens` and `depths` are the values that the round used, before they advance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingLayout {
    /// Number of slots: a power of two, at least 2.
    slots: usize,
    batch: usize,
    words: usize,
}

impl RingLayout {
    /// A ring of `slots` slots for rounds of `batch` seats whose results take `words` words.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] or [`Error::Invalid`] if `slots` is not a power of two of at least 2, and for sizes that
    /// int32 does not index.
    pub fn new(slots: u64, batch: u64, words: u64) -> Result<Self> {
        in_range("ring slots", slots, 2, MAX_SLOTS.into())?;
        if !slots.is_power_of_two() {
            let why = "must be a power of two, so that round numbers may wrap".into();
            return Err(Error::Invalid { what: "ring slots", got: slots.to_string(), why });
        }
        in_range("ring batch", batch, 1, MAX_BATCH.into())?;
        in_range("ring words", words, 0, MAX_WORDS.into())?;
        let layout = Self { slots: slots as usize, batch: batch as usize, words: words as usize };
        in_range("words of a ring", layout.ring_words() as u64, 1, MAX_WORDS.into())?;
        Ok(layout)
    }

    /// Slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Seats.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Words of a round's results.
    pub fn words(&self) -> usize {
        self.words
    }

    /// First word of the lengths.
    pub fn lens_at(&self) -> usize {
        HEADER_WORDS
    }

    /// First word of the depths.
    pub fn depths_at(&self) -> usize {
        HEADER_WORDS + self.batch
    }

    /// First word of the round's results.
    pub fn found_at(&self) -> usize {
        (HEADER_WORDS + 2 * self.batch).next_multiple_of(VECTOR)
    }

    /// Words from the beginning of a slot to that of the next.
    pub fn slot_words(&self) -> usize {
        (self.found_at() + self.words).next_multiple_of(SLOT_ALIGN)
    }

    /// Words of all slots.
    pub fn ring_words(&self) -> usize {
        self.slots * self.slot_words()
    }

    /// The slot of a round.
    pub fn slot(&self, round: u64) -> usize {
        (round % self.slots as u64) as usize
    }

    /// Write all of round `round` into its slot of `ring`, and mark the next slot as being written.
    ///
    /// `lens` and `depths` are the values before [`end_round`]. The time stays 0, since there is no device with a
    /// clock.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for arrays of other lengths.
    pub fn publish(
        &self,
        ring: &mut [i32],
        round: u32,
        end: &RoundEnd,
        [lens, depths]: [&[i32]; 2],
        found: &[i32],
    ) -> Result<()> {
        same_length("ring", ring.len(), self.ring_words())?;
        same_length("lens", lens.len(), self.batch)?;
        same_length("depths", depths.len(), self.batch)?;
        same_length("found", found.len(), self.words)?;
        let words = self.slot_words();
        let next = round.wrapping_add(1);
        ring[self.slot(next.into()) * words + SEQUENCE_AT] = next as i32;
        let slot = &mut ring[self.slot(round.into()) * words..][..words];
        slot[..HEADER_WORDS].fill(0);
        slot[SEQUENCE_AT] = next as i32;
        slot[ROUND_AT] = round as i32;
        slot[LIVE_AT] = end.live;
        slot[EXIT_AT] = end.exit as i32;
        slot[CONTINUES_AT] = i32::from(end.continues);
        slot[self.lens_at()..][..self.batch].copy_from_slice(lens);
        slot[self.depths_at()..][..self.batch].copy_from_slice(depths);
        slot[self.found_at()..][..self.words].copy_from_slice(found);
        Ok(())
    }
}

/// State of a round, by the sequence word of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotState {
    /// The round has not ended.
    Ahead,
    /// The slot holds all of the round.
    Whole,
    /// This later round has begun to write the slot.
    Overwritten(u64),
}

impl RingLayout {
    /// The state of `round`, by the sequence word `sequence` of its slot. The word counts modulo 2^32, so it tells
    /// apart only rounds that are fewer than 2^31 from each other.
    pub fn state(&self, round: u64, sequence: u32) -> SlotState {
        let behind = sequence.wrapping_sub((round as u32).wrapping_add(1)) as i32;
        match behind {
            0 => SlotState::Whole,
            ..0 => SlotState::Ahead,
            _ => {
                // While a slot is being written, its word is the round's number; once it is complete, its word is the
                // number plus 1.
                let past = 1 + behind as u64;
                SlotState::Overwritten(round + past - past % self.slots as u64)
            }
        }
    }
}

/// Results of verification for each seat.
#[derive(Debug, Clone, Copy)]
pub struct RoundFound<'a> {
    /// First entry of each seat in `tokens`, then the end of the last seat's entries: `[batch + 1]`.
    pub offsets: &'a [i32],
    /// Tokens drawn along each accepted path; a seat's last is its new root.
    pub tokens: &'a [i32],
    /// Committed length including the accepted nodes: `[batch]`.
    pub new_lens: &'a [i32],
    /// The new root: `[batch]`.
    pub roots: &'a [i32],
    /// Not 0 if the target's scores were not numbers: `[batch]`.
    pub faults: &'a [i32],
    /// Sound draft steps, 0 if the root's draft scores give no distribution: `[batch]`; read only for seats that draft.
    pub sound: &'a [i32],
    /// Live seats.
    pub live: i32,
}

/// Limits under which requests are decoded, which no round changes.
#[derive(Debug, Clone, Copy)]
pub struct SeatLimits<'a> {
    /// Committed length at which the request ends: `[batch]`.
    pub limits: &'a [i32],
    /// Deepest level of drafts that is wanted: `[batch]`.
    pub caps: &'a [i32],
    /// Tokens that end a request, with equally many places for each seat: `[batch * places]`.
    pub stops: &'a [i32],
    /// Number of places that each seat uses: `[batch]`.
    pub stop_counts: &'a [i32],
}

/// State at a round's beginning, `[batch]` each; the round's end turns it into the state at the next round's beginning.
#[derive(Debug)]
pub struct SeatState<'a> {
    /// Committed lengths.
    pub lens: &'a mut [i32],
    /// Tokens of the roots.
    pub roots: &'a mut [i32],
    /// Levels of drafts of each seat; 0 if it does not draft.
    pub depths: &'a mut [i32],
    /// Not 0 for a seat that has ended and only repeats its root.
    pub done: &'a mut [i32],
}

/// Other conditions on which another round follows.
#[derive(Debug, Clone, Copy, Default)]
pub struct Signals {
    /// The host asks for an end.
    pub asked: bool,
    /// A skipped access was recorded before, and the host has not read the record yet.
    pub recorded: bool,
    /// Rounds that this launch had left before this one; `None` for a launch of one round.
    pub left: Option<i32>,
}

/// Decisions of [`end_round`].
#[derive(Debug, Clone, PartialEq)]
pub struct RoundEnd {
    /// Live seats, within the batch.
    pub live: i32,
    /// Reasons why no further round should follow: `EXIT_` bits, 0 for no reason.
    pub exit: u32,
    /// True if another round follows in the same launch.
    pub continues: bool,
    /// Rounds that the launch has left.
    pub left: Option<i32>,
    /// Errors of the seats whose numbers were refused: [`Error::OutOfBounds`]. These seats are done.
    pub refused: Vec<Error>,
}

/// Advance each live seat by the results of verification, or end it.
///
/// A live seat that is not done and has no fault advances: it gets its new length, its new root, and as many levels of
/// drafts as are wanted and fit before its limit. A seat becomes done, and keeps length and root, if a token of its
/// path ends it, if its new length reaches the limit, if the target's scores were not numbers, or if its own numbers
/// make no sense. A seat that is done drafts nothing. Dead seats stay as they are.
///
/// # Errors
/// [`Error::Mismatch`] for arrays of other lengths; nothing has changed then.
pub fn end_round(
    found: &RoundFound<'_>,
    limits: &SeatLimits<'_>,
    state: &mut SeatState<'_>,
    signals: Signals,
) -> Result<RoundEnd> {
    let batch = state.lens.len();
    same_length("offsets", found.offsets.len(), batch + 1)?;
    let arrays = [
        ("new_lens", found.new_lens),
        ("roots_found", found.roots),
        ("faults", found.faults),
        ("sound", found.sound),
        ("limits", limits.limits),
        ("caps", limits.caps),
        ("stop_counts", limits.stop_counts),
        ("roots", state.roots),
        ("depths", state.depths),
        ("done", state.done),
    ];
    arrays.iter().try_for_each(|(what, array)| same_length(what, array.len(), batch))?;
    let places = limits.stops.len().checked_div(batch).unwrap_or(0);
    same_length("stops", limits.stops.len(), places * batch)?;

    let (mut exit, mut refused) = (0, Vec::new());
    if found.live < 0 || found.live as usize > batch {
        refused.push(outside("live", -1, found.live.into(), batch as i64 + 1));
    }
    let live = found.live.clamp(0, batch as i32) as usize;
    for seat in 0..live {
        if state.done[seat] != 0 {
            exit |= EXIT_DONE;
            state.depths[seat] = 0;
            continue;
        }
        if state.depths[seat] > 0 && found.sound[seat] == 0 {
            exit |= EXIT_UNSOUND;
        }
        let ends = if found.faults[seat] != 0 {
            exit |= EXIT_NAN;
            true
        } else {
            match entries(found, limits, state, seat, places) {
                Ok(tokens) => {
                    let stops = &limits.stops[seat * places..][..limits.stop_counts[seat] as usize];
                    tokens.iter().any(|t| stops.contains(t)) || found.new_lens[seat] >= limits.limits[seat]
                }
                Err(error) => {
                    refused.push(error);
                    true
                }
            }
        };
        if ends {
            exit |= EXIT_DONE;
            state.done[seat] = 1;
            state.depths[seat] = 0;
        } else {
            state.lens[seat] = found.new_lens[seat];
            state.roots[seat] = found.roots[seat];
            // The new length is at least 1 and less than the limit.
            state.depths[seat] = limits.caps[seat].min(limits.limits[seat] - found.new_lens[seat] - 1).max(0);
        }
    }
    if signals.recorded || !refused.is_empty() {
        exit |= EXIT_FAULT;
    }
    if signals.asked {
        exit |= EXIT_ASKED;
    }
    let left = signals.left.map(|left| left.max(1) - 1);
    if left == Some(0) {
        exit |= EXIT_BUDGET;
    }
    Ok(RoundEnd { live: live as i32, exit, continues: left.is_some() && exit == 0, left, refused })
}

/// The tokens of a seat's path, if its numbers make sense.
fn entries<'a>(
    found: &RoundFound<'a>,
    limits: &SeatLimits<'_>,
    state: &SeatState<'_>,
    seat: usize,
    places: usize,
) -> Result<&'a [i32]> {
    let (begin, end, capacity) = (found.offsets[seat], found.offsets[seat + 1], found.tokens.len() as i64);
    if begin < 0 || i64::from(begin) > capacity || end < 0 || i64::from(end) > capacity {
        let index = if begin < 0 || i64::from(begin) > capacity { begin } else { end };
        return Err(outside("accepted path", seat as i64, index.into(), capacity + 1));
    }
    if end <= begin {
        return Err(outside("offsets (decreasing)", seat as i64, end.into(), capacity + 1));
    }
    let (len, new_len) = (state.lens[seat], found.new_lens[seat]);
    let want = i64::from(len) + i64::from(end - begin);
    if len < 0 || i64::from(new_len) != want {
        let index = if len < 0 { len } else { new_len };
        return Err(outside("new lengths (length plus accepted nodes)", seat as i64, index.into(), want + 1));
    }
    let stops = limits.stop_counts[seat];
    if stops < 0 || stops as usize > places {
        return Err(outside("stop tokens", seat as i64, stops.into(), places as i64 + 1));
    }
    Ok(&found.tokens[begin as usize..end as usize])
}

fn outside(buffer: &'static str, request: i64, index: i64, bound: i64) -> Error {
    Error::OutOfBounds { kernel: "round_end", buffer, request, step: -1, index, bound }
}
