"""The head's trees beside those of the host: as proposals, and united by a device.

`DraftExecutor.unite` asks for a round with united trees. The device finds the nodes that both have, and tells the
origin of each node (`VerifiedTrees.origins`). A node's parent is of all origins that the node is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from torch.utils.dlpack import from_dlpack

from specrs._specrs import Accepts, MergedDrafts, NonFiniteError, TreeBatch
from specrs.engine.drafting.sources import HEAD
from specrs.engine.request.request import Passed
from specrs.engine.request.traces import DraftTree

_HEADS, _HOSTS = 1, 2  # bits of an origin


class Drafted(Protocol):
    """Trees to verify."""

    @property
    def levels(self) -> int:
        """Levels of the head's drafts."""

    @property
    def trees(self) -> TreeBatch | None:
        """The trees, or those of the host that a device unites with its own; ``None`` if the device builds all when it
        verifies them. Getting this object waits for nothing; reading it may wait for the device."""

    @property
    def faults(self) -> Sequence[tuple[NonFiniteError, int]]:
        """Errors of requests that cannot be drafted for any more, each with the number of sound positions of draft KV.

        An error's ``request`` is the row of the batch. The tree of such a request is a root alone. A device that builds
        the trees itself tells of them in the round's results.
        """


class VerifiedTrees(Protocol):
    """Trees after verification."""

    @property
    def trees(self) -> TreeBatch:
        """The trees that were verified."""

    @property
    def origins(self) -> Sequence[Sequence[int]] | None:
        """Origin of each node of each request's tree, root first: bit 0 for the head's, bit 1 for the host's. ``None``
        where the device has not united two trees (`DraftExecutor.unite`)."""

    @property
    def accepts(self) -> Accepts:
        """The accepted paths and tokens."""

    def likeliest(self, requests: Sequence[int], count: int) -> Sequence[tuple[list[int], list[list[int]]]] | None:
        """Return the tokens of the nodes of some requests' trees, and the ``count`` tokens that the target finds
        likeliest behind each node, likeliest first. ``None`` where the device no longer has the scores.

        Args:
            requests: their places in the batch, ascending.
        """


def head_accepted(verified: VerifiedTrees, passed: Sequence[Passed]) -> list[int]:
    """Return the number of accepted drafts of the head for each request, after a round with united trees."""
    origins = verified.origins
    assert origins is not None
    each = zip(passed, verified.accepts.paths, origins, strict=True)  # behind the drafts the target drew itself
    return [sum(whose[node] & _HEADS != 0 for node in path[1 : len(p.tokens)]) for p, path, whose in each]


def traced(
    verified: VerifiedTrees, drafts: Sequence[MergedDrafts], wanted: Sequence[int], paths: Sequence[Sequence[int]],
    names: Sequence[str],
) -> list[DraftTree]:  # fmt: skip
    """Return the united trees of some requests, as users see them.

    Args:
        drafts: the host's tree of each request.
        wanted: the places of these requests.
        paths: the accepted path of each request, with its root.
        names: names of all that draft.
    """
    origins, head, found = verified.origins, 1 << names.index(HEAD), []
    assert origins is not None
    tokens, parents = (from_dlpack(a).tolist() for a in (verified.trees.tokens, verified.trees.parents))
    firsts = [0, *accumulate(map(len, origins))]
    for i in wanted:
        draft, nodes = drafts[i], slice(firsts[i], firsts[i + 1])
        own_tokens, own_parents = tokens[nodes], parents[nodes]
        children = {child: node for node, child in enumerate(zip(draft.parents, draft.tokens, strict=True))}
        sources, hosts = draft.sources, [0] * len(origins[i])  # node of the host's tree that each is; 0: none
        masks = [0] * len(hosts)
        for node, origin in enumerate(origins[i]):  # parents stand before their children
            if origin & _HOSTS:
                hosts[node] = children[hosts[own_parents[node]], own_tokens[node]]
            masks[node] = head * (origin & _HEADS) | (sources[hosts[node]] if hosts[node] else 0)
        found.append(DraftTree.of(own_tokens, own_parents, paths[i], names, masks))
    return found
