"""A GPU's rounds of one bucket: launched, captured as CUDA graphs, repeated by the device, and read by the host.

A round can be launched behind another of which the host knows nothing yet, or go round and round in a WHILE loop on the
device. Each publishes what it found to a place of mapped memory, where `Bucket.collect` reads it without a
synchronisation. A graph has the addresses of all that its launches use, so it lasts as long as none of that has moved.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from specrs import _specrs as core
from specrs.engine.devices.given import Given
from specrs.engine.devices.launches import Launches, Variant
from specrs.engine.devices.memory import Arrays, BucketMemory, Models

_COLD = 1  # runs of a variant before it is captured, which load kernels and grow memory
_DOUBTS = 3  # captures during which memory is allocated, before the variant is taken to do so
MOST_AHEAD = 8  # rounds of a loop at most
_BUDGET = 32  # `EXIT_BUDGET` of src/round/round_end.rs: the loop has run as many rounds as it was to


@dataclass(frozen=True, eq=False)
class _Captured:
    """A round's launches, and where its logits lie."""

    graph: core._Graph
    logits: torch.Tensor


class Bucket:
    """The rounds of up to ``batch`` requests.

    Attributes:
        memory: all arrays.
        given: what the host says of the next launch.
        launches: of a round.
        logits: of the last round, a row for each node.
        rounds: launched so far; of a loop under way, those that are known of.
        looping: whether a loop may be under way.
        overtaken: whether a pass of the target that is none of these rounds has run behind them, over its logits.
        cold: whether the last launch made what later ones of its variant only replay.
        waited: seconds, ever, for which the host waited for rounds to end.
        graphs: by variant.
        runs: of each variant without a graph, since scratch memory moved; very few once a capture of it has failed.
        doubts: of each variant, captures during which somebody allocated memory.
    """

    def __init__(self, models: Models, batch: int) -> None:
        self.batch, self.models, self._cuda = batch, models, models.dense.placement.device
        self.memory = BucketMemory(models, batch)
        self.given = Given(self.memory, models.roots)
        self.launches = Launches(models, self.memory, self.given)
        self.logits = self.memory.arrays["given"]  # until the first launch
        self.rounds, self.waited = 0, 0.0
        self.looping = self.overtaken = self.cold = False
        self.graphs: dict[Variant, _Captured] = {}
        self.doubts: Counter[Variant] = Counter()
        self.runs: Counter[Variant] = Counter()
        self._captured_at = self._epoch

    # -- launching ------------------------------------------------------------------------------------------------

    def launch(self, variant: Variant, graphs: bool) -> int:
        """Upload what was `given`, and run the round behind whatever the current stream has. Returns its number."""
        self.given.upload()
        return self.again(variant, graphs)

    def again(self, variant: Variant, graphs: bool, rounds: int = 1) -> int:
        """Run a round that begins where the last one ends; a loop, up to so many. Returns the first one's number."""
        number = self.rounds
        self.rounds, self.looping, self.overtaken = number + 1, variant.loop, False
        if self._epoch != self._captured_at:  # scratch memory that graphs were captured with has moved
            self.graphs.clear()
            self.runs.clear()
            self._captured_at = self._epoch
        kept = self.graphs.get(variant)
        self.cold = graphs and kept is None
        if kept is None and graphs and (variant.loop or self.runs[variant] >= _COLD):
            kept = self._capture(variant)
        if kept is not None:
            if variant.loop:
                self.memory.ring.clear_stop()  # nothing runs that was to be stopped
                self.memory.arrays["control"][1:2].fill_(rounds)
            kept.graph.launch(self.models.dense.stream)
            self.logits = kept.logits
        else:
            # The first time loads kernels and grows memory, which a capture could not.
            self.looping = False
            self.logits = self.launches.run(replace(variant, loop=False), 0)
            self.runs[variant] += 1
        return number

    def loops(self, variant: Variant) -> bool:
        """Whether the variant can go on by itself: there is a graph of it over the present memory, and none of a loop
        of it has failed."""
        again = replace(variant, loop=True)
        return variant in self.graphs and self._epoch == self._captured_at and self.runs[again] >= 0

    @property
    def _epoch(self) -> int:
        """Counts moves of the scratch memory that a round's launches use: activations of both models, and what products
        and attention work in. Everything else of a round stays where it is as long as this bucket does."""
        m = self.models
        return m.dense.memory.moves + m.target.moves + (0 if m.head is None else m.head.moves)

    def _capture(self, variant: Variant) -> _Captured | None:
        """A graph of the variant's launches, which are not run; ``None`` where it cannot be captured."""
        ordinal, epoch, stream = self._cuda.index, self._epoch, self.models.dense.stream
        keep = self.launches.kept()
        made: list[torch.Tensor] = []
        allocated, collecting = _allocations(self._cuda), gc.isenabled()
        gc.disable()  # what it would destroy within the capture could break it
        try:
            if variant.loop:
                core._device_round_end_load(ordinal)
                graph = core._Graph.loop(
                    ordinal, stream, lambda handle: made.append(self.launches.run(variant, handle)), keep
                )
            else:
                graph = core._Graph.capture(ordinal, stream, lambda: made.append(self.launches.run(variant, 0)), keep)
            if self._epoch != epoch:
                raise RuntimeError("scratch memory moved within the capture")
            if _allocations(self._cuda) != allocated:
                # By another thread, perhaps: then not the next time.
                self.doubts[variant] += 1
                if self.doubts[variant] < _DOUBTS:
                    return None
                raise RuntimeError("torch allocated memory within the capture")
        except (RuntimeError, core.GraphCaptureError) as error:
            self.models.dense.forget()
            self.runs[variant] = -sys.maxsize  # from now on without
            warnings.warn(f"{variant} runs without a CUDA graph: {error}", RuntimeWarning, stacklevel=2)
            return None
        finally:
            if collecting:
                gc.enable()
        self.graphs[variant] = captured = _Captured(graph, made[-1])
        return captured

    # -- reading --------------------------------------------------------------------------------------------------

    def collect(self, number: int) -> Arrays:
        """What a round found, for which this waits. Raises what kernels skipped, OutOfBoundsError, and StaleOutputError
        once later rounds have overwritten it."""
        ring, dense = self.memory.ring, self.models.dense
        started = time.perf_counter()
        ring.wait(number, dense.stream)
        self.waited += time.perf_counter() - started
        with suppress(core.NonFiniteError):  # `faults` and `sound` say of whom
            dense.faults.check()
        self.memory.check_guards(dense.stream)
        return self.memory.results[ring.slot(number)]

    def followed_by(self, number: int) -> int | None:
        """The round that the device began by itself behind this one, of a loop, for which this waits."""
        if not self.looping or number != self.rounds - 1:
            return None
        header = self.collect(number)["header"]
        if int(header[self.memory.ring.continues]):
            self.rounds = number + 2
            return number + 1
        self.looping = False
        return None

    def ended(self, number: int) -> bool:
        """Whether a round of a loop, which was collected, was its last though the loop was to have more."""
        return bool(int(self.collect(number)["header"][self.memory.ring.exit]) & ~_BUDGET)

    def holds(self, number: int) -> bool:
        """Whether device memory of rounds (features, root_logits) is still what this one left there."""
        return not self.looping and number == self.rounds - 1

    def holds_logits(self, number: int) -> bool:
        """Whether the logits are still this round's."""
        return self.holds(number) and not self.overtaken

    def request_stop(self) -> None:
        """A loop under way ends with the round at hand."""
        if self.looping:
            self.memory.ring.ask_stop()

    def settle(self) -> None:
        """Wait for everything that was launched, whatever it was, and forget what its kernels skipped."""
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
    """Blocks that torch has handed out so far."""
    return int(torch.cuda.memory_stats(cuda)["allocation.all.allocated"])
