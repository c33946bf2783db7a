"""What all heads in training share: sizes, what a head learns from, scores of its drafts, and where it begins."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specrs.models import HOST, Checkpoint, LayerConfig, ModelConfig
from specrs.models.layer import norm_weight
from specrs.train.layers import RMSNorm

FEATURES = 3
_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 27}  # logits that are in memory at once


def feature_layers(layers: int) -> tuple[int, ...]:
    """Return the layers whose input is a feature: EAGLE-3's default in sglang, vLLM and the package, for all heads."""
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


@dataclass(frozen=True)
class Lesson:
    """What a head learns from rows of text. `wanted` and `best` are flat, [B * T, ...].

    Attributes:
        tokens: int64 [B, T]: the token at p + 1.
        embeds: [B, T, h]: its embedding.
        features: [B, T, 3h].
        pieces: int64 [B, T]: a number for each piece of text, ascending; pieces do not see each other.
        anchors: int64 [B, A]: places p at which a block begins, ascending; heads that draft step by step begin at all.
        wanted: the distribution over the draft vocabulary that position p should give.
        best: the draft id of the target's own answer; -1 where the vocabulary lacks it.
    """

    tokens: Tensor
    embeds: Tensor
    features: Tensor
    pieces: Tensor
    anchors: Tensor
    wanted: Tensor
    best: Tensor

    def split(self, rows: int) -> Iterable[Lesson]:
        """Yield lessons of so many rows of text."""
        batch, length = self.pieces.shape
        for first in range(0, batch, rows):
            part = slice(first, first + rows)
            flat = slice(first * length, (first + rows) * length)
            yield Lesson(
                self.tokens[part], self.embeds[part], self.features[part], self.pieces[part], self.anchors[part],
                self.wanted[flat], self.best[flat],
            )  # fmt: skip


class Head(nn.Module, ABC):
    """A head in training. Embeddings are the target's, frozen, and are passed in. Names are those of published files.

    Attributes:
        sizes: its sizes.
        levels: levels of its drafts.
        decay: what a level weighs in the loss, as a share of the one above.
        title: name of its form.
        published: what published files of the form call it.
    """

    d2t: Tensor
    t2d: Tensor
    levels: int
    decay: float
    title: str
    published: str

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.sizes = sizes
        h = sizes.hidden_size
        self.fc = nn.Linear(FEATURES * h, h, bias=False)
        self.norm = RMSNorm(h, sizes.rms_norm_eps)
        self.lm_head = nn.Linear(h, sizes.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(sizes.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(sizes.vocab_size, dtype=torch.bool))

    def _randomise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02, generator=generator)

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

    @abstractmethod
    def compile_parts(self) -> None:
        """Compile what takes the time."""

    @abstractmethod
    def attended(self, length: int) -> int:
        """Attention scores of a row of text of this length."""

    @abstractmethod
    def scores(self, lesson: Lesson) -> Tensor:
        """float32 [levels, 4]: `counted` of every level."""

    def save(self, target: ModelConfig, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write config.json and model.safetensors in the published form."""
        folder.mkdir(parents=True, exist_ok=True)
        name = str(dtype).removeprefix("torch.")
        config = {**self._config(target), "dtype": name, "torch_dtype": name}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        integers = ("d2t", "t2d")
        tensors = {
            name: (t if name in integers else t.to(dtype)).cpu().contiguous() for name, t in self.state_dict().items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    @abstractmethod
    def _config(self, target: ModelConfig) -> Mapping[str, Any]:
        """Return the published form's config.json, but for the dtype."""


def counted(logits: Tensor, wanted: Tensor, best: Tensor, chained: Tensor) -> Tensor:
    """float32 [4] of rows: sum of cross-entropies, their number, answers that are named first, chained rows.

    Only rows that continue a chain count, and for the cross-entropy only those whose answer can be drafted.
    """
    logits = logits.float()
    scored = chained & (best >= 0)
    ce = -(wanted.float() * F.log_softmax(logits, dim=-1)).sum(-1)
    right = (logits.argmax(-1) == best) & chained
    return torch.stack([(ce * scored).sum(), scored.sum(), right.sum(), chained.sum()])


def in_parts(score: Callable[..., Tensor], vocabulary: int, *each: Tensor) -> Tensor:
    """Sum of ``score`` over rows. Logits of few rows at a time are in memory, and are computed again for the
    gradient."""
    rows = max(_LOGITS[each[0].device.type] // vocabulary, 1)
    parts = [
        checkpoint(score, *(x[first : first + rows] for x in each), use_reentrant=False, preserve_rng_state=False)
        for first in range(0, len(each[0]), rows)
    ]
    return torch.stack(parts).sum(0)


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
