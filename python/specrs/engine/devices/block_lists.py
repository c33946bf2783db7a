"""The lists of the levels of blocks that a GPU selects, and the sizes of the trees that it makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from specrs import _specrs as core
from specrs.engine.config import BlockEngineConfig
from specrs.engine.drafting.levels import LONGEST_BRANCH, drafted_levels
from specrs.models.block_head import BlockHead
from specrs.models.cuda import CudaDense
from specrs.models.eagle3 import Eagle3Head
from specrs.models.head import AnyHead
from specrs.operands import BeamArrays, ListArrays

Sizes = dict[str, tuple[str, int]]
"""Types of arrays and numbers of their elements, by name."""
Lists = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The likeliest ids of rows and their log-probabilities, [rows, width], and 0 for each row without a distribution."""

MOST_BLOCK_ROWS = 256  # limit of a pass that drafts all levels, so that logits take little; larger batches take several
_MOST_NODES = 64  # `MAX_LISTED` of src/device/kernels/tree_lists.rs, and the nodes of a mask's word
_MOST_LISTED = 32  # `MAX_BEAM_LIST` there
_MOST_CANDIDATES = 4096  # `MAX_DEVICE_CANDIDATES` of src/device/kernels/tree_build.rs
_VECTOR = 8  # elements of a vector of a table


