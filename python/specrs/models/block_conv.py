"""The convolutions of a DFlash2 head: around attention and around the MLP of each layer, over the rows of a block.

Each mixes a row with those before it in its own block. The kernel is that of the file and, for groups of columns, one
that follows from the row; so a block's later rows know of its earlier ones before attention.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specrs.models.block_config import BlockConfig
from specrs.models.loader import Checkpoint
from specrs.models.ops import Linear, Ops


class BlockConv:
    """Both convolutions of a sublayer: of what it reads, and of what it adds to the residual stream."""

    def __init__(self, config: BlockConfig, weights: Checkpoint, ops: Ops, prefix: str) -> None:
        assert config.conv is not None
        self._sizes, self._name, self._at = config.conv, f"{prefix}.kernel_projection", ops.placement
        self._base = ops.placement.vector(weights.load(f"{prefix}.base_kernel"))
        self._product = ops.dense.linear(weights.load(f"{self._name}.weight"))

    def products(self) -> Iterator[tuple[str, Linear]]:
        """Yield the product, with the name of its weight."""
        yield self._name, self._product

    def kernels(self, x: torch.Tensor) -> torch.Tensor:
        """Return both kernels of rows [Q, h] that the sublayer reads, before its convolution: [2, Q, taps, h]."""
        of_groups = self._at.empty(x.shape[0], self._product.out_features)
        self._product.forward(x, of_groups)
        size = self._sizes
        each = of_groups.view(x.shape[0], 2, size.taps, -1).repeat_interleave(size.group, -1)
        return each.transpose(0, 1) + self._base[:, None]

    def convolve(self, x: torch.Tensor, kernel: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the convolved rows.

        Args:
            x: [Q, h].
            kernel: [Q, taps, h], one of `kernels`.
            places: int64 [Q], place of each row in its block.
        """
        y = x * kernel[:, 0]
        for tap in range(1, self._sizes.taps):
            before = x.roll(tap, 0).masked_fill_((places < tap)[:, None], 0.0)
            y += before * kernel[:, tap]
        return y
