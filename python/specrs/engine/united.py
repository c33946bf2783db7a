"""Rounds whose trees a device makes of two, the head's and one of the host's: what came of whose.

`DraftExecutor.beside` asks for such a round. The device finds out which nodes both have, and tells whose each is
(`Verified.origins`). Who has a node has its parent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.utils.dlpack import from_dlpack

from specrs._specrs import MergedDrafts
from specrs.engine.batch import Passed
from specrs.engine.config import HEAD
from specrs.engine.executor import Verified
from specrs.engine.rounds import DraftTree
from specrs.engine.speculation import Share

_HEADS, _HOSTS = 1, 2  # bits of an origin


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


def shares(
    verified: Verified, passed: Sequence[Passed], drafts: Sequence[MergedDrafts]
) -> tuple[list[Share], list[Share]]:
    """The head's part of what the round gave each request, and the host's.

    The host's part has the scores that the host gave. A node that the head has too may have a better one in the united
    tree, which says nothing of how sure the host was.

    Args:
        drafts: the host's tree for each request.
    """
    heads, hosts = [], []
    for p, path, tree, draft in zip(passed, verified.accepts.paths, _trees(verified, drafts), drafts, strict=True):
        accepted = [tree.origins[node] for node in path[1 : len(p.tokens)]]  # behind them the target drew itself
        head, host = (sum(origin & bit != 0 for origin in accepted) for bit in (_HEADS, _HOSTS))
        own = [score for score, origin in zip(tree.scores, tree.origins, strict=True) if origin & _HEADS]
        scores = draft.scores
        heads.append(Share(sorted(own, reverse=True), head, host))
        hosts.append(Share(sorted((scores[node] for node in tree.theirs if node), reverse=True), host, head))
    return heads, hosts


def traced(
    verified: Verified, drafts: Sequence[MergedDrafts], wanted: Sequence[int], paths: Sequence[Sequence[int]],
    names: Sequence[str],
) -> list[DraftTree]:  # fmt: skip
    """The trees of some requests of a landing. drafts: of each request, the host's tree. paths: accepted ones, with
    roots."""
    trees, head = _trees(verified, drafts), 1 << names.index(HEAD)
    found = []
    for i in wanted:
        tree, sources = trees[i], drafts[i].sources
        each = zip(tree.origins, tree.theirs, strict=True)
        masks = [head * (origin & _HEADS) | (sources[node] if node else 0) for origin, node in each]
        found.append(DraftTree.of(tree.tokens, tree.parents, paths[i], names, masks))
    return found


def _trees(verified: Verified, drafts: Sequence[MergedDrafts]) -> list[_Tree]:
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
