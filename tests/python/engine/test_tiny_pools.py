"""Pools with hardly a page to spare: whatever the prefix cache holds, a request that fits alone runs, to its tokens.

Each seed draws an engine (page size, tree or none, chunk size, batch, context) whose pool holds its largest request
exactly or a few pages more, and requests that share prefixes, join over time, preempt each other, and are sometimes
aborted. Tokens are those of plain decoding with pages in plenty, no page leaks, every step makes progress, and who was
admitted first is never preempted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from modelzoo import write_eagle3, write_target
from specrs import LLM, PoolExhaustedError, SamplingParams
from specrs.engine import RequestOutput
from specrs.engine.request.request import Request

VOCAB, CONTEXT = 4, 80
SIZES: dict[str, Any] = {
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32,
}  # fmt: skip
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.05}


@dataclass(frozen=True)
class World:
    """A model, its head, and an engine with pages in plenty."""

    target: Path
    draft: Path
    roomy: LLM

    def want(self, prompt: list[int], params: SamplingParams, context: int) -> list[int]:
        most = min(params.max_tokens, context - len(prompt))
        return self.roomy.generate([prompt], SamplingParams(max_tokens=most, seed=params.seed,
                                   temperature=params.temperature, top_p=params.top_p,
                                   repetition_penalty=params.repetition_penalty))[0].token_ids  # fmt: skip

    def llm(self, **options: Any) -> LLM:
        return LLM(self.target, self.draft, **options)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("tiny_pools")
    target = write_target(root / "target", vocab_size=VOCAB, eos_token_id=None, bos_token_id=None, hidden_size=32,
                          num_hidden_layers=3, max_position_embeddings=CONTEXT, **SIZES)  # fmt: skip
    draft = write_eagle3(root / "draft", target, draft_vocab_size=VOCAB, aux_layers=(0, 1, 2), **SIZES)
    return World(target, draft, LLM(target, prefix_cache=False, max_batch=1))


@dataclass
class Watch:
    """Records what happened in the engines of a test."""

    preempted: int = 0
    steps: int = 0
    cached: int = 0

    def attach(self, llm: LLM) -> None:
        scheduler = llm._scheduler
        preempt: Callable[[Request], None] = scheduler._preempt

        def counted(request: Request) -> None:
            assert request is not scheduler._admitted[0], "who was admitted first gave way"
            self.preempted += 1
            preempt(request)

        scheduler._preempt = counted  # type: ignore[method-assign]


def drain(llm: LLM, watch: Watch, bound: int, each: Callable[[int], None] = lambda _: None) -> dict[int, RequestOutput]:
    """Step until nothing is left; at most ``bound`` steps."""
    outputs: dict[int, RequestOutput] = {}
    for step in range(bound):
        each(step)
        if not llm.unfinished:
            break
        outputs |= {e.request_id: e.output for e in llm.step() if e.output is not None}
        llm.audit()
        watch.steps += 1
    assert not llm.unfinished, f"{llm.unfinished} requests unfinished after {bound} steps"
    return outputs


def nothing_leaked(llm: LLM) -> None:
    counts = llm.audit()
    assert counts["sequences"] == 0
    assert counts["free_pages"] + counts["cached_pages"] == counts["total_pages"]


def need(llm: LLM, prompt: list[int], params: SamplingParams) -> int:
    """Pages that a request has at most at once, where it runs alone."""
    [request] = llm._request(prompt, llm._request_params(params, "params"), "prompt")
    most = llm._runner.pages.most_positions(request)
    return -(-most // llm.config.page_size)


def options(rng: random.Random) -> dict[str, Any]:
    page = rng.choice([1, 1, 2, 2, 4, 8])
    out: dict[str, Any] = {"page_size": page, "max_batch": rng.randrange(1, 6),
                           "max_context_len": rng.randrange(30, 73),
                           "prefill_chunk": rng.choice([1, 2, 3, 5, 8, 13, 64, page, 2 * page]),
                           "prefix_cache": rng.random() < 0.85}  # fmt: skip
    kind = rng.random()
    if kind < 0.25:
        out["speculative"] = False
    elif kind > 0.97:
        return out  # the cost model picks; it takes its time to measure
    k, s = rng.randrange(1, 4), rng.randrange(1, 5)
    out["tree"] = (k, s, rng.randrange(1, 2 + k + (s - 1) * k * k))
    if page > 1 and k > 1 and rng.random() < 0.3:
        out |= {"attention_backend": "triton", "draft_layout": "holey"}
    return out


def work(rng: random.Random, config: dict[str, Any]) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts cut from few stems at, before and behind page and chunk boundaries; and what is wanted of each."""
    context, page = config["max_context_len"], config["page_size"]
    stems = [[rng.randrange(VOCAB) for _ in range(context)] for _ in range(rng.choice([1, 1, 2]))]
    # Short prompts run side by side and compute their stem twice; then one of them needs the whole pool.
    longest = rng.choice([context, context // 3])
    prompts, params = [], []
    for i in range(rng.randrange(2, 8)):
        at_page = page * rng.randrange(1, 2 + longest // page) + rng.choice([-1, 0, 1])
        length = rng.choice([rng.randrange(longest), at_page, longest - 1, longest])
        prompt = rng.choice(stems)[: min(max(length, 1), context - 1)]
        if rng.random() < 0.4:
            prompt = [*prompt[:-1], rng.randrange(VOCAB)]
        prompts.append(prompt)
        sampled = SAMPLED if rng.random() < 0.5 else {}
        params.append(SamplingParams(max_tokens=rng.choice([1, 2, 3, 8, 20, 60]), seed=i, **sampled))
    return prompts, params


def run(world: World, seed: int, watch: Watch) -> None:
    rng = random.Random(seed)
    config = options(rng)
    prompts, params = work(rng, config)
    probe = world.llm(**config)
    pages = max(need(probe, p, s) for p, s in zip(prompts, params, strict=True)) + rng.choice([0, 0, 1, 2, 5])
    llm = world.llm(**config, num_pages=pages)
    watch.attach(llm)
    arrivals = [rng.choice([0, 0, 1, 3, rng.randrange(40)]) for _ in prompts]
    aborts = {rng.randrange(60): rng.randrange(len(prompts)) for _ in range(rng.choice([0, 0, 1, 2]))}
    ids: dict[int, int] = {}  # ids of the engine, mapped to ours
    aborted: dict[int, RequestOutput] = {}

    def each(step: int) -> None:
        for i, at in enumerate(arrivals):
            if at == step:
                ids[llm.add(prompts[i], params[i])] = i
        for request, i in ids.items():
            if aborts.get(step) == i:
                event = llm.abort(request)
                if event is not None and event.output is not None:
                    aborted[request] = event.output
                llm.audit()

    # A step is at least a chunk or a round; each request may have to start over for each of the others, and more.
    chunks = len(prompts) * -(-config["max_context_len"] // config["prefill_chunk"])
    bound = 60 + (chunks + sum(s.max_tokens for s in params)) * (1 + len(prompts))
    outputs = drain(llm, watch, bound, each)
    while len(ids) < len(prompts):  # requests that would have arrived after the others had ended
        late = next(i for i in range(len(prompts)) if i not in ids.values())
        ids[llm.add(prompts[late], params[late])] = late
        outputs |= drain(llm, watch, bound)
    assert sorted(outputs | aborted) == sorted(ids)
    for request, i in ids.items():
        want = world.want(prompts[i], params[i], config["max_context_len"])
        if request in outputs:
            assert outputs[request].token_ids == want, f"request {i}"
        else:
            assert aborted[request].token_ids == want[: len(aborted[request].token_ids)], f"aborted request {i}"
    watch.cached += sum(o.usage.cached_tokens for o in outputs.values())
    nothing_leaked(llm)
    # With any content of the cache, the largest request alone gets its pages.
    largest = max(range(len(prompts)), key=lambda i: need(llm, prompts[i], params[i]))
    [alone] = llm.generate([prompts[largest]], params[largest])
    assert alone.token_ids == world.want(prompts[largest], params[largest], config["max_context_len"])
    nothing_leaked(llm)


def test_random_tiny_pools(world: World) -> None:
    watch = Watch()
    for seed in [*range(20), 44, 49]:  # the last two ran out where pinned pages kept what hung above them
        run(world, seed, watch)
    assert watch.preempted > 0 and watch.cached > 0, watch


@pytest.mark.long
@pytest.mark.parametrize("block", range(40))
def test_many_random_tiny_pools(world: World, block: int) -> None:
    watch = Watch()
    for seed in range(1000 + 25 * block, 1000 + 25 * (block + 1)):
        run(world, seed, watch)
    assert watch.preempted > 0 and watch.cached > 0, watch


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "head"])
def test_prompts_that_share_a_prefix_and_are_computed_side_by_side(world: World, speculative: bool) -> None:
    """A chunk of the second prompt ends where the first prompt does: its tail pages hang behind the first one's."""
    ids = [(7 * i * i + i // 3) % VOCAB for i in range(66)]
    params = SamplingParams(max_tokens=4)
    for pages in range(36, 72, 3):
        llm = world.llm(speculative=speculative, tree=(1, 1, 2), page_size=2, num_pages=pages, prefill_chunk=64)
        outputs = llm.generate([ids[:64], ids[:65]], params)
        assert [o.token_ids for o in outputs] == [world.want(ids[:n], params, CONTEXT) for n in (64, 65)]
        nothing_leaked(llm)


def test_a_pool_of_exactly_the_need(world: World) -> None:
    """Exactly the requests that could not run are refused, to the page; and a request without drafts needs no room for
    them."""
    prompt, params = [1, 2, 3, 0, 1], SamplingParams(max_tokens=20)
    for speculative, positions in ((False, 24), (True, 22 + 12)):  # 24 are written; a tree drafts behind 22
        for page in (1, 2, 4, 8):
            options = {"speculative": speculative, "tree": (3, 4, 8), "page_size": page, "max_batch": 1}
            llm = world.llm(**options, num_pages=-(-positions // page))
            assert llm.generate([prompt], params)[0].token_ids == world.want(prompt, params, CONTEXT)
            nothing_leaked(llm)
            with pytest.raises(PoolExhaustedError, match=f"needs {-(-positions // page)} pages of {page} tokens"):
                world.llm(**options, num_pages=-(-positions // page) - 1).generate([prompt], params)
    # Too short for a drafting round.
    short = world.llm(tree=(3, 4, 8), page_size=1, num_pages=6)
    assert len(short.generate([prompt], SamplingParams(max_tokens=2))[0].token_ids) == 2
