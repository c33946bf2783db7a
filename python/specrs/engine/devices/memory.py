"""The static memory of a GPU's rounds. It never moves, because kernels and captured graphs have its addresses.

`BucketMemory` declares all arrays that a round over up to ``batch`` requests reads and writes, in one arena. A
request's place in a bucket is its seat. The live requests have the first seats. The seats behind are empty, and kernels
write dead values into them. A request that has ended keeps its seat until the batch changes, and repeats its root
there. `Models` has everything that all buckets share: both models, their KV, `Roots` and `Activations`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from numpy.typing import ArrayLike
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs._specrs import Geometry
from specrs.engine.config import BlockEngineConfig, EngineConfig
from specrs.engine.devices.block_lists import MOST_BLOCK_ROWS, BlockTrees, beam_regions, built_regions
from specrs.engine.devices.format_arrays import FormatArrays, Regions, format_regions, poisons
from specrs.engine.drafting.chooser import TAIL
from specrs.models.block_head import BlockHead
from specrs.models.cuda import CudaDense
from specrs.models.cuda_attention import CudaAttention, DeviceAttention
from specrs.models.eagle3 import Eagle3Head
from specrs.models.llama import LlamaModel
from specrs.models.ops import KvMemory

STOPS = 8  # stop tokens of a request that the device checks; the host checks all
_ENTERING, _ENTERING_ROWS = 8, 512  # requests that enter together, and their positions in all
_PROMPT_ROWS = 16, 32, 64, 128, 192, 256  # positions of passes over prompts that have a graph
_RESULTS = 32  # rounds whose results are kept
_LASTING = {"given", "host trees", "control", "versions", "minus", "select", "least"}  # a round may read these first

Arrays = dict[str, torch.Tensor]


class Roots:
    """The head's results for roots, with which a round's drafts begin: a row for each row of the page table.

    A root is valid until the next round that drafts for its row.

    Attributes:
        nothing: one more row, which stays 0 and is read for seats that do not draft.
        logits: the head's logits, [rows + 1, vocabulary].
        hidden: the head's hidden states, [rows + 1, hidden size].
    """

    def __init__(self, head: Eagle3Head, rows: int) -> None:
        at = head.placement
        self.nothing = rows
        self.logits = at.for_logits().empty(rows + 1, head.vocab_size).zero_()
        self.hidden = at.empty(rows + 1, head.config.hidden_size).zero_()


class Activations:
    """Arrays that pass values between the models, for a round of the largest batch. Every bucket uses the first rows.

    Attributes:
        features: features of the target's pass, [layers, B * V, h].
        path_features: features of accepted nodes, [layers, B * path, h].
        roots: what a round's drafts begin with; ``None`` of a head of blocks.
    """

    def __init__(
        self, target: LlamaModel, head: Eagle3Head | BlockHead, config: EngineConfig, geometry: Geometry
    ) -> None:
        at, b = head.placement, geometry.max_batch
        layers, wide = len(head.aux_layers), target.config.hidden_size
        self.features = at.empty(layers, b * geometry.shape.draft_tokens, wide)
        self.path_features = at.empty(layers, b * longest_path(config, geometry, trees=True), wide)
        self.roots = RoundRoots(head, geometry) if head.passes == "steps" else None

    def poison(self) -> None:
        """Fill all arrays with NaN."""
        for tensor in (self.features, self.path_features, *(vars(self.roots).values() if self.roots else ())):
            tensor.fill_(math.nan)


class RoundRoots:
    """Arrays that the drafts of a round begin with, and those of its draft steps.

    Attributes:
        logits: the head's logits of the roots, B rows.
        hidden: the head's hidden states of the roots, B rows.
        step_hidden: hidden states that go into a draft step, B * K rows.
    """

    def __init__(self, head: Eagle3Head, geometry: Geometry) -> None:
        at, b, h = head.placement, geometry.max_batch, head.config.hidden_size
        self.logits = at.for_logits().empty(b, head.vocab_size)
        self.hidden, self.step_hidden = at.empty(b, h), at.empty(b * geometry.shape.topk, h)


@dataclass(eq=False)
class Models:
    """The models of an engine, and everything else that all buckets share.

    Attributes:
        dense: the GPU's operations.
        target: the target model.
        cache: the target's KV.
        head: the draft head; ``None`` without one, as are the other attributes of the head.
        draft_cache: the head's KV.
        roots: the head's results for roots; ``None`` of a head of blocks.
        to_target: int32, the target's token of each draft id; ``None`` if the ids are the same, or without a head.
        geometry: the engine's geometry.
        config: the engine's configuration.
        num_pages: pages of the pool.
        table: the pool's page table, on the device.
        stream: the stream of all work.
        activations: arrays that pass values between the models; ``None`` without a head.
        format: the arrays of the attention backend's format.
        blocks: the trees of a head of blocks, or of a P-EAGLE head, that rounds make; ``None`` if they make none.
    """

    dense: CudaDense
    target: LlamaModel
    cache: KvMemory
    head: Eagle3Head | BlockHead | None
    draft_cache: KvMemory | None
    roots: Roots | None
    to_target: torch.Tensor | None
    geometry: Geometry
    config: EngineConfig
    num_pages: int
    table: torch.Tensor
    stream: torch.cuda.Stream
    activations: Activations | None
    format: FormatArrays
    blocks: BlockTrees | None = None

    @property
    def attention(self) -> DeviceAttention:
        """The kernels of the attention backend."""
        return cast(CudaAttention, self.target.ops.attention).kernels


class Fields:
    """A layout of named arrays of int32 words, one behind another in a single array that is copied at once.

    Attributes:
        places: the first word and the number of words of each array, by name.
        words: number of words of all arrays.
    """

    def __init__(self, **words: int) -> None:
        ends = list(accumulate(words.values()))
        self.places = {name: (end - n, n) for (name, n), end in zip(words.items(), ends, strict=True)}
        self.words = ends[-1]

    def of(self, memory: torch.Tensor) -> Arrays:
        """Return the named arrays as views of ``memory``."""
        return {name: memory[first : first + n] for name, (first, n) in self.places.items()}


class HostInputs:
    """Named int32 inputs that the host writes into pinned memory, and copies to the device at once.

    Attributes:
        pinned: the memory of the host.
        host: its arrays, by name.
        there: the same arrays on the device.
    """

    def __init__(self, layout: Fields, device: torch.Tensor) -> None:
        self.pinned, self._device = torch.zeros(layout.words, dtype=torch.int32, pin_memory=True), device
        self.host = {name: array.numpy() for name, array in layout.of(self.pinned).items()}
        self.there = layout.of(device)

    def fill(self, name: str, values: ArrayLike, dead: int) -> None:
        """Set the first values of an array, and all behind them to ``dead``."""
        array, live = self.host[name], len(cast(Sequence[int], values))
        array[:live], array[live:] = values, dead

    def upload(self) -> None:
        """Copy all arrays to the device in stream order. The host must not write them before the copy is over."""
        self._device.copy_(self.pinned, non_blocking=True)


def given_layout(batch: int) -> Fields:
    """Return the layout of the inputs that the host uploads for each round that it launches."""
    # Arrays of 8-byte values come first, so that they are aligned. From `rows` to `root_to` are the fields of a seat.
    return Fields(
        sampling=batch * 12, rows=batch, lens=batch, roots=batch, depths=batch, limits=batch, first_pages=batch,
        caps=batch, nodes=batch, stop_counts=batch, done=batch, root_from=batch, root_to=batch,
        stops=batch * STOPS, tree_offsets=batch + 1, edit_begins=batch, edit_counts=batch, heats=batch, live=1,
    )  # fmt: skip


class BucketMemory:
    """All arrays of a bucket of ``batch`` requests.

    Under ``SPECRS_POISON=1`` there are gaps between the arrays. `poison` then fills all arrays that a round must write
    before it reads them, and `check_guards` looks for writes into the gaps.

    Attributes:
        paths: the most nodes of an accepted path. The key is True for trees that the host makes.
        given_layout: layout of the inputs that the host uploads for each round that it launches.
        trees_layout: layout of the trees that the host makes.
        arena: owns the arrays.
        arrays: the arrays on the device, by name.
        given: the fields of the array "given".
        host_trees: the fields of the array "host trees".
        found: the fields of the array "found", a round's results.
        ring: host memory to which each round publishes its results.
        results: the results in each place of the ring: the fields of ``found``, the ``lens`` and ``depths`` that the
            round used, and its ``header``.
    """

    def __init__(self, models: Models, batch: int) -> None:
        self.batch = batch
        g, config, cuda = models.geometry, models.config, models.dense.placement.device
        # Trees that the host makes may be deeper than trees that the device drafts.
        self.paths = {trees: longest_path(config, g, trees) for trees in (False, True)}
        path, v = max(self.paths.values()), g.shape.draft_tokens
        self.given_layout = given_layout(batch)
        self.trees_layout = Fields(
            tree_offsets=batch + 1, tree_tokens=batch * v, tree_parents=batch * v, tree_scores=batch * v
        )
        found = Fields(
            offsets=batch + 1, paths=batch * path, tokens=batch * path, rows=batch * path, roots=batch, new_lens=batch,
            faults=batch, sound=batch, tree_offsets=batch + 1, tree_tokens=batch * v, tree_parents=batch * v,
            tree_scores=batch * v, tree_origins=batch * v if config.sources else 0,
        )  # fmt: skip
        regions = {
            "given": ("int32", self.given_layout.words),
            "host trees": ("int32", self.trees_layout.words),
            "found": ("int32", found.words),
            "control": ("int32", 4),
            "versions": ("int64", batch),
            "minus": ("int32", batch),
            **_plans(batch, g.shape, path),
        }
        if models.head is not None and models.head.passes == "steps":
            regions |= _drafts(batch, g.shape, models.head.vocab_size, cuda.index, bool(config.sources))
        if models.blocks is not None:
            regions |= models.blocks.regions(batch, v)
        if g.page_size > 1 and (g.shape.topk > 1 or hosts_trees(config)):
            regions |= dict.fromkeys(("move src", "move dst"), ("int32", batch * path))
            regions["move offsets"] = ("int32", batch + 1)
        if models.head is not None and models.head.passes == "steps" and reads_holes(config, g):
            # A branch begins with whole pages, before which lies the tail of the prefix.
            copies = batch * (g.shape.topk - 1) * (g.page_size - 1)
            regions |= dict.fromkeys(("tail src", "tail dst"), ("int32", copies))
            regions["tail offsets"] = ("int32", batch + 1)
        self._poisoned = [name for name in regions if name not in _LASTING] if poisons() else None
        self.arena = core._DeviceArena(
            cuda.index,
            [(name, cast(Any, dtype), [size]) for name, (dtype, size) in regions.items()],
            self._poisoned is not None,
        )
        stream = models.dense.stream
        self.arrays: Arrays = {name: from_dlpack(self.arena.tensor(name, stream)) for name in regions}
        for tensor in self.arrays.values():
            tensor.zero_()
        self.arrays["minus"].fill_(-1)
        self.given = self.given_layout.of(self.arrays["given"])
        self.host_trees = self.trees_layout.of(self.arrays["host trees"])
        self.found = found.of(self.arrays["found"])
        self.ring = ring = core._RoundRing(cuda.index, _RESULTS, batch, found.words)
        self.results = [
            {
                **found.of(one[ring.found_at : ring.found_at + ring.words]),
                "lens": one[ring.lens_at : ring.lens_at + batch],
                "depths": one[ring.depths_at : ring.depths_at + batch],
                "header": one[: ring.lens_at],
            }
            for one in from_dlpack(ring.tensor())
        ]

    def poison(self, models: Models) -> None:
        """Fill all arrays that a round must write before it reads them with NaN or -1. Call this before a round."""
        if self._poisoned is None:
            return
        self.arena.poison(models.dense.stream, self._poisoned)
        if models.activations is not None:
            models.activations.poison()

    def check_guards(self, stream: core._DeviceStream) -> None:
        """Raise OutOfBoundsError if something was written between the arrays."""
        if self._poisoned is not None:
            self.arena.check_guards(stream)


def _plans(batch: int, shape: core.TreeShape, path: int) -> dict[str, tuple[str, int]]:
    """Return the arrays of each phase's plan: their types and sizes by name."""
    regions: dict[str, tuple[str, int]] = {}
    queries = {"draft": shape.topk, "verify": shape.draft_tokens, "extend": path, "decode": 1}
    for name, most in queries.items():
        regions |= {
            f"{name} rows": ("int32", batch),
            f"{name} versions": ("int64", batch),
            f"{name} qo_indptr": ("int32", batch + 1),
            f"{name} prefix_lens": ("int32", batch),
            f"{name} positions": ("int32", batch * most),
            f"{name} out_slots": ("int32", batch * most),
        }
        if name in ("draft", "verify"):
            regions[f"{name} mask"] = "int64", batch * most
    return regions


