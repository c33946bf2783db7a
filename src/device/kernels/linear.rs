//! The launch of `cuda/linear.cu`: products of a few rows with a weight, on GPUs of compute capability 9.0.

use std::sync::Arc;

use super::check::on_device;
use crate::device::context::Context;
use crate::device::driver::{Function, Module, Stream};
use crate::device::images;
use crate::device::params::linear::{LINEAR_ROWS, LinearParams};
use crate::device::rows::{FloatType, Rows};
use crate::device::tensor_map::{BOX_COLUMNS, TensorMap};
use crate::error::{Error, Result, in_range};
use crate::overlap::{Operand, disjoint};

/// Most rows of a launch.
pub(in crate::device) const MAX_LINEAR_ROWS: u32 = LINEAR_ROWS as u32;

/// A block's share, as `cuda/linear.cu` instantiates it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tile {
    outputs: u32,
    /// Panels of 64 inputs in a stage.
    depth: u32,
    stages: u32,
    warpgroups: u32,
    /// For up to 8 rows with K whole, with two parts, then for more rows.
    names: [&'static str; 4],
}

macro_rules! tiles {
    ($(($outputs:literal, $depth:literal, $stages:literal, $warpgroups:literal),)+) => {
        const TILES: &[Tile] = &[$(Tile {
            outputs: $outputs,
            depth: $depth,
            stages: $stages,
            warpgroups: $warpgroups,
            names: [
                concat!("linear_", $outputs, "_8_1"),
                concat!("linear_", $outputs, "_8_2"),
                concat!("linear_", $outputs, "_16_1"),
                concat!("linear_", $outputs, "_16_2"),
            ],
        }),+];
    };
}

tiles! { (16, 4, 5, 1), (32, 2, 8, 1), (48, 2, 6, 1), (64, 2, 5, 1), (128, 1, 5, 1), (224, 1, 3, 2), }

/// What a block costs beside its weights, in outputs.
const BLOCK_COST: u32 = 8;

impl Tile {
    /// Bytes of a block's shared memory, as `LinearTile` of `cuda/linear.cu` counts them.
    fn shared(&self, tokens: u32, split: u32) -> u32 {
        let Tile { outputs, depth, stages, warpgroups, .. } = *self;
        let covered = outputs.next_multiple_of(64 * warpgroups); // outputs of whole tiles
        let ring = stages * depth * outputs * 128 + (stages * depth * tokens * 128).max((covered - outputs) * 128);
        let sums = if split == 2 { covered * tokens * 4 } else { 0 };
        1024 + ring + sums + 16 * stages
    }
}

/// How a weight's product is launched: a function of its sizes and of the GPU's multiprocessors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearPlan {
    tile: usize,
    /// Parts of K, 1 or 2.
    split: u32,
    outputs: u32,
    inputs: u32,
}

impl LinearPlan {
    /// The tile with the least weights for the multiprocessor that has most. `None` where the kernel has no such product: outputs
    /// and inputs are multiples of 8, and the second of two parts begins at a stage of its own.
    fn new(outputs: u32, inputs: u32, split: u32, multiprocessors: u32) -> Option<Self> {
        let whole = |tile: &Tile| inputs.is_multiple_of(split * tile.depth * BOX_COLUMNS);
        let fits = |tile: &Tile| split == 1 || (split == 2 && whole(tile));
        let cost = |tile: &Tile| {
            let blocks = u64::from(outputs.div_ceil(tile.outputs)) * u64::from(split);
            blocks.div_ceil(multiprocessors.into()) * u64::from(tile.outputs + BLOCK_COST)
        };
        let of_eight = outputs > 0 && inputs > 0 && outputs.is_multiple_of(8) && inputs.is_multiple_of(8);
        let tiles = TILES.iter().enumerate().filter(|(_, tile)| of_eight && fits(tile));
        // Of equals the larger one, which is the later one.
        let (tile, _) = tiles.rev().min_by_key(|(_, tile)| cost(tile))?;
        Some(Self { tile, split, outputs, inputs })
    }
}

