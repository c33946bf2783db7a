"""Limits of rendering a conversation, and the errors of it."""

from __future__ import annotations

from dataclasses import dataclass

from specrs._specrs import ConfigError


class ChatTemplateError(ConfigError):
    """A conversation that a template cannot render, a template that is none, or no template at all."""


class ChatLimitError(ChatTemplateError):
    """A template took more time, or wrote more text, than `RenderLimits` allow."""


@dataclass(frozen=True)
class RenderLimits:
    """What rendering one conversation may take.

    Attributes:
        seconds: of wall time, looked at in every turn of a loop, every macro and every piece of text.
        characters: of the text.
        memory: bytes of the process that renders a template apart (`specrs.chat.apart`).
    """

    seconds: float = 5.0
    characters: int = 16 << 20
    memory: int = 1 << 30
