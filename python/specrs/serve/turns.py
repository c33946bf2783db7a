"""Changes a request's messages into those that its template can write: roles that the template knows, and tool calls
with readable arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from specrs.chat import ChatLimitError, ChatTemplateError
from specrs.serve.errors import bad, shown
from specrs.serve.exchange import no_constant, shallow

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""OpenAI's roles, which every request may use."""
_DEEPEST = 48  # levels of a call's arguments as an object: a template gets them some levels down


def with_known_roles(messages: Sequence[Message], source: str) -> list[Message]:
    """Return messages in the roles of a template, which would silently drop a message in another role.

    ``developer`` is OpenAI's newer name of ``system``, and becomes that where the template's text does not name it. Of
    other roles than OpenAI's a request may have those that the text names, as Llama's names ``ipython``.

    Args:
        messages: checked by `specrs.serve.fields`.
        source: source of the template.

    Raises:
        RequestError: 400, a role that is not one of these.
    """
    found = []
    for i, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and not _names(source, role):
            raise bad(
                f"messages[{i}].role = {shown(role)}: must be one of {', '.join(ROLES)}, or a role that the model's "
                "chat template names", "messages",
            )  # fmt: skip
        found.append({**message, "role": "system"} if role == "developer" and not _names(source, role) else message)
    return found


def _names(source: str, role: str) -> bool:
    """Return whether a template has a text that is the role."""
    return f"'{role}'" in source or f'"{role}"' in source


def arguments(text: str) -> dict[str, Any] | str:
    """Return a call's arguments in the form for templates: an object, which they write as JSON or go through; a text
    that is no object in JSON, such as one that ``max_tokens`` cut, stays as it is."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text, parse_constant=no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError):
        return text
    if value is None:
        return {}
    return value if isinstance(value, dict) and shallow(value, _DEEPEST) else text


def rendered(render: Callable[[list[Message]], str], messages: list[Message]) -> str:
    """Return a conversation's text. If a template goes through the arguments of calls, and so takes no text for them,
    it gets an object with the text as ``arguments``.

    Raises:
        ChatTemplateError: the same errors as of ``render``.
    """
    try:
        return render(messages)
    except ChatLimitError:
        raise
    except ChatTemplateError:
        if not any(_is_text(call) for message in messages for call in message.get("tool_calls") or ()):
            raise
    return render([_through(message) for message in messages])


def _is_text(call: dict[str, Any]) -> bool:
    return isinstance(call["function"]["arguments"], str)


def _through(message: Message) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": {"arguments": call["function"]["arguments"]}}}
        if _is_text(call)
        else call
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message
