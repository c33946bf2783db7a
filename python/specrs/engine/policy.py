"""Which tree to verify: depth and size by what passes cost (`costs`), and by what drafts have been worth so far.

Everything here is arithmetic on plain numbers. No choice made here can change a request's tokens: verification is
exact for every tree, so a bad choice costs time only.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from specrs._specrs import DraftNodes
from specrs.engine.costs import Costs

LOOK_BACK = 8  # tokens that a look back asks the head for
_SETTLED = 32  # tokens before the first look back: the head foretells a text's first ones worse than the later
ALLOWANCE = 0.011  # plain rounds that a request may lose to drafts, for each that it has taken so far
_LOAN = 0.003  # plain rounds that it may borrow beside that, for each that it is expected to take
_ADVANCE = 0.018  # the same of a kind whose drafts win; such a request has less to come from `ALLOWANCE`
_RATE = 0.005  # plain rounds that the engine may lose in the long run, for each that its requests took
_ENDOWMENT = 0.3  # plain rounds that a new engine may lose beside that
_CAP = 8.0  # of a bank
TRIES = 3.0  # rounds with drafts that a device's request may lose for its kind
_MOST = 32.0  # of a device's bank
_FREE = 5e-3  # seconds that a device's engine may lose until it knows what drafts bring
_LONGEST_WAIT = 128  # tokens; features that have waited for longer are written
_SHORTEST = LOOK_BACK  # tokens that must be left after a look back
_WON = 8.0, 24.0  # of an account: of what a request has won it may lose half again, or the less where that is more,
# and no more than the other
_CREDIT = 2.0  # smallest rounds that an account pays where a look back, or what others of its kind won, promises more
_PROMISE = 2.5  # plain rounds that a kind is taken to win after a look back, where one request could not try alone
_DOUBT = 1.5  # a look back is taken to cost so much more than its passes, until one has been measured
_DOZE = 16  # tokens that a request which waits lets pass at most, until it looks at its account again
_SETTLED_BY = 0.93  # of one round's time, what two must stay below: a source need not say the same again
_MARGIN = 1.1  # by which the head's hits must beat what one draft node costs
_PRIOR = 4.0  # tokens that weigh as much as what is known of the kind
_RECENT = 0.2  # weight of a round in what a request's drafts win
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
    least: float = -math.inf  # that `worth` falls to; from 0 on, one request that wins makes up for many that tried
    most: float = _CAP  # of the bank, and of what one request counts for
    prior: float | None = None  # `worth` once `barren` requests in a row have won nothing: other texts may have come
    barren: int = 0
    _won_nothing: int = 0  # requests in a row

    def trusted(self) -> bool:
        """Whether requests have won so much by drafts that one may draft without a look back."""
        return self.worth is not None and self.worth > 1.0

    def ended(self, tokens: int, net: float, loan: float = 0.0, prompt: float = 0.0, judged: bool = True) -> None:
        """A request ended after so many tokens; the head won it ``net`` plain rounds, or lost them (negative).

        Args:
            tokens: decoded.
            net: see above.
            loan: what it had taken from the bank.
            prompt: plain rounds that its prompt took.
            judged: whether that says what drafts are worth.
        """
        self.bank = min(self.bank + loan + _RATE * (prompt + tokens) + net, self.most)
        # Requests that end early are what a loan by length is too large for.
        self.length += (0.5 if tokens < self.length else 0.1) * (tokens - self.length)
        if net and judged:
            before = 0.0 if self.worth is None else self.worth
            self.worth = max(before + 0.15 * (min(net, self.most) - before), self.least)
        self._won_nothing = 0 if self.trusted() else self._won_nothing + 1
        if self.prior is not None and self._won_nothing >= self.barren:
            self.worth, self._won_nothing = self.prior, 0

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


def endow(kinds: Iterable[Kind], stake: float, plain: float) -> None:
    """Let requests of a device find out what drafts bring, where a round with drafts may lose ``stake`` plain rounds of
    so many seconds. These are so short that finding out takes no time that anybody sees, and a request that waits until
    it may try again pays more than on a host. One that wins may win tens of them, so it makes up for several."""
    for kind in kinds:
        kind.least, kind.most = 0.0, _MOST
        kind.bank = min(max(2 * TRIES * stake, _FREE / plain), kind.most)


class Step(enum.Enum):
    """What a request does of its next round."""

    DRAFT = "draft"
    LOOK_BACK = "look back"  # then it drafts, or waits
    WAIT = "wait"  # and decode plainly
    GIVE_UP = "give up"  # decode plainly to its end


@dataclass(frozen=True)
class Standing:
    """Where a request stands before a round.

    Attributes:
        produced: tokens so far.
        remaining: tokens that may still come.
        lag: tokens whose features wait for the head; ``None`` where it is ready to draft.
    """

    produced: int
    remaining: int
    lag: int | None


@dataclass
class SpeculationGate:
    """One request's account, in rounds of plain decoding: what it may lose to drafts.

    At any time that is `ALLOWANCE` of the rounds that plain decoding would have taken so far, its prompt included, and
    what it borrowed from the bank of its kind: no more than its expected length justifies. Where drafts of its kind
    win, it borrows its allowance in advance. To the bank, each request adds what it won and `_RATE` of its rounds, and
    from it takes what it lost. Whatever is done for drafts is paid from the account: the prompt's draft KV, a look back
    and the features that waited for it, a round that loses. Rounds that win add to it. Nothing is done that the account
    cannot pay, whatever the request's limit promises, and plain rounds cost what plain decoding costs. So a long
    request finds out for itself, and of short ones a few do for all.

    A request of a kind whose drafts win drafts at once, on what it borrowed or on credit. Another one decodes
    `_SETTLED` tokens plainly, waits until it can pay, and looks back: in one pass, which costs less than most rounds
    that draft, the head shows how many of the last `LOOK_BACK` tokens it would have foretold. If they are enough, the
    request drafts, on credit if need be, else it waits twice as long and looks again; if none, the head follows it no
    further. No round is drafted that could lose more than the account holds by modelled times (`TreePolicy.limit`).

    All requests of a batch wait for what is done for one of them, so it pays for all, and may borrow for all. A round
    with drafts is a matter of all who draft: each goes by its share, and drafts where enough others do. Where one
    request's look back shows that it would pay for all, the next ones of its kind draft at once, together.
    """

    kind: Kind
    loan: float = 0.0  # from the bank of its kind; what is negative is not lent, but missing from the bank
    prompt: float = 0.0  # plain rounds that its prompt takes
    advance: float = 0.0  # part of the loan that is its allowance, given before it has taken those rounds
    follows: bool = True  # the head follows the request
    net: float = 0.0  # plain rounds that the head has won
    balance: float = 0.0  # the same, of which winnings beyond `_WON` are forgotten
    credited: float = 0.0  # what it may lose beyond that
    patience: int = _SETTLED  # tokens to wait before it looks back
    refused: bool = False  # the last look back opened nothing, or what it opened has lost
    foretold: float = 0.0  # tokens that a round's first node is expected to win
    recent: float = 0.0  # smoothed tokens that rounds have won
    drafted: bool = False  # a round
    promised: bool = False  # that others of its kind would win, if it did not
    judged: bool = True  # what it paid says what drafts are worth, though it has not drafted
    before: SpeculationGate | None = None  # another account of the request's, whose losses count here too

    def account(self, produced: int) -> float:
        """Plain rounds that it may still lose, after so many tokens."""
        allowance = max(ALLOWANCE * (self.prompt + produced) - self.advance, 0.0)
        return self.loan + allowance + self.balance - self._lost_before

    @property
    def _lost_before(self) -> float:
        return 0.0 if self.before is None else max(-self.before.net, 0.0)

    @property
    def wins(self) -> float:
        """Tokens that a round is expected to win."""
        return max(self.foretold, self.recent)

    def credit(self, rounds: float, produced: int) -> None:
        """The account holds so much at least: what is known of the request, or of its kind, promises more."""
        more = max(rounds - self.account(produced), 0.0)
        self.balance += more
        self.credited += more

    def borrow(self, rounds: float) -> None:
        """Take so much more from the bank of its kind, where that has it and this account owes it nothing."""
        if 0.0 < rounds <= self.kind.bank and self.loan >= 0.0:
            self.kind.bank -= rounds
            self.loan += rounds

    def pay(self, rounds: float) -> None:
        """Something that drafts need took so many plain rounds."""
        self.balance -= rounds
        self.net -= rounds

    def promise(self) -> None:
        """A look back showed what requests would win if all of a batch drafted; the next ones of the kind may try."""
        self.kind.worth = max(self.kind.worth or 0.0, _PROMISE)
        self.promised = True

    def end(self, tokens: int) -> None:
        """The request has ended after so many tokens; its kind learns of it."""
        judged = self.drafted or (self.judged and not self.promised)
        self.kind.ended(tokens, self.net, max(self.loan, 0.0), self.prompt, judged)

    def decline(self) -> None:
        """The head does not follow the request from its beginning."""
        self.kind.bank += max(self.loan, 0.0)
        self.follows, self.loan = False, 0.0

    def refuse(self) -> None:
        """Wait longer than before, and look back before drafting again."""
        self.refused = True
        self.wait()

    def wait(self) -> None:
        """Wait longer before the next look back: there was nobody to share a round with."""
        self.patience = min(2 * self.patience, _LONGEST_WAIT)

    def would_open(self, hits: int, stake: float) -> bool:
        """Whether a look back with so many hits opens the gate, where one draft node costs ``stake`` plain rounds."""
        return self.kind.foretells(hits) > stake * _MARGIN

    def looked_back(self, hits: int, stake: float, produced: int) -> bool:
        """A look back is done; whether the request drafts now.

        Args:
            hits: of `LOOK_BACK` tokens, those that were the head's first choice.
            stake: plain rounds that one draft node costs.
            produced: tokens so far.
        """
        opens = self.would_open(hits, stake)
        self.follows, self.foretold = hits > 0, self.kind.foretells(hits)
        if opens:
            self.credit(_CREDIT * stake, produced)
            self.refused, self.patience, self.recent = False, _SETTLED, 0.0
        else:
            self.refuse()
        return opens

    def spec_round(self, net: float, accepted: int = 0) -> None:
        """A round with drafts that won ``net`` plain rounds, or lost them (negative)."""
        self.net += net
        least, most = _WON
        self.balance = min(self.balance + net, max(min(self.net / 2, most), least) + self._lost_before)
        self.drafted = True
        self.recent += _RECENT * (accepted - self.recent)


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

    def gate(self, temperature: float, tokens: int, prompt: int, batch: int = 1) -> SpeculationGate:
        """The gate of a new request.

        Args:
            temperature: of its sampling.
            tokens: its limit.
            prompt: tokens of its prompt that the target runs over.
            batch: requests that run with it.
        """
        kind, rounds = self.kind(temperature), self.prefilling(prompt, 1)
        # In a batch, one request tries for all, and all wait.
        share = _ADVANCE if kind.trusted() or batch > 1 else _LOAN
        most = share * (rounds + min(tokens, kind.length)) * batch + self.waiting(prompt, batch)
        loan = min(kind.bank, most)
        kind.bank -= max(loan, 0.0)  # requests that run at once do not take the same rounds
        return SpeculationGate(
            kind, loan, rounds, max(loan, 0.0) if kind.trusted() else 0.0, foretold=kind.foretells(LOOK_BACK)
        )

    def follows(self, gate: SpeculationGate, batch: int, at: Standing, entries: int, again: int) -> bool:
        """Whether the head follows a request from its admission on.

        Args:
            gate: of the request.
            batch: requests that run with it.
            at: where it stands; nothing waits.
            entries: draft KV to write before it decodes.
            again: positions that the target would have to run over only for those.
        """
        if gate.kind.trusted() and not gate.refused and gate.loan >= 0.0:  # a bank that is empty gives no credit
            gate.credit(_CREDIT * self.stake(batch, batch), at.produced)
        left = gate.account(at.produced) - self.waiting(entries, batch) - self.prefilling(again, batch)
        return left >= 0.0 and not self._too_late(gate, batch, at, left)

    def step(self, gate: SpeculationGate, batch: int, at: Standing, reach: Callable[[], int]) -> Step:
        """What a request that the head follows does next.

        Args:
            gate: of the request.
            batch: requests of the round. A round's price is theirs together, so each goes by its share: alone, none of
                them might ever try what pays for all. `drafting` knows how many do.
            at: where it stands.
            reach: counts the tokens that the head could have drafted at all, of the last `LOOK_BACK`.
        """
        stake, left, lag = self.stake(batch, batch), gate.account(at.produced), at.lag or 0
        if at.lag is None and not gate.refused:
            if left >= stake:
                return Step.DRAFT
            gate.refuse()
        early = self.early(gate, lag)
        if early and left - self.waiting(lag, batch) >= stake:
            hits = LOOK_BACK if at.lag is None else reach()
            if gate.would_open(hits, stake):
                gate.foretold = gate.kind.foretells(hits)
                return Step.DRAFT
        if self._too_late(gate, batch, at, left) or self.following(batch) > ALLOWANCE:
            return Step.GIVE_UP
        if early or lag <= gate.patience or self._short(gate, batch, lag, left) > 0.0:
            return Step.WAIT
        return Step.LOOK_BACK

    def early(self, gate: SpeculationGate, lag: int) -> bool:
        """Whether a request whose features of ``lag`` tokens wait may draft without a look back."""
        return gate.kind.trusted() and not gate.refused and lag <= gate.patience

    def _short(self, gate: SpeculationGate, batch: int, lag: int, left: float) -> float:
        """Plain rounds that an account of ``left`` lacks for the way to its first round with drafts, and that."""
        way = self.waiting(lag, batch) + (0.0 if self.early(gate, lag) else self.look_back(batch))
        return way + self.stake(batch, batch) - left

    def doze(self, gate: SpeculationGate, batch: int, at: Standing) -> int:
        """Tokens that a request which was told to wait lets pass, until asking again can bring anything else.

        Most rounds of a request whose drafts do not win are such: they must not notice that it might draft.
        """
        return int(min(self._wait(gate, batch, at, gate.account(at.produced)), _DOZE))

    def _too_late(self, gate: SpeculationGate, batch: int, at: Standing, left: float) -> bool:
        """Whether a request will end before drafts can win anything."""
        wait = self._wait(gate, batch, at, left)
        return wait > 0.0 and at.remaining < wait + _SHORTEST

    def _wait(self, gate: SpeculationGate, batch: int, at: Standing, left: float) -> float:
        """Tokens until a request whose account has ``left`` has waited for long enough, and can pay its way."""
        lag = at.lag or 0
        short, each = self._short(gate, batch, lag, left), ALLOWANCE - self.waiting(1, batch) - self.following(batch)
        wait = 0.0 if short <= 0.0 else short / each if each > 0.0 else math.inf
        return wait if self.early(gate, lag) else max(wait, gate.patience - lag)

    def following(self, batch: int) -> float:
        """Plain rounds that each round without drafts takes longer of each request that the head follows, beside the
        draft KV of its tokens."""
        return 0.0  # a host's features lie where they are

    def waiting(self, tokens: int, batch: int) -> float:
        """Plain rounds that the draft KV of so many tokens takes of a batch, which waits for it."""
        extend, (few, many) = self.costs.draft_extend, (8, 64)
        return (extend.at(many) - extend.at(few)) / (many - few) * tokens / self.costs.plain(batch) * batch

    def prefilling(self, tokens: int, batch: int) -> float:
        """Plain rounds that so many more tokens of a prompt take of a batch, which waits for it."""
        target, (few, many) = self.costs.target, (8, 64)
        return (target.at(many) - target.at(few)) / (many - few) * tokens / self.costs.plain(batch) * batch

    def look_back(self, batch: int) -> float:
        """Plain rounds that a look back takes of a batch, which waits for it."""
        return self._look_back_passes() * self.dearer / self.costs.plain(batch) * batch

    def looked_back(self, batch: int, lag: int, seconds: float) -> float:
        """A look back took so long, the draft KV of ``lag`` tokens included; the plain rounds that it took."""
        passes = seconds - self.waiting(lag, 1) * self.costs.plain(1)
        self.dearer += 0.3 * (min(max(passes / self._look_back_passes(), 1.0), 4.0) - self.dearer)
        return self.look_back(batch) + self.waiting(lag, batch)

    def _look_back_passes(self) -> float:
        step, rows = self.costs.draft_step, LOOK_BACK + 1  # the pass has one row more, the root's
        return self.costs.draft_extend.at(rows) + step.at(rows) - step.at(1)

    def stake(self, batch: int, drafting: int) -> float:
        """Plain rounds that each of ``drafting`` requests loses by a round with one draft node each, all refused."""
        seconds = self.costs.drafting(batch, batch, 0) + self.costs.target.at(batch + drafting)
        return (seconds / self.costs.plain(batch) - 1.0) * batch / drafting

    def drafting(self, able: Sequence[tuple[float, float] | None]) -> list[bool]:
        """Which requests of a batch draft: those that together are expected to win most over what the round costs.

        They share the time of the round that all others wait for, so one that drafts alone may lose where many win.

        Args:
            able: of each request, its account and the tokens that its drafts are expected to win; ``None`` for one that
                cannot draft.
        """
        most, best = 0.0, set[int]()
        asked = [(wins, account, i) for i, (account, wins) in ((i, a) for i, a in enumerate(able) if a is not None)]
        asked.sort(key=lambda one: -one[0])
        for n in range(1, len(asked) + 1):
            stake = self.stake(len(able), n)
            paying = [(wins, i) for wins, account, i in asked if account >= stake][:n]
            won = sum(wins for wins, _ in paying) - n * stake
            if len(paying) == n and won > most:
                most, best = won, {i for _, i in paying}
        return [i in best for i in range(len(able))]

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

    def choose(self, batch: int, nodes: DraftNodes, drafting: float, limit: float = math.inf) -> TreeChoice:
        """The number of draft nodes with the most expected tokens per second.

        Args:
            batch: requests, each with its root.
            nodes: usable candidates of all requests, likeliest first.
            drafting: seconds of the round beside the target's pass.
            limit: seconds that the round may take.
        """
        return TreeChoice(*nodes.choose(batch, self.costs.target.table, drafting, limit))

    def settle(self, choice: TreeChoice, nodes: DraftNodes, drafting: float) -> TreeChoice:
        """The choice for one request, or fewer nodes where two rounds bring its tokens in less time.

        A sure chain below a doubtful token is verified for nothing where that is refused. A round with the nodes
        before it draws that token anyway, and where it is the one that was foretold, the next round verifies the rest:
        the same expected tokens, at the cost of the first round and the chance of the second.

        Args:
            choice: of ``choose``, from ``nodes``.
            nodes: of a request alone, as there; of a source that will rather say the same again.
            drafting: as there.
        """
        chosen = choice.nodes, choice.min_score, choice.expected
        table, plain = self.costs.target.table, self.costs.plain(1)
        return TreeChoice(*nodes.settle(chosen, table, drafting, plain, _SETTLED_BY))


def nodes_of(scored: Sequence[tuple[float, Kind]]) -> DraftNodes:
    """Nodes by their cumulative log-probabilities, each with its request's kind; in any order."""
    best = sorted(scored, key=lambda node: -node[0])
    return DraftNodes.scored([score for score, _ in best], [kind.temper for _, kind in best])
