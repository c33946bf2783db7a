"""What a block's scores change by, once the tokens before each are known: DSpark's Markov head, Domino's correction,
DFlash2's selector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from specrs.models.block_config import BlockConfig
from specrs.models.loader import Checkpoint
from specrs.models.ops import Embedding, Linear, Ops
from specrs.models.placement import Placement


@dataclass(frozen=True, eq=False)
class Pairs:
    """A product of low rank of the token before and the token to score, by which a head's scores change.

    Attributes:
        before: rows of the tokens before, [target vocabulary, rank].
        behind: rows of the tokens to score, [draft vocabulary, rank].
        rank: elements of a row.
        row: gives factors on the product's elements, of a block's own row; ``None`` if all are 1.
    """

    before: Embedding
    behind: Embedding
    rank: int
    row: Linear | None = None

    def scores(self, at: Placement, before: torch.Tensor, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return what the scores of some tokens change by behind each of some tokens: f32 [N, P, M].

        Args:
            at: the head's placement.
            before: int64 [N, P], in the target's vocabulary.
            hidden: [N, h], the normalised row of each level.
            ids: int64 [N, M], in the draft's vocabulary.
        """
        rows, scored = (
            _rows(at, table, tokens, self.rank).float().view(*tokens.shape, self.rank)
            for table, tokens in ((self.before, before), (self.behind, ids))
        )
        if self.row is not None:
            rows *= _product(at, self.row, hidden).float()[:, None]
        return torch.einsum("npr,nmr->npm", rows, scored)


