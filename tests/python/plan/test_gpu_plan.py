"""The device planner against the host's, array by array and bit by bit, over random configurations and batches."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import specrs
from operands_world import named
from specrs import _specrs as core
from specrs import device
from specrs.operands import MoveArrays, PlanArrays

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

CUDA = torch.device("cuda", torch.cuda.current_device())
POISON = 0x5A
FORMATS = [("native", "both"), ("flashinfer", "both"), ("flashinfer", "bool"), ("flashinfer", "packed")]
FORMATS += [("triton", "both"), ("flash_attention", "both")]
TORCH = {"int32": torch.int32, "int64": torch.int64, "bool": torch.uint8, "uint8": torch.uint8}
PLAN = ["rows", "versions", "qo_indptr", "prefix_lens", "positions", "out_slots", "mask"]

pytestmark = pytest.mark.usefixtures("no_fault_is_left")


def i32(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=CUDA)


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


class Block:
    """A tensor of a shape with canaries on both sides, poisoned."""

    def __init__(self, dtype: torch.dtype, shape: list[int], offset: int = 0) -> None:
        size = torch.empty(0, dtype=dtype).element_size()
        n = size
        for d in shape:
            n *= d
        self.begin, self.end = 256 + offset * size, 256 + offset * size + n
        self.bytes = torch.full((self.end + 256,), POISON, dtype=torch.uint8, device=CUDA)
        self.tensor = self.bytes[self.begin : self.end].view(dtype).view(shape)

    def intact(self) -> bool:
        before, behind = self.bytes[: self.begin], self.bytes[self.end :]
        return bool(before.eq(POISON).all()) and bool(behind.eq(POISON).all())

    def tail_is_poison(self, used: int) -> bool:
        size = self.tensor.element_size()
        return bool(self.bytes[self.begin + used * size :].eq(POISON).all())


@dataclass
class Step:
    """A step of a batch: what the host planner is asked, and the device's operands."""

    phase: str
    draft_step: int | None = None
    counts: list[int] = field(default_factory=list)
    trees: list[list[int]] = field(default_factory=list)
    beams: torch.Tensor | None = None

    @property
    def sizes(self) -> list[int]:
        return [len(t) for t in self.trees] if self.phase == "verify" else self.counts


