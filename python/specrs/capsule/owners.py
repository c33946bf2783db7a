"""Names of the owners of each element, for each array of each format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specrs.capsule.names import Names, Owner, Query
from specrs.capsule.schema import Capsule
from specrs.capsule.static import Image, Phase

Show = Callable[[Any], str]

_SLOTS = ("kv_indices", "extend_slots", "out_slots")


class ArrayNames:
    """Owners of the arrays of one pass.

    Args:
        names: names of the round.
        capsule: the round.
        phase: phase of the pass.
        queries: queries of the pass, padding included.
        requests: requests of the batch that the pass has, in order.
        counts: queries of each.
        seen: in a draft step, the names of the draft slots that each query attends to, in the order of its list.
    """

    def __init__(
        self,
        names: Names,
        capsule: Capsule,
        phase: Phase,
        queries: Sequence[Query],
        requests: Sequence[int],
        counts: Sequence[int],
        seen: Sequence[Sequence[str]] = (),
    ) -> None:
        self._names, self._phase, self._queries = names, phase, queries
        self._requests, self._counts, self._seen = requests, counts, seen
        self._page_size = capsule.shape.page_size
        starts = {e.request: e.start for e in capsule.extend} if phase == "extend" else {}
        self._prefix = [starts.get(i, capsule.rows[i].committed) for i in requests]
        self._request_rows = [names.request(i) for i in requests]
        self._query_rows = [q.name for q in queries]

    def of_plan(self, name: str, width: int = 1) -> tuple[Owner, Show]:
        """Owners and values of an array of the plan itself; `width` elements a query."""
        if name in ("rows", "prefix_lens"):
            return self._names.of_requests(self._requests), str
        if name == "qo_indptr":
            return self._names.of_starts(self._request_rows), str
        return self._names.of_queries(self._queries, max(width, 1)), self._names.slot if name in _SLOTS else str

    def of(self, name: str, arrays: Mapping[str, Image], expand_page_size: int | None) -> tuple[Owner, Show]:
        """Owners and values of an array of a format."""
        if name in _SLOTS:
            show: Show = self._names.slot
        elif name == "page_table" or (name == "expand_page_table" and expand_page_size != 1):
            show = self._names.page
        else:
            show = self._names.slot if name == "expand_page_table" else str
        return self._owner(name, arrays), show

    def _owner(self, name: str, arrays: Mapping[str, Image]) -> Owner:
        by_query = self._phase in ("draft", "decode")
        rows = self._query_rows if by_query else self._request_rows
        if name in ("kv_indptr", "kv_last_page_len"):
            return self._names.of_starts(rows) if name == "kv_indptr" else self._of_rows(rows)
        if name in ("qo_indptr", "mask_indptr", "packed_mask_indptr", "cu_seqlens_q"):
            return self._names.of_starts(self._request_rows)
        if name == "expand_cu_seqlens_q":
            return self._names.of_starts(self._query_rows)
        if name in ("extend_slots", "expand_cache_seqlens"):
            return self._names.of_queries(self._queries)
        if name == "cache_seqlens":
            return self._names.of_requests(self._requests)
        if name == "page_table":
            return self._table(self._request_rows, arrays[name])
        if name == "expand_page_table":
            return self._table(self._query_rows, arrays[name])
        if name == "kv_indices":
            return self._names.of_lists(_starts(arrays, "kv_indptr"), rows, self._key)
        if name == "custom_mask":
            return self._names.of_lists(_starts(arrays, "mask_indptr"), self._request_rows, self._mask_cell)
        if name == "packed_custom_mask":
            return self._names.of_lists(_starts(arrays, "packed_mask_indptr"), self._request_rows, self._mask_byte)
        return lambda at: f"element {at}"

    @staticmethod
    def _of_rows(rows: Sequence[str]) -> Owner:
        return lambda at: rows[at] if at < len(rows) else f"row {at} (padding)"

    def _table(self, rows: Sequence[str], image: Image) -> Owner:
        columns = max(image.shape[-1], 1)

        def owner(at: int) -> str:
            row, column = divmod(at, columns)
            return f"{rows[row] if row < len(rows) else f'row {row} (padding)'}, column {column}"

        return owner

    def _request_of(self, row: int) -> int | None:
        """Index in the pass of the request that a row of `kv_indices` belongs to."""
        if self._phase not in ("draft", "decode"):
            return row if row < len(self._requests) else None
        request = self._queries[row].request if row < len(self._queries) else None
        return None if request is None else list(self._requests).index(request)

    def _key(self, row: int, entry: int) -> str:
        at = self._request_of(row)
        if at is None or entry < self._prefix[at]:
            return f"prefix position {entry}"
        own = entry - self._prefix[at]
        if self._phase != "draft":
            return f"{'node' if self._phase == 'verify' else 'new token'} {own}"
        seen = self._seen[row] if row < len(self._seen) else ()
        return f"draft of {seen[own]}" if own < len(seen) else f"entry {entry}"

    def _width(self, row: int) -> int:
        return self._prefix[row] + self._counts[row] if row < len(self._counts) else 1

    def _mask_cell(self, row: int, entry: int) -> str:
        node, key = divmod(entry, self._width(row))
        return f"node {node}, {self._key(row, key)}"

    def _mask_byte(self, row: int, entry: int) -> str:
        return f"bits from {self._mask_cell(row, 8 * entry)}"


def _starts(arrays: Mapping[str, Image], name: str) -> list[int]:
    image = arrays.get(name)
    return [] if image is None else [int(v) for v in image.values]
