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
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from specrs._specrs import ConfigError, GrammarFailedError
from specrs.chat import ChatTemplateError
from specrs.engine import AsyncLLM, RequestOutput, StreamEvent, TokenizedPrompt
from specrs.engine.errors import EngineOverloadedError
from specrs.engine.token_bytes import TokenTable
from specrs.grammar import GrammarError
from specrs.sampling_params import SamplingParams
from specrs.serve.config import ServeConfig
from specrs.serve.errors import RequestError, bad, of, shown
from specrs.serve.exchange import Watch
from specrs.serve.forms import refused
from specrs.serve.metrics import Metrics
from specrs.serve.record import Log
from specrs.serve.reply import MOST_ROUNDS, slices
from specrs.serve.sampling import Wish, renamed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from specrs.engine.aio import RequestStream

_T = TypeVar("_T")
_CHARS_PER_TOKEN = 64  # of the longest prompt that may fit: runs of spaces make long tokens
_STRANGERS = 2  # templates of requests that are rendered at once, each in a process
_QUEUE = 4  # times as many may wait
_LOOKS = 0.1  # seconds between two looks at what must end
_SETTLE = 10.0  # seconds for the last events of aborted requests to go out
_UNREAD = 2.0  # of those, for a client that does not read
_logger = logging.getLogger("specrs.serve")


class Service:
    """Of one app, while it lives."""

    def __init__(self, config: ServeConfig, engine: AsyncLLM) -> None:
        self.config, self.engine = config, engine
        llm = engine.llm
        assert llm.config.max_context_len is not None
        self.names = config.names
        self.context: int = llm.config.max_context_len
        self.vocab_size = llm.vocab_size
        self.defaults: SamplingParams = llm.stated_sampling
        self.created = int(time.time())
        self.template: str | None = None
        if config.chat_template is not None:
            self.template = Path(config.chat_template).read_text(encoding="utf-8")
        self.fingerprint = fingerprint(llm.numerics)
        self.log = Log(config.log)
        self.watch = Watch(config.keep_alive_seconds, config.send_seconds)
        self.metrics = Metrics(self)
        self.draining = False
        self.failed = False
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
        """Whether there is a template of conversations."""
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
        """Of `special_ids` the texts."""
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
        """A token by itself as text, U+FFFD for bytes that are none alone; its number where nothing spells it."""
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
        # As a batch of one: `encode` keeps the interpreter's lock, and with it the event loop and the engine's thread.
        return list(self.tokenizer.encode_batch([text], add_special_tokens=special)[0].ids)

    def prepared(self, wish: Wish) -> Wish:
        """A wish whose texts are tokens, so that the engine's thread need not make them. In the pool's threads."""
        expected = wish.params.prediction
        if not isinstance(expected, str):
            return wish
        ids = self.encode(expected, False, "prediction")[: self.context]
        return replace(wish, params=replace(wish.params, prediction=ids))

    def check_tokens(self, ids: Sequence[int], param: str) -> None:
        """Refuse what is no token of the model.

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
        """What a function gives, run in the pool."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def written(self, work: Callable[[], _T]) -> _T:
        """What a function gives that writes a long response: in a thread that no prompt waits for."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, work)

    async def apart(self, work: Callable[[], _T]) -> _T:
        """What a function gives that renders a request's own template: in threads that nothing else waits for.

        Raises:
            EngineOverloadedError: as many wait as may.
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
        """One request, from its body to the end of its response. Raises as `check_room`."""
        self.check_room()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """A request whose prompt is being made counts as one that waits."""
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1

    @asynccontextmanager
    async def submitted(self, prompts: Sequence[TokenizedPrompt], wish: Wish) -> AsyncIterator[Flow]:
        """The prompts' outputs, once the engine has taken all of them. Leaving ends what still runs.

        Raises:
            RequestError: 400, what the engine refuses.
            EngineOverloadedError, EngineFailedError, EngineClosedError: as `AsyncLLM.submit`; then none was started.
        """
        tokens = sum(len(one.token_ids) for one in prompts)
        if len(prompts) > 1 and tokens > self.config.max_waiting_tokens:
            raise bad(
                f"the prompts have {tokens} tokens in all: at most max_waiting_tokens = "
                f"{self.config.max_waiting_tokens}", "prompt",
            )  # fmt: skip
        for one in prompts:
            wish.checked(len(one.token_ids), self.context)
        try:
            streams = await self._submit(prompts, wish.params)
        except GrammarError as error:
            raise refused(error, wish.form or "structured_outputs") from None
        except ConfigError as error:
            raise renamed(error) if getattr(error, "what", None) else error from None
        self._live.update(streams)
        try:
            yield Flow(streams, wish.params.n or 1, self.metrics)
        except GrammarFailedError as error:
            raise of(error, 0.0, wish.form) from None
        finally:
            for stream in streams:
                stream.close()
            self._live.difference_update(streams)

    async def _submit(self, prompts: Sequence[TokenizedPrompt], params: SamplingParams) -> list[RequestStream]:
        if len(prompts) == 1:
            return [await self.engine.submit(prompts[0], params)]
        tasks = [asyncio.ensure_future(self.engine.submit(one, params)) for one in prompts]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled() and task.exception() is None:
                    task.result().close()
            raise
        return [task.result() for task in tasks]

    # -- its end ------------------------------------------------------------------------------------------------

    def healthy(self) -> str | None:
        """Why the server cannot serve; ``None``: it can."""
        stats = self.engine.stats()
        if self.failed or not stats.healthy:
            return "the engine cannot go on"
        if stats.stepping > self.config.stall_seconds:
            return f"a step of the engine goes on for {stats.stepping:.0f} seconds"
        return None

    async def guard(self) -> None:
        """Notice that the engine has died, and tell whoever ends the process."""
        while self.engine.stats().healthy:
            await asyncio.sleep(_LOOKS)
        if not self.draining:
            self.failed = True
            _logger.critical("the engine cannot go on: this server ends")
            for tell in self.on_death:
                tell()

    async def drain(self) -> None:
        """Take no requests; let those that run end, for ``drain_seconds``; then abort them, and let them say so."""
        self.draining = True
        until = time.monotonic() + self.config.drain_seconds
        while self._open and time.monotonic() < until:
            await asyncio.sleep(_LOOKS)
        for stream in list(self._live):
            stream.abort()
        until = time.monotonic() + _SETTLE
        while self._open and time.monotonic() < until:
            await asyncio.sleep(_LOOKS / 2)
            self.watch.look(patience=_UNREAD)

    def close(self) -> None:
        """Nothing more comes."""
        for pool in (self._pool, self._writer, self._strangers):
            pool.shutdown(wait=False, cancel_futures=True)
        self.log.close()


