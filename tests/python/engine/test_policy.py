"""The cost model's choices, on plain numbers."""

from __future__ import annotations

import math
import random

import pytest

from gate_simulation import decode, policy, request
from specrs.engine.costs import PLAIN, SPECULATIVE, Pace, PassCost
from specrs.engine.policy import Kind, SpeculationGate, TreePolicy


def nodes(p: TreePolicy, scores: list[float], sampled: bool = False) -> list[tuple[float, Kind]]:
    return [(score, p.hot if sampled else p.greedy) for score in scores]


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
    assert costs.plain(3) == 1.0 + costs.overhead.at(PLAIN)
    extend = costs.draft_extend.at(6)
    assert costs.drafting(batch=3, beams=6, steps=4) == 4 * 0.25 + extend + costs.overhead.at(SPECULATIVE)
    for _ in range(300):
        costs.overhead.observe(SPECULATIVE, 0.01)
    assert abs(costs.overhead.at(SPECULATIVE) - 0.01) < 5e-4


def test_what_a_slow_spell_taught_of_drafting_passes_with_it() -> None:
    """Rounds that draft not, for they seemed dear, show that the machine has recovered."""
    costs = policy().costs
    before = costs.overhead.at(SPECULATIVE)
    for _ in range(300):
        costs.overhead.observe(PLAIN, 1e-3)
        costs.overhead.observe(SPECULATIVE, 2e-3)
    assert costs.overhead.at(SPECULATIVE) > 5 * before
    for _ in range(600):
        costs.overhead.observe(PLAIN, 1e-4)
    assert costs.overhead.at(SPECULATIVE) < 1.5 * before


def test_sure_drafts_are_all_verified_and_hopeless_ones_are_not() -> None:
    p = policy()
    assert p.choose(1, nodes(p, [math.log(0.95)] * 5), 0.4).nodes == 5
    assert p.choose(1, nodes(p, [math.log(0.0001)] * 5), 0.4).nodes == 0
    assert p.choose(1, [], 0.4).nodes == 0


def test_the_choice_is_the_best_by_exhaustion() -> None:
    p = policy(growth=0.3)
    scores = sorted((math.log(0.9 / (i + 1)) for i in range(12)), reverse=True)
    best = max(
        range(13),
        key=lambda n: (1 + sum(p.greedy.chance(s) for s in scores[:n])) / (0.4 + p.costs.target.at(1 + n)),
    )
    choice = p.choose(1, nodes(p, scores), 0.4)
    assert 0 < best < 12
    assert choice.nodes == best
    assert choice.min_score == scores[best - 1]


def test_drafting_stops_where_a_step_costs_more_than_it_brings() -> None:
    cheap, dear = policy(step=0.05), policy(step=5.0)
    kind = Kind(hits=0.5)
    assert cheap.deepen(1, 1, [(kind, [math.log(0.8)])])
    assert not dear.deepen(1, 1, [(kind, [math.log(0.8)])])
    assert not cheap.deepen(1, 1, [(kind, [math.log(1e-4)])])
    # Every request of a batch pays for the pass, whether it drafts or not.
    assert policy(step=0.3).deepen(4, 1, [(kind, [math.log(0.8)])] * 4)
    assert not policy(step=0.3).deepen(4, 1, [(kind, [math.log(0.8)])])
    assert not cheap.deepen(4, 1, [])


def test_chances_are_learned_by_kind() -> None:
    """Greedy requests and those that sample, in turns: neither's drafts say anything of the other's."""
    p = policy()
    scores = [math.log(q) for q in (0.8, 0.5, 0.3)]
    for temper in ((0.5, 1.2), (1.2, 0.5)):
        for i in range(2000):
            for sampled, true in zip((False, True), temper, strict=True):
                # Accepted counts are whole numbers whose mean is what this temper predicts.
                mean = sum(math.exp(true * s) for s in scores)
                accepted = math.floor(mean * (i + 1)) - math.floor(mean * i)
                (p.hot if sampled else p.greedy).learn(scores, accepted, 1.5 + sampled)
        assert [p.greedy.temper, p.hot.temper] == pytest.approx(temper, abs=0.1)
    assert [p.greedy.gain, p.hot.gain] == pytest.approx((1.5, 2.5), abs=0.01)


