"""Tool calls and reasoning of a chat: a request's choice of tools, and how its answers are read."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from specrs._specrs import ConfigError
from specrs.grammar import GrammarError
from specrs.serve import forms
from specrs.serve.errors import bad, shown
from specrs.serve.sampling import Wish
from specrs.serve.service import Service
from specrs.serve.tool_fields import Choice, Tool
from specrs.tools import (
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


@dataclass(frozen=True)
class Manner:
    """The manner in which answers to a request are read.

    Attributes:
        dialect: dialect of the template.
        tools: names that calls may have; none: there are no calls.
        parallel: true if all calls are told.
        named: true if the request asks for one tool: then its end is no ``"tool_calls"``, as OpenAI has it.
        certain: true if an answer is of calls alone.
        thinking: marks of reasoning; ``None``: there is none.
        include: true if reasoning is told.
    """

    dialect: Dialect = field(default_factory=Dialect)
    tools: tuple[str, ...] = ()
    parallel: bool = True
    named: bool = False
    certain: bool = False
    thinking: Thinking | None = None
    include: bool = True

    def voice(self) -> Speaking | None:
        """Return a reader for one choice's text; ``None``: all of the text is content."""
        return Speaking(self) if self.tools or self.thinking else None

    def reasoned(self, outputs: Iterable[Sequence[int]], spell: Callable[[int], bytes | None]) -> int:
        """Tokens of outputs that are reasoning, its marks included. spell: the bytes of a token."""
        if self.thinking is None:
            return 0
        found = 0
        for tokens in outputs:
            found += len(tokens) - len(Behind[None](self.thinking, spell).take([(token, None) for token in tokens]))
        return found


def chosen(fields: Mapping[str, Any]) -> tuple[Choice, Sequence[Tool]]:
    """Return a request's choice of tools, and the tools that may be called.

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
    """Return the manner in which answers are read, and the wish that the engine needs for it.

    Args:
        prompt: the template's text.
        wish: wish of the request.

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


_T = TypeVar("_T")


class Behind(Generic[_T]):
    """Separates the tokens behind the reasoning from those of the reasoning, which include the token that ends its
    second mark.

    Args:
        thinking: marks of reasoning; ``None``: there is none.
        spell: the bytes of a token.
    """

    def __init__(self, thinking: Thinking | None, spell: Callable[[int], bytes | None]) -> None:
        self._parser = (
            ReasoningParser(thinking.start, thinking.end, inside=thinking.open) if thinking is not None else None
        )
        self._spell = spell
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unknown: list[tuple[int, _T]] = []  # white space, and what may be the beginning of the first mark

    def take(self, tokens: Sequence[tuple[int, _T]], last: bool = True) -> list[tuple[int, _T]]:
        """Return the tokens of the next ones that stand behind the reasoning, each with what came with it. last: no
        others come."""
        if self._parser is None:
            return list(tokens)
        found: list[tuple[int, _T]] = []
        for one in tokens:
            before = self._parser.at
            if before != "content":
                self._parser.feed(self._decoder.decode(self._spell(one[0]) or b""))
            if self._parser.at is None:
                self._unknown.append(one)
                continue
            if self._parser.at == "content" and before != "reasoning":
                found += [*self._unknown, one]
            self._unknown = []
        if last:
            found, self._unknown = found + self._unknown, []
        return found


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
        """Return deltas of reasoning, then of content and calls."""
        thought, said = ("", text) if self._thought is None else self._thought.feed(text)
        return self._reasoned(thought) + self._spoken(said)

    def finish(self) -> list[dict[str, Any]]:
        """Return deltas for the text that was held back, or for empty content where there is nothing else."""
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
