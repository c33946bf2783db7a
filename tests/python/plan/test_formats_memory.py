"""The memory of the formats' arrays: without a copy, in place, never stale, given back once."""

from __future__ import annotations

import ctypes
import gc
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dlpack_ctypes import Legacy, Producer, Versioned
from formats_world import (
    FORMATS,
    LARGEST,
    LISTS,
    PHASES,
    Caller,
    Format,
    Phase,
    World,
    values,
)
from specrs import _specrs as core

# --- without a copy


@pytest.mark.parametrize("format", FORMATS)
def test_rounds_allocate_nothing(format: Format) -> None:
    w = World(format)
    for phase in PHASES:
        seen: set[tuple[int, ...]] = set()
        for _ in range(20):
            plan = w.plan(phase)
            first = [torch.from_dlpack(a).data_ptr() for a in plan.arrays().values()]
            assert first == [torch.from_dlpack(a).data_ptr() for a in plan.arrays().values()]
            seen.add(tuple(first))
            del plan
        assert len(seen) == 1, phase


@pytest.mark.parametrize("format", FORMATS)
def test_views_keep_a_plans_memory(format: Format) -> None:
    w = World(format)
    plan = w.plan("verify")
    want = values(plan)
    views = {n: torch.from_dlpack(a) for n, a in plan.arrays().items()}
    copies = {n: torch.from_dlpack(a).clone() for n, a in plan.arrays().items()}
    indices = "page_table" if format == "flash_attention" else "kv_indices"
    array = plan.arrays()[indices]
    del plan
    later = w.plan("verify", shorter=1)  # would write into the same memory if it were free
    assert values(later) != want
    assert {torch.from_dlpack(a).data_ptr() for a in later.arrays().values()}.isdisjoint(
        v.data_ptr() for v in views.values()
    )
    del later, w
    gc.collect()
    _ = [torch.zeros(4096, dtype=torch.int32) for _ in range(100)]  # would reuse freed memory
    assert all(torch.equal(v, copies[n]) for n, v in views.items())
    assert array.tolist() == want[indices]


def test_memory_returns_once_its_views_are_gone() -> None:
    w = World("flashinfer")
    view = torch.from_dlpack(w.plan("decode").arrays()["kv_indices"])
    held = view.data_ptr()
    other = torch.from_dlpack(w.plan("decode").arrays()["kv_indices"]).data_ptr()
    assert other != held
    box = [view]
    del view
    dropped = threading.Thread(target=box.clear)  # the deleter runs on another thread
    dropped.start()
    dropped.join()
    pointers = {torch.from_dlpack(w.plan("decode").arrays()["kv_indices"]).data_ptr() for _ in range(4)}
    assert pointers == {held, other}


def test_a_plans_arrays_are_read_only_where_a_library_knows_of_it() -> None:
    w = World("flashinfer")
    plan = w.plan("decode")
    array = np.from_dlpack(plan.arrays()["kv_indptr"])
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(core.ConfigError, match="read-only"):
        w.planner.buffers("decode", tensors=plan.arrays())
    assert np.from_dlpack(w.plan("decode", out=w.planner.buffers("decode")).arrays()["kv_indptr"]).flags.writeable


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_copies_are_detached(version: tuple[int, int] | None) -> None:
    w = World("flashinfer")
    buffers = w.planner.buffers("decode")
    for array in [
        w.plan("decode").arrays()["kv_indices"],
        w.plan("decode", out=buffers).arrays()["kv_indices"],
    ]:
        want = array.tolist()
        copy = torch.utils.dlpack.from_dlpack(array.__dlpack__(copy=True, max_version=version))
        copy.fill_(-1)
        assert array.tolist() == want != copy.tolist()