class World:
    """A pool whose pages are shuffled, sequences of given lengths allocated for a round, planners of a format."""

    def __init__(self, rng: random.Random, shape, page: int, context: int, layout: str, lens: list[int]) -> None:
        self.rng, self.lens = rng, lens
        self.max_batch = max(len(lens) + rng.choice([0, 1, 3]), 1)
        k, s, v = shape
        self.shape = core.TreeShape(k, s, v)
        self.geometry = core.Geometry(self.max_batch, context, page, self.shape, layout)
        g = self.geometry
        self.max_seqs = self.max_batch + 2
        pages = g.row_pages * (len(lens) + 1) + 8
        self.pool = core.Pool(pages, page, self.max_seqs, g.row_pages)
        order = self.pool.alloc_pages(pages - 1)
        rng.shuffle(order)
        self.pool.free_pages(order)
        extra = self.pool.create()  # rows are not the batch's indices
        self.seqs = [self.pool.create() for _ in lens]
        rng.shuffle(self.seqs)
        self.pool.release([extra])
        # Growing in turns mixes the pages of the rows.
        for part in (3, 1):
            for seq, n in zip(self.seqs, lens, strict=True):
                want = n // part
                if want:
                    self.pool.reserve([(seq, want)]).commit([want])
        positions = [(q, g.alloc_target(n, 0)) for q, n in zip(self.seqs, lens, strict=True)]
        self.lease = self.pool.reserve(positions) if lens else None

    def table(self) -> torch.Tensor:
        """The pool's page table as a mirror on the device has it."""
        table = torch.zeros(self.max_seqs, self.geometry.row_pages, dtype=torch.int32)
        for seq in self.seqs:
            pages = self.pool.pages(seq)
            table[seq.row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return table.to(CUDA)

    def step(self, phase: str) -> Step:
        rng, g, s = self.rng, self.geometry, self.shape
        context = g.max_context_len
        if phase == "extend":
            room = [min(context - n, self.pool.allocated(q) - n, 40) for q, n in zip(self.seqs, self.lens, strict=True)]
            return Step("extend", counts=[rng.choice([0, r, rng.randint(0, r)]) for r in room])
        if phase == "decode":
            return Step("decode")
        if phase == "verify":
            trees = []
            for n in self.lens:
                size, parents, depths = rng.randint(1, s.draft_tokens), [-1], [0]
                for j in range(1, size):
                    p = rng.randrange(j) if rng.random() < 0.7 else j - 1
                    if n + depths[p] + 1 >= context:
                        break
                    parents.append(p)
                    depths.append(depths[p] + 1)
                trees.append(parents)
            return Step("verify", trees=trees)
        t = int(phase.removeprefix("draft"))
        words = g.draft_mask_words
        bits = torch.zeros(len(self.lens) * s.topk, words, dtype=torch.int64)
        for i, b in itertools.product(range(len(self.lens)), range(s.topk)):
            for earlier in range(t):
                if rng.random() < 0.9:  # one ancestor a step at most, as trees have
                    self.set_bit(bits[i * s.topk + b], rng.randrange(s.topk) * s.steps + earlier)
            self.set_bit(bits[i * s.topk + b], b * s.steps + t)
        return Step("draft", draft_step=t, beams=bits)

    @staticmethod
    def set_bit(words: torch.Tensor, bit: int) -> None:
        word = int(words[bit // 64]) & (2**64 - 1) | 1 << bit % 64
        words[bit // 64] = word - 2**64 if word >= 2**63 else word

    def host(self, planner: core.Planner, step: Step, pad, lane: bool) -> core.Plan:
        if step.phase == "extend":
            return planner.extend(self.seqs, self.lens, step.counts, pad=pad)
        if step.phase == "decode":
            return planner.decode(self.seqs, self.lens, pad=pad)
        if step.phase == "verify":
            trees = core.TreeBatch.from_parents(step.trees, [[0] * len(t) for t in step.trees])
            return planner.verify(self.seqs, self.lens, trees, pad=pad)
        if lane:
            return planner.draft(self.seqs, self.lens, step.draft_step, None, "lane", pad=pad)
        return planner.draft(self.seqs, self.lens, step.draft_step, step.beams, pad=pad)


class DeviceCall:
    """Operands and poisoned outputs of a launch; what is changed in them before `run` is what the kernel reads."""

    def __init__(self, world: World, step: Step, bucket: tuple[int, int], lane: bool, format="native", masks="both"):
        b, q = bucket
        g, rng = world.geometry, world.rng
        live = len(world.lens)
        self.world, self.step, self.format, self.masks = world, step, format, masks
        dead = [rng.choice([-1, 0, 2**31 - 1]) for _ in range(b - live)]
        rows = [s.row for s in world.seqs]
        self.rows = i32(rows + ([-1] * (b - live) if rng.random() < 0.5 else [-1, *dead][: b - live]))
        self.live = None
        if (b > live and (self.rows[live:] >= 0).any()) or rng.random() < 0.3:
            self.live = i32([7, live])
        self.lens = i32(world.lens + [rng.choice([0, -5, 2**31 - 1]) for _ in range(b - live)])
        self.versions = torch.zeros(b, dtype=torch.int64, device=CUDA)
        self.table = world.table()
        self.num_pages = world.pool.num_pages
        self.offsets = self.parents = self.beams = None
        if step.phase in ("extend", "verify"):
            ends = [0, *itertools.accumulate(step.sizes)]
            self.offsets = i32(ends + [ends[-1]] * (b - live))
        if step.phase == "verify":
            self.parents = i32([p for t in step.trees for p in t] + [-9])
        if step.phase == "draft" and not lane:
            words = g.draft_mask_words
            self.beams = torch.zeros(b * world.shape.topk, words, dtype=torch.int64)
            self.beams[: live * world.shape.topk] = step.beams
            self.beams[live * world.shape.topk :] = -1
            self.beams = self.beams.to(CUDA)
        words = {"verify": g.verify_mask_words, "draft": g.draft_mask_words}.get(step.phase, 0)
        i32t, i64t = torch.int32, torch.int64
        kinds = [(i32t, [b]), (i64t, [b]), (i32t, [b + 1]), (i32t, [b]), (i32t, [q]), (i32t, [q]), (i64t, [q, words])]
        self.plan = [Block(*kind) for kind in kinds]
        self.arrays: dict[str, Block] = {}

    def give_arrays(self, planner: core.Planner, b: int, q: int, grow: int = 0) -> None:
        """Arrays of the capacity of the bucket's requests."""
        for name, c in planner.capacities(self.step.phase, self.step.draft_step, b).items():
            shape = list(c["shape"])
            if self.step.phase == "extend":  # a bucket may have more queries than so many requests
                shape[0] = max(shape[0], q + 1)
            shape[-1] += grow
            # bytes of masks at any alignment
            offset = self.world.rng.randrange(16) if c["dtype"] in ("bool", "uint8") else 0
            self.arrays[name] = Block(TORCH[c["dtype"]], shape, offset)

    def run(self) -> None:
        core._device_plan(
            geometry=self.world.geometry,
            phase=self.step.phase,
            draft_step=self.step.draft_step,
            table=self.table,
            num_pages=self.num_pages,
            rows=self.rows,
            versions=self.versions,
            lens=self.lens,
            live=self.live,
            offsets=self.offsets,
            parents=self.parents,
            ancestors=self.beams,
            plan=named(PlanArrays, (b.tensor for b in self.plan)),
            format=self.format,
            masks=self.masks,
            arrays={name: b.tensor for name, b in self.arrays.items()},
            stream=stream(),
        )

    def get(self, name: str) -> torch.Tensor:
        return self.plan[PLAN.index(name)].tensor.cpu()

    def intact(self) -> bool:
        return all(b.intact() for b in [*self.plan, *self.arrays.values()])


def host_arrays(plan: core.Plan) -> dict[str, torch.Tensor]:
    return {name: torch.from_dlpack(getattr(plan, name)) for name in PLAN}


def compare(call: DeviceCall, host: core.Plan, bucket: tuple[int, int]) -> None:
    """Every array of the plan and of the format."""
    assert call.intact()
    for name, want in host_arrays(host).items():
        got = call.get(name)
        assert torch.equal(got.view(want.shape), want), (name, got, want)
    for name, array in host.arrays().items():
        want = torch.from_dlpack(array)
        block = call.arrays[name]
        got = block.tensor.cpu()
        want = want.to(got.dtype)
        if want.dim() == 2:
            rows, cols = want.shape
            assert torch.equal(got[:rows, :cols], want), name
            assert not got[:rows, cols:].any(), f"{name} holds something behind its rows"
            if got.shape[1]:
                assert block.tail_is_poison(rows * got.shape[1]), name
        else:
            assert torch.equal(got[: len(want)], want), (name, got[: len(want)], want)
            assert block.tail_is_poison(len(want)), name


def shapes(rng: random.Random) -> tuple[int, int, int]:
    k, s = rng.choice([(1, 1), (1, 4), (2, 3), (4, 3), (8, 6), (3, 7), (8, 9), (16, 5)])
    most = 1 + k + (s - 1) * k * k
    return k, s, min(most, rng.choice([1, 2, 5, 32, 33, 63, 64, 65, 130]))


def world(seed: int, layout: str | None = None) -> World:
    rng = random.Random(seed)
    shape = shapes(rng)
    page = rng.choice([1, 1, 2, 4, 16, 64])
    context = rng.choice([1, 2, 17, 63, 64, 65, 200, 700])
    batch = rng.choice([0, 1, 2, 3, 7])
    borders = [0, 1, page - 1, page, page + 1, 2 * page, context - 1, context - 2, context]
    lens = [max(0, min(context, rng.choice([*borders, rng.randint(0, context)]))) for _ in range(batch)]
    return World(rng, shape, page, context, layout or rng.choice(["dense", "holey"]), lens)


def steps_of(w: World) -> list[str]:
    context = w.geometry.max_context_len
    inside = all(n < context for n in w.lens)
    drafts = [f"draft{t}" for t in {0, w.shape.steps // 2, w.shape.steps - 1}]
    return ["extend", *(["decode", "verify"] if inside else []), *drafts]


@pytest.mark.parametrize("seed", range(70))
def test_every_array_of_every_phase(seed: int) -> None:
    w = world(seed)
    rng = w.rng
    b = len(w.lens)
    compared = 0
    for format, masks in FORMATS:
        try:
            planner = core.Planner(w.geometry, w.pool, format, masks)
        except specrs.ConfigError:
            continue  # native in the holey layout
        for name in steps_of(w):
            step = w.step(name)
            lane = step.phase == "draft" and (rng.random() < 0.3 or (format == "flash_attention" and reads_lanes(w)))
            plain = w.host(planner, step, None, lane)
            pads: list[Any] = [None]
            most = {"extend": w.geometry.max_context_len, "decode": 1, "verify": w.shape.draft_tokens}
            room = most.get(step.phase, w.shape.topk) * w.max_batch
            pads.append((w.max_batch, min(room, plain.queries + rng.choice([0, 1, 9]))))
            for pad in pads:
                host = w.host(planner, step, pad, lane)
                bucket = (host.batch, host.queries)
                call = DeviceCall(w, step, bucket, lane, format, masks)
                call.versions[:b] = torch.from_dlpack(host.versions)[:b].to(CUDA)
                call.versions[b:] = 77
                call.give_arrays(planner, w.max_batch, host.queries)
                call.run()
                compare(call, host, bucket)
                audited = planner.audit(step.phase, tuple(call.get(n) for n in PLAN), step.draft_step)
                assert {n: a.tolist() for n, a in audited.arrays().items()} == {
                    n: a.tolist() for n, a in host.arrays().items()
                }
                compared += 1
    assert compared > 0


def reads_lanes(w: World) -> bool:
    """Return whether flash_attention reads whole lanes: other masks are refused."""
    return w.shape.topk == 1 or (w.geometry.layout == "holey" and w.geometry.page_size > 1)


def test_layouts_are_what_they_are_called() -> None:
    holey = [w for w in (world(s, "holey") for s in range(40)) if w.geometry.layout == "holey"]
    assert len(holey) > 5


@pytest.mark.parametrize("seed", range(25))
def test_tail_copies(seed: int) -> None:
    w = world(1000 + seed, "holey")
    planner = core.Planner(w.geometry, w.pool, "flash_attention")
    moves = planner.tail_copies(w.seqs, w.lens)
    b = w.max_batch
    counts = [len(planner.tail_copies([s], [n])) for s, n in zip(w.seqs, w.lens, strict=True)]
    for room in (len(moves), len(moves) + 5):
        src, dst, offsets = Block(torch.int32, [room]), Block(torch.int32, [room]), Block(torch.int32, [b + 1])
        rows = i32([s.row for s in w.seqs] + [-1] * (b - len(w.seqs)))
        lens = i32(w.lens + [3] * (b - len(w.lens)))
        core._device_tail_copies(
            geometry=w.geometry, table=w.table(), num_pages=w.pool.num_pages, rows=rows, lens=lens, live=None,
            moves=MoveArrays(src=src.tensor, dst=dst.tensor, offsets=offsets.tensor), stream=stream(),
        )  # fmt: skip
        ends = [0, *itertools.accumulate(counts)]
        assert offsets.tensor.tolist() == ends + [ends[-1]] * (b - len(counts))
        assert src.tensor.tolist() == moves.src.tolist() + [0] * (room - len(moves))
        assert dst.tensor.tolist() == moves.dst.tolist() + [0] * (room - len(moves))
        assert src.intact() and dst.intact() and offsets.intact()


def small(page: int = 4, layout: str = "dense", lens: list[int] | None = None, shape=(2, 3, 6), context=64) -> World:
    return World(random.Random(9), shape, page, context, layout, [9, 5, 14] if lens is None else lens)


def faulty(call: DeviceCall) -> specrs.OutOfBoundsError:
    call.run()
    torch.cuda.synchronize()
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    assert call.intact()
    device.check()
    return e.value


def owned(arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: a.clone() for name, a in arrays.items()}


CASES = [
    # phase, what is planted, its place, the value; buffer, step, index, bound
    ("decode", "lens", 1, -3, "committed lengths", -1, -3, 65),
    ("decode", "lens", 1, 65, "committed lengths", -1, 65, 65),
    ("decode", "lens", 1, 64, "context", -1, 64, 64),
    ("decode", "lens", 1, 2**31 - 1, "committed lengths", -1, 2**31 - 1, 65),
    ("verify", "lens", 1, 64, "context", -1, 64, 64),
    ("draft1", "lens", 1, 65, "committed lengths", -1, 65, 65),
    ("extend", "lens", 1, 64, "context", -1, None, 64),
    ("decode", "rows", 1, 99, "rows of the page table", -1, 99, None),
    ("verify", "rows", 1, 2**31 - 1, "rows of the page table", -1, 2**31 - 1, None),
    ("verify", "parents", "second 1", 1, "tree parents", 1, 1, 1),
    ("verify", "parents", "second 1", -1, "tree parents", 1, -1, 1),
    ("verify", "parents", "second 0", 0, "tree parents", 0, 0, 0),
    ("draft1", "beams", None, 1 << 5, "ancestor bits", 0, 5, 6),
    ("draft1", "beams", None, 1 << 63, "ancestor bits", 0, 63, 6),
    ("decode", "page", 1, 1000, "pool pages", -1, 1000, None),
    ("decode", "page", 1, -1, "pool pages", -1, -1, None),
    ("verify", "page", 2, 1000, "pool pages", 3, 1000, None),
    ("draft0", "page", 1, 0, "allocated positions", -1, 4, 4),
    ("verify", "page", 2, 0, "allocated positions", 3, 8, 8),
]


@pytest.mark.parametrize(("phase", "what", "place", "value", "buffer", "step", "index", "bound"), CASES)
def test_what_is_wrong_is_recorded_and_its_request_left_out(
    phase: str, what: str, place: Any, value: int, buffer: str, step: int, index: int | None, bound: int | None
) -> None:
    w = small()
    s = w.step(phase)
    if phase == "verify":
        s.trees = [[-1, 0, 0, 1], [-1, 0, 0, 1, 1], [-1]]
    if phase == "extend":
        s.counts = [3, 2, 1]
    if phase.startswith("draft"):
        s.beams = torch.tensor([[1 << b * 3 + s.draft_step] for _ in range(3) for b in (0, 1)])
    planner = core.Planner(w.geometry, w.pool)
    host = w.host(planner, s, None, False)
    call = DeviceCall(w, s, (host.batch, host.queries), False)
    call.versions[:] = torch.from_dlpack(host.versions).to(CUDA)
    if what in ("lens", "rows"):
        getattr(call, what)[place] = value
    elif what == "parents":
        call.parents[4 + int(place.split()[1])] = value
    elif what == "beams":
        call.beams[2, 0] |= value - 2**64 if value >= 2**63 else value
    else:
        call.table[w.seqs[1].row, place] = value
    e = faulty(call)
    assert (e.kernel, e.buffer, e.request, e.step) == ("plan", buffer, 1, step)
    bounds = {"rows of the page table": w.max_seqs, "pool pages": w.pool.num_pages}
    assert e.bound == (bounds[buffer] if bound is None else bound)
    if index is not None:
        assert e.index == index
    want = owned(host_arrays(host))
    first, end = want["qo_indptr"][1], want["qo_indptr"][2]
    want["rows"][1], want["versions"][1], want["prefix_lens"][1] = -1, 0, 0
    for name in ("positions", "out_slots", "mask"):
        want[name][first:end] = 0
    for name, array in want.items():
        assert torch.equal(call.get(name).view(array.shape), array), name


@pytest.mark.parametrize(("sizes", "bad"), [([0, 4, 3, 5], "decreasing"), ([0, 4, 40, 41], "large")])
def test_counts_that_no_tree_has(sizes: list[int], bad: str) -> None:
    w = small()
    s = Step("verify", trees=[[-1, 0, 0, 1], [-1, 0], [-1]])
    host = w.host(core.Planner(w.geometry, w.pool), s, None, False)
    call = DeviceCall(w, s, (3, host.queries), False)
    call.offsets = i32(sizes)
    e = faulty(call)
    if e.request == 2:  # its offset begins where no tree does, or behind the bucket: the first to come is told
        assert e.buffer in ("queries", "tree parents", "nodes of all trees"), bad
    else:
        assert (e.buffer, e.request, e.index, e.bound) == ("nodes of a tree", 1, sizes[2] - sizes[1], 7), bad
    assert call.get("rows")[1] == -1
    assert call.get("out_slots")[:4].tolist() == torch.from_dlpack(host.out_slots)[:4].tolist()


def test_queries_that_do_not_fit_the_bucket_are_cut_off() -> None:
    w = small()
    s = Step("extend", counts=[3, 2, 4])
    planner = core.Planner(w.geometry, w.pool)
    host = w.host(planner, s, None, False)
    call = DeviceCall(w, s, (3, 6), False)
    e = faulty(call)
    assert (e.buffer, e.request, e.index, e.bound) == ("queries", 2, 8, 6)
    assert call.get("qo_indptr").tolist() == [0, 3, 5, 6]
    assert call.get("out_slots").tolist() == [*torch.from_dlpack(host.out_slots)[:5].tolist(), 0]


def test_a_live_count_outside_the_bucket_is_clamped() -> None:
    w = small()
    s = Step("decode")
    host = w.host(core.Planner(w.geometry, w.pool), s, None, False)
    for live, buffer_index in ((4, 4), (-1, -1)):
        call = DeviceCall(w, s, (3, 3), False)
        call.live = i32([live])
        call.versions[:] = torch.from_dlpack(host.versions).to(CUDA)
        e = faulty(call)
        assert (e.buffer, e.index, e.bound) == ("live", buffer_index, 4)
        if live > 0:
            compare_plan = host_arrays(host)
            for name, want in compare_plan.items():
                assert torch.equal(call.get(name).view(want.shape), want), name
        else:
            assert call.get("rows").tolist() == [-1] * 3 and call.get("qo_indptr").tolist() == [0] * 4


@pytest.mark.parametrize("format", ["flashinfer", "triton"])
@pytest.mark.parametrize("phase", ["draft1", "verify", "decode", "extend"])
def test_lists_that_do_not_fit_are_empty(format: str, phase: str) -> None:
    w = small()
    planner = core.Planner(w.geometry, w.pool, format)
    s = w.step(phase)
    if phase == "extend":
        s.counts = [3, 2, 4]
    host = w.host(planner, s, None, False)
    want = {name: torch.from_dlpack(a) for name, a in host.arrays().items()}
    starts = want["kv_indptr"].tolist()
    call = DeviceCall(w, s, (host.batch, host.queries), False, format)
    call.give_arrays(planner, w.max_batch, host.queries)
    room = starts[2] + (starts[3] - starts[2]) // 2  # the third list does not fit
    call.arrays["kv_indices"] = Block(TORCH["int32" if format == "flashinfer" else "int64"], [room])
    e = faulty(call)
    assert (e.kernel, e.buffer, e.index, e.bound) == ("plan_lists", "kv_indices", starts[3] - 1, room)
    got = call.arrays["kv_indptr"].tensor.tolist()[: len(starts)]
    assert got == [min(n, starts[2]) for n in starts]
    assert call.arrays["kv_indices"].tensor[: starts[2]].tolist() == want["kv_indices"][: starts[2]].tolist()
    assert call.arrays["kv_indices"].tail_is_poison(starts[2])


@pytest.mark.parametrize(("name", "masks"), [("custom_mask", "bool"), ("packed_custom_mask", "packed")])
def test_masks_that_do_not_fit_are_empty(name: str, masks: str) -> None:
    w = small()
    planner = core.Planner(w.geometry, w.pool, "flashinfer", masks)
    s = Step("verify", trees=[[-1, 0, 0, 1], [-1, 0], [-1]])
    host = w.host(planner, s, None, False)
    want = torch.from_dlpack(host.arrays()[name])
    starts = host.arrays()["mask_indptr" if masks == "bool" else "packed_mask_indptr"].tolist()
    call = DeviceCall(w, s, (3, host.queries), False, "flashinfer", masks)
    call.give_arrays(planner, w.max_batch, host.queries)
    call.arrays[name] = Block(torch.uint8, [starts[2] - 1])
    e = faulty(call)
    assert (e.kernel, e.buffer, e.request, e.index, e.bound) == ("plan_lists", name, 1, starts[2] - 1, starts[2] - 1)
    indptr = call.arrays["mask_indptr" if masks == "bool" else "packed_mask_indptr"].tensor.tolist()
    assert indptr[:4] == [0, starts[1], starts[1], starts[1]]
    assert torch.equal(call.arrays[name].tensor[: starts[1]].cpu(), want[: starts[1]].to(torch.uint8))
    assert call.arrays[name].tail_is_poison(starts[1])


@pytest.mark.parametrize("format", ["flashinfer", "triton", "flash_attention"])
@pytest.mark.parametrize(("page", "buffer"), [(0, "allocated positions"), (1000, "pool pages"), (-4, "pool pages")])
def test_a_page_of_a_prefix_that_is_none_of_the_pool(format: str, page: int, buffer: str) -> None:
    """The plan looks at the pages that it writes; a list looks at each that it reads."""
    w = small(lens=[9, 21, 14])
    planner = core.Planner(w.geometry, w.pool, format)
    s = Step("decode")
    host = w.host(planner, s, None, False)
    call = DeviceCall(w, s, (3, 3), False, format)
    call.give_arrays(planner, w.max_batch, 3)
    call.table[w.seqs[1].row, 1] = page
    e = faulty(call)
    assert (e.buffer, e.request) == (buffer, 1)
    assert e.kernel == ("plan_tables" if format == "flash_attention" else "plan_lists")
    want = {name: torch.from_dlpack(a).clone() for name, a in host.arrays().items()}
    if format == "flash_attention":
        want["cache_seqlens"][1] = 0
        want["page_table"][1] = 0
    else:
        begin = want["kv_indptr"].tolist()[1]
        want["kv_indices"][begin + 4 : begin + 8] = 0
    for name, array in want.items():
        got = call.arrays[name].tensor.cpu()
        got = got[: array.shape[0]] if array.dim() == 1 else got[: array.shape[0], : array.shape[1]]
        assert torch.equal(got, array), name


def test_rows_that_do_not_fit_a_page_table_are_empty() -> None:
    w = small()
    planner = core.Planner(w.geometry, w.pool, "flash_attention")
    s = Step("verify", trees=[[-1], [-1, 0, 1, 2], [-1, 0]])
    host = w.host(planner, s, None, False)
    call = DeviceCall(w, s, (3, host.queries), False, "flash_attention")
    call.give_arrays(planner, w.max_batch, host.queries)
    call.arrays["page_table"] = Block(torch.int32, [3, 3])  # request 2 needs 4
    e = faulty(call)
    assert (e.kernel, e.buffer, e.request, e.index, e.bound) == ("plan_tables", "page_table", 2, 3, 3)
    assert call.arrays["cache_seqlens"].tensor[:3].tolist() == [9, 5, 0]
    call.arrays["page_table"] = Block(torch.int32, [3, 9])
    call.arrays["expand_page_table"] = Block(torch.int32, [host.queries, 3])  # query 4 has 4 ancestors
    e = faulty(call)
    assert (e.buffer, e.request, e.step, e.index, e.bound) == ("expand_page_table", 1, 4, 3, 3)
    assert call.arrays["expand_cache_seqlens"].tensor[: host.queries].tolist() == [1, 1, 2, 3, 0, 1, 2]


def test_a_mask_that_whole_lanes_cannot_express_is_refused_by_the_kernel() -> None:
    w = small(shape=(1, 3, 4))
    planner = core.Planner(w.geometry, w.pool, "flash_attention")
    s = w.step("draft2")
    s.beams = torch.tensor([[0b101], [0b111], [0b111]])
    call = DeviceCall(w, s, (3, 3), False, "flash_attention")
    call.give_arrays(planner, w.max_batch, 3)
    e = faulty(call)
    assert (e.kernel, e.buffer, e.request) == ("plan_tables", "ancestor bits", 0)
    assert call.arrays["cache_seqlens"].tensor[:3].tolist() == [0, 8, 17]


def test_a_graph_plans_what_the_lengths_are_at_its_replay() -> None:
    w = small(lens=[3, 8, 5])
    planner = core.Planner(w.geometry, w.pool, "flashinfer")
    s = Step("decode")
    host = w.host(planner, s, None, False)
    call = DeviceCall(w, s, (3, 3), False, "flashinfer")
    call.versions[:] = torch.from_dlpack(host.versions).to(CUDA)
    call.give_arrays(planner, w.max_batch, 3)
    device.init()
    call.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    for lens in ([3, 8, 5], [4, 8, 9], [12, 9, 15]):
        w.lease.advance(lens)
        call.lens.copy_(torch.tensor(lens, dtype=torch.int32))
        for b in call.arrays.values():
            b.bytes.fill_(POISON)
        graph.replay()
        w.lens = lens
        compare(call, w.host(planner, s, None, False), (3, 3))


def test_a_large_batch() -> None:
    """More requests than threads of a CTA, more lists than a CTA of the starts has threads."""
    rng = random.Random(1)
    lens = [rng.randrange(60) for _ in range(1100)]
    w = World(rng, (2, 2, 5), 4, 64, "dense", lens)
    for format in ("flashinfer", "triton", "flash_attention"):
        planner = core.Planner(w.geometry, w.pool, format)
        for name in ("draft1", "verify", "extend", "decode"):
            step = w.step(name)
            host = w.host(planner, step, None, False)
            call = DeviceCall(w, step, (host.batch, host.queries), False, format)
            call.versions[:] = torch.from_dlpack(host.versions).to(CUDA)
            call.give_arrays(planner, w.max_batch, host.queries)
            call.run()
            compare(call, host, (host.batch, host.queries))


def test_operands_that_do_not_fit_are_refused() -> None:
    w = small()
    s = Step("decode")

    def refused(match: str, change, format="native") -> None:
        call = DeviceCall(w, s, (3, 3), False, format)
        if format != "native":
            call.give_arrays(core.Planner(w.geometry, w.pool, format), 3, 3)
        change(call)
        with pytest.raises(specrs.ConfigError, match=match):
            call.run()

    refused("lens: got 2, want 3", lambda c: setattr(c, "lens", i32([1, 2])))
    refused("int64, want int32", lambda c: setattr(c, "lens", c.lens.long()))
    refused("num_pages = 0", lambda c: setattr(c, "num_pages", 0))
    refused("mask: got 3, want 0", lambda c: c.plan.__setitem__(6, Block(torch.int64, [3, 1])))
    refused("bucket queries = 99", lambda c: [c.plan.__setitem__(i, Block(torch.int32, [99])) for i in (4, 5)])
    refused("kv_indptr: got none", lambda c: c.arrays.pop("kv_indptr"), "flashinfer")
    refused(
        "kv_indptr: need 4 elements, have 3", lambda c: c.arrays.update(kv_indptr=Block(torch.int32, [3])), "triton"
    )
    wrong = lambda c: c.arrays.update(kv_indices=Block(torch.int32, [300]))  # noqa: E731
    refused("kv_indices: got .*want int64", wrong, "triton")
    refused(
        "page_table: need 3 elements, have 2",
        lambda c: c.arrays.update(page_table=Block(torch.int32, [2, 9])),
        "flash_attention",
    )
