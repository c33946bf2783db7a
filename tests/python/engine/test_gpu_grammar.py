"""Structured output on a GPU: of every tree, batch and way to launch the tokens of plain decoding under the grammar."""

from __future__ import annotations

import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from grammar_world import KINDS, asked, fits, plainly, seen
from modelzoo import Pair, agree, write_eagle3, write_target
from specrs import LLM, FinishReason, GrammarFailedError, SamplingParams, StructuredOutputs, device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

VOCAB = 304  # the bytes, three special tokens, and up to a multiple of 8
ENGINES: list[dict[str, Any]] = [
    {"tree": (1, 6, 7), "page_size": 1}, {"tree": (3, 6, 33), "page_size": 4, "max_batch": 3},
    {"tree": (2, 6, 23), "page_size": 4, "drafters": ["suffix", "recycling"]},
    {"tree": (4, 5, 40), "page_size": 4, "prefill_chunk": 7, "drafters": ["head", "suffix"]}, {},
]  # fmt: skip
PROMPTS = ["def f(x):", "{", "import json\n", "a b c", "The answer is ", "x"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A byte-level tokenizer, EOS, and a head that is right often enough (`agree`)."""
    root: Path = tmp_path_factory.mktemp("gpu-grammar")
    sizes: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    target = write_target(
        root / "target", dtype=torch.bfloat16, vocab_size=VOCAB, tokenizer=True, max_position_embeddings=512, **sizes
    )
    draft = write_eagle3(root / "draft", target, draft_vocab_size=VOCAB, dtype=torch.bfloat16, head_dim=64)
    agree(target, draft)
    return Pair(target, draft)


pytestmark = pytest.mark.usefixtures("no_fault_is_left")


@pytest.mark.parametrize("graphs", ["off", "round", "loop"])
@pytest.mark.parametrize("kind", KINDS)
def test_fuzzed_forms_give_the_tokens_of_plain_decoding(pair: Pair, kind: str, graphs: str) -> None:
    prompts = list(itertools.islice(itertools.cycle(PROMPTS), 14))
    params = asked(3 + len(kind), 14, **KINDS[kind])
    with LLM(pair.target, speculative=False, device="cuda", max_batch=1, prefix_cache=False) as one:
        want = plainly(one, prompts, params)
    ended = 0
    for options in ENGINES:
        with LLM(pair.target, pair.draft, device="cuda", graphs=graphs, **options) as llm:
            for _ in range(2):  # the second time by graphs and a warm prefix cache
                outputs = llm.generate(prompts, params, on_error="return")
                assert [seen(o) for o in outputs] == want, options
            llm.audit()
        for out, p in zip(outputs, params, strict=True):
            if p.structured_outputs is not None and out.finish_reason is FinishReason.STOP:
                ended += 1
                with suppress(ImportError):  # no jsonschema beside this torch
                    assert fits(p.structured_outputs, out.text), (p.structured_outputs, out.text)
    assert ended > 5


def test_a_grammar_that_allows_nothing_ends_its_request_alone(pair: Pair) -> None:
    form = StructuredOutputs(regex="aaaa")
    with LLM(pair.target, pair.draft, device="cuda", tree=(2, 4, 12)) as llm:
        a = llm.encode("a")[-1]
        params = [
            SamplingParams(max_tokens=9, structured_outputs=form),
            SamplingParams(max_tokens=9, structured_outputs=form, min_tokens=6),
            SamplingParams(max_tokens=9, structured_outputs=form, logit_bias={a: float("-inf")}),
            SamplingParams(max_tokens=9, structured_outputs=form, bad_words=["aaa"]),
            SamplingParams(max_tokens=9, temperature=0.8, seed=4),
        ]
        outputs = llm.generate(["x"] * 5, params, on_error="return")
        assert [o.text for o in outputs[:4]] == ["aaaa", "aaaa", "", "aa"]
        assert outputs[0].finish_reason is FinishReason.STOP and outputs[4].finish_reason is not FinishReason.ERROR
        for out in outputs[1:4]:
            assert isinstance(out.error, GrammarFailedError) and out.error.request == out.request_id
        llm.audit()


def test_allowed_tokens_are_those_of_plain_decoding(pair: Pair) -> None:
    params = [
        SamplingParams(max_tokens=24, temperature=t, seed=i, allowed_token_ids=range(20 + i, 120))
        for i, t in enumerate((0.0, 0.8, 1.2, 0.0))
    ]
    prompts = PROMPTS[:4]
    with LLM(pair.target, speculative=False, device="cuda", max_batch=1) as one:
        want = plainly(one, prompts, params)
    for options in ENGINES:
        with LLM(pair.target, pair.draft, device="cuda", **options) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params)
                assert [seen(o) for o in outputs] == want
            assert all(20 <= t < 120 for o in outputs for t in o.token_ids)
            llm.audit()
