//! The launch of `cuda/round_end.cu`: lanes advance or end, and the ring gets what the round found.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::check::{arrays, length, live_address, on_device};
use crate::device::context::Context;
use crate::device::driver::{Function, Module, Relaxed, Stream};
use crate::device::images;
use crate::device::params::round_end as params;
use crate::device::view::DeviceSlice;
#[cfg(doc)]
use crate::error::Error;
use crate::error::{Result, in_range};
use crate::overlap::{Operand, Span, disjoint};
use crate::round::round_end::{self, RingLayout};

/// Words of the control block.
pub const CONTROL_WORDS: usize = params::CONTROL_WORDS as usize;
/// Threads of a block: 64 lanes at once.
const THREADS: u32 = 512;
/// Words of a vector.
const VECTOR: usize = 4;
/// Most blocks that copy: more give no more of the bus.
const MAX_COPIERS: usize = 64;

// The host and the device speak of one slot, and of one reason.
const _: () = {
    assert!(params::ROUND_HEADER as usize == round_end::HEADER_WORDS);
    assert!(params::ROUND_SEQUENCE_AT as usize == round_end::SEQUENCE_AT);
    assert!(params::ROUND_NUMBER_AT as usize == round_end::ROUND_AT);
    assert!(params::ROUND_LIVE_AT as usize == round_end::LIVE_AT);
    assert!(params::ROUND_EXIT_AT as usize == round_end::EXIT_AT);
    assert!(params::ROUND_CONTINUES_AT as usize == round_end::CONTINUES_AT);
    assert!(params::ROUND_TIME_AT as usize == round_end::TIME_AT && round_end::TIME_AT.is_multiple_of(2));
    assert!(params::EXIT_DONE as u32 == round_end::EXIT_DONE);
    assert!(params::EXIT_NAN as u32 == round_end::EXIT_NAN);
    assert!(params::EXIT_UNSOUND as u32 == round_end::EXIT_UNSOUND);
    assert!(params::EXIT_FAULT as u32 == round_end::EXIT_FAULT);
    assert!(params::EXIT_ASKED as u32 == round_end::EXIT_ASKED);
    assert!(params::EXIT_BUDGET as u32 == round_end::EXIT_BUDGET);
};

/// A kernel and what keeps it loaded.
#[derive(Debug)]
struct Loaded {
    function: Function,
    _module: Module,
}

impl Loaded {
    fn of(context: &Context, name: &'static str) -> Result<Self> {
        let module = Module::load(images::select(name, context.capability())?)?;
        Ok(Self { function: module.function(name)?, _module: module })
    }
}

/// The kernels of `cuda/round_end.cu` on one device.
#[derive(Debug)]
pub struct RoundEndKernels {
    plain: Loaded,
    /// Loaded at its first use: the driver compiles it, and one that cannot still runs everything else.
    looped: OnceLock<Loaded>,
    /// Held while it is loaded, so that it is loaded once.
    loading: Mutex<()>,
    context: Arc<Context>,
}

/// The operands of the end of a round of B lanes. All but those of the state and the control block are read alone.
#[derive(Debug, Clone, Copy)]
pub struct RoundEndOperands<'a> {
    /// First token of each lane's path, B + 1 entries.
    pub offsets: &'a DeviceSlice<i32>,
    /// Tokens drawn along accepted paths; a lane's last is its new root.
    pub tokens: &'a DeviceSlice<i32>,
    /// Committed lengths with the accepted nodes, B entries.
    pub new_lens: &'a DeviceSlice<i32>,
    /// The next roots, B entries.
    pub roots_found: &'a DeviceSlice<i32>,
    /// Not 0 where the target's scores were no numbers, B entries.
    pub faults: &'a DeviceSlice<i32>,
    /// Sound draft steps, B entries.
    pub sound: &'a DeviceSlice<i32>,
    /// An array whose last element counts the live lanes.
    pub live: &'a DeviceSlice<i32>,
    /// Committed length at which a request has ended, B entries.
    pub limits: &'a DeviceSlice<i32>,
    /// Deepest level of drafts wanted, B entries.
    pub caps: &'a DeviceSlice<i32>,
    /// Tokens that end a request, as many places a lane.
    pub stops: &'a DeviceSlice<i32>,
    /// Places used, B entries.
    pub stop_counts: &'a DeviceSlice<i32>,
    /// Written: committed lengths, B entries.
    pub lens: &'a DeviceSlice<i32>,
    /// Written: roots, B entries.
    pub roots: &'a DeviceSlice<i32>,
    /// Written: levels of drafts, B entries.
    pub depths: &'a DeviceSlice<i32>,
    /// Written: not 0 for a lane that has ended, B entries.
    pub done: &'a DeviceSlice<i32>,
    /// Written: rounds that have ended, rounds of the launch that are left, exit bits of the last round, and a word of the
    /// kernel's own that is 0 between launches.
    pub control: &'a DeviceSlice<i32>,
    /// What the round found, for the host; of the ring's words.
    pub found: &'a DeviceSlice<i32>,
}

/// A ring's memory, for the device.
#[derive(Debug, Clone, Copy)]
pub(in crate::device) struct RingMemory {
    /// Address of the slots; aligned to a vector.
    pub(in crate::device) slots: u64,
    /// Address of the word by which the host asks for an end.
    pub(in crate::device) stop: u64,
    /// Where the slots have what.
    pub(in crate::device) layout: RingLayout,
}

