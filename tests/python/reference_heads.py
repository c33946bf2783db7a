"""EAGLE-3 heads of every published form, restated: plain torch in f64 over a whole row at once, without cache or plan.

It follows vLLM's and sglang's readers of the files, also where a trainer's code differs (SpecForge's `norm_output`,
AngelSlim's rotary base), and shares nothing with specrs. `Sizes` says
what a head is, `Weights` are its tensors by the names of this file, and `logits_of` is its forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """A head as it was trained.

    Attributes:
        streams: residual streams of the target that are features: 0 is the embedding, i enters layer i.
        later_norm: name of the norm with which layers behind the first begin.
        mask: of P-EAGLE, the token of masked rows, whose features are `mask_hidden`.
        levels: of P-EAGLE, the levels that it was trained on.
    """

    hidden: int = 44
    target_hidden: int = 64
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 10
    inner: int = 70
    vocab: int = 300
    draft_vocab: int | None = 77
    layers: int = 1
    streams: tuple[int, ...] = (2, 3, 3)
    qk_norm: bool = False
    biases: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = True
    later_norm: str = "input_layernorm"
    mask: int | None = None
    levels: int = 4
    eps: float = 1e-5
    theta: float = 10000.0

    @property
    def rows(self) -> int:
        """Rows of the last product."""
        return self.draft_vocab or self.vocab


def random_head(sizes: Sizes, seed: int) -> Weights:
    """Weights that keep activations at about unit size, and norms that are clearly not ones."""
    s, generator = sizes, torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    def norm(size: int) -> torch.Tensor:
        return 1.0 + 0.3 * torch.randn(size, generator=generator)

    wide = len(s.streams) * s.target_hidden
    w = {"fc.weight": matrix(s.hidden, wide), "norm": norm(s.hidden), "lm_head": matrix(s.rows, s.hidden)}
    if s.own_embedding:
        w["embed"] = torch.randn(s.vocab, s.hidden, generator=generator)
    if s.norm_before_fc:
        w["input_norm"] = norm(wide)
    for i in range(len(s.streams) if s.fc_norm else 0):
        w[f"fc_norm.{i}"] = norm(s.target_hidden)
    if s.biases:
        w["fc.bias"] = 0.3 * torch.randn(s.hidden, generator=generator)
    if s.mask is not None:
        w["mask_hidden"] = torch.randn(1, 1, wide, generator=generator)
    for i in range(s.layers):
        reads, q, kv = (s.hidden if i else 2 * s.hidden), s.heads * s.head_dim, s.kv_heads * s.head_dim
        shapes = {"q": (q, reads), "k": (kv, reads), "v": (kv, reads), "o": (s.hidden, q),
                  "gate": (s.inner, s.hidden), "up": (s.inner, s.hidden), "down": (s.hidden, s.inner)}  # fmt: skip
        for name, shape in shapes.items():
            w[f"{i}.{name}.weight"] = matrix(*shape)
            if s.biases:
                w[f"{i}.{name}.bias"] = 0.3 * torch.randn(shape[0], generator=generator)
        w[f"{i}.first"], w[f"{i}.second"] = norm(s.hidden), norm(s.hidden)
        if i == 0:
            w["0.feature"] = norm(s.hidden)
        if s.qk_norm:
            w[f"{i}.q_norm"], w[f"{i}.k_norm"] = 2 * norm(s.head_dim), 2 * norm(s.head_dim)
    return w


def fuse(sizes: Sizes, weights: Weights, features: torch.Tensor) -> torch.Tensor:
    """The head's own features [n, hidden] of the target's, [n, streams * target_hidden]."""
    x, w = features.double(), {name: value.double() for name, value in weights.items()}
    if sizes.fc_norm:
        parts = x.split(sizes.target_hidden, dim=-1)
        x = torch.cat([_normed(part, w[f"fc_norm.{i}"], sizes.eps) for i, part in enumerate(parts)], dim=-1)
    if sizes.norm_before_fc:
        x = _normed(x, w["input_norm"], sizes.eps)
    return _product(x, w, "fc")


def logits_of(
    sizes: Sizes,
    weights: Weights,
    embedding: torch.Tensor,
    tokens: Sequence[int],
    features: torch.Tensor,
    positions: Sequence[int] | None = None,
    visible: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [n, rows], what each row hands on [n, hidden]) of rows.

    Args:
        embedding: the target's, where the head has none.
        tokens: the token *after* each row's position.
        features: [n, hidden]: `fuse` of rows of the target, and what a row before handed on of draft rows.
        positions: the rows' positions; ``None``: 0, 1, ...
        visible: [n, n], row i sees row j; ``None``: it sees those before it, and itself.
    """
    n = len(tokens)
    at = torch.tensor(range(n) if positions is None else positions)
    seen = torch.ones(n, n).tril().bool() if visible is None else visible
    w = {name: value.double() for name, value in weights.items()}
    eps, table = sizes.eps, w.get("embed", embedding.double())
    embedded, feature = _normed(table[list(tokens)], w["0.first"], eps), _normed(features, w["0.feature"], eps)
    stream = feature if sizes.norm_before_residual else features
    for i in range(sizes.layers):
        reads = torch.cat((embedded, feature), dim=-1) if i == 0 else _normed(stream, w[f"{i}.first"], eps)
        stream = stream + _product(_attention(sizes, w, i, reads, at, seen), w, f"{i}.o")
        y = _normed(stream, w[f"{i}.second"], eps)
        gated = torch.nn.functional.silu(_product(y, w, f"{i}.gate")) * _product(y, w, f"{i}.up")
        stream = stream + _product(gated, w, f"{i}.down")
    normed = _normed(stream, w["norm"], eps)
    return normed @ w["lm_head"].T, normed if sizes.norm_output else stream


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _product(x: torch.Tensor, w: Weights, name: str) -> torch.Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _attention(
    sizes: Sizes, w: Weights, layer: int, x: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    n, d = len(x), sizes.head_dim
    q, k, v = (_product(x, w, f"{layer}.{name}").reshape(n, -1, d) for name in "qkv")
    if sizes.qk_norm:
        q, k = (_normed(y, w[f"{layer}.{name}_norm"], sizes.eps) for y, name in ((q, "q"), (k, "k")))
    q, k = _turned(q, positions, sizes.theta), _turned(k, positions, sizes.theta)
    out = torch.zeros(n, sizes.heads, d, dtype=torch.float64)
    for head in range(sizes.heads):
        of = head // (sizes.heads // sizes.kv_heads)
        scores = q[:, head] @ k[:, of].T / d**0.5
        out[:, head] = torch.where(seen, scores, -torch.inf).softmax(-1) @ v[:, of]
    return out.reshape(n, -1)


def _turned(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotated by position: element i of the first half with element i of the second."""
    d = x.shape[-1]
    angles = torch.outer(positions.double(), theta ** (-torch.arange(0, d, 2).double() / d))
    turned = torch.polar(torch.ones_like(angles), angles)[:, None] * torch.complex(x[..., : d // 2], x[..., d // 2 :])
    return torch.cat((turned.real, turned.imag), dim=-1)
