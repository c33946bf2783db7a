"""A round in the middle of a batch's life, and the check of a backend's attention over its plans.

The pool is NaN in every slot that the plan does not let a query read, so that one slot too many shows in the result,
and one too few in its value.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs.backends import PlanAttention

HEADS, KV_HEADS, DIM, VOCAB, CONTEXT = 4, 2, 8, 40, 70
SCALE = 0.4


@dataclass
class Round:
    """A batch in the middle of its life: sequences with committed prefixes and room for a round."""

    geometry: core.Geometry
    pool: core.Pool
    planner: core.Planner
    seqs: list[core.Sequence]
    lens: list[int]
    lease: core.Lease
    rng: random.Random
    generator: torch.Generator

    @classmethod
    def of(cls, backend: Any, layout: Any, tree: tuple[int, int, int], page: int, lens: list[int], seed: int) -> Round:
        geometry = core.Geometry(max(len(lens), 1), CONTEXT, page, core.TreeShape(*tree), layout)
        pool = core.Pool(geometry.pages_for_full_load + 1, page, len(lens) + 1, geometry.row_pages)
        rng = random.Random(seed)
        # Pages of a sequence do not lie side by side: take them one at a time, in turns.
        seqs = [pool.create() for _ in lens]
        order = [i for i, n in enumerate(lens) for _ in range(-(-n // page))]
        rng.shuffle(order)
        have = [0] * len(lens)
        for i in order:
            have[i] += page
            ready = min(have[i], lens[i])
            with pool.reserve([(seqs[i], have[i])]) as lease:
                lease.commit([ready])
        planner = core.Planner(geometry, pool, format=backend.format, mask=backend.mask)
        planner.set_debug(True)
        wants = [(s, geometry.alloc_target(n, pool.allocated(s))) for s, n in zip(seqs, lens, strict=True)]
        lease = pool.reserve(wants)
        return cls(geometry, pool, planner, seqs, lens, lease, rng, torch.Generator().manual_seed(seed))

    def logits(self, rows: int) -> torch.Tensor:
        return 3 * torch.randn(rows, VOCAB, generator=self.generator)

    def plans(self, mode: Any) -> list[core.Plan]:
        """The plans of a round, in its order, and of prefill and plain decoding beside it."""
        k, steps = self.geometry.shape.topk, self.geometry.shape.steps
        batch = len(self.lens)
        counts = [self.rng.randrange(0, min(CONTEXT - n, self.pool.allocated(s) - n) + 1)
                  for s, n in zip(self.seqs, self.lens, strict=True)]  # fmt: skip
        plans = [
            self.planner.extend(self.seqs, self.lens, counts),
            self.planner.extend(self.seqs, [0] * batch, self.lens),
            self.planner.decode(self.seqs, self.lens),
        ]
        beams = core.DraftBeams(batch, self.geometry.shape, None, VOCAB)
        beams.start(self.logits(batch))
        for step in range(steps):
            pad = (batch, batch * k)
            plans.append(self.planner.draft(self.seqs, self.lens, step, beams, mode, pad=pad if step % 2 else None))
            beams.advance(self.logits(batch * k)) if step + 1 < steps else None
        depths = [max(min(steps, CONTEXT - n - 1), 0) for n in self.lens]
        trees = beams.finish([1] * batch, depths, [self.geometry.shape.draft_tokens] * batch)
        plans.append(self.planner.verify(self.seqs, self.lens, trees))
        return plans

    def reads(self, plan: core.Plan) -> list[list[int]]:
        """Slots that each query attends, from the plan's form in row positions."""
        page, steps = self.geometry.page_size, self.geometry.shape.steps
        indptr, prefixes = plan.qo_indptr.tolist(), plan.prefix_lens.tolist()
        table, mask, slots = plan.page_table().tolist(), plan.mask.tolist(), plan.out_slots.tolist()
        reads: list[list[int]] = [[] for _ in range(plan.queries)]
        for i in range(min(plan.batch, len(self.lens))):
            region = self.geometry.draft_region(self.lens[i])
            for j, q in enumerate(range(indptr[i], indptr[i + 1])):
                if slots[q] == 0:  # behind the context's end
                    continue
                if not mask[q]:
                    own = list(range(prefixes[i], prefixes[i] + j + 1))
                else:
                    bits = [64 * w + b for w, word in enumerate(mask[q]) for b in range(64) if word >> b & 1]
                    draft = plan.phase == "draft"
                    own = [region.pos(b // steps, b % steps) if draft else prefixes[i] + b for b in bits]
                reads[q] = [table[i][p // page] * page + p % page for p in [*range(prefixes[i]), *own]]
        return reads


def reference(q: torch.Tensor, layer: torch.Tensor, reads: list[list[int]]) -> torch.Tensor:
    """Softmax attention in float64 of query i over the slots reads[i], of which shorter lists are padded."""
    most = max(map(len, reads), default=0)
    slots = torch.tensor([some + [0] * (most - len(some)) for some in reads], dtype=torch.int64).view(len(reads), most)
    there = torch.arange(most) < torch.tensor([len(some) for some in reads], dtype=torch.int64)[:, None]
    k, v = layer[:, slots].double().repeat_interleave(HEADS // KV_HEADS, 3)
    scores = (k * q[:, None].double()).sum(-1) * SCALE
    weights = scores.masked_fill(~there[:, :, None], -math.inf).softmax(1).nan_to_num(0.0)
    return (weights[..., None] * v.nan_to_num(0.0)).sum(1).float()


def check_round(at: Round, backend: Any, layout: Any, mode: Any, dtype: torch.dtype = torch.float32) -> int:
    """Every plan of a round; returns how many queries there were."""
    slots, count = at.pool.num_pages * at.geometry.page_size, 0
    copies = at.planner.tail_copies(at.seqs, at.lens)
    assert layout == "holey" or not len(copies)
    attention = PlanAttention(backend)
    for plan in at.plans(mode):
        memory = torch.randn(2, 2, slots, KV_HEADS, DIM, generator=at.generator).to(dtype)
        whole = backend.format == "flash_attention" and plan.phase == "draft"
        if whole:
            copies = at.planner.tail_copies(at.seqs, at.lens)  # they run once over a cache
            core.kv_move(core.KvCache(memory, at.geometry.page_size), copies)
        reads = at.reads(plan)
        q = torch.randn(plan.queries, HEADS, DIM, generator=at.generator)
        want = reference(q, memory[1], reads)
        allowed = torch.zeros(slots, dtype=torch.bool)
        allowed[[slot for some in reads for slot in some]] = True
        if whole:
            allowed[from_dlpack(copies.dst).long()] = True
        memory[1, :, ~allowed] = memory[0] = math.nan  # and another layer
        cache = core.KvCache(memory, at.geometry.page_size)
        out = torch.full_like(q, math.nan)
        attention(cache, 1, plan, q, out, SCALE)
        torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6, msg=lambda m: f"{plan}: {m}")  # noqa: B023
        count += sum(map(bool, reads))
    return count
