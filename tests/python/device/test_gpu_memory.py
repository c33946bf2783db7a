"""Device memory of specrs on a GPU: arenas shared with torch, lifetimes in stream order, the page table's mirror."""

from __future__ import annotations

import gc
import itertools
import random
import threading
from typing import ClassVar

import pytest
import torch

import specrs
from specrs import _specrs as core
from specrs import device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

ORDINAL = torch.cuda.current_device()
CUDA = torch.device("cuda", ORDINAL)
I32_MIN, I32_MAX = -(2**31), 2**31 - 1
LONG = 1_000_000_000  # cycles, about half a second


@pytest.fixture(autouse=True)
def no_fault_and_no_memory_is_left():
    torch.cuda.synchronize()
    core._device_collect(ORDINAL)
    before = core._device_memory(ORDINAL)[2:]
    yield
    gc.collect()
    torch.cuda.synchronize()
    device.check()
    core._device_collect(ORDINAL)
    assert core._device_memory(ORDINAL)[2:] == before, "memory was not freed"


def raw(stream=None):
    return (stream or torch.cuda.current_stream()).cuda_stream


def arena(regions, guards=True):
    return core._DeviceArena(ORDINAL, regions, guards)


REGIONS = [
    ("tokens", "int32", [7]),
    ("scores", "float32", [3, 5]),
    ("hidden", "bfloat16", [4, 33]),
    ("half", "float16", [2, 2, 2]),
    ("bytes", "uint8", [1]),
    ("offsets", "int64", [65]),
    ("none", "int32", [0, 4]),
]
TYPES = {
    "int32": torch.int32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
    "int64": torch.int64,
}


@pytest.mark.parametrize("guards", [False, True])
def test_torch_shares_every_region_and_none_overlaps_another(guards):
    a = arena(REGIONS, guards)
    tensors = {name: torch.from_dlpack(a.tensor(name, raw())) for name, _, _ in REGIONS}
    ranges = []
    for name, dtype, shape in REGIONS:
        t = tensors[name]
        assert (t.dtype, list(t.shape), t.device, t.is_contiguous()) == (TYPES[dtype], shape, CUDA, True)
        if t.numel():
            assert t.data_ptr() % 256 == 0
            ranges.append((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()))
    ranges.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    assert sum(b - a for a, b in ranges) <= a.bytes
    for i, t in enumerate(tensors.values()):
        t.fill_(i + 1)
    for i, (name, _, _) in enumerate(REGIONS):
        again = torch.from_dlpack(a.tensor(name, raw()))
        assert (again == i + 1).all() and again.data_ptr() == tensors[name].data_ptr()
    a.check_guards(raw())


def test_poison_is_nan_and_minus_one_and_leaves_the_guards():
    a = arena(REGIONS)
    a.poison(raw())
    for name, _dtype, _ in REGIONS:
        t = torch.from_dlpack(a.tensor(name, raw()))
        assert (t.isnan() if t.is_floating_point() else t == (255 if t.dtype == torch.uint8 else -1)).all()
    a.check_guards(raw())


@pytest.mark.parametrize("name", [name for name, _, shape in REGIONS if 0 not in shape])
@pytest.mark.parametrize("side", ["before", "behind"])
def test_a_write_outside_a_region_is_told_with_its_place(name, side):
    a = arena(REGIONS)
    t = torch.from_dlpack(a.tensor(name, raw()))
    flat = t.view(torch.uint8) if t.dim() == 1 else t.view(-1).view(torch.uint8)
    size = flat.numel()
    at = size if side == "behind" else -1

    class Claim:  # the byte beside the region, which no tensor of torch would reach
        __cuda_array_interface__: ClassVar = {
            "shape": (1,),
            "typestr": "|u1",
            "data": (flat.data_ptr() + at, False),
            "version": 3,
        }

    torch.as_tensor(Claim(), device=CUDA).fill_(7)
    with pytest.raises(specrs.OutOfBoundsError) as e:
        a.check_guards(raw())
    order = [n for n, _, _ in REGIONS]
    if side == "behind":
        assert (e.value.buffer, e.value.index, e.value.bound) == (name, size, size)
    else:
        before = order.index(name) - 1
        want = "the arena's first guard" if before < 0 else order[before]
        assert e.value.buffer == want and e.value.index >= e.value.bound


