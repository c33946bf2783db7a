"""An EAGLE-3 head and its training-time test.

EAGLE (arXiv:2401.15077) drafts at the feature level; EAGLE-3 (arXiv:2503.01840) fuses three of the target's hidden
states and trains the head on its own outputs ("training-time test"). The conventions:

* draft position p pairs the target's feature of position p with the *token* of position p + 1, turns by RoPE position
  p, and predicts the token of position p + 2;
* the first layer's input is concat(norm(embedding), norm(hidden)); its residual is the un-normed hidden. Layers behind
  it are plain;
* the feature that the next step receives is the last layer's output before `norm`; logits are lm_head(norm(output)).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from specrs.models import ModelConfig
from specrs.train.heads import Head, HeadSizes, Lesson, counted, feature_layers, in_parts
from specrs.train.layers import GatedMLP, Projections, RMSNorm, merge_heads, rope_table

STEPS = 6
"""Unrolled steps of a training."""


class Layer(nn.Module):
    """A decoder layer in two parts, so that training can attend across unrolled steps. The first one reads embedding
    and hidden."""

    def __init__(self, sizes: HeadSizes, first: bool) -> None:
        super().__init__()
        h, eps = sizes.hidden_size, sizes.rms_norm_eps
        self.input_layernorm = RMSNorm(h, eps)
        self.hidden_norm = RMSNorm(h, eps) if first else None
        reads = 2 * h if first else h
        self.self_attn = Projections(reads, h, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)
        self.post_attention_layernorm = RMSNorm(h, eps)
        self.mlp = GatedMLP(h, sizes.intermediate_size)

    def qkv(self, embeds: Tensor, hidden: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rotated q and k, and v."""
        if self.hidden_norm is None:
            return self.self_attn.qkv(self.input_layernorm(hidden), rope)
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        return self.self_attn.qkv(x, rope)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return the residual stream behind the layer."""
        x = residual + self.self_attn.o_proj(merge_heads(attended))
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


def attend_unrolled(q: Tensor, k0: Tensor, v0: Tensor, mask0: Tensor, kc: Tensor, vc: Tensor, live: Tensor) -> Tensor:
    """Attention of one unrolled step: over step 0's keys, and over the position's own chain.

    q [B, H, T, d]; k0, v0 [B, kv, T, d] under mask0 [B, T, T]; kc, vc [B, kv, T, C, d] hold, for each position, the
    keys and values of its chain, of which `live` [C] are in use. Returns [B, H, T, d].
    """
    scale = q.shape[-1] ** -0.5
    batch, kv, t, d = k0.shape
    q, k0, v0, kc, vc = q.reshape(batch, kv, -1, t, d), *(x.unsqueeze(2) for x in (k0, v0, kc, vc))
    base = ((q @ k0.transpose(-1, -2)).float() * scale).masked_fill(~mask0[:, None, None], float("-inf"))
    own = ((q.unsqueeze(-2) * kc).float().sum(-1) * scale).masked_fill(~live, float("-inf"))
    p = torch.softmax(torch.cat([base, own], dim=-1), dim=-1).to(v0.dtype)
    return (p[..., :t] @ v0 + (p[..., t:].unsqueeze(-1) * vc).sum(-2)).flatten(1, 2)


def shift_right(x: Tensor, by: int, dim: int) -> Tensor:
    """Position p receives what position p - by had; the first `by` positions receive zeros."""
    if by == 0:
        return x
    pad = torch.zeros_like(x.narrow(dim, 0, by))
    return torch.cat([pad, x.narrow(dim, 0, x.shape[dim] - by)], dim=dim)


class _Keys:
    """Keys and values of a layer: step 0's, and those of each position's chain."""

    def __init__(self, steps: int) -> None:
        self._chain = steps - 1
        self._first: tuple[Tensor, Tensor] | None = None
        self._own: tuple[list[Tensor], list[Tensor]] = ([], [])

    def add(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Add those of the next step; returns what `attend_unrolled` takes beside queries and mask."""
        if self._first is None:
            self._first = (k, v)
        else:
            for kept, x in zip(self._own, (k, v), strict=True):
                kept[:] = [*(shift_right(one, 1, dim=2) for one in kept), x]
        used = len(self._own[0])
        blank = [torch.zeros_like(k)] * (self._chain - used)
        kc, vc = (
            torch.stack([*kept, *blank], dim=-2) if self._chain else k.unsqueeze(-2)[..., :0, :] for kept in self._own
        )
        return *self._first, kc, vc, torch.arange(self._chain, device=k.device) < used


