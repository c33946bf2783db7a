"""The operations of a device: the Rust kernels of the host, and plain torch on any device, their reference.

Results of `HostDense` for a row do not depend on the other rows of the batch nor on the number of threads. With an
attention that keeps that too, a token's logits are the same bits whether it is decoded alone, prefilled in a chunk or
verified in a tree.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs._specrs import ConfigError, Moves, Plan
from specrs.models.ops import Embedding, Heads, KvMemory, Linear
from specrs.models.placement import HOST, Placement
from specrs.models.rowwise import gelu_up, scaled_add, soft_cap

_KEPT: dict[torch.dtype, Literal["bf16", "f16", "f32"]] = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    HOST.activations: "f32",
}  # weights, by the host


def kept_dtype(placement: Placement, stored: torch.dtype) -> torch.dtype:
    """Return the dtype in which the host's products keep a matrix that is stored in a dtype."""
    wanted = placement.weights or stored
    return wanted if wanted in _KEPT else HOST.activations


def follow_torch() -> None:
    """Tells the kernels how many threads torch has; `specrs.set_num_threads` says when that counts."""
    core._follow_torch(torch.get_num_threads(), os.cpu_count() or 1)


class TorchDense:
    """The reference: every step spelled out in torch, on any device."""

    def __init__(self, placement: Placement = HOST) -> None:
        self.placement = placement

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False, scores: bool = False
    ) -> Linear:
        at = self.placement
        weight = at.vector(weight.to(at.weights or weight.dtype))
        return _TorchLinear(weight, None if bias is None else at.vector(bias))

    def embedding(self, table: torch.Tensor) -> Embedding:
        return _Table(table.to(self.placement.device))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        out.copy_(_rms_norm(x, weight, eps))

    gelu_up, scaled_add, soft_cap = staticmethod(gelu_up), staticmethod(scaled_add), staticmethod(soft_cap)

    def convolve(
        self, x: torch.Tensor, base: torch.Tensor, own: torch.Tensor, side: int, plan: Plan, out: torch.Tensor,
        adds: bool = False,
    ) -> None:  # fmt: skip
        (rows, columns), taps = x.shape, len(base)
        starts = from_dlpack(plan.qo_indptr).long()
        places = (torch.arange(rows) - starts[:-1].repeat_interleave(starts.diff())).to(x.device)
        each = own.view(rows, 2, taps, -1)[:, side]
        factors = each.repeat_interleave(columns // each.shape[2], -1) + base
        y = x * factors[:, 0]
        for tap in range(1, taps):
            before = x.roll(tap, 0).masked_fill_((places < tap)[:, None], 0.0)
            y += before * factors[:, tap]
        torch.add(out, y, out=out) if adds else out.copy_(y)

    def gather(self, x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, shift: int = 0) -> None:
        torch.index_select(x, 0, rows + shift if shift else rows, out=out)

    def concat(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tuple(parts), 1)

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return cos.to(self.placement.device), sin.to(self.placement.device)

    def rope_write(
        self, kv: KvMemory, layer: int, plan: Plan, qkv: torch.Tensor, rope: Any, heads: Heads
    ) -> torch.Tensor:
        q, k, v = _rotated(kv, plan, qkv, rope, heads)
        slots = from_dlpack(plan.out_slots).long().to(qkv.device)
        kv.tensor[layer, 0, slots] = k.to(kv.tensor.dtype)
        kv.tensor[layer, 1, slots] = v.to(kv.tensor.dtype)
        return q

    def host(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.to(HOST.device, HOST.activations)

    def kv_move(self, kv: KvMemory, moves: Moves) -> None:
        for src, dst in zip(from_dlpack(moves.src).tolist(), from_dlpack(moves.dst).tolist(), strict=True):
            kv.tensor[:, :, dst] = kv.tensor[:, :, src]


class HostDense:
    """The Rust kernels: packed weights, with the operations around a product fused into it. torch does what needs no
    arithmetic: it copies rows, and rotates for attentions that do not.

    placement: of the host, in f32. Weights are kept as the checkpoint has them, in bf16, f16 or f32, unless it says
    which: bf16 rounds f32 and f16 weights, for half the memory of f32 and nearly twice the speed of decoding. Products
    over weights that were not rounded have the same bits however they are kept. ConfigError: another device or dtype.
    """

    def __init__(self, placement: Placement = HOST) -> None:
        for name in ("device", "activations"):
            got, want = getattr(placement, name), getattr(HOST, name)
            if got != want:
                raise ConfigError(f"{name} = {got}: the host's kernels compute with {want}")
        if placement.weights not in (None, *_KEPT):
            kept = " or ".join(map(str, _KEPT))
            raise ConfigError(f"weights = {placement.weights}: the host's kernels keep {kept}")
        self.placement = placement
        plain = TorchDense(placement)
        self.gather, self.concat = plain.gather, plain.concat
        self.rope, self.convolve, self.rms_norm = plain.rope, plain.convolve, core.rms_norm
        self.gelu_up, self.scaled_add, self.soft_cap = gelu_up, scaled_add, soft_cap

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False, scores: bool = False
    ) -> Linear:
        storage = _KEPT[kept_dtype(self.placement, weight.dtype)]
        bias = None if bias is None else self.placement.vector(bias)
        return core.PackedLinear(weight.contiguous(), bias, storage, gated)

    def embedding(self, table: torch.Tensor) -> Embedding:
        return PackedTable(table.contiguous())

    def rope_write(self, kv: Any, layer: int, plan: Plan, qkv: torch.Tensor, rope: Any, heads: Heads) -> torch.Tensor:
        q, k, v = _rotated(kv, plan, qkv, rope, heads)
        core.kv_write(kv, layer, plan, k.contiguous(), v.contiguous())
        return q

    def host(self, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def kv_move(self, kv: Any, moves: Moves) -> None:
        core.kv_move(kv, moves)


class _Table:
    """An embedding in torch."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self._rows = table.new_empty((0, table.shape[1]))

    def lookup(self, tokens: torch.Tensor, out: torch.Tensor) -> None:
        try:
            if self.table.dtype == out.dtype:
                torch.index_select(self.table, 0, tokens, out=out)
                return
            if tokens.numel() > self._rows.shape[0]:
                self._rows = self.table.new_empty(out.shape)
            rows = self._rows[: tokens.numel()]
            out.copy_(torch.index_select(self.table, 0, tokens, out=rows))
        except (IndexError, RuntimeError) as error:  # torch has checked every index; say which one it was
            vocab = self.table.shape[0]
            bad = [token for token in tokens.tolist() if not 0 <= token < vocab]
            if not bad:
                raise
            raise ConfigError(f"token = {bad[0]} is outside 0..{vocab} (the vocabulary)") from error


class PackedTable:
    """An embedding that the Rust kernels read."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def lookup(self, tokens: torch.Tensor, out: torch.Tensor) -> None:
        core.embed(self.table, tokens, out)


class _TorchLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def forward(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        y = self._apply(x, norm, eps)
        out.copy_(y if residual is None else residual + y)

    def forward_swiglu(self, x: torch.Tensor, out: torch.Tensor, norm: torch.Tensor | None, eps: float) -> None:
        gate, up = self._apply(x, norm, eps).chunk(2, dim=-1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    def _apply(self, x: torch.Tensor, norm: torch.Tensor | None, eps: float) -> torch.Tensor:
        return torch.nn.functional.linear(x if norm is None else _rms_norm(x, norm, eps), self.weight, self.bias)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return (weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)


def _rotated(
    kv: KvMemory, plan: Plan, qkv: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], heads: Heads
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [Q, H, D], k and v [Q, Hkv, D] of fused rows, q and k normalised and rotated at the plan's positions."""
    kv_heads, head_dim = kv.tensor.shape[3:]
    q, k, v = torch.split(qkv.view(qkv.shape[0], -1, head_dim), [heads.count, kv_heads, kv_heads], dim=1)
    if heads.q_norm is not None:
        q = _rms_norm(q, heads.q_norm, heads.eps)
    if heads.k_norm is not None:
        k = _rms_norm(k, heads.k_norm, heads.eps)
    positions = from_dlpack(plan.positions).long().to(qkv.device)
    cos, sin = (table[positions, None, :] for table in rope)
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (d, d + half), the layout of Hugging Face checkpoints; what lies behind them passes."""
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)
