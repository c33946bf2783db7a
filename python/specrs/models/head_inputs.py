"""The inputs of a draft head's decoder layer, for each kind of head: from tokens and features to the residual stream
and the rows of queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from specrs.models.config import Eagle1Config, Eagle3Config
from specrs.models.layer import LayerKind, qkv_names
from specrs.models.loader import Checkpoint
from specrs.models.ops import Embedding, Linear, Ops

LAYER = "midlayer."
"""Prefix of the layer's tensors, once `plain_name` has named them."""


def plain_name(name: str) -> str:
    """Heads are published with and without a leading `model.`, and with `layers.0.` for `midlayer.`."""
    name = name.removeprefix("model.")
    return LAYER + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def layer_kind(weights: Checkpoint) -> LayerKind:
    """Published heads disagree on which config key switches biases on, and none has one for the norms of queries and
    keys, so the file decides."""
    return LayerKind(
        qkv_bias=f"{LAYER}self_attn.q_proj.bias" in weights,
        o_bias=f"{LAYER}self_attn.o_proj.bias" in weights,
        mlp_bias=f"{LAYER}mlp.up_proj.bias" in weights,
        qk_norm=any(f"{LAYER}self_attn.{name}.weight" in weights for name in ("q_norm", "k_norm")),
    )


class HeadInputs(Protocol):
    """Inputs of one kind of head.

    Attributes:
        widths: memory beside `x`, `e` and `n` of the hidden size that `project` uses: by name, columns; `qkv` is a row
            of the layer.
        kv_widths: the same without queries, whose row is `kv`.
    """

    widths: dict[str, int]
    kv_widths: dict[str, int]

    def products(self) -> Iterator[tuple[str, Linear]]:
        """Yield the products, with the names of their weights."""

    def fuse(self, features: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The head's feature [Q, h] from the target's, [Q, n_aux * target hidden]; may be in `out`."""

    def project(
        self, tokens: torch.Tensor, feature: torch.Tensor, w: dict[str, torch.Tensor], queries: bool
    ) -> torch.Tensor:
        """Fill the row of queries, keys and values of w, or that without queries; returns the residual stream."""


class Eagle3Inputs:
    """EAGLE-3: q, k and v read [embedding, feature], both normalised; the residual stream is the feature."""

    def __init__(self, config: Eagle3Config, weights: Checkpoint, ops: Ops, embedding: Embedding) -> None:
        at, dense, h = ops.placement, ops.dense, config.hidden_size
        self._dense, self._embedding, self._eps = dense, embedding, config.rms_norm_eps
        self._norm_first = config.norm_before_residual
        bias = weights.load("fc.bias") if "fc.bias" in weights else None
        self._fc = dense.linear(weights.load("fc.weight"), bias)
        self._embed_norm = at.vector(weights.load(f"{LAYER}input_layernorm.weight"))
        self._hidden_norm = at.vector(weights.load(f"{LAYER}hidden_norm.weight"))
        # q/k/v read [embedding, feature] side by side. Their weight is split at the seam instead, so that neither the
        # concatenation nor its two normalised halves are ever written.
        qkv, qkv_bias = _qkv(weights)
        self._qkv_embed = dense.linear(qkv[:, :h].contiguous(), qkv_bias)
        self._qkv_hidden = dense.linear(qkv[:, h:].contiguous())
        kv, kv_bias = qkv[config.q_size :], None if qkv_bias is None else qkv_bias[config.q_size :]
        self._kv_embed = dense.linear(kv[:, :h].contiguous(), kv_bias)
        self._kv_hidden = dense.linear(kv[:, h:].contiguous())
        self.widths = {"qkv": config.qkv_size, "part": config.qkv_size}
        self.kv_widths = {"kv": 2 * config.kv_size, "part": 2 * config.kv_size}

    def products(self) -> Iterator[tuple[str, Linear]]:
        yield "fc", self._fc
        yield f"{LAYER}self_attn.qkv_proj of embeddings", self._qkv_embed
        yield f"{LAYER}self_attn.qkv_proj of features", self._qkv_hidden
        yield f"{LAYER}self_attn.kv_proj of embeddings", self._kv_embed
        yield f"{LAYER}self_attn.kv_proj of features", self._kv_hidden

    def fuse(self, features: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self._fc.forward(features, out)
        return out

    def project(
        self, tokens: torch.Tensor, feature: torch.Tensor, w: dict[str, torch.Tensor], queries: bool
    ) -> torch.Tensor:
        of_hidden, of_embed = (self._qkv_hidden, self._qkv_embed) if queries else (self._kv_hidden, self._kv_embed)
        self._embedding.lookup(tokens, w["e"])
        if self._norm_first:
            self._dense.rms_norm(feature, self._hidden_norm, self._eps, w["n"])
            feature = w["n"]
            of_hidden.forward(feature, w["part"])
        else:
            of_hidden.forward(feature, w["part"], None, self._hidden_norm, self._eps)
        of_embed.forward(w["e"], w["qkv" if queries else "kv"], w["part"], self._embed_norm, self._eps)
        return feature


class Eagle1Inputs:
    """EAGLE-1 and EAGLE-2: `fc` of [embedding, feature] is the residual stream, and q, k and v read it as it is."""

    def __init__(self, config: Eagle1Config, weights: Checkpoint, ops: Ops, embedding: Embedding) -> None:
        dense, h = ops.dense, config.hidden_size
        self._embedding = embedding
        bias = weights.load("fc.bias") if "fc.bias" in weights else None
        fc = weights.load("fc.weight")
        # Split at the seam, so that the concatenation is never written.
        self._fc_embed = dense.linear(fc[:, :h].contiguous(), bias)
        self._fc_hidden = dense.linear(fc[:, h:].contiguous())
        qkv, qkv_bias = _qkv(weights)
        self._qkv = dense.linear(qkv, qkv_bias)
        kv_bias = None if qkv_bias is None else qkv_bias[config.q_size :]
        self._kv = dense.linear(qkv[config.q_size :].contiguous(), kv_bias)
        self.widths = {"qkv": config.qkv_size, "stream": h}
        self.kv_widths = {"kv": 2 * config.kv_size, "stream": h}

    def products(self) -> Iterator[tuple[str, Linear]]:
        yield "fc of embeddings", self._fc_embed
        yield "fc of features", self._fc_hidden
        yield f"{LAYER}self_attn.qkv_proj", self._qkv
        yield f"{LAYER}self_attn.kv_proj", self._kv

    def fuse(self, features: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return features

    def project(
        self, tokens: torch.Tensor, feature: torch.Tensor, w: dict[str, torch.Tensor], queries: bool
    ) -> torch.Tensor:
        self._embedding.lookup(tokens, w["e"])
        self._fc_hidden.forward(feature, w["n"])
        self._fc_embed.forward(w["e"], w["stream"], w["n"])
        if queries:
            self._qkv.forward(w["stream"], w["qkv"])
        else:
            self._kv.forward(w["stream"], w["kv"])
        return w["stream"]


def _qkv(weights: Checkpoint) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight of q, k and v together, and their bias."""
    names = list(qkv_names(LAYER))
    weight = torch.cat([weights.load(f"{name}.weight") for name in names])
    if f"{names[0]}.bias" not in weights:
        return weight, None
    return weight, torch.cat([weights.load(f"{name}.bias") for name in names])
