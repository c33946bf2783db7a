"""A conversation as a template sees it: plain values, and the mark of an open end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from specrs.chat.errors import ChatTemplateError

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names under which clients send a message's reasoning
_DEEPEST = 64  # levels of lists and mappings in a message: beyond what an API's schema needs, below Python's stack


def conversations(messages: Any) -> tuple[list[Any], list[str]]:
    """Return one conversation, or a list of conversations, as a list, with the name of each in errors.

    Raises:
        ChatTemplateError: the value is neither.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ChatTemplateError(f"messages is a {type(messages).__name__}: give a list of messages, or of such lists")
    if messages and all(isinstance(chat, Sequence) and not isinstance(chat, (str, bytes)) for chat in messages):
        return list(messages), [f"messages[{i}]" for i in range(len(messages))]
    return [messages], ["messages"]


def conversation(messages: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ChatTemplateError(f"{where} is a {type(messages).__name__}: must be a list of messages")
    if not messages:
        raise ChatTemplateError(f"{where}: empty, there is nothing to continue")
    chat = []
    for i, message in enumerate(messages):
        plain = plain_value(message, f"{where}[{i}]")
        if not isinstance(plain, dict):
            raise ChatTemplateError(f"{where}[{i}] is a {type(message).__name__}: must be a mapping with a role")
        plain = {key: value for key, value in plain.items() if value is not None}
        reasoning = next((plain[name] for name in _REASONING if name in plain), None)
        if reasoning is not None:  # under the name that templates read; gpt-oss's reads another
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        chat.append(plain)
    return chat


def plain_value(value: Any, where: str, depth: int = 0) -> Any:
    """A copy in Python's own types, whose methods the sandbox knows to be harmless."""
    if depth > _DEEPEST:
        raise ChatTemplateError(f"{where}: deeper than {_DEEPEST} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__pos__(value)
    if isinstance(value, float):
        return float.__pos__(value)
    if isinstance(value, Mapping):
        return {
            plain_value(key, f"{where}: key", depth + 1): plain_value(item, f"{where}[{key!r}]", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        items = [plain_value(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_value(getattr(value, f.name), f"{where}.{f.name}", depth + 1) for f in fields(value)}
    if callable(dump := getattr(value, "model_dump", None)) and not isinstance(value, type):
        return plain_value(dump(), where, depth + 1)
    raise ChatTemplateError(f"{where} is a {type(value).__name__}: must be a plain value, as JSON has them")


def schema(tool: Any, where: str) -> Any:
    if not callable(tool) or isinstance(tool, Mapping):
        plain = plain_value(tool, where)
        if not isinstance(plain, dict):
            raise ChatTemplateError(f"{where} is a {type(tool).__name__}: must be a JSON schema, or a function")
        return plain
    try:
        from transformers.utils.chat_template_utils import get_json_schema
    except ImportError:
        raise ChatTemplateError(
            f"{where}: a function; transformers, which makes a schema of it, is not installed: give its JSON schema"
        ) from None
    try:
        return get_json_schema(tool)
    except Exception as e:  # errors about type hints and docstrings have types of their own
        raise ChatTemplateError(f"{where}: no schema can be made of it: {e}") from e


@dataclass(frozen=True)
class OpenEnd:
    """The end of the last message, marked, so that it is found again in what a template makes of the message.

    Attributes:
        mark: a word that stands nowhere else in the conversation; the space behind it in the message tells whether the
            template trims.
        text: text of the message before the mark.
        where: name of the conversation in errors.
    """

    mark: str
    text: str
    where: str

    @classmethod
    def of(cls, chat: list[dict[str, Any]], field: str, where: str) -> OpenEnd:
        """Mark the end of a field of the last message, in place.

        Raises:
            ChatTemplateError: the field has no text.
        """
        message, mark = chat[-1], "SPECRS_CONTINUES_HERE"
        while mark in repr(chat):
            mark += "_"
        value = message.get(field)
        if isinstance(value, (list, tuple)):
            part = next((p for p in reversed(value) if isinstance(p, dict) and isinstance(p.get("text"), str)), None)
            if part is not None:
                found = cls(mark, part["text"], where)
                part["text"] += f"{mark} "
                return found
        elif isinstance(value, str):
            # Reasoning stands under several names, and the template may read any of them.
            for name in _REASONING if field in _REASONING else (field,):
                if message.get(name) == value:
                    message[name] = f"{value}{mark} "
            return cls(mark, value, where)
        raise ChatTemplateError(f"{where}[{len(chat) - 1}]: no text in {field!r} to continue")

    def cut(self, text: str) -> str:
        """A template's text up to the mark; without the spaces before it where the template trims what follows it.

        Raises:
            ChatTemplateError: the message or its end is not there.
        """
        at = text.rfind(self.mark)
        if at < 0 or self.text.strip() not in text:
            raise ChatTemplateError(
                f"{self.where}: the template drops the end of the last message: it cannot be continued"
            )
        kept = text[:at] if text.startswith(f"{self.mark} ", at) else text[:at].rstrip()
        return kept.replace(f"{self.mark} ", "").replace(self.mark, "")  # a template may write the message twice
