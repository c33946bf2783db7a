//! Static memory, which is written round after round: tensors that a caller lends, or zeroed memory of specrs's own.
#![allow(unsafe_code)]

use std::alloc::Layout;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use super::abi::{DType, Device};
use super::place::{Place, Source};
use super::tensor::Tensor;
use crate::error::{Error, Result};
use crate::plan::Memory;

/// Alignment of specrs's own memory in bytes: enough for a cache line, and for any vector that a kernel loads.
const ALIGN: usize = 64;

/// First address, and one past the last, of all static memory, lent or specrs's own (which a caller could lend back).
/// No memory is lent twice: two writers would each hold a `&mut` to it, and each would change values that the other
/// relies on.
static LENT: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// The right to read and write a [`Place`]; there is one for each.
pub(in crate::py) struct Lent {
    place: Arc<Place>,
    /// True if nobody could write to the bytes since they were zeroed.
    fresh: bool,
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut lent = LENT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(i) = lent.iter().position(|l| *l == self.place.range()) {
            lent.swap_remove(i);
        }
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if matches!(self.place.source, Source::Tensor(_)) { "tensor" } else { "own" };
        write!(f, "Lent({kind}, {} bytes)", self.place.len)
    }
}

impl Lent {
    /// Zeroed memory of specrs's own. The system backs pages when they are first touched, so static buffers may be as
    /// large as the configuration's worst case.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the system does not have that much.
    pub(in crate::py) fn zeroed(name: &'static str, bytes: u64) -> Result<Self> {
        let none = || Error::Invalid {
            what: name,
            got: format!("{bytes} bytes"),
            why: "more than the system can give; a smaller max_batch or max_context_len needs less".into(),
        };
        let len = usize::try_from(bytes).map_err(|_| none())?;
        // Room to align by hand: an allocator that is asked for more than its own alignment clears the memory itself,
        // and so touches all of it.
        let size = len.checked_add(ALIGN).ok_or_else(none)?;
        let layout = Layout::from_size_align(size, align_of::<u64>()).map_err(|_| none())?;
        // SAFETY: a layout of more than 0 bytes.
        let at = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).ok_or_else(none)?;
        let skip = at.as_ptr().align_offset(ALIGN).min(ALIGN);
        // SAFETY: within the allocation, which has ALIGN bytes more than `len`.
        let data = unsafe { at.add(skip) };
        let place = Place { data, len, source: Source::Heap(at, layout) };
        LENT.lock().unwrap_or_else(PoisonError::into_inner).push(place.range());
        Ok(Self { place: Arc::new(place), fresh: true })
    }

    /// Memory of a caller's tensor. The tensor is kept alive, and its owner may use it between calls.
    ///
    /// # Errors
    /// Those of [`Tensor::lendable`]; [`Error::Mismatch`] for memory that is lent already.
    pub(in crate::py) fn tensor(tensor: Tensor, dtypes: &[DType]) -> Result<Self> {
        tensor.lendable(dtypes)?;
        let len = tensor.elements * tensor.dtype.size();
        let data = NonNull::new(tensor.first::<u64>()).map(NonNull::cast);
        let data = data.ok_or_else(|| tensor.mismatch("a null pointer", "data"))?;
        let (first, end) = (data.as_ptr() as usize, data.as_ptr() as usize + len);
        let mut lent = LENT.lock().unwrap_or_else(PoisonError::into_inner);
        if lent.iter().any(|l| l.0 < end && first < l.1) {
            return Err(tensor.mismatch("memory that other buffers write", "memory that nobody else writes"));
        }
        let place = Place { data, len, source: Source::Tensor(Box::new(tensor)) };
        lent.push(place.range());
        Ok(Self { place: Arc::new(place), fresh: false })
    }

    /// The memory, for views of it.
    pub(in crate::py) fn place(&self) -> Arc<Place> {
        self.place.clone()
    }
}

impl Tensor {
    /// Check that the tensor may be lent.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a tensor that is not on the CPU, whose element type is none of `dtypes`, or that is not
    /// contiguous, aligned and writable.
    pub(in crate::py) fn lendable(&self, dtypes: &[DType]) -> Result<()> {
        if !dtypes.contains(&self.dtype) && self.device == Device::CPU {
            let want = dtypes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
            return Err(self.mismatch(self.dtype, want));
        }
        self.check(Device::CPU, self.dtype, self.shape())?;
        self.writable()
    }
}

impl Memory for Lent {
    fn bytes(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes at `data`, kept by the place. There is one `Lent` for them: its `&self` and
        // `&mut self` keep specrs's readers apart from its writer, and the module's contract keeps the caller apart.
        unsafe { std::slice::from_raw_parts(self.place.data.as_ptr(), self.place.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.fresh = false;
        // SAFETY: as in `bytes`; `lendable` saw a writable tensor.
        unsafe { std::slice::from_raw_parts_mut(self.place.data.as_ptr(), self.place.len) }
    }

    fn is_zeroed(&self) -> bool {
        self.fresh
    }
}
