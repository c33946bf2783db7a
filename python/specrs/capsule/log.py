"""The writes of a replay, array by array, and the first one in which two replays differ.

A run is a list of `Segment`s in the order in which it came to them: one array (or one KV pool) in one phase of the
round. Writes are read back from memory that was filled with a known pattern before, so that an element that nobody
wrote is told from one that was written with any value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from specrs._specrs import SpecrsError

Values = npt.NDArray[Any]
Written = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Segment:
    """The writes to one array in one phase.

    Attributes:
        phase: the phase of the round, such as ``"draft step 1"``.
        array: the array's name.
        shape: sizes; values beyond the last one written are left out.
        values: the elements, flat.
        written: the elements that were written.
        owner: an element's flat index -> whose it is.
        show: a function from a value to text, with what is known of the value.
        across: true if runs in different formats have this array alike.
        tolerance: largest difference that counts as equal across formats; within one, bits are compared.
    """

    phase: str
    array: str
    shape: tuple[int, ...]
    values: Values
    written: Written
    owner: Callable[[int], str]
    show: Callable[[Any], str] = str
    across: bool = False
    tolerance: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """The key that pairs the segment with its like of another run."""
        return self.phase, self.array

    @property
    def writes(self) -> int:
        """Elements written."""
        return int(self.written.sum())

    def index(self, at: int) -> tuple[int, ...]:
        """A flat index as one of each dimension."""
        if len(self.shape) < 2:
            return (at,)
        columns = max(int(np.prod(self.shape[1:])), 1)
        rest = np.unravel_index(at % columns, self.shape[1:])
        return (at // columns, *(int(i) for i in rest))

    def widened(self, columns: int) -> Segment:
        """Return the same table with rows of `columns` columns; added columns count as not written."""
        own = self.shape[1]
        rows = -(-len(self.values) // own)

        def laid_out(flat: Values, fill: Any) -> Values:
            out = np.full((rows, columns), fill, dtype=flat.dtype)
            out[:, :own] = _padded(flat, rows * own, fill).reshape(rows, own)
            return out.reshape(-1)

        def owner(at: int) -> str:
            row, column = divmod(at, columns)
            return self.owner(row * own + column)

        values, written = laid_out(self.values, 0), laid_out(self.written, False)
        return replace(self, shape=(self.shape[0], columns), values=values, written=written, owner=owner)

    def value(self, at: int) -> Any:
        """An element as a Python value; None where it was not written."""
        if at >= len(self.values) or not self.written[at]:
            return None
        return self.values[at].item() if isinstance(self.values[at], np.generic) else self.values[at]


@dataclass(frozen=True)
class Guard:
    """The check that ended a run.

    Attributes:
        phase: the phase in which the guard refused.
        error: the error's message.
        kind: class and kind of the error.
        array, have: the array whose capacity did not suffice, and the elements that it has.
    """

    phase: str
    error: str
    kind: str
    array: str | None = None
    have: int | None = None

    @classmethod
    def of(cls, phase: str, e: SpecrsError) -> Guard:
        """The guard that raised `e`."""
        capacity = e.kind == "Capacity"
        return cls(
            phase,
            str(e),
            f"{type(e).__name__}{f' ({e.kind})' if e.kind else ''}",
            getattr(e, "what", None) if capacity else None,
            getattr(e, "have", None) if capacity else None,
        )


@dataclass
class Run:
    """The writes of one replay.

    Attributes:
        name: the name of the run, such as ``"triton with 27338 reverted"``.
        segments: the run's writes, in order.
        guard: the guard that refused to go on; None where the round was completed.
        notes: remarks on the run for its reader.
    """

    name: str
    segments: list[Segment] = field(default_factory=list)
    guard: Guard | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Divergence:
    """The first write that two runs do not have alike.

    Attributes:
        phase, array, index: place of the element.
        owner: the owner of the element.
        values: the values of both runs, None where one did not write it.
        shown: the values as text.
    """

    phase: str
    array: str
    index: tuple[int, ...]
    owner: str
    values: tuple[Any, Any]
    shown: tuple[str, str]


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        first: the first divergence; None where the runs agree.
        beyond: if a guard refused the second run for want of room in an array, the first write of the first run that
            has no room there: what an unguarded write would have put behind the array.
        arrays, writes: number of arrays that agreed as a whole, and of single writes that agreed, before the
            divergence.
        skipped: arrays that only one of two formats has.
        largest: the largest difference seen within a tolerance.
    """

    first: Divergence | None
    beyond: Divergence | None
    arrays: int
    writes: int
    skipped: tuple[str, ...]
    largest: float


