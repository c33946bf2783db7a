"""The worth of a source of drafts to an engine, which decides how often the source is asked.

The constants were compared by counted gains (`benches/bench_drafters.py`, suffix and recycling).
"""

from __future__ import annotations

from dataclasses import dataclass

_IDLE = 0.003  # of plain decoding's time, what asking takes of a source that gains less: 0.01 loses 0.4%, 0.001 0.2%
_LONGEST_REST = 512  # rounds, so that one slow answer does not silence a source for good
_GAIN = 0.4  # plain rounds that an answer is taken to save, before there was one: with 0 told edits lose 2.4%
_LEARN = 0.2  # weight of an answer: with 0.1 sampled requests lose 2.3%


@dataclass(eq=False)
class SourceWorth:
    """Running means of what asking a source wins and costs.

    Attributes:
        gain: plain rounds that an answer saves, or would if it was verified: the tokens that the target drew as the
            source had said; nothing where no drafts are worth verifying.
        cost: seconds of asking, of merging and weighing the answer, and of telling the source what came of it; 0
            before the first answer.
        rested: rounds since it was last asked.
    """

    gain: float = _GAIN
    cost: float = 0.0
    rested: int = 0

    def due(self, plain: float, spare: float) -> bool:
        """Return whether to ask it for a round: for each while it gains what asking costs, else as often as `_IDLE`
        allows.

        Args:
            plain: seconds of plain decoding for each request of the round.
            spare: seconds that asking costs nothing.
        """
        cost = (self.cost - spare) / plain
        return self.gain >= cost or self.rested >= min(cost / _IDLE, _LONGEST_REST)

    def learn(self, gain: float | None, cost: float) -> None:
        """Learn from an answer; ``gain`` is ``None`` if no token has come that could show what it was worth."""
        self.cost += (_LEARN if self.cost else 1.0) * (cost - self.cost)
        if gain is not None:
            self.gain += _LEARN * (gain - self.gain)
