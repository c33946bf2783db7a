//! The library's objects with one owner each, and the two calls that matter: which algorithms there are, and a product.
//!
//! The library counts in columns. `y = x W^T` of row-major matrices is, read by columns, `y^T[N, M] = W[N, K] x^T[K, M]`:
//! its A is the weight, transposed, its B the rows of x.

use std::ffi::{c_int, c_void};
use std::ptr;

use super::library::{Algo, Heuristic, Library, Object};
use super::shape::LinearShape;
use crate::device::driver::Stream;
use crate::device::rows::FloatType;
use crate::error::{Error, Result};

// Values of `cublasLt.h`, the same from CUDA 11.0 on.
const COMPUTE_32F: c_int = 68;
const R_32F: c_int = 0;
const R_16F: c_int = 2;
const R_16BF: c_int = 14;
const DESC_TRANSA: c_int = 3;
const DESC_EPILOGUE: c_int = 7;
const DESC_BIAS_POINTER: c_int = 8;
static OP_T: i32 = 1;
static EPILOGUE_BIAS: i32 = 4;
const PREFERENCE_MAX_WORKSPACE: c_int = 1;
const PREFERENCE_REDUCTIONS: c_int = 3;
const PREFERENCE_ALIGNMENT_A: c_int = 5; // then B, C, D
/// Partial sums of a split K are kept in float32 and added by a kernel of their own; in place, or in the output's
/// type, they would be rounded or come in any order.
static REDUCE_IN_COMPUTE_TYPE: u32 = 2;

/// Bytes that every operand's address is a multiple of.
pub(super) const ALIGN: u64 = 16;

/// Configuration of an algorithm, as far as the library tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Config {
    pub(super) id: i32,
    pub(super) tile: i32,
    /// Parts that K is split into, which are summed on their own; 1 where it is not.
    pub(super) split: i32,
    pub(super) reduction: i32,
    pub(super) swizzle: i32,
    pub(super) custom: i32,
    pub(super) stages: i32,
    pub(super) inner: u16,
    pub(super) cluster: u16,
}

impl std::fmt::Display for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { id, tile, split, reduction, swizzle, custom, stages, inner, cluster } = self;
        write!(f, "id {id} tile {tile} split {split} reduction {reduction} stages {stages} cluster {cluster} ")?;
        write!(f, "swizzle {swizzle} custom {custom} inner {inner}")
    }
}

/// The library's handle for one device's context, which is current where it is made and used.
#[derive(Debug)]
pub(super) struct Handle {
    /// Null once it is destroyed.
    raw: Object,
    pub(super) library: &'static Library,
}

// SAFETY: the library's handle may be used from any thread at once (its documentation).
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    pub(super) fn new(library: &'static Library) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is a valid out pointer.
        library.done("cublasLtCreate", unsafe { (library.call.create)(&mut raw) })?;
        Ok(Self { raw, library })
    }
}

impl Handle {
    /// Give it back, in its context; it is not used afterwards.
    pub(super) fn destroy(&mut self) {
        let raw = std::mem::replace(&mut self.raw, ptr::null_mut());
        if !raw.is_null() {
            // SAFETY: created once, destroyed once.
            unsafe { (self.library.call.destroy)(raw) };
        }
    }
}

/// An object with the function that destroys it.
#[derive(Debug)]
struct Owned {
    raw: Object,
    destroy: unsafe extern "C" fn(Object) -> c_int,
}

// SAFETY: plain memory of the library, which the calls below only read once it is made.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { (self.destroy)(self.raw) };
    }
}

/// A weight's product, all but its number of rows.
#[derive(Debug)]
pub(super) struct Operation {
    desc: Owned,
    weight: Owned,
    shape: LinearShape,
    library: &'static Library,
}

/// Layouts of the operands that depend on the number of rows.
struct Rows {
    x: Owned,
    y: Owned,
}

