"""``/v1/completions``: prompts, of text or token ids, and the model's continuations.

``echo`` with ``logprobs`` and ``max_tokens`` 0 or 1 scores texts, as evaluation harnesses do: each token of the prompt
has its log-probability, the first one none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specrs.engine import TokenizedPrompt
from specrs.serve.config import ServeConfig
from specrs.serve.errors import bad, shown
from specrs.serve.exchange import DONE, Exchange
from specrs.serve.fields import COMPLETIONS, ROUNDS, read
from specrs.serve.reply import Count, Frame, Reply, counted, speculation, traced
from specrs.serve.sampling import Wish, wish
from specrs.serve.scores import Columns, Names, prompt_scores

if TYPE_CHECKING:
    from specrs.engine import RequestOutput, StreamEvent
    from specrs.serve.service import Flow, Service


async def completions(service: Service, exchange: Exchange, body: Mapping[str, Any]) -> None:
    """Answer a request."""
    fields = read(COMPLETIONS, body, service.config)
    reply = Reply("text_completion", "text_completion", "cmpl", service.model(fields.get("model")), service.fingerprint)
    record = exchange.record
    record.id, record.model, record.stream = reply.id, reply.model, bool(fields.get("stream"))
    asked = wish(COMPLETIONS, fields, service.defaults, service.context)
    with service.admitted():
        with service.preparing():
            prompts, wanted = await service.pooled(lambda: (_prompts(service, fields, asked), service.prepared(asked)))
        call = Call(service, fields, wanted, reply, prompts)
        async with service.submitted(prompts, wanted, record) as flow:
            await (call.stream(exchange, flow) if record.stream else call.whole(exchange, flow))


def _prompts(service: Service, fields: Mapping[str, Any], wanted: Wish) -> list[TokenizedPrompt]:
    """Tokens and texts of the prompts, in the pool's threads."""
    special, skip = fields.get("add_special_tokens", True), fields.get("skip_special_tokens", True)
    found = []
    for i, prompt in enumerate(_given(fields, service.config)):
        where = "prompt" if len(fields["prompt"]) == 1 else f"prompt[{i}]"
        if isinstance(prompt, str):
            ids = service.encode(prompt, special, where)
            if not ids:
                why = "it has no tokens, and the tokenizer puts none before it (BOS): there is nothing to continue"
                raise bad(f"{where} = {shown(prompt)}: {why}", "prompt")
        else:
            ids = prompt
            service.check_tokens(ids, where)
        kept = wanted.kept(ids)
        text = prompt if isinstance(prompt, str) and kept is ids else ""
        if not text and fields.get("echo"):
            text = service.decode(kept, skip)
        found.append(TokenizedPrompt(text, kept))
    return found


def _given(fields: Mapping[str, Any], config: ServeConfig) -> Sequence[str | list[int]]:
    """The prompts, as many as a request may have with its ``n``."""
    prompts: Sequence[str | list[int]] = fields.get("prompt", ())
    if not prompts:
        raise bad("prompt: is needed", "prompt", "missing_parameter")
    outputs = len(prompts) * max(fields.get("n", 1), fields.get("best_of", 1))
    if outputs > config.max_outputs:
        raise bad(f"{len(prompts)} prompts with n give {outputs} outputs: at most max_outputs = {config.max_outputs}",
                  "n")  # fmt: skip
    return prompts


