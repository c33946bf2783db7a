"""The parts of every response of the two generating endpoints: its head, usage, and how outputs ended."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specrs.serve.writing import dumps

if TYPE_CHECKING:
    from specrs.engine import LLM, RequestOutput, Round, StreamEvent
    from specrs.engine.loops.process import RemoteLLM


@dataclass(frozen=True)
class Reply:
    """Reply to one request.

    Attributes:
        object: OpenAI's name of the object.
        chunk: OpenAI's name of a piece of its stream.
        id, created, model, fingerprint: the fields of OpenAI's responses of these names.
    """

    object: str
    chunk: str
    prefix: str
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def id(self) -> str:
        """Id of the response."""
        return f"{self.prefix}-{self.key}"

    def whole(self, choices: list[dict[str, Any]], usage: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """A response that is no stream."""
        return {
            "id": self.id, "object": self.object, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint, "choices": choices, "usage": usage, **more,
        }  # fmt: skip

    def framed(self, usage: bool) -> Frame:
        """Return the function that makes the stream's events. usage: whether each event has a ``usage``."""
        head = dumps({
            "id": self.id, "object": self.chunk, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint, "choices": [],
        })  # fmt: skip
        return Frame(b"data: " + head[: -len(b"]}")], b'],"usage":null}\n\n' if usage else b"]}\n\n")


@dataclass(frozen=True)
class Frame:
    """The constant bytes of a stream's events, so that an event costs no more than its choice."""

    head: bytes
    tail: bytes

    def event(self, choice: Mapping[str, Any] | None, **more: Any) -> bytes:
        """Return one event; ``more`` are fields beside ``choices``, and ``usage`` among them takes the place of its
        own."""
        inner = b"" if choice is None else dumps(choice)
        if not more:
            return self.head + inner + self.tail
        return self.head + inner + b"]," + dumps(more)[1:] + b"\n\n"


