"""The shape of the shipped model, and the constants that every stage shares."""

from __future__ import annotations

from dataclasses import dataclass

SEED = 20240229
BOS = "<|endoftext|>"
BOS_ID = 0


@dataclass(frozen=True)
class TargetConfig:
    """A Llama-style decoder with tied embeddings (the fields are those of a Hugging Face `LlamaConfig`)."""

    vocab_size: int = 8192
    hidden_size: int = 320
    num_hidden_layers: int = 12
    num_attention_heads: int = 5
    num_key_value_heads: int = 1
    head_dim: int = 64
    intermediate_size: int = 896
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
