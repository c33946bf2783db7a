"""`config.json` of a Hugging Face model directory as a frozen value: everything that the forward pass depends on.

A key that would change the numbers and that specrs does not implement (quantisation, experts, recurrent layers,
partial rotary embeddings, ...) is refused by name here, before any weight is read. `Eagle3Config` does the same for an
EAGLE-3 head and says whether it fits a target.

    config = ModelConfig.from_directory(path)
    config.check_context(4096)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrs.models.errors import DraftMismatchError, UnsupportedModelError
from specrs.models.families import FAMILIES, LLAMA, Block, Family
from specrs.models.live import ModelSource, model_json
from specrs.models.reading import Reader

_LLAMA = FAMILIES["LlamaForCausalLM"]
_EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")

# How published models declare layers with a state that is overwritten token by token: by their own keys, by their name,
# or in a list with the kind of each layer.
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

_KINDS = ("full_attention", "sliding_attention")  # of layers
GENERATION = "generation_config.json"

# As of the core.
_MAX_CONTEXT = 1 << 24
# Keys that change what attention reads, with the one value that the models here have.
_FIXED = {
    "is_causal": True,
    "use_bidirectional_attention": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: its base and how its frequencies are scaled. `specrs.models.rope` computes the tables."""

    kind: str
    """One of default, linear, dynamic, llama3, yarn, longrope."""
    theta: float
    factor: float = 1.0
    original_max_position: int = 0
    """Context length before scaling, in tokens; 0 for kinds that do not use it."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    """Factor on cos and sin (yarn); None: derived from `factor`, `mscale` and `mscale_all_dim`."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    share: float = 1.0
    """Of a head's elements, those that are rotated: the first ones."""
    short_factors: tuple[float, ...] = ()
    """Of longrope: what each period is multiplied by, within `original_max_position` tokens."""


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
    """Of config.json and generation_config.json together, ascending, without duplicates."""
    block: Block = LLAMA
    """What else the forward pass does differently from Llama's."""
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    """Of each layer, its rotary embedding, ``None`` for none; empty where all have `rope`."""

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
        architecture = _architecture(Reader(raw, path), tuple(FAMILIES))
        family = FAMILIES[architecture]
        get = Reader({**family.defaults, **raw}, path)
        attention_bias = get.boolean("attention_bias", False)
        num_layers = get.integer("num_hidden_layers", maximum=4096)
        vocab_size = get.integer("vocab_size")
        layer = _layer(get, family)
        window = _sliding_window(get, family, num_layers)  # checks the kinds of layers, too
        layer_ropes = _layer_ropes(get, family, layer, num_layers)
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
            layer_ropes=layer_ropes,
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


