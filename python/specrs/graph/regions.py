"""Memory of a family of buckets, as declared: the regions of each seat, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import Literal

from specrs import _specrs as core
from specrs._specrs import ConfigError

Role = Literal["input", "output", "scratch"]

_INTEGERS = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1), "uint8": (0, 255)}
_FLOATS = ("float32", "float16", "bfloat16")
_MOST_COPIES = 16


@dataclass(frozen=True)
class Region:
    """Memory of one name, so much of it for each seat.

    Attributes:
        name: name of the region in errors; distinct within a runtime.
        dtype: int32, int64, uint8, float32, float16 or bfloat16; torch's names of them and its dtypes are taken.
        seat_shape: ``(n, ...)`` makes a tensor ``[seats * n, ...]``; ``()`` makes ``[seats]``.
        dead: value that seats behind the live ones hold. Inputs must say so: every replay writes it. For an output it
            is the value that the body leaves there, which poison mode checks; ``None`` is any value, as long as one is
            written.
        role: ``input`` (written by each replay from its arguments), ``output`` (written whole by the body, leased to
            the caller) or ``scratch`` (of the body alone; its content does not outlive a replay).
        more: rows behind the last seat, such as the last entry of offsets; none in inputs.
    """

    name: str
    dtype: str
    seat_shape: tuple[int, ...] = ()
    dead: float | int | bool | None = None
    role: Role = "input"
    more: int = 0

    def __post_init__(self) -> None:
        def refuse(what: str, got: object, want: str) -> None:
            raise ConfigError(f"region {self.name!r}: {what} = {got}: {want}")

        if not (isinstance(self.name, str) and self.name):
            refuse("name", repr(self.name), "a name of at least one character is wanted")
        dtype = str(self.dtype).removeprefix("torch.")
        if dtype not in _INTEGERS and dtype not in _FLOATS:
            refuse("dtype", self.dtype, f"one of {', '.join([*_INTEGERS, *_FLOATS])} is wanted")
        object.__setattr__(self, "dtype", dtype)
        shape = tuple(index(n) for n in self.seat_shape)
        object.__setattr__(self, "seat_shape", shape)
        if any(n < 1 for n in shape):
            refuse("seat_shape", shape, "every dimension is at least 1")
        if self.role not in ("input", "output", "scratch"):
            refuse("role", self.role, "input, output or scratch is wanted")
        if index(self.more) < 0 or (self.more and self.role == "input"):
            refuse("more", self.more, "0 or more rows in outputs and scratch, none in inputs")
        if self.dead is None:
            if self.role == "input":
                refuse("dead", None, "an input says what dead seats hold")
        elif self.role == "scratch":
            refuse("dead", self.dead, "scratch has no dead seats: the body writes what it reads")
        elif dtype in _INTEGERS:
            low, high = _INTEGERS[dtype]
            if not isinstance(self.dead, int) or not low <= self.dead <= high:
                refuse("dead", self.dead, f"an integer from {low} to {high} is wanted")

    @property
    def rows_per_seat(self) -> int:
        """The ``n`` of ``seats * n`` rows."""
        return self.seat_shape[0] if self.seat_shape else 1

    def shape(self, seats: int) -> tuple[int, ...]:
        """The tensor's shape for so many seats."""
        return (seats * self.rows_per_seat + self.more, *self.seat_shape[1:])

    def rows(self, seats: int) -> int:
        """Rows of so many seats, without those behind them."""
        return seats * self.rows_per_seat

    def elements(self, seats: int) -> int:
        """Elements for so many seats."""
        return math.prod(self.shape(seats))


class Family:
    """Buckets over one memory.

    Attributes:
        buckets: seats of each, increasing.
        regions: regions by name, in the order of declaration.
        copies: sets of outputs that are written in turn.
    """

    def __init__(self, buckets: Sequence[int], regions: Sequence[Region], copies: int = 2) -> None:
        self.buckets = tuple(index(b) for b in buckets)
        if not self.buckets or self.buckets[0] < 1 or any(a >= b for a, b in pairwise(self.buckets)):
            raise ConfigError(f"buckets = {list(self.buckets)}: at least one is wanted, increasing from 1 or more")
        names = [region.name for region in regions]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"regions: {twice!r} is declared {names.count(twice)} times")
        if not 1 <= index(copies) <= _MOST_COPIES:
            raise ConfigError(f"copies = {copies}: 1 to {_MOST_COPIES} are wanted")
        self.regions = {region.name: region for region in regions}
        self.copies = index(copies)

    def bucket(self, batch: int) -> int | None:
        """Return the smallest bucket that ``batch`` fits; ``None`` where no bucket is so large."""
        if index(batch) < 1:
            raise ConfigError(f"batch = {batch}: at least 1 is wanted")
        return next((b for b in self.buckets if b >= batch), None)

    def of(self, role: Role) -> list[Region]:
        """The regions of a role."""
        return [region for region in self.regions.values() if region.role == role]

    def place(self, region: Region, copy: int) -> str:
        """Return the arena's name for a region's memory."""
        return f"{region.name} (copy {copy})" if region.role == "output" and self.copies > 1 else region.name

    def declared(self) -> list[tuple[str, str, list[int]]]:
        """The arena's regions: of the largest bucket, outputs ``copies`` times."""
        seats = self.buckets[-1]
        return [
            (self.place(region, copy), region.dtype, list(region.shape(seats)))
            for region in self.regions.values()
            for copy in range(self.copies if region.role == "output" else 1)
        ]

    def bytes(self) -> int:
        """Bytes of the arena, guards between regions included. Nothing is allocated, and no GPU is needed."""
        return core._DeviceArena.count(self.declared(), guards=True)


def graph_bytes(buckets: Sequence[int], regions: Sequence[Region], copies: int = 2) -> int:
    """Bytes that a :class:`GraphRuntime` of these allocates for its regions; raises ConfigError as it does."""
    return Family(buckets, regions, copies).bytes()
