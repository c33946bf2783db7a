"""A head that drafts step by step, on a GPU. Its roots stay there, and rounds draft from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch

from specrs import _specrs as core
from specrs.engine.config import EngineConfig
from specrs.engine.devices.entering import Entering
from specrs.engine.devices.head_inputs import Entries
from specrs.engine.devices.host import HostDrafts, Root
from specrs.engine.devices.launched import AskedRound, DeviceRoot, LaunchedRound
from specrs.engine.devices.memory import Roots
from specrs.engine.drafting.levels import drafted_levels
from specrs.engine.drafting.trees import Drafted
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Request
from specrs.engine.rounds.executor import Deepen, Pass
from specrs.models.cuda import CudaDense, DevicePlan
from specrs.models.eagle3 import Eagle3Head
from specrs.models.ops import KvMemory


class CudaDrafts(HostDrafts):
    """The head's passes on a GPU. Roots stay on the GPU, and the host waits for nothing.

    Rounds keep no features. If a request that has not drafted drafts again, the target makes them again (`Entering`).

    If the head gives NaN, its scores for every later root are NaN too. The round that drafts by such scores reports
    the fault (`Verified.faults`).

    Attributes:
        entering: passes up to roots, for more requests from one to the next.
    """

    visible = False

    def __init__(
        self,
        roots: Roots,
        head: Eagle3Head,
        cache: KvMemory,
        planner: core.Planner,
        config: EngineConfig,
        vocab_size: int,
    ) -> None:
        super().__init__(head, cache, planner, config, vocab_size)
        self._roots, self._steps, self._most_rows = roots, planner.geometry.shape.steps, config.prefill_chunk
        self.entering: list[Entering] = []

    def keep(self, batch: Batch, passed: Pass, rows: Sequence[Sequence[int]]) -> None:
        if not isinstance(passed, LaunchedRound):
            super().keep(batch, passed, rows)
            return
        for i, (r, some) in enumerate(zip(batch, rows, strict=True)):
            if r.head.followed and some:
                r.head.root = r.head.features = None
                if (root := passed.root(i)) is not None:
                    r.head.reached(r.committed, root)

    def can_extend(self, request: Request) -> bool:
        return True  # the target makes features that are missing

    def extend(self, requests: Sequence[Request]) -> Sequence[object]:
        most = self.entering[-1].rows
        found = [DeviceRoot(r.seq.row, r.head.end) for r in requests]
        self._write([Entries(r, r.head.end, r.lag - most) for r in requests if r.lag > most])
        counts = [min(r.lag, most) for r in requests]
        entries = [Entries(r, r.committed - n, n) for r, n in zip(requests, counts, strict=True)]
        for recalls in (False, True):
            some = [e for e in entries if e.kept != recalls]
            while some:
                enters = next((each for each in self.entering if each.batch >= len(some)), self.entering[-1])
                self._enter(enters, some[: enters.batch], recalls)
                some = some[enters.batch :]
        return found

    def _write(self, entries: Sequence[Entries]) -> None:
        """Write draft KV whose roots nobody wants, by kept features, or by features that the target makes again."""
        for e in entries:
            if not e.kept:  # rare: a head that reads all of a request is far behind
                for some in in_passes([e], self.entering[0].rows):
                    self._enter(self.entering[0], some, recalls=True)
        for some in in_passes([e for e in entries if e.kept], self._most_rows):
            tokens, features, plan = self._inputs(some)
            at, (tokens,) = DevicePlan.of(cast(CudaDense, self.head.dense), plan, self.cache.page_size, tokens)
            self.head.write(tokens, features, cast(core.Plan, at), self.cache)

    def _enter(self, enters: Entering, entries: Sequence[Entries], recalls: bool) -> None:
        """Write draft KV of few positions, and store the head's result for the last of them as the request's root."""
        features = None if recalls else [e.features() for e in entries]
        enters.run(self._plan(entries), [e.text for e in entries], features, [e.request.seq.row for e in entries])

    def draft(self, batch: Batch, depths: Sequence[int], deepen: Deepen | None) -> Drafted:
        if deepen is not None:
            return super().draft(batch, depths, deepen)
        able = [
            min(depth, self._steps) if isinstance(r.head.root, DeviceRoot) else 0
            for r, depth in zip(batch, depths, strict=True)
        ]
        deepest = max(able, default=0)
        # Round up to levels that graphs are made for. Each seat knows its own depth.
        levels = min(n for n in drafted_levels(self._geometry.shape, sized=False) if n >= deepest) if deepest else 0
        return AskedRound(able, levels)

    def unite(self, drafted: Drafted, trees: core.TreeBatch) -> Drafted | None:
        if not isinstance(drafted, AskedRound) or not drafted.levels:
            return None
        return replace(drafted, trees=trees)

    def _root(self, request: Request) -> Root:
        root = request.head.root
        if not isinstance(root, DeviceRoot):
            return super()._root(request)
        return Root(self._roots.logits[root.row].to("cpu", torch.float32), self._roots.hidden[root.row])


def in_passes(entries: Sequence[Entries], most: int) -> Iterator[list[Entries]]:
    """Split entries into passes of up to ``most`` rows, for which scratch memory is reserved.

    A chunk of prefill has no more rows, but after an error the entries of several chunks may wait.
    """
    some: list[Entries] = []
    room = most
    for e in entries:
        start, end = e.start, e.start + e.count
        while start < end:
            some.append(Entries(e.request, start, min(room, end - start)))
            start, room = start + some[-1].count, room - some[-1].count
            if not room:
                yield some
                some, room = [], most
    if some:
        yield some
