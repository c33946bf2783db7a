"""Whether and how far a batch drafts: always as far as a given tree reaches, or as a cost model advises.

The runner asks, and tells what came of it. Nothing decided here can change a token.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal, ParamSpec, Protocol, TypeVar

from torch.utils.dlpack import from_dlpack

from specrs._specrs import DraftBeams, TreeBatch
from specrs.engine.batch import Batch, Passed
from specrs.engine.costs import PLAIN, SPECULATIVE, PassCost
from specrs.engine.policy import SpeculationGate, TreePolicy
from specrs.engine.request import Request

PassKind = Literal["target", "draft_step", "draft_extend"]

_OBSERVED = 4  # of so many plain rounds, one is timed

_P = ParamSpec("_P")
_T = TypeVar("_T")


class LooksBack(Protocol):
    """What is asked of the head's passes."""

    def reach(self, request: Request) -> int:
        """Of a request's last `LOOK_BACK` tokens, those that the head could have drafted at all."""

    def look_back(self, request: Request) -> int:
        """Bring a request's drafts up to date; of its last `LOOK_BACK` tokens, the head's first choices."""


class GivenTree:
    """Every request that the head follows drafts, and every node is verified.

    Attributes:
        given: whether depth and size of trees are known before a round, so that nobody asks during it.
    """

    given = True

    def follows(self, request: Request) -> bool:
        """Whether the head follows a request that was just admitted."""
        return True

    def drafting(self, batch: Batch, drafter: LooksBack) -> list[bool]:
        """Which requests' next round drafts."""
        return [r.followed for r in batch]

    def cap(self, batch: Batch, drafting: Sequence[bool]) -> int:
        """Levels that the round drafts at most, where trees are `given`."""
        return sys.maxsize

    def limit(self, batch: Batch, drafting: Sequence[bool]) -> float:
        """Seconds that the round may take."""
        return math.inf

    def deepen(self, batch: Batch, beams: DraftBeams, depths: Sequence[int], levels: int, limit: float) -> bool:
        """Whether another draft step pays."""
        return True

    def least_score(self, batch: Batch, trees: TreeBatch, steps: int, limit: float) -> float | None:
        """Cumulative log-probability from which on to verify nodes that ``steps`` draft steps gave; ``None``: all."""
        return None

    def timed(self, kind: PassKind, rows: int, run: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a pass over so many rows."""
        return run(*args, **kwargs)

    def begin(self, speculative: bool) -> None:
        """A round begins."""

    def plain_round(self, batch: Batch) -> None:
        """A round without drafts ended."""

    def spec_round(self, passed: Sequence[Passed], trees: TreeBatch, drafting: Sequence[bool], steps: int) -> None:
        """A round with drafts ended; ``trees`` were verified."""

    def forget(self, request: Request) -> None:
        """The request has given its pages back."""


class AdaptiveTree(GivenTree):
    """What `TreePolicy` makes of measured passes and of each request's account."""

    given = False

    def __init__(self, policy: TreePolicy, topk: int) -> None:
        self.policy = policy
        self._topk = topk
        self._gates: dict[int, SpeculationGate] = {}  # by request
        self._plain_rounds = 0
        self._observing = True  # passes of this round are timed
        self._started = self._in_passes = 0.0  # seconds

    def follows(self, request: Request) -> bool:
        return self._gate(request).follows

    def _gate(self, request: Request) -> SpeculationGate:
        gate = self._gates.get(request.request_id)
        if gate is None:
            unwritten = len(request.tokens) - 1 - request.draft_valid
            gate = self.policy.gate(request.params.temperature, request.remaining, unwritten)
            self._gates[request.request_id] = gate
        return gate

    def drafting(self, batch: Batch, drafter: LooksBack) -> list[bool]:
        return self.policy.drafting([self._account(r, len(batch), drafter) for r in batch])

    def _account(self, r: Request, batch: int, drafter: LooksBack) -> float | None:
        """What a request may lose to drafts; ``None`` for one that cannot draft, or has not looked back yet."""
        if not r.followed:
            return None
        gate, policy = self._gate(r), self.policy
        stake, ready = policy.stake(1, 1), r.root is not None and not gate.refused
        lag = 0 if r.root is not None else r.lag
        if gate.account < (stake if ready else policy.needed(gate, batch, lag)) or (
            not ready and policy.too_late(gate, lag, r.remaining)
        ):
            r.give_up_drafts(r.draft_valid)
            return None
        if ready:
            return gate.account
        if lag <= gate.patience:  # there is little to look back at
            return gate.account if policy.early(gate, lag) and gate.would_open(drafter.reach(r), stake) else None
        hits = drafter.reach(r)
        if gate.would_open(hits, stake):  # else: whatever the head would choose, it lacks these tokens
            started = time.perf_counter()
            hits = drafter.look_back(r)
            gate.pay(policy.looked_back(batch, lag, time.perf_counter() - started))
        opens = gate.looked_back(hits, stake)
        if not gate.follows:
            r.give_up_drafts(r.draft_valid)
        return gate.account if opens and r.followed else None

    def limit(self, batch: Batch, drafting: Sequence[bool]) -> float:
        return self.policy.limit(len(batch), [self._gate(r).account for r, d in zip(batch, drafting, strict=True) if d])

    def deepen(self, batch: Batch, beams: DraftBeams, depths: Sequence[int], levels: int, limit: float) -> bool:
        each = zip(batch, beams.scores(), depths, strict=True)
        live = [(self._gate(r).kind, scores) for r, scores, depth in each if depth > levels]
        return self.policy.deepen(len(batch), levels, live, limit)

    def least_score(self, batch: Batch, trees: TreeBatch, steps: int, limit: float) -> float | None:
        scores = _draft_scores(trees)
        nodes = [(s, self._gate(r).kind) for r, some in zip(batch, scores, strict=True) for s in some]
        nodes.sort(key=lambda node: -node[0])
        drafting = self.policy.costs.drafting(len(batch), len(batch) * self._topk, steps)
        choice = self.policy.choose(len(batch), nodes, drafting, limit)
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

    def begin(self, speculative: bool) -> None:
        if not speculative:
            self._plain_rounds += 1
        self._observing = speculative or self._plain_rounds % _OBSERVED == 0
        self._started, self._in_passes = time.perf_counter(), 0.0

    def plain_round(self, batch: Batch) -> None:
        if self._observing:
            self._observe_overhead(PLAIN)
        for r in batch:
            if r.followed:
                self._gate(r).pay(self.policy.waiting(1, len(batch)))

    def spec_round(self, passed: Sequence[Passed], trees: TreeBatch, drafting: Sequence[bool], steps: int) -> None:
        self._observe_overhead(SPECULATIVE)
        if any(p.request.error is not None for p in passed):
            return  # a walk cut short says nothing of drafts
        batch, drawn, costs = len(passed), sum(len(p.tokens) for p in passed), self.policy.costs
        seconds = costs.drafting(batch, batch * self._topk, steps) + costs.target.at(sum(trees.sizes))
        cost = seconds / costs.plain(batch)  # in rounds of plain decoding
        took = self._charged(seconds) / costs.plain(batch)
        extra = (took - 1.0) * batch / sum(drafting)  # those who drafted share it
        for p, drafts, scores in zip(passed, drafting, _draft_scores(trees), strict=True):
            gate = self._gate(p.request)
            if drafts:
                gate.kind.learn(scores, len(p.tokens) - 1, drawn / batch / cost)
                gate.spec_round(p.committed.kept - 1 - extra)  # what came after a stop won nothing
            elif p.request.followed:
                gate.pay(self.policy.waiting(1, batch))

    def _charged(self, seconds: float) -> float:
        """What accounts pay for a round that is modelled to take so long: the time that it did take. On a machine that
        throttles, passes cost half or twice what is modelled."""
        return min(max(time.perf_counter() - self._started, seconds / 2), 2 * seconds)

    def _observe_overhead(self, kind: int) -> None:
        self.policy.costs.overhead.observe(kind, time.perf_counter() - self._started - self._in_passes)

    def forget(self, request: Request) -> None:
        gate = self._gates.pop(request.request_id, None)
        if gate is not None:
            gate.kind.ended(len(request.tokens) - request.prompt_len, gate.net, gate.loan)


def _draft_scores(trees: TreeBatch) -> list[list[float]]:
    """Of each request, its draft nodes' scores, best first."""
    scores: list[float] = from_dlpack(trees.scores).tolist()
    each, first = [], 0
    for size in trees.sizes:
        each.append(sorted(scores[first + 1 : first + size], reverse=True))  # without its root, whose score is 0
        first += size
    return each
