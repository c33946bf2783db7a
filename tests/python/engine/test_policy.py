"""The cost model's choices, on plain numbers."""

from __future__ import annotations

import itertools
import math
import operator
import random

import pytest

from gate_simulation import Simulated, begin, decode, policy, request, together
from specrs import _specrs as core
from specrs._specrs import DraftNodes
from specrs.engine.costs import PLAIN, SPECULATIVE, Pace, PassCost
from specrs.engine.policy import Kind, SpeculationGate, Standing, Step, TreePolicy, nodes_of


def nodes(p: TreePolicy, scores: list[float]) -> DraftNodes:
    return nodes_of([(score, p.greedy) for score in scores])


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
    assert p.choose(1, nodes(p, []), 0.4).nodes == 0


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


def test_nodes_of_several_trees_are_chosen_as_the_formula_says() -> None:
    """Against the same loops in plain Python: random trees, tempers, tables, batches and limits."""
    rng = random.Random(11)
    for _ in range(200):
        rows = sorted(rng.sample(range(1, 40), rng.randrange(1, 6)))
        target = PassCost(rows, sorted(rng.uniform(0.5, 3.0) for _ in rows), Pace(rng.uniform(0.5, 2.0)))
        batch, beside, limit = rng.randrange(1, 4), rng.uniform(0.01, 0.5), rng.choice([math.inf, rng.uniform(1, 6)])
        trees, tempers, least = [], [rng.uniform(0.2, 2.0) for _ in range(batch)], math.log(0.02)
        for _ in range(batch):
            n = rng.randrange(0, 30)
            parents = [rng.randrange(-1, i) for i in range(n)]
            source = core.DraftProposal(parents, list(range(n)), [rng.uniform(0.05, 1.0) for _ in range(n)])
            trees.append(core.merge_drafts(0, 64, [source], 40, 40, off_spine=40))
        found = DraftNodes(trees, tempers, least)
        plain = [(s, t, i) for i, (tree, t) in enumerate(zip(trees, tempers, strict=True)) for s in tree.scores[1:]]
        plain = sorted((n for n in plain if n[0] >= least), key=lambda n: -n[0])
        assert [found.score(i) for i in range(len(found))] == [s for s, _, _ in plain]
        assert [found.chance(i) for i in range(len(found))] == pytest.approx([math.exp(t * s) for s, t, _ in plain])
        best, expected = (0, math.inf, float(batch)), float(batch)
        best_rate = expected / (beside + target.at(batch))
        for n, (score, temper, _) in enumerate(plain, start=1):
            expected += math.exp(temper * score)
            seconds = beside + target.at(batch + n)
            if expected / seconds > best_rate and seconds <= limit:
                best_rate, best = expected / seconds, (n, score, expected)
        assert found.choose(batch, target.table, beside, limit) == pytest.approx(best)
        for tree in range(batch):
            for tiers in (None, [4, 16, 64]):
                wins, prices, pays = 0.0, [], False
                own = [math.exp(t * s) for s, t, i in plain if i == tree]
                for n, chance in enumerate(own, start=1):
                    wins += chance
                    wide = n + 1 if tiers is None else next((t for t in tiers if t > n), tiers[-1])
                    prices.append(max((target.at(batch * wide) + beside) / 1.5 - 1.0, 0.02))
                    pays |= wins > prices[-1]
                price = found.price(tree, batch, target.table, beside, 1.5, 0.02, tiers)
                assert price == (pytest.approx(prices[0]) if pays else None)


def two_rounds(p: TreePolicy, chances: list[float], drafting: float, first: int) -> tuple[float, float]:
    """Seconds and tokens of verifying so many nodes of a chain, and then, where these and the next token came, the
    rest: over each token at which the target may depart from the chain."""
    n, seconds, tokens, reached = len(chances), 0.0, 0.0, 1.0
    for depart in range(n + 1):
        ends = reached - (chances[depart] if depart < n else 0.0)  # nodes before it came, and it did not
        reached -= ends
        again = first < n and depart > first
        spent = p.costs.plain(1) if first == 0 else drafting + p.costs.target.at(1 + first)
        if again:
            spent += drafting + p.costs.target.at(n - first)
        seconds += ends * spent
        # The target's own token comes with each round; the second round's root is the first one's last token.
        tokens += ends * (depart + 1)
    return seconds, tokens


