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
_SETTLED = 32  # tokens before the first look back: the head foretells a text's first ones worse than the later
_ALLOWANCE = 0.009  # plain rounds, for each token that a request is expected to decode, that it may lose to drafts
_RATE = 0.005  # plain rounds, for each token, that the engine may lose in the long run
_ENDOWMENT = 0.3  # plain rounds that a new engine may lose beside that
_CAP = 4.0  # of a bank
_LONGEST_WAIT = 128  # tokens; features that have waited for longer are written
_SHORTEST = LOOK_BACK  # tokens that must be left after a look back
_WON = 8.0  # of an account: what a request has won it may lose again, up to this
_CREDIT = 2.0  # smallest rounds that an account pays after a look back at text that the head would have foretold
_DOUBT = 1.5  # a look back is taken to cost so much more than its passes, until one has been measured
_MARGIN = 1.1  # by which the head's hits must beat what one draft node costs
_PRIOR = 4.0  # tokens that weigh as much as what is known of the kind
_COOL = 0.8  # temperature up to which sampling is near to greedy


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
    bank: float = _ENDOWMENT  # plain rounds that the engine may lose to requests of this kind
    length: float = 160.0  # smoothed tokens of its requests

    def trusted(self) -> bool:
        """Whether requests have won so much by drafts that one may draft without a look back."""
        return self.worth is not None and self.worth > 1.0

    def ended(self, tokens: int, net: float, loan: float = 0.0) -> None:
        """A request ended after so many tokens; the head won it ``net`` plain rounds, or lost them (negative).

        loan: what it had taken from the bank.
        """
        self.bank = min(self.bank + loan + _RATE * tokens + net, _CAP)
        # Requests that end early are what an allowance by length is too large for.
        self.length += (0.5 if tokens < self.length else 0.1) * (tokens - self.length)
        if net:  # the head had a say
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

    It starts from what the request's length allows (`_ALLOWANCE`) and from the bank of its kind, to which each request
    adds what it won and `_RATE` for each of its tokens, and from which it takes what it lost. Whatever is done for
    drafts is paid from it: the prompt's draft KV, a look back, the features that wait for one, a round that loses.
    Rounds that win add to it. The head follows the request as long as it can pay what comes next, and the rest costs
    what plain decoding costs. So a long request finds out for itself, and of short ones a few do for all.

    A request of a kind whose drafts win drafts at once. Another one decodes `_SETTLED` tokens plainly, and then looks
    back: in one pass, which costs less than most rounds that draft, the head shows how many of the last `LOOK_BACK`
    tokens it would have foretold. If they are enough, the request drafts, on credit if need be, else it waits twice as
    long and looks again; if none, the head follows it no further. No round is drafted that could lose more than the
    account holds by modelled times (`TreePolicy.limit`).
    """

    kind: Kind
    account: float
    follows: bool = True  # the head follows the request
    net: float = 0.0  # plain rounds that the head has won
    patience: int = _SETTLED  # tokens to wait before it looks back
    refused: bool = False  # the last look back opened nothing
    loan: float = 0.0  # from the bank of its kind

    def pay(self, rounds: float) -> None:
        """Something that drafts need took so many plain rounds."""
        self.account -= rounds
        self.net -= rounds

    def would_open(self, hits: int, stake: float) -> bool:
        """Whether a look back with so many hits opens the gate, where one draft node costs ``stake`` plain rounds."""
        return self.kind.foretells(hits) > stake * _MARGIN

    def looked_back(self, hits: int, stake: float) -> bool:
        """A look back is done; whether the request drafts now.

        Args:
            hits: of `LOOK_BACK` tokens, those that were the head's first choice.
            stake: plain rounds that one draft node costs.
        """
        opens = self.would_open(hits, stake)
        self.follows = hits > 0
        if opens:
            self.account = max(self.account, _CREDIT * stake)
        self.refused = not opens
        self.patience = _SETTLED if opens else min(2 * self.patience, _LONGEST_WAIT)
        return opens

    def spec_round(self, net: float) -> None:
        """A round with drafts that won ``net`` plain rounds, or lost them (negative)."""
        self.account = min(self.account + net, _WON)
        self.net += net


@dataclass
class TreePolicy:
    """Picks depth and size of the trees of a batch round by round.

    Only modelled times pick a tree, never the time of the round at hand: a stall of the machine decides nothing.
    Accounts are charged the time that a round took, between half and twice what is modelled.

    Attributes:
        dearer: smoothed seconds of looks back over those of their passes.
    """

    costs: Costs
    greedy: Kind = field(default_factory=lambda: Kind(hits=0.6))
    cool: Kind = field(default_factory=lambda: Kind(hits=0.55))
    hot: Kind = field(default_factory=lambda: Kind(hits=0.45))
    dearer: float = _DOUBT
    _level_yield: float = 0.75  # share of a level's chance that the next level keeps

    def kind(self, temperature: float) -> Kind:
        """Requests alike: the hotter they sample, the less a head foretells."""
        return self.greedy if temperature == 0 else self.cool if temperature <= _COOL else self.hot

    def gate(self, temperature: float, tokens: int, prompt: int) -> SpeculationGate:
        """The gate of a new request.

        Args:
            temperature: of its sampling.
            tokens: its limit.
            prompt: entries of draft KV that following it takes at once.
        """
        kind = self.kind(temperature)
        own = _ALLOWANCE * min(tokens, kind.length)
        loan = min(kind.bank, own)
        gate = SpeculationGate(kind, own + loan, loan=max(loan, 0.0))
        gate.pay(self.waiting(prompt, 1))
        if gate.account < self.needed(gate, 1, 0) or self.too_late(gate, 0, tokens):
            return SpeculationGate(kind, 0.0, follows=False)
        kind.bank -= gate.loan  # requests that run at once do not take the same rounds
        return gate

    def early(self, gate: SpeculationGate, lag: int) -> bool:
        """Whether a request whose features of ``lag`` tokens wait may draft without a look back."""
        return gate.kind.trusted() and not gate.refused and lag <= gate.patience

    def too_late(self, gate: SpeculationGate, lag: int, remaining: int) -> bool:
        """Whether a request with so many tokens to come would look back too late for drafts to win anything."""
        return not self.early(gate, lag) and remaining < max(gate.patience - lag, 0) + _SHORTEST

    def needed(self, gate: SpeculationGate, batch: int, lag: int) -> float:
        """What an account must hold so that the head goes on following its request, which decodes plainly and whose
        features of ``lag`` tokens wait."""
        stake = self.stake(1, 1)
        if self.early(gate, lag):
            return stake
        return stake + self.look_back(batch) + self.waiting(max(gate.patience - lag, 0), batch)

    def waiting(self, tokens: int, batch: int) -> float:
        """Plain rounds that the draft KV of so many tokens takes of a batch, which waits for it."""
        extend, (few, many) = self.costs.draft_extend, (8, 64)
        return (extend.at(many) - extend.at(few)) / (many - few) * tokens / self.costs.plain(batch) * batch

    def look_back(self, batch: int) -> float:
        """Plain rounds that a look back takes of a batch, which waits for it."""
        return self._look_back_passes() * self.dearer / self.costs.plain(batch) * batch

    def looked_back(self, batch: int, lag: int, seconds: float) -> float:
        """A look back took so long, the draft KV of ``lag`` tokens included; the plain rounds that it took."""
        passes = seconds - self.waiting(lag, 1) * self.costs.plain(1)
        self.dearer += 0.3 * (min(max(passes / self._look_back_passes(), 1.0), 4.0) - self.dearer)
        return self.look_back(batch)

    def _look_back_passes(self) -> float:
        step, rows = self.costs.draft_step, LOOK_BACK + 1  # the pass has one row more, the root's
        return self.costs.draft_extend.at(rows) + step.at(rows) - step.at(1)

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
