"""Requests of all lengths, their tokens by plain decoding, and an engine held against those."""

from __future__ import annotations

import random
from typing import Any

from modelzoo import VOCAB, Pair
from specrs import LLM, SamplingParams
from specrs.engine import RequestOutput

PAGES = [1, 4, 16, 64]
SAMPLED: dict[str, Any] = {
    "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1,
}  # fmt: skip


def requests(count: int, seed: int, vocab: int = VOCAB, **common: Any) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of mixed lengths, of which some share prefixes; outputs of mixed lengths."""
    rng = random.Random(seed)
    stem = [rng.randrange(vocab) for _ in range(70)]
    prompts, params = [], []
    for i in range(count):
        shared = stem[: rng.choice([0, 0, 5, 33, 70])]
        prompts.append(shared + [rng.randrange(vocab) for _ in range(rng.randrange(1, 20))])
        params.append(SamplingParams(max_tokens=rng.choice([1, 2, 9, 24, 40]), seed=seed * 100 + i, **common))
    return prompts, params


def plain(pair: Pair, prompts: list[list[int]], params: list[SamplingParams], **options: Any) -> list[list[int]]:
    """Run the requests one by one, without drafts, prefix cache or chunks."""
    llm = LLM(pair.target, speculative=False, max_batch=1, prefix_cache=False, **options)
    return [llm.generate([p], [s])[0].token_ids for p, s in zip(prompts, params, strict=True)]


def check(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], want: list[list[int]]
) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params)
    for i, (out, tokens) in enumerate(zip(outputs, want, strict=True)):
        assert out.token_ids == tokens, f"request {i}, prompt {len(prompts[i])} tokens"
    llm.audit()
    return outputs