def test_a_doubtful_token_is_settled_before_what_stands_behind_it() -> None:
    p, drafting = policy(growth=0.3), 0.1
    doubtful = [math.log(q) for q in itertools.accumulate([0.4] + [0.98] * 9, operator.mul)]
    p.greedy.temper = 1.0
    choice = p.choose(1, nodes(p, doubtful), drafting)
    assert choice.nodes == 10, "by itself the round pays"
    assert p.settle(choice, nodes(p, doubtful), drafting).nodes == 0
    sure = [math.log(q) for q in itertools.accumulate([0.98] * 10, operator.mul)]
    assert p.settle(p.choose(1, nodes(p, sure), drafting), nodes(p, sure), drafting).nodes == 10
    later = [math.log(q) for q in itertools.accumulate([0.98] * 3 + [0.4] + [0.98] * 9, operator.mul)]
    settled = p.settle(p.choose(1, nodes(p, later), drafting), nodes(p, later), drafting)
    assert (settled.nodes, settled.min_score) == (3, later[2])


def test_settling_is_the_best_of_two_rounds_by_exhaustion() -> None:
    rng = random.Random(5)
    for _ in range(300):
        p, drafting = policy(growth=rng.uniform(0.02, 0.6)), rng.uniform(0.0, 0.5)
        p.greedy.temper = rng.choice([0.5, 1.0])
        steps = [rng.choice([0.3, 0.6, 0.9, 0.99]) for _ in range(rng.randrange(2, 14))]
        scores = [math.log(q) for q in itertools.accumulate(steps, operator.mul)]
        choice = p.choose(1, nodes(p, scores), drafting)
        if choice.nodes < 2:
            continue
        chances = [p.greedy.chance(s) for s in scores[: choice.nodes]]
        whole = drafting + p.costs.target.at(1 + choice.nodes)
        each = [two_rounds(p, chances, drafting, k) for k in range(choice.nodes - 1)]
        settled = p.settle(choice, nodes(p, scores), drafting)
        least = min(seconds for seconds, _ in each)
        if least < 0.92 * whole:
            assert settled.nodes < choice.nodes
        if settled.nodes < choice.nodes:
            assert each[settled.nodes][0] == pytest.approx(least) and least < 0.94 * whole
        assert all(tokens == pytest.approx(choice.expected) for _, tokens in each), "no token is lost"
        assert settled.expected == pytest.approx(1.0 + sum(chances[: settled.nodes]))


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
ALLOWANCE = 0.011


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("tokens", [64, 128, 256, 512])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.3, 0.5, 0.7])
def test_drafts_lose_no_more_than_the_account(machine: str, tokens: int, chance: float) -> None:
    step, growth = MACHINES[machine]
    for seed in range(4):
        p, rng = policy(step, growth), random.Random(seed)
        lost = 0.0
        for _ in range(12):  # the first of an engine, and what follows it
            r = begin(p, tokens, chance)
            loan = r.gate.loan
            assert loan <= (0.018 if p.hot.trusted() else 0.005) * tokens
            done = together(p, [r], rng)
            credit = r.gate.credited
            assert credit <= 2.0 * p.stake(1, 1) * (done.deceived + 1)
            assert done.took <= done.tokens + loan + ALLOWANCE * done.tokens + credit + 1e-9, (chance, seed)
            lost += done.took - done.tokens
        assert lost <= 0.005 * 12 * tokens + ALLOWANCE * tokens + 0.6  # in the long run, and what may be lost before


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("ends", [1, 10, 34, 70, 150])
def test_a_limit_far_above_the_real_length_costs_no_more(machine: str, ends: int) -> None:
    """What a request may lose follows from what it has produced, not from what its limit would allow."""
    step, growth = MACHINES[machine]
    for chance in (0.0, 0.3, 0.6):
        for seed in range(8):
            p, rng = policy(step, growth), random.Random(seed)
            endowment = p.hot.bank
            r = begin(p, 2000, chance, ends=ends)
            done = together(p, [r], rng)
            credit = r.gate.credited
            assert credit <= 2.0 * p.stake(1, 1) * r.deceived
            for produced, behind in zip(done.drawn, done.behind, strict=True):
                assert behind <= ALLOWANCE * produced + endowment + credit + 1e-9, (produced, chance, seed)