@pytest.mark.parametrize("debug", [False, True])
def test_a_debug_planner_poisons_what_it_is_lent(debug: bool) -> None:
    """A lowering that stops half-way (historical fault 27360, put back) leaves poison where it has not been yet."""
    w = World("flash_attention", layout="holey", lens=[4, 3], reverts=[27360])
    w.planner.set_debug(debug)
    caller = Caller(w.planner, "draft", step=0)
    t = caller.tensors
    buffers = w.planner.buffers("draft", 0, tensors=t)
    with pytest.raises(core.ConfigError, match="columns of request 1, query 0: flash_attention draft step 0") as e:
        w.planner.draft(w.seqs, w.lens, 0, None, "lane", out=buffers)
    assert (e.value.kind, e.value.what, e.value.need, e.value.have) == ("Capacity", "expand_page_table", 2, 1)
    poison = -(2**31) + 0xBAD
    seen = {name: int(torch.count_nonzero(tensor == poison)) for name, tensor in t.items()}
    assert seen["cache_seqlens"] == seen["page_table"] == 0  # the first pass is whole
    assert (seen["expand_cache_seqlens"] > 0) == (seen["expand_page_table"] > 0) == debug
    # A line is touched as far as the plan asked for; a table in every row.
    assert not torch.any(t["expand_cache_seqlens"][4:] == poison)
    caller.check_canaries()


@pytest.mark.parametrize("given", [False, True])
def test_memory_has_one_writer(given: bool) -> None:
    """Neither a caller's tensors nor specrs's own static memory can be lent to two buffers."""
    w = World("flashinfer")
    tensors: Any = Caller(w.planner, "verify").tensors if given else None
    buffers = w.planner.buffers("verify", tensors=tensors)
    own = buffers.tensors()
    for again in (own, {n: torch.from_dlpack(a) for n, a in own.items()}):
        with pytest.raises(core.ConfigError, match="kv_indptr: got memory that other buffers write"):
            w.planner.buffers("verify", tensors=again)
    del buffers, own, again
    gc.collect()
    w.planner.buffers("verify", tensors=tensors)


def grow_torch(t: torch.Tensor) -> None:
    t.resize_(100 * t.numel())


def grow_storage(t: torch.Tensor) -> None:
    t.untyped_storage().resize_(0)


def grow_numpy(a: Any) -> None:
    a.resize(100 * a.size, refcheck=False)


