"""The choice of sources to ask and of drafts to verify: worth of each, by a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import specrs.engine.drafting.gathering as gathering_module
from gathering_world import VOCAB, Clock, Foretells, text, world
from specrs import LLM, SamplingParams
from specrs.drafters import DraftRequest, Proposal
from specrs.engine.request.batch import Batch

FLAT = {1: 1.0, 2: 1.25, 4: 1.3, 8: 1.4, 16: 1.6}
STEEP = {1: 1.0, 2: 1.44, 4: 2.06, 8: 3.1, 16: 5.3}


def chain(tokens: list[int], first: float, others: float) -> Proposal:
    return Proposal(range(-1, len(tokens) - 1), tokens, [first, *[others] * (len(tokens) - 1)][: len(tokens)])


@pytest.mark.parametrize(("chance", "least"), [(0.3, 1.8), (0.4, 2.2), (0.6, 2.5)])
def test_a_chain_pays_whose_first_node_alone_does_not(
    chance: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, rng, one = Clock(), random.Random(3), text(2000)

    def says(coming: list[int], room: int) -> Proposal:
        right = rng.random() < chance
        return chain([(t + (not right)) % VOCAB for t in coming[: min(8, room)]], chance, 0.95)

    w = world(monkeypatch, clock, [Foretells(clock, [one], says)], FLAT)
    assert 2000 / w.run([one]) > least


def test_siblings_pay_on_a_device_where_none_of_them_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rng, one = Clock(), random.Random(4), text(2000)

    def says(coming: list[int], room: int) -> Proposal:
        tokens = [(coming[0] + 1 + i) % VOCAB for i in range(3)]
        if (which := rng.randrange(4)) < 3:
            tokens[which] = coming[0]
        return Proposal([-1] * 3, tokens, [0.25] * 3)

    rows = {1: 1.0, 4: 1.3, 8: 1.4, 16: 1.6}
    w = world(monkeypatch, clock, [Foretells(clock, [one], says)], rows, tiers=(4, 8, 16))
    assert 2000 / w.run([one]) > 1.25
    assert w.drafted > 0.9 * w.rounds


@pytest.mark.parametrize("beginning", [0.0, 0.6, 2.0, 10.0])
def test_beginning_is_not_the_price_of_asking(beginning: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source indexes a long prompt, says nothing of the first token, and is right ever after."""
    clock, one = Clock(), text(400)

    def says(coming: list[int], room: int) -> Proposal:
        return chain(coming[: min(8, room)], 0.9, 0.9) if len(coming) < 399 else Proposal()

    w = world(monkeypatch, clock, [Foretells(clock, [one], says, beginning, 0.002)], FLAT)
    w.run([one])
    # The cost of the first tries must be earned first, a round of plain decoding at a time.
    assert w.rounds < 60 + 5 * beginning / 0.011 / 10, w.rounds


