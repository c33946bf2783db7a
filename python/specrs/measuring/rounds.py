"""Times of an engine's steady rounds: rounds of every request, once all prompts are written.

On a GPU rounds run ahead of the host, so a step collects one round and launches another, and the time from step to step
is that of a round. The first and the last `EDGE` steps of a turn, in which rounds begin to run ahead and cease to, do
not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator

import torch

from specrs.engine import LLM
from specrs.engine.devices.graphs import Bucket
from specrs.sampling_params import SamplingParams

EDGE = 3
CHUNK = 2048
"""Tokens of prompts in a step of engines that are measured."""


def random_prompts(batch: int, context: int, most: int) -> list[list[int]]:
    """Prompts of random tokens 1 to ``most`` - 1, the same in every run."""
    generators = [torch.Generator().manual_seed(i) for i in range(batch)]
    return [torch.randint(1, most, (context,), generator=g).tolist() for g in generators]


def add(llm: LLM, prompts: list[list[int]], count: int) -> list[int]:
    """Requests for ``count`` tokens each."""
    return [llm.add(p, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)) for p in prompts]


def written(llm: LLM) -> bool:
    """Return whether all prompts are written, so that the next step is a round of every request."""
    scheduler = llm._scheduler
    return not scheduler._waiting and all(r.committed >= len(r.tokens) - 1 for r in scheduler._admitted)


def settle() -> None:
    """Wait for all work of the GPU, if this process has one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def timed(llm: LLM, tokens: dict[int, list[int]]) -> float:
    """Seconds of a step, the device idle before and after; the tokens of requests that end in it."""
    settle()
    started = time.perf_counter()
    for event in llm.step():
        if event.output is not None:
            tokens[event.request_id] = event.output.token_ids
    settle()
    return time.perf_counter() - started


def rounds(llm: LLM, prompts: list[list[int]], count: int) -> None:
    """Run requests of ``count`` tokens each, which makes the rounds' graphs."""
    add(llm, prompts, count)
    while llm.unfinished:
        llm.step()
    settle()


@dataclasses.dataclass
class Watch:
    """Record of the host while rounds ran on: seconds that it waited for them, and when each ended on the device.

    Attributes:
        waited: seconds by step.
        ends: nanoseconds of the device's clock, by round.
    """

    waited: float = 0.0
    ends: dict[int, int] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Watch the rounds that a GPU's engines collect meanwhile."""
        collect = Bucket.collect

        def watched(bucket: Bucket, number: int) -> dict[str, torch.Tensor]:
            started = time.perf_counter()
            found = collect(bucket, number)
            self.waited += time.perf_counter() - started
            first = bucket.memory.ring.time_at
            self.ends[number] = int(found["header"][first : first + 2].view(torch.int64))
            return found

        Bucket.collect = watched  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Bucket.collect = collect  # type: ignore[method-assign]

    def periods(self) -> list[int]:
        """Nanoseconds from the end of a round to the end of the next one."""
        numbers = sorted(self.ends)
        return [self.ends[b] - self.ends[a] for a, b in itertools.pairwise(numbers) if b == a + 1]


class Steady:
    """Requests whose prompts an engine has written, and the times of the rounds that they run in turns.

    Attributes:
        tokens: tokens that each request got so far.
    """

    def __init__(self, llm: LLM, prompts: list[list[int]], count: int) -> None:
        """Write the prompts; each request may get ``count`` tokens."""
        self._llm = llm
        self._ids = add(llm, prompts, count)
        self._tokens: dict[int, list[int]] = {i: [] for i in self._ids}
        self._steps: list[float] = []
        self._hosts: list[float] = []
        self._periods: list[float] = []
        while not written(llm):
            self._step()

    @property
    def tokens(self) -> list[list[int]]:
        return [self._tokens[i] for i in self._ids]

    def turn(self, count: int | None = None) -> None:
        """Run ``count`` steps; ``None``: until a request ends, which ends any turn.

        Raises:
            RuntimeError: a request ended before enough steps were timed.
        """
        steps: list[float] = []
        hosts: list[float] = []
        watch = Watch()
        settle()
        with watch.on():
            while count is None or len(steps) < count:
                watch.waited, started = 0.0, time.perf_counter()
                self._step()
                took = time.perf_counter() - started
                if self._llm.unfinished < len(self._ids):
                    break
                steps.append(took)
                hosts.append(took - watch.waited)
        least = 2 * EDGE + 3 if count is None else count
        if len(steps) < least:
            raise RuntimeError(f"{len(steps)} steady rounds, at least {least} are timed: a request ended early")
        middle = slice(EDGE, -EDGE)
        self._steps += steps[middle]
        self._hosts += hosts[middle]
        self._periods += watch.periods()[middle]

    def finish(self) -> None:
        """Run the requests to their ends."""
        while self._llm.unfinished:
            self._step()

    def drop(self) -> None:
        """Abort what is left of the requests."""
        for i in self._ids:
            self._llm.abort(i)
        settle()

    def figures(self) -> dict[str, float]:
        """Milliseconds, medians over all turns.

        ``step_ms``: from step to step. ``host_ms``: the host's part of a step, without its wait for the device.
        ``period_ms``: from the end of a round to the end of the next one, by the device's clock; a GPU's graphs alone.
        """
        found = {"step_ms": statistics.median(self._steps) * 1e3, "host_ms": statistics.median(self._hosts) * 1e3}
        if self._periods:
            found["period_ms"] = statistics.median(self._periods) / 1e6
        return {name: round(ms, 4) for name, ms in found.items()}

    def _step(self) -> None:
        for event in self._llm.step():
            self._tokens[event.request_id] += event.token_ids


def count_beside_prompts(prompts: list[list[int]], count: int) -> int:
    """Tokens of a request that runs ``count`` rounds in a full batch.

    Prompts are written in turn, while the first requests decode already: none may end before the last one begins.
    """
    return sum(map(len, prompts)) // CHUNK + count


def steady(llm: LLM, prompts: list[list[int]], count: int) -> tuple[list[list[int]], dict[str, float]]:
    """Return tokens of each request, and `Steady.figures` of its rounds; only the engine waits for the device."""
    run = Steady(llm, prompts, count_beside_prompts(prompts, count))
    run.turn()
    run.finish()
    return run.tokens, run.figures()


@contextlib.contextmanager
def under_way(llm: LLM, prompts: list[list[int]], count: int) -> Iterator[None]:
    """Requests that decode, all prompts written and the first rounds over; dropped behind the block."""
    run = Steady(llm, prompts, count_beside_prompts(prompts, count))
    try:
        for _ in range(4):
            llm.step()
        settle()
        yield
    finally:
        run.drop()
