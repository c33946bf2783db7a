"""The draft head's state for one request: its draft KV, and the root to draft from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class HeadState:
    """State of the draft head for one request.

    Draft KV is written and sound on ``[first, end)``. The head has not run over the committed positions behind.

    Attributes:
        followed: True while the head drafts for the request; once False, it stays False.
        first: the first position whose draft KV the head reads, a multiple of the page size.
        end: end of the draft KV in use.
        warm: True while the target's features of new positions are kept, because the head may soon run over these.
        root: the head's result for the request's last token; ``None`` if there is none. Only the executor knows its
            form.
        features: the target's features of positions that the head has not run over, as far as the executor keeps them.
            Only the executor knows their form.
        shared: positions of draft KV that the prefix cache had at the request's admission.
    """

    followed: bool = True
    warm: bool = True
    first: int = 0
    end: int = 0
    root: object | None = None
    features: object | None = None
    shared: int = 0
    _sound: int = 0  # if `first` is not 0: positions from 0 on whose draft KV is sound

    @property
    def prefix(self) -> int:
        """Positions from 0 on whose draft KV is written and sound."""
        return self._sound if self.first else self.end

    def admit(self, committed: int, shared: int) -> None:
        """Begin, or begin again, after ``committed`` positions, the first ``shared`` of which have draft KV.

        The head begins behind all of them if some have none: nobody has their features.
        """
        self.shared = self._sound = shared
        self.end = committed if self.followed else shared
        self.first = self.end if self.end > shared else 0
        self.warm, self.root, self.features = True, None, None

    def begin(self, position: int) -> None:
        """Let the head begin at a position, a multiple of the page size, if that is behind its draft KV."""
        if position > self.end:
            self._sound = self.prefix
            self.first = self.end = position

    def warm_up(self, position: int) -> None:
        """Keep features from now on, so that the head can begin at a position, as `begin` says."""
        self.warm = True
        self.begin(position)

    def cool(self) -> None:
        """Keep no features until `warm_up`."""
        self.warm, self.root, self.features = False, None, None

    def reached(self, end: int, root: object | None) -> None:
        """Note that the head has written draft KV up to ``end``, and gave this root if that is the request's end."""
        self.end, self.root, self.features = end, root, None

    def give_up(self, sound: int) -> None:
        """Stop drafting for the request; the draft KV of the first ``sound`` positions is sound."""
        self.end = min(sound, self._sound) if self.first else sound
        self.followed, self.first = False, 0
        self.root = self.features = None
