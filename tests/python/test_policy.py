"""The cost model's choices, on plain numbers."""

from __future__ import annotations

import math

from specrs.engine.policy import Costs, PassCost, SpeculationGate, TreePolicy


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


def test_a_request_whose_drafts_lose_is_decoded_plainly_ever_longer() -> None:
    gate, spec, plain = SpeculationGate(), 0, 0
    for _ in range(5000):
        if gate.speculate:
            gate.spec_round(1, 1.5)
            spec += 1
        else:
            gate.plain_round()
            plain += 1
    assert spec < 60, "probes must be rare"
    # Drafts that win again are found by a probe.
    for _ in range(3000):
        gate.spec_round(4, 2.0) if gate.speculate else gate.plain_round()
    assert gate.speculate


def test_a_request_whose_drafts_win_is_never_closed() -> None:
    gate = SpeculationGate()
    for i in range(1000):
        assert gate.speculate
        gate.spec_round(1 + i % 6, 2.0)  # between 1 and 6 tokens for the time of 2
