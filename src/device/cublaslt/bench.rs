//! A product tried on the device: its rows' fingerprints, and its time.

use std::collections::HashMap;
use std::sync::Arc;

use super::api::{Handle, Operands, Operation};
use super::library::Algo;
use super::shape::LinearShape;
use crate::device::context::Context;
use crate::device::devices::Device;
use crate::device::kernels::{LinearPlan, MAX_LINEAR_ROWS, Mirror};
use crate::device::memory::DeviceBuffer;
use crate::device::rows::{FloatType, Rows};
use crate::device::stream::{OwnStream, RawEvent};
use crate::error::{Error, Result};

/// Rows of x behind the most that a product has: small products are tried at other places among them, too.
const MORE: u32 = 128;
/// Places at which a number of rows is tried.
const PLACES: u32 = 16;
/// Bytes of weights that launches take turns with, so that none finds its own in the cache.
const ROTATED: usize = 256 << 20;
const MAX_COPIES: usize = 8;
/// Largest workspace that an algorithm may ask for.
pub(super) const MAX_WORKSPACE: usize = 512 << 20;
/// Seeds of the operands.
const SEEDS: [u32; 3] = [1, 2, 3];

/// Reproducible operands of a shape, and room for its result. Freed when it is dropped.
pub(super) struct Bench<'a> {
    handle: &'a Handle,
    operation: Operation,
    shape: LinearShape,
    context: Arc<Context>,
    device: &'static Device,
    weights: DeviceBuffer,
    copies: usize,
    x: DeviceBuffer,
    y: DeviceBuffer,
    _bias: DeviceBuffer,
    prints: DeviceBuffer,
    workspace: DeviceBuffer,
    /// The fingerprint of a row of y that nothing was written to.
    untouched: u64,
    /// Fingerprints of the rows of x W^T, by the class that they are of: the fingerprint of row 0. The operands cancel
    /// (see `cuda/fingerprint.cu`), so two orders of adding do not share one.
    known: HashMap<u64, Vec<Option<u64>>>,
    stream: OwnStream,
}

/// A means to a product.
#[derive(Debug, Clone, Copy)]
pub(super) enum Way {
    /// An algorithm of cublasLt.
    Library(Algo),
    /// `cuda/linear.cu`, for a few rows.
    Own(LinearPlan),
}

/// Outcome of one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ran {
    /// Every row had the bits of its class, which is this one.
    Class(u64),
    /// A row had others than the same row of another run of the class, or the run wrote behind its rows.
    Differs,
    /// The algorithm cannot do this number of rows.
    Unable,
}

