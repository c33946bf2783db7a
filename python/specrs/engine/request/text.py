"""An output's text, made from its tokens one at a time, up to the first stop string."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from specrs.engine.request.decoding import Detokenizer


class OutputText:
    """The text of one output, released in pieces once neither a later token nor a stop string can change them.

    Args:
        detokenizer: detokenizer of the output's tokens, at its beginning.
        stop: strings that end the text.
        include: true if the text keeps the stop string that ended it.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], include: bool) -> None:
        self._tokens = detokenizer
        self._stops = StopMatcher(stop, include)

    def push(self, token: int, may_stop: bool = True) -> tuple[str, str | None]:
        """Return the text that ``token`` released, and the stop string that it completed, if any and if allowed."""
        released, hit = self._stops.push(self._tokens.push(token), may_stop)
        run = self._tokens.run
        if hit is not None or not run:
            return released, hit
        # The next byte might unmake the characters of the run. But if they complete a stop string, no next byte comes.
        if not may_stop:
            self._stops.skip(len(run))
        elif self._tokens.grown and self._stops.ends(run):
            rest, hit = copy.copy(self._stops).push(self._tokens.ahead())
            if hit is not None:
                released += rest
        return released, hit

    def finish(self, may_stop: bool = True) -> tuple[str, str | None]:
        """Return the text that was held back, once no more tokens come, and the stop string that it completed, if any.

        Held text consists of unfinished characters, and of beginnings of stop strings that were not completed.
        """
        released, hit = self._stops.push(self._tokens.finish(), may_stop)
        return released + (self._stops.finish() if hit is None else ""), hit


class StopMatcher:
    """Finds stop strings in text that arrives in pieces; holds back text that may be the beginning of one."""

    def __init__(self, stop: Sequence[str], include: bool):
        self._stop = tuple(stop)
        self._include = include
        self._longest = max((len(s) for s in self._stop), default=0)
        self._held = ""
        self._skipped = 0  # characters from the beginning of the held text on; a stop string must end after them

    def push(self, piece: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Return the text that ``piece`` released, and the stop string that it completed, if any and if allowed."""
        if not self._stop:
            return piece, None
        window, old = self._held + piece, max(len(self._held), self._skipped)
        # The held text may itself be a stop string that came while stopping was not allowed, and may begin a longer
        # one. Such a string does not end the text, so hits must end in the new piece.
        hits = [(at + len(s), at, s) for s in self._stop if (at := window.find(s, max(old - len(s) + 1, 0))) >= 0]
        if hits and may_stop:
            # The string that ends first was completed first. If two end together, take the longer one, which begins
            # earlier.
            end, at, s = min(hits)
            self._held = ""
            return window[: end if self._include else at], s
        released = len(window) - self._pending(window)
        self._held = window[released:]
        self._skipped = max(old if may_stop else len(window), self._skipped) - released
        return window[:released], None

    def skip(self, more: int) -> None:
        """Note that no stop string may end within the text so far, nor within the next ``more`` characters."""
        self._skipped = len(self._held) + more

    def ends(self, text: Sequence[str]) -> bool:
        """Return whether a stop string would end with the last of these characters if they came next."""
        if not self._stop:
            return False
        tail = "".join(text[-self._longest :])
        if len(text) < self._longest:
            tail = self._held + tail
        return any(tail.endswith(s) for s in self._stop)

    def finish(self) -> str:
        """Return the text that was held back, once no more text comes."""
        rest, self._held = self._held, ""
        return rest

    def _pending(self, window: str) -> int:
        """Return the length of the longest suffix of ``window`` that is a proper prefix of a stop string."""
        for n in range(min(self._longest - 1, len(window)), 0, -1):
            if any(len(s) > n and s.startswith(window[-n:]) for s in self._stop):
                return n
        return 0
