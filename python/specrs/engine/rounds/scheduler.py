"""The choice of requests that run next: admission, chunked prefill, waiting for pages, and preemption.

Requests join and finish independently. A request is admitted when a row of the page table is free. If the pool runs
out of pages, prefill waits for running requests to finish. If running requests cannot get the pages of their next
round, the request that was admitted last is preempted: it gives its pages back and starts over later. A preempted
request loses time but no tokens: its prompt and output are prefilled again, to the same bits.

Every step makes progress, because the request that was admitted first always gets its pages: a request that could not
run alone is refused when it is added, and pages that only the prefix cache holds can always be evicted.

A request's priority comes before the order of admission: the lowest number is admitted first and preempted last.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from specrs._specrs import PoolExhaustedError
from specrs.engine.request.request import Passed, Request, StreamEvent
from specrs.engine.rounds.runner import Runner
from specrs.engine.rounds.stats import EngineStats
from specrs.engine.rounds.waiting import WaitingQueue


class Scheduler:
    """Steps requests through prefill and decoding rounds.

    Attributes:
        prefilled: tokens of prompts that were prefilled so far; tokens read again after a preemption count again.
        generated: tokens that outputs kept so far.
        preempted: times so far that a request gave its pages back.
        passing: requests of the pass that runs. After an error, requests of the pass that failed; empty if the error
            came from elsewhere.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._waiting = WaitingQueue()
        self._admitted: list[Request] = []  # sorted by priority, then in order of admission
        self._asked: dict[int, dict[int, Request]] = {}  # requests that wait or run, by asked id and index
        self._arrived = 0
        self._passed: list[Passed] = []  # results whose events are not noted yet
        self._news: list[StreamEvent] = []  # events of this step; after an error, the next step returns them
        self.prefilled = self.generated = self.preempted = 0
        self.passing: list[Request] = []

    @property
    def unfinished(self) -> int:
        """Requests that wait or run, or whose output no step has returned yet."""
        return len(self._waiting) + len(self._admitted) + sum(e.output is not None for e in self._news)

    @property
    def running(self) -> list[Request]:
        """Requests that have a row of the page table."""
        return list(self._admitted)

    @property
    def waiting(self) -> list[Request]:
        """Requests without a row, new or preempted, in the order in which they will be admitted."""
        return list(self._waiting)

    def stats(self, pool: Mapping[str, int], draft_bytes: int) -> EngineStats:
        """Return figures of the requests that run and wait, and counts since the beginning.

        Args:
            pool: the pool's counts.
            draft_bytes: memory that the sources of drafts hold.
        """
        return EngineStats.of(
            len(self._admitted), len(self._waiting), self._waiting.tokens, pool, prefilled=self.prefilled,
            generated=self.generated, preempted=self.preempted, draft_bytes=draft_bytes,
        )  # fmt: skip

    def check(self, request: Request) -> None:
        """Refuse a request that the pool could not hold even alone.

        Raises:
            PoolExhaustedError: the request needs more pages than the pool has; the message has both numbers.
        """
        config, most = self._runner.config, self._runner.pages.most_positions(request)
        need = -(-most // config.page_size)
        if need > (config.num_pages or 0):
            raise PoolExhaustedError(
                f"a request of up to {request.ending.max_total} tokens needs {need} pages of {config.page_size} tokens "
                f"for itself; the pool has num_pages = {config.num_pages}"
            )

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._arrived += 1
        request.arrival = self._arrived
        self._asked.setdefault(request.asked_id, {})[request.index] = request
        self._waiting.add(request)

    def abort(self, request_id: int) -> list[StreamEvent]:
        """End every output of a request early.

        Returns:
            One event for each output; it carries the text and tokens that no step has returned yet.
        """
        outputs = self._asked.get(request_id, {})
        runs = any(r not in self._waiting for r in outputs.values())
        self._tell(self._runner.collect() if runs else ())  # pages stay leased while rounds are in flight
        news = [e for e in self._news if e.request_id == request_id]
        if news:
            self._news = [e for e in self._news if e.request_id != request_id]
        for request in list(outputs.values()):  # outputs that did not end in the collected rounds
            if request in self._waiting:
                self._waiting.remove(request)
            else:
                self._admitted.remove(request)
            pieces = request.abort()
            self._end(request)
            news.append(StreamEvent(request_id, [], pieces, request.output(), request.index))
        each = [[e for e in news if e.index == i] for i in sorted({e.index for e in news})]
        return [event for events in each if (event := StreamEvent.joined(events)) is not None]

    def step(self) -> list[StreamEvent]:
        """Admit requests, prefill one chunk, and run one round.

        An error leaves every request as it was before the failed pass. The results of earlier passes of the failed
        step come with the next step, or with `abort`.
        """
        self.passing = []
        self._tell(())
        self._admit()
        prefilled = self._prefill()
        # Do this before the round, which may fail or preempt: requests that ended in prefill give their pages back.
        self._tell(prefilled)
        new = {id(p.request) for p in prefilled}
        ready = [r for r in self._admitted if r.ready and id(r) not in new]  # new ones have had a token
        if ready:
            # Requests that are in prefill, or finished it in this step, join only when no round is in flight.
            stays = len(ready) == len(self._admitted)
            self._tell(self._with_pages(ready, partial(self._runner.round, stays=stays)))
        self._runner.warn()
        news, self._news = self._news, []
        return news

    def _admit(self) -> None:
        while len(self._admitted) < self._runner.config.max_batch:
            request = self._waiting.first()
            if request is None:
                return
            self._runner.admit(request)
            # A request joins others only if a round of all of them fits. Otherwise a request that was preempted for
            # lack of pages would come back at once. It is admitted before the check, so that shared pages count once.
            if self._admitted and not self._runner.pages.has_room([*self._admitted, request]):
                self._runner.release(request)
                return
            self._waiting.remove(request)
            request.started = request.started or time.perf_counter()
            insort(self._admitted, request, key=_priority)  # behind requests of the same priority

    def _prefill(self) -> list[Passed]:
        budget = self._runner.config.prefill_chunk
        scored = max(self._runner.scored_rows - len(self._admitted), 1)
        chunks: list[tuple[Request, int]] = []
        for request in self._admitted:
            if not request.ready and budget > 0:
                n = min(request.prefill_target - request.committed, budget)
                if request.scored_rows(n):
                    if not scored:
                        continue
                    n = min(n, scored)
                    scored -= n
                chunks.append((request, n))
                budget -= n
        while chunks:
            self.passing = [r for r, _ in chunks]
            try:
                passed = self._runner.prefill(chunks)
                self.prefilled += sum(n for _, n in chunks)
                return passed
            except PoolExhaustedError:
                if len(chunks) > 1:
                    chunks.pop()  # the others may fit
                elif any(r.ready for r in self._admitted):
                    break  # running requests will free pages
                elif self._admitted[-1] is chunks[0][0]:
                    raise  # a request alone; `check` rules this out
                else:
                    self._preempt(self._admitted[-1])  # the request admitted last makes room for the first
        return []

    def _with_pages(self, reqs: list[Request], run: Callable[[Sequence[Request]], list[Passed]]) -> list[Passed]:
        while True:
            self.passing = list(reqs)
            try:
                return run(reqs)
            except PoolExhaustedError:
                last = self._admitted[-1]
                if len(self._admitted) == 1:
                    raise  # `check` rules this out
                self._preempt(last)
                reqs = [r for r in reqs if r is not last]
                if not reqs:
                    return []

    def _preempt(self, request: Request) -> None:
        self.preempted += 1
        self._admitted.remove(request)
        self._runner.release(request)
        self._waiting.add(request)

    def _end(self, request: Request) -> None:
        """Forget a request that has ended, and give its pages back."""
        outputs = self._asked[request.asked_id]
        del outputs[request.index]
        if not outputs:
            del self._asked[request.asked_id]
        self._runner.end(request)

    def _tell(self, passed: Sequence[Passed]) -> None:
        """Note the events of passes that have run, and end the requests that have finished.

        A second Ctrl-C may interrupt this, for example in a drafter's code. The next call then goes on.
        """
        self._passed += passed
        while self._passed:
            p = self._passed.pop(0)
            self.generated += p.kept
            try:
                if p.finished:
                    self._admitted.remove(p.request)
                    self._end(p.request)
            finally:
                self._news.append(p.request.event(p))


def _priority(request: Request) -> int:
    return request.params.priority
