"""The round's logic: prefill, plain decoding, and the speculative round.

A pass takes pages by a lease before it writes anything, commits the lease, and only then changes its requests: where
it fails, every request is as it was. Where one request cannot go on (NaN scores), the pass goes on without it: that
request ends with its error. The device's part stands behind `Executor`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from specrs import _specrs as core
from specrs.engine.batch import Batch, Passed
from specrs.engine.config import EngineConfig
from specrs.engine.drafter import Drafter
from specrs.engine.executor import Executor, Verified
from specrs.engine.observer import RoundObserver
from specrs.engine.pages import Pages
from specrs.engine.request import FinishReason, Request
from specrs.engine.speculation import GivenTree


class Runner:
    """Runs passes over batches of requests.

    Attributes:
        executor: the device that runs them.
        pages: of all requests.
        drafter: what the head is told; ``None`` without a head.
        speculation: whether and how far a batch drafts.
        observers: see every round.
    """

    def __init__(self, executor: Executor, pool: core.Pool, config: EngineConfig, geometry: core.Geometry) -> None:
        self.executor, self.config, self.geometry = executor, config, geometry
        self.observers: list[RoundObserver] = []
        self.speculation: GivenTree = GivenTree()
        drafts = executor.drafts
        self.drafter = None if drafts is None else Drafter(drafts, self.observers)
        self.pages = Pages(pool, config, geometry, executor.copy, drafts is not None)

    def calibrate(self) -> None:
        """Measure the passes for the cost model, where it decides (some hundred milliseconds at worst)."""
        if self.drafter is not None and self.config.adaptive:
            self.speculation = self.executor.speculation(self.pages)

    def admit(self, request: Request) -> None:
        """Give the request a row of the page table, and decide whether the head follows it.

        The head can run only where the target's features are, which no cache has. Where the prefix cache has target
        KV without draft KV, the head's following costs the target's pass over those positions, into pages of the
        request's own, which are cached in place of the others.
        """
        self.pages.admit(request)
        if self.drafter is None or not request.followed:
            return
        if not self.speculation.follows(request):
            request.give_up_drafts(request.draft_shared)
        elif request.draft_shared < request.committed:
            most = request.draft_shared
            self.pages.release(request)
            self.pages.admit(request, most)

    def release(self, request: Request) -> None:
        """Take back the request's pages; it may be admitted again."""
        self.pages.release(request)

    def end(self, request: Request) -> None:
        """Take back the pages of a request that has ended, offer them to others, and close its books."""
        if request.row is not None and request.finish_reason is not FinishReason.ABORT:
            self._complete(request)
            self.pages.share_prefix(request)
        self.pages.release(request)
        self.speculation.forget(request)

    def _complete(self, r: Request) -> None:
        """Write the last entries of draft KV where they complete a page that a later request would go on from."""
        page, drafter = self.config.page_size, self.drafter
        if drafter is None or not self.config.prefix_cache or not r.followed or r.error is not None:
            return
        if r.committed // page > r.draft_valid // page and self.speculation.completes(r):
            drafter.write([r], 0)

    def prefill(self, chunks: Sequence[tuple[Request, int]]) -> list[Passed]:
        """Write the KV of the next ``n`` tokens of each request; draw the first token where a prompt is complete."""
        batch, counts = Batch([r for r, _ in chunks]), [n for _, n in chunks]
        # A fresh prompt yields its first token with its last position; a resumed request knows its root already.
        drawing = [i for i, r in enumerate(batch) if r.committed + counts[i] == len(r.tokens)]
        with _naming(batch), self.pages.lease(batch, counts) as lease:
            prefilled = self.executor.prefill(batch, counts, drawing, self._follow(batch))
            drawn = prefilled.drawn
            lease.commit([n + more for n, more in zip(batch.lens, counts, strict=True)])
        passed = []
        for r, n in chunks:
            r.committed += n
        for i, (first, error) in zip(drawing, drawn, strict=True):
            r = batch.requests[i]
            passed.append(Passed(r, first, r.commit(first, round_=False, error=error)))
        if self.drafter is not None:
            self.drafter.remember(batch, prefilled, [range(n) for n in counts])
            self.drafter.write([r for r in batch if r.finish_reason is None])
            self.speculation.prefilled(batch, counts)
        for r in batch:
            if r.committed >= len(r.tokens) - 1 and r.finish_reason is None:
                self.pages.share_prefix(r)
        return passed

    def decode(self, reqs: Sequence[Request]) -> list[Passed]:
        """One token for each request, without drafts."""
        return self._decode(Batch(reqs))

    def _decode(self, batch: Batch) -> list[Passed]:
        self.speculation.begin(speculative=False)
        with _naming(batch), self.pages.lease(batch, [1] * len(batch)) as lease:
            for o in self.observers:
                o.reserved(batch.requests, [n + 1 for n in batch.lens], speculative=False)
            verified = self.executor.decode(batch, self._follow(batch), self.speculation.timed)
            passed, paths = self._commit(batch, lease, verified)
        if self.drafter is not None:
            self.drafter.remember(batch, verified, paths)
            self.drafter.catch_up(batch, self.speculation)
        for o in self.observers:
            o.ended()
        self.speculation.plain_round(batch)
        return passed

    def round(self, reqs: Sequence[Request]) -> list[Passed]:
        """Draft a tree for each request, verify it, commit what was accepted."""
        drafter, speculation = self.drafter, self.speculation
        if drafter is None or not any(r.followed and r.max_depth > 0 for r in reqs):
            return self.decode(reqs)
        batch = Batch(reqs)
        drafting = speculation.drafting(batch, drafter)
        if not any(drafting):
            return self._decode(batch)
        speculation.begin(speculative=True)
        followed = [r for r, d in zip(batch, drafting, strict=True) if d]
        need = self.geometry.alloc_len_per_decode
        with _naming(batch), self.pages.lease(batch, [need] * len(batch)) as lease:
            for o in self.observers:
                o.reserved(batch.requests, [n + need for n in batch.lens], speculative=True)
            drafter.write(followed)
            drafter.extend(followed, speculation)
            drafted = drafter.draft(batch, drafting, speculation)
            verified = self.executor.verify(batch, drafted, self._follow(batch), speculation.timed)
            passed, paths = self._commit(batch, lease, verified, drafted.faults)
        drafter.remember(batch, verified, paths)
        drafter.extend([r for r in followed if r.finish_reason is None], speculation)
        drafter.catch_up(batch, speculation)
        for o in self.observers:
            o.ended()
        speculation.spec_round(passed, verified.trees, drafting, drafted.steps)
        return passed

    def _follow(self, batch: Batch) -> bool:
        """Whether a pass has to keep features: the head follows one of its requests."""
        return self.drafter is not None and any(r.followed for r in batch)

    def _commit(
        self,
        batch: Batch,
        lease: core.Lease,
        verified: Verified,
        faults: Sequence[tuple[core.NonFiniteError, int]] = (),
    ) -> tuple[list[Passed], list[list[int]]]:
        """Commit what the target accepted. faults: of requests whose drafts broke on the way (`Drafted.faults`).

        Returns what each request got, and which nodes of its tree are now among its positions.
        """
        accepts = verified.accepts
        for o in self.observers:
            o.verified(verified.trees, accepts)
        self.executor.commit(batch, lease, verified)
        paths = accepts.paths
        # Whole paths: where a request keeps less, it has ended, and gives its pages back.
        lease.commit([n + len(path) for n, path in zip(batch.lens, paths, strict=True)])
        # Nothing fails from here on; up to here, no request has changed.
        for error, sound in faults:
            batch.requests[error.request].give_up_drafts(sound, error)
        passed = [
            Passed(r, drawn, r.commit(drawn, round_=True, error=error))
            for r, drawn, error in zip(batch, accepts.tokens, accepts.errors, strict=True)
        ]
        for p in passed:
            p.request.committed += p.committed.kept
        kept = [p.committed.kept for p in passed]
        for o in self.observers:
            o.committed(kept)
        return passed, [path[:n] for path, n in zip(paths, kept, strict=True)]


@contextmanager
def _naming(batch: Batch) -> Iterator[None]:
    """Errors of a pass name a request by its id, where the core names its row of the batch."""
    try:
        yield
    except core.SpecrsError as error:
        row = getattr(error, "request", None)
        if isinstance(row, int) and 0 <= row < len(batch):
            name = batch.requests[row].request_id
            error.request = name  # type: ignore[attr-defined]
            error.args = (f"{error} (row {row} of the batch is request {name})",)
        raise