def _drafts(batch: int, shape: core.TreeShape, vocab: int, ordinal: int, unites: bool) -> dict[str, tuple[str, int]]:
    """Return the arrays that the device drafts with, by name: types and sizes.

    Args:
        unites: True to add arrays for the head's own trees, which the device unites with others.
    """
    v = shape.draft_tokens
    regions = beam_regions(batch, shape.topk, shape.candidates, 1) | built_regions(batch, v)
    regions["select"] = "int64", core._device_draft_scratch(shape, batch, vocab, ordinal)
    if unites:
        regions["own offsets"] = ("int32", batch + 1)
        names = ("tokens", "depths", "parents", "next_child", "next_sibling")
        regions |= {f"own {name}": ("int32", batch * v) for name in names}
        regions["own scores"] = ("float32", batch * v)
    return regions


def hosts_trees(config: EngineConfig) -> bool:
    """Return whether the host makes trees for rounds to verify: of other sources, or of a head's lists of levels."""
    return bool(config.sources) or isinstance(config, BlockEngineConfig)


def step_rows(config: EngineConfig, geometry: Geometry) -> int:
    """Return the most rows of a pass that drafts: one level, or all in one."""
    if isinstance(config, BlockEngineConfig):
        return min(MOST_BLOCK_ROWS, config.max_batch * config.rows)
    return config.max_batch * geometry.shape.topk


