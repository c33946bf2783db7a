"""Run a capsule's round again, without weights: planner, KV kernels and attention, every write logged.

    run = replay(capsule, format="triton")
    other = replay(capsule, format="triton", reverts=[27338])
    compare(run, other).first          # index, owner and both values of the first write that differs

Every phase of the round is planned into static buffers (padded to the largest batch, as a captured graph's are) over
the same page tables, its keys and values are written and moved by the kernels, and its attention is computed by the
format's backend from the arrays alone. Keys, values and queries are made up from who they belong to (`synth`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs._specrs import ConfigError, DeviceLens, KvCache, Plan, Planner, SpecrsError
from specrs.backends import PlanAttention, find
from specrs.backends.base import DraftAttention, Format, Layout
from specrs.capsule import synth
from specrs.capsule.log import Guard, Run, Segment
from specrs.capsule.names import Names, Owner, Query
from specrs.capsule.owners import ArrayNames
from specrs.capsule.parts import DraftStep
from specrs.capsule.schema import Capsule
from specrs.capsule.static import FILLS, MAX_BYTES, Image, Phase, Static, static_bytes
from specrs.capsule.synth import Tokens
from specrs.capsule.world import World, rebuild, with_room

TOLERANCE = 1e-5
"""Largest difference of attention outputs, which lie within -1 and 1, of two formats."""
MAX_POOL_BYTES = 1 << 27
"""Largest made-up KV pool (a million slots); a capsule of a larger one is refused."""
MAX_TABLE = 1 << 26
"""Most entries of a page table (rows times columns); a capsule of a larger one is refused."""
MAX_PADDED = 256
"""Most requests that plans are padded to, unless the round has more; the largest batch of the capsule bounds it too."""

LOGGED = ("rows", "qo_indptr", "prefix_lens", "positions", "out_slots", "mask")
"""Arrays of a plan that are compared."""

Make = Callable[[core.FormatBuffers | None], Plan]
"""Plans a pass on the host, into static buffers or the plan's own memory."""

_Attention = Callable[[KvCache, int, Plan, torch.Tensor, torch.Tensor, float], None]
_TARGET, _DRAFT = 0, 1  # caches, as numbers that tell tokens apart
_PREFIX, _OTHERS, _STEP, _VERIFY, _EXTEND, _QUERY = range(6)  # kinds of tokens, likewise


def replay(
    capsule: Capsule,
    *,
    format: Format | None = None,
    reverts: Sequence[int] = (),
    layout: Layout | None = None,
    mode: DraftAttention | None = None,
    reference: bool = False,
) -> Run:
    """Replay a capsule on the host, and return all that it writes.

    Args:
        capsule: the round.
        format: format of the metadata; None: the recorded one.
        reverts: ids of historical faults to put back; a guard that fires ends the run and is in it.
        layout, mode: a draft layout or draft attention in place of the recorded one. Where the recorded pool has too
            few free pages for the layout, it gets more.
        reference: native attention by the plain reference kernel.

    Raises:
        ConfigError: a format that cannot run the round, with what would work; a pool too large to be made up.
        CapsuleError: page tables that cannot be made again.
    """
    return Replay(capsule, format or capsule.format, reverts, layout, mode, reference).run()


@dataclass(frozen=True)
class Inputs:
    """Inputs that a pass is planned from.

    Attributes:
        step: the step of a draft.
        requests: requests of the capsule, in the order of the pass.
        starts: positions before the pass's own, for each request.
        counts: queries of each.
        parents: parents of the nodes in verify, all trees' behind one another.
        beams: ancestor bits of a draft step, int64 [requests * K, words]; None where beams attend to lanes.
        pad: requests and queries that the plan is padded to.
    """

    step: int | None
    requests: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]
    pad: tuple[int, int]
    parents: Sequence[int] = ()
    beams: torch.Tensor | None = None


