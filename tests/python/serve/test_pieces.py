"""Long responses, which a thread beside the event loop writes."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from serve_world import Running, worst_pause
from specrs.engine.request.logprobs import Logprob
from specrs.serve import exchange
from specrs.serve.scores import Names, all_objects, objects
from specrs.serve.writing import Items, dumps, dumps_in_pieces


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON; long lists of everything, and texts that need escapes."""
    kind = rng.randrange(9 if depth < 4 else 6)
    if kind < 6:
        text = "".join(rng.choice('aé"\\\n\u2028\ud800😀/') for _ in range(rng.randrange(6)))
        return [None, True, -0.0, 1e-300, rng.getrandbits(70), text][kind]
    length = rng.choice([0, 1, 2, 31, 32, 33, 64, 65]) if depth < 2 else rng.randrange(3)
    if kind == 6:
        return {f'{rng.choice("ab")}"{i}': value(rng, depth + 1) for i in range(length)}
    return [value(rng, depth + 1) for _ in range(length)]


def test_pieces_are_the_whole() -> None:
    rng = random.Random(3)
    for _ in range(300):
        made = value(rng)
        assert dumps_in_pieces(made) == dumps(made), made
    for count in (0, 1, 31, 32, 33, 64, 100):
        numbers = Items(count, lambda first, end, count=count: list(range(first, min(end, count))))
        for times in (1, 31, 32, 33, 65):
            want = dumps({"a": [{"b": list(range(count))}] * times, "c": [list(range(count))] * times})
            assert dumps_in_pieces({"a": [{"b": numbers}] * times, "c": [numbers] * times}) == want


def test_what_nobody_wants_is_not_written() -> None:
    stop, made = threading.Event(), []

    def of(first: int, end: int) -> list[int]:
        made.append(first)
        if len(made) == 3:
            stop.set()
        return list(range(first, end))

    assert dumps_in_pieces(Items(100_000, of), stop) == b"" and len(made) == 3


def test_many_scores_hold_nobody_up() -> None:
    scored = {i: Logprob(-i / 7, i + 1, f"é{i}".encode()) for i in range(21)}
    tokens = 8000

    given = [3] * tokens, [scored] * tokens, 20, Names()

    def made(write: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "logprobs": {"content": write(*given)}}]}

    tries = [worst_pause(lambda: dumps_in_pieces(made(all_objects))) for _ in range(5)]
    took, pause = min(tries, key=lambda one: one[1] / one[0])
    assert pause < took / 4, (took, pause)
    whole = dumps(made(objects))
    assert dumps_in_pieces(made(all_objects)) == whole and len(whole) > 8 << 20


@pytest.mark.parametrize("body", [{"logprobs": 3, "echo": True}, {"prompt_logprobs": 2}, {}])
def test_a_response_with_scores_is_made_in_the_pool(
    web: Running, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    threads = []

    def told(*given: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return dumps_in_pieces(*given)

    monkeypatch.setattr(exchange, "dumps_in_pieces", told)
    made = web.client.post("/v1/completions", json={"prompt": "def f(", "max_tokens": 4, "n": 2, "seed": 1, **body})
    chat = {**body, "logprobs": True, "top_logprobs": 3} if body else {}
    chat.pop("echo", None)
    said = web.client.post("/v1/chat/completions", json={
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **chat,
    })  # fmt: skip
    assert [one["finish_reason"] for one in made.json()["choices"] + said.json()["choices"]] == ["length"] * 3
    assert len(threads) == 2 * bool(body) and all(name.startswith("specrs-write") for name in threads)