@dataclass(frozen=True)
class Call:
    """One request to the endpoint."""

    service: Service
    fields: Mapping[str, Any]
    wanted: Wish
    reply: Reply
    prompts: Sequence[TokenizedPrompt]

    @property
    def _n(self) -> int:
        return int(self.fields.get("n", 1))

    @property
    def _echo(self) -> bool:
        return bool(self.fields.get("echo"))

    def _columns(self) -> Columns:
        names = Names(bool(self.fields.get("return_tokens_as_token_ids")))
        silent = self.service.special_ids if self.fields.get("skip_special_tokens", True) else frozenset[int]()
        return Columns(names, self.service.spell, silent, self.fields["logprobs"])

    # -- a whole response ---------------------------------------------------------------------------------------

    async def whole(self, exchange: Exchange, flow: Flow) -> None:
        """All choices at once."""
        outputs = await flow.whole()
        if "logprobs" in self.fields or "prompt_logprobs" in self.fields:
            await exchange.json_of(200, lambda: self._response(flow, outputs), self.service.written)
        else:
            await exchange.json(200, self._response(flow, outputs))

    def _response(self, flow: Flow, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = []
        for i, output in enumerate(outputs):
            for j, chosen in enumerate(self._best(output)):
                choices.append(self.choice(i * self._n + j, i, chosen))
        more = speculation(flow.outputs, self.service.engine.llm) if self.fields.get("return_spec_stats") else {}
        return self.reply.whole(choices, counted(flow.outputs, self.wanted.dropped).usage(), **more)

    def _best(self, output: RequestOutput) -> Sequence[RequestOutput]:
        """Return the ``n`` outputs that are most probable by token, the best first; all of them where none is left
        out."""
        outputs = output.outputs
        if len(outputs) <= self._n:
            return outputs
        mean = {one.index: (one.cumulative_logprob or 0.0) / max(len(one.token_ids), 1) for one in outputs}
        return sorted(outputs, key=lambda one: -mean[one.index])[: self._n]

    def choice(self, index: int, i: int, output: RequestOutput) -> dict[str, Any]:
        """A choice, complete. i: of its prompt."""
        prompt, fields = self.prompts[i], self.fields
        nothing = self.wanted.dropped > 0  # a token was generated since the engine gives one at least
        tokens = [] if nothing else output.token_ids
        text = "" if nothing else output.text
        found: dict[str, Any] = {
            "index": index, "text": prompt.text + text if self._echo else text,
            "logprobs": self._scored(output, tokens) if "logprobs" in fields else None,
            "finish_reason": "length" if nothing else str(output.finish_reason),
            "stop_reason": None if nothing else output.stop_reason,
        }  # fmt: skip
        if fields.get("return_token_ids"):
            found["token_ids"], found["prompt_token_ids"] = list(tokens), list(prompt.token_ids)
        if "prompt_logprobs" in fields and output.prompt_logprobs is not None:
            names = Names(bool(fields.get("return_tokens_as_token_ids")))
            found["prompt_logprobs"] = prompt_scores(output.prompt_logprobs, names)
        return found

    def _scored(self, output: RequestOutput, tokens: Sequence[int]) -> dict[str, list[Any]]:
        columns = self._columns()
        found = columns.of([], [])
        if self._echo:
            known = output.prompt_logprobs or []
            found = columns.of(output.prompt_token_ids[: len(known)], known)
        new = columns.of(tokens, (output.logprobs or [])[: len(tokens)])
        return {name: found[name] + new[name] for name in found}

    # -- a stream -----------------------------------------------------------------------------------------------

    async def stream(self, exchange: Exchange, flow: Flow) -> None:
        """Choices as they come."""
        options = self.fields.get("stream_options", {})
        usage, always = options.get("include_usage", False), options.get("continuous_usage_stats", False)
        frame = self.reply.framed(usage)
        count = Count(sum(len(one.token_ids) for one in self.prompts))
        await exchange.events()
        async for choice, tokens in self._pieces(flow):
            count.completion += tokens
            more = {"usage": count.usage()} if usage and always else {}
            await exchange.event(frame.event(choice, **more))
        await exchange.event(b"".join(self._last(flow, frame, usage)))
        await exchange.end()

    def _last(self, flow: Flow, frame: Frame, usage: bool) -> list[bytes]:
        """Return the events behind those of choices."""
        more: dict[str, Any] = {}
        if usage:
            more["usage"] = counted(flow.outputs, self.wanted.dropped).usage()
        if self.fields.get("return_spec_stats"):
            more.update(speculation(flow.outputs, self.service.engine.llm))
        return [frame.event(None, **more), DONE] if more else [DONE]

    async def _pieces(self, flow: Flow) -> AsyncIterator[tuple[dict[str, Any], int]]:
        """Choices in pieces, and the tokens of each."""
        if (self._echo and "logprobs" in self.fields) or self.wanted.dropped:
            # The prompt's scores are known at the end, and stand before all else.
            async for i, event in flow.events():
                if event.output is not None:
                    tokens = 0 if self.wanted.dropped else len(event.output.token_ids)
                    yield self.choice(i * self._n + event.index, i, event.output), tokens
            return
        voices: dict[tuple[int, int], Voice] = {}
        async for i, event in flow.events():
            voice = voices.get((i, event.index))
            if voice is None:
                voice = voices[i, event.index] = Voice(self, i, i * self._n + event.index)
            piece = voice.piece(event)
            if piece is not None:
                yield piece, len(event.token_ids)


class Voice:
    """One choice of a stream."""

    def __init__(self, call: Call, i: int, index: int) -> None:
        self._prompt, self._index, self._fresh = call.prompts[i], index, True
        self._columns = call._columns() if "logprobs" in call.fields else None
        self._echo, self._ids = call._echo, bool(call.fields.get("return_token_ids"))
        self._shown = call.service.shown if call.fields.get("return_spec_stats") == ROUNDS else None

    def piece(self, event: StreamEvent) -> dict[str, Any] | None:
        """Return the piece that an event adds; ``None``: nothing that anybody asked for."""
        text, output = event.text, event.output
        if self._echo and self._fresh:
            text = self._prompt.text + text
        shows = text or output is not None or (event.token_ids and (self._columns is not None or self._ids))
        if not shows and not event.rounds:
            return None
        found: dict[str, Any] = {
            "index": self._index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None,
        }  # fmt: skip
        if self._columns is not None and event.token_ids:
            found["logprobs"] = self._columns.of(event.token_ids, event.logprobs or [])
        if output is not None:
            found["finish_reason"], found["stop_reason"] = str(output.finish_reason), output.stop_reason
        if self._ids:
            found["token_ids"] = event.token_ids
            if self._fresh:
                found["prompt_token_ids"] = list(self._prompt.token_ids)
        if self._shown is not None:
            found["specrs"] = traced(event.rounds, event.pieces, self._shown)
        self._fresh = False
        return found