MACHINES = {"rows are cheap": (0.1, 0.03), "rows are dear": (0.15, 0.12), "drafts are dear": (0.4, 0.05)}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("tokens", [64, 128, 256, 512])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.3, 0.5, 0.7])
def test_drafts_lose_no_more_than_the_account(machine: str, tokens: int, chance: float) -> None:
    step, growth = MACHINES[machine]
    for seed in range(4):
        p, rng = policy(step, growth), random.Random(seed)
        lost = 0.0
        for _ in range(12):  # the first of an engine, and what follows it
            gate = p.gate(1.0, tokens, 0)
            start = gate.account
            assert start <= 0.018 * tokens
            done = decode(p, gate, tokens, chance, rng)
            p.hot.ended(done.tokens, gate.net, gate.loan)
            # The last round may draw more than ``tokens``.
            assert done.took <= done.tokens + start + 2.0 * p.stake(1, 1) * done.deceived + 1e-9, (chance, seed)
            lost += done.took - done.tokens
        assert lost <= 0.005 * 12 * tokens + 0.018 * tokens + 0.3  # in the long run, and what may be lost before that


def test_a_round_is_paid_by_those_who_draft() -> None:
    """The fewer draft, the more each of them may lose; none is asked for more than its account has."""
    p, rng = policy(step=0.4), random.Random(3)
    four, one = p.stake(4, 4), p.stake(4, 1)
    assert four < one
    assert p.drafting([four] * 4) == [True] * 4
    assert p.drafting([four, 0.0, 0.0, 0.0]) == [False] * 4  # alone, it could not pay
    assert p.drafting([one, 0.0, None, 0.0]) == [True, False, False, False]
    assert p.drafting([None, None]) == [False] * 2
    for _ in range(500):
        accounts = [rng.choice([None, rng.uniform(-0.5, 2.0)]) for _ in range(rng.randrange(1, 9))]
        drafting = p.drafting(accounts)
        paying = [a for a, d in zip(accounts, drafting, strict=True) if d]
        assert all(a is not None and a >= p.stake(len(accounts), len(paying)) for a in paying)


def test_a_request_is_followed_where_its_length_or_the_bank_pays_a_try() -> None:
    p = policy()
    tried = p.stake(1, 1) + p.look_back(1) + p.waiting(32, 1)

    def first(tokens: int, prompt: int) -> SpeculationGate:
        return policy().gate(0.0, tokens, prompt)

    assert not first(16, 0).follows and first(16, 0).account == 0.0
    assert first(160, 0).follows and first(160, 0).account >= tried
    assert first(10**6, 0).account == first(160, 0).account  # requests are expected to be as long as others
    assert first(160, 10).account == pytest.approx(first(160, 0).account - p.waiting(10, 1))
    assert not first(160, 10_000).follows  # a prompt whose draft KV no drafts would earn
    assert not policy(step=2.0).gate(0.0, 160, 0).follows
    p.greedy.ended(0, -5.0)
    assert not p.gate(0.0, 160, 0).follows and p.gate(1.0, 160, 0).follows  # kinds have banks of their own
    for _ in range(12):
        p.greedy.ended(100, 0.0)
    assert p.greedy.bank > 1.0 and p.greedy.worth == pytest.approx(-0.75)  # requests without the head say nothing of it
    assert p.gate(0.0, 64, 0).follows


def test_requests_that_run_at_once_do_not_borrow_the_same_rounds() -> None:
    p = policy()
    p.greedy.ended(64, 50.0)
    full = p.greedy.bank
    gates = [p.gate(0.0, 160, 0) for _ in range(8)]
    lent = sum(gate.loan for gate in gates)
    assert gates[0].loan > 0 and p.greedy.bank == pytest.approx(full - lent) and p.greedy.bank >= 0
    for gate in gates:
        p.greedy.ended(0, 0.0, gate.loan)
    assert p.greedy.bank == pytest.approx(full)


