"""torch's work as a graph that keeps the memory that it needs.

torch captures into a graph of its own, whose private pool backs what the work allocates; the driver copies that graph
as a child into one of specrs, which keeps the pool alive until its last launch has finished.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specrs import _specrs as core
from specrs import device
from specrs._specrs import ConfigError


@functools.cache
def shared_stream(ordinal: int) -> torch.cuda.Stream:
    """Return the stream that all runtimes of a device capture on: torch keeps 32 MiB of workspace for each stream that
    saw a product."""
    return torch.cuda.Stream(ordinal)  # type: ignore[no-untyped-call]


def torch_graph(work: Callable[[], object], stream: torch.cuda.Stream, pool: Any = None) -> torch.cuda.CUDAGraph:
    """torch's graph of what `work` puts on its current stream, which is `stream` meanwhile; not instantiated."""
    try:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
    except TypeError:
        raise ConfigError(f"torch {torch.__version__}: 2.8 or later is needed to embed its graphs") from None
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph


def capture(
    work: Callable[[], object],
    *,
    keep: Sequence[object] = (),
    stream: torch.cuda.Stream | None = None,
    pool: Any = None,
) -> core._Graph:
    """Capture what `work()` puts on torch's current stream; `graph.launch(stream.cuda_stream)` runs it.

    Args:
        work: called once, with `stream` as torch's current one. It waits for nothing on the device, and takes no random
            numbers of torch's generators, whose states only torch's own replay moves. Run it once before, so that
            everything that loads at its first use is there.
        keep: objects that the graph's launches read and write beside torch's allocations within `work`: tensors,
            arenas, modules.
        stream: stream of the capture; another one by default. Graphs captured on one stream share the workspace that
            torch's cuBLAS has there: those with products never run at once.
        pool: a handle of torch's (``torch.cuda.graph_pool_handle()``) that graphs share which never run at once.

    Raises what `work` raises; GraphCaptureError where the driver refuses, or for a node that a child may not hold,
    which it names (with torch's ``cudaMallocAsync`` backend: allocations).
    """
    stream, ordinal = _stream(stream)
    inner = torch_graph(work, stream, pool)
    return core._Graph.capture(
        ordinal,
        stream.cuda_stream,
        lambda: core._graph_child(stream.cuda_stream, inner.raw_cuda_graph()),
        [inner, stream, work, *keep],
    )


def loop(
    work: Callable[[], object],
    left: torch.Tensor,
    *,
    stop: torch.Tensor | None = None,
    keep: Sequence[object] = (),
    stream: torch.cuda.Stream | None = None,
) -> core._Graph:
    """A graph whose launch runs `work` again and again, on the device alone.

    Args:
        work, keep, stream: the same as in :func:`capture`. The body of a loop holds kernels, copies and memsets:
            anything else raises GraphCaptureError with the node's type and path.
        left: int32[1], CUDA: iterations left. Each iteration takes one; the last iteration leaves 0. At least one runs.
        stop: int32[1], CUDA: an iteration that leaves anything but 0 in it is the last.
    """
    stream, ordinal = _stream(stream)
    inner = torch_graph(work, stream)

    def body(handle: int) -> None:
        core._graph_child(stream.cuda_stream, inner.raw_cuda_graph())
        core._graph_loop_count(handle, left, stop, stream.cuda_stream)

    return core._Graph.loop(ordinal, stream.cuda_stream, body, [inner, stream, work, left, stop, *keep])


def collect(*, wait: bool = False) -> tuple[int, int]:
    """Destroy dropped graphs whose last launch has finished (`wait`: wait for it), and let go of the objects that they
    kept.

    Captures and launches do so by themselves. Returns how many were destroyed and how many are left.
    """
    return core._graph_collect(wait)


def _stream(stream: torch.cuda.Stream | None) -> tuple[torch.cuda.Stream, int]:
    """The stream, or a new one, and its device's number; the device is set up."""
    if stream is None:
        device.init()  # raises what there is to say where there is no GPU
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    ordinal = stream.device.index
    device.init(ordinal)
    return stream, ordinal
