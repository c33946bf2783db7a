"""Bounds what strangers can make a server write to stderr: one line of each kind in a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 10.0
_KINDS = 256  # kinds that are known apart


class Seldom(logging.Filter):
    """Lets one record of a kind through in so many seconds, which says how many were dropped before it.

    A kind is a message before its arguments, and the type of its exception.

    Args:
        seconds: seconds between two records of a kind.
        clock: seconds, which only grow.
    """

    def __init__(self, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds, self._clock = seconds, clock
        # For each kind, the time it was last told, and how many records were dropped since.
        self._told: dict[tuple[object, object], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record goes through."""
        kind = (record.msg, record.exc_info and record.exc_info[0])
        now = self._clock()
        last, dropped = self._told.get(kind, (None, 0))
        if last is not None and now - last < self._seconds:
            self._told[kind] = (last, dropped + 1)
            return False
        if len(self._told) >= _KINDS:
            self._told.clear()
        self._told[kind] = (now, 0)
        if dropped:
            record.msg, record.args = f"{record.getMessage()} ({dropped} more of this kind before)", ()
        return True


@contextmanager
def seldom(*names: str) -> Iterator[None]:
    """Within the context, make loggers of these names write seldom."""
    limits = [(logging.getLogger(name), Seldom()) for name in names]
    for logger, limit in limits:
        logger.addFilter(limit)
    try:
        yield
    finally:
        for logger, limit in limits:
            logger.removeFilter(limit)
