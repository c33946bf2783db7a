"""The fields by which a request asks for a form: OpenAI's ``response_format``, and vLLM's for the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specrs.grammar import GrammarError, StructuredOutputs
from specrs.serve.config import ServeConfig
from specrs.serve.errors import RequestError, bad, shown

#: Fields that ask for a form; a request has one of them.
FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_FREE = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")


def response_format(name: str, value: Any, config: ServeConfig) -> StructuredOutputs | None:
    """OpenAI's, whose ``type`` is ``text``, ``json_object``, or ``json_schema`` with ``json_schema.schema``."""
    if not isinstance(value, dict):
        raise bad(f"{name} = {shown(value)}: must be an object with a type", name)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _made(name, json_object=True)
    if kind != "json_schema":
        raise bad(f"{name}.type = {shown(kind)}: must be 'text', 'json_object' or 'json_schema'", name)
    told = value.get("json_schema")
    if not isinstance(told, dict) or not isinstance(told.get("schema"), dict):
        raise bad(f"{name}.json_schema.schema: is needed, an object", name)
    return schema(name, told["schema"], config)


def schema(name: str, value: Any, config: ServeConfig) -> StructuredOutputs:
    """A JSON schema, as an object or its text."""
    if not isinstance(value, (dict, str)):
        raise bad(f"{name} = {shown(value)}: must be a JSON schema", name)
    made = _made(name, json=value)
    _bounded(name, made.schema(), config)
    return made


def structured_outputs(name: str, value: Any, config: ServeConfig) -> StructuredOutputs:
    """Check vLLM's field: one of ``json``, ``json_object``, ``regex``, ``choice``, ``grammar``, and how JSON is
    written."""
    if not isinstance(value, dict):
        raise bad(f"{name} = {shown(value)}: must be an object", name)
    options = {key: one for key, one in value.items() if one is not None and one is not False}
    spaces = options.pop("whitespace_pattern", None)
    if options.pop("disable_any_whitespace", None):
        spaces = ""
    for key in _FREE:
        if key in options:
            raise bad(f"{name}.{key}: is not implemented", name, "unsupported_parameter")
    if spaces is not None:
        options["whitespace"] = spaces
    try:
        made = StructuredOutputs.from_dict(options)
    except GrammarError as error:
        raise refused(error, name) from None
    _bounded(name, made.schema() if made.kind in ("json", "json_object") else str(getattr(made, made.kind)), config)
    return made


def guided(kind: str) -> Any:
    """The check of one of vLLM's former fields, ``guided_*``."""

    def check(name: str, value: Any, config: ServeConfig) -> StructuredOutputs:
        if kind == "json":
            return schema(name, value, config)
        made = _made(name, **{kind: value})
        _bounded(name, str(getattr(made, kind)), config)
        return made

    return check


def wanted(fields: Mapping[str, Any]) -> tuple[str | None, StructuredOutputs | None]:
    """The field that says a request's form, and the form; checked before.

    Raises:
        RequestError: several fields ask for a form.
    """
    given = [name for name in FIELDS if fields.get(name) is not None]
    if len(given) > 1:
        raise bad(f"{given[0]} and {given[1]}: one of them may say what the output looks like", given[1])
    spaces = fields.get("guided_whitespace_pattern")
    if not given:
        if spaces is not None:
            raise bad("guided_whitespace_pattern: needs guided_json", "guided_whitespace_pattern")
        return None, None
    form: StructuredOutputs = fields[given[0]]
    if spaces is not None:
        try:
            form = replace(form, whitespace=spaces)
        except GrammarError as error:
            raise refused(error, "guided_whitespace_pattern") from None
    return given[0], form


def refused(error: GrammarError, name: str) -> RequestError:
    """A form that cannot be had, as an error of the field that asks for it."""
    why = str(error).removeprefix("prompt: ").removeprefix("StructuredOutputs")
    return bad(f"{name}{why}" if why.startswith((".", " ")) else f"{name}: {why}", name, "invalid_grammar")


def _made(name: str, **options: Any) -> StructuredOutputs:
    try:
        return StructuredOutputs(**options)
    except GrammarError as error:
        raise refused(error, name) from None


def _bounded(name: str, text: str, config: ServeConfig) -> None:
    size = len(text.encode())
    if size > config.max_schema_bytes:
        raise bad(f"{name} has {size} bytes: at most max_schema_bytes = {config.max_schema_bytes}", name)
