"""Structured output: valid, and the tokens of plain decoding under the same grammar, whatever the tree and batch."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
from typing import Any

import pytest

from grammar_world import KINDS, SUMS, asked, fits, plainly, seen
from modelzoo import Pair
from specrs import (
    LLM,
    AsyncLLM,
    ConfigError,
    FinishReason,
    GrammarError,
    GrammarFailedError,
    SamplingParams,
    StructuredOutputs,
)
from specrs.engine.request.draws import Draws

pytest.importorskip("jsonschema")
TREES: list[dict[str, Any]] = [
    {"tree": (1, 3, 4)}, {"tree": (2, 5, 16), "page_size": 4}, {"tree": (4, 3, 32), "drafters": ["head", "suffix"]},
    {"tree": (3, 6, 40), "page_size": 16, "drafters": ["suffix", "recycling"]}, {"tree": (8, 5, 64)}, {},
]  # fmt: skip
PROMPTS = ["def f(x):", "{", "import json\n", "a b c", "The answer is ", "x"]


def prompts_of(count: int) -> list[str]:
    return list(itertools.islice(itertools.cycle(PROMPTS), count))


@pytest.mark.parametrize("kind", KINDS)
def test_fuzzed_forms_give_valid_outputs_that_are_those_of_plain_decoding(bytes_pair: Pair, kind: str) -> None:
    count, ended, accepted, finished = 21, 0, 0, 0
    prompts, params = prompts_of(count), asked(len(kind), count, **KINDS[kind])
    with LLM(bytes_pair.target, speculative=False, max_batch=1, prefix_cache=False, device="cpu") as one:
        want = plainly(one, prompts, params)
    for options, batch in zip(TREES, itertools.cycle([5, 1, 8, 3])):
        with LLM(bytes_pair.target, bytes_pair.draft, max_batch=batch, device="cpu", **options) as llm:
            outputs = llm.generate(prompts, params, on_error="return")
            llm.audit()
        for i, out in enumerate(outputs):
            assert seen(out) == want[i], (i, options, params[i].structured_outputs)
            accepted += sum(out.drafted)
            wanted = params[i].structured_outputs
            if wanted is not None and out.finish_reason is FinishReason.STOP:
                assert fits(wanted, out.text), (wanted, out.text)
                ended += 1
            finished += out.finish_reason is not FinishReason.ERROR
    assert ended > 20 and accepted > 100 and finished > len(outputs), (ended, accepted, finished)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_in_the_package_writes_what_is_asked_for(kind: str) -> None:
    prompts, params = prompts_of(14), asked(31, 14, **KINDS[kind])
    with LLM(speculative=False, max_batch=1, device="cpu") as one:
        want = plainly(one, prompts, params)
    for options in ({}, {"tree": (4, 4, 16)}, {"tree": (2, 6, 23), "drafters": ["suffix", "head"]}):
        with LLM(max_batch=6, device="cpu", **options) as llm:
            outputs = llm.generate(prompts, params, on_error="return")
            llm.audit()
        assert [seen(o) for o in outputs] == want
        for out, p in zip(outputs, params, strict=True):
            if p.structured_outputs is not None and out.finish_reason is FinishReason.STOP:
                assert fits(p.structured_outputs, out.text)


def test_forced_text_is_drafted_and_saves_rounds() -> None:
    key = "a_long_name_of_a_property"
    form = StructuredOutputs(
        json={
            "type": "object",
            "properties": {key: {"enum": [1, 2]}},
            "required": [key],
            "additionalProperties": False,
        },
        whitespace="",
    )
    params = SamplingParams(max_tokens=64, temperature=0.0, structured_outputs=form)
    with LLM(device="cpu", tree=(1, 8, 9)) as llm, LLM(device="cpu", speculative=False) as one:
        [out], [plain] = llm.generate(["{"], params), one.generate(["{"], params)
    assert out.token_ids == plain.token_ids and json.loads(out.text) in ({key: 1}, {key: 2})
    assert out.rounds < 0.7 * plain.rounds, (out.rounds, plain.rounds)


def test_bans_compose(bytes_pair: Pair) -> None:
    """Min tokens, bad words, bias, allowed tokens and stop strings under a grammar: as plain decoding has them."""
    rng = random.Random(4)
    form = StructuredOutputs(regex=r"[a-h]{1,40}")
    llm = LLM(bytes_pair.target, bytes_pair.draft, device="cpu", tree=(3, 5, 24), max_batch=4)
    one = LLM(bytes_pair.target, speculative=False, max_batch=1, prefix_cache=False, device="cpu")
    letters = {c: one.encode(c)[-1] for c in "abcdefgh"}
    params = [
        SamplingParams(
            max_tokens=30, seed=i, structured_outputs=form, temperature=rng.choice([0.0, 1.0]),
            min_tokens=rng.choice([0, 5, 20]), bad_words=rng.choice([(), ["ab", "cd", "h"], ["abc"]]),
            logit_bias={letters["a"]: rng.choice([0.0, 3.0, -5.0])}, stop=rng.choice([(), ["cc"], ["ea"]]),
            allowed_token_ids=rng.choice([None, [2, *letters.values()], [2, *list(letters.values())[:4]]]),
            top_k=rng.choice([0, 3]), logprobs=rng.choice([None, 1]), n=rng.choice([1, 3]),
        )
        for i in range(24)
    ]  # fmt: skip
    prompts = prompts_of(24)
    outputs = [o for out in llm.generate(prompts, params) for o in out.outputs]
    plain = [o for p, s in zip(prompts, params, strict=True) for o in one.generate([p], [s])[0].outputs]
    assert [seen(o) for o in outputs] == [seen(o) for o in plain]
    for out in outputs:
        p = out.params
        assert set(out.text) <= set("abcdefgh") and not any(word in out.text for word in p.bad_words)
        if out.finish_reason is FinishReason.STOP and out.stop_reason is None:
            assert len(out.token_ids) > p.min_tokens
    assert len({o.finish_reason for o in outputs}) == 2 and len({o.text for o in outputs}) > 20
    llm.audit()


def test_a_complete_text_ends_the_output_where_no_token_does(bytes_pair: Pair) -> None:
    form = StructuredOutputs(choice=["abc", "abcdefg"])
    for tree in ({"speculative": False}, {"tree": (1, 8, 9)}, {"tree": (4, 5, 40)}):
        draft = None if "speculative" in tree else bytes_pair.draft
        with LLM(bytes_pair.target, draft, device="cpu", **tree) as llm:
            eos, free, stop = llm.generate(
                ["x", "x", "x"],
                [
                    SamplingParams(max_tokens=9, structured_outputs=form),
                    SamplingParams(max_tokens=9, structured_outputs=form, ignore_eos=True),
                    SamplingParams(max_tokens=9, structured_outputs=form, ignore_eos=True, stop_token_ids=[7]),
                ],
            )
        assert eos.text in ("abc", "abcdefg") and eos.token_ids[-1] == 2 and eos.finish_reason is FinishReason.STOP
        assert free.text == "abcdefg" and free.finish_reason is FinishReason.STOP and 2 not in free.token_ids
        assert stop.text in ("abc", "abcdefg") and stop.stop_reason == 7


@pytest.mark.parametrize("tree", [{"speculative": False}, {"tree": (2, 4, 12)}])
def test_a_grammar_that_allows_nothing_ends_its_request_alone(bytes_pair: Pair, tree: dict[str, Any]) -> None:
    draft = None if "speculative" in tree else bytes_pair.draft
    with LLM(bytes_pair.target, draft, device="cpu", max_batch=4, **tree) as llm:
        form, a = StructuredOutputs(regex="aaaa"), llm.encode("a")[-1]
        params = [
            SamplingParams(max_tokens=9, structured_outputs=form),
            SamplingParams(max_tokens=9, structured_outputs=form, min_tokens=6),  # complete before it may end
            SamplingParams(max_tokens=9, structured_outputs=form, logit_bias={a: float("-inf")}),
            SamplingParams(max_tokens=9, structured_outputs=form, bad_words=["aaa"], ignore_eos=True),
            SamplingParams(max_tokens=9, structured_outputs=form, allowed_token_ids=[5, 6]),
            SamplingParams(max_tokens=9),
        ]
        outputs = llm.generate(["x"] * 6, params, on_error="return")
        assert [o.finish_reason for o in outputs[1:5]] == [FinishReason.ERROR] * 4
        assert (outputs[0].text, outputs[0].finish_reason) == ("aaaa", FinishReason.STOP)
        assert outputs[5].finish_reason is not FinishReason.ERROR
        assert [o.text for o in outputs[1:5]] == ["aaaa", "", "aa", ""]
        for i, out in enumerate(outputs[1:5], 1):
            assert isinstance(out.error, GrammarFailedError) and out.error.request == out.request_id, i
            assert out.error.position == len(out.prompt_token_ids) + len(out.token_ids) and out.error.why
        with pytest.raises(GrammarFailedError, match="min_tokens") as raised:
            llm.generate(["x"], params[1])
        assert raised.value.outputs[0].text == "aaaa"  # type: ignore[attr-defined]
        assert llm.generate(["x"], params[0])[0].text == "aaaa"
        llm.audit()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"regex": "a(b"}, "regex: .*unclosed group"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"regex": "(" * 5000 + ")" * 5000}, "brackets"),
    ({"grammar": "start: missing"}, "grammar"),
    ({"grammar": "start: " + "(" * 90000 + '"a"' + ")" * 90000}, "brackets"),
    ({"json": {"type": "elephant"}}, "json"),
    ({"json": {"type": "array", "uniqueItems": True}}, "unique"),
    ({"json": {"$ref": "#/nowhere"}}, "json"),
    ({"json": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "json"),
    ({"json": {"type": "object"}, "whitespace": "("}, "json"),
    ({"choice": ["yes"], "start_after": [2, 30]}, "start_after"),
    ({"choice": ["yes"], "start_after": [99999]}, "start_after"),
]


@pytest.mark.parametrize(("form", "told"), BAD)
def test_what_cannot_be_honoured_is_refused_before_it_is_queued(
    bytes_pair: Pair, form: dict[str, Any], told: str
) -> None:
    with LLM(bytes_pair.target, device="cpu") as llm:
        params = SamplingParams(structured_outputs=form)
        for _ in range(2):  # a failure is not kept
            with pytest.raises(GrammarError, match=told) as raised:
                llm.generate(["x"], params)
        assert isinstance(raised.value, ConfigError) and len(str(raised.value)) < 600
        with pytest.raises(GrammarError):
            llm.add("x", params)
        assert llm.unfinished == 0


def test_a_model_without_a_tokenizer_refuses_every_grammar(tiny: Pair) -> None:
    with LLM(tiny.target, device="cpu") as llm, pytest.raises(GrammarError, match="no tokenizer"):
        llm.generate([[1, 2]], SamplingParams(structured_outputs={"regex": "a"}))


def test_preemption_prefix_cache_and_aborts_keep_the_books(bytes_pair: Pair) -> None:
    form = StructuredOutputs(json={"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 3})
    params = [
        SamplingParams(max_tokens=70, temperature=1.0, seed=i, structured_outputs=form, n=1 + i % 2) for i in range(8)
    ]
    prompts = ["one stem of all prompts, " + "x" * i for i in range(8)]
    with LLM(bytes_pair.target, speculative=False, max_batch=1, prefix_cache=False, device="cpu") as one:
        want = [[seen(o) for o in one.generate([p], [s])[0].outputs] for p, s in zip(prompts, params, strict=True)]
    options: dict[str, Any] = {"tree": (3, 4, 16), "page_size": 4, "max_batch": 6, "device": "cpu"}
    with LLM(bytes_pair.target, bytes_pair.draft, num_pages=64, **options) as llm:
        preempted = []
        release = llm._runner.release
        llm._runner.release = lambda r: (preempted.append(r.request_id), release(r))[1]  # type: ignore[assignment, func-returns-value]
        assert [[seen(o) for o in out.outputs] for out in llm.generate(prompts, params)] == want
        assert preempted, "the pool was to be too small"
        ids = [llm.add(p, s) for p, s in zip(prompts, params, strict=True)]
        for i in range(6):
            llm.step()
            llm.abort(ids[i])
        while llm.unfinished:
            llm.step()
        llm.audit()
        assert [[seen(o) for o in out.outputs] for out in llm.generate(prompts[6:], params[6:])] == want[6:]


def test_async_engines_compile_beside_their_steps(bytes_pair: Pair) -> None:
    async def main() -> None:
        form = StructuredOutputs(grammar=SUMS)
        params = [SamplingParams(max_tokens=20, temperature=1.0, seed=i, structured_outputs=form) for i in range(6)]
        with LLM(bytes_pair.target, speculative=False, device="cpu") as one:
            want = [seen(one.generate(["x"], [p])[0]) for p in params]
        async with AsyncLLM(bytes_pair.target, bytes_pair.draft, tree=(2, 4, 12), device="cpu") as engine:
            outputs = await asyncio.gather(*(engine.complete("x", p) for p in params))
            assert [seen(o) for o in outputs] == want
            with pytest.raises(GrammarError):
                await engine.complete("x", SamplingParams(structured_outputs={"regex": "("}))
            failing = SamplingParams(structured_outputs={"regex": "aa"}, logit_bias={engine.llm.encode("a")[-1]: -1e30},
                                     allowed_token_ids=[5])  # fmt: skip
            out, fine = await asyncio.gather(engine.complete("x", failing), engine.complete("x", params[0]))
            assert isinstance(out.error, GrammarFailedError) and seen(fine) == want[0]
            await engine.audit()

    asyncio.run(main())


def test_no_step_compiles_however_many_grammars_wait(bytes_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that was pushed out of the kept ones stays for the request that waits for the engine."""
    monkeypatch.setattr("specrs.engine.request.grammars._KEPT", 2)
    forms = [StructuredOutputs(choice=[f"{i}a", f"{i}b"]) for i in range(12)]
    compiled: list[tuple[str, list[str]]] = []

    async def main() -> None:
        async with AsyncLLM(bytes_pair.target, max_batch=2, device="cpu") as engine:
            plain = engine.llm._grammars.vocabulary

            class Vocabulary:
                def compile(self, kind: str, texts: list[str], *more: Any) -> Any:
                    compiled.append((threading.current_thread().name, texts))
                    return plain.compile(kind, texts, *more)

            engine.llm._grammars._vocabulary = Vocabulary()  # type: ignore[assignment]
            params = [SamplingParams(max_tokens=4, structured_outputs=form) for form in forms]
            outputs = await asyncio.gather(*(engine.complete("x", p) for p in params))
            assert [o.outputs[0].text in f.choice for o, f in zip(outputs, forms, strict=True) if f.choice] == [
                True
            ] * 12

    asyncio.run(main())
    assert sorted(texts for _, texts in compiled) == sorted(list(f.choice or ()) for f in forms)
    assert all(name.startswith("specrs-prompts") for name, _ in compiled)


def test_a_draft_that_the_grammar_refuses_is_not_verified(bytes_pair: Pair) -> None:
    form = StructuredOutputs(regex=r"(?:ab)+")
    with LLM(bytes_pair.target, bytes_pair.draft, device="cpu", tree=(4, 5, 40), drafters=["head", "suffix"]) as llm:
        a, b = llm.encode("a")[-1], llm.encode("b")[-1]
        drafted: set[int] = set()

        def watch(trees: Any, accepts: Any) -> None:
            import torch

            first = torch.from_dlpack(trees.depths) > 0
            drafted.update(torch.from_dlpack(trees.tokens)[first].tolist())

        with llm.watching(watch):
            llm.generate(["x"], SamplingParams(max_tokens=20, structured_outputs=form))
        assert drafted and drafted <= {a, b, 2}


def test_allowed_tokens_of_a_large_vocabulary_cost_no_mapping() -> None:
    from time import perf_counter

    params = SamplingParams(allowed_token_ids=range(100)).resolved()
    began = perf_counter()
    draws = Draws(128_000, [1, 2], params, 3)
    assert draws.sampler is not None and perf_counter() - began < 0.05
