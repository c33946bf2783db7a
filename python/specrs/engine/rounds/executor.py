"""The device's part of a step, behind two protocols. The round's logic (`runner`, `head`) computes on no tensor.

The logic picks requests, takes pages, has an `Executor` run passes, and commits the results to the requests. An
executor stands for one device: it has the models, the caches, the planner, and all memory that passes need.
`devices.host` has the executor of the CPU, `devices.cuda` the executor of a GPU.

A call may return before the device is done. Reading a result may wait for the device, so the logic reads as late as it
can: it reads nothing of a round's drafts before the target has been told to verify them, unless the host chooses among
the drafts or an observer looks on. A device may also report late that the head gave NaN: in the `faults` of
the next round, not in the pass that met the NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from specrs._specrs import DraftBeams, GrammarFailedError, Lease, Moves, NonFiniteError, Planner, TreeBatch
from specrs.engine.drafting.chooser import TreePolicy
from specrs.engine.drafting.trees import Drafted, VerifiedTrees
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Request
from specrs.engine.rounds.pages import Pages

Deepen = Callable[[DraftBeams, Sequence[int], int], bool]
"""Called before each draft step with the beams so far, each request's deepest useful level, and the level that the step
would reach. Returns True to take the step."""


class Pass(Protocol):
    """A pass of the target."""

    def logits(self, request: int, rows: Sequence[int]) -> torch.Tensor:
        """Logits of the given rows of a request, in order: float32 [n, vocab] on the host, until the next pass
        overwrites them. A prefill has logits only for `Request.scored_rows` and for rows that drew a token."""


class Prefilled(Pass, Protocol):
    """The results of a chunk of prefill."""

    @property
    def drawn(self) -> Sequence[tuple[list[int], NonFiniteError | GrammarFailedError | None]]:
        """The drawn token of each request that was to draw, or no token and the error that prevented it."""


class Verified(Pass, VerifiedTrees, Protocol):
    """The results of a round's pass of the target. The rows of the pass are the trees' nodes."""

    @property
    def faults(self) -> Sequence[tuple[NonFiniteError, int]]:
        """Faults of the drafts, as in `Drafted.faults`."""

    @property
    def lost(self) -> bool:
        """True if some scores were not finite, and the device ran on and overwrote them, so that nobody can tell the
        error. The round has to run again, with none behind it."""

    def of(self, batch: Batch, rows: Sequence[int]) -> Verified:
        """Return the results for ``rows`` of the round's batch. The requests of these rows are now ``batch``."""

    def wait(self) -> None:
        """Wait for the round. What the device noticed in it is raised here, if nothing has read a result before."""

    # For `Executor.launch`.

    @property
    def ahead(self) -> int:
        """How many rounds of the same requests one launch behind this one, the last one launched, may have."""

    def following(self, goes_on: bool) -> Verified | None:
        """Wait for this round, and return the round that the device has begun by itself behind it, if any. Unless it
        ``goes_on``, the device begins no other by itself."""


class DraftExecutor(Protocol):
    """The head's passes, and its values in `HeadState`: roots, and features of the target that the head has to read.

    Attributes:
        catches_up: True if the passes over positions that the head is behind cost next to nothing.
        visible: True if the host sees the drafts before they are verified, and can choose among them.
    """

    catches_up: bool
    visible: bool

    def keep(self, batch: Batch, passed: Pass, rows: Sequence[Sequence[int]]) -> None:
        """Keep of a pass what the head needs of the positions that each followed, warm request has just committed.

        That is the features, or the root if the device has already run the head over these positions.

        Args:
            rows: rows of the pass, per request: one for each of these positions, in order.
        """

    def can_extend(self, request: Request) -> bool:
        """Return whether the head can run over all committed positions of a request that it is behind.

        It cannot if features are missing: the request was cool, or an interrupt came after the positions were committed
        and before `keep`.
        """

    def extend(self, requests: Sequence[Request]) -> Sequence[object]:
        """Write draft KV from `HeadState.end` to the last committed position.

        Returns:
            The root of each request, or the `NonFiniteError` that makes its draft KV unsound.
        """

    def draft(self, batch: Batch, depths: Sequence[int], deepen: Deepen | None) -> Drafted:
        """Draft a tree for each request of the batch, up to the request's depth.

        A request with depth 0 or without a root gets a tree of its last token alone. With ``deepen`` the host drafts
        and has the trees. Without ``deepen`` nobody looks on, and the device takes every step that a depth needs.
        """

    def unite(self, drafted: Drafted, trees: TreeBatch) -> Drafted | None:
        """Return drafts that nobody looks at, united with ``trees``, which has a tree for each request.

        ``None`` if they cannot unite.
        """


class Executor(Protocol):
    """The target's passes, and the device and memory that these need."""

    @property
    def planner(self) -> Planner:
        """Plans passes, in the format that this device's attention reads."""

    @property
    def drafts(self) -> DraftExecutor | None:
        """The head's passes; ``None`` without a head."""

    def entered(self) -> AbstractContextManager[object]:
        """Return a context in which this thread works for the executor: on its device and in its order.

        Torch's inference mode is off in the context, because nobody may write to its tensors once the mode has ended.
        """

    @property
    def launched(self) -> bool:
        """True if a device launches whole rounds: each request takes as many rows as the largest tree, and trees that
        the host does not see are decided before a round."""

    @property
    def ahead(self) -> bool:
        """True if the device can begin a round before anybody has read the results of the last one (`launch`), if the
        round needs nothing from the host."""

    @property
    def clock(self) -> Callable[[], float]:
        """The seconds that requests pay for: on the host those that the thread has worked, so that no neighbour counts;
        on a device, and where the thread's clock is too coarse, those that pass."""

    @property
    def tail(self) -> int | None:
        """Positions that the head reads of a request before its first draft; ``None`` if its attention can begin at no
        other position than a request's first."""

    def policy(self, pages: Pages) -> TreePolicy:
        """Measure passes on this device, for an engine that drafts, and return the policy that picks trees by these
        times."""

    def copy(self, moves: Moves) -> None:
        """Copy KV from slot to slot, in every cache."""

    def prefill(self, batch: Batch, counts: Sequence[int], drawing: Sequence[int]) -> Prefilled:
        """Write the KV of each request's next ``counts[i]`` tokens, and draw the next token of some requests.

        Args:
            drawing: indices in the batch of the requests that draw.
        """

    def decode(self, batch: Batch) -> Verified:
        """Write the KV of each request's last token, and draw the next token. The trees are roots alone."""

    def verify(self, batch: Batch, drafted: Drafted) -> Verified:
        """Write the KV of all nodes, and accept from each tree's root on the nodes that plain decoding would draw.

        Args:
            drafted: the result of `drafts`, or trees that the host made.
        """

    def commit(self, batch: Batch, lease: Lease, verified: Verified) -> None:
        """Move the KV of each accepted path to the end of its request's prefix. The lease can be committed after."""

    # Rounds ahead of the host: only of an executor that is `ahead`.

    def launch(self, verified: Verified, rounds: int, levels: int) -> Verified | None:
        """Launch up to ``rounds`` rounds like this one behind it, whose pages are leased.

        Args:
            levels: levels of the head's drafts; this round may have others. 0 if it has no drafts.

        Returns:
            The first of the new rounds; ``None`` if it cannot be launched now.
        """

    def abandon(self, requests: Sequence[Request]) -> None:
        """Give up rounds in flight, and wait for them to end. The host's books undo their effect on the requests."""

    def close(self) -> None:
        """Let go of everything that keeps models and caches in memory. Nothing runs after this call."""