@dataclass(frozen=True)
class Eagle3Config(LayerConfig):
    """An EAGLE-3 head (https://arxiv.org/abs/2503.01840): one decoder layer over the target's features."""

    vocab_size: int
    """Of the target."""
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...] | None
    """Decoder layers whose *input* residual stream is a feature; None: (2, n/2, n-3) of the target's n layers."""
    norm_before_residual: bool
    """The residual of the midlayer starts from the normalised feature (a variant of the speculators library)."""

    @classmethod
    def from_directory(cls, directory: str | Path) -> Eagle3Config:
        """Reads `config.json` of a head, in the published form or in that of the speculators library.

        Raises ModelFileError and UnsupportedModelError.
        """
        return cls.from_dict(*model_json(directory, "config.json"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], path: Path | None = None) -> Eagle3Config:
        """The same from parsed JSON; `path` is only named in errors."""
        nested = raw.get("transformer_layer_config")
        get = Reader({**nested, **raw} if isinstance(nested, dict) else raw, path)
        _architecture(get, _EAGLE3_ARCHITECTURES)
        if (layers := get.integer("num_hidden_layers", 1, maximum=4096)) != 1:
            get.refuse("num_hidden_layers", layers, "only heads of one layer are implemented")
        layer = _layer(get)
        vocab_size = get.integer("vocab_size")
        eagle = raw.get("eagle_config")
        eagle = eagle if isinstance(eagle, dict) else {}
        if eagle.get("use_aux_hidden_state", True) is not True:
            get.refuse("eagle_config.use_aux_hidden_state", False, "only heads over auxiliary features are implemented")
        return cls(
            **vars(layer),
            vocab_size=vocab_size,
            draft_vocab_size=get.integer("draft_vocab_size", vocab_size),
            target_hidden_size=get.integer("target_hidden_size", layer.hidden_size),
            aux_layers=_aux_layers(get, eagle),
            norm_before_residual=get.boolean("norm_before_residual", False),
        )

    @property
    def aux_size(self) -> int:
        """Columns of a row of features: those of all auxiliary layers side by side."""
        return (3 if self.aux_layers is None else len(self.aux_layers)) * self.target_hidden_size

    def aux_layers_for(self, target: ModelConfig) -> tuple[int, ...]:
        """The features' layers for this target: its own choice, or the published default. Order is that of `fc`."""
        if self.aux_layers is not None:
            return self.aux_layers
        n = target.num_layers
        return (2, n // 2, n - 3)

    def check_target(self, target: ModelConfig) -> None:
        """Raises DraftMismatchError where the head cannot have been made for this target."""
        if self.target_hidden_size != target.hidden_size:
            raise DraftMismatchError(
                "hidden size of features", self.target_hidden_size, f"hidden_size {target.hidden_size}"
            )
        if self.vocab_size != target.vocab_size:
            raise DraftMismatchError("vocab_size", self.vocab_size, f"vocab_size {target.vocab_size}")
        if self.draft_vocab_size > target.vocab_size:
            raise DraftMismatchError(
                "draft_vocab_size", self.draft_vocab_size, f"at most vocab_size {target.vocab_size}"
            )
        for layer in self.aux_layers_for(target):
            if not 0 <= layer < target.num_layers:
                raise DraftMismatchError(
                    "aux layer",
                    layer,
                    f"0..{target.num_layers} (features are the inputs of its {target.num_layers} layers)",
                    "set eagle_aux_hidden_state_layer_ids in the head's config.json to the layers it was trained on",
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
    """Whether the model of a Hugging Face directory declares recurrent layers. ModelFileError: no readable config."""
    return recurrent_layers(model_json(directory, "config.json")[0]) is not None


def _architecture(get: Reader, known: tuple[str, ...]) -> str:
    """The architecture, after refusing by name what no code here could run exactly."""
    raw = get.raw
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else None
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
    if name not in known:
        hint = ""
        if name in _EAGLE3_ARCHITECTURES:
            hint = "an EAGLE-3 draft head: give it as draft, beside the model that it was trained for; "
        elif name in FAMILIES:
            hint = "a model, no draft head: draft needs an EAGLE-3 head; "
        get.refuse("architectures", names, f"{hint}implemented: one of {', '.join(known)}")
    if raw.get("quantization_config") or raw.get("compression_config"):
        got = raw.get("quantization_config") or raw.get("compression_config")
        get.refuse("quantization_config", got, "quantised weights are not implemented; use the bf16, f16 or f32 model")
    family = FAMILIES.get(name, _LLAMA)
    if (act := raw.get(family.act_key, family.acts[0])) not in family.acts:
        get.refuse(family.act_key, act, f"only {family.acts[0]} is implemented")
    for key, value in _FIXED.items():
        if (got := get.boolean(key, value)) is not value:
            get.refuse(key, got, f"only {str(value).lower()} is implemented: causal self-attention over the text")
    return name


def _layer(get: Reader, family: Family = _LLAMA) -> LayerConfig:
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
        rope=_rope(get, family, max_position, head_dim),
        max_position_embeddings=max_position,
    )


def _rope(get: Reader, family: Family, max_position: int, head_dim: int) -> RopeConfig:
    """Both spellings: `rope_scaling` beside `rope_theta`, and transformers 5's `rope_parameters` with all in one. Of a
    family with an embedding for each kind of layer, that of layers without a window."""
    if family.ropes == "typed":
        return _rope_from(get, family, *_rope_of_kind(get, "full_attention"), max_position, head_dim)
    key, rope = _rope_object(get)
    if rope and all(isinstance(value, dict) for value in rope.values()):  # one entry per kind of attention layer
        if len(rope) != 1:
            get.refuse(key, sorted(rope), "one rotary embedding for all layers is implemented")
        (rope,) = rope.values()
    return _rope_from(get, family, key, rope, max_position, head_dim)


def _rope_object(get: Reader) -> tuple[str, dict[str, Any]]:
    """The key of what is said about rotary embeddings, and its object."""
    key = "rope_parameters" if get.raw.get("rope_parameters") is not None else "rope_scaling"
    rope = get.raw.get(key) or {}
    if not isinstance(rope, dict):
        get.refuse(key, rope, "must be an object")
    return key, rope


def _rope_of_kind(get: Reader, kind: str) -> tuple[str, dict[str, Any]]:
    """The same of one kind of attention layer; a spelling without kinds speaks of those without a window."""
    key, rope = _rope_object(get)
    kinds = {name: value or {} for name, value in rope.items() if name in _KINDS}
    found = kinds.get(kind, {}) if kinds or kind == "sliding_attention" else rope
    if not isinstance(found, dict):
        get.refuse(f"{key}.{kind}", found, "must be an object")
    return key, found


def _layer_ropes(get: Reader, family: Family, layer: LayerConfig, num_layers: int) -> tuple[RopeConfig | None, ...]:
    """Each layer's rotary embedding; empty where all have the same."""
    if family.ropes == "some":
        every = get.integer("no_rope_layer_interval", 4, maximum=4096)
        flags = get.raw.get("no_rope_layers")
        if flags is None:
            flags = [int((i + 1) % every != 0) for i in range(num_layers)]
        # A list may be longer than the model.
        if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
            get.refuse("no_rope_layers", flags, f"must be a list of 0 (none) and 1, for each of {num_layers} layers")
        return () if all(flags[:num_layers]) else tuple(layer.rope if flag else None for flag in flags[:num_layers])
    if family.ropes == "typed":
        key, own = _rope_of_kind(get, "sliding_attention")
        theta = Reader(own, get.path).number("rope_theta", get.number("rope_local_base_freq"))
        plain = Reader({**get.raw, "rope_theta": theta}, get.path)
        local = _rope_from(plain, family, key, own, layer.max_position_embeddings, layer.head_dim)
        kinds = _layer_kinds(get, family, num_layers)
        return tuple(local if kind == "sliding_attention" else layer.rope for kind in kinds)
    return ()


def _rope_from(
    get: Reader, family: Family, key: str, rope: dict[str, Any], max_position: int, head_dim: int
) -> RopeConfig:
    read = Reader(rope, get.path)
    theta = read.number("rope_theta", get.number("rope_theta", 10000.0))
    share = 1.0
    for place in (get, read):  # the latter has priority
        share = place.number("partial_rotary_factor", share)
        if share != 1.0 and not family.partial_rotary:
            get.refuse("partial_rotary_factor", share, "only 1.0 is implemented")
    rotary = int(head_dim * share)
    if share > 1.0 or rotary % 2 or not rotary:
        why = f"must leave an even number of a head's {head_dim} elements, at least 2"
        get.refuse("partial_rotary_factor", share, why)
    if family.longrope:
        return _longrope(get, key, read, theta, share, rotary, max_position)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        if rope.get("mrope_section"):
            get.refuse(f"{key}.mrope_section", rope["mrope_section"], "multimodal positions are not implemented")
        return RopeConfig("default", theta)
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        get.refuse(f"{key}.rope_type", kind, "implemented: default, linear, dynamic, llama3, yarn")
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind, theta, read.number("factor"))
    # A value beside the rope object has priority, as in transformers.
    original = get.integer(
        "original_max_position_embeddings", read.integer("original_max_position_embeddings", max_position)
    )
    if kind == "llama3":
        low, high = read.number("low_freq_factor"), read.number("high_freq_factor")
        if high <= low:
            get.refuse(f"{key}.high_freq_factor", high, f"must be above low_freq_factor = {low}")
        return RopeConfig(kind, theta, read.number("factor"), original, low, high)
    if theta <= 1.0:
        get.refuse("rope_theta", theta, "yarn needs a base above 1")
    return RopeConfig(
        kind,
        theta,
        read.number("factor", max_position / original),
        original,
        attention_factor=None if rope.get("attention_factor") is None else read.number("attention_factor"),
        beta_fast=read.number("beta_fast", 32.0),
        beta_slow=read.number("beta_slow", 1.0),
        mscale=rope.get("mscale") and read.number("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim") and read.number("mscale_all_dim"),
        truncate=read.boolean("truncate", True),
    )


