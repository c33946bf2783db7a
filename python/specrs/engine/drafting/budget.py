"""What drafts may lose: a purse of each request, and a bank of all requests of its kind.

Both are the same thing: plain rounds that may be lost to drafts from now on. Each plain round's worth of tokens adds a
little, a round that wins adds what it won, up to `CAP`; whatever is done for drafts is paid from both. So a request
drafts from its first round on, and stops within a few rounds where that loses; where requests of a kind lose one after
the other, their bank is empty, and the next ones hardly try; and where they win, a request whose drafts lose for a
while goes on. In the long run an engine loses no more than `RATE` of what plain decoding takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

STAKE, SHARE = 3.0, 0.05  # plain rounds that a request may lose at first, and of a short one's tokens at most
BANK = 8.0  # that the requests of a new engine may lose together, and that the prompt of one may take the head
CAP = 16.0  # of either, so that what was won long ago is not lost at once
RATE = 0.0075  # for each plain round: 2% of 256 tokens, with `STAKE`; under 1% of an engine's time, with `BANK`


@dataclass(eq=False)
class Purse:
    """Plain rounds that may be lost to drafts."""

    left: float

    def pay(self, rounds: float) -> None:
        """Drafts took so many plain rounds more than they won; negative: they won them."""
        self.left = min(self.left - rounds, max(CAP, self.left))

    def earn(self, rounds: float) -> None:
        """Plain decoding would have taken so many rounds."""
        self.pay(-RATE * rounds)


def stake_of(tokens: int) -> float:
    """Plain rounds that a request of up to so many tokens may lose at first."""
    return min(STAKE, SHARE * tokens)


@dataclass(eq=False)
class Account:
    """One request's: its purse, and its share of a bank.

    A plain round of a batch is one of each of its requests, but one of the bank: its time passes once.
    """

    bank: Purse
    purse: Purse
    produced: int = 0  # tokens that have been earned for
    drew: bool = False  # the head has drafted for it
    _begun: float = field(init=False)

    def __post_init__(self) -> None:
        self._begun = self.purse.left

    def room(self, produced: int, batch: int, own: float = math.inf) -> float:
        """Plain rounds that it may still lose, after so many tokens.

        Args:
            own: plain rounds that a round with drafts costs each request of the batch. Where the purse has those, the
                bank pays what the others lose by it: else none of a batch could find out alone that drafts win again.
        """
        new, self.produced = produced - self.produced, produced
        self.purse.earn(new)
        self.bank.earn(new / batch)
        bank = self.bank.left * batch
        return bank if self.purse.left >= own else min(self.purse.left, bank)

    def pay(self, rounds: float, batch: int) -> None:
        """As `Purse.pay`, of a batch that waits for it: rounds of each request, all of which this one pays."""
        self.purse.pay(rounds)
        self.bank.pay(rounds / batch)

    @property
    def won(self) -> float:
        """Plain rounds that it has won, as far as they are remembered."""
        return self.purse.left - self._begun
