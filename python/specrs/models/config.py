"""`config.json` of a Hugging Face model directory as a frozen value: everything that the forward pass depends on.

A key that would change the numbers and that specrs does not implement (quantisation, experts, recurrent layers,
partial rotary embeddings, ...) is refused by name here, before any weight is read. `head_config` does the same for
draft heads.

    config = ModelConfig.from_directory(path)
    config.check_context(4096)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrs.models.errors import UnsupportedModelError
from specrs.models.families import FAMILIES, LLAMA, Block, Family
from specrs.models.head_forms import FORMS, OTHERS
from specrs.models.live import ModelSource, model_json
from specrs.models.reading import Reader
from specrs.models.rope_config import KINDS, RopeConfig, layer_kinds, layer_ropes, read_rope

# Keys by which published models declare layers with a state that is overwritten token by token: their own keys, their
# name, or a list with the kind of each layer.
_RECURRENT_KEYS = (
    "ssm_cfg",
    "mamba_d_state",
    "mamba_expand",
    "mamba_num_heads",
    "state_size",
    "ssm_state_size",
    "lru_width",
    "linear_num_key_heads",
    "linear_attn_config",
    "conv_L_cache",
)
_RECURRENT_NAMES = ("mamba", "jamba", "rwkv", "recurrentgemma", "xlstm", "zamba", "bamba", "falconh1", "qwen3next",
                    "nemotronh", "granitemoehybrid", "kimilinear", "lfm2", "plamo2", "retnet")  # fmt: skip
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
_RECURRENT_LAYERS = ("mamba", "linear", "recurrent", "ssm", "rwkv", "conv", "lstm", "deltanet", "retention")
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")

GENERATION = "generation_config.json"

# The core has the same limit.
_MAX_CONTEXT = 1 << 24
# Keys that change what attention reads, with the one value that the models here have.
_FIXED = {
    "is_causal": True,
    "use_bidirectional_attention": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
}


@dataclass(frozen=True)
class LayerConfig:
    """Shape of a decoder layer, shared by the target and the draft head. All sizes are positive;
    `num_heads % num_kv_heads == 0`, and `head_dim` is even."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int

    @property
    def q_size(self) -> int:
        """Columns of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Columns of the fused query, key and value projection."""
        return self.q_size + 2 * self.kv_size