class PathHead(Protocol):
    """What makes a block's levels depend on the path. Results for a prefix do not depend on the others.

    Attributes:
        pairs: set if scores depend on no more of the path than the token before, and how; ``None`` otherwise.
    """

    pairs: Pairs | None

    def products(self) -> Iterator[tuple[str, Linear]]:
        """Yield the products, with the names of their weights."""

    def bias(
        self,
        level: int,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        state: torch.Tensor | None,
        parents: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what the scores of some tokens change by behind each prefix of a request, and the prefixes' states.

        Args:
            level: the level, from 0; each is asked for in turn.
            tokens: int64 [N, W], the last token of each prefix, in the target's vocabulary.
            hidden: [N, h], the normalised row of each request's level.
            ids: int64 [N, M], the tokens to score, in the draft's vocabulary.
            state: of the level before, as this method gave it; ``None`` at the first level.
            parents: int64 [N, W], the prefix of that level that each continues.

        Returns:
            [N, W, M], and the states [N, W, r]; ``None`` of heads without.
        """


class MarkovHead:
    """DSpark's: a product of low rank of the token before, which may depend on the block's own row (``gated``), and on
    all tokens of the path (``rnn``)."""

    def __init__(self, config: BlockConfig, weights: Checkpoint, ops: Ops) -> None:
        self.kind, self._rank, self._at = config.markov, config.markov_rank, ops.placement
        tables = (weights.load(f"markov_head.markov_w{i}.weight") for i in (1, 2))
        self._before, self._scores = map(ops.dense.embedding, tables)
        self._part = {"gated": "gate_proj", "rnn": "joint_proj"}.get(config.markov or "")
        self._product: Linear | None = None
        if self._part is not None:
            weight, bias = (weights.load(f"markov_head.{self._part}.{name}") for name in ("weight", "bias"))
            self._product = ops.dense.linear(weight, bias)
        self.pairs: Pairs | None = None if self._product else Pairs(self._before, self._scores, self._rank)

    def products(self) -> Iterator[tuple[str, Linear]]:
        """Yield the products, with the names of their weights."""
        if self._product is not None:
            yield f"markov_head.{self._part}", self._product

    def bias(
        self,
        level: int,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        state: torch.Tensor | None,
        parents: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        (n, w), r = tokens.shape, self._rank
        before = _rows(self._at, self._before, tokens, r)
        made = before
        if self._product is not None:
            x = hidden[:, None].expand(n, w, -1).reshape(n * w, -1)
            if self.kind == "gated":
                made = _product(self._at, self._product, torch.cat((x, before), 1)).sigmoid_() * before
            else:
                old = _continued(state, parents, before, r)
                parts = _product(self._at, self._product, torch.cat((old, before, x), 1))
                gate, change, out = parts.chunk(3, 1)
                gate = gate.sigmoid()
                state, made = (gate * old + (1 - gate) * change.tanh()).view(n, w, r), out.tanh()
        return _scored(self._at, self._scores, made.view(n, w, r), ids), state


class DominoHead:
    """Domino's: a recurrent network reads the tokens of the path, and two products score by its state and the block's
    own row. `embedding` is the head's."""

    def __init__(self, config: BlockConfig, weights: Checkpoint, ops: Ops, embedding: Embedding) -> None:
        assert config.gru is not None
        self._sizes, self._at, self._embedding = config.gru, ops.placement, embedding
        self._width = config.hidden_size
        self._of_token, self._of_state, self._inner = (
            ops.dense.linear(weights.load(name))
            for name in ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight")
        )
        self._scores = ops.dense.embedding(weights.load("embed_proj.2.weight"))
        self.pairs: Pairs | None = None

    def products(self) -> Iterator[tuple[str, Linear]]:
        """Yield the products, with the names of their weights."""
        yield "prefix_gru.weight_ih_l0", self._of_token
        yield "prefix_gru.weight_hh_l0", self._of_state
        yield "embed_proj.0", self._inner

    def bias(
        self,
        level: int,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        state: torch.Tensor | None,
        parents: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        (n, w), size = tokens.shape, self._sizes
        embedded = _rows(self._at, self._embedding, tokens, self._width)
        old = _continued(state, parents, embedded, size.state)
        of_token = _product(self._at, self._of_token, embedded).chunk(3, 1)
        of_state = _product(self._at, self._of_state, old).chunk(3, 1)
        reset, keep = ((a + b).sigmoid() for a, b in zip(of_token[:2], of_state[:2], strict=True))
        new = (1 - keep) * (of_token[2] + reset * of_state[2]).tanh() + keep * old
        state = new.view(n, w, -1)
        if level < size.free:
            return hidden.new_zeros(n, w, ids.shape[1]), state
        x = hidden[:, None].expand(n, w, -1).reshape(n * w, -1)
        made = torch.nn.functional.silu(_product(self._at, self._inner, torch.cat((x, new), 1)))
        return _scored(self._at, self._scores, made.view(n, w, -1), ids), state


class SelectorHead:
    """DFlash2's: a product of low rank of the token before and the token to score, weighted by the block's own row. It
    was trained to choose among a level's likeliest tokens, and no other token has a chance."""

    def __init__(self, config: BlockConfig, weights: Checkpoint, ops: Ops) -> None:
        assert config.selector is not None
        self._rank, self._at = config.selector.rank, ops.placement
        tables = (weights.load(f"candidate_selector.{side}_codebook") for side in ("predecessor", "successor"))
        self._before, self._scores = map(ops.dense.embedding, tables)
        self._row = ops.dense.linear(weights.load("candidate_selector.hidden_projection.weight"))
        self.pairs: Pairs | None = Pairs(self._before, self._scores, self._rank, self._row)

    def products(self) -> Iterator[tuple[str, Linear]]:
        """Yield the products, with the names of their weights."""
        yield "candidate_selector.hidden_projection", self._row

    def bias(
        self,
        level: int,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        state: torch.Tensor | None,
        parents: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        before = _rows(self._at, self._before, tokens, self._rank).view(*tokens.shape, -1)
        row = _product(self._at, self._row, hidden.contiguous())
        return _scored(self._at, self._scores, before * row[:, None], ids), None


def _continued(state: torch.Tensor | None, parents: torch.Tensor, like: torch.Tensor, size: int) -> torch.Tensor:
    """The state [N W, size] of the prefix that each continues; zeros at the first level."""
    if state is None:
        return like.new_zeros(parents.numel(), size)
    return state.take_along_dim(parents[:, :, None], 1).reshape(-1, size)


def _rows(at: Placement, table: Embedding, tokens: torch.Tensor, width: int) -> torch.Tensor:
    out = at.empty(tokens.numel(), width)
    table.lookup(tokens.flatten(), out)
    return out


def _product(at: Placement, product: Linear, x: torch.Tensor) -> torch.Tensor:
    out = at.empty(x.shape[0], product.out_features)
    product.forward(x, out)
    return out


def _scored(at: Placement, table: Embedding, made: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Products [N, W, M] in f32 of rows [N, W, r] and the table's rows of some tokens [N, M]: a sum over the last
    dimension, which unlike a product of matrices has the same bits whatever the batch."""
    n, w, r = made.shape
    return (made.view(n, w, 1, r).float() * _rows(at, table, ids, r).view(n, 1, -1, r)).sum(-1)
