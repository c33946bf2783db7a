"""The device's part of a step, behind two protocols: the round's logic (`runner`, `drafter`) computes on no tensor.

The logic picks requests, takes pages, has an `Executor` run passes, and commits their results to the requests. An
executor is one device: models, caches, the planner, and all memory that passes need. `host` has the CPU's, `cuda` a
GPU's.

A call may return before its device is done. Reading a result may wait for it, so the logic reads as late as it can:
nothing from the first pass of a round until the target has been told to verify, unless a cost model goes by the drafts'
scores or an observer looks on. A device may also tell late that the head gave NaN: by `Drafted.faults` of the next
round, not by the pass that met it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

import torch

from specrs._specrs import DraftBeams, GrammarFailedError, Lease, Moves, NonFiniteError, Planner, TreeBatch
from specrs._specrs import Sequence as KvSequence
from specrs.engine.drafting.speculation import AdaptiveTree, PassKind
from specrs.engine.drafting.trees import VerifiedTrees
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Request
from specrs.engine.rounds.pages import Pages
from specrs.models import Placement
from specrs.models.features import Features

_P = ParamSpec("_P")
_T = TypeVar("_T")

Deepen = Callable[[DraftBeams, Sequence[int], int], bool]
"""Asked before each draft step, with the beams so far, each request's deepest useful level, and the level that the step
would reach: whether to go on."""


class Clock(Protocol):
    """Times passes (`GivenTree.timed`). An executor whose passes outlast the call does not use it."""

    def __call__(self, kind: PassKind, rows: int, run: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a pass over so many rows."""


@dataclass(eq=False)
class Entries:
    """Entries of the head's KV: of each request ``counts[i]`` positions from ``starts[i]`` on, whose features wait."""

    requests: Sequence[Request]
    seqs: list[KvSequence]
    starts: list[int]
    counts: list[int]


class Pass(Protocol):
    """A pass of the target."""

    def features(self, request: int, rows: Sequence[int]) -> Features:
        """The target's features of some of a request's rows in the pass, in order. The pass must have kept them."""

    def logits(self, request: int, rows: Sequence[int]) -> torch.Tensor:
        """Logits of some of a request's rows in the pass, in order: float32 [n, vocab] on the host, until the next pass
        overwrites them. A prefill has those of its `Request.scored_rows` and of rows that drew."""

    def root(self, request: int) -> object | None:
        """The head's result for the request's new last token (`Request.root`), where the head has run over what was
        accepted of it; then nobody asks for those features."""


class Prefilled(Pass, Protocol):
    """The results of a chunk of prefill."""

    @property
    def drawn(self) -> Sequence[tuple[list[int], NonFiniteError | GrammarFailedError | None]]:
        """For each request that was to draw: its token, or why there is none."""


class Verified(Pass, VerifiedTrees, Protocol):
    """What a round's pass of the target found; its rows are the trees' nodes."""

    @property
    def faults(self) -> Sequence[tuple[NonFiniteError, int]]:
        """Those of the drafts (`Watched.faults`)."""

    @property
    def lost(self) -> Sequence[int]:
        """Requests whose scores were not finite, of which the device has kept too little to say why: it ran on. They
        are where they were before the round, and meet it again."""


class Drafted(Protocol):
    """Trees to verify, which the device may build only then."""

    @property
    def steps(self) -> int:
        """Draft steps that lead to them."""


class Watched(Drafted, Protocol):
    """Trees that somebody looked at as they were drafted."""

    @property
    def trees(self) -> TreeBatch:
        """The trees; having them waits for nothing, reading them may."""

    @property
    def faults(self) -> Sequence[tuple[NonFiniteError, int]]:
        """Requests (rows of the batch) that cannot be drafted for any more, and how many positions of their draft KV
        are sound. Their trees are a root alone."""


