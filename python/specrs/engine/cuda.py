"""The executor of a GPU: a round is launched whole, and the host waits once, for the tokens.

Where somebody looks on between draft steps (a recorder, a cost model that goes by scores), the host plans and decides
step by step, as `HostExecutor` does on any device; prefill always is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs.engine.ahead import AheadPolicy, AheadTree, most_nodes
from specrs.engine.batch import Batch
from specrs.engine.config import EngineConfig
from specrs.engine.costs import PLAIN, SPECULATIVE, Costs, Pace, PassCost
from specrs.engine.executor import Clock, Deepen, Drafted, Entries, Verified
from specrs.engine.host import HostDrafts, HostExecutor, Root, non_finite
from specrs.engine.lanes import Activations, Lanes, Models, Roots, Variant, buckets
from specrs.engine.pages import Pages
from specrs.engine.request import Request
from specrs.engine.speculation import AdaptiveTree
from specrs.models.cuda import CudaDense
from specrs.models.eagle3 import Eagle3Head
from specrs.models.features import FeatureRows, Features
from specrs.models.llama import LlamaModel
from specrs.models.ops import KvMemory

_RUNS = 5  # of a round that is measured
_OVERHEAD = 2e-4  # seconds of the host's part of a round, before any was seen


@dataclass(frozen=True)
class DeviceRoot:
    """A request's root lies in `Roots`, in the row of its sequence, until the next round that drafts for that row.

    Attributes:
        row: of the page table.
        start: of the head's KV, the first entry that the pass which gave the root wrote.
    """

    row: int
    start: int


@dataclass(eq=False)
class LaunchedRound:
    """A round of a batch, drafts and verification in one: `CudaDrafts.draft` asks for it, `CudaExecutor.verify`
    launches it. What it found is read when it is asked for, until the next launch over the same memory.

    Attributes:
        depths: how deep each request drafts, 0 for not at all.
        levels: of drafts that are run, 0 without any.
    """

    batch: Batch
    depths: list[int]
    levels: int
    lanes: Lanes | None = None
    launch: int = 0  # of the lanes

    @property
    def steps(self) -> int:
        return max(self.levels - 1, 0)

    def cut(self, least: float) -> LaunchedRound:
        raise NotImplementedError("nobody sees these scores before the trees are verified")

    @property
    def ran(self) -> Lanes:
        """Where it ran. Raises StaleOutputError once another round has run there."""
        lanes = self.lanes
        assert lanes is not None, "the round has not been launched"
        if lanes.launches != self.launch:
            what = f"round {self.launch} of the lanes of {lanes.batch} requests"
            error = core.StaleOutputError(f"{what}: round {lanes.launches} has overwritten what it found")
            error.what, error.held, error.current = what, self.launch, lanes.launches
            raise error
        return lanes

    @cached_property
    def starts(self) -> list[int]:
        """Each request's first row of the pass, and behind the last one's."""
        live = len(self.batch)
        return self.ran.found["tree_offsets"][: live + 1].tolist() if self.levels else list(range(live + 1))

    @property
    def _offsets(self) -> torch.Tensor:
        """Each request's first accepted node, and behind the last one's: int32 [B + 1]."""
        return self.ran.found["offsets"][: len(self.batch) + 1]

    @cached_property
    def trees(self) -> core.TreeBatch:
        lanes, live = self.ran, len(self.batch)
        if not self.levels:
            roots = lanes.given["roots"][:live].tolist()
            return core.TreeBatch.from_parents([[-1]] * live, [[token] for token in roots])
        found = lanes.found
        scores, offsets = found["tree_scores"].view(torch.float32), found["tree_offsets"][: live + 1]
        return core.TreeBatch.from_arrays(offsets, found["tree_tokens"], found["tree_parents"], scores)

    @cached_property
    def accepts(self) -> core.Accepts:
        lanes, live = self.ran, len(self.batch)
        if bool(lanes.found["faults"][:live].any()):
            # Rare: the host looks at the rows, and says of each request what was wrong.
            logits = lanes.logits[: self.starts[-1]].to("cpu", torch.float32)
            return core.verify(self.trees, logits, [r.sampler for r in self.batch], self.batch.lens)
        return core.Accepts.from_arrays(self._offsets, lanes.found["paths"], lanes.found["tokens"])

    @cached_property
    def faults(self) -> list[tuple[core.NonFiniteError, int]]:
        """Requests whose root's draft scores give no distribution."""
        if not self.levels:
            return []
        lanes = self.ran
        sound: list[int] = lanes.found["sound"][: len(self.batch)].tolist()
        bad = [i for i, (depth, n) in enumerate(zip(self.depths, sound, strict=True)) if depth > 0 and n == 0]
        return [(_bad_root(i, lanes.root_logits[i].cpu()), self._sound_until(i)) for i in bad]

    def _sound_until(self, request: int) -> int:
        root = self.batch.requests[request].root
        return root.start if isinstance(root, DeviceRoot) else self.batch.lens[request]

    def features(self, request: int, rows: Sequence[int]) -> Features:
        memory = self.ran.features
        assert memory is not None
        first = self.starts[request]
        if self.drafted(request):
            return Features(memory, [first + row for row in rows])  # the head has run over them
        # The next round overwrites them. Without drafts there is one row, the root's.
        assert list(rows) == [0], rows
        kept = memory.stacked.narrow(1, first, 1).clone()
        return Features(FeatureRows(memory.aux_layers, kept), range(1))

    def drafted(self, request: int) -> bool:
        """Whether the request had drafts, and the head has run over what was accepted of them."""
        return self.levels > 0 and self.depths[request] > 0

    def written(self) -> dict[int, tuple[int, int]]:
        """Entries of the head's KV that the round wrote, by request: the first, and how many."""
        counts = self._offsets.diff().tolist()
        return {r.request_id: (self.batch.lens[i], counts[i]) for i, r in enumerate(self.batch) if self.drafted(i)}


