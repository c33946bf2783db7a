"""The cost model's choices, on plain numbers."""

from __future__ import annotations

import math
import random

import pytest

from gate_simulation import Engine, Simulated, begin, decode, policy, request
from specrs import _specrs as core
from specrs.engine.drafting.budget import CAP, ENGINE, RATE, REQUEST, Account, TokenBucket, request_bucket
from specrs.engine.drafting.chooser import TAIL, Kind
from specrs.engine.drafting.costs import Costs, Pace, PassCost
from specrs.models.acceptance import Acceptance


def test_cost_interpolates_and_extrapolates() -> None:
    cost = PassCost([1, 4, 8], [1.0, 1.0, 2.0])
    assert [cost.at(n) for n in (0, 1, 2, 4, 6, 8, 12)] == [0.0, 1.0, 1.0, 1.0, 1.5, 2.0, 3.0]


def test_the_pace_follows_what_is_seen_and_no_outlier() -> None:
    costs = Costs(PassCost([1, 8], [1.0, 1.0]))
    for _ in range(200):
        costs.observe(2.0, costs.plain(4))
    assert abs(costs.plain(4) - 2.0) < 0.05
    for _ in range(50):  # one round in five is stalled
        for seconds in (2.0, 2.0, 1e9, 2.0, 2.0):
            costs.observe(seconds, costs.plain(4))
    assert abs(costs.plain(4) - 2.0) < 0.1


def test_more_rows_never_cost_less() -> None:
    cost = PassCost([1, 2, 4, 8], [2.3, 2.0, 4.1, 3.9])
    assert [cost.at(n) for n in (1, 2, 4, 8)] == [2.3, 2.3, 4.1, 4.1]


def test_a_slow_machine_slows_every_pass() -> None:
    pace = Pace()
    costs = Costs(PassCost([1, 2, 4, 8], [2.0, 2.5, 4.0, 6.0], pace), PassCost([1, 8], [0.3, 0.5], pace))
    for _ in range(200):
        costs.observe(4.0, costs.plain(1))
    assert costs.plain(1) == pytest.approx(4.0, rel=0.05)
    for before, after in ((2.5, costs.plain(2)), (6.0, costs.plain(8)), (0.3, costs.draft_step.at(1))):
        assert after / before == pytest.approx(2.0, rel=0.05)


def test_costs_of_a_round() -> None:
    costs = policy(step=0.25, growth=0.0).costs
    assert costs.plain(3) == 1.0
    assert costs.drafting(batch=3, beams=6, levels=5) == 4 * 0.25 + costs.draft_extend.at(6)


def test_nodes_are_chosen_as_the_formula_says() -> None:
    """Against the same loops in plain Python: random trees, tables, batches and tiers."""
    rng = random.Random(11)
    for _ in range(300):
        rows = sorted(rng.sample(range(1, 40), rng.randrange(1, 6)))
        target = PassCost(rows, sorted(rng.uniform(0.5, 3.0) for _ in rows), Pace(rng.uniform(0.5, 2.0)))
        batch, beside = rng.randrange(1, 4), rng.uniform(0.01, 0.5)
        tiers = rng.choice([[], [2, 4, 8, 16]])
        asked = []
        for _ in range(batch):
            n = rng.randrange(0, 30)
            parents = [rng.randrange(-1, i) for i in range(n)]
            source = core.DraftProposal(parents, list(range(n)), [rng.uniform(0.05, 1.0) for _ in range(n)])
            asked.append((0, [source], 8, None))
        calibration = core.DraftCalibration(1)
        whole, _, seconds = core.choose_drafts(asked, calibration, 64, 40)
        assert seconds == 0.0
        scores = [sorted(tree.scores[1:], reverse=True) for tree in whole]
        options = [(float(batch), batch)]  # tokens, rows
        if tiers:
            filled = [tier for last, tier in zip([1, *tiers], tiers, strict=False) if max(map(len, whole)) > last]
            for tier in filled:
                tokens = batch + sum(math.exp(s) for own in scores for s in own[: tier - 1])
                options.append((tokens, batch * tier))
            first = 0.0
        else:
            best = sorted((s for own in scores for s in own), reverse=True)
            for n in range(1, len(best) + 1):
                options.append((batch + sum(map(math.exp, best[:n])), batch + n))
            first = batch / (beside + target.at(batch))
        tokens, rows_ = options[0]
        for one in options[1:]:
            seconds = beside + target.at(one[1])
            if one[0] / seconds > first:
                first, (tokens, rows_) = one[0] / seconds, one
        trees, got, seconds = core.choose_drafts(asked, calibration, 64, 40, (target.table, beside, tiers))
        assert got == pytest.approx(tokens) and seconds == pytest.approx(beside + target.at(rows_))
        if not tiers:
            assert sum(map(len, trees)) <= rows_
        else:
            assert max(map(len, trees)) <= rows_ // batch


