"""The static memory of a GPU's rounds: what kernels and captured graphs have the addresses of, and so never moves.

`BucketMemory` declares all that a round over up to ``batch`` requests reads and writes, in one arena. A request's place
in it is its seat. The first seats are taken, one for each live request; those behind are empty, and kernels write dead
values into them. A request that has ended keeps its seat until the batch changes, and repeats its root there. `Models`
has what all buckets share: both models, their KV, `Roots` and `Activations`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs._specrs import Geometry
from specrs.engine.config import EngineConfig
from specrs.models.cuda import CudaDense
from specrs.models.eagle3 import Eagle3Head
from specrs.models.llama import LlamaModel
from specrs.models.ops import KvMemory

STOPS = 8  # tokens by which the device sees that a request ends; the host sees all
_RESULTS = 32  # rounds whose results are kept
_LASTING = {"given", "host trees", "control", "versions", "minus", "select"}  # what a round finds in place

Arrays = dict[str, torch.Tensor]


class Roots:
    """The head's results for roots, a row for each row of the page table: where a round's drafts begin.

    A root is valid until the next round that drafts for its row.

    One more row, `nothing`, is read for seats that do not draft, and stays 0.
    """

    def __init__(self, head: Eagle3Head, rows: int) -> None:
        at = head.placement
        self.nothing = rows
        self.logits = at.for_logits().empty(rows + 1, head.vocab_size).zero_()
        self.hidden = at.empty(rows + 1, head.config.hidden_size).zero_()


class Activations:
    """What passes from one model to the other in a round of the largest batch; every bucket uses its first rows.

    Attributes:
        features: of the target's pass, [layers, B * V, h].
        path_features: of accepted nodes, [layers, B * path, h].
        root_logits, root_hidden, step_hidden: the head's, B, B and B * K rows.
    """

    def __init__(self, target: LlamaModel, head: Eagle3Head, config: EngineConfig, geometry: Geometry) -> None:
        at, shape, b = head.placement, geometry.shape, geometry.max_batch
        layers, wide, h = len(head.aux_layers), target.config.hidden_size, head.config.hidden_size
        self.features = at.empty(layers, b * shape.draft_tokens, wide)
        self.path_features = at.empty(layers, b * longest_path(config, geometry, trees=True), wide)
        self.root_logits = at.for_logits().empty(b, head.vocab_size)
        self.root_hidden, self.step_hidden = at.empty(b, h), at.empty(b * shape.topk, h)

    def poison(self) -> None:
        """Fill all of it with NaN."""
        for tensor in vars(self).values():
            tensor.fill_(math.nan)


@dataclass(eq=False)
class Models:
    """What rounds run over.

    Attributes:
        dense: the GPU's operations.
        target, cache: the model, and its KV.
        head, draft_cache, roots, activations: the head, its KV, and what it needs of rounds; ``None`` without one.
        to_target: int32, the target's token of each draft id; ``None`` where they are the same.
        geometry, config: of the engine.
        num_pages: of the pool.
        table: the pool's page table, on the device.
        stream: of everything.
    """

    dense: CudaDense
    target: LlamaModel
    cache: KvMemory
    head: Eagle3Head | None
    draft_cache: KvMemory | None
    roots: Roots | None
    to_target: torch.Tensor | None
    geometry: Geometry
    config: EngineConfig
    num_pages: int
    table: torch.Tensor
    stream: torch.cuda.Stream
    activations: Activations | None


class Fields:
    """Arrays of int32 words behind one another in one array, which is copied at once.

    Attributes:
        places: of each name its first word, and how many there are.
        words: of all.
    """

    def __init__(self, **words: int) -> None:
        ends = list(accumulate(words.values()))
        self.places = {name: (end - n, n) for (name, n), end in zip(words.items(), ends, strict=True)}
        self.words = ends[-1]

    def of(self, memory: torch.Tensor) -> Arrays:
        """The arrays as views."""
        return {name: memory[first : first + n] for name, (first, n) in self.places.items()}


class BucketMemory:
    """All arrays of a bucket of ``batch`` requests.

    Under ``SPECRS_POISON=1`` gaps lie between the arrays; `poison` fills whatever a round writes before it reads it,
    and `check_guards` looks for writes into the gaps.

    Attributes:
        paths: nodes of an accepted path at most, by whether the host makes the trees.
        given_layout, trees_layout: of what the host uploads for a round.
        arena: owns the arrays.
        arrays: of the device, by name.
        given, host_trees, found: the fields of the arrays of these names.
        ring: host memory to which each round publishes what it found.
        results: of each of its places: what a round found, ``lens`` and ``depths`` as it used them, and its ``header``.
    """

    def __init__(self, models: Models, batch: int) -> None:
        self.batch = batch
        g, config, cuda = models.geometry, models.config, models.dense.placement.device
        # Of trees that the device drafts, and of those that the host makes, which may be deeper.
        self.paths = {trees: longest_path(config, g, trees) for trees in (False, True)}
        path, v = max(self.paths.values()), g.shape.draft_tokens
        # 8-byte arrays first, so that they are aligned.
        self.given_layout = Fields(
            sampling=batch * 12, root_from=batch, root_to=batch, rows=batch, lens=batch, roots=batch, depths=batch,
            done=batch, limits=batch, caps=batch, stops=batch * STOPS, stop_counts=batch, nodes=batch,
            tree_offsets=batch + 1, edit_begins=batch, edit_counts=batch, live=1,
        )  # fmt: skip
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
        if models.head is not None:
            regions |= _drafts(batch, g.shape, models.head.vocab_size, cuda.index, bool(config.sources))
        if g.page_size > 1 and (g.shape.topk > 1 or config.sources):
            regions |= dict.fromkeys(("move src", "move dst"), ("int32", batch * path))
            regions["move offsets"] = ("int32", batch + 1)
        self._poisoned = [name for name in regions if name not in _LASTING] if _poisons() else None
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
        """Before a round: NaN and -1 in all that it has to write first."""
        if self._poisoned is None:
            return
        self.arena.poison(models.dense.stream, self._poisoned)
        if models.activations is not None:
            models.activations.poison()

    def check_guards(self, stream: core._DeviceStream) -> None:
        """Raise OutOfBoundsError where something was written between the arrays."""
        if self._poisoned is not None:
            self.arena.check_guards(stream)


def _plans(batch: int, shape: core.TreeShape, path: int) -> dict[str, tuple[str, int]]:
    """Arrays of each phase's plan."""
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
    """Arrays by which the device drafts; where it unites the head's trees with others, those of the head as well."""
    k, c, v = shape.topk, shape.candidates, shape.draft_tokens
    regions = {
        "scores": ("float32", batch * c),
        "candidate tokens": ("int32", batch * c),
        "candidate parents": ("int32", batch * c),
        "beams": ("int32", batch * k),
        "beam tokens": ("int32", batch * k),
        "beam parents": ("int32", batch * k),
        "ancestors": ("int64", batch * k),
        "select": ("int64", core._device_draft_scratch(shape, batch, vocab, ordinal)),
        "depths": ("int32", batch * v),
        "next_child": ("int32", batch * v),
        "next_sibling": ("int32", batch * v),
    }
    if unites:
        regions["own offsets"] = ("int32", batch + 1)
        names = ("tokens", "depths", "parents", "next_child", "next_sibling")
        regions |= {f"own {name}": ("int32", batch * v) for name in names}
        regions["own scores"] = ("float32", batch * v)
    return regions


def _poisons() -> bool:
    return os.environ.get("SPECRS_POISON", "0") not in ("", "0")


def longest_path(config: EngineConfig, geometry: Geometry, trees: bool) -> int:
    """Nodes of an accepted path at most, of trees that the device drafts, or that the host makes."""
    levels = config.head_shape.steps
    return min(max(levels, config.deepest if trees else 0) + 1, geometry.max_context_len)


def buckets(most: int) -> list[int]:
    """Batch sizes that rounds are made for, the largest last: powers of two."""
    sizes = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [*sizes, most]
