//! The end of a round as the host computes it: the reference of the kernel that `cuda::round` launches.

use pyo3::prelude::*;

use super::arg::detached;
use super::dlpack::Call;
use crate::error::{Error, Result};
use crate::round::round_end::{LaneLimits, LaneState, RingLayout, RoundFound, Signals, end_round};

/// A tensor argument.
type Arg<'a, 'py> = &'a Bound<'py, PyAny>;

/// The end of a round as the host computes it, for tests of the kernel: the operands of `_device_round_end` on the CPU, `ring`
/// int32 [slots, slot words], `looped` where there is a conditional node, `asked` and `recorded` in the place of the host's
/// request and of the fault record. Writes `ring`, `state` and `control`. Returns (buffer, request, index, bound) of each
/// index that was refused.
#[pyfunction]
#[pyo3(signature = (ring, accepts, limits, state, control, found, looped, asked, recorded))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _round_end(
    py: Python<'_>,
    ring: Arg<'_, '_>,
    accepts: [Bound<'_, PyAny>; 7],
    limits: [Bound<'_, PyAny>; 4],
    state: [Bound<'_, PyAny>; 4],
    control: Arg<'_, '_>,
    found: Arg<'_, '_>,
    looped: bool,
    asked: bool,
    recorded: bool,
) -> PyResult<Vec<(&'static str, i64, i64, i64)>> {
    const READ: [&str; 12] = [
        "offsets",
        "tokens",
        "new_lens",
        "roots_found",
        "faults",
        "sound",
        "live",
        "limits",
        "caps",
        "stops",
        "stop_counts",
        "found",
    ];
    const WRITTEN: [&str; 6] = ["lens", "roots", "depths", "done", "control", "ring"];
    let read: Vec<Arg<'_, '_>> = accepts.iter().chain(&limits).chain([found]).collect();
    let written: Vec<Arg<'_, '_>> = state.iter().chain([control, ring]).collect();
    let (read, written) =
        (std::array::from_fn(|i| (READ[i], read[i])), std::array::from_fn(|i| (WRITTEN[i], written[i])));
    let (inputs, [], mut outputs): ([_; 12], _, [_; 6]) = Call::on_host().take(read, [], written)?;
    detached(py, move || {
        let flat = inputs.iter().map(|t| t.line::<i32>()).collect::<Result<Vec<_>>>()?;
        let [offsets, tokens, new_lens, roots, faults, sound, live, limits, caps, stops, stop_counts, found] = flat[..]
        else {
            return Ok(Vec::new()); // as many as were imported
        };
        outputs.iter().try_for_each(|output| output.lendable(&[super::dlpack::DType::I32]))?;
        let [slots, slot_words] = outputs[5].dims("[slots, slot words]")?;
        let layout = RingLayout::new(slots as u64, new_lens.len() as u64, found.len() as u64)?;
        if slot_words != layout.slot_words() {
            let (got, want) = (format!("slots of {slot_words} words"), format!("of {}", layout.slot_words()));
            return Err(Error::Mismatch { operand: "ring", got, want });
        }
        let count = live.last().copied().ok_or_else(|| Error::Mismatch {
            operand: "live",
            got: "0 elements".into(),
            want: "at least 1".into(),
        })?;
        let mut outputs = outputs.iter_mut();
        let mut next = |shape: &[usize]| match outputs.next() {
            Some(output) => output.slice::<i32>(shape),
            None => Ok(&mut [][..]),
        };
        let batch = [new_lens.len()];
        let (lens, roots_now, depths, done) = (next(&batch)?, next(&batch)?, next(&batch)?, next(&batch)?);
        let (control, ring) = (next(&[4])?, next(&[slots, slot_words])?);
        let before = [lens.to_vec(), depths.to_vec()];
        let found_of = RoundFound { offsets, tokens, new_lens, roots, faults, sound, live: count };
        let limits = LaneLimits { limits, caps, stops, stop_counts };
        let mut state = LaneState { lens, roots: roots_now, depths, done };
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