@dataclass(eq=False)
class Fresh:
    """What the last round left.

    Attributes:
        written: of the head's KV, where nobody has asked for it yet (`LaunchedRound.written`).
        cold: whether the round took longer than others of its kind will (`Lanes.cold`).
    """

    written: dict[int, tuple[int, int]] = field(default_factory=dict)
    cold: bool = False


class CudaExecutor(HostExecutor):
    """One target and perhaps a head on a GPU, on a stream of their own.

    Attributes:
        steps: draft steps of a round at most.
    """

    def __init__(
        self,
        target: LlamaModel,
        head: Eagle3Head | None,
        config: EngineConfig,
        geometry: core.Geometry,
        pool: core.Pool,
    ) -> None:
        dense = target.ops.dense
        assert isinstance(dense, CudaDense)
        self._dense, cuda = dense, target.ops.placement.device
        torch.cuda.synchronize(cuda)  # the weights are there
        self._stream = torch.cuda.Stream(cuda)  # type: ignore[no-untyped-call]
        self.steps, self._graphs = geometry.shape.steps, config.graphs != "off"
        self._roots: Roots | None = None
        self._fresh = Fresh()
        with self.entered():
            super().__init__(target, head, config, geometry, pool)
            self._table = core._DeviceTable(pool, cuda.index, dense.stream)
            drafts = self.drafts
            to_target = None
            if head is not None and head.d2t is not None:
                to_target = head.target_ids.to(cuda, torch.int32)
            self._buckets = buckets(config.max_batch)
            most = config.max_batch * (geometry.shape.draft_tokens if head is not None else 1)
            target.reserve(max(most, config.prefill_chunk), most)
            if head is not None:
                head.reserve(max(config.max_batch * (self.steps + 1), config.prefill_chunk), config.max_batch)
            self._models = Models(
                dense, target, self.cache, head, None if drafts is None else drafts.cache, self._roots, to_target,
                geometry, config, pool.num_pages, from_dlpack(self._table.tensor(dense.stream)), self._stream,
                None if head is None else Activations(target, head, geometry),
            )  # fmt: skip
        self._lanes: dict[int, Lanes] = {}

    def entered(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def _drafts(self, head: Eagle3Head, cache: KvMemory, config: EngineConfig) -> HostDrafts:
        self._roots = Roots(head, config.max_batch)
        vocab_size = self.target.config.vocab_size
        return CudaDrafts(self._fresh, self._roots, head, cache, self.planner, config, vocab_size)

    def speculation(self, pages: Pages) -> AdaptiveTree:
        shape = self.planner.geometry.shape
        measured = {b: [self._seconds(b, levels) for levels in (0, 1, shape.steps)] for b in {1, self._buckets[-1]}}
        plain, shallow, deep = measured[1]
        step = max(deep - shallow, 0.0) / max(shape.steps - 1, 1)
        extend = max(shallow - plain, 0.0)
        # Of one request, verification is reckoned among what drafting costs. A round of the largest batch tells what
        # rows cost; its drafting is taken to cost what it does for one request.
        target = {
            b * most_nodes(shape, shape.steps): t[2] - extend - (shape.steps - 1) * step for b, t in measured.items()
        }
        target |= {b: t[0] for b, t in measured.items()}
        rows = sorted(target)
        pace = Pace()
        costs = Costs(
            PassCost(rows, [target[n] for n in rows], pace),
            PassCost([1], [step], pace),
            PassCost([1, 2 * self._buckets[-1]], [extend, extend], pace),
            PassCost([PLAIN, SPECULATIVE], [_OVERHEAD, _OVERHEAD], pace),
        )
        fresh = self._fresh
        return AheadTree(AheadPolicy(costs), shape, lambda: fresh.cold)

    def _seconds(self, size: int, levels: int) -> float:
        """Of a round of a bucket whose lanes are all dead: its passes run over as many rows."""
        lanes = self._of(size)
        lanes.give([], [], [], [], 1)
        seconds = []
        for _ in range(_RUNS + 3):  # the first ones make memory, and a graph
            started = time.perf_counter()
            lanes.launch(Variant(size, levels, True, None), self._graphs)
            lanes.wait()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[3:])

    def _of(self, size: int) -> Lanes:
        lanes = self._lanes.get(size)
        if lanes is None:
            lanes = self._lanes[size] = Lanes(self._models, size)
        return lanes

    def decode(self, batch: Batch, follow: bool, clock: Clock) -> Verified:
        return self._launched(LaunchedRound(batch, [0] * len(batch), 0), follow)

    def verify(self, batch: Batch, drafted: Drafted, follow: bool, clock: Clock) -> Verified:
        if not isinstance(drafted, LaunchedRound):
            self._fresh.written = {}
            return super().verify(batch, drafted, follow, clock)
        try:
            return self._launched(drafted, follow)
        except BaseException:
            # The head may have run over what was accepted, and the requests are as they were: their roots are lost.
            for i, r in enumerate(batch):
                if drafted.drafted(i):
                    r.root = None
            raise

    def commit(self, batch: Batch, lease: core.Lease, verified: Verified) -> None:
        if isinstance(verified, LaunchedRound):
            # The device has moved KV, or remapped its table; now the pool's books follow.
            self.planner.commit(lease, batch.seqs, batch.lens, verified.accepts)
        else:
            super().commit(batch, lease, verified)

    def _launched(self, asked: LaunchedRound, follow: bool) -> LaunchedRound:
        batch, levels = asked.batch, asked.levels
        self._fresh.written = {}
        lanes = self._of(next(b for b in self._buckets if b >= len(batch)))
        nodes = most_nodes(self.planner.geometry.shape, levels)
        lanes.give([q.row for q in batch.seqs], batch.lens, [r.tokens[-1] for r in batch], asked.depths, nodes)
        edits = lanes.sample_by([r.sampler for r in batch])
        self._table.upload(self._dense.stream)
        lanes.launch(Variant(lanes.batch, levels, follow, edits), self._graphs)
        lanes.wait()
        asked.lanes, asked.launch = lanes, lanes.launches
        self._fresh.written, self._fresh.cold = asked.written() if levels else {}, lanes.cold
        return asked


