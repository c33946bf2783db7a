"""Rounds that have been launched and not collected: the device may be ahead of what the host knows.

A flight begins with a round of a batch. While the host reads what that one accepted, the device may run the next ones
over the same requests, which begin where the one before ends. The pages of all of them are leased for how far they
could get at most. A round decides what a request gets when it is *collected*, in order. Once a request has ended, the
results of later rounds for it are dropped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from specrs._specrs import Lease
from specrs.engine.drafting.decisions import RoundPlan
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Request
from specrs.engine.rounds.executor import Verified


@dataclass(eq=False)
class Flight:
    """Rounds of a batch, the oldest first.

    Attributes:
        plan: of all of its rounds.
        lease: pages of every round.
        lens: positions of each sequence that the lease has committed.
        need: positions behind its committed ones that a round may write, per request.
        longest: positions that a round commits at most, per request.
        rounds: launched, not collected.
        single: no round is launched before the first one is collected.
        last: no round is launched any more.
        collected: rounds that have been.
        out: rows of the batch that later rounds say nothing of.
    """

    plan: RoundPlan
    lease: Lease
    lens: list[int]
    need: int
    longest: int
    rounds: deque[Verified]
    single: bool = False
    last: bool = False
    collected: int = 0
    out: set[int] = field(default_factory=set)

    @property
    def requests(self) -> list[Request]:
        """Of the batch, in the order of its rows."""
        return self.plan.batch.requests

    def carries(self, requests: list[Request]) -> bool:
        """Whether its batch is these requests, in this order."""
        pairs = zip(self.requests, requests, strict=False)
        return len(self.requests) == len(requests) and all(one is other for one, other in pairs)

    def batch(self) -> tuple[Batch, list[int]]:
        """The requests that the next one to be collected tells of, as they are now, and their rows."""
        rows = [i for i in range(len(self.requests)) if i not in self.out]
        return Batch([self.requests[i] for i in rows]), rows

    def reach(self, more: int) -> list[int]:
        """Positions of each sequence that rounds in flight and ``more`` behind them can write.

        A round begins at most ``longest`` positions behind the one before, and not behind the request's end.
        """
        behind = (len(self.rounds) + more - 1) * self.longest
        each = enumerate(zip(self.requests, self.lens, strict=True))
        return [
            n if i in self.out else max(n, min(n + behind, r.ending.max_total - 2) + self.need) for i, (r, n) in each
        ]
