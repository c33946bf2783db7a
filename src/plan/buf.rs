//! Buffers and bodies that are reused from round to round, so that a warm planner allocates nothing.

use std::sync::Arc;

use crate::error::{Error, Result};

/// A value that no writer produces: what a debug run fills buffers with, so that a lane nobody wrote is seen.
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

/// Make `data` at least `elements` long; what it holds is written by the caller.
///
/// # Errors
/// [`Error::Invalid`] where there is no memory.
pub(crate) fn grow<T: Poison>(name: &'static str, data: &mut Vec<T>, elements: usize) -> Result<()> {
    if elements <= data.len() {
        return Ok(());
    }
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
    pub(crate) fn reset(&mut self, name: &'static str, len: usize, poison: bool) -> Result<&mut [T]> {
        grow(name, &mut self.data, len)?;
        self.len = len;
        let live = &mut self.data[..len];
        if poison {
            live.fill(T::POISON);
        }
        Ok(live)
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

/// Bodies handed out by `Arc` and taken back when the last handle outside is dropped.
///
/// It grows to the largest number of bodies that are alive at once and no further.
#[derive(Debug)]
pub(crate) struct Arena<T> {
    items: Vec<Arc<T>>,
    /// Where the search for a free body starts; bodies are freed about in the order they were handed out.
    next: usize,
}

impl<T> Default for Arena<T> {
    fn default() -> Self {
        Self { items: Vec::new(), next: 0 }
    }
}

impl<T: Default> Arena<T> {
    /// Fill a free body with `write` and hand it out. After an error the body stays free.
    pub(crate) fn fill<E>(&mut self, write: impl FnOnce(&mut T) -> Result<(), E>) -> Result<Arc<T>, E> {
        let n = self.items.len();
        let free = (0..n).map(|i| (self.next + i) % n).find(|&i| Arc::get_mut(&mut self.items[i]).is_some());
        let at = free.unwrap_or_else(|| {
            self.items.push(Arc::default());
            n
        });
        self.next = at + 1;
        let item = &mut self.items[at];
        if let Some(body) = Arc::get_mut(item) {
            write(body)?;
        }
        Ok(Arc::clone(item))
    }

    /// Bodies there are, in use or free.
    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }
}