def test_what_cannot_be_declared_is_refused_and_what_does_not_fit_says_so():
    for text, regions in [
        ("arena region = a: a region of this name", [("a", "int32", [1]), ("a", "int32", [1])]),
        ("dtype = complex64", [("a", "complex64", [1])]),
        ("does not fit int64", [("a", "int64", [2**40, 2**40])]),
        ("dimension = -1", [("a", "int64", [-1])]),
    ]:
        with pytest.raises(specrs.ConfigError, match=text):
            arena(regions)
    _, total, _, owned = core._device_memory(ORDINAL)
    with pytest.raises(specrs.DeviceMemoryError, match="the arena") as e:
        arena([("small", "uint8", [10]), ("large", "uint8", [total])])
    assert e.value.device == ORDINAL and e.value.need >= total > e.value.have
    assert "large " in e.value.hint and isinstance(e.value, MemoryError)
    assert core._device_memory(ORDINAL)[3] == owned, "nothing was allocated"
    a = arena([("a", "int32", [4])])
    with pytest.raises(specrs.ConfigError, match="arena region = b: the regions are"):
        a.tensor("b", raw())


def test_dlpack_says_what_it_cannot_do():
    a = arena([("a", "int32", [4])])
    t = a.tensor("a", raw())
    assert t.__dlpack_device__() == (2, ORDINAL)
    for kwargs in ({"stream": 0}, {"stream": -2}, {"copy": True, "stream": 1}, {"dl_device": (1, 0), "stream": 1}):
        with pytest.raises(BufferError):
            t.__dlpack__(**kwargs)
    for kwargs in ({"stream": None}, {"stream": 1}, {"stream": -1}, {"max_version": (1, 0)}):
        t.__dlpack__(**kwargs)  # dropped unused


