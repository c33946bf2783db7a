"""Trees of a head that drafts all levels in one pass, made on a GPU within the round that verifies them.

    rows of blocks, plan, head, lists, trees | plan, target, accept, commit | plan, write

A kernel says which rows each request's block has, by the length that only the device knows. The lists of its levels
become the best tree (`cuda/tree_lists.cu`), or candidates of beams where a level's scores depend on the token before
(`cuda/list_beams.cu`), of which `cuda/tree_build.cu` makes trees. So no round waits for the host, and rounds can be
launched ahead of it. Heads whose levels depend on more than the token before have their trees made by the host. A
P-EAGLE head's block has masks alone: the pass behind the round before has given the first level (`Roots`).
"""

from __future__ import annotations

from typing import cast

import torch

from specrs import _specrs as core
from specrs.engine.devices.block_lists import BlockTrees
from specrs.engine.devices.memory import Arrays, BucketMemory, Models
from specrs.engine.drafting.levels import most_nodes
from specrs.models.block_head import BlockHead
from specrs.models.cuda import CudaTable, DevicePlan
from specrs.operands import BeamArrays, BlockArrays, BuiltTrees, ListArrays, PlanArrays


class BlockLaunches:
    """The launches that draft a bucket's trees."""

    def __init__(self, models: Models, memory: BucketMemory, made: BlockTrees) -> None:
        self._m, self._made, self._given, self._batch = models, made, memory.given, memory.batch
        head, a, out = models.head, memory.arrays, memory.found
        assert head is not None
        self._head, self._rows = head, memory.batch * made.levels
        self._blocks = BlockArrays(
            offsets=a["block offsets"], tokens=a["block tokens"], masks=a["block masks"], wanted=a["block wanted"],
            heats=a["block heats"], levels=a["block levels"], nodes=a["block nodes"],
        )  # fmt: skip
        names = ("rows", "versions", "qo_indptr", "prefix_lens", "positions", "out_slots")
        self._planned = PlanArrays(**{name: a[f"block {name}"] for name in names}, mask=a["versions"][:0])
        self._versions, self._sound = a["versions"], out["sound"]
        planned = self._planned
        self._plan = DevicePlan(
            "extend", planned.positions, planned.out_slots, planned.prefix_lens, planned.qo_indptr, models.table,
            None if made.causal else self._blocks.masks, planned.rows, made.rows, models.geometry.page_size,
            self._given["first_pages"], models.format.of("extend"), models.format.expand_page_size("extend"),
            most_keys=models.format.most_keys,
        )  # fmt: skip
        self._trees = BuiltTrees(
            offsets=out["tree_offsets"], tokens=out["tree_tokens"], depths=a["depths"], parents=out["tree_parents"],
            next_child=a["next_child"], next_sibling=a["next_sibling"], scores=out["tree_scores"].view(torch.float32),
        )  # fmt: skip
        if made.shape is not None:
            a["least"].fill_(torch.finfo(torch.float32).min)
            self._least = a["least"]
            self._beams = _beams(a, out)

    def run(self, levels: int, heated: bool) -> None:
        """Launch the drafts of a round with room for trees of ``levels`` levels (`most_nodes`).

        Args:
            heated: True if requests have factors on their scores.
        """
        m, made, given, blocks = self._m, self._made, self._given, self._blocks
        stream = m.dense.stream
        core._device_block_rows(
            rows=made.rows, skipped=made.skipped, context=m.geometry.max_context_len,
            most=min(made.nodes, most_nodes(m.geometry.shape, levels)), mask_token=made.mask_token,
            lens=given["lens"], roots=given["roots"], depths=given["depths"], nodes=given["nodes"],
            heats=given["heats"].view(torch.float32), live=given["live"], blocks=blocks, stream=stream,
        )  # fmt: skip
        m.format.plan(
            stream, "extend", draft_step=None, table=m.table, num_pages=m.num_pages, rows=given["rows"],
            versions=self._versions, lens=given["lens"], live=given["live"], offsets=blocks.offsets, parents=None,
            ancestors=None, plan=self._planned,
        )  # fmt: skip
        logits, weights = self._scores()
        if heated:
            logits.mul_(blocks.heats[:, None])
        made.select.launch(logits)
        self._build(made.select.arrays(self._rows), weights)

    def _scores(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the head. Returns the logits of all levels, and the weights of `BlockHead.pair_weights`."""
        m, blocks, head, plan = self._m, self._blocks, self._head, cast(core.Plan, self._plan)
        assert m.draft_cache is not None
        if isinstance(head, BlockHead):
            logits, hidden = head.draft(blocks.tokens, plan, m.draft_cache, blocks.wanted)
            return logits, head.pair_weights(hidden)
        assert m.roots is not None and self._made.logits is not None
        logits, firsts = self._made.logits[0][: self._rows], self._made.logits[1][: self._batch]
        masked, stream = head.masked(plan, m.draft_cache), m.dense.stream
        core._device_copy_rows(m.roots.logits, self._given["root_from"], logits, firsts, None, stream)
        core._device_copy_rows(masked, blocks.wanted, logits, None, None, stream)
        return logits, None

    def _build(self, lists: ListArrays, weights: torch.Tensor | None) -> None:
        """Make the trees of the lists.

        Args:
            weights: as `_scores` gives them.
        """
        m, made, given, blocks, head = self._m, self._made, self._given, self._blocks, self._head
        stream = m.dense.stream
        if made.shape is None:
            core._device_tree_lists(
                draft_tokens=m.geometry.shape.draft_tokens, width=made.listed, lists=lists, to_target=m.to_target,
                roots=given["roots"], max_depths=blocks.levels, max_nodes=blocks.nodes, live=given["live"],
                trees=self._trees, masks=None, sound=self._sound, stream=stream,
            )  # fmt: skip
            return
        assert isinstance(head, BlockHead) and head.path_head is not None and head.path_head.pairs is not None
        pairs = head.path_head.pairs
        before, behind = (cast(CudaTable, table).table for table in (pairs.before, pairs.behind))
        core._device_list_beams(
            shape=made.shape, width=made.listed, lists=lists, heats=blocks.heats, to_target=m.to_target,
            roots=given["roots"], max_depths=blocks.levels, before=before, behind=behind, weights=weights,
            closed=made.select.closed, live=given["live"], beams=self._beams, stream=stream,
        )  # fmt: skip
        core._device_tree_build(
            shape=made.shape, beams=self._beams, roots=given["roots"], max_depths=blocks.levels,
            max_nodes=blocks.nodes, min_score=self._least, live=given["live"], trees=self._trees, masks=None,
            stream=stream,
        )  # fmt: skip


def _beams(a: Arrays, out: Arrays) -> BeamArrays:
    return BeamArrays(
        scores=a["scores"], candidate_tokens=a["candidate tokens"], candidate_parents=a["candidate parents"],
        beams=a["beams"], tokens=a["beam tokens"], parents=a["beam parents"], ancestors=a["ancestors"],
        sound=out["sound"],
    )  # fmt: skip
