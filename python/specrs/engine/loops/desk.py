"""Stands between the event loops of an `AsyncLLM` and its engine: which requests wait, and how news reaches their
readers."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from specrs._specrs import ConfigError
from specrs.engine.errors import EngineClosedError, EngineFailedError, EngineOverloadedError, StepFailedError
from specrs.engine.loops.process import EngineProcess
from specrs.engine.loops.worker import Abort, Add, Audit, News, Shutdown, Worker
from specrs.engine.prompts import Prompt
from specrs.engine.request.request import RequestOutput, StreamEvent, TokenizedPrompt
from specrs.engine.rounds.stats import RequestTimes
from specrs.sampling_params import SamplingParams

Engine = Worker | EngineProcess
_SLICE = 16  # readers that a loop wakes in one turn: with 0.1 ms of work each, its timers are late by 2 ms


@dataclass(eq=False)
class Slot:
    """State of one request for its reader. Only the reader's loop touches fields that are not said to be the desk's.

    Attributes:
        loop: event loop of the reader.
        times: times of the request, as last told.
        key, tokens, waits, sent: fields of the desk: the request's number, the tokens of its prompt, whether it counts
            as waiting, whether the engine knows of it.
        held: a grammar, until the engine has the request.
        outputs: outputs that ended, by index.
        over: set at the end.
    """

    loop: asyncio.AbstractEventLoop
    times: RequestTimes
    key: int
    tokens: int = 0
    waits: bool = False
    sent: bool = False
    held: Any = None
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    _events: dict[int, list[StreamEvent]] = field(default_factory=dict)  # keyed by the output's index
    _answer: Any = None
    _error: Exception | None = None
    _told: bool = False
    _known: bool = False  # true once the engine knows the request
    _ended: bool = False
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, news: News) -> None:
        """Take news from the worker. Events that wait are joined, so that there are few: each at least twice the
        next."""
        if self._ended:
            return  # no reader
        self._told, self.held = True, None
        if news.times is not None:
            self._known, self.times = True, news.times
        self._answer, self._error = news.answer, news.error
        told = news.error if isinstance(news.error, StepFailedError) else news.event
        if told is not None and told.output is not None:
            self.outputs[told.output.index] = told.output
        if news.event is not None:
            events = self._events.setdefault(news.event.index, [])
            events.append(news.event)
            while len(events) > 1 and len(events[-2].token_ids) < 2 * len(events[-1].token_ids) + 1:
                joined = StreamEvent.joined(events[-2:])
                assert joined is not None
                events[-2:] = [joined]
        if news.last:
            self._end()
        self._wake.set()

    def end(self) -> None:
        """Drop everything: nobody reads any more."""
        self._events.clear()
        self._error = None
        self._end()
        self._wake.set()

    def _end(self) -> None:
        self._ended = True
        self.over.set()

    async def taken(self) -> None:
        """Wait until the engine has the request; raise the reason if it has not. Later errors of the request are raised
        to its reader."""
        while not self._told:
            await self._wake.wait()
        if not self._known:
            self._fail()

    async def answered(self) -> Any:
        """Wait for the answer to a question."""
        await self.taken()
        return self._answer

    async def next(self) -> StreamEvent | None:
        """Return what came since the last event; ``None`` behind the end."""
        if asyncio.get_running_loop() is not self.loop:
            raise ConfigError("this stream belongs to another event loop: read it in the one that submitted it")
        while True:
            if self._events:
                return StreamEvent.joined(self._events.pop(next(iter(self._events))))
            self._fail()
            if self._ended:
                return None
            self._wake.clear()
            await self._wake.wait()

    def _fail(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


class Desk:
    """Stands between event loops and the worker, and knows which requests wait. Its methods may be called from any
    thread."""

    inbox: Any  # inbox of the worker, or of the process

    def __init__(self) -> None:
        self._lock = Lock()
        self._slots: dict[int, Slot] = {}
        self._next = 0
        self.waiting = self.waiting_tokens = 0
        self.closing = False
        self._process = os.getpid()
        self._hands: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Hand] = weakref.WeakKeyDictionary()

    def reserve(self, loop: asyncio.AbstractEventLoop, times: RequestTimes, most: int, worker: Engine) -> Slot:
        """A place in the queue."""
        self._check_process()
        with self._lock:
            self._check(worker)
            if self.waiting >= most:
                raise EngineOverloadedError("requests", self.waiting + 1, most)
            slot = self._new(loop, times)
            slot.waits = True
            self.waiting += 1
            return slot

    def queue(self, slot: Slot, prompt: Prompt, params: SamplingParams | None, began: float, most: int) -> None:
        """Hand the request to the worker."""
        tokens = len(prompt.token_ids if isinstance(prompt, TokenizedPrompt) else prompt)
        with self._lock:
            if self.closing:
                raise EngineClosedError
            if self.waiting_tokens and self.waiting_tokens + tokens > most:
                raise EngineOverloadedError("prompt tokens", self.waiting_tokens + tokens, most)
            slot.tokens, slot.sent = tokens, True
            self.waiting_tokens += tokens
            self.inbox.put(Add(slot.key, prompt, params, began))

    def ask(self, loop: asyncio.AbstractEventLoop, worker: Engine) -> Slot:
        """Ask for an audit."""
        self._check_process()
        with self._lock:
            self._check(worker)
            slot = self._new(loop, RequestTimes(time.perf_counter()))
            self.inbox.put(Audit(slot.key))
            return slot

    def lose(self, error: BaseException | None) -> None:
        """Note that the engine is gone, for this reason or the one that was told; everybody who still waits gets the
        error."""
        with self._lock:
            keys = list(self._slots)
        self.tell([News(k, error=EngineClosedError() if error is None else EngineFailedError(error)) for k in keys])

    @property
    def forked(self) -> bool:
        """True if this is not the process that made the engine, but a fork, which lacks the engine's thread."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        """Refuse a fork, where nobody would answer. Takes no lock, which another thread may have held at the fork."""
        if self.forked:
            why = f"process {os.getpid()} is a fork of {self._process}, which alone has the engine's thread"
            raise EngineFailedError(RuntimeError(why))

    def _check(self, worker: Engine) -> None:
        if self.closing:
            raise EngineClosedError
        if worker.fatal is not None:
            raise EngineFailedError(worker.fatal)

    def _new(self, loop: asyncio.AbstractEventLoop, times: RequestTimes) -> Slot:
        self._next += 1
        slot = self._slots[self._next] = Slot(loop, times, self._next)
        return slot

    def abort(self, slot: Slot) -> None:
        """End a request; its outcome is told."""
        if slot.key in self._slots:
            self.inbox.put(Abort(slot.key))

    def leave(self, slot: Slot) -> None:
        """End a request that nobody reads any more."""
        with self._lock:
            known = self._slots.pop(slot.key, None) is not None
            if known:
                self._enters(slot)
        if known and slot.sent:
            self.inbox.put(Abort(slot.key))

    def _enters(self, slot: Slot) -> None:
        """Count a request as no longer waiting."""
        if slot.waits:
            slot.waits = False
            self.waiting -= 1
            self.waiting_tokens -= slot.tokens

    def close(self, wait: float) -> None:
        """Take nothing more; the worker ends after so many seconds."""
        with self._lock:
            self.closing = True
            self.inbox.put(Shutdown(time.monotonic() + wait))

    def tell(self, news: list[News]) -> None:
        """Hand every loop the news of its requests, in one call each. For the worker's thread."""
        hands: dict[asyncio.AbstractEventLoop, list[tuple[Slot, News]]] = defaultdict(list)
        with self._lock:
            for one in news:
                slot = self._slots.get(one.key)
                if slot is None:
                    continue
                if one.last or (one.times is not None and one.times.admitted is not None):
                    self._enters(slot)
                if one.last:
                    del self._slots[one.key]
                hands[slot.loop].append((slot, one))
        for loop, some in hands.items():
            try:
                loop.call_soon_threadsafe(self._hands.setdefault(loop, _Hand()).take, some)
            except RuntimeError:  # the loop is closed, and whoever read in it is gone
                for slot, _ in some:
                    self.leave(slot)


class _Hand:
    """Hands one loop its news, a slice in each of its turns.

    Every hand wakes a reader, whose work a loop does before it looks at timers and sockets again: a step of hundreds of
    requests, handed over at once, would hold all else up for as long as all their readers take.
    """

    def __init__(self) -> None:
        self._news: deque[tuple[Slot, News]] = deque()  # in the order in which the worker told it
        self._handing = False

    def take(self, some: Iterable[tuple[Slot, News]]) -> None:
        """Take news, on the loop."""
        self._news.extend(some)
        if not self._handing:
            self._handing = True
            self._slice()

    def _slice(self) -> None:
        for _ in range(min(_SLICE, len(self._news))):
            slot, news = self._news.popleft()
            slot.put(news)
        if self._news:
            asyncio.get_running_loop().call_soon(self._slice)
        else:
            self._handing = False
