"""A head of blocks on the host: one pass drafts all levels, and the best trees are made of their lists."""

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
from specrs.models.head import BlockDrafter
from specrs.models.ops import KvMemory

_CANDIDATES = 32  # likeliest tokens of a level that a Markov head scores behind each prefix


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
        heats = [1 / r.params.temperature if r.params.temperature > 0 else 1.0 for r in batch]
        if any(heat != 1.0 for heat in heats):
            logits *= torch.tensor(heats).repeat_interleave(torch.tensor(levels))[:, None]
        roots = [r.tokens[-1] for r in batch]
        width = self._width if self.head.markov is None else max(_CANDIDATES, self._width)
        lists = core.DraftLists(logits, levels, width, None if self.head.d2t is None else self.head.target_ids)
        if self.head.markov is not None:
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
        """Let each level's lists depend on the path, by the Markov head."""
        markov = self.head.markov
        assert markov is not None
        some = lists.begin(roots, self._width)
        if not some:
            return
        starts = list(accumulate(levels, initial=0))
        heat = torch.tensor([heats[i] for i in some])[:, None, None]
        ids, state = from_dlpack(lists.ids).long(), None
        for level in range(max(levels[i] for i in some)):
            at = torch.tensor([starts[i] + min(level, levels[i] - 1) for i in some])
            tokens, parents = (from_dlpack(a).long() for a in (lists.tokens, lists.parents))
            bias, state = markov.bias(tokens, hidden[at], ids[at], state, parents)
            lists.advance((bias * heat).contiguous())
