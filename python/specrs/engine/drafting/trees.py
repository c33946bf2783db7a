"""Trees of several: what came of whose in those that a device makes of two, and drafts that wait for a doubtful token.

`DraftExecutor.unite` asks for a round whose trees the device makes of the head's and the host's. The device finds out
which nodes both have, and tells whose each is (`Verified.origins`). Who has a node has its parent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.utils.dlpack import from_dlpack

from specrs._specrs import Accepts, DraftNodes, MergedDrafts, TreeBatch
from specrs.engine.drafting.chooser import Share, TreeChoice, TreePolicy
from specrs.engine.drafting.sources import HEAD
from specrs.engine.request.request import Passed
from specrs.engine.request.traces import DraftTree

_HEADS, _HOSTS = 1, 2  # bits of an origin
_SAME, _LEARN = 0.8, 0.3  # part of a chance that counts as the same; weight of a time, of which two failures are enough
_TRUSTED = 0.5  # word from which on drafts may wait


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

    @property
    def seconds(self) -> float | None:
        """Seconds of the target's pass; ``None`` where its launch returns before it has run."""

    @property
    def cold(self) -> bool:
        """True if the round took longer than others like it will, since memory or a graph was made for it."""

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


def shares(
    verified: VerifiedTrees, passed: Sequence[Passed], drafts: Sequence[MergedDrafts]
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


@dataclass(eq=False)
class Deferral:
    """One request's drafts that wait.

    Attributes:
        waits: the position in the request's tokens where the doubtful one is expected, that token, and the chance that
            the one behind it was given; ``None`` where no drafts wait.
        word: smoothed share of times that the sources said the same again, once the token had come.
    """

    waits: tuple[int, int, float] | None = None
    word: float = 1.0

    def choose(
        self, tokens: Sequence[int], choice: TreeChoice, nodes: DraftNodes, policy: TreePolicy, overhead: float
    ) -> TreeChoice:
        """A choice of nodes, or the first of them where the rest are better verified once a doubtful token has come.

        Args:
            tokens: of the request.
            choice: of ``policy``, from ``nodes``: what its sources say may come next.
            overhead: seconds of the round beside the target's pass.
        """
        self._hold_to_word(tokens, nodes)
        if self.word < _TRUSTED or choice.nodes < 2:
            return choice
        settled = policy.settle(choice, nodes, overhead)
        if settled.nodes < choice.nodes:
            doubtful = settled.nodes
            said = nodes.chance(doubtful + 1) / nodes.chance(doubtful)
            self.waits = len(tokens) + doubtful, nodes.token(doubtful), said
        return settled

    def _hold_to_word(self, tokens: Sequence[int], nodes: DraftNodes) -> None:
        waits, self.waits = self.waits, None
        if waits is None:
            return
        position, token, said = waits
        if len(tokens) == position + 1 and tokens[position] == token:
            kept = len(nodes) > 0 and nodes.chance(0) >= _SAME * said
            self.word += _LEARN * (kept - self.word)
