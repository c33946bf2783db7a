"""``specrs.AsyncLLM``: an engine for programs that live in event loops.

A `Worker` thread owns the `LLM`, here or in a process of its own. Event loops put requests into its inbox; once a step
it hands each loop everything that is new in one call. A reader that is slow finds the deltas of several steps merged
into one event, so nothing piles up but the request's own tokens. The queue for the engine is bounded; requests beyond
the bound are refused before they start.
"""

from __future__ import annotations

import asyncio
import atexit
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from numbers import Real
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Any, TypeVar

from specrs._specrs import ConfigError
from specrs.chat import ChatTemplates, Messages
from specrs.engine.errors import EngineClosedError
from specrs.engine.llm import LLM
from specrs.engine.loops.desk import Desk, Engine, Slot
from specrs.engine.loops.process import EngineProcess, RemoteLLM
from specrs.engine.loops.worker import Shutdown, StepWatch, Worker
from specrs.engine.prompts import Prompt
from specrs.engine.request.request import RequestOutput, StreamEvent, TokenizedPrompt
from specrs.engine.rounds.stats import RequestTimes, ServingStats
from specrs.engine_options import LLMOptions
from specrs.models import LiveModel
from specrs.sampling_params import SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Unpack

_T = TypeVar("_T")
_GRACE = 30.0  # seconds for a process that was killed to be gone
_LONGEST = TIMEOUT_MAX / 2  # longest wait for a thread, which Python bounds
_AT_EXIT = 5.0  # seconds that the end of the process waits for the step that runs
_RUNNING: weakref.WeakSet[Engine] = weakref.WeakSet()


