"""Draft heads as engines run them: what all of them have, and the passes of each kind.

A head of draft steps (`eagle3`) makes one level of drafts a pass, each from what the pass before it gave, or as a
P-EAGLE head all that follow the first in one pass over masks. A head of blocks (`block_head`) makes all levels in one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import torch

from specrs._specrs import Plan
from specrs.models.acceptance import Acceptance
from specrs.models.block_config import BlockConfig
from specrs.models.head_config import Eagle1Config, Eagle3Config
from specrs.models.ops import Dense, KvMemory, Linear
from specrs.models.path_heads import PathHead
from specrs.models.placement import Placement


class AnyHead(Protocol):
    """What every head has.

    Attributes:
        acceptance: expected acceptance of its drafts, by heat.
        aux_layers: layers of the target whose input is a feature.
        d2t: the number to add to each id of the draft vocabulary for the target's; ``None`` where both are one.
        target_ids: the sums.
        placement: its device and dtypes.
        dense: its operations.
    """

    acceptance: tuple[Acceptance, ...]
    aux_layers: tuple[int, ...]
    d2t: torch.Tensor | None
    target_ids: torch.Tensor
    placement: Placement
    dense: Dense

    @property
    def vocab_size(self) -> int:
        """Columns of the head's logits."""

    def new_cache(self, num_pages: int, page_size: int, dtype: torch.dtype | None = None) -> KvMemory:
        """Return memory for the KV of the head's own layers; its slots are those of the target's cache."""

    def products(self) -> Iterator[tuple[str, Linear]]:
        """Yield every product of the head, with the name of its weight."""


class StepDrafter(AnyHead, Protocol):
    """A head that drafts step by step; `specrs.models.eagle3.Eagle3Head` says what its passes do."""

    passes: Literal["steps"]
    config: Eagle1Config | Eagle3Config

    def extend(
        self,
        tokens: torch.Tensor,
        aux: Sequence[torch.Tensor],
        plan: Plan,
        kv: KvMemory,
        logit_rows: torch.Tensor | None = None,
        shift: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows whose features are the target's."""  # fmt: skip

    def write(self, tokens: torch.Tensor, aux: Sequence[torch.Tensor], plan: Plan, kv: KvMemory) -> torch.Tensor:
        """Rows of `extend` whose logits are not wanted."""

    def masked(self, plan: Plan, kv: KvMemory) -> torch.Tensor:
        """Rows of a P-EAGLE head that draft the levels behind the first."""

    def step(
        self, tokens: torch.Tensor, hidden: torch.Tensor, plan: Plan, kv: KvMemory
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft rows, whose features are the hidden states of the rows that they continue."""


class BlockDrafter(AnyHead, Protocol):
    """A head that drafts a block; `specrs.models.block_head.BlockHead` says what its passes do."""

    passes: Literal["block"]
    config: BlockConfig
    path_head: PathHead | None

    def block(self, token: int, rows: int) -> list[int]:
        """The tokens of a block of so many rows behind a request whose last token is ``token``."""

    def write(self, aux: Sequence[torch.Tensor], plan: Plan, kv: KvMemory) -> list[torch.Tensor]:
        """Keys and values of positions, in all layers, from the target's features of these."""

    def draft(
        self, tokens: torch.Tensor, plan: Plan, kv: KvMemory, logit_rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks, and the scores and rows of those that predict."""


Head = StepDrafter | BlockDrafter
"""A head of any kind, told apart by ``passes``."""