impl RoundEndKernels {
    /// Load the plain one into `context`, which is current.
    pub(super) fn load(context: Arc<Context>) -> Result<Self> {
        let plain = Loaded::of(&context, "round_end")?;
        Ok(Self { plain, looped: OnceLock::new(), loading: Mutex::new(()), context })
    }

    /// Load the kernel of launches with a handle, which a launch does at its first use: the driver compiles it then.
    ///
    /// # Errors
    /// [`Error::Cuda`] where the driver knows no conditional nodes.
    pub fn prepare_loop(&self) -> Result<()> {
        self.looped().map(|_| ())
    }

    fn looped(&self) -> Result<Function> {
        if self.looped.get().is_none() {
            let _one = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
            if self.looped.get().is_none() {
                let _relaxed = Relaxed::enter()?;
                let _current = self.context.enter()?;
                let loaded = Loaded::of(&self.context, "round_end_loop")?;
                return Ok(self.looped.get_or_init(|| loaded).function);
            }
        }
        Ok(self.looped.get().map_or(self.plain.function, |loaded| loaded.function))
    }

    /// End a round: one launch. `handle` is that of the conditional node whose body the launch is captured into, 0 for a
    /// launch of one round.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for operands that do not fit each other or the ring.
    pub(in crate::device) fn launch(
        &self,
        stream: Stream,
        ring: &RingMemory,
        o: &RoundEndOperands<'_>,
        handle: u64,
    ) -> Result<()> {
        let (context, layout) = (&self.context, &ring.layout);
        let batch = layout.batch();
        arrays(context, batch + 1, &[("offsets", o.offsets)])?;
        arrays(
            context,
            batch,
            &[
                ("new_lens", o.new_lens),
                ("roots_found", o.roots_found),
                ("faults", o.faults),
                ("sound", o.sound),
                ("limits", o.limits),
                ("caps", o.caps),
                ("stop_counts", o.stop_counts),
                ("lens", o.lens),
                ("roots", o.roots),
                ("depths", o.depths),
                ("done", o.done),
            ],
        )?;
        arrays(context, layout.words(), &[("found", o.found)])?;
        arrays(context, CONTROL_WORDS, &[("control", o.control)])?;
        on_device(context, &[("tokens", o.tokens.device()), ("stops", o.stops.device())])?;
        in_range("path entries", o.tokens.len() as u64, 0, i128::from(i32::MAX) - 1)?;
        let places = o.stops.len() / batch; // at least 1 lane: `RingLayout`
        length("stops", o.stops.len(), places * batch, true)?;
        in_range("stop tokens of a lane", places as u64, 0, i128::from(i32::MAX) - 1)?;
        let live = live_address(context, Some(o.live))?;
        let found = [o.offsets, o.tokens, o.new_lens, o.roots_found, o.faults, o.sound, o.live, o.found];
        let limits = [o.limits, o.caps, o.stops, o.stop_counts];
        let state = [o.lens, o.roots, o.depths, o.done, o.control];
        let slots = Span::new("ring", ring.slots, 4 * layout.ring_words() as u64);
        let stop = Span::new("ring", ring.stop, 4);
        disjoint(
            &[&state.map(Operand::span), &[slots]],
            &[&found.map(Operand::span), &limits.map(Operand::span), &[stop]],
        )?;
        let report = context.report(stream)?;
        let vectors = layout.words().div_ceil(VECTOR);
        let params = params::RoundEndParams {
            offsets: o.offsets.address(),
            tokens: o.tokens.address(),
            new_lens: o.new_lens.address(),
            roots_found: o.roots_found.address(),
            faults: o.faults.address(),
            sound: o.sound.address(),
            live,
            limits: o.limits.address(),
            caps: o.caps.address(),
            stops: o.stops.address(),
            stop_counts: o.stop_counts.address(),
            lens: o.lens.address(),
            roots: o.roots.address(),
            depths: o.depths.address(),
            done: o.done.address(),
            control: o.control.address(),
            found: o.found.address(),
            ring: ring.slots,
            stop: ring.stop,
            report,
            handle,
            batch: batch as i32, // `RingLayout` checked that its sizes fit
            entries: o.tokens.len() as i32,
            places: places as i32,
            words: layout.words() as i32,
            slot_mask: layout.slots() as u32 - 1,
            slot_words: layout.slot_words() as i32,
            lens_at: layout.lens_at() as i32,
            depths_at: layout.depths_at() as i32,
            found_at: layout.found_at() as i32,
            wide: u32::from(o.found.address().is_multiple_of(16)),
        };
        let function = if handle == 0 { self.plain.function } else { self.looped()? };
        let copiers = vectors.div_ceil(THREADS as usize).min(MAX_COPIERS);
        let _current = context.enter()?;
        // SAFETY: the module is loaded for the process and its context is current. Addresses and sizes come from views,
        // whose constructors' callers promised them, and from a ring, which keeps its memory until the launch is done; the
        // fault record lives as long as the process.
        unsafe { function.launch((1 + copiers as u32, 1, 1), THREADS, stream, &params) }
    }
}