@dataclass(frozen=True)
class ModelConfig(LayerConfig):
    """A target model: the common Llama block with the few differences of its relatives (`families`)."""

    architecture: str
    num_layers: int
    vocab_size: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm over head_dim of each query and key head before the rotary embedding (Qwen3, Gemma 3)."""
    sliding_window: int | None
    """Attention window in tokens of at least one layer; contexts up to it are ordinary causal attention."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """End tokens of config.json and generation_config.json together, ascending, without duplicates. `LLM.eos_ids` has
    the tokenizer's own, too."""
    block: Block = LLAMA
    """Other differences of the forward pass from Llama's."""
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    """Rotary embedding of each layer, ``None`` for none; empty where all layers have `rope`."""

    @classmethod
    def from_directory(cls, directory: ModelSource) -> ModelConfig:
        """Reads `config.json` and, where there is one, `generation_config.json`.

        Raises ModelFileError (missing or not JSON) and UnsupportedModelError (a value that cannot be honoured).
        """
        raw, path = model_json(directory, "config.json")
        return cls.from_dict(raw, model_json(directory, GENERATION, optional=True)[0], path)

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, path: Path | None = None
    ) -> ModelConfig:
        """The same from parsed JSON; `path` is only named in errors."""
        architecture = _architecture(Reader(raw, path))
        family = FAMILIES[architecture]
        if (kind := raw.get("model_type")) not in (None, family.model_type):
            # transformers would go by this one, or by code that comes with the model.
            why = f"{architecture} is a model of type {family.model_type!r}: one of the two is wrong"
            Reader(raw, path).refuse("model_type", kind, why)
        get = Reader({**family.defaults, **raw}, path)
        attention_bias = get.boolean("attention_bias", False)
        num_layers = get.integer("num_hidden_layers", maximum=4096)
        vocab_size = get.integer("vocab_size")
        layer = layer_config(get, family)
        window = sliding_window(get, family, num_layers)  # checks the kinds of layers, too
        max_position = layer.max_position_embeddings
        ropes = layer_ropes(get, family, layer.rope, num_layers, max_position, layer.head_dim)
        eos = {*_token_ids(get, "eos_token_id", vocab_size)}
        beside = None if path is None else path.with_name(GENERATION)
        eos.update(_token_ids(Reader(generation or {}, beside), "eos_token_id", vocab_size))
        bos = _token_ids(get, "bos_token_id", vocab_size)
        return cls(
            **vars(layer),
            architecture=architecture,
            num_layers=num_layers,
            vocab_size=vocab_size,
            tie_word_embeddings=get.boolean("tie_word_embeddings", False),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=get.boolean("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm == "head",
            sliding_window=window,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(sorted(eos)),
            block=family.block(get, layer.hidden_size),
            layer_ropes=ropes,
        )

    def rope_of(self, layer: int) -> RopeConfig | None:
        """The rotary embedding of a layer; ``None`` where it has none."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    @property
    def max_context_len(self) -> int:
        """The longest context, in tokens, that the model serves exactly; `check_context` refuses a longer one."""
        limit = self.max_position_embeddings
        if self.rope.kind == "yarn":
            limit = max(limit, int(self.rope.factor * self.rope.original_max_position))
        if self.rope.kind == "longrope":
            limit = min(limit, self.rope.original_max_position)
        limit = min(limit, _MAX_CONTEXT)
        return limit if self.sliding_window is None else min(limit, self.sliding_window)

    def check_context(self, max_context_len: int) -> None:
        """Refuses a context that the model cannot serve exactly (UnsupportedModelError names what limits it)."""
        if self.sliding_window is not None and max_context_len > self.sliding_window:
            raise UnsupportedModelError(
                "sliding_window",
                self.sliding_window,
                f"max_context_len {max_context_len} is beyond it and windowed attention is not implemented; "
                f"max_context_len <= {self.sliding_window} works, where the window changes nothing",
            )
        if max_context_len > self.max_context_len:
            what = f"{'original_' if self.rope.kind == 'longrope' else ''}max_position_embeddings"
            changing = self.rope.kind in ("dynamic", "longrope")
            dynamic = f" ({self.rope.kind} rope scaling changes keys already cached beyond it)" if changing else ""
            raise UnsupportedModelError(
                "max_context_len",
                max_context_len,
                f"the model serves positions up to {what} = {self.max_context_len}{dynamic}; "
                f"max_context_len <= {self.max_context_len} works",
            )


def recurrent_layers(raw: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The key of a ``config.json`` that declares recurrent (Mamba-like) layers, with its value; ``None`` where all that
    is declared is attention. Of a multimodal model, its language part is looked at too."""
    names = raw.get("architectures")
    names = names if isinstance(names, list) else [names]
    for key, value in (("architectures", names), ("model_type", [raw.get("model_type")])):
        plain = [str(name).lower().replace("_", "").replace("-", "") for name in value]
        if any(part in name for name in plain for part in _RECURRENT_NAMES):
            return key, raw[key]
    for key in _RECURRENT_KEYS:
        if raw.get(key):
            return key, raw[key]
    for key in _LAYER_LISTS:
        kinds = raw.get(key)
        if isinstance(kinds, list) and any(part in str(kind).lower() for kind in kinds for part in _RECURRENT_LAYERS):
            return key, kinds
    pattern = raw.get("hybrid_override_pattern")  # Nemotron-H: M for Mamba, * for attention, - for MLP
    if isinstance(pattern, str) and "M" in pattern:
        return "hybrid_override_pattern", pattern
    nested = raw.get("text_config")
    return recurrent_layers(nested) if isinstance(nested, dict) else None


def has_recurrent_state(directory: ModelSource) -> bool:
    """Return whether the model of a Hugging Face directory declares recurrent layers. ModelFileError: no readable
    config."""
    return recurrent_layers(model_json(directory, "config.json")[0]) is not None


def _architecture(get: Reader) -> str:
    """The architecture of a target, after refusing by name what no code here could run exactly."""
    check_layers(get)
    names = get.raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else None
    if name not in FAMILIES:
        heads = {name for form in (*FORMS, *OTHERS) for name in form.architectures}
        hint = "a draft head: give it as draft, beside the model that it was trained for; " if name in heads else ""
        get.refuse("architectures", names, f"{hint}implemented: one of {', '.join(FAMILIES)}")
    check_arithmetic(get, FAMILIES[name])
    return name


def check_layers(get: Reader) -> None:
    """Raise UnsupportedModelError for layers with a state, and for experts."""
    raw = get.raw
    recurrent = recurrent_layers(raw)
    if recurrent is not None:
        get.refuse(
            *recurrent,
            "recurrent state: no model with recurrent (Mamba-like) layers is implemented yet (one would be decoded "
            "plainly, since a rejected branch cannot be taken back out of a state); attention-only models work",
        )
    for key in _EXPERT_KEYS:
        if raw.get(key):
            get.refuse(key, raw[key], "mixture-of-experts layers are not implemented; dense models work")


def check_arithmetic(get: Reader, family: Family) -> None:
    """Raise UnsupportedModelError for quantised weights, another activation than the family's, and attention that is
    not causal."""
    raw = get.raw
    if raw.get("quantization_config") or raw.get("compression_config"):
        got = raw.get("quantization_config") or raw.get("compression_config")
        get.refuse("quantization_config", got, "quantised weights are not implemented; use the bf16, f16 or f32 model")
    if (act := raw.get(family.act_key, family.acts[0])) not in family.acts:
        get.refuse(family.act_key, act, f"only {family.acts[0]} is implemented")
    for key, value in _FIXED.items():
        if (got := get.boolean(key, value)) is not value:
            get.refuse(key, got, f"only {str(value).lower()} is implemented: causal self-attention over the text")


def layer_config(get: Reader, family: Family) -> LayerConfig:
    """Read the shape of a decoder layer."""
    hidden = get.integer("hidden_size")
    heads = get.integer("num_attention_heads", maximum=4096)
    kv_heads = get.integer("num_key_value_heads", heads, maximum=4096)
    if heads % kv_heads:
        get.refuse("num_key_value_heads", kv_heads, f"must divide num_attention_heads = {heads}")
    if get.raw.get("head_dim") is None and family.head_dim is None and hidden % heads:
        get.refuse("num_attention_heads", heads, f"must divide hidden_size = {hidden} where there is no head_dim")
    head_dim = get.integer("head_dim", family.head_dim or hidden // heads, maximum=4096)
    if head_dim % 2:
        get.refuse("head_dim", head_dim, "must be even: rotary embeddings turn pairs; every even size works")
    max_position = get.integer("max_position_embeddings", 2048, maximum=(1 << 31) - 1)
    return LayerConfig(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=get.integer("intermediate_size"),
        rms_norm_eps=get.number("rms_norm_eps", 1e-6, maximum=1.0),
        rope=read_rope(get, family, max_position, head_dim),
        max_position_embeddings=max_position,
    )


def sliding_window(get: Reader, family: Family, num_layers: int) -> int | None:
    """Return the window if at least one layer uses it. Qwen models name a window that they switch off."""
    kinds = get.raw.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind not in KINDS for kind in kinds)):
        get.refuse("layer_types", kinds, "only full_attention and sliding_attention are implemented")
    if get.raw.get("sliding_window") is None or family.window == "none":
        return None
    window = get.integer("sliding_window", maximum=(1 << 31) - 1)
    if family.window == "all":
        return window
    if family.window == "typed":
        return window if "sliding_attention" in layer_kinds(get, family, num_layers) else None
    if not get.boolean("use_sliding_window", False):
        return None
    if kinds is not None:
        return window if "sliding_attention" in kinds else None
    if family.ropes == "some":  # layers without a rotary embedding are those with a window, if there are any
        return window
    return window if get.integer("max_window_layers", 28, minimum=0) < num_layers else None


def _token_ids(get: Reader, key: str, vocab_size: int) -> tuple[int, ...]:
    """Return one id or a list of ids; files write -1 for no token, so it counts as none."""
    value = get.raw.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not -1 <= token < vocab_size:
            get.refuse(key, value, f"must be token ids in 0..{vocab_size}, or -1 for none")
    return tuple(token for token in ids if token >= 0)
