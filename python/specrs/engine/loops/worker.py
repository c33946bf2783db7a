"""The thread that owns an `LLM`: it drains an inbox between steps, and once a step tells all news.

It knows nothing of event loops, nor of processes. It takes and gives plain values, which `process` carries to another
process and back.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from specrs import device
from specrs._specrs import LedgerError
from specrs.engine.errors import EngineBusyError, EngineClosedError, EngineFailedError, StepFailedError
from specrs.engine.request.request import FinishReason, Request, StreamEvent
from specrs.engine.rounds.stats import EngineStats, RequestTimes

if TYPE_CHECKING:
    from specrs.engine.llm import LLM
    from specrs.engine.prompts import Prompt
    from specrs.sampling_params import SamplingParams

_T = TypeVar("_T")
_DRAFT_BYTES = 64  # steps between two times of asking every drafting for its memory


@dataclass(frozen=True)
class Step:
    """Figures of one step.

    Attributes:
        began: start of the step, on the performance counter.
        seconds: duration of the step.
        tokens: number of tokens that the step read of prompts and wrote of outputs.
        gaps: for each output that went on, the seconds since it last did.
    """

    began: float
    seconds: float
    tokens: int
    gaps: list[float]


StepWatch = Callable[[Step], None]


@dataclass(frozen=True)
class Add:
    """Queue a request. key: of the sender's own; submitted: on the performance counter."""

    key: int
    prompt: Prompt
    params: SamplingParams | None
    submitted: float


@dataclass(frozen=True)
class Abort:
    """Ends a request, whose last event says so; does nothing if the request has ended."""

    key: int


@dataclass(frozen=True)
class Audit:
    """Check the page ledger, and answer with the pool's counts."""

    key: int


@dataclass(frozen=True)
class Shutdown:
    """Finishes requests that were added before, until a time on the monotonic clock; then ends the rest, and the
    thread."""

    until: float


@dataclass(slots=True)
class News:
    """News of one request, or the answer to one question. Each output of a step makes one, so that making it is cheap.

    Attributes:
        key: the sender's.
        times: times of the request so far, a copy; ``None``: unchanged.
        event: progress of the request; the last event has its output.
        error: error that ended the request or the question; nothing follows.
        answer: to a question.
        done: all of its outputs are there.
    """

    key: int
    times: RequestTimes | None = None
    event: StreamEvent | None = None
    error: Exception | None = None
    answer: Any = None
    done: bool = False

    @property
    def last(self) -> bool:
        """True if nothing follows for this key."""
        return self.done or self.error is not None or self.answer is not None


@dataclass
class _Live:
    """An entry that was added: the requests of its outputs, which share one id, and those of them that have not
    ended."""

    requests: list[Request]
    times: RequestTimes
    open: set[int]
    last: dict[int, float] = field(default_factory=dict)  # when each output had its last tokens

    @property
    def request_id(self) -> int:
        """Id of the request in events."""
        return self.requests[0].request_id

    def admit(self) -> bool:
        """Note when it left the queue, once it has; whether it has."""
        self.times.admitted = self.requests[0].started
        return self.times.admitted is not None


