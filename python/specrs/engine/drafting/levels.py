"""The choice of a tree by its levels before a round, for devices that launch all passes of a round together.

Nobody sees a round's scores before the round has ended, so the depth is chosen by how deep drafts were accepted so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specrs._specrs import TreeShape
from specrs.engine.drafting.chooser import Kind, TreePolicy
from specrs.engine.drafting.costs import Costs, Pace, PassCost

_MOST_UNITED, LONGEST_BRANCH = 64, 8  # limits of `cuda/tree_unite.cu`, and `MergeLimits.off_spine`


def most_nodes(shape: TreeShape, levels: int) -> int:
    """Return the most nodes that a request's tree of ``levels`` levels of drafts has, root included."""
    k = shape.topk
    return min(shape.draft_tokens, 1 + k + (levels - 1) * k * k) if levels else 1


def tiers(most: int) -> list[int]:
    """Return the tree sizes that rounds of the host's trees are made for: powers of two below ``most``, and
    ``most``."""
    return [*(1 << i for i in range(1, most.bit_length()) if 1 << i < most), most]


def levels_for(shape: TreeShape, nodes: int) -> int:
    """Return the fewest levels of drafts whose trees have as many nodes as the tier of ``nodes`` nodes."""
    tier = next(n for n in tiers(shape.draft_tokens) if n >= nodes)
    return next(n for n in range(1, shape.steps + 1) if most_nodes(shape, n) >= tier)


def can_unite(shape: TreeShape) -> bool:
    """Return whether a device can unite a head's drafts with other trees.

    The trees must not be larger than the device's kernel takes, and the head's branches not longer than exact attention
    takes beside a deeper path.
    """
    return shape.draft_tokens <= _MOST_UNITED and shape.steps <= LONGEST_BRANCH


def united_levels(shape: TreeShape, levels: int, nodes: int) -> int:
    """Return the fewest levels whose trees have room for ``levels`` of the head's and another tree of ``nodes``
    nodes."""
    return max(levels, levels_for(shape, min(most_nodes(shape, levels) + nodes - 1, shape.draft_tokens)))


def drafted_levels(shape: TreeShape, sized: bool) -> set[int]:
    """Return the numbers of levels to draft: a graph is made for each, and numbers in between would differ little.

    Args:
        sized: True if numbers of levels stand for sizes of trees: of heads that draft all levels in one pass, whose
            trees may have more nodes than levels.
    """
    if sized:
        return {1, *(nodes - 1 for nodes in (8, 16, 32, 64) if nodes <= shape.steps), shape.steps}
    return {1, (shape.steps + 1) // 2, shape.steps}


def costs_of_rounds(
    shape: TreeShape,
    measured: Mapping[int, Mapping[int, float]],
    enter: Mapping[int, float],
    resume: Mapping[int, float],
) -> Costs:
    """Return the costs of passes that explain the measured times of whole rounds.

    Rounds of one request tell what drafting takes, and those of the largest batch what more rows take. Drafting is
    taken to last as long for all requests as for one.

    Args:
        shape: the shape of the deepest trees.
        measured: seconds of rounds by the number of requests and the number of levels of drafts, among them 1 request,
            and 0 and 1 levels.
        enter: seconds of the passes after which a request drafts for the first time, by the positions that the head
            reads; ascending.
        resume: the same of a request that drafts again.
    """
    one, pace = measured[1], Pace()
    extend = max(one[1] - one[0], 0.0)
    # The two deepest of these trees have about as many nodes, so that they differ by draft steps. More nodes cost no
    # less, so that the steps in front cost no less either.
    less, deep = sorted(one)[-2:]
    steps = [(one[deep] - one[levels]) / (deep - levels) for levels in (1, less) if 0 < levels < deep]
    step = max(min(steps, default=0.0), 0.0)
    target = {
        batch * most_nodes(shape, levels): seconds - (extend + (levels - 1) * step if levels else 0.0)
        for batch, rounds in sorted(measured.items(), reverse=True)  # of equal rows, those of one request count
        for levels, seconds in rounds.items()
    }
    rows = sorted(target)
    begin, again = (PassCost(list(passes), list(passes.values()), pace) for passes in (enter, resume))
    return Costs(
        PassCost(rows, [target[n] for n in rows], pace), PassCost([1], [step], pace), PassCost([1], [extend], pace),
        again, begin,
    )  # fmt: skip


def round_seconds(shape: TreeShape, costs: Costs, batch: int, levels: int) -> float:
    """Return the seconds of a round with trees of ``levels`` levels of drafts, at least 1."""
    return costs.drafting(batch, batch * shape.topk, levels) + costs.target.at(batch * most_nodes(shape, levels))


def best_levels(
    shape: TreeShape, policy: TreePolicy, kinds: Sequence[Kind], batch: int, left: float, deepest: int
) -> int:
    """Choose the number of levels with the most tokens per second.

    Args:
        kinds: the kind of each request that drafts.
        batch: number of all requests of the round.
        left: plain rounds that the requests that draft may still lose. No tree of more than one level risks more.
        deepest: the deepest level that any request can use.
    """
    choices, expected = list[tuple[float, int]](), float(batch)
    reached, tried = [1.0] * len(kinds), drafted_levels(shape, policy.sized)
    for levels in range(1, shape.steps + 1):
        reached = [p * kind.levels[levels - 1] for p, kind in zip(reached, kinds, strict=True)]
        expected += sum(reached)
        if levels not in tried:
            continue
        seconds = round_seconds(shape, policy.costs, batch, levels)
        if levels > 1 and policy.lost(batch, len(kinds), seconds) > left:
            break
        choices.append((expected / seconds, levels))
        if levels >= deepest and not policy.sized:
            break
    return max(choices)[1]  # of equal ones, the deepest
