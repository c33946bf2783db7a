"""The checks of the fields ``tools`` and ``tool_choice``, of a chat and of a response; in a response a tool is its
function."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specrs.serve.config import ServeConfig
from specrs.serve.errors import bad, shown
from specrs.serve.exchange import shallow
from specrs.tools import NAME

_DEEPEST = 56  # levels of a tool: of 64 that a template's values may have

Tool = Mapping[str, Any]


def tools(name: str, value: Any, config: ServeConfig) -> list[dict[str, Any]]:
    """OpenAI's list of functions, as a chat has it."""
    return listed(name, value, config, _of_chat)


def tools_of_response(name: str, value: Any, config: ServeConfig) -> list[dict[str, Any]]:
    """The same, as a response has it; given back as a chat has it."""
    return listed(name, value, config, _of_response)


def listed(
    name: str, value: Any, config: ServeConfig, read: Callable[[str, Any, str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """A list of tools that is neither too long nor too deep. read: checks a tool, and gives it as a chat has it."""
    if not isinstance(value, list):
        raise bad(f"{name} = {shown(value)}: must be a list of tools", name)
    if len(value) > config.max_tools:
        raise bad(f"{name} has {len(value)} tools: at most max_tools = {config.max_tools}", name)
    seen: set[str] = set()
    found = []
    for i, one in enumerate(value):
        tool = read(f"{name}[{i}]", one, name)
        called = tool["function"]["name"]
        if called in seen:
            raise bad(f"{name}[{i}]: another tool is called {called!r}, too", name)
        seen.add(called)
        found.append(tool)
    if not shallow(value, _DEEPEST):
        raise bad(f"{name}: deeper than {_DEEPEST} levels", name)
    size = len(json.dumps(value, ensure_ascii=False).encode())
    if size > config.max_schema_bytes:
        raise bad(f"{name} have {size} bytes: at most max_schema_bytes = {config.max_schema_bytes}", name)
    return found


def _of_chat(where: str, given: Any, param: str) -> dict[str, Any]:
    tool = _typed(where, given, param)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad(f"{where}.function = {shown(function)}: must be an object with a name", param)
    _check(f"{where}.function", function, param)
    return tool


#: Keys of a response's tool beside those of its function, and the values without effect.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "async": (False,), "defer_loading": (False,), "allowed_callers": (["direct"],),
}  # fmt: skip


def _of_response(where: str, tool: Any, param: str) -> dict[str, Any]:
    function = {key: one for key, one in _typed(where, tool, param).items() if key != "type" and one is not None}
    for key, plain in _PLAIN.items():
        if key in function and function.pop(key) not in plain:
            raise bad(f"{where}.{key}: is not implemented", param, "unsupported_parameter")
    _check(where, function, param)
    return {"type": "function", "function": function}


def _typed(where: str, tool: Any, param: str) -> dict[str, Any]:
    if isinstance(tool, dict) and tool.get("type") == "function":
        return dict(tool)
    kind = tool.get("type") if isinstance(tool, dict) else tool
    raise bad(f"{where}.type = {shown(kind)}: must be 'function'", param)


def _check(where: str, function: Tool, param: str) -> None:
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


@dataclass(frozen=True)
class Choice:
    """Meaning of ``tool_choice``.

    Attributes:
        mode: ``"none"``, ``"auto"``, ``"required"``, or ``"named"``: one call, of the only tool.
        names: names of the tools that may be called; ``None``: all of them.
    """

    mode: str
    names: tuple[str, ...] | None = None


def tool_choice(name: str, value: Any, config: ServeConfig) -> Choice:
    """Read a word, one tool, or several that are allowed."""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return Choice(value)
    if isinstance(value, dict) and value.get("type") == "function":
        return Choice("named", (_named(name, value),))
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed(f"{name}.allowed_tools", value.get("allowed_tools"), config, _named)
    raise bad(f"{name} = {shown(value)}: must be 'none', 'auto', 'required', "
              'or {"type": "function", "function": {"name": ...}}', name)  # fmt: skip


def tool_choice_of_response(name: str, value: Any, config: ServeConfig) -> Choice:
    """The same, as a response has it."""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return Choice(value)
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function":
        return Choice("named", (_named_flat(name, value),))
    if kind == "allowed_tools":
        return _allowed(name, value, config, _named_flat)
    raise bad(f"{name} = {shown(value if kind is None else kind)}: must be 'none', 'auto', 'required', "
              '{"type": "function", "name": ...} or allowed_tools; there are no built-in tools', name)  # fmt: skip


def _allowed(where: str, allowed: Any, config: ServeConfig, named: Callable[[str, Any], str]) -> Choice:
    mode, tools = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    if mode not in ("auto", "required"):
        raise bad(f"{where}.mode = {shown(mode)}: must be 'auto' or 'required'", "tool_choice")
    if not isinstance(tools, list) or not tools or len(tools) > config.max_tools:
        raise bad(f"{where}.tools: must be a list of 1 to max_tools = {config.max_tools} tools", "tool_choice")
    return Choice(mode, tuple(named(f"{where}.tools[{i}]", one) for i, one in enumerate(tools)))


def _named(where: str, tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return _name(f"{where}.function", function)


def _named_flat(where: str, tool: Any) -> str:
    return _name(where, tool if isinstance(tool, dict) and tool.get("type") == "function" else None)


def _name(where: str, function: Any) -> str:
    called = function.get("name") if isinstance(function, dict) else None
    if not isinstance(called, str):
        raise bad(f"{where}.name = {shown(called)}: must be the name of a tool", "tool_choice")
    return called
