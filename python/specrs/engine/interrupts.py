"""Ctrl-C between two steps of an engine, and not within one."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Uninterrupted:
    """Holds Ctrl-C back within a ``with`` block: `KeyboardInterrupt` comes at its end.

    A second Ctrl-C comes at once, because the block may hang in a user's code or on a device. Python runs handlers of
    signals in the main thread alone, between any two instructions; in other threads, and where somebody has replaced
    the handler of Python, this does nothing.
    """

    def __enter__(self) -> None:
        self._pending = False
        main = threading.current_thread() is threading.main_thread()
        self._holds = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._holds:
            signal.signal(signal.SIGINT, self._hold)

    def _hold(self, _number: int, _frame: FrameType | None) -> None:
        if self._pending:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        self._pending = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._pending and kind is not KeyboardInterrupt:
                raise KeyboardInterrupt
