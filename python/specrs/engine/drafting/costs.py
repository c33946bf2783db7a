"""What rounds cost: passes as they were measured when the engine was made, and what rounds take beside them.

Two things change while an engine runs. The machine slows or recovers, which every pass sees alike: the `Pace`. And a
round takes time beside its passes, another one for each kind of round: running means (`Overheads`).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

_STEP = 1.015  # of the pace, at each pass: a running median, which a stalled pass does not move far
_MEAN = 0.05  # weight of a round in a running mean
_YOUNG = 8  # rounds that move a mean as far as they say; a later one that stalled moves it no further than others
_LEAST_STEP = 1e-4  # seconds


@dataclass
class Pace:
    """How much slower the machine is than when it was calibrated."""

    factor: float = 1.0


class PassCost:
    """Seconds of a model pass by its number of rows: a measured table, interpolated, at the machine's pace.

    Args:
        rows: ascending row counts.
        seconds: of a pass of each; where a measurement fell below that of fewer rows, that one stands.
        pace: shared by the tables of one machine; ``None`` is one of its own.
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float], pace: Pace | None = None) -> None:
        self.rows = list(rows)
        self.pace = Pace() if pace is None else pace
        self._measured: list[float] = []
        for s in seconds:
            self._measured.append(max(s, self._measured[-1]) if self._measured else s)
        self._known: dict[int, float] = {}  # what was asked for, at the pace of calibration

    @property
    def table(self) -> tuple[list[int], list[float], float]:
        """Row counts, seconds of a pass of each, and the pace that they are multiplied by: as `DraftNodes` takes it."""
        return self.rows, self._measured, self.pace.factor

    def at(self, rows: int) -> float:
        """Predicted seconds of a pass over ``rows`` rows; beyond the table by its last slope."""
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
        """A pass over so many rows took so long: the pace moves a step towards it."""
        self.pace.factor *= _STEP if seconds > self.at(rows) else 1 / _STEP


PLAIN, SPECULATIVE, HOSTED = range(3)  # kinds of rounds: without drafts, with the head's, with the host's trees alone


class Overheads:
    """What rounds of each kind take beside their passes, in seconds: running means.

    One is negative where rounds overlap more than they did as passes were measured.

    Args:
        seconds: of each kind, before any was seen.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        self._mean, self._seen = list(seconds), [0] * len(seconds)

    def at(self, kind: int) -> float:
        """Predicted seconds."""
        return self._mean[kind]

    def observe(self, kind: int, seconds: float) -> None:
        """A round took so many."""
        self._seen[kind] += 1
        more = seconds - self._mean[kind]
        if self._seen[kind] > _YOUNG:
            most = max(abs(self._mean[kind]) / 2, _LEAST_STEP)
            more = min(max(more, -most), most)
        self._mean[kind] += max(1 / (self._seen[kind] + 1), _MEAN) * more


def _host_overheads() -> Overheads:
    return Overheads([1e-4, 3e-4, 3e-4])


@dataclass(frozen=True)
class Costs:
    """Measured passes of one engine, and what its rounds cost beside them.

    Attributes:
        target: of the target.
        draft_step: of the head, one level of drafts.
        draft_extend: of the head, draft KV and scores at the root.
        enter: what runs over so many positions at the end of a prompt, until its request can draft.
        resume: what runs over so many positions of a request that has not drafted, until it can.
        overhead: of rounds, beside their passes.
    """

    target: PassCost
    draft_step: PassCost
    draft_extend: PassCost
    enter: PassCost
    resume: PassCost
    overhead: Overheads = field(default_factory=_host_overheads)

    def plain(self, batch: int) -> float:
        """Seconds of a round of plain decoding."""
        return self.target.at(batch) + self.overhead.at(PLAIN)

    def drafting(self, batch: int, beams: int, steps: int) -> float:
        """Seconds of a round's drafting: ``steps`` passes over ``beams`` rows in all, and the draft_extend."""
        passes = steps * self.draft_step.at(beams) + self.draft_extend.at(2 * batch)
        return passes + self.overhead.at(SPECULATIVE)

    def observe(self, kind: int, batch: int, passes: float, seconds: float) -> None:
        """A round of a kind took so long, of which its passes are modelled to take ``passes``.

        Rounds that run behind each other take less than one by itself, or more where the host is slower than the
        device: both must be known to compare them.
        """
        self.overhead.observe(kind, min(max(seconds - passes, -passes / 2), 2 * passes))
        if kind != PLAIN and seconds < self.plain(batch):  # a plain round does nothing that this one does not
            plain = self.target.at(batch)
            self.overhead.observe(PLAIN, max(seconds - plain, -plain / 2))
