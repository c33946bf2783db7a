"""Figures of an engine while it runs, for dashboards, health checks and routers of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Between two steps.

    Attributes:
        running: requests that have a row of the page table.
        waiting: requests that have none: new ones, and those that were preempted.
        waiting_tokens: of their prompts, and of what the preempted ones had generated.
        pages: of the KV pool, without the sink.
        used_pages: those whose keys and values a request has, which nobody else can have.
        cached_pages: those that the prefix cache has, shared or on its own.
        prefilled: tokens of prompts that passes have read so far; what the prefix cache had is not among them, and what
            a preemption has read again is.
        generated: tokens of outputs so far.
        preempted: times so far that a request gave its pages back, to begin again later.
        draft_bytes: memory that sources of drafts without a head say they hold. An `AsyncLLM` asks them now and then.
    """

    running: int
    waiting: int
    waiting_tokens: int
    pages: int
    used_pages: int
    cached_pages: int
    prefilled: int = 0
    generated: int = 0
    preempted: int = 0
    draft_bytes: int = 0

    @classmethod
    def of(cls, running: int, waiting: int, waiting_tokens: int, pool: Mapping[str, int], **counts: int) -> EngineStats:
        """From what a scheduler has, and a pool's counts; ``counts``: since the beginning."""
        return cls(
            running=running,
            waiting=waiting,
            waiting_tokens=waiting_tokens,
            pages=pool["total_pages"],
            used_pages=pool["total_pages"] - pool["free_pages"] - pool["evictable_pages"],
            cached_pages=pool["cached_pages"],
            **counts,
        )

    @property
    def kv_usage(self) -> float:
        """Share of the pool that requests have, 0 to 1."""
        return self.used_pages / self.pages if self.pages else 0.0


@dataclass
class RequestTimes:
    """When things happened to a request, in seconds of `time.perf_counter`; ``None``: not yet.

    Attributes:
        submitted: it came.
        admitted: it left the queue, the first time.
        first_token: its first token was there.
        finished: its end was.
    """

    submitted: float
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def queued(self) -> float | None:
        """Seconds in the queue."""
        return None if self.admitted is None else self.admitted - self.submitted

    @property
    def to_first_token(self) -> float | None:
        """Seconds from its coming to its first token."""
        return None if self.first_token is None else self.first_token - self.submitted


@dataclass(frozen=True)
class ServingStats:
    """Of an `AsyncLLM`, at any time, from any thread.

    Attributes:
        engine: as its thread last told.
        submitted: requests that wait, those included that the thread has not seen yet.
        submitted_tokens: of their prompts.
        steps: that the thread made.
        last_step: seconds that the last one took.
        stepping: seconds since the one that runs began; 0 between steps.
        healthy: the thread is there, and can go on.
    """

    engine: EngineStats
    submitted: int
    submitted_tokens: int
    steps: int
    last_step: float
    stepping: float
    healthy: bool