class CudaDrafts(HostDrafts):
    """The head's passes on a GPU; roots stay there."""

    def __init__(
        self,
        fresh: Fresh,
        roots: Roots,
        head: Eagle3Head,
        cache: KvMemory,
        planner: core.Planner,
        config: EngineConfig,
        vocab_size: int,
    ) -> None:
        super().__init__(head, cache, planner, config, vocab_size)
        self._fresh, self._roots, self._steps = fresh, roots, planner.geometry.shape.steps

    def draft(self, batch: Batch, depths: Sequence[int], deepen: Deepen | None, clock: Clock) -> Drafted:
        if deepen is not None:
            return super().draft(batch, depths, deepen, clock)
        able = [
            min(depth, self._steps) if isinstance(r.root, DeviceRoot) else 0
            for r, depth in zip(batch, depths, strict=True)
        ]
        return LaunchedRound(batch, able, max(able, default=0))

    def extend(self, entries: Entries, clock: Clock) -> list[object]:
        written = self._fresh.written
        each = list(zip(entries.requests, entries.seqs, entries.starts, entries.counts, strict=True))
        rest = [e for e in each if written.get(e[0].request_id) != (e[2], e[3])]
        found: dict[int, object] = {}
        if rest:
            requests, seqs, starts, counts = (list(part) for part in zip(*rest, strict=True))
            ran = super().extend(Entries(requests, seqs, starts, counts), clock)
            found = {r.request_id: root for r, root in zip(requests, ran, strict=True)}
        self._fresh.written = {}
        return [found.get(r.request_id, DeviceRoot(seq.row, start)) for r, seq, start, _ in each]

    def _lend(self, request: Request, logits: torch.Tensor, hidden: torch.Tensor) -> DeviceRoot:
        self._roots.put(request.seq.row, logits, hidden)
        return DeviceRoot(request.seq.row, request.draft_valid)

    def _root(self, request: Request) -> Root:
        root = request.root
        if not isinstance(root, DeviceRoot):
            return super()._root(request)
        return Root(self._roots.logits[root.row].to("cpu", torch.float32), self._roots.hidden[root.row])


def _bad_root(request: int, logits: torch.Tensor) -> core.NonFiniteError:
    """Why nothing can be drafted from a root's logits."""
    error = None if bool(logits.isneginf().all()) else non_finite("draft logits", logits)
    if error is None:
        error = core.NonFiniteError("draft logits: all -inf at index 0")
        error.kind, error.what, error.value, error.index = "NonFinite", "draft logits", "all -inf", 0
    error.request = request
    return error
