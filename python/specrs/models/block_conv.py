"""The convolutions of a DFlash2 head: around attention and around the MLP of each layer, over the rows of a block.

Each mixes a row with those before it in its own block. The factors are those of the file and, for groups of columns,
some that follow from the row; so a block's later rows know of its earlier ones before attention.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specrs._specrs import Plan
from specrs.models.block_config import BlockConfig
from specrs.models.loader import Checkpoint
from specrs.models.ops import Linear, Ops


class BlockConv:
    """Both convolutions of a sublayer: of what it reads, and of what it adds to the residual stream."""

    def __init__(self, config: BlockConfig, weights: Checkpoint, ops: Ops, prefix: str) -> None:
        self._dense, self._name = ops.dense, f"{prefix}.kernel_projection"
        self._base = ops.placement.vector(weights.load(f"{prefix}.base_kernel")).contiguous()
        self._product = ops.dense.linear(weights.load(f"{self._name}.weight"))

    def products(self) -> Iterator[tuple[str, Linear]]:
        """Yield the product, with the name of its weight."""
        yield self._name, self._product

    def before(self, x: torch.Tensor, factors: torch.Tensor, plan: Plan, out: torch.Tensor) -> None:
        """Convolve the rows [Q, h] that the sublayer reads. ``factors`` is memory [Q, `BlockConfig.conv_factors`], in
        which `behind` finds the factors that follow from these rows."""
        self._product.forward(x, factors)
        self._dense.convolve(x, self._base[0], factors, 0, plan, out)

    def behind(self, y: torch.Tensor, factors: torch.Tensor, plan: Plan, x: torch.Tensor) -> None:
        """Add the convolved rows [Q, h] of what the sublayer gives to the residual stream x."""
        self._dense.convolve(y, self._base[1], factors, 1, plan, x, adds=True)
