//! Products by cublasLt for Python: choices, launches on torch's tensors, the report. `python/specrs/device.py` opens them.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;

use super::device::StreamArg;
use super::tensors::LentLinear;
use crate::device::{Device, FloatType, LinearShape, Mirror, Products};
use crate::py::arg::{Int, detached};
use crate::py::dlpack::{Call, Output};

register! { fn _device_fill, _device_fingerprint, _device_linear; class DeviceLinear, DeviceProducts; }

/// cublasLt on CUDA device `ordinal`. The library is looked for in the process, in `folders`, then by the loader.
/// Choices are kept in the file `cache`; `None` keeps none, and `""` means the user's cache folder (`SPECRS_CACHE`,
/// `XDG_CACHE_HOME`, `~/.cache`).
///
/// Raises `CudaError` where there is no CUDA or no cublasLt, with every place that was looked at.
#[pyclass(frozen, name = "_DeviceProducts", module = "specrs._specrs")]
pub(super) struct DeviceProducts(Arc<Products>);

/// One weight's product, from `_DeviceProducts.linear`.
#[pyclass(frozen, name = "_DeviceLinear", module = "specrs._specrs")]
pub(super) struct DeviceLinear(LentLinear);

#[pymethods]
impl DeviceProducts {
    #[new]
    #[pyo3(signature = (ordinal, folders, cache=None))]
    fn new(py: Python<'_>, ordinal: Int, folders: Vec<PathBuf>, cache: Option<PathBuf>) -> PyResult<Self> {
        let ordinal = ordinal.i32("CUDA device")?;
        detached(py, move || {
            let device = Device::get(ordinal)?;
            let opened = match cache {
                Some(file) if file.as_os_str().is_empty() => Products::open(device, &folders),
                file => Products::with_file(device, &folders, file.as_deref()),
            };
            Ok(Self(Arc::new(opened?)))
        })
    }

    /// The same choices, kept in the file `cache` as well: a choice that is known is stored there too, where the file has
    /// none for its shape. `None` keeps nothing, `""` means the user's cache folder as the environment names it now.
    #[pyo3(signature = (cache=None))]
    fn keeping(&self, cache: Option<PathBuf>) -> Self {
        Self(Arc::new(match cache {
            Some(file) if file.as_os_str().is_empty() => self.0.keeping(),
            file => self.0.keeping_in(file.as_deref()),
        }))
    }

    /// For benches alone, which measure what exactness costs: the same library, and for each number of rows the fastest
    /// algorithm of any class of bits. A row's bits then change with the number of rows, so speculation is not exact.
    /// Measured in each process and kept in no file; `numerics` says it, and so does `LLM.numerics`.
    fn without_contract(&self) -> Self {
        Self(Arc::new(self.0.without_contract()))
    }

    /// The product with `weight`, `[outputs, inputs]` of bfloat16 or float16 on the device: up to `max_rows` rows of x
    /// give rows of the same type, or of float32 with `f32_output`, plus `bias` (`[outputs]`). `split` asks for one split of K
    /// instead of the fastest class of bits. Measures, or checks what an earlier process measured. The weight and the
    /// bias are kept, and must not be changed in shape.
    #[pyo3(signature = (weight, max_rows, *, bias=None, f32_output=false, split=None))]
    fn linear(
        &self,
        weight: &Bound<'_, PyAny>,
        max_rows: Int,
        bias: Option<&Bound<'_, PyAny>>,
        f32_output: bool,
        split: Option<Int>,
    ) -> PyResult<DeviceLinear> {
        let py = weight.py();
        let (max_rows, split) = (max_rows.u32("linear max_rows")?, split.map(|s| s.u32("linear split")).transpose()?);
        let ([weight], [bias], []) = Call::on_device().take([("weight", weight)], [("bias", bias)], [])?;
        detached(py, || {
            let view = weight.device_rows(weight.cuda_ordinal()?)?;
            let side = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
            let shape = LinearShape {
                outputs: side(view.rows()),
                inputs: side(view.columns()),
                element: view.float(),
                f32_output,
                bias: bias.is_some(),
                max_rows,
            };
            if view.float() == FloatType::F32 {
                return Err(weight.mismatch("float32", "bfloat16 or float16"));
            }
            let choice = self.0.choice(shape, split)?;
            Ok(DeviceLinear(LentLinear::new(&self.0, &choice, weight, bias)?))
        })
    }

    /// What the bits of products depend on, as JSON: device, driver, library; of each shape that was asked for its split
    /// of K, the fingerprint of its class, and the algorithm of each bucket of rows with its microseconds; `contract` is
    /// false for those of `without_contract`.
    fn numerics(&self, py: Python<'_>) -> PyResult<String> {
        detached(py, || Ok(self.0.numerics()))
    }
}

#[pymethods]
impl DeviceLinear {
    /// Bytes of workspace that a launch of up to `max_rows` rows needs at most.
    #[getter]
    fn workspace_bytes(&self) -> usize {
        self.0.linear().choice().workspace_bytes()
    }

