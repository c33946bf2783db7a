"""The cost of rounds: times of passes, measured when the engine was made, and the time that rounds take beside these.

Two things change while an engine runs: the machine slows down or recovers, which affects every pass alike (the `Pace`),
and the time that rounds take beside their passes, which differs by kind of round. A stall of the machine moves neither
by much: one is a running median, the other a mean that is cut.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

_STEP = 1.015  # factor of the pace at each pass: the pace is a running median
LEARN = 0.05  # least weight of a round in a running mean


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

    def observe(self, rows: int, seconds: float) -> None:
        """Move the pace a step towards a measured pass: ``seconds`` over ``rows`` rows."""
        self.pace.factor *= _STEP if seconds > self.at(rows) else 1 / _STEP


PLAIN, SPECULATIVE, HOSTED = range(3)  # kinds of rounds: without drafts, with the head's, with the host's trees alone


@dataclass(frozen=True)
class Costs:
    """Times of one engine's passes, and the time that its rounds take beside them.

    Attributes:
        target: cost of the target's passes.
        draft_step: cost of the head's passes that draft one level.
        draft_extend: cost of the head's passes that write draft KV and give scores at the root.
        resume: cost of the passes over so many positions of a request that has not drafted, after which it can.
        enter: cost of the passes over so many positions at the end of prompts, after which their requests can draft;
            nothing where they take little beside the prompts.
        beside: seconds that a round of each kind takes beside its passes; negative where rounds overlap more than they
            did when passes were measured.
        seen: number of rounds of each kind that ``beside`` was learnt from.
    """

    target: PassCost
    draft_step: PassCost
    draft_extend: PassCost
    resume: PassCost
    enter: PassCost = field(default_factory=lambda: PassCost([1], [0.0]))
    beside: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    seen: list[int] = field(default_factory=lambda: [0, 0, 0])

    @classmethod
    def of_nothing(cls) -> Costs:
        """Return costs by which drafts cost nothing."""
        nothing = PassCost([1], [0.0])
        return cls(PassCost([1], [1.0]), nothing, nothing, nothing)

    def plain(self, batch: int) -> float:
        """Return the seconds of a round of plain decoding."""
        return self.target.at(batch) + self.beside[PLAIN]

    def drafting(self, batch: int, beams: int, levels: int) -> float:
        """Return the seconds of drafting ``levels`` levels: a pass that extends draft KV and gives the first level, and
        a pass over ``beams`` rows for each level behind it."""
        passes = max(levels - 1, 0) * self.draft_step.at(beams) + self.draft_extend.at(2 * batch)
        return passes + self.beside[SPECULATIVE]

    def observe(self, kind: int, batch: int, expected: float, seconds: float) -> None:
        """Learn from a round of a batch that took ``seconds`` where ``expected`` were.

        The means are of batches of all sizes. None is less than nothing by more than half of a pass over one row, so
        that rounds of all sizes take time.
        """
        self.seen[kind] += 1
        before, least = self.beside[kind], -self.target.at(1) / 2
        more = max(1 / self.seen[kind], LEARN) * min(max(seconds - expected, -expected / 2), expected / 2)
        self.beside[kind] = max(before + more, least)
        # A plain round does only a part of this round's work, and takes no longer; there may be none to learn it from.
        longer = self.plain(batch) - (expected + self.beside[kind] - before)
        if kind != PLAIN and longer > 0.0:
            self.beside[PLAIN] = max(self.beside[PLAIN] - LEARN * longer, least)
