//! Rows of an embedding, widened.

use super::linear::Weight;
use crate::error::{Error, Result, in_range};

/// `out` [Q, width] = the rows of `table` [vocab, width] that `tokens` `[Q]` name. On an error nothing is written.
///
/// # Errors
/// [`Error::OutOfRange`] for a token outside the vocabulary; [`Error::Mismatch`] for lengths that are none.
pub fn embed<T: Copy + Into<i128>>(table: Weight<'_>, width: usize, tokens: &[T], out: &mut [f32]) -> Result<()> {
    if width == 0 || !table.len().is_multiple_of(width) || out.len() != tokens.len() * width {
        let got = format!("{} elements of a table of {}", out.len(), table.len());
        return Err(Error::Mismatch { operand: "embedding", got, want: format!("{} rows of {width}", tokens.len()) });
    }
    let last = (table.len() / width) as i128 - 1;
    tokens.iter().try_for_each(|&token| in_range("token", token, 0, last).map(drop))?;
    for (&token, out) in tokens.iter().zip(out.chunks_exact_mut(width)) {
        let row = token.into() as usize * width..(token.into() as usize + 1) * width;
        match table {
            Weight::F32(all) => out.copy_from_slice(&all[row]),
            Weight::Bf16(all) => out.iter_mut().zip(&all[row]).for_each(|(o, v)| *o = v.to_f32()),
            Weight::F16(all) => out.iter_mut().zip(&all[row]).for_each(|(o, v)| *o = v.to_f32()),
        }
    }
    Ok(())
}
