"""Which tree to verify: depth and size by what passes cost (`costs`), and by what drafts have been worth so far.

Everything here is arithmetic on plain numbers. No choice made here can change a request's tokens: verification is
exact for every tree, so a bad choice costs time only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specrs.engine.costs import Costs

_START = 0.8  # of an account, plain rounds, before anything is known of its kind
_START_MOST = 1.2  # where drafts have been winning
_START_LEAST = 0.5  # where they have been losing
_RATE = 0.006  # added by each plain round
_CAP = 4.0


@dataclass(frozen=True)
class TreeChoice:
    """How many draft nodes to verify, and from which cumulative log-probability on."""

    nodes: int
    min_score: float
    expected: float  # tokens of the round, over the batch


@dataclass
class Kind:
    """What the engine has learnt of requests that sample, or of greedy ones: where the next one's account opens."""

    won: float = 0.0  # smoothed plain rounds that a speculative round won

    @property
    def start(self) -> float:
        """Plain rounds that a new request may lose to drafts."""
        return _START_MOST if self.won > 0.2 else _START_LEAST if self.won < 0.0 else _START

    def learn(self, net: float) -> None:
        """From a speculative round that won ``net`` plain rounds."""
        self.won += 0.03 * (min(net, 4.0) - self.won)


@dataclass
class SpeculationGate:
    """One request's account, in rounds of plain decoding: what it may still lose to drafts.

    It opens with what its kind allows. Each plain round adds `_RATE`, and each speculative round what it won, or
    takes what it lost, by modelled times. No round is drafted that could lose more than the account holds
    (`TreePolicy.limit`), and none at all while the account does not pay the smallest one. So after N plain rounds a
    request has lost at most ``start + _RATE * N`` rounds to drafts, whatever the text; what it won before it may lose
    again, up to `_CAP`.
    """

    kind: Kind
    account: float

    def affords(self, stake: float) -> bool:
        """Whether the next round should draft, which can lose ``stake``."""
        return self.account >= stake

    def plain_round(self) -> None:
        """A round without drafts."""
        self.account = min(self.account + _RATE, _CAP)

    def spec_round(self, net: float) -> None:
        """A round with drafts that won ``net`` plain rounds, or lost them (negative)."""
        self.account = min(self.account + net, _CAP)
        self.kind.learn(net)


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
    kinds: dict[bool, Kind] = field(default_factory=lambda: {sampled: Kind() for sampled in (False, True)})
    _level_yield: float = 0.75  # share of a level's chance that the next level keeps

    def gate(self, sampled: bool) -> SpeculationGate:
        """The gate of a new request."""
        kind = self.kinds[sampled]
        return SpeculationGate(kind, kind.start)

    def chance(self, score: float) -> float:
        """Probability that a node of this cumulative log-probability is accepted."""
        return math.exp(self.temper * score)

    def stake(self, batch: int, drafting: int) -> float:
        """Plain rounds that each of ``drafting`` requests loses by a round with one draft node each, all refused."""
        seconds = self.costs.drafting(batch, batch, 0) + self.costs.target.at(batch + drafting)
        return (seconds / self.costs.plain(batch) - 1.0) * batch / drafting

    def limit(self, batch: int, accounts: Sequence[float]) -> float:
        """Seconds that a round may take, so that none of the requests that draft can overdraw its account."""
        return self.costs.plain(batch) * (1.0 + min(accounts) * len(accounts) / batch)

    def deepen(self, batch: int, steps: int, beams: Sequence[Sequence[float]], limit: float = math.inf) -> bool:
        """Whether another draft step pays: its expected tokens against its time at the present rate.

        Args:
            batch: requests.
            steps: levels drafted so far.
            beams: per request that drafts, the cumulative log-probabilities of its present beams, best first.
            limit: seconds that the round may take.
        """
        rate = max(self.gain, 1.0) * batch / self.costs.plain(batch)
        gain = self._level_yield * sum(self.chance(scores[0]) for scores in beams)
        # A step's rows, and at the end one more row to verify for each request.
        target, verified = self.costs.target, batch * (steps + 1)
        rows = sum(len(scores) for scores in beams)
        cost, deeper = self.costs.draft_step.at(rows), target.at(verified + len(beams))
        if self.costs.drafting(batch, rows, steps) + deeper > limit:
            return False
        return gain > (cost + target.at(verified + batch) - target.at(verified)) * rate

    def choose(self, batch: int, scores: Sequence[float], drafting: float, limit: float = math.inf) -> TreeChoice:
        """The number of draft nodes with the most expected tokens per second.

        Args:
            batch: requests, each with its root.
            scores: cumulative log-probabilities of the usable candidates of all requests, descending.
            drafting: seconds of the round beside the target's pass.
            limit: seconds that the round may take.
        """
        best = TreeChoice(0, math.inf, float(batch))
        best_rate = batch / (drafting + self.costs.target.at(batch))
        expected = float(batch)
        for n, score in enumerate(scores, start=1):
            expected += self.chance(score)
            seconds = drafting + self.costs.target.at(batch + n)
            rate = expected / seconds
            if rate > best_rate and seconds <= limit:
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
