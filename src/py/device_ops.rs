//! Launches of the round's kernels on Python's tensors: rows, RoPE, verification, commit, draft selection. The engine's
//! passes and rounds on a GPU are made of these calls (`python/specrs/models/cuda.py`, `engine/lanes.py`), and so is the
//! replay of recorded rounds (`capsule/on_device.py`).
//!
//! Like those of `device`, these functions exist in every build and raise `CudaError` where there are no kernels. Outputs
//! are tensors that the call writes in full, apart from every other operand. `live`, where it is given, is an int32 tensor
//! whose last element counts what is live of a static batch. `stream` is a raw stream of the tensors' device.

use pyo3::prelude::*;

use super::arg::Int;
use super::device::StreamArg;
use super::geometry::TreeShape;

#[cfg(feature = "cuda")]
use crate::device::{
    Activation, AddRmsNorm, CommitOperands, DeviceAccepts, DeviceBeams, DraftSelectOperands, MovesView, RopeKvOperands,
    VerifyMode, VerifyOperands,
};
#[cfg(feature = "cuda")]
use operands::{Operands, import};

/// A tensor argument.
type Arg<'a, 'py> = &'a Bound<'py, PyAny>;

#[cfg(not(feature = "cuda"))]
pub(super) fn absent<T: Send>(py: Python<'_>) -> PyResult<T> {
    let why = || Err(crate::error::Error::CudaUnavailable("built without the feature `cuda`".into()));
    super::arg::detached(py, why)
}

#[cfg(feature = "cuda")]
pub(super) mod operands {
    use pyo3::prelude::*;

    use crate::device::{Device, DeviceArray, DeviceSlice, Kernels, KvCacheView, Rows, Stream};
    use crate::error::{Error, Result};
    use crate::py::arg::detached;
    use crate::py::device::StreamArg;
    use crate::py::dlpack::cuda::DeviceElement;
    use crate::py::dlpack::{Call, Output, Tensor};

    /// The tensors of a call, by their place in the lists that were imported: inputs first, then outputs.
    pub(in crate::py) struct Operands {
        inputs: Vec<Option<Tensor>>,
        outputs: Vec<Option<Output>>,
    }

    /// Names of operands with their tensors.
    type Named<'a, 'py> = &'a [(&'static str, Option<&'a Bound<'py, PyAny>>)];

    /// Import the tensors of a call, and check that outputs may be written. The launch sees to it that they lie apart from
    /// every other operand.
    pub(in crate::py) fn import(inputs: Named<'_, '_>, outputs: Named<'_, '_>) -> PyResult<Operands> {
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
        pub(in crate::py) fn maybe_rows(&self, n: usize, ordinal: i32) -> Result<Option<Rows>> {
            self.tensor(n).map(|t| t.device_rows(ordinal)).transpose()
        }

        /// Operand `n`, where it is there.
        pub(in crate::py) fn maybe<T: DeviceElement>(&self, n: usize, ordinal: i32) -> Result<Option<DeviceSlice<T>>> {
            self.tensor(n).map(|t| t.device_slice(ordinal)).transpose()
        }

        /// Operand `n` as an array of a format, where it is there.
        pub(in crate::py) fn maybe_array(&self, n: usize, ordinal: i32) -> Result<Option<DeviceArray>> {
            self.tensor(n).map(|t| t.device_array(ordinal)).transpose()
        }

        /// Operand `n`.
        pub(in crate::py) fn rows(&self, n: usize, ordinal: i32) -> Result<Rows> {
            self.maybe_rows(n, ordinal)?.ok_or_else(|| absent(n))
        }

        /// Operand `n`.
        pub(in crate::py) fn slice<T: DeviceElement>(&self, n: usize, ordinal: i32) -> Result<DeviceSlice<T>> {
            self.maybe(n, ordinal)?.ok_or_else(|| absent(n))
        }

        /// Columns of operand `n`, a matrix.
        pub(in crate::py) fn columns(&self, n: usize) -> Result<usize> {
            let [_, columns] = self.tensor(n).ok_or_else(|| absent(n))?.dims("[rows, columns]")?;
            Ok(columns)
        }

        /// Output `n` of the outputs, a KV cache.
        pub(in crate::py) fn cache(&self, n: usize, ordinal: i32) -> Result<KvCacheView> {
            let cache = self.outputs[n].as_ref().ok_or_else(|| absent(n))?;
            cache.device_kv_cache(ordinal)
        }

        /// Launch without the GIL on the device of the first output.
        pub(in crate::py) fn launch(
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
}

#[cfg(feature = "cuda")]
pub(super) fn beams(
    o: &Operands,
    first: usize,
    shape: crate::geometry::TreeShape,
    g: i32,
) -> crate::Result<DeviceBeams> {
    Ok(DeviceBeams {
        shape,
        scores: o.slice(first, g)?,
        candidate_tokens: o.slice(first + 1, g)?,
        candidate_parents: o.slice(first + 2, g)?,
        beams: o.slice(first + 3, g)?,
        tokens: o.slice(first + 4, g)?,
        parents: o.slice(first + 5, g)?,
        ancestors: o.slice(first + 6, g)?,
        sound: o.slice(first + 7, g)?,
    })
}

/// out [rows, hidden] = table[tokens], int32 tokens; zeros for a token of -1, and behind the live rows.
#[pyfunction]
#[pyo3(signature = (table, tokens, live, out, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_embed(
    py: Python<'_>,
    table: Arg<'_, '_>,
    tokens: Arg<'_, '_>,
    live: Option<Arg<'_, '_>>,
    out: Arg<'_, '_>,
    stream: StreamArg,
) -> PyResult<()> {
    #[cfg(feature = "cuda")]
    {
        let operands =
            import(&[("table", Some(table)), ("tokens", Some(tokens)), ("live", live)], &[("out", Some(out))])?;
        operands.launch(py, stream, |o, k, s, g| {
            k.rows.embed(s, &o.rows(0, g)?, &o.slice(1, g)?, o.maybe(2, g)?.as_ref(), &o.rows(3, g)?)
        })
    }
    #[cfg(not(feature = "cuda"))]
    {
        _ = (table, tokens, live, out, stream);
        absent(py)
    }
}

