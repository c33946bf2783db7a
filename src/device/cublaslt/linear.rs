//! The products of one device, and a weight's product: which algorithm, checked operands, one call.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};

use super::api::{ALIGN, Handle, Operands, Operation};
use super::cache;
use super::choice::{Choice, Classes};
use super::library::Library;
use super::shape::LinearShape;
use super::tune;
use crate::device::devices::Device;
use crate::device::driver::Stream;
use crate::device::kernels::LinearPlan;
use crate::device::libcuda;
use crate::device::rows::{FloatType, Rows};
use crate::device::tensor_map::TensorMap;
use crate::device::view::{DeviceSlice, device_mismatch};
use crate::error::{Error, Result, in_range};
use crate::overlap::{Operand, Span, disjoint};

/// Bytes that the workspace's address is a multiple of.
const WORKSPACE_ALIGN: u64 = 256;

/// cublasLt on one device, the choices for the shapes that were asked for, and the file that keeps them.
#[derive(Debug)]
pub struct Products {
    opened: Arc<Opened>,
    file: Option<PathBuf>,
    classes: Classes,
}

/// A handle of the library, and the choices of all that share it.
#[derive(Debug)]
struct Opened {
    handle: Handle,
    device: &'static Device,
    chosen: Mutex<Vec<Chosen>>,
}

/// A choice that was made.
#[derive(Debug)]
struct Chosen {
    split: Option<u32>,
    choice: Arc<Choice>,
    /// Files that have it, as far as this process knows.
    files: Vec<PathBuf>,
}

impl Products {
    /// Load cublasLt and open it on `device`. The library is looked for in the process (torch's own, once torch has
    /// used a GPU), in `folders`, then by the loader. Choices are kept in the user's cache folder: `SPECRS_CACHE`, or
    /// `specrs` under `XDG_CACHE_HOME` or `~/.cache`.
    ///
    /// # Errors
    /// [`Error::CudaUnavailable`] with every place that was looked at, where there is no library.
    pub fn open(device: &'static Device, folders: &[PathBuf]) -> Result<Self> {
        Self::with_file(device, folders, cache::path().as_deref())
    }

    /// Open as [`Self::open`] does, with choices kept in `file`, or nowhere.
    pub fn with_file(device: &'static Device, folders: &[PathBuf], file: Option<&Path>) -> Result<Self> {
        let library = Library::load(folders)?;
        let _current = device.context().enter()?;
        let handle = Handle::new(library)?;
        let opened = Arc::new(Opened { handle, device, chosen: Mutex::default() });
        Ok(Self { opened, file: file.map(Path::to_owned), classes: Classes::One })
    }

    /// The same choices, for an engine that keeps them in the user's cache folder as the environment names it now.
    pub fn keeping(&self) -> Self {
        self.keeping_in(cache::path().as_deref())
    }

    /// The same choices, kept in `file`, or nowhere; [without the contract](Self::without_contract) nowhere.
    pub fn keeping_in(&self, file: Option<&Path>) -> Self {
        let file = file.filter(|_| self.classes == Classes::One).map(Path::to_owned);
        Self { opened: self.opened.clone(), file, classes: self.classes }
    }

    /// The same library without the promise of this module: each bucket of rows gets the fastest algorithm of any class
    /// ([`Classes::Any`]), so that the same row may have other bits among other numbers of rows. Measured in each
    /// process, kept in no file. For the bench of the promise's cost (`benches/gpu/engine.py`), and for nothing else.
    pub fn without_contract(&self) -> Self {
        Self { opened: self.opened.clone(), file: None, classes: Classes::Any }
    }

