"""The EAGLE-3 draft head and its training-time test.

EAGLE (arXiv:2401.15077) drafts at the feature level; EAGLE-3 (arXiv:2503.01840) fuses three of the target's hidden
states and trains the head on its own outputs ("training-time test"). The conventions, which the model card repeats:

* draft position p pairs the target's feature of position p with the *token* of position p + 1, turns by RoPE position
  p, and predicts the token of position p + 2;
* the layer's input is concat(norm(embedding), norm(hidden)); its residual is the un-normed hidden;
* the feature that the next step receives is the layer's output before `norm`; logits are lm_head(norm(output)).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import HeadConfig, TargetConfig
from .layers import GatedMLP, RMSNorm, merge_heads, rope_table, rotate, split_heads


class HeadAttention(nn.Module):
    """Attention whose input is twice the hidden size."""

    def __init__(self, cfg: TargetConfig) -> None:
        super().__init__()
        d, h = cfg.head_dim, cfg.hidden_size
        self.head_dim = d
        self.q_proj = nn.Linear(2 * h, cfg.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(2 * h, cfg.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(2 * h, cfg.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(cfg.num_attention_heads * d, h, bias=False)


class MidLayer(nn.Module):
    """The head's one decoder layer, in three parts so that training can attend across unrolled steps."""

    def __init__(self, cfg: TargetConfig, head: HeadConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.hidden_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = HeadAttention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = GatedMLP(cfg.hidden_size, head.intermediate_size)

    def qkv(self, embeds: Tensor, hidden: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        attn = self.self_attn
        q, k, v = (split_heads(p(x), attn.head_dim) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
        return rotate(q, rope), rotate(k, rope), v

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        x = residual + self.self_attn.o_proj(merge_heads(attended))
        return x + self.mlp(self.post_attention_layernorm(x))


def attend_unrolled(q: Tensor, k0: Tensor, v0: Tensor, mask0: Tensor, kc: Tensor, vc: Tensor, live: Tensor) -> Tensor:
    """Attention of one unrolled step: over step 0's keys, and over the position's own chain.

    q [B, H, T, d]; k0, v0 [B, 1, T, d] under mask0 [T, T]; kc, vc [B, 1, T, C, d] hold, for each position, the keys and
    values of its chain, of which `live` [C] are in use.
    """
    scale = q.shape[-1] ** -0.5
    base = ((q @ k0.transpose(-1, -2)).float() * scale).masked_fill(~mask0, float("-inf"))
    chain = ((q.unsqueeze(-2) * kc).float().sum(-1) * scale).masked_fill(~live, float("-inf"))
    p = torch.softmax(torch.cat([base, chain], dim=-1), dim=-1).to(v0.dtype)
    return p[..., : base.shape[-1]] @ v0 + (p[..., base.shape[-1] :].unsqueeze(-1) * vc).sum(-2)


def shift_right(x: Tensor, by: int, dim: int) -> Tensor:
    """Position p receives what position p - by had; the first `by` positions receive zeros."""
    if by == 0:
        return x
    pad = torch.zeros_like(x.narrow(dim, 0, by))
    return torch.cat([pad, x.narrow(dim, 0, x.shape[dim] - by)], dim=dim)


class Head(nn.Module):
    """The EAGLE-3 head. Embeddings are the target's, frozen, and are passed in."""

    rope: Tensor
    d2t: Tensor
    t2d: Tensor

    def __init__(self, cfg: TargetConfig, head: HeadConfig) -> None:
        super().__init__()
        self.cfg, self.head = cfg, head
        self.attend = attend_unrolled
        h = cfg.hidden_size
        self.fc = nn.Linear(3 * h, h, bias=False)
        self.midlayer = MidLayer(cfg, head)
        self.norm = RMSNorm(h, cfg.rms_norm_eps)
        self.lm_head = nn.Linear(h, head.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(head.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(cfg.vocab_size, dtype=torch.bool))
        self.register_buffer(
            "rope", rope_table(cfg.head_dim, cfg.rope_theta, cfg.max_position_embeddings), persistent=False
        )
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def set_vocab(self, target_ids: Tensor) -> None:
        """Draft id i stands for the i-th of the sorted `target_ids`; d2t holds the offset to add."""
        ids = target_ids.sort().values.to(self.d2t.device)
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    @property
    def target_ids(self) -> Tensor:
        """The target's id of every draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def compile_parts(self) -> None:
        """Compile what every unrolled step shares, so that one graph serves all steps."""
        self.attend = torch.compile(self.attend)
        self.midlayer.qkv = torch.compile(self.midlayer.qkv)  # type: ignore[method-assign]
        self.midlayer.finish = torch.compile(self.midlayer.finish)  # type: ignore[method-assign]

    def unroll(self, embeds: Tensor, feats: Tensor, steps: int) -> list[Tensor]:
        """The training-time test: pre-norm outputs [B, T, h] of every step.

        embeds [B, T, h]: embedding of token p + 1 at position p; feats [B, T, 3h]: the target's aux features. At step
        j, position p continues the chain that left step 0 at position p - j: its hidden input is step j-1's output at
        p - 1, and it attends step 0's keys of positions <= p - j and its chain's keys of steps 1..j. Outputs at p < j
        are void.
        """
        t = embeds.shape[1]
        rope = self.rope[:t]
        gap = torch.arange(t, device=embeds.device)[:, None] - torch.arange(t, device=embeds.device)[None, :]
        hidden = self.fc(feats)
        q, k0, v0 = self.midlayer.qkv(embeds, hidden, rope)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        for j in range(steps):
            if j > 0:
                hidden = shift_right(outputs[-1], 1, dim=1)
                q, k, v = self.midlayer.qkv(embeds, hidden, rope)
                keys = [shift_right(x, 1, dim=2) for x in keys] + [k]
                values = [shift_right(x, 1, dim=2) for x in values] + [v]
            blank = [torch.zeros_like(k0)] * (steps - 1 - j)
            kc, vc = torch.stack(keys + blank, dim=-2), torch.stack(values + blank, dim=-2)
            live = torch.arange(steps - 1, device=embeds.device) < j
            attended = self.attend(q, k0, v0, gap >= j, kc, vc, live)
            outputs.append(self.midlayer.finish(attended, hidden))
        return outputs

    def step(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, cache: Tensor, mask: Tensor
    ) -> Tensor:
        """Inference through a cache [2, 1, kv_heads, slots, d]: embeds, hidden [1, T, h] -> pre-norm outputs [1, T, h].

        Features of the target go through `fc` first; the head's own outputs come back in as they are.
        """
        q, k, v = self.midlayer.qkv(embeds, hidden, self.rope[positions])
        cache[0, :, :, slots], cache[1, :, :, slots] = k, v
        n = mask.shape[1]
        y = F.scaled_dot_product_attention(q, cache[0, :, :, :n], cache[1, :, :, :n], attn_mask=mask, enable_gqa=True)
        return self.midlayer.finish(y, hidden)
