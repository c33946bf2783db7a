"""Generations of output memory: the replay that each set of outputs holds, and the leases that may still read it."""

from __future__ import annotations

from specrs._specrs import StaleOutputError


class Generations:
    """Sets of outputs, written in turn. A generation is a replay's number, from 1 on.

    Attributes:
        last: the latest generation, 0 before the first.
    """

    def __init__(self, copies: int) -> None:
        self._holds = [0] * copies
        self.last = 0

    @property
    def next_copy(self) -> int:
        """The set that the next replay writes: the one whose content is the oldest."""
        return self.last % len(self._holds)

    def begin(self) -> tuple[int, int]:
        """A replay begins: its generation and the set that it writes, whose former leases are stale from now on."""
        copy = self.next_copy
        self.last += 1
        self._holds[copy] = self.last
        return self.last, copy

    def current(self, copy: int) -> int:
        """The generation that a set holds."""
        return self._holds[copy]

    def check(self, what: str, held: int, copy: int) -> None:
        """Raise StaleOutputError unless the set holds this generation."""
        current = self._holds[copy]
        if current != held:
            raise stale(what, held, current)


def stale(what: str, held: int, current: int) -> StaleOutputError:
    """The error for an output of generation `held` whose memory has been written by `current`."""
    error = StaleOutputError(
        f"{what} is stale: it holds replay {held} of its memory, which replay {current} has overwritten; read it "
        "before, copy it (copy=True), or keep more sets of outputs (copies)"
    )
    error.kind, error.what, error.held, error.current = "StaleOutput", what, held, current
    return error
