"""The decoder layer that all models here share: its tensors' names and shapes, its weights as the device wants them,
and the scratch memory that its activations live in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specrs import _specrs as core
from specrs._specrs import Plan
from specrs.models.config import LayerConfig, ModelConfig
from specrs.models.families import LLAMA, Block
from specrs.models.loader import Checkpoint
from specrs.models.ops import Dense, Heads, KvMemory, Linear, Ops
from specrs.models.placement import Placement

# Row counts repeat from round to round; this many sets of views are kept before starting over.
_MAX_ROW_COUNTS = 256


class Workspace:
    """Activations by name, [capacity, width] each, allocated once and cut to a call's row count.

    `rows(n)` returns the same views for the same n until the capacity grows, so that a warm call allocates nothing.
    Once reserved, the memory never moves.
    """

    def __init__(self, placement: Placement, **widths: int) -> None:
        self._placement, self._widths = placement, widths
        self._memory = {name: placement.empty(0, width) for name, width in widths.items()}
        self._views: dict[int, dict[str, torch.Tensor]] = {}
        self._capacity, self._reserved = 0, False

    def reserve(self, count: int) -> None:
        """Allocate memory for so many rows. More rows are an error from now on: captured graphs have the address."""
        self.rows(count)
        self._reserved = True

    def rows(self, count: int) -> dict[str, torch.Tensor]:
        """Return views [count, width], contiguous; they hold what the last use left."""
        views = self._views.get(count)
        if views is None:
            if count > self._capacity:
                if self._reserved:
                    raise RuntimeError(f"a pass of {count} rows: memory is reserved for {self._capacity}")
                self._capacity = -(-count // 16) * 16
                empty = self._placement.empty
                self._memory = {name: empty(self._capacity, width) for name, width in self._widths.items()}
                self._views.clear()
            elif len(self._views) >= _MAX_ROW_COUNTS:
                self._views.clear()
            views = {name: memory[:count] for name, memory in self._memory.items()}
            self._views[count] = views
        return views


@dataclass(frozen=True)
class LayerKind:
    """The properties in which decoder layers differ beside their sizes."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    block: Block = LLAMA

    @classmethod
    def of(cls, config: ModelConfig) -> LayerKind:
        """Return the kind of a target's layers."""
        return cls(config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm, config.block)

    def norms(self, prefix: str) -> _Norms:
        """Names of the norms around attention and the MLP, without ``.weight``; ``None`` where there is none."""
        attention, mlp = f"{prefix}post_attention_layernorm", f"{prefix}post_feedforward_layernorm"
        if self.block.norms == "before":
            return _Norms(f"{prefix}input_layernorm", None, attention, None)
        if self.block.norms == "after":
            return _Norms(None, attention, None, mlp)
        return _Norms(f"{prefix}input_layernorm", attention, f"{prefix}pre_feedforward_layernorm", mlp)

    def qkv_names(self, prefix: str) -> list[str]:
        """The tensors of the query, key and value projections, in the order of a fused qkv row."""
        return [f"{prefix}self_attn.qkv_proj"] if self.block.fused_files else list(qkv_names(prefix))

    def gate_up_names(self, prefix: str) -> list[str]:
        """Return the names of the gate and up projections' weights."""
        parts = ("gate_up",) if self.block.fused_files else ("gate", "up")
        return [f"{prefix}mlp.{part}_proj" for part in parts]


