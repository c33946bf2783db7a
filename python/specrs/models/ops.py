"""Models are written over the operations of a device (`Dense`) and an attention over paged KV (`Attention`).

Each is a protocol, and `Ops` is a pair of both. A pair is composed, never inherited: any device's operations go with
any attention that reads its memory, as the Rust kernels with their own attention or with a backend's
(`specrs.backends`), or plain torch with either. `pairs` makes those that there are.

Activations are [rows, width], contiguous, caller-allocated, of the dtype and on the device of `Dense.placement`, and so
are the weights of norms (`Placement.vector`), or these are f32. An `out` never shares memory with an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specrs._specrs import Moves, Plan
from specrs.backends import Capabilities
from specrs.models.placement import Placement


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

    def forward_swiglu(self, x: torch.Tensor, out: torch.Tensor, norm: torch.Tensor | None, eps: float) -> None:
        """For a gated weight: out [M, N/2] = silu(gate) * up of rms_norm(x [M, K], norm, eps); the norm may be
        absent."""


class Embedding(Protocol):
    """Rows of a [vocab, hidden] table."""

    def lookup(self, tokens: torch.Tensor, out: torch.Tensor) -> None:
        """out [Q, hidden] = rows of `tokens` (int32 or int64 [Q]). ConfigError: a token outside the vocabulary."""


class KvMemory(Protocol):
    """Keys and values of all layers: `KvCache` on the host, `DeviceKvCache` elsewhere."""

    @property
    def tensor(self) -> Any:
        """[layers, 2, num_slots, kv_heads, head_dim], keys at index 0 and values at 1."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""


@dataclass(frozen=True, eq=False)
class Heads:
    """A layer's heads, as attention is told of them beside its rows.

    Attributes:
        count: query heads, H. The cache knows the KV heads, Hkv, and the head's dimension, D.
        scale: factor on the scores.
        cap: c in c * tanh(x / c) of a scaled score x, or ``None``.
        q_norm, k_norm: weights [D] of an RMSNorm of each head, or ``None``.
        eps: epsilon of that norm.
    """

    count: int
    scale: float
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0
    cap: float | None = None


class Dense(Protocol):
    """The products and small operations of a device."""

    @property
    def placement(self) -> Placement:
        """The device, and the dtypes of weights and activations."""

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False, scores: bool = False
    ) -> Linear:
        """Prepares a weight [N, K] (f32, f16 or bf16) and bias [N]; may repack it, so the originals can go.

        gated: the first N / 2 rows are a gate and the others an up projection, for `forward_swiglu` alone. scores: its
        outputs are logits (`Placement.logits_dtype`).
        """

    def embedding(self, table: torch.Tensor) -> Embedding:
        """Prepares a table [vocab, hidden] (f32, f16 or bf16)."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """out [M, K] = weight * x / sqrt(mean(x^2) + eps)."""

    def gelu_up(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """out [M, N] = gelu(gate) * up of rows [gate, up] of 2 N, by gelu's tanh form."""

    def scaled_add(self, x: torch.Tensor, y: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        """out = x + scale * y, which may overwrite y; out may be x."""

    def soft_cap(self, x: torch.Tensor, cap: float) -> None:
        """x = cap * tanh(x / cap), in place."""

    def convolve(
        self, x: torch.Tensor, base: torch.Tensor, own: torch.Tensor, side: int, plan: Plan, out: torch.Tensor,
        adds: bool = False,
    ) -> None:  # fmt: skip
        """out [Q, K] = the sum over t of (base[t] + own[:, side, t]) * x [Q, K] of t rows before, in rows of the same
        request of the plan; with ``adds`` it is added to `out`. base is [taps, K], own [Q, 2 * taps * groups], of each
        of two sides a number for each tap and group of columns."""

    def gather(self, x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, shift: int = 0) -> None:
        """out [R, K] = rows + shift of x [M, K]; `rows` int64 or int32 [R], each below M once shifted."""

    def concat(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The columns of all parts, one part behind the other: [M, sum of widths]."""

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        """Prepares rotary tables, f32 [positions, head_dim / 2] each, for `rope_write`."""

    def rope_write(
        self, kv: KvMemory, layer: int, plan: Plan, qkv: torch.Tensor, rope: Any, heads: Heads
    ) -> torch.Tensor:
        """Normalises (optionally) and rotates q and k of `qkv` [Q, (H + 2 Hkv) D] at the plan's positions, and writes k
        and v to its slots. Returns q [Q, H, D]. With H = 0 the rows have no queries.

        For attentions that only read; one that rotates and writes itself never asks for it.
        """

    def host(self, scores: torch.Tensor) -> torch.Tensor:
        """The same on the host, in f32, once the device has them. Raises what the device has noticed until then."""

    def kv_move(self, kv: KvMemory, moves: Moves) -> None:
        """Copy KV from slot to slot, in all layers and in order."""


class Attention(Protocol):
    """Attention over paged KV; it writes the keys and values that it reads."""

    @property
    def capabilities(self) -> Capabilities:
        """The format of the plans that it reads, and whether they need lengths that the host knows."""

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        """Prepares rotary tables, f32 [positions, head_dim / 2] each."""

    def attend(
        self, kv: KvMemory, layer: int, plan: Plan, qkv: torch.Tensor, rope: Any, heads: Heads, out: torch.Tensor
    ) -> None:
        """Normalises (optionally) and rotates q and k of `qkv` [Q, (H + 2 Hkv) D] at the plan's positions, writes k
        and v to its slots, and attends as it says: out [Q, H D]."""

    def write(self, kv: KvMemory, layer: int, plan: Plan, rows: torch.Tensor, rope: Any, heads: Heads) -> None:
        """Writes as `attend` does, for rows [Q, 2 Hkv D] without queries: later rows will attend to them."""


@dataclass(frozen=True)
class Ops:
    """The pair that a model runs over."""

    dense: Dense
    attention: Attention

    @property
    def placement(self) -> Placement:
        """Device of the head's memory, and its dtypes."""
        return self.dense.placement
