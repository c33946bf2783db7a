"""Fault records of their own: engines that share a GPU do not see each other's faults."""

from __future__ import annotations

import threading

import pytest
import torch

import specrs
from operands_world import named
from specrs import _specrs as core
from specrs import device
from specrs.operands import AcceptArrays, TreeArrays

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

CUDA = torch.device("cuda", torch.cuda.current_device())
SLOTS = 16

pytestmark = pytest.mark.usefixtures("no_fault_is_left")


def bad_move(index: int):
    """Operands of a move from a slot that is not there."""
    cache = torch.zeros(1, 2, SLOTS, 1, 8, device=CUDA)
    return (cache, *(torch.tensor(v, dtype=torch.int32, device=CUDA) for v in ([index], [1], [0, 1])))


def handle() -> int:
    return torch.cuda.current_stream().cuda_stream


def found(faults) -> int:
    torch.cuda.synchronize()
    with pytest.raises(specrs.OutOfBoundsError) as e:
        faults.check()
    faults.check()  # reported once
    assert (e.value.kernel, e.value.bound) == ("kv_move", SLOTS)
    return e.value.index


def test_each_record_has_its_own_faults_and_the_devices_has_the_rest():
    first, second = device.faults(), device.faults(CUDA)
    for _ in range(3):
        core._device_kv_move(*bad_move(100), first.on(handle()))
        core._device_kv_move(*bad_move(101), first.on(handle()))  # lost: the first is kept
        torch.cuda.synchronize()
        second.check()
        device.check()
        core._device_kv_move(*bad_move(200), second.on(handle()))
        device.kv_move(*bad_move(300))
        assert found(first) == 100
        assert found(second) == 200
        assert found(device) == 300


def nan_scores(faults) -> None:
    """Verification of one root whose logits are NaN."""

    def i32(*values):
        return torch.tensor(values, dtype=torch.int32, device=CUDA)

    accepts = named(AcceptArrays, (i32(0, 0), *(i32(0) for _ in range(6))))
    trees = TreeArrays(tokens=i32(5), parents=i32(-1), offsets=i32(0, 1))
    scratch = torch.zeros(core._device_verify_scratch(1, 1, 1), dtype=torch.int64, device=CUDA)
    logits = torch.full((1, 64), float("nan"), device=CUDA)
    core._device_verify_greedy(
        logits=logits, trees=trees, lens=i32(9), live=None, max_nodes=1, max_path=1, accepts=accepts, scratch=scratch,
        full=False, stream=faults.on(handle()),
    )  # fmt: skip


def test_scores_that_are_no_numbers_hide_no_access():
    mine = device.faults()
    for first in (True, False):
        if first:
            nan_scores(mine)
        core._device_kv_move(*bad_move(77), mine.on(handle()))
        nan_scores(mine)
        assert found(mine) == 77  # the probe is found with it
    nan_scores(mine)
    torch.cuda.synchronize()
    with pytest.raises(specrs.NonFiniteError) as e:
        mine.check()
    assert (e.value.what, e.value.value, e.value.position) == ("target logits", "NaN", 10)
    mine.check()


def test_a_graph_reports_where_it_was_captured_to():
    mine, other = device.faults(), device.faults()
    operands = bad_move(50)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        core._device_kv_move(*operands, mine.on(handle()))
    for bad in (60, 70):
        operands[1].fill_(bad)
        graph.replay()
        assert found(mine) == bad
        other.check()
        device.check()
    operands[1].fill_(0)
    graph.replay()
    torch.cuda.synchronize()
    mine.check()


def test_the_record_of_a_graph_outlives_its_name():
    """A graph may report to it at any later time."""
    operands = bad_move(50)
    graph = torch.cuda.CUDAGraph()
    mine = device.faults()
    with torch.cuda.graph(graph):
        core._device_kv_move(*operands, mine.on(handle()))
    del mine
    later = [device.faults() for _ in range(20)]
    graph.replay()
    torch.cuda.synchronize()
    for record in later:
        record.check()


def test_threads_with_records_of_their_own_meet_their_own_faults():
    wrong: list[str] = []

    def engine(number: int) -> None:
        try:
            stream = torch.cuda.Stream()
            mine = device.faults(CUDA)
            with torch.cuda.stream(stream):
                operands = bad_move(0)
                for i in range(100):
                    bad = number * 1000 + i + SLOTS
                    operands[1].fill_(bad)
                    core._device_kv_move(*operands, mine.on(stream.cuda_stream))
                    stream.synchronize()
                    try:
                        mine.check()
                        wrong.append(f"{bad}: nothing")
                    except specrs.OutOfBoundsError as e:
                        if e.index != bad:
                            wrong.append(f"{bad}: {e.index}")
        except Exception as e:
            wrong.append(repr(e))

    threads = [threading.Thread(target=engine, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_every_kind_of_launch_takes_a_stream_that_reports():
    mine = device.faults()
    on = mine.on(handle())
    table = torch.zeros(4, 8, dtype=torch.bfloat16, device=CUDA)
    out = torch.empty(1, 8, dtype=torch.bfloat16, device=CUDA)
    core._device_embed(table, torch.tensor([9], dtype=torch.int32, device=CUDA), None, out, on)
    torch.cuda.synchronize()
    with pytest.raises(specrs.OutOfBoundsError) as e:
        mine.check()
    assert (e.value.kernel, e.value.index, e.value.bound) == ("embed", 9, 4)
    pool = core.Pool(8, 4, 2, 3)
    mirror = core._DeviceTable(pool, CUDA.index, on)
    with pool.reserve([(pool.create(), 9)]) as lease:
        lease.commit([9])
    mirror.upload(on)
    assert mirror.read(on) == mirror.host()[0]
    values = torch.empty(4, 8, dtype=torch.bfloat16, device=CUDA)
    core._device_fill(values, 1, 0, 0, on)
    assert bool(values.isfinite().all())
    mine.check()


def test_a_record_of_another_device_is_refused():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU in this machine")
    elsewhere = device.faults(1 - CUDA.index)
    with pytest.raises(specrs.ConfigError, match="fault record: got one of cuda:"):
        core._device_kv_move(*bad_move(50), elsewhere.on(handle()))


def test_a_stream_is_a_number_or_one_that_reports():
    with pytest.raises(TypeError):
        core._device_kv_move(*bad_move(0), "stream")
    with pytest.raises(specrs.ConfigError, match="stream"):
        device.faults().on(-1)
