"""A round's drafts: the decisions before it (`RoundPlan`) and the results after it (`RoundOutcome`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from specrs.engine.drafting.gathering import HostTrees, Proposals
from specrs.engine.drafting.trees import VerifiedTrees
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Passed, Request


@dataclass(frozen=True, eq=False)
class RoundPlan:
    """The plan of a round's drafts. Rounds that a device launches one after another share a plan.

    Attributes:
        batch: the requests of the round.
        proposals: proposals of sources other than the head, for the host to merge with the head's drafts; ``None``
            without any.
        head: for each request, True if the head drafts for it; ``None`` in a round without the head.
        levels: most levels of the head's drafts.
        trees: trees of sources other than the head, to verify alone or, by a device, united with the head's; ``None``
            without any.
        began: time when the round began, by the executor's clock: behind asking the sources, but before what the head
            has run for it behind the last round.
    """

    batch: Batch
    proposals: Proposals | None = None
    head: Sequence[bool] | None = None
    levels: int = 0
    trees: HostTrees | None = None
    began: float = 0.0

    @property
    def drafts(self) -> bool:
        """True if the round verifies drafts."""
        return self.head is not None or self.trees is not None

    @property
    def drafting(self) -> list[Request]:
        """The requests that the head drafts for."""
        return [] if self.head is None else [r for r, drafts in zip(self.batch, self.head, strict=True) if drafts]

    def positions(self, of_head: int) -> list[int]:
        """Return how many positions behind the committed ones the round writes for each request.

        Args:
            of_head: positions for each request in a round with the head.
        """
        if self.head is not None:
            return [of_head] * len(self.batch)
        return [1] * len(self.batch) if self.trees is None else [len(tree) for tree in self.trees.drafts]


@dataclass(frozen=True)
class RoundOutcome:
    """The results of a round.

    Attributes:
        plan: the plan of the round.
        trees: trees that the host chose, or that a device united with the head's; ``None`` without any.
        rows: the rows of the plan's batch with results; the requests of other rows have ended meanwhile.
        passed: the results of each of these requests.
        verified: the trees of these requests, and the accepted paths.
        seconds: seconds that the round took; ``None`` if a device waited for its plan, so that it took longer.
    """

    plan: RoundPlan
    trees: HostTrees | None
    rows: Sequence[int]
    passed: Sequence[Passed]
    verified: VerifiedTrees
    seconds: float | None

    @cached_property
    def head(self) -> list[bool]:
        """For each of these requests, True if the head drafted for it."""
        return [self.plan.head is not None and self.plan.head[row] for row in self.rows]

    @cached_property
    def sizes(self) -> list[int]:
        """The nodes of each of these requests' trees."""
        return self.verified.trees.sizes if self.plan.drafts else [1] * len(self.rows)

    @cached_property
    def united(self) -> bool:
        """True if a device united ``trees`` with the head's."""
        return self.trees is not None and self.plan.head is not None and self.verified.origins is not None
