"""Rotary embeddings in `config.json`: `RopeConfig`, and how it is read for each family."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from specrs.models.families import Family
from specrs.models.reading import Reader

KINDS = ("full_attention", "sliding_attention")
"""Kinds of attention layers, as `layer_types` names them."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: its base and how its frequencies are scaled. `specrs.models.rope` computes the tables."""

    kind: str
    """Kind of scaling: default, linear, dynamic, llama3, yarn or longrope."""
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
    """Share of a head's elements that are rotated: the first ones."""
    short_factors: tuple[float, ...] = ()
    """Factor of each period within `original_max_position` tokens, for longrope."""


def read_rope(get: Reader, family: Family, max_position: int, head_dim: int) -> RopeConfig:
    """Read both spellings: `rope_scaling` beside `rope_theta`, and transformers 5's `rope_parameters` with all in one.
    If the family has an embedding for each kind of layer, read that of layers without a window."""
    if family.ropes == "typed":
        return _rope_from(get, family, *_rope_of_kind(get, "full_attention"), max_position, head_dim)
    key, rope = _rope_object(get)
    if rope and all(isinstance(value, dict) for value in rope.values()):  # one entry per kind of attention layer
        if len(rope) != 1:
            get.refuse(key, sorted(rope), "one rotary embedding for all layers is implemented")
        (rope,) = rope.values()
    return _rope_from(get, family, key, rope, max_position, head_dim)


def _rope_object(get: Reader) -> tuple[str, dict[str, Any]]:
    """Return the key that describes rotary embeddings, and its object."""
    key, rope = "rope_scaling", dict[str, Any]()
    for other in ("rope_scaling", "rope_parameters"):
        given = get.raw.get(other) or {}
        if not isinstance(given, dict):
            get.refuse(other, given, "must be an object")
        if rope and given and _spelt(get, given) != _spelt(get, rope):
            # transformers takes the former, and with it another base than the latter's.
            get.refuse(
                key, rope, f"says something else than {other} = {given!r}; one of them works, with its rope_theta"
            )
        if given:
            key, rope = other, given
    return key, rope


def _spelt(get: Reader, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that both spellings have in common."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", get.raw.get("rope_theta"))
    return {**{k: v for k, v in rope.items() if k != "type"}, "rope_type": kind, "rope_theta": theta}


def _rope_of_kind(get: Reader, kind: str) -> tuple[str, dict[str, Any]]:
    """The same of one kind of attention layer; a spelling without kinds speaks of those without a window."""
    key, rope = _rope_object(get)
    kinds = {name: value or {} for name, value in rope.items() if name in KINDS}
    found = kinds.get(kind, {}) if kinds or kind == "sliding_attention" else rope
    if not isinstance(found, dict):
        get.refuse(f"{key}.{kind}", found, "must be an object")
    return key, found


def layer_ropes(
    get: Reader, family: Family, shared: RopeConfig, num_layers: int, max_position: int, head_dim: int
) -> tuple[RopeConfig | None, ...]:
    """Return each layer's rotary embedding; empty where all layers have the shared one."""
    if family.ropes == "some":
        every = get.integer("no_rope_layer_interval", 4, maximum=4096)
        flags = get.raw.get("no_rope_layers")
        if flags is None:
            flags = [int((i + 1) % every != 0) for i in range(num_layers)]
        # A list may be longer than the model.
        if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
            get.refuse("no_rope_layers", flags, f"must be a list of 0 (none) and 1, for each of {num_layers} layers")
        return () if all(flags[:num_layers]) else tuple(shared if flag else None for flag in flags[:num_layers])
    if family.ropes == "typed":
        key, own = _rope_of_kind(get, "sliding_attention")
        theta = Reader(own, get.path).number("rope_theta", get.number("rope_local_base_freq"))
        plain = Reader({**get.raw, "rope_theta": theta}, get.path)
        local = _rope_from(plain, family, key, own, max_position, head_dim)
        kinds = layer_kinds(get, family, num_layers)
        return tuple(local if kind == "sliding_attention" else shared for kind in kinds)
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
    if kind == "mrope" or rope.get("mrope_section"):
        name, got = ("rope_type", kind) if kind == "mrope" else ("mrope_section", rope["mrope_section"])
        why = (
            "positions on three axes, as multimodal models have, are not implemented; those of text alone are "
            "rope_type default without mrope_section"
        )
        get.refuse(f"{key}.{name}", got, why)
    if kind == "default":
        return RopeConfig("default", theta)
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        get.refuse(f"{key}.rope_type", kind, "implemented: default, linear, dynamic, llama3, yarn")
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind, theta, read.number("factor"))
    # A value beside the rope object has priority, as in transformers.
    original = _original(get, _original(read, max_position))
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


def _original(get: Reader, default: int) -> int:
    """Context length before scaling, in tokens."""
    return get.integer("original_max_position_embeddings", default, whole_floats=True)


def _longrope(
    get: Reader, key: str, read: Reader, theta: float, share: float, rotary: int, max_position: int
) -> RopeConfig:
    """LongRoPE (https://arxiv.org/abs/2402.13753) within the context before scaling, where its frequencies stay."""
    kind = read.raw.get("rope_type", read.raw.get("type", "default"))
    if kind == "default":
        return RopeConfig("default", theta, share=share)
    if kind not in ("longrope", "su", "yarn"):  # earlier names of the same
        get.refuse(f"{key}.rope_type", kind, "implemented: default, longrope")
    original = _original(get, max_position)  # beside the rope object, as above
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


def layer_kinds(get: Reader, family: Family, num_layers: int) -> list[str]:
    """Return the kind of attention of each layer, for a family whose configuration names kinds or has a pattern of
    them."""
    kinds = get.raw.get("layer_types")
    if kinds is None:
        every = get.integer("sliding_window_pattern", family.pattern, maximum=4096)
        return ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(num_layers)]
    if len(kinds) != num_layers:
        get.refuse("layer_types", kinds, f"must name the kind of each of {num_layers} layers")
    return list(kinds)
