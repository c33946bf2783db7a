"""Attentions over paged KV: the Rust kernels, attentions that only read (behind a device's rotation), and a plain
reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs._specrs import Plan
from specrs.backends import Capabilities, Native
from specrs.models.ops import Dense, Heads, KvMemory


class Reads(Protocol):
    """Attention over KV that has been written: `specrs.backends.PlanAttention`, `TorchAttention`."""

    @property
    def capabilities(self) -> Capabilities:
        """The format of the plans that it reads."""

    def __call__(
        self,
        kv: KvMemory,
        layer: int,
        plan: Plan,
        q: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        cap: float | None = None,
    ) -> None:
        """out = attention of q, both [Q, H, D]; see `specrs.models.ops.Heads` for the rest."""


class HostAttention:
    """The Rust kernels on the host, which rotate, write and attend in one call.

    Results for a row do not depend on the other rows of the batch, on paging or on the number of threads.
    """

    capabilities = Capabilities.of(Native())

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return core.RopeTable(cos, sin)

    def attend(
        self, kv: Any, layer: int, plan: Plan, qkv: torch.Tensor, rope: Any, heads: Heads, out: torch.Tensor
    ) -> None:
        core.rope_attention(
            kv, layer, plan, qkv, rope, heads.count, out, heads.scale, heads.q_norm, heads.k_norm, heads.eps, heads.cap
        )

    def write(self, kv: Any, layer: int, plan: Plan, rows: torch.Tensor, rope: Any, heads: Heads) -> None:
        core.rope_write(kv, layer, plan, rows, rope, heads.k_norm, heads.eps)


@dataclass(frozen=True)
class ReadAttention:
    """An attention that reads; a device rotates and writes before it."""

    dense: Dense
    reads: Reads

    @property
    def capabilities(self) -> Capabilities:
        return self.reads.capabilities

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return self.dense.rope(cos, sin)

    def attend(
        self, kv: KvMemory, layer: int, plan: Plan, qkv: torch.Tensor, rope: Any, heads: Heads, out: torch.Tensor
    ) -> None:
        q = self.dense.rope_write(kv, layer, plan, qkv, rope, heads)
        self.reads(kv, layer, plan, q, out.view_as(q), heads.scale, heads.cap)

    def write(self, kv: KvMemory, layer: int, plan: Plan, rows: torch.Tensor, rope: Any, heads: Heads) -> None:
        self.dense.rope_write(kv, layer, plan, rows, rope, replace(heads, count=0))


class TorchAttention:
    """The reference: softmax over the row positions that a plan's form allows, request by request."""

    capabilities = Capabilities.of(Native())

    def __call__(
        self,
        kv: KvMemory,
        layer: int,
        plan: Plan,
        q: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        cap: float | None = None,
    ) -> None:
        indptr = from_dlpack(plan.qo_indptr).tolist()
        prefixes = from_dlpack(plan.prefix_lens).tolist()
        table = from_dlpack(plan.page_table()).long().to(q.device)
        mask = from_dlpack(plan.mask).to(q.device)
        group = q.shape[1] // kv.tensor.shape[3]
        for i, prefix in enumerate(prefixes):
            first, end = indptr[i], indptr[i + 1]
            if first == end:
                continue
            allowed = _allowed(mask[first:end], prefix, end - first)
            positions = torch.arange(allowed.shape[1], device=q.device)
            slots = table[i, positions // kv.page_size] * kv.page_size + positions % kv.page_size
            k, v = (half[slots].to(q.dtype).repeat_interleave(group, dim=1) for half in kv.tensor[layer])
            scores = torch.einsum("qhd,khd->hqk", q[first:end], k) * scale
            if cap is not None:
                scores = (scores / cap).tanh() * cap
            weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
            out[first:end] = torch.einsum("hqk,khd->qhd", weights, v)


def _allowed(mask: torch.Tensor, prefix: int, queries: int) -> torch.Tensor:
    """Return bool [queries, row positions]: the whole prefix, then causal, or the positions whose bit is set."""
    if mask.shape[1] == 0:
        return mask.new_ones(queries, prefix + queries, dtype=torch.bool).tril(prefix)
    bits = (mask[:, :, None] >> torch.arange(64, device=mask.device)) & 1
    flat = bits.reshape(queries, -1).bool()
    used = int(flat.any(0).nonzero().max()) + 1
    return torch.cat((mask.new_ones(queries, prefix, dtype=torch.bool), flat[:, :used]), dim=1)
