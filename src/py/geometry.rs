//! Tree shapes, sizes, draft layouts and token trees: thin newtypes over [`crate::geometry`].

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::arg::{Int, guarded, i32s};
use super::revert;
use crate::error::{Error, Result};
use crate::geometry;

/// Parse a layout name.
fn layout(name: &str) -> Result<geometry::Layout> {
    match name {
        "dense" => Ok(geometry::Layout::Dense),
        "holey" => Ok(geometry::Layout::Holey),
        _ => {
            Err(Error::Invalid { what: "layout", got: format!("{name:?}"), why: "want \"dense\" or \"holey\"".into() })
        }
    }
}

/// Shape of a dynamic draft tree: `topk` (K) branches per step, `steps` (S) steps, `draft_tokens` (V) tokens verified
/// per request, root included; `1 <= V <= 1 + K + (S-1)*K*K`. Raises `ConfigError` for anything else.
#[pyclass(frozen, eq, hash, module = "specrs._specrs")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct TreeShape(pub(super) geometry::TreeShape);

#[pymethods]
impl TreeShape {
    #[new]
    #[pyo3(signature = (topk, steps, draft_tokens))]
    fn new(topk: Int, steps: Int, draft_tokens: Int) -> PyResult<Self> {
        let shape =
            geometry::TreeShape::new(topk.u32("topk")?, steps.u32("steps")?, draft_tokens.u32("draft_tokens")?)?;
        Ok(Self(shape))
    }

    /// K: branches kept per draft step.
    #[getter]
    fn topk(&self) -> u32 {
        self.0.topk()
    }

    /// S: draft steps.
    #[getter]
    fn steps(&self) -> u32 {
        self.0.steps()
    }

    /// V: tokens verified per request, root included.
    #[getter]
    fn draft_tokens(&self) -> u32 {
        self.0.draft_tokens()
    }

    /// Nodes that the draft proposes: `K + (S-1)*K*K`.
    #[getter]
    fn candidates(&self) -> u32 {
        self.0.candidates()
    }

    /// Draft slots of a request in the dense layout: `K*S`.
    #[getter]
    fn draft_slots(&self) -> u32 {
        self.0.draft_slots()
    }

    /// The same tree with at most `depth` steps, V clamped with it; `None` where no step fits (verify the root alone).
    fn clamp_depth(&self, depth: Int) -> PyResult<Option<Self>> {
        Ok(self.0.clamp_depth(depth.u32("depth")?).map(Self))
    }

    /// Arguments for copies and pickles: configurations are sent to processes.
    fn __getnewargs__(&self) -> (u32, u32, u32) {
        (self.0.topk(), self.0.steps(), self.0.draft_tokens())
    }

    fn __repr__(&self) -> String {
        format!("TreeShape(topk={}, steps={}, draft_tokens={})", self.0.topk(), self.0.steps(), self.0.draft_tokens())
    }
}

/// Checked limits, tree shape and draft layout: every size of specrs is a property of this object. Raises `ConfigError`
/// if a limit is out of range or a size does not fit int32 indexing.
///
/// `reverts` are ids of historical faults to put back, for debugging alone (see `faults()`); `None` means those that
/// the environment variable `SPECRS_DEBUG_REVERT` names, usually none.
#[pyclass(frozen, eq, hash, module = "specrs._specrs")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Geometry(pub(super) geometry::Geometry);

#[pymethods]
impl Geometry {
    #[new]
    #[pyo3(signature = (max_batch, max_context_len, page_size, shape, layout="dense", reverts=None))]
    fn new(
        max_batch: Int,
        max_context_len: Int,
        page_size: Int,
        shape: &Bound<'_, TreeShape>,
        layout: &str,
        reverts: Option<Vec<Int>>,
    ) -> PyResult<Self> {
        let limits = geometry::Limits {
            max_batch: max_batch.u32("max_batch")?,
            max_context_len: max_context_len.u32("max_context_len")?,
            page_size: page_size.u32("page_size")?,
        };
        let (shape, layout) = (shape.get().0, self::layout(layout)?);
        Ok(Self(match reverts {
            None => geometry::Geometry::new(limits, shape, layout)?,
            Some(ids) => geometry::Geometry::with_reverts(limits, shape, layout, revert::set(&ids)?)?,
        }))
    }

    /// Largest number of requests in a batch.
    #[getter]
    fn max_batch(&self) -> u32 {
        self.0.limits().max_batch
    }

    /// Largest number of tokens of a request, prompt and output together.
    #[getter]
    fn max_context_len(&self) -> u32 {
        self.0.limits().max_context_len
    }

    /// P: tokens per page.
    #[getter]
    fn page_size(&self) -> u32 {
        self.0.page().get()
    }

    /// The tree shape.
    #[getter]
    fn shape(&self) -> TreeShape {
        TreeShape(self.0.shape())
    }

