"""Drafts that wait for a doubtful token, as long as sources say then what they say now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrs._specrs import MergedDrafts
from specrs.engine.policy import Kind, TreeChoice, TreePolicy

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
        self,
        tokens: Sequence[int],
        tree: MergedDrafts,
        choice: TreeChoice,
        nodes: Sequence[tuple[float, Kind]],
        policy: TreePolicy,
        overhead: float,
    ) -> TreeChoice:
        """A choice of nodes, or the first of them where the rest are better verified once a doubtful token has come.

        Args:
            tokens: of the request.
            tree: what its sources say may come next.
            choice: of ``policy``, from ``nodes``: those of the tree, the likeliest first.
            overhead: seconds of the round beside the target's pass.
        """
        self._hold_to_word(tokens, nodes)
        if self.word < _TRUSTED or choice.nodes < 2:
            return choice
        settled = policy.settle(choice, nodes, overhead)
        if settled.nodes < choice.nodes:
            scores, kind = tree.scores, nodes[0][1]
            order = sorted(range(1, len(scores)), key=lambda i: -scores[i])
            doubtful, behind = order[settled.nodes], order[settled.nodes + 1]
            said = kind.chance(scores[behind] - scores[doubtful])
            self.waits = len(tokens) + settled.nodes, tree.tokens[doubtful], said
        return settled

    def _hold_to_word(self, tokens: Sequence[int], nodes: Sequence[tuple[float, Kind]]) -> None:
        waits, self.waits = self.waits, None
        if waits is None:
            return
        position, token, said = waits
        if len(tokens) == position + 1 and tokens[position] == token:
            kept = bool(nodes) and nodes[0][1].chance(nodes[0][0]) >= _SAME * said
            self.word += _LEARN * (kept - self.word)
