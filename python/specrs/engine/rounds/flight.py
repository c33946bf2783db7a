"""Rounds that have been launched and not collected: the device may be ahead of what the host knows.

A flight begins with a round of a batch. While the host reads what that round accepted, the device may run the next one
over the same requests, which begins where the round before ends; and so on, one round ahead. One lease has the pages of
both rounds, for the most positions that they can reach. Rounds are *collected* in order, and a request gets its tokens
when a round is collected. Once a request has ended, the results of later rounds for it are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from specrs._specrs import ConfigError, Lease, PoolExhaustedError
from specrs.engine.drafting.decisions import Drafting
from specrs.engine.drafting.gathering import HostTrees
from specrs.engine.drafting.plans import RoundPlan
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Request
from specrs.engine.rounds.executor import Executor, Verified
from specrs.engine.rounds.observer import RoundObserver


@dataclass(eq=False)
class Flight:
    """Rounds of a batch that are in flight.

    Attributes:
        plan: the plan of the last launched round.
        trees: as of `RoundOutcome.trees`.
        lease: the pages of every round.
        lens: positions of each sequence that the lease has committed.
        need: positions behind the committed ones that a round may write, per request.
        longest: positions that a round commits at most, per request.
        rounds: launched rounds that are not collected, the oldest first, each with its plan.
        observers: the observers that were told of the first round's pages, and are told of its results.
        ahead: True if a round may be launched behind one that is not collected.
        dropped: rows of the batch whose requests have ended; later results for them are dropped.
        ended: time when the last collected round ended; ``None`` until the first one is collected.
    """

    plan: RoundPlan
    trees: HostTrees | None
    lease: Lease
    lens: list[int]
    need: int
    longest: int
    rounds: deque[tuple[RoundPlan, Verified]]
    observers: Sequence[RoundObserver]
    ahead: bool
    dropped: set[int] = field(default_factory=set)
    ended: float | None = None

    @property
    def requests(self) -> list[Request]:
        """The requests of the batch, in the order of its rows."""
        return self.plan.batch.requests

    def carries(self, requests: list[Request]) -> bool:
        """Return whether the flight's batch consists of these requests, in this order."""
        pairs = zip(self.requests, requests, strict=False)
        return len(self.requests) == len(requests) and all(one is other for one, other in pairs)

    def batch(self) -> tuple[Batch, list[int]]:
        """Return the requests that get results from the next collected round, as they are now, and their rows."""
        rows = [i for i in range(len(self.requests)) if i not in self.dropped]
        return Batch([self.requests[i] for i in rows]), rows

    @property
    def reach(self) -> list[int]:
        """The length that each sequence needs pages for, for the round in flight and one behind it.

        A round begins at most ``longest`` positions behind the round before, and not behind the request's end.
        """
        each = enumerate(zip(self.requests, self.lens, strict=True))
        return [
            n if i in self.dropped else max(n, min(n + self.longest, r.ending.max_total - 2) + self.need)
            for i, (r, n) in each
        ]

    def launch_ahead(self, executor: Executor, drafting: Drafting) -> None:
        """Launch a round behind the one in flight if possible. Without one the flight ends with that round."""
        batch, rows = self.batch()
        plan = drafting.behind(self.plan, batch, rows) if self.ahead else None
        # Others were asked for the first round of the flight just now.
        if plan is None or (self.ended is not None and drafting.others_know_better(self.plan, batch, rows)):
            return
        try:
            self.lease.renew(self.reach)
        except (PoolExhaustedError, ConfigError):  # too few pages, or the row too short
            return
        if len(copies := self.lease.copies):
            executor.copy(copies)
        launched = executor.launch(self.rounds[-1][1], plan.levels)
        if launched is not None:
            self.plan = plan
            self.rounds.append((plan, launched))
