"""The target: a small Llama whose parameters carry Hugging Face's names.

Two entry points: `forward` (whole rows, for training and for features) and `step` (through a KV cache, for generation
and for tree verification).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import TargetConfig
from .layers import GatedMLP, RMSNorm, merge_heads, rope_table, rotate, split_heads


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, cfg: TargetConfig) -> None:
        super().__init__()
        d, h = cfg.head_dim, cfg.hidden_size
        self.head_dim = d
        self.q_proj = nn.Linear(h, cfg.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(h, cfg.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(h, cfg.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(cfg.num_attention_heads * d, h, bias=False)

    def qkv(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (split_heads(p(x), self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        return rotate(q, rope), rotate(k, rope), v

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        q, k, v = self.qkv(x, rope)
        return self.o_proj(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)))


class Block(nn.Module):
    """One pre-norm decoder layer; `dropout` acts on both residual branches while training."""

    def __init__(self, cfg: TargetConfig, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = GatedMLP(cfg.hidden_size, cfg.intermediate_size)
        self.dropout = dropout

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.drop(self.self_attn(self.input_layernorm(x), rope))
        return x + self.drop(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """The `model.` part of a Hugging Face Llama."""

    def __init__(self, cfg: TargetConfig, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Block(cfg, dropout) for _ in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def blocks(self) -> Iterator[Block]:
        """The layers, with their type."""
        for layer in self.layers:
            assert isinstance(layer, Block)
            yield layer


class KVCache:
    """Keys and values of every layer, [B, kv_heads, slots, d]; the caller says which slot holds what."""

    def __init__(self, cfg: TargetConfig, batch: int, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (cfg.num_hidden_layers, 2, batch, cfg.num_key_value_heads, slots, cfg.head_dim)
        self.data = torch.zeros(shape, device=device, dtype=dtype)

    def move(self, sources: Tensor, start: int) -> None:
        """Make the entries of `sources` the dense run that begins at `start`."""
        self.data[..., start : start + len(sources), :] = self.data[..., sources, :].clone()


class Target(nn.Module):
    """Llama for causal language modelling with tied embeddings."""

    rope: Tensor

    def __init__(self, cfg: TargetConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = Decoder(cfg, dropout)
        self.register_buffer(
            "rope", rope_table(cfg.head_dim, cfg.rope_theta, cfg.max_position_embeddings), persistent=False
        )
        depth_scale = (2 * cfg.num_hidden_layers) ** -0.5
        for name, p in self.named_parameters():
            if p.ndim == 2:
                closes_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 * (depth_scale if closes_branch else 1.0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits of final (normed) hidden states."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Whole rows [B, T], causal: (final normed hidden, aux features [B, T, 3h] of `cfg.aux_layers`)."""
        rope = self.rope[: ids.shape[1]]
        x = self.model.embed_tokens(ids)
        taps = []
        for i, block in enumerate(self.model.blocks()):
            if i in self.cfg.aux_layers:
                taps.append(x)
            x = block(x, rope)
        return self.model.norm(x), torch.cat(taps, dim=-1)

    def step(
        self, ids: Tensor, positions: Tensor, slots: Tensor, cache: KVCache, kv_len: int, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run ids [B, T] at `positions` [T], storing KV at `slots` [T] and attending to slots [0, kv_len) under `mask`.

        `mask` is boolean [T, kv_len], or None when T = 1 sees every slot. Returns what `forward` returns.
        """
        rope = self.rope[positions]
        x = self.model.embed_tokens(ids)
        taps = []
        for i, block in enumerate(self.model.blocks()):
            if i in self.cfg.aux_layers:
                taps.append(x)
            attn = block.self_attn
            q, k, v = attn.qkv(block.input_layernorm(x), rope)
            keys, values = cache.data[i, 0], cache.data[i, 1]
            keys[:, :, slots], values[:, :, slots] = k.to(keys.dtype), v.to(values.dtype)
            keys, values = keys[:, :, :kv_len].to(q.dtype), values[:, :, :kv_len].to(q.dtype)
            if mask is None and keys.shape[1] == 1:  # the query heads share one key: they can be that key's rows
                y = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values).transpose(1, 2)
            else:
                y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
            x = x + attn.o_proj(merge_heads(y))
            x = x + block.mlp(block.post_attention_layernorm(x))
        return self.model.norm(x), torch.cat(taps, dim=-1)
