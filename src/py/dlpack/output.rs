//! Tensors that a call writes in place.
//!
//! DLPack knows nothing of autograd, and torch's C exchange hands out tensors that require grad like any other. A
//! kernel that wrote into one would leave a graph that computes the gradient of something else, so such tensors and
//! views of them are refused. The version of any other torch tensor is counted up, as torch's own in-place operations
//! do: backward then refuses values that it saved before the write. A call that is refused for another operand may
//! already have counted up a version.
#![allow(unsafe_code)]

use std::ops::Deref;

use pyo3::intern;
use pyo3::prelude::*;

use super::abi::{Device, Element};
use super::producer::known;
use super::tensor::Tensor;
use crate::error::Result;
use crate::overlap::{Operand, Span};

/// A tensor that may be written, as far as its library is concerned.
pub(in crate::py) struct Output(Tensor);

impl Deref for Output {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.0
    }
}

impl Output {
    /// [`Tensor::import`] of a tensor that the call writes.
    ///
    /// # Errors
    /// Those of [`Tensor::import`], and `Error::Mismatch` for a torch tensor that requires grad, or whose base does.
    pub(in crate::py) fn import(
        obj: &Bound<'_, PyAny>,
        operand: &'static str,
        stream: Option<isize>,
    ) -> PyResult<Self> {
        let tensor = Tensor::import(obj, operand, stream)?;
        touch(obj, &tensor)?;
        Ok(Self(tensor))
    }

    /// The elements of a contiguous, writable CPU tensor of this shape. [`Call::take`](super::Call::take) has checked
    /// that the call's other tensors lie elsewhere.
    pub(in crate::py) fn slice<T: Element>(&mut self, shape: &[usize]) -> Result<&mut [T]> {
        self.0.check(Device::CPU, T::DTYPE, shape)?;
        self.0.writable()?;
        // SAFETY: as in `Tensor::input`; `&mut self` and the call's check for overlaps make this specrs's only slice
        // over this memory. The module's contract with the caller excludes slices of other calls.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.0.first(), self.0.elements) })
    }
}

impl Operand for Output {
    fn span(&self) -> Span {
        self.0.span()
    }
}

/// Prepare a write to `tensor`, imported from `obj`: refuse it if autograd follows it, else count up its version.
///
/// # Errors
/// Those of [`Output::import`].
pub(super) fn touch(obj: &Bound<'_, PyAny>, tensor: &Tensor) -> PyResult<()> {
    let py = obj.py();
    let Some(increment_version) = known(obj)?.increment_version else { return Ok(()) };
    const WANT: &str = "a tensor outside autograd's graph, such as its .detach(); torch.no_grad() does not help";
    if obj.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
        return Err(tensor.mismatch("a tensor that requires grad", WANT).into());
    }
    // A view made under `no_grad` does not require grad, even if its base does.
    let base = obj.getattr(intern!(py, "_base"))?;
    if !base.is_none() && base.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
        return Err(tensor.mismatch("a view of a tensor that requires grad", WANT).into());
    }
    increment_version.bind(py).call1(((obj,),))?; // nothing for an inference tensor, which no graph can hold
    Ok(())
}