impl<'a> Bench<'a> {
    /// Allocate and fill; `rotate` where times are wanted.
    pub(super) fn new(
        handle: &'a Handle,
        device: &'static Device,
        shape: LinearShape,
        rotate: bool,
        workspace_bytes: usize,
    ) -> Result<Self> {
        let context = device.context().clone();
        let current = context.enter()?;
        let (n, k, m) = (shape.outputs as usize, shape.inputs as usize, shape.max_rows as usize);
        let bytes = shape.weight_bytes().next_multiple_of(256);
        let copies = if rotate { ROTATED.div_ceil(bytes).clamp(1, MAX_COPIES) } else { 1 };
        let buffer = |what, bytes| DeviceBuffer::in_context(&context, what, bytes);
        let weights = buffer("weights to try products with", bytes * copies)?;
        let x = buffer("rows to try products with", (m + MORE as usize) * k * shape.element.bytes() as usize)?;
        let y = buffer("results to compare products by", (m + 1) * n * shape.output().bytes() as usize)?;
        let bias = buffer("a bias to try products with", n * shape.element.bytes() as usize)?;
        let prints = buffer("fingerprints of products", (m + 1) * 8)?;
        let workspace = buffer("workspace to try products with", workspace_bytes)?;
        let operation = Operation::new(handle.library, shape, shape.bias.then(|| bias.address()))?;
        let stream = OwnStream::new()?;
        let ordinal = context.ordinal();
        let fill = |what, at: u64, dims: [usize; 2], seed, exponent, mirror| {
            // SAFETY: the buffers were just made for these sizes and live until `stream` has been waited for.
            let view = unsafe { Rows::from_raw(what, at, dims, dims[1], shape.element, ordinal) }?;
            device.kernels().fingerprint.fill(stream.stream(), &view, seed, exponent, mirror)
        };
        for copy in 0..copies {
            fill("weight", weights.address() + (copy * bytes) as u64, [n, k], SEEDS[0], 0, Mirror::Negated)?;
        }
        fill("x", x.address(), [m + MORE as usize, k], SEEDS[1], 0, Mirror::Equal)?;
        fill("bias", bias.address(), [1, n], SEEDS[2], -20, Mirror::None)?; // not larger than what the sums leave
        let mut bench = Self {
            handle,
            operation,
            shape,
            context: context.clone(),
            device,
            weights,
            copies,
            x,
            y,
            _bias: bias,
            prints,
            workspace,
            untouched: 0,
            known: HashMap::new(),
            stream,
        };
        bench.y.fill(0, n * shape.output().bytes() as usize, 0xFF, bench.stream.stream())?;
        bench.untouched = bench.fingerprints(1)?[0];
        drop(current);
        Ok(bench)
    }

    /// Rows that places are a multiple of: of a row's bytes that many are a multiple of 16.
    fn place(&self) -> u32 {
        if self.shape.inputs.is_multiple_of(8) { 1 } else { 8 }
    }

    pub(super) fn operation(&self) -> &Operation {
        &self.operation
    }

    fn y_view(&self) -> Result<Rows> {
        let dims = [self.shape.max_rows as usize + 1, self.shape.outputs as usize];
        // SAFETY: `y` was made for these sizes; whoever launches with the view waits for the stream while `self` lives.
        unsafe { Rows::from_raw("y", self.y.address(), dims, dims[1], self.shape.output(), self.context.ordinal()) }
    }

    /// Fingerprints of the first `rows` rows of y.
    fn fingerprints(&self, rows: u32) -> Result<Vec<u64>> {
        let view = self.y_view()?;
        // SAFETY: within the buffer, which lives until the copy below has been waited for.
        let out = unsafe { self.prints.slice("fingerprints", 0, self.shape.max_rows as usize + 1) }?;
        self.device.kernels().fingerprint.rows(self.stream.stream(), &view, rows, &out)?;
        let bytes = self.prints.read(0, rows as usize * 8, self.stream.stream())?;
        let word = |b: &[u8]| b.iter().rev().fold(0u64, |w, b| w << 8 | u64::from(*b)); // little-endian, as the device
        Ok(bytes.chunks_exact(8).map(word).collect())
    }

    fn operands(&self, first: u32, copy: usize) -> Operands {
        let weight = self.weights.address() + (copy * self.shape.weight_bytes().next_multiple_of(256)) as u64;
        let x = self.x.address() + u64::from(first) * u64::from(self.shape.inputs) * self.shape.element.bytes();
        let (workspace, workspace_bytes) = (self.workspace.address(), self.workspace.bytes());
        Operands { weight, x, y: self.y.address(), workspace, workspace_bytes }
    }

    /// Put `rows` rows from row `first` of x on, with a copy of the weight, on the stream.
    ///
    /// # Safety
    /// The context is current; whoever calls waits for the stream while `self` lives.
    unsafe fn launch(&self, way: Way, rows: u32, first: u32, copy: usize) -> Result<()> {
        let (operands, stream) = (self.operands(first, copy), self.stream.stream());
        match way {
            // SAFETY: the buffers have these sizes; the rest is the caller's promise.
            Way::Library(algo) => unsafe { self.operation.launch(self.handle, &algo, rows, &operands, stream) },
            Way::Own(plan) => {
                let Some(kernel) = &self.device.kernels().linear else { return Err(absent()) };
                let weight = kernel.weight_map(&plan, operands.weight)?;
                let y = (operands.y, self.shape.f32_output);
                // SAFETY: as above; weights and rows are of the plan's sizes and of bfloat16, which `plan_of` saw to.
                unsafe { kernel.launch_unchecked(stream, &plan, &weight, operands.x, rows, y) }
            }
        }
    }

