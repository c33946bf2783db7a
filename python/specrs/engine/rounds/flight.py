"""Rounds that have been launched and not collected: the device may be ahead of what the host knows.

A flight begins with a round of a batch. While the host reads what that round accepted, the device may run the next
rounds over the same requests. Each round begins where the round before ends. One lease has the pages of all rounds, for
the most positions that they can reach. Rounds are *collected* in order, and a request gets its tokens when a round is
collected. Once a request has ended, the results of later rounds for it are dropped.
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
        requests: the requests of the batch, in the order of its rows.
        lease: the pages of every round.
        lens: positions of each sequence that the lease has committed.
        need: positions behind the committed ones that a round may write, per request.
        longest: positions that a round commits at most, per request.
        observers: the observers that were told of the first round's pages, and are told of its results.
        rounds: launched rounds that are not collected, the oldest first, each with its plan.
        trees: as of `RoundOutcome.trees`.
        ahead: True if rounds may be launched behind one that is not collected.
        dropped: rows of the batch whose requests have ended; later results for them are dropped.
        ended: time when the last collected round ended; ``None`` until the first one is collected.
    """

    requests: list[Request]
    lease: Lease
    lens: list[int]
    need: int
    longest: int
    observers: Sequence[RoundObserver]
    rounds: deque[tuple[RoundPlan, Verified]] = field(default_factory=deque)
    trees: HostTrees | None = None
    ahead: bool = False
    dropped: set[int] = field(default_factory=set)
    ended: float | None = None

    def carries(self, requests: list[Request]) -> bool:
        """Return whether the flight's batch consists of these requests, in this order."""
        pairs = zip(self.requests, requests, strict=False)
        return len(self.requests) == len(requests) and all(one is other for one, other in pairs)

    def batch(self) -> tuple[Batch, list[int]]:
        """Return the requests that get results from the next collected round, as they are now, and their rows."""
        rows = [i for i in range(len(self.requests)) if i not in self.dropped]
        return Batch([self.requests[i] for i in rows]), rows

    def reach(self, more: int) -> list[int]:
        """Return the length that each sequence needs pages for, for the rounds in flight and ``more`` behind them.

        A round begins at most ``longest`` positions behind the round before, and not behind the request's end.
        """
        behind = (len(self.rounds) + more - 1) * self.longest
        each = enumerate(zip(self.requests, self.lens, strict=True))
        return [
            n if i in self.dropped else max(n, min(n + behind, r.ending.max_total - 2) + self.need)
            for i, (r, n) in each
        ]

    # -- ahead of the host: not used on a device that plans every round by the results of the last one -----------------

    def launch_ahead(self, executor: Executor, drafting: Drafting, stays: bool) -> None:
        """Launch rounds behind the last one if possible; else the flight ends with those that have begun.

        Args:
            stays: True if the next round is likely to have the same batch.
        """
        last, verified = self.rounds[-1]
        plan = self._behind(last, drafting) if self.ahead and stays else None
        most = 0 if self.take_following(plan is not None) or plan is None else verified.ahead
        while plan is not None and most:
            try:
                self.lease.renew(self.reach(most))
            except (PoolExhaustedError, ConfigError):  # too few pages, or the row too short
                most //= 2  # fewer rounds may fit; if not, the round in flight is collected first
                continue
            if len(copies := self.lease.copies):
                executor.copy(copies)
            launched = executor.launch(verified, most, plan.levels)
            if launched is not None:
                self.rounds.append((plan, launched))
            return

    def _behind(self, last: RoundPlan, drafting: Drafting) -> RoundPlan | None:
        """Return the plan of a round behind the last one, before its outcome is known; ``None`` if the next round has
        to wait for that."""
        batch, rows = self.batch()
        plan = drafting.behind(last, batch, rows)
        # Other sources were asked for the first round of the flight just now.
        if plan is not None and self.ended is not None and drafting.others_know_better(last, batch, rows):
            return None
        return plan

    def take_following(self, goes_on: bool = False) -> bool:
        """Note the round that the device has begun by itself behind the last one, if any; it begins more if it
        ``goes_on``."""
        plan, last = self.rounds[-1]
        following = last.following(goes_on)
        if following is not None:
            self.rounds.append((plan, following))
        return following is not None
