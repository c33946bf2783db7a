"""Bans that hold for some tokens, and log-probabilities: with and without speculation as by naive decoding."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draws_world import cuts_of, naive, prompts_of, seen, words_of
from flight_world import Level, Told, flying
from modelzoo import Pair, write_target
from specrs import LLM, ConfigError, NonFiniteError, Sampler, SamplingParams
from specrs.capsule.replay import replay
from specrs.engine.request.draws import Draws
from specrs.engine.request.seeds import philox4x32_10, split
from specrs.engine.request.token_bytes import TokenTable

SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.1}
WORDS = [[0, 0, 1], [1, 1, 2], [2, 0, 2], [2, 2, 2, 2], [1, 0, 1], [0, 2, 0]]
KINDS = {"greedy": {"temperature": 0.0}, "sampled": SAMPLED}
TREES: list[dict[str, Any]] = [
    {"tree": (1, 5, 6), "page_size": 1}, {"tree": (3, 5, 40), "page_size": 1}, {"tree": (3, 5, 40), "page_size": 4},
    {"tree": (2, 6, 23), "page_size": 16, "max_batch": 3}, {"tree": (3, 4, 30), "page_size": 4, "num_pages": 34},
    {}, {"draft_attention": "lane", "tree": (2, 4, 14), "prefix_cache": False},
]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 4.0], ids=["greedy", "sampled"])
def test_bans_are_those_of_naive_decoding(ternary: Pair, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 tokens: words are met all the time, and drafts are accepted deep."""
    rng = random.Random(5)
    reference = LLM(ternary.target, max_batch=1)
    cases = []
    for i, prompt in enumerate(prompts_of(3, 8, 3)):
        some = rng.sample(WORDS, rng.randrange(1, 5))
        params = SamplingParams(
            max_tokens=30, min_tokens=rng.choice([0, 1, 5, 11]), stop_token_ids=rng.choice([[], [2]]), seed=i,
            temperature=temperature, top_p=0.98, bad_words=["x"], logit_bias={0: -4.0},
        )  # fmt: skip
        cases.append((prompt, params, some, naive(reference, prompt, params, some)))
    cuts = cuts_of(monkeypatch)
    for options in TREES:
        llm = LLM(ternary.target, ternary.draft, **options)
        for prompt, params, some, want in cases:
            words_of(llm, monkeypatch, some)
            [out] = llm.generate([prompt], [params])
            assert out.token_ids == want, options
        llm.audit()
    assert len(cuts) > (60 if temperature else 4) and max(cuts) > 1


def test_no_round_straddles_min_tokens(ternary: Pair) -> None:
    """Deep accepted drafts, and a stop token that comes as soon as it may."""
    llm, spec = LLM(ternary.target), LLM(ternary.target, ternary.draft, tree=(3, 6, 48))
    for least in range(1, 12):
        params = [SamplingParams(max_tokens=14, min_tokens=least, stop_token_ids=[1], seed=i, temperature=3.0,
                                 logit_bias={0: -4.0, 1: -2.0}) for i in range(8)]  # fmt: skip
        prompts = prompts_of(least, 8, 3)
        want = [o.token_ids for o in llm.generate(prompts, params)]
        outputs = spec.generate(prompts, params)
        assert [o.token_ids for o in outputs] == want
        assert any(len(tokens) < 14 for tokens in want) and max(len(o.accepted_lengths) for o in outputs) > 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [3, 10])
