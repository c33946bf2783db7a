//! The operands of one launch, by name: imported together, then taken as the typed views that the launch wants.
//!
//! ```text
//! let mut call = Operands::named();
//! let (tokens, out) = (call.reads("tokens", tokens), call.writes("out", out));
//! call.launch(py, stream, |o, k, s, g| k.rows.embed(s, &o.slice(tokens, g)?, &o.rows(out, g)?))
//! ```
//!
//! What Python passes together is an object of `python/specrs/operands.py`; each is read by the names of its attributes.

use pyo3::prelude::*;

use super::device::StreamArg;
use super::tensors::DeviceElement;
use crate::device::{
    Device, DeviceAccepts, DeviceArray, DeviceBeams, DeviceLists, DeviceSamplers, DeviceSlice, DeviceTrees, GivenTrees,
    Kernels, KvCacheView, MovesView, PlanMemory, Rows, Stream,
};
use crate::error::{Error, Result};
use crate::geometry;
use crate::py::arg::detached;
use crate::py::dlpack::{Call, Output, Tensor};

/// A tensor argument.
pub(super) type Arg<'a, 'py> = &'a Bound<'py, PyAny>;

/// Where an operand is among those that are imported.
#[derive(Clone, Copy)]
pub(super) struct At {
    name: &'static str,
    list: List,
    n: usize,
}

#[derive(Clone, Copy)]
enum List {
    Read,
    Written,
}

/// The operands that a launch is given, before they are imported. Those that may be left out are `Option`s.
pub(super) struct Operands<'a, 'py> {
    read: Vec<(&'static str, Option<Arg<'a, 'py>>)>,
    written: Vec<(&'static str, Option<Arg<'a, 'py>>)>,
}

impl<'a, 'py> Operands<'a, 'py> {
    /// None yet.
    pub(super) fn named() -> Self {
        Self { read: Vec::with_capacity(16), written: Vec::with_capacity(16) }
    }

    /// The launch reads `tensor`, called `name` in errors.
    pub(super) fn reads(&mut self, name: &'static str, tensor: impl Into<Option<Arg<'a, 'py>>>) -> At {
        self.name(List::Read, name, tensor.into())
    }

    /// The launch writes `tensor`, called `name` in errors.
    pub(super) fn writes(&mut self, name: &'static str, tensor: impl Into<Option<Arg<'a, 'py>>>) -> At {
        self.name(List::Written, name, tensor.into())
    }

    fn name(&mut self, list: List, name: &'static str, tensor: Option<Arg<'a, 'py>>) -> At {
        let named = match list {
            List::Read => &mut self.read,
            List::Written => &mut self.written,
        };
        named.push((name, tensor));
        At { name, list, n: named.len() - 1 }
    }

    /// Import all of them, and launch without the GIL on the device of the first that is written. The launch sees to it that
    /// what is written lies apart from every other operand.
    pub(super) fn launch(
        self,
        py: Python<'py>,
        stream: StreamArg,
        f: impl FnOnce(&Imported, &Kernels, Stream, i32) -> Result<()> + Send,
    ) -> PyResult<()> {
        let (read, written) = Call::on_device().take_lists(&self.read, &self.written)?;
        let imported = Imported { read, written };
        let stream = stream.get()?;
        detached(py, || {
            let first = imported.written.iter().flatten().next().ok_or_else(|| absent("output"))?;
            let ordinal = first.cuda_ordinal()?;
            f(&imported, Device::get(ordinal)?.kernels(), stream, ordinal)
        })
    }
}

/// The tensors of a launch.
pub(super) struct Imported {
    read: Vec<Option<Tensor>>,
    written: Vec<Option<Output>>,
}

impl Imported {
    fn tensor(&self, at: At) -> Option<&Tensor> {
        match at.list {
            List::Read => self.read[at.n].as_ref(),
            List::Written => self.written[at.n].as_deref(),
        }
    }

    /// Rows, where they are given.
    pub(super) fn maybe_rows(&self, at: At, ordinal: i32) -> Result<Option<Rows>> {
        self.tensor(at).map(|t| t.device_rows(ordinal)).transpose()
    }

    /// Elements, where they are given.
    pub(super) fn maybe<T: DeviceElement>(&self, at: At, ordinal: i32) -> Result<Option<DeviceSlice<T>>> {
        self.tensor(at).map(|t| t.device_slice(ordinal)).transpose()
    }

    /// An array of a format, where it is given.
    pub(super) fn maybe_array(&self, at: At, ordinal: i32) -> Result<Option<DeviceArray>> {
        self.tensor(at).map(|t| t.device_array(ordinal)).transpose()
    }

    /// Rows.
    pub(super) fn rows(&self, at: At, ordinal: i32) -> Result<Rows> {
        self.maybe_rows(at, ordinal)?.ok_or_else(|| absent(at.name))
    }

    /// Elements.
    pub(super) fn slice<T: DeviceElement>(&self, at: At, ordinal: i32) -> Result<DeviceSlice<T>> {
        self.maybe(at, ordinal)?.ok_or_else(|| absent(at.name))
    }

    /// Columns of a matrix.
    pub(super) fn columns(&self, at: At) -> Result<usize> {
        let [_, columns] = self.tensor(at).ok_or_else(|| absent(at.name))?.dims("[rows, columns]")?;
        Ok(columns)
    }

    /// A KV cache that is written.
    pub(super) fn cache(&self, at: At, ordinal: i32) -> Result<KvCacheView> {
        let cache = self.written.get(at.n).and_then(|cache| cache.as_ref()).ok_or_else(|| absent(at.name))?;
        cache.device_kv_cache(ordinal)
    }
}

fn absent(what: &'static str) -> Error {
    Error::Invalid { what, got: "None".into(), why: "must be given".into() }
}

/// Trees that are verified.
#[derive(FromPyObject)]
pub(super) struct TreeArrays<'py> {
    pub(super) tokens: Bound<'py, PyAny>,
    pub(super) parents: Bound<'py, PyAny>,
    pub(super) offsets: Bound<'py, PyAny>,
}

/// What verification accepts.
#[derive(FromPyObject)]
pub(super) struct AcceptArrays<'py> {
    offsets: Bound<'py, PyAny>,
    paths: Bound<'py, PyAny>,
    tokens: Bound<'py, PyAny>,
    rows: Bound<'py, PyAny>,
    roots: Bound<'py, PyAny>,
    new_lens: Bound<'py, PyAny>,
    faults: Bound<'py, PyAny>,
}