def test_drafting_stops_where_a_step_costs_more_than_it_brings() -> None:
    cheap, dear = policy(step=0.05), policy(step=5.0)
    kind = Kind()
    assert cheap.deepen(1, 1, [(kind, [math.log(0.8)])])
    assert not dear.deepen(1, 1, [(kind, [math.log(0.8)])])
    assert not cheap.deepen(1, 1, [(kind, [math.log(1e-4)])])
    # Every request of a batch pays for the pass, whether it drafts or not.
    assert policy(step=0.3).deepen(4, 1, [(kind, [math.log(0.8)])] * 4)
    assert not policy(step=0.3).deepen(4, 1, [(kind, [math.log(0.8)])])
    assert not cheap.deepen(4, 1, [])


def test_gains_are_learned_by_kind() -> None:
    """Greedy requests and those that sample, in turns: neither's drafts say anything of the other's."""
    p = policy()
    for _ in range(200):
        for sampled in (False, True):
            p.kinds[2 * sampled].learn(1.5 + sampled)
    assert [p.kinds[0].gain, p.kinds[2].gain] == pytest.approx((1.5, 2.5), abs=0.01)


def overdraft(p: Engine, batch: int = 1) -> float:
    """Plain rounds that the head's catching up and a round of the deepest trees lose if all drafts are refused: what a
    request that can still pay a little may take."""
    seconds = batch * p.costs.draft_extend.at(TAIL) + p.costs.drafting(batch, batch, 8) + p.costs.target.at(9 * batch)
    return seconds / p.costs.plain(batch) - 1.0


MACHINES = {"rows are cheap": (0.1, 0.03), "rows are dear": (0.15, 0.12), "drafts are dear": (0.4, 0.05)}


def test_a_purse_is_paid_from_and_saves_up_to_a_limit() -> None:
    bucket = TokenBucket(3.0)
    bucket.pay(0.5)
    assert bucket.left == 2.5
    bucket.pay(-1.5)
    assert bucket.left == 4.0
    bucket.pay(-500.0)  # a round that won
    assert bucket.left == CAP
    bucket.pay(20.0)
    assert bucket.left == CAP - 20.0
    rich = TokenBucket(CAP + 5.0)
    rich.pay(-1.0)
    assert rich.left == CAP + 5.0, "what is there stays"


def test_an_account_is_a_purse_and_a_share_of_the_bank() -> None:
    engine = TokenBucket(2.0)
    one, two = Account(engine, TokenBucket(3.0)), Account(engine, TokenBucket(3.0))
    one.pay(1.0, 1)
    assert (engine.left, one.request.left, two.request.left) == (1.0, 2.0, 3.0)
    two.pay(1.0, 4)
    assert engine.left == 0.75, "four requests wait at once: a round of theirs is one of the engine's"
    two.earn(100, 4)
    assert two.request.left == pytest.approx(2.0 + 100 * RATE)
    assert engine.left == pytest.approx(0.75 + 25 * RATE)
    assert one.left(1) == engine.left and two.left(4) == two.request.left, "the lesser of both"
    one.pay(2.0, 4)
    assert one.left(4) <= 0.0 < two.left(4), "its own bucket is empty"
    two.pay(8.0, 1)
    engine.left, two.request.left = 0.0, 1.0
    assert two.left(8) == 0.0, "the engine's is"


@pytest.mark.parametrize(("tokens", "filled"), [(1, 0.03), (8, 0.24), (58, 1.74), (59, 1.75), (10**6, 1.75)])
def test_a_short_request_may_lose_a_part_of_its_tokens(tokens: int, filled: float) -> None:
    assert request_bucket(tokens) == pytest.approx(filled)
    assert policy().account(0.0, tokens).request.left == pytest.approx(filled)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("tokens", [8, 64, 128, 256, 512])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.3, 0.5, 0.7])
