"""The executor of a GPU. It launches whole rounds, and the next round before the host knows the results of the last.

From the second round of a batch on, the host does not know the lengths of sequences. A round begins with values on the
device, pages are leased for the most positions that rounds can take, and the host reads tokens from mapped memory as
they come.

If a recorder looks on between draft steps, or the host merges other drafts into a fixed tree, the host drafts step by
step, as `HostExecutor` does on any device. Its trees then enter a round at verification. The host plans prefill.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs.engine.config import BlockEngineConfig, EngineConfig
from specrs.engine.devices.calibration import costs_of_blocks
from specrs.engine.devices.cuda_blocks import CudaBlocks, CudaMasks
from specrs.engine.devices.cuda_drafts import CudaDrafts
from specrs.engine.devices.entering import Entering
from specrs.engine.devices.format_arrays import FormatArrays
from specrs.engine.devices.given import Seat
from specrs.engine.devices.graphs import Bucket
from specrs.engine.devices.head_inputs import HostDrafted
from specrs.engine.devices.host import HostExecutor
from specrs.engine.devices.host_blocks import Blocks, heats_of
from specrs.engine.devices.launched import AskedRound, BlockRoot, DeviceRoot, LaunchedRound
from specrs.engine.devices.launches import Variant
from specrs.engine.devices.memory import (
    Activations,
    Models,
    Roots,
    buckets,
    entering,
    format_arrays,
    longest_path,
    prompt_sizes,
    step_rows,
)
from specrs.engine.devices.memory_plan import attention_bytes, attention_of, engine_sizes
from specrs.engine.devices.prompt_pass import prompt_passes
from specrs.engine.drafting.chooser import TAIL, Kind, TreePolicy
from specrs.engine.drafting.costs import Costs, Pace, PassCost
from specrs.engine.drafting.levels import (
    costs_of_rounds,
    drafted_levels,
    levels_for,
    most_nodes,
    tiers,
    united_levels,
)
from specrs.engine.drafting.trees import Drafted
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Request
from specrs.engine.rounds.executor import Verified
from specrs.engine.rounds.pages import Pages
from specrs.models.acceptance import UNKNOWN
from specrs.models.block_head import BlockHead
from specrs.models.config import LayerConfig
from specrs.models.cuda import CudaDense, CudaLinear, DevicePlan
from specrs.models.cuda_attention import CudaAttention
from specrs.models.eagle3 import Eagle3Head
from specrs.models.features import FeatureRows, Features
from specrs.models.head import Head
from specrs.models.llama import LlamaModel
from specrs.models.ops import KvMemory

_RUNS = 5  # measured runs of a round
_PROMPT = 64  # tokens of the prompt that warms the passes up


class CudaExecutor(HostExecutor):
    """Runs one target, and perhaps a head, on a GPU and on a stream of its own."""

    launched = True
    clock = staticmethod(time.perf_counter)

    def __init__(
        self,
        target: LlamaModel,
        head: Eagle3Head | BlockHead | None,
        config: EngineConfig,
        geometry: core.Geometry,
        pool: core.Pool,
    ) -> None:
        dense = target.ops.dense
        assert isinstance(dense, CudaDense)
        self._dense, cuda = dense, target.ops.placement.device
        torch.cuda.synchronize(cuda)  # the weights have arrived
        self._stream = torch.cuda.Stream(cuda)  # type: ignore[no-untyped-call]
        self.ahead = config.graphs != "off"
        self._roots: Roots | None = None
        self._running: Bucket | None = None  # the bucket of the last launched round
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
            rows, batch = max(most, config.prefill_chunk, math.prod(entering(config))), config.max_batch
            target.reserve(rows, most)
            if head is not None:
                rows = max(rows, batch * longest_path(config, geometry, trees=True))
                steps = step_rows(config, geometry)
                if isinstance(head, BlockHead):
                    head.reserve(rows, steps)
                else:
                    head.reserve(rows, batch, steps)
            layers: list[LayerConfig] = [target.config] if head is None else [target.config, head.config]
            products = [*target.products(), *(() if head is None else head.products())]
            wide = 0 if head is None else head.config.aux_size
            attention = attention_bytes(config, geometry, layers, trees, attention_of(target.ops, cuda.index))
            dense.reserve(rows, layers, (cast(CudaLinear, product) for _, product in products), wide, attention)
            kernels = cast(CudaAttention, target.ops.attention).kernels
            kernels.reserve(engine_sizes(config, geometry, layers, rows), dense.placement)
            lists = format_arrays(config, geometry, head is not None)
            self._models = Models(
                dense, target, self.cache, head, None if drafts is None else drafts.cache, self._roots, to_target,
                geometry, config, pool.num_pages, from_dlpack(self._table.tensor(dense.stream)), self._stream,
                None if head is None else Activations(target, head, config, geometry),
                FormatArrays(config, geometry, lists, cuda.index, dense.stream),
                drafts.made if isinstance(drafts, CudaBlocks | CudaMasks) else None,
            )  # fmt: skip
            self._prompts = prompt_passes(self._models, prompt_sizes(config))
            if isinstance(drafts, CudaBlocks):
                drafts.prepare(self._models)
            if isinstance(drafts, CudaDrafts):
                most, wide = entering(config)
                drafts.entering = [Entering(self._models, n, wide) for n in sorted({1, most})]
        self._buckets: dict[int, Bucket] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            yield

    def _drafts(self, head: Head, cache: KvMemory, config: EngineConfig) -> CudaDrafts | CudaBlocks:
        if isinstance(head, BlockHead):
            return CudaBlocks(head, cache, self.planner, config)
        assert isinstance(head, Eagle3Head)
        self._roots, vocab_size = Roots(head, config.max_batch), self.target.config.vocab_size
        if isinstance(config, BlockEngineConfig):
            return CudaMasks(self._roots, head, cache, self.planner, config, vocab_size)
        return CudaDrafts(self._roots, head, cache, self.planner, config, vocab_size)

    @property
    def _sized(self) -> bool:
        """True if a number of levels stands for a size of trees (`drafted_levels`)."""
        return isinstance(self._models.config, BlockEngineConfig)

    def policy(self, pages: Pages) -> TreePolicy:
        shape = self.planner.geometry.shape
        if self.drafts is None or self.drafts.visible:
            return self._policy_of_trees(shape, pages)
        tried = sorted(drafted_levels(shape, self._sized))
        self._warm(tried, pages)
        measured: dict[int, dict[int, float]] = {}  # seconds of rounds, by batch and levels
        for b in {1, self._sizes[-1]}:
            with self._seated(b, pages) as seqs:
                prompt = self._prompt_len(pages)
                measured[b] = {levels: self._seconds(b, levels, seqs, prompt) for levels in (0, *tried)}
        # Every launch writes the draft KV of a head of blocks.
        beginning = ({1: 0.0}, {1: 0.0}) if isinstance(self.drafts, CudaBlocks) else self._beginning(pages)
        return self._expecting(costs_of_rounds(shape, measured, *beginning), shape)

    def _beginning(self, pages: Pages) -> tuple[dict[int, float], dict[int, float]]:
        """Measure the passes after which a request drafts for the first time, and again: seconds by the positions that
        the head reads."""
        rows = min(TAIL, pages.most_tokens)
        enter, resume = ({rows: self._entering(rows, pages, recalls)} for recalls in (False, True))
        if self.tail is None:
            # The head reads all of a request: a long prompt in one pass more, and again in as many short passes as it
            # takes, since the target makes the features of each anew.
            more = self._prompt_rows(pages)
            enter[rows + more] = enter[rows] + self._writing(more, pages)
            resume[2 * rows] = 2 * resume[rows]
        return enter, resume

    def _expecting(self, costs: Costs, shape: core.TreeShape) -> TreePolicy:
        head = None if self.drafts is None else self.drafts.head
        expected = UNKNOWN if head is None else head.acceptance
        return TreePolicy(costs, [Kind.of(one, shape.steps) for one in expected], sized=self._sized)

    def _policy_of_trees(self, shape: core.TreeShape, pages: Pages) -> TreePolicy:
        """Return a policy for an engine whose trees the host makes. Without a head only verification costs time; with
        one, the pass that drafts all levels does too."""
        sizes, pace = {1, self._sizes[-1]}, Pace()
        deep = [levels_for(shape, n) for n in tiers(shape.draft_tokens) if n >= min(8, shape.draft_tokens)]
        target = {b * most_nodes(shape, n): self._seconds(b, n) for b in sizes for n in (0, *deep)}
        self._warm(sorted({levels_for(shape, n) for n in tiers(shape.draft_tokens)}), pages)
        rows, nothing = sorted(target), PassCost([1], [0.0], pace)
        of_target = PassCost(rows, [target[n] for n in rows], pace)
        if self.drafts is None:
            return self._expecting(Costs(of_target), shape)
        drafting = costs_of_blocks({b: self._drafting(b, pages) for b in sizes}, pace)
        if not isinstance(self.drafts, CudaDrafts):  # its draft KV is written by every launch
            return self._expecting(Costs(of_target, nothing, drafting, nothing), shape)
        enter, resume = (PassCost(list(one), list(one.values()), pace) for one in self._beginning(pages))
        return self._expecting(Costs(of_target, nothing, drafting, resume, enter), shape)

    def _drafting(self, size: int, pages: Pages) -> float:
        """Measure in seconds the pass that drafts all levels for so many requests, and the making of their trees."""
        drafts, config, pool, seconds = self.drafts, self._models.config, pages.pool, list[float]()
        assert isinstance(drafts, CudaBlocks | CudaMasks) and isinstance(config, BlockEngineConfig)
        count = max(min(self._prompt_len(pages), pages.most_tokens - config.rows), 1)
        need = min(count + config.rows, pages.most_tokens)
        n = min(size, pool.stats()["free_pages"] // -(-need // pool.page_size))
        seqs, none = [pool.create() for _ in range(n)], [0] * n
        with pool.reserve([(seq, need) for seq in seqs]) as lease:
            for seq in seqs:
                self._read(seq, count)
            lease.advance([count] * n)  # passes are planned behind committed positions
            rows, levels = drafts.sizes(config.levels, need - count)
            blocks = Blocks(seqs, [count] * n, none, none, [rows] * n, [levels] * n, [1.0] * n)
            for _ in range(_RUNS + 1):  # the first one allocates memory
                self._stream.synchronize()
                started = time.perf_counter()
                drafts.lists(blocks).trees(none, config.nodes)
                seconds.append(time.perf_counter() - started)
        for seq in seqs:
            pool.release([seq])
        return statistics.median(seconds[1:])

    @contextmanager
    def _seated(self, size: int, pages: Pages) -> Iterator[list[core.Sequence]]:
        """Give a bucket's seats to prompts that belong to no request, as many as the pool has room for."""
        pool, most = pages.pool, self._prompt_len(pages) + self._measured_len + pages.round_positions
        room = pool.stats()["free_pages"] // -(-most // pool.page_size) if most <= pages.most_tokens else 0
        seqs = [pool.create() for _ in range(min(size, room))]
        with pool.reserve([(seq, most) for seq in seqs]):
            for seq in seqs:
                self._read(seq, self._prompt_len(pages))
            self._table.upload(self._dense.stream)
            try:
                yield seqs
            finally:
                self._table.forget()  # rounds may have remapped rows
        pool.release(seqs)

    def _prompt_len(self, pages: Pages) -> int:
        """Return the number of tokens of a prompt that belongs to no request."""
        return min(_PROMPT, pages.most_tokens, self._models.config.prefill_chunk)

    @property
    def _measured_len(self) -> int:
        """The most positions that a request may commit while a round is measured."""
        return (_RUNS + 5) * (self.planner.geometry.shape.steps + 1)

    def _seconds(self, size: int, levels: int, seqs: Sequence[core.Sequence] = (), prompt: int = 0) -> float:
        """Measure a round of a bucket in seconds. Empty seats take less time, but passes still run over their rows.

        Rounds without trees of the host are launched ahead. Their time is the time from one round to the next.

        Args:
            seqs: sequences that have seats.
            prompt: positions that each of them has committed.
        """
        bucket, nodes = self._of(size), most_nodes(self.planner.geometry.shape, levels)
        seats = [Seat(seq.row, prompt, 0, levels, prompt + self._measured_len) for seq in seqs]
        bucket.given.set_requests(seats, nodes)
        variant = self._variant(levels)
        ahead = self.ahead and not variant.trees
        seconds = []
        last = bucket.launch(variant)
        for _ in range(_RUNS + 3):  # the first three allocate memory and capture a graph
            started = time.perf_counter()
            if ahead:
                number, last = last, bucket.again(variant)
            else:
                number = bucket.launch(variant)
            bucket.collect(number)
            seconds.append(time.perf_counter() - started)
        bucket.collect(last if ahead else number)
        return statistics.median(seconds[3:])

    def _variant(self, levels: int, edits: int | None = None) -> Variant:
        """Return a round with trees of so many levels, from wherever this engine's trees come."""
        drafts = self.drafts
        follow = isinstance(drafts, CudaBlocks) or (drafts is not None and levels > 0)
        hosted = levels > 0 and (drafts is None or drafts.visible)
        return Variant(levels, follow, edits, trees=hosted)

    def _warm(self, levels: Sequence[int], pages: Pages) -> None:
        """Run over a prompt and capture graphs, so that the first answer does not wait for this and take twice as long.

        The graphs are those of passes over prompts, of passes that begin drafts, and of each bucket, plain and with
        drafts of each of ``levels``, greedy and sampled. A batch gets smaller as its requests end, so that it may run
        in any bucket.
        """
        self._prompt(pages)
        for _ in range(2):  # the first run loads kernels, the second one captures a graph
            for each in self._prompts:
                each.launch()
            for enters in self.drafts.entering if isinstance(self.drafts, CudaDrafts) else ():
                for recalls in (False, True):
                    enters.launch(recalls)
        for size in self._sizes if self.ahead else ():
            bucket = self._of(size)
            bucket.given.set_requests([], 1)
            for edits in (None, bucket.given.least_room()):
                for variant in (self._variant(n, edits) for n in (0, *levels)):
                    while not bucket.graphs.settled(variant):
                        bucket.collect(bucket.launch(variant))

    def _prompt(self, pages: Pages) -> None:
        """Run both models over a prompt that belongs to no request."""
        n, seq = self._prompt_len(pages), pages.pool.create()
        with pages.pool.reserve([(seq, n)]):
            self._read(seq, n)
        pages.pool.release([seq])

    def _read(self, seq: core.Sequence, n: int) -> None:
        """Run both models over the first positions of a sequence."""
        tokens, plan = torch.zeros(n, dtype=torch.int64), self.planner.extend([seq], [0], [n])
        aux = self._logits(tokens, plan, self.drafts is not None, tokens[:1])[1]
        if aux is not None and isinstance(self.drafts, CudaBlocks):
            self.drafts.head.write(aux.layers, plan, self.drafts.cache)
        if aux is not None and isinstance(self.drafts, CudaDrafts):
            self.drafts.head.write(tokens, aux.layers, plan, self.drafts.cache)
            self.drafts.head.extend(tokens, aux.layers, plan, self.drafts.cache, tokens[:1])

    def _prompt_rows(self, pages: Pages) -> int:
        """Return the most positions of a pass over a prompt."""
        return min(self._models.config.prefill_chunk, pages.most_tokens)

    def _writing(self, n: int, pages: Pages) -> float:
        """Measure in seconds the head's pass over n positions of a prompt whose root nobody wants yet."""
        assert isinstance(self.drafts, CudaDrafts)
        seq, seconds, kept = pages.pool.create(), list[float](), self._prompt_features(n)
        kept.stacked.zero_()
        with pages.pool.reserve([(seq, n)]):
            for _ in range(_RUNS + 1):  # the first one allocates memory
                self._stream.synchronize()
                started = time.perf_counter()
                tokens, plan = torch.zeros(n, dtype=torch.int64), self.planner.extend([seq], [0], [n])
                at, (tokens,) = DevicePlan.of(self._dense, plan, self.cache.page_size, tokens)
                self.drafts.head.write(tokens, kept.layers, cast(core.Plan, at), self.drafts.cache)
                self._stream.synchronize()
                seconds.append(time.perf_counter() - started)
        pages.pool.release([seq])
        return statistics.median(seconds[1:])

    def _entering(self, n: int, pages: Pages, recalls: bool) -> float:
        """Measure in seconds the pass over n positions after which a request drafts for the first time, or again
        (``recalls``).

        It is measured behind a pass over a prompt, as it comes in a request: behind itself, its code and data would
        still be in the host's caches.
        """
        assert isinstance(self.drafts, CudaDrafts)
        seq, seconds = pages.pool.create(), list[float]()
        kept = self._prompt_features(n)
        with pages.pool.reserve([(seq, n)]):
            for _ in range(_RUNS + 2):  # the first two allocate memory and capture a graph
                self._read(seq, n)
                self._stream.synchronize()
                started = time.perf_counter()
                plan = self.planner.extend([seq], [0], [n])
                features = None if recalls else [[Features(kept, range(n))]]
                self.drafts.entering[0].run(plan, [[0] * (n + 1)], features, [seq.row])
                self._stream.synchronize()
                seconds.append(time.perf_counter() - started)
        pages.pool.release([seq])
        return statistics.median(seconds[2:])

    def _of(self, size: int) -> Bucket:
        bucket = self._buckets.get(size)
        if bucket is None:
            bucket = self._buckets[size] = Bucket(self._models, size)
        return bucket

    def _prompt_features(self, rows: int) -> FeatureRows:
        """Return memory for the features of a prompt's rows. Rounds have memory of their own."""
        assert self.target.features is not None
        return self.target.features.once(rows)  # prompts differ in length

    def _logits(
        self, tokens: torch.Tensor, plan: core.Plan, features: bool, rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, FeatureRows | None]:
        if self._running is not None:
            self._running.overtaken = True
        kept = tokens[:0] if rows is None else rows
        requests = max(from_dlpack(plan.prefix_lens).numel(), kept.numel())
        for each in self._prompts if rows is not None else ():
            if each.rows >= tokens.numel() and each.batch >= requests:
                logits, aux = each.run(tokens, plan, kept, features)
                return self._dense.host(logits), aux
        aux = self._prompt_features(tokens.numel()) if features else None
        at, (tokens, kept) = DevicePlan.of(self._dense, plan, self.cache.page_size, tokens, kept)
        logits = self.target.forward(tokens, cast(core.Plan, at), self.cache, aux, None if rows is None else kept)[0]
        return self._dense.host(logits), aux

    def decode(self, batch: Batch) -> Verified:
        return self._launched(batch, AskedRound([0] * len(batch), 0))

    def verify(self, batch: Batch, drafted: Drafted) -> Verified:
        if isinstance(drafted, AskedRound):
            return self._launched(batch, drafted)
        trees, shape = drafted.trees, self.planner.geometry.shape
        assert trees is not None
        stepwise = isinstance(drafted, HostDrafted) and not isinstance(self._models.config, BlockEngineConfig)
        levels = shape.steps if stepwise else levels_for(shape, max(trees.sizes))
        # If the head is up to date, it runs over the accepted tokens, as if the device had drafted.
        depths = [levels if isinstance(r.head.root, DeviceRoot) and r.head.followed else 0 for r in batch]
        return self._launched(batch, AskedRound(depths, levels), drafted)

    def commit(self, batch: Batch, lease: core.Lease, verified: Verified) -> None:
        # The device has already moved KV or remapped its table; this brings the pool's books up to date.
        self.planner.commit(lease, batch.seqs, batch.lens, verified.accepts)

    def _launched(self, batch: Batch, asked: AskedRound, made: Drafted | None = None) -> LaunchedRound:
        """Launch a round with drafts that the device makes, drafts that the host has made, or both."""
        levels, shape = asked.levels, self.planner.geometry.shape
        trees, drafts = None if made is None else made.trees, 0
        if asked.trees is not None:
            trees, drafts = asked.trees, levels
            levels = united_levels(shape, levels, max(trees.sizes))
        bucket = self._running = self._of(next(b for b in self._sizes if b >= len(batch)))
        # Rounds behind this one may draft deeper. They make no more nodes than their levels have.
        given, nodes = bucket.given, shape.draft_tokens if trees is None else most_nodes(shape, levels)
        page = self.planner.geometry.page_size
        # A request ends one position early, because nobody needs the KV of its last token.
        seats = [
            Seat(r.seq.row, n, r.tokens[-1], depth, r.ending.max_total - 1, r.head.first // page,
                 r.ending.eos_ids | r.ending.stop_ids, heat)
            for r, n, depth, heat in zip(batch, batch.lens, asked.depths, heats_of(batch), strict=True)
        ]  # fmt: skip
        given.set_requests(seats, nodes)
        moving = any(r.draws.grammar is not None for r in batch)
        edits = given.set_samplers([r.sampler for r in batch], moving)
        self._table.upload(self._dense.stream)
        if trees is not None:
            given.set_trees(trees)
        follow = any(asked.depths) or any(r.head.followed and isinstance(r.head.root, BlockRoot) for r in batch)
        variant = Variant(levels, follow, edits, trees=trees is not None, drafts=drafts)
        number = bucket.launch(variant)
        launched = LaunchedRound(batch, bucket, number, variant, range(len(batch)))
        return launched if made is None else replace(launched, host_trees=made.trees, host_faults=made.faults)

    def launch(self, verified: Verified, rounds: int, levels: int) -> Verified | None:
        assert isinstance(verified, LaunchedRound)
        remaps = verified.variant.levels > 0 and self.planner.geometry.page_size == 1
        rows = [q.row for q in verified.batch.seqs] if remaps else []
        if self._table.upload(self._dense.stream, rows)[3]:
            return None  # the upload would store whole rows, which rounds in flight change
        bucket, variant = verified.bucket, replace(verified.variant, loop=False)
        if variant.levels:  # else there are no roots to draft from
            variant = replace(variant, levels=levels)
        variant = replace(variant, loop=bucket.loops(variant))
        number = bucket.again(variant, rounds)
        return LaunchedRound(verified.batch, bucket, number, variant, verified.seats)

    def abandon(self, requests: Sequence[Request]) -> None:
        bucket = self._running
        if bucket is None:
            return
        for r in requests:
            # The head may have run over accepted tokens that the request, which is as before the round, does not have.
            if isinstance(r.head.root, DeviceRoot):
                r.head.root = None
        self._table.forget()  # rounds may have remapped rows
        bucket.settle()
        self._running = None

    def close(self) -> None:
        # A graph keeps everything that it points at, weights too, until the core collects the graph.
        self._running = None
        self._buckets.clear()
        self._prompts.clear()
        if isinstance(self.drafts, CudaDrafts):
            self.drafts.entering.clear()
        if isinstance(self.drafts, CudaBlocks):
            self.drafts.passes.clear()
        core._graph_collect(True)