class Flow:
    """What comes of one request's prompts.

    Attributes:
        streams: one for each prompt.
    """

    def __init__(self, streams: list[RequestStream], outputs: int, metrics: Metrics) -> None:
        self.streams, self._metrics = streams, metrics
        self._left = [outputs] * len(streams)  # outputs of each that have not ended
        self.outputs: list[RequestOutput] = []

    async def whole(self) -> list[RequestOutput]:
        """Of each prompt its output, whose ``outputs`` are all of them.

        Raises:
            NonFiniteError: of a request that could not go on.
            StepFailedError, EngineFailedError: as `RequestStream`.
        """
        found: list[dict[int, RequestOutput]] = [{} for _ in self.streams]
        async for i, event in self.events():
            if event.output is not None:
                found[i][event.index] = event.output
        return [_grouped(one) for one in found]

    async def events(self) -> AsyncIterator[tuple[int, StreamEvent]]:
        """Of all prompts, by their index, as they come. Raises as `whole`."""
        source = self._one() if len(self.streams) == 1 else self._many()
        async for i, event in source:
            if event.output is not None:
                self._ended(i, event.output)
                if event.output.error is not None:
                    raise event.output.error
            parts = list(slices(event)) if len(event.rounds) > MOST_ROUNDS else [event]
            for part in parts[:-1]:
                yield i, part
                await asyncio.sleep(0)  # others' turn
            yield i, parts[-1]

    def _ended(self, i: int, output: RequestOutput) -> None:
        self.outputs.append(output)
        self._metrics.ended(output)
        self._left[i] -= 1
        if not self._left[i]:
            self._metrics.timed(self.streams[i].times, len(output.token_ids))

    async def _one(self) -> AsyncIterator[tuple[int, StreamEvent]]:
        async for event in self.streams[0]:
            yield 0, event

    async def _many(self) -> AsyncIterator[tuple[int, StreamEvent]]:
        """One read is pending of each stream, so that what nobody has asked for stays joined in its slot."""
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
    """Of what the bits of tokens depend on beside model, input and seed (`specrs.LLM.numerics`)."""
    told = json.dumps(numerics, sort_keys=True, default=str)
    return f"fp_{hashlib.sha256(told.encode()).hexdigest()[:16]}"
