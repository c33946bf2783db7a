"""The draft head's state for one request: its draft KV, the features that wait, and the root to draft from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specrs.models.features import Features


@dataclass(eq=False)
class HeadState:
    """State of the draft head for one request.

    Draft KV is written and sound on ``[first, end)``. The target's features of the ``lag`` positions after it wait for
    the head. So ``end + lag`` positions are committed as long as the request is ``followed``.

    Attributes:
        followed: True while the head drafts for the request; once False, it stays False.
        first: the first position whose draft KV the head reads, a multiple of the page size.
        end: end of the draft KV in use.
        lag: number of positions whose features wait.
        root: the head's result for the request's last token; ``None`` if there is none. Only the executor knows its
            form.
        shared: positions of draft KV that the prefix cache had at the request's admission.
    """

    followed: bool = True
    first: int = 0
    end: int = 0
    lag: int = 0
    root: object | None = None
    shared: int = 0
    _waiting: list[Features] = field(default_factory=list)
    _kept: int = 0  # if `first` is not 0: positions from 0 on whose draft KV is sound

    @property
    def prefix(self) -> int:
        """Positions from 0 on whose draft KV is written and sound."""
        return self._kept if self.first else self.end

    def admit(self, committed: int, shared: int) -> None:
        """Begin, or begin again, after ``committed`` positions, the first ``shared`` of which have draft KV."""
        self.first, self.shared, self._kept = 0, shared, shared
        self.end = committed if self.followed else shared
        self._forget()

    def wait(self, features: Features) -> None:
        """Keep the features of positions that were just committed, until the head has run over them."""
        self.lag += len(features)
        self.root = None
        if features.memory is None and self.unkept:
            features = self._waiting.pop().longer(len(features))
        self._waiting.append(features)

    @property
    def ready(self) -> bool:
        """True if the head can draft in the next round. It cannot where the root was lost and no features wait, until a
        round without drafts has given some."""
        return self.followed and (self.root is not None or self.lag > 0)

    @property
    def unkept(self) -> bool:
        """True if nobody kept the features of the last positions that wait."""
        return bool(self._waiting) and self._waiting[-1].memory is None

    def recall(self, features: Features) -> None:
        """Replace all features that wait, now that the target has run over their positions again."""
        self._waiting[:] = [features]

    def oldest(self, count: int) -> list[Features]:
        """Return the waiting features of the first ``count`` positions."""
        some: list[Features] = []
        for features in self._waiting:
            if count <= 0:
                break
            some.append(features if len(features) <= count else features[:count])
            count -= len(features)
        return some

    def wrote(self, count: int) -> None:
        """Note that the draft KV of the first ``count`` waiting positions is written."""
        self.end += count
        self.lag -= count
        while self._waiting and count >= len(self._waiting[0]):
            count -= len(self._waiting.pop(0))
        if count:
            self._waiting[0] = self._waiting[0][count:]

    def reached(self, end: int, root: object) -> None:
        """Note that the head has run over all positions before ``end``, and gave this root."""
        self._forget()
        self.end, self.root = end, root

    def begin(self, position: int) -> None:
        """Let the head begin at a position, a multiple of the page size.

        Features of earlier positions are dropped. Sound draft KV from 0 on is remembered for the cache.
        """
        skipped = position - self.end
        if skipped > 0:
            self._kept = self.prefix
            self.first = position
            self.wrote(skipped)

    def give_up(self, sound: int) -> None:
        """Stop drafting for the request; the draft KV of the first ``sound`` positions is sound."""
        self.end = min(sound, self._kept) if self.first else sound
        self.followed, self.first = False, 0
        self._forget()

    def _forget(self) -> None:
        self._waiting.clear()
        self.lag, self.root = 0, None