def test_an_account_grows_with_what_was_produced() -> None:
    p = policy()
    gate = p.gate(0.0, 10**6, 0)
    assert gate.account(0) == gate.loan == pytest.approx(0.3)
    assert gate.account(100) == pytest.approx(gate.loan + 100 * ALLOWANCE)
    long = p.gate(1.0, 10**6, 1000)  # a prompt is part of what plain decoding takes
    assert long.account(0) == pytest.approx(long.loan + ALLOWANCE * p.prefilling(1000, 1))
    gate.spec_round(-0.4)
    gate.pay(0.1)
    assert gate.account(50) == pytest.approx(gate.loan + 50 * ALLOWANCE - 0.5)
    for _ in range(100):
        gate.spec_round(3.0, 4)
    assert gate.net == pytest.approx(299.5)
    assert gate.account(0) == pytest.approx(gate.loan + 24.0)  # what it won it may lose again, up to a limit


@pytest.mark.parametrize(("won", "keeps"), [(4.0, 4.0), (12.0, 8.0), (30.0, 15.0), (48.0, 24.0), (500.0, 24.0)])
def test_half_of_what_was_won_may_be_lost_again(won: float, keeps: float) -> None:
    """A long edit is told well for fifty tokens and badly for three: it must not decode plainly to its end."""
    gate = SpeculationGate(Kind(hits=0.5))
    for _ in range(100):
        gate.spec_round(won / 100, 1)
    assert gate.account(0) == pytest.approx(keeps)
    gate.spec_round(-3.0)
    assert gate.account(0) == pytest.approx(keeps - 3.0)


def at(produced: int, remaining: int, lag: int | None) -> Standing:
    return Standing(produced, remaining, lag)


def test_a_request_looks_back_as_soon_as_it_can_pay() -> None:
    p = policy()
    gate = p.gate(0.0, 500, 0)
    steps = [p.step(gate, 1, at(n, 500 - n, n + 1), lambda: 8) for n in range(200)]
    first = steps.index(Step.LOOK_BACK)
    assert first >= 32 and set(steps[:first]) == {Step.WAIT}
    assert gate.account(first) >= p.stake(1, 1) + p.look_back(1) + p.waiting(first + 1, 1)
    assert p.step(p.gate(0.0, 500, 0), 1, at(0, 20, 1), lambda: 8) is Step.GIVE_UP
    dear = policy(step=2.0)
    assert dear.step(dear.gate(0.0, 100, 0), 1, at(0, 100, 1), lambda: 8) is Step.GIVE_UP


def test_who_dozes_misses_nothing() -> None:
    """Whatever a request's account holds: while it dozes, it would have been told to wait, or to give up."""
    rng, dozed = random.Random(5), 0
    for _ in range(400):
        p = policy(step=rng.choice((0.05, 0.2, 0.6)), growth=rng.choice((0.01, 0.05)))
        if rng.random() < 0.4:
            p.greedy.worth = 3.0  # such a request needs no look back
        batch, lag = rng.choice((1, 1, 4)), rng.randrange(1, 90)
        produced = lag + rng.randrange(40)
        gate = p.gate(0.0, 600, rng.choice((0, 50, 500)), batch)
        gate.pay(rng.uniform(-0.5, 2.0))
        gate.refused, gate.patience = rng.random() < 0.5, rng.choice((32, 64, 128))

        def later(n: int, p: TreePolicy = p, gate: SpeculationGate = gate, batch: int = batch, produced: int = produced,
                  lag: int = lag) -> Step:  # fmt: skip
            return p.step(gate, batch, at(produced + n, 600, lag + n), lambda: 8)

        if later(0) is not Step.WAIT:
            continue
        doze = p.doze(gate, batch, at(produced, 600, lag))
        assert 0 <= doze <= 16
        assert all(later(n) in (Step.WAIT, Step.GIVE_UP) for n in range(1, doze)), (doze, batch)
        dozed += doze > 1
    assert dozed > 100


def test_a_request_that_has_lost_all_waits_and_looks_back() -> None:
    p = policy()
    gate = p.gate(0.0, 500, 0)
    gate.looked_back(8, p.stake(1, 1), 60)
    assert p.step(gate, 1, at(60, 400, None), lambda: 8) is Step.DRAFT
    gate.pay(gate.account(60))
    assert p.step(gate, 1, at(60, 400, None), lambda: 8) is Step.WAIT
    assert gate.refused and gate.patience == 64
    assert p.step(gate, 1, at(124, 336, 64), lambda: 8) is Step.WAIT
    later = [p.step(gate, 1, at(60 + n, 400 - n, n), lambda: 8) for n in range(1, 256)]
    assert Step.LOOK_BACK in later


