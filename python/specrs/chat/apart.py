"""Templates of strangers: rendered in a process of their own, which dies at its limits.

jinja2's sandbox keeps a template from what it must not touch, not from what costs too much: one line makes a text of a
terabyte without a loop. Here the operating system bounds memory and time, and the process has neither the parent's
environment nor a file of it. Starting it takes about 0.2 s.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from specrs.chat.dialect import environment
from specrs.chat.errors import ChatLimitError, ChatTemplateError, RenderLimits
from specrs.chat.messages import conversation
from specrs.chat.templates import ChatTemplates, Messages

_START = "import sys; sys.path[:] = {path!r}; from specrs.chat.apart import child; child()"
_STARTS = 60.0  # seconds for Python to begin, on a busy machine
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")  # the environment that Python starts with


def apart(
    templates: ChatTemplates,
    messages: Messages,
    *,
    chat_template: str,
    limits: RenderLimits | None = None,
    where: str = "messages",
    **options: Any,
) -> str:
    """Render a conversation as `ChatTemplates.render` does, by a template that nobody vouches for.

    Args:
        templates: templates of the model, for its special tokens.
        chat_template: a source; never one of the model's by name.
        options: the others of `ChatTemplates.render`, of plain values alone.

    Raises:
        ChatTemplateError, ChatLimitError: the same errors as of `ChatTemplates.render`.
    """
    limits = limits or RenderLimits()
    if not isinstance(chat_template, str):
        raise ChatTemplateError(f"chat_template is a {type(chat_template).__name__}: must be a template")
    asked = {
        "variables": dict(templates.variables), "messages": conversation(messages, where), "where": where,
        "chat_template": chat_template, "limits": [limits.seconds, limits.characters, limits.memory],
        "options": options,
    }  # fmt: skip
    try:
        told = json.dumps(asked)
    except (TypeError, ValueError, RecursionError) as e:
        raise ChatTemplateError(f"{where}: not plain values: {e}") from None
    late = ChatLimitError(f"chat template: not done after {limits.seconds} seconds")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _START.format(path=[os.path.abspath(folder) for folder in sys.path])],
            input=told.encode(), capture_output=True, timeout=_STARTS + limits.seconds, check=False, cwd="/",
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise late from None
    if done.returncode in (-signal.SIGALRM, -signal.SIGXCPU):
        raise late
    try:
        found = json.loads(done.stdout)
    except ValueError:
        raise ChatLimitError(f"chat template: its process ended with status {done.returncode}") from None
    if "text" in found:
        return str(found["text"])
    raise (ChatLimitError if found["limit"] else ChatTemplateError)(found["error"])


def child() -> None:
    """Render what stands on stdin, as `apart` asks, and print what came of it."""
    asked = json.load(sys.stdin)
    limits = RenderLimits(*asked["limits"])
    environment()  # the template does not pay for imports
    with contextlib.suppress(ImportError):
        import jinja2.debug  # noqa: F401  # of errors
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + limits.memory
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    seconds = math.ceil(limits.seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.setitimer(signal.ITIMER_REAL, limits.seconds)  # ends the process, whatever it is at
    try:
        templates = ChatTemplates(Path("."), {}, asked["variables"])
        text = templates.render(
            asked["messages"], chat_template=asked["chat_template"], limits=limits, where=asked["where"],
            **asked["options"],
        )  # fmt: skip
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        answer: dict[str, Any] = {"text": text}
    except ChatTemplateError as e:
        memory = isinstance(e.__cause__, MemoryError)
        said = f"chat template: took more than {limits.memory} bytes" if memory else str(e)
        answer = {"error": said, "limit": memory or isinstance(e, ChatLimitError)}
    print(json.dumps(answer))