@pytest.mark.parametrize("asking", [0.003, 0.03, 0.3, 3.0])
@pytest.mark.parametrize("claims", [0.3, 0.9])
def test_a_source_that_is_always_wrong_costs_little(
    asking: float, claims: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, texts = Clock(), [text(300, i) for i in range(12)]

    def says(coming: list[int], room: int) -> Proposal:
        return chain([(t + 1) % VOCAB for t in coming[: min(8, room)]], claims, claims)

    source = Foretells(clock, texts, says, asking=asking)
    w = world(monkeypatch, clock, [source], STEEP)
    took = sum(w.run([one]) for one in texts)
    # Nobody knows beforehand what the first two times will cost.
    assert took - 2 * asking < 3600 * 1.02, (took, len(source.asked), w.drafted)


@pytest.mark.parametrize("says", ["nothing", "what never comes"])
@pytest.mark.parametrize("asking", [0.003, 0.05, 0.12, 1.0])
def test_a_source_that_gains_nothing_is_asked_rarely(asking: float, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, texts = Clock(), [text(600, i) for i in range(6)]

    def wrong(coming: list[int], room: int) -> Proposal:
        return chain([(t + 1) % VOCAB for t in coming[: min(8, room)]], 0.3, 0.3)

    source = Foretells(clock, texts, wrong if says != "nothing" else lambda coming, room: Proposal(), asking=asking)
    w = world(monkeypatch, clock, [source], STEEP)
    for one in texts:
        w.run([one])
    # 0.3% of plain decoding's time, and what it takes to find out.
    assert len(source.asked) * asking < 0.003 * 3600 + 1.5 + asking, len(source.asked)
    assert len(source.asked) > 3600 / 512 - 2, "it may have become better"


@pytest.mark.parametrize("spare", [0.0, 0.3])
def test_asking_costs_nothing_while_a_device_is_busy(spare: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that asks for more than a request saves is asked all the same, and foretells what pays."""
    clock, one = Clock(), text(600)
    source = Foretells(clock, [one], lambda coming, room: chain(coming[: min(8, room)], 0.9, 0.9), asking=0.25)
    w = world(monkeypatch, clock, [source], STEEP)
    ask = w.gathering.ask
    monkeypatch.setattr(w.gathering, "ask", lambda batch: ask(batch, spare=spare))
    w.policy.kinds[0].bucket.left = 0.0
    w.run([one])
    first = next((at for at in source.asked[2:]), 600)
    assert first < 30 if spare == 0.3 else first > 32, source.asked[:9]
    assert w.drafted > 20


@pytest.mark.parametrize("size", [1, 2, 8, 16])
def test_what_costs_nothing_is_spent_once(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is busy for half of a round, so asking any source meanwhile is free."""
    clock, texts = Clock(), [text(400, i) for i in range(size)]
    source = Foretells(clock, texts, lambda coming, room: Proposal(), asking=0.1)
    w = world(monkeypatch, clock, [source], STEEP)
    ask, late = w.gathering.ask, 0.0

    def busy(batch: Batch) -> Any:
        nonlocal late
        began = clock.now
        proposals = ask(batch, spare=0.5)
        late += max(clock.now - began - 0.5, 0.0)  # time that the device waited for
        clock.now = began
        return proposals

    monkeypatch.setattr(w.gathering, "ask", busy)
    w.run(texts)
    assert late < 400 * 0.03 and w.policy.kinds[0].bucket.left > -1.0, (late, w.policy.kinds[0].bucket.left)
    assert size > 1 or len(source.asked) > 390, "it costs nothing, and may say something any time"


@pytest.mark.parametrize("tiers", [None, (2, 4, 8, 16)], ids=["host", "device"])
def test_the_first_request_drafts_at_once(tiers: Sequence[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, one = Clock(), text(64)
    source = Foretells(clock, [one], lambda coming, room: chain(coming[: min(8, room)], 0.9, 0.9), asking=0.005)
    w = world(monkeypatch, clock, [source], STEEP, tiers)
    proposals = w.gathering.ask(Batch([one]))  # type: ignore[list-item]
    assert proposals is not None and proposals.trees is not None
    assert 64 / w.run([one]) > 1.8


@pytest.mark.parametrize("tiers", [None, (2, 4, 8, 16)], ids=["host", "device"])
@pytest.mark.parametrize("head", [0.0, 9.0], ids=["no head", "dear head"])
def test_a_request_that_can_pay_for_no_more_than_the_least_round_gets_that(
    head: float, tiers: Sequence[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least round of a head costs another time, which says nothing of a round without it."""
    clock, one = Clock(), text(64)
    source = Foretells(clock, [one], lambda coming, room: chain(coming[: min(8, room)], 0.9, 0.9))
    w = world(monkeypatch, clock, [source], STEEP, tiers, head, hosted=0.1)
    w.gathering.ask(Batch([one]))  # type: ignore[list-item]
    w.drafting.account(one).request.left = 0.65  # the least round loses 0.54
    proposals = w.gathering.ask(Batch([one]))  # type: ignore[list-item]
    assert proposals is not None and proposals.trees is not None and proposals.trees.trees.sizes == [2]


@pytest.mark.parametrize("moved_on", [False, True])
def test_a_source_hears_of_no_later_round_where_a_device_has_moved_on(
    moved_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, one, heard = Clock(), text(400), list[int]()
    source = Foretells(clock, [one], lambda coming, room: Proposal())
    begin = source.begin

    def begins(request: DraftRequest) -> Any:
        told = begin(request)
        told.observe = lambda tokens, top: heard.append(one.produced)
        return told

    monkeypatch.setattr(source, "begin", begins)
    w = world(monkeypatch, clock, [source], STEEP)
    batch = Batch([one])  # type: ignore[list-item]
    rows = None if moved_on else [([1], [[1]])]
    verified: Any = SimpleNamespace(likeliest=lambda requests, count: rows)
    w.gathering.ask(batch)
    one.tokens.append(one.all[len(one.tokens)])
    w.gathering.watch(batch, verified)
    w.gathering._worth[0].gain, w.gathering._worth[0].cost = 0.0, 1.0
    assert w.gathering.ask(batch) is None
    one.tokens.append(one.all[len(one.tokens)])
    w.gathering.watch(batch, verified)
    assert heard == ([] if moved_on else [1]), "a source is told of the round that it was asked for, and of no other"


@pytest.mark.parametrize("drafters", [["head", "suffix"], ["suffix"]])
def test_a_request_has_one_account_whoever_drafts(drafters: list[str]) -> None:
    with LLM(drafters=drafters) as llm:
        drafting = llm._runner.drafting
        assert drafting.gathering._account_of == drafting.account


def test_merging_is_part_of_what_asking_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, one = Clock(), text(2000)
    source = Foretells(clock, [one], lambda coming, room: chain([(coming[0] + 1) % VOCAB], 0.3, 0.3), asking=0.001)
    w = world(monkeypatch, clock, [source], FLAT)
    merges = gathering_module.choose_drafts

    def dear(*args: Any) -> Any:
        clock.now += 0.5
        return merges(*args)

    monkeypatch.setattr(gathering_module, "choose_drafts", dear)
    took = w.run([one])
    assert took < 2000 * 1.015 and w.gathering._worth[0].cost > 0.4, took


def test_a_source_that_said_nothing_hears_of_the_round_that_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, one, heard = Clock(), text(400), list[int]()

    def observe(tokens: Sequence[int], top: Sequence[Sequence[int]]) -> None:
        clock.now += 0.05  # takes more than a source that is not asked may take
        heard.append(one.produced)

    source = Foretells(clock, [one], lambda coming, room: Proposal(), asking=0.05)
    begin = source.begin

    def begins(request: DraftRequest) -> Any:
        told = begin(request)
        told.observe = observe
        return told

    monkeypatch.setattr(source, "begin", begins)
    w = world(monkeypatch, clock, [source], STEEP)
    while one.remaining > 1:
        w.gathering.ask(Batch([one]))  # type: ignore[list-item]
        clock.now += 1.0
        one.tokens.append(one.all[len(one.tokens)])
        row = SimpleNamespace(likeliest=lambda requests, count: [([1], [[1]])])
        w.gathering.watch(Batch([one]), row)  # type: ignore[arg-type, list-item]
    assert source.asked and heard[1:] == [n + 1 for n in source.asked][-len(heard) + 1 :]
    assert len(heard) <= len(source.asked) + 1, "its first time, nobody knows what telling it takes"


def test_a_dear_source_does_not_make_a_cheap_one_look_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, texts = Clock(), [text(300, i) for i in range(4)]

    def right(coming: list[int], room: int) -> Proposal:
        return chain(coming[: min(4, room)], 0.9, 0.9)

    cheap = Foretells(clock, texts, right, asking=0.002, name="cheap")
    dear = Foretells(clock, texts, lambda coming, room: Proposal(), asking=1.5, name="dear")
    w = world(monkeypatch, clock, [cheap, dear], FLAT)
    for one in texts:
        w.run([one])
    assert len(dear.asked) <= 12 and len(cheap.asked) > 200, (len(dear.asked), len(cheap.asked))


@pytest.mark.parametrize("drafters", [["head", "suffix"], ["suffix"]])
def test_requests_that_have_ended_leave_no_account(drafters: list[str]) -> None:
    """The last asking is paid as a request ends, and opens no account again."""
    with LLM(drafters=drafters, max_batch=2) as llm:
        llm.generate(["a b c a b c a b c"] * 4, SamplingParams(max_tokens=24, ignore_eos=True))
        assert not llm._runner.drafting._accounts
