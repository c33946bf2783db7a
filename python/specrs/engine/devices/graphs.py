"""A GPU's rounds of one bucket: launched, captured as CUDA graphs, and read by the host.

A round can be launched before the host has read the round in front of it. Each round publishes its results to a place
of mapped memory, where `Bucket.collect` reads them without a synchronisation. A graph holds the addresses of all memory
that its launches use. That memory never moves: it is static (`memory`), or scratch memory that is reserved at its
largest when the engine is made.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import TypeVar, cast

from specrs import _specrs as core
from specrs.device import allocations
from specrs.engine.devices.given import Given
from specrs.engine.devices.launches import Launches, Variant
from specrs.engine.devices.memory import Arrays, BucketMemory, Models

_TRIES = 3  # captures that may fail before launches run without a graph: another thread may have allocated meanwhile

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

    def run(self, key: Hashable, launches: Callable[[], Result], keep: Keep) -> Result:
        """Run launches, and return what they return.

        Args:
            launches: makes the launches, always the same for a key.
            keep: returns the objects whose memory the launches use.
        """
        if key in self.failures and not self.settled(key):
            self._capture(key, launches, keep)
        if key not in self.made:
            ran = launches()
            self.failures.setdefault(key, 0)
            return ran
        graph, found = self.made[key]
        graph.launch(self._models.dense.stream)
        return cast(Result, found)

    def _capture(self, key: Hashable, launches: Callable[[], object], keep: Keep) -> None:
        try:
            self.made[key] = self._captured(launches, keep())
        except (RuntimeError, core.GraphCaptureError) as error:
            self.failures[key] += 1
            if self.failures[key] == _TRIES:
                warnings.warn(f"{key} runs without a CUDA graph: {error}", RuntimeWarning, stacklevel=4)

    def _captured(self, launches: Callable[[], object], keep: list[object]) -> tuple[core._Graph, object]:
        """Capture launches without running them.

        It fails if torch allocates memory meanwhile, but for memory that attention's kernels keep (`captured`).
        """
        dense, attention, made = self._models.dense, self._models.attention, list[object]()
        cuda, collecting = dense.placement.device, gc.isenabled()
        allocated = allocations(cuda) - attention.captured

        gc.disable()  # destroying an object within the capture could break the capture
        try:
            graph = core._Graph.capture(cuda.index, dense.stream, lambda: made.append(launches()), keep)
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
        rounds: number of rounds launched so far.
        held: number of the round whose `logits` and `Launches.root_logits` are still there; -1 once another pass has
            run behind the last round.
        graphs: captured rounds by variant.
    """

    def __init__(self, models: Models, batch: int) -> None:
        self.batch, self.models = batch, models
        self.memory = BucketMemory(models, batch)
        self.given = Given(self.memory, models.roots, models.geometry.shape)
        self.launches = Launches(models, self.memory, self.given)
        self.logits = self.memory.arrays["given"]  # a placeholder before the first launch
        self.rounds, self.held = 0, -1
        self.graphs = Graphs(models)

    # -- launching ------------------------------------------------------------------------------------------------

    def launch(self, variant: Variant) -> int:
        """Upload the inputs in `given`, and run a round behind all work of the stream. Returns the round's number."""
        self.given.upload()
        return self.again(variant)

    def again(self, variant: Variant) -> int:
        """Run a round that begins where the last round ends. Returns the round's number."""
        number = self.held = self.rounds
        self.rounds += 1
        self.logits = self.graphs.run(variant, partial(self.launches.run, variant), self.launches.kept)
        return number

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

    def settle(self) -> None:
        """Wait for everything that was launched, and forget the errors of its kernels."""
        self.models.stream.synchronize()
        self.rounds, self.held = int(self.memory.arrays["control"][0]), -1
        with suppress(core.SpecrsError):
            self.models.dense.faults.check()
