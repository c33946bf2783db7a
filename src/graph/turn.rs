//! One capture at a time in the process: a capture sees what other threads allocate and free, and cublasLt, torch's
//! allocator and the list of dropped graphs are all shared.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use crate::error::{Error, Result};

static HOLDER: Mutex<Option<ThreadId>> = Mutex::new(None);
static FREED: Condvar = Condvar::new();

fn holder() -> MutexGuard<'static, Option<ThreadId>> {
    HOLDER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The right to capture, until it is dropped. It may be dropped on another thread.
#[derive(Debug)]
pub struct Turn(());

impl Turn {
    /// Wait for it. The caller holds no lock that another capture's work may need, Python's own included.
    ///
    /// # Errors
    /// [`Error::GraphCapture`] on a thread that has it: a capture within a capture would wait for itself.
    pub fn take() -> Result<Self> {
        let me = thread::current().id();
        let mut now = holder();
        while let Some(other) = *now {
            if other == me {
                let why = "this thread is capturing a graph already; put the inner work on the same stream".into();
                return Err(Error::GraphCapture { call: "capture", node: String::new(), path: String::new(), why });
            }
            now = FREED.wait(now).unwrap_or_else(PoisonError::into_inner);
        }
        *now = Some(me);
        Ok(Self(()))
    }

    /// True if this thread took the turn and has not dropped it.
    pub(super) fn is_mine() -> bool {
        *holder() == Some(thread::current().id())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *holder() = None;
        FREED.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn one_thread_at_a_time_and_never_twice() {
        let inside = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let turn = Turn::take().unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        assert!(matches!(Turn::take(), Err(Error::GraphCapture { call: "capture", .. })));
                        assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1);
                        drop(turn);
                    }
                });
            }
        });
        // Left on another thread.
        let turn = Turn::take().unwrap();
        thread::scope(|scope| {
            scope.spawn(move || drop(turn));
        });
        drop(Turn::take().unwrap());
    }
}
