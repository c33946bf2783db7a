"""The count of CUDA's calls: what counts as a wait of the host for the device."""

from __future__ import annotations

import pytest

from driver_calls import DRIVER, ENTER, EXIT, RUNTIME, DriverCalls, load


def call(name: str, *inner: tuple, thread: int = 1) -> list[tuple]:
    """Return enter and exit of a call, and the calls within."""
    domain = RUNTIME if name.startswith("cuda") else DRIVER
    return [(thread, domain, ENTER, name), *(e for events in inner for e in events), (thread, domain, EXIT, name)]


def counted(*calls: list[tuple]) -> DriverCalls:
    seen = DriverCalls()
    seen.add(e for events in calls for e in events)
    return seen


@pytest.mark.parametrize(
    "name",
    [
        "cuStreamSynchronize", "cuStreamSynchronize_ptsz", "cuCtxSynchronize_v2", "cuEventSynchronize",
        "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2_ptds", "cuMemcpy", "cuMemcpy2D_v2", "cuMemFree_v2", "cudaMemcpy",
        "cudaDeviceSynchronize", "cudaMemcpy_v3020",
    ],
)  # fmt: skip
def test_waits(name):
    assert counted(call(name)).synchronisations.total() == 1


@pytest.mark.parametrize(
    "name",
    [
        "cuStreamWaitValue32_v2", "cuStreamWaitEvent", "cuStreamQuery", "cuEventQuery", "cuMemcpyDtoHAsync_v2",
        "cuMemcpyBatchAsync", "cuMemcpyHtoDAsync_v2_ptsz", "cudaMemcpyAsync", "cuLaunchKernel", "cuMemFreeAsync",
        "cudaStreamWaitEvent", "cuGraphLaunch",
    ],
)  # fmt: skip
def test_what_does_not_wait(name):
    seen = counted(call(name))
    assert not seen.synchronisations and (seen.calls + seen.runtime).total() == 1


def test_a_wait_within_a_call_of_the_runtime_counts_once():
    both = counted(
        call("cudaStreamSynchronize", call("cuStreamSynchronize")),
        call("cudaMemcpyAsync", call("cuMemcpyDtoHAsync_v2")),
        call("cudaEventSynchronize"),
        call("cudaFree", call("cuMemFree_v2")),
    )
    assert both.synchronisations == {"cuStreamSynchronize": 1, "cudaEventSynchronize": 1, "cuMemFree": 1}
    assert both.runtime.total() == 4 and both.calls.total() == 3


def test_threads_are_told_apart_and_calls_under_way_are_left_out():
    first = call("cudaStreamSynchronize", thread=1)
    second = call("cuStreamSynchronize", thread=2)
    seen = counted([first[0], *second, first[1], *call("cudaMemcpy", thread=3)[1:]])
    assert seen.synchronisations == {"cuStreamSynchronize": 1, "cudaStreamSynchronize": 1}


def test_cupti_comes_with_torch():
    torch = pytest.importorskip("torch")
    if torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    assert load().cuptiSubscribe
