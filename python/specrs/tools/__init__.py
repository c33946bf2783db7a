"""Tool calls and reasoning: from an answer's text to what a client of OpenAI's API reads, from its tools to grammars.

    parser = tool_parser("hermes", ["get_weather"])
    for piece in pieces:
        for delta in parser.feed(piece): ...
    parser.finish()

Pure text: no engine, no server. A parser's result does not depend on the pieces in which the text comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from specrs._specrs import ConfigError
from specrs.tools.deltas import ArgumentsDelta, ContentDelta, Delta, ToolCallStart, merged
from specrs.tools.dialect import REASONING, Dialect, detect, detect_reasoning
from specrs.tools.dialects import PARSERS
from specrs.tools.grammar import Thinking, behind_thinking, structured_outputs_for
from specrs.tools.parser import NAME, ToolParser
from specrs.tools.reasoning import ReasoningParser


def tool_parser(
    name: str,
    tools: Collection[str],
    ids: Callable[[], str] | None = None,
    *,
    parallel: bool = True,
    certain: bool = False,
) -> ToolParser:
    """A parser of a dialect.

    Args:
        name: ``"hermes"``, ``"llama3"`` or ``"mistral"``.
        tools, ids, parallel, certain: options as `ToolParser` takes them.

    Raises:
        ConfigError: there is no such dialect.
    """
    if name not in PARSERS:
        raise ConfigError(f"tool_parser: {name!r}: must be one of {', '.join(PARSERS)}")
    return PARSERS[name](tools, ids, parallel=parallel, certain=certain)


__all__ = [
    "NAME",
    "PARSERS",
    "REASONING",
    "ArgumentsDelta",
    "ContentDelta",
    "Delta",
    "Dialect",
    "ReasoningParser",
    "Thinking",
    "ToolCallStart",
    "ToolParser",
    "behind_thinking",
    "detect",
    "detect_reasoning",
    "merged",
    "structured_outputs_for",
    "tool_parser",
]
