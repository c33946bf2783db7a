"""Tokens are the same with and without speculation: for any tree, page size, batch, prefix sharing and chunking."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from exact_world import PAGES, SAMPLED, check, plain, requests
from modelzoo import Pair
from specrs import LLM, SamplingParams, assets
from specrs.engine import RequestOutput

TREES = [(1, 1, 2), (1, 3, 4), (1, 5, 6), (2, 1, 3), (2, 3, 8), (2, 5, 16), (4, 1, 4), (4, 3, 32), (4, 5, 64),
         (8, 1, 9), (8, 3, 64), (8, 5, 64), (4, 5, 2), (8, 5, 7)]  # fmt: skip


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("page_size", PAGES)
def test_every_tree_gives_the_plain_tokens(tiny: Pair, page_size: int, sampled: bool) -> None:
    prompts, params = requests(8, seed=page_size, **(SAMPLED if sampled else {}))
    want = plain(tiny, prompts, params)
    lengths: set[int] = set()
    for (k, s, v), batch in zip(TREES, itertools.cycle([8, 3, 1, 5])):
        llm = LLM(tiny.target, tiny.draft, tree=(k, s, v), page_size=page_size, max_batch=batch,
                  prefill_chunk=11)  # fmt: skip
        outputs = check(llm, prompts, params, want)
        lengths |= {n for o in outputs for n, count in enumerate(o.accepted_lengths) if count}
    assert max(lengths) >= 3, "trees must have been accepted for this to mean anything"


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("page_size", PAGES)
def test_deep_acceptance_gives_the_plain_tokens(ternary: Pair, page_size: int, sampled: bool) -> None:
    prompts, params = requests(8, seed=page_size, vocab=3, **(SAMPLED if sampled else {}))
    want = plain(ternary, prompts, params)
    lengths: set[int] = set()
    for k, s, v, batch in ((3, 5, 40, 8), (3, 6, 48, 2), (2, 6, 23, 3), (1, 5, 6, 8)):
        llm = LLM(ternary.target, ternary.draft, tree=(k, s, v), page_size=page_size, max_batch=batch,
                  prefill_chunk=9)  # fmt: skip
        outputs = check(llm, prompts, params, want)
        lengths |= {n for o in outputs for n, count in enumerate(o.accepted_lengths) if count}
    assert max(lengths) >= 4


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_the_model_in_the_package_gives_the_plain_tokens(sampled: bool) -> None:
    prompts = assets.heldout_prompts()[:6]
    params = SamplingParams(max_tokens=40, seed=3, **(SAMPLED if sampled else {"temperature": 0}))
    want = [o.token_ids for o in LLM(speculative=False, max_batch=6).generate(prompts, params)]
    for tree in ({}, {"tree": (4, 4, 16), "page_size": 4}):
        outputs = LLM(max_batch=3, **tree).generate(prompts, params)
        assert [o.token_ids for o in outputs] == want
        if tree and not sampled:
            assert sum(len(o.token_ids) for o in outputs) / sum(o.rounds for o in outputs) > 3


@pytest.mark.parametrize("option", [{"draft_attention": "lane"}, {"kv_dtype": "bfloat16"}, {"prefix_cache": False}, {}])
def test_other_options_give_the_plain_tokens(tiny: Pair, option: dict[str, Any]) -> None:
    """``{}``: the tree picked by the cost model, whose choices depend on timing and must not matter."""
    prompts, params = requests(8, seed=7, **SAMPLED)
    kv = {"kv_dtype": option["kv_dtype"]} if "kv_dtype" in option else {}
    want = plain(tiny, prompts, params, **kv)
    tree = {} if not option else {"tree": (4, 3, 16)}
    check(LLM(tiny.target, tiny.draft, **tree, **option), prompts, params, want)


def test_a_warm_prefix_cache_changes_nothing(tiny: Pair) -> None:
    prompts, params = requests(8, seed=3, **SAMPLED)
    want = plain(tiny, prompts, params)
    llm = LLM(tiny.target, tiny.draft, tree=(4, 3, 16), page_size=4, max_batch=2)
    check(llm, prompts, params, want)
    again = check(llm, prompts, params, want)
    assert sum(o.usage.cached_tokens for o in again) > 150


def test_requests_join_and_finish_independently(tiny: Pair) -> None:
    prompts, params = requests(8, seed=5, **SAMPLED)
    want = plain(tiny, prompts, params)
    llm = LLM(tiny.target, tiny.draft, tree=(4, 3, 16), max_batch=4, prefill_chunk=16)
    ids: dict[int, int] = {}
    outputs: dict[int, RequestOutput] = {}
    for i in range(8):
        ids[llm.add(prompts[i], params[i])] = i
        for event in llm.step():
            if event.output:
                outputs[ids[event.request_id]] = event.output
    while llm.unfinished:
        for event in llm.step():
            if event.output:
                outputs[ids[event.request_id]] = event.output
    assert [outputs[i].token_ids for i in range(8)] == want


def test_a_pool_too_small_for_all_preempts_and_gives_the_same_tokens(tiny: Pair) -> None:
    prompts, params = requests(8, seed=11, **SAMPLED)
    want = plain(tiny, prompts, params)
    llm = LLM(tiny.target, tiny.draft, tree=(2, 3, 8), page_size=4, max_batch=8, num_pages=40)
    check(llm, prompts, params, want)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_random_configurations(tiny: Pair, seed: int) -> None:
    rng = random.Random(seed)
    k, s = rng.randrange(1, 9), rng.randrange(1, 7)
    v = rng.randrange(1, min(64, 1 + k + (s - 1) * k * k) + 1)
    prompts, params = requests(rng.randrange(1, 9), seed=1000 + seed, **(SAMPLED if rng.random() < 0.7 else {}))
    want = plain(tiny, prompts, params)
    llm = LLM(tiny.target, tiny.draft, tree=(k, s, v), page_size=2 ** rng.randrange(8),
              max_batch=rng.randrange(1, 9), prefill_chunk=rng.randrange(1, 80), prefix_cache=rng.random() < 0.5,
              draft_attention=rng.choice(["ancestors", "lane"]))  # fmt: skip
    check(llm, prompts, params, want)
