"""Turns the token file into shuffled rows of a fixed length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specrs.train.rows import pack

from .data import HELD_OUT


class Corpus:
    """The documents of `tokens.npz`; each begins with the BOS."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self.ids, self.offsets, self.kinds = file["ids"], file["offsets"], file["kinds"]

    def documents(self, held_out: bool) -> list[np.ndarray]:
        """Documents of one side of the split, in file order."""
        wanted = np.flatnonzero((self.kinds == HELD_OUT) == held_out)
        return [self.ids[self.offsets[i] : self.offsets[i + 1]] for i in wanted]


def shuffled(docs: list[np.ndarray], length: int, seed: int) -> Tensor:
    """Documents in a random order, end to end, cut into int64 rows [N, length]; every seed cuts elsewhere."""
    return pack(docs, length, np.random.default_rng(seed)).tokens


def batches(docs: list[np.ndarray], length: int, batch: int, total: int, device: torch.device) -> Iterator[Tensor]:
    """`total` batches [batch, length], repacking the documents for each pass over them."""
    done, epoch = 0, 0
    while done < total:
        rows = shuffled(docs, length, seed=epoch).to(device)
        epoch += 1
        for start in range(0, len(rows) - batch + 1, batch):
            if done == total:
                return
            done += 1
            yield rows[start : start + batch]