@dataclass(frozen=True)
class _Norms:
    """Norms of a layer: on what attention and the MLP read, and on what each adds to the residual stream."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


def layer_shapes(config: LayerConfig, kind: LayerKind, prefix: str, qkv_inputs: int) -> dict[str, tuple[int, ...]]:
    """Tensors of one layer in a checkpoint; `prefix` ends in a dot, `qkv_inputs` is the width that q/k/v read."""
    h, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {}
    norms = kind.norms(prefix)
    for norm in (norms.after_attention, norms.before_mlp, norms.after_mlp):
        if norm is not None:
            shapes[f"{norm}.weight"] = (h,)
    fused = kind.block.fused_files
    rows = [config.qkv_size] if fused else [config.q_size, config.kv_size, config.kv_size]
    for name, count in zip(kind.qkv_names(prefix), rows, strict=True):
        shapes[f"{name}.weight"] = (count, qkv_inputs)
        if kind.qkv_bias:
            shapes[f"{name}.bias"] = (count,)
    shapes[f"{prefix}self_attn.o_proj.weight"] = (h, config.q_size)
    if kind.o_bias:
        shapes[f"{prefix}self_attn.o_proj.bias"] = (h,)
    gate_up = [(name, 2 * inner if fused else inner, h) for name in kind.gate_up_names(prefix)]
    for name, count, columns in (*gate_up, (f"{prefix}mlp.down_proj", h, inner)):
        shapes[f"{name}.weight"] = (count, columns)
        if kind.mlp_bias:
            shapes[f"{name}.bias"] = (count,)
    if kind.qk_norm or kind.block.whole_qk_norm:
        whole = kind.block.whole_qk_norm
        shapes[f"{prefix}self_attn.q_norm.weight"] = (config.q_size if whole else config.head_dim,)
        shapes[f"{prefix}self_attn.k_norm.weight"] = (config.kv_size if whole else config.head_dim,)
    return shapes


def norm_weight(at: Placement, weights: Checkpoint, name: str | None, block: Block) -> torch.Tensor | None:
    """A norm's weight as operations read it; ``None`` of no norm. With an offset it is of f32: a sum near 1 would keep
    few of the weight's bits in bf16."""
    if name is None:
        return None
    weight = weights.load(f"{name}.weight")
    return (weight.float() + block.norm_offset).to(at.device) if block.norm_offset else at.vector(weight)


