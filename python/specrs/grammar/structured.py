"""The form that a request's output must have."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from specrs.grammar.errors import GrammarError, refusal

MAX_TEXT = 1 << 20
"""Most bytes of a grammar, and of all choices together."""
MAX_CHOICES = 4096
_MAX_MARK = 256  # tokens
_SHOWN = 60  # characters of a value that an error repeats
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


def refuse(name: str, value: object, why: str) -> GrammarError:
    """The error of a field, which repeats no more than the beginning of its value."""
    text = repr(value)
    return refusal(f"StructuredOutputs.{name}", text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...", why)


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """Form that the text of an output must have. Exactly one of the first five fields says it.

    Attributes:
        json: a JSON schema, as a mapping, as its JSON text, or ``True`` for any value. What the schema has that cannot
            be enforced is refused by name.
        json_object: ``True``: any JSON object.
        regex: a regular expression that the whole text matches (Rust's syntax; no look-around, no back references).
        choice: texts, one of which the output is.
        grammar: a context-free grammar in Lark's syntax, as llguidance reads it; its rule ``start`` is the text.
        whitespace: a regular expression, for ``json`` and ``json_object``, of the text that may stand between two
            tokens of JSON; ``""`` for nothing. ``None``: a space, or a line break and up to 40 characters that indent
            the next line.
        start_after: the text, or the token ids, behind which the output must look so; anything may stand before. A
            reasoning model's end of thinking is one. The output does not end before it.

    Raises:
        GrammarError: a `ConfigError`: a field of another type, none or several of the five, more than fits.
    """

    json: Mapping[str, Any] | str | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    whitespace: str | None = None
    start_after: str | Sequence[int] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                object.__setattr__(self, field.name, _CHECKS[field.name](field.name, value))
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            told = ", ".join(given) if given else "nothing"
            raise refusal("StructuredOutputs", told, f"must have exactly one of {', '.join(_KINDS)}")
        if self.whitespace is not None and self.kind not in ("json", "json_object"):
            raise refuse("whitespace", self.whitespace, f"is of json and json_object; this is {self.kind}")

    @property
    def kind(self) -> str:
        """Name of the one field that is given."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> StructuredOutputs:
        """Build from a mapping such as a part of a request's body; a name that cannot be honoured is refused."""
        known = [field.name for field in fields(cls)]
        for name, value in options.items():
            if name not in known:
                raise refuse(str(name), value, f"is not supported; supported are {', '.join(known)}")
        return cls(**options)

    def schema(self) -> str:
        """The JSON schema of ``json`` and ``json_object`` as text."""
        if self.json_object:
            return '{"type":"object"}'
        if isinstance(self.json, str):
            return self.json
        assert self.json is not None
        return _dumps("json", self.json)

    def __hash__(self) -> int:
        return hash((self.kind, self.whitespace))  # a schema is a mapping; equality tells the rest


def _dumps(name: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise refusal(f"StructuredOutputs.{name}", "a schema", "is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise refusal(f"StructuredOutputs.{name}", "a schema", f"is no JSON: {error}") from None


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise refuse(name, value, "must be a text")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise refuse(name, value, f"not encodable as UTF-8 at character {error.start}: {error.reason}") from None
    if size > MAX_TEXT:
        raise refuse(name, value, f"has {size} bytes; at most {MAX_TEXT}")
    return value


def _json(name: str, value: object) -> Mapping[str, Any] | str | bool:
    if isinstance(value, bool):
        if not value:
            raise refuse(name, value, "allows nothing: give a schema, or True for any value")
        return value
    if isinstance(value, str):
        text = _text(name, value)
        try:
            found = json.loads(text)
        except RecursionError:
            raise refusal(f"StructuredOutputs.{name}", "a schema", "is nested too deeply") from None
        except ValueError as error:
            raise refuse(name, value, f"is no JSON: {error}") from None
        if not isinstance(found, (dict, bool)) or found is False:
            raise refuse(name, value, "must be a JSON object, the schema")
        return text
    if not isinstance(value, Mapping):
        raise refuse(name, value, "must be a JSON schema: a mapping, or its JSON text")
    # A copy, so that nobody can change it behind the request's back.
    copied = json.loads(_text_of_schema(name, dict(value)))
    assert isinstance(copied, dict)
    return copied


def _text_of_schema(name: str, value: dict[Any, Any]) -> str:
    text = _dumps(name, value)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise refusal(f"StructuredOutputs.{name}", "a schema", f"not encodable as UTF-8: {error.reason}") from None
    if size > MAX_TEXT:
        raise refusal(f"StructuredOutputs.{name}", "a schema", f"has {size} bytes; at most {MAX_TEXT}")
    return text


def _true(name: str, value: object) -> bool:
    if value is not True:
        raise refuse(name, value, "must be True, or left out")
    return True


def _choice(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise refuse(name, value, "must be a sequence of texts")
    texts = tuple(value)
    if not texts or len(texts) > MAX_CHOICES:
        raise refuse(name, value, f"has {len(texts)} texts; at least 1 and at most {MAX_CHOICES}")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise refuse(name, value, "must be non-empty texts")
    _text(name, "".join(texts))
    return texts


def _start_after(name: str, value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        if not value:
            raise refuse(name, value, "must not be empty")
        return _text(name, value)
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise refuse(name, value, "must be a text or a sequence of token ids")
    ids = []
    for token in value:
        try:
            if isinstance(token, bool):
                raise TypeError
            ids.append(operator.index(token))
        except TypeError:
            raise refuse(name, value, "must be a text or a sequence of token ids") from None
        if ids[-1] < 0:
            raise refuse(name, value, f"has the token {ids[-1]}; at least 0")
    if not 1 <= len(ids) <= _MAX_MARK:
        raise refuse(name, value, f"has {len(ids)} tokens; at least 1 and at most {_MAX_MARK}")
    return tuple(ids)


_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "json": _json,
    "json_object": _true,
    "regex": _text,
    "choice": _choice,
    "grammar": _text,
    "whitespace": _text,
    "start_after": _start_after,
}
