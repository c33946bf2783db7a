"""The draft head's part of a round: features that wait, draft KV, roots to draft from, and trees.

The head's entry at position p pairs the target's features of p with the token at p + 1. Features wait on their request
until the head runs over them. If the head gives NaN, the request loses its drafts and nothing else. An executor runs
the passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from specrs._specrs import DraftBeams, NonFiniteError
from specrs.engine.drafting.decisions import Drafting
from specrs.engine.drafting.plans import RoundPlan
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Request
from specrs.engine.rounds.executor import Drafted, DraftExecutor, Entries, Pass, Watched
from specrs.engine.rounds.observer import RoundObserver

_MAX_LAG = 64  # features that a request may hold


class Head:
    """Brings the draft KV of requests up to date, and drafts from there.

    Args:
        executor: runs the head.
        drafting: decides how far the head drafts.
        observers: see the head's passes; the list is shared with the runner.
    """

    def __init__(self, executor: DraftExecutor, drafting: Drafting, observers: Sequence[RoundObserver]) -> None:
        self._executor, self._drafting, self._observers = executor, drafting, observers

    # -- features -----------------------------------------------------------------------------------------------

    def remember(self, batch: Batch, passed: Pass, rows: Sequence[Sequence[int]]) -> None:
        """Keep the target's features of newly committed positions until the head has run over them.

        If the device has already run the head over these positions, take its root instead.

        Args:
            rows: rows of the pass to keep, per request.
        """
        for i, (r, index) in enumerate(zip(batch, rows, strict=True)):
            if not index or not r.head.followed:
                continue
            root = passed.root(i)
            if root is not None:
                r.head.reached(r.committed, root)
            else:
                r.head.wait(passed.features(i, index))

    def bound_features(self, batch: Batch) -> None:
        """Let go of the oldest features of requests that have not drafted for long.

        A head that cannot begin anywhere gives up their drafts.
        """
        for r in batch:
            if r.head.lag < _MAX_LAG:
                continue
            position = self._drafting.begins(r)
            if not self._drafting.anywhere:
                r.give_up_drafts(r.head.end)
            elif position > r.head.end:
                r.head.begin(position)

    # -- passes -------------------------------------------------------------------------------------------------

    def after_prefill(self, reqs: Sequence[Request]) -> None:
        """Write the draft KV of prompts, as far as they are prefilled: near the end alone if the head may begin there.

        A complete prompt gets its root too.
        """
        for r in reqs:
            if r.head.followed:
                r.head.begin(self._drafting.begins(r))
        self.write([r for r in reqs if not r.ready and not r.head.first])
        self.extend([r for r in reqs if r.ready])

    def write(self, reqs: Sequence[Request]) -> None:
        """Write the draft KV of all features that wait."""
        reqs = [r for r in reqs if r.head.lag]
        if not reqs:
            return
        entries = self._entries(reqs)
        errors = self._executor.write(entries)
        for r, start, n, error in zip(reqs, entries.starts, entries.counts, errors, strict=True):
            if error is not None:
                r.give_up_drafts(start, error)
            else:
                r.head.wrote(n)

    def extend(self, reqs: Sequence[Request]) -> None:
        """Run the head over the features that wait, so that draft KV, logits and hidden state reach the root."""
        reqs = [r for r in reqs if r.head.lag]
        if not reqs:
            return
        entries = self._entries(reqs)
        roots = self._executor.extend(entries)
        for r, start, n, root in zip(reqs, entries.starts, entries.counts, roots, strict=True):
            if isinstance(root, NonFiniteError):
                r.give_up_drafts(start, root)
            else:
                r.head.reached(start + n, root)

    def draft(self, plan: RoundPlan) -> Drafted:
        """Draft a tree for each request that the plan names, and a root alone for the others.

        Drafts of other sources, if any, come into the same trees: the host merges both, or the device unites them. If
        the device cannot, the head drafts alone.
        """
        drafting, proposals = self._drafting, plan.proposals
        for r in plan.drafting:
            if r.head.lag:
                r.head.begin(drafting.begins(r))
        self.extend(plan.drafting)
        if drafting.gathering is None or proposals is None or not proposals.nodes:
            return self._alone(plan)
        if drafting.unites and not self._observers:
            return self._united(plan)
        if drafting.launched and drafting.policy is not None:
            return self._alone(plan)
        drafted = self._step_by_step(plan)
        plan.trees = drafting.gathering.merge_with_head(
            plan.batch, proposals, drafted.trees, drafted.steps, drafted.faults, plan.limit,
            None if drafting.policy is None else drafting.policy.costs,
        )  # fmt: skip
        return plan.trees

    def _alone(self, plan: RoundPlan) -> Drafted:
        """Draft with the head alone."""
        if (self._drafting.launched or self._drafting.policy is None) and not self._observers:
            return self._executor.draft(plan.batch, [min(n, plan.levels) for n in self._depths(plan)], None)
        drafted = self._step_by_step(plan)
        least = self._drafting.least_score(plan, drafted.trees, drafted.steps)
        return drafted if least is None else self._executor.cut(drafted, least)

    def _united(self, plan: RoundPlan) -> Drafted:
        """Draft with the head, for the device to unite with drafts of other sources if that yields more."""
        drafted, drafting, proposals = self._alone(plan), self._drafting, plan.proposals
        assert plan.head is not None and proposals is not None and drafting.gathering is not None
        if not drafting.joins_others(plan.batch, plan.head, proposals):
            return drafted
        trees = drafting.gathering.trees_of(proposals)
        both = self._executor.unite(drafted, trees.trees)
        if both is None:
            return drafted
        plan.trees, plan.united = trees, True
        return both

    def _step_by_step(self, plan: RoundPlan) -> Watched:
        """Draft step by step, as long as another step pays."""

        def deepen(beams: DraftBeams, depths: Sequence[int], levels: int) -> bool:
            if not self._drafting.deepen(plan, beams, depths, levels):
                return False
            for o in self._observers:
                o.drafted(beams)
            return True

        return cast(Watched, self._executor.draft(plan.batch, self._depths(plan), deepen))

    def _depths(self, plan: RoundPlan) -> list[int]:
        """Return the deepest useful level of each request's drafts; 0 for no drafts."""
        drafting = zip(plan.batch, plan.head or (), strict=True)
        return [r.max_depth if drafts and r.head.followed else 0 for r, drafts in drafting]

    def _entries(self, reqs: Sequence[Request]) -> Entries:
        """Return all positions that wait."""
        starts, counts = [r.head.end for r in reqs], [r.head.lag for r in reqs]
        entries = Entries(reqs, [r.seq for r in reqs], starts, counts)
        for o in self._observers:
            o.extended(entries.seqs, starts, counts)
        return entries
