"""Poison before a replay, and the checks after it.

Every element type has a pattern that no computation makes: a NaN with a payload of its own, or an integer far from any
index. Where an output still has it, nobody wrote; where memory outside of the bucket has lost it, somebody did.
"""

from __future__ import annotations

import math

import torch

from specrs._specrs import SpecrsError
from specrs.graph.regions import Region

# Type of the same size to write bits by, and the bits.
_PATTERNS = {
    torch.float32: (torch.int32, 0x7FD5A5A5),
    torch.float16: (torch.int16, 0x7ED5),
    torch.bfloat16: (torch.int16, 0x7FD5),
    torch.int32: (torch.int32, -0x2A5A5A5B),
    torch.int64: (torch.int64, -0x2A5A5A5A2A5A5A5B),
    torch.uint8: (torch.uint8, 0xD5),
}
_TELLING_BYTES = 8  # so many single bytes in a row are taken for the pattern


class SeatError(SpecrsError):
    """A replay left a seat that nobody wrote, or wrote one that is not its own.

    Attributes:
        region: name of the region.
        seat: number from 0; the bucket's size and more for memory behind it.
        bucket: seats of the graph, or of the eager run.
        batch: live seats.
        why: description of what was found.
    """

    def __init__(self, region: str, seat: int, bucket: int, batch: int, why: str) -> None:
        kind = "live" if seat < batch else "dead" if seat < bucket else "no"
        super().__init__(f"region {region!r}, seat {seat} ({kind} seat; {batch} of bucket {bucket} are live): {why}")
        self.region, self.seat, self.bucket, self.batch, self.why = region, seat, bucket, batch, why


def poison(memory: torch.Tensor) -> None:
    """Fill memory with its type's pattern, on torch's current stream."""
    bits, pattern = _PATTERNS[memory.dtype]
    memory.view(bits).fill_(pattern)


def _poisoned(memory: torch.Tensor, region: Region) -> torch.Tensor:
    """Return for each row [rows, ...] whether an element of it holds the pattern; for bytes, whether all elements of
    the row do."""
    bits, pattern = _PATTERNS[memory.dtype]
    same = (memory.view(bits) == pattern).view(memory.shape[0], -1)
    if memory.dtype != torch.uint8:
        return same.any(1)
    if math.prod(region.seat_shape[1:]) >= _TELLING_BYTES:
        return same.all(1)
    # Short rows of bytes may hold it by chance: all of them do not.
    return same.all().expand(memory.shape[0])


def check_output(memory: torch.Tensor, region: Region, bucket: int, batch: int) -> None:
    """Raise SeatError for the first seat that nobody wrote, and for a dead one that lacks its declared value.

    Args:
        memory: memory of the bucket, rows behind the seats included.
    """
    row = _first(_poisoned(memory, region)) if memory.numel() else None
    if row is not None:
        raise SeatError(region.name, row // region.rows_per_seat, bucket, batch, "nobody wrote it")
    check_dead(memory, region, bucket, batch, "the body left")


def check_dead(memory: torch.Tensor, region: Region, bucket: int, batch: int, who: str) -> None:
    """Raise SeatError for the first dead seat that does not hold the declared value."""
    if region.dead is None:
        return
    begin, end = region.rows(batch), region.rows(bucket)
    found = memory[begin:end]
    if not found.numel():
        return
    want = torch.full_like(found, region.dead)
    other = (found != want) & ~(found.isnan() & want.isnan())  # two NaN are one value
    row = _first(other.view(end - begin, -1).any(1))
    if row is not None:
        seat = batch + row // region.rows_per_seat
        value = found[row].flatten()[:4].tolist()
        raise SeatError(region.name, seat, bucket, batch, f"{who} {value}, its dead value is {region.dead}")


def check_outside(memory: torch.Tensor, region: Region, bucket: int, batch: int) -> None:
    """Raise SeatError for the first row behind the bucket's that is written.

    Args:
        memory: memory of the largest bucket.
    """
    bits, pattern = _PATTERNS[memory.dtype]
    begin = region.rows(bucket) + region.more
    behind = memory[begin:]
    if not behind.numel():
        return
    row = _first((behind.view(bits) != pattern).view(behind.shape[0], -1).any(1))
    if row is not None:
        seat = (begin + row) // region.rows_per_seat
        raise SeatError(region.name, seat, bucket, batch, "written by a graph that has no such seat")


def _first(rows: torch.Tensor) -> int | None:
    """The first that is true; the host waits."""
    found = rows.nonzero()
    return int(found[0]) if found.numel() else None
