"""The few operations that a model is written over, in three implementations.

`TorchOps` is plain torch reading the plan's attention form: slow, obviously right, the reference for the others.
`HostOps` calls the Rust kernels, whose results for a row do not depend on the other rows of the batch, on paging or on
the number of threads; with it a token's logits are the same bits whether it is decoded alone, prefilled in a chunk or
verified in a tree. `BackendOps` is `HostOps` with the attention of a backend (`specrs.backends`).

All activations are f32 [rows, width], contiguous, and caller-allocated. An `out` never shares memory with an input.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs._specrs import ConfigError, KvCache, Plan
from specrs.backends import AttentionBackend, Native, PlanAttention
from specrs.models.config import LayerConfig

KV_DTYPES = (torch.float32, torch.bfloat16)


def new_cache(
    config: LayerConfig, layers: int, num_pages: int, page_size: int, dtype: torch.dtype = torch.float32
) -> KvCache:
    """Zeroed memory for `num_pages` pages, the sink included, of `page_size` tokens.

    Its tensor is [layers, 2, num_slots, kv_heads, head_dim], keys at index 0 and values at 1. Slot s is position
    s % page_size of page s // page_size; page 0 is the sink of padded queries. ConfigError: dtype not f32 or bf16, or
    no memory for it.
    """
    if dtype not in KV_DTYPES:
        raise ConfigError(f"KV dtype = {dtype}: must be torch.float32 or torch.bfloat16")
    return KvCache(_cache_memory(config, layers, num_pages, page_size, dtype).zero_(), page_size)


def check_memory(config: LayerConfig, layers: int, num_pages: int, page_size: int, kv_dtype: str) -> None:
    """Refuses a cache that `new_cache` would get no memory for, without touching any.

    ConfigError: the bytes, and what takes fewer.
    """
    _cache_memory(config, layers, num_pages, page_size, getattr(torch, kv_dtype))


def _cache_memory(config: LayerConfig, layers: int, num_pages: int, page_size: int, dtype: torch.dtype) -> torch.Tensor:
    shape = (layers, 2, num_pages * page_size, config.num_kv_heads, config.head_dim)
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:  # torch's allocator has no type of its own for this
        size = math.prod(shape) * dtype.itemsize
        raise ConfigError(
            f"KV cache: no memory for {size} bytes, num_pages = {num_pages} (sink included) of {page_size} tokens; "
            "a smaller num_pages, max_batch or max_context_len, or kv_dtype bfloat16, takes less"
        ) from error


def follow_torch() -> None:
    """Tells the kernels how many threads torch has; `specrs.set_num_threads` says when that counts."""
    core._follow_torch(torch.get_num_threads(), os.cpu_count() or 1)


class Linear(Protocol):
    """`x @ weight.T + bias`, with what surrounds it in a decoder layer fused in."""

    @property
    def in_features(self) -> int:
        """Columns of the weight, K."""

    @property
    def out_features(self) -> int:
        """Rows of the weight, N."""

    def forward(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """out [M, N] = residual + linear(rms_norm(x [M, K], norm, eps)); either may be absent."""

    def forward_swiglu(self, x: torch.Tensor, out: torch.Tensor, norm: torch.Tensor, eps: float) -> None:
        """For a gated weight: out [M, N/2] = silu(gate) * up of rms_norm(x [M, K], norm, eps)."""


@dataclass(frozen=True, eq=False)
class Heads:
    """What attention is told of a layer, beside its rows.

    Attributes:
        count: query heads, H. The cache knows the KV heads, Hkv, and the head's dimension, D.
        scale: factor on the scores.
        q_norm, k_norm: weights [D] of an RMSNorm of each head, or ``None``.
        eps: of that norm.
    """

    count: int
    scale: float
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


class Ops(Protocol):
    """What the model code is written over."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False) -> Linear:
        """Prepares a weight [N, K] (f32, f16 or bf16) and bias [N]; may repack it, so the originals can go.

        gated: the first N / 2 rows are a gate and the others an up projection, for `forward_swiglu` alone.
        """

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        """Prepares rotary tables, f32 [positions, head_dim / 2] each."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """out [M, K] = weight * x / sqrt(mean(x^2) + eps)."""

    def rope_attention(
        self, kv: KvCache, layer: int, plan: Plan, qkv: torch.Tensor, rope: Any, heads: Heads, out: torch.Tensor
    ) -> None:
        """Normalises (optionally) and rotates q and k of `qkv` [Q, (H + 2 Hkv) D] at the plan's positions, writes k
        and v to its slots, and attends as it says: out [Q, H D]."""

    def rope_write(self, kv: KvCache, layer: int, plan: Plan, rows: torch.Tensor, rope: Any, heads: Heads) -> None:
        """Of `rope_attention` what later rows need: k and v of `rows` [Q, 2 Hkv D], without queries."""


class TorchOps:
    """The reference: every step spelled out in torch, in f32."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False) -> Linear:
        return _TorchLinear(weight.float(), None if bias is None else bias.float())

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return cos, sin

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        out.copy_(_rms_norm(x, weight, eps))

    def rope_attention(
        self, kv: KvCache, layer: int, plan: Plan, qkv: torch.Tensor, rope: Any, heads: Heads, out: torch.Tensor
    ) -> None:
        q, k, v = _rotated(kv, plan, qkv, rope, heads)
        _store(kv, layer, plan, k, v)
        _attend(kv, layer, plan, q, out.view_as(q), heads.scale)

    def rope_write(self, kv: KvCache, layer: int, plan: Plan, rows: torch.Tensor, rope: Any, heads: Heads) -> None:
        _, k, v = _rotated(kv, plan, rows, rope, replace(heads, count=0))
        _store(kv, layer, plan, k, v)