    /// The class of bits and the algorithms for `shape`, chosen once for all that share these choices, whatever file
    /// each keeps them in: so two engines of a process give the same bits. A file that has no such choice is given it. `split`
    /// asks for one split of K, such as another machine's; else the class with the least time over all numbers of rows is
    /// taken.
    ///
    /// The algorithms are run against each other on this device before they are taken: every row of the product of
    /// reproducible operands, whose sums cancel so that rounding alone is left, must have the same bits at the ends and in
    /// the middle of every bucket of rows, at several places among the rows. A choice that an earlier process measured is checked in the same way and then
    /// taken; where it fails, or its file cannot be read, all is measured anew (one to six seconds a shape on an H200).
    ///
    /// Allocates up to eight weights of the shape and `max_rows` rows of operands and results while it runs.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Mismatch`] for a shape that cannot be; [`Error::Invalid`] where no class covers
    /// every number of rows, with what would work, and for a `split` that is asked for [without the
    /// contract](Self::without_contract); [`Error::DeviceMemory`].
    pub fn choice(&self, shape: LinearShape, split: Option<u32>) -> Result<Arc<Choice>> {
        shape.check()?;
        if let Some(split) = split {
            in_range("linear split", split, 1, 64)?;
            if self.classes == Classes::Any {
                let why =
                    "without the contract each bucket has the split of its fastest algorithm; ask for none".into();
                return Err(Error::Invalid { what: "linear split", got: split.to_string(), why });
            }
        }
        // Held while a choice is made: two at once would time each other.
        let Opened { handle, device, chosen } = &*self.opened;
        let mut chosen = chosen.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |c: &Chosen| c.split == split && c.choice.shape == shape && c.choice.classes == self.classes;
        if let Some(known) = chosen.iter_mut().find(|c| same(c)) {
            if let Some(file) = self.file.as_ref().filter(|file| !known.files.contains(file)) {
                tune::keep(handle, device, &known.choice, split, file);
                known.files.push(file.clone());
            }
            return Ok(known.choice.clone());
        }
        let made = match self.classes {
            Classes::One => tune::choose(handle, device, shape, split, self.file.as_deref()),
            Classes::Any => tune::fastest_of_any(handle, device, shape),
        };
        let _ = device.collect()?; // takes back the memory that trials used
        let choice = Arc::new(made?);
        chosen.push(Chosen { split, choice: choice.clone(), files: self.file.iter().cloned().collect() });
        Ok(choice)
    }

    /// Facts on which the bits of products depend, as JSON: device, driver, library and, for each shape that was
    /// chosen, the split of K, the fingerprint of the class, and the algorithm of each bucket with its time. `contract`
    /// is false [without it](Self::without_contract).
    pub fn numerics(&self) -> String {
        let Opened { handle, device, chosen } = &*self.opened;
        let chosen = chosen.lock().unwrap_or_else(PoisonError::into_inner);
        let weights: Vec<Value> = chosen
            .iter()
            .filter(|c| c.choice.classes == self.classes)
            .map(|Chosen { split: pinned, choice, .. }| {
                let mut entry = cache::of(choice);
                if let Value::Object(entry) = &mut entry {
                    entry.insert("shape".into(), json!(choice.shape.to_string()));
                    entry.insert("pinned".into(), json!(pinned.is_some()));
                    entry.insert("measured".into(), json!(choice.measured));
                }
                entry
            })
            .collect();
        let capability = device.capability();
        json!({
            "device": device.name(),
            "capability": format!("{}.{}", capability / 10, capability % 10),
            "driver_cuda": libcuda::driver_version(),
            "cublaslt": handle.library.version,
            "cublaslt_path": handle.library.path,
            "contract": self.classes == Classes::One,
            "cache": self.file.as_ref().map(|f| f.display().to_string()),
            "weights": weights,
        })
        .to_string()
    }

    /// The product with `weight`, `[outputs, inputs]` row-major, by the algorithms of `choice`.
    ///
    /// # Safety
    /// Weight and bias stay where and as they are until the last launch, and the last replay of a graph that captured
    /// one, has finished. No launch of such a graph writes them: a product there may read its weight before the launch in
    /// front of it has ended.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a weight or bias that is not as the choice's shape has it, on another device, or not
    /// aligned to 16 bytes.
    pub unsafe fn linear(self: &Arc<Self>, choice: &Arc<Choice>, weight: &Rows, bias: Option<&Rows>) -> Result<Linear> {
        let shape = choice.shape;
        let (n, k) = (shape.outputs as usize, shape.inputs as usize);
        self.fits(weight, [n, k], shape.element)?;
        if let Some(bias) = bias {
            self.fits(bias, [1, n], shape.output())?;
        }
        if bias.is_some() != shape.bias {
            let (got, want) = (bias.map_or("none", |_| "one"), if shape.bias { "one" } else { "none" });
            return Err(Error::Mismatch { operand: "bias", got: got.into(), want: want.into() });
        }
        let operation = Operation::new(self.opened.handle.library, shape, bias.map(Rows::address))?;
        let mut own = Vec::with_capacity(choice.buckets.len());
        for bucket in &choice.buckets {
            own.push(match (bucket.own(), &self.opened.device.kernels().linear) {
                (Some(plan), Some(kernel)) => Some((plan, kernel.weight_map(&plan, weight.address())?)),
                _ => None,
            });
        }
        let (weight, bias, choice) = (*weight, bias.span(), choice.clone());
        Ok(Linear { operation, weight, bias, own, choice, products: self.clone() })
    }