def test_drafts_lose_no_more_than_the_budget(machine: str, tokens: int, chance: float) -> None:
    step, growth = MACHINES[machine]
    for seed in range(4):
        p, rng = policy(step, growth), random.Random(seed)
        lost = drawn = 0.0
        for _ in range(12):  # the first of an engine, and what follows it
            done = request(p, tokens, chance, rng)
            most = request_bucket(tokens) + RATE * done.tokens + overdraft(p)
            assert done.took <= done.tokens + most, (chance, seed)
            lost, drawn = lost + done.took - done.tokens, drawn + done.tokens
        assert lost <= ENGINE + RATE * drawn + overdraft(p)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("ends", [1, 10, 34, 70, 150])
def test_a_limit_far_above_the_real_length_costs_no_more(machine: str, ends: int) -> None:
    """The loss that a request may take follows from its output so far, not from its limit."""
    step, growth = MACHINES[machine]
    for chance in (0.0, 0.3, 0.6):
        for seed in range(8):
            p, rng = policy(step, growth), random.Random(seed)
            done = decode(p, [begin(p, 2000, chance, ends=ends)], rng)
            for produced, behind in zip(done.drawn, done.behind, strict=True):
                assert behind <= REQUEST + RATE * produced + overdraft(p), (produced, chance, seed)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("batch", [2, 4, 8])
def test_batches_lose_no_more_than_their_budgets(machine: str, batch: int) -> None:
    step, growth = MACHINES[machine]
    for chances in ([0.0] * batch, [0.5, 0.1] * (batch // 2), [0.9] + [0.0] * (batch - 1)):
        p, rng = policy(step, growth), random.Random(batch)
        for _ in range(6):
            done = decode(p, [begin(p, 200, chance) for chance in chances], rng)
            for produced, behind in zip(done.drawn, done.behind, strict=True):
                most = batch * (ENGINE + overdraft(p, batch))  # a round of all is one of the engine's
                assert behind <= most + RATE * produced, (chances, produced)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_first_request_of_an_engine_drafts_from_its_first_round(machine: str) -> None:
    p = policy(*MACHINES[machine])
    r = begin(p, 64, 0.9)
    assert r.account.left(1) > 0.0
    assert decode(p, [r], random.Random(1)).took < 0.8 * 64


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_batches_whose_drafts_win_draft(batch: int) -> None:
    p, rng = policy(step=0.1, growth=0.03), random.Random(batch)
    done = [decode(p, [begin(p, 300, 0.9) for _ in range(batch)], rng) for _ in range(6)]
    assert sum(d.took for d in done) < 0.75 * sum(d.tokens for d in done)


@pytest.mark.parametrize("machine", MACHINES)
def test_drafts_that_win_are_not_held_back(machine: str) -> None:
    p, rng = policy(*MACHINES[machine]), random.Random(1)
    held, free = 0.0, 0.0
    for _ in range(20):
        held += request(p, 200, 0.95, rng).took
        rich = Account(TokenBucket(1e9), TokenBucket(1e9))
        free += decode(p, [Simulated(rich, 200, 0.95, 200)], rng).took
    assert held < 1.05 * free


def test_requests_whose_drafts_win_are_found_behind_many_that_lost() -> None:
    p, rng = policy(), random.Random(2)
    for _ in range(40):
        request(p, 200, 0.0, rng)
    took = [request(p, 200, 0.9, rng).took for _ in range(40)]
    assert sum(took) < 0.7 * 40 * 200, took


def test_what_a_round_won_or_lost_is_shared_by_who_caused_it() -> None:
    p, rng = policy(step=0.3), random.Random(4)
    for _ in range(400):
        batch = rng.randrange(1, 9)
        wins = [float(rng.randrange(6)) for _ in range(rng.randrange(1, batch + 1))]
        seconds = p.costs.plain(batch) * rng.uniform(1.0, 3.0)
        price = p.lost(batch, len(wins), seconds) / len(wins)
        total, won = sum(wins) - price * len(wins), p.won(batch, len(wins), seconds, wins)
        assert sum(won) == pytest.approx(total, abs=1e-9)
        for own, share in zip(wins, won, strict=True):
            assert share * total >= -1e-9, "nobody pays where the round wins, nobody gains where it loses"
            assert share == 0.0 or (own - price) * total > 0.0


def test_a_head_is_taken_for_what_its_file_says() -> None:
    kind = Kind.of(Acceptance(0.5, (0.9, 0.7)), 4)
    assert kind.levels == [0.9, 0.7, 0.7, 0.7] and kind.chance(math.log(0.25)) == pytest.approx(0.5)
