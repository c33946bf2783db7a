"""Two sequences, a planner of a format over them, and tensors of a caller with canaries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from specrs import _specrs as core
from specrs.backends.base import Format, Phase

FORMATS: list[Format] = ["flashinfer", "flash_attention", "triton"]
LISTS: list[Format] = ["flashinfer", "triton"]
PHASES: list[Phase] = ["extend", "decode", "draft", "verify"]
SHAPE = core.TreeShape(2, 3, 5)
TREES = core.TreeBatch.from_parents([[-1, 0, 0, 1], [-1, 0]], [[5, 6, 7, 8], [1, 2]])
LARGEST: dict[Phase, tuple[int, int]] = {"extend": (4, 12), "decode": (4, 4), "draft": (4, 8), "verify": (4, 20)}
CANARY = 0x5A
TORCH = {"int32": torch.int32, "int64": torch.int64, "bool": torch.bool, "uint8": torch.uint8}


@dataclass
class World:
    """Two sequences of 5 and 3 committed tokens, allocated for a round, and a planner over them."""

    format: Format
    page_size: int = 4
    mask: Literal["both", "bool", "packed"] = "both"
    layout: Literal["dense", "holey"] = "dense"
    max_batch: int = 4
    lens: list[int] = field(default_factory=lambda: [5, 3])
    reverts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        geometry = core.Geometry(self.max_batch, 64, self.page_size, SHAPE, self.layout, self.reverts)
        self.pool = core.Pool(400, self.page_size, self.max_batch + 4, geometry.row_pages)
        self.planner = core.Planner(geometry, self.pool, self.format, self.mask)
        self.planner.set_debug(True)
        self._made: dict[int, tuple[list[core.Sequence], core.Lease]] = {}
        self.seqs, self.lease = self.sequences(0)
        self.beams = core.DraftBeams(2, SHAPE, None, 8)
        self.beams.start(torch.tensor([[0.0, 5.0, 0.0, 4.0, 0, 0, 0, 0]] * 2))

    def sequences(self, shorter: int) -> tuple[list[core.Sequence], core.Lease]:
        """Sequences that have so many tokens less, with a round reserved."""
        if shorter not in self._made:
            lens = [n - shorter for n in self.lens]
            seqs = [self.pool.create() for _ in lens]
            self.pool.reserve(list(zip(seqs, lens, strict=True))).commit(lens)
            self._made[shorter] = seqs, self.pool.reserve([(s, 40) for s in seqs])
        return self._made[shorter]

    def plan(self, phase: Phase, shorter: int = 0, **kwargs: Any) -> core.Plan:
        """A plan of the phase; ``shorter`` takes that many tokens off every prefix, of sequences of their own."""
        lens = [n - shorter for n in self.lens]
        p, (seqs, _) = self.planner, self.sequences(shorter)
        if phase == "extend":
            return p.extend(seqs, lens, [2, 3], **kwargs)
        if phase == "decode":
            return p.decode(seqs, lens, **kwargs)
        if phase == "draft":
            return p.draft(seqs, lens, 0, self.beams, **kwargs)
        return p.verify(seqs, lens, TREES, **kwargs)


def values(plan: core.Plan) -> dict[str, Any]:
    return {name: array.tolist() for name, array in plan.arrays().items()}


class Caller:
    """Tensors of a caller for a phase, each with canaries on both sides, of at least the capacity.

    ``grow`` makes them larger (negative: smaller) by so many elements, columns of a table.
    """

    def __init__(self, planner: core.Planner, phase: Phase, grow: int = 0, step: int | None = None) -> None:
        self.blocks: dict[str, torch.Tensor] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        for name, c in planner.capacities(phase, step).items():
            *rows, last = c["shape"]
            shape = [*rows, last + grow]
            dtype = TORCH[c["dtype"]]
            size = torch.tensor([], dtype=dtype).element_size()
            n = int(np.prod(shape)) * size
            self.blocks[name] = torch.full((n + 128,), CANARY, dtype=torch.uint8)
            self.tensors[name] = self.blocks[name][64 : 64 + n].view(dtype).view(shape)

    def check_canaries(self) -> None:
        for name, block in self.blocks.items():
            assert torch.all(block[:64] == CANARY), name
            assert torch.all(block[-64:] == CANARY), name

    def untouched(self) -> bool:
        return all(bool(torch.all(block == CANARY)) for block in self.blocks.values())


def used(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The part of a whole tensor that an array of this shape is."""
    return tensor[: shape[0]] if len(shape) == 1 else tensor[: shape[0], : shape[1]]
