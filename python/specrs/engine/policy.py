"""Which tree to verify: depth and size by what passes cost (`costs`), and by what drafts have been worth so far.

Everything here is arithmetic on plain numbers. No choice made here can change a request's tokens: verification is
exact for every tree, so a bad choice costs time only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specrs.engine.costs import Costs

LOOK_BACK = 8  # tokens that a look back asks the head for
_RATE = 0.005  # added to an account by each plain round
_CAP = 4.0
_CREDIT = 1.5  # smallest rounds that an account pays after a look back at text that the head would have foretold, or at
# once where drafts of its kind have won
_MARGIN = 1.1  # by which the head's hits must beat what one draft node costs
_PRIOR = 4.0  # tokens that weigh as much as what is known of the kind
_COOL = 0.8  # temperature up to which sampling is near to greedy
_EXPLORED = 8  # where drafts of a kind lose, one request of so many is followed by the head


@dataclass(frozen=True)
class TreeChoice:
    """How many draft nodes to verify, and from which cumulative log-probability on."""

    nodes: int
    min_score: float
    expected: float  # tokens of the round, over the batch


@dataclass
class Kind:
    """What the engine has learnt of greedy requests, of those that sample at a low temperature, or at a high one.

    A node of draft probability p is taken to be accepted with probability p ** ``temper``: drafts of a greedy target
    are likelier to be accepted than they claim (about p ** 0.5 with the model in the package).
    """

    hits: float  # smoothed share of rounds whose first draft token was accepted
    worth: float | None = None  # smoothed plain rounds that the head won a request that it followed, once one has ended
    temper: float = 0.6
    gain: float = 1.5  # smoothed rate of speculative rounds over plain ones
    _requests: int = 0

    def opens(self, stake: float) -> bool:
        """Whether the head follows a new request: each, or few where it has been losing.

        Before any has ended, where a round that costs ``stake`` is likely to win.
        """
        self._requests += 1
        wins = self.hits > stake * _MARGIN if self.worth is None else self.worth > 0.0
        return wins or self._requests % _EXPLORED == 0

    def trusted(self) -> bool:
        """Whether requests have won so much by drafts that one may draft without a look back."""
        return self.worth is not None and self.worth > 1.0

    def ended(self, net: float) -> None:
        """The head won a request that it followed ``net`` plain rounds, or lost them (negative)."""
        before = 0.0 if self.worth is None else self.worth
        self.worth = before + 0.15 * (min(net, 8.0) - before)

    def foretells(self, hits: int) -> float:
        """Probability that the head foretells the next token, where a look back gave so many hits."""
        return (hits + _PRIOR * self.hits) / (LOOK_BACK + _PRIOR)

    def chance(self, score: float) -> float:
        """Probability that a node of this cumulative log-probability is accepted."""
        return math.exp(self.temper * score)

    def learn(self, scores: Sequence[float], accepted: int, gain: float) -> None:
        """Calibrate by a verified tree: its nodes' scores, the accepted ones, the round's rate over plain."""
        self.gain += 0.05 * (min(gain, 8.0) - self.gain)
        self.hits += 0.03 * ((accepted > 0) - self.hits)
        chances = [self.chance(s) for s in scores]
        slope = -sum(s * c for s, c in zip(scores, chances, strict=True))
        # A small step of Newton's method towards a temper whose chances sum to what was accepted.
        step = (sum(chances) - accepted) / max(slope, 0.5)
        self.temper = min(max(self.temper + 0.02 * min(max(step, -1.0), 1.0), 0.2), 2.0)


@dataclass
class SpeculationGate:
    """One request's account, in rounds of plain decoding: what it may still lose to drafts.

    A request of a kind whose drafts win drafts at once; the head looks back where they do not, or where this account
    is spent. Each plain round adds `_RATE`. A request that has decoded `LOOK_BACK` tokens plainly looks back once its
    account pays for that: in one pass, which costs less than one round that drafts, the head shows how many of these
    tokens it would have foretold. If they are enough, the account gets credit for a round, else it is emptied;
    if none, the head follows the request no further, and the rest costs what plain decoding costs. Each speculative
    round adds what it won, or takes what it lost, by modelled times. No round is drafted that could lose more than the
    account holds (`TreePolicy.limit`), and none at all while the account does not pay the smallest one.

    So after N plain rounds a request has lost at most ``start + _RATE * N`` rounds, and the credit of each look back
    that deceived, whatever the text; what it won before it may lose again, up to `_CAP`.
    """

    kind: Kind
    account: float
    follows: bool = True  # the head follows the request
    net: float = 0.0  # plain rounds that the head has won

    def plain_round(self) -> None:
        """A round without drafts."""
        self.account = min(self.account + _RATE, _CAP)

    def would_open(self, hits: int, stake: float) -> bool:
        """Whether a look back with so many hits opens the gate, where one draft node costs ``stake`` plain rounds."""
        return self.kind.foretells(hits) > stake * _MARGIN

    def looked_back(self, hits: int, stake: float, price: float) -> None:
        """A look back is done.

        Args:
            hits: of `LOOK_BACK` tokens, those that were the head's first choice.
            stake: plain rounds that one draft node costs.
            price: plain rounds that the look back took.
        """
        self.net -= price
        left, credit = self.account - price, _CREDIT * stake
        self.account = max(left, credit) if self.would_open(hits, stake) else min(left, 0.0)
        self.follows = hits > 0

    def spec_round(self, net: float) -> None:
        """A round with drafts that won ``net`` plain rounds, or lost them (negative)."""
        self.account = min(self.account + net, _CAP)
        self.net += net


@dataclass
class TreePolicy:
    """Picks depth and size of the trees of a batch round by round.

    Only modelled times enter, never the time of the round at hand, so that a stall of the machine decides nothing.
    """

    costs: Costs
    greedy: Kind = field(default_factory=lambda: Kind(hits=0.6))
    cool: Kind = field(default_factory=lambda: Kind(hits=0.55))
    hot: Kind = field(default_factory=lambda: Kind(hits=0.45))
    _level_yield: float = 0.75  # share of a level's chance that the next level keeps

    def kind(self, temperature: float) -> Kind:
        """Requests alike: the hotter they sample, the less a head foretells."""
        return self.greedy if temperature == 0 else self.cool if temperature <= _COOL else self.hot

    def gate(self, temperature: float) -> SpeculationGate:
        """The gate of a new request."""
        kind, stake = self.kind(temperature), self.stake(1, 1)
        if not kind.opens(stake):
            return SpeculationGate(kind, 0.0, follows=False)
        return SpeculationGate(kind, max(self.look_back(1), _CREDIT * stake if kind.trusted() else 0.0))

    def look_back(self, batch: int) -> float:
        """Plain rounds that a look back takes of a batch, which waits for it."""
        step, rows = self.costs.draft_step, LOOK_BACK + 1  # the pass has one row more, the root's
        seconds = self.costs.draft_extend.at(rows) + step.at(rows) - step.at(1)
        return seconds / self.costs.plain(batch) * batch

    def stake(self, batch: int, drafting: int) -> float:
        """Plain rounds that each of ``drafting`` requests loses by a round with one draft node each, all refused."""
        seconds = self.costs.drafting(batch, batch, 0) + self.costs.target.at(batch + drafting)
        return (seconds / self.costs.plain(batch) - 1.0) * batch / drafting

    def drafting(self, accounts: Sequence[float | None]) -> list[bool]:
        """Which requests of a batch draft: the most that can pay the smallest round, whose time they share.

        Args:
            accounts: of each request; ``None`` for one that cannot draft.
        """
        able = [account for account in accounts if account is not None]
        while able:
            stake = self.stake(len(accounts), len(able))
            left = [account for account in able if account >= stake]
            if len(left) == len(able):
                return [account is not None and account >= stake for account in accounts]
            able = left
        return [False] * len(accounts)

    def limit(self, batch: int, accounts: Sequence[float]) -> float:
        """Seconds that a round may take, so that none of the requests that draft can overdraw its account."""
        return self.costs.plain(batch) * (1.0 + min(accounts) * len(accounts) / batch)

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

    def choose(
        self, batch: int, nodes: Sequence[tuple[float, Kind]], drafting: float, limit: float = math.inf
    ) -> TreeChoice:
        """The number of draft nodes with the most expected tokens per second.

        Args:
            batch: requests, each with its root.
            nodes: cumulative log-probabilities of the usable candidates of all requests, descending, each with its
                request's kind.
            drafting: seconds of the round beside the target's pass.
            limit: seconds that the round may take.
        """
        best = TreeChoice(0, math.inf, float(batch))
        best_rate = batch / (drafting + self.costs.target.at(batch))
        expected = float(batch)
        for n, (score, kind) in enumerate(nodes, start=1):
            expected += kind.chance(score)
            seconds = drafting + self.costs.target.at(batch + n)
            rate = expected / seconds
            if rate > best_rate and seconds <= limit:
                best_rate, best = rate, TreeChoice(n, score, expected)
        return best
