"""``/v1/chat/completions``: conversations, by the model's chat template, and the model's answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specrs.chat import RenderLimits, apart
from specrs.engine import TokenizedPrompt
from specrs.serve.calling import Manner, chosen, manner
from specrs.serve.errors import bad
from specrs.serve.exchange import DONE, Exchange
from specrs.serve.fields import CHAT, ROUNDS, read
from specrs.serve.reply import Count, Frame, Reply, counted, speculation, traced
from specrs.serve.sampling import Wish, wish
from specrs.serve.scores import Names, all_objects, objects, prompt_scores
from specrs.serve.turns import rendered, with_known_roles
from specrs.serve.voices import Plain, Voice, message

if TYPE_CHECKING:
    from specrs.engine import RequestOutput, StreamEvent
    from specrs.serve.service import Flow, Service


async def chat(service: Service, exchange: Exchange, body: Mapping[str, Any]) -> None:
    """Answer a request."""
    fields = read(CHAT, body, service.config)
    model = service.model(fields.get("model"))
    reply = Reply("chat.completion", "chat.completion.chunk", "chatcmpl", model, service.fingerprint)
    record = exchange.record
    record.id, record.model, record.stream = reply.id, reply.model, bool(fields.get("stream"))
    if "messages" not in fields:
        raise bad("messages: is needed", "messages", "missing_parameter")
    asked = wish(CHAT, fields, service.defaults, service.context)
    chosen(fields)
    with service.admitted():
        with service.preparing():
            pool = service.apart if "chat_template" in fields else service.pooled
            prompt, (spoken, wanted) = await pool(lambda: prepared(service, fields, asked))
        call = Call(service, fields, reply, prompt, spoken)
        async with service.submitted([prompt], wanted, record) as flow:
            await (call.stream(exchange, flow) if record.stream else call.whole(exchange, flow))


def prepared(service: Service, fields: Mapping[str, Any], asked: Wish) -> tuple[TokenizedPrompt, tuple[Manner, Wish]]:
    """The prompt, how answers to it are read, and what the engine is asked for. In the pool's threads.

    Raises:
        ChatTemplateError: the same errors as of `chat_prompt`.
        RequestError: the same errors as of `manner`.
    """
    prompt = chat_prompt(service, fields, asked)
    return prompt, manner(service, fields, prompt.text, service.prepared(asked))


def chat_prompt(service: Service, fields: Mapping[str, Any], wanted: Wish | None) -> TokenizedPrompt:
    """The prompt that a conversation makes, in the pool's threads.

    Raises:
        ChatTemplateError: the same errors as of `specrs.chat.ChatTemplates.render`.
        RequestError: the same errors as of `with_known_roles`.
    """
    config, templates = service.config, service.engine.chat_templates
    limits = RenderLimits(config.max_template_seconds, config.max_template_chars)
    goes_on = fields.get("continue_final_message", False)
    options = {
        "tools": fields.get("tools") or None,
        "add_generation_prompt": fields.get("add_generation_prompt", not goes_on),
        "continue_final_message": goes_on,
        "chat_template_kwargs": _variables(service, fields),
    }  # fmt: skip
    own = fields.get("chat_template")
    source = templates.source(service.template, bool(options["tools"])) if own is None else own

    def render(messages: list[dict[str, Any]]) -> str:
        if own is not None:
            return apart(templates, messages, chat_template=own, limits=limits, **options)
        return templates.render(messages, chat_template=service.template, limits=limits, **options)

    text = rendered(render, with_known_roles(fields["messages"], source))
    ids = service.encode(text, fields.get("add_special_tokens", False), "messages")
    return TokenizedPrompt(text, ids if wanted is None else wanted.kept(ids))


def _variables(service: Service, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Further variables of the template."""
    found = dict(fields.get("chat_template_kwargs", {}))
    if "documents" in fields:
        found["documents"] = fields["documents"]
    effort = fields.get("reasoning_effort")
    if effort is not None:
        tools = bool(fields.get("tools"))
        source = fields.get("chat_template") or service.engine.chat_templates.source(service.template, tools)
        if "reasoning_effort" not in source:
            raise bad("reasoning_effort: the model's chat template does not read it", "reasoning_effort",
                      "unsupported_parameter")  # fmt: skip
        found["reasoning_effort"] = effort
    return found


