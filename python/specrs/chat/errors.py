"""Limits of rendering a conversation, and the errors of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from specrs._specrs import ConfigError


class ChatTemplateError(ConfigError):
    """A conversation that a template cannot render, a malformed template, or a missing one."""


class ChatLimitError(ChatTemplateError):
    """A template took more time, or wrote more text, than `RenderLimits` allow."""


@dataclass(frozen=True)
class RenderLimits:
    """Limits of rendering one conversation.

    Attributes:
        seconds: limit of wall time, checked in every turn of a loop, every macro and every piece of text.
        characters: limit of the text's length.
        memory: bytes of the process that renders a template apart (`specrs.chat.apart`).

    Raises:
        ConfigError: a limit that is no number, is below 0 or is not finite.
    """

    seconds: float = 5.0
    characters: int = 16 << 20
    memory: int = 1 << 30

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            kind, what = ((int, float), "a number") if name == "seconds" else ((int,), "an integer")
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 <= value < math.inf:
                raise ConfigError(f"RenderLimits.{name} = {value!r}: must be {what}, at least 0 and finite")
