"""Rounds whose trees a device makes of two, the head's and one of the host's: what came of whose.

`DraftExecutor.beside` asks for such a round. The device finds out which nodes both have, and tells whose each is
(`Verified.origins`). Who has a node has its parent.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.dlpack import from_dlpack

from specrs._specrs import MergedDrafts
from specrs.engine.batch import Passed
from specrs.engine.config import HEAD
from specrs.engine.executor import Verified
from specrs.engine.rounds import DraftTree
from specrs.engine.speculation import Share

_HEADS, _HOSTS = 1, 2  # bits of an origin


def shares(verified: Verified, passed: Sequence[Passed]) -> tuple[list[Share], list[Share]]:
    """Of each request, the head's part of what the round gave it, and the host's."""
    origins, paths = verified.origins, verified.accepts.paths
    assert origins is not None
    scores: list[float] = from_dlpack(verified.trees.scores).tolist()
    heads, hosts, first = [], [], 0
    for p, path, whose in zip(passed, paths, origins, strict=True):
        pairs = list(zip(scores[first : first + len(whose)], whose, strict=True))
        first += len(whose)
        accepted = [whose[node] for node in path[1 : len(p.tokens)]]  # behind them the target drew a token itself
        of = [sum(origin & bit != 0 for origin in accepted) for bit in (_HEADS, _HOSTS)]
        each = [sorted((score for score, w in pairs if w & bit), reverse=True) for bit in (_HEADS, _HOSTS)]
        heads.append(Share(each[0], of[0], of[1]))
        hosts.append(Share(each[1], of[1], of[0]))
    return heads, hosts


def traced(
    verified: Verified, drafts: Sequence[MergedDrafts], wanted: Sequence[int], paths: Sequence[Sequence[int]],
    names: Sequence[str],
) -> list[DraftTree]:  # fmt: skip
    """The trees of some requests of a landing. drafts: of each request, the host's tree. paths: accepted ones, with
    roots."""
    origins, trees = verified.origins, verified.trees
    assert origins is not None
    tokens, parents = from_dlpack(trees.tokens).tolist(), from_dlpack(trees.parents).tolist()
    firsts = [0]
    for size in trees.sizes:
        firsts.append(firsts[-1] + size)
    head = 1 << names.index(HEAD)
    found = []
    for i in wanted:
        own, above = tokens[firsts[i] : firsts[i + 1]], parents[firsts[i] : firsts[i + 1]]
        theirs = dict(zip(_paths(drafts[i].tokens, drafts[i].parents), drafts[i].sources, strict=True))
        each = zip(_paths(own, above), origins[i], strict=True)
        masks = [head * (whose & _HEADS) | (theirs[path] if whose & _HOSTS else 0) for path, whose in each]
        found.append(DraftTree.of(own, above, paths[i], names, masks))
    return found


def _paths(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens from below the root down to each node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    return found
