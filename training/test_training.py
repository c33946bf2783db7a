"""Checks of the target against an independent computation; a few seconds on a CPU."""

from __future__ import annotations

import pytest
import torch

from .config import TargetConfig
from .target import Target

CFG = TargetConfig(
    vocab_size=97, hidden_size=48, num_hidden_layers=8, num_attention_heads=3, head_dim=16, intermediate_size=64,
    max_position_embeddings=128,
)  # fmt: skip


def test_matches_transformers() -> None:
    """Logits are those of Hugging Face's Llama."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    model = Target(CFG).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.15 if p.ndim == 2 else 0.2) + (1.0 if p.ndim == 1 else 0.0))
    config = transformers.LlamaConfig(
        **{k: getattr(CFG, k) for k in CFG.__dataclass_fields__}, tie_word_embeddings=True, attn_implementation="eager"
    )
    peer = transformers.LlamaForCausalLM(config).eval()
    missing, unexpected = peer.load_state_dict(model.state_dict(), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    peer.tie_weights()
    ids = torch.randint(1, CFG.vocab_size, (1, 15))
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model(ids)), peer(ids).logits, rtol=1e-4, atol=1e-4)
