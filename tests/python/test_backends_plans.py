"""Each backend over the planner's own arrays: its attention is that of the plan's form, and reads nothing else.

The pool is NaN in every slot that the plan does not let a query read, so that one slot too many shows in the result,
and one too few in its value.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from specrs import ConfigError
from specrs import _specrs as core
from specrs.backends import FlashAttention, FlashInfer, Native, PlanAttention, Triton
from specrs.models.ops import _attend

HEADS, KV_HEADS, DIM, VOCAB, CONTEXT = 4, 2, 8, 40, 70
SCALE = 0.4

# (backend, draft layout, what branches attend to): all that there is.
ABLE = [
    (backend, layout, mode)
    for backend in (FlashInfer("bool"), FlashInfer("packed"), Triton(), FlashAttention())
    for layout, modes in backend.draft_attention.items()
    for mode in modes
]
NAMES = [f"{b.name}{'-' + b.mask if b.name == 'flashinfer' else ''}-{layout}-{mode}" for b, layout, mode in ABLE]


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


def lengths(rng: random.Random, page: int, batch: int) -> list[int]:
    """Mixed, with page borders, nothing, and the end of the context among them."""
    borders = [n for m in range(1, CONTEXT // page + 1) for n in (m * page - 1, m * page, m * page + 1)]
    picks = [*borders, 0, 1, CONTEXT - 1, CONTEXT - 2, CONTEXT - 3, rng.randrange(CONTEXT), rng.randrange(CONTEXT)]
    return [min(rng.choice(picks), CONTEXT - 1) for _ in range(batch)]


TREES = [(1, 1, 2), (1, 4, 5), (2, 3, 8), (3, 2, 9), (4, 3, 20), (8, 2, 40)]


@pytest.mark.parametrize(("backend", "layout", "mode"), ABLE, ids=NAMES)
@pytest.mark.parametrize("page", [1, 4, 16, 64])
def test_attention_is_that_of_the_plan(backend: Any, layout: Any, mode: Any, page: int) -> None:
    rng = random.Random(page)
    for i, tree in enumerate(TREES):
        lens = lengths(rng, page, [3, 1, 5, 2, 4, 3][i])
        if mode == "ancestors" or tree[0] == 1 or page > 1:
            assert check_round(Round.of(backend, layout, tree, page, lens, i), backend, layout, mode) > 0


@pytest.mark.long
@pytest.mark.parametrize(("backend", "layout", "mode"), ABLE, ids=NAMES)
@pytest.mark.parametrize("seed", range(40))
def test_attention_is_that_of_the_plan_at_random(backend: Any, layout: Any, mode: Any, seed: int) -> None:
    rng = random.Random(seed)
    k, s = rng.randrange(1, 9), rng.randrange(1, 7)
    tree = (k, s, rng.randrange(1, min(64, 1 + k + (s - 1) * k * k) + 1))
    page = 2 ** rng.randrange(7)
    lens = lengths(rng, page, rng.randrange(0, 7))
    dtype = rng.choice([torch.float32, torch.bfloat16])
    check_round(Round.of(backend, layout, tree, page, lens, seed), backend, layout, mode, dtype)


@pytest.mark.parametrize(("backend", "layout", "mode"), ABLE, ids=NAMES)
def test_a_batch_of_nothing(backend: Any, layout: Any, mode: Any) -> None:
    assert check_round(Round.of(backend, layout, (2, 3, 8), 4, [], 0), backend, layout, mode) == 0


@pytest.mark.parametrize(("backend", "layout", "mode"), ABLE, ids=NAMES)
def test_bfloat16_pools(backend: Any, layout: Any, mode: Any) -> None:
    assert check_round(Round.of(backend, layout, (3, 3, 12), 4, [9, 4, 30], 1), backend, layout, mode, torch.bfloat16)


@pytest.mark.parametrize(("backend", "layout", "mode"), ABLE, ids=NAMES)
def test_padded_requests_and_queries_give_nothing(backend: Any, layout: Any, mode: Any) -> None:
    at = Round.of(backend, layout, (2, 2, 4), 4, [6, 9, 3, 2], 2)
    some, lens = at.seqs[:2], at.lens[:2]
    beams = core.DraftBeams(2, at.geometry.shape, None, VOCAB)
    beams.start(at.logits(2))
    trees = beams.finish([1, 1], [2, 2], [4, 4])
    plans = [
        at.planner.extend(some, [3, 0], [3, 5], pad=(4, 11)),
        at.planner.decode(some, lens, pad=(4, 4)),
        at.planner.draft(some, lens, 0, beams, mode, pad=(4, 8)),
        at.planner.verify(some, lens, trees, pad=(4, 16)),
    ]
    memory = torch.randn(1, 2, at.pool.num_pages * 4, KV_HEADS, DIM, generator=at.generator)
    core.kv_move(core.KvCache(memory, 4), at.planner.tail_copies(some, lens))
    memory[:, :, :4] = math.nan  # the sink
    for plan in plans:
        live = plan.live_queries
        assert live < plan.queries
        q = torch.randn(plan.queries, HEADS, DIM, generator=at.generator)
        out = torch.full_like(q, math.nan)
        PlanAttention(backend)(core.KvCache(memory, 4), 0, plan, q, out, SCALE)
        assert not out[live:].any()
        at.lens = lens
        torch.testing.assert_close(out, reference(q, memory[0], at.reads(plan)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["ancestors", "lane"])
def test_the_reference_here_is_that_of_the_models(mode: Any) -> None:
    """What these tests compare with is what `TorchOps` makes of native plans, and what the Rust kernels do."""
    at = Round.of(Native(), "dense", (3, 3, 12), 4, [9, 1, 30], 3)
    memory = torch.randn(1, 2, at.pool.num_pages * 4, KV_HEADS, DIM, generator=at.generator)
    cache = core.KvCache(memory, 4)
    for plan in at.plans(mode):
        q = torch.randn(plan.queries, HEADS, DIM, generator=at.generator)
        want = reference(q, memory[0], at.reads(plan))
        out = torch.zeros_like(q)
        _attend(cache, 0, plan, q, out, SCALE)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
        PlanAttention(Native())(cache, 0, plan, q, out, SCALE)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_arrays_of_another_format_are_refused() -> None:
    at = Round.of(FlashInfer(), "dense", (2, 2, 4), 4, [6], 4)
    plan = at.planner.decode(at.seqs, at.lens)
    cache = core.KvCache(torch.zeros(1, 2, at.pool.num_pages * 4, KV_HEADS, DIM), 4)
    q = torch.zeros(1, HEADS, DIM)
    for backend in (FlashAttention(), Triton()):
        with pytest.raises(ConfigError, match=f"'flashinfer'; the attention backend '{backend.name}'"):
            PlanAttention(backend)(cache, 0, plan, q, q.clone(), SCALE)
    with pytest.raises(ConfigError, match="flashinfer"):
        PlanAttention(Native())(cache, 0, plan, q, q.clone(), SCALE)
