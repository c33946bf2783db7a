//! The launches of `cuda/tree_lists.cu` and `cuda/list_beams.cu`: the rows of a batch's blocks, and trees or candidates from
//! the lists of their levels.

use std::sync::Arc;

use super::check::{arrays, half, live_address, rows_on_device};
use super::{DeviceBeams, DeviceTrees, MAX_DEVICE_TOPK};
use crate::bounds::{MAX_BATCH, fits_i32};
use crate::device::context::Context;
use crate::device::driver::{Function, Module, Stream};
use crate::device::images;
use crate::device::params::draft::{BlockRowsParams, ListBeamsParams, TreeListsParams};
use crate::device::rows::Rows;
use crate::device::view::DeviceSlice;
use crate::error::{Error, Result, in_range};
use crate::geometry::words_for;
use crate::overlap::{Operand, disjoint};
use crate::round::MAX_VOCAB;

/// Most nodes of a tree of lists: `MOST` of the kernel.
pub const MAX_LISTED: u32 = 64;
/// Most tokens of a list behind which beams go on: a lane each.
pub const MAX_BEAM_LIST: usize = 32;

/// The kernels on one device. Functions are valid while their modules are loaded.
#[derive(Debug)]
pub struct TreeLists {
    rows: Function,
    lists: Function,
    beams: [Function; 2],
    _modules: [Module; 2],
    context: Arc<Context>,
}

/// The lists of B requests' levels: B * D rows of `width` tokens, best first.
#[derive(Debug, Clone, Copy)]
pub struct DeviceLists {
    /// Log-probability of each token, B * D * `width` entries.
    pub scores: DeviceSlice<f32>,
    /// Each token in the draft's vocabulary.
    pub ids: DeviceSlice<i32>,
    /// 0 of each list without a distribution, B * D entries.
    pub sound: DeviceSlice<i32>,
}

/// The operands of [`TreeLists::rows`].
#[derive(Debug, Clone, Copy)]
pub struct BlockRowsOperands<'a> {
    /// Rows of a block.
    pub rows: u32,
    /// Rows of a block before the one that predicts the first level; -1 if no row does, and all rows have the mask.
    pub skipped: i32,
    /// Positions of a request.
    pub context: u32,
    /// Most nodes of a tree of this round.
    pub most: u32,
    /// Token of the rows behind the first.
    pub mask_token: u32,
    /// Committed positions, B entries.
    pub lens: &'a DeviceSlice<i32>,
    /// Token of each root, B entries.
    pub roots: &'a DeviceSlice<i32>,
    /// Deepest useful level, 0 of a request that does not draft, B entries.
    pub depths: &'a DeviceSlice<i32>,
    /// Most nodes of each tree, B entries.
    pub nodes: &'a DeviceSlice<i32>,
    /// Factor on each request's scores, B entries.
    pub heats: &'a DeviceSlice<f32>,
    /// An array whose last element counts the live requests; `None` where all are. A dead request has no rows.
    pub live: Option<&'a DeviceSlice<i32>>,
    /// Written: first row of each block, B + 1 entries.
    pub offsets: &'a DeviceSlice<i32>,
    /// Written: token of each row, B * `rows` entries, 0 behind the last block.
    pub tokens: &'a DeviceSlice<i32>,
    /// Written: the rows of the same block, as bits.
    pub masks: &'a DeviceSlice<u64>,
    /// Written: the row that predicts each level, row 0 where there is no such level, -1 where no row predicts it; B * D
    /// entries.
    pub wanted: &'a DeviceSlice<i32>,
    /// Written: the factor of each level's scores, B * D entries.
    pub row_heats: &'a DeviceSlice<f32>,
    /// Written: levels of each request, B entries.
    pub levels: &'a DeviceSlice<i32>,
    /// Written: most nodes of each tree of this round, B entries.
    pub max_nodes: &'a DeviceSlice<i32>,
}

/// The operands of [`TreeLists::lists`].
#[derive(Debug, Clone, Copy)]
pub struct TreeListsOperands<'a> {
    /// V: most nodes of a tree, at most [`MAX_LISTED`].
    pub draft_tokens: u32,
    /// Tokens of a list.
    pub width: u32,
    /// What is read.
    pub lists: &'a DeviceLists,
    /// Token of the target for each draft id; `None` where they are the same.
    pub to_target: Option<&'a DeviceSlice<i32>>,
    /// Token of each root, B entries.
    pub roots: &'a DeviceSlice<i32>,
    /// Deepest level of each tree, B entries.
    pub max_depths: &'a DeviceSlice<i32>,
    /// Most nodes of each tree, root included, each in `1..=V`, B entries.
    pub max_nodes: &'a DeviceSlice<i32>,
    /// An array whose last element counts the live requests; `None` where all are. A dead request has no nodes.
    pub live: Option<&'a DeviceSlice<i32>>,
    /// Written.
    pub trees: &'a DeviceTrees,
    /// Written: 0 of each request with a level without a distribution, B entries.
    pub sound: &'a DeviceSlice<i32>,
}

