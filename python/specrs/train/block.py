"""A head that drafts a block in one pass, in training: DFlash (arXiv:2602.06036) and DSpark. The conventions:

* what a block knows of the text before is the target's features of committed positions: each layer has keys and values
  of the same fused feature, which no layer changes;
* a block behind position p begins with the token of position p + 1, its anchor, which stands at position p + 1; rows
  behind it read a mask. Each row attends the positions up to p, and all of its block;
* level k is the token of position p + 2 + k: with a Markov head (DSpark) the row at p + 1 + k predicts it, without
  (DFlash) the row at p + 2 + k does, and the anchor's predicts nothing;
* the Markov head adds to a level's scores a product of low rank of the token before, in training that of the text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specrs.models import ModelConfig
from specrs.train.heads import Head, HeadSizes, Lesson, counted, feature_layers, in_parts
from specrs.train.layers import GatedMLP, Projections, RMSNorm, merge_heads, rope_table, rotate, split_heads

EVERY = 2
"""Places of a text of which one, at random, begins a block."""


class NormedProjections(Projections):
    """Projections whose queries and keys are normalised."""

    def __init__(self, sizes: HeadSizes) -> None:
        h = sizes.hidden_size
        super().__init__(h, h, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)
        self.q_norm, self.k_norm = (RMSNorm(sizes.head_dim, sizes.rms_norm_eps) for _ in range(2))


class Layer(nn.Module):
    """A decoder layer with norms of queries and keys, as Qwen 3 has it."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        h, eps = sizes.hidden_size, sizes.rms_norm_eps
        self.input_layernorm = RMSNorm(h, eps)
        self.self_attn = NormedProjections(sizes)
        self.post_attention_layernorm = RMSNorm(h, eps)
        self.mlp = GatedMLP(h, sizes.intermediate_size)

    def _keys(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        a = self.self_attn
        k, v = (split_heads(p(x), a.head_dim) for p in (a.k_proj, a.v_proj))
        return rotate(a.k_norm(k).to(v.dtype), rope), v

    def forward(self, x: Tensor, context: Tensor, rope: Tensor, at: Tensor, behind: Tensor, rows: int) -> Tensor:
        """Return the residual stream of blocks behind the layer.

        Args:
            x: [B, A * rows, h].
            context: [B, T, h].
            rope: [T, 2, d], the table's rows at the context's positions.
            at: [B, 1, A * rows, 2, d], those at the blocks' positions.
            behind: bool [B, A, T]: the positions that each block attends.
        """
        a, normed = self.self_attn, self.input_layernorm(x)
        q = split_heads(a.q_proj(normed), a.head_dim)
        q = rotate(a.q_norm(q).to(q.dtype), at)
        attended = attend_blocks(q, *self._keys(context, rope), *self._keys(normed, at), behind, rows)
        x = x + a.o_proj(merge_heads(attended))
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, behind: Tensor, rows: int) -> Tensor:
    """Attention of blocks: over a context's keys, and over all keys of the own block.

    q [B, H, A * rows, d]; k, v [B, kv, T, d], of which block a sees `behind` [B, A, T]; own_k, own_v
    [B, kv, A * rows, d]. Returns [B, H, A * rows, d].
    """
    batch, kv, t, d = k.shape
    blocks, scale = behind.shape[1], d**-0.5
    flat = (q * scale).reshape(batch, kv, -1, d)
    base = (flat @ k.transpose(-1, -2)).view(batch, kv, -1, blocks, rows, t).float()
    base = base.masked_fill(~behind[:, None, None, :, None], float("-inf"))
    own_k, own_v = (x.view(batch, kv, 1, blocks, rows, d) for x in (own_k, own_v))
    own = (flat.view(batch, kv, -1, blocks, rows, d) @ own_k.transpose(-1, -2)).float()
    p = torch.softmax(torch.cat([base, own], dim=-1), dim=-1).to(v.dtype)
    out = (p[..., :t].reshape(batch, kv, -1, t) @ v).view(*own.shape[:-1], d) + p[..., t:] @ own_v
    return out.flatten(1, 2).flatten(2, 3)


