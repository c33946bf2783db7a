"""Bans that hold for some tokens, and log-probabilities, on a GPU: of every tree, batch and way to launch the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from draws_world import cuts_of, naive, prompts_of, seen, words_of
from modelzoo import Pair, agree, write_eagle3, write_target
from specrs import LLM, SamplingParams, device
from specrs.engine import RequestOutput
from specrs.engine.request.seeds import split

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

VOCAB = 8
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "top_p": 0.9},
    "penalised": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
}
ENGINES: list[dict[str, Any]] = [
    {"tree": (1, 6, 7), "page_size": 1, "graphs": "loop"}, {"tree": (3, 6, 33), "page_size": 1, "max_batch": 3},
    {"tree": (4, 5, 40), "page_size": 4, "graphs": "loop", "prefill_chunk": 7}, {"tree": (2, 3, 8), "graphs": "off"},
    {"tree": (2, 6, 23), "page_size": 4, "num_pages": 44}, {},
]  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """8 tokens only, and a head that is right often enough (`agree`)."""
    root: Path = tmp_path_factory.mktemp("gpu-draws")
    sizes: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    target = write_target(
        root / "target", dtype=torch.bfloat16, vocab_size=VOCAB, eos_token_id=None, bos_token_id=None,
        max_position_embeddings=512, **sizes,
    )  # fmt: skip
    draft = write_eagle3(root / "draft", target, draft_vocab_size=VOCAB, dtype=torch.bfloat16, head_dim=64)
    agree(target, draft)
    return Pair(target, draft)


pytestmark = pytest.mark.usefixtures("no_fault_is_left")


def words_in(outputs: list[RequestOutput], size: int = 4) -> list[list[int]]:
    """Bad words that free outputs have within what rounds accept."""
    return [o.token_ids[i : i + size] for o in outputs for i in (3, 8, 14) if len(o.token_ids) >= i + size]


@pytest.mark.parametrize("kind", KINDS)
def test_bans_and_logprobs_are_those_of_plain_decoding(pair: Pair, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(11)
    prompts = prompts_of(7, 9, VOCAB)
    with LLM(pair.target, speculative=False, device="cuda") as plain:
        free = plain.generate(prompts, [SamplingParams(max_tokens=30, seed=i, **KINDS[kind]) for i in range(9)])
    words = words_in(free)
    params = [
        SamplingParams(
            max_tokens=rng.choice([3, 20, 40]), seed=i, bad_words=["x"] if i % 3 == 1 else (),
            min_tokens=rng.choice([0, 3]), stop_token_ids=[1] if i % 2 else (),
            allowed_token_ids=None if i % 4 else [1, *free[i].token_ids], logprobs=i % 3 or None,
            prompt_logprobs=2 if i % 5 == 0 else None, **KINDS[kind],
            logprobs_mode=("raw_logprobs", "processed_logprobs")[i % 2],
        )
        for i in range(9)
    ]  # fmt: skip
    want = []
    with LLM(pair.target, speculative=False, device="cuda", max_batch=1, prefix_cache=False) as plain:
        words_of(plain, monkeypatch, words)
        for prompt, one in zip(prompts, params, strict=True):
            want += seen(plain.generate([prompt], [one]))
    cuts = cuts_of(monkeypatch)
    for options in ENGINES:
        with LLM(pair.target, pair.draft, device="cuda", **options) as llm:
            words_of(llm, monkeypatch, words)
            for _ in range(2):  # the second time by graphs and a warm prefix cache
                outputs = llm.generate(prompts, params)
                assert seen(outputs) == want, options
            assert not options or sum(sum(o.drafted) for o in outputs) > 5
            llm.audit()
    assert cuts


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "sampled"])
def test_bans_are_those_of_naive_decoding(pair: Pair, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    cases, free = [], SamplingParams(max_tokens=30, temperature=temperature, top_p=0.95, seed=1)
    with LLM(pair.target, speculative=False, device="cuda", max_batch=1) as reference:
        words = words_in(reference.generate(prompts_of(3, 4, VOCAB), free), 3)
        for i, prompt in enumerate(prompts_of(3, 4, VOCAB)):
            params = SamplingParams(max_tokens=24, min_tokens=[0, 7][i % 2], stop_token_ids=[2], seed=i, top_p=0.95,
                                    temperature=temperature, bad_words=["x"])  # fmt: skip
            cases.append((prompt, params, naive(reference, prompt, params, words)))
    for options in ENGINES:
        with LLM(pair.target, pair.draft, device="cuda", **options) as llm:
            words_of(llm, monkeypatch, words)
            for prompt, params, tokens in cases:
                assert llm.generate([prompt], [params])[0].token_ids == tokens, options
            llm.audit()


@pytest.mark.parametrize("options", ENGINES)
def test_outputs_of_a_prompt_are_requests_with_split_seeds(pair: Pair, options: dict[str, Any]) -> None:
    params: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "logprobs": 1}
    prompts = prompts_of(4, 3, VOCAB)
    with LLM(pair.target, speculative=False, device="cuda") as plain:
        want = [
            [plain.generate([p], SamplingParams(seed=split(77, i), **params))[0] for i in range(5)] for p in prompts
        ]
    with LLM(pair.target, pair.draft, device="cuda", **options) as llm:
        for output, alone in zip(llm.generate(prompts, SamplingParams(seed=77, n=5, **params)), want, strict=True):
            assert [(o.token_ids, o.logprobs) for o in output.outputs] == [(o.token_ids, o.logprobs) for o in alone]
        llm.audit()


def test_biases_alone_are_uploaded_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The edits stay on the device, also for rounds ahead of the host; those of the next batch take their place."""
    prompts = prompts_of(5, 4, VOCAB)
    params = [
        SamplingParams(max_tokens=24, temperature=0.9, seed=i, logit_bias={i: 2.0, 7 - i: -1.0}) for i in range(4)
    ]
    with LLM(pair.target, speculative=False, device="cuda", max_batch=1) as plain:
        want = [plain.generate([p], [s])[0].token_ids for p, s in zip(prompts, params, strict=True)]
    with LLM(pair.target, pair.draft, device="cuda", tree=(3, 4, 16), max_batch=2) as llm:
        launch, ahead = llm._runner.executor.launch, 0

        def counted(*args: Any) -> Any:
            nonlocal ahead
            done = launch(*args)
            ahead += done is not None
            return done

        monkeypatch.setattr(llm._runner.executor, "launch", counted)
        for _ in range(2):
            assert [o.token_ids for o in llm.generate(prompts, params)] == want
        monkeypatch.undo()  # nothing refers to itself
        assert ahead, "no round was launched ahead"
