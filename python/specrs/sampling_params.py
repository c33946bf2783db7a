"""A request's sampling parameters. Every field is honoured exactly on draft trees; nothing is silently ignored."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from specrs._specrs import ConfigError
from specrs.grammar import StructuredOutputs

RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
"""Values of `SamplingParams.logprobs_mode`."""

_MAX_SEED = 2**64 - 1
_MAX_TOP_K = 2**63 - 1
# Logits are edited in float32. Within these limits, which are the core's too, none of magnitude up to 1e30 overflows,
# however often a token occurs: (1e30 + 1e30) * 1e6 + 1e20 * 2**32 + 1e20 < 3e36, and float32 ends at 3.4e38.
_MAX_BIAS = 1e30
_MAX_PENALTY = 1e20
_MAX_REPETITION = 1e6
_MAX_LOGPROBS = 20  # beside the chosen token
_MAX_N = 4096
_MAX_PRIORITY = 2**31
_MAX_SALT = 1024
_DECIMAL = re.compile("[0-9]{1,19}")


def _refuse(name: str, value: object, why: str) -> ConfigError:
    error = ConfigError(f"SamplingParams.{name} = {value!r}: {why}")
    error.what, error.got, error.why = name, value, why  # named as the core's errors name them
    return error


def _plain(value: object) -> object:
    """A scalar of numpy or torch as Python's own number; anything else as it is."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else value


def _number(name: str, value: object) -> float:
    plain = _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, Real):
        raise _refuse(name, value, "must be a number")
    try:
        number = float(plain)
    except OverflowError:
        raise _refuse(name, value, "must be finite") from None
    if not math.isfinite(number):
        raise _refuse(name, value, "must be finite")
    return number


def _within(name: str, value: float, limit: float, or_else: str = "") -> None:
    if abs(value) > limit:
        raise _refuse(name, value, f"must be in -{limit:g}..{limit:g}{or_else}")


