"""The checks of a chat's fields ``tools`` and ``tool_choice``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrs.serve.config import ServeConfig
from specrs.serve.errors import bad, shown
from specrs.serve.exchange import shallow
from specrs.tools import NAME

_DEEPEST = 56  # levels of a tool: of 64 that a template's values may have

Tool = Mapping[str, Any]


def tools(name: str, value: Any, config: ServeConfig) -> list[dict[str, Any]]:
    """OpenAI's list of functions."""
    if not isinstance(value, list):
        raise bad(f"{name} = {shown(value)}: must be a list of tools", name)
    if len(value) > config.max_tools:
        raise bad(f"{name} has {len(value)} tools: at most max_tools = {config.max_tools}", name)
    seen: set[str] = set()
    for i, one in enumerate(value):
        function = _function(f"{name}[{i}]", one, name)
        if function["name"] in seen:
            raise bad(f"{name}[{i}].function.name = {function['name']!r}: two tools have it", name)
        seen.add(function["name"])
    if not shallow(value, _DEEPEST):
        raise bad(f"{name}: deeper than {_DEEPEST} levels", name)
    size = len(json.dumps(value, ensure_ascii=False).encode())
    if size > config.max_schema_bytes:
        raise bad(f"{name} have {size} bytes: at most max_schema_bytes = {config.max_schema_bytes}", name)
    return value


def _function(where: str, tool: Any, param: str) -> Tool:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise bad(f"{where}.type = {shown(kind)}: must be 'function'", param)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad(f"{where}.function = {shown(function)}: must be an object with a name", param)
    where += ".function"
    called = function.get("name")
    if not isinstance(called, str) or not NAME.fullmatch(called):
        raise bad(f"{where}.name = {shown(called)}: must be 1 to 64 letters, digits, '_' and '-'", param)
    for key, kind, what in (("description", str, "a text"), ("strict", bool, "true or false"),
                            ("parameters", dict, "a JSON schema")):  # fmt: skip
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise bad(f"{where}.{key} = {shown(function[key])}: must be {what}", param)
    schema = function.get("parameters") or {}
    if schema.get("type", "object") != "object":
        raise bad(f"{where}.parameters.type = {shown(schema['type'])}: must be 'object'", param)
    return function


@dataclass(frozen=True)
class Choice:
    """What ``tool_choice`` says.

    Attributes:
        mode: ``"none"``, ``"auto"``, ``"required"``, or ``"named"``: one call, of the only tool.
        names: of tools that may be called; ``None``: all of them.
    """

    mode: str
    names: tuple[str, ...] | None = None


def tool_choice(name: str, value: Any, config: ServeConfig) -> Choice:
    """A word, one tool, or several that are allowed."""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return Choice(value)
    if isinstance(value, dict) and value.get("type") == "function":
        return Choice("named", (_named(name, value),))
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        allowed = value.get("allowed_tools")
        mode, listed = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
        if mode not in ("auto", "required"):
            raise bad(f"{name}.allowed_tools.mode = {shown(mode)}: must be 'auto' or 'required'", name)
        if not isinstance(listed, list) or not listed or len(listed) > config.max_tools:
            raise bad(f"{name}.allowed_tools.tools: must be a list of 1 to max_tools = {config.max_tools} tools", name)
        return Choice(mode, tuple(_named(f"{name}.allowed_tools.tools[{i}]", one) for i, one in enumerate(listed)))
    raise bad(f"{name} = {shown(value)}: must be 'none', 'auto', 'required', "
              'or {"type": "function", "function": {"name": ...}}', name)  # fmt: skip


def _named(where: str, tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    called = function.get("name") if isinstance(function, dict) else None
    if not isinstance(called, str):
        raise bad(f"{where}.function.name = {shown(called)}: must be the name of a tool", "tool_choice")
    return called