@pytest.mark.parametrize("grow", [grow_torch, grow_storage, grow_numpy])
def test_a_tensor_that_was_resized_is_not_written(grow: Callable[[Any], None]) -> None:
    """Resizing frees memory whoever else holds it: it is asked for again before each use."""
    w = World("flashinfer")
    kind = np if grow is grow_numpy else torch
    tensors: Any = {
        n: kind.zeros(c["shape"], dtype=getattr(kind, "bool_" if (kind, c["dtype"]) == (np, "bool") else c["dtype"]))
        for n, c in w.planner.capacities("decode").items()
    }
    buffers = w.planner.buffers("decode", tensors=tensors)
    plan = w.plan("decode", out=buffers)
    grow(tensors["kv_indices"])
    for use in (lambda: w.plan("decode", out=buffers), plan.arrays, buffers.tensors):
        with pytest.raises(core.ConfigError, match=r"kv_indices: .*(resized|null pointer)"):
            use()
    assert buffers.generation == 1


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("format", FORMATS)
def test_static_arrays_are_true_whatever_others_wrote(format: Format, phase: Phase, given: bool) -> None:
    """Between two writes the memory is anybody's: each element of the plan's shapes is written again."""
    w = World(format)
    w.planner.set_debug(False)
    caller = Caller(w.planner, phase, grow=3)
    buffers = w.planner.buffers(phase, tensors=caller.tensors if given else None)
    whole = {n: torch.from_dlpack(a) for n, a in buffers.tensors().items()}
    for pattern in (b"\xff\xff\xff\xff", np.float32(np.nan).tobytes()):
        for shorter, pad in [(0, LARGEST[phase]), (2, LARGEST[phase]), (0, None), (2, None), (0, LARGEST[phase])]:
            for t in whole.values():
                block = t.view(-1).view(torch.uint8)
                block.copy_(torch.tensor(list(pattern), dtype=torch.uint8).repeat(len(block) // 4 + 1)[: len(block)])
            plan = w.plan(phase, shorter=shorter, out=buffers, pad=pad)
            assert values(plan) == values(w.plan(phase, shorter=shorter, pad=pad))
    caller.check_canaries()


# --- staleness


@pytest.mark.parametrize("given", [False, True])
def test_views_of_an_earlier_write_are_refused(given: bool) -> None:
    w = World("triton")
    tensors = Caller(w.planner, "verify").tensors if given else None
    buffers = w.planner.buffers("verify", tensors=tensors)
    assert buffers.generation == 0
    first = w.plan("verify", out=buffers)
    arrays = first.arrays()
    assert arrays["kv_indptr"].tolist() == [0, 5, 8]
    assert buffers.generation == 1
    second = w.plan("verify", shorter=1, out=buffers)
    assert buffers.generation == 2
    reads: list[Callable[[], object]] = [first.arrays]
    for a in arrays.values():
        reads += [a.tolist, a.__dlpack__, a.__repr__, lambda a=a: core.as_array(a), lambda a=a: torch.from_dlpack(a)]
    for read in reads:
        with pytest.raises(core.StaleOutputError, match=r"holds write 1 .*write 2") as e:
            read()
        assert (e.value.kind, e.value.held, e.value.current) == ("StaleOutput", 1, 2)
        assert "triton" in e.value.what and "verify" in e.value.what
    with pytest.raises(core.StaleOutputError, match="kv_indptr of triton buffers for verify"):
        arrays["kv_indptr"].tolist()
    assert arrays["kv_indptr"].shape == (3,)  # no memory is read
    assert second.arrays()["kv_indptr"].tolist() == [0, 4, 6]
    # The rest of a stale plan is its own.
    assert first.prefix_lens.tolist() == [5, 3]
    # Whole memory shows what was written last.
    assert buffers.tensors()["kv_indptr"].tolist()[:3] == [0, 4, 6]


def test_writers_and_readers_of_one_buffer_do_not_meet() -> None:
    w = World("flashinfer")
    w.planner.set_debug(False)
    buffers = w.planner.buffers("verify")
    want = [values(w.plan("verify", shorter=s)) for s in range(3)]
    wrong: list[Any] = []
    fresh = [0]

    def work(shorter: int) -> None:
        for _ in range(300):
            plan = w.plan("verify", shorter=shorter, out=buffers)
            try:
                got = {n: a.tolist() for n, a in plan.arrays().items()}
            except core.StaleOutputError:
                continue
            fresh[0] += 1
            if got != want[shorter]:
                wrong.append(got)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert fresh[0] > 0
    assert buffers.generation == 900


# --- lifetimes


def ready(planner: core.Planner) -> dict[str, Producer]:
    """A lent tensor for each array of a decode, which counts the calls of its deleter."""
    return {
        n: Producer([0.0] * int(np.prod(c["shape"])), code=0)
        for n, c in planner.capacities("decode").items()
        if c["dtype"] == "int32"
    }


def test_lent_tensors_are_given_back_once() -> None:
    w = World("flashinfer")
    lent = ready(w.planner)
    buffers = w.planner.buffers("decode", tensors=lent)
    plan = w.plan("decode", out=buffers)
    view = torch.from_dlpack(plan.arrays()["kv_indices"])
    del buffers
    gc.collect()
    assert [p.deleted for p in lent.values()] == [0] * len(lent)
    assert values(plan) == values(w.plan("decode"))
    del plan
    gc.collect()
    # The view keeps its own array and no more than it must.
    assert lent["kv_indices"].deleted == 0
    assert view.tolist() == values(w.plan("decode"))["kv_indices"]
    del view
    gc.collect()
    assert [p.deleted for p in lent.values()] == [1] * len(lent)


def test_refused_tensors_are_given_back() -> None:
    w = World("flashinfer")
    lent = ready(w.planner)
    broken = {**lent, "kv_last_page_len": torch.zeros(1, dtype=torch.int32)}
    with pytest.raises(core.ConfigError, match="kv_last_page_len"):
        w.planner.buffers("decode", tensors=broken)
    gc.collect()
    assert [p.deleted for n, p in lent.items() if n != "kv_last_page_len"] == [1] * (len(lent) - 1)


def test_numpy_arrays_live_as_long_as_they_are_lent() -> None:
    class Owned(np.ndarray):
        """An array that can be watched."""

    w = World("flashinfer")
    arrays = {n: np.zeros(c["shape"], dtype=c["dtype"]).view(Owned) for n, c in w.planner.capacities("decode").items()}
    alive = [weakref.ref(a) for a in arrays.values()]
    buffers = w.planner.buffers("decode", tensors=arrays)
    del arrays
    gc.collect()
    assert all(a() is not None for a in alive)
    views = w.plan("decode", out=buffers).arrays()
    want = values(w.plan("decode"))
    del buffers
    gc.collect()
    assert {n: a.tolist() for n, a in views.items()} == want
    del views
    gc.collect()
    assert all(a() is None for a in alive)


def test_whole_memory_outlives_its_buffers() -> None:
    w = World("flashinfer")
    buffers = w.planner.buffers("decode")
    whole = torch.from_dlpack(buffers.tensors()["kv_indices"])
    plan = w.plan("decode", out=buffers)
    want = values(plan)["kv_indices"]
    assert whole.tolist()[: len(want)] == want
    assert whole.shape == w.planner.capacities("decode")["kv_indices"]["shape"]
    assert whole.data_ptr() % 64 == 0
    del plan, buffers, w
    gc.collect()
    assert whole.tolist()[: len(want)] == want
    whole.fill_(1)


def released_without_the_gil(array: core.Array, dtype: str = "dltensor_versioned") -> Callable[[], None]:
    """Return a function that calls the deleter of a consumed capsule as a library would that has let the GIL go."""
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
    versioned = dtype == "dltensor_versioned"
    capsule = array.__dlpack__(max_version=(1, 0) if versioned else None)
    at = api.PyCapsule_GetPointer(capsule, dtype.encode())
    api.PyCapsule_SetName(capsule, USED[dtype])
    managed = (Versioned if versioned else Legacy).from_address(at)
    return lambda: ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(at)


USED = {"dltensor": b"used_dltensor", "dltensor_versioned": b"used_dltensor_versioned"}


@pytest.mark.parametrize("capsule", USED)
def test_deleters_run_without_the_gil(capsule: str) -> None:
    w = World("flashinfer")
    lent = ready(w.planner)
    buffers = w.planner.buffers("decode", tensors=lent)
    of_lent = released_without_the_gil(w.plan("decode", out=buffers).arrays()["kv_indices"], capsule)
    of_plan = released_without_the_gil(w.plan("decode").arrays()["kv_indices"], capsule)
    del buffers, w
    gc.collect()
    assert lent["kv_indices"].deleted == 0
    threads = [threading.Thread(target=f) for f in (of_lent, of_plan)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [p.deleted for p in lent.values()] == [1] * len(lent)


def test_static_memory_costs_what_is_written() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * resource.getpagesize()

    g = core.Geometry(64, 2**17, 1, core.TreeShape(4, 3, 5))
    pool = core.Pool(64, 1, 4, g.row_pages)
    planner = core.Planner(g, pool, "triton")
    before = resident()
    buffers = planner.buffers("draft")
    tensors = buffers.tensors()
    assert planner.capacities("draft")["kv_indices"]["bytes"] > 2**27
    assert resident() - before < 2**24
    assert torch.from_dlpack(tensors["kv_indices"])[:: 2**20].count_nonzero() == 0


def test_lists_that_int32_does_not_index_are_refused() -> None:
    g = core.Geometry(4096, 2**17, 1, core.TreeShape(4, 3, 5))
    pool = core.Pool(64, 1, 4, g.row_pages)
    assert core.Planner(g, pool, "native").buffers("verify").tensors() == {}
    for format in LISTS:
        with pytest.raises(core.ConfigError, match=r"kv_indices.*int32"):
            core.Planner(g, pool, format)


def test_static_memory_that_there_is_not_is_refused() -> None:
    code = """
import resource
from specrs import _specrs as core
g = core.Geometry(64, 2**17, 1, core.TreeShape(4, 3, 5))
planner = core.Planner(g, core.Pool(64, 1, 4, g.row_pages), "triton")
resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28))
try:
    planner.buffers("draft")
except core.ConfigError as e:
    print(e.kind, e.what, e.got)
planner.buffers("decode")
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == f"Invalid kv_indices {64 * 4 * 2**17 * 8} bytes\n"
