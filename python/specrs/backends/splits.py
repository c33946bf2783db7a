"""The parts of the keys that FlashAttention-3's operator works on apart, and the memory that it allocates for them."""

from __future__ import annotations

SPLITS = 64 << 20
"""Bytes of results over parts of the keys that a launch of the operator may allocate."""

_MOST_SPLITS = 128  # parts that the operator takes at most by its own choice


def num_splits(rows: int, heads: int, head_dim: int) -> int:
    """Return the operator's ``num_splits`` of a pass: the most parts of the keys whose results fit into `SPLITS` bytes.

    0, by which the operator chooses itself, where as many as it ever takes fit. Its own choice knows one request of
    a pass, and its results have room for all rows.

    Args:
        rows: rows of the pass, of all its requests.
        heads: query heads.
        head_dim: elements of a head.
    """
    most = SPLITS // (rows * heads * (head_dim + 1) * 4)  # a result in float32, and its sum of weights
    return 0 if most >= _MOST_SPLITS else max(most, 1)
