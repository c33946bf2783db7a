"""A GPU's rounds of one bucket: launched, captured as CUDA graphs, repeated by the device, and read by the host.

A round can be launched before the host has read the round in front of it, or repeat in a WHILE loop on the device. Each
round publishes its results to a place of mapped memory, where `Bucket.collect` reads them without a synchronisation. A
graph holds the addresses of all memory that its launches use. That memory never moves: it is static (`memory`), or
scratch memory that is reserved at its largest when the engine is made.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

from specrs import _specrs as core
from specrs.device import allocations
from specrs.engine.devices.given import Given
from specrs.engine.devices.launches import Launches, Variant
from specrs.engine.devices.memory import Arrays, BucketMemory, Models

_TRIES = 3  # captures that may fail before launches run without a graph: another thread may have allocated meanwhile
MOST_AHEAD = 8  # the most rounds of a loop
_BUDGET = 32  # `EXIT_BUDGET` of src/round/round_end.rs: the loop has run all rounds that it was launched for

Result = TypeVar("Result")
Keep = Callable[[], list[object]]


class Graphs:
    """CUDA graphs of launches, by a key of each.

    The first run of a key loads kernels and makes memory, which a capture could not do. The second run captures a
    graph, and later runs replay it. If `_TRIES` captures of a key fail, it runs without a graph from then on.

    Attributes:
        made: each captured graph, and what its launches returned.
        failures: number of failed captures of each key that has run or was to be captured.
    """

    def __init__(self, models: Models) -> None:
        self._models, self._on = models, models.config.graphs != "off"
        self.made: dict[Hashable, tuple[core._Graph, object]] = {}
        self.failures: dict[Hashable, int] = {}

    def settled(self, key: Hashable) -> bool:
        """Return whether later runs of a key take no longer than its next one."""
        return not self._on or key in self.made or self.failures.get(key, 0) >= _TRIES

    def run(self, key: Hashable, launches: Callable[[int], Result], keep: Keep) -> Result:
        """Run launches, and return what they return. If they loop, they must have a graph.

        Args:
            launches: makes the launches, always the same for a key; gets the handle of the loop, or 0 without one.
            keep: returns the objects whose memory the launches use.
        """
        if key in self.failures:
            self.capture(key, launches, keep)
        if key not in self.made:
            ran = launches(0)
            self.failures.setdefault(key, 0)
            return ran
        graph, found = self.made[key]
        graph.launch(self._models.dense.stream)
        return cast(Result, found)

    def capture(self, key: Hashable, launches: Callable[[int], object], keep: Keep, loop: bool = False) -> bool:
        """Capture a graph of launches that has run before, unless there is one, and return whether there is one now.

        Args:
            loop: True for launches that are the body of a loop.
        """
        if not self.settled(key):
            self.failures.setdefault(key, 0)
            try:
                self.made[key] = self._captured(launches, keep(), loop)
            except (RuntimeError, core.GraphCaptureError) as error:
                self.failures[key] += 1
                if self.failures[key] == _TRIES:
                    warnings.warn(f"{key} runs without a CUDA graph: {error}", RuntimeWarning, stacklevel=4)
        return key in self.made

    def _captured(
        self, launches: Callable[[int], object], keep: list[object], loop: bool
    ) -> tuple[core._Graph, object]:
        """Capture launches without running them.

        It fails if torch allocates memory meanwhile, but for memory that attention's kernels keep (`captured`).
        """
        dense, attention, made = self._models.dense, self._models.attention, list[object]()
        cuda, collecting = dense.placement.device, gc.isenabled()
        allocated = allocations(cuda) - attention.captured

        def launch(handle: int = 0) -> None:
            made.append(launches(handle))

        gc.disable()  # destroying an object within the capture could break the capture
        try:
            if loop:
                core._device_round_end_load(cuda.index)
                graph = core._Graph.loop(cuda.index, dense.stream, launch, keep)
            else:
                graph = core._Graph.capture(cuda.index, dense.stream, launch, keep)
        finally:
            dense.forget()  # a sum that a broken pass left undone
            if collecting:
                gc.enable()
        if allocations(cuda) - attention.captured != allocated:
            raise RuntimeError("torch allocated memory within the capture")
        return graph, made[-1]


class Bucket:
    """The rounds of up to ``batch`` requests.

    Attributes:
        memory: all arrays of the bucket.
        given: the host's inputs to the next launch.
        launches: the launches of a round.
        logits: the last round's logits, a row for each node.
        rounds: number of rounds launched so far. For a loop under way, only rounds that the host knows of count.
        looping: True if a loop may be under way.
        overtaken: True if another pass of the target has run behind the last round.
        graphs: captured rounds by variant.
    """

    def __init__(self, models: Models, batch: int) -> None:
        self.batch, self.models = batch, models
        self.memory = BucketMemory(models, batch)
        self.given = Given(self.memory, models.roots, models.geometry.shape)
        self.launches = Launches(models, self.memory, self.given)
        self.logits = self.memory.arrays["given"]  # a placeholder before the first launch
        self.rounds = 0
        self.looping = self.overtaken = False
        self.graphs = Graphs(models)

    # -- launching ------------------------------------------------------------------------------------------------

    def launch(self, variant: Variant) -> int:
        """Upload the inputs in `given`, and run a round behind all work of the stream. Returns the round's number."""
        self.given.upload()
        return self.again(variant)

    def again(self, variant: Variant, rounds: int = 1) -> int:
        """Run a round that begins where the last round ends. A variant that loops runs up to ``rounds`` rounds.

        Returns:
            The number of the first round.
        """
        number = self.rounds
        self.rounds, self.looping, self.overtaken = number + 1, variant.loop, False
        if variant.loop:
            self.memory.ring.clear_stop()  # an earlier request to stop is over, as its loop has ended
            self.memory.arrays["control"][1:2].fill_(rounds)
        self.logits = self.graphs.run(variant, partial(self.launches.run, variant), self.launches.kept)
        return number

    def loops(self, variant: Variant) -> bool:
        """Return whether the device can repeat the variant in a loop, whose graph this captures if there is none.

        It can if the variant has a graph, and ``graphs`` allows loops.
        """
        if self.models.config.graphs != "loop" or variant not in self.graphs.made:
            return False
        again = replace(variant, loop=True)
        return self.graphs.capture(again, partial(self.launches.run, again), self.launches.kept, loop=True)

    # -- reading --------------------------------------------------------------------------------------------------

    def collect(self, number: int) -> Arrays:
        """Wait for a round, and return its results.

        Raises:
            SpecrsError: an error other than NaN made a kernel skip its work.
            OutOfBoundsError: a kernel wrote between the arrays.
            StaleOutputError: later rounds have overwritten the results.
        """
        ring, dense = self.memory.ring, self.models.dense
        ring.wait(number, dense.stream)
        with suppress(core.NonFiniteError):  # the results name the requests, in `faults` and `sound`
            dense.faults.check()
        self.memory.check_guards(dense.stream)
        self.models.format.check_guards(dense.stream)
        return self.memory.results[ring.slot(number)]

    def followed_by(self, number: int, goes_on: bool) -> int | None:
        """Wait for the last round, if it is of a loop, and return the round that the device began by itself behind it,
        if any. Unless the loop ``goes_on``, it ends with its current round."""
        if not self.looping:
            return None
        if not goes_on:
            self.memory.ring.ask_stop()
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
        """Return whether `logits` and `Launches.root_logits` still have what this round left there."""
        return number == self.rounds - 1 and not (self.looping or self.overtaken)

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
