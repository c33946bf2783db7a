"""The queue of requests that wait: it has the order of a sorted list, and leaving it costs the same at any length."""

from __future__ import annotations

import random
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from aio_world import OPTIONS
from modelzoo import Pair
from specrs import LLM, SamplingParams
from specrs.engine.rounds.waiting import WaitingQueue


def counted(work: Any) -> int:
    """Lines of Python that a call runs, in all of its frames."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_that_of_a_sorted_list(seed: int) -> None:
    rng = random.Random(seed)
    queue, model, out = WaitingQueue(), [], []
    for i in range(400):
        done = rng.random()
        if done < 0.45 or not model:
            back = out.pop(rng.randrange(len(out))) if out and rng.random() < 0.5 else None  # it was preempted
            one: Any = back or SimpleNamespace(
                request_id=i, arrival=i, held=False, tokens=[0] * rng.randint(1, 9),
                params=SimpleNamespace(priority=rng.randint(-1, 1)),
            )  # fmt: skip
            queue.add(one)
            model.append(one)
        elif done < 0.7:
            queue.remove(gone := model.pop(rng.randrange(len(model))))
            out.append(gone)
        elif done < 0.8:
            one = rng.choice(model)
            one.held = not one.held
        model.sort(key=lambda r: (r.params.priority, r.arrival))
        assert list(queue) == model and len(queue) == len(model)
        assert queue.first() is next((r for r in model if not r.held), None)
        assert queue.tokens == sum(len(r.tokens) for r in model)
        assert all((r in queue) == (r in model) for r in (*model, *out))


@pytest.mark.parametrize("order", ["first come", "last come", "any"])
def test_closing_many_requests_costs_each_the_same(tiny: Pair, order: str) -> None:
    """With a queue 8 times as long, an abort runs as many lines: clients that leave all at once hold nobody up."""
    each = []
    for size in (50, 400):
        with LLM(tiny.target, tiny.draft, **OPTIONS) as llm:
            ids = [llm.add([1, 2, 3], SamplingParams(max_tokens=4)) for _ in range(size)]
            llm.step()  # some of them run
            if order != "first come":
                ids.reverse()
            if order == "any":
                random.Random(1).shuffle(ids)
            ids = [i for i in ids if i in {r.asked_id for r in llm._scheduler.waiting}]
            each.append(counted(lambda llm=llm, ids=ids: [llm.abort(i) for i in ids]) / len(ids))
            assert not llm._scheduler.waiting and llm.stats().waiting == llm.stats().waiting_tokens == 0
            assert llm.audit()["sequences"] == OPTIONS["max_batch"]
    assert each[1] < 1.1 * each[0]