/// The operands of [`TreeLists::beams`].
#[derive(Debug, Clone, Copy)]
pub struct ListBeamsOperands<'a> {
    /// Tokens of a list, at most [`MAX_BEAM_LIST`].
    pub width: u32,
    /// What is read.
    pub lists: &'a DeviceLists,
    /// Factor on what the scores of each level change by, B * D entries.
    pub heats: &'a DeviceSlice<f32>,
    /// Token of the target for each draft id; `None` where they are the same.
    pub to_target: Option<&'a DeviceSlice<i32>>,
    /// Token of each root, B entries.
    pub roots: &'a DeviceSlice<i32>,
    /// Deepest level of each tree, B entries.
    pub max_depths: &'a DeviceSlice<i32>,
    /// `[vocab, rank]`: a row of each token before.
    pub before: &'a Rows,
    /// `[draft vocabulary, rank]`: a row of each token that is scored.
    pub behind: &'a Rows,
    /// `[B * D, rank]`: factors on the elements of both rows' product; `None` where all are 1.
    pub weights: Option<&'a Rows>,
    /// No token has a chance but those that are listed.
    pub closed: bool,
    /// As above.
    pub live: Option<&'a DeviceSlice<i32>>,
    /// Written: candidates, of D steps, and whether they are sound.
    pub beams: &'a DeviceBeams,
}

impl DeviceLists {
    /// Check the arrays of `requests` requests, and return their levels.
    fn check(&self, context: &Context, requests: usize, width: usize) -> Result<usize> {
        let rows = self.sound.len();
        in_range("requests", requests as u64, 1, MAX_BATCH.into())?;
        in_range("width of lists", width as u64, 1, 255)?;
        let levels = rows / requests;
        if levels * requests != rows {
            let (got, want) = (format!("{rows} rows"), format!("as many for each of {requests} requests"));
            return Err(Error::Mismatch { operand: "lists", got, want });
        }
        in_range("levels of lists", levels as u64, 1, 255)?;
        fits_i32("rows * width", (rows * width) as u64, || format!("{rows} * {width}"))?;
        arrays(context, rows * width, &[("list scores", &self.scores)])?;
        arrays(context, rows * width, &[("list ids", &self.ids)])?;
        arrays(context, rows, &[("sound lists", &self.sound)])?;
        Ok(levels)
    }
}

impl TreeLists {
    /// Load them into `context`, which is current.
    pub(super) fn load(context: Arc<Context>) -> Result<Self> {
        let trees = Module::load(images::select("tree_lists", context.capability())?)?;
        let beams = Module::load(images::select("list_beams", context.capability())?)?;
        let [bf16, f16] = ["list_beams_bf16", "list_beams_f16"].map(|name| beams.function(name));
        Ok(Self {
            rows: trees.function("block_rows")?,
            lists: trees.function("tree_lists")?,
            beams: [bf16?, f16?],
            _modules: [trees, beams],
            context,
        })
    }

