"""The queue of requests that have no row of the page table."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from specrs.engine.request.request import Request

_Entry = tuple[int, int, int, Request]
_SPARE = 16  # stale entries that are not worth a clean-up


class WaitingQueue:
    """Requests by priority, then in order of arrival. A preempted request comes before requests that arrived later.

    Adding a request costs O(log n). Removing a request costs O(1) amortised, wherever in the queue it is: its entry
    goes stale in the heap. Stale entries are dropped when they reach the front, or all at once when most entries are
    stale.

    Attributes:
        tokens: tokens of the prompts of all requests in the queue, and tokens that preempted requests had generated.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []  # every live entry, and stale entries
        self._live: dict[int, _Entry] = {}  # the live entries, by request id
        self._serial = count()  # numbers the entries, so that a comparison never gets to the requests
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._live

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._live.values()))

    def add(self, request: Request) -> None:
        """Queue a request. Its tokens must not change while it is in the queue."""
        entry = (request.params.priority, request.arrival, next(self._serial), request)
        self._live[request.request_id] = entry
        heappush(self._heap, entry)
        self.tokens += len(request.tokens)

    def remove(self, request: Request) -> None:
        """Take a request out of the queue. Raises KeyError if it is not in the queue."""
        del self._live[request.request_id]
        self.tokens -= len(request.tokens)
        if len(self._heap) > 2 * len(self._live) + _SPARE:
            self._heap = list(self._live.values())
            heapify(self._heap)

    def first(self) -> Request | None:
        """Return the first request that is not held, without taking it out; ``None`` if there is none."""
        held: list[_Entry] = []
        found = None
        while self._heap and found is None:
            entry = self._heap[0]
            if self._live.get(entry[-1].request_id) is not entry:
                heappop(self._heap)
            elif entry[-1].held:
                held.append(heappop(self._heap))
            else:
                found = entry[-1]
        for entry in held:
            heappush(self._heap, entry)
        return found