impl<'py> AcceptArrays<'py> {
    /// The launch writes them.
    pub(super) fn written<'a>(
        &'a self,
        call: &mut Operands<'a, 'py>,
    ) -> impl Fn(&Imported, i32) -> Result<DeviceAccepts> + Send + Sync + use<> {
        let offsets = call.writes("out_offsets", &self.offsets);
        let paths = call.writes("paths", &self.paths);
        let tokens = call.writes("path_tokens", &self.tokens);
        let rows = call.writes("path_rows", &self.rows);
        let roots = call.writes("roots", &self.roots);
        let new_lens = call.writes("new_lens", &self.new_lens);
        let faults = call.writes("faults", &self.faults);
        move |o, g| {
            Ok(DeviceAccepts {
                offsets: o.slice(offsets, g)?,
                paths: o.slice(paths, g)?,
                tokens: o.slice(tokens, g)?,
                rows: o.slice(rows, g)?,
                roots: o.slice(roots, g)?,
                new_lens: o.slice(new_lens, g)?,
                faults: o.slice(faults, g)?,
            })
        }
    }
}

/// What tokens are drawn by.
#[derive(FromPyObject)]
pub(super) struct SamplerArrays<'py> {
    rows: Bound<'py, PyAny>,
    edit_begins: Bound<'py, PyAny>,
    edit_counts: Bound<'py, PyAny>,
    edit_tokens: Bound<'py, PyAny>,
    edit_biases: Bound<'py, PyAny>,
    edit_outputs: Bound<'py, PyAny>,
}

impl<'py> SamplerArrays<'py> {
    /// The launch reads them.
    pub(super) fn read<'a>(
        &'a self,
        call: &mut Operands<'a, 'py>,
    ) -> impl Fn(&Imported, i32) -> Result<DeviceSamplers> + Send + Sync + use<> {
        let rows = call.reads("sampler rows", &self.rows);
        let edit_begins = call.reads("edit_begins", &self.edit_begins);
        let edit_counts = call.reads("edit_counts", &self.edit_counts);
        let edit_tokens = call.reads("edit_tokens", &self.edit_tokens);
        let edit_biases = call.reads("edit_biases", &self.edit_biases);
        let edit_outputs = call.reads("edit_outputs", &self.edit_outputs);
        move |o, g| {
            Ok(DeviceSamplers {
                rows: o.slice(rows, g)?,
                edit_begins: o.slice(edit_begins, g)?,
                edit_counts: o.slice(edit_counts, g)?,
                edit_tokens: o.slice(edit_tokens, g)?,
                edit_biases: o.slice(edit_biases, g)?,
                edit_outputs: o.slice(edit_outputs, g)?,
            })
        }
    }
}

