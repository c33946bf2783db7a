"""The target's features of committed positions, from the pass that makes them to the draft pass that reads them.

A pass writes its features where nobody has written before, and entries that wait for a draft pass refer to those rows.
So nothing is copied for a position that no draft ever needs. Memory lives as long as something refers to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from specrs.models.placement import Placement

_PASSES = 32  # passes of one size for which a block has room


class FeatureRows:
    """Memory for the features of one pass, and the way of the residual stream through it.

    The stream lies where the next feature belongs: entering layer i it *is* the feature of layer i, and layer i writes
    its output elsewhere. So capturing a feature costs nothing.

    Attributes:
        aux_layers: the layers whose input is a feature.
        layers: [rows, h] for each of them.
        stacked: the same memory, [n_aux, rows, h].
        last: the layer whose output leaves this memory.
    """

    __slots__ = ("_homes", "_repeats", "aux_layers", "last", "layers", "rows", "stacked")

    def __init__(self, aux_layers: tuple[int, ...], stacked: torch.Tensor) -> None:
        self.aux_layers, self.stacked, self.rows = aux_layers, stacked, stacked.shape[1]
        self.layers: tuple[torch.Tensor, ...] = stacked.unbind(0)
        homes = dict(zip(aux_layers, self.layers, strict=True))
        self._homes = sorted(homes.items(), key=lambda home: home[0])
        self.last = self._homes[-1][0]
        self._repeats = len(homes) < len(self.layers)

    def stretches(self, layers: int, x: torch.Tensor) -> list[tuple[int, int, torch.Tensor]]:
        """Return the stretches of a pass over so many layers: the first layer and the end of each, and the memory that
        the stream lies in behind its first layer. That of the first stretch gets the embedding; the last one's is x."""
        ends = [*(layer for layer, _ in self._homes), layers]
        memory = [*(home for _, home in self._homes), x]
        return [(first, end, out) for (first, end), out in zip(pairwise([0, *ends]), memory, strict=True)]

    def repeat(self) -> None:
        """Copy the features of layers that are named more than once."""
        if self._repeats:
            homes = dict(zip(self.aux_layers, self.layers, strict=True))
            for layer, memory in zip(self.aux_layers, self.layers, strict=True):
                if memory is not homes[layer]:
                    memory.copy_(homes[layer])


class FeatureMemory:
    """Fresh rows for the features of passes.

    Small passes of one size share a block, whose views are made at once: between two passes that stream all weights
    through the caches, a torch operation costs some 10 us, as its code and data are cold.
    """

    def __init__(self, aux_layers: tuple[int, ...], hidden_size: int, placement: Placement) -> None:
        self._aux_layers, self._hidden_size, self._placement = aux_layers, hidden_size, placement
        self._ready: dict[int, Iterator[FeatureRows]] = {}  # keyed by the number of rows

    def rows(self, count: int) -> FeatureRows:
        """Return memory for ``count`` rows that nothing else refers to."""
        ready = next(self._ready.get(count, iter(())), None)
        return ready if ready is not None else self._block(count)

    def once(self, count: int) -> FeatureRows:
        """The same for a pass whose size is unlikely to come again: views for others would cost more than the pass."""
        memory = self._placement.empty(len(self._aux_layers), count, self._hidden_size)
        return FeatureRows(self._aux_layers, memory)

    def _block(self, count: int) -> FeatureRows:
        passes = _PASSES if 0 < count <= _PASSES else 1
        block = self._placement.empty(len(self._aux_layers), passes * count, self._hidden_size)
        fresh = iter([FeatureRows(self._aux_layers, block.narrow(1, i * count, count)) for i in range(passes)])
        if len(self._ready) >= _PASSES:
            self._ready.clear()
        self._ready[count] = fresh
        return next(fresh)


@dataclass(frozen=True, slots=True)
class Features:
    """Features of consecutive positions: rows, in order, of what a pass wrote.

    Attributes:
        memory: the pass's memory.
        rows: a row for each position.
    """

    memory: FeatureRows
    rows: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, positions: slice) -> Features:
        return Features(self.memory, self.rows[positions])

    def read(self) -> torch.Tensor:
        """[n_aux, n, h], a view where the rows ascend one by one."""
        first, n = self.rows[0], len(self.rows)
        if all(row == first + i for i, row in enumerate(self.rows)):
            return self.memory.stacked.narrow(1, first, n)
        stacked = self.memory.stacked
        return stacked.index_select(1, torch.tensor(self.rows, device=stacked.device))


@dataclass(slots=True)
class KeptFeatures:
    """Features of a sequence's positions from ``start`` to ``end``, in pieces of one pass each."""

    start: int
    end: int
    pieces: list[Features] = field(default_factory=list)

    @classmethod
    def of_pass(cls, start: int, features: Features) -> KeptFeatures:
        """Return the features of one pass, of the positions from ``start`` on."""
        return cls(start, start + len(features), [features])

    def covers(self, start: int, end: int) -> bool:
        """Return whether the features of all positions from ``start`` to ``end`` are kept."""
        return self.start <= start and end <= self.end

    def add(self, start: int, features: Features) -> None:
        """Keep features of the positions from ``start`` on, which must follow those that are kept."""
        if start != self.end:
            raise ValueError(f"features of positions from {start} on: {self.start} to {self.end} are kept")
        self.pieces.append(features)
        self.end += len(features)

    def drop(self, position: int) -> None:
        """Let go of the features of positions before this one."""
        while self.pieces and self.start < position:
            piece, count = self.pieces[0], position - self.start
            if count < len(piece):
                self.pieces[0], self.start = piece[count:], position
            else:
                self.start += len(self.pieces.pop(0))

    def of(self, start: int, end: int) -> list[Features]:
        """Return the pieces of positions from ``start`` to ``end``, all of which must have been kept."""
        if not self.covers(start, end):
            raise ValueError(f"features of positions {start} to {end}: {self.start} to {self.end} are kept")
        found, at = list[Features](), self.start
        for piece in self.pieces:
            some = piece[max(start - at, 0) : max(end - at, 0)]
            at += len(piece)
            if len(some):
                found.append(some if len(some) < len(piece) else piece)
        return found


def gather(pieces: Iterable[Features]) -> tuple[torch.Tensor, ...]:
    """All of them one behind the other, [n, h] of each aux layer."""
    read = [p.read() for p in pieces]
    return (read[0] if len(read) == 1 else torch.cat(read, 1)).unbind(0)
