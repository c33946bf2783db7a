"""Trees that are decided before a round, for executors that launch its passes together.

Nobody sees a round's scores before it has ended, so depth goes by how deep drafts have been accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from specrs._specrs import TreeBatch, TreeShape
from specrs.engine.batch import Batch, Passed
from specrs.engine.costs import PLAIN, SPECULATIVE
from specrs.engine.policy import Kind, SpeculationGate, TreePolicy
from specrs.engine.speculation import AdaptiveTree, Outlook, PassKind, Share

_KEEP = 0.6  # of drafts accepted so far, how many are taken to be accepted a level deeper, before any was tried
_LEARN = 0.05
_MOST_UNITED, _LONGEST_BRANCH = 64, 8  # of `cuda/tree_unite.cu`, and `off_spine` of `MergeLimits`
_ADDS = 0.5  # of other sources' drafts that are accepted, how many the head is taken not to have, before any was tried
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


class AheadPolicy(TreePolicy):
    """Drafts from the first round on, and again once it has lost what it may, without a look back: a round of one level
    costs less than asking the head would.

    What that may lose is the account's to bound, as ever.
    """

    def early(self, gate: SpeculationGate, lag: int) -> bool:
        return True


class AheadTree(AdaptiveTree):
    """Gates as `AdaptiveTree` does; a batch drafts as deep as the yield of each level so far pays.

    cold: whether the last round took longer than others like it will, since it made memory or a graph.
    """

    given = True
    merges = False  # the device drafts and verifies in one launch, and unites trees within it (`joined`)

    def __init__(self, policy: TreePolicy, shape: TreeShape, cold: Callable[[], bool] = lambda: False) -> None:
        super().__init__(policy, shape.topk)
        self._adds = _ADDS
        self._shape, self._cold = shape, cold
        self._tried = drafted_levels(shape)
        self._levels = 1  # of the last round
        self._keeps: dict[int, list[float]] = {}  # by kind: of each level, the share that is accepted if its parent is

    def cap(self, batch: Batch, drafting: Sequence[bool]) -> int:
        self._levels = self._best(batch, drafting)
        return self._levels

    def alone(self, batch: Batch, drafting: Sequence[bool], others: Outlook) -> bool:
        return super().alone(batch, drafting, others) and others.rate > self._together(batch, drafting, others)[1]

    def joined(self, batch: Batch, drafting: Sequence[bool], others: Outlook) -> bool:
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
        more = others.rate * (costs.overhead.at(SPECULATIVE) + costs.target.at(size * most)) - size
        # The host has to look at such a round before the next.
        longer = costs.overhead.at(SPECULATIVE) + costs.target.at(size * rows)
        longer -= costs.target.at(size * most_nodes(shape, levels))
        return tokens / seconds, (tokens + self._adds * max(more, 0.0)) / (seconds + longer)

    def stays(self, batch: Batch, drafting: Sequence[bool]) -> bool:
        drew = [r for r, drafts in zip(batch, drafting, strict=False) if drafts]
        stake = self.policy.stake(len(batch), max(len(drew), 1))
        if any(self._gate(r).account(r.produced) < stake for r in drew):
            return False
        return self._best(batch, drafting) == self._levels

    def _best(self, batch: Batch, drafting: Sequence[bool]) -> int:
        return self._outlook(batch, drafting)[0]

    def _outlook(self, batch: Batch, drafting: Sequence[bool]) -> tuple[int, float, float]:
        """The number of levels that yields most a second; tokens that a round of it is expected to give, and its
        seconds."""
        kinds = [self._gate(r).kind for r, d in zip(batch, drafting, strict=True) if d]
        costs, limit = self.policy.costs, self.limit(batch, drafting)
        shape, size = self._shape, len(batch)
        best, best_rate, expected = (1, float(size), costs.plain(size)), 0.0, float(size)
        reached = [1.0] * len(kinds)
        for levels in range(1, shape.steps + 1):
            reached = [p * self._keep(kind)[levels - 1] for p, kind in zip(reached, kinds, strict=True)]
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

    def _keep(self, kind: Kind) -> list[float]:
        return self._keeps.setdefault(id(kind), [_KEEP] * self._shape.steps)

    def timed(self, kind: PassKind, rows: int, run: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return run(*args, **kwargs)  # how long a launch takes says nothing of its pass

    @property
    def cold(self) -> bool:
        return self._cold()

    def begin(self, speculative: bool) -> None:
        self._started = time.perf_counter()

    def plain_round(self, batch: Batch) -> None:
        if not self._cold():
            costs = self.policy.costs
            rest = time.perf_counter() - self._started - costs.target.at(len(batch))
            costs.overhead.observe(PLAIN, max(rest, 0.0))
        super().plain_round(batch)

    def _charged(self, seconds: float) -> float:
        # Sampling, and features that are caught up with, take time that no model of passes has.
        return seconds if self._cold() else super()._charged(seconds)

    def _observe_overhead(self, kind: int) -> None:
        """`plain_round` does."""

    def spec_round(
        self,
        passed: Sequence[Passed],
        trees: Callable[[], TreeBatch],
        drafting: Sequence[bool],
        steps: int,
        shares: Sequence[Share] | None = None,
    ) -> None:
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
                keep = self._keep(self._gate(p.request).kind)
                for level in range(min(steps + 1, accepted + 1)):
                    keep[level] += _LEARN * ((accepted > level) - keep[level])
