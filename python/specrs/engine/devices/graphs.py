"""A GPU's rounds of one bucket: launched, captured as CUDA graphs, repeated by the device, and read by the host.

A round can be launched before the host has read the round in front of it, or repeat in a WHILE loop on the device. Each
round publishes its results to a place of mapped memory, where `Bucket.collect` reads them without a synchronisation. A
graph holds the addresses of all memory that its launches use, so it is valid only until some of that memory moves.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from specrs import _specrs as core
from specrs.engine.devices.given import Given
from specrs.engine.devices.launches import Launches, Variant
from specrs.engine.devices.memory import Arrays, BucketMemory, Models

_COLD = 1  # runs of a variant before it is captured; these load kernels and grow memory
_DOUBTS = 3  # captures during which memory is allocated, before the variant itself is taken to be the cause
MOST_AHEAD = 8  # the most rounds of a loop
_BUDGET = 32  # `EXIT_BUDGET` of src/round/round_end.rs: the loop has run all rounds that it was launched for


class AllocatedError(RuntimeError):
    """Memory was allocated during a capture, perhaps by another thread."""


def record(models: Models, keep: list[object], launches: Callable[[int], None], loop: bool = False) -> core._Graph:
    """Capture launches as a CUDA graph, without running them.

    Args:
        models: the models and everything else that the launches use.
        keep: objects whose memory the launches use.
        launches: makes the launches; gets the handle of the loop, or 0 without one.
        loop: True for launches that are the body of a loop.

    Raises:
        AllocatedError: torch handed out memory meanwhile.
        RuntimeError: scratch memory moved within the capture.
        GraphCaptureError: something else broke the capture.
    """
    cuda, epoch, stream = models.dense.placement.device, models.epoch, models.dense.stream
    allocated, collecting = _allocations(cuda), gc.isenabled()
    gc.disable()  # destroying an object within the capture could break the capture
    try:
        if loop:
            core._device_round_end_load(cuda.index)
            graph = core._Graph.loop(cuda.index, stream, launches, keep)
        else:
            graph = core._Graph.capture(cuda.index, stream, lambda: launches(0), keep)
        if models.epoch != epoch:
            raise RuntimeError("scratch memory moved within the capture")
        if _allocations(cuda) != allocated:
            raise AllocatedError("torch allocated memory within the capture")
    except (RuntimeError, core.GraphCaptureError):
        models.dense.forget()
        raise
    finally:
        if collecting:
            gc.enable()
    return graph


@dataclass(frozen=True, eq=False)
class _Captured:
    """The captured launches of a round, and the memory of its logits."""

    graph: core._Graph
    logits: torch.Tensor


class Bucket:
    """The rounds of up to ``batch`` requests.

    Attributes:
        memory: all arrays of the bucket.
        given: the host's inputs to the next launch.
        launches: the launches of a round.
        logits: the last round's logits, a row for each node.
        rounds: number of rounds launched so far. For a loop under way, only rounds that the host knows of count.
        looping: True if a loop may be under way.
        overtaken: True if another pass of the target has run behind the last round and overwritten its logits.
        cold: True if the last launch had to run or capture a variant that later launches only replay.
        waited: total seconds for which the host waited for rounds to end.
        graphs: captured rounds by variant.
        runs: number of runs of each variant without a graph since scratch memory moved; a huge negative number if a
            capture of the variant has failed.
        doubts: number of captures of each variant during which somebody allocated memory.
    """

    def __init__(self, models: Models, batch: int) -> None:
        self.batch, self.models, self._cuda = batch, models, models.dense.placement.device
        self.memory = BucketMemory(models, batch)
        self.given = Given(self.memory, models.roots)
        self.launches = Launches(models, self.memory, self.given)
        self.logits = self.memory.arrays["given"]  # a placeholder before the first launch
        self.rounds, self.waited = 0, 0.0
        self.looping = self.overtaken = self.cold = False
        self.graphs: dict[Variant, _Captured] = {}
        self.doubts: Counter[Variant] = Counter()
        self.runs: Counter[Variant] = Counter()
        self._captured_at = self.models.epoch

    # -- launching ------------------------------------------------------------------------------------------------

    def launch(self, variant: Variant, graphs: bool) -> int:
        """Upload the inputs in `given`, and run a round behind all work of the stream. Returns the round's number."""
        self.given.upload()
        return self.again(variant, graphs)

    def again(self, variant: Variant, graphs: bool, rounds: int = 1) -> int:
        """Run a round that begins where the last round ends. A variant that loops runs up to ``rounds`` rounds.

        Returns:
            The number of the first round.
        """
        number = self.rounds
        self.rounds, self.looping, self.overtaken = number + 1, variant.loop, False
        if self.models.epoch != self._captured_at:  # scratch memory that graphs were captured with has moved
            self.graphs.clear()
            self.runs.clear()
            self._captured_at = self.models.epoch
        kept = self.graphs.get(variant)
        self.cold = graphs and kept is None
        if kept is None and graphs and (variant.loop or self.runs[variant] >= _COLD):
            kept = self._capture(variant)
        if kept is not None:
            if variant.loop:
                self.memory.ring.clear_stop()  # an earlier request to stop is over, as its loop has ended
                self.memory.arrays["control"][1:2].fill_(rounds)
            kept.graph.launch(self.models.dense.stream)
            self.logits = kept.logits
        else:
            # The first run loads kernels and grows memory. A capture could not do either.
            self.looping = False
            self.logits = self.launches.run(replace(variant, loop=False), 0)
            self.runs[variant] += 1
        return number

    def loops(self, variant: Variant) -> bool:
        """Return whether the device can repeat the variant in a loop.

        It can if the variant has a graph over the present memory and no capture of its loop has failed.
        """
        again = replace(variant, loop=True)
        return variant in self.graphs and self.models.epoch == self._captured_at and self.runs[again] >= 0

    def _capture(self, variant: Variant) -> _Captured | None:
        """Capture a graph of the variant's launches without running them. Returns ``None`` if the capture fails."""
        made: list[torch.Tensor] = []

        def launches(handle: int) -> None:
            made.append(self.launches.run(variant, handle))

        try:
            graph = record(self.models, self.launches.kept(), launches, variant.loop)
        except AllocatedError as error:
            # Another thread may have allocated; then a later capture works.
            self.doubts[variant] += 1
            if self.doubts[variant] >= _DOUBTS:
                self._fail(variant, error)
            return None
        except (RuntimeError, core.GraphCaptureError) as error:
            self._fail(variant, error)
            return None
        self.graphs[variant] = captured = _Captured(graph, made[-1])
        return captured

    def _fail(self, variant: Variant, error: Exception) -> None:
        """Run a variant without a graph from now on."""
        self.runs[variant] = -sys.maxsize  # never try again
        warnings.warn(f"{variant} runs without a CUDA graph: {error}", RuntimeWarning, stacklevel=4)

    # -- reading --------------------------------------------------------------------------------------------------

    def collect(self, number: int) -> Arrays:
        """Wait for a round, and return its results.

        Raises:
            SpecrsError: an error other than NaN made a kernel skip its work.
            OutOfBoundsError: a kernel wrote between the arrays.
            StaleOutputError: later rounds have overwritten the results.
        """
        ring, dense = self.memory.ring, self.models.dense
        started = time.perf_counter()
        ring.wait(number, dense.stream)
        self.waited += time.perf_counter() - started
        with suppress(core.NonFiniteError):  # the results name the requests, in `faults` and `sound`
            dense.faults.check()
        self.memory.check_guards(dense.stream)
        return self.memory.results[ring.slot(number)]

    def followed_by(self, number: int) -> int | None:
        """Wait for a round of a loop, and return the round that the device began by itself behind it, if any."""
        if not self.looping or number != self.rounds - 1:
            return None
        header = self.collect(number)["header"]
        if int(header[self.memory.ring.continues]):
            self.rounds = number + 2
            return number + 1
        self.looping = False
        return None

    def ended(self, number: int) -> bool:
        """Return whether a loop ended early with this collected round, before all its rounds had run."""
        return bool(int(self.collect(number)["header"][self.memory.ring.exit]) & ~_BUDGET)

    def holds(self, number: int) -> bool:
        """Return whether device memory of rounds (`Launches.root_logits`) still has what this round left there."""
        return not self.looping and number == self.rounds - 1

    def holds_logits(self, number: int) -> bool:
        """Return whether `logits` still has this round's logits."""
        return self.holds(number) and not self.overtaken

    def request_stop(self) -> None:
        """Have a loop under way, if any, end with its current round."""
        if self.looping:
            self.memory.ring.ask_stop()

    def settle(self) -> None:
        """Stop a loop, wait for everything that was launched, and forget the errors of its kernels."""
        ring = self.memory.ring
        ring.ask_stop()
        try:
            self.models.stream.synchronize()
        finally:
            ring.clear_stop()
        self.rounds, self.looping = int(self.memory.arrays["control"][0]), False
        with suppress(core.SpecrsError):
            self.models.dense.faults.check()


def _allocations(cuda: torch.device) -> int:
    """Return the number of blocks that torch has handed out so far."""
    return int(torch.cuda.memory_stats(cuda)["allocation.all.allocated"])
