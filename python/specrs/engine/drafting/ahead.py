"""Trees that are decided before a round, for executors that launch its passes together.

Nobody sees a round's scores before it has ended, so depth goes by how deep drafts have been accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from specrs._specrs import TreeBatch, TreeShape
from specrs.engine.drafting.chooser import TreePolicy
from specrs.engine.drafting.costs import HOSTED, PLAIN, SPECULATIVE
from specrs.engine.drafting.speculation import AdaptiveTree, Outlook, PassKind, Share
from specrs.engine.request.batch import Batch, Passed

_LEARN = 0.05
_MOST_UNITED, _LONGEST_BRANCH = 64, 8  # of `cuda/tree_unite.cu`, and `off_spine` of `MergeLimits`
_ADDS = 0.5  # of other sources' drafts that are accepted, how many the head is taken not to have, before any was tried
_RETRY = (
    16  # tokens of a request until it is asked again, where a round with drafts of too few would have been too dear
)
_FORGETS = 5e-4  # of what was learnt of that, how much each round without both takes back, so that both are tried again

_P = ParamSpec("_P")
_T = TypeVar("_T")


def most_nodes(shape: TreeShape, levels: int) -> int:
    """Nodes of a request's tree of so many levels of drafts at most, root included."""
    k = shape.topk
    return min(shape.draft_tokens, 1 + k + (levels - 1) * k * k) if levels else 1


def tiers(most: int) -> list[int]:
    """Nodes of a request's tree, of up to so many, that rounds of the host's trees are made for: powers of two."""
    return [*(1 << i for i in range(1, most.bit_length()) if 1 << i < most), most]


def levels_for(shape: TreeShape, nodes: int) -> int:
    """Levels of drafts whose trees have as many nodes as the tier of so many."""
    tier = next(n for n in tiers(shape.draft_tokens) if n >= nodes)
    return next(n for n in range(1, shape.steps + 1) if most_nodes(shape, n) >= tier)


def unites(shape: TreeShape) -> bool:
    """Whether a device makes one tree of a head's drafts and of other trees: none is larger than its kernel takes, and
    the head's branches are no longer than exact attention takes beside a deeper path."""
    return shape.draft_tokens <= _MOST_UNITED and shape.steps <= _LONGEST_BRANCH


def united_levels(shape: TreeShape, levels: int, nodes: int) -> int:
    """Levels of drafts whose trees have room for ``levels`` of the head's and a tree of so many nodes beside."""
    return max(levels, levels_for(shape, min(most_nodes(shape, levels) + nodes - 1, shape.draft_tokens)))


