"""The target: a small Llama whose parameters carry Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from specrs.train.layers import GatedMLP, Projections, RMSNorm, merge_heads, rope_table

from .config import TargetConfig


class Attention(Projections):
    """Grouped-query attention with rotary positions."""

    def __init__(self, cfg: TargetConfig) -> None:
        h = cfg.hidden_size
        super().__init__(h, h, cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim)

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

    def forward(self, ids: Tensor) -> Tensor:
        """Final normed hidden states of whole rows [B, T], causal."""
        rope = self.rope[: ids.shape[1]]
        x = self.model.embed_tokens(ids)
        for block in self.model.blocks():
            x = block(x, rope)
        return self.model.norm(x)
