"""The shapes of the two shipped models, and the constants that every stage shares."""

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

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """Decoder layers whose *input* (the residual stream entering them) feeds the EAGLE-3 head."""
        n = self.num_hidden_layers
        return (2, n // 2, n - 3)


@dataclass(frozen=True)
class HeadConfig:
    """The EAGLE-3 head (arXiv:2503.01840): one decoder layer over (token embedding, feature)."""

    draft_vocab_size: int = 4096
    intermediate_size: int = 768
    ttt_steps: int = 6
