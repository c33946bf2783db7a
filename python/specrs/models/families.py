"""The differences of model families from Llama, as data: nothing here computes.

`Family` says how a family's `config.json` is read and which tensors its checkpoints have. `Block` is what follows from
one model's configuration for its forward pass; its defaults are Llama's, and `layer` and `llama` interpret it. Sources
of both are the published configurations and the models' code in transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specrs.models.reading import Reader

Norms = Literal["before", "after", "around"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Block:
    """Differences of a model's forward pass from Llama's. The defaults are Llama itself.

    Attributes:
        fused_files: true if the checkpoint has q, k and v stacked in one tensor, and gate and up in one.
        whole_qk_norm: RMSNorm over all query heads together, and over all key heads, before the rotation.
        norms: places of the RMSNorms: before attention and before the MLP; after each, on what it adds to the residual
            stream; or both.
        norm_offset: added to every norm's weight.
        activation: activation of the gate.
        score_scale: factor on attention's scores; ``None``: 1 / sqrt(head_dim).
        score_cap: c in c * tanh(x / c) of a scaled score x.
        embedding_scale: factor on embeddings as they enter the first layer.
        rounds_scale: true if that scale is rounded to the type of activations first.
        residual_scale: factor on what attention and MLP add to the residual stream.
        logits_divisor: divisor of the last product's outputs.
        logits_cap: c in logits = c * tanh(logits / c), behind the divisor.
    """

    fused_files: bool = False
    whole_qk_norm: bool = False
    norms: Norms = "before"
    norm_offset: float = 0.0
    activation: Activation = "silu"
    score_scale: float | None = None
    score_cap: float | None = None
    embedding_scale: float = 1.0
    rounds_scale: bool = False
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    logits_cap: float | None = None


LLAMA = Block()


@dataclass(frozen=True)
class Family:
    """Rules for reading a family's configuration. The defaults are Llama's.

    Attributes:
        model_type: the family's name in `config.json`.
        qkv_bias, o_bias: true if attention's products have a bias; ``None``: `attention_bias` says.
        mlp_bias: ``None``: `mlp_bias` says.
        qk_norm: RMSNorm of queries and keys before the rotation: of each head, or of all heads as one row.
        window: layers that `sliding_window` counts for: none, all, those that `use_sliding_window` switches on, or
            those that `layer_types` (or a pattern of layers) names.
        pattern: period of the layers without a window, where `window` is "typed" and there are no `layer_types`: every
            other layer attends to a window.
        ropes: one rotary embedding for all layers, none in some layers (`no_rope_layers`), or one for each kind of
            layer.
        partial_rotary: true if `partial_rotary_factor` may be below 1.
        longrope: true if rope scaling is LongRoPE, whatever its name.
        act_key, acts: the key of the activation, and its names.
        multipliers: true if Granite's four multipliers are read.
        scaled_embedding: embeddings are multiplied by sqrt(hidden_size).
        query_scalar: scores are scaled by 1 / sqrt(`query_pre_attn_scalar`).
        caps: true if `attn_logit_softcapping` and `final_logit_softcapping` are read.
        head_dim: size of a head where the configuration gives none; ``None``: hidden_size / heads.
        defaults: values of keys that the configuration lacks.
    """

    model_type: str
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: Literal["none", "head", "whole"] = "none"
    fused_files: bool = False
    norms: Norms = "before"
    norm_offset: float = 0.0
    activation: Activation = "silu"
    act_key: str = "hidden_act"
    acts: tuple[str, ...] = ("silu", "swish")
    window: Literal["none", "all", "switched", "typed"] = "none"
    pattern: int = 0
    ropes: Literal["one", "some", "typed"] = "one"
    partial_rotary: bool = False
    longrope: bool = False
    multipliers: bool = False
    scaled_embedding: bool = False
    query_scalar: bool = False
    caps: bool = False
    head_dim: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def block(self, get: Reader, hidden_size: int) -> Block:
        """Return how a model of the family computes. Raises UnsupportedModelError for a value that nothing here
        computes."""
        return Block(
            fused_files=self.fused_files,
            whole_qk_norm=self.qk_norm == "whole",
            norms=self.norms,
            norm_offset=self.norm_offset,
            activation=self.activation,
            score_scale=self._score_scale(get),
            embedding_scale=self._embedding_scale(get, hidden_size),
            rounds_scale=self.scaled_embedding,
            residual_scale=get.number("residual_multiplier", 1.0) if self.multipliers else 1.0,
            logits_divisor=get.number("logits_scaling", 1.0) if self.multipliers else 1.0,
            score_cap=self._cap(get, "attn_logit_softcapping"),
            logits_cap=self._cap(get, "final_logit_softcapping"),
        )

    def _score_scale(self, get: Reader) -> float | None:
        if self.multipliers:
            return get.number("attention_multiplier", 1.0)
        return get.number("query_pre_attn_scalar") ** -0.5 if self.query_scalar else None

    def _embedding_scale(self, get: Reader, hidden_size: int) -> float:
        if self.multipliers:
            return get.number("embedding_multiplier", 1.0)
        return hidden_size**0.5 if self.scaled_embedding else 1.0

    def _cap(self, get: Reader, name: str) -> float | None:
        return get.number(name) if self.caps and get.raw.get(name) is not None else None


_GEMMA: dict[str, Any] = {
    "mlp_bias": False, "norm_offset": 1.0, "activation": "gelu_tanh", "scaled_embedding": True, "head_dim": 256,
}  # fmt: skip
_GEMMA_DEFAULTS: dict[str, Any] = {"tie_word_embeddings": True, "max_position_embeddings": 8192}
_TANH = ("gelu_pytorch_tanh",)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", mlp_bias=None),  # SmolLM and SmolLM2 too
    "MistralForCausalLM": Family("mistral", False, False, window="all"),
    "Qwen2ForCausalLM": Family("qwen2", True, False, window="switched"),
    "Qwen3ForCausalLM": Family("qwen3", None, None, qk_norm="head", window="switched", head_dim=128),
    "Phi3ForCausalLM": Family(
        "phi3",
        False,
        False,
        fused_files=True,
        window="all",
        partial_rotary=True,
        longrope=True,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "GraniteForCausalLM": Family("granite", mlp_bias=None, multipliers=True),
    "Olmo2ForCausalLM": Family("olmo2", qk_norm="whole", norms="after", defaults={"rms_norm_eps": 1e-5}),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        mlp_bias=None,
        ropes="some",
        window="switched",
        defaults={"rope_theta": 2e6, "max_position_embeddings": 32768, "tie_word_embeddings": True},
    ),
    "GemmaForCausalLM": Family("gemma", **_GEMMA, acts=(*_TANH, "gelu"), defaults=_GEMMA_DEFAULTS),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        **_GEMMA,
        norms="around",
        act_key="hidden_activation",
        acts=_TANH,
        window="typed",
        pattern=2,
        query_scalar=True,
        caps=True,
        defaults={
            **_GEMMA_DEFAULTS,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        **_GEMMA,
        qk_norm="head",
        norms="around",
        act_key="hidden_activation",
        acts=_TANH,
        window="typed",
        pattern=6,
        ropes="typed",
        query_scalar=True,
        caps=True,
        defaults={
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
    ),
}
"""Families by the first entry of `architectures`."""