class Qkv(Protocol):
    """The projection to a row of queries, keys and values: a `Linear`, or `WholeNormQkv`."""

    def forward(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """out [M, (H + 2 Hkv) D] of rms_norm(x [M, h], norm, eps); the norm may be absent, and there is no residual."""


class WholeNormQkv:
    """Queries, keys and values by three products; an RMSNorm of all query heads as one row, and of all key heads.

    work: memory of `widths`, which layers share.
    """

    def __init__(
        self, ops: Ops, config: LayerConfig, kind: LayerKind, weights: Checkpoint, prefix: str, work: Workspace
    ) -> None:
        self._dense, self._eps = ops.dense, config.rms_norm_eps
        self.parts = [stacked(ops.dense, weights, [name], kind.qkv_bias) for name in qkv_names(prefix)]
        self._norms = [
            norm_weight(ops.placement, weights, f"{prefix}self_attn.{name}", kind.block)
            for name in ("q_norm", "k_norm")
        ]
        self._work = work

    @staticmethod
    def widths(config: LayerConfig) -> dict[str, int]:
        """Memory that `forward` uses, by name: columns."""
        q, k = config.q_size, config.kv_size
        return {"q": q, "k": k, "v": k, "q_normed": q, "k_normed": k}

    def forward(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        w = self._work.rows(x.shape[0])
        for part, name in zip(self.parts, "qkv", strict=True):
            part.forward(x, w[name], None, norm, eps)
        for weight, name in zip(self._norms, "qk", strict=True):
            assert weight is not None
            self._dense.rms_norm(w[name], weight, self._eps, w[f"{name}_normed"])
        torch.cat((w["q_normed"], w["k_normed"], w["v"]), 1, out=out)


def qkv_work(at: Placement, config: LayerConfig, block: Block) -> Workspace:
    """The memory that the projections of all layers share."""
    return Workspace(at, **(WholeNormQkv.widths(config) if block.whole_qk_norm else {}))


def qkv_of(
    ops: Ops, config: LayerConfig, kind: LayerKind, weights: Checkpoint, prefix: str, work: Workspace
) -> Linear | WholeNormQkv:
    """A layer's projection of queries, keys and values."""
    if kind.block.whole_qk_norm:
        return WholeNormQkv(ops, config, kind, weights, prefix, work)
    return stacked(ops.dense, weights, kind.qkv_names(prefix), kind.qkv_bias)


def qkv_products(qkv: Linear | WholeNormQkv, prefix: str) -> Iterator[tuple[str, Linear]]:
    """Yield the products, with the names of their weights."""
    if isinstance(qkv, WholeNormQkv):
        yield from zip(qkv_names(prefix), qkv.parts, strict=True)
    else:
        yield f"{prefix}self_attn.qkv_proj", qkv


class LayerTail:
    """Everything of a decoder layer after its q/k/v projection."""

    def __init__(
        self, ops: Ops, config: LayerConfig, kind: LayerKind, weights: Checkpoint, prefix: str, rope: Any
    ) -> None:
        at, dense, self._attention = ops.placement, ops.dense, ops.attention
        self._dense, self._eps, self._block, self._rope = dense, config.rms_norm_eps, kind.block, rope
        self._gelu = kind.block.activation == "gelu_tanh"
        self.o = stacked(dense, weights, [f"{prefix}self_attn.o_proj"], kind.o_bias)
        self.gate_up = stacked(dense, weights, kind.gate_up_names(prefix), kind.mlp_bias, gated=not self._gelu)
        self.down = stacked(dense, weights, [f"{prefix}mlp.down_proj"], kind.mlp_bias)
        norms = kind.norms(prefix)
        self.post_norm, self._attention_norm, self._mlp_norm = (
            norm_weight(at, weights, name, kind.block)
            for name in (norms.before_mlp, norms.after_attention, norms.after_mlp)
        )
        q_norm, k_norm = (
            norm_weight(at, weights, f"{prefix}self_attn.{name}", kind.block) if kind.qk_norm else None
            for name in ("q_norm", "k_norm")
        )
        scale = config.head_dim**-0.5 if kind.block.score_scale is None else kind.block.score_scale
        self._heads = Heads(config.num_heads, scale, q_norm, k_norm, config.rms_norm_eps, kind.block.score_cap)
        self.fused = self._fused(rope)

    def _fused(self, rope: Any) -> core.LayerTail | None:
        """Return the same in one call, where all of it is made of the host's kernels and the family's steps are those
        that the call has."""
        heads, block, (o, gate_up, down) = self._heads, self._block, (self.o, self.gate_up, self.down)
        if block.norms != "before" or block.residual_scale != 1.0 or self._gelu or not isinstance(rope, core.RopeTable):
            return None
        if not isinstance(o, core.PackedLinear):
            return None
        assert isinstance(gate_up, core.PackedLinear) and isinstance(down, core.PackedLinear)
        assert self.post_norm is not None
        norms = heads.q_norm, heads.k_norm
        return core.LayerTail(
            o, gate_up, down, self.post_norm, self._eps, rope, heads.count, heads.scale, *norms, heads.cap
        )

    @staticmethod
    def widths(config: LayerConfig, block: Block = LLAMA) -> dict[str, int]:
        """Memory that `forward` uses beside the residual stream, by name: columns."""
        wide = {"y": config.hidden_size, "attended": config.q_size, "act": config.intermediate_size}
        if block.norms != "before" or block.residual_scale != 1.0:
            wide |= {"added": config.hidden_size, "normed": config.hidden_size}
        if block.activation == "gelu_tanh":
            wide["gate_up"] = 2 * config.intermediate_size
        return wide

    def products(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yield the products, with the names of their weights."""
        yield f"{prefix}self_attn.o_proj", self.o
        yield f"{prefix}mlp.gate_up_proj", self.gate_up
        yield f"{prefix}mlp.down_proj", self.down

    def forward(
        self,
        kv: Any,
        index: int,
        plan: Plan,
        qkv: torch.Tensor,
        residual: torch.Tensor,
        w: dict[str, torch.Tensor],
        out: torch.Tensor,
        rows: torch.Tensor | None = None,
        shift: int = 0,
        of_rows: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """out [R, h] = the residual stream after this layer. Layer `index` of `kv` gets all rows' keys and values.

        qkv: rows of queries, keys and values. residual: the stream before the layer, which `out` may be. w: memory of
        all rows (`widths`). rows: integers [R] or None (all), to each of which ``shift`` is added. of_rows: memory of
        these (`widths`, and `x`, which `out` may be).
        """
        if self.fused is not None:
            self.fused.forward(kv, index, plan, qkv, residual, out, rows if rows is None or not shift else rows + shift)
            return
        self.attend(kv, index, plan, qkv, w["attended"])
        attended = w["attended"]
        if rows is not None:
            # From here on rows are independent, and only these are read.
            assert of_rows is not None
            self._dense.gather(residual, rows, of_rows["x"], shift)
            self._dense.gather(attended, rows, of_rows["attended"], shift)
            w, residual, attended = of_rows, of_rows["x"], of_rows["attended"]
        if out.shape[0]:
            self._mix(residual, attended, w, out)

    def attend(self, kv: KvMemory, index: int, plan: Plan, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Layer `index` of `kv` gets the rows' keys and values; out [Q, H D] is what the queries read."""
        self._attention.attend(kv, index, plan, qkv, self._rope, self._heads, out)

    def write(self, kv: KvMemory, index: int, plan: Plan, rows: torch.Tensor) -> None:
        """Layer `index` of `kv` gets the keys and values of `rows` [Q, 2 Hkv D]."""
        self._attention.write(kv, index, plan, rows, self._rope, self._heads)

    def _mix(
        self, residual: torch.Tensor, attended: torch.Tensor, w: dict[str, torch.Tensor], out: torch.Tensor
    ) -> None:
        """out [R, h] = the residual stream after this layer; `out` may be `residual`."""
        self._add(self.o, attended, residual, self._attention_norm, w, w["y"])
        if self._gelu:
            self.gate_up.forward(w["y"], w["gate_up"], None, self.post_norm, self._eps)
            self._dense.gelu_up(w["gate_up"], w["act"])
        else:
            self.gate_up.forward_swiglu(w["y"], w["act"], self.post_norm, self._eps)
        self._add(self.down, w["act"], w["y"], self._mlp_norm, w, out)

    def _add(
        self,
        product: Linear,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: torch.Tensor | None,
        w: dict[str, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """out = residual + scale * rms_norm(product(x)), the norm and the scale where the family has them."""
        scale = self._block.residual_scale
        if norm is None and scale == 1.0:
            product.forward(x, out, residual)
            return
        added = w["added"]
        product.forward(x, added)
        if norm is not None:
            self._dense.rms_norm(added, norm, self._eps, w["normed"])
            added = w["normed"]
        self._dense.scaled_add(residual, added, scale, out)


class DecoderLayers:
    """Decoder layers whose queries, keys and values are a product of the normalised residual stream.

    Args:
        qkv: each layer's projection of queries, keys and values.
        norms: weight of the norm before each, or ``None``.
        tails: everything behind each.
    """

    def __init__(
        self, qkv: Sequence[Qkv], norms: Sequence[torch.Tensor | None], tails: Sequence[LayerTail], eps: float
    ) -> None:
        self._each, self._eps = list(zip(qkv, norms, tails, strict=True)), eps
        whole = [
            (product, norm, eps, tail.fused)
            for product, norm, tail in self._each
            if isinstance(product, core.PackedLinear) and norm is not None and tail.fused is not None
        ]
        self._fused = core.DecoderLayers(whole) if whole and len(whole) == len(self._each) else None

    def forward(
        self,
        kv: Any,
        first: int,
        end: int,
        plan: Plan,
        x: torch.Tensor,
        w: dict[str, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """out = the residual stream x [Q, h] after layers ``first`` to ``end``; `out` may be `x`. w: memory of
        `LayerTail.widths`, and `qkv`."""
        if self._fused is not None:
            self._fused.forward(kv, first, end, plan, x, out)
            return
        for i in range(first, end):
            product, norm, tail = self._each[i]
            product.forward(x, w["qkv"], None, norm, self._eps)
            tail.forward(kv, i, plan, w["qkv"], x, w, out)
            x = out

    def last(
        self,
        kv: Any,
        plan: Plan,
        x: torch.Tensor,
        w: dict[str, torch.Tensor],
        rows: torch.Tensor,
        of_rows: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return some rows of the stream x after the last layer, in `x` of ``of_rows``."""
        product, norm, tail = self._each[-1]
        product.forward(x, w["qkv"], None, norm, self._eps)
        tail.forward(kv, len(self._each) - 1, plan, w["qkv"], x, w, of_rows["x"], rows, 0, of_rows)
        return of_rows["x"]


def stacked(dense: Dense, weights: Checkpoint, names: list[str], bias: bool, gated: bool = False) -> Linear:
    """Return one linear of several projections of the same input, their rows stacked in the order of `names`."""
    weight = _stack([weights.load(f"{name}.weight") for name in names])
    return dense.linear(weight, _stack([weights.load(f"{name}.bias") for name in names]) if bias else None, gated)


def _stack(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def qkv_names(prefix: str) -> Iterator[str]:
    """The three projections in the order of a fused qkv row."""
    return (f"{prefix}self_attn.{name}_proj" for name in "qkv")
