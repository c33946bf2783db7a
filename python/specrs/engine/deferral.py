"""Drafts that wait for a doubtful token, as long as sources say then what they say now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrs._specrs import DraftNodes
from specrs.engine.policy import TreeChoice, TreePolicy

_SAME, _LEARN = 0.8, 0.3  # part of a chance that counts as the same; weight of a time, of which two failures are enough
_TRUSTED = 0.5  # word from which on drafts may wait


@dataclass(eq=False)
class Deferral:
    """One request's drafts that wait.

    Attributes:
        waits: the position in the request's tokens where the doubtful one is expected, that token, and the chance that
            the one behind it was given; ``None`` where no drafts wait.
        word: smoothed share of times that the sources said the same again, once the token had come.
    """

    waits: tuple[int, int, float] | None = None
    word: float = 1.0

    def choose(
        self, tokens: Sequence[int], choice: TreeChoice, nodes: DraftNodes, policy: TreePolicy, overhead: float
    ) -> TreeChoice:
        """A choice of nodes, or the first of them where the rest are better verified once a doubtful token has come.

        Args:
            tokens: of the request.
            choice: of ``policy``, from ``nodes``: what its sources say may come next.
            overhead: seconds of the round beside the target's pass.
        """
        self._hold_to_word(tokens, nodes)
        if self.word < _TRUSTED or choice.nodes < 2:
            return choice
        settled = policy.settle(choice, nodes, overhead)
        if settled.nodes < choice.nodes:
            doubtful = settled.nodes
            said = nodes.chance(doubtful + 1) / nodes.chance(doubtful)
            self.waits = len(tokens) + doubtful, nodes.token(doubtful), said
        return settled

    def _hold_to_word(self, tokens: Sequence[int], nodes: DraftNodes) -> None:
        waits, self.waits = self.waits, None
        if waits is None:
            return
        position, token, said = waits
        if len(tokens) == position + 1 and tokens[position] == token:
            kept = len(nodes) > 0 and nodes.chance(0) >= _SAME * said
            self.word += _LEARN * (kept - self.word)
