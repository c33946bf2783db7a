"""Answers to a request that fails: OpenAI's body, and a status by which its clients decide whether to try again.

The ``openai`` client tries 408, 409, 429 and those from 500 on again, and honours ``Retry-After``: so a request that
can never succeed gets another one. Messages name fields, values and limits; they have no paths, and no prompts.
"""

from __future__ import annotations

import math
from typing import Any

from specrs._specrs import ConfigError, GrammarFailedError, NonFiniteError, PoolExhaustedError
from specrs.chat import ChatLimitError, ChatTemplateError
from specrs.engine import EngineClosedError, EngineFailedError, EngineOverloadedError, StepFailedError

_EDITED = "after logit_bias and penalties"  # the core's name for logits that were sound as the model gave them
_MOST = 600  # characters of a message: the value in it may be the caller's, and long


class RequestError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: status of HTTP.
        message, type, param, code: fields of OpenAI's body of the same names.
        retry_after: seconds, where trying again may help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, shortened(message), type, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The answer's body, for JSON."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers beside those that every response has."""
        if self.retry_after is None:
            return []
        return [(b"retry-after", str(max(1, math.ceil(self.retry_after))).encode())]


def bad(message: str, param: str | None = None, code: str | None = None) -> RequestError:
    """A request that is wrong."""
    return RequestError(400, message, param=param, code=code)


def shown(value: object, most: int = 80) -> str:
    """Return a request's value for a message: its kind, and its beginning."""
    if isinstance(value, str):
        return repr(value) if len(value) <= most else f"{value[:most]!r}... of {len(value)} characters"
    if isinstance(value, (list, dict)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    try:
        return shortened(repr(value), most)
    except ValueError:  # an integer of thousands of digits
        return "a number of very many digits"


def shortened(text: str, most: int = _MOST) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def of(error: BaseException, retry_after: float, param: str | None = None) -> RequestError:
    """Return an error of the engine in the form for the client that asked.

    Args:
        error: any error; an unforeseen one is told as a fault of the server, without its text.
        retry_after: seconds, where trying again may help.
        param: name of the request's field, where the error does not say.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineOverloadedError):
        return RequestError(
            429, str(error), type="rate_limit_error", code="engine_overloaded", retry_after=retry_after
        )  # fmt: skip
    if isinstance(error, (EngineFailedError, EngineClosedError)):
        message = "this server's engine cannot go on" if isinstance(error, EngineFailedError) else "shutting down"
        return RequestError(503, message, type="server_error", code="engine_unavailable", retry_after=retry_after)
    if isinstance(error, ChatLimitError):
        return bad(str(error), "messages", "template_limit")
    if isinstance(error, ChatTemplateError):
        told = _without_path(str(error))
        name = "chat_template_kwargs" if told.startswith("chat_template_kwargs") else "messages"
        return bad(told, name, "template_error")
    if isinstance(error, PoolExhaustedError):
        return bad(str(error), "max_tokens", "context_length_exceeded")
    if isinstance(error, ConfigError):
        return bad(str(error), _named(error) or param)
    if isinstance(error, StepFailedError):
        return RequestError(500, "a pass of this request failed", type="server_error", code="step_failed")
    if isinstance(error, GrammarFailedError):
        return bad(f"the output cannot go on in the form that is asked for: {error.why}", param, "grammar_failed")
    if isinstance(error, NonFiniteError):
        return _without_scores(error)
    return RequestError(500, "the server met a fault of its own", type="server_error", code="internal_error")


def _without_scores(error: NonFiniteError) -> RequestError:
    """The model gave NaN, which is its fault; or what the request bans leaves no token, which is the request's."""
    if error.what.endswith(_EDITED):
        return bad("logit_bias, bad_words and allowed_token_ids leave no token", "logit_bias", "no_token_left")
    return RequestError(500, "the model's scores are not finite", type="server_error", code="non_finite_scores")


def _named(error: ConfigError) -> str | None:
    """The field of `SamplingParams` that an error of its is about."""
    what = getattr(error, "what", None)
    if not isinstance(what, str):
        return None
    return _FIELDS.get(what, what)


def _without_path(message: str) -> str:
    """A message without the model's directory at its head."""
    head, mark, rest = message.partition(": ")
    return rest if mark and ("/" in head or "\\" in head) else message


#: Fields of `SamplingParams` that requests call otherwise.
_FIELDS = {"include_stop": "include_stop_str_in_output"}
