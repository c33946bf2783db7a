"""The named faults on a GPU: what each would do to a graph that plans on the device, and which guard names it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.dlpack import from_dlpack

import specrs
from specrs import _specrs as core
from specrs import device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

from named_faults_world import BRANCHES, BUCKET, CUDA, PLAN, POISON, Captured, fault, two_of_three

FORMATS = ["native", "flashinfer", "flash_attention", "triton"]

pytestmark = pytest.mark.usefixtures("no_fault_is_left")


# -- 27338 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["flashinfer", "triton"])
def test_27338_lists_of_all_branches_do_not_fit_the_width_of_one(format: str) -> None:
    """The width of one branch's lists: those of short requests fit all the same, as they did there."""
    c = Captured(format, reverts=[27338])
    room = c.arrays.views["kv_indices"].numel()
    assert room == BUCKET * (16 + 2), "without the factor K"
    c.reserve(c.seqs, [5, 4, 3])
    c.hand_over([5, 4, 3])
    c.live.fill_(3)
    c.capture()
    c.poison()
    c.graph.replay()
    torch.cuda.synchronize()
    device.check()
    c.equals(c.host([5, 4, 3]))
    assert c.lease is not None
    c.lease.rollback()
    c.reserve(c.seqs, [14, 14, 14])
    c.lens.fill_(14)
    c.poison()
    c.graph.replay()
    e = fault()
    assert (e.kernel, e.buffer, e.bound) == ("plan_lists", "kv_indices", room)
    # Six lists of 15 slots: three fit, and which of the others is met first is the GPU's to say.
    assert e.index in (59, 74, 89), e.index
    assert c.arrays.views["kv_indptr"].tolist()[:4] == [0, 15, 30, 45]
    assert c.arrays.views["kv_indptr"].tolist()[4:7] == [45, 45, 45], "lists that do not fit are empty"
    c.arrays.bytes(POISON)  # the guards around each array are as they were
    c.plan.bytes(POISON)


# -- 27360 ------------------------------------------------------------------------------------------------------------


def test_27360_the_kernel_counts_live_tokens_alone() -> None:
    """The host's planner writes all steps' pages with the switch, and is stopped; the device's has nowhere to do it."""
    lens = [5, 4, 3]
    c = Captured("flash_attention", reverts=[27360], layout="holey")
    c.reserve(c.seqs, lens)
    with pytest.raises(specrs.ConfigError, match="expand_page_table: need 2 elements, have 1"):
        c.host(lens)
    plain = core.Geometry(BUCKET, 16, 2, core.TreeShape(BRANCHES, 2, 4), "holey", [])
    planner = core.Planner(plain, c.pool, format="flash_attention")
    host = planner.draft(c.seqs, lens, 0, None, "lane", pad=(BUCKET, BUCKET * BRANCHES))
    c.hand_over(lens, host)
    c.live.fill_(3)
    c.capture()
    c.poison()
    c.graph.replay()
    torch.cuda.synchronize()
    device.check()
    c.equals(host)


# -- 26972 ------------------------------------------------------------------------------------------------------------


