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


def test_cost_follows_what_is_seen() -> None:
    cost = PassCost([1, 8], [1.0, 1.0])
    for _ in range(200):
        cost.observe(4, 2.0)
    assert abs(cost.at(4) - 2.0) < 0.01
    cost.observe(4, 1e9)  # one outlier moves it a little only
    assert cost.at(4) < 2.5


def test_sure_drafts_are_all_verified_and_hopeless_ones_are_not() -> None:
    p = policy()
    assert p.choose(1, [math.log(0.95)] * 5, 16, 0.2, 0.2).nodes == 5
    assert p.choose(1, [math.log(0.01)] * 5, 16, 0.2, 0.2).nodes == 0
    assert p.choose(1, [], 16, 0.2, 0.2).nodes == 0


def test_the_choice_is_the_best_by_exhaustion() -> None:
    p = policy(growth=0.1)
    scores = sorted((math.log(0.9 / (i + 1)) for i in range(12)), reverse=True)
    best = max(
        range(13),
        key=lambda n: (1 + p.worth * sum(math.exp(s) for s in scores[:n])) / (0.2 + p.costs.target.at(1 + n) + 0.2),
    )
    choice = p.choose(1, scores, 12, 0.2, 0.2)
    assert choice.nodes == best
    assert choice.min_score == scores[best - 1]


def test_drafting_stops_where_a_step_costs_more_than_it_brings() -> None:
    cheap, dear = policy(step=0.05), policy(step=5.0)
    assert cheap.deepen(1, [[math.log(0.8)]])
    assert not dear.deepen(1, [[math.log(0.8)]])
    assert not cheap.deepen(1, [[math.log(1e-4)]])


def test_a_request_whose_drafts_lose_is_decoded_plainly_ever_longer() -> None:
    gate, spec, plain = SpeculationGate(), 0, 0
    for _ in range(5000):
        if gate.speculate:
            gate.spec_round(0.7)
            spec += 1
        else:
            gate.plain_round()
            plain += 1
    assert spec < 60, "probes must be rare"
    # Drafts that win again are found by a probe.
    for _ in range(3000):
        gate.spec_round(2.0) if gate.speculate else gate.plain_round()
    assert gate.speculate


def test_a_request_whose_drafts_win_is_never_closed() -> None:
    gate = SpeculationGate()
    for _ in range(1000):
        assert gate.speculate
        gate.spec_round(1.8)