/// The beams of a round's drafts.
#[derive(FromPyObject)]
pub(super) struct BeamArrays<'py> {
    scores: Bound<'py, PyAny>,
    candidate_tokens: Bound<'py, PyAny>,
    candidate_parents: Bound<'py, PyAny>,
    beams: Bound<'py, PyAny>,
    tokens: Bound<'py, PyAny>,
    parents: Bound<'py, PyAny>,
    ancestors: Bound<'py, PyAny>,
    sound: Bound<'py, PyAny>,
}

impl<'py> BeamArrays<'py> {
    /// The launch reads them.
    pub(super) fn read<'a>(
        &'a self,
        call: &mut Operands<'a, 'py>,
        shape: geometry::TreeShape,
    ) -> impl Fn(&Imported, i32) -> Result<DeviceBeams> + Send + Sync + use<> {
        self.named(call, List::Read, shape)
    }

    /// The launch writes them.
    pub(super) fn written<'a>(
        &'a self,
        call: &mut Operands<'a, 'py>,
        shape: geometry::TreeShape,
    ) -> impl Fn(&Imported, i32) -> Result<DeviceBeams> + Send + Sync + use<> {
        self.named(call, List::Written, shape)
    }

    fn named<'a>(
        &'a self,
        call: &mut Operands<'a, 'py>,
        list: List,
        shape: geometry::TreeShape,
    ) -> impl Fn(&Imported, i32) -> Result<DeviceBeams> + Send + Sync + use<> {
        let mut of = |name, tensor| call.name(list, name, Some(tensor));
        let scores = of("scores", &self.scores);
        let candidate_tokens = of("candidate_tokens", &self.candidate_tokens);
        let candidate_parents = of("candidate_parents", &self.candidate_parents);
        let beams = of("beams", &self.beams);
        let tokens = of("beam_tokens", &self.tokens);
        let parents = of("beam_parents", &self.parents);
        let ancestors = of("ancestors", &self.ancestors);
        let sound = of("sound", &self.sound);
        move |o, g| {
            Ok(DeviceBeams {
                shape,
                scores: o.slice(scores, g)?,
                candidate_tokens: o.slice(candidate_tokens, g)?,
                candidate_parents: o.slice(candidate_parents, g)?,
                beams: o.slice(beams, g)?,
                tokens: o.slice(tokens, g)?,
                parents: o.slice(parents, g)?,
                ancestors: o.slice(ancestors, g)?,
                sound: o.slice(sound, g)?,
            })
        }
    }
}

/// Trees with links and scores, as kernels make them.
#[derive(FromPyObject)]
pub(super) struct BuiltTrees<'py> {
    offsets: Bound<'py, PyAny>,
    tokens: Bound<'py, PyAny>,
    depths: Bound<'py, PyAny>,
    parents: Bound<'py, PyAny>,
    next_child: Bound<'py, PyAny>,
    next_sibling: Bound<'py, PyAny>,
    scores: Bound<'py, PyAny>,
}

impl<'py> BuiltTrees<'py> {
    /// The launch writes them, and their ancestor bits `masks`.
    pub(super) fn written<'a>(
        &'a self,
        call: &mut Operands<'a, 'py>,
        masks: Option<Arg<'a, 'py>>,
    ) -> impl Fn(&Imported, i32) -> Result<DeviceTrees> + Send + Sync + use<> {
        let offsets = call.writes("offsets", &self.offsets);
        let tokens = call.writes("tree tokens", &self.tokens);
        let depths = call.writes("depths", &self.depths);
        let parents = call.writes("tree parents", &self.parents);
        let next_child = call.writes("next_child", &self.next_child);
        let next_sibling = call.writes("next_sibling", &self.next_sibling);
        let scores = call.writes("tree scores", &self.scores);
        let masks = call.writes("masks", masks);
        move |o, g| {
            Ok(DeviceTrees {
                offsets: o.slice(offsets, g)?,
                tokens: o.slice(tokens, g)?,
                depths: o.slice(depths, g)?,
                parents: o.slice(parents, g)?,
                next_child: o.slice(next_child, g)?,
                next_sibling: o.slice(next_sibling, g)?,
                scores: o.slice(scores, g)?,
                masks: o.maybe(masks, g)?,
            })
        }
    }
}

/// Trees with scores, two of which are united.
#[derive(FromPyObject)]
pub(super) struct ScoredTrees<'py> {
    offsets: Bound<'py, PyAny>,
    tokens: Bound<'py, PyAny>,
    parents: Bound<'py, PyAny>,
    scores: Bound<'py, PyAny>,
}

