"""Which tree to verify: a cost model measured on this machine, and what drafts have been worth so far.

Everything here is arithmetic on plain numbers. No choice made here can change a request's tokens: verification is
exact for every tree, so a bad choice costs time only.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_STEP = 1.02  # of a running median


@dataclass
class PassCost:
    """Seconds of a model pass by its number of rows: a measured table, interpolated, that follows what is seen."""

    rows: list[int]
    seconds: list[float]

    def at(self, rows: int) -> float:
        """Predicted seconds of a pass over ``rows`` rows; beyond the table by its last slope."""
        if rows <= 0:
            return 0.0
        if rows <= self.rows[0] or len(self.rows) == 1:
            return self.seconds[0]
        i = min(bisect.bisect_left(self.rows, rows), len(self.rows) - 1)
        r0, r1 = self.rows[i - 1], self.rows[i]
        t0, t1 = self.seconds[i - 1], self.seconds[i]
        return t0 + max(t1 - t0, 0.0) * (rows - r0) / (r1 - r0)

    def observe(self, rows: int, seconds: float) -> None:
        """Move the entries about ``rows`` a step towards what was seen.

        A running median: it follows longer contexts and a busy machine, and no outlier moves it far.
        """
        factor = _STEP if seconds > self.at(rows) else 1 / _STEP
        i = min(bisect.bisect_left(self.rows, rows), len(self.rows) - 1)
        share = 1.0  # of the upper one of the two entries
        if i > 0 and rows < self.rows[i]:
            share = (rows - self.rows[i - 1]) / (self.rows[i] - self.rows[i - 1])
            self.seconds[i - 1] *= factor ** (1.0 - share)
        self.seconds[i] *= factor**share


@dataclass
class Overhead:
    """Seconds of a round outside its passes, as a running median."""

    seconds: float

    def observe(self, seconds: float) -> None:
        """Take a step towards what was seen."""
        self.seconds *= _STEP if seconds > self.seconds else 1 / _STEP


@dataclass(frozen=True)
class Costs:
    """Measured passes of one engine, and what its rounds cost beside them."""

    target: PassCost
    draft_step: PassCost
    draft_extend: PassCost
    plain_overhead: Overhead = field(default_factory=lambda: Overhead(1e-4))
    spec_overhead: Overhead = field(default_factory=lambda: Overhead(2e-4))

    def plain(self, batch: int) -> float:
        """Seconds of a round of plain decoding."""
        return self.target.at(batch) + self.plain_overhead.seconds

    def drafting(self, batch: int, beams: int, steps: int) -> float:
        """Seconds of a round's drafting: ``steps`` passes over ``beams`` rows in all, and the draft_extend."""
        return steps * self.draft_step.at(beams) + self.draft_extend.at(2 * batch) + self.spec_overhead.seconds


@dataclass(frozen=True)
class TreeChoice:
    """How many draft nodes to verify, and from which cumulative log-probability on."""

    nodes: int
    min_score: float
    expected: float  # tokens of the round, over the batch


@dataclass
class TreePolicy:
    """Picks depth and size of the trees of a batch round by round.

    Only modelled times enter, never the time of the round at hand, so that a stall of the machine decides nothing.
    A node of draft probability p is taken to be accepted with probability p ** ``temper``: drafts of a greedy target
    are likelier to be accepted than they claim (about p ** 0.5 with the model in the package). ``temper`` is learned.
    """

    costs: Costs
    temper: float = 0.6
    gain: float = 1.5  # smoothed rate of speculative rounds over plain ones
    _level_yield: float = 0.75  # share of a level's chance that the next level keeps

    def chance(self, score: float) -> float:
        """Probability that a node of this cumulative log-probability is accepted."""
        return math.exp(self.temper * score)

    def deepen(self, batch: int, steps: int, beams: Sequence[Sequence[float]]) -> bool:
        """Whether another draft step pays: its expected tokens against its time at the present rate.

        Args:
            batch: requests.
            steps: levels drafted so far.
            beams: per request that drafts, the cumulative log-probabilities of its present beams, best first.
        """
        rate = max(self.gain, 1.0) * batch / self.costs.plain(batch)
        gain = self._level_yield * sum(self.chance(scores[0]) for scores in beams)
        # A step's rows, and at the end one more row to verify for each request.
        target, verified = self.costs.target, batch * (steps + 1)
        cost = self.costs.draft_step.at(sum(len(scores) for scores in beams))
        return gain > (cost + target.at(verified + batch) - target.at(verified)) * rate

    def choose(self, batch: int, scores: Sequence[float], drafting: float) -> TreeChoice:
        """The number of draft nodes with the most expected tokens per second.

        Args:
            batch: requests, each with its root.
            scores: cumulative log-probabilities of the usable candidates of all requests, descending.
            drafting: seconds of the round beside the target's pass.
        """
        best = TreeChoice(0, math.inf, float(batch))
        best_rate = batch / (drafting + self.costs.target.at(batch))
        expected = float(batch)
        for n, score in enumerate(scores, start=1):
            expected += self.chance(score)
            rate = expected / (drafting + self.costs.target.at(batch + n))
            if rate > best_rate:
                best_rate, best = rate, TreeChoice(n, score, expected)
        return best

    def learn(self, scores: Sequence[float], accepted: int, gain: float) -> None:
        """Calibrate by a verified round: its nodes' scores, accepted draft tokens, rate over plain."""
        self.gain += 0.05 * (min(gain, 8.0) - self.gain)
        chances = [self.chance(s) for s in scores]
        slope = -sum(s * c for s, c in zip(scores, chances, strict=True))
        # A small step of Newton's method towards a temper whose chances sum to what was accepted.
        step = (sum(chances) - accepted) / max(slope, 0.5)
        self.temper = min(max(self.temper + 0.02 * min(max(step, -1.0), 1.0), 0.2), 2.0)


@dataclass
class SpeculationGate:
    """Whether a request's drafts pay at all; plain rounds in between cost nothing but a rare probe.

    What counts is the smoothed number of plain rounds that a speculative round saves. Below 0, the request decodes
    plainly for a span that doubles with every failed probe, so that the time lost to probes soon is under 2%.
    """

    plain_left: int = 0
    _saved: float = 0.5  # starts with the benefit of the doubt
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

    def spec_round(self, tokens: int, cost: float) -> None:
        """A round with drafts that yielded ``tokens`` and took as long as ``cost`` plain rounds."""
        probing = self._probe > 0
        self._saved += (0.5 if probing else 0.06) * (tokens - cost - self._saved)
        if probing:
            self._probe -= 1
        if self._saved >= 0.0:
            self._span = 16
        elif self._probe == 0:
            self.plain_left = self._span
            self._span = min(2 * self._span, self._MAX_SPAN)
            self._probe = self._PROBE_ROUNDS
            self._saved = 0.0
