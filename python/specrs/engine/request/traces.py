"""A round's drafts for one request and their fate, told to a user who asked for them (`SamplingParams.trace`).

Nodes are kept in arrays: 8 bytes a node, 16 where several sources draft. A round emits a token at
least, so of a request that nobody reads, traces hold at most ``max_tokens`` trees of as many nodes as rounds verify.
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
    """A tree that a round verified, of one request.

    Attributes:
        tokens: token of each node; node 0, the root, is the request's last token of before.
        parents: parent of each node, -1 for the root; parents stand before their children.
        path: nodes of the accepted path behind the root, in order.
        sources: names of the sources that drafted.
        proposed: sources that proposed each node: a bit each, the first name's is 1; empty where there is one name.
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
        """A tree in as little memory as it takes. path: with its root."""
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
    """One round of a request, as `StreamEvent.rounds` has it.

    Attributes:
        tokens, parents: token and parent of each node of the tree that was verified, root first; a root alone where
            nothing was drafted.
        accepted: nodes of the path whose tokens became output, in order, without the root; nodes behind a stop do not
            count, as in `RequestOutput.drafted`.
        own: the token behind them that the target drew itself; ``None`` where the output ended before it, or where it
            is to be drawn again (``bad_words``).
        seconds: time since the request's tokens before these came, other work of the engine included.
        sources: names of the sources that drafted, as `LLM` has them (``drafters``); ``"grammar"`` for tokens that a
            grammar forces.
        proposed: sources that proposed each node: a bit each, the first name's is 1; empty where there is one name.
        pieces: the text that it released, as `StreamEvent.pieces`.
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
        """Tokens that the output gained."""
        return len(self.accepted) + (self.own is not None)

    @property
    def drafted(self) -> int:
        """Draft tokens that the target verified."""
        return len(self.tokens) - 1


def trees_of(trees: TreeBatch, wanted: Sequence[int], paths: Sequence[Sequence[int]], source: str) -> list[DraftTree]:
    """Return the trees of some requests of a batch, which one source drafted. paths: of all requests, with their
    roots."""
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
