"""Parts that the GPU benches share: calls captured as a graph, graphs that take turns, the copy bandwidth of the same
run."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def stream() -> int:
    """torch's current stream, as specrs's launches take it."""
    handle: int = torch.cuda.current_stream().cuda_stream
    return handle


def graph_of(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """The calls, made once, as one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def medians(graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]], repeats: int, warm_up: int = 2) -> dict[str, float]:
    """Microseconds of one call, median over replays; the graphs take turns.

    Args:
        graphs: for each name, a graph and the number of calls in it.
        repeats: replays of each that count.
        warm_up: replays of each before those.
    """
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for i in range(repeats + warm_up):
        for name, (graph, calls) in graphs.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(200_000)  # 0.1 ms: the host's part of the launch is over when the GPU gets there
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            if i >= warm_up:
                times[name].append(start.elapsed_time(stop) * 1e3 / calls)
    return {name: statistics.median(t) for name, t in times.items()}


def times(parts: dict[str, Callable[[], object]], launches: int = 20, repeats: int = 15) -> dict[str, float]:
    """Microseconds of each part, from graphs of `launches` of it, which take turns."""
    graphs = {name: (graph_of([part] * launches), launches) for name, part in parts.items()}
    return {name: round(us, 2) for name, us in medians(graphs, repeats).items()}


def copy_bandwidth(repeats: int) -> float:
    """Bytes read plus bytes written of a large copy, in bytes a second."""
    a = torch.full((1 << 29,), 1.5, device="cuda")
    b = torch.empty_like(a)
    return 8 * len(a) / (medians({"copy": (graph_of([lambda: torch.neg(a, out=b)] * 4), 4)}, repeats)["copy"] * 1e-6)