class ListSelect:
    """The likeliest tokens of rows of logits, by the kernel that selects drafts, which takes each row for a request's
    root.

    Args:
        head: the head whose logits they are.
        width: tokens of a list.
        closed: True if no token has a chance but those that are listed.
    """

    def __init__(self, head: AnyHead, width: int, closed: bool = False) -> None:
        at, most, self.closed = head.placement.device, MOST_BLOCK_ROWS, closed
        self._dense, self._vocab = cast(CudaDense, head.dense), head.vocab_size
        self._shape = shape = core.TreeShape(width, 1, 2)

        def empty(columns: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(most, columns, dtype=dtype, device=at)

        self._scores, self._ids, self._sound = empty(width, torch.float32), empty(width), empty(1)
        self._parents, self._beams, self._bits = empty(width), empty(width), empty(width, torch.int64)
        self._tokens, self._from, self._found = empty(width), empty(width), empty(2 * width + 1)
        words = core._device_draft_scratch(shape, most, self._vocab, at.index)
        self._scratch = torch.zeros(words, dtype=torch.int64, device=at)

    def of(self, logits: torch.Tensor, heats: Sequence[float]) -> Lists:
        """Return the lists of up to `MOST_BLOCK_ROWS` rows, whose logits are multiplied by ``heats`` in place."""
        if any(heat != 1.0 for heat in heats):
            logits.mul_(torch.tensor(heats).pin_memory().to(logits.device, non_blocking=True)[:, None])
        self.launch(logits)
        return self.read(len(heats))

    def launch(self, logits: torch.Tensor) -> None:
        """Select from logits of up to `MOST_BLOCK_ROWS` rows. Nothing here waits or allocates."""
        rows, width = logits.shape[0], self._shape.topk
        scores, ids, sound = self._scores[:rows], self._ids[:rows], self._sound[:rows]
        beams = BeamArrays(
            scores=scores, candidate_tokens=ids, candidate_parents=self._parents[:rows], beams=self._beams[:rows],
            tokens=self._tokens.view(-1)[: rows * width], parents=self._from.view(-1)[: rows * width],
            ancestors=self._bits.view(-1, 1)[: rows * width], sound=sound.view(-1),
        )  # fmt: skip
        self._scratch[: rows // 2 + 1].zero_()  # counts of launches, which lie where a launch of fewer rows has lists
        self._dense.settle()
        core._device_draft_select(
            step=0, logits=logits, to_target=None, vocab=self._vocab, live=None, shape=self._shape, beams=beams,
            scratch=self._scratch, stream=self._dense.stream,
        )  # fmt: skip
        torch.cat((ids, scores.view(torch.int32), sound), 1, out=self._found[:rows])

    def read(self, rows: int) -> Lists:
        """Return the lists of the first rows that `launch` selected from, once they are there."""
        found, width = self._found[:rows].cpu(), self._shape.topk  # waits for all that was launched
        scores = found[:, width:-1].view(torch.float32)
        scores = scores.log_softmax(-1) if self.closed else scores.contiguous()
        return found[:, :width].contiguous(), scores, found[:, -1]

    def arrays(self, rows: int) -> ListArrays:
        """Return the memory of the lists of the first rows."""
        return ListArrays(
            scores=self._scores[:rows].view(-1), ids=self._ids[:rows].view(-1), sound=self._sound[:rows].view(-1)
        )


@dataclass(frozen=True)
class BlockTrees:
    """The sizes of a head's trees that a GPU makes, and what makes their lists.

    Attributes:
        select: selects the lists.
        rows: rows of a block, or masked rows of a request.
        levels: levels of a tree.
        width: most children of a node.
        listed: tokens of a list.
        nodes: most nodes of a tree.
        mask_token: the token of masked rows.
        skipped: rows before the one that predicts the first level; -1 if no row does.
        causal: True if a row attends to those before it alone.
        shape: of the beams; ``None`` if levels do not depend on the path.
        logits: memory for the logits of all levels of a batch, and int32, the row of each request's first level: of a
            P-EAGLE head, whose first level's and others' are of two passes. ``None`` of a head of blocks.
    """

    select: ListSelect
    rows: int
    levels: int
    width: int
    listed: int
    nodes: int
    mask_token: int
    skipped: int
    causal: bool
    shape: core.TreeShape | None = None
    logits: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(
        cls, head: BlockHead | Eagle3Head, config: BlockEngineConfig, geometry: core.Geometry, select: ListSelect,
        listed: int,
    ) -> BlockTrees | None:  # fmt: skip
        """Return those of an engine; ``None`` if the host makes its trees.

        It does if levels depend on more of the path than the token before, if a round has more blocks than one pass
        takes, if sizes are beyond those of the kernels, and if it merges trees of a fixed shape with other sources.
        Beams are not held to a spine, so that they have no more levels than exact attention takes on a branch.
        """
        levels, most = min(config.levels, config.head_shape.steps), geometry.shape.draft_tokens
        rows = head.config.block_size if isinstance(head, BlockHead) else levels - 1
        width, requests = min(config.width, head.vocab_size), config.max_batch
        fits = 0 < requests * max(rows, levels) <= MOST_BLOCK_ROWS and most <= _MOST_NODES
        if not rows or not fits or config.backend.format != "native" or (config.sources and not config.adaptive):
            return None
        if not isinstance(head, BlockHead):
            at, mask = head.placement, head.mask_token
            logits = at.for_logits().empty(requests * levels, head.vocab_size)
            firsts = torch.arange(0, requests * levels, levels, dtype=torch.int32, device=at.device)
            return cls(select, rows, levels, width, listed, config.nodes, mask, -1, True, logits=(logits, firsts))
        shape = None
        if head.path_head is not None:
            pairs = head.path_head.pairs
            if not (
                pairs is not None
                and pairs.rank % _VECTOR == 0
                and listed <= _MOST_LISTED
                and levels <= LONGEST_BRANCH
                and most - 1 <= _candidates(width, levels) <= _MOST_CANDIDATES
            ):
                return None
            shape = core.TreeShape(width, levels, most)
        skipped, c = 0 if head.config.anchor else 1, head.config
        return cls(select, rows, levels, width, listed, config.nodes, c.mask_token, skipped, c.causal, shape)

    def levels_of(self, depths: Sequence[int], shape: core.TreeShape, fixed: bool) -> int:
        """Return the levels of a round in which requests draft to these depths, which stand for the size of its trees.

        Args:
            shape: of the largest trees.
            fixed: True if trees are as the user fixed them: they have all of their nodes.
        """
        most = max(depths, default=0)
        if most:
            most = self.nodes - 1 if fixed else min(most, self.nodes - 1)
        return min(n for n in drafted_levels(shape, sized=True) if n >= most) if most else 0

    def regions(self, batch: int, most: int) -> Sizes:
        """Return the arrays of a bucket of ``batch`` requests.

        Args:
            most: most nodes of a verified tree.
        """
        return tree_regions(batch, self.rows, self.levels, most, None if self.shape is None else self.width)


def tree_regions(batch: int, rows: int, levels: int, most: int, beams: int | None) -> Sizes:
    """Return the arrays with which a bucket of ``batch`` requests makes trees.

    Args:
        rows: rows of a block.
        most: most nodes of a verified tree.
        beams: prefixes of a level; ``None`` if levels do not depend on the path.
    """
    regions = {
        "block offsets": ("int32", batch + 1),
        "block tokens": ("int32", batch * rows),
        "block masks": ("int64", batch * rows),
        "block wanted": ("int32", batch * levels),
        "block heats": ("float32", batch * levels),
        "block levels": ("int32", batch),
        "block nodes": ("int32", batch),
        "block rows": ("int32", batch),
        "block versions": ("int64", batch),
        "block qo_indptr": ("int32", batch + 1),
        "block prefix_lens": ("int32", batch),
        "block positions": ("int32", batch * rows),
        "block out_slots": ("int32", batch * rows),
        **built_regions(batch, most),
    }
    if beams is not None:
        words = -(-beams * levels // 64)
        regions |= beam_regions(batch, beams, _candidates(beams, levels), words) | {"least": ("float32", 1)}
    return regions


def built_regions(batch: int, most: int) -> Sizes:
    """Return the arrays of trees of up to ``most`` nodes that no result has."""
    return dict.fromkeys(("depths", "next_child", "next_sibling"), ("int32", batch * most))


def beam_regions(batch: int, topk: int, candidates: int, words: int) -> Sizes:
    """Return the arrays of the beams of ``topk`` prefixes.

    Args:
        candidates: candidates of a request, of all levels.
        words: words of a prefix's ancestors.
    """
    return {
        "scores": ("float32", batch * candidates),
        "candidate tokens": ("int32", batch * candidates),
        "candidate parents": ("int32", batch * candidates),
        "beams": ("int32", batch * topk),
        "beam tokens": ("int32", batch * topk),
        "beam parents": ("int32", batch * topk),
        "ancestors": ("int64", batch * topk * words),
    }


def _candidates(beams: int, levels: int) -> int:
    """Return the candidates of a request's beams, of all levels."""
    return beams + (levels - 1) * beams**2