/// The kernels of `cuda/linear.cu` on one device. Functions are valid while `_module` is loaded.
#[derive(Debug)]
pub struct LinearKernel {
    /// By tile, in the order of its names.
    functions: Vec<[Function; 4]>,
    _module: Module,
    context: Arc<Context>,
}

/// Parameters as the kernel declares them.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct LinearCall {
    weight: TensorMap,
    x: TensorMap,
    params: LinearParams,
}

impl LinearKernel {
    /// Load them into `context`, which is current; `None` where the device is of another compute capability.
    pub(super) fn load(context: Arc<Context>) -> Result<Option<Self>> {
        let Some(image) = images::find("linear", context.capability()) else { return Ok(None) };
        let module = Module::load(image)?;
        let mut functions = Vec::with_capacity(TILES.len());
        for tile in TILES {
            let of = |i: usize| {
                let function = module.early_function(tile.names[i])?;
                function.allow_shared(tile.shared(if i < 2 { 8 } else { 16 }, i as u32 % 2 + 1))?;
                Ok::<_, Error>(function)
            };
            functions.push([of(0)?, of(1)?, of(2)?, of(3)?]);
        }
        Ok(Some(Self { functions, _module: module, context }))
    }

    /// The plan for a weight `[outputs, inputs]` with K in `split` parts; `None` where the kernel has none.
    pub fn plan(&self, outputs: u32, inputs: u32, split: u32) -> Option<LinearPlan> {
        LinearPlan::new(outputs, inputs, split, self.context.multiprocessors())
    }

    /// The map of a weight of a plan's sizes: made once, kept beside the weight.
    pub(in crate::device) fn weight_map(&self, plan: &LinearPlan, address: u64) -> Result<TensorMap> {
        TensorMap::of_16_bits(address, [plan.outputs, plan.inputs], [TILES[plan.tile].outputs, BOX_COLUMNS])
    }

    /// `y = x W^T`, checked: `weight` and `x` of bfloat16, y of bfloat16 or float32, each without gaps and aligned to 16
    /// bytes, up to 16 rows.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a number of rows, [`Error::Mismatch`] for operands that do not fit the plan or each other.
    pub fn launch(&self, stream: Stream, plan: &LinearPlan, weight: &Rows, x: &Rows, y: &Rows) -> Result<()> {
        let (outputs, inputs) = (plan.outputs as usize, plan.inputs as usize);
        in_range("linear rows", x.rows() as u64, 1, MAX_LINEAR_ROWS.into())?;
        let f32_output = y.float() == FloatType::F32;
        let output = if f32_output { FloatType::F32 } else { FloatType::Bf16 };
        let shapes = [(weight, outputs, inputs, FloatType::Bf16), (x, x.rows(), inputs, FloatType::Bf16)];
        for (rows, count, columns, float) in shapes.into_iter().chain([(y, x.rows(), outputs, output)]) {
            on_device(&self.context, &[(rows.what(), rows.device())])?;
            rows.expect(count, columns, float)?;
            if rows.stride() != columns || !rows.address().is_multiple_of(16) {
                let got = format!("{} elements from row to row, at {:#x}", rows.stride(), rows.address());
                let want = format!("{columns}, no gaps, at a multiple of 16 bytes");
                return Err(Error::Mismatch { operand: rows.what(), got, want });
            }
        }
        disjoint(&[&[y.span()]], &[&[x.span(), weight.span()]])?;
        let _current = self.context.enter()?;
        let map = self.weight_map(plan, weight.address())?;
        // SAFETY: the context is current; sizes, devices and overlaps were checked just now, and the views' makers promised
        // their memory.
        unsafe { self.launch_unchecked(stream, plan, &map, x.address(), x.rows() as u32, (y.address(), f32_output)) }
    }

