"""Whether and how far a batch drafts: always as far as a given tree reaches, or as a cost model advises.

The runner asks, and tells what came of it. Nothing decided here can change a token.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, ParamSpec, Protocol, TypeVar

from torch.utils.dlpack import from_dlpack

from specrs._specrs import DraftBeams, TreeBatch
from specrs.engine.drafting.budget import Account
from specrs.engine.drafting.chooser import Kind, TreePolicy, nodes_of
from specrs.engine.drafting.costs import PLAIN, SPECULATIVE, Costs, PassCost
from specrs.engine.request.batch import Batch, Passed
from specrs.engine.request.request import Request

PassKind = Literal["target", "draft_step", "draft_extend"]

_OBSERVED = 4  # of so many plain rounds, one is timed;
_SETTLED, _SELDOM = 32, 16  # of so many, once there have been this many without drafts between them

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Outlook(Protocol):
    """What other sources than the head propose for a round.

    Attributes:
        rate: tokens a second that a round of their trees alone is expected to yield.
        most: nodes of a tree at most, root included.
        pays: whether that is better than plain decoding.
    """

    rate: float
    most: int
    pays: bool


class GivenTree:
    """Every request that the head follows drafts, and every node is verified.

    Attributes:
        given: whether depth and size of trees are known before a round, so that nobody asks during it.
        merges: whether the host drafts step by step where other sources draft too, and makes one tree of all; else a
            round has either, or a device makes one tree of both (`unites`).
        costs: of passes, by which nodes of a merged tree are chosen; ``None``: all are verified.
        tail: as `TreePolicy.tail`.
    """

    tail: int | None = None
    given = True
    merges = True
    costs: Costs | None = None

    def begins(self, request: Request) -> int:
        """First position that the head reads of a request where it begins now, a multiple of the page size."""
        return 0

    def follows(self, request: Request) -> bool:
        """Whether the head follows a request that was just admitted, perhaps not for the first time.

        Its ``committed`` positions came from the prefix cache, with draft KV of the first ``draft_shared``.
        """
        return True

    def prefilled(self, batch: Batch, counts: Sequence[int]) -> None:
        """A chunk of prefill ended, of so many positions of each request. The head has written what draft KV it will of
        these."""

    def catches_up(self, request: Request, batch: int) -> bool:
        """Whether the draft KV of features that have waited for long is written, in a batch of so many requests."""
        return True

    def completes(self, request: Request) -> bool:
        """Whether a request that has ended writes its last draft KV, for a later one that goes on from there."""
        return False

    def awake(self, batch: Batch) -> bool:
        """Whether any request may draft in the next round, so that `drafting` is worth asking."""
        return any(r.followed and r.max_depth > 0 for r in batch)

    def drafting(self, batch: Batch) -> list[bool]:
        """Which requests' next round drafts."""
        return [r.followed for r in batch]

    def cap(self, batch: Batch, drafting: Sequence[bool]) -> int:
        """Levels that the round drafts at most, where trees are `given`."""
        return sys.maxsize

    def limit(self, batch: Batch, drafting: Sequence[bool]) -> float:
        """Seconds that the round may take."""
        return math.inf

    def rate(self, batch: Batch, drafting: Sequence[bool]) -> float:
        """Tokens a second that a round with the head's drafts is expected to yield."""
        return math.inf

    def prefers_others(self, batch: Batch, drafting: Sequence[bool], others: Outlook) -> bool:
        """Whether tokens come faster by the drafts of other sources without the head's passes."""
        return others.pays and others.rate > self.rate(batch, drafting)

    def unites(self, batch: Batch, drafting: Sequence[bool], others: Outlook) -> bool:
        """Whether they come faster by the head's drafts with those of other sources than by the head's alone, in rounds
        whose trees the device makes."""
        return True

    def deepen(self, batch: Batch, beams: DraftBeams, depths: Sequence[int], levels: int, limit: float) -> bool:
        """Whether another draft step pays."""
        return True

    def least_score(self, batch: Batch, trees: TreeBatch, steps: int, limit: float) -> float | None:
        """Cumulative log-probability from which on to verify nodes that ``steps`` draft steps gave; ``None``: all."""
        return None

    def timed(self, kind: PassKind, rows: int, run: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a pass over so many rows."""
        return run(*args, **kwargs)

    def stays(self, batch: Batch, drafting: Sequence[bool]) -> bool:
        """Whether a round right behind the present one, of which nothing is known yet, drafts as that one does."""
        return True

    @property
    def cold(self) -> bool:
        """Whether the last round took longer than others like it will."""
        return False

    def begin(self, speculative: bool, since: float | None = None) -> None:
        """A round begins, or collecting it does. since: when, by `time.perf_counter`, where it runs behind another one
        or somebody was asked for it; else now."""

    def plain_round(self, batch: Batch) -> None:
        """A round without drafts ended."""

    def spec_round(
        self,
        passed: Sequence[Passed],
        trees: Callable[[], TreeBatch],
        drafting: Sequence[bool],
        steps: int,
        shares: Sequence[Share] | None = None,
    ) -> None:
        """A round with drafts ended; ``trees`` gives those that were verified.

        drafting: for whom the head drafted; empty where the host made all trees. shares: of each request, the head's
        part where other sources drafted too.
        """

    def forget(self, request: Request) -> None:
        """The request has ended."""


@dataclass(frozen=True)
class Share:
    """The head's part of a request's tree.

    Attributes:
        scores: that it gave its nodes, best first.
        accepted: of its drafts.
        others: of the other sources' drafts, where a device has united both.
    """

    scores: list[float]
    accepted: int
    others: int = 0


class AdaptiveTree(GivenTree):
    """What `TreePolicy` makes of measured passes and of each request's account."""

    given = False

    def __init__(self, policy: TreePolicy, topk: int, page: int = 1) -> None:
        self.policy, self.costs = policy, policy.costs
        self._topk, self._page = topk, page
        self._accounts: dict[int, Account] = {}  # by request, from its first admission to its end
        self._again: dict[int, int] = {}  # by request, positions of its prefill that only the head needs
        self._wakes: dict[int, float] = {}  # by request, the number of its tokens from which on it may pay for drafts
        self._batch = 1  # of the last round
        self._caught_up = 0.0  # seconds of this round, for features that had waited
        self._plain_rounds = self._in_a_row = 0  # since ever, since the last one with drafts
        self._observing = True  # passes of this round are timed
        self._started = self._in_passes = 0.0  # seconds

    @property
    def tail(self) -> int | None:  # type: ignore[override]
        return self.policy.tail

    def begins(self, request: Request) -> int:
        return 0 if self.tail is None else max(request.committed - self.tail, 0) // self._page * self._page

    def follows(self, request: Request) -> bool:
        account = self.account(request)
        self._wakes.pop(request.request_id, None)
        again = request.committed - request.draft_shared
        entries = request.prefill_target - request.draft_shared
        follows = self.policy.follows(account, self._batch, request.remaining, entries, again)
        if follows:
            self._again[request.request_id] = again
        return follows

    def account(self, request: Request) -> Account:
        """What drafts may lose a request, whoever makes them."""
        account = self._accounts.get(request.request_id)
        if account is None:
            prompt = request.prefill_target - request.committed
            account = self.policy.account(request.params.temperature, prompt, self._batch, request.remaining)
            self._accounts[request.request_id] = account
        return account

    def prefilled(self, batch: Batch, counts: Sequence[int]) -> None:
        together = max(sum(r.followed and r.ready for r in batch), 1)
        for r, n in zip(batch, counts, strict=True):
            if r.followed and self.tail is not None:
                if r.ready:  # at once, for all that may come
                    price = self.policy.entering(r.draft_valid - r.draft_from, self._batch, together)
                    self.account(r).engine.pay(price / self._batch)
            elif r.followed:
                left = self._again.pop(r.request_id, 0)
                again = min(left, n)
                self._again[r.request_id] = left - again
                price = self.policy.waiting(n, self._batch) + self.policy.prefilling(again, self._batch)
                self.account(r).engine.pay(price / self._batch)  # it is paid at once, for all that may come

    def awake(self, batch: Batch) -> bool:
        for r in batch.requests:
            if r.followed and len(r.tokens) >= self._wakes.get(r.request_id, 0) and r.max_depth > 0:
                return True  # where one is, all are asked: what one alone cannot pay, several may
        return False

    def drafting(self, batch: Batch) -> list[bool]:
        policy, size = self.policy, len(batch)
        rooms = [self._room(r, size) if r.followed else -math.inf for r in batch]
        drafting = policy.drafting(rooms)
        self._caught_up = 0.0
        for r, drafts in zip(batch, drafting, strict=True):
            if drafts and r.root is None:
                lag = self._lag(r)
                self.account(r).pay(policy.resuming(lag, size), size)
                self._caught_up += policy.costs.plain(1) * policy.resuming(lag, 1)
        return drafting

    def _lag(self, r: Request) -> int | None:
        """Features that the head has to run over before the request can draft; ``None`` where it drafted just now."""
        if r.root is not None:
            return None
        return min(r.lag, r.committed - self.begins(r))

    def _room(self, r: Request, batch: int) -> float:
        """What a request may lose to a round with drafts; one that will not pay for any again gives them up."""
        account, lag = self.account(r), self._lag(r)
        wait = self.policy.wait(account, batch, r.produced, lag)
        if wait == 0.0:
            resuming = self.policy.resuming(lag, batch)
            return account.room(r.produced, batch, resuming + self.policy.least_loss(batch, batch)) - resuming
        if wait >= r.remaining / 2:
            r.give_up_drafts(r.draft_valid)
        self._wakes[r.request_id] = len(r.tokens) + wait
        return -math.inf

    def catches_up(self, request: Request, batch: int) -> bool:
        account, price = self.account(request), self.policy.waiting(request.lag - 1, batch)
        if account.room(request.produced, batch) < price:
            return False
        account.pay(price, batch)
        return True

    def completes(self, request: Request) -> bool:
        account, costs = self.account(request), self.policy.costs
        price = costs.draft_extend.at(request.lag) / costs.plain(self._batch) * self._batch
        if account.won < price:
            return False
        account.pay(price, self._batch)
        return True

    def limit(self, batch: Batch, drafting: Sequence[bool]) -> float:
        size = len(batch)
        rooms = [self.account(r).room(r.produced, size) for r, d in zip(batch, drafting, strict=True) if d]
        return self.policy.limit(size, rooms)

    def rate(self, batch: Batch, drafting: Sequence[bool]) -> float:
        gains = [self.kind(r).gain for r, drafts in zip(batch, drafting, strict=True) if drafts]
        return sum(gains) / len(gains) * len(batch) / self.policy.costs.plain(len(batch))

    def kind(self, request: Request) -> Kind:
        """What is known of the head's drafts for such requests."""
        return self.policy.kind(request.params.temperature)

    def deepen(self, batch: Batch, beams: DraftBeams, depths: Sequence[int], levels: int, limit: float) -> bool:
        each = zip(batch, beams.scores(), depths, strict=True)
        live = [(self.kind(r), scores) for r, scores, depth in each if depth > levels]
        return self.policy.deepen(len(batch), levels, live, limit)

    def least_score(self, batch: Batch, trees: TreeBatch, steps: int, limit: float) -> float | None:
        scores = _draft_scores(trees)
        nodes = [(s, self.kind(r)) for r, some in zip(batch, scores, strict=True) for s in some]
        drafting = self.policy.costs.drafting(len(batch), len(batch) * self._topk, steps)
        choice = self.policy.choose(len(batch), nodes_of(nodes), drafting, limit)
        return choice.min_score if choice.nodes < len(nodes) else None

    def timed(self, kind: PassKind, rows: int, run: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not self._observing:
            return run(*args, **kwargs)
        started = time.perf_counter()
        result = run(*args, **kwargs)
        seconds = time.perf_counter() - started
        cost: PassCost = getattr(self.policy.costs, kind)
        cost.observe(rows, seconds)
        self._in_passes += seconds
        return result

    def begin(self, speculative: bool, since: float | None = None) -> None:
        if speculative:
            self._observing, self._in_a_row = True, 0
        else:
            self._plain_rounds += 1
            self._in_a_row += 1
            every = _OBSERVED if self._in_a_row < _SETTLED else _SELDOM
            self._observing = self._plain_rounds % every == 0
            if not self._observing:
                return  # nobody asks when it began
        self._started, self._in_passes = time.perf_counter(), 0.0

    def plain_round(self, batch: Batch) -> None:
        if self._observing:
            self._observe_overhead(PLAIN)
        self._batch = len(batch)

    def spec_round(
        self,
        passed: Sequence[Passed],
        trees: Callable[[], TreeBatch],
        drafting: Sequence[bool],
        steps: int,
        shares: Sequence[Share] | None = None,
    ) -> None:
        self._observe_overhead(SPECULATIVE)
        if any(p.request.error is not None for p in passed) or not any(drafting):
            return  # a walk cut short says nothing of drafts; and those who drafted may have ended rounds ago
        verified = trees()
        self._batch = len(passed)
        batch, drawn, costs = len(passed), sum(len(p.tokens) for p in passed), self.policy.costs
        seconds = costs.drafting(batch, batch * self._topk, steps) + costs.target.at(sum(verified.sizes))
        cost = seconds / costs.plain(batch)  # in rounds of plain decoding
        took = self._charged(seconds)
        self._caught_up = 0.0  # before this round, not before those behind it
        if shares is None:
            each = zip(_draft_scores(verified), passed, strict=True)
            shares = [Share(scores, len(p.tokens) - 1) for scores, p in each]
        drew = [(p, share) for p, share, drafts in zip(passed, shares, drafting, strict=True) if drafts]
        for p, share in drew:
            self.kind(p.request).learn(share.scores, share.accepted, drawn / batch / cost)
        wins = [min(p.committed.kept - 1, share.accepted) for p, share in drew]  # what came after a stop won nothing
        verify = sum(len(share.scores) > 0 for _, share in drew)
        for (p, _), won in zip(drew, self.policy.won(batch, verify, took, wins), strict=True):
            self.account(p.request).pay(-won, batch)

    def _charged(self, seconds: float) -> float:
        """What accounts pay for a round that is modelled to take so long: the time that it did take. On a machine that
        throttles, passes cost half or twice what is modelled."""
        return min(max(self._elapsed() - self._caught_up, seconds / 2), 2 * seconds)

    def _elapsed(self) -> float:
        """Seconds of the round."""
        return time.perf_counter() - self._started

    def _observe_overhead(self, kind: int) -> None:
        self.policy.costs.overhead.observe(kind, time.perf_counter() - self._started - self._in_passes)

    def forget(self, request: Request) -> None:
        account = self._accounts.pop(request.request_id, None)
        self._again.pop(request.request_id, None)
        self._wakes.pop(request.request_id, None)
        if account is not None:
            account.room(request.produced, self._batch)


def _draft_scores(trees: TreeBatch) -> list[list[float]]:
    """Of each request, its draft nodes' scores, best first."""
    scores: list[float] = from_dlpack(trees.scores).tolist()
    each, first = [], 0
    for size in trees.sizes:
        each.append(sorted(scores[first + 1 : first + size], reverse=True))  # without its root, whose score is 0
        first += size
    return each