def test_the_per_thread_default_stream_is_refused_wherever_work_would_have_to_be_followed():
    # Dropped on another thread, a loan to it gave its memory back while the first thread's work ran.
    a = arena([("a", "int32", [4])])
    t = a.tensor("a", raw())
    with pytest.raises(BufferError, match=r"stream = 2: the per-thread default stream .*torch\.cuda\.Stream"):
        t.__dlpack__(stream=2)
    ids = torch.zeros(3, dtype=torch.int32, device=CUDA)
    table, out = (torch.zeros(3, 8, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    for call in (
        lambda: a.tensor("a", 2),
        lambda: a.poison(2),
        lambda: core._device_embed(table, ids, None, out, 2),
    ):
        with pytest.raises(specrs.ConfigError, match="stream = 2: the per-thread default stream"):
            call()
    core._device_embed(table, ids, None, out, 1)  # the legacy default stream by its other name


def test_a_loan_of_the_legacy_stream_ends_behind_its_work_on_whichever_thread():
    size = 64 << 20
    a = arena([("a", "uint8", [size])])
    with torch.cuda.stream(torch.cuda.default_stream()):
        t = torch.from_dlpack(a.tensor("a", raw()))
        torch.cuda._sleep(LONG)
        t.fill_(1)
        done = torch.cuda.Event()
        done.record()
    box = [t]
    del a, t
    gc.collect()
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    freed = core._device_collect(ORDINAL)
    assert done.query() or freed == 0, "memory went back under running work"
    torch.cuda.synchronize()
    assert core._device_collect(ORDINAL) + freed >= size


def test_a_consumers_stream_waits_for_the_writers():
    a = arena([("a", "float32", [1 << 20])])
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(writer):
        t = torch.from_dlpack(a.tensor("a", raw(writer)))
        t.zero_()
        torch.cuda._sleep(LONG)
        t.fill_(3)
    with torch.cuda.stream(reader):
        seen = torch.from_dlpack(a.tensor("a", raw(writer))).clone()
    reader.synchronize()
    assert (seen == 3).all()
    # Without the order that the export asks for, the reader is too early: this machine can show the difference.
    with torch.cuda.stream(writer):
        torch.cuda._sleep(LONG)
        t.fill_(4)
    with torch.cuda.stream(reader):
        early = t.clone()
    reader.synchronize()
    assert (early == 3).all()
    torch.cuda.synchronize()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_memory_goes_back_behind_its_last_use(elsewhere):
    size = 64 << 20
    a = arena([("a", "uint8", [size])])
    held = core._device_memory(ORDINAL)[2]
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        t = torch.from_dlpack(a.tensor("a", raw(side)))
        torch.cuda._sleep(LONG)
        t.fill_(1)
        done.record()
    del a  # the tensor keeps the arena
    gc.collect()
    assert core._device_memory(ORDINAL)[2] == held
    box = [t]
    del t
    if elsewhere:  # the deleter runs on a thread that has no context
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
    else:
        box.clear()
    assert not done.query(), "dropping waited"
    assert core._device_memory(ORDINAL)[2] >= held + size
    core._device_collect(ORDINAL)
    assert not done.query(), "collecting waited"
    assert core._device_memory(ORDINAL)[2] >= held + size, "freed under work in flight"
    other = arena([("b", "uint8", [size])])  # an allocation is no reason to wait, either
    assert not done.query() and core._device_memory(ORDINAL)[2] >= held + size
    done.synchronize()
    owned = core._device_memory(ORDINAL)[3]
    assert core._device_collect(ORDINAL) >= size
    assert core._device_memory(ORDINAL)[2] == held
    assert core._device_memory(ORDINAL)[3] <= owned - size
    del other


def test_many_arenas_do_not_grow_memory():
    sizes = [1 << 20, 3 << 20, 7 << 20]
    start = core._device_memory(ORDINAL)[3]
    for i in range(30):
        a = arena([("a", "uint8", [sizes[i % 3]])])
        torch.from_dlpack(a.tensor("a", raw())).fill_(i)
        torch.cuda.synchronize()
        # The last one, and the one before, which was dropped after this one's allocation had looked.
        assert core._device_memory(ORDINAL)[3] - start <= 2 * max(sizes) + 4096
    del a


def test_memory_in_a_captured_graph_stays():
    """No event says when a graph's last replay is over: the memory stays for the process, and replays are safe."""
    a = arena([("a", "float32", [1 << 20])])
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    out = torch.zeros(1 << 20, device=CUDA)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        t = torch.from_dlpack(a.tensor("a", raw(side)))
        out.copy_(t)
        del t  # the last use that is told is in the capture
    # The arena itself keeps the memory; what is tested here is that a loan dropped in a capture does not break it.
    torch.from_dlpack(a.tensor("a", raw())).fill_(5)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 5).all()
    held = core._device_memory(ORDINAL)[2]
    del a
    gc.collect()
    core._device_collect(ORDINAL)
    kept = core._device_memory(ORDINAL)[2] - held
    assert kept >= 4 << 20, "a replay may follow"
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 5).all()
    graph.reset()
    assert core._device_collect_captured(ORDINAL) >= 4 << 20
    assert core._device_memory(ORDINAL)[2] == held


def test_a_budget_is_a_table_and_a_refusal_says_what_fits():
    lines = [("weights", 16 << 30), ("workspace", 1 << 20)]
    free, total, _, _ = core._device_memory(ORDINAL)
    text = core._device_budget(lines, ("KV pool", "num_pages", 1 << 20, 100, 8), have=total * 4)
    assert len(text.splitlines()) == 4 and "KV pool, 100 num_pages of 1048576" in text
    with pytest.raises(specrs.DeviceMemoryError) as e:
        core._device_budget([], ("KV pool", "num_pages", 1 << 20, 10**9, 8), have=free, ordinal=ORDINAL)
    fits = int(e.value.hint.split("num_pages = ")[1].split()[0])
    assert fits == free // (1 << 20)
    assert core._device_budget([], ("KV pool", "num_pages", 1 << 20, fits, 8), have=free)


# The page table's mirror


