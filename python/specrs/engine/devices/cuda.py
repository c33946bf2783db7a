"""The executor of a GPU: a round is launched whole, and the next one behind it before the host knows what it found.

From the second round of a batch on, the host knows no length: a round begins with values on the device, pages are
leased for the most that rounds can take, and the host reads tokens from mapped memory as they come.

Where somebody looks on between draft steps (a recorder, a cost model that goes by scores), the host drafts step by
step, as `HostExecutor` does on any device, and its trees enter a round at verification. Prefill is planned by the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import cast

import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs.engine.config import EngineConfig
from specrs.engine.devices.graphs import MOST_AHEAD, Bucket
from specrs.engine.devices.host import HostDrafted, HostDrafts, HostExecutor, Root, likeliest, non_finite
from specrs.engine.devices.launches import Variant
from specrs.engine.devices.memory import Activations, Arrays, Models, Roots, buckets, longest_path
from specrs.engine.devices.memory_plan import attention_passes
from specrs.engine.drafting.ahead import (
    AheadTree,
    drafted_levels,
    levels_for,
    most_nodes,
    tiers,
    united_levels,
    unites,
)
from specrs.engine.drafting.chooser import Kind, TreePolicy
from specrs.engine.drafting.costs import Costs, Overheads, Pace, PassCost
from specrs.engine.drafting.speculation import AdaptiveTree
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Request
from specrs.engine.rounds.executor import Clock, Deepen, Drafted, Verified, Watched
from specrs.engine.rounds.pages import Pages
from specrs.models.acceptance import HEATS, UNKNOWN
from specrs.models.cuda import CudaDense
from specrs.models.eagle3 import Eagle3Head
from specrs.models.features import FeatureRows, Features
from specrs.models.llama import LlamaModel
from specrs.models.ops import KvMemory

_RUNS = 5  # of a round that is measured
# Seconds, before any was seen: the host's part of a plain round, which bounds those of small models; and what it does
# while the device waits for it, in a round with trees of the host's, and in a plain one that the head follows.
_HOST, _HOSTED, _FOLLOWED = 4e-4, 2e-4, 4e-4


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
class AskedRound:
    """Drafts that `CudaExecutor.verify` launches together with their verification.

    Attributes:
        depths: how deep each request drafts, 0 for not at all.
        levels: of drafts that are run, 0 without any.
        trees: of the host, with which the drafts are united.
    """

    batch: Batch
    depths: list[int]
    levels: int
    trees: core.TreeBatch | None = None

    @property
    def steps(self) -> int:
        return max(self.levels - 1, 0)


@dataclass(eq=False)
class LaunchedRound:
    """A round that runs or has run. What it found is waited for when it is asked for, and is there until many rounds
    later; what it left in device memory (features, logits), until the next one.

    Attributes:
        batch: requests that are asked about, as they are once all rounds before have landed.
        bucket, number: where it runs, and which of the rounds there it is.
        variant: what was launched.
        seats: of each request.
        host_drafted: trees that the host made; ``None`` where the device drafted them, or some of their nodes.
    """

    batch: Batch
    bucket: Bucket
    number: int
    variant: Variant
    seats: Sequence[int]
    host_drafted: Watched | None = None

    @cached_property
    def _found(self) -> Arrays:
        found, seats = self.bucket.collect(self.number), self.seats
        began = found["lens"].tolist()
        if any(began[seat] != n for seat, n in zip(seats, self.batch.lens, strict=True)):
            starts = [began[seat] for seat in seats]
            raise RuntimeError(f"round {self.number} began at positions {starts}, its requests at {self.batch.lens}")
        return found

    def _held(self, what: str, held: bool) -> Bucket:
        """The bucket, whose device memory still has what this round left. Raises StaleOutputError."""
        bucket = self.bucket
        if not held:
            what = f"{what} of round {self.number} of the bucket of {bucket.batch} requests"
            current = bucket.rounds - 1
            error = core.StaleOutputError(f"{what}: round {current}, or a pass behind it, has overwritten it")
            error.what, error.held, error.current = what, self.number, current
            raise error
        return bucket

    @cached_property
    def starts(self) -> list[int]:
        """Each request's first row of the pass, and behind the last seat's."""
        if not self.variant.levels:
            return [*self.seats, self.bucket.given.live]
        if self.host_drafted is not None:
            return list(accumulate(self.host_drafted.trees.sizes, initial=0))
        offsets: list[int] = self._found["tree_offsets"].tolist()
        return [*(offsets[seat] for seat in self.seats), offsets[self.bucket.given.live]]

    @cached_property
    def trees(self) -> core.TreeBatch:
        if self.host_drafted is not None:
            return self.host_drafted.trees
        found = self._found
        if not self.variant.levels:
            return core.TreeBatch.from_parents([[-1]] * len(self.seats), [[r.tokens[-1]] for r in self.batch])
        scores = found["tree_scores"].view(torch.float32)
        offsets, arrays = self._of_seats(found["tree_offsets"], (found["tree_tokens"], found["tree_parents"], scores))
        return core.TreeBatch.from_arrays(offsets, *arrays)

    @cached_property
    def origins(self) -> list[list[int]] | None:
        found = self._found
        if not self.variant.drafts:
            return None
        offsets, origins = found["tree_offsets"].tolist(), found["tree_origins"]
        return [origins[offsets[seat] : offsets[seat + 1]].tolist() for seat in self.seats]

    @cached_property
    def accepts(self) -> core.Accepts:
        found = self._found
        if any(self._faulty):
            # Rare: the host looks at the rows, and says of each request what was wrong.
            trees = self.trees
            each = zip(self.starts, trees.sizes, strict=False)
            logits = self._logits([row for first, size in each for row in range(first, first + size)])
            return core.verify(trees, logits, [r.sampler for r in self.batch], self.batch.lens)
        offsets, arrays = self._of_seats(found["offsets"], (found["paths"], found["tokens"]))
        return core.Accepts.from_arrays(offsets, *arrays)

    def logits(self, request: int, rows: Sequence[int]) -> torch.Tensor:
        first = self.starts[request]
        return self._logits([first + row for row in rows])

    def _logits(self, rows: list[int]) -> torch.Tensor:
        """Of rows of the pass, on the host."""
        bucket = self._held("logits", self.bucket.holds_logits(self.number))
        return bucket.logits[rows].to("cpu", torch.float32)

    def _of_seats(
        self, offsets: torch.Tensor, arrays: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Of arrays with a part for each seat, those of the requests' seats."""
        seats = self.seats
        if isinstance(seats, range):  # of every request since the launch
            return offsets[: len(seats) + 1], arrays
        ends: list[int] = offsets.tolist()
        index = torch.tensor([i for seat in seats for i in range(ends[seat], ends[seat + 1])], dtype=torch.int64)
        counts = [ends[seat + 1] - ends[seat] for seat in seats]
        return torch.tensor([0, *accumulate(counts)], dtype=torch.int32), tuple(a[index] for a in arrays)

    @cached_property
    def _faulty(self) -> list[bool]:
        """Of each request, whether the target's scores were not finite."""
        faults: list[int] = self._found["faults"].tolist()
        return [faults[seat] != 0 for seat in self.seats]

    @property
    def lost(self) -> list[int]:
        return [] if self.bucket.holds_logits(self.number) else [i for i, faulty in enumerate(self._faulty) if faulty]

    @cached_property
    def faults(self) -> list[tuple[core.NonFiniteError, int]]:
        """Requests whose root's draft scores give no distribution."""
        if self.host_drafted is not None:
            return list(self.host_drafted.faults)
        if not self.variant.levels:
            return []
        sound: list[int] = self._found["sound"].tolist()
        bad = [i for i, seat in enumerate(self.seats) if self.drafted(i) and sound[seat] == 0]
        kept = self.bucket.holds(self.number)
        scores = [self.bucket.launches.root_logits[self.seats[i]].cpu() if kept else None for i in bad]
        return [(_bad_root(i, row), self._sound_until(i)) for i, row in zip(bad, scores, strict=True)]

    def _sound_until(self, request: int) -> int:
        root = self.batch.requests[request].root
        return root.start if isinstance(root, DeviceRoot) else self.batch.lens[request]

    def features(self, request: int, rows: Sequence[int]) -> Features:
        memory = self._held("features", self.bucket.holds(self.number)).launches.features
        assert memory is not None and not self.drafted(request)
        # The next round overwrites them. Without drafts there is one row, the root's.
        first = self.starts[request]
        if list(rows) == [0]:
            kept = memory.stacked.narrow(1, first, 1).clone()
        else:
            index = torch.tensor([first + row for row in rows], device=memory.stacked.device)
            kept = memory.stacked.index_select(1, index)
        return Features(FeatureRows(memory.aux_layers, kept), range(len(rows)))

    def likeliest(self, requests: Sequence[int], count: int) -> list[tuple[list[int], list[list[int]]]] | None:
        if not self.bucket.holds_logits(self.number):
            return None  # and nobody waits for a round that runs
        return likeliest(self.trees, self.starts, self.bucket.logits, requests, count)

    @cached_property
    def _depths(self) -> list[int]:
        """How deep each seat drafted."""
        depths: list[int] = self._found["depths"].tolist()
        return depths

    def drafted(self, request: int) -> bool:
        """Whether the request had drafts, and the head has run over what was accepted of them."""
        return self.variant.levels > 0 and self._depths[self.seats[request]] > 0

    def root(self, request: int) -> DeviceRoot | None:
        if not self.drafted(request):
            return None
        return DeviceRoot(self.batch.seqs[request].row, self.batch.lens[request])


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
        self.steps, self._level, self._graphs = geometry.shape.steps, config.graphs, config.graphs != "off"
        self._roots: Roots | None = None
        self._running: Bucket | None = None  # of the last round that was launched
        self._needs_sync = True  # the host has to read that round before the next one is launched
        with self.entered():
            super().__init__(target, head, config, geometry, pool)
            self._table = core._DeviceTable(pool, cuda.index, dense.stream)
            drafts = self.drafts
            to_target = None
            if head is not None and head.d2t is not None:
                to_target = head.target_ids.to(cuda, torch.int32)
            self._sizes = buckets(config.max_batch)
            trees = head is not None or bool(config.sources)
            most = config.max_batch * (geometry.shape.draft_tokens if trees else 1)
            target.reserve(max(most, config.prefill_chunk), most)
            if head is not None:
                path = longest_path(config, geometry, trees=True)
                head.reserve(max(config.max_batch * path, config.prefill_chunk), config.max_batch)
            keys = geometry.row_pages * config.page_size
            for layer in [target.config] if head is None else [target.config, head.config]:
                group = layer.num_heads // layer.num_kv_heads
                dense.attention_space(
                    max(
                        core._device_attention_workspace(
                            cuda.index, requests=requests, max_queries=queries, kv_heads=layer.num_kv_heads,
                            group=group, head_dim=layer.head_dim, max_keys=keys,
                        )
                        for requests, queries in attention_passes(config, geometry, trees)
                    )
                )  # fmt: skip
            self._models = Models(
                dense, target, self.cache, head, None if drafts is None else drafts.cache, self._roots, to_target,
                geometry, config, pool.num_pages, from_dlpack(self._table.tensor(dense.stream)), self._stream,
                None if head is None else Activations(target, head, config, geometry),
            )  # fmt: skip
        self._buckets: dict[int, Bucket] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            yield

    def _drafts(self, head: Eagle3Head, cache: KvMemory, config: EngineConfig) -> HostDrafts:
        self._roots = Roots(head, config.max_batch)
        vocab_size = self.target.config.vocab_size
        return CudaDrafts(self._roots, head, cache, self.planner, config, vocab_size)

    def speculation(self, pages: Pages) -> AdaptiveTree:
        shape = self.planner.geometry.shape
        if self.drafts is None:
            return self._speculation_of_trees(shape)
        measured = {b: [self._seconds(b, levels) for levels in (0, 1, shape.steps)] for b in {1, self._sizes[-1]}}
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
            PassCost([1, 2 * self._sizes[-1]], [extend, extend], pace),
            _overheads(plain),
        )
        return self._ahead(costs, shape)

    def _ahead(self, costs: Costs, shape: core.TreeShape) -> AheadTree:
        head = None if self.drafts is None else self.drafts.head
        expected = (UNKNOWN,) * len(HEATS) if head is None else head.acceptance
        policy = TreePolicy(costs, [Kind.of(one, shape.steps) for one in expected])
        return AheadTree(policy, shape, lambda: self._running is not None and self._running.cold)

    def _speculation_of_trees(self, shape: core.TreeShape) -> AdaptiveTree:
        """Of an engine whose drafts the host makes, at no cost of the device: what rounds of their trees take."""
        sizes, pace = {1, self._sizes[-1]}, Pace()
        deep = [levels_for(shape, n) for n in tiers(shape.draft_tokens) if n >= min(8, shape.draft_tokens)]
        target = {b * most_nodes(shape, n): self._seconds(b, n) for b in sizes for n in (0, *deep)}
        rows, nothing = sorted(target), PassCost([1], [0.0], pace)
        costs = Costs(
            PassCost(rows, [target[n] for n in rows], pace), nothing, PassCost([1], [0.0], pace), _overheads(target[1])
        )
        return self._ahead(costs, shape)

    def _seconds(self, size: int, levels: int) -> float:
        """Of a round of a bucket whose seats are all empty: its passes run over as many rows. From one to the next
        where they are launched ahead, as rounds without trees of the host's are."""
        bucket = self._of(size)
        bucket.given.set_requests([], [], [], [], 1)
        heads = self.drafts is not None
        variant = Variant(size, levels, heads, None, trees=levels > 0 and not heads)
        ahead = self._graphs and not variant.trees
        seconds = []
        last = bucket.launch(variant, self._graphs)
        for _ in range(_RUNS + 3):  # the first ones make memory, and a graph
            started = time.perf_counter()
            if ahead:
                number, last = last, bucket.again(variant, self._graphs)
            else:
                number = bucket.launch(variant, self._graphs)
            bucket.collect(number)
            seconds.append(time.perf_counter() - started)
        bucket.collect(last if ahead else number)
        return statistics.median(seconds[3:])

    def _of(self, size: int) -> Bucket:
        bucket = self._buckets.get(size)
        if bucket is None:
            bucket = self._buckets[size] = Bucket(self._models, size)
        return bucket

    def _logits(
        self, tokens: torch.Tensor, plan: core.Plan, aux: FeatureRows | None, rows: torch.Tensor | None
    ) -> torch.Tensor:
        if self._running is not None:
            self._running.overtaken = True
        return super()._logits(tokens, plan, aux, rows)

    def decode(self, batch: Batch, follow: bool, clock: Clock) -> Verified:
        return self._launched(AskedRound(batch, [0] * len(batch), 0), follow)

    def verify(self, batch: Batch, drafted: Drafted, follow: bool, clock: Clock) -> Verified:
        if isinstance(drafted, AskedRound):
            return self._launched(drafted, follow)
        made, shape = cast(Watched, drafted), self.planner.geometry.shape
        # Where the head is up to date it runs over what is accepted, as if the device had drafted.
        levels = shape.steps if isinstance(drafted, HostDrafted) else levels_for(shape, max(made.trees.sizes))
        depths = [levels if r.followed and r.root is not None else 0 for r in batch]
        return self._launched(AskedRound(batch, depths, levels), follow, made)

    def commit(self, batch: Batch, lease: core.Lease, verified: Verified) -> None:
        if isinstance(verified, LaunchedRound):
            # The device has moved KV, or remapped its table; now the pool's books follow.
            self.planner.commit(lease, batch.seqs, batch.lens, verified.accepts)
        else:
            super().commit(batch, lease, verified)

    def _launched(self, asked: AskedRound, follow: bool, host_drafted: Watched | None = None) -> LaunchedRound:
        """Launch a round, of drafts that the device makes, or that the host has made; or of both."""
        batch, levels, shape = asked.batch, asked.levels, self.planner.geometry.shape
        trees, drafts = None if host_drafted is None else host_drafted.trees, 0
        if asked.trees is not None:
            trees, drafts = asked.trees, levels
            levels = united_levels(shape, levels, max(trees.sizes))
        bucket = self._running = self._of(next(b for b in self._sizes if b >= len(batch)))
        given, nodes = bucket.given, most_nodes(shape, levels)
        # A request ends with the position before its last token's, whose KV nobody needs.
        limits, stops = [r.ending.max_total - 1 for r in batch], [r.ending.eos_ids | r.ending.stop_ids for r in batch]
        tokens = [r.tokens[-1] for r in batch]
        rows = [q.row for q in batch.seqs]
        given.set_requests(rows, batch.lens, tokens, asked.depths, nodes, levels, limits, stops)
        moving = any(r.draws.grammar is not None for r in batch)
        edits = given.set_samplers([r.sampler for r in batch], moving)
        self._table.upload(self._dense.stream)
        if trees is not None:
            given.set_trees(trees)
        variant = Variant(bucket.batch, levels, follow, edits, trees=trees is not None, drafts=drafts)
        number = bucket.launch(variant, self._graphs)
        # What the head is asked for behind this round, a root or features, the host has to see to.
        waits = follow and not all(depth > 0 or not r.followed for r, depth in zip(batch, asked.depths, strict=True))
        self._needs_sync = waits or given.changing or trees is not None or self._level == "off"
        return LaunchedRound(batch, bucket, number, variant, range(len(batch)), host_drafted)

    @property
    def waited(self) -> float:
        return sum(bucket.waited for bucket in self._buckets.values())

    def following(self, verified: Verified) -> Verified | None:
        if not isinstance(verified, LaunchedRound):
            return None
        number = verified.bucket.followed_by(verified.number)
        return None if number is None else replace(verified, number=number)

    def ahead(self, verified: Verified) -> int:
        if not isinstance(verified, LaunchedRound) or self._needs_sync or self._running is not verified.bucket:
            return 0
        if not verified.variant.loop:
            return MOST_AHEAD if self._level == "loop" and verified.bucket.loops(verified.variant) else 1
        return 0 if verified.bucket.ended(verified.number) else MOST_AHEAD

    def launch(self, verified: Verified, rounds: int) -> Verified | None:
        assert isinstance(verified, LaunchedRound)
        remaps = verified.variant.levels > 0 and self.planner.geometry.page_size == 1
        rows = [q.row for q in verified.batch.seqs] if remaps else []
        if self._table.upload(self._dense.stream, rows)[3]:
            return None  # whole rows are to be stored, which the rounds in flight change
        bucket, variant = verified.bucket, verified.variant
        variant = replace(variant, loop=self._level == "loop" and bucket.loops(replace(variant, loop=False)))
        number = bucket.again(variant, self._graphs, rounds)
        return LaunchedRound(verified.batch, bucket, number, variant, verified.seats)

    def hasten(self) -> None:
        if self._running is not None:
            self._running.request_stop()

    def landing(self, verified: Verified, batch: Batch, rows: Sequence[int]) -> Verified:
        assert isinstance(verified, LaunchedRound)
        seats = verified.seats
        if len(rows) < len(seats):
            seats = [seats[row] for row in rows]
        return LaunchedRound(batch, verified.bucket, verified.number, verified.variant, seats)

    def abandon(self, requests: Sequence[Request]) -> None:
        bucket = self._running
        if bucket is None:
            return
        for r in requests:
            # The head may have run over what was accepted, and the requests are as they were.
            if isinstance(r.root, DeviceRoot):
                r.root = None
        self._table.forget()  # rounds may have remapped rows
        bucket.settle()
        self._running = None

    def close(self) -> None:
        # A graph keeps what it points at, the weights too, until it is collected.
        self._running = None
        self._buckets.clear()
        core._graph_collect(True)


