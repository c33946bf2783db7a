"""Ctrl-C between two steps of an engine, and not within one."""

from __future__ import annotations

import os
import signal
import threading
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
        self._holds = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._holds:
            try:
                signal.signal(signal.SIGINT, self._hold)
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
            signal.default_int_handler(number, frame)
        self._pending = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._holds:
            return
        if signal.getsignal(signal.SIGINT) == self._hold:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._holds = False
        if kind is not KeyboardInterrupt:
            self.check()