    /// [`launch`](Self::launch) with the weight's map. A launch that is captured may read the weight before the launch in front
    /// of it has ended.
    ///
    /// # Safety
    /// The context is current. The map is of this plan and its weight is there; `x` is `[rows, inputs]` of bfloat16 and `y`
    /// `[rows, outputs]` of float32 or bfloat16, aligned to 16 bytes; they stay until the product has finished, and y
    /// overlaps none of the others.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for more than 16 rows, or none.
    pub(in crate::device) unsafe fn launch_unchecked(
        &self,
        stream: Stream,
        plan: &LinearPlan,
        weight: &TensorMap,
        x: u64,
        rows: u32,
        (y, f32_output): (u64, bool),
    ) -> Result<()> {
        in_range("linear rows", rows, 1, MAX_LINEAR_ROWS.into())?;
        let (tile, split) = (&TILES[plan.tile], plan.split);
        let tokens = if rows <= 8 { 8 } else { 16 };
        let function = self.functions[plan.tile][usize::from(rows > 8) * 2 + usize::from(split == 2)];
        let stage = tile.depth * BOX_COLUMNS;
        let call = LinearCall {
            weight: *weight,
            x: TensorMap::of_16_bits(x, [rows, plan.inputs], [tokens, BOX_COLUMNS])?,
            params: LinearParams {
                y,
                outputs: plan.outputs as i32, // the driver took it for the map
                rows: rows as i32,
                stages: plan.inputs.div_ceil(split * stage) as i32,
                part: (plan.inputs / split) as i32,
                f32_output: u32::from(f32_output),
                reserved: 0,
            },
        };
        let blocks = plan.outputs.div_ceil(tile.outputs) * split;
        let (threads, shared) = (128 * tile.warpgroups + 64, tile.shared(tokens, split));
        let function = if stream.is_capturing()? { function } else { function.late() };
        // SAFETY: the module is loaded for the process and its context is current; the rest is the caller's promise.
        unsafe { function.launch_in_clusters((blocks, 1, 1), threads, (shared, split), stream, &call) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outputs(n: u32, k: u32, split: u32) -> Option<u32> {
        LinearPlan::new(n, k, split, 132).map(|plan| TILES[plan.tile].outputs)
    }

    #[test]
    fn products_of_an_8b_model_take_a_block_for_each_multiprocessor() {
        let shapes = [(6144, 4096, 1), (4096, 4096, 1), (28672, 4096, 1), (4096, 14336, 2)];
        assert_eq!(shapes.map(|(n, k, split)| outputs(n, k, split)), [Some(48), Some(32), Some(224), Some(64)]);
    }

    #[test]
    fn shapes_that_the_kernel_has_not_get_no_plan() {
        let shapes =
            [(0, 64, 1), (8, 0, 1), (12, 64, 1), (16, 60, 1), (16, 64, 2), (16, 72, 2), (16, 512, 3), (16, 512, 0)];
        assert!(shapes.iter().all(|(n, k, split)| outputs(*n, *k, *split).is_none()));
        assert!([(8, 8, 1), (24, 72, 1), (16, 128, 2)].iter().all(|(n, k, split)| outputs(*n, *k, *split).is_some()));
    }

    #[test]
    fn tiles_are_those_of_the_kernel_and_two_blocks_share_a_multiprocessor() {
        let text = include_str!("../../../cuda/linear.cu");
        let lines = text.lines().filter_map(|line| line.strip_prefix("SPECRS_LINEAR(")?.strip_suffix(')'));
        let found: Vec<Vec<u32>> = lines.map(|line| line.split(", ").map(|n| n.parse().unwrap()).collect()).collect();
        let want: Vec<Vec<u32>> = TILES.iter().map(|t| vec![t.outputs, t.depth, t.stages, t.warpgroups]).collect();
        assert_eq!(found, want);
        assert!(TILES.iter().all(|tile| tile.shared(16, 2) <= 113 * 1024));
        // Of the 8B model's down: 5 stages of 2 panels of 64 outputs and 8 rows, sums of 64 x 8, 10 barriers.
        assert_eq!(TILES[3].shared(8, 2), 1024 + 5 * 2 * (64 + 8) * 128 + 64 * 8 * 4 + 80);
    }
}