    /// Draft layout in use: `"dense"` (also for K = 1 or P = 1) or `"holey"`.
    #[getter]
    fn layout(&self) -> &'static str {
        self.0.layout().name()
    }

    /// Ids of the historical faults that are put back; empty except for debugging.
    #[getter]
    fn reverts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.reverts().iter().map(|f| f.id).collect::<Vec<_>>())
    }

    /// Positions that one round may write beyond the committed length.
    #[getter]
    fn alloc_len_per_decode(&self) -> u32 {
        self.0.alloc_len_per_decode()
    }

    /// Twice `alloc_len_per_decode`: with overlapped scheduling the host's length lags one round.
    #[getter]
    fn reserve_per_decode(&self) -> u32 {
        self.0.reserve_per_decode()
    }

    /// Positions of a request's row, whole pages.
    #[getter]
    fn row_width(&self) -> u32 {
        self.0.row_width()
    }

    /// Columns of a request's page table.
    #[getter]
    fn row_pages(&self) -> u32 {
        self.0.row_pages()
    }

    /// Pages of a pool in which `max_batch` requests of full context run at once, without the sink.
    #[getter]
    fn pages_for_full_load(&self) -> PyResult<u32> {
        Ok(self.0.pages_for_full_load()?)
    }

    /// Width of one step's `kv_indices` in the per-branch formats; raises `ConfigError` where int32 cannot index it.
    #[getter]
    fn per_branch_kv_indices(&self) -> PyResult<u32> {
        Ok(self.0.per_branch_kv_indices()?)
    }

    /// 64-bit words of a draft query's ancestor mask.
    #[getter]
    fn draft_mask_words(&self) -> u32 {
        self.0.draft_mask_words()
    }

    /// 64-bit words of a verify query's ancestor mask.
    #[getter]
    fn verify_mask_words(&self) -> u32 {
        self.0.verify_mask_words()
    }

    /// Positions a request must have allocated for its next round: whole pages, never fewer than `allocated`.
    fn alloc_target(&self, committed: Int, allocated: Int) -> PyResult<u32> {
        Ok(self.0.alloc_target(committed.u32("committed")?, allocated.u32("allocated")?)?)
    }

    /// Returns the draft region after a prefix of `committed` tokens.
    fn draft_region(&self, committed: Int) -> PyResult<DraftRegion> {
        Ok(DraftRegion(self.0.draft_region(committed.u32("committed length")?)?))
    }

    fn __repr__(&self) -> String {
        let (l, s) = (self.0.limits(), TreeShape(self.0.shape()).__repr__());
        let reverts = match self.0.reverts() {
            none if none.is_empty() => String::new(),
            some => format!(", reverts=[{some}]"),
        };
        format!(
            "Geometry(max_batch={}, max_context_len={}, page_size={}, shape={s}, layout={:?}{reverts})",
            l.max_batch,
            l.max_context_len,
            l.page_size,
            self.layout()
        )
    }
}

/// Row positions of the draft KV of one request.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct DraftRegion(geometry::DraftRegion);

#[pymethods]
impl DraftRegion {
    /// `"dense"` or `"holey"`.
    #[getter]
    fn layout(&self) -> &'static str {
        self.0.layout().name()
    }

    /// First position of the prefix's tail page.
    #[getter]
    fn base(&self) -> u32 {
        self.0.base()
    }

    /// Tokens in the prefix's tail page, `L mod P`.
    #[getter]
    fn remainder(&self) -> u32 {
        self.0.remainder()
    }

    /// `ceil((remainder + S) / P)`.
    #[getter]
    fn pages_per_branch(&self) -> u32 {
        self.0.pages_per_branch()
    }

    /// One past the last position of the region.
    #[getter]
    fn end(&self) -> PyResult<u32> {
        Ok(self.0.end()?)
    }

    /// Row position of branch `branch`, step `step`.
    fn pos(&self, branch: Int, step: Int) -> PyResult<u32> {
        Ok(self.0.pos(branch.u32("branch")?, step.u32("step")?)?)
    }

    /// `(src, dst, len)` of the copy that fills the hole before `branch`; `None` where there is no hole.
    fn hole(&self, branch: Int) -> PyResult<Option<(u32, u32, u32)>> {
        Ok(self.0.hole(branch.u32("branch")?)?.map(|c| (c.src, c.dst, c.len)))
    }
}

/// A checked token tree: node 0 is the root, every parent has a smaller index than its child.
#[pyclass(frozen, eq, hash, module = "specrs._specrs")]
#[derive(PartialEq, Eq, Hash)]
pub(super) struct Tree(pub(super) geometry::Tree);

#[pymethods]
impl Tree {
    /// Check a parent array: `parents[0] == -1`, `0 <= parents[i] < i` otherwise.
    #[staticmethod]
    fn from_parents(py: Python<'_>, parents: Vec<Int>) -> PyResult<Self> {
        guarded(py, || geometry::Tree::from_parents(&i32s("tree parent", &parents)?)).map(Self)
    }

    /// Parent of each node, -1 for the root.
    #[getter]
    fn parents(&self) -> Vec<i32> {
        self.0.parents().to_vec()
    }

    /// Depth of each node, 0 for the root.
    #[getter]
    fn depths(&self) -> Vec<u32> {
        self.0.depths().to_vec()
    }

    /// First child of each node, -1 for a leaf.
    #[getter]
    fn next_child(&self) -> Vec<i32> {
        self.0.next_child().to_vec()
    }

    /// Next child of the same parent, -1 for the last.
    #[getter]
    fn next_sibling(&self) -> Vec<i32> {
        self.0.next_sibling().to_vec()
    }

    /// Returns one integer per node: bit j is set if node j is that node or one of its ancestors.
    fn mask_bits<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let mask = self.0.ancestor_bits();
        let int = py.get_type::<pyo3::types::PyInt>();
        mask.bits
            .chunks(mask.words as usize)
            .map(|row| {
                let bytes: Vec<u8> = row.iter().flat_map(|w| w.to_le_bytes()).collect();
                int.call_method1("from_bytes", (pyo3::types::PyBytes::new(py, &bytes), "little"))
            })
            .collect()
    }

    fn __len__(&self) -> usize {
        self.0.parents().len()
    }

    fn __repr__(&self) -> String {
        format!("Tree.from_parents({:?})", self.0.parents())
    }
}
