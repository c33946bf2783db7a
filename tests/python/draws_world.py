"""Parts that tests of sampling's bans and of log-probabilities share, on the host and on a GPU."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from specrs import LLM, NonFiniteError, SamplingParams
from specrs.engine import RequestOutput
from specrs.engine.request.draws import Draws


def told(error: NonFiniteError | None) -> Any:
    """Return the content of an error without its request."""
    return None if error is None else (error.what, error.value, error.position, error.index)


def seen(outputs: list[RequestOutput]) -> list[Any]:
    """Return what must not depend on how tokens were found: tokens, and every log-probability to the bit."""
    return [
        (o.index, o.token_ids, o.text, o.finish_reason, told(o.error), o.logprobs, o.prompt_logprobs,
         o.cumulative_logprob)
        for output in outputs for o in output.outputs
    ]  # fmt: skip


def prompts_of(seed: int, count: int, vocab: int) -> list[list[int]]:
    rng = random.Random(seed)
    stem = [rng.randrange(vocab) for _ in range(40)]
    return [stem[: rng.choice([0, 7, 40])] + [rng.randrange(vocab) for _ in range(rng.randrange(1, 9))]
            for _ in range(count)]  # fmt: skip


class Mute:
    """A tokenizer whose tokens are no text."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return ""


def cuts_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record, from now on, the walks of which a request kept less: how many draws of each stood."""
    cuts: list[int] = []
    standing = Draws.standing

    def noting(draws: Draws, tokens: list[int], count: int) -> int:
        stand = standing(draws, tokens, count)
        if stand < count:
            cuts.append(stand)
        return stand

    monkeypatch.setattr(Draws, "standing", noting)
    return cuts


def words_of(llm: LLM, monkeypatch: pytest.MonkeyPatch, words: list[list[int]]) -> None:
    """Set bad words by their tokens, for a model without a tokenizer."""
    monkeypatch.setattr(llm, "tokenizer", Mute())
    monkeypatch.setattr(llm, "_spellings", lambda params: words if params.bad_words else [])


def naive(llm: LLM, prompt: list[int], params: SamplingParams, words: list[list[int]]) -> list[int]:
    """A token at a time, each drawn under the bans that hold for it, from whole passes over all tokens."""
    p = params.resolved(llm.default_sampling)
    output: list[int] = []
    while len(output) < p.max_tokens:
        banned = {w[-1] for w in words if output[max(len(output) + 1 - len(w), 0) :] == w[:-1]}
        if len(output) < p.min_tokens:
            banned |= set(p.stop_token_ids)
        if p.allowed_token_ids is not None:
            banned |= set(range(llm.vocab_size)) - set(p.allowed_token_ids)
        bias = dict.fromkeys(banned, -math.inf)
        one = SamplingParams(
            max_tokens=1, temperature=p.temperature, top_p=p.top_p, seed=p.seed, logit_bias={**p.logit_bias, **bias}
        )
        output += llm.generate([prompt + output], [one])[0].token_ids
        if output[-1] in p.stop_token_ids:
            break
    return output
