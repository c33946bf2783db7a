"""Trees of several: what came of whose in those that a device makes of two, and drafts that wait for a doubtful token.

`DraftExecutor.unite` asks for a round whose trees the device makes of the head's and the host's. The device finds out
which nodes both have, and tells whose each is (`Verified.origins`). Who has a node has its parent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.utils.dlpack import from_dlpack

from specrs._specrs import Accepts, MergedDrafts, TreeBatch
from specrs.engine.drafting.sources import HEAD
from specrs.engine.drafting.speculation import Share
from specrs.engine.request.batch import Passed
from specrs.engine.request.traces import DraftTree

_HEADS, _HOSTS = 1, 2  # bits of an origin


class VerifiedTrees(Protocol):
    """Trees after verification."""

    @property
    def trees(self) -> TreeBatch:
        """The trees that were verified."""

    @property
    def origins(self) -> Sequence[Sequence[int]] | None:
        """Whose each node is of each request's tree, root first, where the device has united two
        (`DraftExecutor.unite`): bit 0 the head's, bit 1 the other one's. ``None`` else."""

    @property
    def accepts(self) -> Accepts:
        """The accepted paths and tokens."""

    def likeliest(self, requests: Sequence[int], count: int) -> Sequence[tuple[list[int], list[list[int]]]] | None:
        """Of some requests, in ascending order, the tokens of their trees' nodes, and after each the target's likeliest
        next tokens, so many, the likeliest first. ``None`` where the device no longer has the scores."""


@dataclass(frozen=True)
class _Tree:
    """A request's united tree.

    Attributes:
        tokens, parents, scores, origins: of each node, root first.
        theirs: the node of the host's tree that each is; 0 for none, and of the root.
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    origins: Sequence[int]
    theirs: list[int]


def shares(verified: VerifiedTrees, passed: Sequence[Passed], drafts: Sequence[MergedDrafts]) -> list[Share]:
    """The head's part of what the round gave each request.

    Args:
        drafts: the host's tree for each request.
    """
    found = []
    for p, path, tree in zip(passed, verified.accepts.paths, _trees(verified, drafts), strict=True):
        accepted = [tree.origins[node] for node in path[1 : len(p.tokens)]]  # behind them the target drew itself
        head, host = (sum(origin & bit != 0 for origin in accepted) for bit in (_HEADS, _HOSTS))
        scores = [score for score, origin in zip(tree.scores, tree.origins, strict=True) if origin & _HEADS]
        found.append(Share(sorted(scores, reverse=True), head, host))
    return found


def traced(
    verified: VerifiedTrees, drafts: Sequence[MergedDrafts], wanted: Sequence[int], paths: Sequence[Sequence[int]],
    names: Sequence[str],
) -> list[DraftTree]:  # fmt: skip
    """The trees of some requests of a round. drafts: of each request, the host's tree. paths: accepted ones, with
    roots."""
    trees, head = _trees(verified, drafts), 1 << names.index(HEAD)
    found = []
    for i in wanted:
        tree, sources = trees[i], drafts[i].sources
        each = zip(tree.origins, tree.theirs, strict=True)
        masks = [head * (origin & _HEADS) | (sources[node] if node else 0) for origin, node in each]
        found.append(DraftTree.of(tree.tokens, tree.parents, paths[i], names, masks))
    return found


def _trees(verified: VerifiedTrees, drafts: Sequence[MergedDrafts]) -> list[_Tree]:
    """The tree of each request, and which of its nodes are which of the host's."""
    origins, trees = verified.origins, verified.trees
    assert origins is not None
    arrays = [from_dlpack(a).tolist() for a in (trees.tokens, trees.parents, trees.scores)]
    found, first = [], 0
    for whose, draft in zip(origins, drafts, strict=True):
        tokens, parents, scores = (array[first : first + len(whose)] for array in arrays)
        first += len(whose)
        children = {child: node for node, child in enumerate(zip(draft.parents, draft.tokens, strict=True))}
        theirs = [0] * len(whose)
        for node, origin in enumerate(whose):  # parents stand before their children
            if origin & _HOSTS:
                theirs[node] = children[theirs[parents[node]], tokens[node]]
        found.append(_Tree(tokens, parents, scores, whose, theirs))
    return found
