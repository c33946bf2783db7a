"""What passes cost on this machine: measured tables that follow the machine and keep their order.

Two things change while an engine runs. The machine as a whole slows or recovers: every pass sees it, so one `Pace`
is shared by all tables, and a table that is not observed for a while moves with the others. And passes of different
sizes change by different factors (longer contexts, a neighbour that takes the memory's bandwidth): each table's
entries take smaller steps of their own. Both are steps of a running median, so that a stalled pass moves nothing
far. More rows never cost less: a step that would say so takes the neighbouring entries along. An entry that is not
observed returns slowly to the shape that was calibrated, so that a guess made in its absence does not stay.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

_STEP = 1.015  # of a running median
_SHAPE_STEP = 1.004
_MEAN = 0.05  # weight of what is seen, in a running mean
_YOUNG = 8  # seen, of a mean that whatever is seen may move
_LEAST_STEP = 1e-4  # seconds
_RETURN = 0.01  # of an entry's distance to its calibrated value, at each observation


@dataclass
class Pace:
    """How much slower the machine is than when it was calibrated."""

    factor: float = 1.0


class PassCost:
    """Seconds of a model pass by its number of rows: a measured table, interpolated, that follows what is seen.

    Args:
        rows: ascending row counts.
        seconds: of a pass of each; where a measurement fell below that of fewer rows, that one stands.
        pace: shared by the tables of one machine; ``None`` is one of its own.
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float], pace: Pace | None = None) -> None:
        self.rows = list(rows)
        self.pace = Pace() if pace is None else pace
        self._shape: list[float] = []
        for s in seconds:
            self._shape.append(max(s, self._shape[-1]) if self._shape else s)
        self._calibrated = list(self._shape)
        self._known: dict[int, float] = {}  # of the present shape, what was asked for

    @property
    def seconds(self) -> list[float]:
        """The table at the machine's present pace."""
        return [s * self.pace.factor for s in self._shape]

    @property
    def table(self) -> tuple[list[int], list[float], float]:
        """Row counts, seconds of a pass of each, and the pace that they are multiplied by: as `DraftNodes` takes it."""
        return self.rows, self._shape, self.pace.factor

    def at(self, rows: int) -> float:
        """Predicted seconds of a pass over ``rows`` rows; beyond the table by its last slope."""
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = self._shape_at(rows)
        return known * self.pace.factor

    def _shape_at(self, rows: int) -> float:
        if rows <= 0:
            return 0.0
        shape, table = self._shape, self.rows
        if rows <= table[0] or len(table) == 1:
            return shape[0]
        i = min(bisect.bisect_left(table, rows), len(table) - 1)
        slope = (shape[i] - shape[i - 1]) / (table[i] - table[i - 1])
        return shape[i - 1] + slope * (rows - table[i - 1])

    def observe(self, rows: int, seconds: float) -> None:
        """Move the pace, and the entries about ``rows``, a step towards what was seen."""
        slower = seconds > self.at(rows)
        self.pace.factor *= _STEP if slower else 1 / _STEP
        self._known.clear()
        shape, table = self._shape, self.rows
        i = min(bisect.bisect_left(table, rows), len(table) - 1)
        share = 1.0  # of the upper one of the two entries
        if i > 0 and rows < table[i]:
            share = (rows - table[i - 1]) / (table[i] - table[i - 1])
        step = _SHAPE_STEP if slower else 1 / _SHAPE_STEP
        for j, calibrated in enumerate(self._calibrated):
            if j == i:
                shape[j] *= step**share
            elif j == i - 1:
                shape[j] *= step ** (1.0 - share)
            else:
                shape[j] += _RETURN * (calibrated - shape[j])
        for j in range(1, len(shape)):  # in the direction of the step, more rows cost no less
            if slower:
                shape[j] = max(shape[j], shape[j - 1])
            else:
                shape[-j - 1] = min(shape[-j - 1], shape[-j])


# "Rows" of the table of overheads. `HOSTED` is for rounds of the host's trees, on a device alone.
PLAIN, SPECULATIVE, HOSTED = 1, 2, 3


class Overheads(PassCost):
    """What a device's rounds of each kind take beside their passes: running means.

    One is negative where rounds overlap more than they did as passes were measured.

    Args:
        seconds: of each kind, before any was seen.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        super().__init__(range(PLAIN, PLAIN + len(seconds)), [0.0] * len(seconds))
        self._shape, self._seen = list(seconds), [0] * len(seconds)

    def at(self, rows: int) -> float:
        return self._shape[rows - PLAIN]

    def observe(self, rows: int, seconds: float) -> None:
        i = rows - PLAIN
        self._seen[i] += 1
        more = seconds - self._shape[i]
        if self._seen[i] > _YOUNG:  # one that stalled moves it no further than others
            most = max(abs(self._shape[i]) / 2, _LEAST_STEP)
            more = min(max(more, -most), most)
        self._shape[i] += max(1 / (self._seen[i] + 1), _MEAN) * more


def _overheads() -> PassCost:
    return PassCost([PLAIN, SPECULATIVE], [1e-4, 3e-4])


@dataclass(frozen=True)
class Costs:
    """Measured passes of one engine, and what its rounds cost beside them.

    Attributes:
        enter: the head's pass over the end of a prompt, in seconds; 0 where it takes no longer than its rows.
        recall: passes of target and head over so many positions whose features a device did not keep, until a request
            can draft again; ``None`` where features are kept.
    """

    target: PassCost
    draft_step: PassCost
    draft_extend: PassCost
    overhead: PassCost = field(default_factory=_overheads)
    enter: float = 0.0
    recall: PassCost | None = None

    def plain(self, batch: int) -> float:
        """Seconds of a round of plain decoding."""
        return self.target.at(batch) + self.overhead.at(PLAIN)

    def drafting(self, batch: int, beams: int, steps: int) -> float:
        """Seconds of a round's drafting: ``steps`` passes over ``beams`` rows in all, and the draft_extend."""
        passes = steps * self.draft_step.at(beams) + self.draft_extend.at(2 * batch)
        return passes + self.overhead.at(SPECULATIVE)
