"""The events of a round, and observers that are told of them: recorders of capsules, and tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from specrs._specrs import Accepts, DraftBeams, TreeBatch
from specrs._specrs import Sequence as KvSequence
from specrs.engine.request.request import Request


class RoundObserver(Protocol):
    """Sees the events of each round, in the order below, and changes nothing. A round that fails has no `ended`."""

    def reserved(self, reqs: Sequence[Request], positions: Sequence[int], speculative: bool) -> None:
        """The round has its lease. ``positions`` has the length of each sequence that it asked pages for."""

    def drafted(self, beams: DraftBeams) -> None:
        """A draft step was planned for these beams."""

    def verified(self, trees: TreeBatch, accepts: Accepts) -> None:
        """The trees were verified; no request has changed yet."""

    def committed(self, kept: Sequence[int]) -> None:
        """The lease was committed. ``kept`` is the number of nodes that each request keeps of its path."""

    def extended(self, seqs: Sequence[KvSequence], starts: Sequence[int], counts: Sequence[int]) -> None:
        """A pass of the head over features of the target was planned."""

    def ended(self) -> None:
        """The round is complete."""


class Watching:
    """Calls a function with each round's trees and the accepted paths."""

    def __init__(self, watch: Callable[[TreeBatch, Accepts], None]) -> None:
        self.verified = watch
        self.reserved = self.drafted = self.committed = self.extended = self.ended = _ignore


def _ignore(*_: object, **__: object) -> None:
    """Ignore an event."""
