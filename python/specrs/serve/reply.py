"""What every response of the two generating endpoints has: its head, usage, and how outputs ended."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specrs.serve.exchange import dumps

if TYPE_CHECKING:
    from specrs.engine import RequestOutput


@dataclass(frozen=True)
class Reply:
    """Of one request.

    Attributes:
        object: what OpenAI calls it.
        chunk: what OpenAI calls a piece of its stream.
        id, created, model, fingerprint: as in OpenAI's responses.
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
        """Of the response."""
        return f"{self.prefix}-{self.key}"

    def whole(self, choices: list[dict[str, Any]], usage: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """A response that is no stream."""
        return {
            "id": self.id, "object": self.object, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint, "choices": choices, "usage": usage, **more,
        }  # fmt: skip

    def framed(self, usage: bool) -> Frame:
        """How the stream's events are made. usage: whether each has a ``usage``."""
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
        """One event; ``more`` are fields beside ``choices``, and ``usage`` among them takes the place of its own."""
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

    def usage(self) -> dict[str, Any]:
        """As OpenAI has it."""
        found: dict[str, Any] = {
            "prompt_tokens": self.prompt, "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }  # fmt: skip
        if self.cached is not None:
            found["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return found


def counted(outputs: Sequence[RequestOutput], dropped: int = 0) -> Count:
    """Tokens of all outputs of all prompts, each prompt once. dropped: tokens of each that were not asked for."""
    firsts = [one for one in outputs if not one.index]
    return Count(
        sum(one.usage.prompt_tokens for one in firsts),
        sum(one.usage.cached_tokens for one in firsts),
        sum(max(one.usage.completion_tokens - dropped, 0) for one in outputs),
    )


def spec_stats(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """What speculation was worth: over all outputs of a request."""
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
