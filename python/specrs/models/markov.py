"""The Markov head of DSpark: what a block's scores change by, once the token before each is known."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specrs.models.block_config import BlockConfig
from specrs.models.loader import Checkpoint
from specrs.models.ops import Embedding, Linear, Ops


class MarkovHead:
    """A product of low rank of the token before, which may depend on the block's own row (``gated``), and on all tokens
    of the path (``rnn``).

    Results for a prefix do not depend on the others.
    """

    def __init__(self, config: BlockConfig, weights: Checkpoint, ops: Ops) -> None:
        self.kind, self._rank, self._at = config.markov, config.markov_rank, ops.placement
        tables = (weights.load(f"markov_head.markov_w{i}.weight") for i in (1, 2))
        self._before, self._scores = map(ops.dense.embedding, tables)
        self._part = {"gated": "gate_proj", "rnn": "joint_proj"}.get(config.markov or "")
        self._product: Linear | None = None
        if self._part is not None:
            weight, bias = (weights.load(f"markov_head.{self._part}.{name}") for name in ("weight", "bias"))
            self._product = ops.dense.linear(weight, bias)

    def products(self) -> Iterator[tuple[str, Linear]]:
        """Yield the products, with the names of their weights."""
        if self._product is not None:
            yield f"markov_head.{self._part}", self._product

    def bias(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        state: torch.Tensor | None,
        parents: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what the scores of some tokens change by behind each prefix of a request, and the prefixes' states.

        Args:
            tokens: int64 [N, W], the last token of each prefix, in the target's vocabulary.
            hidden: [N, h], the normalised row of each request's level.
            ids: int64 [N, M], the tokens to score, in the draft's vocabulary.
            state: of the level before, as this method gave it; ``None`` at the first level.
            parents: int64 [N, W], the prefix of that level that each continues.

        Returns:
            [N, W, M], and the states [N, W, r]; ``None`` of heads without.
        """
        (n, w), r = tokens.shape, self._rank
        before = self._rows(self._before, tokens)
        made = before
        if self._product is not None:
            x = hidden[:, None].expand(n, w, -1).reshape(n * w, -1)
            if self.kind == "gated":
                made = self._forward(torch.cat((x, before), 1), r).sigmoid_() * before
            else:
                old = before.new_zeros(n, w, r) if state is None else state.take_along_dim(parents[:, :, None], 1)
                old = old.reshape(n * w, r)
                gate, change, out = self._forward(torch.cat((old, before, x), 1), 3 * r).chunk(3, 1)
                gate = gate.sigmoid()
                state, made = (gate * old + (1 - gate) * change.tanh()).view(n, w, r), out.tanh()
        rows = self._rows(self._scores, ids).view(n, 1, -1, r)
        # A sum over the last dimension, unlike a product of matrices, has the same bits whatever the batch.
        return (made.view(n, w, 1, r) * rows).sum(-1), state

    def _rows(self, table: Embedding, tokens: torch.Tensor) -> torch.Tensor:
        out = self._at.empty(tokens.numel(), self._rank)
        table.lookup(tokens.flatten(), out)
        return out

    def _forward(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        assert self._product is not None
        out = self._at.empty(x.shape[0], columns)
        self._product.forward(x, out)
        return out
