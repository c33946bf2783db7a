"""The service that all requests of a server share: the engine, how requests get into it, and how the server ends.

A request is admitted before anything of it is worked on: while the server drains, or too much waits, it is refused at
once. Its prompts are tokenised in a small pool, then all of them are handed to the engine, or none.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from specrs._specrs import ConfigError, GrammarFailedError, SpecrsError
from specrs.chat import ChatTemplateError
from specrs.engine import AsyncLLM, RequestOutput, StreamEvent, TokenizedPrompt
from specrs.engine.errors import EngineClosedError, EngineOverloadedError
from specrs.engine.request.token_bytes import TokenTable
from specrs.grammar import GrammarError
from specrs.sampling_params import SamplingParams
from specrs.serve.config import ServeConfig
from specrs.serve.errors import RequestError, bad, of, shown
from specrs.serve.exchange import Watch
from specrs.serve.forms import refused
from specrs.serve.metrics import Metrics
from specrs.serve.record import Log, Record
from specrs.serve.reply import MOST_ROUNDS, slices
from specrs.serve.sampling import Wish, renamed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from specrs.engine.loops.aio import RequestStream

_T = TypeVar("_T")
_CHARS_PER_TOKEN = 64  # characters for a token of the longest prompt that may fit: runs of spaces make long tokens
_STRANGERS = 2  # templates of requests that are rendered at once, each in a process
_QUEUE = 4  # times as many may wait
_LOOKS = 0.1  # seconds between two looks at what must end
LAST_WORDS = 5.0
"""Seconds at the end for the engine to tell the outcome of aborted requests, and to check its pages."""
_UNREAD = 2.0  # seconds of `LAST_WORDS`, for a client that does not read
_logger = logging.getLogger("specrs.serve")


class Service:
    """State that the requests of one app share while it lives."""

    def __init__(self, config: ServeConfig, engine: AsyncLLM, owned: bool = True) -> None:
        self.config, self.engine = config, engine
        self.owned = owned  # the engine ends with the server
        llm = engine.llm
        assert llm.config.max_context_len is not None
        self.names = config.names
        self.context: int = llm.config.max_context_len
        self.vocab_size = llm.vocab_size
        self.defaults: SamplingParams = llm.stated_sampling
        self.created = int(time.time())
        self.template = config.template
        self.fingerprint = fingerprint(llm.numerics)
        self.log = Log(config.log)
        self.watch = Watch(config.comment_seconds, config.send_seconds)
        self.metrics = Metrics(self)
        self.draining = False
        self.failed = False  # the engine is gone, or given up
        self.forced = False  # true once nobody waits for anything any more
        self.unsound = False  # the process ends with status 1
        self._drained: asyncio.Future[None] | None = None
        self.on_death: list[Callable[[], None]] = []
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="specrs-serve")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="specrs-write")
        self._strangers = ThreadPoolExecutor(_STRANGERS, thread_name_prefix="specrs-template")
        self._rendering = 0
        self._preparing = 0
        self._open = 0  # requests that were admitted and have not ended
        self._live: set[RequestStream] = set()
        self._special: frozenset[int] | None = None
        self._names: dict[str, int] | None = None
        self._table: TokenTable | None = None

    # -- the model ----------------------------------------------------------------------------------------------

    def model(self, asked: str | None) -> str:
        """The name that a request gave, if it is one of this model.

        Raises:
            RequestError: 404.
        """
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise RequestError(
                404, f"model = {asked[:80]!r}: this server has {', '.join(self.names)}", param="model",
                code="model_not_found",
            )  # fmt: skip
        return asked

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError where the model has none."""
        found = self.engine.llm.tokenizer
        if found is None:
            raise bad("this model has no tokenizer: give prompts as token ids", "prompt")
        return found

    @cached_property
    def chats(self) -> bool:
        """True if there is a template of conversations."""
        try:
            self.engine.chat_templates.source(self.template)
        except ChatTemplateError:
            return False
        return True

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that texts leave out."""
        if self._special is None:
            tokenizer = self.engine.llm.tokenizer
            added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
            self._special = frozenset(i for i, token in added.items() if token.special)
        return self._special

    @property
    def special_names(self) -> dict[str, int]:
        """Texts of `special_ids`."""
        if self._names is None:
            tokenizer = self.engine.llm.tokenizer
            added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
            self._names = {token.content: i for i, token in added.items() if token.special and i < self.vocab_size}
        return self._names

    def spell(self, token: int) -> bytes | None:
        """The bytes that a token stands for; ``None`` without a tokenizer."""
        if self._table is None and self.engine.llm.tokenizer is not None:
            self._table = TokenTable(self.engine.llm.tokenizer)
        return None if self._table is None else self._table(token)

    def shown(self, token: int) -> str:
        """Return a token by itself as text, with U+FFFD for bytes that are no text alone; its number where no text
        spells it."""
        spelled = self.spell(token)
        return str(token) if not spelled else spelled.decode("utf-8", "replace")

    def encode(self, text: str, special: bool, param: str) -> list[int]:
        """Tokens of a text, in the pool's threads.

        Raises:
            RequestError: 400 where it is too long to be a prompt.
        """
        most = self.config.max_prompt_chars or _CHARS_PER_TOKEN * self.context
        if len(text) > most:
            message = f"{param} has {len(text)} characters: at most max_prompt_chars = {most}"
            raise bad(message, param, "context_length_exceeded")
        # Encode a batch of one: `encode` keeps the interpreter's lock, and with it the event loop and the engine's
        # thread.
        return list(self.tokenizer.encode_batch([text], add_special_tokens=special)[0].ids)

    def prepared(self, wish: Wish) -> Wish:
        """A wish whose texts are tokens, so that the engine's thread need not make them. In the pool's threads."""
        expected = wish.params.prediction
        if not isinstance(expected, str):
            return wish
        ids = self.encode(expected, False, "prediction")[: self.context]
        return replace(wish, params=replace(wish.params, prediction=ids))

    def check_tokens(self, ids: Sequence[int], param: str) -> None:
        """Refuse ids that are no token of the model.

        Raises:
            RequestError: 400, with its place.
        """
        for i, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                message = f"{param}[{i}] = {shown(token)}: outside the vocabulary 0..{self.vocab_size - 1}"
                raise bad(message, param.partition("[")[0])

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Text of tokens, in the pool's threads."""
        return str(self.tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special)[0])

    async def pooled(self, work: Callable[[], _T]) -> _T:
        """Return the result of a function, run in the pool."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def written(self, work: Callable[[], _T]) -> _T:
        """Return the result of a function that writes a long response, run in a thread that no prompt waits for."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, work)

    async def apart(self, work: Callable[[], _T]) -> _T:
        """Return the result of a function that renders a request's own template, run in threads that nothing else waits
        for.

        Raises:
            EngineOverloadedError: as many renderings wait as may.
        """
        if self._rendering >= _STRANGERS * _QUEUE:
            raise EngineOverloadedError("templates", self._rendering + 1, _STRANGERS * _QUEUE)
        self._rendering += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._strangers, work)
        finally:
            self._rendering -= 1

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def open_requests(self) -> int:
        """Requests that were admitted and have not ended."""
        return self._open

    def check_room(self) -> None:
        """Refuse before a body is read or parsed: under a storm of requests that are refused, refusals must be cheap.

        Raises:
            RequestError: 503 while the server drains, or its engine is gone.
            EngineOverloadedError: too much waits.
        """
        config = self.config
        if self.draining:
            raise RequestError(503, "this server is shutting down", type="server_error", code="draining",
                               retry_after=config.retry_after_seconds)  # fmt: skip
        if self.failed:
            raise RequestError(503, "this server's engine cannot go on", type="server_error",
                               code="engine_unavailable", retry_after=config.retry_after_seconds)  # fmt: skip
        waiting = self.engine.stats().submitted + self._preparing
        if waiting >= config.max_waiting:
            raise EngineOverloadedError("requests", waiting + 1, config.max_waiting)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Admit one request, from its body to the end of its response. Raises as `check_room`."""
        self.check_room()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count a request whose prompt is being made as one that waits."""
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1

    @asynccontextmanager
    async def submitted(
        self, prompts: Sequence[TokenizedPrompt], wish: Wish, record: Record | None = None
    ) -> AsyncIterator[Flow]:
        """The prompts' outputs, once the engine has taken all of them. Leaving ends what still runs.

        What the outputs came to is counted here alone, once all of them have ended, in the metrics and in the record:
        so what was generated for a client that has left counts as any other.

        Raises:
            RequestError: 400, what the engine refuses.
            EngineOverloadedError, EngineFailedError, EngineClosedError: the same errors as of `AsyncLLM.submit`; then
                no prompt goes on.
        """
        tokens = sum(len(one.token_ids) for one in prompts)
        if len(prompts) > 1 and tokens > self.config.max_waiting_tokens:
            raise bad(
                f"the prompts have {tokens} tokens in all: at most max_waiting_tokens = "
                f"{self.config.max_waiting_tokens}", "prompt",
            )  # fmt: skip
        for one in prompts:
            wish.checked(len(one.token_ids), self.context)
        streams: list[RequestStream] = []
        try:
            await self._submit(prompts, wish, streams)
            yield Flow(streams)
        except GrammarFailedError as error:
            raise of(error, 0.0, wish.form) from None
        finally:
            try:
                await self._leave(streams)
            finally:
                for stream in streams:
                    self.metrics.ended(stream.outputs, stream.times)
                outputs = [one for stream in streams for one in stream.outputs]
                if record is not None and outputs:
                    record.ended(outputs, [stream.times for stream in streams])

    async def _submit(self, prompts: Sequence[TokenizedPrompt], wish: Wish, streams: list[RequestStream]) -> None:
        """Queue the prompts, each with a stream in the list, and wait until the engine has them."""
        try:
            for one in prompts:
                streams.append(await self.engine.enqueue(one, wish.params))
                self._live.add(streams[-1])
            for stream in streams:
                await stream.taken()
        except GrammarError as error:
            raise refused(error, wish.form or "structured_outputs") from None
        except ConfigError as error:
            raise renamed(error) if getattr(error, "what", None) else error from None

    async def _leave(self, streams: Sequence[RequestStream]) -> None:
        """End the outputs of some requests that still run, and wait for their outcome: the engine tells it between two
        steps."""
        try:
            for stream in streams:
                stream.abort()
            for stream in streams:
                await stream.ended()
        finally:
            for stream in streams:
                stream.close()
            self._live.difference_update(streams)

    # -- its end ------------------------------------------------------------------------------------------------

    def healthy(self) -> str | None:
        """Return the reason why the server cannot serve, or ``None`` where it can."""
        stats = self.engine.stats()
        if self.failed or not stats.healthy:
            return "the engine cannot go on"
        if stats.stepping > self.config.stall_seconds:
            return f"a step of the engine goes on for {stats.stepping:.0f} seconds"
        return None

    async def guard(self) -> None:
        """Notice that the engine has died, and tell the code that ends the process."""
        while self.engine.stats().healthy:
            await asyncio.sleep(_LOOKS)
        if not self.draining:
            self.failed = self.unsound = True
            _logger.critical("the engine cannot go on: this server ends")
            for tell in self.on_death:
                tell()

    async def drain(self) -> None:
        """Take no requests; let running ones end, for ``drain_seconds``; then abort them, and let them say so. If the
        engine does not say so either, give it up. A second call waits for the same end."""
        self.draining = True
        if self._drained is None:
            self._drained = asyncio.ensure_future(self._drain())
        await asyncio.shield(self._drained)

    async def _drain(self) -> None:
        await self.pause(lambda: not self._open, self.config.drain_seconds)
        for stream in list(self._live):
            stream.abort()
        if not await self.pause(self._settled, LAST_WORDS) and not all(stream.over for stream in self._live):
            self.give_up(f"the engine has not answered for {LAST_WORDS:g} seconds")
            await self.pause(self._settled, _UNREAD)

    def _settled(self) -> bool:
        self.watch.look(patience=_UNREAD)
        return not self._open

    async def pause(self, until: Callable[[], object], seconds: float) -> bool:
        """Wait for something, for so many seconds at most, and not at all once the server is `forced`; whether it is
        so."""
        end = time.monotonic() + seconds
        while not (done := bool(until())) and not self.forced and time.monotonic() < end:
            await asyncio.sleep(_LOOKS / 2)
        return done

    def give_up(self, why: str) -> None:
        """Wait for the engine no more: it ends, and everybody who waits for it gets the error."""
        if not self.failed:
            _logger.critical("%s: it is given up", why)
            self._let_go()

    def force(self) -> None:
        """End at once: wait neither for requests nor for the engine."""
        self.forced = self.unsound = True
        if not self.failed:
            self._let_go()

    def _let_go(self) -> None:
        self.failed = self.unsound = True
        if self.owned:
            self.engine.kill()
        for stream in list(self._live):
            stream.close()

    async def audit(self) -> None:
        """Check the engine's page ledger at the end, if it still can; a fault is told, and makes the server
        `unsound`."""
        if self.failed:
            return
        try:
            counts = await asyncio.wait_for(self.engine.audit(), LAST_WORDS)
        except asyncio.TimeoutError:
            self.give_up(f"the engine has not answered for {LAST_WORDS:g} seconds")
            return
        except SpecrsError as error:
            if not self.forced:
                self.unsound = True
                _logger.critical("at the end, the pool: %s", error)
            return
        stats = self.engine.stats()
        held = {name: counts[name] for name in ("sequences", "held_pages") if counts.get(name)}
        if held and not (self._open or stats.submitted or stats.engine.running or stats.engine.waiting):
            self.unsound = True
            _logger.critical("at the end, with no request open, the pool has %s", held)

    def close(self) -> None:
        """Shut the thread pools down and close the log."""
        for pool in (self._pool, self._writer, self._strangers):
            pool.shutdown(wait=False, cancel_futures=True)
        self.log.close()


