"""Costs of passes, measured beside a neighbour that takes the machine in spells."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

import specrs.engine.devices.calibration as calibration
import specrs.engine.devices.host as host
from modelzoo import Pair
from specrs import LLM, SamplingParams
from specrs.models.eagle3 import Eagle3Head
from specrs.models.llama import LlamaModel

PRICES: dict[str, Callable[[int], float]] = {
    "target": lambda rows: 1.0 + 0.1 * rows,
    "step": lambda rows: 0.2 + 0.01 * rows,
}


@pytest.mark.parametrize("spell", [7, 40, 1000])
def test_a_slow_spell_changes_no_ratio(bytes_pair: Pair, spell: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For so many passes everything takes five times as long; then for as many it does not."""
    clock, passes = SimpleNamespace(now=0.0), count()
    monkeypatch.setattr(host, "thread_clock", lambda: lambda: clock.now)

    def priced(owner: Any, name: str, price: Callable[[int], float]) -> None:
        run = getattr(owner, name)

        def timed(self: Any, tokens: Any, *args: Any) -> Any:
            clock.now += price(len(tokens)) * (5.0 if next(passes) // spell % 2 else 1.0)
            return run(self, tokens, *args)

        monkeypatch.setattr(owner, name, timed)

    monkeypatch.setattr(calibration, "_ENOUGH", 1e9)
    priced(LlamaModel, "forward", PRICES["target"])
    priced(Eagle3Head, "step", PRICES["step"])
    with LLM(bytes_pair.target, bytes_pair.draft, max_batch=2) as llm:
        policy = llm._runner.drafting.policy
        costs = policy.costs
        one = costs.target.at(1) / PRICES["target"](1)
        assert 0.99 < one < 5.01
        for rows in (1, 2, 4, 8):
            assert costs.target.at(rows) / one == pytest.approx(PRICES["target"](rows), rel=0.01)
            assert costs.draft_step.at(rows) / one == pytest.approx(PRICES["step"](rows), rel=0.01)


def test_a_thread_clock_of_coarse_ticks_gives_way_to_the_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calibration.thread_clock() is time.thread_time
    tick = SimpleNamespace(perf_counter=time.perf_counter, thread_time=lambda: time.perf_counter() // 10 * 10)
    monkeypatch.setattr(calibration, "time", tick)
    assert calibration.thread_clock() is time.perf_counter


@pytest.mark.parametrize("seconds", [lambda: 0.0, count(0, -1).__next__])
def test_a_clock_that_stands_still_or_runs_backwards_changes_no_token(
    seconds: Callable[[], float], bytes_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with LLM(bytes_pair.target, max_batch=2, speculative=False) as plain:
        want = [out.token_ids for out in plain.generate([[1, 2, 3], [4, 5]], params)]
    monkeypatch.setattr(host, "thread_clock", lambda: seconds)
    with LLM(bytes_pair.target, bytes_pair.draft, max_batch=2) as llm:
        assert [out.token_ids for out in llm.generate([[1, 2, 3], [4, 5]], params)] == want
