"""A device that runs ahead, on the CPU: what `CudaExecutor` is on a GPU, with the same promises and no more.

It keeps lengths, root tokens and roots of the head by itself from the first round of a flight on, so that later rounds
are launched, and run, before anybody has read what the first one found. What a round leaves in device memory is
overwritten by NaN, logits by the target's next pass and features by the next round; what it tells the host lies in a
ring of few slots. It can be told to fail anywhere on the way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from reference_unite import Scored, unite
from specrs import LLM
from specrs import _specrs as core
from specrs.engine import llm as engine
from specrs.engine.devices.head_inputs import Entries, begun
from specrs.engine.devices.host import HostDrafts, HostExecutor, Root, likeliest
from specrs.engine.drafting.chooser import Kind, TreePolicy
from specrs.engine.drafting.costs import PassCost
from specrs.engine.drafting.levels import most_nodes, united_levels
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Request
from specrs.models.acceptance import UNKNOWN
from specrs.models.features import FeatureRows, Features, KeptFeatures, gather

Level = Literal["off", "round", "loop"]
LOOP = 8  # rounds of a loop at most
SLOTS = 16  # rounds whose results are kept


class Broken(Exception):
    """A planted error."""


@dataclass(frozen=True)
class DeviceRoot:
    """The head's result for a request's root lies on the device, until the next round that drafts for its row."""

    row: int
    start: int


@dataclass(eq=False)
class Asked:
    """Drafts that are launched together with their verification. trees: those of the host to unite them with."""

    batch: Batch
    depths: list[int]
    trees: core.TreeBatch | None = None
    faults = ()

    @property
    def levels(self) -> int:
        return max(self.depths, default=0)


@dataclass(eq=False)
class Seat:
    """A request as the device knows it."""

    seq: core.Sequence
    sampler: core.Sampler
    length: int
    root: int
    depth: int
    limit: int
    stops: frozenset[int]
    drafts: bool
    first: int  # of the positions of which the head reads draft KV
    done: bool = False


@dataclass(eq=False)
class Found:
    """Results of a round for the host; ``logits`` and ``features`` are device memory."""

    lens: list[int]
    depths: list[int]
    trees: core.TreeBatch
    starts: list[int]
    paths: list[list[int]]
    tokens: list[list[int]]
    faulty: list[bool]
    unsound: dict[int, core.NonFiniteError]
    logits: torch.Tensor
    features: FeatureRows | None
    goes_on: bool = False
    ended: bool = False
    origins: list[list[int]] | None = None


@dataclass(eq=False)
class Run:
    """The device's state of a flight.

    Attributes:
        levels: levels of drafts.
        follow: true if features are kept.
        given: trees of the host, which its only round unites with its drafts.
    """

    seats: list[Seat]
    levels: int
    follow: bool
    given: core.TreeBatch | None = None


@dataclass(eq=False)
class Round:
    """A round that has run, whose results are read late."""

    device: Device
    run: Run
    number: int
    batch: Batch
    places: Sequence[int]
    loop: bool = False

    @cached_property
    def _found(self) -> Found:
        self.device.might("collect")
        found = self.device.slot(self.number)
        began = [found.lens[place] for place in self.places]
        assert began == self.batch.lens, f"round {self.number} began at {began}, its requests are at {self.batch.lens}"
        return found

    def of(self, batch: Batch, rows: Sequence[int]) -> Round:
        return Round(self.device, self.run, self.number, batch, [self.places[row] for row in rows], self.loop)

    def wait(self) -> None:
        self.device.might("collect")
        assert self.device.slot(self.number)

    @property
    def ahead(self) -> int:
        device = self.device
        if device.told.level == "round":
            return 1
        # The end of a loop is known; a round alone has not been waited for.
        return 0 if self.loop and device.slot(self.number).ended else LOOP

    def following(self, goes_on: bool) -> Round | None:
        device = self.device
        if not self.loop or self.number != device._handed - 1 or not device.slot(self.number).goes_on:
            return None
        device._handed += 1
        return replace(self, number=self.number + 1)

    @property
    def _held(self) -> Found:
        if not self.device.holds(self.number):
            raise core.StaleOutputError(f"round {self.number} is overwritten")
        return self._found

    @cached_property
    def trees(self) -> core.TreeBatch:
        found, sizes = self._found, self._found.trees.sizes
        arrays = [from_dlpack(a) for a in (found.trees.tokens, found.trees.parents, found.trees.scores)]
        rows = [row for p in self.places for row in range(found.starts[p], found.starts[p] + sizes[p])]
        ends = torch.tensor([0, *accumulate(sizes[p] for p in self.places)], dtype=torch.int32)
        tokens, parents, scores = (a[torch.tensor(rows, dtype=torch.int64)] for a in arrays)
        return core.TreeBatch.from_arrays(ends, tokens, parents, scores)

    @property
    def origins(self) -> list[list[int]] | None:
        origins = self._found.origins
        return None if origins is None else [origins[p] for p in self.places]

    @cached_property
    def accepts(self) -> core.Accepts:
        found = self._found
        if any(found.faulty[p] for p in self.places):
            logits, sizes = self._held.logits, found.trees.sizes
            rows = [row for p in self.places for row in range(found.starts[p], found.starts[p] + sizes[p])]
            return core.verify(self.trees, logits[rows], [r.sampler for r in self.batch], self.batch.lens)
        paths, tokens = ([each[p] for p in self.places] for each in (found.paths, found.tokens))
        ends = torch.tensor([0, *accumulate(map(len, paths))], dtype=torch.int32)
        flat = [torch.tensor([n for one in each for n in one], dtype=torch.int32) for each in (paths, tokens)]
        return core.Accepts.from_arrays(ends, *flat)

    @property
    def lost(self) -> bool:
        lost = not self.device.holds(self.number) and any(self._found.faulty[p] for p in self.places)
        self.device.told.lost += lost
        return lost

    @property
    def faults(self) -> list[tuple[core.NonFiniteError, int]]:
        told = []
        for i, p in enumerate(self.places):
            error = self._found.unsound.get(p)
            if error is not None:
                root, mine = self.batch.requests[i].head.root, core.NonFiniteError(str(error))
                mine.kind, mine.what, mine.value, mine.index = error.kind, error.what, error.value, error.index
                mine.request = i
                told.append((mine, root.start if isinstance(root, DeviceRoot) else self.batch.lens[i]))
        return told

    def likeliest(self, requests: Sequence[int], count: int) -> list[tuple[list[int], list[list[int]]]] | None:
        if not self.device.holds(self.number):
            return None
        found = self._found
        return likeliest(self.trees, [found.starts[p] for p in self.places], found.logits, requests, count)

    def logits(self, request: int, rows: Sequence[int]) -> torch.Tensor:
        found = self._held
        first = found.starts[self.places[request]]
        return found.logits[[first + row for row in rows]]

    def drafted(self, request: int) -> bool:
        return self.run.levels > 0 and self._found.depths[self.places[request]] > 0

    def root(self, request: int) -> DeviceRoot | None:
        if not self.drafted(request):
            return None
        return DeviceRoot(self.batch.seqs[request].row, self.batch.lens[request])


@dataclass
class Told:
    """Records what the device is told to do, and what it did."""

    level: Level = "round"
    fails: Callable[[str], None] = lambda _: None
    refuses: Callable[[], bool] = lambda: False
    rounds: int = 0  # that ran
    ahead: int = 0  # of these, before the one before was collected
    lost: int = 0  # times that scores could not be looked at any more
    abandoned: int = 0
    changed: int = 0  # times that levels changed within a flight
    recalled: int = 0  # positions whose features were made again
    unsound: int = 0  # seats whose root gave no drafts
    united: int = 0  # rounds of the host's trees and the head's drafts


class Device(HostExecutor):
    """Runs rounds ahead."""

    launched = True
    clock = staticmethod(time.perf_counter)
    told = Told()

    def __init__(self, target: Any, head: Any, config: Any, geometry: core.Geometry, pool: core.Pool) -> None:
        self.roots: dict[int, Root] = {}  # keyed by row
        self._pool = pool
        # Pages of one token are permuted in the host's table when a round is collected: a GPU has a table of its own.
        self.drafts_ahead = geometry.shape.topk == 1 or geometry.page_size > 1
        super().__init__(target, head, config, geometry, pool)
        self._slots: dict[int, Found] = {}
        self._next = self._handed = 0  # number of the next round, and of the next that the engine is told of
        self._overtaken = True  # another pass has run since the last round

    def _drafts(self, head: Any, cache: Any, config: Any) -> HostDrafts:
        return DeviceDrafts(self, head, cache, config)

    def policy(self, pages: Any) -> TreePolicy:
        policy, steps = super().policy(pages), self.planner.geometry.shape.steps
        costs = replace(policy.costs, resume=PassCost([1], [policy.costs.target.at(1)]))
        return TreePolicy(costs, [Kind.of(one, steps) for one in UNKNOWN])

    # -- what the engine sees -------------------------------------------------------------------------------------

    def might(self, what: str) -> None:
        self.told.fails(what)

    def slot(self, number: int) -> Found:
        assert self._next - SLOTS <= number < self._next, f"round {number} of {self._next} is read too late, or early"
        return self._slots[number % SLOTS]

    def holds(self, number: int) -> bool:
        """Return whether what a round left in device memory is still there."""
        return number == self._next - 1 and not self._overtaken

    @property
    def ahead(self) -> bool:
        return self.told.level != "off"

    def prefill(self, *args: Any) -> Any:
        self._overwrite(features=False)
        self.might("prefill")
        return super().prefill(*args)

    def decode(self, batch: Batch) -> Any:
        return self._launched(Asked(batch, [0] * len(batch)))

    def verify(self, batch: Batch, drafted: Any) -> Any:
        if isinstance(drafted, Asked):
            return self._launched(drafted)
        self._overwrite()
        return super().verify(batch, drafted)

    def commit(self, batch: Batch, lease: core.Lease, verified: Any) -> None:
        self.might("commit")
        if isinstance(verified, Round):
            self.planner.commit(lease, batch.seqs, batch.lens, verified.accepts)  # the device has moved the KV
        else:
            super().commit(batch, lease, verified)

    def _launched(self, asked: Asked) -> Round:
        batch, levels = asked.batch, max(asked.depths, default=0)
        seats = [
            Seat(r.seq, r.sampler, r.committed, r.tokens[-1], depth, r.ending.max_total - 1,
                 r.ending.eos_ids | r.ending.stop_ids, depth > 0, r.head.first)
            for r, depth in zip(batch, asked.depths, strict=True)
        ]  # fmt: skip
        follow = levels > 0
        run = Run(seats, levels, follow, asked.trees)
        number = self._round(run)
        self.might("first")
        return Round(self, run, number, batch, range(len(batch)))

    def launch(self, verified: Any, rounds: int, levels: int) -> Any:
        assert isinstance(verified, Round) and rounds >= 1 and self.ahead and verified.run.given is None
        assert self._handed == self._next, "a loop is under way"
        self.might("launch")
        if self.told.refuses():
            return None
        run, number, loop = verified.run, self._next, self.told.level == "loop"
        if run.levels and levels != run.levels:
            run = replace(run, levels=levels)
            self.told.changed += 1
        for left in range(rounds if loop else 1, 0, -1):  # the device goes on by itself, before the host knows anything
            found = self.slot(self._round(run))
            self.told.ahead += 1
            found.goes_on = left > 1 and not found.ended
            if not found.goes_on:
                break
        self._handed = number + 1
        self.might("launched")
        return Round(self, run, number, verified.batch, verified.places, loop)

    def abandon(self, requests: Sequence[Request]) -> None:
        self.told.abandoned += 1
        for r in requests:
            if isinstance(r.head.root, DeviceRoot):
                r.head.root = None
            self.roots.pop(r.seq.row, None)
        self._overwrite()
        self._handed = self._next

    # -- the device's side: nothing of a request is read -----------------------------------------------------------

    def _overwrite(self, features: bool = True) -> None:
        """Run another pass over the memory of the last round."""
        if self._next and (last := self._slots.get((self._next - 1) % SLOTS)) is not None:
            last.logits.fill_(torch.nan)
            if features and last.features is not None:
                last.features.stacked.fill_(torch.nan)
        self._overtaken = True

    def _round(self, run: Run) -> int:
        """Run a round from the device's own state. Returns its number."""
        self._overwrite()
        seats = run.seats
        seqs, lens = [seat.seq for seat in seats], [seat.length for seat in seats]
        depths, unsound, origins = [seat.depth for seat in seats], {}, None
        if run.levels:
            trees, unsound = self._draft(run, seqs, lens, depths)
            trees, origins = (trees, None) if run.given is None else self._united(run, trees)
            plan = self.planner.verify(seqs, lens, trees)
        else:
            trees = core.TreeBatch.from_parents([[-1]] * len(seats), [[seat.root] for seat in seats])
            plan = self.planner.decode(seqs, lens)
        logits, features = self._logits(from_dlpack(trees.tokens), plan, run.follow, None)
        logits = logits.clone()
        accepts = core.verify(trees, logits, [seat.sampler for seat in seats], lens)
        paths, drawn, faulty = accepts.paths, accepts.tokens, [e is not None for e in accepts.errors]
        starts = list(accumulate(trees.sizes, initial=0))
        if run.levels:
            self._move(seats, paths)
            self._extend(run, seats, paths, drawn, starts, features)
        for seat, path, found, bad in zip(seats, paths, drawn, faulty, strict=True):
            if seat.done:
                continue
            end = seat.length + len(path)
            if bad or end >= seat.limit or any(t in seat.stops for t in found):
                seat.done, seat.depth = True, 0  # from now on it repeats its root
            else:
                seat.length, seat.root = end, found[-1]
                steps = self.planner.geometry.shape.steps
                seat.depth = max(min(steps if seat.drafts else 0, seat.limit - end - 1), 0)
        ended = any(seat.done for seat in seats) or bool(unsound)
        number, self._next, self._overtaken = self._next, self._next + 1, False
        self._slots[number % SLOTS] = Found(
            lens, depths, trees, starts, paths, drawn, faulty, unsound, logits, features, ended=ended, origins=origins
        )
        self._handed = self._next
        self.told.rounds += 1
        return number

    def _draft(
        self, run: Run, seqs: list[core.Sequence], lens: list[int], depths: list[int]
    ) -> tuple[core.TreeBatch, dict[int, core.NonFiniteError]]:
        drafts = self.drafts
        assert drafts is not None
        beams, shape, nothing = drafts.beams, self.planner.geometry.shape, drafts._no_root
        roots = [self.roots[seat.seq.row] if seat.depth else nothing for seat in run.seats]
        beams.start(torch.stack([root.logits for root in roots]))
        hidden = torch.stack([root.hidden for root in roots])
        unsound = {error.request: error for error in beams.faults}
        self.told.unsound += len(unsound)
        for step in range(run.levels - 1):
            plan = begun(self.planner.draft(seqs, lens, step, beams, drafts._mode), (seat.first for seat in run.seats))
            inputs = hidden if shape.topk == 1 else hidden.index_select(0, from_dlpack(beams.parents).to(torch.int64))
            logits, hidden = drafts._step(from_dlpack(beams.tokens), inputs, plan)
            beams.advance(logits)
        able = [0 if i in unsound else min(depth, run.levels) for i, depth in enumerate(depths)]
        return beams.finish([seat.root for seat in run.seats], able, [shape.draft_tokens] * len(lens)), unsound

    def _united(self, run: Run, trees: core.TreeBatch) -> tuple[core.TreeBatch, list[list[int]]]:
        """The head's trees and the host's."""
        assert run.given is not None
        shape = self.planner.geometry.shape
        most = most_nodes(shape, united_levels(shape, run.levels, max(run.given.sizes)))
        each = zip(scored(trees), scored(run.given), strict=True)
        found = [unite(own.tokens[0], own, other, most) for own, other in each]
        self.told.united += 1
        made = core.TreeBatch.from_parents(
            [t.parents for t in found], [t.tokens for t in found], [t.scores for t in found]
        )
        return made, [t.origins for t in found]

    def _move(self, seats: list[Seat], paths: list[list[int]]) -> None:
        """Make the KV of accepted paths the end of each prefix."""
        page, memory = self.planner.geometry.page_size, self.cache.tensor
        for seat, path in zip(seats, paths, strict=True):
            pages = self._pool.pages(seat.seq)
            slots = [pages[p // page] * page + p % page for p in range(seat.length, seat.length + max(path) + 1)]
            for i, node in enumerate(path):  # ascending: a node is never behind its place
                if node != i:
                    memory[:, :, slots[i]] = memory[:, :, slots[node]]

    def _extend(
        self,
        run: Run,
        seats: list[Seat],
        paths: list[list[int]],
        drawn: list[list[int]],
        starts: list[int],
        features: FeatureRows | None,
    ) -> None:
        """The head's pass over accepted paths, up to the next roots."""
        drafts = self.drafts
        assert drafts is not None and features is not None
        each = [(seat, path, new) for seat, path, new in zip(seats, paths, drawn, strict=True) if len(new) == len(path)]
        if not each:
            return
        tokens = torch.tensor([t for _, _, new in each for t in new])
        by_seat = dict(zip(map(id, seats), starts, strict=False))
        pieces = [Features(features, [by_seat[id(seat)] + node for node in path]) for seat, path, _ in each]
        counts = [len(path) for _, path, _ in each]
        plan = self.planner.extend([seat.seq for seat, _, _ in each], [seat.length for seat, _, _ in each], counts)
        plan = begun(plan, [seat.first for seat, _, _ in each])
        rows = torch.tensor([end - 1 for end in accumulate(counts)])
        logits, hidden = drafts._extend(tokens, gather(pieces), plan, rows)
        for i, (seat, _, _) in enumerate(each):
            if seat.drafts:
                self.roots[seat.seq.row] = Root(logits[i].clone(), hidden[i].clone())
        for seat, path, new in zip(seats, paths, drawn, strict=True):
            if seat.drafts and len(new) < len(path):  # the head makes this of a seat with NaN
                nothing = drafts._no_root
                self.roots[seat.seq.row] = Root(nothing.logits * torch.nan, nothing.hidden * torch.nan)


class DeviceDrafts(HostDrafts):
    """The head's passes; roots stay on the device, and so do the drafts of a round until it is verified."""

    visible = False

    def __init__(self, device: Device, head: Any, cache: Any, config: Any) -> None:
        super().__init__(head, cache, device.planner, config, device.target.config.vocab_size)
        self._device = device

    def keep(self, batch: Batch, passed: Any, rows: Sequence[Sequence[int]]) -> None:
        if not isinstance(passed, Round):
            super().keep(batch, passed, rows)
            return
        for i, (r, some) in enumerate(zip(batch, rows, strict=True)):
            if r.head.followed and some:
                r.head.root = r.head.features = None
                if (root := passed.root(i)) is not None:
                    r.head.reached(r.committed, root)

    def can_extend(self, request: Request) -> bool:
        return True

    def extend(self, requests: Sequence[Request]) -> Any:
        self._device.might("extend")
        self._recall(requests)
        return super().extend(requests)

    def _recall(self, requests: Sequence[Request]) -> None:
        """Run the target again over positions whose features nobody kept. A GPU writes no KV in this pass; here the
        pass shows that its KV has the bits that are there."""
        for r in requests:
            if r.lag and not Entries(r, r.head.end, r.lag).kept:
                device, start = self._device, r.head.end
                before = device.cache.tensor.clone()
                plan = self._planner.extend([r.seq], [start], [r.lag])
                tokens, none = torch.tensor(r.tokens[start : r.committed]), torch.tensor([], dtype=torch.int64)
                _, features = device._logits(tokens, plan, True, none)
                assert features is not None
                assert torch.equal(before.view(torch.uint8), device.cache.tensor.view(torch.uint8))
                r.head.features = KeptFeatures.of_pass(start, Features(features, range(r.lag)))
                device.told.recalled += r.lag

    def draft(self, batch: Batch, depths: Sequence[int], deepen: Any) -> Any:
        self._device.might("draft")
        if deepen is not None or not self._device.drafts_ahead:
            return super().draft(batch, depths, deepen)
        steps = self._geometry.shape.steps
        each = zip(batch, depths, strict=True)
        return Asked(batch, [min(depth, steps) if isinstance(r.head.root, DeviceRoot) else 0 for r, depth in each])

    def unite(self, drafted: Any, trees: core.TreeBatch) -> Any:
        self._device.might("beside")
        return replace(drafted, trees=trees) if isinstance(drafted, Asked) and max(drafted.depths) else None

    def _lend(self, request: Request, logits: torch.Tensor, hidden: torch.Tensor) -> DeviceRoot:
        self._device.roots[request.seq.row] = Root(logits.clone(), hidden.clone())
        return DeviceRoot(request.seq.row, request.head.end)

    def _root(self, request: Request) -> Root:
        return self._device.roots[request.head.root.row] if isinstance(request.head.root, DeviceRoot) else self._no_root


def scored(trees: core.TreeBatch) -> list[Scored]:
    """Return each tree of a batch with its scores."""
    arrays = [from_dlpack(a) for a in (trees.tokens, trees.parents, trees.scores)]
    each = [torch.split(a, trees.sizes) for a in arrays]
    return [Scored(t.tolist(), p.tolist(), s.tolist()) for t, p, s in zip(*each, strict=True)]


def flying(target: Path, draft: Path | None, monkeypatch: pytest.MonkeyPatch, told: Told, **options: Any) -> LLM:
    """An engine whose executor runs ahead as it is told."""
    with monkeypatch.context() as patch:
        patch.setattr(engine, "HostExecutor", type("Device", (Device,), {"told": told}))
        return LLM(target, draft, **options)