class Eagle3(Head):
    """The head.

    Args:
        positions: tokens of a row of text, at most.
        levels: unrolled steps.
    """

    rope: Tensor
    decay = 0.9
    title, published = "EAGLE-3", "LlamaForCausalLMEagle3"

    def __init__(self, sizes: HeadSizes, positions: int, seed: int = 0, levels: int = STEPS) -> None:
        super().__init__(sizes)
        self.levels = levels
        self.midlayer = Layer(sizes, first=True)
        self.layers = nn.ModuleDict({str(i): Layer(sizes, first=False) for i in range(1, sizes.num_layers)})
        self.register_buffer("rope", rope_table(sizes.head_dim, sizes.rope.theta, positions), persistent=False)
        self._randomise(seed)
        self._attend = attend_unrolled
        self._score = self._scores

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the draft vocabulary."""
        y: Tensor = self.lm_head(self.norm(hidden))
        return y

    def compile_parts(self) -> None:
        """Compile what every unrolled step shares, so that one graph serves all steps."""
        self._attend, self._score = torch.compile(attend_unrolled), torch.compile(self._scores)
        for layer in self._all_layers():
            layer.qkv = torch.compile(layer.qkv)  # type: ignore[method-assign]
            layer.finish = torch.compile(layer.finish)  # type: ignore[method-assign]

    def attended(self, length: int) -> int:
        return self.sizes.num_heads * length**2 * self.levels * self.sizes.num_layers

    def _all_layers(self) -> list[Layer]:
        layers = list(chain([self.midlayer], self.layers.values()))
        assert all(isinstance(layer, Layer) for layer in layers)
        return layers  # type: ignore[return-value]

    def unroll(self, embeds: Tensor, features: Tensor, pieces: Tensor, steps: int) -> list[Tensor]:
        """The training-time test: pre-norm outputs [B, T, h] of every step; arguments as in `Lesson`.

        At step j, position p continues the chain that left step 0 at position p - j: its hidden input is step j-1's
        output at p - 1, and it attends step 0's keys of positions <= p - j and its chain's keys of steps 1..j. Outputs
        are void where p - j is before the piece.
        """
        at = torch.arange(embeds.shape[1], device=embeds.device)
        rope, gap = self.rope[: len(at)], at[:, None] - at
        same = pieces[:, :, None] == pieces[:, None, :]
        layers = self._all_layers()
        keys = [_Keys(steps) for _ in layers]
        outputs: list[Tensor] = []
        for j in range(steps):
            x = self.fc(features) if j == 0 else shift_right(outputs[-1], 1, dim=1)
            mask = same & (gap >= j)
            for layer, kept in zip(layers, keys, strict=True):
                q, k, v = layer.qkv(embeds, x, rope)
                k0, v0, kc, vc, live = kept.add(k, v)
                x = layer.finish(self._attend(q, k0, v0, mask, kc, vc, live), x)
            outputs.append(x)
        return outputs

    def _scores(self, hidden: Tensor, wanted: Tensor, best: Tensor, chained: Tensor) -> Tensor:
        return counted(self.logits(hidden), wanted, best, chained)

    def scores(self, lesson: Lesson) -> Tensor:
        pieces = lesson.pieces.flatten()
        total = []
        for j, hidden in enumerate(self.unroll(lesson.embeds, lesson.features, lesson.pieces, self.levels)):
            # The answer stands at p + 1, whose scores a piece must have; the chain began at p - j.
            chained = torch.zeros_like(pieces, dtype=torch.bool)
            chained[j : len(pieces) - 1] = (pieces[j:-1] == pieces[j + 1 :]) & (
                pieces[: len(pieces) - 1 - j] == pieces[j:-1]
            )
            rows = (hidden.flatten(0, 1), lesson.wanted, lesson.best, chained)
            total.append(in_parts(self._score, self.sizes.draft_vocab_size, *rows))
        return torch.stack(total)

    def _config(self, target: ModelConfig) -> Mapping[str, Any]:
        # It names no `eagle_aux_hidden_state_layer_ids`: engines disagree whether it means a layer's input or its
        # output, and agree on the default (the inputs of layers 2, n/2 and n-3), which is what this head uses.
        s = self.sizes
        ids = {"bos_token_id": target.bos_token_id, "eos_token_id": next(iter(target.eos_token_ids), None)}
        return {
            "architectures": [self.published], "model_type": "llama", "vocab_size": s.vocab_size,
            "hidden_size": s.hidden_size, "num_attention_heads": s.num_heads, "num_key_value_heads": s.num_kv_heads,
            "head_dim": s.head_dim, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
            "rope_theta": s.rope.theta, "rope_scaling": None, "rms_norm_eps": s.rms_norm_eps,
            "max_position_embeddings": s.max_position_embeddings, **ids, "num_hidden_layers": s.num_layers,
            "intermediate_size": s.intermediate_size, "draft_vocab_size": s.draft_vocab_size,
            "tie_word_embeddings": False, "target_hidden_size": s.hidden_size,
            "eagle_config": {"use_aux_hidden_state": True},
            "specrs": {
                "aux_layer_inputs": list(feature_layers(target.num_layers)),
                "target_num_hidden_layers": target.num_layers,
            },
        }  # fmt: skip