/// out [rows, columns] = source[indices + shift], int32 indices; zeros for -1, and behind the live rows.
#[pyfunction]
#[pyo3(signature = (source, indices, shift, live, out, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_gather_rows(
    py: Python<'_>,
    source: Arg<'_, '_>,
    indices: Arg<'_, '_>,
    shift: Int,
    live: Option<Arg<'_, '_>>,
    out: Arg<'_, '_>,
    stream: StreamArg,
) -> PyResult<()> {
    #[cfg(feature = "cuda")]
    {
        let shift = shift.i32("shift")?;
        let operands =
            import(&[("source", Some(source)), ("indices", Some(indices)), ("live", live)], &[("out", Some(out))])?;
        operands.launch(py, stream, |o, k, s, g| {
            k.rows.gather(s, &o.rows(0, g)?, &o.slice(1, g)?, shift, o.maybe(2, g)?.as_ref(), &o.rows(3, g)?)
        })
    }
    #[cfg(not(feature = "cuda"))]
    {
        _ = (source, indices, shift, live, out, stream);
        absent(py)
    }
}

/// residual += x (where x is given); copy[:, column:] = residual; out = RMSNorm(residual) * weight. All bf16 or f16 [rows, columns],
/// `copy` [rows, at least column + columns]; `weight` [columns] may be float32.
#[pyfunction]
#[pyo3(signature = (residual, x, weight, eps, copy, column, live, out, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_add_rms_norm(
    py: Python<'_>,
    residual: Arg<'_, '_>,
    x: Option<Arg<'_, '_>>,
    weight: Arg<'_, '_>,
    eps: f32,
    copy: Option<Arg<'_, '_>>,
    column: Int,
    live: Option<Arg<'_, '_>>,
    out: Option<Arg<'_, '_>>,
    stream: StreamArg,
) -> PyResult<()> {
    #[cfg(feature = "cuda")]
    {
        let column = column.usize("column")?;
        let operands = import(
            &[("x", x), ("weight", Some(weight)), ("live", live)],
            &[("residual", Some(residual)), ("copy", copy), ("out", out)],
        )?;
        operands.launch(py, stream, |o, k, s, g| {
            let residual = o.rows(3, g)?;
            let copy = o.maybe_rows(4, g)?.map(|c| c.part(column, residual.columns())).transpose()?;
            let (x, out, live) = (o.maybe_rows(0, g)?, o.maybe_rows(5, g)?, o.maybe(2, g)?);
            k.rows.add_rms_norm(
                s,
                &AddRmsNorm {
                    residual: &residual,
                    x: x.as_ref(),
                    weight: &o.rows(1, g)?,
                    eps,
                    out: out.as_ref(),
                    copy: copy.as_ref(),
                    live: live.as_ref(),
                },
            )
        })
    }
    #[cfg(not(feature = "cuda"))]
    {
        _ = (residual, x, weight, eps, copy, column, live, out, stream);
        absent(py)
    }
}

