"""Static buffers of one phase, in memory whose every byte is known before a plan is written into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from specrs._specrs import FormatBuffers, Planner, SpecrsError

Phase = Literal["extend", "decode", "draft", "verify"]

FILLS = (0xA5, 0x5A)
"""A plan is written once over each: an element that has kept both was not written."""
MAX_BYTES = 64 << 20
"""Largest buffers of a phase that are made static; beyond, the format's own arrays are used."""

_GUARD = 64  # bytes before and behind each array
_DTYPES = {"int32": torch.int32, "int64": torch.int64, "bool": torch.uint8, "uint8": torch.uint8}


@dataclass(frozen=True)
class Image:
    """An array as two writes left it: values (flat), which were written, and the shape of its memory."""

    values: npt.NDArray[Any]
    written: npt.NDArray[np.bool_]
    shape: tuple[int, ...]


class Overrun(SpecrsError):
    """Bytes beside an array were written."""


class Memory:
    """Arrays of given sizes, each between guards.

    Args:
        sizes: ``shape``, ``dtype`` and ``bytes`` of each array, as `Planner.capacities` has them.
        device: the device that holds the memory.
    """

    def __init__(self, sizes: Mapping[str, Mapping[str, Any]], device: torch.device | None = None) -> None:
        self._backing: dict[str, torch.Tensor] = {}
        self.views: dict[str, torch.Tensor] = {}
        for name, size in sizes.items():
            backing = torch.zeros(size["bytes"] + 2 * _GUARD, dtype=torch.uint8, device=device)
            self._backing[name] = backing
            view = backing[_GUARD : _GUARD + size["bytes"]].view(_DTYPES[size["dtype"]])
            self.views[name] = view.view(list(size["shape"]))

    def fill(self, byte: int, tables: bool = False) -> None:
        """Overwrite what a plan must write. A table keeps its content except for `tables`: behind the plan's own shape,
        nothing that was 0 before is written. Cells of a table count as written if they are not 0."""
        for name, backing in self._backing.items():
            if tables or self.views[name].dim() == 1:
                backing.fill_(byte)
            else:
                backing[:_GUARD] = byte
                backing[-_GUARD:] = byte

    def bytes(self, byte: int) -> dict[str, npt.NDArray[Any]]:
        """Copies of the arrays after a write over `byte`.

        Raises:
            Overrun: the bytes beside one have changed.
        """
        for name, backing in self._backing.items():
            for side, guard in (("before", backing[:_GUARD]), ("behind", backing[-_GUARD:])):
                if bool((guard != byte).any()):
                    raise Overrun(f"{name}: bytes {side} the array were written")
        return {name: view.cpu().numpy().reshape(-1).copy() for name, view in self.views.items()}

    def images(self, copies: list[dict[str, npt.NDArray[Any]]]) -> dict[str, Image]:
        """Return the image of each array that both writes left, cut behind the last element written."""
        out = {}
        for name, view in self.views.items():
            first, second = (c[name] for c in copies)
            if view.dim() == 1:
                kept = [np.frombuffer(bytes([b]) * first.itemsize, first.dtype)[0] for b in FILLS]
                written = ~((first == kept[0]) & (second == kept[1]))
            else:
                written = second != 0
            n = int(written.nonzero()[0][-1]) + 1 if written.any() else 0
            out[name] = Image(second[:n], written[:n], tuple(view.shape))
        return out


class Static(Memory):
    """Tensors of the capacity that the planner states for a phase, lent to it."""

    def __init__(self, planner: Planner, phase: Phase, max_batch: int) -> None:
        super().__init__(planner.capacities(phase, max_batch=max_batch))
        self.out: FormatBuffers = planner.buffers(phase, max_batch=max_batch, tensors=self.views)


def static_bytes(planner: Planner, phase: Phase, max_batch: int) -> int:
    """Bytes of a phase's static buffers."""
    return sum(c["bytes"] for c in planner.capacities(phase, max_batch=max_batch).values())