def same(mirror, stream=None):
    host, versions = mirror.host()
    assert mirror.read(raw(stream)) == host
    assert mirror.versions() == versions


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_a_mirror_follows_random_operations_of_the_pool(page_size, seed):
    rng = random.Random(seed * 10 + page_size)
    pool = core.Pool(400, page_size, 9, 40)
    stream = torch.cuda.Stream() if seed % 2 else torch.cuda.current_stream()
    mirror = core._DeviceTable(pool, ORDINAL, raw(stream))
    late = core._DeviceTable(pool, ORDINAL, raw(stream))  # looks rarely, so that the log does not always reach back
    live, leases, stored = [], [], 0
    for step in range(300):
        choice = rng.random()
        try:
            if choice < 0.2:
                live.append(pool.create())
            elif choice < 0.3 and live:
                source = rng.choice(live)
                live.append(pool.fork(source, rng.randint(0, pool.committed(source))))
            elif choice < 0.65 and live:
                idle = [s for s in live if all(s not in taken for _, taken in leases)]
                some = rng.sample(idle, rng.randint(0, min(3, len(idle))))
                if some:
                    wants = [(s, min(40 * page_size, pool.committed(s) + rng.randint(1, 30))) for s in some]
                    leases.append((pool.reserve(wants), some))
            elif choice < 0.8 and leases:
                lease, some = leases.pop(rng.randrange(len(leases)))
                if page_size == 1:
                    for s in some:
                        first, n = pool.committed(s), pool.allocated(s) - pool.committed(s)
                        if n > 1 and rng.random() < 0.7:
                            lease.remap(s, first, rng.sample(range(n), rng.randint(1, n)))
                if rng.random() < 0.6:
                    lease.commit([rng.randint(pool.committed(s), pool.allocated(s)) for s in some])
                else:
                    lease.rollback()
            elif choice < 0.9 and live:
                idle = [s for s in live if all(s not in taken for _, taken in leases)]
                if idle:
                    gone = rng.choice(idle)
                    live.remove(gone)
                    pool.release([gone])
        except specrs.PoolExhaustedError:
            pass
        if rng.random() < 0.5:
            stored += mirror.upload(raw(stream))[0]
            if rng.random() < 0.3:
                same(mirror, stream)
        if step % 90 == 89:
            late.upload(raw(stream))
            same(late, stream)
    stored += mirror.upload(raw(stream))[0]
    same(mirror, stream)
    late.upload(raw(stream))
    same(late, stream)
    assert stored > 100
    assert mirror.upload(raw(stream)) == (0, 0, 0, False), "nothing changed, nothing is launched"
    for lease, _ in leases:
        lease.rollback()


def test_uploads_wait_for_no_kernel_until_the_ring_is_full_and_come_in_order():
    pool = core.Pool(5000, 1, 4, 1024)
    stream = torch.cuda.Stream()
    mirror = core._DeviceTable(pool, ORDINAL, raw(stream))
    seq = pool.create()
    done = torch.cuda.Event()
    mirror.upload(raw(stream))
    stream.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        done.record()
    waits = []
    for i in range(1, 5):
        with pool.reserve([(seq, 100 * i)]) as lease:
            lease.commit([100 * i])
        waits.append(mirror.upload(raw(stream))[2])
    assert waits == [0, 0, 0, 0] and not done.query(), "an upload waited"
    with pool.reserve([(seq, 500)]) as lease:
        lease.commit([500])
    assert mirror.upload(raw(stream))[2] == 1, "the ring has four slots"
    assert done.query()
    same(mirror, stream)


def test_a_change_longer_than_a_slot_is_stored_in_parts():
    pool = core.Pool(70_000, 1, 1, 60_000)
    mirror = core._DeviceTable(pool, ORDINAL, raw())
    seq = pool.create()
    with pool.reserve([(seq, 60_000)]) as lease:
        lease.commit([60_000])
    columns, launches, _, _ = mirror.upload(raw())
    assert columns == 60_000 and launches >= 1
    same(mirror)


def test_rows_that_a_round_permutes_are_left_to_it():
    pool = core.Pool(100, 1, 4, 32)
    mirror = core._DeviceTable(pool, ORDINAL, raw())
    seqs = [pool.create() for _ in range(2)]
    lease = pool.reserve([(s, 10) for s in seqs])
    assert mirror.upload(raw(), [0]) == (0, 0, 0, True), "whole rows wait for rounds that permute"
    mirror.upload(raw())
    before = mirror.read(raw())
    for s in seqs:
        lease.remap(s, 0, [3, 1, 2, 0])
    columns, launches, _, rounds_first = mirror.upload(raw(), [seqs[0].row])
    assert 4 <= columns <= 10 and (launches, rounds_first) == (1, False)
    after, (host, _) = mirror.read(raw()), mirror.host()
    mine, theirs = seqs[0].row * 32, seqs[1].row * 32
    assert after[mine : mine + 32] == before[mine : mine + 32] != host[mine : mine + 32]
    assert after[theirs : theirs + 32] == host[theirs : theirs + 32]
    lease.rollback()


