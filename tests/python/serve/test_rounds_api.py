"""``return_spec_stats: "rounds"``: what choices say of their rounds, in streams and whole, of both endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from serve_world import Running, running
from specrs.engine import AsyncLLM, Round, StreamEvent
from specrs.serve import reply, service
from specrs.serve.reply import slices, traced

PROMPT = "class Stack:\n    def __init__(self):\n"


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = AsyncLLM(max_batch=8, max_context_len=512, tree=(3, 4, 12))
    with running(engine, tmp_path_factory.mktemp("rounds"), max_waiting=64, max_prompts=32) as made:
        yield made
        made.idle()
    asyncio.run(engine.aclose(drain=False))


def check(told: dict[str, Any], text: str, tokens: list[int]) -> dict[str, int]:
    """Check that the rounds of a choice make its text and tokens. Returns sums for the response's own object."""
    rounds, pieces = told["rounds"], told["pieces"]
    assert "".join(piece for piece, _, _ in pieces) == text
    found = tokens[:1]
    for i, one in enumerate(rounds):
        assert len(one["tokens"]) == len(one["texts"]) == len(one["parents"]) and one["parents"][0] == -1
        assert one["tokens"][0] == found[-1] and one["seconds"] > 0
        own = [] if one["own"] is None else [one["own"]]
        found += [one["tokens"][node] for node in one["accepted"]] + own
        assert one["emitted"] == len(one["accepted"]) + len(own)
        mine = [(piece, drafted) for piece, drafted, at in pieces if at == i]
        if "\ufffd" not in text:
            drafts, last = [one["texts"][node] for node in one["accepted"]], one["own_text"]
            assert "".join(piece for piece, _ in mine) == "".join(drafts) + (last or "")
            assert [piece for piece, drafted in mine if drafted] == drafts
    assert found == tokens
    return {
        "rounds": len(rounds), "draft_tokens": sum(len(one["tokens"]) - 1 for one in rounds),
        "draft_tokens_accepted": sum(len(one["accepted"]) for one in rounds),
    }  # fmt: skip


