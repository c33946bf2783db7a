//! The ring by which the host learns the results of rounds: pinned memory that the device writes and the host polls.
//!
//! No call of the driver stands between the end of a round and the host: the last store of a round is its slot's
//! sequence word, and a reader that has read that by an acquire sees the rest of the slot (`round::round_end` says
//! where).

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::devices::Device;
use super::driver::{Relaxed, Stream};
use super::kernels::{RingMemory, RoundEndOperands};
use super::memory::PinnedBuffer;
use crate::error::{Error, Result};
use crate::round::round_end::{RingLayout, SEQUENCE_AT, SlotState};

/// Time for which a wait looks without a pause: work that is about to end is seen at once.
const SPIN: Duration = Duration::from_micros(50);
/// Pause between two looks.
const PAUSE: Duration = Duration::from_micros(20);
/// Interval at which a wait asks whether there is still anything to wait for.
const ASK: Duration = Duration::from_millis(100);

/// Slots in mapped memory, and the word by which the host asks the rounds to end.
#[derive(Debug)]
pub struct RoundRing {
    /// The slots, then the stop word.
    memory: PinnedBuffer,
    layout: RingLayout,
    device: &'static Device,
}

impl RoundRing {
    /// A ring on `device`. Its first round is 0: it goes with a control block of zeros.
    ///
    /// # Errors
    /// [`Error::Cuda`] where so much memory cannot be pinned.
    pub fn new(device: &'static Device, layout: RingLayout) -> Result<Self> {
        let memory = PinnedBuffer::new(device, "round ring", 4 * (layout.ring_words() + 1))?;
        Ok(Self { memory, layout, device })
    }

    /// Layout of a slot.
    pub fn layout(&self) -> &RingLayout {
        &self.layout
    }

    /// The words of all slots, which the device writes at its own pace.
    pub fn words(&self) -> NonNull<i32> {
        NonNull::new(self.memory.host().cast()).unwrap_or(NonNull::dangling())
    }

    /// End a round: one launch of `cuda/round_end.cu` on `stream`, which writes the round's slot. `handle` is that of the
    /// conditional node whose body the launch is captured into, 0 for a launch of one round. The memory stays until the
    /// launch is done; where it was captured, until [`Device::collect_captured`].
    ///
    /// # Errors
    /// [`Error::Mismatch`] for operands that do not fit each other or the ring.
    pub fn end_round(&self, stream: Stream, operands: &RoundEndOperands<'_>, handle: u64) -> Result<()> {
        let slots = self.memory.device_address();
        let stop = slots + 4 * self.layout.ring_words() as u64;
        let ring = RingMemory { slots, stop, layout: self.layout };
        let launched = self.device.kernels().round_end.launch(stream, &ring, operands, handle);
        // The use is told behind a refused launch, too: the launch may have begun.
        self.memory.used_on(stream).and(launched)
    }

    /// True if all of `round` is in its slot.
    ///
    /// # Errors
    /// [`Error::StaleOutput`] once a later round has begun to write it.
    pub fn ready(&self, round: u64) -> Result<bool> {
        let at = self.layout.slot(round) * self.layout.slot_words() + SEQUENCE_AT;
        match self.layout.state(round, self.word(at).load(Ordering::Acquire)) {
            SlotState::Whole => Ok(true),
            SlotState::Ahead => Ok(false),
            SlotState::Overwritten(current) => {
                let what = format!("round {round} of a ring of {} slots", self.layout.slots());
                Err(Error::StaleOutput { what, held: round, current })
            }
        }
    }

    /// Check, behind a reader, that the values which it read of `round` are that round's.
    ///
    /// # Errors
    /// [`Error::StaleOutput`] where a later round has begun to write the slot; [`Error::Invalid`] for a round that has not
    /// ended.
    pub fn check(&self, round: u64) -> Result<()> {
        std::sync::atomic::fence(Ordering::Acquire); // the reader's loads before the word's
        if self.ready(round)? {
            return Ok(());
        }
        Err(Error::Invalid { what: "round", got: round.to_string(), why: "it has not ended; wait for it first".into() })
    }

    /// Let the host wait for `round`, of `stream`, for `limit` at most: whether it is there. No call of the driver, but
    /// every 100 ms a look at the stream.
    ///
    /// # Errors
    /// [`Error::StaleOutput`] once a later round has begun to write the slot; [`Error::Cuda`] where the device has failed;
    /// [`Error::Invalid`] where the stream has no work left and the round is not there: nobody launched it.
    pub fn wait(&self, round: u64, stream: Stream, limit: Duration) -> Result<bool> {
        let started = Instant::now();
        let mut asked = started;
        loop {
            if self.ready(round)? {
                return Ok(true);
            }
            let now = Instant::now();
            if now - started >= limit {
                return Ok(false);
            }
            if now - asked >= ASK {
                asked = now;
                if self.is_idle(stream)? && !self.ready(round)? {
                    let why =
                        "the stream has no work left and the round has not ended: it was not launched there".into();
                    return Err(Error::Invalid { what: "round", got: round.to_string(), why });
                }
            }
            if now - started < SPIN {
                std::hint::spin_loop();
            } else {
                thread::sleep(PAUSE);
            }
        }
    }

    /// Ask the rounds that have not ended to be the last of their launch. They say so, exit bit 16, until
    /// [`Self::clear_stop`].
    pub fn ask_stop(&self) {
        self.word(self.layout.ring_words()).store(1, Ordering::Release);
    }

    /// Ask no longer.
    pub fn clear_stop(&self) {
        self.word(self.layout.ring_words()).store(0, Ordering::Release);
    }

    fn is_idle(&self, stream: Stream) -> Result<bool> {
        let _relaxed = Relaxed::enter()?; // another stream of the process may be captured
        let _current = self.device.context().enter()?;
        if stream.is_capturing()? {
            return Ok(false); // to ask would break the capture
        }
        stream.is_idle()
    }

    /// A word of the memory that host and device share.
    fn word(&self, at: usize) -> &AtomicU32 {
        debug_assert!(at <= self.layout.ring_words());
        // SAFETY: within the allocation of the slots and one word more, aligned, initialised, and there as long as `self`.
        // The host reads and writes these words by atomics alone.
        unsafe { AtomicU32::from_ptr(self.memory.host().cast::<u32>().add(at)) }
    }
}
