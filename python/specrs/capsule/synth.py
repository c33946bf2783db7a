"""Makes keys, values and queries up: those of each token are a function of who wrote it and where, and of nothing else.

So two runs that place the same tokens in the same slots have the same pool, bit for bit, and any token found in a pool
says whose it is (`Tokens.name`): a write is told by what it left in memory, not by what a plan says about it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

KV_HEADS, HEADS, HEAD_DIM = 2, 4, 8
"""Sizes of the replay's one layer: grouped heads, and small, since placement does not depend on them."""
SCALE = HEAD_DIM**-0.5

_TOKEN = 2 * KV_HEADS * HEAD_DIM  # elements of a token's keys and values
_QUERY = HEADS * HEAD_DIM
_NOBODY = "nothing written"

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]


def _mix(x: Words) -> Words:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2714064.2660195)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = x ^ (x >> np.uint64(31))
    return mixed


def _uniform(keys: Words, width: int) -> Floats:
    """float32 [len(keys), width] in [-1, 1), row i a function of keys[i] alone."""
    with np.errstate(over="ignore"):
        words = keys[:, None] + np.arange(1, width + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    uniform: Floats = (_mix(words) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1.0)
    return uniform


def _keys(*numbers: int | npt.NDArray[np.int64]) -> Words:
    """One 64-bit key for each element of the broadcast numbers."""
    arrays = np.broadcast_arrays(*[np.atleast_1d(np.asarray(n, dtype=np.int64)) for n in numbers])
    key = np.zeros(arrays[0].shape, dtype=np.uint64)
    for a in arrays:
        with np.errstate(over="ignore"):
            key = _mix(key * np.uint64(0x2545F4914F6CDD1D) + a.astype(np.uint64) + np.uint64(0x632BE59BD9B4E019))
    return key


class Tokens:
    """The tokens that a replay has made so far, by name."""

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}

    def make(self, names: list[str], *numbers: int | npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, float32 [n, KV_HEADS, HEAD_DIM] each, of the tokens with these names; the numbers tell the
        tokens apart."""
        rows = _uniform(_keys(*numbers), _TOKEN)
        for name, row in zip(names, rows, strict=True):
            self._names[row.tobytes()] = name
        kv = torch.from_numpy(rows).view(-1, 2, KV_HEADS, HEAD_DIM)
        return kv[:, 0].contiguous(), kv[:, 1].contiguous()

    def name(self, row: Floats) -> str:
        """Return the name of the token whose keys and values are in the row of a slot."""
        if np.isnan(row).all():
            return _NOBODY
        return self._names.get(row.tobytes(), "a mixture of tokens")


def queries(*numbers: int | npt.NDArray[np.int64]) -> torch.Tensor:
    """Queries float32 [n, HEADS, HEAD_DIM], told apart by the numbers."""
    return torch.from_numpy(_uniform(_keys(*numbers), _QUERY)).view(-1, HEADS, HEAD_DIM)


def new_pool(slots: int) -> torch.Tensor:
    """Return a KV tensor [1, 2, slots, KV_HEADS, HEAD_DIM] of NaN: nothing is written, so that any read is seen."""
    return torch.full((1, 2, slots, KV_HEADS, HEAD_DIM), float("nan"))


def by_slot(pool: torch.Tensor) -> Floats:
    """A copy of a pool as one row for each slot, keys before values."""
    flat: Floats = pool[0].permute(1, 0, 2, 3).reshape(pool.shape[2], _TOKEN).numpy().copy()
    return flat


POOL_BYTES = 4 * _TOKEN
"""Bytes of a slot."""
