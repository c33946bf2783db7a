"""Ctrl-C between two steps of an engine, and not within one."""

from __future__ import annotations

import os
import threading

# Not those of `signal`, which look for an enum's member at each call: 24 us a block instead of 3.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from signal import SIGINT, default_int_handler
from types import FrameType


class Uninterrupted:
    """Holds Ctrl-C back within a ``with`` block: `KeyboardInterrupt` comes at its end, or with `check`.

    A second Ctrl-C comes at once, because the block may hang in a user's code or on a device. Python runs handlers of
    signals in the main thread alone, between any two instructions. In other threads, and where somebody has replaced
    Python's handler of SIGINT, this does nothing.
    """

    def __enter__(self) -> Uninterrupted:
        self._pending, self._process = False, os.getpid()
        main = threading.current_thread() is threading.main_thread()
        self._holds = main and getsignal(SIGINT) is default_int_handler
        if self._holds:
            try:
                signal(SIGINT, self._hold)
            except ValueError:  # the main thread of an embedded interpreter
                self._holds = False
        return self

    def check(self) -> None:
        """Let a Ctrl-C that is held back come now. Raises KeyboardInterrupt."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _hold(self, number: int, frame: FrameType | None) -> None:
        # Somebody may have kept this handler beyond the block, or a process may have been forked within.
        if self._pending or not self._holds or os.getpid() != self._process:
            default_int_handler(number, frame)
        self._pending = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._holds:
            return
        if getsignal(SIGINT) == self._hold:
            signal(SIGINT, default_int_handler)
        self._holds = False
        if kind is not KeyboardInterrupt:
            self.check()
