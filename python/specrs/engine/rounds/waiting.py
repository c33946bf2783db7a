"""The queue of requests that have no row of the page table."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from specrs.engine.request.request import Request

_Entry = tuple[int, int, int, Request]
_SPARE = 16  # stale entries that are not worth a clean-up


class WaitingQueue:
    """Requests by priority, then in order of arrival: what was preempted comes before what has arrived later.

    Adding one costs O(log n). Removing one costs O(1) amortised, wherever it stands: its entry goes stale in the heap,
    and stale entries are dropped at the front, or all at once where they are the greater part.

    Attributes:
        tokens: of all prompts that wait, and of what the preempted requests had generated.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []  # every live entry, and stale ones
        self._live: dict[int, _Entry] = {}  # by request id
        self._serial = count()  # of entries, so that comparing two never comes to their requests
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._live

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._live.values()))

    def add(self, request: Request) -> None:
        """Queue a request, whose tokens stay as they are meanwhile."""
        entry = (request.params.priority, request.arrival, next(self._serial), request)
        self._live[request.request_id] = entry
        heappush(self._heap, entry)
        self.tokens += len(request.tokens)

    def remove(self, request: Request) -> None:
        """Take a request out. Raises KeyError where it is not in the queue."""
        del self._live[request.request_id]
        self.tokens -= len(request.tokens)
        if len(self._heap) > 2 * len(self._live) + _SPARE:
            self._heap = list(self._live.values())
            heapify(self._heap)

    def first(self) -> Request | None:
        """The first request that is not held; it stays in the queue. ``None``: there is none."""
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