def _longrope(
    get: Reader, key: str, read: Reader, theta: float, share: float, rotary: int, max_position: int
) -> RopeConfig:
    """LongRoPE (https://arxiv.org/abs/2402.13753) within the context before scaling, where its frequencies stay."""
    kind = read.raw.get("rope_type", read.raw.get("type", "default"))
    if kind == "default":
        return RopeConfig("default", theta, share=share)
    if kind not in ("longrope", "su", "yarn"):  # earlier names of the same
        get.refuse(f"{key}.rope_type", kind, "implemented: default, longrope")
    original = get.integer("original_max_position_embeddings", max_position)  # beside the rope object, as above
    factor = read.number("factor", max_position / original)
    scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(max(original, 2)))
    return RopeConfig(
        "longrope",
        theta,
        factor,
        original,
        attention_factor=read.number("attention_factor", scale),
        share=share,
        short_factors=read.numbers("short_factor", rotary // 2),
    )


def _layer_kinds(get: Reader, family: Family, num_layers: int) -> list[str]:
    """The kind of attention of each layer, of a family whose configuration names kinds or has a pattern of them."""
    kinds = get.raw.get("layer_types")
    if kinds is None:
        every = get.integer("sliding_window_pattern", family.pattern, maximum=4096)
        return ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(num_layers)]
    if len(kinds) != num_layers:
        get.refuse("layer_types", kinds, f"must name the kind of each of {num_layers} layers")
    return list(kinds)


