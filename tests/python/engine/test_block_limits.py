"""Heads that draft all levels in one pass, at the limits: prompts, outputs and pages shorter than a block, requests
that differ in a batch, that end or are preempted in its midst; what the package proves and replays of such engines."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

import blockzoo
import modelzoo
from blocks_world import FORMS, LAYERS, SMALL, pair_of
from exact_world import check, plain, requests
from modelzoo import VOCAB, Pair
from specrs import LLM, SamplingParams
from specrs import _specrs as core
from specrs.capsule import Capsule, dumps, loads
from specrs.capsule.compare import replay_formats
from specrs.capsule.replay import replay
from specrs.models import BlockConfig, ModelConfig, check_draft

NAMES = [*FORMS]
BATCH = [
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=1.3, frequency_penalty=0.4, seed=2, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0, logit_bias={5: 3.0}, max_tokens=1),
    SamplingParams(temperature=1.0, seed=3, max_tokens=7, speculative=False, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=23, ignore_eos=True),
]
"""Of a batch: all that can differ between its requests."""


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_of(tmp_path_factory.mktemp("limits"), request.param)


@pytest.mark.parametrize("page", [1, 2, 16, 64])
def test_prompts_outputs_and_pages_may_be_shorter_than_a_block(pair: Pair, page: int) -> None:
    """The widest block has 16 rows; prompts begin at one token, outputs at one."""
    prompts = [[2], [1, 2], [5, 4, 3], [*range(7)], [*range(15)], [*range(16)], [*range(17)]]
    prompts = [[token % VOCAB for token in prompt] for prompt in prompts]
    params = [SamplingParams(max_tokens=1 + i % 6, ignore_eos=True, temperature=i % 2, seed=i) for i in range(7)]
    want = plain(pair, prompts, params)
    for tree, batch in (((3, 4, 12), 7), (None, 2)):
        check(LLM(pair.target, pair.draft, tree=tree, page_size=page, max_batch=batch), prompts, params, want)


def test_a_batch_of_requests_that_sample_and_end_differently(pair: Pair) -> None:
    prompts = [[1, 2, 3], [4] * 9, [7, 8], [1, 2, 3, 4, 5], [6], [*range(9)]]
    want = plain(pair, prompts, BATCH)
    for order in (range(6), (3, 1, 5, 0, 4, 2)):
        llm = LLM(pair.target, pair.draft, tree=(3, 4, 12), max_batch=4, page_size=4)
        check(llm, [prompts[i] for i in order], [BATCH[i] for i in order], [want[i] for i in order])


def test_others_go_on_where_a_request_is_aborted_between_blocks(pair: Pair) -> None:
    prompts = [[1, 2, 3], [4] * 9, [7, 8]]
    params = [SamplingParams(max_tokens=30, ignore_eos=True, temperature=i % 2, seed=i) for i in range(3)]
    want = plain(pair, prompts, params)
    llm = LLM(pair.target, pair.draft, tree=(3, 4, 12), page_size=4)
    ids = [llm.add(p, s) for p, s in zip(prompts, params, strict=True)]
    found: dict[int, list[int]] = {i: [] for i in ids}
    for step in itertools.count():
        if step == 4:
            llm.abort(ids[1])
        if not llm.unfinished:
            break
        for event in llm.step():
            found[event.request_id] += event.token_ids
    llm.audit()
    assert found[ids[0]] == want[0] and found[ids[2]] == want[2]
    assert found[ids[1]] == want[1][: len(found[ids[1]])] and len(found[ids[1]]) < 30


def test_a_request_ends_within_a_block_where_it_stops(pair: Pair) -> None:
    """At each token of its output, which a tree often reaches in the midst of its path."""
    prompt = [1, 2, 3, 4]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    [tokens] = plain(pair, [prompt], [params])
    llm = LLM(pair.target, pair.draft, tree=(3, 5, 16), page_size=4)
    for token in dict.fromkeys(tokens):
        end = tokens.index(token)
        [out] = llm.generate([prompt], [replace(params, stop_token_ids=[token])])
        assert out.token_ids[:end] == tokens[:end] and out.finish_reason == "stop" and len(out.token_ids) <= end + 1
    llm.audit()


def test_a_stop_string_within_a_block_ends_the_text_there(tmp_path: Path) -> None:
    target = modelzoo.write_target(tmp_path / "target", tokenizer=True)
    blockzoo.write_block(tmp_path / "head", "DFlash", replace(SMALL, vocab=300), LAYERS)
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=4)
    with LLM(target, speculative=False) as one, LLM(target, tmp_path / "head", tree=(4, 5, 20)) as llm:
        [whole] = one.generate([[9, 8, 7]], [params])
        for at in range(0, len(whole.text) - 3, 3):
            stopping = replace(params, stop=[whole.text[at : at + 2], whole.text[at + 1 : at + 4]])
            [want], [out] = (each.generate([[9, 8, 7]], [stopping]) for each in (one, llm))
            assert (out.text, out.token_ids, out.stop_reason) == (want.text, want.token_ids, want.stop_reason)
        llm.audit()


def test_pages_that_were_computed_are_drafted_from_again(pair: Pair) -> None:
    """A second request that shares a prompt's pages drafts as the first did, and its tokens are plain's. A P-EAGLE head
    may begin behind the pages, as all that draft by steps."""
    prompt = [token % VOCAB for token in range(40)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    [want] = plain(pair, [prompt], [params])
    for page in (1, 2, 16):
        llm = LLM(pair.target, pair.draft, tree=(3, 4, 12), page_size=page)
        first, second = (llm.generate([prompt], [params])[0] for _ in range(2))
        assert first.token_ids == second.token_ids == want
        assert second.usage.cached_tokens >= 39 // page * page - page > first.usage.cached_tokens
        if isinstance(check_draft(pair.draft, ModelConfig.from_directory(pair.target))[0], BlockConfig):
            assert second.accepted_drafts == first.accepted_drafts and second.rounds == first.rounds
        llm.audit()


def test_preempted_requests_draft_again(pair: Pair) -> None:
    prompts, params = requests(5, seed=21)
    params = [replace(p, max_tokens=30) for p in params]
    want = plain(pair, prompts, params)
    llm = LLM(pair.target, pair.draft, tree=(2, 4, 8), page_size=4, max_batch=5, num_pages=48)
    for prompt, param in zip(prompts, params, strict=True):
        llm.add(prompt, param)
    found, preempted = dict[int, list[int]](), 0
    while llm.unfinished:
        waiting = len(llm._scheduler._waiting)
        for event in llm.step():
            found.setdefault(event.request_id, []).extend(event.token_ids)
        preempted += len(llm._scheduler._waiting) > waiting
    llm.audit()
    assert preempted and [found[i] for i in sorted(found)] == want


def recorded(pair: Pair, tree: tuple[int, int, int] | None, round: int) -> Capsule:
    llm = LLM(pair.target, pair.draft, tree=tree, page_size=4, max_context_len=64)
    llm.generate([[1, 2, 3, 4, 5, 6, 7]], SamplingParams(max_tokens=2))  # leaves its pages in the cache
    prompts = [[1, 2, 3, 4, 5, 6, 9], [1, 2, 3], [4, 5]]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=t, seed=1) for t in (0, 1, 0)]
    with llm.recording(round=round) as recorder:
        llm.generate(prompts, params)
    assert recorder.capsule is not None
    return loads(dumps(recorder.capsule))


@pytest.mark.parametrize("round", [1, 3])
def test_a_recorded_round_replays_in_every_format(pair: Pair, round: int) -> None:
    capsule = recorded(pair, (3, 4, 9), round)
    assert capsule.kind == "speculative" and capsule.trees and not capsule.steps, "a block has no draft steps"
    run = replay(capsule)
    assert run.guard is None and {"verify", "commit", "draft extend"} <= {part.phase for part in run.segments}
    assert replay_formats(capsule).equal


@pytest.mark.parametrize("tree", [None, (3, 4, 12), (2, 1, 2), (8, 15, 40)])
@pytest.mark.parametrize("page", [1, 4, 64])
def test_what_an_engine_reserves_is_certified(pair: Pair, tree: tuple[int, int, int] | None, page: int) -> None:
    config = LLM(pair.target, pair.draft, tree=tree, page_size=page, max_context_len=100).config
    assert config.max_context_len is not None
    proof = core.certify(config.max_batch, config.max_context_len, page, config.shape, ["native"])
    assert proof["holds"], proof
