"""Watching rounds: the trees that a request's rounds verified, for pictures and for curiosity."""

from __future__ import annotations

import math
from contextlib import closing

from specrs import _specrs as core
from specrs.drawing import TreePicture
from specrs.engine.llm import LLM
from specrs.sampling_params import SamplingParams


def trace_rounds(llm: LLM, prompt: str, rounds: int) -> list[TreePicture]:
    """The trees of the first ``rounds`` greedy rounds that continue ``prompt``."""
    seen: list[TreePicture] = []

    def watch(trees: core.TreeBatch, accepts: core.Accepts) -> None:
        if len(seen) < rounds and accepts.errors == [None]:  # a round that failed drew no bonus token
            seen.append(_picture(llm, trees, accepts))

    # A round yields at least one token.
    params = SamplingParams(max_tokens=1 + rounds * llm.max_tokens_per_round, temperature=0)
    with llm.watching(watch), closing(llm.stream([prompt], params)) as events:
        for _ in events:
            if len(seen) == rounds:
                break
    return seen


def _picture(llm: LLM, trees: core.TreeBatch, accepts: core.Accepts) -> TreePicture:
    """Return the picture of the tree of the batch's only request."""

    def text(token: int) -> str:
        return str(token) if llm.tokenizer is None else llm.tokenizer.decode([token], skip_special_tokens=False)

    return TreePicture(
        parents=trees.parents.tolist(),
        texts=[text(t) for t in trees.tokens.tolist()],
        probabilities=[math.exp(s) for s in trees.scores.tolist()],
        accepted=frozenset(accepts.paths[0]),
        bonus=text(accepts.tokens[0][-1]),
    )
