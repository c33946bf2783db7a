//! The operands of one launch: imported together, then taken as the typed views that the launch wants.

use pyo3::prelude::*;

use super::device::StreamArg;
use super::tensors::DeviceElement;
use crate::device::{Device, DeviceArray, DeviceSlice, Kernels, KvCacheView, Rows, Stream};
use crate::error::{Error, Result};
use crate::py::arg::detached;
use crate::py::dlpack::{Call, Output, Tensor};

/// The tensors of a call, by their place in the lists that were imported: inputs first, then outputs.
pub(super) struct Operands {
    inputs: Vec<Option<Tensor>>,
    outputs: Vec<Option<Output>>,
}

/// A tensor argument.
pub(super) type Arg<'a, 'py> = &'a Bound<'py, PyAny>;

/// Names of operands with their tensors.
type Named<'a, 'py> = &'a [(&'static str, Option<&'a Bound<'py, PyAny>>)];

/// Import the tensors of a call, and check that outputs may be written. The launch sees to it that they lie apart from
/// every other operand.
pub(super) fn import(inputs: Named<'_, '_>, outputs: Named<'_, '_>) -> PyResult<Operands> {
    let (inputs, outputs) = Call::on_device().take_lists(inputs, outputs)?;
    Ok(Operands { inputs, outputs })
}

impl Operands {
    fn tensor(&self, n: usize) -> Option<&Tensor> {
        match n.checked_sub(self.inputs.len()) {
            None => self.inputs[n].as_ref(),
            Some(n) => self.outputs[n].as_deref(),
        }
    }

    /// Operand `n`, where it is there.
    pub(super) fn maybe_rows(&self, n: usize, ordinal: i32) -> Result<Option<Rows>> {
        self.tensor(n).map(|t| t.device_rows(ordinal)).transpose()
    }

    /// Operand `n`, where it is there.
    pub(super) fn maybe<T: DeviceElement>(&self, n: usize, ordinal: i32) -> Result<Option<DeviceSlice<T>>> {
        self.tensor(n).map(|t| t.device_slice(ordinal)).transpose()
    }

    /// Operand `n` as an array of a format, where it is there.
    pub(super) fn maybe_array(&self, n: usize, ordinal: i32) -> Result<Option<DeviceArray>> {
        self.tensor(n).map(|t| t.device_array(ordinal)).transpose()
    }

    /// Operand `n`.
    pub(super) fn rows(&self, n: usize, ordinal: i32) -> Result<Rows> {
        self.maybe_rows(n, ordinal)?.ok_or_else(|| absent(n))
    }

    /// Operand `n`.
    pub(super) fn slice<T: DeviceElement>(&self, n: usize, ordinal: i32) -> Result<DeviceSlice<T>> {
        self.maybe(n, ordinal)?.ok_or_else(|| absent(n))
    }

    /// Columns of operand `n`, a matrix.
    pub(super) fn columns(&self, n: usize) -> Result<usize> {
        let [_, columns] = self.tensor(n).ok_or_else(|| absent(n))?.dims("[rows, columns]")?;
        Ok(columns)
    }

    /// Output `n` of the outputs, a KV cache.
    pub(super) fn cache(&self, n: usize, ordinal: i32) -> Result<KvCacheView> {
        let cache = self.outputs[n].as_ref().ok_or_else(|| absent(n))?;
        cache.device_kv_cache(ordinal)
    }

    /// Launch without the GIL on the device of the first output.
    pub(super) fn launch(
        &self,
        py: Python<'_>,
        stream: StreamArg,
        f: impl FnOnce(&Self, &Kernels, Stream, i32) -> Result<()> + Send,
    ) -> PyResult<()> {
        let stream = stream.get()?;
        detached(py, || {
            let first = self.outputs.iter().flatten().next().ok_or_else(|| absent(0))?;
            let ordinal = first.cuda_ordinal()?;
            f(self, Device::get(ordinal)?.kernels(), stream, ordinal)
        })
    }
}

fn absent(n: usize) -> Error {
    Error::Invalid { what: "operand", got: n.to_string(), why: "must be given".into() }
}
