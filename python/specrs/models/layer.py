"""The decoder layer that all models here share: its tensors' names and shapes, its weights as the device wants them,
and the scratch memory that its activations live in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from specrs._specrs import Plan
from specrs.models.config import LayerConfig
from specrs.models.loader import Checkpoint
from specrs.models.ops import Dense, Heads, KvMemory, Linear, Ops
from specrs.models.placement import Placement

# Row counts repeat from round to round; this many sets of views are kept before starting over.
_MAX_ROW_COUNTS = 256


class Workspace:
    """Activations by name, [capacity, width] each, allocated once and cut to a call's row count.

    `rows(n)` returns the same views for the same n until the capacity grows, so that a warm call allocates nothing.

    Attributes:
        moves: how often it grew: what was captured with its memory before must not run again.
    """

    def __init__(self, placement: Placement, **widths: int) -> None:
        self._placement, self._widths = placement, widths
        self._memory = {name: placement.empty(0, width) for name, width in widths.items()}
        self._views: dict[int, dict[str, torch.Tensor]] = {}
        self._capacity = self.moves = 0

    def rows(self, count: int) -> dict[str, torch.Tensor]:
        """Views [count, width], contiguous; the contents are whatever the last use left."""
        views = self._views.get(count)
        if views is None:
            if count > self._capacity:
                self._capacity = -(-count // 16) * 16
                empty = self._placement.empty
                self._memory = {name: empty(self._capacity, width) for name, width in self._widths.items()}
                self._views.clear()
                self.moves += 1
            elif len(self._views) >= _MAX_ROW_COUNTS:
                self._views.clear()
            views = {name: memory[:count] for name, memory in self._memory.items()}
            self._views[count] = views
        return views


@dataclass(frozen=True)
class LayerKind:
    """What varies between decoder layers beside their sizes."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def layer_shapes(config: LayerConfig, kind: LayerKind, prefix: str, qkv_inputs: int) -> dict[str, tuple[int, ...]]:
    """Tensors of one layer in a checkpoint; `prefix` ends in a dot, `qkv_inputs` is the width that q/k/v read."""
    h, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}post_attention_layernorm.weight": (h,)}
    for name, rows in (("q", config.q_size), ("k", config.kv_size), ("v", config.kv_size)):
        shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, qkv_inputs)
        if kind.qkv_bias:
            shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
    shapes[f"{prefix}self_attn.o_proj.weight"] = (h, config.q_size)
    if kind.o_bias:
        shapes[f"{prefix}self_attn.o_proj.bias"] = (h,)
    for name, rows, columns in (("gate", inner, h), ("up", inner, h), ("down", h, inner)):
        shapes[f"{prefix}mlp.{name}_proj.weight"] = (rows, columns)
        if kind.mlp_bias:
            shapes[f"{prefix}mlp.{name}_proj.bias"] = (rows,)
    if kind.qk_norm:
        shapes[f"{prefix}self_attn.q_norm.weight"] = (config.head_dim,)
        shapes[f"{prefix}self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


class LayerTail:
    """Everything of a decoder layer after its q/k/v projection."""

    def __init__(self, ops: Ops, config: LayerConfig, kind: LayerKind, weights: Checkpoint, prefix: str) -> None:
        at, dense, self._attention = ops.placement, ops.dense, ops.attention
        self._eps = config.rms_norm_eps
        self.o = stacked(dense, weights, [f"{prefix}self_attn.o_proj"], kind.o_bias)
        self.gate_up = stacked(
            dense, weights, [f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"], kind.mlp_bias, gated=True
        )
        self.down = stacked(dense, weights, [f"{prefix}mlp.down_proj"], kind.mlp_bias)
        self.post_norm = at.vector(weights.load(f"{prefix}post_attention_layernorm.weight"))
        q_norm, k_norm = (
            at.vector(weights.load(f"{prefix}self_attn.{name}.weight")) if kind.qk_norm else None
            for name in ("q_norm", "k_norm")
        )
        self._heads = Heads(config.num_heads, config.head_dim**-0.5, q_norm, k_norm, config.rms_norm_eps)

    def products(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Its products, by what their weights are called."""
        yield f"{prefix}self_attn.o_proj", self.o
        yield f"{prefix}mlp.gate_up_proj", self.gate_up
        yield f"{prefix}mlp.down_proj", self.down

    def attend(self, kv: KvMemory, index: int, plan: Plan, qkv: torch.Tensor, rope: Any, out: torch.Tensor) -> None:
        """Layer `index` of `kv` gets the rows' keys and values; out [Q, H D] is what the queries read."""
        self._attention.attend(kv, index, plan, qkv, rope, self._heads, out)

    def write(self, kv: KvMemory, index: int, plan: Plan, rows: torch.Tensor, rope: Any) -> None:
        """Layer `index` of `kv` gets the keys and values of `rows` [Q, 2 Hkv D]."""
        self._attention.write(kv, index, plan, rows, rope, self._heads)

    def mix(
        self, residual: torch.Tensor, attended: torch.Tensor, w: dict[str, torch.Tensor], out: torch.Tensor
    ) -> None:
        """out [R, h] = the residual stream after this layer. Uses `y` and `act` of w; `out` may be `residual`."""
        self.o.forward(attended, w["y"], residual)
        self.gate_up.forward_swiglu(w["y"], w["act"], self.post_norm, self._eps)
        self.down.forward(w["act"], out, w["y"])


def stacked(dense: Dense, weights: Checkpoint, names: list[str], bias: bool, gated: bool = False) -> Linear:
    """One linear of several projections of the same input, their rows stacked in the order of `names`."""
    weight = _stack([weights.load(f"{name}.weight") for name in names])
    return dense.linear(weight, _stack([weights.load(f"{name}.bias") for name in names]) if bias else None, gated)


def _stack(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def qkv_names(prefix: str) -> Iterator[str]:
    """The three projections in the order of a fused qkv row."""
    return (f"{prefix}self_attn.{name}_proj" for name in "qkv")
