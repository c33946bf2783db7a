"""Decides which requests of a round draft and how far, and learns from each round's outcome.

No decision made here can change a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from specrs._specrs import DraftBeams, TreeShape
from specrs.engine.drafting.budget import RATE, REQUEST, Account
from specrs.engine.drafting.chooser import TreePolicy
from specrs.engine.drafting.costs import LEAST
from specrs.engine.drafting.gathering import Gathering, HostTrees, Proposals
from specrs.engine.drafting.levels import best_levels, can_unite, round_seconds
from specrs.engine.drafting.plans import RoundOutcome, RoundPlan
from specrs.engine.drafting.trees import head_accepted
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Request


class Drafting:
    """Decides which requests draft, and learns from the outcome of rounds.

    Attributes:
        policy: the cost model, over measured passes; of an engine with fixed trees one in which drafts cost nothing.
        gathering: drafts of sources other than the head.
        has_head: True if a head drafts.
        launched: True if a device launches the head's drafts together with their verification. Then trees are decided
            before a round, by levels; else by the scores of the drafts.
        tail: positions that the head reads before its first draft; ``None`` if its attention reads all of a request.
        cools: True if features are kept only of requests that will soon be able to pay (`HeadState.warm`).
        spent: seconds that the head of a host has run behind the last round, which belong to the next one, and the
            requests that it ran for.
        clock: the seconds that requests pay for, as of `Executor.clock`.
        waiting: those by which they pay a drafter of the user's, which may wait for something else: the wall's.
    """

    def __init__(
        self, shape: TreeShape, page: int, has_head: bool, gathering: Gathering, launched: bool,
        tail: int | None = None, clock: Callable[[], float] = time.thread_time,
    ) -> None:  # fmt: skip
        self.gathering, self.has_head, self.launched, self.tail = gathering, has_head, launched, tail
        self.clock, self.waiting, self.cools = clock, time.perf_counter, False
        self.spent: tuple[float, Sequence[Request]] = (0.0, ())
        self._shape, self._page = shape, page
        self._accounts: dict[int, Account] = {}  # by request, from its first admission to its end
        self.price(TreePolicy.of_fixed_trees(shape.steps))

    def price(self, policy: TreePolicy) -> None:
        """Let a policy decide from now on."""
        self.policy = policy
        self.gathering.price(policy)

    @property
    def drafts(self) -> bool:
        """True if anything can draft."""
        return self.has_head or bool(self.gathering.sources.all)

    @property
    def unites(self) -> bool:
        """True if a device unites the head's drafts with those of other sources, for whose sake each round then waits
        for the one before: where trees are fixed. Else the better drafts of the two are verified alone."""
        return self.launched and self.policy.fixed and can_unite(self._shape)

    # -- one request --------------------------------------------------------------------------------------------

    def begins(self, request: Request) -> int:
        """Return the first position that the head reads of a request if it begins now: a multiple of the page size."""
        return 0 if self.tail is None else self.page(max(request.committed - self.tail, 0))

    def page(self, position: int) -> int:
        """Return the first position of a position's page."""
        return position // self._page * self._page

    def account(self, request: Request) -> Account:
        """Return the request's account, which pays for drafts of every source; opened at the first call."""
        account = self._accounts.get(request.request_id)
        if account is None:
            account = self.policy.account(request.params.temperature, request.remaining)
            self._accounts[request.request_id] = account
        return account

    def follows(self, request: Request) -> bool:
        """Return whether the head can follow a request that was just admitted, perhaps not for the first time: not if
        it has to read all of it, and the prefix cache lacks draft KV of that."""
        return self.tail is not None or not request.head.first

    def pays(self, request: Request, size: int, lag: int = 0) -> bool:
        """Return whether a request in a batch of ``size`` can pay for drafts: whether its account holds anything, and
        as much as it takes to run the head over ``lag`` positions."""
        left = self.account(request).left(size)
        return left > 0.0 and left >= self.policy.resuming(lag, size)

    def warms(self, request: Request, size: int) -> bool:
        """Return whether a request in a batch of ``size`` will be able to pay for drafts before it has as many more
        tokens as the head reads before its first draft. Until then, nobody keeps features of its positions."""
        return self.tail is None or self.account(request).left(size) > -RATE * (self.tail + self._page)

    def _warm(self, batch: Batch) -> None:
        """Warm requests that will soon be able to pay, and cool others."""
        for r in batch:
            if r.head.followed and r.head.warm != self.warms(r, len(batch)):
                if r.head.warm:
                    r.head.cool()
                else:
                    r.head.warm_up(self.page(r.committed + self._page - 1))

    def goes_on(self, request: Request, size: int, lag: int = 0) -> bool:
        """Return whether a request that the head follows can pay, as `pays` does. If not, a head that has to read all
        of a request gives it up, because it would have more to read, the longer it waits."""
        pays = self.pays(request, size, lag)
        if not pays and self.tail is None:
            request.give_up_drafts(request.head.end)
        return pays

    def entered(self, requests: Sequence[Request], seconds: float) -> None:
        """Let requests pay for the head's pass behind their prompts, which has taken ``seconds`` of the host.

        A device's pass is paid from the engine's bucket alone, so that requests keep all that they have for their first
        rounds.
        """
        if not self.launched:
            self._charge(requests, len(requests), seconds)
            return
        accounts, together = [self.account(r) for r in requests], len(requests)
        for r, account in zip(requests, accounts, strict=True):
            reads = (r.head.end - max(r.head.first, r.head.shared)) * together
            account.engine.pay(self.policy.entering(reads, len(self._accounts)) / together)

    def _charge(self, payers: Sequence[Request], size: int, seconds: float) -> None:
        """Let requests pay together for ``seconds`` that a batch of ``size`` requests waits. Where trees are fixed,
        nobody pays."""
        if payers and not self.policy.fixed:
            rounds = max(seconds, 0.0) / self.policy.costs.plain(size) * size
            for r in payers:
                self.account(r).pay(rounds / len(payers), size)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        self.gathering.forget(request)
        self._accounts.pop(request.request_id, None)

    # -- before a round -----------------------------------------------------------------------------------------

    def plan(self, batch: Batch) -> RoundPlan:
        """Decide which sources' drafts the next round of a batch verifies."""
        (spent, ran), self.spent = self.spent, (0.0, ())
        ran = [r for r in ran if r in batch.requests]
        spent = spent if ran else 0.0
        proposals = self._ask(batch)
        if self.cools:
            self._warm(batch)
        began = self.clock()
        others = None if proposals is None else proposals.trees
        head = [r.can_draft and r.max_depth > 0 and self.goes_on(r, len(batch), r.lag) for r in batch]
        if not any(head) or (others is not None and self._prefers_others(batch, head, others)):
            self._charge(ran, len(batch), spent)
            return RoundPlan(batch, trees=others, began=began)
        levels, united = self._levels(batch, head), others if self.unites else None
        return RoundPlan(batch, proposals, head, levels, united, began - spent)

    def _ask(self, batch: Batch, spare: float = 0.0) -> Proposals | None:
        """Ask the sources for the requests that can pay for it, and let these pay for the time that it takes, but for
        ``spare`` seconds, for which a device is busy."""
        if not self.gathering.asks:
            return None
        clock = self._asking_clock
        started = clock()
        able = [r for r in batch if r.params.speculative and self.pays(r, len(batch))]
        proposals = self.gathering.ask(batch, able)
        if proposals is not None:
            proposals.trees = self.gathering.weighed(batch, proposals.said, clock() - started)
        self._charge(able if self.gathering.sources.all else (), len(batch), clock() - started - spare)
        return proposals

    @property
    def _asking_clock(self) -> Callable[[], float]:
        return self.waiting if self.gathering.sources.foreign else self.clock

    def catch_up(self, requests: Sequence[Request], size: int) -> None:
        """Let some requests of a batch of ``size`` pay for the pass of the head over the positions that it is behind
        them."""
        for r in requests:
            if r.lag:
                self.account(r).pay(self.policy.resuming(r.lag, size), size)

    def _levels(self, batch: Batch, head: Sequence[bool], flying: float = 0.0) -> int:
        """Return the most levels that the head drafts in a round, for the requests that ``head`` names.

        Args:
            flying: plain rounds that the round in flight may lose, for which nobody has paid yet.
        """
        if not self.launched:
            return self._shape.steps
        drafting = [r for r, drafts in zip(batch, head, strict=True) if drafts]
        kinds, deepest = [self.policy.kind(r.params.temperature) for r in drafting], max(r.max_depth for r in drafting)
        left = sum(self.account(r).left(len(batch)) for r in drafting) - flying
        return best_levels(self._shape, self.policy, kinds, len(batch), left, deepest)

    def _prefers_others(self, batch: Batch, head: Sequence[bool], others: HostTrees) -> bool:
        """Return whether other sources' drafts alone yield more tokens a second than the head's do."""
        if self.policy.fixed:
            return False
        drafting = [r for r, drafts in zip(batch, head, strict=True) if drafts]
        gains = [self.policy.kind(r.params.temperature).gain for r in drafting]
        return others.rate > sum(gains) / len(gains) * len(batch) / self.policy.costs.plain(len(batch))

    # -- during a round -----------------------------------------------------------------------------------------

    def merges(self, plan: RoundPlan) -> bool:
        """Return whether the host chooses the best nodes of the head's drafts, and of other sources if there are any.

        A device that launches whole rounds verifies all that the head drafts.
        """
        return not self.launched and (plan.proposals is not None or not self.policy.fixed)

    def deepen(self, plan: RoundPlan, beams: DraftBeams, depths: Sequence[int], levels: int) -> bool:
        """Return whether another draft step pays."""
        each, policy = zip(plan.batch, beams.scores(), depths, strict=True), self.policy
        live = [(policy.kind(r.params.temperature), scores) for r, scores, depth in each if depth > levels]
        return policy.deepen(len(plan.batch), levels, live)

    # -- rounds ahead of the host -------------------------------------------------------------------------------

    def behind(self, plan: RoundPlan, batch: Batch, rows: Sequence[int]) -> RoundPlan | None:
        """Return the plan of a round behind those in flight, before their outcome is known: the same one, with as many
        levels as pay now. ``None`` where other requests than in those could pay for drafts.

        Args:
            plan: the plan of the last round in flight.
            batch: the requests that go on.
            rows: rows of these requests in the plan's batch.
        """
        flying = [plan.head is not None and plan.head[row] for row in rows]
        # Behind a round without drafts the head has to run over a position more, and a draft needs room behind that.
        behind = [not drafts for drafts in flying]
        each = zip(batch, behind, strict=True)
        head = [r.head.followed and r.max_depth > b and self.pays(r, len(batch), r.lag + b) for r, b in each]
        if head != flying:
            return None
        if not any(head):
            return plan
        seconds = round_seconds(self._shape, self.policy.costs, len(batch), plan.levels)
        return replace(plan, levels=self._levels(batch, head, self.policy.lost(len(batch), sum(head), seconds)))

    def others_know_better(self, plan: RoundPlan, batch: Batch, rows: Sequence[int]) -> bool:
        """Return whether to launch no more rounds behind those in flight, because other sources' drafts are better.

        The arguments are those of `behind`. The device is busy meanwhile, so that asking costs nothing.
        """
        size, costs = len(batch), self.policy.costs
        if not size:
            return False
        spare = costs.plain(size) if plan.head is None else round_seconds(self._shape, costs, size, plan.levels)
        proposals = self._ask(batch, spare)
        if proposals is None or proposals.trees is None:
            return False
        head = [plan.head is not None and plan.head[row] for row in rows]
        return not any(head) or self.unites or self._prefers_others(batch, head, proposals.trees)

    # -- after a round ------------------------------------------------------------------------------------------

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a round, and charge its cost."""
        plan, passed = outcome.plan, outcome.passed
        for p in passed:
            if p.request.params.speculative:
                self.account(p.request).earn(p.kept, len(passed))
        if plan.drafts:
            for p, nodes in zip(passed, outcome.sizes, strict=True):
                p.request.proposed += nodes - 1
                p.request.drafting_rounds += nodes > 1
        if not self.policy.fixed:
            self._learn(outcome)
        if plan.drafts or self.gathering.asks:  # this comes last, because a user's code may be interrupted
            clock = self._asking_clock
            started = clock()
            told = self.gathering.learn(passed, outcome.verified)
            self._charge(told, len(passed), clock() - started)

    def _learn(self, outcome: RoundOutcome) -> None:
        """Learn from the time that a round took, and book what its drafts have won or lost."""
        drafts, expected = outcome.plan.drafts, self._expected(outcome)
        if drafts:
            self._book(outcome, expected)
        # What a device's round with drafts takes says little of what a plain one would take.
        if outcome.seconds is not None and not (drafts and self.launched):
            self.policy.costs.observe(outcome.seconds, expected)

    def _expected(self, outcome: RoundOutcome) -> float:
        """Return the seconds that the round was expected to take."""
        plan, costs, size = outcome.plan, self.policy.costs, len(outcome.passed)
        if outcome.trees is not None and not outcome.united:
            return outcome.trees.seconds
        return costs.plain(size) if plan.head is None else round_seconds(self._shape, costs, size, plan.levels)

    def _observe_head(self, outcome: RoundOutcome, seconds: float) -> None:
        """Learn from a round with the head's drafts, which took ``seconds``."""
        plan, passed, size = outcome.plan, outcome.passed, len(outcome.passed)
        gain = sum(len(p.tokens) for p in passed) / size * self.policy.costs.plain(size) / seconds
        accepted = head_accepted(outcome.verified, passed) if outcome.united else [len(p.tokens) - 1 for p in passed]
        for i, (p, drafts) in enumerate(zip(passed, outcome.head, strict=True)):
            if not drafts or p.request.error is not None:
                continue
            kind = self.policy.kind(p.request.params.temperature)
            kind.learn(gain)
            if self.launched and p.request.finish_reason is None:  # one that has ended had less room than others
                kind.reached(accepted[i], min(plan.levels, len(p.tokens)))

    def _book(self, outcome: RoundOutcome, expected: float) -> None:
        """Book the plain rounds that drafts of any source have won or lost, by the seconds that the round took.

        No more than `REQUEST` plain rounds beyond those that were ``expected`` count, so that a stall decides little.
        """
        plain, seconds = self.policy.costs.plain(len(outcome.passed)), outcome.seconds
        seconds = expected if seconds is None else max(min(seconds, expected + REQUEST * plain), LEAST)
        if outcome.plan.head is not None:
            self._observe_head(outcome, seconds)
        size, sizes = len(outcome.passed), outcome.sizes
        each = zip(outcome.passed, sizes, outcome.head, strict=True)
        drew = [p for p, nodes, drafts in each if (drafts or nodes > 1) and p.request.error is None]
        if not drew:
            return
        wins = [p.kept - 1 for p in drew]  # drafts after a stop won nothing
        verify = sum(nodes > 1 for nodes in sizes)
        for p, won in zip(drew, self.policy.won(size, verify, seconds, wins), strict=True):
            self.account(p.request).pay(-won, size)