def test_26972_a_position_behind_the_reserve_is_named_by_the_kernel() -> None:
    """A request of no tokens: two branches take a page each, and the reserve is one page."""
    lens = [6, 0, 6]
    c = Captured("flash_attention", reverts=[26972], tree=(BRANCHES, 1, 1), page=4, layout="holey")
    assert (c.geometry.alloc_len_per_decode, c.geometry.alloc_target(0, 0)) == (2, 4)
    c.reserve(c.seqs, lens)
    c.rows.copy_(torch.tensor([q.row for q in c.seqs], dtype=torch.int32))
    c.lens.copy_(torch.tensor(lens, dtype=torch.int32))
    c.live.fill_(3)
    c.poison()
    c.launch(BUCKET)
    e = fault()
    assert (e.kernel, e.buffer, e.request, e.index, e.bound) == ("plan", "allocated positions", 1, 4, 4)
    # The request's queries write to the sink; the neighbours' have their places, a page apart.
    want = [c.pool.pages(q)[pos // 4] * 4 + pos % 4 for q in (c.seqs[0], c.seqs[2]) for pos in (6, 10)]
    slots = c.plan.views["out_slots"].tolist()
    assert (slots[:2] + slots[4:], slots[2:4]) == (want, [0, 0])
    c.plan.bytes(POISON)
    c.arrays.bytes(POISON)
    assert c.lease is not None
    c.lease.rollback()
    c.pool.audit()


# -- 23037 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_23037_dead_lanes_are_written_whatever_the_last_replay_left(format: str) -> None:
    c = two_of_three(format)
    c.live.fill_(2)
    c.graph.replay()  # over the arrays of the larger batch
    torch.cuda.synchronize()
    device.check()
    host = c.host([5, 4])
    for name in PLAN:
        want = from_dlpack(getattr(host, name))
        assert torch.equal(c.plan.views[name].cpu().view(want.shape), want), name
    c.audit()
    c.poison()
    c.graph.replay()
    torch.cuda.synchronize()
    c.equals(host)


@pytest.mark.parametrize("format", FORMATS)
def test_23037_a_batch_that_still_counts_its_dead_is_named_by_the_kernel(format: str) -> None:
    """The count is stale as well: the third request is planned, and has no pages any more."""
    c = two_of_three(format)
    c.poison()
    c.graph.replay()
    e = fault()
    assert (e.kernel, e.buffer, e.request, e.bound) == ("plan", "allocated positions", 2, 0)
    c.equals(c.host([5, 4]), counted=3)  # its queries are dead ones, and the others are as they should be


@pytest.mark.parametrize("format", FORMATS)
def test_23037_stale_lanes_are_refused_by_the_audit(format: str) -> None:
    """The fault itself: only live seats are overwritten, and what reads the arrays reads all of them."""
    c = two_of_three(format)
    c.live.fill_(2)
    if format != "native":
        c.format = "native"  # the plan alone; a format's arrays are of the bucket
    c.launch(2)
    torch.cuda.synchronize()
    device.check()
    with pytest.raises(specrs.StaleHandleError, match="the row's pages changed"):
        c.audit()  # the request of the last batch
    c.plan.views["rows"][2] = -1
    c.plan.views["versions"][2] = 0
    with pytest.raises(specrs.ConfigError, match=r"dead (request|query) = request 2"):
        c.audit()  # refuses its prefix, or its queries
    # Poisoned before each write, a seat that nobody wrote is no number that anything accepts.
    c.poison()
    c.launch(2)
    torch.cuda.synchronize()
    with pytest.raises(specrs.ConfigError, match="qo_indptr = "):
        c.audit()
    device.check()


def test_23037_attention_over_poisoned_lanes_is_skipped_and_recorded() -> None:
    """The kernel that reads the plan checks every number by itself."""
    c = two_of_three("native")
    c.live.fill_(2)
    c.poison()
    c.launch(2)
    heads, dim = 2, 64
    cache = torch.zeros(1, 2, c.pool.num_pages * 2, 1, dim, dtype=torch.bfloat16, device=CUDA)
    q = torch.ones(BUCKET * BRANCHES, heads, dim, dtype=torch.bfloat16, device=CUDA)
    out = torch.full_like(q, 7.0)
    size = core._device_attention_workspace(
        CUDA.index, requests=BUCKET, max_queries=BRANCHES, kv_heads=1, group=heads, head_dim=dim, max_keys=64
    )
    views = c.plan.views
    core._device_attention(
        cache, 0, q, out, table=c.table, page_size=2, rows=views["rows"], lens=views["prefix_lens"],
        starts=views["qo_indptr"], mask=views["mask"].view(-1), draft=(BRANCHES, 2), max_queries=BRANCHES, scale=0.1,
        workspace=torch.empty(size, dtype=torch.uint8, device=CUDA), stream=torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    e = fault()
    assert (e.kernel, e.request) == ("attention", 2)
    assert bool(out[:4].eq(0).all())  # keys of zeros


# -- 26738 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_26738_lengths_that_only_the_device_knows(format: str) -> None:
    """Sized by the bound, planned from device memory, without the host waiting for anything."""
    c = Captured(format)
    c.reserve(c.seqs, [5, 4, 3])
    c.hand_over([5, 4, 3])
    c.live.fill_(3)
    c.capture()
    now = [14, 9, 3]
    longer = torch.tensor(now, dtype=torch.int32, device=CUDA)
    assert c.lease is not None
    c.lease.rollback()
    c.reserve(c.seqs, now)
    versions = from_dlpack(c.host(now).versions).to(CUDA)
    c.poison()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        c.lens.copy_(longer)  # writes as a kernel of the round before would
        c.versions.copy_(versions)
        c.graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    c.equals(c.host(now))
    c.audit()


@pytest.mark.parametrize("format", ["flashinfer", "flash_attention", "triton"])
def test_26738_put_back_is_refused_before_anything_is_allocated(format: str) -> None:
    gc.collect()  # collects garbage of earlier tests
    before = torch.cuda.memory_allocated()
    with pytest.raises(specrs.ConfigError, match="sizing on the host reads lengths") as e:
        Captured(format, reverts=[26738])
    assert (e.value.what, e.value.got) == ("lens", "device lengths of 3 requests (<= 16)")
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("format", ["flashinfer", "flash_attention", "triton"])
def test_26738_arrays_of_the_lengths_that_the_host_last_saw(format: str) -> None:
    """A mirror that is there but stale: arrays too small for the lengths on the device, and the kernel says so."""
    c = Captured(format, at_most=5)
    c.reserve(c.seqs, [5, 4, 3])
    c.hand_over([5, 4, 3])
    c.live.fill_(3)
    c.capture()
    assert c.lease is not None
    c.lease.rollback()
    c.reserve(c.seqs, [14, 14, 14])
    c.lens.fill_(14)
    c.poison()
    c.graph.replay()
    e = fault()
    if format == "flash_attention":
        assert (e.kernel, e.buffer) == ("plan_tables", "page_table")
    else:
        assert (e.kernel, e.buffer) == ("plan_lists", "kv_indices")
    assert e.index >= e.bound
    c.arrays.bytes(POISON)  # the guards around each array are as they were
    c.plan.bytes(POISON)
