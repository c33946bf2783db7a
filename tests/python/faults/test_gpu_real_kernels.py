"""The named faults before the real kernels: FlashInfer's, FlashAttention-3's and those in Triton, on a GPU.

Each fault is shown twice. With the guards it is named, nothing beside the arrays is written, and the kernel that reads
them is right for the requests that are sound. Without guards, as a writer here that checks nothing leaves the arrays,
the same kernel's result is wrong: the guards prevent that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from specrs import ConfigError, device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)
pytest.importorskip("triton")

from named_faults_world import BRANCHES, BUCKET, CUDA, POISON, Captured, fault, two_of_three
from pass_world import Heads, Pass, Requests
from specrs import _specrs as core
from specrs.backends import BACKENDS, Step, flash_attention, flashinfer, triton
from specrs.backends.base import Format, Operands
from specrs.backends.flashinfer_kernels import Planned

pytestmark = pytest.mark.usefixtures("no_fault_is_left")
QUERIES, HEADS, DIM, CANARY = BUCKET * BRANCHES, 2, 64, -77
TOLERANCE = 2**-6  # of a few roundings to bfloat16, near 1


class World:
    """KV of random numbers for the pool of a graph, and one query for each branch."""

    def __init__(self, c: Captured, format: Format) -> None:
        random = torch.Generator().manual_seed(1)
        self.page, self.format = c.pool.page_size, format
        shape = (c.pool.num_pages * self.page, 1, DIM)
        self.keys, self.values = (torch.randn(shape, generator=random).bfloat16().to(CUDA) for _ in range(2))
        self.q = torch.randn(QUERIES, HEADS, DIM, generator=random).bfloat16().to(CUDA)
        self.expand = self.page if c.geometry.layout == "holey" else 1
        try:
            self.kernels: Any = MODULES[format].kernels()
        except ConfigError as error:
            pytest.skip(str(error))

    def read(self, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The real kernel's result for a draft step's arrays on the device, in float32 on the CPU."""
        out = torch.full_like(self.q, torch.nan)
        common: dict[str, Any] = {"most_queries": BRANCHES}
        if self.format == "flash_attention":
            common |= {"page_size": self.page, "expand_page_size": self.expand}
        elif self.format == "flashinfer":
            common |= {"phase": "draft", "lists": QUERIES}
        else:
            space = torch.empty(self.kernels.workspace(CUDA, DIM), dtype=torch.uint8, device=CUDA)
            common |= {"phase": "draft", "sequences": QUERIES, "space": space}
        self.kernels.attention(Operands(self.q, self.keys, self.values, out, arrays, DIM**-0.5), **common)
        torch.cuda.synchronize()
        return out.float().cpu()

    def right(self, plan: core.Plan) -> torch.Tensor:
        """Attention in float64 by the arrays of the host's plan."""
        backend = BACKENDS[self.format]()
        arrays = {name: torch.from_dlpack(array) for name, array in plan.arrays().items()}
        step = Step(
            phase="draft", page_size=self.page, expand_page_size=plan.expand_page_size, queries=QUERIES, arrays=arrays
        )
        return backend.attend(
            backend.prepare(step), self.keys.cpu(), self.values.cpu(), self.q.float().cpu(), DIM**-0.5
        )


MODULES = {"flashinfer": flashinfer, "flash_attention": flash_attention, "triton": triton}


def wrong(got: torch.Tensor, want: torch.Tensor) -> list[bool]:
    """Which rows differ by more than roundings, or are no numbers."""
    return [not bool((row - of).abs().max() <= TOLERANCE) for row, of in zip(got, want, strict=True)]


def plain(c: Captured, lens: list[int], step: int = 0) -> core.Plan:
    """The host's plan without the fault."""
    g = c.geometry
    geometry = core.Geometry(BUCKET, g.max_context_len, g.page_size, g.shape, g.layout, [])
    planner = core.Planner(geometry, c.pool, format=c.format)  # type: ignore[arg-type]
    return planner.draft(c.seqs[: len(lens)], lens, step, None, "lane", pad=(BUCKET, QUERIES))


