"""Chat templates that together use every construct of the dialect, and conversations to try them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# The name of each template tells what it is for.
TEMPLATES = {p.stem: p.read_text(encoding="utf-8") for p in (Path(__file__).parent / "chat/templates").glob("*.jinja")}
assert len(TEMPLATES) == 21

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a place, <now> & tomorrow",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["place"],
            },
        },
    }
]

CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "what is a tree? "}],
    "turns": [
        {"role": "system", "content": "You are terse.\n"},
        {"role": "user", "content": "hello <there> & é \U0001f600"},
        {"role": "assistant", "content": "  hello\n\n"},
        {"role": "user", "content": "{{ 7 * 7 }} {% raise %}", "name": "ann"},
        {"role": "assistant", "content": "wood  "},
    ],
    "calls": [
        {"role": "user", "content": "weather in Oslo?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "they ask for Oslo",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"place": "Oslo"}}}],
        },
        {"role": "tool", "name": "weather", "content": '{"celsius": -3}'},
        {"role": "assistant", "content": "cold", "thinking": None, "reasoning_content": "it is -3"},
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "look: "}, {"type": "image"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "cat "}]},
    ],
}