    /// The rows of each request's block, its root and masks, no further than `context` positions; and its limits.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for operands that do not fit each other; [`Error::OutOfRange`] for sizes that no block has.
    pub fn rows(&self, stream: Stream, operands: &BlockRowsOperands<'_>) -> Result<()> {
        let o = operands;
        let (context, requests) = (&self.context, o.lens.len());
        in_range("requests", requests as u64, 1, MAX_BATCH.into())?;
        let rows = in_range("rows of a block", o.rows, 1, 64)? as usize;
        in_range("rows before the first level", o.skipped, -1, i128::from(o.rows))?;
        in_range("mask token", o.mask_token, 0, i128::from(MAX_VOCAB))?;
        in_range("context", o.context, 1, i128::from(i32::MAX))?;
        in_range("most nodes", o.most, 1, MAX_LISTED.into())?;
        let levels = o.wanted.len() / requests;
        in_range("levels of blocks", levels as u64, 1, 64)?;
        let read = [("lens", o.lens), ("roots", o.roots), ("depths", o.depths), ("nodes", o.nodes)];
        arrays(context, requests, &read)?;
        arrays(context, requests, &[("heats", o.heats)])?;
        arrays(context, requests + 1, &[("block offsets", o.offsets)])?;
        arrays(context, requests * rows, &[("block tokens", o.tokens)])?;
        arrays(context, requests * rows, &[("block masks", o.masks)])?;
        arrays(context, requests * levels, &[("wanted", o.wanted)])?;
        arrays(context, requests * levels, &[("row heats", o.row_heats)])?;
        arrays(context, requests, &[("levels", o.levels), ("most nodes", o.max_nodes)])?;
        let live = live_address(context, o.live)?;
        let written = [
            o.offsets.span(),
            o.tokens.span(),
            o.masks.span(),
            o.wanted.span(),
            o.row_heats.span(),
            o.levels.span(),
            o.max_nodes.span(),
        ];
        let spans = [o.lens.span(), o.roots.span(), o.depths.span(), o.nodes.span(), o.heats.span(), o.live.span()];
        disjoint(&[&written], &[&spans])?;
        let report = context.report(stream)?;
        let params = BlockRowsParams {
            lens: o.lens.address(),
            roots: o.roots.address(),
            depths: o.depths.address(),
            nodes: o.nodes.address(),
            heats: o.heats.address(),
            live,
            offsets: o.offsets.address(),
            tokens: o.tokens.address(),
            masks: o.masks.address(),
            wanted: o.wanted.address(),
            row_heats: o.row_heats.address(),
            levels_out: o.levels.address(),
            nodes_out: o.max_nodes.address(),
            report,
            requests: requests as i32, // limits above fit
            rows: o.rows as i32,
            levels: levels as i32,
            skipped: o.skipped,
            context: o.context as i32,
            most: o.most as i32,
            mask_token: o.mask_token as i32,
            reserved: 0,
        };
        let _current = context.enter()?;
        // SAFETY: the module is loaded for the process and its context is current. Addresses and sizes come from views,
        // whose constructors' callers promised them; the fault record lives as long as the process.
        unsafe { self.rows.launch((requests as u32, 1, 1), 128, stream, &params) }
    }

    /// The best tree of each request, as [`list_tree`](crate::draft::list_tree) chooses and numbers its nodes: the same
    /// lists give the same trees. A request with a level without a distribution gets its root alone.
    ///
    /// A limit outside its range is recorded and leaves the root alone (`max_nodes`); so is an id outside the draft's
    /// vocabulary, for which token 0 stands in (`vocabulary (d2t target id)`).
    ///
    /// # Errors
    /// [`Error::Mismatch`] for operands that do not fit each other; [`Error::OutOfRange`] for trees of more than
    /// [`MAX_LISTED`] nodes.
    pub fn lists(&self, stream: Stream, operands: &TreeListsOperands<'_>) -> Result<()> {
        let o = operands;
        let (context, trees, requests) = (&self.context, o.trees, o.roots.len());
        let v = in_range("nodes of a tree of lists", o.draft_tokens, 1, MAX_LISTED.into())? as usize;
        let levels = o.lists.check(context, requests, o.width as usize)?;
        arrays(context, requests + 1, &[("offsets", &trees.offsets)])?;
        let nodes = [
            ("tree tokens", &trees.tokens),
            ("depths", &trees.depths),
            ("tree parents", &trees.parents),
            ("next_child", &trees.next_child),
            ("next_sibling", &trees.next_sibling),
        ];
        arrays(context, requests * v, &nodes)?;
        arrays(context, requests * v, &[("tree scores", &trees.scores)])?;
        let words = words_for(o.draft_tokens) as usize;
        trees.masks.map_or(Ok(()), |masks| arrays(context, requests * v * words, &[("masks", &masks)]))?;
        let limits = [("roots", o.roots), ("max_depths", o.max_depths), ("max_nodes", o.max_nodes), ("sound", o.sound)];
        arrays(context, requests, &limits)?;
        let draft_vocab = o.to_target.map_or(0, DeviceSlice::len);
        o.to_target.map_or(Ok(()), |map| arrays(context, draft_vocab, &[("to_target", map)]))?;
        in_range("draft vocabulary", draft_vocab as u64, 0, MAX_VOCAB.into())?;
        let live = live_address(context, o.live)?;
        let lists = [o.lists.scores.span(), o.lists.ids.span(), o.lists.sound.span(), o.to_target.span()];
        let limits = [o.roots.span(), o.max_depths.span(), o.max_nodes.span(), o.live.span()];
        disjoint(&[&trees.spans(), &[o.sound.span()]], &[&lists, &limits])?;
        let report = context.report(stream)?;
        let params = TreeListsParams {
            scores: o.lists.scores.address(),
            ids: o.lists.ids.address(),
            sound: o.lists.sound.address(),
            to_target: o.to_target.map_or(0, DeviceSlice::address),
            max_depths: o.max_depths.address(),
            live,
            trees: trees.params(o.roots, o.max_nodes, v),
            sound_out: o.sound.address(),
            report,
            levels: levels as i32, // limits above fit
            width: o.width as i32,
            draft_vocab: draft_vocab as i32,
            reserved: 0,
        };
        let _current = context.enter()?;
        // SAFETY: as above.
        unsafe { self.lists.launch((requests as u32, 1, 1), 512, stream, &params) }
    }

