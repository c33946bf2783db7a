"""Finds the dialect that a model's template speaks, and the marks by which it does."""

from __future__ import annotations

import functools
from dataclasses import dataclass

#: Marks of forms that no parser here reads, though they share one with those that it does.
_OTHERS = ("<function=", "<arg_key>", "<｜tool▁call", "<|tool_call_begin|>")
REASONING = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
"""Marks of reasoning, by name."""


@dataclass(frozen=True)
class Dialect:
    """Facts of a model's manner that a server needs.

    Attributes:
        tools: the name of the tool calls' form (`specrs.tools.PARSERS`); ``None``: the model has no such form.
        newer: true for the newer of Mistral's two forms, ``name[ARGS]{...}``.
        reasoning: marks around the model's reasoning; ``None``: the model has none.
    """

    tools: str | None = None
    newer: bool = False
    reasoning: tuple[str, str] | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that an answer may need, which may be special tokens."""
        found = {"hermes": ("<tool_call>", "</tool_call>"), "llama3": ("<|python_tag|>",),
                 "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")}  # fmt: skip
        return (*found.get(self.tools or "", ()), *(self.reasoning or ()))

    @classmethod
    def of(cls, template: str, tools: str = "auto", reasoning: str = "auto") -> Dialect:
        """Find the dialect from a template's source.

        Args:
            template: read where a name is ``"auto"``.
            tools: the name of a form, ``"auto"`` or ``"none"``.
            reasoning: a name of `REASONING`, ``"auto"`` or ``"none"``.
        """
        named = detect(template) if tools == "auto" else None if tools == "none" else tools
        thinks = detect_reasoning(template) if reasoning == "auto" else REASONING.get(reasoning)
        return cls(named, "[ARGS]" in template, thinks)


@functools.lru_cache(maxsize=64)
def detect(template: str) -> str | None:
    """Return the name of the form in which a template writes tool calls, or ``None`` if no parser here reads it."""
    if "tools" not in template or any(mark in template for mark in _OTHERS):
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and "parameters" in template):
        return "llama3"
    return None


@functools.lru_cache(maxsize=64)
def detect_reasoning(template: str) -> tuple[str, str] | None:
    """Return the marks between which a template's model thinks, or ``None`` if it does not."""
    return next((pair for pair in REASONING.values() if pair[1] in template), None)
