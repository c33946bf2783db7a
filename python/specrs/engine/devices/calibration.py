"""The costs of an engine's passes, measured once when the engine is made."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from specrs import _specrs as core
from specrs.engine.drafting.chooser import Kind, TreePolicy
from specrs.engine.drafting.costs import LEAST, Costs, Pace, PassCost
from specrs.engine.rounds.pages import Pages
from specrs.models.head import Head, StepDrafter
from specrs.models.llama import LlamaModel
from specrs.models.ops import KvMemory

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_RUNS = 7
_ENOUGH = 0.2  # seconds of runs of one row count; a large model's passes vary less
_TICK = 1e-3  # seconds
_CONTEXT = 256  # tokens before the rows, because attention to them adds to the cost of a row


def thread_clock() -> Callable[[], float]:
    """Return the clock of the thread, or where it stands still for a millisecond of work, that of the wall: some
    kernels and sandboxes count a thread's time in ticks of more."""
    began, worked = time.perf_counter(), time.thread_time()
    while time.perf_counter() - began < _TICK:
        pass
    return time.thread_time if time.thread_time() > worked else time.perf_counter


def calibrated(
    target: LlamaModel,
    cache: KvMemory,
    head: tuple[Head, KvMemory] | None,
    planner: core.Planner,
    pages: Pages,
    clock: Callable[[], float],
) -> TreePolicy:
    """Return a policy from measured passes of a few row counts.

    Each pass is measured in a pair with the target's pass of one row. If other work slows the machine for a while, it
    slows both passes, and the policy needs only the ratio of their times.

    Args:
        head: the head and its cache; ``None`` if drafts come from elsewhere and cost no pass.
        clock: tells the seconds.
    """
    room = pages.most_tokens
    most = min(_ROWS[-1], room)
    table = [n for n in _ROWS if n <= most]
    context = min(_CONTEXT, room - most)
    host = target.ops.dense.host
    seq = pages.pool.create()

    def verify(n: int, plan: core.Plan) -> None:
        host(target.forward(torch.arange(n) % target.config.vocab_size, plan, cache, True if head else None, None)[0])

    def seconds(run: Callable[[int, core.Plan], None], n: int) -> float:
        started = clock()
        plan = planner.extend([seq], [context], [n])
        run(n, plan)
        return max(clock() - started, LEAST)  # no clock of a virtual machine is beyond doubt

    pace = Pace()  # shared by all passes, because they run on one machine
    plain: list[float] = []  # seconds of passes of one row

    def measure(run: Callable[[int, core.Plan], None]) -> list[float]:
        """Return the median time of a pass for each row count, in units of the target's pass of one row."""
        found = []
        for n in table:
            seconds(run, n)  # makes the buffers of this row count
            ratios, took = list[float](), 0.0
            while len(ratios) < _RUNS and took < _ENOUGH:
                # The target's pass pushes the head's weights out of the CPU's inner caches, as it does in a round.
                plain.append(seconds(verify, 1))
                this = seconds(run, n)
                ratios.append(this / plain[-1])
                took += this + plain[-1]
            # The minimum would be the time on a cool core. On a hot core, passes of many rows take half as long again.
            found.append(statistics.median(ratios))
        return found

    with pages.pool.reserve([(seq, context + most)]) as lease:
        lease.advance([context])  # passes are planned behind committed positions; any KV there costs the same
        ratios = [measure(verify)]
        if head is not None and head[0].passes != "block":
            ratios.append(measure(_step(target, head[0], head[1], most)))
    pages.pool.release([seq])
    alone = statistics.median(plain)
    costs = [PassCost(table, [alone * ratio for ratio in some], pace) for some in ratios]
    if head is None:
        return TreePolicy(Costs(costs[0]))
    kinds = [Kind.of(one, planner.geometry.shape.steps) for one in head[0].acceptance]
    return TreePolicy(Costs(*costs), kinds)


def costs_of_blocks(drafting: Mapping[int, float], pace: Pace) -> PassCost:
    """Return the cost of drafting all levels in one pass as `Costs.drafting` asks for it, from seconds by batch."""
    batches = sorted(drafting)
    return PassCost([2 * n for n in batches], [drafting[n] for n in batches], pace)  # two positions of each request


def _step(target: LlamaModel, head: StepDrafter, cache: KvMemory, most: int) -> Callable[[int, core.Plan], None]:
    """Return a function that runs a draft step of up to ``most`` rows."""
    hidden = target.ops.placement.empty(most, head.config.hidden_size).zero_()

    def step(n: int, plan: core.Plan) -> None:
        target.ops.dense.host(head.step(torch.zeros(n, dtype=torch.int64), hidden[:n], plan, cache)[0])

    return step
