"""The checks of fields whose form is the Responses API's own."""

from __future__ import annotations

import re
from typing import Any

from specrs.grammar import StructuredOutputs
from specrs.serve import forms
from specrs.serve.config import ServeConfig
from specrs.serve.errors import bad, shown

LOGPROBS = "message.output_text.logprobs"
#: Parts that a response may include beside its usual ones. All but one concern tools and images, which there are not,
#: or reasoning that a client may not see: here it is told in the clear.
_INCLUDED = (
    LOGPROBS, "reasoning.encrypted_content", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "file_search_call.results", "message.input_image.image_url", "web_search_call.action.sources",
    "web_search_call.results",
)  # fmt: skip
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_PAIRS, _KEY, _VALUE = 16, 64, 512  # OpenAI's limits of metadata: pairs, and characters


def text(name: str, value: Any, config: ServeConfig) -> StructuredOutputs | None:
    """``{"format": {"type": "text" | "json_object" | "json_schema", ...}}``."""
    _known(name, value, ("format", "verbosity"))
    if value.get("verbosity") not in (None, "medium"):
        raise bad(f"{name}.verbosity = {shown(value['verbosity'])}: no template reads it", name,
                  "unsupported_parameter")  # fmt: skip
    form = value.get("format")
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else form
    if kind not in ("text", "json_object", "json_schema"):
        raise bad(f"{name}.format.type = {shown(kind)}: must be 'text', 'json_object' or 'json_schema'", name)
    if kind == "json_schema":
        if not isinstance(form.get("name"), str) or not _NAME.fullmatch(form["name"]):
            raise bad(f"{name}.format.name = {shown(form.get('name'))}: must be 1 to 64 letters, digits, '_' and '-'",
                      name)  # fmt: skip
        if not isinstance(form.get("schema"), dict):
            raise bad(f"{name}.format.schema = {shown(form.get('schema'))}: must be a JSON schema", name)
    return forms.response_format(name, {"type": kind, "json_schema": form}, config)


def reasoning(name: str, value: Any, config: ServeConfig) -> str | None:
    """The effort."""
    _known(name, value, ("effort", "summary", "generate_summary", "context", "mode"))
    for key, plain in (("summary", "auto"), ("generate_summary", "auto"), ("context", "auto"), ("mode", "standard")):
        if value.get(key) not in (None, plain):
            raise bad(f"{name}.{key} = {shown(value[key])}: is not implemented", name, "unsupported_parameter")
    effort = value.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise bad(f"{name}.effort = {shown(effort)}: must be a text", name)
    return effort


def include(name: str, value: Any, config: ServeConfig) -> list[str]:
    if not isinstance(value, list):
        raise bad(f"{name} = {shown(value)}: must be a list", name)
    for one in value:
        if one not in _INCLUDED:
            raise bad(f"{name}: {shown(one)} is none of {', '.join(_INCLUDED)}", name)
    return value


def truncation(name: str, value: Any, config: ServeConfig) -> str:
    if value not in ("auto", "disabled"):
        raise bad(f"{name} = {shown(value)}: must be 'auto' or 'disabled'", name)
    return str(value)


def metadata(name: str, value: Any, config: ServeConfig) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise bad(f"{name} = {shown(value)}: must be an object of texts", name)
    if len(value) > _PAIRS or any(len(key) > _KEY or len(one) > _VALUE for key, one in value.items()):
        raise bad(f"{name}: at most {_PAIRS} pairs, of {_KEY} and {_VALUE} characters", name)
    return value


def _known(name: str, value: Any, keys: tuple[str, ...]) -> None:
    """Refuse a value that is no object, or has other keys: whoever sends one expects something of it."""
    if not isinstance(value, dict):
        raise bad(f"{name} = {shown(value)}: must be an object", name)
    for key in value:
        if key not in keys:
            raise bad(f"{name}: {shown(key)} is none of {', '.join(keys)}", name, "unknown_parameter")
