"""Parts that the tests of kernels share: tensors between canaries, poisoned outputs, a noisy neighbour."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

CUDA = torch.device("cuda")
I32_MIN, I32_MAX = -(2**31), 2**31 - 1
PAD = 256  # bytes of a canary, so that what lies between is aligned
CANARY = 0xA5


class Canaries:
    """Makes tensors with canaries around them, and says whether all of them live."""

    def __init__(self) -> None:
        self.held: list[tuple[torch.Tensor, int]] = []

    def empty(self, *shape: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """Poison of all ones (NaN, -1) between canaries, `offset` bytes behind a multiple of 256."""
        size = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
        raw = torch.full((PAD + offset + size + PAD,), CANARY, dtype=torch.uint8, device=CUDA)
        raw[PAD + offset : PAD + offset + size] = 0xFF
        self.held.append((raw, PAD + offset))
        return raw[PAD + offset : PAD + offset + size].view(dtype).view(shape)

    def of(self, values: Any, dtype: torch.dtype = torch.int32, offset: int = 0) -> torch.Tensor:
        """A copy of `values` between canaries."""
        source = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
        made = self.empty(*source.shape, dtype=source.dtype, offset=offset)
        made.copy_(source)
        return made

    def check(self) -> None:
        """Every canary is as it was."""
        torch.cuda.synchronize()
        for raw, first in self.held:
            assert bool((raw[:first] == CANARY).all()) and bool((raw[-PAD:] == CANARY).all())


def handle() -> int:
    """The raw current stream."""
    return torch.cuda.current_stream().cuda_stream


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bits and shape."""
    return got.shape == want.shape and got.dtype == want.dtype and torch.equal(bits(got), bits(want))


@contextlib.contextmanager
def neighbour() -> Iterator[None]:
    """A second stream that keeps the GPU busy, so that blocks start and end in another order."""
    side = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device=CUDA)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(60):
            a = (a @ a).clamp_(-1, 1)
    yield
    side.synchronize()


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """`a * b + c` rounded to float32 once, but for one double rounding in some hundred million."""
    return (a.double() * b.double() + c.double()).float()


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, 32 lanes, as a warp adds: halves onto each other."""
    for half in (16, 8, 4, 2, 1):
        x = x[..., :half] + x[..., half : 2 * half]
    return x[..., 0]
