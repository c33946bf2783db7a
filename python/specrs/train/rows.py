"""Documents end to end, in rows of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Tokens = NDArray[np.integer]


@dataclass(frozen=True)
class Rows:
    """Rows of text.

    Attributes:
        tokens: int64 [N, length].
        pieces: int64 [N, length]: a number for each piece, ascending. A piece is what a row has of one document.
    """

    tokens: Tensor
    pieces: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice | Tensor) -> Rows:
        return Rows(self.tokens[rows], self.pieces[rows])


def pack(docs: Sequence[Tokens], length: int, rng: np.random.Generator | None) -> Rows:
    """Return documents end to end, cut into rows; the end that fills no row is left out.

    Args:
        rng: puts documents and rows in a random order, and cuts elsewhere with every draw; ``None``: they stay in
            order, and the first row begins with the first.
    """
    docs = [docs[i] for i in rng.permutation(len(docs))] if rng is not None else docs
    stream = np.concatenate(docs)
    begins = np.zeros(len(stream), dtype=np.int64)
    begins[np.cumsum([0, *map(len, docs[:-1])])] = 1
    first = int(rng.integers(0, length)) if rng is not None else 0
    count = (len(stream) - first) // length
    cut = slice(first, first + count * length)
    of_rows = begins[cut].reshape(count, length)
    of_rows[:, 0] = 1
    pieces = of_rows.ravel().cumsum().reshape(count, length)
    tokens = stream[cut].reshape(count, length).astype(np.int64)
    rows = Rows(torch.from_numpy(tokens), torch.from_numpy(pieces))
    return rows if rng is None else rows[torch.from_numpy(rng.permutation(count))]


def anchors_of(rows: Rows, every: int, seed: Sequence[int]) -> Tensor:
    """Return int64 [N, length // every]: of each ``every`` places of a row one, at random by the seed."""
    count, length = rows.tokens.shape
    cells = length // every
    drawn = np.random.default_rng(list(seed)).integers(0, every, size=(count, cells))
    return torch.from_numpy(drawn + every * np.arange(cells))


@dataclass
class Stream:
    """Batches of rows without end: the model's answers, and of the user's text up to as much.

    What a batch holds is a function of the seed and its place, the pass and the batch within it.
    """

    answers: list[Tokens]
    text: list[Tokens]
    length: int
    batch: int
    seed: int
    at: tuple[int, int] = (0, 0)
    _packed: tuple[int, Rows] | None = None

    def next(self) -> Rows:
        """Return the next batch."""
        turn, batch = self.at
        rows = self._pass(turn)
        if (batch + 1) * self.batch > len(rows):
            turn, batch = turn + 1, 0
            rows = self._pass(turn)
        self.at = (turn, batch + 1)
        return rows[slice(batch * self.batch, (batch + 1) * self.batch)]

    def _pass(self, turn: int) -> Rows:
        if self._packed is None or self._packed[0] != turn:
            self._packed = (turn, self._laid(turn))
        return self._packed[1]

    def _laid(self, turn: int) -> Rows:
        rng = np.random.default_rng([self.seed, turn])
        docs = list(self.answers)
        room = max(sum(map(len, docs)), self.batch * self.length) if docs else sum(map(len, self.text))
        for i in rng.permutation(len(self.text)):
            if room <= 0:
                break
            docs.append(self.text[i])
            room -= len(self.text[i])
        # Little text is there several times, each time in another order: a pass has a batch at least.
        times = -(-(self.batch + 1) * self.length // sum(map(len, docs)))
        return pack(docs * times, self.length, rng)
