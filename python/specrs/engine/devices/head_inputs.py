"""Inputs of a head's passes on the host: the target's features that wait for them, and the plans over these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from specrs import _specrs as core
from specrs.engine.drafting.trees import Drafted
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Request
from specrs.engine.rounds.executor import Pass
from specrs.models.features import FeatureRows, Features, KeptFeatures, gather


@dataclass(eq=False)
class ScoredPass:
    """A pass of the target.

    Attributes:
        aux: features of its rows.
        starts: each request's first row.
        scores: float32 logits on the host; the next pass may overwrite them.
    """

    aux: FeatureRows | None
    starts: Sequence[int]
    scores: torch.Tensor

    def features(self, request: int, rows: Sequence[int]) -> Features:
        """The target's features of the given rows of a request, in order."""
        assert self.aux is not None
        first = self.starts[request]
        return Features(self.aux, [first + row for row in rows])

    def logits(self, request: int, rows: Sequence[int]) -> torch.Tensor:
        first = self.starts[request]
        return self.scores[[first + row for row in rows]]


@dataclass(eq=False)
class HostDrafted:
    trees: core.TreeBatch
    levels: int
    faults: list[tuple[core.NonFiniteError, int]]


@dataclass(frozen=True)
class Entries:
    """Entries of the head's KV to write: ``count`` positions of a request from ``start`` on."""

    request: Request
    start: int
    count: int

    @property
    def text(self) -> list[int]:
        """The tokens at these positions, and the token behind."""
        return self.request.tokens[self.start : self.start + self.count + 1]

    @property
    def kept(self) -> bool:
        """True if the features of all these positions are kept."""
        features = cast("KeptFeatures | None", self.request.head.features)
        return features is not None and features.covers(self.start, self.start + self.count)

    def features(self) -> list[Features]:
        """The kept features of these positions."""
        return cast(KeptFeatures, self.request.head.features).of(self.start, self.start + self.count)


class KeptInputs:
    """Keeps what passes of a head read, and plans those over the target's features. A head's own device derives from
    it."""

    def __init__(self, planner: core.Planner) -> None:
        self._planner = planner

    def keep(self, batch: Batch, passed: Pass, rows: Sequence[Sequence[int]]) -> None:
        assert isinstance(passed, ScoredPass)
        for i, (r, some) in enumerate(zip(batch, rows, strict=True)):
            if not r.head.followed or not r.head.warm or not some:
                continue
            r.head.root = None
            start, kept = r.committed - len(some), cast("KeptFeatures | None", r.head.features)
            if kept is not None and kept.end == start:
                kept.add(start, passed.features(i, some))
                kept.drop(r.head.end)
            else:  # if others are missing before these, these are of no use
                new = KeptFeatures.of_pass(start, passed.features(i, some))
                r.head.features = new if start <= r.head.end else None

    def can_extend(self, request: Request) -> bool:
        return Entries(request, request.head.end, request.lag).kept

    def unite(self, drafted: Drafted, trees: core.TreeBatch) -> Drafted | None:
        return None

    def _inputs(self, entries: Sequence[Entries]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], core.Plan]:
        """Return tokens, features and plan of a pass over entries. An entry's token is the token after its position."""
        tokens = torch.tensor([t for e in entries for t in e.text[1:]])
        return tokens, gather(piece for e in entries for piece in e.features()), self._plan(entries)

    def _plan(self, entries: Sequence[Entries]) -> core.Plan:
        """Plan a pass of the head over entries."""
        requests, starts, counts = [e.request for e in entries], [e.start for e in entries], [e.count for e in entries]
        return begun(self._planner.extend([r.seq for r in requests], starts, counts), (r.head.first for r in requests))


def begun(plan: core.Plan, firsts: Iterable[int]) -> core.Plan:
    """Return the head's plan, changed so that it reads no draft KV from before each request's first position."""
    starts = list(firsts)
    return plan.attending_from(starts) if any(starts) else plan


def non_finite(what: str, row: torch.Tensor) -> core.NonFiniteError | None:
    """Return the error for a row that holds NaN or an infinity; ``None`` if all its values are finite."""
    bad = (~row.isfinite()).nonzero()
    if not len(bad):
        return None
    index = int(bad[0])
    value = str(row[index].item())
    error = core.NonFiniteError(f"{what}: {value} at index {index}")
    error.kind, error.what, error.value, error.index = "NonFinite", what, value, index
    return error
