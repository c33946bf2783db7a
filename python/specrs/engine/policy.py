"""Which tree to verify: a cost model measured on this machine, and what drafts have been worth so far.

Everything here is arithmetic on plain numbers. No choice made here can change a request's tokens: verification is
exact for every tree, so a bad choice costs time only.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class PassCost:
    """Seconds of a model pass by its number of rows: a measured table, interpolated, drifting with what is seen."""

    rows: list[int]
    seconds: list[float]
    drift: float = 1.0

    def at(self, rows: int) -> float:
        """Predicted seconds of a pass over ``rows`` rows."""
        if rows <= 0:
            return 0.0
        i = bisect.bisect_left(self.rows, rows)
        if i == 0:
            base = self.seconds[0]
        elif i == len(self.rows):  # beyond the table: the last slope
            i -= 1
            base = self._line(i, rows)
        else:
            base = self._line(i, rows)
        return base * self.drift

    def _line(self, i: int, rows: int) -> float:
        if i == 0:
            return self.seconds[0]
        r0, r1 = self.rows[i - 1], self.rows[i]
        t0, t1 = self.seconds[i - 1], self.seconds[i]
        return t0 + max(t1 - t0, 0.0) * (rows - r0) / (r1 - r0)

    def observe(self, rows: int, seconds: float) -> None:
        """Follow slow change (longer contexts, a busy machine) without believing a single outlier."""
        ratio = seconds / (self.at(rows) / self.drift)
        self.drift += 0.05 * (min(max(ratio, 0.25), 4.0) - self.drift)


@dataclass(frozen=True)
class Costs:
    """Measured passes of one engine."""

    target: PassCost
    draft_step: PassCost
    draft_extend: PassCost


@dataclass(frozen=True)
class TreeChoice:
    """How many draft nodes to verify, and from which cumulative log-probability on."""

    nodes: int
    min_score: float
    expected: float  # tokens of the round, over the batch


@dataclass
class TreePolicy:
    """Picks depth and size of the trees of a batch round by round.

    ``worth`` calibrates the draft's probabilities: accepted draft tokens over the sum of the probabilities of the
    nodes that were verified.
    """

    costs: Costs
    worth: float = 0.9
    gain: float = 1.5  # smoothed rate of speculative rounds over plain ones
    _level_yield: float = 0.6  # share of a level's probability that the next level keeps

    def deepen(self, batch: int, beams: Sequence[Sequence[float]]) -> bool:
        """Whether another draft step pays: its expected tokens against its time at the present rate.

        Args:
            batch: requests.
            beams: per request, the cumulative log-probabilities of its present beams.
        """
        rate = max(self.gain, 1.0) * batch / self.costs.target.at(batch)
        mass = sum(math.exp(s) for scores in beams for s in scores)
        gain = self.worth * mass * self._level_yield
        rows = sum(len(scores) for scores in beams)
        target = self.costs.target
        cost = self.costs.draft_step.at(rows) + (target.at(2 * batch) - target.at(batch))
        return gain > cost * rate

    def choose(self, batch: int, scores: Sequence[float], max_nodes: int, spent: float, extend: float) -> TreeChoice:
        """The number of draft nodes with the most expected tokens per second.

        Args:
            batch: requests, each with its root.
            scores: cumulative log-probabilities of the usable candidates of all requests, descending.
            max_nodes: most draft nodes of the whole batch.
            spent: seconds of drafting, already spent.
            extend: seconds of the draft_extend that follows.
        """
        best = TreeChoice(0, math.inf, float(batch))
        best_rate = batch / (spent + self.costs.target.at(batch) + extend)
        expected = float(batch)
        for n, score in enumerate(scores[:max_nodes], start=1):
            expected += self.worth * math.exp(score)
            rate = expected / (spent + self.costs.target.at(batch + n) + extend)
            if rate > best_rate:
                best_rate, best = rate, TreeChoice(n, score, expected)
        return best

    def learn(self, predicted: float, accepted: int, gain: float) -> None:
        """Calibrate by a verified round: sum of its nodes' probabilities, accepted draft tokens, rate over plain."""
        self.gain += 0.05 * (min(gain, 8.0) - self.gain)
        if predicted > 0:
            self.worth += 0.02 * (min(accepted / predicted, 1.5) - self.worth)


@dataclass
class SpeculationGate:
    """Whether a request's drafts pay at all; plain rounds in between cost nothing but a rare probe.

    After each speculative round the smoothed rate is compared with plain decoding. Below it, the request decodes
    plainly for a span that doubles with every failed probe, so that the time lost to probes stays under 2%.
    """

    plain_left: int = 0
    _gain: float = 1.3  # smoothed speculative over plain rate; starts with the benefit of the doubt
    _span: int = 16
    _probe: int = field(default=0)

    _MAX_SPAN = 1024
    _PROBE_ROUNDS = 2

    @property
    def speculate(self) -> bool:
        """Whether the next round should draft."""
        return self.plain_left == 0

    def plain_round(self) -> None:
        """A round without drafts."""
        if self.plain_left > 0:
            self.plain_left -= 1

    def spec_round(self, gain: float) -> None:
        """A round with drafts whose rate was ``gain`` times the plain rate."""
        probing = self._probe > 0
        self._gain += (0.5 if probing else 0.15) * (gain - self._gain)
        if probing:
            self._probe -= 1
        if self._gain >= 1.02:
            self._span = 16
        elif self._probe == 0:
            self.plain_left = self._span
            self._span = min(2 * self._span, self._MAX_SPAN)
            self._probe = self._PROBE_ROUNDS
            self._gain = 1.0