    /// The package's own product of this shape, with K in `split` parts; `None` where there is none.
    pub(super) fn plan_of(&self, split: u32) -> Option<LinearPlan> {
        let LinearShape { outputs, inputs, element, bias, .. } = self.shape;
        let kernel = self.device.kernels().linear.as_ref()?;
        if element != FloatType::Bf16 || bias { None } else { kernel.plan(outputs, inputs, split) }
    }

    /// Bytes of workspace for `rows` rows; `None` where the algorithm cannot do them.
    pub(super) fn workspace(&self, way: Way, rows: u32) -> Result<Option<usize>> {
        let _current = self.context.enter()?;
        let need = match way {
            Way::Library(algo) => self.operation.workspace(self.handle, &algo, rows)?,
            Way::Own(_) => (rows <= MAX_LINEAR_ROWS).then_some(0),
        };
        Ok(need.filter(|bytes| *bytes <= self.workspace.bytes()))
    }

    /// Run `rows` rows from row `first` of x on, and compare all of them with the rows that earlier runs of the class
    /// gave. The class is `class`; if none is given and the run begins at row 0, that row names it.
    pub(super) fn run(&mut self, way: Way, rows: u32, first: u32, class: Option<u64>) -> Result<Ran> {
        let current = self.context.enter()?;
        if self.workspace(way, rows)?.is_none() {
            return Ok(Ran::Unable);
        }
        let row_bytes = self.shape.outputs as usize * self.shape.output().bytes() as usize;
        self.y.fill(0, (rows as usize + 1) * row_bytes, 0xFF, self.stream.stream())?;
        // SAFETY: the context is current; the buffers live until `fingerprints` has waited.
        if unsafe { self.launch(way, rows, first, 0) }.is_err() {
            return Ok(Ran::Unable);
        }
        let mut prints = self.fingerprints(rows + 1)?;
        drop(current);
        if prints.pop() != Some(self.untouched) || prints.contains(&self.untouched) {
            return Ok(Ran::Differs);
        }
        let class = class.unwrap_or(prints[0]);
        let all = (self.shape.max_rows + MORE) as usize;
        let known = self.known.entry(class).or_insert_with(|| {
            let mut rows = vec![None; all];
            rows[0] = Some(class); // a class is called by it
            rows
        });
        let mut same = true;
        for (row, print) in known[first as usize..].iter_mut().zip(&prints) {
            same &= *row.get_or_insert(*print) == *print;
        }
        Ok(if same { Ran::Class(class) } else { Ran::Differs })
    }

