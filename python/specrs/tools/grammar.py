"""Makes the grammar of answers from a request's tools: calls in the dialect's form, arguments of each tool's schema.

Calls are written as the families' own templates write them, to the space: that is what the models have read. Between
the tokens of a call's arguments stands what `specrs.StructuredOutputs` allows in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specrs._specrs import ConfigError
from specrs.grammar import StructuredOutputs
from specrs.tools.dialect import Dialect

_SPACES = r" |\r?\n[ \t]{0,40}"  # between tokens of JSON, as in src/grammar/compile.rs
_ANY = r"/(?s:.*)/"
_READ = ("description", "title", "examples", "default", "$comment", "deprecated", "readOnly", "writeOnly")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # keywords of schemas by name
_VALUES = ("enum", "const", "required", "x-guidance")


@dataclass(frozen=True)
class Thinking:
    """Reasoning that an answer may begin with; no grammar binds it.

    Attributes:
        start, end: marks around it.
        open: the prompt has the first mark already; else the answer may have it, and may not.
    """

    start: str
    end: str
    open: bool


def structured_outputs_for(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any],
    dialect: Dialect | str,
    parallel: bool = True,
    *,
    special: Mapping[str, int] | None = None,
    thinking: Thinking | None = None,
    content: StructuredOutputs | None = None,
) -> StructuredOutputs | None:
    """Return the form that an answer must have.

    Args:
        tools: tools as OpenAI's requests have them: ``{"type": "function", "function": {"name", "parameters",
            "strict"}}``.
        tool_choice: ``"required"``: at least one call; ``{"type": "function", "function": {"name": ...}}``: one call of
            that tool; ``"auto"``: text with calls in it, if that needs a grammar, which it does with ``content``, or
            with a tool that is ``strict``; ``"none"``: no condition on the answer.
        dialect: a dialect, or the name of its form.
        parallel: true if there may be several calls.
        special: ids of special tokens by text; a mark that is one is that token.
        thinking: text that may stand before all else.
        content: the form of an answer that has no call, where the choice is ``"auto"``: of JSON.

    Returns:
        ``None`` where any text will do. Compiling it may find a schema that cannot be enforced.

    Raises:
        ConfigError: an unknown dialect, tool or choice; ``content`` of another kind.
    """
    if isinstance(dialect, str):
        dialect = Dialect(dialect)
    if tool_choice == "none":
        return None
    functions = [tool["function"] for tool in tools]
    auto = tool_choice == "auto"
    if isinstance(tool_choice, Mapping):
        name = tool_choice["function"]["name"]
        functions, parallel = [f for f in functions if f["name"] == name], False
        if not functions:
            raise ConfigError(f"tool_choice: no tool is called {name!r}")
    elif not auto and tool_choice != "required":
        raise ConfigError(f"tool_choice = {tool_choice!r}: must be 'auto', 'none', 'required' or a tool")
    if auto and content is None and not any(f.get("strict") for f in functions):
        return None
    writer = _FORMS.get(dialect.tools or "")
    if writer is None:
        raise ConfigError(f"dialect {dialect.tools!r}: must be one of {', '.join(_FORMS)}")
    lark = _Lark(dict(special or {}))
    made = writer(lark, functions, parallel, dialect.newer, auto)
    if not auto:
        text = made.calls
    elif content is None:
        text = made.mixed
    else:
        text = f"{made.calls} | {lark.content(content)}"
    return StructuredOutputs(grammar=lark.grammar(text, thinking))


def behind_thinking(
    form: StructuredOutputs, thinking: Thinking, special: Mapping[str, int] | None = None
) -> StructuredOutputs:
    """A form that begins where the model has thought.

    Where the prompt does not open the thinking, an answer may leave it out; that is known for JSON alone, and any other
    form then begins at once.
    """
    if form.start_after is not None:
        return form
    if thinking.open:
        return replace(form, start_after=thinking.end)
    if form.kind not in ("json", "json_object"):
        return form
    lark = _Lark(dict(special or {}))
    return StructuredOutputs(grammar=lark.grammar(lark.content(form), thinking))


@dataclass
class _Lark:
    """A grammar in the making, in Lark's syntax as llguidance reads it."""

    special: dict[str, int]
    rules: list[str] = field(default_factory=list)

    def rule(self, name: str, text: str) -> str:
        self.rules.append(f"{name}: {text}")
        return name

    def mark(self, text: str) -> str:
        """A mark: the token that it is, or its text."""
        return f"<[{self.special[text]}]>" if text in self.special else quoted(text)

    def up_to(self, name: str, mark: str) -> str:
        """Any text, and the mark that ends it."""
        if mark in self.special:
            return self.rule(name, f"ANY {self.mark(mark)}")
        self.rules.append(f"{name}[suffix={quoted(mark)}]: {_ANY}")
        return name

    def without(self, name: str, mark: str, *more: str) -> str:
        """Add a rule for any text without the mark that none of ``more``, regular expressions, matches."""
        banned = [] if mark in self.special else [f"(?s:.*){_escaped(mark)}(?s:.*)"]
        return self.rule(name, " & ".join([_ANY, *(f"~/{rx}/" for rx in (*banned, *more))]))

    def json(self, name: str, schema: Mapping[str, Any]) -> str:
        return self.rule(name, f"%json {json.dumps(schema, ensure_ascii=False)}")

    def content(self, form: StructuredOutputs) -> str:
        if form.kind not in ("json", "json_object"):
            raise ConfigError(f"content: a {form.kind}; beside tool calls an answer can be of JSON alone")
        if form.start_after is not None:
            raise ConfigError("content: start_after; beside tool calls an answer begins with its form")
        schema = json.loads(form.schema())
        return self.json("content", spaced({} if schema is True else schema, form.whitespace))

    def grammar(self, text: str, thinking: Thinking | None) -> str:
        if thinking is None:
            self.rule("start", text)
        else:
            self.rule("answer", text)
            thought = self.up_to("thought", thinking.end)
            self.rule("SPACE", r"/[ \t\r\n]{0,4}/")
            if thinking.open:
                self.rule("start", f"{thought} SPACE answer")
            else:
                self.rule("start", "thinking? answer")
                self.rule("thinking", f"{self.mark(thinking.start)} {thought} SPACE")
        if any("ANY" in rule.split(" ") for rule in self.rules):
            self.rule("ANY", _ANY)
        return "\n".join(self.rules)


