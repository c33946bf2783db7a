"""What drafts may lose: a token bucket of each request, and one of the engine for all requests of a kind.

Both hold plain rounds that may be lost to drafts from now on. Each token adds a little, a round that wins adds what it
won, up to `CAP`; everything that is done for drafts is paid from both. So a request drafts from its first round on, and
stops within a few rounds where drafts lose. Where requests of a kind lose one after the other, the engine's bucket is
empty, and the next ones hardly try. Where they win, a request whose drafts lose for a while goes on. In the long run an
engine loses no more than `RATE` of what plain decoding takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

REQUEST, OF_ANSWER = 3.0, 0.05  # plain rounds that a request may lose at first, and of a short one's tokens at most
ENGINE = 8.0  # that the requests of a new engine may lose together, and that the prompt of one may take the head
CAP = 16.0  # of either, so that what was won long ago is not lost at once
RATE = 0.0075  # for each plain round: 2% of 256 tokens, with `REQUEST`; under 1% of an engine's time, with `ENGINE`


@dataclass(eq=False)
class TokenBucket:
    """Plain rounds that may be lost to drafts."""

    left: float

    def pay(self, rounds: float) -> None:
        """Drafts took so many plain rounds more than they won; negative: they won them."""
        self.left = min(self.left - rounds, max(CAP, self.left))

    def earn(self, rounds: float) -> None:
        """Plain decoding would have taken so many rounds."""
        self.pay(-RATE * rounds)


def request_bucket(tokens: int) -> float:
    """Plain rounds that a request of up to so many tokens may lose at first."""
    return min(REQUEST, OF_ANSWER * tokens)


@dataclass(eq=False)
class Account:
    """One request's bucket, and its share of the engine's.

    A plain round of a batch is one plain round for each of its requests, and one for the engine: its time passes once.

    Attributes:
        engine: the bucket of all requests of its kind.
        request: its own.
        produced: tokens that both have earned for.
        wakes: the number of the request's tokens from which on it may be able to pay for drafts.
    """

    engine: TokenBucket
    request: TokenBucket
    produced: int = 0
    wakes: float = 0.0
    _begun: float = field(init=False)

    def __post_init__(self) -> None:
        self._begun = self.request.left

    def room(self, produced: int, batch: int, own: float = math.inf) -> float:
        """Plain rounds that it may still lose, after so many tokens.

        Args:
            own: plain rounds that a round with drafts costs each request of the batch. Where the request's bucket has
                those, the engine's pays what the others lose by it: else none of a batch could find out alone that
                drafts win again.
        """
        new, self.produced = produced - self.produced, produced
        self.request.earn(new)
        self.engine.earn(new / batch)
        engine = self.engine.left * batch
        return engine if self.request.left >= own else min(self.request.left, engine)

    def pay(self, rounds: float, batch: int) -> None:
        """As `TokenBucket.pay`, of a batch that waits for it: rounds of each request, all of which this one pays."""
        self.request.pay(rounds)
        self.engine.pay(rounds / batch)

    @property
    def won(self) -> float:
        """Plain rounds that it has won, as far as they are remembered."""
        return self.request.left - self._begun
