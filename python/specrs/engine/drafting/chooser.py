"""The choice of the tree to verify: depth and size by the cost of passes (`costs`) and the worth of drafts so far.

No choice made here can change a request's tokens: verification is exact for every tree, so a bad choice costs only
time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specrs.engine.drafting.budget import ENGINE, Account, TokenBucket, request_bucket
from specrs.engine.drafting.costs import LEARN, Costs
from specrs.models.acceptance import UNKNOWN, Acceptance

TAIL = 32
"""Positions that a head reads before its first draft, if it may begin anywhere. Fewer lose 6%, and more change 1%
(part ``tails`` of `benches/results/gate.json`)."""
_YIELD = 0.75  # share of a level's chance that the next level keeps (part ``yields`` there)
_COOL = 0.8  # temperature up to which sampling is near to greedy


@dataclass(eq=False)
class Kind:
    """The engine's knowledge of one kind of requests: those of temperature 0, of a low one, or of a high one.

    Attributes:
        levels: for each level of drafts, the share of trees in which a draft of the level is accepted, among those in
            which a draft of the level above is. Before a round nobody sees a node's probability, so levels tell what
            the head's drafts may bring.
        temper: the head's drafts are expected to be accepted with the probability that it gives them, to this power.
        gain: smoothed ratio of the token rate of rounds with drafts to that of plain rounds.
        bucket: the plain rounds that all requests of the kind may still lose to drafts together.
    """

    levels: list[float] = field(default_factory=list)
    temper: float = 1.0
    gain: float = 1.5
    bucket: TokenBucket = field(default_factory=lambda: TokenBucket(ENGINE))

    @classmethod
    def of(cls, expected: Acceptance, depth: int) -> Kind:
        """Return the knowledge to start from, before any draft of a head was verified.

        Args:
            expected: the expected acceptance of the head's drafts for requests of this kind.
            depth: levels of drafts in the deepest tree.
        """
        return cls([expected.level(i) for i in range(depth)], expected.temper)

    def chance(self, score: float) -> float:
        """Return the probability that a node of this cumulative log-probability is accepted."""
        return math.exp(self.temper * score)

    def learn(self, gain: float) -> None:
        """Learn from the gain of a round with drafts over plain rounds."""
        self.gain += LEARN * (gain - self.gain)

    def reached(self, accepted: int, levels: int) -> None:
        """Learn from a path of ``accepted`` drafts in a tree of ``levels`` levels."""
        for level in range(min(levels, accepted + 1)):
            self.levels[level] += LEARN * ((accepted > level) - self.levels[level])


def by_temperature(temperature: float) -> int:
    """Return the index of a request's kind, from 0 to 2: the hotter it samples, the less drafts foretell."""
    return 0 if temperature == 0 else 1 if temperature <= _COOL else 2


@dataclass(eq=False)
class TreePolicy:
    """Picks the depth and size of a batch's trees, round by round.

    Attributes:
        costs: costs of passes and rounds.
        kinds: one for each kind of requests, by `by_temperature`.
        fixed: True if trees are as the user fixed them: every node is verified, of all that draft.
        sized: as `drafted_levels` takes it.
    """

    costs: Costs
    kinds: list[Kind] = field(default_factory=lambda: [Kind() for _ in range(3)])
    fixed: bool = False
    sized: bool = False

    @classmethod
    def of_fixed_trees(cls, depth: int) -> TreePolicy:
        """Return the policy of an engine whose trees are fixed, of up to ``depth`` levels: drafts cost nothing."""
        return cls(Costs.of_nothing(), [Kind.of(one, depth) for one in UNKNOWN], fixed=True)

    def kind(self, temperature: float) -> Kind:
        """Return the knowledge of requests with such a temperature."""
        return self.kinds[by_temperature(temperature)]

    def account(self, temperature: float, tokens: int) -> Account:
        """Open the account of a new request that may generate up to ``tokens`` tokens."""
        return Account(self.kind(temperature).bucket, TokenBucket(request_bucket(tokens)))

    def resuming(self, lag: int, batch: int) -> float:
        """Return the plain rounds that a batch waits until the head has run over ``lag`` positions of a request."""
        return self.costs.resume.at(lag) / self.costs.plain(batch) * batch

    def entering(self, tokens: int, batch: int) -> float:
        """Return the plain rounds that a batch waits until the head has run over ``tokens`` positions of prompts."""
        return self.costs.enter.at(tokens) / self.costs.plain(batch)

    def lost(self, batch: int, drafting: int, seconds: float) -> float:
        """Return the plain rounds that a batch loses by a round of ``seconds`` whose drafts are all refused.

        Each request has waited. The requests without drafts count twice, because they waited for others. A round with
        drafts takes no less than a plain one, whatever the measured costs say.
        """
        return max(seconds / self.costs.plain(batch) - 1.0, 0.0) * (2 * batch - max(drafting, 1))

    def won(self, batch: int, drafting: int, seconds: float, wins: Sequence[float]) -> list[float]:
        """Return the plain rounds that a round won for each request that drafted; negative for a loss.

        If the round wins, the requests that won more than their part of its price share the win, and no request pays:
        one more tree costs next to nothing. If the round loses, the requests that won less than their part pay, so that
        they are the first to stop.

        Args:
            wins: tokens that the round won for each of these requests.
        """
        price = self.lost(batch, drafting, seconds) / len(wins)
        total = sum(wins) - price * len(wins)
        side = [max((w - price) * total, 0.0) for w in wins]  # how far each request caused the result
        return [total * one / (sum(side) or 1.0) for one in side]

    def deepen(self, batch: int, levels: int, beams: Sequence[tuple[Kind, Sequence[float]]]) -> bool:
        """Return whether another draft step yields more tokens than its time yields at the present rate.

        Args:
            batch: number of requests.
            levels: number of levels drafted so far.
            beams: for each request that drafts, its kind and the cumulative log-probabilities of its present beams,
                best first.
        """
        if not beams:
            return False
        # A step costs its own rows, and one more row to verify for each request.
        target, verified = self.costs.target, batch * (levels + 1)
        rows = sum(len(scores) for _, scores in beams)
        rate = max(sum(kind.gain for kind, _ in beams) / len(beams), 1.0) * batch / self.costs.plain(batch)
        seconds = self.costs.draft_step.at(rows) + target.at(verified + batch) - target.at(verified)
        return _YIELD * sum(kind.chance(scores[0]) for kind, scores in beams) > seconds * rate