/// Addresses of a product's operands, each a multiple of [`ALIGN`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Operands {
    pub(super) weight: u64,
    pub(super) x: u64,
    pub(super) y: u64,
    pub(super) workspace: u64,
    pub(super) workspace_bytes: usize,
}

fn element(t: FloatType) -> c_int {
    match t {
        FloatType::Bf16 => R_16BF,
        FloatType::F16 => R_16F,
        FloatType::F32 => R_32F,
    }
}

impl Operation {
    /// The product of `shape`; `bias` is the address of its `outputs` elements of the output's type, where it has one.
    pub(super) fn new(library: &'static Library, shape: LinearShape, bias: Option<u64>) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is a valid out pointer.
        let made = unsafe { (library.call.desc_create)(&mut raw, COMPUTE_32F, R_32F) };
        library.done("cublasLtMatmulDescCreate", made)?;
        let desc = Owned { raw, destroy: library.call.desc_destroy };
        let set = |what: c_int, value: *const c_void, size: usize| {
            // SAFETY: the object lives; `value` points at `size` bytes of what the attribute holds.
            let status = unsafe { (library.call.desc_set)(desc.raw, what, value, size) };
            library.done("cublasLtMatmulDescSetAttribute", status)
        };
        set(DESC_TRANSA, (&raw const OP_T).cast(), 4)?;
        if let Some(address) = bias {
            set(DESC_EPILOGUE, (&raw const EPILOGUE_BIAS).cast(), 4)?;
            set(DESC_BIAS_POINTER, (&raw const address).cast(), 8)?;
        }
        let (n, k) = (u64::from(shape.outputs), u64::from(shape.inputs));
        let weight = layout(library, element(shape.element), k, n)?;
        Ok(Self { desc, weight, shape, library })
    }

    fn rows(&self, rows: u32) -> Result<Rows> {
        let LinearShape { outputs, inputs, element: e, .. } = self.shape;
        let x = layout(self.library, element(e), inputs.into(), rows.into())?;
        let y = layout(self.library, element(self.shape.output()), outputs.into(), rows.into())?;
        Ok(Rows { x, y })
    }

