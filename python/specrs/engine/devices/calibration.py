"""The costs of an engine's passes, measured once when the engine is made."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from specrs import _specrs as core
from specrs.engine.drafting.chooser import Kind, TreePolicy
from specrs.engine.drafting.costs import Costs, Pace, PassCost
from specrs.engine.rounds.pages import Pages
from specrs.models.head import BlockDrafter, Head, StepDrafter
from specrs.models.head_config import Eagle3Config
from specrs.models.llama import LlamaModel
from specrs.models.ops import KvMemory

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_RUNS = 7
_ENOUGH = 0.2  # seconds of runs of one row count; a large model's passes vary less
_CONTEXT = 256  # tokens before the rows, because attention to them adds to the cost of a row


def calibrated(
    target: LlamaModel,
    cache: KvMemory,
    head: tuple[Head, KvMemory] | None,
    planner: core.Planner,
    pages: Pages,
) -> TreePolicy:
    """Return a policy from measured passes of a few row counts.

    Each pass is measured in a pair with the target's pass of one row. If other work slows the machine for a while, it
    slows both passes, and the policy needs only the ratio of their times.

    Args:
        head: the head and its cache; ``None`` if drafts come from elsewhere and cost no pass.
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
        plan = planner.extend([seq], [context], [n])  # a new plan each time, because a device loads each
        started = time.perf_counter()
        run(n, plan)
        return time.perf_counter() - started

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
        ratios = [measure(run) for run in (verify, *(() if head is None else _passes(target, *head, most)))]
    pages.pool.release([seq])
    alone = statistics.median(plain)
    costs = [PassCost(table, [alone * ratio for ratio in some], pace) for some in ratios]
    if head is None:
        nothing = PassCost([1], [0.0], pace)
        return TreePolicy(Costs(costs[0], nothing, nothing, nothing))
    steps = planner.geometry.shape.steps
    kinds = [Kind.of(one, steps) for one in head[0].acceptance]
    if head[0].passes == "block":
        return TreePolicy(_of_blocks(costs, head[0].config.block_size, planner.geometry.max_batch), kinds)
    if isinstance(head[0].config, Eagle3Config) and head[0].config.levels:
        return TreePolicy(_of_blocks(costs, head[0].config.levels - 1, planner.geometry.max_batch), kinds)
    return TreePolicy(Costs(costs[0], costs[1], costs[2], costs[2]), kinds)


def _of_blocks(costs: Sequence[PassCost], rows: int, most: int) -> Costs:
    """Return the costs of an engine whose head drafts all levels in one pass, before which it runs over the last
    round's tokens.

    Args:
        costs: costs of the target's passes, of blocks (or draft steps) and of writes (or extends).
        rows: rows of that pass for a request.
        most: most requests of a batch.
    """
    target, blocks, writes = costs
    batches = sorted({*(1 << i for i in range(most.bit_length())), most})
    drafting = {n: (blocks.at(n * rows) + writes.at(2 * n)) / target.pace.factor for n in batches}
    return Costs(target, PassCost([1], [0.0], target.pace), costs_of_blocks(drafting, target.pace), writes)


def costs_of_blocks(drafting: Mapping[int, float], pace: Pace) -> PassCost:
    """Return the cost of drafting all levels in one pass as `Costs.drafting` asks for it, from seconds by batch."""
    batches = sorted(drafting)
    return PassCost([2 * n for n in batches], [drafting[n] for n in batches], pace)  # two positions of each request


_Run = Callable[[int, core.Plan], None]


def _passes(target: LlamaModel, head: Head, cache: KvMemory, most: int) -> tuple[_Run, _Run]:
    """Return functions that run passes of up to ``most`` rows: a draft step and a draft_extend, or a block and a
    write."""
    return _blocks(target, head, cache, most) if head.passes == "block" else _steps(target, head, cache, most)


def _blocks(target: LlamaModel, head: BlockDrafter, cache: KvMemory, most: int) -> tuple[_Run, _Run]:
    aux = target.ops.placement.empty(len(head.aux_layers), most, target.config.hidden_size).zero_()

    def block(n: int, plan: core.Plan) -> None:
        logits, _ = head.draft(torch.tensor(head.block(0, n)), plan, cache, torch.arange(n))
        core.DraftLists(target.ops.dense.host(logits), [n], 1)

    def write(n: int, plan: core.Plan) -> None:
        target.ops.dense.host(head.write([a[:n] for a in aux], plan, cache)[-1])

    return block, write


def _steps(target: LlamaModel, head: StepDrafter, cache: KvMemory, most: int) -> tuple[_Run, _Run]:
    at, host = target.ops.placement, target.ops.dense.host
    aux = at.empty(len(head.aux_layers), most, target.config.hidden_size).zero_()
    hidden = at.empty(most, head.config.hidden_size).zero_()
    last = torch.zeros(1, dtype=torch.int64)

    def step(n: int, plan: core.Plan) -> None:
        host(head.step(torch.zeros(n, dtype=torch.int64), hidden[:n], plan, cache)[0])

    def extend(n: int, plan: core.Plan) -> None:
        host(head.extend(torch.zeros(n, dtype=torch.int64), [a[:n] for a in aux], plan, cache, last)[0])

    return step, extend
