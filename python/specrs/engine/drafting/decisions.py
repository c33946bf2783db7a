"""Decides which requests of a round draft and how far, and learns from each round's outcome.

No decision made here can change a token.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from specrs._specrs import DraftBeams, TreeShape
from specrs.engine.drafting.budget import WAIT, Account
from specrs.engine.drafting.chooser import TreePolicy
from specrs.engine.drafting.costs import HOSTED, PLAIN, SPECULATIVE
from specrs.engine.drafting.gathering import Gathering, HostTrees
from specrs.engine.drafting.levels import best_levels, can_unite, most_nodes, round_seconds, tiers, united_levels
from specrs.engine.drafting.plans import RoundOutcome, RoundPlan
from specrs.engine.drafting.trees import head_accepted
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Request

_ROUNDING = 1e-9  # of plain rounds
_ADDED = 0.5  # share of other sources' tokens that the head is taken to lack, where a device unites both


class Drafting:
    """Decides which requests draft, and learns from the outcome of rounds.

    Attributes:
        policy: the cost model, over measured passes; of an engine with fixed trees one in which drafts cost nothing.
        gathering: drafts of sources other than the head.
        has_head: True if a head drafts.
        launched: True if a device launches all passes of a round together. Then trees are decided before a round, by
            levels; else they are decided step by step, by the scores of the drafts so far.
        unites: True if the device unites the head's drafts with those of other sources in one tree.
    """

    def __init__(self, shape: TreeShape, page: int, has_head: bool, gathering: Gathering, launched: bool) -> None:
        self.gathering, self.has_head, self.launched = gathering, has_head, launched
        self.unites = has_head and launched and can_unite(shape)
        self._shape, self._page = shape, page
        self._accounts: dict[int, Account] = {}  # by request, from its first admission to its end
        self._batch = 1  # of the last round
        self.price(TreePolicy.fixed())

    def price(self, policy: TreePolicy) -> None:
        """Let a policy decide from now on."""
        self.policy = policy
        self.gathering.price(policy, self.account)

    @property
    def drafts(self) -> bool:
        """True if anything can draft."""
        return self.has_head or bool(self.gathering.sources.all)

    # -- one request --------------------------------------------------------------------------------------------

    @property
    def reads_all(self) -> bool:
        """True if the head reads all of a request, or nothing; else it may begin anywhere."""
        return self.policy.tail is None

    def begins(self, request: Request) -> int:
        """Return the first position that the head reads of a request if it begins now: a multiple of the page size."""
        tail = self.policy.tail
        return 0 if tail is None else max(request.committed - tail, 0) // self._page * self._page

    def account(self, request: Request) -> Account:
        """Return the request's account, which pays for drafts of every source; opened at the first call."""
        account = self._accounts.get(request.request_id)
        if account is None:
            account = self.policy.account(request.params.temperature, request.remaining)
            self._accounts[request.request_id] = account
        return account

    def follows(self, request: Request) -> bool:
        """Return whether the head follows a request that was just admitted, perhaps not for the first time.

        The request's ``committed`` positions came from the prefix cache; the first ``head.shared`` of them have draft
        KV.
        """
        account = self.account(request)
        account.drafts_from = 0.0
        entries = request.prefill_target - request.head.shared
        return self.policy.follows(account, self._batch, request.remaining, entries)

    def prefilled(self, batch: Batch) -> None:
        """Pay for the draft KV of complete prompts, for all tokens that may come."""
        ready = [r for r in batch if r.head.followed and r.ready]
        for r in ready:
            price = self.policy.entering(r.head.end - max(r.head.first, r.head.shared), self._batch, len(ready))
            self.account(r).engine.pay(price / self._batch)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        self.gathering.forget(request)  # may pay
        self._accounts.pop(request.request_id, None)

    # -- before a round -----------------------------------------------------------------------------------------

    def plan(self, batch: Batch) -> RoundPlan:
        """Decide which sources' drafts the next round of a batch verifies."""
        proposals = self.gathering.ask(batch)
        plan = RoundPlan(batch, proposals)
        if self.has_head:
            head = self._able(batch)
            plan.head = head if any(head) else None
        if proposals is not None and proposals.trees is not None:
            if plan.head is not None and self._prefers_others(batch, plan.head, proposals.trees):
                plan.head = None
            if plan.head is None:
                plan.trees = proposals.trees
        return plan

    def start(self, plan: RoundPlan) -> None:
        """Let a round begin, now that its pages are leased: pay for what the head has to catch up with, and settle how
        far it drafts."""
        if plan.head is None or self.policy.costs.free:
            return
        size = len(plan.batch)
        for r in plan.drafting:
            if r.lag:
                self.account(r).pay(self.policy.resuming(self._lag(r), size), size)
        plan.limit = self._limit(plan.batch, plan.head)
        if self.launched:
            plan.levels = self._best(plan.batch, plan.head)[0]

    def _able(self, batch: Batch, idle: Collection[int] | None = None) -> list[bool]:
        """Return for each request whether it drafts: the most requests that can each pay their share of a round.

        All requests of the batch wait for those that draft, so that a share is the larger, the fewer they are.

        Args:
            idle: for a round behind one in flight, the ids of the requests that do not draft in that one.
        """
        size, rooms = len(batch), dict[int, float]()
        for i, r in enumerate(batch):
            ahead = idle is not None and r.request_id in idle
            if (idle is not None or r.can_draft) and self._pays(r, size, ahead):
                rooms[i] = math.inf
                if not self.policy.costs.free:
                    rooms[i] = self.account(r).room(size) - self.policy.resuming(self._lag(r, ahead), size)
        while rooms:
            poorest = min(rooms, key=rooms.__getitem__)
            if rooms[poorest] >= self.policy.least_loss(size, len(rooms)) - _ROUNDING:
                break
            del rooms[poorest]
        return [i in rooms for i in range(size)]

    def _pays(self, r: Request, batch: int, ahead: bool = False) -> bool:
        """Return whether a request could pay for drafts of the head if all of its batch drafted.

        A request that is not expected to be able to do so again gives them up.

        Args:
            ahead: True behind a round in flight in which it does not draft.
        """
        if not r.head.followed or r.max_depth <= ahead or self.policy.costs.free:
            return r.head.followed and r.max_depth > ahead
        account = self.account(r)
        if len(r.tokens) < account.drafts_from:
            return False
        wait = self.policy.wait(account, batch, self._lag(r, ahead))
        if wait > 0.0 and wait >= r.remaining / 2:
            r.give_up_drafts(r.head.end)
        account.drafts_from = len(r.tokens) + min(wait, WAIT)
        return wait == 0.0

    def _lag(self, r: Request, ahead: bool = False) -> int:
        """Return how many positions the head must run over before the request drafts, at least one if a round without
        its drafts is in flight (``ahead``)."""
        return min(r.lag + ahead, r.committed - self.begins(r))

    def _limit(self, batch: Batch, head: Sequence[bool], flying: float = 0.0) -> float:
        """Return the seconds that a round of a batch may take, of which ``head`` tells who drafts."""
        size, drew = len(batch), [r for r, drafts in zip(batch, head, strict=True) if drafts]
        rooms = [self.account(r).room(size, flying, len(drew)) for r in drew]
        return self.policy.limit(size, rooms, self.policy.least_round(size, len(rooms)))

    def _best(self, batch: Batch, head: Sequence[bool], flying: float = 0.0) -> tuple[int, float, float]:
        """Return the `best_levels` of a batch.

        Args:
            head: for each request, True if it drafts.
            flying: plain rounds that each request that drafts may lose to the round in flight.
        """
        drafting = [r for r, drafts in zip(batch, head, strict=True) if drafts]
        kinds, deepest = [self.policy.kind(r.params.temperature) for r in drafting], max(r.max_depth for r in drafting)
        limit = self._limit(batch, head, flying)
        return best_levels(self._shape, self.policy.costs, kinds, len(batch), limit, deepest)

    def _prefers_others(self, batch: Batch, head: Sequence[bool], others: HostTrees) -> bool:
        """Return whether other sources' drafts without the head's passes yield more tokens a second."""
        policy, size = self.policy, len(batch)
        if policy.costs.free:
            return False
        gains = [policy.kind(r.params.temperature).gain for r, drafts in zip(batch, head, strict=True) if drafts]
        if others.rate <= sum(gains) / len(gains) * size / policy.costs.plain(size):
            return False
        if not self.launched:
            return True
        alone, both = self._rates(batch, head, others)
        return others.rate > (both if self.unites else alone)

    def joins_others(self, batch: Batch, head: Sequence[bool], others: HostTrees) -> bool:
        """Return whether a device unites the head's drafts with others, because that yields more tokens a second."""
        if not self.unites or self.policy.costs.free:
            return self.unites
        alone, both = self._rates(batch, head, others)
        return both > alone

    def _rates(self, batch: Batch, head: Sequence[bool], others: HostTrees) -> tuple[float, float]:
        """Return the expected tokens a second of the head's drafts, alone and in one tree with others."""
        costs, size, shape = self.policy.costs, len(batch), self._shape
        levels, tokens, seconds = self._best(batch, head)
        rows = most_nodes(shape, united_levels(shape, levels, max(others.trees.sizes)))
        # The host has to read the results of such a round before the next round.
        longer = costs.overhead.at(HOSTED) + costs.target.at(size * rows)
        longer -= costs.target.at(size * most_nodes(shape, levels))
        both = tokens + _ADDED * max(others.tokens - size, 0.0)
        return tokens / seconds, both / (seconds + longer)

    # -- during a round -----------------------------------------------------------------------------------------

    def chooses(self, plan: RoundPlan) -> bool:
        """Return whether the host chooses the best nodes of the head's drafts, and of other sources if there are any.

        A device that launches whole rounds verifies all that the head drafts.
        """
        return plan.proposals is not None if self.policy.costs.free else not self.launched

    def deepen(self, plan: RoundPlan, beams: DraftBeams, depths: Sequence[int], levels: int) -> bool:
        """Return whether another draft step pays."""
        each, policy = zip(plan.batch, beams.scores(), depths, strict=True), self.policy
        live = [(policy.kind(r.params.temperature), scores) for r, scores, depth in each if depth > levels]
        return policy.deepen(len(plan.batch), levels, live, plan.limit)

    # -- rounds ahead of the host -------------------------------------------------------------------------------

    def behind(self, plan: RoundPlan, batch: Batch) -> RoundPlan | None:
        """Return the plan of the round behind one with this plan, decided before that one's outcome is known.

        It is the same plan, perhaps with other levels of the head's drafts. ``None`` if another plan is wanted, which
        has to wait for the outcome.
        """
        head, size, policy = plan.head or [False] * len(plan.batch), len(batch), self.policy
        idle = [r for r, drafts in zip(plan.batch, head, strict=True) if not drafts and r.finish_reason is None]
        if self.has_head and any(self._pays(r, size, ahead=True) for r in idle):
            saving = {r.request_id for r in idle}
            able = {r.request_id for r, drafts in zip(batch, self._able(batch, saving), strict=True) if drafts}
            if able & saving:
                return None  # a request that does not draft does so in the next round
        if plan.head is None or policy.costs.free:
            return plan
        drew = [r for r, drafts in zip(batch, plan.head, strict=True) if drafts]
        least = policy.least_loss(size, len(drew))
        poor = sum(self.account(r).room(size) < least for r in drew)
        if 0 < poor < len(drew):
            return None
        if poor and plan.levels == 1:
            return plan.with_levels(0)
        # The round in flight may lose all its drafts, for which nobody has paid yet. But it may win, so that one more
        # level is worth more than the time for which the device would wait for its outcome.
        flying = round_seconds(self._shape, policy.costs, size, plan.levels)
        levels = self._best(batch, plan.head, policy.lost(size, len(drew), flying) / len(drew))[0]
        return plan if levels == plan.levels else plan.with_levels(levels)

    def others_know_better(self, batch: Batch, rows: Sequence[int], plan: RoundPlan, spare: float) -> bool:
        """Return whether to launch no more rounds behind those in flight, because other sources' drafts are better.

        Args:
            batch: the requests that go on.
            rows: rows of these requests in the plan's batch.
            plan: the plan of the rounds in flight.
            spare: seconds for which the device is busy meanwhile.
        """
        if not len(batch):
            return False
        proposals = self.gathering.ask(batch, spare=spare)
        if proposals is None or (trees := proposals.trees) is None:
            return False
        if plan.head is None or (self.policy.costs.free and not self.unites):
            return True
        head = [plan.head[row] for row in rows]
        if not any(head):
            return False
        if self._prefers_others(batch, head, trees):
            return True
        return self.joins_others(batch, head, trees)

    # -- after a round ------------------------------------------------------------------------------------------

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a round, and charge its cost."""
        plan, passed = outcome.plan, outcome.passed
        sizes = [1] * len(passed)
        if plan.drafts:
            made = plan.trees is not None and not plan.united
            sizes = [len(plan.trees.drafts[i]) for i in outcome.rows] if made else outcome.verified.trees.sizes  # type: ignore[union-attr]
        for p, nodes in zip(passed, sizes, strict=True):
            p.request.proposed += nodes - 1
            p.request.drafting_rounds += nodes > 1
        free = self.policy.costs.free
        if not free:
            self._observe_costs(outcome)
            for p in passed:
                if p.request.params.speculative:
                    self.account(p.request).earn(p.kept, len(passed))
        if not any(p.request.error is not None for p in passed):  # a walk cut short says nothing of drafts
            merged = plan.trees is not None and not plan.united
            accepted = self._accepted(outcome) if any(outcome.head) and (merged or not free) else []
            if not free:
                self._observe_head(outcome, accepted)
                self._book(outcome, sizes)
        self._batch = len(passed)
        # This comes last, because a user's code may be interrupted.
        self.gathering.watch([p.request for p in passed], outcome.verified)

    def _accepted(self, outcome: RoundOutcome) -> list[int]:
        """Return the number of accepted drafts of the head for each request, and calibrate its claims if the host
        merged them with others."""
        plan, passed = outcome.plan, outcome.passed
        if plan.united:
            return head_accepted(outcome.verified, passed)
        if plan.trees is not None:
            heads = [plan.trees.head[row] for row in outcome.rows]
            return [self.gathering.grade_head(head, p) for head, p in zip(heads, passed, strict=True)]
        return [len(p.tokens) - 1 for p in passed]

    def _observe_costs(self, outcome: RoundOutcome) -> None:
        """Learn the time of such rounds."""
        plan, costs, size = outcome.plan, self.policy.costs, len(outcome.passed)
        if outcome.seconds is None:
            return
        if not plan.drafts:
            kind, passes = PLAIN, costs.target.at(size)
        elif plan.head is None:
            kind, passes = HOSTED, costs.target.at(self._rows(outcome))
        elif any(outcome.head) and not plan.united:
            kind, passes = SPECULATIVE, self._passes(outcome) - costs.overhead.at(SPECULATIVE)
        else:
            return  # the host reads the results of a round with united trees, so that it takes longer than others
        costs.observe(kind, size, passes, outcome.seconds)

    def _rows(self, outcome: RoundOutcome) -> int:
        """Return the number of rows of the target's pass over drafts."""
        plan, size = outcome.plan, len(outcome.passed)
        if plan.trees is None or plan.united:
            return sum(outcome.verified.trees.sizes)
        sizes = [len(tree) for tree in plan.trees.drafts]
        if not self.launched:
            return sum(sizes)
        return size * next(n for n in tiers(self._shape.draft_tokens) if n >= max(sizes))

    def _passes(self, outcome: RoundOutcome) -> float:
        """Return the seconds that a round with the head's drafts is modelled to take."""
        costs, size = self.policy.costs, len(outcome.passed)
        return costs.drafting(size, size * self._shape.topk, outcome.plan.levels) + costs.target.at(self._rows(outcome))

    def _observe_head(self, outcome: RoundOutcome, accepted: Sequence[int]) -> None:
        """Learn from the number of accepted drafts of the head for each request; there are none without the head."""
        plan, passed = outcome.plan, outcome.passed
        if not accepted:
            return
        gain = sum(len(p.tokens) for p in passed) / len(passed)
        gain *= self.policy.costs.plain(len(passed)) / self._passes(outcome)
        for p, count, drafts in zip(passed, accepted, outcome.head, strict=True):
            if drafts:
                kind = self.policy.kind(p.request.params.temperature)
                kind.learn(gain)
                if self.launched and p.request.finish_reason is None:  # one that has ended had less room than others
                    kind.reached(count, min(plan.levels, len(p.tokens)))

    def _book(self, outcome: RoundOutcome, sizes: Sequence[int]) -> None:
        """Book the plain rounds that drafts of any source have won or lost.

        Args:
            sizes: nodes of each request's tree.
        """
        plan, size = outcome.plan, len(outcome.passed)
        each = zip(outcome.passed, sizes, outcome.head, strict=True)
        drew = [p for p, nodes, drafts in each if drafts or nodes > 1]
        if not drew:
            return
        # This is the modelled time, not the measured one, so that a stall of the machine decides nothing.
        hosted = plan.trees if plan.head is None else None
        took = self._passes(outcome) if hosted is None else hosted.seconds
        wins = [p.kept - 1 for p in drew]  # drafts after a stop won nothing
        verify = sum(nodes > 1 for nodes in sizes)
        for p, won in zip(drew, self.policy.won(size, verify, took, wins), strict=True):
            self.account(p.request).pay(-won, size)
