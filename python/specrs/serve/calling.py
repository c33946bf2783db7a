"""Tool calls and reasoning of a chat: what a request says of them, and how its answers are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specrs._specrs import ConfigError
from specrs.grammar import GrammarError
from specrs.serve import forms
from specrs.serve.config import ServeConfig
from specrs.serve.errors import bad, shown
from specrs.serve.exchange import shallow
from specrs.tools import (
    NAME,
    ArgumentsDelta,
    ContentDelta,
    Delta,
    Dialect,
    ReasoningParser,
    Thinking,
    ToolCallStart,
    behind_thinking,
    structured_outputs_for,
    tool_parser,
)

if TYPE_CHECKING:
    from specrs.serve.sampling import Wish
    from specrs.serve.service import Service

_DEEPEST = 56  # levels of a tool: of 64 that a template's values may have

Tool = Mapping[str, Any]


# -- fields -------------------------------------------------------------------------------------------------------


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


# -- answers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manner:
    """How the answers to a request are read.

    Attributes:
        dialect: of the template.
        tools: names that calls may have; none: there are no calls.
        parallel: whether all calls are told.
        named: whether the request asks for one tool: then its end is no ``"tool_calls"``, as OpenAI has it.
        certain: whether an answer is of calls alone.
        thinking: marks of reasoning; ``None``: there is none.
        include: whether reasoning is told.
    """

    dialect: Dialect = field(default_factory=Dialect)
    tools: tuple[str, ...] = ()
    parallel: bool = True
    named: bool = False
    certain: bool = False
    thinking: Thinking | None = None
    include: bool = True

    def voice(self) -> Speaking | None:
        """Of one choice; ``None``: all of its text is content."""
        return Speaking(self) if self.tools or self.thinking else None


def chosen(fields: Mapping[str, Any]) -> tuple[Choice, Sequence[Tool]]:
    """What a request says of its tools, and those that may be called.

    Raises:
        RequestError: the choice is none.
    """
    given: Sequence[Tool] = fields.get("tools", ())
    choice: Choice = fields.get("tool_choice", Choice("auto" if given else "none"))
    if not given:
        if choice.mode in ("required", "named") or choice.names:
            raise bad("tool_choice: needs tools", "tool_choice")
        return Choice("none"), ()
    if choice.names is not None:
        known = {tool["function"]["name"] for tool in given}
        for name in choice.names:
            if name not in known:
                raise bad(f"tool_choice: no tool is called {shown(name)}", "tool_choice")
        given = [tool for tool in given if tool["function"]["name"] in choice.names]
    return choice, () if choice.mode == "none" else given


def manner(service: Service, fields: Mapping[str, Any], prompt: str, wish: Wish) -> tuple[Manner, Wish]:
    """How answers are read, and what the engine is told so that they can be.

    Args:
        prompt: the template's text.
        wish: of the request.

    Raises:
        RequestError: the model has no tool calls that this server reads; a form that cannot be with tools.
    """
    choice, callable_tools = chosen(fields)
    config = service.config
    own = fields.get("chat_template")
    source = (
        own if own is not None else service.engine.chat_templates.source(service.template, bool(fields.get("tools")))
    )
    dialect = Dialect.of(source, config.tool_call_parser, config.reasoning_parser)
    if callable_tools and dialect.tools is None:
        raise bad("tools: the model's chat template has no tool calls that this server reads; its operator may name "
                  "their form (tool_call_parser)", "tools", "unsupported_parameter")  # fmt: skip
    thinking = _thinking(dialect, prompt)
    found = Manner(
        dialect, tuple(tool["function"]["name"] for tool in callable_tools), fields.get("parallel_tool_calls", True),
        choice.mode == "named", choice.mode in ("named", "required"), thinking, fields.get("include_reasoning", True),
    )  # fmt: skip
    if not callable_tools and thinking is None:
        return found, wish
    special = {mark: i for mark in dialect.marks if (i := service.special_names.get(mark)) is not None}
    params, form = wish.params, wish.form
    own_form = params.structured_outputs
    made = own_form
    try:
        if callable_tools:
            asked: Any = choice.mode if choice.mode != "named" else callable_tools[0]
            content = own_form if choice.mode == "auto" else None
            made = structured_outputs_for(
                callable_tools, asked, dialect, found.parallel, special=special, thinking=thinking, content=content
            )
            form = form if made is None or form is not None else "tools"
        elif own_form is not None and thinking is not None:
            made = behind_thinking(own_form, thinking, special)
    except GrammarError as error:
        raise forms.refused(error, form or "tools") from None
    except ConfigError as error:
        raise bad(f"{form or 'tools'}: {error}", form or "tools") from None
    params = replace(params, structured_outputs=made, keep_special_tokens=tuple(special.values()))
    return found, replace(wish, params=params, form=form)


def _thinking(dialect: Dialect, prompt: str) -> Thinking | None:
    """Reasoning that an answer to a prompt may have. A prompt that ends with its end has had it."""
    if dialect.reasoning is None:
        return None
    start, end = dialect.reasoning
    prompt = prompt.rstrip()
    return None if prompt.endswith(end) else Thinking(start, end, prompt.endswith(start))


class Speaking:
    """A voice that thinks and calls."""

    def __init__(self, manner: Manner) -> None:
        self._manner, thinking = manner, manner.thinking
        self._thought = ReasoningParser(thinking.start, thinking.end, inside=thinking.open) if thinking else None
        assert manner.dialect.tools is not None or not manner.tools
        self._calls = (
            tool_parser(manner.dialect.tools or "", manner.tools, parallel=manner.parallel, certain=manner.certain)
            if manner.tools
            else None
        )
        self._called = self._said = False

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Reasoning, then content and calls."""
        thought, said = ("", text) if self._thought is None else self._thought.feed(text)
        return self._reasoned(thought) + self._spoken(said)

    def finish(self) -> list[dict[str, Any]]:
        """What was held back; and that there is no content, where there is nothing else."""
        thought, said = ("", "") if self._thought is None else self._thought.finish()
        found = self._reasoned(thought) + self._spoken(said)
        if self._calls is not None:
            found += self._told(self._calls.finish())
        return found if self._called or self._said else [*found, {"content": ""}]

    def reason(self, reason: str) -> str:
        """``tool_calls`` where the output has calls and came to its end, and the request did not name the tool."""
        return "tool_calls" if self._called and reason == "stop" and not self._manner.named else reason

    def _reasoned(self, text: str) -> list[dict[str, Any]]:
        return [{"reasoning_content": text}] if text and self._manner.include else []

    def _spoken(self, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        return self._told([ContentDelta(text)] if self._calls is None else self._calls.feed(text))

    def _told(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self._said = True
                found.append({"content": delta.text})
            elif isinstance(delta, ToolCallStart):
                self._called = True
                call = {"index": delta.index, "id": delta.id, "type": "function",
                        "function": {"name": delta.name, "arguments": ""}}  # fmt: skip
                found.append({"tool_calls": [call]})
            else:
                assert isinstance(delta, ArgumentsDelta)
                piece = {"index": delta.index, "function": {"arguments": delta.json_text}}
                found.append({"tool_calls": [piece]})
        return found


__all__ = ["Choice", "Manner", "Speaking", "chosen", "manner", "tool_choice", "tools"]
