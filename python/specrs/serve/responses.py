"""``/v1/responses``: OpenAI's Responses API, without its store: a request brings the whole conversation.

Its fields become those of a chat, and from there on prompt, tools, reasoning, forms and limits are a chat's. What
differs is how the answer is told: as items, and in a stream as typed events (`specrs.serve.responses_events`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specrs._specrs import PoolExhaustedError
from specrs.chat import ChatTemplateError
from specrs.serve.calling import Behind, Manner, chosen
from specrs.serve.chat import chat_prompt, prepared
from specrs.serve.errors import RequestError, bad, of
from specrs.serve.exchange import Exchange
from specrs.serve.fields import CHAT, RESPONSES, messages, read
from specrs.serve.reply import counted, speculation
from specrs.serve.responses_events import Event, Events, Output
from specrs.serve.responses_fields import LOGPROBS
from specrs.serve.sampling import Wish, wish
from specrs.serve.scores import Names, objects
from specrs.serve.voices import Plain

if TYPE_CHECKING:
    from specrs.engine import RequestOutput, StreamEvent, TokenizedPrompt
    from specrs.engine.request.logprobs import TokenLogprobs
    from specrs.serve.config import ServeConfig
    from specrs.serve.service import Flow, Service

#: Fields of a chat, and what a response calls them.
_CALLED = {
    "messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
    "response_format": "text", "reasoning_effort": "reasoning", "logprobs": "include",
}  # fmt: skip
#: Codes of a failed response by the error's status; others are the server's.
_FAILURES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
NOT_STORED = "no response is stored here: a request brings the whole conversation as input"


async def responses(service: Service, exchange: Exchange, body: Mapping[str, Any]) -> None:
    """Answer a request."""
    given = read(RESPONSES, body, service.config)
    model = service.model(given.get("model"))
    record = exchange.record
    record.model, record.stream = model, bool(given.get("stream"))
    with _called():
        fields = _of_chat(given, service.config)
        asked = replace(
            wish(CHAT, fields, service.defaults, service.context), what="input", limit="max_output_tokens"
        )  # fmt: skip
        chosen(fields)
        with service.admitted():
            with service.preparing():
                prompt, manner, wanted = await _prompt(service, fields, asked, given.get("truncation") == "auto")
            call = Call(service, fields, body, model, manner, wanted)
            record.id = call.id
            async with service.submitted([prompt], wanted, record) as flow:
                await (call.stream(exchange, flow) if record.stream else call.whole(exchange, flow))


async def input_tokens(service: Service, exchange: Exchange, body: Mapping[str, Any]) -> None:
    """``POST /v1/responses/input_tokens``: how many tokens a request's prompt has."""
    given = read(RESPONSES, body, service.config)
    service.model(given.get("model"))
    with _called():
        fields = _of_chat(given, service.config)
        chosen(fields)
        with service.admitted(), service.preparing():
            pool = service.apart if "chat_template" in fields else service.pooled
            prompt = await pool(lambda: chat_prompt(service, fields, None))
    await exchange.json(200, {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


@contextmanager
def _called() -> Iterator[None]:
    """Rename fields in errors of a chat to those of the response that they were made of."""
    try:
        yield
    except (RequestError, ChatTemplateError, PoolExhaustedError) as error:
        told = of(error, 0.0)
        chats = told.param or ""
        theirs = _CALLED.get(chats)
        if theirs is None:
            raise
        message = theirs + told.message.removeprefix(chats) if told.message.startswith(chats) else told.message
        raise RequestError(
            told.status, message, type=told.type, param=theirs, code=told.code, retry_after=told.retry_after
        ) from error


def _of_chat(given: Mapping[str, Any], config: ServeConfig) -> dict[str, Any]:
    """The fields of a chat that asks for the same.

    Raises:
        RequestError: fields contradict each other.
    """
    if "input" not in given:
        raise bad("input: is needed", "input", "missing_parameter")
    fields = dict(given)
    fields["messages"] = _with_instructions(messages("input", fields.pop("input"), config), given.get("instructions"))
    for ours, theirs in (("max_output_tokens", "max_completion_tokens"), ("text", "response_format"),
                         ("reasoning", "reasoning_effort")):  # fmt: skip
        if (value := fields.pop(ours, None)) is not None:
            fields[theirs] = value
    fields["logprobs"] = LOGPROBS in given.get("include", ())
    if not fields["logprobs"] and fields.pop("top_logprobs", 0):
        raise bad(f"top_logprobs: needs include = [{LOGPROBS!r}]", "top_logprobs")
    if fields["logprobs"] and chosen(fields)[1]:
        raise bad(f"include: {LOGPROBS!r}: not with tools that may be called: what a token is of is known at the end",
                  "include", "unsupported_parameter")  # fmt: skip
    return fields


def _with_instructions(conversation: list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Instructions and the system messages at the head as one message: many templates know one there alone."""
    first = next((i for i, one in enumerate(conversation) if one["role"] != "system"), len(conversation))
    texts = [instructions or "", *(one["content"] for one in conversation[:first])]
    whole = "\n\n".join(text for text in texts if text)
    return [*([{"role": "system", "content": whole}] if whole else []), *conversation[first:]]


async def _prompt(
    service: Service, fields: dict[str, Any], asked: Wish, auto: bool
) -> tuple[TokenizedPrompt, Manner, Wish]:
    """The prompt, how answers to it are read, and what the engine is asked for. auto: the oldest turns are left out, in
    ``fields`` too, where the conversation does not fit otherwise."""
    pool = service.apart if "chat_template" in fields else service.pooled
    if auto:
        fields["messages"] = await pool(lambda: _fitting(service, fields, asked))
    prompt, (manner, wanted) = await pool(lambda: prepared(service, fields, asked))
    return prompt, manner, wanted


def _fitting(service: Service, fields: Mapping[str, Any], asked: Wish) -> list[dict[str, Any]]:
    """The messages without the fewest of the oldest turns that leaves room, in the pool's threads. A turn begins with a
    user's message; the system's message at the head stays."""
    conversation: list[dict[str, Any]] = fields["messages"]
    head = conversation[:1] if conversation[0]["role"] == "system" else []
    begins = [i for i, one in enumerate(conversation) if one["role"] == "user" and i > len(head)]
    left = [conversation, *([*head, *conversation[i:]] for i in begins)]

    def fits(some: list[dict[str, Any]]) -> bool:
        try:
            prompt = chat_prompt(service, {**fields, "messages": some}, asked)
            asked.checked(len(prompt.token_ids), service.context)
        except RequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return False
        return True

    low, high = 0, len(left) - 1  # the last of them is what remains, whether or not it fits
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(left[middle]) else (middle + 1, high)
    return left[low]


@dataclass(frozen=True)
class Call:
    """One request to the endpoint.

    Attributes:
        fields: fields of a chat.
        body: body of the request as it came, for the parts that a response repeats.
    """

    service: Service
    fields: Mapping[str, Any]
    body: Mapping[str, Any]
    model: str
    manner: Manner
    wanted: Wish
    created: float = field(default_factory=time.time)
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")

    def response(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The response, as far as it is. more: fields that are ``null`` otherwise, and others."""
        asked = {name: value for name, value in self.body.items() if value is not None}
        params = self.wanted.params
        reasoning = asked.get("reasoning", {})
        text = asked.get("text", {})
        return {
            "id": self.id, "object": "response", "created_at": int(self.created), "status": status,
            "background": False, "completed_at": int(time.time()) if status == "completed" else None, "error": None,
            "incomplete_details": None, "instructions": asked.get("instructions"),
            "max_output_tokens": self.fields.get("max_completion_tokens"), "max_tool_calls": None, "model": self.model,
            "output": output, "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "previous_response_id": None, "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "service_tier": "default", "store": False, "temperature": params.temperature,
            "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": asked.get("tool_choice", "auto"), "tools": asked.get("tools", []),
            "top_logprobs": self.fields.get("top_logprobs", 0), "top_p": params.top_p,
            "truncation": asked.get("truncation", "disabled"), "usage": None, "user": None,
            "metadata": asked.get("metadata", {}), "system_fingerprint": self.service.fingerprint, **more,
        }  # fmt: skip

    def ended(self, flow: Flow, output: list[dict[str, Any]]) -> dict[str, Any]:
        """The response, complete."""
        [generated] = flow.outputs
        service = self.service
        reasoning = self.manner.reasoned([generated.token_ids], service.spell)
        more: dict[str, Any] = {"usage": counted(flow.outputs, reasoning=reasoning).usage_of_response()}
        if self.fields.get("return_spec_stats"):
            more.update(speculation(flow.outputs, service.engine.llm))
        reason = str(generated.finish_reason)
        if reason == "length":
            return self.response("incomplete", output, incomplete_details={"reason": "max_output_tokens"}, **more)
        if reason == "abort":
            error = {"code": "server_error", "message": "the server is shutting down"}
            return self.response("failed", output, error=error, **more)
        return self.response("completed", output, **more)

    @property
    def _costly(self) -> bool:
        """True if the response takes long to make, so that the event loop leaves it to a thread."""
        return bool(self.fields["logprobs"]) or self.manner.thinking is not None

    # -- a whole response ---------------------------------------------------------------------------------------

    async def whole(self, exchange: Exchange, flow: Flow) -> None:
        """All of it at once."""
        [output] = await flow.whole()
        if self._costly:
            await exchange.json_of(200, lambda: self._response(flow, output), self.service.written)
        else:
            await exchange.json(200, self._response(flow, output))

    def _response(self, flow: Flow, output: RequestOutput) -> dict[str, Any]:
        answer = Answer(self)
        answer.take(output.text, output.token_ids, output.logprobs)
        answer.end(output)
        return self.ended(flow, answer.output.items)

    # -- a stream -----------------------------------------------------------------------------------------------

    async def stream(self, exchange: Exchange, flow: Flow) -> None:
        """Events as they come."""
        events, answer = Events(), Answer(self)

        def failed(error: RequestError) -> bytes:
            """The stream's end in an error: what clients of either kind look for."""
            ends = answer.output.broken()
            told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
            code = _FAILURES.get(error.status, "server_error")
            response = self.response("failed", answer.output.items, error={"code": code, "message": error.message})
            return events.write([*ends, told, {"type": "response.failed", "response": response}])

        await exchange.events(failed)
        begun = self.response("in_progress", [])
        await exchange.event(events.write({"type": f"response.{name}", "response": begun} for name in _BEGIN))
        async for _, event in flow.events():
            pieces = answer.piece(event)
            if pieces:
                await exchange.event(events.write(pieces))

        def last() -> bytes:
            response = self.ended(flow, answer.output.items)
            return events.write([{"type": f"response.{response['status']}", "response": response}])

        await exchange.event(await self.service.written(last) if self._costly else last())
        await exchange.end()


_BEGIN = ("created", "in_progress")


class Answer:
    """Items of an output's text, made as the text comes."""

    def __init__(self, call: Call) -> None:
        self.output = Output()
        self._voice = call.manner.voice() or Plain()
        self._scored = bool(call.fields["logprobs"])
        self._most = call.fields.get("top_logprobs", 0)
        self._behind: Behind[TokenLogprobs] = Behind(call.manner.thinking, call.service.spell)

    def piece(self, event: StreamEvent) -> list[Event]:
        """Return what an event of a stream adds."""
        events = self.take(event.text, event.token_ids, event.logprobs)
        return events if event.output is None else events + self.end(event.output)

    def take(self, text: str, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> list[Event]:
        """Return what text and tokens add."""
        scores: list[dict[str, Any]] = []
        if self._scored:
            scores = self._objects(self._behind.take(list(zip(tokens, logprobs or [], strict=True)), last=False))
        return self.output.take(self._voice.feed(text), scores)

    def end(self, output: RequestOutput) -> list[Event]:
        """Return the last events: no more text comes."""
        scores = self._objects(self._behind.take([])) if self._scored else []
        return self.output.take(self._voice.finish(), scores) + self.output.end(str(output.finish_reason) != "stop")

    def _objects(self, scored: list[tuple[int, TokenLogprobs]]) -> list[dict[str, Any]]:
        found = objects([token for token, _ in scored], [score for _, score in scored], self._most, Names())
        for one in found:
            for each in (one, *one["top_logprobs"]):
                each["bytes"] = each["bytes"] or []  # never null here
        return found
