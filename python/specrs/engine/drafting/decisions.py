"""A round's drafts: decided before it (`RoundPlan`), judged after it (`RoundOutcome`).

`Drafting` has the two that decide: `speculation` for the head, whose passes cost time, and `gathering` for other
sources, whose trees the host makes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from specrs.engine.drafting import trees as united
from specrs.engine.drafting.gathering import Gathering, HostTrees, Proposals
from specrs.engine.drafting.speculation import AdaptiveTree, GivenTree
from specrs.engine.drafting.trees import VerifiedTrees
from specrs.engine.request.batch import Batch, Passed
from specrs.engine.request.request import Request


@dataclass(eq=False)
class RoundPlan:
    """Whose drafts a round verifies. Rounds that a device launches behind one another share a plan.

    Attributes:
        batch: requests of the round.
        head: which of them the head drafts for; ``None`` in a round without it.
        proposals: of other sources; ``None`` without any.
        trees: made by the host and verified as they are; ``None`` where there are none. The next round waits for this
            one's tokens then, and with `beside_head`.
        beside_head: made by the host, where the device makes one tree of each and the head's.
        steps: draft steps of the head.
        asked: when the host turned to it, on the performance counter.
        began: when it was launched.
    """

    batch: Batch
    head: list[bool] | None = None
    proposals: Proposals | None = None
    trees: HostTrees | None = None
    beside_head: HostTrees | None = None
    steps: int = 0
    asked: float = field(default_factory=time.perf_counter)
    began: float = 0.0

    @property
    def drafts(self) -> bool:
        """Whether the round verifies any."""
        return self.head is not None or self.trees is not None

    @property
    def needs_tokens(self) -> bool:
        """Whether the next round's drafts need this one's tokens, so that it cannot be launched before."""
        return self.trees is not None or self.beside_head is not None

    def positions(self, of_head: int) -> list[int]:
        """Positions behind the committed ones that each request's part of the round writes; ``of_head`` with the
        head."""
        if self.head is not None:
            return [of_head] * len(self.batch)
        return [1] * len(self.batch) if self.trees is None else [len(tree) for tree in self.trees.drafts]


@dataclass(frozen=True)
class RoundOutcome:
    """What a round gave.

    Attributes:
        plan: of the round.
        rows: of the plan's batch, those that it tells of; others have ended meanwhile.
        batch: their requests.
        passed: what each of them got.
        verified: their trees, and what of these was accepted.
    """

    plan: RoundPlan
    rows: Sequence[int]
    batch: Batch
    passed: Sequence[Passed]
    verified: VerifiedTrees

    @property
    def head(self) -> list[bool] | None:
        """For which of these requests the head drafted."""
        return None if self.plan.head is None else [self.plan.head[row] for row in self.rows]


class Drafting:
    """Decides who drafts, and learns from what came of it.

    Attributes:
        speculation: whether and how far the head drafts.
        gathering: drafts of other sources; ``None`` without any.
        unites: whether the device makes one tree of the head's drafts and other ones.
    """

    def __init__(self, has_head: bool, gathering: Gathering | None, unites: bool) -> None:
        self.speculation: GivenTree = GivenTree()
        self.gathering, self.unites = gathering, unites
        self._has_head = has_head

    def price(self, speculation: AdaptiveTree) -> None:
        """From now on a cost model decides."""
        self.speculation = speculation
        if self.gathering is not None:
            self.gathering.price(speculation.policy.costs, speculation.account)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self.speculation.forget(request)
        if self.gathering is not None:
            self.gathering.forget(request)

    def plan(self, batch: Batch) -> RoundPlan:
        """Whose drafts the next round of a batch verifies."""
        plan, speculation = RoundPlan(batch), self.speculation
        if self.gathering is not None:
            plan.proposals = self.gathering.ask(batch)
        if self._has_head and speculation.awake(batch):
            asked = speculation.drafting(batch)
            head = [d and r.draws.room > 1 for r, d in zip(batch, asked, strict=True)]
            plan.head = head if any(head) else None
        proposals = plan.proposals
        if self.gathering is not None and proposals is not None and proposals.pays:
            if plan.head is not None and speculation.prefers_others(batch, plan.head, proposals):
                plan.head = None
            if plan.head is None:
                plan.trees = self.gathering.trees_of(proposals)
        return plan

    def tempts(self, batch: Batch, rows: Sequence[int], plan: RoundPlan, spare: float) -> bool:
        """Whether other sources know better than rounds that run, so that these are let run out.

        Args:
            batch: requests that go on, at these rows of the plan's batch.
            spare: seconds for which the device is busy meanwhile.
        """
        if self.gathering is None or not len(batch):
            return False
        proposals, speculation = self.gathering.ask(batch, spare=spare), self.speculation
        if proposals is None or not proposals.pays:
            return False
        if plan.head is None or speculation.merges:
            return True
        head = [plan.head[row] for row in rows]
        if not any(head):
            return False
        if speculation.prefers_others(batch, head, proposals):
            return True
        return self.unites and speculation.unites(batch, head, proposals)

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a round, and settle what it cost."""
        plan, head, passed, verified = outcome.plan, outcome.head, outcome.passed, outcome.verified
        speculation, gathering = self.speculation, self.gathering
        if plan.drafts:
            trees = verified.trees.sizes if plan.trees is None else [plan.trees.trees.sizes[i] for i in outcome.rows]
            for p, nodes in zip(passed, trees, strict=True):
                p.request.proposed += nodes - 1
                p.request.drafting_rounds += nodes > 1
        if gathering is None or not plan.needs_tokens:
            if head is None:
                speculation.plain_round(outcome.batch)
            else:
                speculation.spec_round(passed, lambda: verified.trees, head, plan.steps)
            return
        if (hosted := plan.beside_head) is not None and head is not None:
            shares = united.shares(verified, passed)
            speculation.spec_round(passed, lambda: verified.trees, head, plan.steps, shares)
            gathering.observe(passed, outcome.rows, hosted, self._took(plan), [share.accepted for share in shares])
        elif (hosted := plan.trees) is not None:
            trees_of = hosted.trees
            shares = None
            if head is not None:
                shares = [gathering.share(hosted.head[row], p) for row, p in zip(outcome.rows, passed, strict=True)]
            speculation.spec_round(passed, lambda: trees_of, head or [], plan.steps, shares)
            won = None if shares is None else [share.accepted for share in shares]
            gathering.observe(passed, outcome.rows, hosted, self._took(plan), won)

    def _took(self, plan: RoundPlan) -> float | None:
        """Seconds of its round; ``None`` where these say nothing of others like it."""
        return None if self.speculation.cold else time.perf_counter() - plan.began