class HostOps:
    """The Rust kernels: packed weights, and what surrounds a product fused into it.

    storage: how weights are kept; "auto" is bf16 where the checkpoint is bf16 and f32 otherwise, so never rounds;
    "bf16" rounds f32 and f16 weights, for half the memory and nearly twice the speed of decoding.
    """

    def __init__(self, storage: Literal["auto", "bf16", "f32"] = "auto") -> None:
        self.storage = storage

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False) -> Linear:
        storage = self.storage
        if storage == "auto":
            storage = "bf16" if weight.dtype == torch.bfloat16 else "f32"
        return core.PackedLinear(weight.contiguous(), None if bias is None else bias.float(), storage, gated)

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return core.RopeTable(cos, sin)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        core.rms_norm(x, weight, eps, out)

    def rope_attention(
        self, kv: KvCache, layer: int, plan: Plan, qkv: torch.Tensor, rope: Any, heads: Heads, out: torch.Tensor
    ) -> None:
        core.rope_attention(
            kv, layer, plan, qkv, rope, heads.count, out, heads.scale, heads.q_norm, heads.k_norm, heads.eps
        )

    def rope_write(self, kv: KvCache, layer: int, plan: Plan, rows: torch.Tensor, rope: Any, heads: Heads) -> None:
        core.rope_write(kv, layer, plan, rows, rope, heads.k_norm, heads.eps)


class BackendOps(HostOps):
    """The Rust kernels for everything but attention, which a backend computes from its format's arrays."""

    def __init__(self, backend: AttentionBackend) -> None:
        super().__init__()
        self._attention = PlanAttention(backend)

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return cos, sin

    def rope_attention(
        self, kv: KvCache, layer: int, plan: Plan, qkv: torch.Tensor, rope: Any, heads: Heads, out: torch.Tensor
    ) -> None:
        q, k, v = _rotated(kv, plan, qkv, rope, heads)
        core.kv_write(kv, layer, plan, k.contiguous(), v.contiguous())
        self._attention(kv, layer, plan, q, out.view_as(q), heads.scale)

    def rope_write(self, kv: KvCache, layer: int, plan: Plan, rows: torch.Tensor, rope: Any, heads: Heads) -> None:
        _, k, v = _rotated(kv, plan, rows, rope, replace(heads, count=0))
        core.kv_write(kv, layer, plan, k.contiguous(), v.contiguous())


