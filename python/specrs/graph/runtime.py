"""A body of work in graphs of several sizes over one memory, and replays of any batch."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs import device as cuda_device
from specrs._specrs import ConfigError, OutOfBoundsError, StaleHandleError
from specrs.graph import poison as poisons
from specrs.graph.capture import capture, shared_stream
from specrs.graph.leases import Generations
from specrs.graph.regions import Family, Region


class Order:
    """The order of a device: replays of all runtimes follow each other, for they share the workspace of cuBLAS that was
    captured.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.end = torch.cuda.Event()  # type: ignore[no-untyped-call]


@functools.cache
def _order(_ordinal: int) -> Order:
    return Order()


class Buffers(Mapping[str, torch.Tensor]):
    """Tensors that a body reads and writes, of so many seats, by the regions' names.

    Attributes:
        seats: number of the bucket's seats, dead ones included; in an eager run the batch itself.
    """

    def __init__(self, seats: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self.seats, self._tensors = seats, dict(tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Output:
    """A lease of a replay's output: live seats, for as long as no later replay has written that memory.

    Attributes:
        generation: number of the replay that wrote the output.
    """

    def __init__(self, what: str, tensor: torch.Tensor, generation: int, copy: int, at: Generations | None) -> None:
        self._what, self._tensor, self._copy, self._at = what, tensor, copy, at
        self.generation = generation

    @property
    def valid(self) -> bool:
        """True if the output may still be read."""
        return self._at is None or self._at.current(self._copy) == self.generation

    def check(self) -> None:
        """Raise StaleOutputError, with both generations, once a later replay has written the memory."""
        if self._at is not None:
            self._at.check(self._what, self.generation, self._copy)

    def tensor(self) -> torch.Tensor:
        """The seats as they lie there, without a copy: torch reads whatever the memory holds when it gets to it.

        Reads on the replay's stream are in order. Whoever reads on another stream makes a later replay wait for it.
        """
        self.check()
        return self._tensor

    def copy(self) -> torch.Tensor:
        """The seats in memory of torch's, copied on its current stream: never stale."""
        self.check()
        return self._tensor.clone()

    def __dlpack__(self, **asked: Any) -> Any:
        self.check()
        return self._tensor.__dlpack__(**asked)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, ordinal = self._tensor.__dlpack_device__()
        return int(kind), int(ordinal)


class Replay:
    """Outputs of one replay.

    Attributes:
        batch: live seats.
        bucket: seats of the graph; ``None`` for a batch that ran eagerly.
        generation: number of the replay from 1 on; 0 for a batch that ran eagerly, whose outputs are its own and never
            stale.
    """

    def __init__(
        self, batch: int, bucket: int | None, generation: int, outputs: dict[str, torch.Tensor], copy: int,
        at: Generations | None,
    ) -> None:  # fmt: skip
        self.batch, self.bucket, self.generation = batch, bucket, generation
        self._outputs, self._copy, self._at = outputs, copy, at

    def output(self, name: str, *, copy: bool = False) -> Output:
        """A lease of an output's live seats; with `copy`, of a copy that is never stale."""
        if name not in self._outputs:
            raise ConfigError(f"output = {name!r}: the outputs are {list(self._outputs)}")
        lease = Output(f"output {name!r}", self._outputs[name], self.generation, self._copy, self._at)
        return Output(f"output {name!r}", lease.copy(), self.generation, 0, None) if copy else lease


class GraphRuntime:
    """Work captured once for each bucket of batch sizes and each set of outputs, over one arena.

    Outputs are double-buffered by two captures, and not by a copy at the graph's end: a replay then costs what the body
    costs, whatever the outputs' size, and graphs of one runtime share torch's pool, so that the second costs the graph
    alone.

    Replays follow each other on the device, whatever streams they are put on, also those of other runtimes: torch's
    cuBLAS works in one workspace for all that was captured on one stream.
    """

    def __init__(
        self,
        body: Callable[[Buffers], object],
        buckets: Sequence[int],
        regions: Sequence[Region],
        *,
        device: torch.device | int | None = None,
        modules: Sequence[object] = (),
        copies: int = 2,
        poison: bool | None = None,
    ) -> None:
        """Declare, allocate, run the body once for each bucket, capture it for each bucket and set of outputs.

        Args:
            body: puts the work of ``at.seats`` seats on torch's current stream. It reads inputs and writes every row of
                every output, dead seats included, and waits for nothing. What it does depends on the inputs alone: it
                runs before it is captured, over dead seats. Random numbers of torch's generators are not for it.
            buckets: seats of each, increasing.
            regions: memory of the body's inputs and outputs.
            device: a CUDA device; torch's current one by default.
            modules: objects that the body uses beside the regions, kept until the last replay has finished: modules,
                tensors, pools, planners, arenas.
            copies: sets of outputs. With 2, the last replay's outputs stand while the next one runs.
            poison: check every replay (slow: the host waits); ``None`` asks the environment, ``SPECRS_POISON=1``.

        Raises ConfigError for what cannot be declared, DeviceMemoryError for memory that is not there (before anything
        is allocated), GraphCaptureError for a body that cannot be captured, CudaError without a GPU.
        """
        self.family = Family(buckets, regions, copies)
        self.poison = os.environ.get("SPECRS_POISON", "") not in ("", "0") if poison is None else poison
        cuda_device.init(device)
        if not isinstance(device, int):
            index = None if device is None else torch.device(device).index
            device = torch.cuda.current_device() if index is None else index
        self.device = torch.device("cuda", device)
        self.eager_runs = 0
        self._body, self._kept = body, [body, *modules]
        self._order = _order(device)
        self._generations = Generations(self.family.copies)
        self._warned = False
        with self._order.lock, torch.no_grad(), torch.cuda.device(self.device):
            self._side = shared_stream(device)
            self._arena = core._DeviceArena(device, self.family.declared(), guards=True)
            self._memory = {
                name: from_dlpack(self._arena.tensor(name, self._handle())) for name, _, _ in self.family.declared()
            }
            self._pool = torch.cuda.graph_pool_handle()
            self._graphs: dict[tuple[int, int], core._Graph] = {}
            for bucket in reversed(self.family.buckets):  # the largest first: the others find its memory in the pool
                self._capture(bucket)

    # -- memory -------------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """Bytes of the regions of all buckets and sets of outputs; :func:`graph_bytes` says it before."""
        return self._arena.bytes

    @property
    def captured_bytes(self) -> int:
        """Bytes that torch holds for allocations of the bodies: one pool for all graphs."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        own = [s for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(self._pool)]
        return sum(int(s["total_size"]) for s in own)

    def nodes(self, bucket: int) -> dict[str, int]:
        """Nodes of a bucket's graph by type."""
        self._alive()
        return self._graphs[bucket, 0].nodes

    def _handle(self) -> int:
        """torch's current stream."""
        return torch.cuda.current_stream(self.device).cuda_stream

    def _rows(self, region: Region, copy: int, seats: int) -> torch.Tensor:
        """A region's memory for so many seats, and what is behind them."""
        return self._memory[self.family.place(region, copy)][: region.rows(seats) + region.more]

    def _buffers(self, bucket: int, copy: int) -> Buffers:
        return Buffers(bucket, {r.name: self._rows(r, copy, bucket) for r in self.family.regions.values()})

    def _capture(self, bucket: int) -> None:
        """Graphs of a bucket, behind a run that loads and allocates what a first use does."""
        self._side.wait_stream(torch.cuda.current_stream())
        self._side.wait_event(self._order.end)
        with torch.cuda.stream(self._side):
            for region in self.family.of("input"):
                self._rows(region, 0, bucket).fill_(_dead(region))
            self._body(self._buffers(bucket, 0))
        self._side.synchronize()
        for copy in range(self.family.copies):
            self._graphs[bucket, copy] = capture(
                functools.partial(self._body, self._buffers(bucket, copy)),  # holds no runtime: its graphs go with it
                keep=[self._arena, self._memory, *self._kept],
                stream=self._side,
                pool=self._pool,
            )

    # -- replays ------------------------------------------------------------------------------------------------

    def replay(self, batch: int, inputs: Mapping[str, torch.Tensor]) -> Replay:
        """Run the body for `batch` seats, on torch's current stream; waits for nothing but in poison mode.

        The smallest bucket that fits runs. A batch above the largest runs eagerly, over memory of its own, and says so
        once.

        Args:
            batch: live seats, at least 1.
            inputs: live seats of each input region: ``[batch * n, ...]`` of its type, on the device or the host. They
                are copied on the stream; the caller leaves those of the host as they are until then.

        Raises ConfigError for inputs that do not fit, before anything is written; in poison mode SeatError, and
        OutOfBoundsError for a write between regions; CudaError for what the driver refuses, also for a fault of earlier
        work.
        """
        bucket = self.family.bucket(batch)
        given = self._fitting(batch, inputs)
        with self._order.lock, torch.no_grad(), torch.cuda.device(self.device):
            self._alive()
            if bucket is None:
                return self._eager(batch, given)
            return self._replay(batch, bucket, given)

    def _replay(self, batch: int, bucket: int, given: dict[str, torch.Tensor]) -> Replay:
        stream = torch.cuda.current_stream()
        stream.wait_event(self._order.end)
        # From here on the set's memory counts as written, whatever fails.
        generation, copy = self._generations.begin()
        try:
            if self.poison:
                for region in self.family.regions.values():
                    poisons.poison(self._memory[self.family.place(region, copy)])
            for region in self.family.of("input"):
                self._write(region, self._rows(region, 0, bucket), batch, bucket, given[region.name])
            self._graphs[bucket, copy].launch(stream.cuda_stream)
        finally:
            self._order.end.record(stream)
        if self.poison:
            self._check(batch, bucket, copy)
        outputs = {r.name: self._rows(r, copy, bucket)[: r.rows(batch) + r.more] for r in self.family.of("output")}
        return Replay(batch, bucket, generation, outputs, copy, self._generations)

    def _write(self, region: Region, memory: torch.Tensor, batch: int, bucket: int, given: torch.Tensor) -> None:
        """Live seats from the caller, dead ones by the declared value."""
        live = region.rows(batch)
        memory[:live].copy_(given, non_blocking=True)
        if batch < bucket:
            memory[live:].fill_(_dead(region))

    def _eager(self, batch: int, given: dict[str, torch.Tensor]) -> Replay:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"batch {batch} is larger than the largest bucket, {self.family.buckets[-1]}: it runs eagerly over "
                "memory of its own, as all such batches will (this is said once)",
                RuntimeWarning,
                stacklevel=3,
            )
        stream = torch.cuda.current_stream()
        stream.wait_event(self._order.end)  # work may write what replays do: memory of the caller's
        try:
            tensors = self._run_eagerly(batch, given)
        finally:
            self._order.end.record(stream)
        outputs = {region.name: tensors[region.name] for region in self.family.of("output")}
        if self.poison:
            for region in self.family.of("output"):
                poisons.check_output(tensors[region.name], region, batch, batch)
        return Replay(batch, None, 0, outputs, 0, None)

    def _run_eagerly(self, batch: int, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for region in self.family.regions.values():
            dtype = getattr(torch, region.dtype)
            tensors[region.name] = made = torch.empty(region.shape(batch), dtype=dtype, device=self.device)
            if self.poison:
                poisons.poison(made)
            if region.role == "input":
                made.copy_(given[region.name], non_blocking=True)
        self._body(Buffers(batch, tensors))
        self.eager_runs += 1
        return tensors

    def _check(self, batch: int, bucket: int, copy: int) -> None:
        """Check the traces that the replay must have left."""
        self.check_guards(f"bucket {bucket}, {batch} live seats")
        for region in self.family.regions.values():
            whole, of_bucket = self._memory[self.family.place(region, copy)], self._rows(region, copy, bucket)
            poisons.check_outside(whole, region, bucket, batch)
            if region.role == "input":
                poisons.check_dead(of_bucket, region, bucket, batch, "the body left")
            elif region.role == "output":
                poisons.check_output(of_bucket, region, bucket, batch)

    def check_guards(self, where: str = "a replay") -> None:
        """Raise OutOfBoundsError where something was written between regions; the host waits. Poison mode does so."""
        try:
            self._arena.check_guards(self._handle())
        except OutOfBoundsError as found:
            text = f"{where}: behind region {found.buffer!r}: byte {found.index} of {found.bound} was written"
            error = OutOfBoundsError(text)
            for name, value in vars(found).items():
                setattr(error, name, value)
            raise error from None

    def _fitting(self, batch: int, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs, each of its region's type and of `batch` seats."""
        regions = self.family.of("input")
        names = [region.name for region in regions]
        if set(inputs) != set(names):
            raise ConfigError(f"inputs = {sorted(inputs)}: the input regions are {sorted(names)}")
        for region in regions:
            got, want = inputs[region.name], region.shape(batch)
            if tuple(got.shape) != want or str(got.dtype) != f"torch.{region.dtype}":
                raise ConfigError(
                    f"input {region.name!r}: got {str(got.dtype).removeprefix('torch.')} {list(got.shape)}, want "
                    f"{region.dtype} {list(want)} for {batch} seats"
                )
            if got.is_cuda and got.device != self.device:
                raise ConfigError(f"input {region.name!r}: got a tensor on {got.device}, want one on {self.device}")
        return dict(inputs)

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the graphs; memory goes back once the last replay has finished. Outputs that are held stay."""
        with self._order.lock:
            self._graphs = {}
            self._memory = {}

    def _alive(self) -> None:
        if not self._graphs:
            raise StaleHandleError("graph runtime: it was closed")

    def __enter__(self) -> GraphRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _dead(region: Region) -> Any:
    """The declared value; an input has one."""
    assert region.dead is not None
    return region.dead