def arrays_of(plan: core.Plan) -> dict[str, torch.Tensor]:
    """A plan's arrays on the device, written without a guard."""
    return {name: torch.from_dlpack(array).to(CUDA) for name, array in plan.arrays().items()}


def named(plan: core.Plan, page: int) -> torch.Tensor:
    """The slots that a plan's arrays name, those of whole pages where a kernel reads pages."""
    arrays = {name: torch.from_dlpack(array).long() for name, array in plan.arrays().items()}
    if "kv_indices" in arrays:
        return arrays["kv_indices"]
    pages = arrays["page_table"].flatten()[:, None] * page + torch.arange(page)
    return torch.cat((pages.flatten(), arrays["expand_page_table"].flatten()))


@pytest.mark.parametrize("format", ["flashinfer", "triton"])
def test_27338(format: Format) -> None:
    """Lists of all branches in an array that is as wide as those of one."""
    lens = [14, 14, 14]
    c = Captured(format, reverts=[27338])
    world, room = World(c, format), c.arrays.views["kv_indices"].numel()
    c.reserve(c.seqs, [5, 4, 3])
    c.hand_over([5, 4, 3])
    c.live.fill_(3)
    c.capture()
    assert c.lease is not None
    c.lease.rollback()
    c.reserve(c.seqs, lens)
    c.lens.fill_(14)
    right = world.right(plain(c, lens))

    c.poison()
    c.graph.replay()
    assert fault().buffer == "kv_indices"
    got = world.read(c.arrays.views)
    assert wrong(got, right) == [False] * 3 + [True] * 3, "the lists that fit are there"
    assert not got[3:].any(), "lists that do not fit are empty"
    c.arrays.bytes(POISON)
    c.plan.bytes(POISON)

    arrays = arrays_of(plain(c, lens))
    lists = arrays["kv_indices"]
    memory = torch.full((room + 64,), CANARY, dtype=lists.dtype, device=CUDA)
    neighbour = memory[room:]
    memory[: len(lists)] = lists
    assert len(lists) > room and not neighbour.eq(CANARY).all(), "the neighbour's memory is overwritten"
    neighbour.fill_(1)  # and written again by the neighbour
    assert wrong(world.read({**arrays, "kv_indices": memory}), right) == [False] * 3 + [True] * 3


def test_27360() -> None:
    """The pages of all steps, where the table of one step has a column for each of its own."""
    lens = [5, 4, 3]
    c = Captured("flash_attention", layout="holey")
    world = World(c, "flash_attention")
    c.reserve(c.seqs, lens)
    c.hand_over(lens)
    c.live.fill_(3)
    right = world.right(plain(c, lens))

    c.poison()
    c.launch(BUCKET)
    assert not any(wrong(world.read(c.arrays.views), right))
    c.arrays.bytes(POISON)

    arrays, all_steps = arrays_of(plain(c, lens)), arrays_of(plain(c, lens, step=1))["expand_page_table"]
    table = arrays["expand_page_table"]
    assert (table.shape[1], all_steps.shape[1]) == (1, 2)
    memory = torch.full((QUERIES + 2,), CANARY, dtype=torch.int32, device=CUDA)
    for row in reversed(range(QUERIES)):  # the rows of a scatter have no order
        memory[row : row + 2] = all_steps[row]
    assert int(memory[QUERIES]) != CANARY, "the memory behind the table is overwritten"
    found = wrong(world.read({**arrays, "expand_page_table": memory[:QUERIES].view(QUERIES, 1)}), right)
    assert found[1], "a branch reads a page of another"


