"""The arrays of an attention backend's format, which the device planner writes for every pass that it plans.

A pass reads them behind the launch that plans it, and all passes are on one stream. So there is one array of each name,
in static memory, as large as the largest pass of any phase wants it. Tables of a phase are as wide as that phase needs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs._specrs import Geometry
from specrs.backends.base import Capabilities, Phase
from specrs.engine.config import EngineConfig

_OF_QUERIES = "extend_slots"  # has an element for each query of a pass
_BITS = "packed_custom_mask"

Regions = list[tuple[str, Any, list[int]]]


def poisons() -> bool:
    """Return whether memory is filled with poison before it is written, and guarded by gaps."""
    return os.environ.get("SPECRS_POISON", "0") not in ("", "0")


def format_regions(config: EngineConfig, geometry: Geometry, head: bool, queries: int) -> Regions:
    """Return the name, type and shape of each array; none for ``"native"``.

    Args:
        head: True if the engine has a draft head.
        queries: the most queries of a pass that the device plans.
    """
    phases: list[Phase] = ["extend", "decode"]
    if head or config.sources:
        phases.append("verify")
    if head:
        phases.append("draft")
    sizes: dict[str, tuple[str, int]] = {}
    for phase in phases:
        for name, array in _capacities(config, geometry, phase).items():
            n = queries if name == _OF_QUERIES else math.prod(array["shape"])
            kind = "uint8" if array["dtype"] == "bool" else array["dtype"]
            sizes[name] = kind, max(n, sizes.get(name, (kind, 0))[1])
    if _BITS in sizes:  # a kernel may read as many rows of bits as a request may have, whatever it has
        rows = geometry.shape.draft_tokens
        assert sizes[_BITS][1] >= geometry.max_batch * -(-rows * most_keys(geometry) // 8), "bits have room"
    return [(name, kind, [n]) for name, (kind, n) in sizes.items()]


def most_keys(geometry: Geometry) -> int:
    """Return the most keys of a request: all but one position of its context, and a tree behind them."""
    return geometry.max_context_len - 1 + geometry.shape.draft_tokens


def _capacities(config: EngineConfig, geometry: Geometry, phase: Phase) -> Mapping[str, Any]:
    """Return the shape and type of each array of a phase."""
    pool = core.Pool(2, geometry.page_size, 1, geometry.row_pages)  # sizes do not depend on it
    told = Capabilities.of(config.backend)
    return core.Planner(geometry, pool, told.format, mask=told.mask).capacities(phase)


class FormatArrays:
    """The arrays of the format of an engine's attention backend, and the launches that write them.

    Under ``SPECRS_POISON=1`` they are between gaps, and full of -1 before each pass.

    Attributes:
        arrays: the arrays by name; empty for ``"native"``.
    """

    def __init__(
        self, config: EngineConfig, geometry: Geometry, regions: Regions, ordinal: int, stream: core._DeviceStream
    ) -> None:
        self._geometry, self._config, self._told = geometry, config, Capabilities.of(config.backend)
        self._poisons = poisons() and bool(regions)
        self._arena = core._DeviceArena(ordinal, regions, self._poisons) if regions else None
        self.arrays: dict[str, torch.Tensor] = {
            name: from_dlpack(cast(core._DeviceArena, self._arena).tensor(name, stream)) for name, *_ in regions
        }
        for array in self.arrays.values():
            array.zero_()
        self._of: dict[Phase, dict[str, torch.Tensor]] = {}

    def of(self, phase: Phase) -> Mapping[str, torch.Tensor]:
        """Return the arrays of a phase: the same memory for all phases, of which a table has the phase's columns."""
        if phase not in self._of:
            self._of[phase] = found = {}
            for name, array in _capacities(self._config, self._geometry, phase).items():
                if name not in self.arrays:
                    continue  # a phase that the engine does not have
                memory, columns = self.arrays[name], array["shape"][1:]
                rows = memory.numel() // max(math.prod(columns), 1)
                found[name] = memory[: rows * math.prod(columns)].view(rows, *columns)
        return self._of[phase]

    def expand_page_size(self, phase: Phase) -> int:
        """Return the tokens of a page of the table by which a phase's queries read their own keys, if it has one."""
        holey = phase == "draft" and self._geometry.layout == "holey"
        return self._geometry.page_size if holey else 1

    @property
    def most_keys(self) -> int:
        """Return the most keys of one request in any pass."""
        return most_keys(self._geometry)

    def kept(self) -> Iterable[object]:
        """Return the objects whose memory a graph of passes uses."""
        return [] if self._arena is None else [self._arena]

    def plan(self, stream: core._DeviceStream, phase: Phase, **operands: Any) -> None:
        """Plan a pass by `core._device_plan`, of which ``operands`` are the other operands, and write its arrays."""
        if self._poisons and self._arena is not None:
            self._arena.poison(stream)
        core._device_plan(
            geometry=self._geometry, format=self._told.format, masks=self._told.mask, phase=phase,
            arrays=dict(self.of(phase)) if self.arrays else {}, stream=stream, **operands,
        )  # fmt: skip

    def check_guards(self, stream: core._DeviceStream) -> None:
        """Raise OutOfBoundsError if something was written between the arrays."""
        if self._poisons and self._arena is not None:
            self._arena.check_guards(stream)