class AsyncLLM:
    """An `LLM` in a thread or a process of its own, for any number of event loops.

    Args:
        model: a model as `LLM` takes it; or an `LLM`, which nobody else may use until `aclose`, and which stays open
            then.
        draft, options: options as `LLM` takes them.
        process: true to give the engine a process of its own. Then event loops and the engine do not wait for each
            other's interpreter, and a crash of the engine does not end the event loops' process. A second start of
            Python is the price. The engine's process takes the number of threads that this process has.
        max_waiting: most requests that wait for a place in the batch.
        max_waiting_tokens: most prompt tokens of those; one request may always wait, whatever its length.
        pool_threads: number of threads that render conversations and tokenise.

    The model is loaded here, which takes as long as `LLM` takes: in a loop that others use, call it in a thread.

    Raises:
        ConfigError: limits below 1; a model in memory for another process; and what `LLM` raises.
        EngineProcessError: the engine's process ended while it loaded.

    Example:
        >>> async with AsyncLLM() as engine:
        ...     async for event in engine.generate("def fibonacci(n):"):
        ...         print(event.text, end="")
    """

    def __init__(
        self,
        model: str | Path | LLM | None = None,
        draft: str | Path | None = None,
        *,
        process: bool = False,
        max_waiting: int = 512,
        max_waiting_tokens: int = 1 << 20,
        pool_threads: int = 2,
        **options: Unpack[LLMOptions],
    ) -> None:
        limits = {"max_waiting": max_waiting, "max_waiting_tokens": max_waiting_tokens, "pool_threads": pool_threads}
        for name, value in limits.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} = {value!r}: must be an integer of at least 1")
        if isinstance(model, LLM):
            if draft is not None or options:
                given = ", ".join(["draft"] * (draft is not None) + list(options))
                raise ConfigError(f"{given}: the LLM that is handed over has its own")
            if model.lent:
                raise ConfigError("the LLM that is handed over belongs to another AsyncLLM, until that one's aclose")
            if model.unfinished:
                raise ConfigError(f"the LLM that is handed over has {model.unfinished} requests of its own")
        if not isinstance(process, bool):
            raise ConfigError(f"process = {process!r}: must be a bool")
        if process and isinstance(model, (LLM, LiveModel)):
            kind = type(model).__name__
            raise ConfigError(f"process = True: the {kind} that is handed over is in this process's memory")
        self._desk = desk = Desk()
        self._llm: LLM | RemoteLLM
        self._worker: Engine
        worker: Engine
        if process:
            self._worker = worker = apart = EngineProcess(
                {"model": model, "draft": draft, **options}, desk.tell, desk.lose
            )
            try:
                self._llm = RemoteLLM(apart)
            except BaseException:
                apart.kill()
                raise
        else:
            self._llm = llm = model if isinstance(model, LLM) else LLM(model, draft, **options)
            self._worker = worker = Worker(llm, desk.tell, close=llm is not model)
            llm._owner = worker.thread
        self._most, self._most_tokens = max_waiting, max_waiting_tokens
        self._pool = ThreadPoolExecutor(pool_threads, thread_name_prefix="specrs-prompts")
        desk.inbox = worker.inbox
        worker.thread.start()
        # An engine that nobody closes ends with the last object that refers to it, or with the process.
        _RUNNING.add(worker)
        self._finalizer = weakref.finalize(self, _abandon, worker)
        self._finalizer.atexit = False

    # -- requests -----------------------------------------------------------------------------------------------

    async def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestStream:
        """Queue a request, and return its stream once the engine has taken it.

        Args:
            prompt: a text, token ids, or what `chat_prompt` gives.
            params: the same as in `LLM.generate`.

        Raises:
            EngineOverloadedError: too much waits already; nothing was started.
            EngineClosedError: `aclose` was called.
            EngineFailedError: the engine cannot go on.
            ConfigError, PoolExhaustedError: the same errors as of `LLM.add`.
        """
        return await _taken(await self.enqueue(prompt, params))

    async def enqueue(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestStream:
        """Queue a request, and return its stream at once: `RequestStream.taken` tells whether the engine has taken it.

        From here on the engine may work on the request, so that whoever counts what it generates has the stream.

        Args:
            prompt, params: the same as in `submit`.

        Raises:
            EngineOverloadedError, EngineClosedError, EngineFailedError, ConfigError: the same errors as of `submit`, as
                far as they are known
            before the engine has seen the request.
        """
        ids = prompt.token_ids if isinstance(prompt, TokenizedPrompt) else prompt
        if isinstance(ids, (list, tuple)):
            return await self._enqueue(lambda: prompt, params, pooled=False)
        return await self._enqueue(lambda: self._llm._settled(prompt), params)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncGenerator[StreamEvent, None]:
        """A request's events; the last one has its ``output`` (of ``n``: the last of each `StreamEvent.index`).
        Leaving early, or being cancelled, aborts the request.

        An event may join those of several steps. A request that cannot go on raises nothing: its ``output`` has the
        ``error``. Raises what `submit` does, and what `RequestStream` does.
        """
        with closing(await self.submit(prompt, params)) as stream:
            async for event in stream:
                yield event

    async def complete(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """A request's whole output, as `LLM.generate` gives it. Being cancelled aborts it. Raises as `generate`."""
        async with await self.submit(prompt, params) as stream:
            return await stream.output()

    async def chat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[StreamEvent, None]:
        """Generate one conversation's answer as `generate` does; options are those of
        `specrs.chat.ChatTemplates.render`.

        Raises:
            ChatTemplateError: the same errors as of `LLM.chat`.
        """
        queued = await self._enqueue(lambda: self._llm.chat_prompt(messages, **options), params)
        with closing(await _taken(queued)) as stream:
            async for event in stream:
                yield event

    async def chat_prompt(self, messages: Messages, **options: Any) -> TokenizedPrompt:
        """Return what `LLM.chat_prompt` returns, worked out in the pool of threads."""
        return await self._pooled(lambda: self._llm.chat_prompt(messages, **options))

    async def encode(self, text: str) -> list[int]:
        """Return what `LLM.encode` returns, worked out in the pool of threads."""
        return await self._pooled(lambda: self._llm.encode(text))

    async def _pooled(self, work: Callable[[], _T]) -> _T:
        if self._desk.closing:
            raise EngineClosedError
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def _enqueue(
        self, make: Callable[[], Prompt], params: SamplingParams | None, pooled: bool = True
    ) -> RequestStream:
        began = time.perf_counter()
        slot = self._desk.reserve(asyncio.get_running_loop(), RequestTimes(began), self._most, self._worker)
        try:
            llm = self._llm
            if isinstance(llm, LLM) and isinstance(params, SamplingParams) and params.structured_outputs is not None:
                grammars, form = llm._grammars, params.structured_outputs
                slot.held = await self._pooled(lambda: grammars.held(form))  # compiled here, no step waits for it
            if isinstance(params, SamplingParams) and isinstance(params.prediction, str):
                asked = params
                params = await self._pooled(lambda: self._predicting(asked))
            prompt = await self._pooled(make) if pooled else make()
            self._desk.queue(slot, prompt, params, began, self._most_tokens)
        except BaseException:
            self._desk.leave(slot)
            raise
        return RequestStream(self, slot)

    def _predicting(self, params: SamplingParams) -> SamplingParams:
        """The same with a text that is expected made tokens, so that the engine's thread need not make them."""
        ids = self._llm._encode(str(params.prediction), "prompt: SamplingParams.prediction", special=False)
        return replace(params, prediction=ids[: self._llm.config.max_context_len])

    # -- the engine ---------------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """True if requests can be served: the engine's thread is there, and its device and ledger are sound."""
        return self._worker.thread.is_alive() and self._worker.fatal is None and not self._desk.closing

    def stats(self) -> ServingStats:
        """Return figures of the engine's work. Any thread may call this at any time, and waits for nothing."""
        worker, began = self._worker, self._worker.step_began
        return ServingStats(
            engine=worker.stats,
            submitted=self._desk.waiting,
            submitted_tokens=self._desk.waiting_tokens,
            steps=worker.steps,
            last_step=worker.last_step,
            stepping=0.0 if began is None else time.monotonic() - began,
            healthy=self.healthy,
        )

    @contextmanager
    def watching_steps(self, watch: StepWatch) -> Iterator[None]:
        """Within the context, call ``watch`` with each `Step` that read or wrote tokens, in a thread; ``watch`` must
        neither make it wait nor raise."""
        self._worker.watchers.append(watch)
        try:
            yield
        finally:
            self._worker.watchers.remove(watch)

    async def audit(self) -> dict[str, int]:
        """Run `LLM.audit` between two steps, after every abort that came before."""
        slot = self._desk.ask(asyncio.get_running_loop(), self._worker)
        found: dict[str, int] = await slot.answered()
        return found

    @property
    def chat_templates(self) -> ChatTemplates:
        """Chat templates of the model, as `LLM.chat_templates`."""
        return self._llm.chat_templates

    @property
    def llm(self) -> LLM | RemoteLLM:
        """The engine itself, for values that never change: `LLM.device`, `LLM.numerics`, `LLM.default_sampling`. Only
        the thread may step, add or abort; an engine in a process of its own lacks these calls here."""
        return self._llm

    def __repr__(self) -> str:
        return f"AsyncLLM({self._llm!r}, {'closed' if self._desk.closing else f'{self._desk.waiting} waiting'})"

    async def aclose(self, *, drain: bool = True, timeout: float = 30.0, grace: float = 30.0) -> None:
        """Refuse new requests, finish the present ones, free the engine.

        Args:
            drain: let requests run to their ends; else abort them.
            timeout: seconds for them to do so, at least 0; ``math.inf``: as long as they take. What runs then is
                aborted. Streams get the last events, with ``finish_reason`` ``"abort"``.
            grace: seconds beyond that for the step that runs, at least 0.

        Raises:
            ConfigError: an invalid timeout or grace; nothing was closed.
            TimeoutError: the step went on beyond the grace; the thread ends by itself once it is over. An engine's
                process is killed instead.
        """
        for name, seconds in (("timeout", timeout), ("grace", grace)):
            if isinstance(seconds, bool) or not isinstance(seconds, Real) or not seconds >= 0:
                raise ConfigError(f"{name} = {seconds!r}: must be a number of seconds, at least 0")
        if self._desk.forked:
            return  # this process does not have the engine
        wait = min(float(timeout), _LONGEST) if drain else 0.0
        self._desk.close(wait)
        thread = self._worker.thread
        await asyncio.get_running_loop().run_in_executor(None, thread.join, min(wait + grace, _LONGEST))
        if thread.is_alive() and isinstance(self._worker, EngineProcess):
            self.kill()  # the process hangs, and need not
            await asyncio.get_running_loop().run_in_executor(None, thread.join, _GRACE)
        if thread.is_alive():
            raise TimeoutError(f"the engine's step went on for {grace:g} seconds after the time to drain")
        self._finalizer.detach()
        self._pool.shutdown(wait=False)

    def kill(self) -> None:
        """Give the engine up at once, whatever it does: its requests get EngineFailedError.

        Its process ends. A thread cannot be ended from outside: it ends once its step is over.
        """
        if isinstance(self._worker, EngineProcess):
            self._worker.kill()
        else:
            self._desk.close(0.0)
            self._desk.lose(EngineClosedError())

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.aclose(drain=kind is None)


class RequestStream:
    """One request's events, for one event loop: ``async for``, or ``async with`` to be sure that it is aborted.

    Iterating raises `StepFailedError` where a pass of the request failed, and `EngineFailedError` where the engine
    cannot go on.
    """

    def __init__(self, engine: AsyncLLM, slot: Slot) -> None:
        self._engine, self._slot = engine, slot

    @property
    def times(self) -> RequestTimes:
        """Times at which the request came, left the queue, had its first token, ended; as far as it did."""
        return self._slot.times

    @property
    def outputs(self) -> list[RequestOutput]:
        """Outputs of the request's ``n`` that have ended so far, read or not. Where a pass failed, those that had ended
        by then."""
        return list(self._slot.outputs.values())

    @property
    def over(self) -> bool:
        """True if the request has ended, or the stream was closed."""
        return self._slot.over.is_set()

    async def taken(self) -> None:
        """Wait until the engine has the request. Raises as `AsyncLLM.submit`."""
        await self._slot.taken()

    async def ended(self) -> None:
        """Wait for the request's end, its abort's too, however it ends; its events need not be read."""
        await self._slot.over.wait()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamEvent:
        event = await self._slot.next()
        if event is None:
            raise StopAsyncIteration
        return event

    async def output(self) -> RequestOutput:
        """Wait for the request's end, and return its output; ``n`` of them are its `RequestOutput.outputs`.

        Raises:
            ConfigError: an event with the output has been read already.
        """
        found = {event.index: event.output async for event in self if event.output is not None}
        if 0 not in found:
            raise ConfigError("the stream's output has been read already")
        first, *others = (found[i] for i in sorted(found))
        return replace(first, others=tuple(others)) if others else first

    def abort(self) -> None:
        """End the request early. The stream goes on to its last event, whose output says ``"abort"``."""
        self._engine._desk.abort(self._slot)

    def close(self) -> None:
        """Leave the stream, and abort the request where it still runs. Closing again does nothing."""
        self._engine._desk.leave(self._slot)
        self._slot.end()

    async def aclose(self) -> None:
        """Close the stream, as `close` does."""
        self.close()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._engine._desk.abort(self._slot)  # takes no lock: the garbage collector runs anywhere


async def _taken(stream: RequestStream) -> RequestStream:
    """The stream, once the engine has its request."""
    try:
        await stream.taken()
    except BaseException:
        stream.close()
        raise
    return stream


def _abandon(worker: Engine) -> None:
    """End a worker whose engine nobody closed, and nobody can close any more."""
    worker.inbox.put(Shutdown(time.monotonic()))


@atexit.register
def _at_exit() -> None:
    """A thread within torch must not be there when the interpreter goes."""
    workers = list(_RUNNING)
    for worker in workers:
        _abandon(worker)
    for worker in workers:
        worker.thread.join(_AT_EXIT)
