"""Names of the owners of elements of arrays: requests, branches, steps, positions, and the owners of pages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specrs.capsule.schema import Capsule

Owner = Callable[[int], str]


@dataclass(frozen=True)
class Query:
    """One query of a phase: its request (None for padding) and its name."""

    request: int | None
    name: str


class Names:
    """Names of one replay of a capsule.

    Args:
        capsule: the round.
        pages: pages of each request under the lease.
    """

    def __init__(self, capsule: Capsule, pages: Sequence[Sequence[int]]) -> None:
        self._c = capsule
        self._pages = pages
        self._owners: dict[int, list[str]] = {}
        for page, owner in capsule.others:
            self._owners.setdefault(page, []).append(owner)
        for r, own in zip(capsule.rows, pages, strict=True):
            for page in own:
                self._owners.setdefault(page, []).insert(0, r.owner)
        self._columns = [{page: col for col, page in enumerate(own)} for own in pages]

    def request(self, i: int) -> str:
        """A request of the batch."""
        return f"request {i} ({self._c.rows[i].owner})"

    def page(self, page: int) -> str:
        """A page and who owns it."""
        if page == 0:
            return "page 0 (the sink)"
        owners = self._owners.get(page)
        return f"page {page} ({', '.join(owners) if owners else 'free'})"

    def slot(self, slot: int) -> str:
        """A slot: its page, who owns that, and the row position where a request of the batch has it."""
        p = self._c.shape.page_size
        page, offset = divmod(slot, p)
        if slot < 0 or page >= self._c.pool.num_pages:
            return f"slot {slot} (outside the pool)"
        where = [
            f"position {columns[page] * p + offset} of request {i}"
            for i, columns in enumerate(self._columns)
            if page in columns
        ]
        return f"slot {slot} ({', '.join([self.page(page), *where])})"

    def draft_queries(self, step: int, pad: int) -> list[Query]:
        """Queries of a draft step, padded to `pad`."""
        k = self._c.shape.topk
        live = [
            Query(i, f"{self.request(i)}, branch {b}, step {step}") for i in range(len(self._c.rows)) for b in range(k)
        ]
        return self._padded(live, pad)

    def draft_slots(self, bits: int) -> list[str]:
        """Return the names of the draft slots in a mask, in the order in which lists have them."""
        steps = self._c.shape.steps
        slots = range(self._c.shape.topk * steps)
        return [f"branch {slot // steps}, step {slot % steps}" for slot in slots if bits >> slot & 1]

    def verify_queries(self, pad: int) -> list[Query]:
        """Queries of verify, padded to `pad`."""
        live = [
            Query(i, f"{self.request(i)}, node {j}") for i, t in enumerate(self._c.trees) for j in range(len(t.parents))
        ]
        return self._padded(live, pad)

    def extend_queries(self, pad: int) -> list[Query]:
        """Queries of the draft model's pass over accepted tokens, padded to `pad`."""
        live = [
            Query(e.request, f"{self.request(e.request)}, position {p}")
            for e in self._c.extend
            for p in range(e.start, e.start + e.count)
        ]
        return self._padded(live, pad)

    @staticmethod
    def _padded(live: list[Query], pad: int) -> list[Query]:
        return live + [Query(None, f"padding, query {q}") for q in range(len(live), pad)]

    @staticmethod
    def of_queries(queries: Sequence[Query], width: int = 1) -> Owner:
        """Owners of an array with `width` elements a query."""
        return lambda at: queries[at // width].name if at // width < len(queries) else f"behind query {len(queries)}"

    def of_requests(self, requests: Sequence[int]) -> Owner:
        """Return the owners of an array with an element a request; `requests` are those of the batch that the phase
        has."""
        return lambda at: self.request(requests[at]) if at < len(requests) else f"request {at} (padding)"

    def of_starts(self, rows: Sequence[str]) -> Owner:
        """Owners of a CSR pointer over `rows`."""
        return lambda at: f"start of {rows[at]}" if at < len(rows) else f"end of the last of {len(rows)} rows"

    @staticmethod
    def of_lists(starts: Sequence[int], rows: Sequence[str], entry: Callable[[int, int], str]) -> Owner:
        """Owners of the entries of lists that begin at `starts`; `entry` names entry j of row z."""

        def owner(at: int) -> str:
            if not starts or at >= starts[-1]:
                return f"behind the lists of {len(rows)} rows"
            z = bisect_right(starts, at) - 1
            return f"{rows[z]}, {entry(z, at - starts[z])}" if 0 <= z < len(rows) else f"row {z}"

        return owner
