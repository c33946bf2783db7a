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

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specrs.models import HOST, Checkpoint, LayerConfig, ModelConfig
from specrs.models.layer import norm_weight
from specrs.train.layers import GatedMLP, Projections, RMSNorm, merge_heads, rope_table

FEATURES = 3
_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 27}  # logits that are in memory at once


def feature_layers(layers: int) -> tuple[int, ...]:
    """Return the layers whose input is a feature: the default of sglang, vLLM and the package."""
    return (2, layers // 2, layers - 3)


@dataclass(frozen=True)
class HeadSizes(LayerConfig):
    """Sizes of a head. Its layers have the target's shape, but for the MLP; their rotary embedding has no scaling."""

    vocab_size: int
    draft_vocab_size: int
    num_layers: int

    @classmethod
    def of(cls, target: ModelConfig, draft_vocab_size: int, intermediate_size: int, num_layers: int) -> HeadSizes:
        """Return the sizes of a head for a target."""
        layer = {each.name: getattr(target, each.name) for each in fields(LayerConfig)}
        layer["intermediate_size"] = intermediate_size
        return cls(**layer, vocab_size=target.vocab_size, draft_vocab_size=draft_vocab_size, num_layers=num_layers)


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


@dataclass(frozen=True)
class Lesson:
    """What a head learns from rows of text: everything but the embeddings is flat, [B * T, ...].

    Attributes:
        embeds: [B, T, h]: the embedding of the token at p + 1.
        features: [B, T, 3h].
        pieces: int64 [B, T]: a number for each piece of text, ascending; pieces do not see each other.
        wanted: the distribution over the draft vocabulary that position p should give.
        best: the draft id of the target's own answer; -1 where the vocabulary lacks it.
    """

    embeds: Tensor
    features: Tensor
    pieces: Tensor
    wanted: Tensor
    best: Tensor

    def split(self, rows: int) -> Iterable[Lesson]:
        """Yield lessons of so many rows of text."""
        batch, length = self.pieces.shape
        for first in range(0, batch, rows):
            part = slice(first, first + rows)
            flat = slice(first * length, (first + rows) * length)
            yield Lesson(self.embeds[part], self.features[part], self.pieces[part], self.wanted[flat], self.best[flat])


class Eagle3(nn.Module):
    """The head. Embeddings are the target's, frozen, and are passed in. Names are those of published files."""

    rope: Tensor
    d2t: Tensor
    t2d: Tensor

    def __init__(self, sizes: HeadSizes, positions: int, seed: int = 0) -> None:
        super().__init__()
        self.sizes = sizes
        h = sizes.hidden_size
        self.fc = nn.Linear(FEATURES * h, h, bias=False)
        self.midlayer = Layer(sizes, first=True)
        self.layers = nn.ModuleDict({str(i): Layer(sizes, first=False) for i in range(1, sizes.num_layers)})
        self.norm = RMSNorm(h, sizes.rms_norm_eps)
        self.lm_head = nn.Linear(h, sizes.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(sizes.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(sizes.vocab_size, dtype=torch.bool))
        self.register_buffer("rope", rope_table(sizes.head_dim, sizes.rope.theta, positions), persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02, generator=generator)
        self._attend = attend_unrolled
        self._score = self._scores

    @torch.no_grad()
    def begin_at(self, model: Path, target: ModelConfig, ids: Tensor) -> None:
        """Take the draft vocabulary, ascending target ids, and begin near the target.

        The head's feature begins as the target's last one, and its last product as the target's own, with a norm that
        is scaled so that scores differ by about one.
        """
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.t2d.zero_()
        self.t2d[ids] = True
        weights = Checkpoint(model)
        last = "model.embed_tokens.weight" if target.tie_word_embeddings else "lm_head.weight"
        self.lm_head.weight.copy_(weights.load(last)[ids])
        norm = norm_weight(HOST, weights, "model.norm", target.block)
        assert norm is not None
        self.norm.weight.copy_(norm / (self.lm_head.weight * norm).norm(dim=-1).mean())
        self.fc.weight[:, -self.sizes.hidden_size :] += torch.eye(self.sizes.hidden_size)

    @property
    def target_ids(self) -> Tensor:
        """The target's id of every draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

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
        """float32 [4] of rows: sum of cross-entropies, their number, answers that are named first, chained rows.

        Only rows that continue a chain count, and for the cross-entropy only those whose answer can be drafted.
        """
        logits = self.logits(hidden).float()
        scored = chained & (best >= 0)
        ce = -(wanted.float() * F.log_softmax(logits, dim=-1)).sum(-1)
        right = (logits.argmax(-1) == best) & chained
        return torch.stack([(ce * scored).sum(), scored.sum(), right.sum(), chained.sum()])

    def scores(self, lesson: Lesson, steps: int) -> Tensor:
        """float32 [steps, 4]: `_scores` of every step. Logits of few rows at a time are in memory, and are computed
        again for the gradient."""
        pieces = lesson.pieces.flatten()
        rows = max(_LOGITS[pieces.device.type] // self.sizes.draft_vocab_size, 1)
        outputs = self.unroll(lesson.embeds, lesson.features, lesson.pieces, steps)
        total = []
        for j, hidden in enumerate(outputs):
            # The answer stands at p + 1, whose scores a piece must have; the chain began at p - j.
            chained = torch.zeros_like(pieces, dtype=torch.bool)
            chained[j : len(pieces) - 1] = (pieces[j:-1] == pieces[j + 1 :]) & (
                pieces[: len(pieces) - 1 - j] == pieces[j:-1]
            )
            each = (hidden.flatten(0, 1), lesson.wanted, lesson.best, chained)
            parts = [
                checkpoint(
                    self._score, *(x[first : first + rows] for x in each), use_reentrant=False, preserve_rng_state=False
                )
                for first in range(0, len(chained), rows)
            ]
            total.append(torch.stack(parts).sum(0))
        return torch.stack(total)


def wanted_of(scores: Tensor, ids: Tensor, drafts: Tensor, hard: float) -> tuple[Tensor, Tensor]:
    """Return the distribution over the draft vocabulary that the target's scores [N, V] ask for, and the draft id of
    their first choice, -1 where there is none.

    It is the target's, renormalised, with a share `hard` moved to its first choice: a greedy verifier asks for that
    alone, a sampling one for the whole distribution. ids: target id of each draft id; drafts: draft id of each target
    id, or -1.
    """
    best = drafts[scores.argmax(-1)]
    wanted = torch.softmax(scores[:, ids].float(), dim=-1) * (1 - hard)
    peak = wanted.argmax(-1, keepdim=True)
    wanted.scatter_add_(-1, peak, torch.full_like(peak, hard, dtype=wanted.dtype))
    return wanted, best


def save(head: Eagle3, target: ModelConfig, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors in the published form.

    The configuration names no `eagle_aux_hidden_state_layer_ids`: engines disagree whether it means a layer's input or
    its output, and agree on the default (the inputs of layers 2, n/2 and n-3), which is what this head uses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    s, name = head.sizes, str(dtype).removeprefix("torch.")
    ids = {"bos_token_id": target.bos_token_id, "eos_token_id": next(iter(target.eos_token_ids), None)}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "dtype": name, "torch_dtype": name,
        "vocab_size": s.vocab_size, "hidden_size": s.hidden_size, "num_attention_heads": s.num_heads,
        "num_key_value_heads": s.num_kv_heads, "head_dim": s.head_dim, "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False, "rope_theta": s.rope.theta, "rope_scaling": None, "rms_norm_eps": s.rms_norm_eps,
        "max_position_embeddings": s.max_position_embeddings, **ids, "num_hidden_layers": s.num_layers,
        "intermediate_size": s.intermediate_size, "draft_vocab_size": s.draft_vocab_size, "tie_word_embeddings": False,
        "target_hidden_size": s.hidden_size, "eagle_config": {"use_aux_hidden_state": True},
        "specrs": {
            "aux_layer_inputs": list(feature_layers(target.num_layers)), "target_num_hidden_layers": target.num_layers,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {
        name: (t if name in ("d2t", "t2d") else t.to(dtype)).cpu().contiguous() for name, t in head.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