/// out [rows, columns] = activation(gate) * up of gate_up [rows, 2 * columns], all gates first, or interleaved pairs; the
/// activation is "silu" or "gelu_tanh".
#[pyfunction]
#[pyo3(signature = (gate_up, activation, interleaved, live, out, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_gated_up(
    py: Python<'_>,
    gate_up: Arg<'_, '_>,
    activation: &str,
    interleaved: bool,
    live: Option<Arg<'_, '_>>,
    out: Arg<'_, '_>,
    stream: StreamArg,
) -> PyResult<()> {
    #[cfg(feature = "cuda")]
    {
        let activation = activation.parse::<Activation>()?;
        let operands = import(&[("gate_up", Some(gate_up)), ("live", live)], &[("out", Some(out))])?;
        operands.launch(py, stream, |o, k, s, g| {
            k.rows.gated_up(s, activation, &o.rows(0, g)?, interleaved, o.maybe(1, g)?.as_ref(), &o.rows(2, g)?)
        })
    }
    #[cfg(not(feature = "cuda"))]
    {
        _ = (gate_up, activation, interleaved, live, out, stream);
        absent(py)
    }
}

/// Bias, per-head RMSNorm and rotation of the rows of qkv: queries to q, keys and values to the slots of a layer of the
/// cache. `table` is (cos, sin), float32 [positions, pairs]; the norms' weights may be float32, both or neither.
#[pyfunction]
#[pyo3(signature = (qkv, heads, kv_heads, bias, q_norm, k_norm, eps, table, positions, slots, q, cache, layer, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_rope_kv(
    py: Python<'_>,
    qkv: Arg<'_, '_>,
    heads: Int,
    kv_heads: Int,
    bias: Option<Arg<'_, '_>>,
    q_norm: Option<Arg<'_, '_>>,
    k_norm: Option<Arg<'_, '_>>,
    eps: f32,
    table: [Bound<'_, PyAny>; 2],
    positions: Arg<'_, '_>,
    slots: Arg<'_, '_>,
    q: Option<Arg<'_, '_>>,
    cache: Arg<'_, '_>,
    layer: Int,
    stream: StreamArg,
) -> PyResult<()> {
    #[cfg(feature = "cuda")]
    {
        let (heads, kv_heads, layer) = (heads.usize("heads")?, kv_heads.usize("kv_heads")?, layer.usize("layer")?);
        let operands = import(
            &[
                ("qkv", Some(qkv)),
                ("bias", bias),
                ("q_norm", q_norm),
                ("k_norm", k_norm),
                ("cos", Some(&table[0])),
                ("sin", Some(&table[1])),
                ("positions", Some(positions)),
                ("slots", Some(slots)),
            ],
            &[("cache", Some(cache)), ("q", q)],
        )?;
        operands.launch(py, stream, |o, k, s, g| {
            let (bias, q_norm, k_norm) = (o.maybe_rows(1, g)?, o.maybe_rows(2, g)?, o.maybe_rows(3, g)?);
            let q = o.maybe_rows(9, g)?;
            k.rope_kv.launch(
                s,
                &RopeKvOperands {
                    qkv: &o.rows(0, g)?,
                    heads,
                    kv_heads,
                    bias: bias.as_ref(),
                    q_norm: q_norm.as_ref(),
                    k_norm: k_norm.as_ref(),
                    eps,
                    cos: &o.rows(4, g)?,
                    sin: &o.rows(5, g)?,
                    positions: &o.slice(6, g)?,
                    slots: &o.slice(7, g)?,
                    q: q.as_ref(),
                    cache: &o.cache(0, g)?,
                    layer,
                },
            )
        })
    }
    #[cfg(not(feature = "cuda"))]
    {
        _ = (qkv, heads, kv_heads, bias, q_norm, k_norm, eps, table, positions, slots, q, cache, layer, stream);
        absent(py)
    }
}

