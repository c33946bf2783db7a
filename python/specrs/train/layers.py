"""The parts that trained models share: RMSNorm, rotary positions, the gated MLP. Parameters have Llama's names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 as Llama does."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class GatedMLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, inner, bias=False)
        self.up_proj = nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Projections(nn.Module):
    """The four products of grouped-query attention over inputs of width ``reads``."""

    def __init__(self, reads: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(reads, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(reads, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(reads, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)

    def qkv(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v [B, heads, T, d] of x [B, T, reads], q and k rotated."""
        q, k, v = (split_heads(p(x), self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        return rotate(q, rope), rotate(k, rope), v


def rope_table(head_dim: int, theta: float, length: int) -> Tensor:
    """[length, 2, head_dim]: cosines and sines of every position, in the half-split layout of Hugging Face's Llama."""
    inv_freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), inv_freq)
    angle = torch.cat([angle, angle], dim=-1)
    return torch.stack([angle.cos(), angle.sin()], dim=1).float()


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate x [B, heads, T, d] by rope [T, 2, d] or [B, 1, T, 2, d] (the table's rows at x's positions)."""
    cos, sin = rope[..., 0, :], rope[..., 1, :]
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    y: Tensor = (x.float() * cos + turned * sin).to(x.dtype)
    return y


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, heads*d] -> [B, heads, T, d]."""
    return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, heads, T, d] -> [B, T, heads*d]."""
    return x.transpose(1, 2).flatten(2)
