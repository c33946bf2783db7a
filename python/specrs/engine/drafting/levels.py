"""Trees that are decided before a round, by levels of drafts, for devices that launch all passes of a round together.

Nobody sees a round's scores before it has ended, so depth goes by how deep drafts have been accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrs._specrs import TreeShape
from specrs.engine.drafting.chooser import Kind
from specrs.engine.drafting.costs import Costs

_MOST_UNITED, _LONGEST_BRANCH = 64, 8  # of `cuda/tree_unite.cu`, and `off_spine` of `MergeLimits`


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


def can_unite(shape: TreeShape) -> bool:
    """Whether a device makes one tree of a head's drafts and of other trees: none is larger than its kernel takes, and
    the head's branches are no longer than exact attention takes beside a deeper path."""
    return shape.draft_tokens <= _MOST_UNITED and shape.steps <= _LONGEST_BRANCH


def united_levels(shape: TreeShape, levels: int, nodes: int) -> int:
    """Levels of drafts whose trees have room for ``levels`` of the head's and a tree of so many nodes beside."""
    return max(levels, levels_for(shape, min(most_nodes(shape, levels) + nodes - 1, shape.draft_tokens)))


def drafted_levels(shape: TreeShape) -> set[int]:
    """Levels that are drafted at all: a graph is made for each, and rounds between them differ by little."""
    return {1, (shape.steps + 1) // 2, shape.steps}


def best_levels(
    shape: TreeShape, costs: Costs, kinds: Sequence[Kind], batch: int, limit: float
) -> tuple[int, float, float]:
    """The number of levels that yields most tokens a second in a round that takes ``limit`` seconds at most.

    Args:
        kinds: of the requests that draft.
        batch: all requests of the round.

    Returns:
        The levels, the tokens that such a round is expected to give, and its seconds.
    """
    best, best_rate, expected = (1, float(batch), costs.plain(batch)), 0.0, float(batch)
    reached, tried = [1.0] * len(kinds), drafted_levels(shape)
    for levels in range(1, shape.steps + 1):
        reached = [p * kind.levels[levels - 1] for p, kind in zip(reached, kinds, strict=True)]
        expected += sum(reached)
        if levels not in tried:
            continue
        seconds = costs.drafting(batch, batch * shape.topk, levels - 1)
        seconds += costs.target.at(batch * most_nodes(shape, levels))
        if levels > 1 and seconds > limit:
            break
        if expected / seconds > best_rate:
            best, best_rate = (levels, expected, seconds), expected / seconds
    return best