def _sliding_window(get: Reader, family: Family, num_layers: int) -> int | None:
    """The window where at least one layer uses it. Qwen models name one that they switch off."""
    kinds = get.raw.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind not in _KINDS for kind in kinds)):
        get.refuse("layer_types", kinds, "only full_attention and sliding_attention are implemented")
    if get.raw.get("sliding_window") is None or family.window == "none":
        return None
    window = get.integer("sliding_window", maximum=(1 << 31) - 1)
    if family.window == "all":
        return window
    if family.window == "typed":
        return window if "sliding_attention" in _layer_kinds(get, family, num_layers) else None
    if not get.boolean("use_sliding_window", False):
        return None
    if kinds is not None:
        return window if "sliding_attention" in kinds else None
    if family.ropes == "some":  # layers without a rotary embedding are those with a window, if there are any
        return window
    return window if get.integer("max_window_layers", 28, minimum=0) < num_layers else None


def _token_ids(get: Reader, key: str, vocab_size: int) -> tuple[int, ...]:
    value = get.raw.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            get.refuse(key, value, f"must be token ids in 0..{vocab_size}")
    return tuple(ids)


def _aux_layers(get: Reader, eagle: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Layers whose input is captured.

    Two conventions are published under one name. Beside the other keys (speculators, vLLM) the numbers count residual
    streams, 0 being the embedding: the inputs of layers. Inside `eagle_config` (SpecForge, sglang) they count layers
    whose *output* is meant, which is the input of the next one; sglang adds 1 to them in
    `set_eagle3_layers_to_capture`, while its default (2, n/2, n-3) are inputs already.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    shift = 0
    ids = get.raw.get(name)
    if ids is None:
        shift, ids = 1, eagle.get(name)
    if ids is None:
        return None
    if not isinstance(ids, list) or not 1 <= len(ids) <= 64:
        get.refuse(name, ids, "must be a list of 1..=64 layer numbers")
    for layer in ids:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer <= 4096:
            get.refuse(name, ids, "must be layer numbers >= 0")
    return tuple(layer + shift for layer in ids)