def reads_holes(config: EngineConfig, geometry: Geometry) -> bool:
    """Return whether draft steps read whole pages, in which the tail of a prefix must lie before each branch."""
    return config.backend.format == "flash_attention" and geometry.layout == "holey"


def longest_path(config: EngineConfig, geometry: Geometry, trees: bool) -> int:
    """Return the most nodes of an accepted path.

    Args:
        trees: True for trees that the host makes, False for trees that the device drafts.
    """
    levels = config.head_shape.steps
    return min(max(levels, config.deepest if trees else 0) + 1, geometry.max_context_len)


def entering(config: EngineConfig) -> tuple[int, int]:
    """Return the most requests that one pass of the head enters, and the most positions that it reads of each."""
    rows = min(
        TAIL + config.page_size - 1, config.max_context_len or TAIL
    )  # the head begins at a page's first position
    return max(min(config.max_batch, _ENTERING, _ENTERING_ROWS // rows), 1), rows


def prompt_sizes(config: EngineConfig) -> list[tuple[int, int]]:
    """Return the passes over prompts that have graphs: for each, the most requests and the most positions in all.

    Passes over more positions take the device longer than it takes the host to launch them.
    """
    if config.graphs == "off":
        return []
    rows = [n for n in _PROMPT_ROWS if n <= config.prefill_chunk]
    return [(batch, n) for n in rows for batch in sorted({1, entering(config)[0]})]


def format_arrays(config: EngineConfig, geometry: Geometry, head: bool) -> Regions:
    """Return the arrays of the attention backend's format that passes of an engine want (`FormatArrays`).

    Args:
        head: True if the engine has a draft head.
    """
    each = max(geometry.shape.draft_tokens, longest_path(config, geometry, trees=True))
    captured = [rows for _, rows in prompt_sizes(config)]
    queries = max(geometry.max_batch * each, math.prod(entering(config)), *captured)
    return format_regions(config, geometry, head, queries)


def buckets(most: int) -> list[int]:
    """Return the batch sizes that rounds are made for: powers of two below ``most``, and ``most`` itself last."""
    sizes = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [*sizes, most]
