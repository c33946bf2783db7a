"""A round's drafts: the decisions before it (`RoundPlan`) and the results after it (`RoundOutcome`)."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specrs.engine.drafting.gathering import HostTrees, Proposals
from specrs.engine.drafting.trees import VerifiedTrees
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Passed, Request


@dataclass(eq=False)
class RoundPlan:
    """The plan of a round's drafts. Rounds that a device launches one after another may share a plan.

    Attributes:
        batch: the requests of the round.
        proposals: proposals of sources other than the head; ``None`` without any.
        head: for each request, True if the head drafts for it; ``None`` in a round without the head.
        levels: levels of the head's drafts: the most before they are made, then their number.
        limit: the most seconds that the round may take.
        trees: trees that the host made, so that the next round has to wait for this round's tokens; ``None`` without
            any.
        united: True if the device unites each of ``trees`` with the head's tree.
        began: time when the round began, on the performance counter.
    """

    batch: Batch
    proposals: Proposals | None = None
    head: list[bool] | None = None
    levels: int = sys.maxsize
    limit: float = math.inf
    trees: HostTrees | None = None
    united: bool = False
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = time.perf_counter()

    @property
    def drafts(self) -> bool:
        """True if the round verifies drafts."""
        return self.head is not None or self.trees is not None

    @property
    def drafting(self) -> list[Request]:
        """The requests that the head drafts for."""
        return [] if self.head is None else [r for r, drafts in zip(self.batch, self.head, strict=True) if drafts]

    def with_levels(self, levels: int) -> RoundPlan:
        """Return the plan of a round like this one with other levels of the head's drafts; 0 for no drafts."""
        return replace(self, head=self.head if levels else None, levels=levels)

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
        rows: the rows of the plan's batch with results; the requests of other rows have ended meanwhile.
        passed: the results of each of these requests.
        verified: the trees of these requests, and the accepted paths.
        seconds: seconds that the round took; ``None`` if a device waited for its plan, so that it took longer.
    """

    plan: RoundPlan
    rows: Sequence[int]
    passed: Sequence[Passed]
    verified: VerifiedTrees
    seconds: float | None

    @property
    def head(self) -> list[bool]:
        """For each of these requests, True if the head drafted for it."""
        return [self.plan.head is not None and self.plan.head[row] for row in self.rows]