    /// Contiguous rows of these sizes on the device, aligned.
    fn fits(&self, rows: &Rows, [count, columns]: [usize; 2], float: FloatType) -> Result<()> {
        self.on_device(rows.what(), rows.device())?;
        rows.expect(count, columns, float)?;
        if rows.stride() != columns {
            let (got, want) = (format!("{} elements from row to row", rows.stride()), format!("{columns}: no gaps"));
            return Err(Error::Mismatch { operand: rows.what(), got, want });
        }
        aligned(rows.what(), rows.address(), ALIGN)
    }

    fn on_device(&self, operand: &'static str, on: i32) -> Result<()> {
        let ordinal = self.opened.device.context().ordinal();
        if on == ordinal { Ok(()) } else { Err(device_mismatch(operand, on, ordinal, "the product is launched")) }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // The handle is destroyed, right after this, where it was made.
        if let Ok(current) = self.device.context().enter() {
            self.handle.destroy();
            drop(current);
        }
    }
}

fn aligned(operand: &'static str, address: u64, to: u64) -> Result<()> {
    if address.is_multiple_of(to) {
        return Ok(());
    }
    let (got, want) = (format!("device address {address:#x}"), format!("an address aligned to {to} bytes"));
    Err(Error::Mismatch { operand, got, want })
}

/// One weight's product, `y = x W^T (+ bias)`: a row's bits depend on the row and the weight alone, not on how many
/// rows there are, nor on the row's place among them.
#[derive(Debug)]
pub struct Linear {
    operation: Operation,
    weight: Rows,
    /// The memory of the bias, whose address the operation has.
    bias: Span,
    /// By bucket, the package's own product, where it is taken, with the weight's map.
    own: Vec<Option<(LinearPlan, TensorMap)>>,
    choice: Arc<Choice>,
    products: Arc<Products>,
}

impl Linear {
    /// The choice for the product's shape.
    pub fn choice(&self) -> &Arc<Choice> {
        &self.choice
    }

    /// Put the product of the first `rows` rows of `x` on `stream`, into the first `rows` rows of `y`. `workspace` is
    /// shared by all products of a stream. Allocates nothing on the device and waits for nothing: it can be captured.
    ///
    /// # Errors
    /// Before anything is launched: [`Error::OutOfRange`] for more rows than the choice covers; [`Error::Capacity`] for an
    /// operand with fewer rows, or too small a workspace; [`Error::Mismatch`] for one of another width or type, on another
    /// device, not aligned (x and y to 16 bytes, workspace to 256), or a y or workspace that overlaps another operand.
    pub fn launch(&self, stream: Stream, rows: u32, x: &Rows, y: &Rows, workspace: &DeviceSlice<u8>) -> Result<()> {
        let (shape, products) = (&self.choice.shape, &self.products);
        in_range("linear rows", rows, 0, shape.max_rows.into())?;
        for (view, columns, element) in [(x, shape.inputs, shape.element), (y, shape.outputs, shape.output())] {
            products.fits(view, [view.rows(), columns as usize], element)?;
            if view.rows() < rows as usize {
                let (need, have) = (rows.into(), view.rows() as u64);
                return Err(Error::Capacity { what: view.what(), need, have, hint: "in rows".into() });
            }
        }
        products.on_device("workspace", workspace.device())?;
        aligned("workspace", workspace.address(), WORKSPACE_ALIGN)?;
        let Some((index, bucket)) = self.choice.bucket(rows) else {
            return Err(Error::OutOfRange {
                what: "linear rows",
                got: rows.into(),
                min: 0,
                max: shape.max_rows.into(),
            });
        };
        if workspace.len() < bucket.workspace {
            let hint = format!("bytes for {rows} rows; `workspace_bytes` of the choice is enough for any");
            let (need, have) = (bucket.workspace as u64, workspace.len() as u64);
            return Err(Error::Capacity { what: "workspace", need, have, hint });
        }
        disjoint(&[&[workspace.span(), y.span()]], &[&[x.span(), self.weight.span(), self.bias]])?;
        if rows == 0 {
            return Ok(());
        }
        let operands = Operands {
            weight: self.weight.address(),
            x: x.address(),
            y: y.address(),
            workspace: workspace.address(),
            workspace_bytes: workspace.len(),
        };
        let device = products.opened.device;
        let _current = device.context().enter()?;
        if let (Some((plan, map)), Some(kernel)) = (&self.own[index], &device.kernels().linear) {
            // SAFETY: as below; the map is of this weight and plan.
            return unsafe {
                kernel.launch_unchecked(stream, plan, map, x.address(), rows, (y.address(), shape.f32_output))
            };
        }
        // SAFETY: the context is current; sizes, devices and overlaps were checked just now, and the makers of the views
        // (`Products::linear` for the weight) promised that the memory stays.
        unsafe { self.operation.launch(&products.opened.handle, &bucket.algo, rows, &operands, stream) }
    }
}
