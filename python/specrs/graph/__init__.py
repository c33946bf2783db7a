"""CUDA graphs of your own work over memory of specrs: buckets of batch sizes, dead seats, outputs that know their age.

    >>> from specrs.graph import GraphRuntime, Region
    >>> regions = [
    ...     Region("tokens", "int32", dead=0),  # int32[seats]
    ...     Region("scores", "float32", (4, 32000), role="output"),  # float32[seats * 4, 32000]
    ... ]
    >>> def body(at):  # captured once a bucket; reads and writes at[name], whose first dimension is seats * n
    ...     at["scores"].copy_(model(at["tokens"]))
    >>> runtime = GraphRuntime(body, buckets=[1, 4, 16], regions=regions, modules=[model])
    >>> done = runtime.replay(3, {"tokens": tokens})  # the graph of 4 seats, one of them dead
    >>> done.output("scores").tensor()  # live seats; StaleOutputError once that memory has been replayed over

A graph is a list of addresses. These rules keep them true:

* All memory of a runtime is declared (:class:`Region`), counted before the first byte is allocated
  (:func:`graph_bytes`) and shared by its buckets: a smaller one uses the first seats.
* Each replay writes every input's seats, live from its arguments and dead by the declared value.
* A graph keeps the memory, the modules and torch's private pool until its last replay has finished on the device, even
  if the runtime is dropped before.
* Outputs are leases with a generation. ``copies`` sets of them are written in turn, a capture each, so that the last
  replay's outputs are read while the next one runs, and nothing is copied.
* With ``SPECRS_POISON=1`` every replay begins with poison everywhere and is checked afterwards: seats that nobody
  wrote, seats outside the bucket that somebody wrote, dead seats that changed, writes between regions.

| file | what lives there; each imports from those above it |
|---|---|
| ``regions`` | declared memory and buckets: arithmetic, needs neither torch nor a GPU |
| ``leases`` | generations of output memory: arithmetic |
| ``capture`` | torch's work, or a loop of it, as a graph that keeps what it needs |
| ``poison`` | what a replay must leave, and how it is seen |
| ``runtime`` | :class:`GraphRuntime` |
"""

from specrs.graph.capture import capture, collect, loop
from specrs.graph.leases import Generations
from specrs.graph.poison import SeatError
from specrs.graph.regions import Family, Region, graph_bytes
from specrs.graph.runtime import Buffers, GraphRuntime, Output, Replay

__all__ = [
    "Buffers",
    "Family",
    "Generations",
    "GraphRuntime",
    "SeatError",
    "Output",
    "Region",
    "Replay",
    "capture",
    "collect",
    "graph_bytes",
    "loop",
]