@dataclass(frozen=True)
class Call:
    """One request to the endpoint."""

    service: Service
    fields: Mapping[str, Any]
    reply: Reply
    prompt: TokenizedPrompt
    manner: Manner

    def voice(self) -> Voice:
        """Return the voice that turns a choice's text into deltas."""
        return self.manner.voice() or Plain()

    def opening(self) -> str:
        """Text that stands before each answer: of the message that it goes on with, where that is wanted."""
        if not (self.fields.get("echo") and self.fields.get("continue_final_message")):
            return ""
        content = self.fields["messages"][-1].get("content")
        return content if isinstance(content, str) else ""

    def scored(self, write: Callable[..., Any], tokens: Any, scores: Any) -> dict[str, Any] | None:
        """A choice's ``logprobs``, where they are wanted. write: `objects` or `all_objects`."""
        if not self.fields.get("logprobs"):
            return None
        names = Names(bool(self.fields.get("return_tokens_as_token_ids")))
        return {"content": write(tokens, scores or [], self.fields.get("top_logprobs", 0), names), "refusal": None}

    # -- a whole response ---------------------------------------------------------------------------------------

    async def whole(self, exchange: Exchange, flow: Flow) -> None:
        """All choices at once."""
        [output] = await flow.whole()
        if self.fields.get("logprobs") or "prompt_logprobs" in self.fields or self.manner.thinking is not None:
            await exchange.json_of(200, lambda: self._response(flow, output), self.service.written)
        else:
            await exchange.json(200, self._response(flow, output))

    def _response(self, flow: Flow, output: RequestOutput) -> dict[str, Any]:
        choices = [self.choice(one) for one in output.outputs]
        more: dict[str, Any] = {}
        if self.fields.get("return_spec_stats"):
            more.update(speculation(flow.outputs, self.service.engine.llm))
        if self.fields.get("return_token_ids"):
            more["prompt_token_ids"] = list(self.prompt.token_ids)
        if "prompt_logprobs" in self.fields and output.prompt_logprobs is not None:
            names = Names(bool(self.fields.get("return_tokens_as_token_ids")))
            more["prompt_logprobs"] = prompt_scores(output.prompt_logprobs, names)
        return self.reply.whole(choices, self._usage(flow), **more)

    def _usage(self, flow: Flow) -> dict[str, Any]:
        reasoning = self.manner.reasoned((one.token_ids for one in flow.outputs), self.service.spell)
        return counted(flow.outputs, reasoning=reasoning).usage()

    def choice(self, output: RequestOutput) -> dict[str, Any]:
        """A choice, complete."""
        voice = self.voice()
        opening = self.opening()
        deltas = [*([{"content": opening}] if opening else []), *voice.feed(output.text), *voice.finish()]
        found: dict[str, Any] = {
            "index": output.index, "message": {**message(deltas), "refusal": None},
            "logprobs": self.scored(all_objects, output.token_ids, output.logprobs),
            "finish_reason": voice.reason(str(output.finish_reason)), "stop_reason": output.stop_reason,
        }  # fmt: skip
        if self.fields.get("return_token_ids"):
            found["token_ids"] = list(output.token_ids)
            found["prompt_token_ids"] = list(self.prompt.token_ids)
        return found

    # -- a stream -----------------------------------------------------------------------------------------------

    async def stream(self, exchange: Exchange, flow: Flow) -> None:
        """Choices as they come."""
        options = self.fields.get("stream_options", {})
        usage, always = options.get("include_usage", False), options.get("continuous_usage_stats", False)
        frame = self.reply.framed(usage)
        count = Count(len(self.prompt.token_ids))
        await exchange.events()
        voices = [Stream(self, i) for i in range(self.fields.get("n", 1))]
        for voice in voices:
            await exchange.event(frame.event(voice.head(), **({"usage": count.usage()} if usage and always else {})))
        async for _, event in flow.events():
            count.completion += len(event.token_ids)
            more = {"usage": count.usage()} if usage and always else {}
            pieces = [frame.event(choice, **more) for choice in voices[event.index].pieces(event)]
            if pieces:
                await exchange.event(b"".join(pieces))
        if usage and self.manner.thinking is not None:  # usage counts the tokens of reasoning one by one
            last = await self.service.written(lambda: self._last(flow, frame, usage))
        else:
            last = self._last(flow, frame, usage)
        await exchange.event(b"".join(last))
        await exchange.end()

    def _last(self, flow: Flow, frame: Frame, usage: bool) -> list[bytes]:
        """Return the events behind those of choices."""
        more: dict[str, Any] = {}
        if usage:
            more["usage"] = self._usage(flow)
        if self.fields.get("return_spec_stats"):
            more.update(speculation(flow.outputs, self.service.engine.llm))
        return [frame.event(None, **more), DONE] if more else [DONE]


class Stream:
    """One choice of a stream."""

    def __init__(self, call: Call, index: int) -> None:
        self._call, self._index = call, index
        self._voice = call.voice()
        self._scores = bool(call.fields.get("logprobs"))
        self._ids = bool(call.fields.get("return_token_ids"))
        self._traced = call.fields.get("return_spec_stats") == ROUNDS

    def head(self) -> dict[str, Any]:
        """The piece that says who speaks."""
        opening = self._call.opening()
        # An answer of calls alone has no content, and nothing tells yet whether this is one.
        content = opening if opening or isinstance(self._voice, Plain) else None
        found = self._piece({"role": "assistant", "content": content})
        if self._ids:
            found["token_ids"], found["prompt_token_ids"] = [], list(self._call.prompt.token_ids)
        return found

    def pieces(self, event: StreamEvent) -> list[dict[str, Any]]:
        """Return the pieces that an event adds: one for each delta, the first with the event's tokens, the last with
        the end."""
        output = event.output
        deltas = self._voice.feed(event.text)
        if output is not None:
            deltas += self._voice.finish()
        told = (event.token_ids and (self._scores or self._ids)) or (self._traced and (event.rounds or event.pieces))
        if output is not None or (told and not deltas):
            deltas.append({})
        found = [self._piece(delta) for delta in deltas]
        if found and event.token_ids:
            found[0]["logprobs"] = self._call.scored(objects, event.token_ids, event.logprobs)
            if self._ids:
                found[0]["token_ids"] = event.token_ids
        if found and self._traced:
            found[0]["specrs"] = traced(event.rounds, event.pieces, self._call.service.shown)
        if output is not None:
            found[-1]["finish_reason"] = self._voice.reason(str(output.finish_reason))
            found[-1]["stop_reason"] = output.stop_reason
        return found

    def _piece(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
