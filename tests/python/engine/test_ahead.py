"""Trees that are decided before a round: depth by yield, losses within the account."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from specrs import TreeShape
from specrs._specrs import TreeBatch
from specrs.engine.drafting.budget import RATE, request_bucket
from specrs.engine.drafting.chooser import Kind, TreePolicy
from specrs.engine.drafting.costs import Costs, Pace, PassCost
from specrs.engine.drafting.decisions import Drafting
from specrs.engine.drafting.gathering import Gathering
from specrs.engine.drafting.levels import costs_of_rounds, drafted_levels, most_nodes, round_seconds
from specrs.engine.drafting.plans import RoundOutcome, RoundPlan
from specrs.engine.drafting.sources import Sources
from specrs.models.acceptance import UNKNOWN

SHAPE = TreeShape(4, 6, 32)
PLAIN_SECONDS, STEP, EXTEND = 1.0, 0.1, 0.2


class Launched(Drafting):
    """What decides for a device that launches rounds, without an engine.

    Attributes:
        policy: see there.
    """

    policy: TreePolicy  # type: ignore[assignment]

    def __init__(self, costs: Costs) -> None:
        super().__init__(SHAPE, 1, True, Gathering(Sources((), 8), 32, 6, [2]), True, 32)
        self.price(TreePolicy(costs, [Kind.of(one, SHAPE.steps) for one in UNKNOWN]))

    def ended(
        self, plan: RoundPlan, passed: Sequence[Any], seconds: float | None, trees: TreeBatch | None = None
    ) -> None:
        """A round ended."""
        self.observe(RoundOutcome(plan, None, range(len(passed)), passed, SimpleNamespace(trees=trees), seconds))  # type: ignore[arg-type]


def tree(rows: float = 0.0) -> Launched:
    """rows: what a row to verify costs beside a pass."""
    pace = Pace()
    target = PassCost([1, 256], [PLAIN_SECONDS, PLAIN_SECONDS + 255 * rows], pace)
    extend = PassCost([1, 16], [EXTEND, EXTEND], pace)
    return Launched(
        Costs(
            target,
            PassCost([1], [STEP], pace),
            extend,
            extend,
        )
    )


class Side(list[Any]):
    """A batch of requests that have no engine."""

    @property
    def requests(self) -> list[Any]:
        return self


class Alone(SimpleNamespace):
    """A request that has no engine."""

    @property
    def produced(self) -> int:
        return len(self.tokens) - self.prompt_len

    def give_up_drafts(self, _: int) -> None:
        self.head.followed = False


def request(i: int, tokens: int = 256) -> Any:
    head = SimpleNamespace(followed=True, root=object(), end=9, first=0, shared=10)
    return Alone(
        request_id=i, tokens=[1] * 10, prompt_len=10, remaining=tokens, error=None, prefill_target=10, committed=10,
        finish_reason=None, params=SimpleNamespace(temperature=0.0, speculative=True), drafting_rounds=0, proposed=0,
        head=head, max_depth=99, draws=SimpleNamespace(room=99), lag=0, can_draft=True,
    )  # fmt: skip


def gave(r: Any, tokens: int) -> Any:
    """What a round gave a request."""
    return SimpleNamespace(request=r, tokens=[1] * tokens, kept=tokens)


def planned(speculation: Launched, r: Any) -> Any:
    """The plan of a round in which the head drafts for a request."""
    plan = speculation.plan(Side([r]))  # type: ignore[arg-type]
    assert plan.head == [True]
    speculation.catch_up(plan.drafting, len(plan.batch))
    return plan


def run(
    speculation: Launched, r: Any, chance: float, rng: random.Random, clock: list[float], beside: float = 0.0,
    plain: float = PLAIN_SECONDS,
) -> tuple[int, float]:  # fmt: skip
    """One round of a request alone whose every draft level is accepted with ``chance``: tokens, and the levels.

    beside: seconds of a round with drafts that no model of passes has; plain: of a round without.
    """
    plan = speculation.plan(Side([r]))  # type: ignore[arg-type]
    if plan.head is None:
        clock[0] += plain
        r.tokens, r.remaining = [*r.tokens, 1], r.remaining - 1
        speculation.ended(plan, [gave(r, 1)], plain)
        return 1, 0
    speculation.catch_up(plan.drafting, len(plan.batch))
    levels = plan.levels
    accepted = 0
    while accepted < levels and rng.random() < chance:
        accepted += 1
    seconds = PLAIN_SECONDS + EXTEND + STEP * (levels - 1) + beside
    clock[0] += seconds
    n = accepted + 1
    r.tokens, r.remaining = [*r.tokens, *[1] * n], r.remaining - n
    parents = [-1, *range(most_nodes(SHAPE, levels) - 1)]
    trees = TreeBatch.from_parents([parents], [[0] * len(parents)])
    speculation.ended(plan, [gave(r, n)], seconds, trees)
    return n, levels


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Rounds take what their model says."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def test_nodes_of_levels() -> None:
    assert [most_nodes(SHAPE, n) for n in range(5)] == [1, 5, 21, 32, 32]
    assert [most_nodes(TreeShape(1, 8, 9), n) for n in (0, 1, 8)] == [1, 2, 9]


def test_accepted_levels_deepen_and_refused_ones_make_shallow(clock: list[float]) -> None:
    rng, deep = random.Random(1), tree()
    for i in range(6):
        r = request(i, 600)
        while r.remaining > 0 and r.head.followed:
            _, levels = run(deep, r, 0.97, rng, clock)
        assert r.head.followed
        deep.forget(r)
    assert levels == SHAPE.steps
    r = request(9)
    for _ in range(40):
        _, levels = run(deep, r, 0.05, rng, clock)
    assert levels <= 2


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("tokens", [64, 256])
def test_text_that_the_head_does_not_know_loses_what_the_budget_holds(
    chance: float, tokens: int, clock: list[float]
) -> None:
    speculation, rng, lasted = tree(), random.Random(2), 0.0
    for i in range(30):
        r, begun = request(i, tokens), clock[0]
        while r.remaining > 0:
            run(speculation, r, chance, rng, clock)
        drawn = len(r.tokens) - 10
        took = clock[0] - begun
        lasted += took
        speculation.forget(r)
        last = 0.2  # of its last rounds, which may cost more than is left
        assert took - drawn <= request_bucket(tokens) + RATE * drawn + last, (i, took, drawn)
    assert 30 * tokens * PLAIN_SECONDS / lasted > 0.985


def test_text_that_the_head_knows_gains(clock: list[float]) -> None:
    speculation, rng = tree(), random.Random(3)
    r = request(0)
    while r.remaining > 0:
        run(speculation, r, 0.8, rng, clock)
    assert (len(r.tokens) - 10) * PLAIN_SECONDS / clock[0] > 1.8


def crowd(size: int, chances: Sequence[float], clock: list[float]) -> list[float]:
    """``size`` requests at once, of which one begins where another has ended: of each third of them, tokens in a plain
    round's time, over those of a full batch that decodes plainly.

    chances: of each request, that a level of its drafts is accepted.
    """
    speculation, rng = tree(rows=3e-4), random.Random(9)
    live, ended, drawn, rates, since = list[Any](), 0, 0, list[float](), 0.0
    coming = list(enumerate(chances))
    while coming or live:
        while coming and len(live) < size:
            i, chance = coming.pop(0)
            r = request(i, rng.randrange(80, 240))
            r.chance, r.head.shared, r.entered = chance, 0, False
            r.head.followed = speculation.follows(r)
            live.append(r)
        plan = speculation.plan(Side(live))  # type: ignore[arg-type]
        drafting, levels, sizes, entering = plan.head or [False] * len(live), 0, list[int](), 0
        if plan.head is not None:
            speculation.catch_up(plan.drafting, len(plan.batch))
            levels = plan.levels
            sizes = [most_nodes(SHAPE, levels) if drafts else 1 for drafts in drafting]
            entering = sum(drafts and not r.entered for r, drafts in zip(live, drafting, strict=True))
            seconds = 3e-4 * (sum(sizes) - 1) + PLAIN_SECONDS + EXTEND + STEP * (levels - 1) + 0.2 * entering
        else:
            seconds = PLAIN_SECONDS
        clock[0] += seconds
        passed = []
        for r, drafts in zip(live, drafting, strict=True):
            accepted, r.entered = 0, r.entered or drafts
            while drafts and accepted < levels and rng.random() < r.chance:
                accepted += 1
            n = min(accepted + 1, r.remaining)
            r.tokens, r.remaining, drawn = [*r.tokens, *[1] * n], r.remaining - n, drawn + n
            passed.append(gave(r, n))
        trees = None
        if levels:
            trees = TreeBatch.from_parents([[-1, *range(n - 1)] for n in sizes], [[0] * n for n in sizes])
        speculation.ended(plan, passed, None if entering else seconds, trees)
        for r in [r for r in live if r.remaining <= 0]:
            speculation.forget(r)
            live.remove(r)
            ended += 1
            if ended % (len(chances) // 3) == 0:
                rates.append(drawn / size / (clock[0] - since))
                drawn, since = 0, clock[0]
    return rates


@pytest.mark.parametrize("size", [2, 8, 16])
def test_batches_gain_where_the_head_wins_and_lose_little_where_it_does_not(size: int, clock: list[float]) -> None:
    # At the end of the last third, batches are not full.
    assert min(crowd(size, [0.8] * 120, clock)) > (1.8 if size < 16 else 1.3)
    assert crowd(size, [0.1] * 120, clock)[1] > 0.93
    if size < 16:  # if one of many can try alone, it finds out for all that other texts have come
        assert crowd(size, [*[0.1] * 160, *[0.8] * 320], clock)[2] > 1.2


def test_rounds_run_ahead_as_long_as_the_same_requests_can_pay() -> None:
    """Before the outcome is known: where another can pay, or one no more, the next round waits for it."""
    speculation, side = tree(), Side([request(0), request(1)])
    policy, one, other = speculation.policy, *map(speculation.account, side)
    both = speculation.plan(side)  # type: ignore[arg-type]
    assert both.head == [True, True]
    alone, plain = (RoundPlan(both.batch, head=head, levels=3) for head in ([True, False], None))
    rich, resuming = 16.0, policy.resuming(1, 2)
    one.engine.left = rich
    for rooms, goes_on in (
        ((rich, rich), both),
        ((rich, resuming / 2), alone),  # the head would have to catch up with the round in flight
        ((0.0, 0.0), plain),
    ):
        one.request.left, other.request.left = rooms
        for plan in (both, alone, plain):
            wanted = plan is goes_on or (plan is both and rooms[1] > 0.0)
            assert (speculation.behind(plan, plan.batch, range(2)) is not None) == wanted, (rooms, plan.head)
    assert speculation.behind(alone, Side(side[1:]), [1]), "the one that drafts has ended"  # type: ignore[arg-type]


def test_a_round_behind_gets_the_levels_that_pay_now() -> None:
    speculation, r = tree(), request(0)
    plan, account, side = planned(speculation, r), speculation.account(r), Side([r])
    assert plan.levels > 1 and speculation.behind(plan, side, [0]).levels == plan.levels  # type: ignore[arg-type, union-attr]
    account.request.left = 0.01
    shallow: Any = speculation.behind(plan, side, [0])  # type: ignore[arg-type]
    assert (shallow.head, shallow.levels) == ([True], 1)
    account.request.left = account.engine.left = 9.0
    again: Any = speculation.behind(shallow, side, [0])  # type: ignore[arg-type]
    assert again.levels > 1
    speculation.policy.kind(0.0).levels[:] = [0.01] * SHAPE.steps  # learnt from rounds of the same flight
    again = speculation.behind(again, side, [0])  # type: ignore[arg-type]
    assert again.levels == 1


def test_others_draft_alone_where_they_yield_more_than_the_head() -> None:
    speculation, r = tree(), request(0)
    batch: Any = Side([r])
    speculation.policy.kind(0.0).gain = 2.0
    for tokens, alone in ((1.9, False), (2.1, True)):
        assert speculation._prefers_others(batch, [True], others(tokens)) == alone


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("shape", [(4, 6, 32), (1, 5, 6), (8, 2, 64), (4, 1, 5), (8, 6, 64)])
def test_costs_of_passes_explain_the_rounds_that_were_measured(shape: tuple[int, int, int], sized: bool) -> None:
    """Rows of deep trees cost more than those of one level: by draft steps alone middle depths would be too cheap."""
    shape_, rng = TreeShape(*shape), random.Random(str(shape))
    tried = sorted(drafted_levels(shape_, sized))
    for _ in range(50):
        extend, step, rows = rng.random(), rng.random(), rng.random()
        measured = {1: {0: 1.0}}
        for levels in tried:
            more = rows * math.sqrt(most_nodes(shape_, levels))  # a pass takes the less for a row, the more rows it has
            measured[1][levels] = 1.0 + extend + (levels - 1) * step + more
        costs = costs_of_rounds(shape_, measured, {1: 0.25}, {1: 0.75, 3: 1.75})
        for levels in tried:
            assert round_seconds(shape_, costs, 1, levels) == pytest.approx(measured[1][levels])
        assert costs.target.at(1) == 1.0
        assert [costs.enter.at(n) for n in (1, 40)] == [0.25, 0.25], "one pass, however many positions"
        assert [costs.resume.at(n) for n in (1, 3, 5)] == pytest.approx([0.75, 1.75, 2.75])


def test_each_request_drafts_while_its_own_account_can_pay() -> None:
    speculation, side = tree(), Side([request(i) for i in range(5)])
    for r in side[3:]:
        r.head.followed = r.can_draft = False
    for left, drafts in ((-0.1, False), (0.1, True), (9.0, True)):
        for r, own in zip(side, (16.0, 16.0, left), strict=False):
            account = speculation.account(r)
            account.request.left, account.engine.left = own, 16.0
        plan = speculation.plan(side)  # type: ignore[arg-type]
        assert plan.head == [True, True, drafts, False, False], left
    speculation.account(side[0]).engine.left = 0.0
    assert speculation.plan(side).head is None, "the engine has nothing left"  # type: ignore[arg-type]
    plain = RoundPlan(side)  # type: ignore[arg-type]
    assert speculation.behind(plain, plain.batch, range(5)) is plain, "they save, while plain rounds run ahead"


def test_a_request_that_is_behind_drafts_once_it_can_pay_for_catching_up() -> None:
    speculation, r = tree(), request(0)
    side, account, resuming = Side([r]), speculation.account(r), speculation.policy.resuming(32, 1)
    for lag, left, drafts in ((0, 0.01, True), (32, 0.99 * resuming, False), (32, 1.01 * resuming, True)):
        r.lag, account.request.left = lag, left
        assert (speculation.plan(side).head is not None) == drafts  # type: ignore[arg-type]
        assert r.head.followed, "it may pay later"
    speculation.catch_up([r], 1)
    assert account.request.left == pytest.approx(0.01 * resuming)
    r.head.followed, r.lag, speculation.tail = True, 0, None
    account.request.left = 0.0
    assert speculation.behind(RoundPlan(side, head=[True], levels=1), side, [0]) is None and r.head.followed  # type: ignore[arg-type]
    assert speculation.plan(side).head is None and not r.head.followed, "it would have more and more to read"  # type: ignore[arg-type]


def test_rounds_that_end_with_an_error_teach_and_cost_nothing() -> None:
    speculation, bad, good = tree(), request(0), request(1)
    plan = speculation.plan(Side([bad, good]))  # type: ignore[arg-type]
    bad.error = ValueError("NaN")
    kind, account = speculation.policy.kind(0.0), speculation.account(bad)
    before, levels = account.request.left, list(kind.levels)
    trees = TreeBatch.from_parents([[-1, 0]] * 2, [[0] * 2] * 2)
    good.finish_reason = "length"  # has less room than others: its depth teaches nothing
    speculation.ended(plan, [gave(bad, 1), gave(good, 5)], 1.0, trees)
    assert account.request.left == pytest.approx(before + RATE) and kind.levels == levels
    assert speculation.account(good).request.left > before + RATE, "the other one's round counts"


def test_rows_that_cost_make_trees_shallow() -> None:
    cheap, dear = tree(0.0), tree(0.1)
    r = request(0)
    assert planned(cheap, r).levels > planned(dear, r).levels == 1


@pytest.mark.parametrize(("tokens", "chance", "least"), [(256, 0.8, 0.93), (64, 0.5, 0.85)])
def test_what_rounds_take_beside_their_passes_is_charged(
    tokens: int, chance: float, least: float, clock: list[float]
) -> None:
    """Sampling, features to catch up with: where they cost more than drafts win, drafts end."""
    speculation, rng = tree(), random.Random(4)
    for i in range(4):
        r, begun = request(i, tokens), clock[0]
        while r.remaining > 0:
            run(speculation, r, chance, rng, clock, beside=2 * PLAIN_SECONDS)
        drawn, took = len(r.tokens) - 10, clock[0] - begun
        speculation.forget(r)
        assert drawn * PLAIN_SECONDS / took > least, (i, took, drawn)


def test_a_round_that_made_a_graph_makes_no_other_look_dear(clock: list[float]) -> None:
    speculation, rng = tree(), random.Random(5)
    r = request(0)
    run(speculation, r, 1.0, rng, clock, beside=1000 * PLAIN_SECONDS)
    _, levels = run(speculation, r, 1.0, rng, clock)
    assert levels > 0, "no request pays for making a graph"


def others(tokens: float, seconds: float = 1.0, nodes: int = 8) -> Any:
    """Stand in for trees of other sources, which are expected to give so many tokens in so many plain rounds' time."""
    seconds *= PLAIN_SECONDS
    trees = TreeBatch.from_parents([list(range(-1, nodes - 1))], [[0] * nodes])
    return SimpleNamespace(tokens=tokens, seconds=seconds, rate=tokens / seconds, trees=trees)