class Flow:
    """The outputs of one request's prompts, as they come.

    Attributes:
        streams: one stream for each prompt.
    """

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self.streams = streams

    @property
    def outputs(self) -> list[RequestOutput]:
        """Outputs of all prompts that have ended."""
        return [one for stream in self.streams for one in stream.outputs]

    async def whole(self) -> list[RequestOutput]:
        """Return the output of each prompt, whose ``outputs`` are all of them.

        Raises:
            NonFiniteError: the error of a request that could not go on.
            StepFailedError, EngineFailedError: the same errors as of `RequestStream`.
        """
        found: list[dict[int, RequestOutput]] = [{} for _ in self.streams]
        async for i, event in self.events():
            if event.output is not None:
                found[i][event.index] = event.output
        return [_grouped(one) for one in found]

    async def events(self) -> AsyncIterator[tuple[int, StreamEvent]]:
        """Yield the events of all prompts, with the prompt's index, as they come. Raises as `whole`."""
        source = self._one() if len(self.streams) == 1 else self._many()
        async for i, event in source:
            if event.output is not None and event.output.error is not None:
                raise event.output.error
            parts = list(slices(event)) if len(event.rounds) > MOST_ROUNDS else [event]
            for part in parts[:-1]:
                yield i, part
                await asyncio.sleep(0)  # others' turn
            yield i, parts[-1]
        if not all(stream.outputs for stream in self.streams):
            raise EngineClosedError  # the server has let go of the engine

    async def _one(self) -> AsyncIterator[tuple[int, StreamEvent]]:
        async for event in self.streams[0]:
            yield 0, event

    async def _many(self) -> AsyncIterator[tuple[int, StreamEvent]]:
        """Keep one read pending for each stream, so that events that nobody has asked for stay joined in their slot."""
        reads = {asyncio.ensure_future(anext(stream, None)): i for i, stream in enumerate(self.streams)}
        try:
            while reads:
                done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
                for read in sorted(done, key=reads.__getitem__):
                    i = reads.pop(read)
                    event = read.result()
                    if event is not None:
                        reads[asyncio.ensure_future(anext(self.streams[i], None))] = i
                        yield i, event
        finally:
            for read in reads:
                read.cancel()


def _grouped(outputs: dict[int, RequestOutput]) -> RequestOutput:
    first, *others = (outputs[i] for i in sorted(outputs))
    return replace(first, others=tuple(others)) if others else first


def fingerprint(numerics: dict[str, Any]) -> str:
    """Return a fingerprint of what the bits of tokens depend on beside model, input and seed
    (`specrs.LLM.numerics`)."""
    told = json.dumps(numerics, sort_keys=True, default=str)
    return f"fp_{hashlib.sha256(told.encode()).hexdigest()[:16]}"
