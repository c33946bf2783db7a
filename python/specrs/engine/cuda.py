"""The executor of a GPU: a round is launched whole, and the host waits once, for the tokens.

Where somebody looks on between draft steps (a recorder, a cost model that goes by scores), the host plans and decides
step by step, as `HostExecutor` does on any device; prefill always is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
from specrs.engine.lanes import Lanes, Models, Roots, Variant, buckets, runs
from specrs.engine.pages import Pages
from specrs.engine.request import Request
from specrs.engine.speculation import AdaptiveTree
from specrs.models.cuda import CudaDense
from specrs.models.eagle3 import Eagle3Head
from specrs.models.features import FeatureRows, Features
from specrs.models.llama import LlamaModel
from specrs.models.ops import KvMemory

_RUNS = 5  # of a round that is measured


@dataclass(frozen=True)
class DeviceRoot:
    """A request's root lies in `Roots`, in the row of its sequence."""

    row: int


@dataclass(eq=False)
class LaunchedRound:
    """A round of a batch that has run; what it found is read when it is asked for.

    It is both what was drafted and what was verified. Until `CudaExecutor.verify` it is a request for drafts alone.
    """

    batch: Batch
    depths: list[int]
    executor: CudaExecutor
    lanes: Lanes | None = None

    @property
    def steps(self) -> int:
        return max(self.levels - 1, 0)

    @property
    def levels(self) -> int:
        """Of drafts."""
        return min(max(self.depths, default=0), self.executor.steps)

    def cut(self, least: float) -> LaunchedRound:
        raise NotImplementedError("nobody sees these scores before the trees are verified")

    @property
    def _ran(self) -> Lanes:
        assert self.lanes is not None, "the round has not been launched"
        return self.lanes

    @cached_property
    def starts(self) -> list[int]:
        """Each request's first row of the pass, and behind the last one's."""
        live = len(self.batch)
        return self._ran.found["tree_offsets"][: live + 1].tolist() if self.levels else list(range(live + 1))

    @cached_property
    def _offsets(self) -> torch.Tensor:
        """Each request's first accepted node, and behind the last one's: int32 [B + 1]."""
        return self._ran.found["offsets"][: len(self.batch) + 1]

    @cached_property
    def trees(self) -> core.TreeBatch:
        found, live = self._ran.found, len(self.batch)
        if not self.levels:
            roots = self._ran.given["roots"][:live].tolist()
            return core.TreeBatch.from_parents([[-1]] * live, [[token] for token in roots])
        scores = found["tree_scores"].view(torch.float32)
        offsets = found["tree_offsets"][: live + 1]
        return core.TreeBatch.from_arrays(offsets, found["tree_tokens"], found["tree_parents"], scores)

    @cached_property
    def accepts(self) -> core.Accepts:
        lanes, live = self._ran, len(self.batch)
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
        sound: list[int] = self._ran.found["sound"][: len(self.batch)].tolist()
        bad = [i for i, (depth, n) in enumerate(zip(self.depths, sound, strict=True)) if depth > 0 and n == 0]
        return [(_bad_root(i, self._ran.root_logits[i].cpu()), self.batch.lens[i]) for i in bad]

    def features(self, request: int, rows: Sequence[int]) -> Features:
        memory = self._ran.features
        assert memory is not None
        first = self.starts[request]
        index = [first + row for row in rows]
        if self.drafted(request):
            return Features(memory, index)  # the head has run over them
        # The next round overwrites them.
        kept = memory.stacked.index_select(1, torch.tensor(index, device=memory.stacked.device))
        return Features(FeatureRows(memory.aux_layers, kept), range(len(index)))

    def drafted(self, request: int) -> bool:
        """Whether the request had drafts, and the head has run over what was accepted of them."""
        return self.levels > 0 and self.depths[request] > 0

    @cached_property
    def written(self) -> dict[int, tuple[int, int]]:
        """Entries of the head's KV that the round wrote, by request: the first, and how many."""
        counts = self._offsets.diff().tolist()
        return {r.request_id: (self.batch.lens[i], counts[i]) for i, r in enumerate(self.batch) if self.drafted(i)}


