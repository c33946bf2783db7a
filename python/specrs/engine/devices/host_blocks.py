"""Heads on the host that draft all levels in one pass: the best trees are made of the levels' lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs.engine.config import BlockEngineConfig, EngineConfig
from specrs.engine.devices.head_inputs import Entries, HostDrafted, KeptInputs, begun, non_finite
from specrs.engine.drafting.trees import Drafted
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Request
from specrs.engine.rounds.executor import Deepen
from specrs.models.features import gather
from specrs.models.head import AnyHead, BlockDrafter, StepDrafter
from specrs.models.ops import KvMemory

_CANDIDATES = 32  # likeliest tokens of a level that are scored behind each prefix


class HostBlocks(KeptInputs):
    """Runs the passes of a head that drafts blocks.

    Attributes:
        head: the model.
        cache: the head's KV, in the same pages as the target's.
    """

    catches_up = True

    def __init__(self, head: BlockDrafter, cache: KvMemory, planner: core.Planner, config: EngineConfig) -> None:
        super().__init__(planner)
        assert isinstance(config, BlockEngineConfig)
        self.head, self.cache = head, cache
        self._width, self._nodes, self._levels = config.width, config.nodes, config.head_shape.steps
        self._wall = planner.geometry.max_context_len

    def extend(self, requests: Sequence[Request]) -> Sequence[object]:
        # A block reads nothing but what this writes, so that a request can draft once it is there.
        entries = [Entries(r, r.head.end, r.lag) for r in requests]
        aux = gather(piece for e in entries for piece in e.features())
        written = self.head.write(aux, self._plan(entries), self.cache)
        if math.isfinite(sum(layer.sum().item() for layer in written)):
            return [True] * len(entries)
        parts = torch.split(torch.cat(written, 1), [e.count for e in entries])
        return [non_finite("draft KV", part.flatten()) or True for part in parts]

    def draft(self, batch: Batch, depths: Sequence[int], deepen: Deepen | None) -> Drafted:
        rows = [self._rows(length) if depth > 0 and r.head.root else 0 for r, length, depth in zip(
            batch, batch.lens, depths, strict=True)]  # fmt: skip
        levels = [
            min(depth, self._levels, self.head.config.levels(count)) for depth, count in zip(depths, rows, strict=True)
        ]
        logits, hidden = self._run(batch, rows, levels)
        heats, roots = _heats(batch), [r.tokens[-1] for r in batch]
        width = self._width if self.head.path_head is None else max(_CANDIDATES, self._width)
        lists = _lists(self.head, logits, levels, heats, width)
        if self.head.path_head is not None:
            self._walk(lists, roots, levels, hidden, heats)
        faults = [(error, batch.lens[error.request]) for error in lists.faults]
        return HostDrafted(lists.trees(roots, self._nodes), max(levels, default=0), faults)

    def _rows(self, length: int) -> int:
        """Rows of a block behind so many positions: fewer at the context's end."""
        return min(self.head.config.block_size, self._wall - length)

    def _run(self, batch: Batch, rows: Sequence[int], levels: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the blocks of those requests that draft. Returns logits and rows of each level, request by request."""
        some = [i for i, count in enumerate(levels) if count]
        requests, counts = [batch.requests[i] for i in some], [rows[i] for i in some]
        plan = self._planner.extend([r.seq for r in requests], [batch.lens[i] for i in some], counts)
        plan = begun(plan, (r.head for r in requests))
        if not self.head.config.causal:
            plan = plan.attending_block()
        tokens = [t for r, count in zip(requests, counts, strict=True) for t in self.head.block(r.tokens[-1], count)]
        skipped, starts = 0 if self.head.config.anchor else 1, accumulate(counts, initial=0)
        wanted = [start + skipped + level for i, start in zip(some, starts) for level in range(levels[i])]  # noqa: B905
        logits, hidden = self.head.draft(torch.tensor(tokens), plan, self.cache, torch.tensor(wanted))
        return self.head.dense.host(logits), hidden

    def _walk(
        self, lists: core.DraftLists, roots: list[int], levels: Sequence[int], hidden: torch.Tensor,
        heats: Sequence[float],
    ) -> None:  # fmt: skip
        """Let each level's lists depend on the path, by the head's own network."""
        path_head = self.head.path_head
        assert path_head is not None
        some = lists.begin(roots, self._width)
        if not some:
            return
        starts = list(accumulate(levels, initial=0))
        heat = torch.tensor([heats[i] for i in some])[:, None, None]
        ids, state = from_dlpack(lists.ids).long(), None
        for level in range(max(levels[i] for i in some)):
            at = torch.tensor([starts[i] + min(level, levels[i] - 1) for i in some])
            tokens, parents = (from_dlpack(a).long() for a in (lists.tokens, lists.parents))
            bias, state = path_head.bias(level, tokens, hidden[at], ids[at], state, parents)
            lists.advance((bias * heat).contiguous())


class HostMasks(KeptInputs):
    """Runs the passes of a P-EAGLE head: those of EAGLE-3 give the first level, and one over masks all that follow.

    Attributes:
        head: the model.
        cache: the head's KV, in the same pages as the target's.
    """

    catches_up = False

    def __init__(self, head: StepDrafter, cache: KvMemory, planner: core.Planner, config: BlockEngineConfig) -> None:
        super().__init__(planner)
        self.head, self.cache = head, cache
        self._width, self._nodes = config.width, config.nodes
        self._levels, self._wall = min(config.levels, config.head_shape.steps), planner.geometry.max_context_len

    def extend(self, requests: Sequence[Request]) -> Sequence[object]:
        entries = [Entries(r, r.head.end, r.lag) for r in requests]
        rows = torch.tensor([end - 1 for end in accumulate(e.count for e in entries)])
        logits, hidden = self.head.extend(*self._inputs(entries), self.cache, rows)
        logits = self.head.dense.host(logits).clone()
        # A hidden state depends on all draft KV before it. So if it is sound, all of that draft KV is sound.
        return [non_finite("draft hidden state", hidden[i]) or logits[i] for i in range(len(requests))]

    def draft(self, batch: Batch, depths: Sequence[int], deepen: Deepen | None) -> Drafted:
        roots = [r.head.root if isinstance(r.head.root, torch.Tensor) else None for r in batch]
        levels = [
            0 if root is None else min(depth, self._levels, self._wall - length + 1)
            for root, depth, length in zip(roots, depths, batch.lens, strict=True)
        ]
        some = [i for i, count in enumerate(levels) if count > 1]
        requests, counts = [batch.requests[i] for i in some], [levels[i] - 1 for i in some]
        plan = self._planner.extend([r.seq for r in requests], [batch.lens[i] for i in some], counts)
        masked = self.head.dense.host(self.head.masked(begun(plan, (r.head for r in requests)), self.cache))
        behind = dict(zip(some, torch.split(masked, counts), strict=True))
        parts = [masked[:0]]
        for i, (root, count) in enumerate(zip(roots, levels, strict=True)):
            if root is not None and count:
                parts += [root[None], *([behind[i]] if i in behind else [])]
        lists = _lists(self.head, torch.cat(parts), levels, _heats(batch), self._width)
        faults = [(error, batch.lens[error.request]) for error in lists.faults]
        trees = lists.trees([r.tokens[-1] for r in batch], self._nodes)
        return HostDrafted(trees, max(levels, default=0), faults)


def _heats(batch: Batch) -> list[float]:
    """The factor on each request's scores: drafts of a sampled token are accepted as it is drawn. Scores stay finite at
    any temperature."""
    return [1 / max(r.params.temperature, 1e-3) if r.params.temperature > 0 else 1.0 for r in batch]


def _lists(
    head: AnyHead, logits: torch.Tensor, levels: Sequence[int], heats: Sequence[float], width: int
) -> core.DraftLists:
    """The lists of all levels, whose rows of logits stand request by request."""
    if any(heat != 1.0 for heat in heats):
        logits = logits * torch.tensor(heats).repeat_interleave(torch.tensor(levels))[:, None]
    return core.DraftLists(logits, levels, width, None if head.d2t is None else head.target_ids)