    /// True if the algorithm gives the class's bits at every one of `samples`, at each of several places.
    pub(super) fn holds(&mut self, way: Way, class: u64, samples: &[u32]) -> Result<bool> {
        for rows in samples {
            let last = self.shape.max_rows + MORE - rows;
            // Small products lie side by side, so that all their rows are others; large ones overlap.
            let step = (*rows).clamp(1, (last / PLACES).max(1)).next_multiple_of(self.place());
            for first in (0..PLACES).map(|i| i * step).take_while(|first| *first <= last) {
                if first > 0 && *rows > 256 && first > step {
                    break; // two places of many rows
                }
                if self.run(way, *rows, first, Some(class))? != Ran::Class(class) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Microseconds of one launch of `rows` rows, once and roughly: to choose candidates for [`Self::time`].
    pub(super) fn glance(&self, way: Way, rows: u32) -> Result<f32> {
        let _current = self.context.enter()?;
        let (stream, launches) = (self.stream.stream(), self.launches(rows));
        let (begin, end) = (RawEvent::new(true)?, RawEvent::new(true)?);
        // The fill keeps the GPU busy while the host launches, so that the launches follow each other without a gap.
        self.workspace.fill(0, self.workspace.bytes(), 0, stream)?;
        begin.record(stream)?;
        for i in 0..launches {
            // SAFETY: as in `run`; waited for below.
            unsafe { self.launch(way, rows, 0, i % self.copies) }?;
        }
        end.record(stream)?;
        end.wait()?;
        Ok(end.milliseconds_since(&begin)? * 1000.0 / launches as f32)
    }

    /// Launches that make a time long enough to be measured.
    fn launches(&self, rows: u32) -> usize {
        let flop = 2.0 * f64::from(rows) * f64::from(self.shape.outputs) * f64::from(self.shape.inputs);
        let guess = (self.shape.weight_bytes() as f64 / 3e6).max(flop / 5e8).max(2.0); // us on a GPU of 3 TB/s
        (300.0 / guess).clamp(2.0, 16.0) as usize
    }

    /// Microseconds of one launch of `rows` rows: the median of `repeats`, each of several captured launches.
    pub(super) fn time(&self, way: Way, rows: u32, repeats: usize) -> Result<f32> {
        self.time_of(rows, repeats, |i| {
            // SAFETY: as in `run`; `time_of` waits.
            unsafe { self.launch(way, rows, 0, i % self.copies) }
        })
    }

    /// [`time`](Self::time) of launches that each follow a small one, as in a model, where norms and activations stand between
    /// products; its time is in it.
    pub(super) fn time_in_chain(&self, way: Way, rows: u32, repeats: usize) -> Result<f32> {
        let (columns, ordinal) = (self.shape.inputs as usize, self.context.ordinal());
        let view = |what, address| {
            let dims = [rows as usize, columns];
            // SAFETY: x has more rows than any product, and the workspace is larger than x; both live until `time_of` has
            // waited.
            unsafe { Rows::from_raw(what, address, dims, columns, self.shape.element, ordinal) }
        };
        let (from, to) = (view("x", self.x.address())?, view("workspace", self.workspace.address())?);
        self.time_of(rows, repeats, |i| {
            self.device.kernels().rows.copy(self.stream.stream(), (&from, None), (&to, None), None)?;
            // SAFETY: as above.
            unsafe { self.launch(way, rows, 0, i % self.copies) }
        })
    }

    fn time_of(&self, rows: u32, repeats: usize, launch: impl Fn(usize) -> Result<()>) -> Result<f32> {
        let _current = self.context.enter()?;
        let (stream, launches) = (self.stream.stream(), self.launches(rows));
        let recording = self.stream.record(|| (0..launches).try_for_each(&launch))?;
        let (begin, end) = (RawEvent::new(true)?, RawEvent::new(true)?);
        let mut times = Vec::with_capacity(repeats);
        for i in 0..=repeats {
            begin.record(stream)?;
            // SAFETY: the buffers live until `end` has been waited for.
            unsafe { recording.launch(stream) }?;
            end.record(stream)?;
            end.wait()?;
            if i > 0 {
                times.push(end.milliseconds_since(&begin)? * 1000.0 / launches as f32); // the first one warms up
            }
        }
        times.sort_by(f32::total_cmp);
        times.get(times.len() / 2).copied().ok_or_else(|| Error::Invalid {
            what: "repeats",
            got: repeats.to_string(),
            why: "at least 1 is timed".into(),
        })
    }
}

/// The error of a plan on a GPU that has not the kernel, which no plan comes from.
fn absent() -> Error {
    Error::CudaUnavailable("kernel linear needs a GPU of compute capability 9.0".into())
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        // Work in flight, after an error, ends before the memory goes on the list of memory that nobody uses.
        if let Ok(_current) = self.context.enter() {
            let _ = self.stream.wait();
        }
    }
}
