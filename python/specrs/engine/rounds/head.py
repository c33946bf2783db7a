"""The draft head's part of a round: draft KV, roots to draft from, and trees.

The head's entry at position p pairs the target's features of p with the token at p + 1. If the head gives NaN, the
request loses its drafts and nothing else. An executor runs the passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrs._specrs import DraftBeams, NonFiniteError
from specrs.engine.drafting.decisions import Drafting
from specrs.engine.drafting.plans import RoundPlan
from specrs.engine.drafting.trees import Drafted
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Request
from specrs.engine.rounds.executor import DraftExecutor, Pass
from specrs.engine.rounds.observer import RoundObserver

_MAX_LAG = 64  # positions that a head which catches up may be behind a request after a round


class Head:
    """Brings the draft KV of requests up to date, and drafts from there.

    Args:
        executor: runs the head.
        drafting: decides how far the head drafts.
        observers: see the head's passes; the list is shared with the runner.
    """

    def __init__(self, executor: DraftExecutor, drafting: Drafting, observers: Sequence[RoundObserver]) -> None:
        self._executor, self._drafting, self._observers = executor, drafting, observers

    # -- draft KV -----------------------------------------------------------------------------------------------

    def keep(self, batch: Batch, passed: Pass, rows: Sequence[Sequence[int]]) -> None:
        """Keep what the head needs of positions that a pass has just committed (`DraftExecutor.keep`)."""
        if any(r.head.followed for r in batch):
            self._executor.keep(batch, passed, rows)

    def after_prefill(self, reqs: Sequence[Request]) -> None:
        """Run the head over the last positions of prompts, as far as they are read, of requests that can pay.

        For others it begins behind the prompt's full pages, because these may be shared from now on.
        """
        self._begin(reqs)
        self.extend([r for r in reqs if r.lag and self._drafting.goes_on(r, len(reqs))])
        for r in reqs:
            if r.lag:
                r.head.begin(self._drafting.page(r.committed))

    def after_round(self, batch: Batch, drafted: Sequence[bool]) -> None:
        """Run the head over the new tokens of requests that it has drafted for, so that the next round drafts at once.

        Behind others it never stays further than it would have to read (`Drafting.begins`); and where catching up costs
        next to nothing, it does so before much waits for it.
        """
        if any(drafted) or self._executor.catches_up:
            going = [(r, drew) for r, drew in zip(batch, drafted, strict=True) if r.finish_reason is None]
            late = [r for r, drew in going if not drew and r.lag >= _MAX_LAG and self._executor.catches_up]
            self._drafting.catch_up(late, len(batch))
            self.extend([r for r, drew in going if drew] + late)
        self._begin(batch.requests)

    def _begin(self, reqs: Sequence[Request]) -> None:
        """Let the head begin anew near the end of requests that it is further behind."""
        for r in reqs:
            if r.head.warm and r.lag:
                r.head.begin(self._drafting.begins(r))

    def extend(self, reqs: Sequence[Request]) -> None:
        """Run the head over all committed positions, so that draft KV, logits and hidden state reach the root."""
        reqs = self._behind(reqs)
        roots = self._executor.extend(reqs) if reqs else ()
        for r, root in zip(reqs, roots, strict=True):
            if isinstance(root, NonFiniteError):
                r.give_up_drafts(r.head.end, root)
            else:
                r.head.reached(r.committed, root)

    def _behind(self, reqs: Sequence[Request]) -> list[Request]:
        """Return the requests that the head has to run over, and tell the observers. Give up those that it cannot."""
        for r in reqs:
            if r.lag and not self._executor.can_extend(r):
                r.give_up_drafts(r.head.end)
        behind = [r for r in reqs if r.lag]
        for o in self._observers if behind else ():
            o.extended([r.seq for r in behind], [r.head.end for r in behind], [r.lag for r in behind])
        return behind

    # -- drafts -------------------------------------------------------------------------------------------------

    def draft(self, plan: RoundPlan) -> Drafted:
        """Draft a tree for each request that the plan names, and a root alone for the others.

        Drafts of other sources come into the same trees: the host merges both, or the device unites them.
        """
        self.extend(plan.drafting)
        if self._drafting.merges(plan):
            drafted = self._step_by_step(plan)
            beside = self._drafting.clock() - plan.began
            return self._drafting.gathering.merge_with_head(plan.batch, plan.proposals, drafted, beside)
        if self._observers:
            return self._step_by_step(plan)
        drafted = self._executor.draft(plan.batch, self._depths(plan), None)
        if plan.trees is None:
            return drafted
        return self._executor.unite(drafted, plan.trees.trees) or plan.trees

    def _step_by_step(self, plan: RoundPlan) -> Drafted:
        """Draft step by step, as long as another step pays."""

        def deepen(beams: DraftBeams, depths: Sequence[int], levels: int) -> bool:
            if not self._drafting.deepen(plan, beams, depths, levels):
                return False
            for o in self._observers:
                o.drafted(beams)
            return True

        return self._executor.draft(plan.batch, self._depths(plan), deepen)

    def _depths(self, plan: RoundPlan) -> list[int]:
        """Return the deepest useful level of each request's drafts; 0 for no drafts."""
        drafting = zip(plan.batch, plan.head or (), strict=True)
        return [min(r.max_depth, plan.levels) if drafts and r.head.followed else 0 for r, drafts in drafting]
