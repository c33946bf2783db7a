"""Traced requests, and what their rounds must say."""

from __future__ import annotations

import itertools

from specrs import LLM, RequestOutput, SamplingParams, StreamEvent
from specrs.engine import Round


def streamed(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[dict[int, list[StreamEvent]], list[RequestOutput]]:
    """Return events and outputs of one batch by request, in order."""
    ids = [llm.add(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    events: dict[int, list[StreamEvent]] = {i: [] for i in range(len(ids))}
    while llm.unfinished:
        for event in llm.step():
            events[ids.index(event.request_id)].append(event)
    return events, [next(e.output for e in some if e.output is not None) for some in events.values()]


def check(events: list[StreamEvent], output: RequestOutput, prompt: list[int]) -> list[Round]:
    """Check that rounds agree with output and events; returns the rounds."""
    rounds = [one for event in events for one in event.rounds]
    assert len(rounds) == output.rounds
    lengths = [0] * len(output.accepted_lengths)
    tokens, drafted = [*output.token_ids[:1]], [False]
    for one in rounds:
        lengths[one.emitted] += 1
        assert one.tokens[0] == (prompt + tokens)[-1] and one.parents[0] == -1, "the root is the last token"
        assert len(one.parents) == len(one.tokens) == one.drafted + 1
        assert all(0 <= parent < i for i, parent in enumerate(one.parents) if i)
        for parent, node in itertools.pairwise((0, *one.accepted)):
            assert one.parents[node] == parent, "a path from the root"
        tokens += [one.tokens[node] for node in one.accepted] + ([] if one.own is None else [one.own])
        drafted += [True] * len(one.accepted) + [False] * (one.own is not None)
        assert one.seconds > 0
        assert bool(one.sources) == bool(one.drafted)
        assert len(one.proposed) in (0, len(one.tokens))
        if one.proposed:
            assert one.proposed[0] == 0 and all(0 < bits < 1 << len(one.sources) for bits in one.proposed[1:])
    assert tokens == output.token_ids and drafted == output.drafted and lengths == output.accepted_lengths
    assert sum(one.drafted for one in rounds) == output.proposed
    assert sum(one.drafted > 0 for one in rounds) == output.drafting_rounds
    return rounds
