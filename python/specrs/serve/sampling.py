"""Makes `specrs.SamplingParams` from a request's fields.

A field that a request leaves out has the value of the model's ``generation_config.json``, and where that has none,
OpenAI's: temperature 1, top_p 1; 16 tokens of a completion, the rest of the context in a chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrs._specrs import ConfigError
from specrs.sampling_params import RAW, SamplingParams
from specrs.serve import forms
from specrs.serve.errors import RequestError, bad
from specrs.serve.fields import CHAT, COMPLETIONS, ROUNDS

#: Values that OpenAI's servers use, or, where they know no such field, values without effect.
_NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_COMPLETION_TOKENS = 16
#: Fields that `SamplingParams` has too, with their names there.
_SAME: dict[str, str] = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "seed": "seed", "stop": "stop", "n": "n",
    "stop_token_ids": "stop_token_ids", "presence_penalty": "presence_penalty", "logit_bias": "logit_bias",
    "frequency_penalty": "frequency_penalty", "ignore_eos": "ignore_eos", "min_tokens": "min_tokens",
    "include_stop_str_in_output": "include_stop", "speculative": "speculative", "prediction": "prediction",
    "bad_words": "bad_words", "allowed_token_ids": "allowed_token_ids", "priority": "priority",
    "skip_special_tokens": "skip_special_tokens", "prompt_logprobs": "prompt_logprobs",
    "logprobs_mode": "logprobs_mode", "cache_salt": "cache_salt",
}  # fmt: skip
_CALLED = {ours: theirs for theirs, ours in _SAME.items()}


@dataclass(frozen=True)
class Wish:
    """The generation that a request wants.

    Attributes:
        params: parameters for the engine, whose ``max_tokens`` are at least 1, and end with the context.
        asked: ``max_tokens`` as the request has it; ``None``: not stated.
        keep: last tokens of a prompt that are kept; ``None``: all.
        what: the field that has the prompt.
        form: the field that says what the output looks like; ``None``: none does.
        limit: the field that says how many tokens.
    """

    params: SamplingParams
    asked: int | None
    keep: int | None
    what: str
    form: str | None = None
    limit: str = "max_tokens"

    @property
    def dropped(self) -> int:
        """Number of tokens that the engine generates and nobody asked for: it gives at least one."""
        return 1 if self.asked == 0 else 0

    def kept(self, ids: list[int]) -> list[int]:
        """Return the tokens of a prompt that are kept."""
        return ids if self.keep is None or len(ids) <= self.keep else ids[-self.keep :]

    def checked(self, prompt_tokens: int, context: int) -> None:
        """Refuse what does not fit the context, where the request itself says how much it wants.

        Raises:
            RequestError: the prompt is too long; the message has both numbers.
        """
        if prompt_tokens >= context:
            raise bad(
                f"the prompt has {prompt_tokens} tokens, and the context of this model is {context}: nothing is left "
                "to generate", self.what, "context_length_exceeded",
            )  # fmt: skip
        if self.asked is not None and prompt_tokens + self.asked > context:
            raise bad(
                f"the prompt has {prompt_tokens} tokens and {self.limit} = {self.asked} are wanted: "
                f"{prompt_tokens + self.asked}, and the context of this model is {context}",
                self.limit, "context_length_exceeded",
            )  # fmt: skip


def wish(endpoint: str, fields: Mapping[str, Any], defaults: SamplingParams, context: int) -> Wish:
    """Return what a request wants, by its fields and what the model's authors state.

    Raises:
        RequestError: 400, by field.
    """
    options = dict(_NEUTRAL)
    options.update((name, value) for name in _NEUTRAL if (value := getattr(defaults, name)) is not None)
    options.update((ours, fields[theirs]) for theirs, ours in _SAME.items() if theirs in fields)
    asked = fields.get("max_completion_tokens", fields.get("max_tokens"))
    most = defaults.max_tokens if asked is None else asked
    if most is None and endpoint == COMPLETIONS:
        most = _COMPLETION_TOKENS
    options["max_tokens"] = min(max(context if most is None else most, 1), context)
    if asked is None or asked == 0:  # if the request says both, they must agree; a default gives way
        options["min_tokens"] = min(options.get("min_tokens", 0), options["max_tokens"])
    _scores(endpoint, fields, options)
    form, options["structured_outputs"] = forms.wanted(fields)
    options["trace"] = _traced(fields)
    keep = _keep(fields, asked, context)
    return Wish(params(options), asked, keep, "prompt" if endpoint == COMPLETIONS else "messages", form)


def _scores(endpoint: str, fields: Mapping[str, Any], options: dict[str, Any]) -> None:
    """Log-probabilities: a number in completions, a flag and a number in chat."""
    if endpoint == COMPLETIONS:
        options["logprobs"] = fields.get("logprobs")
        if fields.get("echo") and "logprobs" in fields:
            options["prompt_logprobs"] = max(fields["logprobs"], fields.get("prompt_logprobs", 0))
        most = max(fields.get("best_of", 0), fields.get("n", 1))
        if "best_of" in fields:
            if fields["best_of"] < fields.get("n", 1):
                raise bad(f"best_of = {fields['best_of']}: must be at least n = {fields['n']}", "best_of")
            if fields.get("stream") and most > fields.get("n", 1):
                raise bad("best_of: which outputs are best is known at their ends; not with stream", "best_of")
            options["n"] = most
            if most > fields.get("n", 1) and options["logprobs"] is None:
                options["logprobs"], options["logprobs_mode"] = (
                    0,
                    RAW,
                )  # not shown: outputs are ranked by the model's own scores
    elif fields.get("logprobs"):
        options["logprobs"] = fields.get("top_logprobs", 0)
    elif fields.get("top_logprobs"):
        raise bad("top_logprobs: needs logprobs = true", "top_logprobs")
    if fields.get("stream") and "prompt_logprobs" in fields:
        raise bad("prompt_logprobs: not with stream", "prompt_logprobs")


def _traced(fields: Mapping[str, Any]) -> bool:
    """Return whether the request wants to see its rounds: in a stream, whose client reads them as they come."""
    wanted = bool(fields.get("return_spec_stats") == ROUNDS)
    if wanted and not fields.get("stream"):
        raise bad(f'return_spec_stats = "{ROUNDS}": needs stream = true', "return_spec_stats")
    if wanted and fields.get("echo") and "logprobs" in fields:
        raise bad(f'return_spec_stats = "{ROUNDS}": not with echo and logprobs, which come whole', "return_spec_stats")
    return wanted


def _keep(fields: Mapping[str, Any], asked: int | None, context: int) -> int | None:
    """Tokens of the prompt: -1 leaves room for ``max_tokens`` where it is stated, else for one token."""
    keep: int | None = fields.get("truncate_prompt_tokens")
    if keep == 0:
        raise bad("truncate_prompt_tokens = 0: must be at least 1, or -1", "truncate_prompt_tokens")
    if keep is None or keep > 0:
        return keep
    room = context - (asked or 1)
    if room < 1:
        raise bad(f"max_tokens = {asked}: leaves no room for a prompt in the context of {context}", "max_tokens")
    return room


def params(options: Mapping[str, Any]) -> SamplingParams:
    """Parameters, whose errors name the request's field."""
    try:
        return SamplingParams.from_dict(options)
    except ConfigError as error:
        raise renamed(error) from None


def renamed(error: ConfigError) -> RequestError:
    """An error of `SamplingParams` as one of the request's field."""
    name = getattr(error, "what", None)
    message = str(error).removeprefix("params: ").removeprefix("SamplingParams.")
    if not isinstance(name, str):
        return bad(message)
    field = _CALLED.get(name, name)
    return bad(field + message.removeprefix(name), field)


__all__ = ["CHAT", "COMPLETIONS", "Wish", "params", "renamed", "wish"]
