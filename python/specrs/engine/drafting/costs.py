"""The cost of passes, measured when the engine was made: what decides how far to draft, and what a plain round takes.

While an engine runs, the machine slows down or recovers, which affects every pass alike. The `Pace` follows, a running
median of rounds, so that a stall hardly moves it; it has in it what a plain round takes beside its pass, too.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

_STEP = 1.015  # factor of the pace at each round: the pace is a running median
_FARTHEST = 1e3  # a clock that stands still does not take the pace to zero
LEAST = 1e-9  # seconds that anything takes
LEARN = 0.05  # weight of a round in a running mean


@dataclass
class Pace:
    """The factor by which the machine is slower than at its calibration."""

    factor: float = 1.0


class PassCost:
    """Seconds of a model pass by its number of rows: a measured table, interpolated, at the machine's pace.

    Args:
        rows: row counts, ascending.
        seconds: seconds of a pass for each row count. A measurement below that of fewer rows is replaced by the latter.
        pace: the pace of the machine, which its tables share; ``None`` for a pace of this table alone.
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float], pace: Pace | None = None) -> None:
        self.rows = list(rows)
        self.pace = Pace() if pace is None else pace
        self._measured: list[float] = []
        for s in seconds:
            self._measured.append(max(s, self._measured[-1]) if self._measured else s)
        self._known: dict[int, float] = {}  # seconds that were asked for, by row count, at the pace of calibration

    @property
    def table(self) -> tuple[list[int], list[float], float]:
        """Row counts, seconds of a pass for each, and the pace to multiply these by, as `choose_drafts` takes them."""
        return self.rows, self._measured, self.pace.factor

    def at(self, rows: int) -> float:
        """Return the predicted seconds of a pass over ``rows`` rows; beyond the table, its last slope continues."""
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = self._measured_at(rows)
        return known * self.pace.factor

    def _measured_at(self, rows: int) -> float:
        if rows <= 0:
            return 0.0
        seconds, table = self._measured, self.rows
        if rows <= table[0] or len(table) == 1:
            return seconds[0]
        i = min(bisect.bisect_left(table, rows), len(table) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (table[i] - table[i - 1])
        return seconds[i - 1] + slope * (rows - table[i - 1])


_NOTHING = PassCost([1], [0.0])


@dataclass(frozen=True)
class Costs:
    """Times of one engine's passes. On a host the head's passes but the draft steps have no price here: what they took
    is known when it is asked for.

    Attributes:
        target: cost of the target's passes.
        draft_step: cost of the head's passes that draft one level.
        draft_extend: cost of the head's passes that write draft KV and give scores at the root.
        resume: cost of the passes over so many positions of a request that has not drafted, after which it can.
        enter: cost of the passes over so many positions at the end of prompts, after which their requests can draft;
            nothing where they take little beside the prompts.
    """

    target: PassCost
    draft_step: PassCost = _NOTHING
    draft_extend: PassCost = _NOTHING
    resume: PassCost = _NOTHING
    enter: PassCost = _NOTHING

    @classmethod
    def of_nothing(cls) -> Costs:
        """Return costs by which drafts cost nothing."""
        return cls(PassCost([1], [1.0]))

    def plain(self, batch: int) -> float:
        """Return the seconds of a round of plain decoding."""
        return self.target.at(batch)

    def drafting(self, batch: int, beams: int, levels: int) -> float:
        """Return the seconds of drafting ``levels`` levels: a pass that extends draft KV and gives the first level, and
        a pass over ``beams`` rows for each level behind it."""
        return max(levels - 1, 0) * self.draft_step.at(beams) + self.draft_extend.at(2 * batch)

    def observe(self, seconds: float, expected: float) -> None:
        """Move the pace a step towards a round that took ``seconds`` where ``expected`` were."""
        factor = self.target.pace.factor * (_STEP if seconds > expected else 1 / _STEP)
        self.target.pace.factor = min(max(factor, 1 / _FARTHEST), _FARTHEST)
