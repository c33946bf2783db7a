"""Keeps one round's inputs while the engine runs it.

The engine calls a `RoundRecorder` where a round's inputs come into being; a call costs nothing where no recorder is
set. The recorder keeps copies of small arrays and of the pool's account. It changes nothing of the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from specrs._specrs import Accepts, DraftBeams, Planner, Pool, TreeBatch
from specrs._specrs import Sequence as PoolSequence
from specrs.backends.base import DraftAttention
from specrs.capsule.parts import DraftStep, Extend, PoolSize, Row, Shape, Tree
from specrs.capsule.schema import Capsule


class Recorded(Protocol):
    """The fields of an engine's request that a recorder reads."""

    @property
    def seq(self) -> PoolSequence: ...
    @property
    def committed(self) -> int: ...
    @property
    def seed(self) -> int: ...


class RoundRecorder:
    """Records the ``round``-th round (from 1) that completes; `capsule` is set from then on.

    The engine's calls, in order: `reserved`, `drafted` for each forward of the draft model, `verified`, `committed`,
    `extended` where the draft model runs over accepted tokens, `ended`. A round that fails is forgotten by the next
    call of `reserved`, and does not count.
    """

    def __init__(self, planner: Planner, pool: Pool, mode: DraftAttention, round: int = 1) -> None:
        g, tree = planner.geometry, planner.geometry.shape
        self._shape = Shape(g.max_batch, g.max_context_len, g.page_size, tree.topk, tree.steps, tree.draft_tokens,
                            g.layout)  # fmt: skip
        self._pool, self._format, self._mode, self._wanted = pool, planner.format, mode, round
        self._open: Capsule | None = None
        self.rounds = 0
        """Rounds that completed."""
        self.capsule: Capsule | None = None
        """The recorded round."""

    def reserved(self, reqs: Sequence[Recorded], positions: Sequence[int], speculative: bool) -> None:
        """Note that the round has its lease, for `positions` that it asked for."""
        self._open = None
        if self.capsule is not None or self.rounds + 1 != self._wanted:
            return
        pool = self._pool
        rows = []
        for r, n in zip(reqs, positions, strict=True):
            pages = pool.pages(r.seq)[: -(-n // pool.page_size)]
            rows.append(Row(r.seq.row, r.seq.generation, r.committed, n, r.seed, tuple(pages)))
        batch = {row.owner for row in rows}
        self._open = Capsule(
            round=self._wanted,
            kind="speculative" if speculative else "plain",
            format=self._format,
            draft_attention=self._mode,
            shape=self._shape,
            pool=PoolSize(pool.num_pages, pool.max_seqs, pool.row_pages),
            rows=tuple(rows),
            others=tuple((page, owner) for page, owner in pool.owners() if owner not in batch),
            steps=(),
            trees=(),
            paths=(),
            kept=(),
            extend=(),
        )

    def drafted(self, beams: DraftBeams) -> None:
        """A forward of the draft model was planned for these beams."""
        if self._open is None:
            return
        words = beams.ancestors.tolist()
        bits = tuple(sum((w % 2**64) << 64 * i for i, w in enumerate(row)) for row in words)
        scores = tuple(s for row in beams.scores() for s in row)
        step = DraftStep(tuple(beams.tokens.tolist()), tuple(beams.parents.tolist()), scores, bits)
        self._open = replace(self._open, steps=(*self._open.steps, step))

    def verified(self, trees: TreeBatch, accepts: Accepts) -> None:
        """The trees were verified."""
        if self._open is None:
            return
        parents, tokens, scores = trees.parents.tolist(), trees.tokens.tolist(), trees.scores.tolist()
        made, first = [], 0
        for n in trees.sizes:
            end = first + n
            made.append(Tree(tuple(parents[first:end]), tuple(tokens[first:end]), tuple(scores[first:end])))
            first = end
        self._open = replace(self._open, trees=tuple(made), paths=tuple(tuple(path) for path in accepts.paths))

    def committed(self, kept: Sequence[int]) -> None:
        """The lease was committed; `kept` nodes of each path count."""
        if self._open is not None:
            self._open = replace(self._open, kept=tuple(kept))

    def extended(self, seqs: Sequence[PoolSequence], starts: Sequence[int], counts: Sequence[int]) -> None:
        """The draft model's pass over accepted tokens was planned."""
        if self._open is None or not self._open.kept:  # one before the round brings a lagging draft up to date
            return
        requests = {(r.row, r.generation): i for i, r in enumerate(self._open.rows)}
        made = [
            Extend(requests[seq.row, seq.generation], start, count)
            for seq, start, count in zip(seqs, starts, counts, strict=True)
        ]
        self._open = replace(self._open, extend=tuple(sorted(made, key=lambda e: e.request)))

    def ended(self) -> None:
        """The round is complete."""
        self.rounds += 1
        if self._open is not None:
            self._open.check()
            self.capsule, self._open = self._open, None