class CudaDrafts(HostDrafts):
    """The head's passes on a GPU; roots stay there."""

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
        self._roots, self._steps = roots, planner.geometry.shape.steps
        self.unites = unites(planner.geometry.shape)

    def draft(self, batch: Batch, depths: Sequence[int], deepen: Deepen | None, clock: Clock) -> Drafted:
        if deepen is not None:
            return super().draft(batch, depths, deepen, clock)
        able = [
            min(depth, self._steps) if isinstance(r.root, DeviceRoot) else 0
            for r, depth in zip(batch, depths, strict=True)
        ]
        deepest = max(able, default=0)
        # Of the levels that graphs are made for; each seat knows how deep it drafts itself.
        levels = min(n for n in drafted_levels(self._geometry.shape) if n >= deepest) if deepest else 0
        return AskedRound(batch, able, levels)

    def beside(self, drafted: Drafted, trees: core.TreeBatch) -> Drafted | None:
        if not isinstance(drafted, AskedRound) or not drafted.levels or not self.unites:
            return None
        return replace(drafted, trees=trees)

    def _lend(self, request: Request, logits: torch.Tensor, hidden: torch.Tensor) -> DeviceRoot:
        self._roots.put(request.seq.row, logits, hidden)
        return DeviceRoot(request.seq.row, request.draft_valid)

    def _root(self, request: Request) -> Root:
        root = request.root
        if not isinstance(root, DeviceRoot):
            return super()._root(request)
        return Root(self._roots.logits[root.row].to("cpu", torch.float32), self._roots.hidden[root.row])


def _overheads(plain: float) -> Overheads:
    """What rounds take over and above their passes, where a plain pass takes so long."""
    host = max(_HOST - plain, 0.0)
    return Overheads([host, 0.0, _HOSTED, host + _FOLLOWED])


def _bad_root(request: int, logits: torch.Tensor | None) -> core.NonFiniteError:
    """Why nothing can be drafted from a root's logits; ``None`` where a later round has overwritten them."""
    error = None if logits is None or bool(logits.isneginf().all()) else non_finite("draft logits", logits)
    if error is None:
        value, index = ("all -inf", 0) if logits is not None else ("not finite", -1)
        error = core.NonFiniteError(f"draft logits: {value} at index {index}")
        error.kind, error.what, error.value, error.index = "NonFinite", "draft logits", value, index
    error.request = request
    return error