/// Greedy verification of trees (tokens, parents, offsets) by logits [nodes, vocab]. `accepts` are the arrays offsets, paths,
/// tokens, rows, roots, new_lens and faults; `full` picks the mode that reads all rows. `scratch` (int64) is 0 before
/// the first call.
#[pyfunction]
#[pyo3(signature = (logits, trees, lens, live, max_nodes, max_path, accepts, scratch, full, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_verify_greedy(
    py: Python<'_>,
    logits: Arg<'_, '_>,
    trees: [Bound<'_, PyAny>; 3],
    lens: Arg<'_, '_>,
    live: Option<Arg<'_, '_>>,
    max_nodes: Int,
    max_path: Int,
    accepts: [Bound<'_, PyAny>; 7],
    scratch: Arg<'_, '_>,
    full: bool,
    stream: StreamArg,
) -> PyResult<()> {
    #[cfg(feature = "cuda")]
    {
        let (max_nodes, max_path) = (max_nodes.usize("max_nodes")?, max_path.usize("max_path")?);
        let operands = import(
            &[
                ("logits", Some(logits)),
                ("tree tokens", Some(&trees[0])),
                ("tree parents", Some(&trees[1])),
                ("offsets", Some(&trees[2])),
                ("lens", Some(lens)),
                ("live", live),
            ],
            &[
                ("out_offsets", Some(&accepts[0])),
                ("paths", Some(&accepts[1])),
                ("path_tokens", Some(&accepts[2])),
                ("path_rows", Some(&accepts[3])),
                ("roots", Some(&accepts[4])),
                ("new_lens", Some(&accepts[5])),
                ("faults", Some(&accepts[6])),
                ("scratch", Some(scratch)),
            ],
        )?;
        operands.launch(py, stream, |o, k, s, g| {
            let live = o.maybe(5, g)?;
            let out = DeviceAccepts {
                offsets: o.slice(6, g)?,
                paths: o.slice(7, g)?,
                tokens: o.slice(8, g)?,
                rows: o.slice(9, g)?,
                roots: o.slice(10, g)?,
                new_lens: o.slice(11, g)?,
                faults: o.slice(12, g)?,
            };
            let operands = VerifyOperands {
                logits: &o.rows(0, g)?,
                tree_tokens: &o.slice(1, g)?,
                tree_parents: &o.slice(2, g)?,
                offsets: &o.slice(3, g)?,
                lens: &o.slice(4, g)?,
                live: live.as_ref(),
                max_nodes,
                max_path,
                out: &out,
                scratch: &o.slice(13, g)?,
            };
            k.verify_greedy.launch(s, &operands, if full { VerifyMode::Full } else { VerifyMode::Walk })
        })
    }
    #[cfg(not(feature = "cuda"))]
    {
        _ = (logits, trees, lens, live, max_nodes, max_path, accepts, scratch, full, stream);
        absent(py)
    }
}

/// Accepted paths (offsets, paths, new_lens) into the rows of the page table [rows, columns]: reordered where `moves` is
/// `None` (pages of one token), else as the moves src, dst, offsets of `_device_kv_move`.
#[pyfunction]
#[pyo3(signature = (accepts, table, rows, live, num_pages, page_size, max_nodes, moves, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_kv_commit(
    py: Python<'_>,
    accepts: [Bound<'_, PyAny>; 3],
    table: Arg<'_, '_>,
    rows: Arg<'_, '_>,
    live: Option<Arg<'_, '_>>,
    num_pages: Int,
    page_size: Int,
    max_nodes: Int,
    moves: Option<[Bound<'_, PyAny>; 3]>,
    stream: StreamArg,
) -> PyResult<()> {
    #[cfg(feature = "cuda")]
    {
        let (num_pages, max_nodes) = (num_pages.usize("num_pages")?, max_nodes.usize("max_nodes")?);
        let page = crate::bounds::PageSize::new(page_size.u32("page_size")?)?;
        let [moves0, moves1, moves2] = match &moves {
            Some([src, dst, offsets]) => [Some(src), Some(dst), Some(offsets)],
            None => [None, None, None],
        };
        let operands = import(
            &[
                ("offsets", Some(&accepts[0])),
                ("paths", Some(&accepts[1])),
                ("new_lens", Some(&accepts[2])),
                ("rows", Some(rows)),
                ("live", live),
            ],
            &[("table", Some(table)), ("src", moves0), ("dst", moves1), ("move offsets", moves2)],
        )?;
        operands.launch(py, stream, |o, k, s, g| {
            let live = o.maybe(4, g)?;
            let operands = CommitOperands {
                offsets: &o.slice(0, g)?,
                paths: &o.slice(1, g)?,
                new_lens: &o.slice(2, g)?,
                table: &o.slice(5, g)?,
                table_width: o.columns(5)?,
                rows: &o.slice(3, g)?,
                live: live.as_ref(),
                num_pages,
                page,
                max_nodes,
            };
            match (o.maybe(6, g)?, o.maybe(7, g)?, o.maybe(8, g)?) {
                (Some(src), Some(dst), Some(offsets)) => {
                    k.kv_commit.moves(s, &operands, &MovesView::new(src, dst, offsets)?)
                }
                _ => k.kv_commit.remap(s, &operands),
            }
        })
    }
    #[cfg(not(feature = "cuda"))]
    {
        _ = (accepts, table, rows, live, num_pages, page_size, max_nodes, moves, stream);
        absent(py)
    }
}

/// One step of draft selection from logits [batch (* K), draft vocabulary]. `beams` are the arrays scores, candidate tokens and
/// parents, beams, their tokens and parents, ancestors (int64) and sound steps. `scratch` (int64) is 0 before the first
/// call; `_device_draft_scratch` says how long it is.
#[pyfunction]
#[pyo3(signature = (step, logits, to_target, vocab, live, shape, beams, scratch, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_draft_select(
    py: Python<'_>,
    step: Int,
    logits: Arg<'_, '_>,
    to_target: Option<Arg<'_, '_>>,
    vocab: Int,
    live: Option<Arg<'_, '_>>,
    shape: &Bound<'_, TreeShape>,
    beams: [Bound<'_, PyAny>; 8],
    scratch: Arg<'_, '_>,
    stream: StreamArg,
) -> PyResult<()> {
    #[cfg(feature = "cuda")]
    {
        let (step, vocab, shape) = (step.u32("step")?, vocab.u32("vocab")?, shape.get().0);
        let operands = import(
            &[("logits", Some(logits)), ("to_target", to_target), ("live", live)],
            &[
                ("scores", Some(&beams[0])),
                ("candidate_tokens", Some(&beams[1])),
                ("candidate_parents", Some(&beams[2])),
                ("beams", Some(&beams[3])),
                ("beam_tokens", Some(&beams[4])),
                ("beam_parents", Some(&beams[5])),
                ("ancestors", Some(&beams[6])),
                ("sound", Some(&beams[7])),
                ("scratch", Some(scratch)),
            ],
        )?;
        operands.launch(py, stream, |o, k, s, g| {
            let (to_target, live) = (o.maybe(1, g)?, o.maybe(2, g)?);
            k.draft_select.launch(
                s,
                &DraftSelectOperands {
                    step,
                    logits: &o.rows(0, g)?,
                    to_target: to_target.as_ref(),
                    vocab,
                    live: live.as_ref(),
                    beams: &self::beams(o, 3, shape, g)?,
                    scratch: &o.slice(11, g)?,
                },
            )
        })
    }
    #[cfg(not(feature = "cuda"))]
    {
        _ = (step, logits, to_target, vocab, live, shape, beams, scratch, stream);
        absent(py)
    }
}

/// 64-bit words of scratch that `_device_draft_select` needs on CUDA device `ordinal` for rounds of up to `batch` requests.
#[pyfunction]
#[pyo3(signature = (shape, batch, draft_vocab, ordinal))]
pub(super) fn _device_draft_scratch(
    py: Python<'_>,
    shape: &Bound<'_, TreeShape>,
    batch: Int,
    draft_vocab: Int,
    ordinal: Int,
) -> PyResult<usize> {
    let (batch, columns) =
        (batch.within("batch", 0, crate::bounds::MAX_BATCH.into())?, draft_vocab.u32("draft_vocab")?);
    let (shape, ordinal) = (shape.get().0, ordinal.i32("CUDA device")?);
    #[cfg(feature = "cuda")]
    return super::arg::detached(py, move || {
        let kernels = crate::device::Device::get(ordinal)?.kernels();
        Ok(kernels.draft_select.scratch(shape, batch as usize, columns as usize))
    });
    #[cfg(not(feature = "cuda"))]
    {
        _ = (batch, columns, shape, ordinal);
        absent(py).map(|()| 0)
    }
}

/// 64-bit words of scratch that `_device_verify_greedy` needs.
#[pyfunction]
#[pyo3(signature = (nodes, batch, max_path))]
pub(super) fn _device_verify_scratch(py: Python<'_>, nodes: Int, batch: Int, max_path: Int) -> PyResult<usize> {
    let within = |what, n: Int| n.within(what, 0, i32::MAX.into()).map(|n| n as usize);
    let (nodes, batch, path) = (within("nodes", nodes)?, within("batch", batch)?, within("max_path", max_path)?);
    #[cfg(feature = "cuda")]
    return super::arg::detached(py, move || Ok(crate::device::verify_scratch(nodes, batch, path)));
    #[cfg(not(feature = "cuda"))]
    {
        _ = (nodes, batch, path);
        absent(py).map(|()| 0)
    }
}
