"""A round's drafts: what was decided before it (`RoundPlan`), and what came of it (`RoundOutcome`)."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from specrs.engine.drafting.gathering import HostTrees, Proposals
from specrs.engine.drafting.trees import VerifiedTrees
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Passed, Request


@dataclass(eq=False)
class RoundPlan:
    """Whose drafts a round verifies. Rounds that a device launches behind one another share a plan.

    Attributes:
        batch: requests of the round.
        proposals: of other sources than the head; ``None`` without any.
        head: which of the requests the head drafts for; ``None`` in a round without it.
        levels: of the head's drafts at most, where trees are decided before a round.
        limit: seconds that the round may take.
        steps: draft steps that the head took.
        trees: made by the host; ``None`` where there are none. The next round waits for this one's tokens then.
        united: whether the device makes one tree of each of ``trees`` and the head's.
        resumes: whether the head has to catch up before the first round, which its requests have paid.
        began: time when the round began, on the performance counter.
    """

    batch: Batch
    proposals: Proposals | None = None
    head: list[bool] | None = None
    levels: int = sys.maxsize
    limit: float = math.inf
    steps: int = 0
    trees: HostTrees | None = None
    united: bool = False
    resumes: bool = False
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

    def positions(self, of_head: int) -> list[int]:
        """Positions behind the committed ones that each request's part of the round writes; ``of_head`` with the
        head."""
        if self.head is not None:
            return [of_head] * len(self.batch)
        return [1] * len(self.batch) if self.trees is None else [len(tree) for tree in self.trees.drafts]


@dataclass(frozen=True)
class RoundOutcome:
    """What a round gave.

    Attributes:
        plan: of the round.
        rows: of the plan's batch, those that the round gives results for; other requests have ended meanwhile.
        passed: what each of these requests got.
        verified: their trees, and what of these was accepted.
        seconds: that the round took.
    """

    plan: RoundPlan
    rows: Sequence[int]
    passed: Sequence[Passed]
    verified: VerifiedTrees
    seconds: float

    @property
    def head(self) -> list[bool]:
        """For which of these requests the head drafted."""
        return [self.plan.head is not None and self.plan.head[row] for row in self.rows]
