//! The end of a round as the host computes it: the reference of the kernel that `cuda::round` launches.

use pyo3::prelude::*;

use super::arg::detached;
use super::dlpack::{Call, DType};
use crate::error::Error;
use crate::round::round_end::{RingLayout, RoundFound, SeatLimits, SeatState, Signals, end_round};

/// A tensor argument.
type Arg<'a, 'py> = &'a Bound<'py, PyAny>;

/// Results of a round: `RoundFound` of `python/specrs/operands.py`.
#[derive(FromPyObject)]
pub(super) struct FoundArrays<'py> {
    pub(super) offsets: Bound<'py, PyAny>,
    pub(super) tokens: Bound<'py, PyAny>,
    pub(super) new_lens: Bound<'py, PyAny>,
    pub(super) roots: Bound<'py, PyAny>,
    pub(super) faults: Bound<'py, PyAny>,
    pub(super) sound: Bound<'py, PyAny>,
    pub(super) live: Bound<'py, PyAny>,
}

/// Limits of seats: `SeatLimits` of `python/specrs/operands.py`.
#[derive(FromPyObject)]
pub(super) struct LimitArrays<'py> {
    pub(super) limits: Bound<'py, PyAny>,
    pub(super) caps: Bound<'py, PyAny>,
    pub(super) stops: Bound<'py, PyAny>,
    pub(super) stop_counts: Bound<'py, PyAny>,
}

/// State of seats: `SeatState` of `python/specrs/operands.py`.
#[derive(FromPyObject)]
pub(super) struct StateArrays<'py> {
    pub(super) lens: Bound<'py, PyAny>,
    pub(super) roots: Bound<'py, PyAny>,
    pub(super) depths: Bound<'py, PyAny>,
    pub(super) done: Bound<'py, PyAny>,
}

/// Compute the end of a round on the host, for tests of the kernel. Takes the operands of `_device_round_end` on the
/// CPU: `ring` is int32 [slots, slot words], `looped` says that there is a conditional node, `asked` and `recorded`
/// stand for the host's request and the fault record. Writes `ring`, `state` and `control`. Returns (buffer, request,
/// index, bound) of each index that was refused.
#[pyfunction]
#[pyo3(signature = (ring, *, accepts, limits, state, control, found, looped, asked, recorded))]
#[allow(clippy::too_many_arguments, reason = "operands, passed by name")]
pub(super) fn _round_end<'py>(
    py: Python<'py>,
    ring: Arg<'_, 'py>,
    accepts: FoundArrays<'py>,
    limits: LimitArrays<'py>,
    state: StateArrays<'py>,
    control: Arg<'_, 'py>,
    found: Arg<'_, 'py>,
    looped: bool,
    asked: bool,
    recorded: bool,
) -> PyResult<Vec<(&'static str, i64, i64, i64)>> {
    let read = [
        ("offsets", &accepts.offsets),
        ("tokens", &accepts.tokens),
        ("new_lens", &accepts.new_lens),
        ("roots_found", &accepts.roots),
        ("faults", &accepts.faults),
        ("sound", &accepts.sound),
        ("live", &accepts.live),
        ("limits", &limits.limits),
        ("caps", &limits.caps),
        ("stops", &limits.stops),
        ("stop_counts", &limits.stop_counts),
        ("found", found),
    ];
    let written = [
        ("lens", &state.lens),
        ("roots", &state.roots),
        ("depths", &state.depths),
        ("done", &state.done),
        ("control", control),
        ("ring", ring),
    ];
    let (inputs, [], outputs) = Call::on_host().take(read, [], written)?;
    detached(py, move || {
        let [offsets, tokens, new_lens, roots, faults, sound, live, limits, caps, stops, stop_counts, found] = &inputs;
        outputs.iter().try_for_each(|output| output.lendable(&[DType::I32]))?;
        let [mut lens, mut roots_now, mut depths, mut done, mut control, mut ring] = outputs;
        let (new_lens, found) = (new_lens.line::<i32>()?, found.line::<i32>()?);
        let [slots, slot_words] = ring.dims("[slots, slot words]")?;
        let layout = RingLayout::new(slots as u64, new_lens.len() as u64, found.len() as u64)?;
        if slot_words != layout.slot_words() {
            let (got, want) = (format!("slots of {slot_words} words"), format!("of {}", layout.slot_words()));
            return Err(Error::Mismatch { operand: "ring", got, want });
        }
        let count = live.line::<i32>()?.last().copied().ok_or_else(|| Error::Mismatch {
            operand: "live",
            got: "0 elements".into(),
            want: "at least 1".into(),
        })?;
        let batch = [new_lens.len()];
        let found_of = RoundFound {
            offsets: offsets.line()?,
            tokens: tokens.line()?,
            new_lens,
            roots: roots.line()?,
            faults: faults.line()?,
            sound: sound.line()?,
            live: count,
        };
        let limits = SeatLimits {
            limits: limits.line()?,
            caps: caps.line()?,
            stops: stops.line()?,
            stop_counts: stop_counts.line()?,
        };
        let mut state = SeatState {
            lens: lens.slice(&batch)?,
            roots: roots_now.slice(&batch)?,
            depths: depths.slice(&batch)?,
            done: done.slice(&batch)?,
        };
        let (control, ring) = (control.slice::<i32>(&[4])?, ring.slice(&[slots, slot_words])?);
        let before = [state.lens.to_vec(), state.depths.to_vec()];
        let signals = Signals { asked, recorded, left: looped.then_some(control[1]) };
        let end = end_round(&found_of, &limits, &mut state, signals)?;
        let round = control[0] as u32;
        layout.publish(ring, round, &end, [&before[0], &before[1]], found)?;
        control[0] = round.wrapping_add(1) as i32;
        control[1] = end.left.unwrap_or(control[1]);
        control[2] = end.exit as i32;
        let told = end.refused.iter().filter_map(|error| match *error {
            Error::OutOfBounds { buffer, request, index, bound, .. } => Some((buffer, request, index, bound)),
            _ => None,
        });
        Ok(told.collect())
    })
}