def test_a_round_is_paid_by_those_who_draft() -> None:
    """The fewer draft, the more each of them may lose; none is asked for more than its account has."""
    p, rng = policy(step=0.4), random.Random(3)
    four, one = p.stake(4, 4), p.stake(4, 1)
    assert four < 1.0 < one
    sure = 2.0 * one
    assert p.drafting([(four, sure)] * 4) == [True] * 4
    assert p.drafting([(four, sure), (0.0, sure), (0.0, sure), (0.0, sure)]) == [False] * 4  # it could not pay alone
    assert p.drafting([(one, sure), (0.0, sure), None, (0.0, sure)]) == [True, False, False, False]
    assert p.drafting([None, None]) == [False] * 2
    for _ in range(500):
        able = [rng.choice([None, (rng.uniform(-0.5, 2.0), rng.uniform(0.0, 3.0))]) for _ in range(rng.randrange(1, 9))]
        drafting = p.drafting(able)
        paying = [a for a, d in zip(able, drafting, strict=True) if d and a is not None]
        stake = p.stake(len(able), max(len(paying), 1))
        assert all(account >= stake for account, _ in paying)
        assert not paying or sum(wins for _, wins in paying) > len(paying) * stake


def test_who_drafts_is_the_best_choice_by_exhaustion() -> None:
    p, rng = policy(step=0.3), random.Random(4)
    drafted = 0
    for _ in range(300):
        able = [(rng.uniform(0.0, 3.0), rng.uniform(0.0, 2.0)) for _ in range(rng.randrange(1, 6))]

        def worth(chosen: list[tuple[float, float]], batch: int = len(able)) -> float:
            stake = p.stake(batch, max(len(chosen), 1))
            if any(account < stake for account, _ in chosen):
                return -math.inf
            return sum(wins for _, wins in chosen) - len(chosen) * stake

        best = max(worth([a for i, a in enumerate(able) if subset >> i & 1]) for subset in range(1 << len(able)))
        drafting = p.drafting(able)
        assert worth([a for a, d in zip(able, drafting, strict=True) if d]) == pytest.approx(best)
        drafted += any(drafting)
    assert 100 < drafted < 300


def test_drafts_that_win_only_together_are_drafted_together() -> None:
    """Alone, a request of this batch could not win what its rounds cost all others; four of them can."""
    p = policy(step=0.3)
    wins = 0.5 * (p.stake(4, 4) + p.stake(4, 1))
    assert p.stake(4, 4) < wins < p.stake(4, 1)
    assert p.drafting([(9.0, wins)] * 4) == [True] * 4
    assert p.drafting([(9.0, wins), None, None, None]) == [False] * 4
    # So a look back goes by a share of the round, not by the round alone, nor by that of a batch of one.
    gate = p.gate(0.0, 500, 0)
    assert gate.would_open(8, p.stake(4, 4)) and not gate.would_open(8, p.stake(4, 1))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("batch", [2, 4, 8])
