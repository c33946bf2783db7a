"""Heads on the host that draft all levels in one pass: the best trees are made of the levels' lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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

CANDIDATES = 32  # likeliest tokens of a level that are scored behind each prefix


@dataclass(frozen=True)
class Blocks:
    """The blocks of a round, a request's at its place in each list.

    Attributes:
        seqs: the sequences.
        lens: positions before each block.
        firsts: the first position that each attends to, a multiple of the page size.
        roots: each request's last token.
        rows: rows of each block.
        levels: levels to draft; 0 of a request that does not draft.
        heats: the factor on each request's scores.
    """

    seqs: Sequence[core.Sequence]
    lens: Sequence[int]
    firsts: Sequence[int]
    roots: list[int]
    rows: Sequence[int]
    levels: Sequence[int]
    heats: Sequence[float]


class HostBlocks(KeptInputs):
    """Runs the passes of a head that drafts blocks.

    Attributes:
        head: the model.
        cache: the head's KV, in the same pages as the target's.
    """

    catches_up = True
    visible = True

    def __init__(self, head: BlockDrafter, cache: KvMemory, planner: core.Planner, config: EngineConfig) -> None:
        super().__init__(planner)
        assert isinstance(config, BlockEngineConfig)
        self.head, self.cache = head, cache
        self._width, self._nodes, self._levels = config.width, config.nodes, config.head_shape.steps
        # Where levels depend on the path, more tokens than a node has children are scored.
        self._listed = self._width if head.path_head is None else max(CANDIDATES, self._width)
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
        sizes = [
            self.sizes(depth, self._wall - length) if depth > 0 and r.head.root else (0, 0)
            for r, length, depth in zip(batch, batch.lens, depths, strict=True)
        ]
        rows, levels = [rows for rows, _ in sizes], [levels for _, levels in sizes]
        firsts, roots = [r.head.first for r in batch], [r.tokens[-1] for r in batch]
        lists = self.lists(Blocks(batch.seqs, batch.lens, firsts, roots, rows, levels, heats_of(batch)))
        faults = [(error, self._sound(batch, error.request)) for error in lists.faults]
        return HostDrafted(lists.trees(roots, self._nodes), max(levels, default=0), faults)

    def sizes(self, depth: int, room: int) -> tuple[int, int]:
        """Return a block's rows, and its levels, of which ``depth`` are of use, with ``room`` positions behind the
        request."""
        rows = min(self.head.config.block_size, room)
        return rows, min(depth, self._levels, self.head.config.levels(rows))

    def lists(self, blocks: Blocks) -> core.DraftLists:
        """Run blocks, and return the lists of their levels."""
        plan, tokens, wanted = self._plan_blocks(blocks)
        logits, hidden = self.head.draft(torch.tensor(tokens), plan, self.cache, torch.tensor(wanted))
        if (selector := self.head.config.selector) is not None:
            least = logits.topk(selector.candidates).values[:, -1:]
            logits.masked_fill_(logits < least, -math.inf)
        lists = lists_of(self.head, self.head.dense.host(logits), blocks.levels, blocks.heats, self._listed)
        self._walk(lists, blocks, hidden)
        return lists

    def _sound(self, batch: Batch, request: int) -> int:
        """Return the positions of a request whose draft KV is sound, though its block's scores are not."""
        return batch.lens[request]

    def _plan_blocks(self, blocks: Blocks) -> tuple[core.Plan, list[int], list[int]]:
        """Return the plan of the blocks of those requests that draft, their tokens, and the rows of all levels."""
        some, config = [i for i, count in enumerate(blocks.levels) if count], self.head.config
        seqs, counts = [blocks.seqs[i] for i in some], [blocks.rows[i] for i in some]
        plan = self._planner.extend(seqs, [blocks.lens[i] for i in some], counts)
        if any(firsts := [blocks.firsts[i] for i in some]):
            plan = plan.attending_from(firsts)
        if not config.causal:
            plan = plan.attending_block()
        each = list(zip(some, counts, accumulate(counts, initial=0)))  # noqa: B905
        tokens = [t for i, count, _ in each for t in self.head.block(blocks.roots[i], count)]
        skipped = 0 if config.anchor else 1
        wanted = [start + skipped + level for i, _, start in each for level in range(blocks.levels[i])]
        return plan, tokens, wanted

    def _walk(self, lists: core.DraftLists, blocks: Blocks, hidden: torch.Tensor) -> None:
        """Let each level's lists depend on the path, by the head's own network, if it has one."""
        path_head, levels = self.head.path_head, blocks.levels
        some = [] if path_head is None else lists.begin(blocks.roots, self._width)
        if path_head is None or not some:
            return
        starts, at = list(accumulate(levels, initial=0)), hidden.device
        heat = torch.tensor([blocks.heats[i] for i in some])[:, None, None]
        ids, state = from_dlpack(lists.ids).long().to(at), None
        for level in range(max(levels[i] for i in some)):
            of_level = torch.tensor([starts[i] + min(level, levels[i] - 1) for i in some]).to(at)
            tokens, parents = (from_dlpack(a).long().to(at) for a in (lists.tokens, lists.parents))
            bias, state = path_head.bias(level, tokens, hidden[of_level], ids[of_level], state, parents)
            lists.advance((self.head.dense.host(bias) * heat).contiguous())


class HostMasks(KeptInputs):
    """Runs the passes of a P-EAGLE head: those of EAGLE-3 give the first level, and one over masks all that follow.

    Attributes:
        head: the model.
        cache: the head's KV, in the same pages as the target's.
    """

    catches_up = False
    visible = True

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
        masked = self.head.dense.host(self.head.masked(begun(plan, (r.head.first for r in requests)), self.cache))
        behind = dict(zip(some, torch.split(masked, counts), strict=True))
        parts = [masked[:0]]
        for i, (root, count) in enumerate(zip(roots, levels, strict=True)):
            if root is not None and count:
                parts += [root[None], *([behind[i]] if i in behind else [])]
        lists = lists_of(self.head, torch.cat(parts), levels, heats_of(batch), self._width)
        faults = [(error, batch.lens[error.request]) for error in lists.faults]
        trees = lists.trees([r.tokens[-1] for r in batch], self._nodes)
        return HostDrafted(trees, max(levels, default=0), faults)


def heats_of(batch: Batch) -> list[float]:
    """The factor on each request's scores: drafts of a sampled token are accepted as it is drawn. Scores stay finite at
    any temperature."""
    return [1 / max(r.params.temperature, 1e-3) if r.params.temperature > 0 else 1.0 for r in batch]


def lists_of(
    head: AnyHead, logits: torch.Tensor, levels: Sequence[int], heats: Sequence[float], width: int
) -> core.DraftLists:
    """The lists of all levels, whose rows of logits stand request by request."""
    if any(heat != 1.0 for heat in heats):
        logits = logits * torch.tensor(heats).repeat_interleave(torch.tensor(levels))[:, None]
    return core.DraftLists(logits, levels, width, None if head.d2t is None else head.target_ids)
