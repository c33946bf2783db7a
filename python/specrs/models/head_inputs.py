"""The inputs of a draft head's decoder layers, for each kind of head: from tokens and features to the residual stream
and the rows of queries, keys and values of the first layer, and from the stream to the rows of layers behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from specrs import _specrs as core
from specrs.models.config import LayerConfig
from specrs.models.head_config import Eagle1Config, Eagle3Config
from specrs.models.head_files import first_norm
from specrs.models.head_forms import LAYER
from specrs.models.layer import LayerTail, qkv_names
from specrs.models.loader import Checkpoint
from specrs.models.ops import Embedding, Linear, Ops


class HeadInputs(Protocol):
    """Inputs of one kind of head.

    Attributes:
        widths: memory beside `x`, `e` and `n` of the hidden size that `project` uses: by name, columns; `qkv` is a row
            of the layer.
        kv_widths: the same without queries, whose row is `kv`.
        feature_widths: memory beside `x` that `fuse` uses.
    """

    widths: dict[str, int]
    kv_widths: dict[str, int]
    feature_widths: dict[str, int]

    def products(self) -> Iterator[tuple[str, Linear]]:
        """Yield the products, with the names of their weights."""

    def fused(self, tail: LayerTail, norm: torch.Tensor | None, lm_head: Linear) -> core.Eagle3Layer | None:
        """Return `project` and all behind it, of a head of one layer, in one call, where the host's kernels have it."""

    def fuse(self, aux: Sequence[torch.Tensor], w: dict[str, torch.Tensor]) -> torch.Tensor:
        """The head's feature [Q, h] from the target's, [Q, target hidden] of each aux layer; may be in `x` of w."""

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
        self._all_norm = at.vector(weights.load("input_norm.weight")) if config.norm_before_fc else None
        count = config.aux_size // config.target_hidden_size if config.fc_norm else 0
        self._each_norm = [at.vector(weights.load(f"fc_norm.{i}.weight")) for i in range(count)]
        self.feature_widths = {f"feature {i}": config.target_hidden_size for i in range(count)}
        if config.norm_before_fc:
            self.feature_widths["features"] = config.aux_size
        bias = weights.load("fc.bias") if "fc.bias" in weights else None
        self._fc = dense.linear(weights.load("fc.weight"), bias)
        self._embed_norm = at.vector(weights.load(f"{LAYER}input_layernorm.weight"))
        self._hidden_norm = at.vector(weights.load(f"{LAYER}hidden_norm.weight"))
        # q/k/v read [embedding, feature] side by side. Their weight is split at the seam instead, so that neither the
        # concatenation nor its two normalised halves are ever written.
        qkv, qkv_bias = _qkv(weights, LAYER)
        self._qkv_embed = dense.linear(qkv[:, :h].contiguous(), qkv_bias)
        self._qkv_hidden = dense.linear(qkv[:, h:].contiguous())
        self._kv: tuple[Linear, Linear] | None = None
        if config.num_layers == 1:  # another layer needs what this one's queries read
            kv, kv_bias = qkv[config.q_size :], None if qkv_bias is None else qkv_bias[config.q_size :]
            self._kv = dense.linear(kv[:, h:].contiguous()), dense.linear(kv[:, :h].contiguous(), kv_bias)
        self.widths = {"qkv": config.qkv_size, "part": config.qkv_size}
        self.kv_widths = {"kv": 2 * config.kv_size, "part": 2 * config.kv_size}

    def fused(self, tail: LayerTail, norm: torch.Tensor | None, lm_head: Linear) -> core.Eagle3Layer | None:
        of_feature, of_embedding = self._qkv_hidden, self._qkv_embed
        if self._norm_first or norm is None or tail.fused is None or not isinstance(lm_head, core.PackedLinear):
            return None
        assert isinstance(of_feature, core.PackedLinear) and isinstance(of_embedding, core.PackedLinear)
        each = self._hidden_norm, of_feature, self._embed_norm, of_embedding
        return core.Eagle3Layer(*each, tail.fused, norm, lm_head, self._eps)

    def products(self) -> Iterator[tuple[str, Linear]]:
        yield "fc", self._fc
        yield f"{LAYER}self_attn.qkv_proj of embeddings", self._qkv_embed
        yield f"{LAYER}self_attn.qkv_proj of features", self._qkv_hidden
        if self._kv is not None:
            yield f"{LAYER}self_attn.kv_proj of features", self._kv[0]
            yield f"{LAYER}self_attn.kv_proj of embeddings", self._kv[1]

    def fuse(self, aux: Sequence[torch.Tensor], w: dict[str, torch.Tensor]) -> torch.Tensor:
        for i, norm in enumerate(self._each_norm):
            self._dense.rms_norm(aux[i].contiguous(), norm, self._eps, w[f"feature {i}"])
        features = self._dense.concat([w[f"feature {i}"] for i in range(len(aux))] if self._each_norm else aux)
        if self._all_norm is not None:
            self._dense.rms_norm(features, self._all_norm, self._eps, w["features"])
            features = w["features"]
        self._fc.forward(features, w["x"])
        return w["x"]

    def project(
        self, tokens: torch.Tensor, feature: torch.Tensor, w: dict[str, torch.Tensor], queries: bool
    ) -> torch.Tensor:
        of_hidden, of_embed = (self._qkv_hidden, self._qkv_embed)
        if not queries:
            assert self._kv is not None
            of_hidden, of_embed = self._kv
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
        self._dense, self._embedding = dense, embedding
        bias = weights.load("fc.bias") if "fc.bias" in weights else None
        fc = weights.load("fc.weight")
        # Split at the seam, so that the concatenation is never written.
        self._fc_embed = dense.linear(fc[:, :h].contiguous(), bias)
        self._fc_hidden = dense.linear(fc[:, h:].contiguous())
        qkv, qkv_bias = _qkv(weights, LAYER)
        self._qkv = dense.linear(qkv, qkv_bias)
        kv_bias = None if qkv_bias is None else qkv_bias[config.q_size :]
        self._kv = dense.linear(qkv[config.q_size :].contiguous(), kv_bias)
        self.widths = {"qkv": config.qkv_size, "stream": h}
        self.kv_widths = {"kv": 2 * config.kv_size, "stream": h}
        self.feature_widths: dict[str, int] = {}

    def fused(self, tail: LayerTail, norm: torch.Tensor | None, lm_head: Linear) -> None:
        return None

    def products(self) -> Iterator[tuple[str, Linear]]:
        yield "fc of embeddings", self._fc_embed
        yield "fc of features", self._fc_hidden
        yield f"{LAYER}self_attn.qkv_proj", self._qkv
        yield f"{LAYER}self_attn.kv_proj", self._kv

    def fuse(self, aux: Sequence[torch.Tensor], w: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._dense.concat(aux)

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


class LaterInputs:
    """Inputs of a layer behind the first: q, k and v read the normalised residual stream.

    kv: true for the last layer, of which passes without logits want keys and values alone.
    """

    def __init__(self, config: LayerConfig, weights: Checkpoint, ops: Ops, prefix: str, kv: bool) -> None:
        self._prefix, self._eps = prefix, config.rms_norm_eps
        self._norm = ops.placement.vector(weights.load(f"{first_norm(weights, prefix)}.weight"))
        qkv, bias = _qkv(weights, prefix)
        self._qkv = ops.dense.linear(qkv, bias)
        self._kv: Linear | None = None
        if kv:
            kv_bias = None if bias is None else bias[config.q_size :]
            self._kv = ops.dense.linear(qkv[config.q_size :].contiguous(), kv_bias)

    def products(self) -> Iterator[tuple[str, Linear]]:
        """Yield the products, with the names of their weights."""
        yield f"{self._prefix}self_attn.qkv_proj", self._qkv
        if self._kv is not None:
            yield f"{self._prefix}self_attn.kv_proj", self._kv

    def project(self, stream: torch.Tensor, w: dict[str, torch.Tensor], queries: bool) -> None:
        """Fill the row of queries, keys and values of w, or that without queries, from the residual stream."""
        if queries:
            self._qkv.forward(stream, w["qkv"], None, self._norm, self._eps)
        else:
            assert self._kv is not None
            self._kv.forward(stream, w["kv"], None, self._norm, self._eps)


def _qkv(weights: Checkpoint, prefix: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight of a layer's q, k and v together, and their bias."""
    names = list(qkv_names(prefix))
    weight = torch.cat([weights.load(f"{name}.weight") for name in names])
    if f"{names[0]}.bias" not in weights:
        return weight, None
    return weight, torch.cat([weights.load(f"{name}.bias") for name in names])
