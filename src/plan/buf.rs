//! Buffers that are reused from round to round, so that a warm planner allocates nothing.

use crate::error::{Error, Result};

/// A value that no writer produces: a debug run fills buffers with it, so that an element that nobody wrote is seen.
pub trait Poison: Copy + Default + PartialEq {
    /// The value.
    const POISON: Self;
}

impl Poison for i32 {
    const POISON: Self = i32::MIN + 0xBAD;
}

impl Poison for i64 {
    const POISON: Self = i64::MIN + 0xBAD;
}

impl Poison for u8 {
    const POISON: Self = 0xBA;
}

impl Poison for u32 {
    const POISON: Self = 0xBAD0_BAD0;
}

impl Poison for u64 {
    const POISON: Self = 0xBAD0_BAD0_BAD0_BAD0;
}

/// Make `data` at least `elements` long; the caller writes its content.
///
/// # Errors
/// [`Error::Invalid`] where there is no memory.
#[inline]
pub(crate) fn grow<T: Poison>(name: &'static str, data: &mut Vec<T>, elements: usize) -> Result<()> {
    if elements <= data.len() { Ok(()) } else { lengthen(name, data, elements) }
}

#[cold]
fn lengthen<T: Poison>(name: &'static str, data: &mut Vec<T>, elements: usize) -> Result<()> {
    data.try_reserve(elements - data.len()).map_err(|_| Error::Invalid {
        what: name,
        got: format!("{elements} elements of {} bytes", size_of::<T>()),
        why: "no memory for it; a smaller batch or smaller limits take less".into(),
    })?;
    data.resize(elements, T::default());
    Ok(())
}

/// A vector with a length of its own: shrinking and growing again neither allocates nor clears.
///
/// After [`Buf::reset`] the content is whatever an earlier round left there (or poison): the caller writes every
/// element before anyone reads it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Buf<T> {
    data: Vec<T>,
    /// Always `<= data.len()`.
    len: usize,
}

impl<T: Poison> Buf<T> {
    /// Make it `len` long with content to be written by the caller. `name` is what errors call it.
    ///
    /// # Errors
    /// [`Error::Invalid`] where there is no memory.
    #[inline]
    pub(crate) fn reset(&mut self, name: &'static str, len: usize, poison: bool) -> Result<&mut [T]> {
        grow(name, &mut self.data, len)?;
        self.len = len;
        let live = &mut self.data[..len];
        if poison {
            live.fill(T::POISON);
        }
        Ok(live)
    }

    /// Make it empty.
    pub(crate) fn clear(&mut self) {
        self.len = 0;
    }

    /// The content.
    pub(crate) fn get(&self) -> &[T] {
        &self.data[..self.len]
    }

    /// The content, to write.
    pub(crate) fn get_mut(&mut self) -> &mut [T] {
        &mut self.data[..self.len]
    }

    /// The first element that holds poison.
    pub(crate) fn first_poison(&self) -> Option<usize> {
        self.get().iter().position(|v| *v == T::POISON)
    }
}

impl<T> From<Vec<T>> for Buf<T> {
    fn from(data: Vec<T>) -> Self {
        let len = data.len();
        Self { data, len }
    }
}