@pytest.mark.parametrize("real", [0.95, 1.6], ids=["overlapped", "the host is slower"])
def test_plain_rounds_are_what_they_take_behind_each_other(real: float, clock: list[float]) -> None:
    """A plain round's time is not that of a round by itself: drafts that lose against rounds in a row are known to
    lose."""
    speculation, rng = tree(), random.Random(6)
    for i in range(8):
        r, begun, drawn = request(i), clock[0], 0
        while r.remaining > 0:
            before = len(r.tokens)
            run(speculation, r, 0.1, rng, clock, beside=real - PLAIN_SECONDS, plain=real)
            drawn += len(r.tokens) - before
        took = clock[0] - begun
        speculation.forget(r)
        assert drawn * real / took > (0.97 if i else 0.9), (i, drawn, took)
    assert speculation.policy.costs.plain(1) == pytest.approx(real, rel=0.05)


def test_stalls_cost_no_more_than_they_take(clock: list[float]) -> None:
    """One round in ten is read late, and the next one seems to take no time."""
    speculation, rng, took, drawn = tree(), random.Random(9), 0.0, 0
    for i in range(40):
        r = request(i)
        while r.remaining > 0:
            late = 3 * PLAIN_SECONDS if rng.random() < 0.1 else 0.0
            for beside in (late, -late) if late else (0.0,):
                if r.remaining <= 0:
                    break
                begun, before = clock[0], len(r.tokens)
                run(speculation, r, 0.8, rng, clock, beside=max(beside, -1.3 * PLAIN_SECONDS))
                drawn, took = drawn + len(r.tokens) - before, took + clock[0] - begun
            assert speculation.policy.costs.plain(1) > 0.7 * PLAIN_SECONDS
        speculation.forget(r)
    assert drawn * PLAIN_SECONDS / took > 1.7
