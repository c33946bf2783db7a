"""Figures of speculation, for a request and for a server: under OpenAI's and vLLM's names, and all of one account."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest

from serve_world import Running, running
from specrs import LLM, SamplingParams
from specrs.engine import AsyncLLM
from specrs.serve.record import Record
from specrs.serve.reply import counted, spec_decode_metrics

PROMPT = "def quicksort(items):\n    def quicksort(items):\n    def quicksort("
COUNTERS = {
    "num_spec_steps": "num_drafts", "num_draft_tokens": "num_draft_tokens",
    "num_accepted_draft_tokens": "num_accepted_tokens",
}  # fmt: skip


DRAFTS: dict[str, Any] = {
    "tree": (2, 3, 8),
    "max_batch": 2,
    "max_context_len": 256,
}  # fixed, so that a busy machine changes nothing


@pytest.fixture(scope="module")
def eager() -> Iterator[LLM]:
    """An engine that drafts in every round."""
    with LLM(**DRAFTS) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server over such an engine."""
    engine = AsyncLLM(**DRAFTS)
    with running(engine, tmp_path_factory.mktemp("drafting")) as made:
        yield made
        made.idle()
    asyncio.run(engine.aclose(drain=False))


def scraped(web: Running) -> dict[str, float]:
    """Counters of speculation; those by position as a list's items."""
    found = {}
    for line in web.client.get("/metrics").text.splitlines():
        if match := re.match(r"vllm:spec_decode_(\w+)_total\{(.*)\} (.*)", line):
            position = re.search('position="([0-9]+)"', match[2])
            found[match[1] + (f".{position[1]}" if position else "")] = float(match[3])
    return found


def test_a_request_s_figures_are_those_of_the_counters(drafting: Running) -> None:
    web, before = drafting, scraped(drafting)
    told: list[dict[str, Any]] = []
    usages: list[dict[str, Any]] = []
    bodies: list[dict[str, Any]] = [
        {"seed": 1, "max_tokens": 60}, {"temperature": 0, "max_tokens": 60}, {"temperature": 0, "stop": "return"},
    ]  # fmt: skip
    for body in bodies:
        found = web.complete(prompt=PROMPT, return_spec_stats=True, **body)
        told.append(found["metrics"]["speculative_decoding"])
        usages.append(found["usage"])
        chunks = web.stream("/v1/completions", prompt=PROMPT, return_spec_stats=True, **body)
        told.append(chunks[-1]["metrics"]["speculative_decoding"])
    after = scraped(web)
    for theirs, counter in COUNTERS.items():
        assert sum(one[theirs] for one in told) == after[counter] - before[counter], theirs
    assert any(one["num_accepted_draft_tokens"] for one in told), "nothing was accepted: the test says nothing"
    for one in told:
        histogram, accepted = one["acceptance_histogram"], one["num_accepted_draft_tokens"]
        assert len(histogram) == one["num_spec_tokens"] + 1 and sum(histogram) == one["num_spec_steps"]
        assert sum(n * rounds for n, rounds in enumerate(histogram)) == accepted and min(histogram) >= 0
        assert one["num_spec_steps"]
        assert one["mean_acceptance_length"] == 1 + accepted / one["num_spec_steps"]
        assert one["draft_acceptance_rate"] == accepted / one["num_draft_tokens"]
    # Each position counts the steps that accepted so many drafts or more.
    for place in range(told[0]["num_spec_tokens"]):
        want = sum(sum(one["acceptance_histogram"][place + 1 :]) for one in told)
        name = f"num_accepted_tokens_per_pos.{place}"
        assert after[name] - before[name] == want, place
    for usage, one in zip(usages, told[::2], strict=True):
        details = usage["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == one["num_accepted_draft_tokens"]
        wasted = one["num_draft_tokens"] - one["num_accepted_draft_tokens"]
        assert details["rejected_prediction_tokens"] == wasted and details["reasoning_tokens"] == 0


def test_several_outputs_have_no_histogram(drafting: Running) -> None:
    web = drafting
    found = web.complete(prompt=PROMPT, n=2, seed=1, max_tokens=8, return_spec_stats=True)
    assert found["metrics"] == {"speculative_decoding": None} and found["specrs"]["rounds"]
    assert "metrics" not in web.complete(prompt=PROMPT, max_tokens=2)
    chat = web.chat("x", max_tokens=4, return_spec_stats=True)
    assert chat["metrics"]["speculative_decoding"]["num_spec_steps"] == chat["specrs"]["drafting_rounds"]
    assert set(chat["usage"]["completion_tokens_details"]) == {
        "reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens",
    }  # fmt: skip


def test_a_stop_within_accepted_drafts_is_counted_where_it_stands(eager: LLM) -> None:
    """The request's round kept drafts and no token of its own: all that it kept are accepted, and it counts at their
    number."""
    [whole] = eager.generate([PROMPT], SamplingParams(temperature=0, max_tokens=80))
    accepted = [i for i, drafted in enumerate(whole.drafted) if drafted]
    assert accepted
    for i in accepted:
        [cut] = eager.generate(
            [PROMPT], SamplingParams(temperature=0, max_tokens=80, stop_token_ids=[whole.token_ids[i]])
        )
        drafts = sum(cut.drafted)
        assert sum(n * rounds for n, rounds in enumerate(cut.accepted_drafts)) == drafts
        assert sum(cut.accepted_drafts) == cut.rounds
        told = spec_decode_metrics([cut], eager.max_tokens_per_round - 1)
        assert told is not None and told["num_accepted_draft_tokens"] == drafts == counted([cut]).accepted
        if cut.drafted[-1]:
            break
    else:
        raise AssertionError("no stop fell on an accepted draft: the test says nothing")


def test_the_log_has_them(eager: LLM) -> None:
    outputs = eager.generate([PROMPT], SamplingParams(temperature=0, max_tokens=40, n=2, seed=1))[0].outputs
    record = Record("x", "POST", "/v1/completions")
    record.ended(outputs, [])
    line, count = record.line(), counted(outputs)
    assert (line["num_draft_tokens"], line["num_accepted_draft_tokens"]) == (count.drafts, count.accepted)
    assert count.drafts > 0