impl<'py> ScoredTrees<'py> {
    /// The launch reads them under these names: offsets, tokens, parents and scores.
    pub(super) fn read<'a>(
        &'a self,
        call: &mut Operands<'a, 'py>,
        names: [&'static str; 4],
    ) -> impl Fn(&Imported, i32) -> Result<GivenTrees> + Send + Sync + use<> {
        let offsets = call.reads(names[0], &self.offsets);
        let tokens = call.reads(names[1], &self.tokens);
        let parents = call.reads(names[2], &self.parents);
        let scores = call.reads(names[3], &self.scores);
        move |o, g| {
            Ok(GivenTrees {
                offsets: o.slice(offsets, g)?,
                tokens: o.slice(tokens, g)?,
                parents: o.slice(parents, g)?,
                scores: o.slice(scores, g)?,
            })
        }
    }
}

/// Lists of the levels of a batch's blocks.
#[derive(FromPyObject)]
pub(super) struct ListArrays<'py> {
    scores: Bound<'py, PyAny>,
    ids: Bound<'py, PyAny>,
    sound: Bound<'py, PyAny>,
}

impl<'py> ListArrays<'py> {
    /// The launch reads them.
    pub(super) fn read<'a>(
        &'a self,
        call: &mut Operands<'a, 'py>,
    ) -> impl Fn(&Imported, i32) -> Result<DeviceLists> + Send + Sync + use<> {
        let scores = call.reads("list scores", &self.scores);
        let ids = call.reads("list ids", &self.ids);
        let sound = call.reads("sound lists", &self.sound);
        move |o, g| Ok(DeviceLists { scores: o.slice(scores, g)?, ids: o.slice(ids, g)?, sound: o.slice(sound, g)? })
    }
}

/// The rows of a batch's blocks, and the limits of their trees.
#[derive(FromPyObject)]
pub(super) struct BlockArrays<'py> {
    pub(super) offsets: Bound<'py, PyAny>,
    pub(super) tokens: Bound<'py, PyAny>,
    pub(super) masks: Bound<'py, PyAny>,
    pub(super) wanted: Bound<'py, PyAny>,
    pub(super) heats: Bound<'py, PyAny>,
    pub(super) levels: Bound<'py, PyAny>,
    pub(super) nodes: Bound<'py, PyAny>,
}

/// A plan that the device writes.
#[derive(FromPyObject)]
pub(super) struct PlanArrays<'py> {
    rows: Bound<'py, PyAny>,
    versions: Bound<'py, PyAny>,
    qo_indptr: Bound<'py, PyAny>,
    prefix_lens: Bound<'py, PyAny>,
    positions: Bound<'py, PyAny>,
    out_slots: Bound<'py, PyAny>,
    mask: Bound<'py, PyAny>,
}

impl<'py> PlanArrays<'py> {
    /// The launch writes them.
    pub(super) fn written<'a>(
        &'a self,
        call: &mut Operands<'a, 'py>,
    ) -> impl Fn(&Imported, i32) -> Result<PlanMemory> + Send + Sync + use<> {
        let rows = call.writes("rows", &self.rows);
        let versions = call.writes("versions", &self.versions);
        let qo_indptr = call.writes("qo_indptr", &self.qo_indptr);
        let prefix_lens = call.writes("prefix_lens", &self.prefix_lens);
        let positions = call.writes("positions", &self.positions);
        let out_slots = call.writes("out_slots", &self.out_slots);
        let mask = call.writes("mask", &self.mask);
        move |o, g| {
            Ok(PlanMemory {
                rows: o.slice(rows, g)?,
                versions: o.slice(versions, g)?,
                qo_indptr: o.slice(qo_indptr, g)?,
                prefix_lens: o.slice(prefix_lens, g)?,
                positions: o.slice(positions, g)?,
                out_slots: o.slice(out_slots, g)?,
                mask: o.slice(mask, g)?,
            })
        }
    }
}

/// Moves that the device lists.
#[derive(FromPyObject)]
pub(super) struct MoveArrays<'py> {
    src: Bound<'py, PyAny>,
    dst: Bound<'py, PyAny>,
    offsets: Bound<'py, PyAny>,
}

impl<'py> MoveArrays<'py> {
    /// The launch writes them.
    pub(super) fn written<'a>(
        &'a self,
        call: &mut Operands<'a, 'py>,
    ) -> impl Fn(&Imported, i32) -> Result<MovesView> + Send + Sync + use<> {
        let src = call.writes("src", &self.src);
        let dst = call.writes("dst", &self.dst);
        let offsets = call.writes("move offsets", &self.offsets);
        move |o, g| MovesView::new(o.slice(src, g)?, o.slice(dst, g)?, o.slice(offsets, g)?)
    }
}
