"""Which tree to verify: depth and size by what passes cost (`costs`), and by what drafts have been worth so far.

Everything here is arithmetic on plain numbers. No choice made here can change a request's tokens: verification is
exact for every tree, so a bad choice costs time only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from specrs._specrs import DraftNodes
from specrs.engine.drafting.budget import ENGINE, RATE, Account, TokenBucket, request_bucket
from specrs.engine.drafting.costs import Costs
from specrs.models.acceptance import Acceptance

TAIL = 32
"""Positions that a head reads before its first draft, where it may begin anywhere. More are paid for and bring less
(part ``tails`` of `benches/results/gate.json`)."""
FROM_THE_BEGINNING = sys.maxsize
_RISK = 0.7  # of what a request may lose, what one round may
_LEARN = 0.05  # weight of a round
_COOL = 0.8  # temperature up to which sampling is near to greedy


@dataclass(frozen=True)
class TreeChoice:
    """How many draft nodes to verify, and from which cumulative log-probability on."""

    nodes: int
    min_score: float
    expected: float  # tokens of the round, over the batch


@dataclass(eq=False)
class Kind:
    """What the engine has learnt of greedy requests, of those that sample at a low temperature, or at a high one.

    A node of draft probability p is taken to be accepted with probability p ** ``temper``.

    Attributes:
        temper: see there.
        levels: where nobody sees a node's probability before a round has ended: of each level of drafts, the share that
            is accepted if its parent is; as many as trees have.
        gain: smoothed rate of rounds with drafts over plain ones.
    """

    temper: float = 1.0
    levels: list[float] = field(default_factory=list)
    gain: float = 1.5

    @classmethod
    def of(cls, expected: Acceptance, depth: int) -> Kind:
        """Of a head from which so much is expected, before any of its drafts was verified."""
        return cls(expected.temper, [expected.level(i) for i in range(depth)])

    def chance(self, score: float) -> float:
        """Probability that a node of this cumulative log-probability is accepted."""
        return math.exp(self.temper * score)

    def learn(self, scores: Sequence[float], accepted: int, gain: float) -> None:
        """Calibrate by a verified tree: its nodes' scores, the accepted ones, the round's rate over plain."""
        self.gain += _LEARN * (min(gain, 8.0) - self.gain)
        chances = [self.chance(s) for s in scores]
        slope = -sum(s * c for s, c in zip(scores, chances, strict=True))
        # A small step of Newton's method towards a temper whose chances sum to what was accepted.
        step = (sum(chances) - accepted) / max(slope, 0.5)
        self.temper = min(max(self.temper + 0.02 * min(max(step, -1.0), 1.0), 0.2), 2.0)

    def reached(self, accepted: int, levels: int) -> None:
        """Learn from a path of so many accepted drafts, in a tree of so many levels."""
        for level in range(min(levels, accepted + 1)):
            self.levels[level] += _LEARN * ((accepted > level) - self.levels[level])


@dataclass(frozen=True)
class Share:
    """What one of those who drafted has in a request's tree.

    Attributes:
        scores: cumulative log-probabilities that it gave its nodes, best first.
        accepted: number of its accepted drafts.
        others: number of accepted drafts of the others, where a device has united both.
    """

    scores: list[float]
    accepted: int
    others: int = 0


def by_temperature(temperature: float) -> int:
    """Requests alike, of three kinds: the hotter they sample, the less drafts foretell."""
    return 0 if temperature == 0 else 1 if temperature <= _COOL else 2


@dataclass(eq=False)
class TreePolicy:
    """Picks depth and size of the trees of a batch round by round.

    Attributes:
        costs: of passes.
        kinds, buckets: of greedy requests, those of low temperature, and those of high.
        tail: positions before its first draft that the head reads, of any request at any time. `FROM_THE_BEGINNING`
            where the head cannot begin anywhere: it reads all of a request, or none.

    Only modelled times pick a tree and are charged, never the time of the round at hand: a stall of the machine decides
    nothing. What rounds take beside the model is learnt (`Overheads`).
    """

    costs: Costs
    kinds: list[Kind] = field(default_factory=lambda: [Kind() for _ in range(3)])
    buckets: list[TokenBucket] = field(default_factory=lambda: [TokenBucket(ENGINE) for _ in range(3)])
    tail: int = FROM_THE_BEGINNING
    _level_yield: float = 0.75  # share of a level's chance that the next level keeps

    def kind(self, temperature: float) -> Kind:
        """What is known of requests like it."""
        return self.kinds[by_temperature(temperature)]

    def account(self, temperature: float, prompt: int, batch: int, tokens: int) -> Account:
        """Of a new request of up to so many tokens, whose prompt has so many that the target runs over."""
        account = Account(self.buckets[by_temperature(temperature)], TokenBucket(request_bucket(tokens)))
        account.engine.earn(self.prefilling(prompt, 1) / batch)
        return account

    def follows(self, account: Account, batch: int, remaining: int, entries: int) -> bool:
        """Whether the head follows a request from its admission on.

        Args:
            account: of the request.
            batch: requests that run with it.
            remaining: tokens that may come.
            entries: positions at the end of its prompt that have no draft KV.
        """
        least = self.least_loss(batch, batch)
        price = self.entering(min(entries, self.tail), batch) + least
        # The bucket of a short answer may hold no round: then its draft KV would be for nothing.
        return least <= account.request.left and price <= account.engine.left * batch and price < remaining / 2

    def wait(self, account: Account, batch: int, produced: int, lag: int | None) -> float:
        """Plain rounds until a request can pay for the way to a round with drafts, and for its share of that: 0 for
        now."""
        short = self.resuming(lag, batch) + self.least_loss(batch, batch) - account.room(produced, batch)
        return max(short, 0.0) / RATE

    def resuming(self, lag: int | None, batch: int) -> float:
        """Plain rounds of a batch, which waits for it, that pass until a request can draft again that is behind by
        ``lag`` positions; ``None`` where it drafted in the last round."""
        return 0.0 if lag is None else self.costs.resume.at(lag) / self.costs.plain(batch) * batch

    def entering(self, tokens: int, batch: int, together: int = 1) -> float:
        """Plain rounds of a batch, which waits for it, that the draft KV of so many tokens of a prompt takes, in a pass
        over the prompts of ``together`` requests."""
        return self.costs.enter.at(tokens * together) / together / self.costs.plain(batch) * batch

    def prefilling(self, tokens: int, batch: int) -> float:
        """Plain rounds that so many more tokens of a prompt take of a batch, which waits for it."""
        target, (few, many) = self.costs.target, (8, 64)
        return (target.at(many) - target.at(few)) / (many - few) * tokens / self.costs.plain(batch) * batch

    def least_loss(self, batch: int, drafting: int) -> float:
        """Plain rounds that each of ``drafting`` requests loses by a round with one draft node each, all refused."""
        seconds = self.costs.drafting(batch, batch, 0) + self.costs.target.at(batch + drafting)
        return self.lost(batch, drafting, seconds) / drafting

    def lost(self, batch: int, drafting: int, seconds: float) -> float:
        """Plain rounds that requests lose by a round of so many seconds in which ``drafting`` of them verify drafts,
        all refused: each has waited, and the others count twice, for nobody asked them."""
        return (seconds / self.costs.plain(batch) - 1.0) * (2 * batch - max(drafting, 1))

    def won(self, batch: int, drafting: int, seconds: float, wins: Sequence[float]) -> list[float]:
        """What a round won each of those who asked for it, or lost them, by the tokens that it won each.

        Where a round wins, those share it who won more than their part of its price, and nobody pays: one more tree
        costs next to nothing. Where it loses, those pay who won less, so that they are the first to stop."""
        price = self.lost(batch, drafting, seconds) / len(wins)
        total = sum(wins) - price * len(wins)
        side = [max((w - price) * total, 0.0) for w in wins]  # of those who are the cause
        return [total * one / (sum(side) or 1.0) for one in side]

    def lacking(self, rooms: Sequence[float]) -> list[float]:
        """What each request of a batch lacks to draft, in plain rounds: nothing for as many as can each pay their share
        of the round, which all wait for.

        Args:
            rooms: of each request, what it may lose.
        """
        size = len(rooms)
        richest = sorted(range(size), key=lambda i: -rooms[i])
        able = next((n for n in range(size, 0, -1) if rooms[richest[n - 1]] >= self.least_loss(size, n)), 0)
        lacking = [0.0] * size
        for i in richest[able:]:
            lacking[i] = self.least_loss(size, able + 1) - rooms[i]
        return lacking

    def limit(self, batch: int, rooms: Sequence[float]) -> float:
        """Seconds that a round may take: none of those who draft risks more than a part of what it may lose, so that
        one bad round of many levels is not its last; but a round of one draft each may be tried."""
        share = max(self.least_loss(batch, len(rooms)), _RISK * min(rooms))
        return self.costs.plain(batch) * (1.0 + share * len(rooms) / (2 * batch - len(rooms))) * (1.0 + 1e-9)

    def deepen(
        self, batch: int, steps: int, beams: Sequence[tuple[Kind, Sequence[float]]], limit: float = math.inf
    ) -> bool:
        """Whether another draft step pays: its expected tokens against its time at the present rate.

        Args:
            batch: requests.
            steps: levels drafted so far.
            beams: per request that drafts, its kind and the cumulative log-probabilities of its present beams, best
                first.
            limit: seconds that the round may take.
        """
        if not beams:
            return False
        rate = max(sum(kind.gain for kind, _ in beams) / len(beams), 1.0) * batch / self.costs.plain(batch)
        gain = self._level_yield * sum(kind.chance(scores[0]) for kind, scores in beams)
        # A step's rows, and at the end one more row to verify for each request.
        target, verified = self.costs.target, batch * (steps + 1)
        rows = sum(len(scores) for _, scores in beams)
        cost, deeper = self.costs.draft_step.at(rows), target.at(verified + len(beams))
        if self.costs.drafting(batch, rows, steps) + deeper > limit:
            return False
        return gain > (cost + target.at(verified + batch) - target.at(verified)) * rate

    def choose(self, batch: int, nodes: DraftNodes, drafting: float, limit: float = math.inf) -> TreeChoice:
        """The number of draft nodes with the most expected tokens per second.

        Args:
            batch: requests, each with its root.
            nodes: usable candidates of all requests, likeliest first.
            drafting: seconds of the round beside the target's pass.
            limit: seconds that the round may take.
        """
        return TreeChoice(*nodes.choose(batch, self.costs.target.table, drafting, limit))


def nodes_of(scored: Sequence[tuple[float, Kind]]) -> DraftNodes:
    """Nodes by their cumulative log-probabilities, each with its request's kind; in any order."""
    best = sorted(scored, key=lambda node: -node[0])
    return DraftNodes.scored([score for score, _ in best], [kind.temper for _, kind in best])
