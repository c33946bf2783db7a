"""What a request asks of sampling. Every field is honoured exactly on draft trees; nothing is silently ignored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specrs._specrs import ConfigError

_MAX_SEED = 2**64 - 1
_MAX_TOP_K = 2**63 - 1
_MAX_F32 = 3.4028234663852886e38
_MIN_F32 = 1.1754943508222875e-38  # smallest normal


def _refuse(name: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"SamplingParams.{name} = {value!r}: {why}")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _refuse(name, value, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        raise _refuse(name, value, "must be finite") from None
    if not math.isfinite(number):
        raise _refuse(name, value, "must be finite")
    return number


def _penalty(name: str, value: float) -> None:
    """The arithmetic of logits is in f32."""
    if abs(value) > _MAX_F32:
        raise _refuse(name, value, f"must be in -{_MAX_F32}..{_MAX_F32}")


def _items(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise _refuse(name, value, "must be a sequence")
    return tuple(value)


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refuse(name, value, "must be an integer")
    if value < low or (high is not None and value > high):
        raise _refuse(name, value, f"must be at least {low}" if high is None else f"must be in {low}..{high}")
    return value


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request.

    The token at absolute position p is drawn from the processed distribution by inverse CDF with a Philox number
    keyed by ``(seed, p)``, so that a seeded request yields the same tokens with and without speculation, alone or in
    any batch. Processors run in this order: ``logit_bias``, ``repetition_penalty`` (prompt and output),
    ``presence_penalty`` and ``frequency_penalty`` (output), ``temperature``, ``top_k``, ``top_p`` (of what top-k
    kept, renormalised), ``min_p`` (relative to the most probable token).

    Attributes:
        max_tokens: most tokens to generate; at least 1.
        temperature: 0 is greedy decoding.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens with at least this mass, in (0, 1].
        min_p: drop tokens less probable than this fraction of the most probable one, in [0, 1].
        seed: 0 .. 2**64 - 1; ``None`` draws one per request, which the output reports.
        stop: strings that end the output; the text is cut before them (``include_stop`` keeps them).
        stop_token_ids: token ids that end the output, as EOS does; they count in ``token_ids`` but not in the text.
        repetition_penalty: > 0; divides positive and multiplies negative logits of seen tokens (arXiv:1909.05858).
        presence_penalty: subtracted once from the logit of each token in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        logit_bias: token id -> value added to its logit; ``-math.inf`` forbids the token.
        ignore_eos: do not end at the model's EOS.
        include_stop: keep the stop string in the text.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ignore_eos: bool = False
    include_stop: bool = False

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        _integer("max_tokens", self.max_tokens, 1)
        _integer("top_k", self.top_k, 0, _MAX_TOP_K)
        if self.seed is not None:
            _integer("seed", self.seed, 0, _MAX_SEED)
        for name in ("temperature", "presence_penalty", "frequency_penalty", "top_p", "min_p", "repetition_penalty"):
            put(name, _number(name, getattr(self, name)))
        if self.temperature < 0:
            raise _refuse("temperature", self.temperature, "must be at least 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise _refuse("top_p", self.top_p, "must be in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise _refuse("min_p", self.min_p, "must be in [0, 1]")
        if not _MIN_F32 <= self.repetition_penalty <= _MAX_F32:
            raise _refuse("repetition_penalty", self.repetition_penalty, "must be greater than 0, and a normal f32")
        _penalty("presence_penalty", self.presence_penalty)
        _penalty("frequency_penalty", self.frequency_penalty)
        for name in ("ignore_eos", "include_stop"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "must be a bool")
        stop = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop)
        for s in stop:
            if not isinstance(s, str) or not s:
                raise _refuse("stop", self.stop, "must be non-empty strings")
        put("stop", stop)
        ids = _items("stop_token_ids", self.stop_token_ids)
        for i in ids:
            _integer("stop_token_ids", i, 0)
        put("stop_token_ids", ids)
        if not isinstance(self.logit_bias, Mapping):
            raise _refuse("logit_bias", self.logit_bias, "must be a mapping from token ids to numbers")
        bias = dict(self.logit_bias)
        for token, value in bias.items():
            _integer("logit_bias", token, 0)
            if value != -math.inf:
                bias[token] = _number("logit_bias", value)
                _penalty("logit_bias", bias[token])
        put("logit_bias", bias)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping such as a request body; a name that cannot be honoured is refused."""
        known = cls.__dataclass_fields__
        for name, value in options.items():
            if name not in known:
                raise _refuse(name, value, f"is not supported; supported are {', '.join(sorted(known))}")
        return cls(**options)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have, before anything is allocated for the request."""
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(self, name):
                if token >= vocab_size:
                    raise _refuse(name, token, f"the vocabulary has {vocab_size} tokens")