def test_26972() -> None:
    """A reserve without the pages of each branch: a branch's key goes where the table's row ends."""
    lens = [6, 0, 6]
    c = Captured("flash_attention", reverts=[26972], tree=(BRANCHES, 1, 1), page=4, layout="holey")
    world = World(c, "flash_attention")
    c.reserve(c.seqs, lens)
    c.rows.copy_(torch.tensor([q.row for q in c.seqs], dtype=torch.int32))
    c.lens.copy_(torch.tensor(lens, dtype=torch.int32))
    c.live.fill_(3)
    c.poison()
    c.launch(BUCKET)
    assert fault().buffer == "allocated positions"
    before, slots = world.read(c.arrays.views), c.plan.views["out_slots"].long()
    assert slots[2:4].tolist() == [0, 0]
    world.keys[slots[2:4]] = 9.0  # the head writes the keys of both branches, to the sink
    after = world.read(c.arrays.views)
    assert torch.equal(before[:2], after[:2]) and torch.equal(before[4:], after[4:])
    c.arrays.bytes(POISON)

    # A row's end is where the next row begins: the page of a neighbour's prefix.
    stale = c.pool.pages(c.seqs[2])[0] * world.page
    world.keys[stale] = 9.0
    assert wrong(world.read(c.arrays.views), before)[4:] == [True, True], "the neighbour reads a draft as its prefix"


@pytest.mark.parametrize("format", list(MODULES))
def test_23037(format: Format) -> None:
    """Seats of a request that has ended keep the last replay's arrays."""
    c = two_of_three(format)
    world = World(c, format)
    stale = {name: view.clone() for name, view in c.arrays.views.items()}  # of three requests
    others = torch.ones(len(world.keys), dtype=torch.bool)
    others[named(c.host([5, 4]), world.page)] = False

    c.live.fill_(2)
    c.poison()
    c.graph.replay()
    torch.cuda.synchronize()
    device.check()
    got = world.read(c.arrays.views)
    assert not any(wrong(got, world.right(c.host([5, 4])))) and not got[4:].any()

    first = world.read(stale)
    world.values[others] = 5.0  # the pages have another owner
    second = world.read(stale)
    assert first[4:].any() and wrong(second, first)[4:] == [True, True], "dead seats read what others write"
    world.values[others] = torch.nan
    assert bool(world.read(stale)[4:].isnan().all()), "whatever it is"
    assert torch.equal(world.read(c.arrays.views), got), "with the guards nobody reads there"


def test_26738() -> None:
    """A plan on the host, of the lengths that it last saw: FlashInfer's is one; the device's lengths have moved on."""
    requests = Requests(1, (4, 3, 9), 16, "dense", context=700, lens=[600, 500])
    one = Pass(requests, "decode", Heads(1, 2, DIM, torch.bfloat16), padded=False, format="flashinfer")
    try:
        kernels = flashinfer.kernels()
    except ConfigError as error:
        pytest.skip(str(error))
    q, keys, values = (t.to(CUDA) for t in (one.q, one.keys, one.values))
    arrays, right = {name: array.to(CUDA) for name, array in one.arrays.items()}, one.reference()
    ends, last_seen = one.arrays["kv_indptr"], torch.tensor([0, 300, 500], dtype=torch.int32)

    def planned_by(lengths: torch.Tensor, arrays: dict[str, torch.Tensor]) -> torch.Tensor:
        """The result of a plan of such lengths on the host."""
        out = torch.full_like(q, torch.nan)
        operands = Operands(q, keys, values, out, arrays, one.scale)
        kernels.attention_of(Planned("decode", arrays, {"kv_indptr": lengths}), operands)
        return out.float().cpu()

    out = torch.full_like(q, torch.nan)
    operands = Operands(q, keys, values, out, arrays, one.scale)
    kernels.attention(operands, phase="decode", lists=2, most_queries=1)  # a plan of bounds, which no length is in
    assert not any(wrong(out.float().cpu(), right))
    assert not any(wrong(planned_by(ends, arrays), right)), "as does a plan of the true lengths"

    # FlashInfer's plan() writes the lengths that it plans for over those in the arrays.
    stale = {**arrays, "kv_indptr": last_seen.to(CUDA)}
    got = planned_by(last_seen, stale)
    assert wrong(got, right) == [True, True]
    one.arrays["kv_indptr"] = last_seen
    assert not any(wrong(got, one.reference())), "one lacks its newest keys, the other reads those as its own"
    # With the lengths put back its schedule is still of the old ones: the kernel looks for parts where none are.
    assert wrong(planned_by(last_seen, arrays), right) == [True, True]
