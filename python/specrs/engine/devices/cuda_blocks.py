"""Heads on a GPU that draft all levels in one pass, or all behind the first. Where it can, a round makes their trees on
the device (`BlockTrees`). Else, and where somebody looks on, the host makes them by the lists of the levels' likeliest
tokens, which is all that is copied; a round then verifies them as it does trees of other sources.

A head of blocks writes the draft KV of the accepted tokens in the launch that verified them, in rounds without drafts
too. So it is never behind a request, and nothing has to be made again before a request drafts. A P-EAGLE head gives a
root as EAGLE-3's do (`CudaDrafts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import cast

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs.engine.config import BlockEngineConfig, EngineConfig
from specrs.engine.devices.block_lists import MOST_BLOCK_ROWS, BlockTrees, Lists, ListSelect
from specrs.engine.devices.cuda_drafts import CudaDrafts, in_passes
from specrs.engine.devices.graphs import Graphs
from specrs.engine.devices.head_inputs import Entries, HostDrafted, non_finite
from specrs.engine.devices.host_blocks import Blocks, HostBlocks, heats_of
from specrs.engine.devices.launched import AskedRound, BlockRoot, DeviceRoot, LaunchedRound
from specrs.engine.devices.memory import Models, Roots, buckets
from specrs.engine.devices.prompt_pass import PassInputs
from specrs.engine.drafting.trees import Drafted
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Request
from specrs.engine.rounds.executor import Deepen, Pass
from specrs.models.block_head import BlockHead
from specrs.models.cuda import CudaDense, DevicePlan
from specrs.models.eagle3 import Eagle3Head
from specrs.models.features import gather
from specrs.models.head import AnyHead
from specrs.models.ops import KvMemory


class BlockPass:
    """Graphs of a head's pass over the blocks of up to ``batch`` requests, and of the selection from its logits.

    Attributes:
        batch: number of seats.
    """

    def __init__(self, models: Models, head: BlockHead, select: ListSelect, batch: int) -> None:
        self.batch, self._m, self._head, self._select = batch, models, head, select
        config, at = head.config, head.placement.device
        rows, self._levels = batch * config.block_size, batch * config.depth
        self._inputs = inputs = PassInputs(
            models, batch, rows, first_pages=batch, wanted=self._levels, heats=self._levels
        )
        self._host_masks = torch.zeros(rows, dtype=torch.int64, pin_memory=True)
        self._masks = torch.zeros(rows, dtype=torch.int64, device=at)
        plan = cast(DevicePlan, inputs.plan("slots", config.block_size, first_pages=True))
        self._plan = plan if config.causal else replace(plan, mask=self._masks)
        self._graphs = Graphs(models)

    def run(
        self, plan: core.Plan, tokens: Sequence[int], wanted: Sequence[int], heats: Sequence[float]
    ) -> tuple[Lists, torch.Tensor]:
        """Run the pass, and wait for it.

        Args:
            plan: the pass, planned by the host.
            tokens: token of each row.
            wanted: the rows of all levels.
            heats: the factor on the scores of each of these.

        Returns:
            The lists of ``wanted``, and these rows, which the next pass overwrites.
        """
        inputs, count = self._inputs, from_dlpack(plan.prefix_lens).numel()
        inputs.set(
            plan,
            tokens=(tokens, 0),
            wanted=(wanted, 0),
            first_pages=(plan.first_pages or [0] * count, 0),
            heats=(np.array(heats, np.float32).view(np.int32), 0),
        )
        if not self._head.config.causal:
            masks = from_dlpack(plan.mask).view(-1)
            self._host_masks[: len(masks)] = masks
            self._masks.copy_(self._host_masks, non_blocking=True)
        heated = any(heat != 1.0 for heat in heats)
        name = f"the pass over blocks of {self.batch} requests{', some sampled' if heated else ''}:"
        hidden = self._graphs.run(name, self._passes(heated), self._kept)
        return self._select.read(len(wanted)), hidden[: len(wanted)]

    def _kept(self) -> list[object]:
        m = self._m
        return [m.draft_cache, self._head, self._select, self._inputs, self._masks, *m.format.kept()]

    def _passes(self, heated: bool) -> Callable[[int], torch.Tensor]:
        """Return a function that launches the pass. It does not refer to this object, because a graph keeps it."""
        m, head, select, inputs, plan = self._m, self._head, self._select, self._inputs, self._plan
        a = inputs.there

        def run(_: int) -> torch.Tensor:
            assert m.draft_cache is not None
            m.dense.forget()
            inputs.write_arrays(m.dense.stream)
            logits, hidden = head.draft(a["tokens"], cast(core.Plan, plan), m.draft_cache, a["wanted"])
            if heated:
                logits.mul_(a["heats"].view(torch.float32)[:, None])
            select.launch(logits)
            return hidden

        return run


class CudaBlocks(HostBlocks):
    """Runs the passes of a head that drafts blocks.

    Attributes:
        passes: passes over blocks whose trees the host makes, for more requests from one to the next.
        made: the sizes of the trees that rounds make; ``None`` if the host makes all.
    """

    head: BlockHead

    def __init__(self, head: BlockHead, cache: KvMemory, planner: core.Planner, config: EngineConfig) -> None:
        super().__init__(head, cache, planner, config)
        self._dense, selector = cast(CudaDense, head.dense), head.config.selector
        self._listed = min(self._listed, head.vocab_size) if selector is None else selector.candidates
        self._select = ListSelect(head, self._listed, closed=selector is not None)
        self._most_rows = config.prefill_chunk
        assert isinstance(config, BlockEngineConfig)
        self.made = BlockTrees.of(head, config, planner.geometry, self._select, self._listed)
        self.visible, self._fixed = self.made is None, not config.adaptive
        self.passes: list[BlockPass] = []

    def prepare(self, models: Models) -> None:
        """Make the passes over blocks."""
        most = min(models.config.max_batch, MOST_BLOCK_ROWS // self.head.config.block_size)
        self.passes = [BlockPass(models, self.head, self._select, n) for n in buckets(most)]

    def keep(self, batch: Batch, passed: Pass, rows: Sequence[Sequence[int]]) -> None:
        if not isinstance(passed, LaunchedRound):
            super().keep(batch, passed, rows)
            return
        for r, some in zip(batch, rows, strict=True):
            if not r.head.followed or not some:
                continue
            wrote = passed.variant.follow and r.head.end == r.committed - len(some)
            root = r.head.root if isinstance(r.head.root, BlockRoot) else BlockRoot(r.head.shared)
            r.head.root = r.head.features = None
            if wrote:
                r.head.reached(r.committed, root)

    def extend(self, requests: Sequence[Request]) -> Sequence[object]:
        errors: dict[int, core.NonFiniteError] = {}
        for some in in_passes([Entries(r, r.head.end, r.lag) for r in requests], self._most_rows):
            at, _ = DevicePlan.of(self._dense, self._plan(some), self.cache.page_size)
            aux = gather(piece for e in some for piece in e.features())
            written = self.head.write(aux, cast(core.Plan, at), self.cache)
            sums = torch.stack([layer.sum(1, dtype=torch.float32) for layer in written]).sum(0)
            if self._dense.host(sums).isfinite().all():
                continue
            parts = torch.split(torch.cat(written, 1).cpu(), [e.count for e in some])
            for e, part in zip(some, parts, strict=True):
                if (error := non_finite("draft KV", part.flatten())) is not None:
                    errors.setdefault(e.request.request_id, error)
        return [errors.get(r.request_id) or BlockRoot(r.committed) for r in requests]

    def draft(self, batch: Batch, depths: Sequence[int], deepen: Deepen | None) -> Drafted:
        if deepen is not None or self.made is None:
            return super().draft(batch, depths, deepen)
        each = zip(batch, batch.lens, depths, strict=True)
        able = [depth if r.head.root and length < self._wall else 0 for r, length, depth in each]
        return AskedRound(able, self.made.levels_of(able, self._planner.geometry.shape, self._fixed))

    def lists(self, blocks: Blocks) -> core.DraftLists:
        found, hidden = list[Lists](), list[torch.Tensor]()
        drafting = [i for i, count in enumerate(blocks.levels) if count]
        most = self.passes[-1].batch
        for first in range(0, len(drafting), most):
            some = set(drafting[first : first + most])
            levels = [count if i in some else 0 for i, count in enumerate(blocks.levels)]
            made = next(each for each in self.passes if each.batch >= len(some))
            lists_of_some, rows = made.run(
                *self._plan_blocks(replace(blocks, levels=levels)), heats_by_level(blocks.heats, levels)
            )
            found.append(lists_of_some)
            hidden.append(rows if len(drafting) <= most else rows.clone())
        lists = joined(self.head, found, blocks.levels, self._listed)
        if hidden:
            self._walk(lists, blocks, hidden[0] if len(hidden) == 1 else torch.cat(hidden))
        return lists

    def _walk(self, lists: core.DraftLists, blocks: Blocks, hidden: torch.Tensor) -> None:
        path_head, levels = self.head.path_head, blocks.levels
        if path_head is None or path_head.pairs is None:
            super()._walk(lists, blocks, hidden)
            return
        some = lists.begin(blocks.roots, self._width)
        if not some:
            return
        # Of all pairs of a listed token and one listed a level before at once: the device is waited for once.
        ids, starts = from_dlpack(lists.ids).long(), torch.tensor([*accumulate(levels, initial=0)])[:-1]
        tokens = ids if self.head.d2t is None else self.head.target_ids[ids]
        before, drafting = tokens.roll(1, 0), torch.tensor(levels) > 0
        before[starts[drafting]] = torch.tensor(blocks.roots)[drafting][:, None]
        at = self.head.placement
        pairs = self._dense.host(path_head.pairs.scores(at, before.to(at.device), hidden, ids.to(at.device)))
        heat = torch.tensor([blocks.heats[i] for i in some])[:, None, None]
        last, places = torch.tensor([levels[i] for i in some]) - 1, torch.arange(len(some))[:, None]
        for level in range(int(last.max()) + 1):
            rows = starts[some] + last.clamp(max=level)
            ranks = (from_dlpack(lists.tokens)[:, :, None] == before[rows][:, None]).int().argmax(-1)
            lists.advance((pairs[rows][places, ranks] * heat).contiguous())

    def _sound(self, batch: Batch, request: int) -> int:
        root = batch.requests[request].head.root
        return root.sound if isinstance(root, BlockRoot) else 0


class CudaMasks(CudaDrafts):
    """Runs the passes of a P-EAGLE head: those of EAGLE-3 give roots, one over masks all levels behind the first.

    Attributes:
        made: as of `CudaBlocks`.
    """

    def __init__(
        self, roots: Roots, head: Eagle3Head, cache: KvMemory, planner: core.Planner, config: BlockEngineConfig,
        vocab_size: int,
    ) -> None:  # fmt: skip
        super().__init__(roots, head, cache, planner, config, vocab_size)
        self._width, self._nodes = min(config.width, head.vocab_size), config.nodes
        self._most_levels, self._wall = min(config.levels, config.head_shape.steps), planner.geometry.max_context_len
        self._select, self._fixed = ListSelect(head, self._width), not config.adaptive
        self._at_once = max(MOST_BLOCK_ROWS // max(config.levels - 1, 1), 1)
        self.made = BlockTrees.of(head, config, planner.geometry, self._select, self._width)
        self.visible = self.made is None

    def draft(self, batch: Batch, depths: Sequence[int], deepen: Deepen | None) -> Drafted:
        states = [r.head.root for r in batch]
        if deepen is None and self.made is not None:
            each = zip(states, depths, strict=True)
            able = [depth if isinstance(root, DeviceRoot) else 0 for root, depth in each]
            return AskedRound(able, self.made.levels_of(able, self._planner.geometry.shape, self._fixed))
        levels = [
            self.sizes(depth, self._wall - length)[1] if isinstance(root, DeviceRoot) else 0
            for root, depth, length in zip(states, depths, batch.lens, strict=True)
        ]
        rows = [root.row if isinstance(root, DeviceRoot) else 0 for root in states]
        firsts, roots = [r.head.first for r in batch], [r.tokens[-1] for r in batch]
        lists = self.lists(Blocks(batch.seqs, batch.lens, firsts, roots, rows, levels, heats_of(batch)))
        starts = [root.start if isinstance(root, DeviceRoot) else 0 for root in states]
        faults = [(error, starts[error.request]) for error in lists.faults]
        return HostDrafted(lists.trees(roots, self._nodes), max(levels, default=0), faults)

    def unite(self, drafted: Drafted, trees: core.TreeBatch) -> None:
        return None  # the better trees of the two are verified

    def sizes(self, depth: int, room: int) -> tuple[int, int]:
        """Return the row of `Roots` of no request, and the levels to draft, of which ``depth`` are of use, where there
        are ``room`` positions behind the request: a masked row for each level but the first."""
        return self._roots.nothing, min(depth, self._most_levels, room + 1)

    def lists(self, blocks: Blocks) -> core.DraftLists:
        """Run the masked rows of blocks, and return the lists of all levels.

        Args:
            blocks: ``rows`` are the rows of the requests' roots in `Roots`.
        """
        found = list[Lists]()
        drafting = [i for i, count in enumerate(blocks.levels) if count]
        for first in range(0, len(drafting), self._at_once):
            found.append(self._lists(blocks, drafting[first : first + self._at_once]))
        return joined(self.head, found, blocks.levels, self._width)

    def _lists(self, blocks: Blocks, some: Sequence[int]) -> Lists:
        """Return the lists of some requests."""
        roots = torch.tensor([blocks.rows[i] for i in some]).pin_memory()
        logits = self._roots.logits.index_select(0, roots.to(self._roots.logits.device, non_blocking=True))
        of_roots = self._select.of(logits, [blocks.heats[i] for i in some])
        deep = [i for i in some if blocks.levels[i] > 1]
        if not deep:
            return of_roots
        counts = [blocks.levels[i] - 1 for i in deep]
        plan = self._planner.extend([blocks.seqs[i] for i in deep], [blocks.lens[i] for i in deep], counts)
        if any(firsts := [blocks.firsts[i] for i in deep]):
            plan = plan.attending_from(firsts)
        masked = self.head.masked(plan, self.cache)
        heats = heats_by_level([blocks.heats[i] for i in deep], counts)
        behind = self._select.of(masked, heats)
        order, root, at = list[int](), 0, len(some)
        for i in some:
            more = blocks.levels[i] - 1
            order += [root, *range(at, at + more)]
            root, at = root + 1, at + more
        a, b, c = (torch.cat(pair)[order] for pair in zip(of_roots, behind, strict=True))
        return a, b, c


def heats_by_level(heats: Sequence[float], levels: Sequence[int]) -> list[float]:
    """Return the factor of each level's row, request by request."""
    return [heat for heat, count in zip(heats, levels, strict=True) for _ in range(count)]


def joined(head: AnyHead, found: Sequence[Lists], levels: Sequence[int], width: int) -> core.DraftLists:
    """Return the lists of passes over requests in order."""
    if found:
        ids, scores, sound = (torch.cat(parts) for parts in zip(*found, strict=True))
    else:
        ids, sound = torch.zeros(0, width, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
        scores = torch.zeros(0, width)
    return core.DraftLists.of(ids, scores, sound, levels, None if head.d2t is None else head.target_ids)
