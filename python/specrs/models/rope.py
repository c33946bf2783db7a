"""Rotary embedding tables. Frequencies follow the published scalings (linear: kaiokendev; llama3: Llama 3.1; yarn:
https://arxiv.org/abs/2309.00071), computed in f32 in the same order as transformers, so that logits can be compared
closely at every position."""

from __future__ import annotations

import math

import torch

from specrs._specrs import ConfigError
from specrs.models.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return (f32 [rotary / 2] inverse frequencies in radians per position, the factor on cos and sin); rotary is the
    ``share`` of a head's elements."""
    head_dim = int(head_dim * rope.share)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    # "dynamic" scales only beyond max_position_embeddings, which ModelConfig.check_context refuses.
    if rope.kind in ("default", "dynamic"):
        return plain, 1.0
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "longrope":
        # The other factors begin beyond the context before scaling, which ModelConfig.check_context refuses.
        factor = 1.0 if rope.attention_factor is None else rope.attention_factor
        return 1.0 / (torch.tensor(rope.short_factors) * rope.theta**exponents), factor
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    return _yarn(rope, head_dim, rope.theta**exponents)


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Divide long wavelengths by `factor`, keep short ones, and interpolate those between."""
    context, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    slow = wavelength > context / low
    scaled = torch.where(slow, plain / rope.factor, plain)
    smooth = (context / wavelength - low) / (high - low)
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where(~slow & (wavelength >= context / high), between, scaled)


def _yarn(rope: RopeConfig, head_dim: int, periods: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Extrapolate dimensions that turn often, interpolate those that turn rarely, with a linear ramp between."""

    def dimension_of(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    frequencies = 1.0 / (rope.factor * periods) * (1 - keep) + 1.0 / periods * keep
    return frequencies, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def rope_tables(rope: RopeConfig | None, head_dim: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each f32 [positions, rotary / 2] and contiguous; element d turns the pair (d, d + rotary / 2).

    Without a rotary embedding, the smallest tables that turn nothing. ConfigError: no memory for them.
    """
    if rope is None:
        pairs = min(2, head_dim // 2)  # two where there are two: kernels of a GPU load two neighbours at once
        return torch.ones(positions, pairs), torch.zeros(positions, pairs)
    frequencies, factor = inverse_frequencies(rope, head_dim)
    try:
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
        return (angles.cos() * factor).contiguous(), (angles.sin() * factor).contiguous()
    except RuntimeError as error:  # torch's allocator has no type of its own for this
        raise ConfigError(
            f"rotary tables: no memory for {positions} positions of head_dim {head_dim}; "
            "a smaller max_context_len takes less"
        ) from error