    /// Up to `most` algorithms that the library proposes for `rows` rows within `workspace` bytes.
    pub(super) fn candidates(&self, handle: &Handle, rows: u32, workspace: usize, most: usize) -> Result<Vec<Algo>> {
        let call = &self.library.call;
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is a valid out pointer.
        self.library.done("cublasLtMatmulPreferenceCreate", unsafe { (call.preference_create)(&mut raw) })?;
        let preference = Owned { raw, destroy: call.preference_destroy };
        let set = |what: c_int, value: *const c_void, size: usize| {
            // SAFETY: as for a description.
            let status = unsafe { (call.preference_set)(preference.raw, what, value, size) };
            self.library.done("cublasLtMatmulPreferenceSetAttribute", status)
        };
        set(PREFERENCE_MAX_WORKSPACE, (&raw const workspace).cast(), size_of::<usize>())?;
        set(PREFERENCE_REDUCTIONS, (&raw const REDUCE_IN_COMPUTE_TYPE).cast(), 4)?;
        let align = ALIGN as u32;
        for operand in 0..4 {
            set(PREFERENCE_ALIGNMENT_A + operand, (&raw const align).cast(), 4)?;
        }
        let (mut found, mut count) = (vec![Heuristic::EMPTY; most], 0);
        let at = self.rows(rows)?;
        // SAFETY: every object lives; `found` has room for `most` results.
        let status = unsafe {
            (call.heuristic)(
                handle.raw,
                self.desc.raw,
                self.weight.raw,
                at.x.raw,
                at.y.raw,
                at.y.raw,
                preference.raw,
                most as c_int,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        const NOT_SUPPORTED: c_int = 15;
        if status != NOT_SUPPORTED {
            self.library.done("cublasLtMatmulAlgoGetHeuristic", status)?;
        }
        found.truncate(count.max(0) as usize);
        Ok(found.into_iter().filter(|h| h.state == 0).map(|h| h.algo).collect())
    }

    /// The workspace that `algo` needs for `rows` rows; `None` where it cannot do them.
    pub(super) fn workspace(&self, handle: &Handle, algo: &Algo, rows: u32) -> Result<Option<usize>> {
        let (at, mut result) = (self.rows(rows)?, Heuristic::EMPTY);
        // SAFETY: every object lives; `result` is a valid out pointer.
        let status = unsafe {
            let check = self.library.call.check;
            check(handle.raw, self.desc.raw, self.weight.raw, at.x.raw, at.y.raw, at.y.raw, algo, &mut result)
        };
        Ok((status == 0 && result.state == 0).then_some(result.workspace))
    }

    /// Put the product of the first `rows` rows on `stream`.
    ///
    /// # Safety
    /// The handle's context is current. The operands have the sizes of the shape and `rows`, lie on the context's device
    /// and stay there until the product has finished; the output overlaps none of the others.
    pub(super) unsafe fn launch(
        &self,
        handle: &Handle,
        algo: &Algo,
        rows: u32,
        operands: &Operands,
        stream: Stream,
    ) -> Result<()> {
        let at = self.rows(rows)?;
        let (one, zero) = (1f32, 0f32);
        let Operands { weight, x, y, workspace, workspace_bytes } = *operands;
        // SAFETY: every object lives; the rest is the caller's promise.
        let status = unsafe {
            (self.library.call.matmul)(
                handle.raw,
                self.desc.raw,
                (&raw const one).cast(),
                weight as *const c_void,
                self.weight.raw,
                x as *const c_void,
                at.x.raw,
                (&raw const zero).cast(),
                y as *const c_void,
                at.y.raw,
                y as *mut c_void,
                at.y.raw,
                algo,
                workspace as *mut c_void,
                workspace_bytes,
                stream.raw() as *mut c_void,
            )
        };
        self.library.done("cublasLtMatmul", status)
    }
}

/// A matrix of `rows x cols` whose columns follow each other without a gap.
fn layout(library: &'static Library, element: c_int, rows: u64, cols: u64) -> Result<Owned> {
    let mut raw = ptr::null_mut();
    // SAFETY: `raw` is a valid out pointer.
    let status = unsafe { (library.call.layout_create)(&mut raw, element, rows, cols, rows as i64) };
    library.done("cublasLtMatrixLayoutCreate", status)?;
    Ok(Owned { raw, destroy: library.call.layout_destroy })
}

impl Algo {
    /// The algorithm's configuration.
    pub(super) fn config(&self, library: &'static Library) -> Result<Config> {
        fn get<T: Default>(library: &'static Library, algo: &Algo, what: c_int) -> Result<T> {
            let (mut value, mut written) = (T::default(), 0);
            // SAFETY: `value` has room for the attribute, whose size is checked by the call.
            let status =
                unsafe { (library.call.config)(algo, what, (&raw mut value).cast(), size_of::<T>(), &mut written) };
            library.done("cublasLtMatmulAlgoConfigGetAttribute", status).map(|()| value)
        }
        Ok(Config {
            id: get(library, self, 0)?,
            tile: get(library, self, 1)?,
            split: get(library, self, 2)?,
            reduction: get(library, self, 3)?,
            swizzle: get(library, self, 4)?,
            custom: get(library, self, 5)?,
            stages: get(library, self, 6)?,
            inner: get(library, self, 7)?,
            cluster: get(library, self, 8)?,
        })
    }
}

/// The error for a shape that no class of algorithms computes alike for every number of rows.
pub(super) fn no_class(shape: &LinearShape, why: String) -> Error {
    let odd = !shape.outputs.is_multiple_of(8) || !shape.inputs.is_multiple_of(8);
    let advice = if odd { "; outputs and inputs that are multiples of 8 work: pad the weight with zeros" } else { "" };
    Error::Invalid { what: "linear", got: shape.to_string(), why: format!("{why}{advice}") }
}