class CudaExecutor(HostExecutor):
    """One target and perhaps a head on a GPU.

    Attributes:
        steps: draft steps of a round at most.
        last: the round that ran last; ``None`` before the first.
        written: entries of the head's KV that it wrote, by request, and whose roots nobody has asked for yet.
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
        self._dense = dense
        self.steps, self._graphs = geometry.shape.steps, config.graphs != "off"
        self._table = core._DeviceTable(pool, target.ops.placement.device.index, dense.stream)
        self._roots: Roots | None = None
        super().__init__(target, head, config, geometry, pool)
        dense, drafts = self._dense, self.drafts
        to_target = None
        if head is not None and head.d2t is not None:
            to_target = head.target_ids.to(self.placement.device, torch.int32)
        self._models = Models(
            dense, target, self.cache, head, None if drafts is None else drafts.cache, self._roots, to_target, geometry,
            config, pool.num_pages, from_dlpack(self._table.tensor(dense.stream)),
        )  # fmt: skip
        self._buckets = buckets(config.max_batch)
        self._lanes: dict[int, Lanes] = {}
        self.last: LaunchedRound | None = None
        self.written: dict[int, tuple[int, int]] = {}
        most = config.max_batch * (geometry.shape.draft_tokens if head is not None else 1)
        target.reserve(max(most, config.prefill_chunk), most)

    def _drafts(self, head: Eagle3Head, cache: KvMemory, config: EngineConfig) -> HostDrafts:
        self._roots = Roots(head, config.max_batch)
        return CudaDrafts(self, self._roots, head, cache, self.planner, config, self.target.config.vocab_size)

    def speculation(self, pages: Pages) -> AdaptiveTree:
        shape = self.planner.geometry.shape
        measured = {b: [self._seconds(b, levels) for levels in (0, 1, shape.steps)] for b in {1, self._buckets[-1]}}
        plain, shallow, deep = measured[1]
        step = max(deep - shallow, 0.0) / max(shape.steps - 1, 1)
        extend = max(shallow - plain, 0.0)
        # A round of the largest batch tells what rows cost; its drafting is taken to cost what it does for one request.
        target = {b: t[0] for b, t in measured.items()}
        for b, t in measured.items():
            target[b * most_nodes(shape, shape.steps)] = t[2] - extend - (shape.steps - 1) * step
        rows = sorted(target)
        pace = Pace()
        costs = Costs(
            PassCost(rows, [target[n] for n in rows], pace),
            PassCost([1], [step], pace),
            PassCost([1, 2 * self._buckets[-1]], [extend, extend], pace),
            PassCost([PLAIN, SPECULATIVE], [0.0, 0.0], pace),
        )
        return AheadTree(AheadPolicy(costs), shape)

    def _seconds(self, size: int, levels: int) -> float:
        """Of a round of a bucket whose lanes are all dead: its passes run over as many rows."""
        lanes = self._of(size)
        lanes.give([], [], [], [], 1)
        seconds = []
        for _ in range(_RUNS + 2):  # the first makes memory, the second a graph
            started = time.perf_counter()
            lanes.launch(Variant(size, levels, True, None), self._graphs)
            lanes.wait()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[2:])

    def _of(self, size: int) -> Lanes:
        lanes = self._lanes.get(size)
        if lanes is None:
            lanes = self._lanes[size] = Lanes(self._models, size)
        return lanes

    def decode(self, batch: Batch, follow: bool, clock: Clock) -> Verified:
        return self._launched(LaunchedRound(batch, [0] * len(batch), self), follow)

    def verify(self, batch: Batch, drafted: Drafted, follow: bool, clock: Clock) -> Verified:
        if isinstance(drafted, LaunchedRound):
            return self._launched(drafted, follow)
        return super().verify(batch, drafted, follow, clock)

    def commit(self, batch: Batch, lease: core.Lease, verified: Verified) -> None:
        if isinstance(verified, LaunchedRound):
            # The device has moved KV, or remapped its table; now the pool's books follow.
            self.planner.commit(lease, batch.seqs, batch.lens, verified.accepts)
        else:
            super().commit(batch, lease, verified)

    def _launched(self, round_: LaunchedRound, follow: bool) -> LaunchedRound:
        batch, depths, levels = round_.batch, round_.depths, round_.levels
        size = next(b for b in self._buckets if b >= len(batch))
        lanes = self._of(size)
        able = [min(depth, self.steps) for depth in depths]
        nodes = most_nodes(self.planner.geometry.shape, levels)
        lanes.give([q.row for q in batch.seqs], batch.lens, [r.tokens[-1] for r in batch], able, nodes)
        edits = lanes.sample_by([r.sampler for r in batch])
        self._table.upload(self._dense.stream)
        lanes.launch(Variant(size, levels, follow, edits), self._graphs)
        lanes.wait()
        round_.lanes = lanes
        self.last, self.written = round_, round_.written
        return round_


class CudaDrafts(HostDrafts):
    """The head's passes on a GPU; roots stay there."""

    def __init__(
        self,
        executor: CudaExecutor,
        roots: Roots,
        head: Eagle3Head,
        cache: KvMemory,
        planner: core.Planner,
        config: EngineConfig,
        vocab_size: int,
    ) -> None:
        super().__init__(head, cache, planner, config, vocab_size)
        self._executor, self._roots = executor, roots

    def draft(self, batch: Batch, depths: Sequence[int], deepen: Deepen | None, clock: Clock) -> Drafted:
        if deepen is None and runs(self._geometry.shape, self._geometry):
            able = [depth if isinstance(r.root, DeviceRoot) else 0 for r, depth in zip(batch, depths, strict=True)]
            return LaunchedRound(batch, able, self._executor)
        return super().draft(batch, depths, deepen, clock)

    def extend(self, entries: Entries, clock: Clock) -> list[object]:
        written, self._executor.written = self._executor.written, {}
        each = list(zip(entries.requests, entries.seqs, entries.starts, entries.counts, strict=True))
        rest = [e for e in each if written.get(e[0].request_id) != (e[2], e[3])]
        found: dict[int, object] = {}
        if rest:
            requests, seqs, starts, counts = (list(part) for part in zip(*rest, strict=True))
            ran = super().extend(Entries(requests, seqs, starts, counts), clock)
            found = {r.request_id: root for r, root in zip(requests, ran, strict=True)}
        return [found.get(r.request_id, DeviceRoot(seq.row)) for r, seq, _, _ in each]

    def _lend(self, request: Request, logits: torch.Tensor, hidden: torch.Tensor) -> DeviceRoot:
        self._roots.put(request.seq.row, logits, hidden)
        return DeviceRoot(request.seq.row)

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
