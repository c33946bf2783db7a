//! The end of a round: the kernel's launch, and the ring by which the host learns what the round found.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;

use super::device::StreamArg;
use super::operands::{Arg, Operands};
use super::tensors::ring_place;
use crate::device::{self, Device, RoundEndOperands};
use crate::py::arg::{Int, detached};
use crate::py::dlpack::{Array, Buffer, DType, View};
use crate::py::round_end::{FoundArrays, LimitArrays, StateArrays};
use crate::round::round_end::{CONTINUES_AT, EXIT_AT, LIVE_AT, ROUND_AT, RingLayout, TIME_AT};

register! { fn _device_round_end, _device_round_end_load; class RoundRing; }

/// How long a wait stays without the GIL before it lets Python handle signals.
const UNINTERRUPTED: Duration = Duration::from_millis(250);

/// Pinned memory by which the host learns what rounds found, without a synchronisation: `slots` slots (a power of two, at
/// least 2) on CUDA device `ordinal`, for rounds of `batch` seats that find `words` int32 words. Round r has slot
/// r % slots; its first round is 0. Round r can be read until round r + slots - 1 has ended.
#[pyclass(frozen, name = "_RoundRing", module = "specrs._specrs")]
pub(super) struct RoundRing(Arc<device::RoundRing>);

impl RoundRing {
    fn layout(&self) -> &RingLayout {
        self.0.layout()
    }
}

#[pymethods]
impl RoundRing {
    #[new]
    fn new(py: Python<'_>, ordinal: Int, slots: Int, batch: Int, words: Int) -> PyResult<Self> {
        let ordinal = ordinal.i32("CUDA device")?;
        let [slots, batch] = [slots.u64("ring slots")?, batch.u64("ring batch")?];
        let layout = RingLayout::new(slots, batch, words.u64("ring words")?)?;
        detached(py, move || Ok(Self(Arc::new(device::RoundRing::new(Device::get(ordinal)?, layout)?))))
    }

    /// Slots.
    #[getter]
    fn slots(&self) -> usize {
        self.layout().slots()
    }

    /// Seats of a round.
    #[getter]
    fn batch(&self) -> usize {
        self.layout().batch()
    }

    /// Words of what a round found.
    #[getter]
    fn words(&self) -> usize {
        self.layout().words()
    }

    /// Words of a slot.
    #[getter]
    fn slot_words(&self) -> usize {
        self.layout().slot_words()
    }

    /// Word of a slot: the round's number, modulo 2^32.
    #[getter]
    fn round(&self) -> usize {
        ROUND_AT
    }

    /// Word of a slot: live seats.
    #[getter]
    fn live(&self) -> usize {
        LIVE_AT
    }

    /// Word of a slot: why no further round should follow, 0 for no reason. Bits: 1 a live seat is done, 2 a seat's target
    /// scores were NaN, 4 a root's draft scores give no distribution, 8 an access was recorded that the host has not
    /// read, 16 the host asked, 32 the rounds of the launch are used up.
    #[getter]
    fn exit(&self) -> usize {
        EXIT_AT
    }

    /// Word of a slot: 1 where another round follows in the same launch.
    #[getter]
    fn continues(&self) -> usize {
        CONTINUES_AT
    }

    /// First of two words of a slot: when the round was published, in nanoseconds of the device's clock (`%globaltimer`), the low
    /// word first; the slot's row viewed as int64 has it at time_at / 2.
    #[getter]
    fn time_at(&self) -> usize {
        TIME_AT
    }

    /// First word of the lengths of a slot, `batch` of them, as the round used them.
    #[getter]
    fn lens_at(&self) -> usize {
        self.layout().lens_at()
    }

    /// First word of the depths of a slot, `batch` of them, as the round used them.
    #[getter]
    fn depths_at(&self) -> usize {
        self.layout().depths_at()
    }

    /// First of the `words` words of a slot that the round found.
    #[getter]
    fn found_at(&self) -> usize {
        self.layout().found_at()
    }

    /// The slots, int32 [slots, slot_words], on the CPU; whoever has it keeps the memory. The device writes it: read a
    /// round's row between `wait` and `check`.
    fn tensor(&self) -> PyResult<Array> {
        let (rows, cols) = (self.slots(), self.slot_words());
        let view = View::Table { name: "round ring", dtype: DType::I32, rows, cols, stride: cols };
        Ok(Array::of(Buffer::of_place(Arc::new(ring_place(self.0.clone())), view)?, None))
    }

    /// The row of `tensor()` that has round `round`.
    fn slot(&self, round: Int) -> PyResult<usize> {
        Ok(self.layout().slot(round.u64("round")?))
    }

