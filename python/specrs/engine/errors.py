"""Errors of using an engine at the wrong time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrs._specrs import SpecrsError

if TYPE_CHECKING:
    from specrs.engine.request.request import RequestOutput


class EngineBusyError(SpecrsError):
    """Another thread, or a callback of the engine itself, called an `LLM` during a call. Nothing was changed."""

    def __init__(self) -> None:
        super().__init__(
            "this LLM is at work in another thread, or in a callback of its own: one thread at a time may use an LLM. "
            "Give each thread its own, or guard this one with a lock"
        )


class EngineClosedError(SpecrsError):
    """An `LLM` was used after `LLM.close`."""

    def __init__(self) -> None:
        super().__init__("this LLM is closed: its weights and caches are freed; make another one")


class EngineOverloadedError(SpecrsError):
    """An `AsyncLLM` has as many waiting requests as it may have. The request was not queued; a later try may find room.

    Attributes: `what` waits, how much of it there would be (`got`), `limit`.
    """

    def __init__(self, what: str, got: int, limit: int) -> None:
        super().__init__(f"overloaded: {got} {what} would wait for this engine; at most {limit}. Try again later")
        self.what, self.got, self.limit = what, got, limit


class StepFailedError(SpecrsError):
    """A pass of the engine failed, and its requests ended with it; the engine goes on. ``__cause__`` is the error.

    Attributes: `output`: what the request had by then, with ``finish_reason`` ``"abort"``.
    """

    def __init__(self, error: BaseException, output: RequestOutput | None) -> None:
        super().__init__(f"a pass of this request failed: {type(error).__name__}: {error}")
        self.output = output
        self.__cause__ = error


class EngineFailedError(SpecrsError):
    """An `AsyncLLM` that cannot go on: its GPU context or its account of pages is broken, or its process has ended.

    ``__cause__`` says how. Every request of it gets this error, and every later one. What works is another process.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"this engine cannot go on: {type(error).__name__}: {error}")
        self.__cause__ = error


class EngineProcessError(SpecrsError):
    """The process of an `AsyncLLM` ended by itself: for example, it was killed where memory was short.

    Attributes: `status`: its exit status; negative: the signal that killed it; ``None``: not known.
    """

    def __init__(self, status: int | None) -> None:
        how = "" if status is None else f", by signal {-status}" if status < 0 else f", with status {status}"
        super().__init__(f"the engine's process ended{how}; its stderr may say why")
        self.status = status
