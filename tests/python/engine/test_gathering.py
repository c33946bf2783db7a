"""The choice of sources to ask and of drafts to verify: worth of each, by a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gathering_world import VOCAB, Clock, Foretells, text, world
from specrs import LLM, SamplingParams
from specrs.drafters import DraftRequest, Proposal
from specrs.engine.drafting.budget import ENGINE, RATE
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Passed

FLAT = {1: 1.0, 2: 1.25, 4: 1.3, 8: 1.4, 16: 1.6}
STEEP = {1: 1.0, 2: 1.44, 4: 2.06, 8: 3.1, 16: 5.3}


def chain(tokens: list[int], first: float, others: float) -> Proposal:
    return Proposal(range(-1, len(tokens) - 1), tokens, [first, *[others] * (len(tokens) - 1)][: len(tokens)])


@pytest.mark.parametrize(("chance", "least"), [(0.3, 1.8), (0.4, 2.2), (0.6, 2.5)])
def test_a_chain_pays_whose_first_node_alone_does_not(chance: float, least: float) -> None:
    clock, rng, one = Clock(), random.Random(3), text(2000)

    def says(coming: list[int], room: int) -> Proposal:
        right = rng.random() < chance
        return chain([(t + (not right)) % VOCAB for t in coming[: min(8, room)]], chance, 0.95)

    w = world(clock, [Foretells(clock, [one], says)], FLAT)
    assert 2000 / w.run([one]) > least


def test_siblings_pay_on_a_device_where_none_of_them_does() -> None:
    clock, rng, one = Clock(), random.Random(4), text(2000)

    def says(coming: list[int], room: int) -> Proposal:
        tokens = [(coming[0] + 1 + i) % VOCAB for i in range(3)]
        if (which := rng.randrange(4)) < 3:
            tokens[which] = coming[0]
        return Proposal([-1] * 3, tokens, [0.25] * 3)

    rows = {1: 1.0, 4: 1.3, 8: 1.4, 16: 1.6}
    w = world(clock, [Foretells(clock, [one], says)], rows, tiers=(4, 8, 16))
    assert 2000 / w.run([one]) > 1.25
    assert w.drafted > 0.9 * w.rounds


@pytest.mark.parametrize("asking", [0.003, 0.03, 0.3, 3.0])
@pytest.mark.parametrize("claims", [0.3, 0.9])
def test_a_source_that_is_always_wrong_costs_little(asking: float, claims: float) -> None:
    clock, texts = Clock(), [text(300, i) for i in range(12)]

    def says(coming: list[int], room: int) -> Proposal:
        return chain([(t + 1) % VOCAB for t in coming[: min(8, room)]], claims, claims)

    source = Foretells(clock, texts, says, asking=asking)
    w = world(clock, [source], STEEP)
    took = sum(w.run([one]) for one in texts)
    # Nobody knows beforehand what the first two times will cost.
    assert took - 2 * asking < 3600 * 1.02, (took, len(source.asked), w.drafted)


@pytest.mark.parametrize("tiers", [None, (2, 4, 8, 16)], ids=["host", "device"])
def test_the_first_request_drafts_at_once(tiers: Sequence[int] | None) -> None:
    clock, one = Clock(), text(64)
    source = Foretells(clock, [one], lambda coming, room: chain(coming[: min(8, room)], 0.9, 0.9), asking=0.005)
    w = world(clock, [source], STEEP, tiers)
    proposals = w.drafting._ask(Batch([one]))  # type: ignore[list-item]
    assert proposals is not None and proposals.trees is not None
    assert 64 / w.run([one]) > 1.8


@pytest.mark.parametrize("asking", [0.02, 0.3])
def test_a_source_that_says_nothing_is_asked_rarely(asking: float) -> None:
    clock, texts = Clock(), [text(500, i) for i in range(8)]
    source = Foretells(clock, texts, lambda coming, room: Proposal(), asking=asking)
    w = world(clock, [source], STEEP)
    for one in texts:
        w.run([one])
    assert w.rounds == 4000 and w.drafted == 0
    assert 10 < len(source.asked) * asking < ENGINE + 4000 * RATE + asking


def test_a_source_that_begins_slowly_is_begun_once_and_waited_for_no_more() -> None:
    clock, texts = Clock(), [text(300, i) for i in range(6)]
    source = Foretells(clock, texts, lambda coming, room: Proposal(), beginning=20.0)
    w = world(clock, [source], STEEP)
    took = [w.run([one]) for one in texts]
    assert took[0] == pytest.approx(320.0, rel=0.01) and sum(took) < 1800 + 2 * 20.1, "the engine pays, too"


@pytest.mark.parametrize("spare", [0.0, 0.5, 2.0])
def test_beginning_beyond_the_time_of_a_round_in_flight_empties_the_account(
    spare: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, one = Clock(), text(64)
    source = Foretells(clock, [one], lambda coming, room: Proposal(), beginning=3.5)
    w = world(clock, [source], STEEP)
    w.drafting._ask(Batch([one]), spare)  # type: ignore[list-item]
    account = w.drafting.account(one)  # type: ignore[arg-type]
    assert (account.left(1) > 0.0) == (spare == 2.0)
    w.drafting._ask(Batch([one]), spare)  # type: ignore[list-item]
    assert len(source.asked) == (2 if spare == 2.0 else 1), "nobody who cannot pay is asked, whether it is free or not"


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
    w = world(clock, [source], STEEP)
    batch = Batch([one])  # type: ignore[list-item]
    rows = None if moved_on else [([1], [[1]])]
    verified: Any = SimpleNamespace(likeliest=lambda requests, count: rows)
    passed = [Passed(one, one.all[len(one.tokens) : len(one.tokens) + 1], 1)]  # type: ignore[arg-type]
    w.drafting._ask(batch)
    one.tokens.append(one.all[len(one.tokens)])
    w.gathering.learn(passed, verified)
    w.drafting.account(one).request.left = 0.0  # type: ignore[arg-type]
    assert w.drafting._ask(batch) is None
    one.tokens.append(one.all[len(one.tokens)])
    w.gathering.learn(passed, verified)
    assert heard == ([] if moved_on else [1]), "a source is told of the round that it was asked for, and of no other"


@pytest.mark.parametrize("spare", [0.0, 0.5, 2.0])
def test_who_is_asked_pays_for_the_time_that_it_takes(spare: float) -> None:
    """Beginning, merging and choosing are part of it; while a device is busy, nothing is to be paid."""
    clock, texts = Clock(), [text(64, i) for i in range(2)]
    source = Foretells(clock, texts, lambda coming, room: chain(coming[:4], 0.9, 0.9), beginning=0.5, asking=0.1)
    w = world(clock, [source], STEEP)
    accounts = [w.drafting.account(one) for one in texts]  # type: ignore[arg-type]
    before = [account.request.left for account in accounts]
    w.drafting._ask(Batch(texts), spare)  # type: ignore[arg-type]
    paid = [left - account.request.left for left, account in zip(before, accounts, strict=True)]
    assert paid == pytest.approx([max(1.2 - spare, 0.0) / w.costs.plain(2)] * 2)


@pytest.mark.parametrize("drafters", [["head", "suffix"], ["suffix"]])
def test_requests_that_have_ended_leave_no_account(drafters: list[str]) -> None:
    """The last asking is paid as a request ends, and opens no account again."""
    with LLM(drafters=drafters, max_batch=2) as llm:
        llm.generate(["a b c a b c a b c"] * 4, SamplingParams(max_tokens=24, ignore_eos=True))
        assert not llm._runner.drafting._accounts