def ops_for(backend: AttentionBackend | None = None) -> Ops:
    """The operations for a model on the CPU whose attention is a backend's; `None`: specrs's own."""
    return HostOps() if backend is None or isinstance(backend, Native) else BackendOps(backend)


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

    def forward_swiglu(self, x: torch.Tensor, out: torch.Tensor, norm: torch.Tensor, eps: float) -> None:
        gate, up = self._apply(x, norm, eps).chunk(2, dim=-1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    def _apply(self, x: torch.Tensor, norm: torch.Tensor | None, eps: float) -> torch.Tensor:
        return torch.nn.functional.linear(x if norm is None else _rms_norm(x, norm, eps), self.weight, self.bias)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _rotated(
    kv: KvCache, plan: Plan, qkv: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], heads: Heads
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [Q, H, D], k and v [Q, Hkv, D] of fused rows, q and k normalised and rotated at the plan's positions."""
    kv_heads, head_dim = kv.tensor.shape[3:]
    q, k, v = torch.split(qkv.view(qkv.shape[0], -1, head_dim), [heads.count, kv_heads, kv_heads], dim=1)
    if heads.q_norm is not None:
        q = _rms_norm(q, heads.q_norm, heads.eps)
    if heads.k_norm is not None:
        k = _rms_norm(k, heads.k_norm, heads.eps)
    positions = from_dlpack(plan.positions).long()
    cos, sin = (table[positions, None, :] for table in rope)
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def _store(kv: KvCache, layer: int, plan: Plan, k: torch.Tensor, v: torch.Tensor) -> None:
    slots = from_dlpack(plan.out_slots).long()
    kv.tensor[layer, 0, slots] = k.to(kv.tensor.dtype)
    kv.tensor[layer, 1, slots] = v.to(kv.tensor.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (d, d + head_dim / 2), the layout of Hugging Face checkpoints."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _attend(kv: KvCache, layer: int, plan: Plan, q: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """Softmax attention of q [Q, H, D] over the row positions that the plan allows, request by request."""
    indptr = from_dlpack(plan.qo_indptr).tolist()
    prefixes = from_dlpack(plan.prefix_lens).tolist()
    table = from_dlpack(plan.page_table()).long()
    mask = from_dlpack(plan.mask)
    group = q.shape[1] // kv.tensor.shape[3]
    for i, prefix in enumerate(prefixes):
        first, end = indptr[i], indptr[i + 1]
        if first == end:
            continue
        allowed = _allowed(mask[first:end], prefix, end - first)
        positions = torch.arange(allowed.shape[1])
        slots = table[i, positions // kv.page_size] * kv.page_size + positions % kv.page_size
        k, v = (half[slots].float().repeat_interleave(group, dim=1) for half in kv.tensor[layer])
        scores = torch.einsum("qhd,khd->hqk", q[first:end], k) * scale
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, v)


def _allowed(mask: torch.Tensor, prefix: int, queries: int) -> torch.Tensor:
    """bool [queries, row positions]: the whole prefix, then causal, or the positions whose bit is set."""
    if mask.shape[1] == 0:
        return torch.ones(queries, prefix + queries, dtype=torch.bool).tril(prefix)
    bits = (mask[:, :, None] >> torch.arange(64)) & 1
    flat = bits.reshape(queries, -1).bool()
    used = int(flat.any(0).nonzero().max()) + 1
    return torch.cat((torch.ones(queries, prefix, dtype=torch.bool), flat[:, :used]), dim=1)
