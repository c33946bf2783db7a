"""`SamplingParams.trace`: what each round drafted and accepted, told to those who asked, changing nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exact_world import requests
from flight_world import Told, flying
from modelzoo import Pair, agree, write_eagle3, write_target
from rounds_world import check, streamed
from specrs import LLM, AsyncLLM, SamplingParams, StreamEvent

TREE: dict[str, Any] = {"tree": (4, 4, 24), "max_batch": 4, "prefix_cache": False}


@pytest.fixture(scope="module")
def llm(tiny: Pair) -> LLM:
    return LLM(tiny.target, tiny.draft, **TREE)


@pytest.mark.parametrize("seed", range(6))
def test_traced_and_untraced_requests_share_a_batch(llm: LLM, seed: int) -> None:
    prompts, params = requests(8, seed)
    mixed = [replace(one, trace=i % 2 == 0) for i, one in enumerate(params)]
    _, want = streamed(llm, prompts, params)
    events, got = streamed(llm, prompts, mixed)
    for i, (one, other) in enumerate(zip(want, got, strict=True)):
        assert (one.token_ids, one.drafted, one.accepted_lengths, one.proposed) == (
            other.token_ids, other.drafted, other.accepted_lengths, other.proposed,
        )  # fmt: skip
        if i % 2:
            assert all(event.rounds == () for event in events[i])
        else:
            check(events[i], other, prompts[i])


def test_the_tree_of_a_round_that_a_stop_cuts(llm: LLM) -> None:
    """Accepted tokens behind the end are no output, and no part of the path."""
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=4, trace=True)
    for most in range(1, 60, 7):
        events, [output] = streamed(llm, [[1, 2, 3]], [replace(params, max_tokens=most)])
        rounds = check(events[0], output, [1, 2, 3])
        assert (rounds[-1].emitted if rounds else 1) >= 1


@pytest.mark.parametrize("words", [["a"], ["bc", "d e"]])
def test_rounds_that_a_bad_word_cuts(bytes_pair: Pair, words: list[str]) -> None:
    with LLM(bytes_pair.target, bytes_pair.draft, **TREE) as llm:
        prompt = llm.encode("ab")
        params = SamplingParams(max_tokens=80, temperature=1.0, seed=3, bad_words=words, trace=True)
        events, [output] = streamed(llm, [prompt], [params])
        rounds = check(events[0], output, prompt)
        released = [piece for event in events[0] for piece in event.pieces]
        told = [piece for one in rounds for piece in one.pieces]
        assert "".join(text for text, _ in released) == output.text
        assert told == released[len(released) - len(told) :], "the first token is the prompt's"


def test_every_source_is_named(tiny: Pair) -> None:
    with LLM(tiny.target, tiny.draft, drafters=["head", "suffix"], tree=(4, 4, 24)) as llm:
        prompt = [1, 2, 3, 4] * 6
        params = SamplingParams(max_tokens=60, temperature=0, trace=True)
        events, [output] = streamed(llm, [prompt], [params])
        seen = {name for one in check(events[0], output, prompt) for name in one.sources}
        assert "head" in seen and seen <= {"head", "suffix", "grammar"}


def test_plain_rounds_are_a_root_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=9, temperature=0, speculative=False, trace=True)
    events, [output] = streamed(llm, [[7, 8]], [params])
    rounds = check(events[0], output, [7, 8])
    assert len(rounds) == 8 and all(one.tokens == one.tokens[:1] and not one.sources for one in rounds)


def test_all_outputs_of_a_prompt_are_traced(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, n=3, trace=True)
    request = llm.add([4, 5, 6], params)
    events: list[StreamEvent] = []
    while llm.unfinished:
        events += llm.step()
    assert {event.request_id for event in events} == {request}
    for index in range(3):
        mine = [event for event in events if event.index == index]
        output = next(event.output for event in mine if event.output is not None)
        check(mine, output, [4, 5, 6])


def test_joined_events_have_all_rounds_in_order(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=5, trace=True)
    events, [output] = streamed(llm, [[9, 1]], [params])
    joined = StreamEvent.joined(events[0])
    assert joined is not None
    assert list(joined.rounds) == check([joined], output, [9, 1])
    held = sum(memoryview(part).nbytes for one in joined.rounds for part in (one.tokens, one.parents, one.proposed))
    assert held <= 16 * 24 * 40, "the stated bound: 16 bytes a node, a tree a token"


def test_who_reads_late_finds_all_rounds(tiny: Pair) -> None:
    """The rounds come in a few events, since those that wait are joined."""
    params = SamplingParams(max_tokens=200, temperature=1.0, seed=5, trace=True)

    async def late(engine: AsyncLLM) -> list[StreamEvent]:
        async with engine, await engine.submit([9, 1], params) as stream:
            while (stats := engine.stats()).submitted or stats.engine.running or not stats.steps:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            return [event async for event in stream]

    with LLM(tiny.target, tiny.draft, **TREE) as lent:
        events = asyncio.run(late(AsyncLLM(lent)))
    output = events[-1].output
    assert output is not None and len(output.token_ids) == 200 and len(events) <= 8
    check(events, output, [9, 1])


def test_preempted_requests_keep_their_trace(tiny: Pair) -> None:
    with LLM(tiny.target, tiny.draft, max_batch=3, tree=(2, 3, 8), page_size=4, num_pages=40) as small:
        prompts = [[i, 2, 3, 4, 5, 6, 7] for i in range(1, 5)]
        params = [SamplingParams(max_tokens=60, temperature=1.0, seed=i, trace=True) for i in range(4)]
        events, outputs = streamed(small, prompts, params)
        for i, output in enumerate(outputs):
            check(events[i], output, prompts[i])
        assert small.stats().preempted > 0


@pytest.mark.parametrize("level", ["round", "loop"])
@pytest.mark.parametrize("shape", [(1, 3, 4), (2, 3, 8)])
def test_a_device_runs_ahead_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: Any, shape: tuple[int, int, int]
) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32,
    }  # fmt: skip
    target = write_target(tmp_path / "target", vocab_size=12, num_hidden_layers=3, eos_token_id=2, **sizes)
    draft = write_eagle3(tmp_path / "draft", target, draft_vocab_size=None, aux_layers=(0, 1, 2), **sizes)
    agree(target, draft, slope=0.8)
    prompts = [[3, 4], [5], [6, 7, 8], [9]]
    params = [SamplingParams(max_tokens=40 + i, temperature=0.5, seed=i, ignore_eos=True) for i in range(4)]
    seen = []
    for traced in ((), (1, 3), (0, 1, 2, 3)):
        told = Told(level=level)
        llm = flying(target, draft, monkeypatch, told, tree=shape, max_batch=4, max_context_len=96, page_size=4)
        mixed = [replace(one, trace=i in traced) for i, one in enumerate(params)]
        events, outputs = streamed(llm, prompts, mixed)
        for i in traced:
            assert any(one.sources == ("head",) for one in check(events[i], outputs[i], prompts[i]))
        seen.append(([one.token_ids for one in outputs], told.rounds, told.ahead, told.lost))
        llm.close()
    assert seen[0] == seen[1] == seen[2] and seen[0][2] > 0
