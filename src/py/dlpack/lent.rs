//! Static memory: what a caller lends to be written round after round, or zeroed memory of ours in its stead.

use std::alloc::Layout;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::Tensor;
use super::abi::{DType, Device};
use crate::error::{Error, Result};
use crate::plan::Memory;

/// Bytes that memory of ours is aligned to: a cache line, and any vector that a kernel loads.
const ALIGN: usize = 64;

/// Memory that stays where it is. [`Lent`] alone makes slices of it; others know its address, and keep it alive.
pub(in crate::py) struct Place {
    data: NonNull<u8>, // `len` initialised bytes, aligned to the elements
    len: usize,
    source: Source,
}

/// Who owns the bytes.
enum Source {
    /// A caller's tensor: contiguous, writable, on the CPU.
    Tensor(#[allow(dead_code, reason = "held for its memory")] Box<Tensor>),
    /// `alloc_zeroed` of this layout; nothing was allocated for a layout without bytes.
    Heap(Layout),
}

// SAFETY: the memory is plain bytes that `source` keeps; a DLPack deleter may run on any thread; `Place` itself never
// reads or writes them.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

impl Place {
    /// Address of the first byte; dangling where there is none.
    pub(super) fn data(&self) -> *mut u8 {
        self.data.as_ptr()
    }

    /// Bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Source::Heap(layout) = self.source
            && layout.size() > 0
        {
            // SAFETY: allocated with this layout in `Lent::zeroed`, and freed once.
            unsafe { std::alloc::dealloc(self.data.as_ptr(), layout) }
        }
    }
}

/// The right to read and write a [`Place`]; there is one for each.
pub(in crate::py) struct Lent(Arc<Place>);

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if matches!(self.0.source, Source::Tensor(_)) { "tensor" } else { "own" };
        write!(f, "Lent({kind}, {} bytes)", self.0.len)
    }
}

impl Lent {
    /// Zeroed memory of ours. What was never touched costs no memory, so static buffers may be as large as the
    /// configuration's worst case.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the system has not that much.
    pub(in crate::py) fn zeroed(name: &'static str, bytes: u64) -> Result<Self> {
        let none = || Error::Invalid {
            what: name,
            got: format!("{bytes} bytes"),
            why: "more than the system can give; a smaller max_batch or max_context_len needs less".into(),
        };
        let len = usize::try_from(bytes).map_err(|_| none())?;
        let layout = Layout::from_size_align(len, ALIGN).map_err(|_| none())?;
        let data = match len {
            0 => Some(NonNull::<[u64; 8]>::dangling().cast()),
            // SAFETY: a layout of more than 0 bytes.
            _ => NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }),
        };
        Ok(Self(Arc::new(Place { data: data.ok_or_else(none)?, len, source: Source::Heap(layout) })))
    }

    /// A caller's tensor. It is kept alive, and its owner may use it between calls.
    ///
    /// # Errors
    /// As [`Tensor::lendable`].
    pub(in crate::py) fn tensor(tensor: Tensor, dtypes: &[DType]) -> Result<Self> {
        tensor.lendable(dtypes, &[])?;
        let len = tensor.elements * tensor.dtype.size();
        let data = NonNull::new(tensor.first::<u64>()).map(NonNull::cast);
        let data = data.ok_or_else(|| tensor.mismatch("a null pointer", "data"))?;
        Ok(Self(Arc::new(Place { data, len, source: Source::Tensor(tensor.into()) })))
    }

    /// The memory, for views of it.
    pub(in crate::py) fn place(&self) -> Arc<Place> {
        self.0.clone()
    }
}

impl Tensor {
    /// Check that this may be lent.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a tensor that is not on the CPU, whose element type is none of `dtypes`, that is not
    /// contiguous, aligned and writable, or shares memory with one of `beside`.
    pub(in crate::py) fn lendable(&self, dtypes: &[DType], beside: &[&Tensor]) -> Result<()> {
        if !dtypes.contains(&self.dtype) && self.device == Device::CPU {
            let want = dtypes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
            return Err(self.mismatch(self.dtype, want));
        }
        self.check(Device::CPU, self.dtype, self.shape())?;
        self.writable(beside)
    }
}

impl Memory for Lent {
    fn bytes(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes at `data`, kept by the place. `&self` and `&mut self` of the one `Lent` there
        // is for them keep readers of ours apart from its writer, and the module's contract does the caller.
        unsafe { std::slice::from_raw_parts(self.0.data.as_ptr(), self.0.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; `lendable` saw a writable tensor.
        unsafe { std::slice::from_raw_parts_mut(self.0.data.as_ptr(), self.0.len) }
    }
}