class Replay:
    """One replay on the host; `on_device` takes plans, trees and accepted paths from a GPU instead.

    Args: the same as in `replay`.
    """

    def __init__(
        self,
        c: Capsule,
        format: Format,
        reverts: Sequence[int],
        layout: Layout | None,
        mode: DraftAttention | None,
        reference: bool,
    ) -> None:
        self.format, self.reverts, self.reference = format, list(reverts), reference
        self.mode: DraftAttention = mode or c.draft_attention
        self.geometry = c.shape.geometry(layout, self.reverts)
        recorded_pages, c = c.pool.num_pages, with_room(c, self.geometry)
        self.c, self.pages_more = c, c.pool.num_pages - recorded_pages
        self.padded = max(min(c.shape.max_batch, MAX_PADDED), len(c.rows))
        slots = c.pool.num_pages * c.shape.page_size
        if slots * synth.POOL_BYTES > MAX_POOL_BYTES:
            need = slots * synth.POOL_BYTES
            raise ConfigError(f"pool of {slots} slots: replay would make up {need} bytes of KV, the limit is "
                              f"{MAX_POOL_BYTES}")  # fmt: skip
        entries = c.pool.max_seqs * c.pool.row_pages
        if entries > MAX_TABLE:
            raise ConfigError(f"page table of {entries} entries: replay would make it, the limit is {MAX_TABLE}")
        # Formats are compared where both lay out the drafts alike.
        self.as_recorded = self.geometry.layout == c.shape.layout
        ids = ", ".join(map(str, self.reverts))
        name = format + (f" with {ids} reverted" if ids else "")
        self.log = Run(name + (", reference kernel" if reference else ""))
        self.phase = "reserve"
        self.tokens = Tokens()
        self.static: dict[Phase, Static | None] = {}

    def run(self) -> Run:
        try:
            world = rebuild(self.c, self.geometry)
            self._round(world)
        except SpecrsError as e:
            if not self.reverts:
                raise
            self.log.guard = Guard.of(self.phase, e)
        return self.log

    def _round(self, world: World) -> None:
        c, pool = self.c, world.pool
        self.world, self.seqs, self.lens = world, world.seqs, [r.committed for r in c.rows]
        self.names = Names(c, world.pages)
        same, all_ = world.recorded, world.columns
        more = f", {all_ - same} more for this layout" if all_ > same else ""
        self.log.notes.append(f"page tables: {same} columns as recorded{more}")
        if self.pages_more:
            self.log.notes.append(f"the recorded pool is too small for this layout: {self.pages_more} pages were added")
        self._log_tables("reserve", self._tables(), self.as_recorded)
        self.planner = Planner(self.geometry, pool, format=self.format)
        self.attention: _Attention = core.attention_reference if self.reference else core.attention
        if self.format != "native":
            self.attention = PlanAttention(find(self.format))
        slots = c.pool.num_pages * c.shape.page_size
        self.pools = [synth.new_pool(slots), synth.new_pool(slots)]
        self.caches = [KvCache(t, c.shape.page_size) for t in self.pools]
        for cache in (_TARGET, _DRAFT):
            self._fill_prefixes(cache)
        with world.lease as lease:
            if c.steps:
                self._drafts()
            trees, logits = _verified(c)
            if c.kind == "plain":
                self._decode()
            else:
                self._trees()
                self._verify(trees)
            self._commit(lease, self._accept(trees, logits))
        if c.extend:
            self._extend()

    # -- phases -------------------------------------------------------------------------------------------------

    def _drafts(self) -> None:
        self.phase = "tail copies"
        self._moves(_DRAFT, *self._tail_copies(), False)
        for t, step in enumerate(self.c.steps):
            self._draft(t, step)

    def _draft(self, t: int, step: DraftStep) -> None:
        c, k, words = self.c, self.c.shape.topk, self.geometry.draft_mask_words
        self.phase = f"draft step {t}"
        bits = torch.tensor([_words(b, words) for b in step.ancestors], dtype=torch.int64).view(-1, words)
        pad = (self.padded, self.padded * k)
        queries = self.names.draft_queries(t, pad[1])
        numbers = np.arange(pad[1])
        requests = list(range(len(c.rows)))
        lane = [sum(1 << (b * c.shape.steps + s) for s in range(t + 1)) for b in range(k)] * len(requests)
        seen = [self.names.draft_slots(m) for m in (lane if self.mode == "lane" else step.ancestors)]
        who = ArrayNames(self.names, c, "draft", queries, requests, [k] * len(requests), seen)
        self._pass(
            "draft", queries, who,
            lambda out: self.planner.draft(self.seqs, self.lens, t, bits, self.mode, out=out, pad=pad),
            Inputs(t, requests, self.lens, [k] * len(requests), pad, beams=None if self.mode == "lane" else bits),
            _DRAFT, (_STEP, t, numbers // k, numbers % k), self.as_recorded,
        )  # fmt: skip

    def _verify(self, trees: core.TreeBatch) -> None:
        c = self.c
        self.phase = "verify"
        pad = (self.padded, self.padded * c.shape.draft_tokens)
        queries = self.names.verify_queries(pad[1])
        requests, counts = list(range(len(c.rows))), [len(t.parents) for t in c.trees]
        who = ArrayNames(self.names, c, "verify", queries, requests, counts)
        self._pass(
            "verify", queries, who,
            lambda out: self.planner.verify(self.seqs, self.lens, trees, out=out, pad=pad),
            Inputs(None, requests, self.lens, counts, pad, [p for t in c.trees for p in t.parents]),
            _TARGET, (_VERIFY, *_numbers(queries)), True,
        )  # fmt: skip

    def _decode(self) -> None:
        c = self.c
        self.phase = "decode"
        pad = (self.padded, self.padded)
        queries = self.names.verify_queries(pad[1])  # a root each
        requests, counts = list(range(len(c.rows))), [1] * len(c.rows)
        who = ArrayNames(self.names, c, "decode", queries, requests, counts)
        self._pass(
            "decode", queries, who,
            lambda out: self.planner.decode(self.seqs, self.lens, out=out, pad=pad),
            Inputs(None, requests, self.lens, counts, pad),
            _TARGET, (_VERIFY, *_numbers(queries)), True,
        )  # fmt: skip

    def _commit(self, lease: core.Lease, accepts: core.Accepts) -> None:
        self.phase = "commit"
        self._moves(_TARGET, *self._commit_moves(lease, accepts), True)
        committed = [n + kept for n, kept in zip(self.lens, self.c.kept, strict=True)]
        lease.commit(committed)
        self._log_tables("commit", self._tables(), True)
        self._log("committed", np.array(committed), self.names.of_requests(range(len(committed))), across=True)
        self.names = Names(self.c, [self.world.pool.pages(seq) for seq in self.seqs])

    def _extend(self) -> None:
        c = self.c
        self.phase = "draft extend"
        requests = [e.request for e in c.extend]
        counts = [e.count for e in c.extend]
        pad = (self.padded, max(self.padded * (c.shape.steps + 1), sum(counts)))
        queries = self.names.extend_queries(pad[1])
        who = ArrayNames(self.names, c, "extend", queries, requests, counts)
        seqs, starts = [self.seqs[i] for i in requests], [e.start for e in c.extend]
        self._pass(
            "extend", queries, who,
            lambda out: self.planner.extend(seqs, starts, counts, out=out, pad=pad),
            Inputs(None, requests, starts, counts, pad),
            _DRAFT, (_EXTEND, *_numbers(queries)), True,
        )  # fmt: skip

    # -- what the host decides, and a device may decide instead -----------------------------------------------------

    def _plan(self, phase: Phase, make: Make, who: ArrayNames, inputs: Inputs, across: bool) -> Plan:
        """The plan of a pass, its arrays logged."""
        plan = self._written(phase, make, who)
        self._log_plan({name: getattr(plan, name) for name in LOGGED}, who, across)
        return plan

    def _tables(self) -> list[list[int]]:
        """Pages of each request."""
        return [self.world.pool.pages(seq) for seq in self.seqs]

    def _tail_copies(self) -> tuple[list[int], list[int]]:
        """Source and destination slots of the copies into holes."""
        moves = self.planner.tail_copies(self.seqs, self.lens)
        return moves.src.tolist(), moves.dst.tolist()

    def _trees(self) -> None:
        """The recorded trees, which a device builds again from their scores."""
        self._log_trees([(list(t.tokens), list(t.parents), list(t.scores)) for t in self.c.trees])

    def _accept(self, trees: core.TreeBatch, logits: torch.Tensor) -> core.Accepts:
        """Return what greedy verification accepts by `logits`, which lead along the recorded paths."""
        accepts = core.verify(trees, logits, [core.Sampler(logits.shape[1], [0]) for _ in self.c.rows], self.lens)
        self._log_accepted(accepts.paths, accepts.tokens)
        return accepts

    def _commit_moves(self, lease: core.Lease, accepts: core.Accepts) -> tuple[list[int], list[int]]:
        """Source and destination slots of the moves that make accepted paths dense; with pages of one token the rows
        are reordered instead."""
        moves = self.planner.commit(lease, self.seqs, self.lens, accepts)
        return moves.src.tolist(), moves.dst.tolist()

    def _move(self, cache: int, src: list[int], dst: list[int]) -> None:
        """Copy from slot to slot, in order."""
        core.kv_move(self.caches[cache], core.Moves(src, dst, self.pools[cache].shape[2]))

    # -- what every phase does ------------------------------------------------------------------------------------

    def _pass(
        self,
        phase: Phase,
        queries: list[Query],
        who: ArrayNames,
        make: Make,
        inputs: Inputs,
        cache: int,
        numbers: tuple[int | np.ndarray[Any, Any], ...],
        across: bool,
    ) -> None:
        plan = self._plan(phase, make, who, inputs, across)
        self._sizes(phase, inputs.step)
        keys, values = self.tokens.make([f"KV of {q.name}" for q in queries], *numbers)
        with self._writes(cache, across):
            core.kv_write(self.caches[cache], 0, plan, keys, values)
        self._attend(plan, cache, queries, numbers)

    def _sizes(self, phase: Phase, step: int | None) -> None:
        """Log the sizes that the planner gives where lengths live on the device only, without a length on the host."""
        at_most = max(self.lens)
        sizes = self.planner.sizes(phase, DeviceLens(len(self.lens), at_most), step)
        rows = list(sizes)
        elements = np.array([int(np.prod(s["shape"])) for s in sizes.values()], dtype=np.int64)
        self._log("sizes for device lengths", elements, lambda at: f"elements of {rows[at]}, lengths up to {at_most}")

    def _written(self, phase: Phase, make: Make, who: ArrayNames) -> Plan:
        """Plan into static buffers, twice, over different bytes, and log the format's arrays."""
        static = self._static(phase)
        if static is None:
            plan = make(None)
            self._log_arrays({name: _image(from_dlpack(a)) for name, a in plan.arrays().items()}, plan, who)
            return plan
        plans: list[Plan] = []
        copies = []
        refused: SpecrsError | None = None
        for byte in FILLS:
            static.fill(byte)
            try:
                plans.append(make(static.out))
            except SpecrsError as e:
                refused = e
            copies.append(static.bytes(byte))
        # The arrays of a refused plan are logged too: they were written until then.
        self._log_arrays(static.images(copies), plans[-1] if plans else None, who)
        if refused is not None:
            raise refused
        self._leases(plans[0])
        return plans[1]

    def _static(self, phase: Phase) -> Static | None:
        if self.format == "native":
            return None
        if phase not in self.static:
            size = static_bytes(self.planner, phase, self.padded)
            if size > MAX_BYTES:
                note = f"static buffers of {phase} would have {size} bytes: written to the format's own arrays instead"
                self.log.notes.append(note)
            self.static[phase] = None if size > MAX_BYTES else Static(self.planner, phase, self.padded)
        return self.static[phase]

    def _leases(self, before: Plan) -> None:
        """The arrays of a plan whose buffers have been written again are not to be had."""
        try:
            before.arrays()
            state = "readable"
        except core.StaleOutputError:
            state = "refused as stale"
        self._log("arrays of the write before", np.array([state], dtype=object), lambda _: "whoever still holds them")

    def _attend(
        self, plan: Plan, cache: int, queries: list[Query], numbers: tuple[int | np.ndarray[Any, Any], ...]
    ) -> None:
        q = synth.queries(_QUERY, cache, *numbers)
        out = torch.zeros_like(q)
        self.attention(self.caches[cache], 0, plan, q, out, synth.SCALE)
        width = synth.HEADS * synth.HEAD_DIM
        self._log("attention", out.reshape(-1).numpy().copy(), self.names.of_queries(queries, width),
                  shape=(len(queries), synth.HEADS, synth.HEAD_DIM), across=True, tolerance=TOLERANCE)  # fmt: skip

    def _moves(self, cache: int, src: list[int], dst: list[int], across: bool) -> None:
        def owner(at: int) -> str:
            return f"move {at} into {self.names.slot(dst[at])}"

        for name, slots in (("source slots", src), ("destination slots", dst)):
            self._log(name, np.array(slots, dtype=np.int32), owner, self.names.slot, across=across)
        with self._writes(cache, across):
            self._move(cache, src, dst)

    # -- the log ------------------------------------------------------------------------------------------------

    def _log(
        self,
        array: str,
        values: np.ndarray[Any, Any],
        owner: Owner,
        show: Callable[[Any], str] = str,
        *,
        written: np.ndarray[Any, Any] | None = None,
        shape: tuple[int, ...] | None = None,
        across: bool = False,
        tolerance: float = 0.0,
    ) -> None:
        done = np.ones(len(values), dtype=np.bool_) if written is None else written
        self.log.segments.append(
            Segment(self.phase, array, shape or (len(values),), values, done, owner, show, across, tolerance)
        )

    def _log_arrays(self, images: Mapping[str, Image], plan: Plan | None, who: ArrayNames) -> None:
        for name, image in images.items():
            owner, show = who.of(name, images, None if plan is None else plan.expand_page_size)
            self._log(name, image.values, owner, show, written=image.written, shape=image.shape)

    def _log_plan(self, arrays: Mapping[str, Any], who: ArrayNames, across: bool) -> None:
        """arrays: by the names in `LOGGED`."""
        for name in LOGGED[:-1]:
            values = from_dlpack(arrays[name]).numpy()
            owner, show = who.of_plan(name)
            self._log(f"plan.{name}", values, owner, show, across=across or name != "out_slots")
        mask = from_dlpack(arrays["mask"])
        owner, _ = who.of_plan("mask", mask.shape[1])
        self._log("plan.mask", mask.reshape(-1).numpy(), owner, _hexadecimal, shape=tuple(mask.shape), across=True)

    def _log_trees(self, trees: Sequence[tuple[list[int], list[int], list[float]]]) -> None:
        """tokens, parents and scores of each tree."""
        self.phase = "trees"
        owner = self._each([len(parents) for _, parents, _ in trees], "node")
        for n, (name, dtype) in enumerate((("tokens", np.int32), ("parents", np.int32), ("scores", np.float32))):
            values = np.array([v for tree in trees for v in tree[n]], dtype=dtype)
            self._log(name, values, owner, across=True)

    def _log_accepted(self, paths: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> None:
        self.phase = "accept"
        for name, lists in (("paths", paths), ("tokens", tokens)):
            values = np.array([v for own in lists for v in own], dtype=np.int32)
            self._log(name, values, self._each([len(own) for own in lists], "place"), across=True)
        lengths = np.array([n + len(path) for n, path in zip(self.lens, paths, strict=True)], dtype=np.int32)
        self._log("lengths", lengths, self.names.of_requests(range(len(lengths))), across=True)

    def _each(self, counts: Sequence[int], what: str) -> Owner:
        """Return the owners of lists of so many entries, one a request."""
        rows = [self.names.request(i) for i in range(len(counts))]
        return self.names.of_lists([0, *accumulate(counts)], rows, lambda _, entry: f"{what} {entry}")

    def _log_tables(self, phase: str, pages: Sequence[Sequence[int]], across: bool) -> None:
        self.phase = phase
        columns = max(max(map(len, pages)), 1)
        table = np.zeros((len(pages), columns), dtype=np.int64)
        for i, own in enumerate(pages):
            table[i, : len(own)] = own
        flat = table.reshape(-1)

        def owner(at: int) -> str:
            i, column = divmod(at, columns)
            return f"{self.names.request(i)}, column {column}"

        self._log("page table", flat, owner, self.names.page, written=flat != 0, shape=table.shape, across=across)

    def _writes(self, cache: int, across: bool) -> _KvWrites:
        return _KvWrites(self, cache, across)

    def _fill_prefixes(self, cache: int) -> None:
        """Committed positions of the batch, and the pages of everybody else."""
        c, p = self.c, self.c.shape.page_size
        pool, done = self.pools[cache], set[int]()
        for i, r in enumerate(c.rows):
            positions = np.arange(r.committed, dtype=np.int64)
            own = np.array([r.pages[n // p] not in done for n in positions], dtype=np.bool_)
            done.update(r.pages[: -(-r.committed // p)])
            positions = positions[own]
            names = [f"KV of {self.names.request(i)}, prefix position {n}" for n in positions]
            pages = np.array(r.pages, dtype=np.int64)
            self._put(pool, pages[positions // p] * p + positions % p, names, cache, _PREFIX, i, positions)
        for page in sorted({page for page, _ in c.others} - done):
            slots = np.arange(page * p, (page + 1) * p, dtype=np.int64)
            self._put(pool, slots, [f"KV in {self.names.page(page)}"] * p, cache, _OTHERS, 0, slots)

    def _put(
        self, pool: torch.Tensor, slots: np.ndarray[Any, Any], names: list[str], *numbers: int | np.ndarray[Any, Any]
    ) -> None:
        if len(slots):
            pool[0, 0, slots], pool[0, 1, slots] = self.tokens.make(names, *numbers)


class _KvWrites:
    """Logs the slots of a KV pool that change within the context; nobody owns the sink's."""

    def __init__(self, replay: Replay, cache: int, across: bool) -> None:
        self._replay, self._cache, self._across = replay, cache, across

    def __enter__(self) -> None:
        self._before = synth.by_slot(self._replay.pools[self._cache])

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        r = self._replay
        after = synth.by_slot(r.pools[self._cache])
        changed = (after.view(np.uint32) != self._before.view(np.uint32)).any(axis=1)
        changed[: r.c.shape.page_size] = False
        n = int(changed.nonzero()[0][-1]) + 1 if changed.any() else 0
        values = np.full(n, None, dtype=object)
        for slot in changed.nonzero()[0]:
            values[slot] = r.tokens.name(after[slot])
        name = ("target KV", "draft KV")[self._cache]
        r._log(name, values, r.names.slot, written=changed[:n], shape=(len(after),), across=self._across)


def _image(array: torch.Tensor) -> Image:
    values = array.contiguous().view(-1).numpy().copy()
    return Image(values, np.ones(len(values), dtype=np.bool_), tuple(array.shape))


def _words(bits: int, words: int) -> list[int]:
    """A mask as int64 words."""
    out = []
    for i in range(words):
        word = bits >> 64 * i & (1 << 64) - 1
        out.append(word - (1 << 64) if word >> 63 else word)
    return out


def _hexadecimal(word: int) -> str:
    return f"{word % 2**64:#x}"


def _numbers(queries: Sequence[Query]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The request of each query (-1 for padding) and its index."""
    requests = np.array([-1 if q.request is None else q.request for q in queries], dtype=np.int64)
    return requests, np.arange(len(queries), dtype=np.int64)


def _verified(c: Capsule) -> tuple[core.TreeBatch, torch.Tensor]:
    """Return the recorded trees, and logits by which greedy verification accepts the recorded paths. Tokens are node
    numbers: placement needs no more."""
    most = max(len(t.parents) for t in c.trees)
    trees = core.TreeBatch.from_parents(
        [list(t.parents) for t in c.trees], [list(range(len(t.parents))) for t in c.trees]
    )
    logits = torch.zeros(sum(len(t.parents) for t in c.trees), most + 1)
    first = 0
    for tree, path in zip(c.trees, c.paths, strict=True):
        for node, following in zip(path, [*path[1:], most], strict=True):
            logits[first + node, following] = 1.0  # greedy: this token, which at the end no node has
        first += len(tree.parents)
    return trees, logits