    /// The candidates of each request's beams, as [`ListBeams`](crate::draft::ListBeams) finds them: behind each beam a
    /// token's score changes by the product of two rows, summed in f32. Places that no candidate takes have a score of
    /// -inf. A request with a level without a distribution, or with a product that is not finite, has no sound steps.
    ///
    /// An id outside the draft's vocabulary is recorded and is no candidate (`vocabulary (d2t target id)`); a token before
    /// that has no row is recorded, and nothing goes on behind it (`tokens before (rows of their table)`).
    ///
    /// # Errors
    /// [`Error::Mismatch`] for operands that do not fit each other; [`Error::OutOfRange`] for lists of more than
    /// [`MAX_BEAM_LIST`] tokens or more beams than [`MAX_DEVICE_TOPK`].
    pub fn beams(&self, stream: Stream, operands: &ListBeamsOperands<'_>) -> Result<()> {
        let o = operands;
        let (context, beams, requests) = (&self.context, o.beams, o.roots.len());
        in_range("tokens of a list of beams", u64::from(o.width), 1, MAX_BEAM_LIST as i128)?;
        in_range("topk on a GPU", beams.shape.topk(), 1, MAX_DEVICE_TOPK.into())?;
        let levels = o.lists.check(context, requests, o.width as usize)?;
        beams.check(context)?;
        if beams.requests() != requests || beams.shape.steps() as usize != levels {
            let got = format!("{} requests of {} steps", beams.requests(), beams.shape.steps());
            return Err(Error::Mismatch { operand: "beams", got, want: format!("{requests} of {levels}") });
        }
        arrays(context, requests * levels, &[("heats", o.heats)])?;
        arrays(context, requests, &[("roots", o.roots), ("max_depths", o.max_depths)])?;
        let (vocab, draft_vocab, rank) = (o.before.rows(), o.behind.rows(), o.before.columns());
        o.behind.expect(draft_vocab, rank, o.before.float())?;
        let function = half(o.before, self.beams[0], self.beams[1])?;
        o.weights.map_or(Ok(()), |weights| weights.expect(requests * levels, rank, o.before.float()))?;
        for table in [o.before, o.behind].into_iter().chain(o.weights) {
            rows_on_device(context, &[table])?;
            if !table.in_vectors() || table.stride() != rank {
                let (got, want) = (format!("rows of {rank}"), "rows of whole vectors, behind one another".into());
                return Err(Error::Mismatch { operand: table.what(), got, want });
            }
        }
        in_range("vocab", vocab as u64, 1, MAX_VOCAB.into())?;
        in_range("draft vocabulary", draft_vocab as u64, 1, MAX_VOCAB.into())?;
        o.to_target.map_or(Ok(()), |map| arrays(context, draft_vocab, &[("to_target", map)]))?;
        let live = live_address(context, o.live)?;
        let lists = [o.lists.scores.span(), o.lists.ids.span(), o.lists.sound.span(), o.to_target.span()];
        let limits = [o.roots.span(), o.max_depths.span(), o.heats.span(), o.live.span()];
        disjoint(&[&beams.spans()], &[&lists, &limits, &[o.before.span(), o.behind.span(), o.weights.span()]])?;
        let report = context.report(stream)?;
        let params = ListBeamsParams {
            scores: o.lists.scores.address(),
            ids: o.lists.ids.address(),
            sound: o.lists.sound.address(),
            heats: o.heats.address(),
            to_target: o.to_target.map_or(0, DeviceSlice::address),
            max_depths: o.max_depths.address(),
            roots: o.roots.address(),
            live,
            before: o.before.address(),
            behind: o.behind.address(),
            weights: o.weights.map_or(0, Rows::address),
            drafts: beams.drafts(),
            report,
            requests: requests as i32, // limits above fit
            levels: levels as i32,
            width: o.width as i32,
            draft_vocab: draft_vocab as i32,
            vocab: vocab as i32,
            rank: rank as i32,
            closed: u32::from(o.closed),
            reserved: 0,
        };
        let _current = context.enter()?;
        // SAFETY: as above.
        unsafe { function.launch((requests as u32, 1, 1), 256, stream, &params) }
    }
}