class MarkovHead(nn.Module):
    """A product of low rank of the token before."""

    def __init__(self, sizes: HeadSizes, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(sizes.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, sizes.draft_vocab_size, bias=False)

    def forward(self, before: Tensor) -> Tensor:
        """Scores of the draft vocabulary behind tokens."""
        y: Tensor = self.markov_w2(self.markov_w1(before))
        return y


class BlockHead(Head):
    """The head.

    Args:
        positions: tokens of a row of text, at most.
        levels: levels of a block.
        rank: of the Markov head; 0: a head without, whose rows predict the token at their own place.
    """

    rope: Tensor
    mask: Tensor

    def __init__(self, sizes: HeadSizes, positions: int, seed: int, levels: int, rank: int) -> None:
        super().__init__(sizes)
        self.levels, self.rank, self.mask_token = levels, rank, 0
        self._skipped = 0 if rank else 1
        self.rows = levels + self._skipped
        self.decay = math.exp(-1 / 4)
        self.title = "DSpark" if rank else "DFlash"
        self.published = f"{self.title}Speculator"
        self.hidden_norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.num_layers))
        self.markov_head = MarkovHead(sizes, rank) if rank else None
        table = rope_table(sizes.head_dim, sizes.rope.theta, positions + self.rows)
        self.register_buffer("rope", table, persistent=False)
        self.register_buffer("mask", torch.zeros(sizes.hidden_size), persistent=False)
        self._randomise(seed)
        self._scale = 1.0
        self._score = self._scores

    def begin_at(self, model: Path, target: ModelConfig, ids: Tensor) -> None:
        super().begin_at(model, target, ids)
        self._scale = target.block.embedding_scale

    def mask_by(self, token: int, embedding: Tensor) -> None:
        """Take the token that masked rows read, and its embedding."""
        self.mask_token = token
        self.mask.copy_(embedding)

    def compile_parts(self) -> None:
        self._score = torch.compile(self._scores)
        for layer in self.layers:
            layer.compile()

    def attended(self, length: int) -> int:
        return self.sizes.num_heads * (length // EVERY) * self.rows * length * self.sizes.num_layers

    def blocks(self, embeds: Tensor, features: Tensor, pieces: Tensor, anchors: Tensor) -> Tensor:
        """Rows [B, A, levels, h] of blocks that predict, normalised; arguments as in `Lesson`."""
        batch, length = pieces.shape
        count, rows, h = anchors.shape[1], self.rows, embeds.shape[-1]
        context = self.hidden_norm(self.fc(features))
        first = embeds.take_along_dim(anchors[:, :, None], 1)[:, :, None]
        x = (
            torch.cat([first, self.mask.to(embeds.dtype).expand(batch, count, rows - 1, h)], 2).flatten(1, 2)
            * self._scale
        )
        at = (anchors[:, :, None] + 1 + torch.arange(rows, device=anchors.device)).flatten(1)
        places = torch.arange(length, device=anchors.device)
        same = pieces.take_along_dim(anchors, 1)[:, :, None] == pieces[:, None]
        behind = same & (places <= anchors[:, :, None])
        turned = self.rope[at][:, None]
        for layer in self.layers:
            x = layer(x, context, self.rope[:length], turned, behind, rows)
        y: Tensor = self.norm(x.view(batch, count, rows, h)[:, :, self._skipped :])
        return y

    def logits(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Scores of the draft vocabulary of normalised rows, behind tokens."""
        y: Tensor = self.lm_head(hidden)
        return y if self.markov_head is None else y + self.markov_head(before)

    def _scores(self, hidden: Tensor, before: Tensor, wanted: Tensor, best: Tensor, chained: Tensor) -> Tensor:
        return counted(self.logits(hidden, before), wanted, best, chained)

    def scores(self, lesson: Lesson) -> Tensor:
        batch, length = lesson.pieces.shape
        hidden = self.blocks(lesson.embeds, lesson.features, lesson.pieces, lesson.anchors)
        pieces, tokens = lesson.pieces.flatten(), lesson.tokens.flatten()
        begins = (lesson.anchors + length * torch.arange(batch, device=pieces.device)[:, None]).flatten()
        total = []
        for k in range(self.levels):
            # The answer stands at p + 1, whose scores the block's piece must have.
            at = (begins + k).clamp(max=len(pieces) - 2)
            chained = (begins + k + 1 < len(pieces)) & (pieces[at + 1] == pieces[begins])

            def score(hidden: Tensor, at: Tensor, chained: Tensor) -> Tensor:
                return self._score(hidden, tokens[at], lesson.wanted[at], lesson.best[at], chained)

            total.append(in_parts(score, self.sizes.draft_vocab_size, hidden[:, :, k].flatten(0, 1), at, chained))
        return torch.stack(total)

    def _config(self, target: ModelConfig) -> Mapping[str, Any]:
        s, kind = self.sizes, self.title.lower()
        markov: dict[str, Any] = {}
        if self.rank:
            markov = {
                "markov_rank": self.rank, "markov_head_type": "vanilla", "enable_confidence_head": False,
                "confidence_head_with_markov": False, "sample_from_anchor": True,
            }  # fmt: skip
        scale = {} if self._scale == 1.0 else {"input_embedding_scale": self._scale}
        return {
            "architectures": [self.published], "speculators_model_type": kind, "block_size": self.rows,
            "mask_token_id": self.mask_token, "draft_vocab_size": s.draft_vocab_size,
            "aux_hidden_state_layer_ids": list(feature_layers(target.num_layers)),
            "target_hidden_size": s.hidden_size, "tie_word_embeddings": False, **markov, **scale,
            "speculators_config": {
                "algorithm": kind, "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": self.levels}],
                "verifier": {"name_or_path": None, "architectures": [target.architecture]},
            },
            "transformer_layer_config": {
                "model_type": "qwen3", "vocab_size": s.vocab_size, "hidden_size": s.hidden_size,
                "num_hidden_layers": s.num_layers, "num_attention_heads": s.num_heads,
                "num_key_value_heads": s.num_kv_heads, "head_dim": s.head_dim,
                "intermediate_size": s.intermediate_size, "hidden_act": "silu", "attention_bias": False,
                "rms_norm_eps": s.rms_norm_eps, "max_position_embeddings": s.max_position_embeddings,
                "rope_parameters": {"rope_theta": s.rope.theta, "rope_type": "default"},
                "layer_types": ["full_attention"] * s.num_layers,
            },
        }  # fmt: skip
