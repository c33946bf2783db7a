"""The traces of rounds: a round's drafts for one request and their fate, for users that ask for them
(`SamplingParams.trace`).

Nodes are kept in arrays: 8 bytes a node, or 16 if several sources draft. A round emits at least one token. So the
unread traces of a request hold at most ``max_tokens`` trees of as many nodes as a round verifies.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.utils.dlpack import from_dlpack

if TYPE_CHECKING:
    from specrs._specrs import TreeBatch


@dataclass(frozen=True)
class DraftTree:
    """A tree that a round verified for one request.

    Attributes:
        tokens: token of each node; node 0, the root, is the request's last token before the round.
        parents: parent of each node, -1 for the root; parents come before their children.
        path: nodes of the accepted path after the root, in order.
        sources: names of the sources that drafted.
        proposed: sources that proposed each node, one bit each: bit 0 is the first name's; empty if there is one name.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    path: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    proposed: Sequence[int] = ()

    @classmethod
    def of(
        cls, tokens: Sequence[int], parents: Sequence[int], path: Sequence[int], sources: Sequence[str] = (),
        proposed: Sequence[int] = (),
    ) -> DraftTree:  # fmt: skip
        """Return a tree in as little memory as it needs; ``path`` includes the root."""
        if len(tokens) == 1:
            sources, proposed = (), ()
        elif len(sources) < 2:
            proposed = ()
        some = [i for i in range(len(sources)) if not proposed or any(bits >> i & 1 for bits in proposed)]
        if proposed and len(some) < len(sources):  # sources that drafted nothing here have no bit
            proposed = [sum(1 << j for j, i in enumerate(some) if bits >> i & 1) for bits in proposed]
            proposed = proposed if len(some) > 1 else ()
        names = tuple(sources[i] for i in some)
        return cls(array("i", tokens), array("i", parents), tuple(path[1:]), names, array("Q", proposed))


@dataclass(frozen=True)
class Round:
    """One round of a request, an element of `StreamEvent.rounds`.

    Attributes:
        tokens, parents: token and parent of each node of the verified tree, root first; a root alone if nothing was
            drafted.
        accepted: nodes of the path whose tokens became output, in order, without the root; nodes after a stop do not
            count, as in `RequestOutput.drafted`.
        own: the token after the accepted ones, which the target drew itself; ``None`` if the output ended before it, or
            if it is to be drawn again (``bad_words``).
        seconds: time since the request's previous tokens, including other work of the engine.
        sources: names of the sources that drafted, as in `LLM` (``drafters``); ``"grammar"`` for tokens that a grammar
            forces.
        proposed: sources that proposed each node, one bit each: bit 0 is the first name's; empty if there is one name.
        pieces: the text that the round released, as in `StreamEvent.pieces`.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    accepted: tuple[int, ...]
    own: int | None
    seconds: float
    sources: tuple[str, ...] = ()
    proposed: Sequence[int] = ()
    pieces: tuple[tuple[str, bool], ...] = ()

    @property
    def emitted(self) -> int:
        """Number of tokens that the output gained."""
        return len(self.accepted) + (self.own is not None)

    @property
    def drafted(self) -> int:
        """Number of draft tokens that the target verified."""
        return len(self.tokens) - 1


def trees_of(trees: TreeBatch, wanted: Sequence[int], paths: Sequence[Sequence[int]], source: str) -> list[DraftTree]:
    """Return the trees of some requests of a batch, which one source drafted.

    Args:
        wanted: rows of these requests.
        paths: accepted paths of all requests, with their roots.
        source: name of the source.
    """
    tokens, parents = from_dlpack(trees.tokens), from_dlpack(trees.parents)
    firsts = [0]
    for size in trees.sizes:
        firsts.append(firsts[-1] + size)
    return [
        DraftTree.of(
            tokens[firsts[i] : firsts[i + 1]].tolist(), parents[firsts[i] : firsts[i + 1]].tolist(), paths[i], (source,)
        )
        for i in wanted
    ]
