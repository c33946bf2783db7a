"""The bookkeeping of the head's passes: features that wait, and roots to draft from. An executor runs the passes.

The head's entry at position p pairs the target's features of p with the token at p + 1. Features wait on their request
until the head runs over them. If the head gives NaN, the request loses its drafts and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from specrs._specrs import DraftBeams, NonFiniteError
from specrs.engine.drafting.speculation import GivenTree
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Request
from specrs.engine.rounds.executor import Drafted, DraftExecutor, Entries, Pass, Watched
from specrs.engine.rounds.observer import RoundObserver

_MAX_LAG = 256  # features that a request may hold before its draft KV is brought up to date


class Head:
    """Brings the draft KV of requests up to date, and drafts from there.

    Args:
        executor: runs the head.
        observers: see the head's passes; the list is shared with the runner.
    """

    def __init__(self, executor: DraftExecutor, observers: Sequence[RoundObserver]) -> None:
        self._executor, self._observers = executor, observers

    # -- features -----------------------------------------------------------------------------------------------

    def remember(self, batch: Batch, passed: Pass, rows: Sequence[Sequence[int]]) -> None:
        """Keep the target's features of newly committed positions until the head has run over them.

        If the device has already run the head over these positions, take its root instead.

        Args:
            rows: rows of the pass to keep, per request.
        """
        for i, (r, index) in enumerate(zip(batch, rows, strict=True)):
            if not index or not r.followed:
                continue
            root = passed.root(i)
            if root is not None:
                r.root = root
            else:
                r.wait(passed.features(i, index))

    def bound_features(self, batch: Batch, speculation: GivenTree) -> None:
        """Write the draft KV of requests whose features have waited for long, or give up their drafts.

        A head that may begin anywhere (``speculation.tail``) drops the older features instead.
        """
        if speculation.tail is not None:
            for r in batch:
                if r.lag >= 2 * speculation.tail:
                    r.begin_drafts(speculation.begins(r))
            return
        late = [r for r in batch if r.lag >= _MAX_LAG and r.finish_reason is None]
        if not late:
            return
        for r in late:
            if not speculation.catches_up(r, len(batch)):
                r.give_up_drafts(r.draft_valid)
        self.write([r for r in late if r.followed])

    # -- passes -------------------------------------------------------------------------------------------------

    def after_prefill(self, reqs: Sequence[Request], speculation: GivenTree) -> None:
        """Write the draft KV of prompts, as far as they are prefilled.

        A head that may begin anywhere (``speculation.tail``) writes it once a prompt is complete, near its end alone.
        """
        if speculation.tail is not None:
            for r in reqs:
                if r.followed:
                    r.begin_drafts(speculation.begins(r))
            reqs = [r for r in reqs if r.ready]
            if not self._executor.splits:
                self.extend(reqs, speculation)
        self.write(reqs)

    def write(self, reqs: Sequence[Request], keep: int = 1) -> None:
        """Write the draft KV of all features that wait, except each request's last ``keep``.

        `extend` runs over the excepted features, because their logits are wanted.
        """
        reqs = [r for r in reqs if r.lag > keep]
        if not reqs:
            return
        entries = self._entries(reqs, keep)
        errors = self._executor.write(entries)
        for r, start, n, error in zip(reqs, entries.starts, entries.counts, errors, strict=True):
            if error is not None:
                r.give_up_drafts(start, error)
            else:
                r.drop_oldest(n)

    def before_drafting(self, reqs: Sequence[Request], speculation: GivenTree) -> None:
        """Make requests ready to draft: write draft KV and compute a root from the features that wait."""
        for r in reqs:
            if r.lag:
                r.begin_drafts(speculation.begins(r))
        if self._executor.splits:
            self.write(reqs)
        self.extend(reqs, speculation)

    def extend(self, reqs: Sequence[Request], speculation: GivenTree) -> None:
        """Run the head over the features that wait, so that draft KV, logits and hidden state reach the root."""
        reqs = [r for r in reqs if r.pending]
        if not reqs:
            return
        entries = self._entries(reqs)
        for r, start, root in zip(reqs, entries.starts, self._executor.extend(entries, speculation.timed), strict=True):
            _extended(r, start, root)

    def draft(self, batch: Batch, drafting: Sequence[bool], speculation: GivenTree) -> Drafted:
        """Draft a tree for each request that is ``drafting``, and a root alone for the others.

        The draft KV of the drafting requests must be up to date.
        """
        if speculation.given and not self._observers:
            depths = [r.max_depth if d and r.followed else 0 for r, d in zip(batch, drafting, strict=True)]
            cap = speculation.cap(batch, drafting)
            return self._executor.draft(batch, [min(n, cap) for n in depths], None, speculation.timed)
        limit = speculation.limit(batch, drafting)
        drafted = self.grow(batch, drafting, speculation, limit)
        least = speculation.least_score(batch, drafted.trees, drafted.steps, limit)
        return drafted if least is None else self._executor.cut(drafted, least)

    def grow(self, batch: Batch, drafting: Sequence[bool], speculation: GivenTree, limit: float) -> Watched:
        """Draft step by step, as long as another step pays in a round that may take ``limit`` seconds."""
        depths = [r.max_depth if d and r.followed else 0 for r, d in zip(batch, drafting, strict=True)]

        def deepen(beams: DraftBeams, depths: Sequence[int], levels: int) -> bool:
            if not speculation.deepen(batch, beams, depths, levels, limit):
                return False
            for o in self._observers:
                o.drafted(beams)
            return True

        return cast(Watched, self._executor.draft(batch, depths, deepen, speculation.timed))

    def _entries(self, reqs: Sequence[Request], keep: int = 0) -> Entries:
        """Return all positions that wait, except each request's last ``keep``."""
        starts, counts = [r.draft_valid for r in reqs], [r.lag - keep for r in reqs]
        entries = Entries(reqs, [r.seq for r in reqs], starts, counts)
        for o in self._observers:
            o.extended(entries.seqs, starts, counts)
        return entries


def _extended(r: Request, start: int, root: object) -> None:
    """Note that the head has run over all features that waited, from ``start`` on."""
    if isinstance(root, NonFiniteError):
        r.give_up_drafts(start, root)
    else:
        r.drop_pending()
        r.root = root
