//! Checks of operands that several launches share.

use crate::device::context::Context;
use crate::device::rows::{FloatType, Rows};
use crate::device::view::{DeviceSlice, device_mismatch};
use crate::error::{Error, Result};

/// Operands with their devices must be on the device of `context`.
pub(super) fn on_device(context: &Context, operands: &[(&'static str, i32)]) -> Result<()> {
    match operands.iter().find(|(_, device)| *device != context.ordinal()) {
        Some(&(operand, device)) => Err(device_mismatch(operand, device, context.ordinal(), "the kernel is launched")),
        None => Ok(()),
    }
}

/// [`on_device`] of rows.
pub(super) fn rows_on_device(context: &Context, operands: &[&Rows]) -> Result<()> {
    operands.iter().try_for_each(|rows| on_device(context, &[(rows.what(), rows.device())]))
}

/// An array of `len` elements, or more where `exact` is false.
pub(super) fn length(operand: &'static str, got: usize, want: usize, exact: bool) -> Result<()> {
    if got == want || (!exact && got > want) {
        return Ok(());
    }
    let at_least = if exact { "" } else { "at least " };
    Err(Error::Mismatch { operand, got: format!("{got} elements"), want: format!("{at_least}{want}") })
}

/// Arrays of `want` elements on the device of `context`, with their names.
pub(super) fn arrays<T>(context: &Context, want: usize, operands: &[(&'static str, &DeviceSlice<T>)]) -> Result<()> {
    operands.iter().try_for_each(|(operand, slice)| {
        length(operand, slice.len(), want, true)?;
        on_device(context, &[(operand, slice.device())])
    })
}

/// Address of the live count, the last element of `live`; 0 where all is live.
pub(super) fn live_address(context: &Context, live: Option<&DeviceSlice<i32>>) -> Result<u64> {
    let Some(live) = live else { return Ok(0) };
    on_device(context, &[("live", live.device())])?;
    length("live", live.len(), 1, false)?;
    Ok(live.address() + 4 * (live.len() as u64 - 1))
}

/// One of two functions by 16-bit element type.
pub(super) fn half<T>(rows: &Rows, bf16: T, f16: T) -> Result<T> {
    match rows.float() {
        FloatType::Bf16 => Ok(bf16),
        FloatType::F16 => Ok(f16),
        FloatType::F32 => Err(Error::Mismatch {
            operand: rows.what(),
            got: rows.float().name().into(),
            want: "bfloat16 or float16".into(),
        }),
    }
}

/// The weight of a norm over rows of `columns` of `float`: of that type, or of f32; whether it is f32.
pub(super) fn norm_weight(weight: &Rows, columns: usize, float: FloatType) -> Result<bool> {
    let wide = weight.float() == FloatType::F32;
    weight.expect(1, columns, if wide { FloatType::F32 } else { float })?;
    Ok(wide)
}

/// The epsilon of a norm.
pub(super) fn epsilon(eps: f32) -> Result<u32> {
    if eps.is_finite() && eps >= 0.0 {
        return Ok(eps.to_bits());
    }
    Err(Error::Invalid { what: "eps", got: eps.to_string(), why: "must be finite and >= 0".into() })
}
