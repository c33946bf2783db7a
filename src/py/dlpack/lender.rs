//! A tensor that a caller lends for many calls, looked at again before each of them.
//!
//! A DLPack tensor keeps its memory alive, with one gap: torch and numpy can resize what they own
//! (`untyped_storage().resize_`, `resize_`, `set_`, `resize(refcheck=False)`), which frees the memory although others
//! hold it. So an object that keeps borrowed memory asks for the tensor again and compares, which takes a fraction of a
//! microsecond. One case goes unnoticed: an array that is resized beneath another library's tensor
//! (`torch.from_numpy`).

use pyo3::intern;
use pyo3::prelude::*;

use super::output::touch;
use super::producer::runs_python;
use super::tensor::Tensor;
use crate::error::Error;

/// A lent tensor that can be resized, and its state when it was lent.
pub(in crate::py) struct Lender {
    object: Py<PyAny>,
    operand: &'static str,
    /// The tensor when it was lent, as an error shows it.
    was: String,
    /// The end of the error's text: since when the tensor should be unchanged, and what to do.
    since: &'static str,
    /// True if looking at the tensor may run code of its class.
    runs_python: bool,
    seen: Tensor,
    beneath: Option<Beneath>,
}

/// The owner of a lent tensor's bytes, where its library tells.
enum Beneath {
    /// The function that returns the size of a torch tensor's storage, which DLPack does not tell, and that size. The
    /// address does not suffice: a storage that shrank may lie where the larger one lay.
    Storage { nbytes: Py<PyAny>, bytes: usize },
    /// The numpy array beneath a numpy view, with its address and size. Resizing the array does not change the view's
    /// pointer.
    Base { array: Py<PyAny>, address: usize, bytes: usize },
}

impl Lender {
    /// A lender for `tensor`, which was imported from `object`; `None` if the object cannot be resized.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a tensor that reaches beyond its own storage; the exception of the look-up of its
    /// methods.
    pub(in crate::py) fn of(object: &Bound<'_, PyAny>, tensor: &Tensor) -> PyResult<Option<Self>> {
        Self::since("as when it was lent; a tensor that was resized has to be lent anew", object, tensor)
    }

    /// [`Self::of`], for one call.
    pub(super) fn of_call(object: &Bound<'_, PyAny>, tensor: &Tensor) -> PyResult<Option<Self>> {
        Self::since("as when the call took it; the code of another operand's class resized it", object, tensor)
    }

    fn since(since: &'static str, object: &Bound<'_, PyAny>, tensor: &Tensor) -> PyResult<Option<Self>> {
        let py = object.py();
        if !object.hasattr(intern!(py, "resize_"))? && !object.hasattr(intern!(py, "resize"))? {
            return Ok(None);
        }
        let seen = Tensor::import(object, tensor.operand, None)?;
        let beneath = Beneath::of(object, &seen)?;
        let (was, runs_python) = (seen.to_string(), runs_python(object)?);
        let object = object.clone().unbind();
        Ok(Some(Self { object, operand: tensor.operand, was, since, runs_python, seen, beneath }))
    }

    /// The name of the tensor in errors.
    pub(in crate::py) fn operand(&self) -> &'static str {
        self.operand
    }

    /// Returns whether [`Self::check`] may run code of the tensor's class.
    pub(super) fn runs_python(&self) -> bool {
        self.runs_python
    }

    /// Check that the tensor and the memory beneath it are unchanged since the tensor was lent.
    ///
    /// # Errors
    /// [`Error::Mismatch`] where they have changed; any exception that the object raises instead of giving its tensor.
    pub(in crate::py) fn check(&self, py: Python<'_>) -> PyResult<()> {
        match Tensor::import(self.object.bind(py), self.operand, None) {
            Ok(now) if !now.is(&self.seen) => return Err(self.changed(now.to_string())),
            Ok(_) => {}
            Err(e) => {
                let got = e.value(py).getattr(intern!(py, "got")).and_then(|got| got.extract::<String>());
                let Ok(got) = got else { return Err(e) };
                let refused = self.changed(got);
                refused.set_cause(py, Some(e));
                return Err(refused);
            }
        }
        match &self.beneath {
            None => Ok(()),
            Some(beneath) => match beneath.changed(py)? {
                None => Ok(()),
                Some(got) => Err(self.changed(got)),
            },
        }
    }

    /// [`Self::check`], before the tensor is written.
    ///
    /// # Errors
    /// Those of `check`, and those of [`super::Output::import`].
    pub(in crate::py) fn touch(&self, py: Python<'_>) -> PyResult<()> {
        self.check(py)?;
        touch(self.object.bind(py), &self.seen)
    }

    fn changed(&self, got: String) -> PyErr {
        Error::Mismatch { operand: self.operand, got, want: format!("{}, {}", self.was, self.since) }.into()
    }
}

impl Beneath {
    fn of(object: &Bound<'_, PyAny>, tensor: &Tensor) -> PyResult<Option<Self>> {
        let py = object.py();
        if let Some(storage) = object.getattr_opt(intern!(py, "untyped_storage"))? {
            let storage = storage.call0()?;
            let nbytes = storage.getattr(intern!(py, "nbytes"))?;
            let bytes: usize = nbytes.call0()?.extract()?;
            let first: usize = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
            let (low, high) = tensor.range;
            if low < high && (low < first || high - first > bytes) {
                let got = format!("{tensor} over a storage of {bytes} bytes at {first:#x}");
                return Err(tensor.mismatch(got, "a tensor within its storage").into());
            }
            return Ok(Some(Self::Storage { nbytes: nbytes.unbind(), bytes }));
        }
        let Some(base) = object.getattr_opt(intern!(py, "base"))? else { return Ok(None) };
        match extent(&base)? {
            Some((address, bytes)) => Ok(Some(Self::Base { array: base.unbind(), address, bytes })),
            None => Ok(None),
        }
    }

    /// A description of what is there now; `None` if nothing has changed.
    fn changed(&self, py: Python<'_>) -> PyResult<Option<String>> {
        match self {
            Self::Storage { nbytes, bytes: was } => {
                let bytes: usize = nbytes.bind(py).call0()?.extract()?;
                Ok((bytes != *was).then(|| format!("a storage of {bytes} bytes where {was} were")))
            }
            Self::Base { array, address, bytes } => {
                let now = extent(array.bind(py))?;
                let text = |(a, b): (usize, usize)| format!("a view of an array of {b} bytes at {a:#x}");
                let was = (*address, *bytes);
                let told =
                    || format!("{}, which was {} bytes at {:#x}", now.map_or("no array".into(), text), was.1, was.0);
                Ok((now != Some(was)).then(told))
            }
        }
    }
}

/// Address and bytes of a numpy array that can be resized.
fn extent(array: &Bound<'_, PyAny>) -> PyResult<Option<(usize, usize)>> {
    let py = array.py();
    if array.getattr_opt(intern!(py, "resize"))?.is_none() {
        return Ok(None);
    }
    let Some(interface) = array.getattr_opt(intern!(py, "__array_interface__"))? else { return Ok(None) };
    let (address, _read_only): (usize, bool) = interface.get_item(intern!(py, "data"))?.extract()?;
    Ok(Some((address, array.getattr(intern!(py, "nbytes"))?.extract()?)))
}
