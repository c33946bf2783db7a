"""The cost model's choices, on plain numbers."""

from __future__ import annotations

import math
import random

import pytest

from specrs.engine.costs import Costs, Pace, PassCost
from specrs.engine.policy import SpeculationGate, TreePolicy


def policy(step: float = 0.2, growth: float = 0.02) -> TreePolicy:
    rows = [1, 8, 64]
    return TreePolicy(
        Costs(
            target=PassCost(rows, [1.0 + growth * r for r in rows]),
            draft_step=PassCost(rows, [step] * 3),
            draft_extend=PassCost(rows, [step] * 3),
        )
    )


def test_cost_interpolates_and_extrapolates() -> None:
    cost = PassCost([1, 4, 8], [1.0, 1.0, 2.0])
    assert [cost.at(n) for n in (0, 1, 2, 4, 6, 8, 12)] == [0.0, 1.0, 1.0, 1.0, 1.5, 2.0, 3.0]


def test_cost_follows_what_is_seen_and_no_outlier() -> None:
    cost = PassCost([1, 8], [1.0, 1.0])
    for _ in range(200):
        cost.observe(4, 2.0)
    assert abs(cost.at(4) - 2.0) < 0.05
    for _ in range(50):  # one pass in five is stalled
        for seconds in (2.0, 2.0, 1e9, 2.0, 2.0):
            cost.observe(4, seconds)
    assert abs(cost.at(4) - 2.0) < 0.1


def test_costs_stay_in_order_on_a_busy_machine() -> None:
    # The observations of one row alone left at(2) = 7.55 above at(3) = 3.45.
    cost = PassCost([1, 2, 4, 8], [2.3, 2.8, 4.1, 6.2])
    for _ in range(60):
        cost.observe(1, 8.0)
    assert cost.at(1) > 5.0
    assert sorted(cost.seconds) == cost.seconds
    for seconds in (1.0, 30.0, 0.1):
        for rows in (1, 3, 8, 100, 5):
            for _ in range(50):
                cost.observe(rows, seconds)
                assert sorted(cost.seconds) == cost.seconds


def test_a_slow_machine_slows_every_pass() -> None:
    pace = Pace()
    target, step = PassCost([1, 2, 4, 8], [2.0, 2.5, 4.0, 6.0], pace), PassCost([1, 8], [0.3, 0.5], pace)
    for _ in range(200):
        target.observe(1, 4.0)
    assert target.at(1) == pytest.approx(4.0, rel=0.05)
    for before, after in ((2.5, target.at(2)), (6.0, target.at(8)), (0.3, step.at(1))):
        assert 1.4 < after / before < 2.2


def test_an_entry_that_is_not_observed_returns_to_its_shape() -> None:
    cost = PassCost([1, 2, 8], [2.0, 2.5, 6.0])
    for seconds in (12.0, 2.0):
        for _ in range(1500):
            cost.observe(1, seconds)
    assert cost.seconds == pytest.approx([2.0, 2.5, 6.0], rel=0.1)


def test_costs_of_a_round() -> None:
    costs = policy(step=0.25, growth=0.0).costs
    overhead = costs.spec_overhead.seconds
    assert costs.plain(3) == 1.0 + costs.plain_overhead.seconds
    assert costs.drafting(batch=3, beams=6, steps=4) == 5 * 0.25 + overhead
    for _ in range(300):
        costs.spec_overhead.observe(0.01)
    assert abs(costs.spec_overhead.seconds - 0.01) < 5e-4


def test_sure_drafts_are_all_verified_and_hopeless_ones_are_not() -> None:
    p = policy()
    assert p.choose(1, [math.log(0.95)] * 5, 0.4).nodes == 5
    assert p.choose(1, [math.log(0.0001)] * 5, 0.4).nodes == 0
    assert p.choose(1, [], 0.4).nodes == 0


def test_the_choice_is_the_best_by_exhaustion() -> None:
    p = policy(growth=0.3)
    scores = sorted((math.log(0.9 / (i + 1)) for i in range(12)), reverse=True)
    best = max(
        range(13),
        key=lambda n: (1 + sum(p.chance(s) for s in scores[:n])) / (0.4 + p.costs.target.at(1 + n)),
    )
    choice = p.choose(1, scores, 0.4)
    assert 0 < best < 12
    assert choice.nodes == best
    assert choice.min_score == scores[best - 1]