    /// Wait until round `round`, launched on the raw stream `stream`, has ended, without the GIL. Raises `StaleOutputError`
    /// where a later round has overwritten it, `CudaError` where the device has failed, `ConfigError` where the stream has no
    /// work left and the round has not ended.
    fn wait(&self, py: Python<'_>, round: Int, stream: StreamArg) -> PyResult<()> {
        let (round, stream) = (round.u64("round")?, stream.get()?);
        while !detached(py, || self.0.wait(round, stream, UNINTERRUPTED))? {
            py.check_signals()?;
        }
        Ok(())
    }

    /// Whether round `round` has ended. Raises `StaleOutputError` where a later round has overwritten it.
    fn ready(&self, round: Int) -> PyResult<bool> {
        Ok(self.0.ready(round.u64("round")?)?)
    }

    /// Behind a reader of a round's row: raise `StaleOutputError` where a later round has begun to overwrite it.
    fn check(&self, round: Int) -> PyResult<()> {
        Ok(self.0.check(round.u64("round")?)?)
    }

    /// Ask the rounds that have not ended yet to be the last of their launch: they have exit bit 16 until `clear_stop`.
    fn ask_stop(&self) {
        self.0.ask_stop();
    }

    /// Ask no longer.
    fn clear_stop(&self) {
        self.0.clear_stop();
    }
}

/// End a round, in one launch: seats advance to what verification found or become done, and the round's slot of `ring` gets
/// the lengths and depths that the round used and a copy of `found` (int32 [words]). All tensors are int32. `accepts`
/// (`RoundFound`): offsets [B + 1], tokens, new_lens, roots, faults, sound [B], live (its last element counts). `limits`
/// (`SeatLimits`): the committed length at which a seat has ended, the deepest level wanted, stop tokens [B * places], places
/// used. `state` (`SeatState`), in and out: lens, roots, depths, done [B]. `control` [4], zeros at first: rounds ended, rounds
/// left of the launch, exit bits, the kernel's own. `handle` of the conditional node whose body this is captured into, or 0.
#[pyfunction]
#[pyo3(signature = (ring, *, accepts, limits, state, control, found, handle, stream))]
#[allow(clippy::too_many_arguments, reason = "operands, passed by name")]
fn _device_round_end<'py>(
    py: Python<'py>,
    ring: &Bound<'_, RoundRing>,
    accepts: FoundArrays<'py>,
    limits: LimitArrays<'py>,
    state: StateArrays<'py>,
    control: Arg<'_, 'py>,
    found: Arg<'_, 'py>,
    handle: Int,
    stream: StreamArg,
) -> PyResult<()> {
    let handle = handle.u64("handle")?;
    let ring = ring.get();
    let mut call = Operands::named();
    let (offsets, tokens) = (call.reads("offsets", &accepts.offsets), call.reads("tokens", &accepts.tokens));
    let new_lens = call.reads("new_lens", &accepts.new_lens);
    let roots_found = call.reads("roots_found", &accepts.roots);
    let (faults, sound) = (call.reads("faults", &accepts.faults), call.reads("sound", &accepts.sound));
    let live = call.reads("live", &accepts.live);
    let (lengths, caps) = (call.reads("limits", &limits.limits), call.reads("caps", &limits.caps));
    let stops = call.reads("stops", &limits.stops);
    let stop_counts = call.reads("stop_counts", &limits.stop_counts);
    let found = call.reads("found", found);
    let (lens, roots) = (call.writes("lens", &state.lens), call.writes("roots", &state.roots));
    let (depths, done) = (call.writes("depths", &state.depths), call.writes("done", &state.done));
    let control = call.writes("control", control);
    call.launch(py, stream, |o, _, s, g| {
        let operands = RoundEndOperands {
            offsets: &o.slice(offsets, g)?,
            tokens: &o.slice(tokens, g)?,
            new_lens: &o.slice(new_lens, g)?,
            roots_found: &o.slice(roots_found, g)?,
            faults: &o.slice(faults, g)?,
            sound: &o.slice(sound, g)?,
            live: &o.slice(live, g)?,
            limits: &o.slice(lengths, g)?,
            caps: &o.slice(caps, g)?,
            stops: &o.slice(stops, g)?,
            stop_counts: &o.slice(stop_counts, g)?,
            found: &o.slice(found, g)?,
            lens: &o.slice(lens, g)?,
            roots: &o.slice(roots, g)?,
            depths: &o.slice(depths, g)?,
            done: &o.slice(done, g)?,
            control: &o.slice(control, g)?,
        };
        ring.0.end_round(s, &operands, handle)
    })
}

/// Load the kernel that `_device_round_end` launches with a handle on CUDA device `ordinal`: the driver compiles it.
#[pyfunction]
fn _device_round_end_load(py: Python<'_>, ordinal: Int) -> PyResult<()> {
    let ordinal = ordinal.i32("CUDA device")?;
    detached(py, move || Device::get(ordinal)?.kernels().round_end.prepare_loop())
}