def compare(a: Run, b: Run, across: bool = False) -> Comparison:
    """The first divergence of two runs, in the order of the first. ``across``: compare only what formats share."""
    theirs = {s.key: s for s in b.segments}
    mine = {s.key for s in a.segments}
    arrays = writes = 0
    largest = 0.0
    skipped = []
    for s in a.segments:
        other = theirs.get(s.key)
        alone = other is None and b.guard is None
        if across and (alone or not s.across or (other is not None and not other.across)):
            skipped += [s.array] if s.writes else []
            continue
        if other is not None:
            s, other = _alike(s, other)
        at, apart = _first(s, other, across)
        if at is not None:
            writes += int(s.written[:at].sum())
            return Comparison(_divergence(s, other, at), _beyond(a, b.guard), arrays, writes, _unique(skipped), largest)
        arrays, writes, largest = arrays + 1, writes + s.writes, max(largest, apart)
    for s in b.segments:
        if s.key not in mine and s.writes and not across:
            found = _divergence(s, None, int(s.written.argmax()))
            turned = replace(found, values=found.values[::-1], shown=found.shown[::-1])
            return Comparison(turned, None, arrays, writes, _unique(skipped), largest)
    return Comparison(None, None, arrays, writes, _unique(skipped), largest)


def _beyond(a: Run, guard: Guard | None) -> Divergence | None:
    """The first write of `a` that a capacity of `guard` leaves no room for."""
    if guard is None or guard.array is None or guard.have is None:
        return None
    for s in a.segments:
        if s.key == (guard.phase, guard.array) and len(s.shape) == 1 and s.value(guard.have) is not None:
            return _divergence(s, None, guard.have)
    return None


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _alike(a: Segment, b: Segment) -> tuple[Segment, Segment]:
    """Two tables with rows of the same length, so that an element has the same flat index in both."""
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] == b.shape[1]:
        return a, b
    columns = max(a.shape[1], b.shape[1])
    return a.widened(columns), b.widened(columns)


def _first(a: Segment, b: Segment | None, across: bool) -> tuple[int | None, float]:
    """The first element written otherwise, and the largest difference of those before it."""
    if b is None:
        return (int(a.written.argmax()), 0.0) if a.writes else (None, 0.0)
    n = max(len(a.values), len(b.values))
    wa, wb = (_padded(s.written, n, False) for s in (a, b))
    va, vb = (_padded(s.values, n, None if s.values.dtype == object else 0) for s in (a, b))
    apart = 0.0
    tolerance = max(a.tolerance, b.tolerance) if across else 0.0
    if tolerance:
        with np.errstate(invalid="ignore"):
            distance = np.abs(va.astype(np.float64) - vb.astype(np.float64))
        unlike = ~((distance <= tolerance) | (np.isnan(va) & np.isnan(vb)))
        apart = float(np.nan_to_num(distance, nan=0.0, posinf=0.0)[~unlike].max(initial=0.0))
    elif va.dtype.kind == "f":
        unlike = va.view(np.uint32) != vb.view(np.uint32)  # bits: NaN is NaN
    else:
        unlike = va != vb
    different = (wa != wb) | (wa & wb & unlike)
    return (int(different.argmax()) if different.any() else None), apart


def _padded(values: Values, n: int, fill: Any) -> Values:
    out = np.full(n, fill, dtype=values.dtype)
    out[: len(values)] = values
    return out


def _divergence(a: Segment, b: Segment | None, at: int) -> Divergence:
    values = (a.value(at), None if b is None else b.value(at))
    shown = tuple("not written" if v is None else s.show(v) for s, v in zip((a, b or a), values, strict=True))
    return Divergence(a.phase, a.array, a.index(at), a.owner(at), values, (shown[0], shown[1]))