def test_a_refused_look_back_holds_until_the_next() -> None:
    p = policy()
    for _ in range(5):
        p.greedy.ended(160, 6.0)
    gate = p.gate(0.0, 160, 0)
    assert p.early(gate, 1)
    gate.looked_back(hits=1, stake=0.9)
    assert not p.early(gate, 1) and not p.early(gate, gate.patience)
    assert p.too_late(gate, 0, gate.patience + 7) and not p.too_late(gate, 0, gate.patience + 8)
    gate.looked_back(hits=8, stake=0.1)
    assert p.early(gate, 1)


def test_a_request_tells_what_the_head_won_it() -> None:
    gate = policy().gate(0.0, 160, 0)
    start, before = gate.account, gate.net
    gate.pay(0.2)
    gate.spec_round(1.5)
    gate.spec_round(-0.4)
    assert gate.net - before == pytest.approx(0.9)
    assert gate.account - start == pytest.approx(0.9)


def test_a_kind_whose_drafts_won_drafts_at_once() -> None:
    p = policy()
    gate = p.gate(0.0, 64, 0)
    assert not p.greedy.trusted() and p.needed(gate, 1, 1) > p.stake(1, 1)
    for _ in range(5):
        p.greedy.ended(64, 6.0)
    gate = p.gate(0.0, 64, 0)
    assert p.greedy.trusted() and gate.follows and p.needed(gate, 1, 1) == p.stake(1, 1)
    assert p.needed(gate, 1, gate.patience + 1) > p.stake(1, 1)
    assert p.drafting([gate.account])[0]


def test_a_look_back_opens_the_gate_or_asks_for_patience() -> None:
    p = policy()
    gate, stake = p.gate(0.0, 160, 0), p.stake(1, 1)
    first = gate.patience
    assert not gate.looked_back(hits=1, stake=0.5) and gate.follows
    assert gate.patience == 2 * first
    assert p.needed(gate, 1, 0) > p.needed(p.gate(0.0, 160, 0), 1, 0)
    assert gate.looked_back(hits=7, stake=stake) and gate.patience == first
    assert not gate.looked_back(hits=8, stake=1.0)  # whatever the head foretells, a round cannot win that much
    assert not gate.looked_back(hits=0, stake=stake) and not gate.follows


def test_the_price_of_a_look_back_is_learned() -> None:
    p = policy()
    modelled = p.look_back(1)
    for _ in range(40):
        p.looked_back(1, 100, 2.0 * modelled * p.costs.plain(1) + p.waiting(100, 1) * p.costs.plain(1))
    assert p.look_back(1) == pytest.approx(2.0 * modelled, rel=0.01)
    for _ in range(40):
        p.looked_back(1, 100, 0.0)
    assert 0 < p.look_back(1) < modelled  # never below its passes


def test_a_kind_remembers_how_often_its_drafts_hit() -> None:
    sure, unsure = Kind(hits=0.5), Kind(hits=0.5)
    for _ in range(200):
        sure.learn([math.log(0.5)], 1, 1.5)
        unsure.learn([math.log(0.5)], 0, 0.8)
    assert sure.foretells(3) > 0.5 > Kind(hits=0.5).foretells(3) > 0.3 > unsure.foretells(3)


@pytest.mark.parametrize("machine", MACHINES)
def test_drafts_that_win_are_not_held_back(machine: str) -> None:
    step, growth = MACHINES[machine]
    p, rng = policy(step, growth), random.Random(1)
    p.greedy.ended(200, 100.0)  # the first request
    held, free = 0.0, 0.0
    for _ in range(20):
        gate = p.gate(0.0, 200, 0)
        held += decode(p, gate, 200, 0.95, rng).took
        p.greedy.ended(200, gate.net, gate.loan)
        free += decode(p, SpeculationGate(p.greedy, 1e9), 200, 0.95, rng).took
    assert held < 1.05 * free


def test_drafts_that_win_again_are_found() -> None:
    p, rng = policy(), random.Random(2)
    gate = p.gate(0.0, 1000, 0)
    assert not gate.looked_back(hits=1, stake=0.5)
    assert decode(p, gate, 1000, 0.9, rng).took < 0.7 * 1000


def test_requests_whose_drafts_win_are_found_among_those_that_lose() -> None:
    p, rng = policy(), random.Random(2)
    for _ in range(40):
        request(p, 200, 0.0, rng)
    assert sum(request(p, 200, 0.9, rng).took for _ in range(40)) < 0.7 * 40 * 200
