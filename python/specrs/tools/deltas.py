"""The pieces of content and of calls that a parser finds in a text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ContentDelta:
    """Text that is no call."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins.

    Attributes:
        index: index of the call in its message, from 0.
        id: id of the call, which nobody else has.
        name: name of the tool.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """A piece of a call's arguments.

    Attributes:
        index: index of the call.
        json_text: text that continues the arguments so far.
    """

    index: int
    json_text: str


Delta = ContentDelta | ToolCallStart | ArgumentsDelta


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Merge neighbouring deltas of one kind: for a whole text the result is the same whatever pieces the text came
    in."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
            found[-1] = ContentDelta(last.text + delta.text)
        elif isinstance(delta, ArgumentsDelta) and isinstance(last, ArgumentsDelta) and last.index == delta.index:
            found[-1] = ArgumentsDelta(delta.index, last.json_text + delta.json_text)
        else:
            found.append(delta)
    return found