def _items(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise _refuse(name, value, "must be a sequence")
    return tuple(value)


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    plain = _plain(value)
    try:
        if isinstance(plain, bool):
            raise TypeError
        number = operator.index(plain)  # type: ignore[arg-type]
    except TypeError:
        raise _refuse(name, value, "must be an integer") from None
    if number < low or (high is not None and number > high):
        raise _refuse(name, number, f"must be at least {low}" if high is None else f"must be in {low}..{high}")
    return number


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "must be a bool")
    return value


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request.

    The token at absolute position p is drawn from the processed distribution by inverse CDF with a Philox number
    keyed by ``(seed, p)``, so that a seeded request yields the same tokens with and without speculation, alone or in
    any batch. Processors run in this order: ``logit_bias``, ``repetition_penalty`` (prompt and output),
    ``presence_penalty`` and ``frequency_penalty`` (output), ``temperature``, ``top_k``, ``top_p`` (of what top-k
    kept, renormalised), ``min_p`` (relative to the most probable token).

    ``None`` leaves a field unset. The first six fields then take the model's own value (`LLM.default_sampling`, from
    its ``generation_config.json``), and the value in brackets where the model has none. Numbers may be numpy's or
    torch's scalars.

    Attributes:
        max_tokens: most tokens to generate; at least 1 (128).
        temperature: 0 is greedy decoding, whatever the other fields say (0).
        top_k: keep the k most probable tokens; 0 and -1 keep all (0).
        top_p: keep the smallest set of most probable tokens with at least this mass, in (0, 1] (1).
        min_p: drop tokens less probable than this fraction of the most probable one, in [0, 1] (0).
        repetition_penalty: in 1e-6..1e6; divides positive and multiplies negative logits of seen tokens (1;
            arXiv:1909.05858).
        seed: 0 .. 2**64 - 1; ``None`` draws one per request, which the output reports.
        stop: strings that end the output; the text is cut before them (``include_stop`` keeps them).
        stop_token_ids: token ids that end the output, as EOS does; they count in ``token_ids`` but not in the text.
        presence_penalty: subtracted once from the logit of each token in the output; in -1e20..1e20.
        frequency_penalty: subtracted once per occurrence in the output; in -1e20..1e20.
        logit_bias: token id -> value added to its logit, in -1e30..1e30; ``-math.inf`` forbids the token.
        ignore_eos: do not end at the model's EOS.
        include_stop: keep the stop string in the text.
        speculative: ``False`` decodes this request plainly; its tokens are the same.
        prediction: text, or token ids, that the output is expected to repeat in large part, such as a file that is to
            be edited: one more source of drafts. It changes no token. ``None``: nothing is expected.
            `RequestOutput.params` has a text's ids, as many as the context has room for.
        n: outputs of the prompt, which is prefilled once (1, at most 4096); `RequestOutput.outputs` has all. Output i
            draws with a seed of its own, split from the request's; output 0 draws with the request's own seed.
        min_tokens: tokens before which no EOS, stop token or stop string ends the output (0). EOS and stop tokens have
            no probability there.
        bad_words: texts that the output never spells: the token that would complete one (as it is, or behind a space)
            has no probability. The output alone is searched for these texts, token by token.
        allowed_token_ids: all other tokens have no probability; ``None`` allows all.
        logprobs: log-probabilities of each token and of so many most probable ones, 0..20; ``None``: none.
        logprobs_mode: ``"raw_logprobs"``: those of the model's own distribution, before any of the processors above;
            ``"processed_logprobs"``: those of the distribution that the token is drawn from, behind all of them; tokens
            that bans or cuts leave out are not listed. Greedy decoding draws nothing: its processed ones are those of
            the model's distribution behind bans, bias and penalties.
        prompt_logprobs: the same for the tokens of the prompt, but its first; always raw.
        truncate_prompt_tokens: keep so many last tokens of the prompt; -1: as many as leave room for ``max_tokens``.
        priority: requests with a lower number run first, and are preempted last; in -2**31..2**31 - 1 (0).
        cache_salt: a text of 1 to 1024 characters. Requests of one salt share cached prefixes, and a drafter's shared
            state, with each other alone: without the salt, nobody can tell by timing what its requests contain.
            ``None``: prefixes are shared with all requests without a salt.
        skip_special_tokens: leave special tokens out of the text.
        keep_special_tokens: special tokens whose text stays nonetheless: marks of tool calls, say.
        structured_outputs: form that the text must have, as `StructuredOutputs` or a mapping of its fields; tokens that
            would break the form have no probability, and the output ends where it is complete. ``None``: anything.
        trace: tell in `StreamEvent.rounds` what each round drafted and which drafts were accepted; it changes no token.

    Raises:
        ConfigError: a value out of range or of another type, by name; ``what``, ``got`` and ``why`` are attributes.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Sequence[str] | str | None = ()
    stop_token_ids: Sequence[int] | None = ()
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logit_bias: Mapping[int, float] | None = field(default_factory=dict)
    ignore_eos: bool | None = False
    include_stop: bool | None = False
    speculative: bool | None = True
    prediction: str | Sequence[int] | None = None
    n: int | None = 1
    min_tokens: int | None = 0
    bad_words: Sequence[str] | str | None = ()
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    logprobs_mode: str | None = RAW
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = 0
    cache_salt: str | None = None
    skip_special_tokens: bool | None = True
    keep_special_tokens: Sequence[int] | None = ()
    structured_outputs: StructuredOutputs | None = None
    trace: bool | None = False

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check(name, value))
            elif name in _UNSET:
                object.__setattr__(self, name, _UNSET[name])
        if self.logit_bias is None:
            object.__setattr__(self, "logit_bias", {})
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            raise _refuse("min_tokens", self.min_tokens, f"must be at most max_tokens = {self.max_tokens}")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping such as a request body; a name that cannot be honoured is refused.

        ``None`` is unset, the keys of ``logit_bias`` may be decimal text, as JSON has them, and ``prediction`` may be
        ``{"type": "content", "content": text}``.
        """
        known = cls.__dataclass_fields__
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"options is a {type(options).__name__}: must be a mapping of the fields of SamplingParams"
            )
        for name, value in options.items():
            if name not in known:
                raise _refuse(name, value, f"is not supported; supported are {', '.join(sorted(known))}")
        options = dict(options)
        bias = options.get("logit_bias")
        if isinstance(bias, Mapping):
            numbers = {int(k) if isinstance(k, str) and _DECIMAL.fullmatch(k) else k: v for k, v in bias.items()}
            if len(numbers) < len(bias):
                raise _refuse("logit_bias", bias, "names a token twice")
            options["logit_bias"] = numbers
        expected = options.get("prediction")
        if isinstance(expected, Mapping) and isinstance(expected.get("content"), str):  # form of OpenAI's requests
            options["prediction"] = expected["content"]
        return cls(**options)

    def resolved(self, defaults: SamplingParams | None = None) -> ResolvedSampling:
        """Decide every field: its own value, else that of ``defaults`` (a model's), else the neutral one."""
        chosen = dict(_NEUTRAL)
        for params in (defaults, self):
            if params is not None:
                chosen.update((name, value) for name in _NEUTRAL if (value := getattr(params, name)) is not None)
        rest = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _NEUTRAL}
        return ResolvedSampling(**chosen, **rest)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have, before anything is allocated for the request."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "keep_special_tokens"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise _refuse(name, token, f"the vocabulary has {vocab_size} tokens")
        if self.prediction is not None and not isinstance(self.prediction, str):
            token = max(self.prediction, default=0)
            if token >= vocab_size:
                raise _refuse("prediction", token, f"the vocabulary has {vocab_size} tokens")


