"""Log-probabilities of tokens, from the target's row of logits, or from a sampler's processed scores.

Each row is reduced by itself, in float64 and in one fixed order, so the results depend only on the row's bits: the same
logits give the same log-probabilities with and without speculation, in any batch. A sampler's row depends only on the
logits and on the tokens before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specrs._specrs import Sampler

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a token at a position.

    Attributes:
        logprob: natural logarithm of the token's probability.
        rank: place of the token among all tokens, 1 for the most probable one; among equally probable tokens the lower
            id comes first.
        bytes: bytes of the token's text, which need not be whole characters; ``None`` without a tokenizer.
    """

    logprob: float
    rank: int
    bytes: bytes | None = None

    @property
    def decoded_token(self) -> str | None:
        """Text of the token; bytes that are no whole character become U+FFFD."""
        return None if self.bytes is None else self.bytes.decode("utf-8", "replace")


TokenLogprobs = dict[int, Logprob]
"""Scores at a position by token id: first the token at that position, then the most probable tokens in order."""


def of_rows(
    logits: torch.Tensor, tokens: Sequence[int], most: int, spell: TokenBytes | None = None
) -> list[TokenLogprobs]:
    """Score the token after each row of logits (float32 [n, vocab], on the host) and the ``most`` most probable
    ones."""
    return [of_row(row, token, most, spell) for row, token in zip(logits.numpy(), tokens, strict=True)]


def of_draws(
    logits: torch.Tensor, tokens: Sequence[int], most: int, sampler: Sampler, spell: TokenBytes | None = None
) -> list[TokenLogprobs]:
    """Score successive tokens by the distributions that ``sampler`` draws from; tokens of probability 0 are left
    out."""
    found, row = [], torch.empty(logits.shape[1])
    for i, (model, token) in enumerate(zip(logits, tokens, strict=True)):
        sampler.processed(model, row, list(tokens[:i]))
        best = of_row(row.numpy(), token, most, spell)
        found.append({t: one for t, one in best.items() if one.logprob > -math.inf or t == token})
    return found


def of_row(row: npt.NDArray[np.float32], token: int, most: int, spell: TokenBytes | None = None) -> TokenLogprobs:
    """Score a token and the ``most`` most probable tokens by a row of logits."""
    with np.errstate(invalid="ignore"):  # a result of NaN already shows what is wrong
        x = row.astype(np.float64)
        x -= x.max()
        x -= math.log(np.exp(x).sum())
        best = _best(row, most)
        more, same = int((row > row[token]).sum()), int((row[:token] == row[token]).sum())
    ranks = {token: more + same + 1}
    ranks.update((int(t), i + 1) for i, t in enumerate(best))
    return {t: Logprob(float(x[t]), rank, None if spell is None else spell(t)) for t, rank in ranks.items()}


def _best(x: npt.NDArray[np.float32], most: int) -> npt.NDArray[np.int64]:
    """Return the indices of the ``most`` largest values; among equal values the lower index comes first."""
    if not most:
        return np.empty(0, np.int64)
    if most < len(x):
        least = np.partition(x, len(x) - most)[len(x) - most]
        some = np.flatnonzero(x >= least)
    else:
        some = np.arange(len(x))
    return some[np.argsort(-x[some], kind="stable")][:most]
