"""The budget for time lost to drafts: a token bucket of each request, and one of the engine for each kind of requests.

Both buckets hold the number of plain rounds that may still be lost to drafts. Each token of a round adds a little, and
a round that wins adds the rounds that it won, up to `CAP`. All work that is done for drafts is paid from both buckets,
but on a device the pass behind a prompt from the engine's alone, so that a request keeps all that it has for its first
rounds. A request drafts as long as both buckets hold anything. So it drafts from its first round on, and stops within
a few rounds if its drafts lose. If one request of a kind after another loses, the engine's bucket becomes empty, and
later requests hardly try. If they win, a request goes on drafting even while its own drafts lose for a while.

A request loses at most what its bucket held at first, `RATE` of its tokens, and its last round, which may cost more
than is left; on a GPU, where rounds are launched behind others unread, its last two. An engine loses at most the same
by its own bucket. A request pays for the time that its drafts took: on a host for that of the thread, so that neither a
stall nor a neighbour counts; on a device for that between rounds. A plain round's time is known by the pace of the
machine, so that all of this holds as far as the pace is known, and no more than `CAP` is ever owed.
"""

from __future__ import annotations

from dataclasses import dataclass

# Plain rounds that a request may lose at first, and at most this share of its tokens. With 2.25 and 3.5%, prose at
# temperature 1 lost 5.5% of 64 tokens, counted (558b7bb, not kept).
REQUEST, OF_ANSWER = 1.75, 0.03
ENGINE = 8.0  # plain rounds that a new engine's requests may lose together
CAP = 16.0  # most plain rounds in either bucket, so that rounds won long ago are not lost at once
RATE = 0.0075  # earned by each plain round: counted 0.95x plain decoding at 64 tokens, 0.98x at 256


@dataclass(eq=False)
class TokenBucket:
    """A number of plain rounds that may still be lost to drafts: ``left``."""

    left: float

    def pay(self, rounds: float) -> None:
        """Take ``rounds`` that drafts have lost; a negative number adds rounds that drafts have won. No more than `CAP`
        rounds are owed, so that one stall does not end drafting for good."""
        self.left = max(min(self.left - rounds, max(CAP, self.left)), -CAP)


def request_bucket(tokens: int) -> float:
    """Return the plain rounds that a request of up to ``tokens`` tokens may lose at first."""
    return min(REQUEST, OF_ANSWER * tokens)


@dataclass(eq=False)
class Account:
    """One request's bucket, and its share of the engine's.

    A plain round of a batch counts once for each of its requests, and once for the engine, because its time passes
    once.

    Attributes:
        engine: the bucket of all requests of the same kind.
        request: the request's own bucket.
    """

    engine: TokenBucket
    request: TokenBucket

    def earn(self, tokens: int, batch: int) -> None:
        """Earn for new tokens of the request, in a batch of ``batch`` requests."""
        self.pay(-RATE * tokens, batch)

    def left(self, batch: int) -> float:
        """Return the plain rounds that the request may still lose while ``batch`` requests run together."""
        return min(self.request.left, self.engine.left * batch)

    def pay(self, rounds: float, batch: int) -> None:
        """Take plain rounds from both buckets, as `TokenBucket.pay` does, for drafts that the whole batch waits for.

        Args:
            rounds: plain rounds, summed over the requests of the batch. This request pays for all of them.
            batch: number of requests that wait.
        """
        self.request.pay(rounds)
        self.engine.pay(rounds / batch)