class Worker:
    """An engine and its thread.

    Args:
        llm: the engine, which from now on only the thread uses.
        tell: called once a step, by the thread, with all news, perhaps none; it must not wait, nor raise.
        close: true if the engine is closed at the end.
    """

    def __init__(self, llm: LLM, tell: Callable[[list[News]], None], close: bool) -> None:
        self._llm, self._tell, self._close = llm, tell, close
        self.inbox: queue.SimpleQueue[Add | Abort | Audit | Shutdown] = queue.SimpleQueue()
        self._live: dict[int, _Live] = {}  # keyed by request key
        self._keys: dict[int, int] = {}  # keyed by request id
        self._news: list[News] = []
        self._until: float | None = None  # once it shuts down
        #: The error that the engine cannot go on from; ``None`` while it can.
        self.fatal: BaseException | None = None
        self.stats: EngineStats = llm.stats()
        self.steps, self.last_step = 0, 0.0
        self.watchers: list[StepWatch] = []
        self._gaps: list[float] = []  # gaps of this turn
        self._stepped: float | None = None  # when the turn's step began, on the performance counter
        self.step_began: float | None = None  # on the monotonic clock, while one runs
        self.thread = threading.Thread(target=self._run, name="specrs-engine", daemon=True)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # a fault of this loop itself: nobody may wait for ever
            self._fail_all(error)
            self._flush()
            while self._until is None:
                self._take(self.inbox.get())
                self._flush()
        finally:
            if self._close:
                try:
                    _when_free(self._llm.close)
                except Exception as error:
                    self.fatal = self.fatal or error

    def _turn(self) -> bool:
        """Take messages, make a step, tell the news. Returns whether there is more to do."""
        self._listen()
        if self._until is not None and self._live and time.monotonic() >= self._until:
            for key in list(self._live):
                self._abort(key)
        if self._live and self.fatal is None:
            self._step()
        if self.fatal is None:
            before = self.stats
            lately = before.draft_bytes if self._live and self.steps % _DRAFT_BYTES else None
            self.stats = _when_free(lambda: self._llm._stats(lately))
            self._count(before, self.stats)
        self._flush()
        return self._until is None or bool(self._live)

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def _count(self, before: EngineStats, now: EngineStats) -> None:
        """Tell watchers what the turn's step read and wrote."""
        tokens = now.prefilled + now.generated - before.prefilled - before.generated
        gaps, self._gaps = self._gaps, []
        if tokens > 0 and self._stepped is not None:
            step = Step(self._stepped, self.last_step, tokens, gaps)
            for watch in self.watchers:
                watch(step)

    def _listen(self) -> None:
        """Take everything in the inbox; wait for a message if nothing runs."""
        wait = not self._live and self._until is None
        while True:
            try:
                message = self.inbox.get(block=wait)
            except queue.Empty:
                return
            self._take(message)
            wait = False

    def _take(self, message: Add | Abort | Audit | Shutdown) -> None:
        if isinstance(message, Add):
            self._add(message)
        elif isinstance(message, Abort):
            self._abort(message.key)
        elif isinstance(message, Audit):
            try:
                self._news.append(News(message.key, answer=_when_free(self._llm.audit)))
            except Exception as error:
                self._news.append(News(message.key, error=error))
        else:
            self._until = message.until

    def _add(self, message: Add) -> None:
        times = RequestTimes(message.submitted)
        if self.fatal is not None:
            self._news.append(News(message.key, error=EngineFailedError(self.fatal)))
            return
        if self._until is not None:
            self._news.append(News(message.key, error=EngineClosedError()))
            return
        try:
            requests = _when_free(lambda: self._llm._enqueue(message.prompt, message.params))
        except Exception as error:
            self._news.append(News(message.key, error=error))
            return
        live = self._live[message.key] = _Live(requests, times, {r.index for r in requests})
        self._keys[live.request_id] = message.key
        self._news.append(News(message.key, replace(times)))  # taken

    def _step(self) -> None:
        self.step_began = time.monotonic()
        began = self._stepped = time.perf_counter()
        try:
            events = _when_free(self._llm.step)
        except Exception as error:
            self._failed(error)
            return
        finally:
            self.step_began = None
            self.steps += 1
            self.last_step = time.perf_counter() - began
        now = time.perf_counter()
        told = {self._event(event, now) for event in events}
        for key, live in self._live.items():
            if live.times.admitted is None and live.admit() and key not in told:
                self._news.append(News(key, replace(live.times)))

    def _event(self, event: StreamEvent, now: float, error: Exception | None = None) -> int | None:
        """Tell a request's progress, and return its key; ``None`` if nobody knows the request."""
        key = self._keys.get(event.request_id)
        if key is None:
            return None
        live = self._live[key]
        times = live.times
        changed = times.admitted is None and live.admit()
        if event.token_ids:
            if times.first_token is None:
                times.first_token, changed = now, True
            last = live.last.get(event.index)
            live.last[event.index] = now
            if last is not None:
                self._gaps.append(now - last)
        done = False
        if event.output is not None or error is not None:
            live.open.discard(event.index)
            if error is not None:
                event = replace(event, output=None)
            done = error is not None or not live.open
            if done:
                times.finished, changed = now, True
                self._forget(key)
        self._news.append(News(key, replace(times) if changed else None, event, error, done=done))
        return key

    def _abort(self, key: int) -> None:
        """End a request. The result of a round in flight may fail first; then try once more."""
        if key not in self._live or self.fatal is not None:
            return
        now = time.perf_counter()
        for event in self._ended(self._live[key].request_id):
            self._event(event, now)

    def _ended(self, request_id: int) -> list[StreamEvent]:
        """The last events of all outputs of a request that ends now."""
        events: list[StreamEvent] = []
        for attempt in (1, 2):
            try:
                while (event := _when_free(lambda: self._llm.abort(request_id))) is not None:
                    events.append(event)
                return events
            except Exception as error:
                fault = self._fault(error)
                if fault is not None or attempt == 2:
                    self._fail_all(fault or error)
                    return []
        return events

    def _failed(self, error: Exception) -> None:
        """A step raised: the requests of the pass that failed end, and the others go on."""
        fault = self._fault(error)
        if fault is not None:
            self._fail_all(fault)
            return
        scheduler = self._llm._scheduler
        # No pass failed: the fault is common to all requests that run, or that would enter.
        for group in (scheduler.passing, scheduler.running, scheduler.waiting[:1]):
            ended = list(dict.fromkeys(r.asked_id for r in group if r.asked_id in self._keys))
            if ended:
                break
        else:
            self._fail_all(error)
            return
        for request_id in ended:
            events = self._ended(request_id)
            if self.fatal is not None:
                return
            # A request that had ended by itself, in an earlier pass of the step, has its end.
            sound = [e for e in events if e.output is not None and e.output.finish_reason is not FinishReason.ABORT]
            broken = [e for e in events if e not in sound] or [StreamEvent(request_id, [], [])][len(events) :]
            now = time.perf_counter()
            for event in sound:
                self._event(event, now)
            for event in broken[:1]:
                self._event(event, now, StepFailedError(error, event.output))

    def _fault(self, error: Exception) -> BaseException | None:
        """Return an error that the engine cannot go on from: pages that do not add up, or a CUDA context in which
        nothing runs any more."""
        if isinstance(error, LedgerError):
            return error
        return device.broken(self._llm.config.device)

    def _fail_all(self, error: BaseException) -> None:
        self.fatal = error
        for key in list(self._live):
            times = self._live[key].times
            self._forget(key)
            self._news.append(News(key, replace(times), error=EngineFailedError(error)))

    def _forget(self, key: int) -> None:
        del self._keys[self._live.pop(key).request_id]

    def _flush(self) -> None:
        news, self._news = self._news, []
        stepped, self._stepped = self._stepped is not None, None
        if news or stepped or self.fatal is not None:
            self._tell(news)


def _when_free(call: Callable[[], _T]) -> _T:
    """Return the result of a call that runs once nobody else is at the engine, such as an audit that its owner asks
    for."""
    while True:
        try:
            return call()
        except EngineBusyError:
            time.sleep(1e-3)