    /// Parts that K is split into.
    #[getter]
    fn split(&self) -> u32 {
        self.0.linear().choice().split()
    }

    /// The class of bits by a number.
    #[getter]
    fn fingerprint(&self) -> u64 {
        self.0.linear().choice().fingerprint()
    }

    /// Put the product of the first `rows` rows of `x` into those of `y`, on the raw stream `stream`. `workspace`:
    /// `uint8[>= workspace_bytes]`. Raises `ConfigError`, before anything is launched, for operands that do not fit.
    fn launch(
        &self,
        rows: Int,
        x: &Bound<'_, PyAny>,
        y: &Bound<'_, PyAny>,
        workspace: &Bound<'_, PyAny>,
        stream: StreamArg,
    ) -> PyResult<()> {
        let py = x.py();
        let (rows, stream) = (rows.u32("linear rows")?, stream.get()?);
        let written = [("workspace", workspace), ("y", y)];
        let ([x], [], [workspace, y]) = Call::on_device().take([("x", x)], [], written)?;
        detached(py, || {
            let ordinal = x.cuda_ordinal()?;
            [&y, &workspace].into_iter().try_for_each(|output| output.writable())?;
            let (xs, ys, ws) =
                (x.device_rows(ordinal)?, y.device_rows(ordinal)?, workspace.device_slice::<u8>(ordinal)?);
            self.0.linear().launch(stream, rows, &xs, &ys, &ws)
        })
    }
}

/// Write reproducible values to `out` (bfloat16 or float16), on the raw stream `stream`, of magnitudes around
/// 2^`exponent`. `mirror`: 0 for rows as they come, 1 for rows that read the same from both ends, 2 for rows whose second
/// half is the first from its end, negated.
#[pyfunction]
fn _device_fill(out: &Bound<'_, PyAny>, seed: Int, exponent: Int, mirror: Int, stream: StreamArg) -> PyResult<()> {
    let (seed, stream, exponent) = (seed.u32("seed")?, stream.get()?, exponent.i32("exponent")?);
    let mirror = mirror.within("mirror", 0, 2)?;
    let out_tensor = Output::import(out, "out", Some(-1))?;
    detached(out.py(), || {
        let ordinal = out_tensor.cuda_ordinal()?;
        out_tensor.writable()?;
        let view = out_tensor.device_rows(ordinal)?;
        let mirror = [Mirror::None, Mirror::Equal, Mirror::Negated][mirror as usize];
        Device::get(ordinal)?.kernels().fingerprint.fill(stream, &view, seed, exponent, mirror)
    })
}

/// Write the fingerprints of the first `rows` rows of `matrix` to `out` (int64), on the raw stream `stream`.
#[pyfunction]
fn _device_fingerprint(
    matrix: &Bound<'_, PyAny>,
    rows: Int,
    out: &Bound<'_, PyAny>,
    stream: StreamArg,
) -> PyResult<()> {
    let (rows, stream) = (rows.u32("rows")?, stream.get()?);
    let py = out.py();
    let ([tensor], [], [prints]) = Call::on_device().take([("matrix", matrix)], [], [("out", out)])?;
    detached(py, || {
        let ordinal = tensor.cuda_ordinal()?;
        prints.writable()?;
        let (view, words) = (tensor.device_rows(ordinal)?, prints.device_slice::<u64>(ordinal)?);
        Device::get(ordinal)?.kernels().fingerprint.rows(stream, &view, rows, &words)
    })
}

/// The product `y = x W^T` of up to 16 rows by the package's own kernel, on the raw stream `stream`: `weight`
/// `[outputs, inputs]` and `x` of bfloat16, `y` of bfloat16 or float32, K in `split` parts. False, and nothing is launched,
/// where the kernel has none of these sizes, or the GPU has not the kernel. For tests: `_DeviceProducts` chooses.
#[pyfunction]
fn _device_linear(
    weight: &Bound<'_, PyAny>,
    x: &Bound<'_, PyAny>,
    y: &Bound<'_, PyAny>,
    split: Int,
    stream: StreamArg,
) -> PyResult<bool> {
    let (split, stream) = (split.u32("linear split")?, stream.get()?);
    let py = y.py();
    let ([weight, x], [], [y]) = Call::on_device().take([("weight", weight), ("x", x)], [], [("y", y)])?;
    detached(py, || {
        let ordinal = weight.cuda_ordinal()?;
        y.writable()?;
        let (weight, x, y) = (weight.device_rows(ordinal)?, x.device_rows(ordinal)?, y.device_rows(ordinal)?);
        let side = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let Some(kernel) = &Device::get(ordinal)?.kernels().linear else { return Ok(false) };
        let Some(plan) = kernel.plan(side(weight.rows()), side(weight.columns()), split) else { return Ok(false) };
        kernel.launch(stream, &plan, &weight, &x, &y).map(|()| true)
    })
}
