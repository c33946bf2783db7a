"""Errors of using an engine at the wrong time."""

from __future__ import annotations

from specrs._specrs import SpecrsError


class EngineBusyError(SpecrsError):
    """Another thread, or a callback of the engine itself, called an `LLM` while it works. Nothing was changed."""

    def __init__(self) -> None:
        super().__init__(
            "this LLM is at work in another thread, or in a callback of its own: one thread at a time may use an LLM. "
            "Give each thread its own, or guard this one with a lock"
        )


class EngineClosedError(SpecrsError):
    """An `LLM` was used after `LLM.close`."""

    def __init__(self) -> None:
        super().__init__("this LLM is closed: its weights and caches are freed; make another one")
