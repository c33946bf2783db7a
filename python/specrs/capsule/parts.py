"""The parts of a capsule: one round's inputs as plain values. B requests, K branches, S steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specrs._specrs import Geometry, TreeShape
from specrs.backends.base import DraftAttention, Format, Layout

Kind = Literal["speculative", "plain"]


@dataclass(frozen=True)
class Shape:
    """Limits, tree and draft layout: the arguments of `specrs.Geometry`."""

    max_batch: int
    max_context_len: int
    page_size: int
    topk: int
    steps: int
    draft_tokens: int
    layout: Layout

    def geometry(self, layout: Layout | None = None, reverts: Sequence[int] = ()) -> Geometry:
        """Return the geometry, perhaps in another draft layout or with faults put back; the environment does not change
        it."""
        tree = TreeShape(self.topk, self.steps, self.draft_tokens)
        limits = self.max_batch, self.max_context_len, self.page_size
        return Geometry(*limits, tree, layout or self.layout, reverts=list(reverts))


@dataclass(frozen=True)
class PoolSize:
    """Pages (the sink included), rows of the page table, and its columns."""

    num_pages: int
    max_seqs: int
    row_pages: int


@dataclass(frozen=True)
class Row:
    """One request under the round's lease.

    Attributes:
        row, generation: row and generation of the request's sequence.
        committed: L, positions whose KV is valid.
        reserved: positions that the round asked pages for.
        seed: seed of the request's sampler.
        pages: page of each P positions, ``ceil(reserved / P)`` of them.
    """

    row: int
    generation: int
    committed: int
    reserved: int
    seed: int
    pages: tuple[int, ...]

    @property
    def owner(self) -> str:
        """Name of the sequence in the pool's ledger."""
        return f"sequence {self.row}.{self.generation}"


@dataclass(frozen=True)
class DraftStep:
    """The beams that one forward of the draft model took, B * K values each.

    Attributes:
        tokens: ids in the target's vocabulary.
        parents: row of the step before that a beam continues; in step 0 the request.
        scores: cumulative log-probabilities, float32 exactly.
        ancestors: bit ``b * S + s`` is beam b of step s: the beam's true ancestors and itself.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]
    ancestors: tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """A request's verified tree: parents (-1, then each before its child), tokens, cumulative log-probabilities."""

    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Extend:
    """The draft model's pass over accepted tokens: `count` of them at positions `start`... of request `request`."""

    request: int
    start: int
    count: int


@dataclass(frozen=True)
class Fields:
    """The fields of `specrs.capsule.Capsule`.

    Attributes:
        round: number of the round in its recording, from 1.
        kind: ``"speculative"``, or ``"plain"`` where each request decoded its root alone, without drafts.
        format: format of the attention backend that the engine ran.
        draft_attention: the tokens that a draft branch attended to.
        shape, pool: sizes.
        rows: the batch.
        others: (page, owner) for each owner of a page that is not a sequence of the batch, by page.
        steps: the forwards of the draft model, in order.
        trees: trees of each request.
        paths: accepted nodes of each request, the root first.
        kept: number of path tokens that count (a stop string or a limit may end a request inside its path).
        extend: the draft model's pass at the end of the round; without the requests that ended.
    """

    round: int
    kind: Kind
    format: Format
    draft_attention: DraftAttention
    shape: Shape
    pool: PoolSize
    rows: tuple[Row, ...]
    others: tuple[tuple[int, str], ...]
    steps: tuple[DraftStep, ...]
    trees: tuple[Tree, ...]
    paths: tuple[tuple[int, ...], ...]
    kept: tuple[int, ...]
    extend: tuple[Extend, ...]