def test_batches_lose_no_more_than_their_accounts(machine: str, batch: int) -> None:
    step, growth = MACHINES[machine]
    for chances in ([0.0] * batch, [0.5, 0.1] * (batch // 2), [0.9] + [0.0] * (batch - 1)):
        p, rng = policy(step, growth), random.Random(batch)
        for _ in range(6):
            some = [begin(p, 200, chance, batch=batch) for chance in chances]
            loans = sum(max(r.gate.loan, 0.0) for r in some)
            done = together(p, some, rng)
            credit = sum(r.gate.credited for r in some)
            assert credit <= 2.0 * p.stake(batch, batch) * (done.deceived + batch)
            for produced, behind in zip(done.drawn, done.behind, strict=True):
                assert behind <= ALLOWANCE * produced + loans + credit + 1e-9, (chances, produced)


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_batches_whose_drafts_win_draft(batch: int) -> None:
    p, rng = policy(step=0.1, growth=0.03), random.Random(batch)
    done = [together(p, [begin(p, 300, 0.9, batch=batch) for _ in range(batch)], rng) for _ in range(6)]
    assert sum(d.took for d in done) < 0.75 * sum(d.tokens for d in done)


def test_a_request_is_followed_where_its_length_or_the_bank_pays_a_try() -> None:
    p = policy()

    def first(p: TreePolicy, tokens: int, prompt: int, batch: int = 1, again: int = 0) -> bool:
        return p.follows(p.gate(0.0, tokens, prompt), batch, at(0, tokens, 0), prompt, again)

    assert not first(policy(), 16, 0) and first(policy(), 160, 0) and first(policy(), 10**6, 0)
    assert first(policy(), 160, 50)
    assert not first(policy(), 160, 10_000)  # a prompt whose draft KV no drafts would earn
    assert not first(policy(), 160, 0, again=200) and first(policy(), 160, 0, again=5)
    assert not first(policy(step=2.0), 160, 0)
    p.greedy.ended(0, -5.0)
    assert not first(p, 160, 0) and p.gate(1.0, 160, 0).loan > 0.0  # kinds have banks of their own
    for _ in range(14):
        p.greedy.ended(100, 0.0)
    assert p.greedy.bank > 1.0 and p.greedy.worth == pytest.approx(-0.75)  # requests without the head say nothing of it
    assert first(p, 160, 0)


def test_what_requests_won_pays_for_long_prompts() -> None:
    """The bank lends a prompt's draft KV beside what the length allows; a request that is not followed returns it."""
    p = policy()
    for _ in range(5):
        p.greedy.ended(160, 6.0)
    full = p.greedy.bank
    gate = p.gate(0.0, 160, 600)
    assert p.follows(gate, 1, at(0, 160, 0), 600, 0)
    assert p.greedy.bank == pytest.approx(full - gate.loan)
    other = policy().gate(0.0, 160, 600)
    assert not policy().follows(other, 1, at(0, 160, 0), 600, 0)
    gate.decline()
    assert p.greedy.bank == pytest.approx(full) and not gate.follows and gate.loan == 0.0


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
    gate.looked_back(hits=1, stake=0.9, produced=40)
    assert not p.early(gate, 1) and not p.early(gate, gate.patience)
    assert p.step(gate, 1, at(40, gate.patience + 7, 0), lambda: 8) is Step.GIVE_UP
    assert p.step(gate, 1, at(40, gate.patience + 8, 0), lambda: 8) is Step.WAIT
    gate.looked_back(hits=8, stake=0.1, produced=80)
    assert p.early(gate, 1)


def test_a_kind_whose_drafts_won_drafts_at_once() -> None:
    p = policy()
    gate = p.gate(0.0, 64, 0)
    assert not p.greedy.trusted() and p.step(gate, 1, at(1, 63, 1), lambda: 8) is Step.GIVE_UP  # too late to pay
    gate = p.gate(0.0, 128, 0)
    assert p.step(gate, 1, at(1, 127, 1), lambda: 8) is Step.WAIT
    for _ in range(5):
        p.greedy.ended(64, 6.0)
    gate = p.gate(0.0, 64, 0)
    assert p.greedy.trusted() and p.step(gate, 1, at(1, 63, 1), lambda: 8) is Step.DRAFT
    assert p.step(gate, 1, at(1, 5, 1), lambda: 8) is Step.DRAFT  # and however few are left
    assert p.drafting([(gate.account(1), gate.wins)]) == [True]
    gate = p.gate(0.0, 64, 0)
    assert p.step(gate, 1, at(1, 63, 1), lambda: 0) is Step.WAIT  # the head lacks its tokens


def test_a_look_back_opens_the_gate_or_asks_for_patience() -> None:
    p = policy()
    gate, stake = p.gate(0.0, 160, 0), p.stake(1, 1)
    first = gate.patience
    assert not gate.looked_back(hits=1, stake=0.5, produced=40) and gate.follows
    assert gate.patience == 2 * first
    gate.pay(gate.account(100) + 5.0)
    assert gate.looked_back(hits=7, stake=stake, produced=100) and gate.patience == first
    assert gate.account(100) == pytest.approx(2.0 * stake)  # on credit
    assert not gate.looked_back(hits=8, stake=1.0, produced=100)  # a round cannot win so much, whatever it foretells
    assert not gate.looked_back(hits=0, stake=stake, produced=100) and not gate.follows


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
    p.hot.ended(200, 100.0)  # the first request
    held, free = 0.0, 0.0
    for _ in range(20):
        held += request(p, 200, 0.95, rng).took
        free += decode(p, [Simulated(SpeculationGate(p.hot, 1e9), 200, 0.95, 200)], rng).took
    assert held < 1.05 * free


def test_drafts_that_win_again_are_found() -> None:
    p, rng = policy(), random.Random(2)
    r = begin(p, 1000, 0.9)
    assert not r.gate.looked_back(hits=1, stake=0.5, produced=0)
    assert decode(p, [r], rng).took < 0.7 * 1000


def test_requests_whose_drafts_win_are_found_among_those_that_lose() -> None:
    p, rng = policy(), random.Random(2)
    for _ in range(40):
        request(p, 200, 0.0, rng)
    assert sum(request(p, 200, 0.9, rng).took for _ in range(40)) < 0.7 * 40 * 200