def drafted_levels(shape: TreeShape) -> set[int]:
    """Levels that are drafted at all: a graph is made for each, and rounds between them differ by little."""
    return {1, (shape.steps + 1) // 2, shape.steps}


class AheadTree(AdaptiveTree):
    """Gates as `AdaptiveTree` does; a batch drafts as deep as the yield of each level so far pays.

    cold: whether the last round took longer than others like it will, since it made memory or a graph.
    """

    given = True
    merges = False  # the device drafts and verifies in one launch, and unites trees within it (`unites`)

    def __init__(
        self, policy: TreePolicy, shape: TreeShape, page: int = 1, cold: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__(policy, shape.topk, page)
        self._adds = _ADDS
        self._entering = False  # a request of a batch drafts for the first time
        self._shape, self._cold = shape, cold
        self._tried = drafted_levels(shape)
        self._levels = 1  # of the last round

    def drafting(self, batch: Batch) -> list[bool]:
        drafting = super().drafting(batch)
        for r, drafts in zip(batch, drafting, strict=True):
            if not drafts and self._wakes.get(r.request_id, 0) <= len(r.tokens):
                self._wakes[r.request_id] = len(r.tokens) + _RETRY  # meanwhile rounds run ahead of the host
        return drafting

    def cap(self, batch: Batch, drafting: Sequence[bool]) -> int:
        self._levels = self._best(batch, drafting)
        return self._levels

    def prefers_others(self, batch: Batch, drafting: Sequence[bool], others: Outlook) -> bool:
        return (
            super().prefers_others(batch, drafting, others) and others.rate > self._together(batch, drafting, others)[1]
        )

    def unites(self, batch: Batch, drafting: Sequence[bool], others: Outlook) -> bool:
        if not others.pays:
            return False
        head, both = self._together(batch, drafting, others)
        return both > head

    def _together(self, batch: Batch, drafting: Sequence[bool], others: Outlook) -> tuple[float, float]:
        """Tokens a second that the head's drafts are expected to yield, alone and united with those of others."""
        costs, size, shape = self.policy.costs, len(batch), self._shape
        levels, tokens, seconds = self._outlook(batch, drafting)
        most = min(others.most, shape.draft_tokens)
        rows = most_nodes(shape, united_levels(shape, levels, most))
        more = others.rate * (costs.overhead.at(HOSTED) + costs.target.at(size * most)) - size
        # The host has to look at such a round before the next.
        longer = costs.overhead.at(HOSTED) + costs.target.at(size * rows)
        longer -= costs.target.at(size * most_nodes(shape, levels))
        return tokens / seconds, (tokens + self._adds * max(more, 0.0)) / (seconds + longer)

    def stays(self, batch: Batch, drafting: Sequence[bool]) -> bool:
        drew = [r for r, drafts in zip(batch, drafting, strict=False) if drafts]
        least = self.policy.least_loss(len(batch), max(len(drew), 1))
        if any(self.account(r).room(r.produced, len(batch)) < least for r in drew):
            return False
        return self._best(batch, drafting) == self._levels

    def _best(self, batch: Batch, drafting: Sequence[bool]) -> int:
        return self._outlook(batch, drafting)[0]

    def _outlook(self, batch: Batch, drafting: Sequence[bool]) -> tuple[int, float, float]:
        """The number of levels that yields most a second; tokens that a round of it is expected to give, and its
        seconds."""
        kinds = [self.kind(r) for r, d in zip(batch, drafting, strict=True) if d]
        costs, limit = self.policy.costs, self.limit(batch, drafting)
        shape, size = self._shape, len(batch)
        best, best_rate, expected = (1, float(size), costs.plain(size)), 0.0, float(size)
        reached = [1.0] * len(kinds)
        for levels in range(1, shape.steps + 1):
            reached = [p * kind.levels[levels - 1] for p, kind in zip(reached, kinds, strict=True)]
            expected += sum(reached)
            if levels not in self._tried:
                continue
            seconds = costs.drafting(size, size * shape.topk, levels - 1)
            seconds += costs.target.at(size * most_nodes(shape, levels))
            if levels > 1 and seconds > limit:
                break
            if expected / seconds > best_rate:
                best, best_rate = (levels, expected, seconds), expected / seconds
        return best

    def timed(self, kind: PassKind, rows: int, run: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return run(*args, **kwargs)  # how long a launch takes says nothing of its pass

    @property
    def cold(self) -> bool:
        return self._cold()

    def begin(self, speculative: bool, since: float | None = None) -> None:
        self._started = time.perf_counter() if since is None else since

    def plain_round(self, batch: Batch) -> None:
        size = len(batch)
        self._learn(PLAIN, self.policy.costs.target.at(size), size)
        super().plain_round(batch)

    def _learn(self, kind: int, passes: float, size: int) -> None:
        """A round of ``size`` requests ended, of passes that are modelled to take so long. Rounds that run behind each
        other take less than one by itself, or more where the host is slower than the device: both must be known to
        compare them."""
        if self._cold():
            return
        costs, elapsed = self.policy.costs, self._elapsed()
        costs.overhead.observe(kind, min(max(elapsed - passes, -passes / 2), 2 * passes))
        if kind != PLAIN and elapsed < costs.plain(size):  # a plain round does nothing that this one does not
            plain = costs.target.at(size)
            costs.overhead.observe(PLAIN, max(elapsed - plain, -plain / 2))

    def _charged(self, seconds: float) -> float:
        # Sampling, and features that are caught up with, take time that no model of passes has. In a batch, a round in
        # which some draft for the first time takes longer for their prompts, which others must not pay.
        return seconds if self._cold() or self._entering else super()._charged(seconds)

    def _observe_overhead(self, kind: int) -> None:
        """`_learn` does."""

    def spec_round(
        self,
        passed: Sequence[Passed],
        trees: Callable[[], TreeBatch],
        drafting: Sequence[bool],
        steps: int,
        shares: Sequence[Share] | None = None,
    ) -> None:
        costs, size = self.policy.costs, len(passed)
        if not drafting:  # trees of the host
            most = max(trees().sizes)
            tier = next(n for n in tiers(self._shape.draft_tokens) if n >= most)
            self._learn(HOSTED, costs.target.at(size * tier), size)
            self._batch = size
            return
        # In the first one of a request, the device still runs over its prompt.
        first = any(d and p.request.drafting_rounds < 2 for p, d in zip(passed, drafting, strict=True))
        self._entering = first and size > 1
        if any(drafting) and shares is None and not first:
            passes = costs.drafting(size, size * self._topk, steps) - costs.overhead.at(SPECULATIVE)
            self._learn(SPECULATIVE, passes + costs.target.at(sum(trees().sizes)), size)
        super().spec_round(passed, trees, drafting, steps, shares)
        if shares is None:
            self._adds += _FORGETS * (_ADDS - self._adds)
        for p, share in zip(passed, shares or (), strict=shares is not None):
            if share.others:
                added = max(len(p.tokens) - 1 - share.accepted, 0)
                self._adds += _LEARN * (min(added / share.others, 1.0) - self._adds)
        for i, (p, drafts) in enumerate(zip(passed, drafting, strict=True)):
            accepted = len(p.tokens) - 1 if shares is None else shares[i].accepted
            # One that has ended had less room than the others.
            if drafts and p.request.finish_reason is None:
                kept = self.kind(p.request).levels
                for level in range(min(steps + 1, accepted + 1)):
                    kept[level] += _LEARN * ((accepted > level) - kept[level])
