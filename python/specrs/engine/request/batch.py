"""The batch of requests that travels through the passes of a step, as it was when a pass began."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specrs._specrs import Sequence as KvSequence
from specrs.engine.request.request import Request


class Batch:
    """The requests of a pass, in the order of its rows.

    Attributes:
        requests: at most ``max_batch`` requests, all different.
        seqs: the requests' rows of the page table.
        lens: committed positions of each request when the pass began, L.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        self.seqs: list[KvSequence] = [r.seq for r in requests]
        self.lens = [r.committed for r in requests]

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)
