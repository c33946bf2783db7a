"""Engines timed on one request in step: the one that has produced least goes next.

A neighbour on a shared machine slows for seconds. Requests that run one after the other meet different neighbours;
engines that take turns within a request meet the same. Steps alternate in who is first, so what one leaves in the
caches the other finds as often.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from specrs import LLM, SamplingParams
from specrs.engine import RequestOutput


def in_step(
    engines: Sequence[LLM], prompt: str | Sequence[int], params: SamplingParams, first: int = 0
) -> list[tuple[float, float, RequestOutput]]:
    """Run one request in all engines in step, and return for each the thread's seconds of the request, those of them
    before its first token, and its output.

    Args:
        engines: without requests.
        prompt, params: prompt and parameters of the request.
        first: engine that goes first.
    """
    seconds, first_token = [0.0] * len(engines), [0.0] * len(engines)
    produced, outputs = [0] * len(engines), dict[int, RequestOutput]()
    turn = first
    for i, llm in enumerate(engines):
        started = time.thread_time()
        llm.add(prompt, params)
        seconds[i] += time.thread_time() - started
    while len(outputs) < len(engines):
        behind = min(produced[i] for i in range(len(engines)) if i not in outputs)
        order = [(turn + k) % len(engines) for k in range(len(engines))]
        i = next(i for i in order if i not in outputs and produced[i] == behind)
        turn = i + 1
        started = time.thread_time()
        events = engines[i].step()
        seconds[i] += time.thread_time() - started
        for event in events:
            if event.token_ids and not produced[i]:
                first_token[i] = seconds[i]
            produced[i] += len(event.token_ids)
            if event.output is not None:
                outputs[i] = event.output
    return [(seconds[i], first_token[i], outputs[i]) for i in range(len(engines))]