@dataclass(frozen=True)
class _Made:
    """Texts of rules: calls alone, and any text with calls in it."""

    calls: str
    mixed: str


def quoted(text: str) -> str:
    """A text as Lark has it."""
    return json.dumps(text, ensure_ascii=False)


def spaced(schema: Mapping[str, Any], whitespace: str | None = None) -> dict[str, Any]:
    """A schema that says what may stand between tokens of JSON."""
    if whitespace is None and "x-guidance" in schema:
        return dict(schema)
    told = {"whitespace_flexible": False} if whitespace == "" else {"whitespace_pattern": whitespace or _SPACES}
    return {**schema, "x-guidance": told}


def arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments: an object; without parameters, an empty one."""
    found = _bare(function.get("parameters") or {"properties": {}, "additionalProperties": False})
    found["type"] = "object"
    assert isinstance(found, dict)
    return found


def _bare(schema: Any) -> Any:
    """Return a schema without the parts for readers alone: a grammar needs none of them, and their texts count against
    limits."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            found[key] = {name: _bare(one) for name, one in value.items()}
        elif key not in _READ:
            found[key] = value if key in _VALUES else _bare(value)
    return found


def _escaped(text: str) -> str:
    """Return a text escaped for a regular expression in Lark."""
    return "".join(c if c.isalnum() or c in "_<>" else f"\\{c}" for c in text)


def _schemas(lark: _Lark, functions: Sequence[Mapping[str, Any]], auto: bool) -> list[tuple[str, str]]:
    """Return the name of each tool and the rule of its arguments; where the model may choose, those of strict tools
    alone."""
    found = []
    for i, function in enumerate(functions):
        free = auto and not function.get("strict")
        schema = {"type": "object"} if free else arguments(function)
        found.append((function["name"], lark.json(f"args_{i}", spaced(schema))))
    return found


def _objects(lark: _Lark, functions: Sequence[Mapping[str, Any]], auto: bool, key: str) -> None:
    """The rule ``call``: an object with a tool's name and its arguments."""
    found = [f"{quoted(_head(name, key))} {args} {quoted('}')}" for name, args in _schemas(lark, functions, auto)]
    lark.rule("call", "\n  | ".join(found))


def _head(name: str, key: str) -> str:
    return f'{{"name": "{name}", "{key}": '


def _hermes(lark: _Lark, functions: Sequence[Mapping[str, Any]], parallel: bool, newer: bool, auto: bool) -> _Made:
    _objects(lark, functions, auto, "arguments")
    lark.rule("rest", f'"\\n" call "\\n" {lark.mark("</tool_call>")}')
    one = f"{lark.mark('<tool_call>')} rest"
    calls = f'{one} ("\\n" {one})*' if parallel else one
    if not auto:
        return _Made(calls, "")
    before, tail = lark.up_to("before", "<tool_call>"), lark.without("TAIL", "<tool_call>")
    return _Made(calls, f"({before} rest){'*' if parallel else '?'} {tail}")


def _llama3(lark: _Lark, functions: Sequence[Mapping[str, Any]], parallel: bool, newer: bool, auto: bool) -> _Made:
    _objects(lark, functions, auto, "parameters")
    calls = 'call ("; " call)*' if parallel else "call"
    if not auto:
        return _Made(calls, "")
    tag = "<|python_tag|>"
    free = lark.without("TAIL", tag, r'[ \t\r\n]*\{[ \t\r\n]*"(name|type|parameters|arguments)"(?s:.*)')
    lark.rule("calls", f"{lark.mark(tag)}? {calls}")
    return _Made(calls, f"calls | {free}")


def _mistral(lark: _Lark, functions: Sequence[Mapping[str, Any]], parallel: bool, newer: bool, auto: bool) -> _Made:
    opening = "[TOOL_CALLS]"
    if newer:
        args = lark.mark("[ARGS]")
        lark.rule("rest", "\n  | ".join(f"{quoted(n)} {args} {rule}" for n, rule in _schemas(lark, functions, auto)))
        many = "+" if parallel else ""
        calls = f"({lark.mark(opening)} rest){many}"
    else:
        _objects(lark, functions, auto, "arguments")
        many = ' (", " call)*' if parallel else ""
        lark.rule("rest", f'" "? "[" call{many} "]"')
        calls = f"{lark.mark(opening)} rest"
    if not auto:
        return _Made(calls, "")
    before, tail = lark.up_to("before", opening), lark.without("TAIL", opening)
    return _Made(calls, f"({before} rest){'*' if parallel and newer else '?'} {tail}")


_FORMS = {"hermes": _hermes, "llama3": _llama3, "mistral": _mistral}