class DraftExecutor(Protocol):
    """The head's passes. `Request.root` is the executor's own value: the head's result for the request's last token."""

    @property
    def vocabulary(self) -> frozenset[int]:
        """Tokens that the head can draft."""

    def write(self, entries: Entries) -> Sequence[NonFiniteError | None]:
        """Write draft KV; for each request why it is not sound, or ``None``."""

    def extend(self, entries: Entries, clock: Clock) -> Sequence[object]:
        """Write draft KV up to the root; for each request its root, or a `NonFiniteError`."""

    def draft(self, batch: Batch, depths: Sequence[int], deepen: Deepen | None, clock: Clock) -> Drafted:
        """Draft a tree for each request of the batch, up to its depth; roots for those with depth 0 or no root.
        With ``deepen`` the result is `Watched`; without, nobody looks on and each step is taken that a depth needs."""

    def cut(self, drafted: Watched, least: float) -> Watched:
        """The same without nodes of a cumulative log-probability below ``least``."""

    @property
    def unites(self) -> bool:
        """Whether `unite` can be had of drafts that nobody looks at."""

    def unite(self, drafted: Drafted, trees: TreeBatch) -> Drafted | None:
        """The same, which the device makes one tree of with one of these for each request; ``None`` where it cannot."""


class Executor(Protocol):
    """The target's passes, and what they need."""

    @property
    def placement(self) -> Placement:
        """The device."""

    @property
    def planner(self) -> Planner:
        """Plans passes, in the format that this device's attention reads."""

    @property
    def drafts(self) -> DraftExecutor | None:
        """The head's passes; ``None`` without a head."""

    def entered(self) -> AbstractContextManager[object]:
        """Within the context, this thread's work is the executor's: on its device, in its order, and outside of torch's
        inference mode, whose tensors nobody may write to once it has ended."""

    def speculation(self, pages: Pages) -> AdaptiveTree:
        """Picks trees by what passes take on this device, of an engine that drafts; measures them."""

    def copy(self, moves: Moves) -> None:
        """Copy KV from slot to slot, in every cache."""

    def prefill(self, batch: Batch, counts: Sequence[int], drawing: Sequence[int], follow: bool) -> Prefilled:
        """Write the KV of each request's next ``counts[i]`` tokens, and draw the next token of those ``drawing``
        (indices of the batch). follow: keep features."""

    def decode(self, batch: Batch, follow: bool, clock: Clock) -> Verified:
        """Write the KV of each request's last token, and draw the next one: a tree of a root."""

    def verify(self, batch: Batch, drafted: Drafted, follow: bool, clock: Clock) -> Verified:
        """Write the KV of all nodes, and accept from each tree's root on what decoding would draw. drafted: what
        `drafts` gave, or any `Watched` whose trees the host made."""

    def commit(self, batch: Batch, lease: Lease, verified: Verified) -> None:
        """Make the KV of accepted paths the end of each request's prefix; then the lease can be committed."""

    # Rounds behind a round of which nobody has read anything yet: an executor that can say what the next one needs
    # without the host launches it at once.

    @property
    def waited(self) -> float:
        """Seconds, ever, for which the host had nothing to do but to wait for such rounds."""

    def following(self, verified: Verified) -> Verified | None:
        """The round that the device has begun by itself behind this one, for which this one is waited for."""

    def ahead(self, verified: Verified) -> int:
        """How many rounds over the same requests can be launched behind this one, the last of all; 0 for none."""

    def launch(self, verified: Verified, rounds: int) -> Verified | None:
        """Launch up to so many, whose pages are leased. Returns the first; ``None`` where it cannot be now."""

    def request_stop(self) -> None:
        """The host waits for what is in flight: the device begins no further round by itself."""

    def collect(self, verified: Verified, batch: Batch, rows: Sequence[int]) -> Verified:
        """What a round gave these rows of its batch, whose requests are ``batch`` now."""

    def abandon(self, requests: Sequence[Request]) -> None:
        """Rounds in flight are over, and what they did to these requests is undone by the host's books. Waits."""

    def close(self) -> None:
        """Let go of what keeps models and caches: nothing runs any more."""
