//! Lengths behind a type that says whether the host may read them.

use crate::error::{Error, Result};

/// The committed lengths of a batch, in tokens.
///
/// A function that must know the lengths on the CPU takes them by [`Lens::host`], which refuses device lengths by a
/// typed error instead of reading a host mirror that is absent or stale (sglang pull request 26738). A bound on
/// them is enough to size something.
///
/// ```
/// use specrs::plan::Lens;
/// assert_eq!(Lens::Host(&[3, 5]).host("verify")?, &[3, 5]);
/// let on_device = Lens::Device { batch: 2, at_most: 4096 };
/// assert_eq!(on_device.batch(), 2);
/// assert!(on_device.host("verify").is_err());
/// # Ok::<(), specrs::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lens<'a> {
    /// The host knows them.
    Host(&'a [u32]),
    /// The lengths live on the device alone.
    Device {
        /// Requests.
        batch: u32,
        /// No length exceeds this.
        at_most: u32,
    },
}

impl<'a> Lens<'a> {
    /// Requests.
    pub fn batch(&self) -> usize {
        match *self {
            Lens::Host(lens) => lens.len(),
            Lens::Device { batch, .. } => batch as usize,
        }
    }

    /// The lengths, for the host function `who`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for lengths that live on the device.
    pub fn host(&self, who: &'static str) -> Result<&'a [u32]> {
        match *self {
            Lens::Host(lens) => Ok(lens),
            Lens::Device { batch, at_most } => Err(Error::Invalid {
                what: "lens",
                got: format!("device lengths of {batch} requests (<= {at_most})"),
                why: format!("{who} on the host reads lengths; plan on the device, or copy the lengths to the host"),
            }),
        }
    }
}
