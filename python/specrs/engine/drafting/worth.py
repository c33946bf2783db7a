"""What a source of drafts is worth: to the engine, and to each request that asks it.

Asking takes time, and wins the tokens that come as the source had said. A source that wins less than asking it takes
rests, the longer the more often that was so.
"""

from __future__ import annotations

from dataclasses import dataclass

from specrs.engine.drafting.sources import DraftSession, SourceProposal

_IDLE = 0.003  # of a plain round, what asking a source may take for each, as long as it gains less than that
_LONGEST_REST = 512  # rounds
_PATIENCE = 4  # times as long a source rests at most that has gained nothing several times in a row
_GAINS = 0.4  # plain rounds that a source is taken to gain, before it was asked
_COLD = 2  # first times of asking a source, which meet cold caches: both are free, and the shorter one counts
_LEARN, _LEARN_ALL = 0.1, 0.02  # weight of a proposal, among its request's and among the source's


@dataclass(eq=False)
class SourceStats:
    """What a source is worth to the engine, or to one request.

    Attributes:
        gains: smoothed plain rounds that a round with its proposal wins, or would have: the tokens that the target drew
            as it had said, less what verifying takes; nothing where no node was worth that.
        asking, watching: smoothed seconds of asking it once, and of telling it what came of a round.
        asked: how often that was.
    """

    gains: float = _GAINS
    asking: float = 0.0
    watching: float = 0.0
    asked: int = 0

    def took(self, seconds: float, learn: float) -> None:
        """Asking it took so long."""
        if self.asked < _COLD:
            self.asking = min(seconds, self.asking or seconds)
        else:
            self.asking += learn * (seconds - self.asking)
        self.asked += 1

    @property
    def seconds(self) -> float:
        """What it takes of a round."""
        return self.asking + self.watching


@dataclass(eq=False)
class SourceState:
    """One source, where one request asks it.

    Attributes:
        told: the request's drafting.
        everywhere: what the source is worth to the engine.
        worth: what it is worth to this request.
        rest: rounds until it is asked again.
        patience: by how much its next rest is longer than the first.
        part: what it proposed last.
        proposing: seconds that its last proposal took.
    """

    told: DraftSession
    everywhere: SourceStats
    worth: SourceStats
    rest: int = 0
    patience: int = 1
    part: SourceProposal | None = None
    proposing: float = 0.0

    @property
    def needs(self) -> float:
        """Seconds that the request must be able to pay for asking."""
        return self.worth.seconds if self.everywhere.asked >= _COLD else 0.0

    def spared(self, spare: float) -> bool:
        """Whether asking it takes no longer than seconds that cost nothing."""
        return self.everywhere.asked >= _COLD and self.worth.seconds <= spare

    def took(self, seconds: float, plain: float, spare: float = 0.0) -> float:
        """Asking it took so long, where a request's plain round takes ``plain``, and so many seconds cost nothing. What
        it took."""
        self.worth.took(seconds, _LEARN)
        self.everywhere.took(seconds, _LEARN_ALL)
        cost = max(self.worth.seconds - spare, 0.0)
        if self.worth.gains * plain < cost and self.everywhere.asked >= _COLD:
            rest = int(cost / (_IDLE * plain) * self.patience)
            self.rest = min(rest, _LONGEST_REST)
            self.patience = min(2 * self.patience, _PATIENCE)
        return seconds + self.worth.watching

    def gained(self, gain: float) -> None:
        """Its last proposal won so many plain rounds, or would have."""
        self.worth.gains += _LEARN * (gain - self.worth.gains)
        self.everywhere.gains += _LEARN_ALL * (gain - self.everywhere.gains)
        if gain > 0.0:
            self.rest, self.patience = 0, 1

    def watched(self, seconds: float) -> None:
        """Telling it of a verified tree took so long."""
        for worth in (self.worth, self.everywhere):
            worth.watching += _LEARN * (seconds - worth.watching)
