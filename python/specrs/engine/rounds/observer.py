"""The events of a round, told to those who look on: recorders of capsules, tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from specrs._specrs import Accepts, DraftBeams, TreeBatch
from specrs._specrs import Sequence as KvSequence
from specrs.engine.request.request import Request


class RoundObserver(Protocol):
    """Sees each round's events in this order and changes nothing. A round that fails has no end."""

    def reserved(self, reqs: Sequence[Request], positions: Sequence[int], speculative: bool) -> None:
        """The round has its lease: ``positions`` are those that it asked for."""

    def drafted(self, beams: DraftBeams) -> None:
        """A draft step was planned for these beams."""

    def verified(self, trees: TreeBatch, accepts: Accepts) -> None:
        """The trees were verified; no request has changed yet."""

    def committed(self, kept: Sequence[int]) -> None:
        """The lease was committed; ``kept`` nodes of each path count."""

    def extended(self, seqs: Sequence[KvSequence], starts: Sequence[int], counts: Sequence[int]) -> None:
        """A pass of the head over features of the target was planned."""

    def ended(self) -> None:
        """The round is complete."""


class Watching:
    """Calls a function with each round's trees and what was accepted of them."""

    def __init__(self, watch: Callable[[TreeBatch, Accepts], None]) -> None:
        self.verified = watch
        self.reserved = self.drafted = self.committed = self.extended = self.ended = _ignore


def _ignore(*_: object, **__: object) -> None:
    """An event that nobody looks at."""