def whole(events: list[dict[str, Any]], index: int, chat: bool) -> tuple[dict[str, Any], str, list[int]]:
    """A choice of a stream, put together; that text comes with its pieces."""
    told: dict[str, Any] = {"rounds": [], "pieces": []}
    text, tokens = "", []
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            new = choice["delta"].get("content", "") if chat else choice["text"]
            text += new
            tokens += choice.get("token_ids", [])
            if "specrs" in choice:
                before = len(told["rounds"])
                told["rounds"] += choice["specrs"]["rounds"]
                pieces = choice["specrs"]["pieces"]
                told["pieces"] += [[piece, drafted, at + before if at >= 0 else -1] for piece, drafted, at in pieces]
                assert "".join(piece for piece, _, _ in pieces) == new
            else:
                assert not new
    return told, text, tokens


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_the_rounds_of_a_stream_make_the_whole_response(web: Running, chat: bool, n: int) -> None:
    body: dict[str, Any] = {
        "n": n, "seed": 5, "temperature": 0.7, "max_tokens": 40, "return_spec_stats": "rounds",
        "return_token_ids": True,
    }  # fmt: skip
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body |= {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    events = web.stream(path, **body)
    answer = web.post(path, **{**body, "return_spec_stats": True}).json()
    sums: list[dict[str, int]] = []
    for choice in answer["choices"]:
        text = choice["message"]["content"] if chat else choice["text"]
        told, streamed, tokens = whole(events, choice["index"], chat)
        assert (streamed, tokens) == (text, choice["token_ids"])
        sums.append(check(told, streamed, tokens))
        assert all(one["sources"] in ([], ["head"]) for one in told["rounds"])
    for name in sums[0]:
        assert sum(one[name] for one in sums) == answer["specrs"][name]
    assert sum(one["draft_tokens_accepted"] for one in sums) > 0


def test_prompts_and_echo(web: Running) -> None:
    body: dict[str, Any] = {
        "prompt": [PROMPT, "import os\n"], "temperature": 0, "max_tokens": 20, "return_spec_stats": "rounds",
        "return_token_ids": True,
    }  # fmt: skip
    events = web.stream("/v1/completions", **body)
    for index in range(2):
        check(*whole(events, index, chat=False))
    [first, *rest] = web.stream("/v1/completions", **{**body, "prompt": PROMPT, "echo": True})
    first["choices"][0]["text"] = first["choices"][0]["text"].removeprefix(PROMPT)
    check(*whole([first, *rest], 0, chat=False))


@pytest.mark.parametrize("more", [{}, {"stream": True, "echo": True, "logprobs": 0}])
def test_what_comes_whole_has_no_rounds(web: Running, more: dict[str, Any]) -> None:
    error = web.refused("/v1/completions", prompt=PROMPT, return_spec_stats="rounds", **more)
    assert error["param"] == "return_spec_stats"


def test_nobody_who_does_not_ask_is_told(web: Running) -> None:
    for stats in (True, False):
        answer = web.complete(prompt=PROMPT, max_tokens=8, temperature=0, return_spec_stats=stats)
        assert "specrs" not in answer["choices"][0] and ("specrs" in answer) == stats
        for event in web.stream("/v1/completions", prompt=PROMPT, max_tokens=8, return_spec_stats=stats):
            assert all("specrs" not in choice for choice in event["choices"])
    [event, last] = web.stream("/v1/completions", prompt=PROMPT, max_tokens=0, return_spec_stats="rounds")
    assert event["choices"][0]["text"] == "" and "specrs" not in event["choices"][0] and last["specrs"]["rounds"] == 0


@pytest.mark.parametrize("wrong", ["round", 1, ["rounds"], {}])
def test_other_values_are_refused(web: Running, wrong: Any) -> None:
    error = web.refused("/v1/completions", prompt=PROMPT, return_spec_stats=wrong)
    assert error["param"] == "return_spec_stats" and "rounds" in error["message"]


def test_a_slow_client_s_rounds_come_in_slices(web: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced: each event has more rounds than one may have."""
    body: dict[str, Any] = {"prompt": PROMPT, "temperature": 0.7, "seed": 3, "max_tokens": 30}
    want = web.complete(**body)["choices"][0]["text"]
    real = service.Flow._one

    async def late(self: Any) -> Any:
        events = [event async for _, event in real(self)]
        yield 0, StreamEvent.joined(events)

    monkeypatch.setattr(service.Flow, "_one", late)
    for most in (1, 2, 5):
        monkeypatch.setattr(reply, "MOST_ROUNDS", most)
        monkeypatch.setattr(service, "MOST_ROUNDS", most)
        events = web.stream("/v1/completions", **body, return_spec_stats="rounds", return_token_ids=True)
        parts = [choice["specrs"]["rounds"] for event in events for choice in event["choices"]]
        assert max(map(len, parts)) == most and len(parts) > 1
        told, text, tokens = whole(events, 0, chat=False)
        assert text == want
        check(told, text, tokens)


def round_of(*pieces: tuple[str, bool]) -> Round:
    return Round([7], [-1], (), 8, 0.1, pieces=pieces)


def test_pieces_belong_to_rounds_whatever_stands_before_and_behind() -> None:
    first, second = round_of(("a", True), ("b", False)), round_of(("c", False))
    for before in ([], [("p", False)]):
        for behind in ([], [("z", False)]):
            pieces = [*before, *first.pieces, *second.pieces, *behind]
            told = traced([first, second], pieces, str)
            assert [at for _, _, at in told["pieces"]] == [-1] * len(before) + [0, 0, 1] + [-1] * len(behind)
    assert traced([], [("p", False)], str) == {"rounds": [], "pieces": [["p", False, -1]]}
    held = round_of()  # a round whose text a later one released
    assert [at for _, _, at in traced([held, second], [("c", False)], str)["pieces"]] == [1]


def test_slices_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "MOST_ROUNDS", 2)
    rounds = tuple(round_of((str(i), i % 2 == 0)) for i in range(7))
    pieces = [("p", False), *(piece for one in rounds for piece in one.pieces), ("z", False)]
    event = StreamEvent(3, [1, 2, 3], pieces, rounds=rounds)
    parts = list(slices(event))
    assert [len(part.rounds) for part in parts] == [2, 2, 2, 1]
    assert StreamEvent.joined(parts) == event
    few = StreamEvent(3, [1], [("p", False)], rounds=rounds[:2])
    assert list(slices(few)) == [few]
