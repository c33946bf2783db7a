"""`config.json` of a draft head as a frozen value, read as its form says (`head_forms`).

A key that would change what the head computes, and that nothing here computes, is refused by name before any weight is
read. Whether a head fits a target is checked here, too.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from specrs.models.config import LayerConfig, ModelConfig, check_arithmetic, check_layers, layer_config, sliding_window
from specrs.models.errors import DraftMismatchError
from specrs.models.families import FAMILIES, Family
from specrs.models.head_forms import (
    AUX_KEYS,
    EAGLE_CONFIG,
    HARMLESS,
    LAYER,
    LAYER_DEFAULTS,
    NEUTRAL,
    NORM_KEYS,
    READ,
    Form,
    form_of,
)
from specrs.models.live import model_json
from specrs.models.reading import Reader

# Families of the layers that nested configurations name: those whose defaults `LAYER_DEFAULTS` has. They differ in
# q_norm and k_norm, whose tensors the file of weights has or lacks.
_FAMILIES = {"llama": FAMILIES["LlamaForCausalLM"], "qwen3": FAMILIES["Qwen3ForCausalLM"]}
_DEFAULT_AUX = 3


@dataclass(frozen=True)
class Eagle3Config(LayerConfig):
    """An EAGLE-3 head (https://arxiv.org/abs/2503.01840): decoder layers over the target's features.

    Attributes:
        num_layers: decoder layers. The first reads embedding and feature, the others are plain.
        vocab_size: vocabulary of the target.
        draft_vocab_size: columns of the head's logits.
        target_hidden_size: width of a feature.
        aux_layers: decoder layers whose *input* residual stream is a feature; ``None``: (2, n/2, n-3) of n layers.
        target_layers: number of the target's layers, where the file says it.
        norm_before_residual: true if the residual stream of the first layer starts from the normalised feature.
        norm_before_fc: true if one RMSNorm spans all features of a row before `fc`.
        fc_norm: true if each feature has an RMSNorm before `fc`.
        norm_output: true if a draft step passes on what the last norm gives, instead of what it reads.
        form: the form of the file.
        notes: what is worth knowing of the file.
    """

    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...] | None
    target_layers: int | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    form: Form = field(compare=False)
    notes: tuple[str, ...] = field(compare=False)

    @classmethod
    def from_directory(cls, directory: str | Path) -> Eagle3Config:
        """Read `config.json` of a head in any form of EAGLE-3. Raises ModelFileError and UnsupportedModelError."""
        return cls.from_dict(*model_json(directory, "config.json"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], path: Path | None = None, form: Form | None = None) -> Eagle3Config:
        """Read the same from parsed JSON.

        Args:
            path: the file to name in errors.
            form: the form; ``None``: that of its name.
        """
        form = form or form_of(raw, path)
        get = _flat(raw, path)
        family = _checked(get, form)
        section = raw.get("eagle_config") or {}
        if not isinstance(section, dict):
            get.refuse("eagle_config", section, "must be an object")
        _check_section(get, section)
        layers = get.integer("num_hidden_layers", 1, maximum=4096)
        _check_windows(get, family, layers)
        layer = layer_config(get, family)
        vocab_size = get.integer("vocab_size")
        before_fc, each, output = (
            _switched(get, Reader(section, path), NORM_KEYS[name])
            for name in ("norm_before_fc", "fc_norm", "norm_output")
        )
        if before_fc and each:
            get.refuse("fc_norm", True, "norm_before_fc is true, too: one of the two norms stands before fc")
        aux = _aux_layers(get, section)
        count = _DEFAULT_AUX if aux is None else len(aux)
        if (said := get.integer("num_aux_hidden_states", count)) != count:
            where = "no key names layers, so the three of EAGLE-3's default count" if aux is None else f"{count} layers"
            get.refuse("num_aux_hidden_states", said, f"{where}; name as many layers")
        return cls(
            **vars(layer),
            num_layers=layers,
            vocab_size=vocab_size,
            draft_vocab_size=get.integer("draft_vocab_size", vocab_size),
            target_hidden_size=get.integer("target_hidden_size", layer.hidden_size),
            aux_layers=aux,
            target_layers=get.integer("num_target_layers") if get.raw.get("num_target_layers") is not None else None,
            norm_before_residual=get.boolean("norm_before_residual", False),
            norm_before_fc=before_fc,
            fc_norm=each,
            norm_output=output,
            form=form,
            notes=_notes(get, form, layer.rope.theta),
        )

    @property
    def form_name(self) -> str:
        """Name of the form; EAGLE-3.1 is EAGLE-3 with a norm of each feature and a normalised output."""
        return "EAGLE-3.1" if self.fc_norm and self.norm_output else self.form.name

    @property
    def aux_size(self) -> int:
        """Columns of a row of features: all auxiliary layers side by side."""
        return (_DEFAULT_AUX if self.aux_layers is None else len(self.aux_layers)) * self.target_hidden_size

    def aux_layers_for(self, target: ModelConfig) -> tuple[int, ...]:
        """Return the features' layers for this target: its own choice, or the published default. They are in the order
        of `fc`."""
        if self.aux_layers is not None:
            return self.aux_layers
        n = target.num_layers
        return (2, n // 2, n - 3)

    def check_target(self, target: ModelConfig) -> None:
        """Raise DraftMismatchError where the head cannot have been made for this target."""
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
        if self.target_layers not in (None, target.num_layers):
            raise DraftMismatchError("num_target_layers", self.target_layers, f"{target.num_layers} layers")
        for layer in self.aux_layers_for(target):
            if not 0 <= layer < target.num_layers:
                raise DraftMismatchError(
                    "aux layer",
                    layer,
                    f"0..{target.num_layers} (features are the inputs of its {target.num_layers} layers)",
                    "set eagle_aux_hidden_state_layer_ids in the head's config.json to the layers it was trained on",
                )


@dataclass(frozen=True)
class Eagle1Config(LayerConfig):
    """An EAGLE-1 (https://arxiv.org/abs/2401.15077) or EAGLE-2 (https://arxiv.org/abs/2406.16858) head: one decoder
    layer over the embedding and the target's last hidden state. The two differ only in the trees that are drafted with
    them.

    Attributes:
        vocab_size: vocabulary of the target, and of the head's logits.
        form: the form of the file.
        notes: what is worth knowing of the file.
    """

    vocab_size: int
    form: Form = field(compare=False)
    notes: tuple[str, ...] = field(compare=False)
    num_layers: ClassVar[int] = 1

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], path: Path | None = None, form: Form | None = None) -> Eagle1Config:
        """Read a head from its parsed `config.json`, which is that of a model of one layer.

        Args:
            path: the file to name in errors.
            form: the form; ``None``: that of its name, beside a file with `fc.weight`.

        Raises:
            UnsupportedModelError: another form, or a value that cannot be honoured.
        """
        form = form or form_of(raw, path, ("fc.weight",))
        get = _flat(raw, path)
        family = _checked(get, form)
        if (layers := get.integer("num_hidden_layers", 1, maximum=4096)) != 1:
            get.refuse("num_hidden_layers", layers, "EAGLE-1 and EAGLE-2 heads have one layer")
        _check_windows(get, family, layers)
        layer = layer_config(get, family)
        notes = _notes(get, form, layer.rope.theta)
        return cls(**vars(layer), vocab_size=get.integer("vocab_size"), form=form, notes=notes)

    @property
    def form_name(self) -> str:
        """Name of the form."""
        return self.form.name

    @property
    def draft_vocab_size(self) -> int:
        """Columns of the head's logits."""
        return self.vocab_size

    @property
    def aux_size(self) -> int:
        """Columns of a row of features."""
        return self.hidden_size

    def aux_layers_for(self, target: ModelConfig) -> tuple[int, ...]:
        """Return the features' layer: none of the target's, but the output of its last norm.

        In the code that the paper publishes (SafeAILab/EAGLE: `ea_model.py`, `ge_data/`) a feature is the model's
        `last_hidden_state`, behind the norm, and the target's `lm_head` is applied to what the head predicts as it is.
        """
        return (target.num_layers,)

    def check_target(self, target: ModelConfig) -> None:
        """Raise DraftMismatchError where the head cannot have been made for this target."""
        for what in ("hidden_size", "vocab_size"):
            if (got := getattr(self, what)) != (want := getattr(target, what)):
                raise DraftMismatchError(what, got, f"{what} {want}")


HeadConfig = Eagle1Config | Eagle3Config
"""Configuration of a draft head of any kind."""


def _flat(raw: Mapping[str, Any], path: Path | None) -> Reader:
    """A head's `config.json`, with what the speculators library nests beside the other keys, and what that leaves
    out."""
    nested = raw.get("transformer_layer_config")
    if not isinstance(nested, dict):
        return Reader(raw, path)
    return Reader({**LAYER_DEFAULTS.get(str(nested.get("model_type")), {}), **nested, **raw}, path)


def _checked(get: Reader, form: Form) -> Family:
    """Return the family whose layer a head has, once nothing forbids its layers."""
    check_layers(get)
    nested = get.raw.get("transformer_layer_config")
    kind = nested.get("model_type") if isinstance(nested, dict) else None
    if kind not in (None, *_FAMILIES):
        why = f"heads whose layer is that of {', '.join(_FAMILIES)} are implemented"
        get.refuse("transformer_layer_config.model_type", kind, why)
    family = FAMILIES[form.family] if kind is None else _FAMILIES[str(kind)]
    check_arithmetic(get, family)
    _check_keys(get)
    return family


def _check_keys(get: Reader) -> None:
    """Refuse keys that change what nothing here computes, and unknown ones that may name layers."""
    for key, value in get.raw.items():
        if value is not None and key in NEUTRAL and value not in NEUTRAL[key]:
            allowed = " or ".join(str(one).lower() for one in (*NEUTRAL[key], "null"))
            get.refuse(key, value, f"it changes the head's numbers, which is not implemented; {allowed} works")
        if isinstance(value, list) and value and "layer_ids" in key and key not in READ:
            known = ", ".join(f"{within}.{one}" if within else one for one, within, _ in AUX_KEYS)
            get.refuse(key, value, f"unknown, and may name the features' layers; known: {known}")


def _check_windows(get: Reader, family: Family, layers: int) -> None:
    """Refuse layers that attend to a window, whether the configuration names the kind of each or none."""
    key, got = "layer_types", get.raw.get("layer_types")
    if got is None:
        key, got = "sliding_window", sliding_window(get, family, layers)
    if got is not None and got != ["full_attention"] * (len(got) if isinstance(got, list) else 0):
        get.refuse(key, got, "windows are not implemented in heads; layers of full_attention work")


def _check_section(get: Reader, section: Mapping[str, Any]) -> None:
    """Refuse a value of `eagle_config` that changes what nothing here computes."""
    for key, value in section.items():
        if key not in EAGLE_CONFIG:
            if value is not None:
                get.refuse(f"eagle_config.{key}", value, f"unknown; known: {', '.join(EAGLE_CONFIG)}")
        elif (allowed := EAGLE_CONFIG[key]) is not None and value is not None and value not in allowed:
            known = " or ".join(str(one).lower() for one in allowed)
            get.refuse(f"eagle_config.{key}", value, f"only {known} is implemented")


def _switched(get: Reader, section: Reader, keys: tuple[str, ...]) -> bool:
    """Return whether the keys are true, beside the others or in `eagle_config`. All that are there must agree."""
    said = [
        (key if place is get else f"eagle_config.{key}", place.boolean(key, False))
        for key in keys
        for place in (get, section)
        if place.raw.get(key) is not None
    ]
    for name, value in said[1:]:
        if value != said[0][1]:
            why = f"{said[0][0]} is {str(said[0][1]).lower()}, and both switch the same norm; give both one value"
            get.refuse(name, value, why)
    return any(value for _, value in said)


def _notes(get: Reader, form: Form, theta: float) -> tuple[str, ...]:
    notes = []
    unknown = sorted(key for key in get.raw if key not in READ and key not in HARMLESS)
    if unknown:
        notes.append(f"config.json has keys that nothing here reads: {', '.join(unknown)}")
    if form.speculators == "eagle3" and get.raw.get("norm_before_residual") is None:
        notes.append("norm_before_residual is absent and taken as false, as speculators does; vLLM takes it as true")
    if get.raw.get("architectures") == ["LlamaForCausalLMEagle3"] and get.raw.get("norm_output") is not None:
        notes.append(
            "norm_output: in SpecForge's trainer it says whether the last norm stands before lm_head; here, as in "
            "sglang and vLLM, that norm always does, and the key says whether a draft step passes on its output"
        )
    if get.raw.get("architectures") == ["Eagle3LlamaForCausalLM"] and theta != 10000:
        notes.append(
            f"rope_theta = {theta:.0f}: AngelSlim's trainer does not read the key and takes 10000; here it counts, as "
            "in sglang and vLLM"
        )
    return tuple(notes)


def _aux_layers(get: Reader, section: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Layers whose input is captured, by all of `AUX_KEYS` that have numbers; ``None`` for the default, for which
    NVIDIA writes an empty list."""
    first: tuple[str, tuple[int, ...]] | None = None
    for key, within, shift in AUX_KEYS:
        ids = (get.raw if within is None else section).get(key)
        if ids is None or ids == []:
            continue
        name = key if within is None else f"{within}.{key}"
        if not isinstance(ids, list) or not 1 <= len(ids) <= 64:
            get.refuse(name, ids, "must be a list of 1..=64 layer numbers")
        for layer in ids:
            if isinstance(layer, bool) or not isinstance(layer, int) or not -shift <= layer <= 4096:
                get.refuse(name, ids, f"must be layer numbers >= {-shift}")
        streams = tuple(layer + shift for layer in ids)
        if first is None:
            first = (name, streams)
        elif streams != first[1]:
            why = (
                f"the inputs of layers {[*streams]}, where {first[0]} names those of {[*first[1]]}; keep the key by "
                "which the head was trained"
            )
            get.refuse(name, ids, why)
    return None if first is None else first[1]


def parts(config: HeadConfig, tensors: Container[str]) -> str | None:
    """Return what a head has beyond the first published one of its kind, in words; ``None`` where that is nothing.

    Args:
        tensors: names of its tensors.
    """
    has = [
        (config.num_layers > 1, f"{config.num_layers} layers"),
        (f"{LAYER}self_attn.q_norm.weight" in tensors, "q_norm and k_norm, as Qwen3's layers"),
    ]
    if isinstance(config, Eagle3Config):
        has += [
            (config.norm_before_residual, "norm_before_residual"),
            (config.norm_before_fc, "norm_before_fc"),
            (config.fc_norm, "fc_norm"),
            (config.norm_output, "norm_output"),
            ("d2t" in tensors, "a vocabulary of its own"),
            ("embed_tokens.weight" in tensors, "embeddings of its own"),
        ]
    return "; ".join(name for there, name in has if there) or None
