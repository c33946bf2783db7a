"""The target's passes: prefill, plain decoding, and the speculative round.

A pass takes pages by a lease before it writes anything, commits the lease, and only then changes its requests: where
it fails, every request is as it was. Where one request cannot go on (NaN scores), the pass goes on without it: that
request ends with its error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs.backends import AttentionBackend, Capabilities
from specrs.engine.batch import Batch, Passed
from specrs.engine.calibration import calibrated
from specrs.engine.config import EngineConfig
from specrs.engine.drafter import Drafter
from specrs.engine.observer import RoundObserver
from specrs.engine.pages import Pages
from specrs.engine.request import Request
from specrs.engine.speculation import AdaptiveTree, GivenTree
from specrs.models.eagle3 import Eagle3Head
from specrs.models.features import FeatureRows
from specrs.models.llama import LlamaModel


class Runner:
    """Runs passes over batches of requests; owns the KV caches, the pages and the planner.

    Attributes:
        pages: of all requests.
        drafter: the head's passes; ``None`` without a head.
        speculation: whether and how far a batch drafts.
        observers: see every round.
    """

    def __init__(
        self, target: LlamaModel, head: Eagle3Head | None, config: EngineConfig, geometry: core.Geometry
    ) -> None:
        assert config.num_pages is not None
        self.target, self.config, self.geometry = target, config, geometry
        self.observers: list[RoundObserver] = []
        self.speculation = GivenTree()
        self.drafter: Drafter | None = None
        pages = config.num_pages + 1  # page 0 is the sink
        pool = core.Pool(pages, config.page_size, config.max_batch, geometry.row_pages)
        self.planner = _planner(geometry, pool, config.backend)
        dtype = getattr(torch, config.kv_dtype)
        self.cache = target.new_cache(pages, config.page_size, dtype)
        caches = [self.cache]
        if head is not None:
            assert target.features is not None  # the head chose them
            caches.append(head.new_cache(pages, config.page_size, dtype))
            self.drafter = Drafter(
                head,
                caches[1],
                self.planner,
                geometry,
                target.features,
                target.config.vocab_size,
                config.branches_attend,
                self.observers,
            )
        self.pages = Pages(pool, config, geometry, caches, head is not None)

    def calibrate(self) -> None:
        """Measure the passes for the cost model, where it decides (some hundred milliseconds at worst)."""
        if self.drafter is not None and self.config.adaptive:
            policy = calibrated(
                self.target, self.cache, self.drafter.head, self.drafter.cache, self.planner, self.pages
            )
            self.speculation = AdaptiveTree(policy, self.geometry.shape.topk)

    def release(self, request: Request) -> None:
        """Take back the request's pages and what it may lose to drafts."""
        self.pages.release(request)
        self.speculation.forget(request)

    def prefill(self, chunks: Sequence[tuple[Request, int]]) -> list[Passed]:
        """Write the KV of the next ``n`` tokens of each request; draw the first token where a prompt is complete."""
        batch, counts = Batch([r for r, _ in chunks]), [n for _, n in chunks]
        tokens = [t for r, n in chunks for t in r.tokens[r.committed : r.committed + n]]
        ends = list(accumulate(counts))
        # A fresh prompt yields its first token with its last position; a resumed request knows its root already.
        drawing = [i for i, r in enumerate(batch) if r.committed + counts[i] == len(r.tokens)]
        for r in batch:
            # What others may share has draft KV; a prompt for itself alone needs none where the head does not follow.
            if not self.config.prefix_cache and r.followed and not self.speculation.follows(r):
                r.give_up_drafts(r.draft_valid)
        with _naming(batch), self.pages.lease(batch, counts) as lease:
            plan = self.planner.extend(batch.seqs, batch.lens, counts)
            rows = torch.tensor([ends[i] - 1 for i in drawing], dtype=torch.int64)
            aux = self._features(batch, len(tokens))
            logits, _ = self.target.forward(torch.tensor(tokens), plan, self.cache, aux, rows)
            drawn = [_draw(batch.requests[i], logits[j]) for j, i in enumerate(drawing)]
            lease.commit([n + more for n, more in zip(batch.lens, counts, strict=True)])
        passed = []
        for r, n in chunks:
            r.committed += n
        for i, (first, error) in zip(drawing, drawn, strict=True):
            r = batch.requests[i]
            passed.append(Passed(r, first, r.commit(first, round_=False, error=error)))
        if self.drafter is not None:
            self.drafter.remember(batch, aux, [range(e - n, e) for e, n in zip(ends, counts, strict=True)])
            self.drafter.write([r for r in batch if r.finish_reason is None])
        for r in batch:
            if r.committed >= len(r.tokens) - 1:
                self._prompt_done(r)
        return passed

    def _prompt_done(self, r: Request) -> None:
        """The prompt's KV is written, but for the head's last entry."""
        if self.drafter is not None and r.followed and r.finish_reason is None and not self.speculation.follows(r):
            self.drafter.write([r], 0)
            r.give_up_drafts(r.draft_valid)
        self.pages.share_prefix(r)

    def decode(self, reqs: Sequence[Request]) -> list[Passed]:
        """One token for each request, without drafts."""
        return self._decode(Batch(reqs))

    def _decode(self, batch: Batch) -> list[Passed]:
        self.speculation.begin(speculative=False)
        trees = core.TreeBatch.from_parents([[-1]] * len(batch), [[r.tokens[-1]] for r in batch])
        with _naming(batch), self.pages.lease(batch, [1] * len(batch)) as lease:
            for o in self.observers:
                o.reserved(batch.requests, [n + 1 for n in batch.lens], speculative=False)
            plan = self.planner.decode(batch.seqs, batch.lens)
            passed, aux, _ = self._verify(batch, trees, plan, lease)
        if self.drafter is not None:
            self.drafter.remember(batch, aux, [[i] for i in range(len(batch))])
            self.drafter.catch_up(batch)
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
            trees = drafted.trees
            plan = self.planner.verify(batch.seqs, batch.lens, trees)
            passed, aux, paths = self._verify(batch, trees, plan, lease)
        first, rows = 0, []
        for size, path, p in zip(trees.sizes, paths, passed, strict=True):
            rows.append([first + node for node in path[: p.committed.kept]])
            first += size
        drafter.remember(batch, aux, rows)
        drafter.extend([r for r in followed if r.finish_reason is None], speculation)
        drafter.catch_up(batch)
        for o in self.observers:
            o.ended()
        speculation.spec_round(passed, trees, drafting, drafted.steps)
        return passed

    def _verify(
        self, batch: Batch, trees: core.TreeBatch, plan: core.Plan, lease: core.Lease
    ) -> tuple[list[Passed], FeatureRows | None, list[list[int]]]:
        """Run the target over the nodes of trees, as planned, and commit what it accepts."""
        tokens = from_dlpack(trees.tokens)
        aux = self._features(batch, len(tokens))
        logits, _ = self.speculation.timed(
            "target", len(tokens), self.target.forward, tokens, plan, self.cache, aux, None
        )
        accepts = core.verify(trees, logits, [r.sampler for r in batch], batch.lens)
        for o in self.observers:
            o.verified(trees, accepts)
        moves = self.planner.commit(lease, batch.seqs, batch.lens, accepts)
        core.kv_move(self.cache, moves)
        paths = accepts.paths
        # Whole paths: where a request keeps less, it has ended, and gives its pages back.
        lease.commit([n + len(path) for n, path in zip(batch.lens, paths, strict=True)])
        # Nothing fails from here on; up to here, no request has changed.
        passed = [
            Passed(r, drawn, r.commit(drawn, round_=True, error=error))
            for r, drawn, error in zip(batch, accepts.tokens, accepts.errors, strict=True)
        ]
        for p in passed:
            p.request.committed += p.committed.kept
        for o in self.observers:
            o.committed([p.committed.kept for p in passed])
        return passed, aux, paths

    def _features(self, batch: Batch, rows: int) -> FeatureRows | None:
        return None if self.drafter is None else self.drafter.features(batch, rows)


def _planner(geometry: core.Geometry, pool: core.Pool, backend: AttentionBackend) -> core.Planner:
    """The planner of a backend's format."""
    capabilities = Capabilities.of(backend)
    return core.Planner(geometry, pool, format=capabilities.format, mask=capabilities.mask)


def _draw(request: Request, logits: torch.Tensor) -> tuple[list[int], core.NonFiniteError | None]:
    """The first token of a request, or why there is none."""
    try:
        return [request.sampler.draw(logits, len(request.tokens), [])], None
    except core.NonFiniteError as error:
        return [], error


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
