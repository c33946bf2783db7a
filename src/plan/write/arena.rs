//! Bodies that are reused from round to round, so that a warm planner allocates nothing.

use std::sync::Arc;

/// Bodies handed out by `Arc` and taken back when the last handle outside is dropped.
///
/// It grows to the largest number of bodies that are alive at once and no further.
#[derive(Debug)]
pub(crate) struct Arena<T> {
    items: Vec<Arc<T>>,
    /// Index where the search for a free body starts; bodies are freed about in the order they were handed out.
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
