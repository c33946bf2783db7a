"""The hook on CUDA's calls sees what torch and specrs do; without CUPTI these tests fail, and say why."""

from __future__ import annotations

import threading

import pytest
import torch

from specrs import _specrs as core
from specrs import device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

from driver_calls import driver_calls
from gpu_world import CUDA
from specrs.operands import RoundFound, SeatLimits, SeatState


def test_it_sees_torch_wait():
    one = torch.ones(1, device=CUDA)
    one.item()
    stream = torch.cuda.current_stream()
    for what, wait in {
        "item": one.item,
        "stream.synchronize": stream.synchronize,
        "torch.cuda.synchronize": torch.cuda.synchronize,
        "tolist": one.tolist,
        "cpu": one.cpu,
    }.items():
        with driver_calls() as seen:
            wait()
        assert seen.synchronisations.total() >= 1, f"{what}: {seen}"


def test_it_sees_specrs_wait_and_call():
    ordinal = torch.cuda.current_device()
    arena = core._DeviceArena(ordinal, [("a", "int32", [64])], True)
    stream = torch.cuda.Stream()
    arena.poison(stream.cuda_stream)
    with driver_calls() as seen:
        arena.poison(stream.cuda_stream)
    assert not seen.synchronisations and seen.calls["cuMemsetD8Async"] >= 1, seen
    with driver_calls() as seen:
        arena.check_guards(stream.cuda_stream)  # reads the guards back
    assert seen.synchronisations["cuEventSynchronize"] >= 1, seen


def test_launches_and_asynchronous_copies_are_no_waits():
    one = torch.ones(1000, device=CUDA)
    pinned = torch.empty(1000, pin_memory=True)
    out = torch.empty_like(one)
    torch.add(one, 1, out=out)
    pinned.copy_(one, non_blocking=True)
    torch.cuda.synchronize()
    with driver_calls() as seen:
        torch.add(one, 1, out=out)
        pinned.copy_(out, non_blocking=True)
        torch.cuda.current_stream().query()
    assert not seen.synchronisations, seen
    assert (seen.calls + seen.runtime).total() >= 3, seen
    torch.cuda.synchronize()
    assert bool((pinned == 2).all())


def test_it_sees_other_threads_and_ends():
    def work():
        torch.ones(1, device=CUDA).item()

    work()
    with driver_calls() as seen:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen.synchronisations.total() >= 1, seen
    before = seen.calls + seen.runtime
    work()
    assert seen.calls + seen.runtime == before


def test_a_ring_tells_the_host_without_a_wait():
    """A round is launched, waited for and read, and the driver is not asked to wait."""
    ordinal, batch, words = torch.cuda.current_device(), 2, 100
    ring = core._RoundRing(ordinal, 4, batch, words)
    slots = torch.from_dlpack(ring.tensor())
    of = lambda *values: torch.tensor(values, dtype=torch.int32, device=CUDA)  # noqa: E731
    offsets, tokens, new_lens = of(0, 1, 2), of(5, 6), of(11, 21)
    accepts = RoundFound(
        offsets=offsets, tokens=tokens, new_lens=new_lens, roots=tokens.clone(), faults=of(0, 0), sound=of(1, 1),
        live=of(2),
    )  # fmt: skip
    limits = SeatLimits(limits=of(99, 99), caps=of(3, 3), stops=of(-1, -1), stop_counts=of(0, 0))
    state = SeatState(lens=of(10, 20), roots=of(1, 2), depths=of(0, 0), done=of(0, 0))
    control, found = of(0, 0, 0, 0), torch.arange(words, dtype=torch.int32, device=CUDA)
    stream = torch.cuda.current_stream().cuda_stream

    def launch():
        core._device_round_end(
            ring, accepts=accepts, limits=limits, state=state, control=control, found=found, handle=0, stream=stream
        )

    launch()
    ring.wait(0, stream)
    new_lens.add_(1)
    with driver_calls() as seen:
        launch()
        ring.wait(1, stream)
        row = slots[ring.slot(1)].clone()
        ring.check(1)
    assert not seen.synchronisations, seen
    assert seen.calls["cuLaunchKernelEx"] == 1, seen
    assert row[ring.lens_at :][:batch].tolist() == [11, 21] and int(row[ring.exit]) == 0
