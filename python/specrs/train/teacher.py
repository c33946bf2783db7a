"""The target as the teacher of its head: features and scores from the engine's own forward pass, as they are needed.

Each piece of text is a sequence of its own in the pass, as it is when it is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from specrs._specrs import Geometry, Planner, Pool, TreeShape
from specrs.models import Ops, load_target
from specrs.train.heads import Lesson, feature_layers, wanted_of
from specrs.train.rows import Rows

_PAGE = 16
_PIECES = 256  # most pieces of a pass
_MOST_ROWS = 8192
_MOST_SCORES = 1 << 28  # scores of a pass


class Teacher:
    """A model, with memory for one pass.

    Args:
        model: its directory.
        length: tokens of a row of text.
    """

    def __init__(self, model: Path, ops: Ops, length: int) -> None:
        self.place = ops.placement
        self._target = load_target(model, ops, max_context_len=length)
        config = self._target.config
        self._target.set_aux_layers(feature_layers(config.num_layers))
        self._rows = max(length, min(_MOST_ROWS, _MOST_SCORES // config.vocab_size))
        geometry = Geometry(_PIECES, length, _PAGE, TreeShape(1, 1, 2))
        pages = self._rows // _PAGE + 2 * _PIECES + 1  # page 0 is the sink
        self._pool = Pool(pages, _PAGE, _PIECES, geometry.row_pages)
        reads = ops.attention.capabilities
        self._planner = Planner(geometry, self._pool, format=reads.format, mask=reads.mask)
        self._kv = self._target.new_cache(pages, _PAGE)

    @torch.no_grad()
    def lesson(self, rows: Rows, anchors: Tensor, ids: Tensor, drafts: Tensor, hard: float) -> Lesson:
        """Return what a head learns from rows; anchors as in `Lesson`, ids, drafts and hard as `wanted_of` takes
        them."""
        device, h = self.place.device, self._target.config.hidden_size
        tokens = rows.tokens.flatten().to(device)
        features, wanted, best = [], [], []
        keep = self.place.activations
        for first, counts in self._passes(rows.pieces):
            scores, some = self._forward(tokens[first : first + sum(counts)], counts)
            features.append(some)
            asked, answers = wanted_of(scores, ids, drafts, hard)
            wanted.append(asked.to(keep))
            best.append(answers)
        shape, behind = rows.tokens.shape, tokens.roll(-1)
        # The answer at p is that of the scores at p + 1.
        return Lesson(
            behind.view(shape), self.embedded(behind).view(*shape, h), torch.cat(features).view(*shape, -1),
            rows.pieces.to(device), anchors.to(device), torch.cat(wanted).roll(-1, 0), torch.cat(best).roll(-1, 0),
        )  # fmt: skip

    @torch.no_grad()
    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [N, h] of tokens, as the model reads them."""
        out = self.place.empty(len(tokens), self._target.config.hidden_size)
        self._target.embedding.lookup(tokens, out)
        return out

    def _passes(self, pieces: Tensor) -> Iterator[tuple[int, list[int]]]:
        """Yield the first row and the sizes of the pieces of each pass, by the flattened numbers of pieces."""
        _, sizes = torch.unique_consecutive(pieces.flatten(), return_counts=True)
        first, counts = 0, list[int]()
        for size in sizes.tolist():
            if counts and (sum(counts) + size > self._rows or len(counts) == _PIECES):
                yield first, counts
                first, counts = first + sum(counts), []
            counts.append(size)
        yield first, counts

    def _forward(self, tokens: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
        """Return the scores of a pass, which the next one overwrites, and its features side by side."""
        assert self._target.features is not None
        seqs = [self._pool.create() for _ in counts]
        try:
            with self._pool.reserve(list(zip(seqs, counts, strict=True))) as lease:
                plan = self._planner.extend(seqs, [0] * len(counts), counts)
                aux = self._target.features.once(len(tokens))
                scores, _ = self._target.forward(tokens, plan, self._kv, aux)
                lease.commit(counts)
        finally:
            self._pool.release(seqs)
        return scores, torch.cat(aux.layers, 1)