@dataclass
class Count:
    """Tokens of a request so far."""

    prompt: int = 0
    cached: int | None = None
    completion: int = 0
    reasoning: int = 0
    drafts: int = 0
    accepted: int = 0

    def usage(self) -> dict[str, Any]:
        """Return the usage in OpenAI's form. Predictions are draft tokens, from any source: those that the output has,
        and those that were verified in vain."""
        found: dict[str, Any] = {
            "prompt_tokens": self.prompt, "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }  # fmt: skip
        if self.cached is not None:
            found["prompt_tokens_details"] = {"cached_tokens": self.cached}
            found["completion_tokens_details"] = {
                "reasoning_tokens": self.reasoning, "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafts - self.accepted,
            }  # fmt: skip
        return found

    def usage_of_response(self) -> dict[str, Any]:
        """Return the usage in the form of OpenAI's Responses API."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached or 0, "cache_write_tokens": 0},
            "output_tokens": self.completion,
            "output_tokens_details": {
                "reasoning_tokens": self.reasoning, "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafts - self.accepted,
            },
            "total_tokens": self.prompt + self.completion,
        }  # fmt: skip


def counted(outputs: Sequence[RequestOutput], dropped: int = 0, reasoning: int = 0) -> Count:
    """Tokens of all outputs of all prompts, each prompt once.

    Args:
        dropped: tokens of each output that were not asked for.
        reasoning: tokens of all outputs that are reasoning.
    """
    firsts = [one for one in outputs if not one.index]
    return Count(
        sum(one.usage.prompt_tokens for one in firsts),
        sum(one.usage.cached_tokens for one in firsts),
        sum(max(one.usage.completion_tokens - dropped, 0) for one in outputs),
        reasoning,
        sum(one.proposed for one in outputs),
        sum(sum(one.drafted) for one in outputs),
    )


def speculation(outputs: Sequence[RequestOutput], llm: LLM | RemoteLLM) -> dict[str, Any]:
    """Return the worth of speculation: ``specrs``, over all outputs of a request, and ``metrics`` under vLLM's
    names."""
    told = spec_decode_metrics(outputs, llm.max_tokens_per_round - 1) if llm.speculative else None
    return {"specrs": spec_stats(outputs), "metrics": {"speculative_decoding": told}}


def spec_decode_metrics(outputs: Sequence[RequestOutput], deepest: int) -> dict[str, Any] | None:
    """vLLM's ``metrics.speculative_decoding``, which it tells of requests with one output; ``None``: with several.
    deepest: draft tokens that one round can accept.

    A step is a round that verified drafts. Drafts are trees, so one has more tokens than a step can accept, and there
    is no histogram by draft length.
    """
    if len(outputs) != 1:
        return None
    [output] = outputs
    steps, accepted = output.drafting_rounds, sum(output.drafted)
    histogram = [*output.accepted_drafts, *[0] * (deepest + 1)][: max(deepest + 1, len(output.accepted_drafts))]
    histogram[0] = steps - sum(histogram[1:])  # leaves out rounds without drafts
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / output.proposed if output.proposed else 0.0,
        "acceptance_histogram": histogram, "num_spec_steps": steps, "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": output.proposed, "num_spec_tokens": deepest,
    }  # fmt: skip


def spec_stats(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the worth of speculation over all outputs of a request."""
    rounds = sum(one.rounds for one in outputs)
    yielded = sum(one.mean_accepted * one.rounds for one in outputs)
    longest = max((len(one.accepted_lengths) for one in outputs), default=0)
    lengths = [sum(one.accepted_lengths[i] for one in outputs if i < len(one.accepted_lengths)) for i in range(longest)]
    return {
        "rounds": rounds, "mean_accepted": round(yielded / rounds, 4) if rounds else 0.0, "accepted_lengths": lengths,
        "drafting_rounds": sum(one.drafting_rounds for one in outputs),
        "draft_tokens": sum(one.proposed for one in outputs),
        "draft_tokens_accepted": sum(sum(one.drafted) for one in outputs),
    }  # fmt: skip


#: Rounds of one event of a stream at most: with 64 nodes each, their JSON holds the loop for about a millisecond.
MOST_ROUNDS = 32


def slices(event: StreamEvent) -> Iterator[StreamEvent]:
    """An event as several, of at most so many rounds each, where a client was slow and it has more. The last one has
    its tokens, scores and output."""
    rounds = event.rounds
    first = _first(event.rounds, event.pieces)
    taken = 0
    while len(rounds) > MOST_ROUNDS:
        some, rounds = rounds[:MOST_ROUNDS], rounds[MOST_ROUNDS:]
        end = first + sum(len(one.pieces) for one in some)
        yield replace(event, token_ids=[], pieces=event.pieces[taken:end], rounds=some, output=None, logprobs=None)
        first = taken = end
    yield replace(event, pieces=event.pieces[taken:], rounds=rounds) if taken else event


def traced(rounds: Sequence[Round], pieces: Sequence[tuple[str, bool]], spell: Callable[[int], str]) -> dict[str, Any]:
    """Return a choice's trace of its rounds.

    Args:
        rounds: rounds, in order.
        pieces: pieces of the choice's text, including those of its rounds. Each is told with whether a draft gave it,
            and with the round of this choice that it belongs to; -1 for the prompt's pass, and for text that an early
            end released.
        spell: a token as text.
    """
    found, at = [[text, drafted, -1] for text, drafted in pieces], _first(rounds, pieces)
    for i, one in enumerate(rounds):
        for piece in found[at : at + len(one.pieces)]:
            piece[2] = i
        at += len(one.pieces)
    return {"rounds": [_told(one, spell) for one in rounds], "pieces": found}


def _first(rounds: Sequence[Round], pieces: Sequence[tuple[str, bool]]) -> int:
    """Return the index of the first piece that a round gave: behind the prompt's, and before text that an early end
    released."""
    known = [piece for one in rounds for piece in one.pieces]
    spare = len(pieces) - len(known)
    return next((i for i in range(spare, -1, -1) if list(pieces[i : i + len(known)]) == known), 0)


def _told(one: Round, spell: Callable[[int], str]) -> dict[str, Any]:
    tokens = list(one.tokens)
    found: dict[str, Any] = {
        "tokens": tokens, "texts": [spell(token) for token in tokens], "parents": list(one.parents),
        "accepted": list(one.accepted), "own": one.own, "own_text": None if one.own is None else spell(one.own),
        "emitted": one.emitted, "seconds": round(one.seconds, 6), "sources": list(one.sources),
    }  # fmt: skip
    if one.proposed:
        found["proposed"] = list(one.proposed)
    return found
