"""Seeds of the outputs of a prompt that has several outputs (``SamplingParams.n``).

Output 0 draws with the request's seed, so that it equals the output of a request with ``n=1``. Output i > 0 draws with
words 0 and 1 (low and high) of Philox4x32-10 at counter ``(i, 1, 0, 0)``, keyed by the low and high words of the
request's seed. Tokens are drawn at counters ``(position, 0, 0, 0)``, so seeds and tokens never use the same random
numbers.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

_WORD = 2**32 - 1
_SPLIT = 1  # word 1 of the counter, which is 0 for tokens


def split(seed: int, index: int) -> int:
    """Return the seed of a prompt's output ``index``, 64 bits."""
    if index == 0:
        return seed
    low, high, _, _ = philox4x32_10((index, _SPLIT, 0, 0), (seed & _WORD, seed >> 32))
    return high << 32 | low


def philox4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the 32-bit words of ten rounds of Philox4x32."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _WORD, (a >> 32) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3