@dataclass(frozen=True, kw_only=True)
class ResolvedSampling(SamplingParams):
    """Sampling parameters with no field left to the model: what a request runs with (`RequestOutput.params`)."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ignore_eos: bool = False
    include_stop: bool = False
    speculative: bool = True
    n: int = 1
    min_tokens: int = 0
    bad_words: Sequence[str] = ()
    logprobs_mode: str = RAW
    priority: int = 0
    skip_special_tokens: bool = True
    keep_special_tokens: Sequence[int] = ()
    trace: bool = False

    def __str__(self) -> str:
        """Return how tokens are picked, as an option for each field that is not neutral: ``temperature 0.6, top_p
        0.9``."""
        picking = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                   "frequency_penalty")  # fmt: skip
        told = [f"{name} {getattr(self, name):g}" for name in picking if getattr(self, name) != _NEUTRAL.get(name, 0.0)]
        if self.temperature == 0:
            told = ["greedy", *(t for t in told if "penalty" in t)]
        return ", ".join(told)


#: Fields that a model may decide, with their values where neither it nor the request does.
_NEUTRAL: dict[str, Any] = {
    "max_tokens": 128, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip
_UNSET: dict[str, Any] = {
    "stop": (), "stop_token_ids": (), "presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": False,
    "include_stop": False, "speculative": True, "n": 1, "min_tokens": 0, "bad_words": (), "priority": 0,
    "logprobs_mode": RAW, "skip_special_tokens": True, "keep_special_tokens": (), "trace": False,
}  # fmt: skip


def _logprobs_mode(name: str, value: object) -> str:
    if not isinstance(value, str) or value not in (RAW, PROCESSED):
        raise _refuse(name, value, f"must be {RAW!r} or {PROCESSED!r}")
    return value


def _temperature(name: str, value: object) -> float:
    number = _number(name, value)
    if number < 0:
        raise _refuse(name, number, "must be at least 0 (0 is greedy)")
    return number


def _top_k(name: str, value: object) -> int:
    return max(_integer(name, value, -1, _MAX_TOP_K), 0)


def _top_p(name: str, value: object) -> float:
    number = _number(name, value)
    if not 0 < number <= 1:
        raise _refuse(name, number, "must be in (0, 1]")
    return number


def _min_p(name: str, value: object) -> float:
    number = _number(name, value)
    if not 0 <= number <= 1:
        raise _refuse(name, number, "must be in [0, 1]")
    return number


def _repetition_penalty(name: str, value: object) -> float:
    number = _number(name, value)
    if not 1 / _MAX_REPETITION <= number <= _MAX_REPETITION:
        raise _refuse(name, number, "must be in 1e-6..1e6")
    return number


def _output_penalty(name: str, value: object) -> float:
    number = _number(name, value)
    _within(name, number, _MAX_PENALTY)
    return number


def _texts(name: str, value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _items(name, value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _refuse(name, value, "must be non-empty strings")
    return texts


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    return tuple(_integer(name, i, 0) for i in _items(name, value))


def _allowed_token_ids(name: str, value: object) -> tuple[int, ...]:
    ids = _token_ids(name, value)
    if not ids:
        raise _refuse(name, value, "must allow at least one token")
    return ids


def _logprobs(name: str, value: object) -> int:
    return _integer(name, value, 0, _MAX_LOGPROBS)


def _truncate(name: str, value: object) -> int:
    number = _integer(name, value, -1)
    if number == 0:
        raise _refuse(name, number, "must be at least 1, or -1 for as many as leave room")
    return number


def _logit_bias(name: str, value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _refuse(name, value, "must be a mapping from token ids to numbers")
    bias: dict[int, float] = {}
    for token, added in value.items():
        number = -math.inf if _plain(added) == -math.inf else _number(name, added)
        if number != -math.inf:
            _within(name, number, _MAX_BIAS, ", or -inf to forbid the token")
        bias[_integer(name, token, 0)] = number
    return bias


def _prediction(name: str, value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    return tuple(_integer(name, i, 0) for i in _items(name, value))


def _salt(name: str, value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_SALT:
        raise _refuse(name, value, f"must be a text of 1 to {_MAX_SALT} characters")
    return value


def _structured(name: str, value: object) -> StructuredOutputs:
    if isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, Mapping):
        raise _refuse(name, value, "must be StructuredOutputs, or a mapping of its fields")
    return StructuredOutputs.from_dict(value)


_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "max_tokens": lambda name, value: _integer(name, value, 1),
    "temperature": _temperature,
    "top_k": _top_k,
    "top_p": _top_p,
    "min_p": _min_p,
    "repetition_penalty": _repetition_penalty,
    "seed": lambda name, value: _integer(name, value, 0, _MAX_SEED),
    "stop": _texts,
    "stop_token_ids": _token_ids,
    "presence_penalty": _output_penalty,
    "frequency_penalty": _output_penalty,
    "logit_bias": _logit_bias,
    "ignore_eos": _flag,
    "include_stop": _flag,
    "speculative": _flag,
    "prediction": _prediction,
    "n": lambda name, value: _integer(name, value, 1, _MAX_N),
    "min_tokens": lambda name, value: _integer(name, value, 0),
    "bad_words": _texts,
    "allowed_token_ids": _allowed_token_ids,
    "logprobs": _logprobs,
    "logprobs_mode": _logprobs_mode,
    "prompt_logprobs": _logprobs,
    "truncate_prompt_tokens": _truncate,
    "priority": lambda name, value: _integer(name, value, -_MAX_PRIORITY, _MAX_PRIORITY - 1),
    "cache_salt": _salt,
    "skip_special_tokens": _flag,
    "keep_special_tokens": _token_ids,
    "structured_outputs": _structured,
    "trace": _flag,
}