def test_bans_of_a_batch_are_those_of_each_alone(
    tiny: Pair, ternary: Pair, vocab: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, pair = random.Random(11), ternary if vocab == 3 else tiny
    words = WORDS if vocab == 3 else [[a, b] for a in range(0, 10, 3) for b in range(1, 10, 2)] + [[2, 4, 6], [7]]
    heat = {"temperature": 4.0} if vocab == 3 and kind == "sampled" else {}
    prompts = prompts_of(7, 9, vocab)
    params = [
        SamplingParams(
            max_tokens=rng.choice([3, 20, 31]), seed=i, bad_words=["x"] if i % 3 else (), min_tokens=rng.choice([0, 3]),
            stop_token_ids=[1] if i % 2 else (), allowed_token_ids=None if i % 4 else [0, 1, *range(3, vocab, 2)],
            logprobs=i % 3 or None, logit_bias={0: -4.0}, **{**KINDS[kind], **heat},
        )
        for i in range(9)
    ]  # fmt: skip
    plain = LLM(pair.target, max_batch=1, prefix_cache=False)
    words_of(plain, monkeypatch, words)
    want = seen([plain.generate([p], [s])[0] for p, s in zip(prompts, params, strict=True)])
    for (_, tokens, *_), p in zip(want, params, strict=True):
        assert p.allowed_token_ids is None or set(tokens) <= set(p.allowed_token_ids)
        assert not p.stop_token_ids or 1 not in tokens[: p.min_tokens]
        runs = [tokens[i : i + n] for n in range(1, 5) for i in range(len(tokens) - n + 1)]
        assert not p.bad_words or not any(run in words for run in runs)
    cuts = cuts_of(monkeypatch)
    for options in TREES:
        llm = LLM(pair.target, pair.draft, **options)
        words_of(llm, monkeypatch, words)
        assert seen(llm.generate(prompts, params)) == want, options
        llm.audit()
    assert len(cuts) > 5 or vocab > 3


@pytest.mark.parametrize("temperature", [0.0, 4.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("level", ["round", "loop"])
def test_a_device_that_runs_ahead_keeps_bans_and_logprobs(
    ternary: Pair, temperature: float, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(2, 12, 3)
    params = [
        SamplingParams(max_tokens=[25, 40][i % 2], seed=i, bad_words=["x"] if i % 5 == 1 else (),
                       logprobs=2 if i % 5 == 2 else None, min_tokens=9 if i % 5 == 3 else 0,
                       stop_token_ids=[2] if i % 5 == 3 else (), temperature=temperature, logit_bias={0: -4.0})
        for i in range(12)
    ]  # fmt: skip
    plain = LLM(ternary.target)
    words_of(plain, monkeypatch, WORDS)
    want = seen(plain.generate(prompts, params))
    for page in (1, 4):
        told, cuts = Told(level=level), cuts_of(monkeypatch)
        tree = (1, 5, 6) if page == 1 else (2, 3, 8)
        llm = flying(ternary.target, ternary.draft, monkeypatch, told, tree=tree, page_size=page, max_batch=2)
        words_of(llm, monkeypatch, WORDS)
        assert seen(llm.generate(prompts, params)) == want
        assert told.ahead > 5 and told.abandoned == 0 and cuts
        llm.audit()


def test_a_ban_that_leaves_nothing_ends_the_request_by_name(tiny: Pair) -> None:
    llm = LLM(tiny.target)
    params = SamplingParams(max_tokens=4, min_tokens=2, allowed_token_ids=[3], stop_token_ids=[3])
    with pytest.raises(NonFiniteError, match="after logit_bias"):
        llm.generate([[1, 2]], [params])
    assert [o.finish_reason for o in llm.generate([[1, 2]], [params], on_error="return")] == ["error"]


def test_stop_strings_wait_for_min_tokens(bytes_pair: Pair) -> None:
    llm = LLM(bytes_pair.target, bytes_pair.draft)
    free = llm.generate(["hello"], SamplingParams(max_tokens=30, ignore_eos=True, skip_special_tokens=False))[0]
    stop = free.text[3]
    for least in (0, 6, 12):
        params = SamplingParams(max_tokens=30, ignore_eos=True, min_tokens=least, stop=stop)
        out = llm.generate(["hello"], params)[0]
        assert out.token_ids == free.token_ids[: len(out.token_ids)] and len(out.token_ids) >= least
        assert out.finish_reason == "length" or out.stop_reason == stop


def test_a_bad_word_is_never_spelled(bytes_pair: Pair) -> None:
    for seed in range(4):
        params = SamplingParams(max_tokens=60, seed=seed, temperature=1.0, ignore_eos=True)
        plain, spec = LLM(bytes_pair.target), LLM(bytes_pair.target, bytes_pair.draft, tree=(4, 4, 32))
        free = plain.generate(["hello"], params)[0]
        middle = [w for w in (free.text[i : i + 2] for i in range(5, 50, 9)) if "\ufffd" not in w]
        banned = SamplingParams(max_tokens=60, seed=seed, temperature=1.0, ignore_eos=True, bad_words=middle)
        out = plain.generate(["hello"], banned)[0]
        assert middle and out.token_ids != free.token_ids
        assert not any(w in out.text for w in middle)
        assert spec.generate(["hello"], banned)[0].token_ids == out.token_ids


def test_rounds_keep_what_stands() -> None:
    draws = Draws(10, [1], SamplingParams(temperature=1.0).resolved(), 3, (), [[4, 5], [4, 6, 7], [8]])
    assert draws.room > 100 and draws.varies
    assert draws.standing([1, 2, 3], 3) == 3 and draws.standing([1, 2], 3) == 3
    assert draws.standing([1, 4, 2, 3], 4) == 2  # behind a 4 no 5 is drawn
    assert draws.standing([1, 4], 3) == 2  # the failed draw is made again
    assert draws.standing([4], 1) == 1
    draws.commit([1, 4])
    assert draws.room == 1
    logits = torch.full((10,), -50.0)
    logits[5] = logits[8] = 50.0
    assert all(draws.sampler.draw(logits, p) not in (5, 8) for p in range(40))
    draws.commit([6])
    assert draws.room == 1 and draws.standing([7], 1) == 1
    draws.commit([6])
    assert draws.room > 100
    greedy = Draws(10, [1], SamplingParams().resolved(), 3, (), [[4, 5], [4, 6, 7]])
    assert greedy.standing([1, 4, 2, 3], 4) == 4 and greedy.standing([1, 4, 5, 3], 4) == 2


def test_a_sampler_of_bans_has_the_whole_history() -> None:
    params = SamplingParams(temperature=1.0, presence_penalty=3.0, repetition_penalty=1.5).resolved()
    rng = random.Random(1)
    draws, prompt, output = Draws(12, [1, 2], params, 3, [11], [[4, 5], [5, 6, 7]]), [1, 2], [4, 4, 5, 6, 4]
    for token in output:
        draws.commit([token])
    want = Sampler(12, prompt, temperature=1.0, presence_penalty=3.0, repetition_penalty=1.5, seed=3,
                   logit_bias={5: -math.inf})  # fmt: skip
    want.commit(output)
    for position in range(50):
        logits = torch.tensor([rng.gauss(0, 3) for _ in range(12)])
        assert draws.sampler.draw(logits, position) == want.draw(logits, position)


# -- log-probabilities --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_plain_decodings_to_the_bit(tiny: Pair, kind: str) -> None:
    prompts = prompts_of(9, 8, 10)
    params = [SamplingParams(max_tokens=20, seed=i, logprobs=i % 5, prompt_logprobs=(i % 4) or None, **KINDS[kind],
                             logprobs_mode=("raw_logprobs", "processed_logprobs")[i // 2 % 2])
              for i in range(8)]  # fmt: skip
    plain = LLM(tiny.target, max_batch=1, prefix_cache=False)
    want = seen([plain.generate([p], [s])[0] for p, s in zip(prompts, params, strict=True)])
    for options in TREES:
        llm = LLM(tiny.target, tiny.draft, **options, prefill_chunk=11)
        assert seen(llm.generate(prompts, params)) == want, options
        assert seen(llm.generate(prompts, params)) == want, "by a warm prefix cache"
        llm.audit()


def test_logprobs_are_the_models_own(tiny: Pair, bytes_pair: Pair) -> None:
    """Against log-softmax in float64 over logits of a pass of torch over everything."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(bytes_pair.target, dtype=torch.float32)
    llm = LLM(bytes_pair.target, bytes_pair.draft)
    params = SamplingParams(max_tokens=12, logprobs=20, prompt_logprobs=3, temperature=0.7, seed=1, top_k=4,
                            logit_bias={70: 3.0}, ignore_eos=True)  # fmt: skip
    [out] = llm.generate(["hello, world"], params)
    tokens = [*out.prompt_token_ids, *out.token_ids]
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1)
    assert out.logprobs is not None and out.prompt_logprobs is not None and out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids) and len(out.logprobs) == len(out.token_ids)
    total = 0.0
    for i, found in enumerate([*out.prompt_logprobs, *out.logprobs]):
        if found is None:
            continue
        row, k = rows[i - 1], 3 if i < len(out.prompt_token_ids) else 20
        best = torch.sort(row, descending=True, stable=True)
        assert next(iter(found)) == tokens[i]
        assert [t for t, p in found.items() if p.rank <= k and t != tokens[i]] == [
            t for t in best.indices[:k].tolist() if t != tokens[i]
        ]
        for token, p in found.items():
            assert abs(p.logprob - row[token].item()) < 1e-4
            assert p.rank == best.indices.tolist().index(token) + 1
            assert p.bytes == llm._runner.spell(token)  # type: ignore[misc]
        total += found[tokens[i]].logprob if i >= len(out.prompt_token_ids) else 0.0
    assert out.cumulative_logprob == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize("temperature", [0.0, 4.0], ids=["greedy", "sampled"])
def test_processed_logprobs_know_every_ban(ternary: Pair, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad words and `min_tokens` come and go within rounds; a largest logit that none of them bans stands, and yet what
    the token is drawn from lacks the banned ones."""
    rng = random.Random(8)
    reference = LLM(ternary.target, max_batch=1, speculative=False)
    cases = []
    for i, prompt in enumerate(prompts_of(4, 8, 3)):
        some = rng.sample(WORDS, rng.randrange(1, 5))
        params = SamplingParams(
            max_tokens=24, min_tokens=rng.choice([0, 7]), stop_token_ids=rng.choice([[], [2]]), seed=i, logprobs=2,
            temperature=temperature, bad_words=["x"], logit_bias={0: -4.0}, logprobs_mode="processed_logprobs",
        )  # fmt: skip
        words_of(reference, monkeypatch, some)
        cases.append((prompt, params, some, seen(reference.generate([prompt], [params]))))
    banned = [one for *_, [(_, _, _, _, _, logprobs, *_)] in cases for one in logprobs if len(one) < 3]
    assert len(banned) > 20, "of three tokens, one or two were banned"
    for options in TREES:
        llm = LLM(ternary.target, ternary.draft, **options)
        for prompt, params, some, want in cases:
            words_of(llm, monkeypatch, some)
            assert seen(llm.generate([prompt], [params])) == want, options
        llm.audit()


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_processed_logprobs_are_what_tokens_are_drawn_from(bytes_pair: Pair, temperature: float) -> None:
    """Against every processor in float64, by its definition, over logits of a pass of torch over everything."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(bytes_pair.target, dtype=torch.float32)
    llm, stop = LLM(bytes_pair.target, bytes_pair.draft, tree=(3, 4, 16)), 65
    params = SamplingParams(
        max_tokens=24, min_tokens=20, stop_token_ids=[stop], logprobs=20, logprobs_mode="processed_logprobs", seed=2,
        temperature=temperature, top_k=15, top_p=0.9, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.2, logit_bias={70: 1.0, 71: -math.inf}, ignore_eos=True,
    )  # fmt: skip
    [out] = llm.generate(["hello, world"], params)
    prompt, tokens = out.prompt_token_ids, out.token_ids
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].double()
    assert out.logprobs is not None and len(out.logprobs) == len(tokens) >= 20
    for i, found in enumerate(out.logprobs):
        row = logits[len(prompt) + i - 1].clone()
        row[70] += 1.0
        row[71] = -math.inf
        if i < 20:
            row[stop] = -math.inf
        for t in {*prompt, *tokens[:i]}:
            row[t] = row[t] / 1.2 if row[t] > 0 else row[t] * 1.2
        for t in set(tokens[:i]):
            row[t] -= 0.3 + 0.2 * tokens[:i].count(t)
        if temperature:
            row /= temperature
            row[row < row.topk(15).values[-1]] = -math.inf
            ranked = torch.softmax(row, -1).sort(descending=True)
            row[ranked.indices[(ranked.values.cumsum(0) - ranked.values) >= 0.9]] = -math.inf
            row[torch.exp(row - row.max()) < 0.02] = -math.inf
        want = torch.log_softmax(row, -1)
        kept = int((want > -math.inf).sum())
        assert next(iter(found)) == tokens[i] and min(kept, 20) <= len(found) <= 21
        assert not temperature or len(found) == kept <= 15
        for token, p in found.items():
            assert p.logprob == pytest.approx(want[token].item(), abs=2e-4)
            assert p.rank == 1 + int((want > want[token]).sum())
    assert out.cumulative_logprob == pytest.approx(sum(f[t].logprob for f, t in zip(out.logprobs, tokens, strict=True)))


def test_streams_carry_the_logprobs_of_their_tokens(tiny: Pair) -> None:
    llm = LLM(tiny.target, tiny.draft, tree=(3, 4, 16))
    params = SamplingParams(max_tokens=20, logprobs=2)
    events = list(llm.stream([[1, 2], [3]], params))
    for output in (e.output for e in events if e.output is not None):
        own = [e for e in events if e.request_id == output.request_id]
        assert [p for e in own for p in e.logprobs or ()] == output.logprobs
        assert all(len(e.logprobs or ()) == len(e.token_ids) for e in own)
    assert all(e.logprobs is None for e in llm.stream([[1, 2]], SamplingParams(max_tokens=3)))


def test_a_long_prompts_logprobs_come_in_bounded_chunks(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny.target, speculative=False, max_batch=2, max_context_len=256)
    assert llm._runner.scored_rows == 16
    most = 0
    forward = llm._runner.executor.target.forward  # type: ignore[attr-defined]

    def counting(*args: Any) -> Any:
        nonlocal most
        found = forward(*args)
        most = max(most, len(found[0]))
        return found

    monkeypatch.setattr(llm._runner.executor.target, "forward", counting)  # type: ignore[attr-defined]
    prompt = prompts_of(1, 1, 10)[0] * 20
    outs = llm.generate([prompt[:150], prompt[:90]], SamplingParams(max_tokens=2, prompt_logprobs=1))
    assert [len(o.prompt_logprobs or ()) for o in outs] == [150, 90] and most <= 18
    again = llm.generate([prompt[:150]], SamplingParams(max_tokens=2, prompt_logprobs=1))
    assert again[0].usage.cached_tokens == 0 and again[0].prompt_logprobs == outs[0].prompt_logprobs


SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 80))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_requests(tiny: Pair, ternary: Pair, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything at once: pools too small for all, aborts, rounds ahead, several outputs, priorities."""
    rng = random.Random(seed)
    pair, vocab = ((tiny, 10), (ternary, 3))[seed % 2]
    words = WORDS if vocab == 3 else [[rng.randrange(10) for _ in range(rng.choice([1, 2, 2, 3]))] for _ in range(25)]
    words = [w for w in words if len(w) > 1] + [w for w in words if len(w) == 1][:2]
    prompts = prompts_of(seed, 8, vocab)
    params = [
        SamplingParams(
            max_tokens=rng.choice([1, 2, 12, 30]), seed=rng.randrange(99), bad_words=rng.choice([(), ["x"]]),
            temperature=rng.choice([0.0, 1.0, 4.0]), stop_token_ids=rng.choice([(), (), [1]]),
            logprobs=rng.choice([None, None, 0, 3]), prompt_logprobs=rng.choice([None, None, 2]),
            n=rng.choice([1, 1, 1, 3]), priority=rng.choice([0, 0, 2]), logit_bias=rng.choice([{}, {0: -4.0}]),
            presence_penalty=rng.choice([0, 0, 0.4]),
        )
        for _ in prompts
    ]  # fmt: skip
    params = [replace(p, min_tokens=rng.choice([0, 0, 1, p.max_tokens])) for p in params]
    plain = LLM(pair.target, max_batch=1, prefix_cache=False)
    words_of(plain, monkeypatch, words)
    want = [seen(plain.generate([p], [s], on_error="return")) for p, s in zip(prompts, params, strict=True)]
    page = rng.choice([1, 4, 16])
    options: dict[str, Any] = {
        "page_size": page, "max_batch": rng.randrange(1, 6), "prefill_chunk": rng.choice([5, 30, 512]),
        "prefix_cache": rng.random() < 0.7, "num_pages": rng.choice([120, 160, 900]) // page + 6,
        "tree": rng.choice([(1, 5, 6), (3, 4, 21), (2, 3, 8)]),
    }  # fmt: skip
    told = Told(level=rng.choice(["off", "round", "loop"]))
    if page == 1:
        options["tree"] = (1, 5, 6)  # a tree that the device of these tests can run ahead
    host = LLM(pair.target, pair.draft, **options)
    for llm in (host, flying(pair.target, pair.draft, monkeypatch, told, **options)):
        words_of(llm, monkeypatch, words)
        ids, drop = {}, rng.randrange(8)
        events = []
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            ids[llm.add(prompt, one)] = i
            for _ in range(rng.randrange(3)):
                events += llm.step()
        gone = llm.abort(next(r for r, i in ids.items() if i == drop))
        events += [] if gone is None else [gone]
        while llm.unfinished:
            events += llm.step()
        for request, i in ids.items():
            if i != drop:
                own = [e.output for e in events if e.request_id == request and e.output is not None]
                own.sort(key=lambda o: o.index)
                assert seen(own) == want[i], (i, options)
        llm.audit()


# -- several outputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", TREES)
def test_outputs_of_a_prompt_are_requests_with_split_seeds(tiny: Pair, options: dict[str, Any]) -> None:
    prompts = prompts_of(4, 3, 10)
    llm = LLM(tiny.target, tiny.draft, **options)
    for common in ({"temperature": 1.0}, {"temperature": 1.0, "logprobs": 1, "prompt_logprobs": 0, "n": 5}):
        n = common.get("n", 1)
        params = SamplingParams(max_tokens=15, seed=77, **common)
        outputs = llm.generate(prompts, params)
        assert [len(o.outputs) for o in outputs] == [n] * 3
        for prompt, output in zip(prompts, outputs, strict=True):
            assert [o.index for o in output.outputs] == list(range(n)) and output.outputs[
                0
            ].token_ids == output.token_ids
            assert {o.request_id for o in output.outputs} == {output.request_id}
            for i, o in enumerate(output.outputs):
                rest = {k: v for k, v in common.items() if k != "n"}
                alone = LLM(tiny.target).generate([prompt], SamplingParams(max_tokens=15, seed=split(77, i), **rest))[0]
                assert (o.token_ids, o.logprobs, o.seed) == (alone.token_ids, alone.logprobs, split(77, i))
                assert o.prompt_logprobs == alone.prompt_logprobs
            assert n == 1 or len({tuple(o.token_ids) for o in output.outputs}) > 1
        llm.audit()


def test_a_prompt_is_prefilled_once(tiny: Pair) -> None:
    llm = LLM(tiny.target, tiny.draft, tree=(2, 3, 8), page_size=4)
    [out] = llm.generate([list(range(10)) * 4], SamplingParams(max_tokens=5, n=6, temperature=1.0))
    assert [o.usage.cached_tokens for o in out.outputs] == [0, *[36] * 5]


def test_aborting_ends_all_outputs(tiny: Pair) -> None:
    llm = LLM(tiny.target, tiny.draft, tree=(2, 3, 8), page_size=4, max_batch=3)
    other = llm.add([1, 2, 3], SamplingParams(max_tokens=30))
    request = llm.add([4, 5], SamplingParams(max_tokens=60, n=5, temperature=1.0))
    events = [e for _ in range(4) for e in llm.step()]
    first = llm.abort(request)
    assert first is not None
    events.append(first)
    while llm.unfinished:
        events += llm.step()
    ended = [e for e in events if e.output is not None]
    assert sorted((e.request_id, e.index) for e in ended) == [(other, 0), *((request, i) for i in range(5))]
    for e in ended:
        own = [t for x in events if (x.request_id, x.index) == (e.request_id, e.index) for t in x.token_ids]
        assert e.output is not None and own == e.output.token_ids
        assert e.output.finish_reason == ("length" if e.request_id == other else "abort")
    with_stream = llm.stream([[1, 2]], SamplingParams(max_tokens=50, n=4, temperature=1.0))
    next(with_stream)
    with_stream.close()
    assert llm.unfinished == 0
    llm.audit()


def test_seeds_are_split_by_philox() -> None:
    assert philox4x32_10((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 2**32 - 1
    assert philox4x32_10((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert split(5, 0) == 5 and len({split(5, i) for i in range(1000)} | {split(6, i) for i in range(1000)}) == 2000
    assert all(0 <= split(2**64 - 1, i) < 2**64 for i in range(10))


# -- priority -----------------------------------------------------------------------------------------------------


def test_the_lowest_priority_runs_first_and_is_preempted_last(tiny: Pair) -> None:
    llm = LLM(tiny.target, max_batch=1)
    order = [3, 0, -2, 0, 5]
    ids = [llm.add([1, i], SamplingParams(max_tokens=3, priority=p)) for i, p in enumerate(order)]
    ended: list[int] = []
    while llm.unfinished:
        ended += [e.request_id for e in llm.step() if e.output is not None]
    assert ended == [ids[i] for i in (2, 1, 3, 0, 4)]


@pytest.mark.parametrize("urgent", range(4))
def test_preemption_respects_priority(tiny: Pair, urgent: int) -> None:
    prompts = [[i] * 12 for i in range(4)]
    params = [
        SamplingParams(max_tokens=60, seed=i, temperature=1.0, priority=0 if i == urgent else 1) for i in range(4)
    ]
    want = [o.token_ids for o in LLM(tiny.target).generate(prompts, params)]
    llm = LLM(tiny.target, tiny.draft, tree=(2, 3, 8), page_size=4, num_pages=36, prefix_cache=False)
    preempted: list[int] = []
    release = llm._scheduler._preempt

    def noting(request: Any) -> None:
        preempted.append(request.request_id)
        release(request)

    llm._scheduler._preempt = noting  # type: ignore[method-assign]
    assert [o.token_ids for o in llm.generate(prompts, params)] == want
    assert preempted and urgent not in preempted
    llm.audit()


# -- prompts ------------------------------------------------------------------------------------------------------


def test_prompts_are_texts_ids_or_mappings(bytes_pair: Pair) -> None:
    llm = LLM(bytes_pair.target)
    ids = llm.encode("hello")
    params = SamplingParams(max_tokens=4)
    both = {"prompt": "as shown", "prompt_token_ids": np.array(ids)}
    outs = llm.generate(["hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids, "prompt": None}, both], params)
    assert len({tuple(o.token_ids) for o in outs}) == 1
    assert [o.prompt for o in outs] == ["hello", None, "hello", None, "as shown"]
    refused: list[tuple[Any, str]] = [
        ({}, "must have 'prompt'"),
        ({"prompt": 3}, r"\['prompt'\] is a int"),
        ({"text": "x"}, "is a dict with 'text': supported are prompt"),
        ({"prompt_token_ids": "12"}, "is a str"),
        ({"prompt_token_ids": [1, "x"]}, r"\[1\] = 'x'"),
        ({"prompt_token_ids": []}, "empty"),
    ]
    for bad, match in refused:
        with pytest.raises(ConfigError, match=match):
            llm.generate([bad], params)


def test_prompts_can_be_truncated(bytes_pair: Pair) -> None:
    llm = LLM(bytes_pair.target, max_context_len=64)
    ids = [3 + i for i in range(100)]
    for keep, left in ((5, ids[-5:]), (-1, ids[-54:]), (63, ids[-63:])):
        [out] = llm.generate([ids], SamplingParams(max_tokens=10, truncate_prompt_tokens=keep, ignore_eos=True))
        assert out.prompt_token_ids == left
    assert llm.generate([ids[:3]], SamplingParams(max_tokens=2, truncate_prompt_tokens=9))[0].usage.prompt_tokens == 3
    with pytest.raises(ConfigError, match="leave no room"):
        llm.generate([ids], SamplingParams(max_tokens=10, truncate_prompt_tokens=64))


def test_bad_words_need_a_tokenizer(tiny: Pair, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bad_words.*tokenizer\.json"):
        LLM(tiny.target).generate([[1]], SamplingParams(bad_words=["x"]))


def test_a_round_that_was_cut_is_recorded_and_replayed(ternary: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capsule says what the round verified; the engine kept less of a path."""
    params = SamplingParams(max_tokens=30, temperature=4.0, seed=3, bad_words=["x"], logit_bias={0: -4.0})
    cut = 0
    for number in range(1, 9):
        llm = LLM(ternary.target, ternary.draft, tree=(3, 5, 40), page_size=4)
        words_of(llm, monkeypatch, WORDS)
        with llm.recording(round=number) as recorder:
            llm.generate([[0, 1, 2, 0]], [params])
        assert recorder.capsule is not None
        [path], [kept] = recorder.capsule.paths, recorder.capsule.kept
        cut += kept < len(path)
        replay(recorder.capsule)
    assert cut


def test_special_tokens_are_text_where_they_are_wanted(bytes_pair: Pair) -> None:
    llm = LLM(bytes_pair.target, bytes_pair.draft)
    for skip in (True, False):
        params = SamplingParams(max_tokens=20, logit_bias={1: 8.0}, ignore_eos=True, skip_special_tokens=skip)
        [out] = llm.generate(["hello"], params)
        assert 1 in out.token_ids and out.text.count("<s>") == (0 if skip else out.token_ids.count(1))


def test_a_bad_word_is_found_where_tokenizers_begin_texts_with_a_space(tmp_path: Path) -> None:
    """Such tokenizers spell the word alone as behind a space, and within a text by other tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    from specrs.engine.prompts import spellings

    pieces = ["\u2581foo", "\u2581", "foo", "f", "o", "oo", "x", "<0x0A>"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{piece: i + 3 for i, piece in enumerate(pieces)}}
    merges = [("o", "o"), ("f", "oo"), ("\u2581", "foo")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    found = {tuple(tokenizer.id_to_token(i) for i in ids) for ids in spellings(tokenizer, ["foo"], len(vocab))}
    assert found == {("\u2581foo",), ("foo",), ("\u2581", "\u2581foo")}

    target = write_target(tmp_path, vocab_size=len(vocab), eos_token_id=None, bos_token_id=None)
    tokenizer.save(str(target / "tokenizer.json"))
    params = SamplingParams(max_tokens=60, temperature=2.0, seed=1, bad_words=["foo"], allowed_token_ids=[3, 4, 5, 9])
    with LLM(target) as llm:
        assert "foo" not in llm.generate(["x"], params)[0].text
        assert "foo" in llm.generate(["x"], replace(params, bad_words=()))[0].text


def test_words_that_the_model_cannot_write_are_never_written(tmp_path: Path) -> None:
    """A tokenizer may have more tokens than the model."""
    from specrs.engine.prompts import spellings

    class Tokens:
        def encode(self, text: str, add_special_tokens: bool) -> Any:
            return SimpleNamespace(ids=[] if text == " " else [ord(c) for c in text])

    assert spellings(Tokens(), ["ab", "a\xff"], 100) == [(97, 98), (32, 97, 98)]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="' ' has no tokens"):
        spellings(Tokens(), [" "], 100)  # type: ignore[arg-type]
    draws = Draws(10, [1], SamplingParams(min_tokens=2).resolved(), 0, [3, 99])
    assert draws.room == 2


def test_tokens_have_the_bytes_that_they_stand_for() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    pieces = {"\u2581a": 0, "b": 1, "<0xE4>": 2, "<0xBD>": 3, "<0xA0>": 4, "<unk>": 5, "\u2581": 6}
    model = tokenizers.models.BPE(vocab=pieces, merges=[], byte_fallback=True, unk_token="<unk>")
    sp = tokenizers.Tokenizer(model)
    d = tokenizers.decoders
    sp.decoder = d.Sequence([d.Replace("\u2581", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    sp.add_special_tokens(["<s>"])
    spell = TokenTable(sp)
    assert [spell(i) for i in (0, 1, 2, 3, 4, 6, 7)] == [b" a", b"b", b"\xe4", b"\xbd", b"\xa0", b" ", b"<s>"]
    assert b"".join(spell(i) for i in (2, 3, 4)).decode() == "\u4f60" and spell(50) == b""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    byte = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(sorted(alphabet))}, merges=[]))
    byte.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte.decoder = tokenizers.decoders.ByteLevel()
    spell = TokenTable(byte)
    text = "na\u00efve \u4f60 \n\x00~"
    ids = byte.encode(text).ids
    assert b"".join(map(spell, ids)).decode() == text and sorted(map(spell, range(256))) == [
        bytes([b]) for b in range(256)
    ]