def test_drafting_stops_where_a_step_costs_more_than_it_brings() -> None:
    cheap, dear = policy(step=0.05), policy(step=5.0)
    assert cheap.deepen(1, 1, [[math.log(0.8)]])
    assert not dear.deepen(1, 1, [[math.log(0.8)]])
    assert not cheap.deepen(1, 1, [[math.log(1e-4)]])
    # Every request of a batch pays for the pass, whether it drafts or not.
    assert policy(step=0.3).deepen(4, 1, [[math.log(0.8)]] * 4)
    assert not policy(step=0.3).deepen(4, 1, [[math.log(0.8)]])
    assert not cheap.deepen(4, 1, [])


def test_chances_are_learned() -> None:
    p = policy()
    scores = [math.log(q) for q in (0.8, 0.5, 0.3)]
    for true in (0.5, 1.2):
        for i in range(2000):
            # Accepted counts are whole numbers whose mean is what this temper predicts.
            mean = sum(math.exp(true * s) for s in scores)
            p.learn(scores, math.floor(mean * (i + 1)) - math.floor(mean * i), 1.5)
        assert abs(p.temper - true) < 0.1
    assert abs(p.gain - 1.5) < 0.01


def decode(p: TreePolicy, gate: SpeculationGate, tokens: int, chance: float, rng: random.Random) -> tuple[float, int]:
    """Plain rounds that ``tokens`` take as the runner decodes them, each draft token being accepted with ``chance``
    whatever its score says; and speculative rounds among them."""
    costs = p.costs
    took, done, spec = 0.0, 0, 0
    boast = [i * math.log(0.97) for i in range(1, 9)]  # a head that is sure of itself
    while done < tokens:
        if not gate.affords(p.stake(1, 1)):
            gate.plain_round()
            took, done = took + 1.0, done + 1
            continue
        limit, levels = p.limit(1, [gate.account]), 1
        while levels < 8 and p.deepen(1, levels, [boast[levels - 1 : levels]], limit):
            levels += 1
        drafting = costs.drafting(1, 1, levels - 1)
        choice = p.choose(1, boast[:levels], drafting, limit)
        accepted = next((i for i in range(choice.nodes) if rng.random() >= chance), choice.nodes)
        cost = (drafting + costs.target.at(1 + choice.nodes)) / costs.plain(1)
        gate.spec_round(accepted - (cost - 1.0))
        p.learn(boast[: choice.nodes], accepted, (accepted + 1) / cost)
        took, done, spec = took + cost, done + accepted + 1, spec + 1
    return took, spec


MACHINES = {"rows are cheap": (0.1, 0.03), "rows are dear": (0.15, 0.12), "drafts are dear": (0.4, 0.05)}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("tokens", [64, 128, 512])
def test_drafts_lose_no_more_than_the_account(machine: str, tokens: int) -> None:
    step, growth = MACHINES[machine]
    for chance in (0.0, 0.1, 0.3, 0.5, 0.7):
        for seed in range(4):
            p, rng = policy(step, growth), random.Random(seed)
            for _ in range(5):  # the first of an engine, and what follows it
                gate = p.gate(sampled=True)
                most = gate.account + 0.006 * tokens
                took, _ = decode(p, gate, tokens, chance, rng)
                # A round may end beyond ``tokens``; what it drew there is not counted here.
                assert took <= tokens + most, (chance, seed)


def test_an_engine_opens_accounts_by_what_drafts_have_been_worth() -> None:
    p = policy()
    before = p.gate(sampled=True).account
    for _ in range(100):
        p.gate(sampled=True).spec_round(-0.5)
        p.gate(sampled=False).spec_round(1.5)
    assert p.gate(sampled=True).account < before < p.gate(sampled=False).account


@pytest.mark.parametrize("machine", MACHINES)
def test_drafts_that_win_are_not_held_back(machine: str) -> None:
    step, growth = MACHINES[machine]
    p, rng = policy(step, growth), random.Random(1)
    decode(p, p.gate(sampled=False), 200, 0.95, rng)
    held, free = 0.0, 0.0
    for _ in range(20):
        held += decode(p, p.gate(sampled=False), 200, 0.95, rng)[0]
        free += decode(p, SpeculationGate(p.kinds[False], 1e9), 200, 0.95, rng)[0]
    assert held < 1.05 * free


def test_drafts_that_win_again_are_found() -> None:
    p, rng = policy(), random.Random(2)
    gate = p.gate(sampled=False)
    _, lost = decode(p, gate, 2000, 0.0, rng)
    assert lost < 100, "rounds that lose must be rare"
    took, _ = decode(p, gate, 500, 0.9, rng)
    assert took < 0.6 * 500
