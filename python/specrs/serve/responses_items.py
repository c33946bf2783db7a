"""The field ``input`` of a response: from items to the messages of a chat.

What an assistant did in one turn comes as several items: reasoning, messages, function calls. They become one message
of a chat, as templates know it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specrs.serve.config import ServeConfig
from specrs.serve.errors import RequestError, bad, shown

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_WHY = "must be 'message', 'function_call', 'function_call_output' or 'reasoning'"


def read(name: str, value: Any, config: ServeConfig) -> list[dict[str, Any]]:
    """The messages of a text or of items, whose calls have their arguments as text.

    Raises:
        RequestError: 400, with the item's place.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise bad(f"{name} = {shown(value)}: must be a text or a list of items, not empty", name)
    if len(value) > config.max_messages:
        raise bad(f"{name} has {len(value)} items: at most max_messages = {config.max_messages}", name)
    conversation = _Conversation(name)
    for i, item in enumerate(value):
        conversation.add(f"{name}[{i}]", item)
    if not conversation.messages:
        raise bad(f"{name}: has reasoning alone, and nothing to answer", name)
    return conversation.messages


class _Conversation:
    """The conversation that the items so far make."""

    def __init__(self, name: str) -> None:
        self.messages: list[dict[str, Any]] = []
        self._name = name
        self._called: dict[str, str] = {}  # names of functions by the ids of their calls
        # Reasoning of the assistant's next item. Where none follows, it was cut: no template has a place for it.
        self._reasoning = ""

    def add(self, where: str, item: Any) -> None:
        """Add one more item."""
        if not isinstance(item, dict):
            raise self._wrong(where, item, "must be an object")
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "item_reference":
            raise bad(f"{where}: no item is stored: send the item itself", self._name, "unsupported_parameter")
        kinds: dict[str, Callable[[str, dict[str, Any]], None]] = {
            "message": self._message, "function_call": self._call, "function_call_output": self._output,
            "reasoning": self._thought,
        }  # fmt: skip
        if not isinstance(kind, str) or kind not in kinds:
            raise bad(f"{where}.type = {shown(kind)}: {_WHY}", self._name, "unsupported_parameter")
        kinds[kind](where, item)

    def _message(self, where: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise self._wrong(f"{where}.role", role, f"must be one of {', '.join(_ROLES)}")
        content = self._text(f"{where}.content", item.get("content"))
        if role == "assistant":
            self._said({"content": content})
        else:
            self._reasoning = ""
            self.messages.append({"role": _ROLES[role], "content": content})

    def _call(self, where: str, item: dict[str, Any]) -> None:
        for key in ("call_id", "name", "arguments"):
            if not isinstance(item.get(key), str):
                raise self._wrong(f"{where}.{key}", item.get(key), "must be a text")
        self._called[item["call_id"]] = item["name"]
        call = {
            "id": item["call_id"], "type": "function",
            "function": {"name": item["name"], "arguments": item["arguments"]},
        }  # fmt: skip
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and not self._reasoning:
            last.setdefault("tool_calls", []).append(call)
        else:
            self._said({"content": None, "tool_calls": [call]})

    def _output(self, where: str, item: dict[str, Any]) -> None:
        call = item.get("call_id")
        if not isinstance(call, str) or call not in self._called:
            raise self._wrong(f"{where}.call_id", call, "must be that of a function_call before it")
        content = self._text(f"{where}.output", item.get("output"))
        self._reasoning = ""
        self.messages.append({"role": "tool", "tool_call_id": call, "name": self._called[call], "content": content})

    def _thought(self, where: str, item: dict[str, Any]) -> None:
        """Return the content of a reasoning item or, where that is missing, its summary. Text that another server has
        encrypted says nothing here."""
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list):
            raise self._wrong(f"{where}.content", parts, "must be a list of parts with a text")
        texts = []
        for part in parts:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise self._wrong(f"{where}.content", part, "must be a part with a text")
            texts.append(str(part["text"]))
        self._reasoning = "\n".join([self._reasoning, *texts] if self._reasoning else texts)

    def _said(self, said: dict[str, Any]) -> None:
        """A message of the assistant's, with the reasoning before it."""
        if self._reasoning:
            said["reasoning_content"], self._reasoning = self._reasoning, ""
        self.messages.append({"role": "assistant", **said})

    def _text(self, where: str, content: Any) -> str:
        """A text, or parts of text as one."""
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise self._wrong(where, content, "must be a text, or a list of parts")
        texts = []
        for i, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            key = _PARTS.get(kind) if isinstance(kind, str) else None
            if key is None:
                raise self._wrong(f"{where}[{i}].type", kind, "parts of text alone are supported")
            if not isinstance(part.get(key), str):
                raise self._wrong(f"{where}[{i}].{key}", part.get(key), "must be a text")
            texts.append(part[key])
        return "\n".join(texts)

    def _wrong(self, where: str, value: Any, why: str) -> RequestError:
        return bad(f"{where} = {shown(value)}: {why}", self._name)
