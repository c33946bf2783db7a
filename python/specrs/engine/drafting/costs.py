"""The cost of rounds: times of passes, measured when the engine was made, and the time that rounds take beside these.

Two things change while an engine runs. The machine slows down or recovers, which affects every pass alike: the `Pace`.
And the time that rounds take beside their passes changes, which differs by kind of round: running means (`Overheads`).
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_STEP = 1.015  # factor of the pace at each pass: the pace is a running median, which a stalled pass moves little
_MEAN = 0.05  # weight of a round in a running mean


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


class Overheads:
    """Running means of the seconds that rounds of each kind take beside their passes.

    A mean is negative if rounds overlap more than they did when passes were measured. It is the mean of medians of
    three rounds in a row, so that one that stalled, or one behind it that ended early by the host's clock, does not
    count. The first round alone says nothing, and of the first two the shorter one counts.

    Args:
        seconds: where the means begin, for each kind.
    """

    def __init__(self, seconds: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        self._mean, self._seen = list(seconds), [0] * len(seconds)
        self._last = [deque[float](maxlen=3) for _ in seconds]

    def at(self, kind: int) -> float:
        """Return the predicted seconds of a round of this kind."""
        return self._mean[kind]

    def observe(self, kind: int, seconds: float, passes: float) -> float | None:
        """Learn from a round of this kind that took ``seconds`` beside its passes, which take ``passes``.

        Returns:
            What counts of the last rounds of the kind; ``None`` for the first one.
        """
        last = self._last[kind]
        last.append(min(max(seconds, -passes / 2), 2 * passes))
        if len(last) < 2:
            return None
        self._seen[kind] += 1
        median = sorted(last)[(len(last) - 1) // 2]
        self._mean[kind] += max(1 / (self._seen[kind] + 1), _MEAN) * (median - self._mean[kind])
        return median


@dataclass(frozen=True)
class Costs:
    """Times of one engine's passes, and the time that its rounds take beside them.

    Attributes:
        target: cost of the target's passes.
        draft_step: cost of the head's passes that draft one level.
        draft_extend: cost of the head's passes that write draft KV and give scores at the root.
        enter: cost of the passes over so many positions at the end of a prompt, after which its request can draft.
        resume: cost of the passes over so many positions of a request that has not drafted, after which it can.
        overhead: time of rounds beside their passes.
        free: True if drafts cost nothing: trees are as the user fixed them, and every node is verified.
    """

    target: PassCost
    draft_step: PassCost
    draft_extend: PassCost
    enter: PassCost
    resume: PassCost
    overhead: Overheads = field(default_factory=Overheads)
    free: bool = False

    @classmethod
    def of_nothing(cls) -> Costs:
        """Return costs that let every request draft all nodes in every round."""
        nothing = PassCost([1], [0.0])
        return cls(PassCost([1], [1.0]), nothing, nothing, nothing, nothing, free=True)

    def plain(self, batch: int) -> float:
        """Return the seconds of a round of plain decoding, at least half of its pass's: the mean is of batches of all
        sizes."""
        seconds = self.target.at(batch)
        return max(seconds + self.overhead.at(PLAIN), seconds / 2)

    def drafting(self, batch: int, beams: int, levels: int) -> float:
        """Return the seconds of drafting ``levels`` levels: a pass that extends draft KV and gives the first level, and
        a pass over ``beams`` rows for each level behind it."""
        passes = max(levels - 1, 0) * self.draft_step.at(beams) + self.draft_extend.at(2 * batch)
        return passes + self.overhead.at(SPECULATIVE)

    def observe(self, kind: int, batch: int, passes: float, seconds: float) -> None:
        """Learn from a round that took ``seconds``, of which its passes are modelled to take ``passes``.

        A round takes less time if it runs right after another, or more if the host is slower than the device. To
        compare kinds of rounds, the overheads of both kinds must be known.
        """
        beside, plain = self.overhead.observe(kind, seconds - passes, passes), self.target.at(batch)
        # A plain round does only a part of this round's work, and takes no longer.
        if kind != PLAIN and beside is not None and passes + beside < self.plain(batch):
            self.overhead.observe(PLAIN, passes + beside - plain, plain)
