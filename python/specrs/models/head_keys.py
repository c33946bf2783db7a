"""Readers that the configurations of all kinds of draft heads share, and what heads over fused features have in common.

A key that would change what the head computes, and that nothing here computes, is refused by name before any weight is
read. Whether a head fits a target is checked here, too.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from specrs.models.config import LayerConfig, ModelConfig, check_arithmetic, check_layers, sliding_window
from specrs.models.errors import DraftMismatchError
from specrs.models.families import FAMILIES, Family
from specrs.models.head_forms import AUX_KEYS, HARMLESS, LAYER_DEFAULTS, NEUTRAL, READ, Form
from specrs.models.reading import Reader

# Families of the layers that nested configurations name: those whose defaults `LAYER_DEFAULTS` has. They differ in
# q_norm and k_norm, whose tensors the file of weights has or lacks.
_FAMILIES = {"llama": FAMILIES["LlamaForCausalLM"], "qwen3": FAMILIES["Qwen3ForCausalLM"]}


@dataclass(frozen=True)
class FusedConfig(LayerConfig):
    """A head over features of several of the target's layers, which its `fc` fuses to one.

    Attributes:
        num_layers: decoder layers.
        vocab_size: vocabulary of the target.
        draft_vocab_size: columns of the head's logits.
        target_hidden_size: width of a feature.
        aux_layers: decoder layers whose *input* residual stream is a feature; ``None``: those of `default_aux`.
        target_layers: number of the target's layers, where the file says it.
        form: the form of the file.
        notes: what is worth knowing of the file.
    """

    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...] | None
    target_layers: int | None
    form: Form = field(compare=False)
    notes: tuple[str, ...] = field(compare=False)
    layers_key: ClassVar[str] = "eagle_aux_hidden_state_layer_ids"

    @property
    def form_name(self) -> str:
        """Name of the form."""
        return self.form.name

    @property
    def aux_count(self) -> int:
        """Number of features of a row."""
        return len(self.default_aux(self.target_layers or 0) if self.aux_layers is None else self.aux_layers)

    @property
    def aux_size(self) -> int:
        """Columns of a row of features: all auxiliary layers side by side."""
        return self.aux_count * self.target_hidden_size

    def default_aux(self, layers: int) -> tuple[int, ...]:
        """Return the features' layers of a head that names none, for a target of so many layers."""
        raise NotImplementedError

    def aux_layers_for(self, target: ModelConfig) -> tuple[int, ...]:
        """Return the features' layers for this target: its own choice, or the published default. They are in the order
        of `fc`."""
        return self.default_aux(target.num_layers) if self.aux_layers is None else self.aux_layers

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
                    f"set {self.layers_key} in the head's config.json to the layers it was trained on",
                )


def target_layers(get: Reader) -> int | None:
    """Number of the target's layers, where the file says it."""
    return get.integer("num_target_layers") if get.raw.get("num_target_layers") is not None else None


def unread_keys(get: Reader, more: Container[str] = ()) -> list[str]:
    """Return a note on the keys of `config.json` that nothing here reads, if there are any."""
    unknown = sorted(key for key in get.raw if key not in READ and key not in HARMLESS and key not in more)
    return [f"config.json has keys that nothing here reads: {', '.join(unknown)}"] if unknown else []


def flat(raw: Mapping[str, Any], path: Path | None) -> Reader:
    """A head's `config.json`, with what the speculators library nests beside the other keys, and what that leaves
    out."""
    nested = raw.get("transformer_layer_config")
    if not isinstance(nested, dict):
        return Reader(raw, path)
    return Reader({**LAYER_DEFAULTS.get(str(nested.get("model_type")), {}), **nested, **raw}, path)


def checked(get: Reader, form: Form, honoured: Container[str] = ()) -> Family:
    """Return the family whose layer a head has, once nothing forbids its layers.

    Args:
        honoured: keys that change numbers, and that the form's reader reads.
    """
    check_layers(get)
    nested = get.raw.get("transformer_layer_config")
    kind = nested.get("model_type") if isinstance(nested, dict) else None
    if kind not in (None, *_FAMILIES):
        why = f"heads whose layer is that of {', '.join(_FAMILIES)} are implemented"
        get.refuse("transformer_layer_config.model_type", kind, why)
    family = FAMILIES[form.family] if kind is None else _FAMILIES[str(kind)]
    check_arithmetic(get, family)
    _check_keys(get, honoured)
    return family


def _check_keys(get: Reader, honoured: Container[str]) -> None:
    """Refuse keys that change what nothing here computes, and unknown ones that may name layers."""
    for key, value in get.raw.items():
        if value is not None and key in NEUTRAL and key not in honoured and value not in NEUTRAL[key]:
            allowed = " or ".join(str(one).lower() for one in (*NEUTRAL[key], "null"))
            get.refuse(key, value, f"it changes the head's numbers, which is not implemented; {allowed} works")
        if isinstance(value, list) and value and "layer_ids" in key and key not in READ:
            known = ", ".join(f"{within}.{one}" if within else one for one, within, _ in AUX_KEYS)
            get.refuse(key, value, f"unknown, and may name the features' layers; known: {known}")


def check_windows(get: Reader, family: Family, layers: int) -> None:
    """Refuse layers that attend to a window, whether the configuration names the kind of each or none."""
    key, got = "layer_types", get.raw.get("layer_types")
    if got is None:
        key, got = "sliding_window", sliding_window(get, family, layers)
    if got is not None and got != ["full_attention"] * (len(got) if isinstance(got, list) else 0):
        get.refuse(key, got, "windows are not implemented in heads; layers of full_attention work")


def section_of(get: Reader, name: str, known: Mapping[str, tuple[Any, ...] | None]) -> Mapping[str, Any]:
    """Return an object within `config.json`, whose keys are there to change numbers; empty where there is none.

    Args:
        known: its keys, with the values that are implemented; ``None``: any, since the key is read elsewhere or changes
            nothing.
    """
    section = get.raw.get(name) or {}
    if not isinstance(section, dict):
        get.refuse(name, section, "must be an object")
    for key, value in section.items():
        if key not in known and value is not None:
            get.refuse(f"{name}.{key}", value, f"unknown; known: {', '.join(known)}")
        check_value(get, f"{name}.{key}", value, known.get(key))
    return section


def check_value(get: Reader, name: str, value: Any, allowed: tuple[Any, ...] | None) -> None:
    """Refuse a value that is none of those that are implemented; null is none, and with ``None`` any will do."""
    if allowed is not None and value is not None and value not in allowed:
        works = " or ".join(str(one).lower() for one in allowed) or "null"
        get.refuse(name, value, f"only {works} is implemented")


def switched(get: Reader, section: Reader, keys: tuple[str, ...]) -> bool:
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


def aux_layers(get: Reader) -> tuple[int, ...] | None:
    """Layers whose input is captured, by all of `AUX_KEYS` that have numbers; ``None`` for the default, for which
    NVIDIA writes an empty list."""
    first: tuple[str, tuple[int, ...]] | None = None
    for key, within, shift in AUX_KEYS:
        ids = (get.raw if within is None else get.raw.get(within) or {}).get(key)
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
