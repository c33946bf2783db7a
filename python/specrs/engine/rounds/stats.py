"""Figures of an engine while it runs, for dashboards, health checks and routers of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Figures of an engine between two steps.

    Attributes:
        running: requests that have a row of the page table.
        waiting: requests without a row, new or preempted.
        waiting_tokens: tokens of the prompts of waiting requests, and tokens that preempted requests had generated.
        pages: pages of the KV pool, without the sink.
        used_pages: pages that are neither free nor evictable, because requests use them.
        cached_pages: pages in the prefix cache, whether requests share them or not.
        prefilled: tokens of prompts that passes have read so far. Tokens found in the prefix cache do not count;
            tokens read again after a preemption count again.
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
        """Return the figures for a scheduler's numbers and a pool's counts.

        Args:
            counts: counts since the beginning, by attribute.
        """
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
        """The share of the pool's pages that requests use, from 0 to 1."""
        return self.used_pages / self.pages if self.pages else 0.0


@dataclass
class RequestTimes:
    """Times of a request's events, in seconds of `time.perf_counter`. An event that is still to come has ``None``.

    Attributes:
        submitted: time at which the request arrived.
        admitted: time at which the request left the queue for the first time.
        first_token: time at which the first token was drawn.
        finished: time at which the request ended.
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
        """Seconds from the request's arrival to its first token."""
        return None if self.first_token is None else self.first_token - self.submitted


@dataclass(frozen=True)
class ServingStats:
    """Figures of an `AsyncLLM`, readable at any time and from any thread.

    Attributes:
        engine: the engine's figures that its thread last reported.
        submitted: requests that wait, including those that the thread has not seen yet.
        submitted_tokens: tokens of the prompts of submitted requests.
        steps: steps that the thread has made.
        last_step: seconds that the last step took.
        stepping: seconds since the running step began; 0 between steps.
        healthy: True if the thread is alive and can go on.
    """

    engine: EngineStats
    submitted: int
    submitted_tokens: int
    steps: int
    last_step: float
    stepping: float
    healthy: bool
