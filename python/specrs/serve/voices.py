"""Turns an answer's text into the deltas of a chat; the plain voice takes all of it as content."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol


class Voice(Protocol):
    """Voice of one choice. Its deltas do not depend on the pieces in which the text comes."""

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Deltas that the next piece of text completes."""
        ...

    def finish(self) -> list[dict[str, Any]]:
        """Return the deltas of the held text."""
        ...

    def reason(self, reason: str) -> str:
        """Return the reason why the choice ended, where the engine says ``reason``."""
        ...


class Plain:
    """All of the text is content."""

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The text."""
        return [{"content": text}] if text else []

    def finish(self) -> list[dict[str, Any]]:
        """Return no deltas: nothing is held back."""
        return []

    def reason(self, reason: str) -> str:
        """Return the engine's reason."""
        return reason


def message(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The whole message that deltas make."""
    found: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for name, value in delta.items():
            if name != "tool_calls":
                found[name] = value if found.get(name) is None else found[name] + value
                continue
            for part in value:
                call = calls.setdefault(part["index"], {"id": "", "type": "function", "function": {}})
                call["id"] = part.get("id", call["id"])
                for key, text in part.get("function", {}).items():
                    call["function"][key] = call["function"].get(key, "") + text
    if calls:
        found["tool_calls"] = [calls[i] for i in sorted(calls)]
    elif found["content"] is None:
        found["content"] = ""
    return found