def test_pools_do_not_mix():
    pool, other = core.Pool(100, 1, 4, 32), core.Pool(100, 1, 4, 32)
    mirror = core._DeviceTable(pool, ORDINAL, raw())
    mirror.upload(raw())
    assert core._DeviceTable(other, ORDINAL, raw()).upload(raw())[3] is False


HEADS = {"row": 0, "first": 1, "count": 2, "begin": 3}


@pytest.mark.parametrize(
    ("field", "bad", "buffer", "index", "bound"),
    [
        ("row", 4, "rows of the page table", 4, 4),
        ("row", -1, "rows of the page table", -1, 4),
        ("row", I32_MIN, "rows of the page table", I32_MIN, 4),
        ("first", -1, "row of the page table", -1, 8),
        ("first", 6, "row of the page table", 8, 8),
        ("first", I32_MAX, "row of the page table", I32_MAX + 2, 8),
        ("count", 9, "row of the page table", 8 + 2, 8),
        ("count", -1, "row of the page table", -1, 8),
        ("begin", -1, "staged page ids", -1, 20),
        ("begin", 18, "staged page ids", 20, 20),
        ("begin", I32_MAX, "staged page ids", I32_MAX + 2, 20),
        ("page", 50, "pages", 50, 50),
        ("page", -1, "pages", -1, 50),
        ("page", I32_MAX, "pages", I32_MAX, 50),
    ],
)
def test_a_bad_index_is_left_out_and_recorded(field, bad, buffer, index, bound):
    rows, width = 4, 8
    flat = torch.full((rows * width + 64,), -7, dtype=torch.int32, device=CUDA)
    table = flat[32 : 32 + rows * width]
    # Two changes of three columns each; the second one is broken. Ids from word 8 on.
    heads = [[1, 2, 3, 8], [2, 2, 3, 11]]
    ids = [11, 12, 13, 21, 22, 23, 0, 0, 0, 0, 0, 0]
    want = torch.full((rows, width), -7, dtype=torch.int32)
    want[1, 2:5] = torch.tensor([11, 12, 13])
    row, step = 2, 1
    if field == "page":
        ids[4] = bad
        want[2, 2], want[2, 4], step = 21, 23, 3  # the column
    else:
        heads[1][HEADS[field]] = bad
        row = bad if field == "row" else 2
    staged = torch.tensor([*heads[0], *heads[1], *ids], dtype=torch.int32, device=CUDA)
    core._device_table_update(table, rows, width, 50, staged, 2, raw())
    torch.cuda.synchronize()
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    fields = (e.value.kernel, e.value.buffer, e.value.request, e.value.step, e.value.index, e.value.bound)
    assert fields == ("table_update", buffer, row, step, index, bound)
    assert torch.equal(table.cpu().view(rows, width), want)
    assert (flat[:32] == -7).all() and (flat[32 + rows * width :] == -7).all()


def test_launches_whose_capacities_do_not_fit_are_refused():
    table = torch.zeros(32, dtype=torch.int32, device=CUDA)
    staged = torch.zeros(8, dtype=torch.int32, device=CUDA)
    for text, call in [
        ("table: need 40", lambda: core._device_table_update(table, 5, 8, 9, staged, 1, raw())),
        ("staged: need 12", lambda: core._device_table_update(table, 4, 8, 9, staged, 3, raw())),
        ("table: got memory that staged uses too", lambda: core._device_table_update(table, 1, 8, 9, table, 1, raw())),
        ("table rows = 2147483648", lambda: core._device_table_update(table, 2**31, 8, 9, staged, 1, raw())),
    ]:
        with pytest.raises(specrs.ConfigError, match=text):
            call()
    core._device_table_update(table, 4, 8, 9, staged, 0, raw())
