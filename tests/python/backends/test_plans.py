"""Each backend over the planner's own arrays: its attention is that of the plan's form, and reads nothing else."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from backend_rounds import CONTEXT, DIM, HEADS, KV_HEADS, SCALE, VOCAB, Round, check_round, reference
from specrs import ConfigError
from specrs import _specrs as core
from specrs.backends import FlashAttention, FlashInfer, Native, PlanAttention, Triton
from specrs.models import TorchAttention

# (backend, draft layout, what branches attend to): all that there is.
ABLE = [
    (backend, layout, mode)
    for backend in (FlashInfer("bool"), FlashInfer("packed"), Triton(), FlashAttention())
    for layout, modes in backend.draft_attention.items()
    for mode in modes
]
NAMES = [f"{b.name}{'-' + b.mask if b.name == 'flashinfer' else ''}-{layout}-{mode}" for b, layout, mode in ABLE]


def lengths(rng: random.Random, page: int, batch: int) -> list[int]:
    """Return mixed lengths, with page borders, 0, and the end of the context among them."""
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
    """The reference of these tests is equal to `TorchAttention` over native plans, and to the Rust kernels."""
    at = Round.of(Native(), "dense", (3, 3, 12), 4, [9, 1, 30], 3)
    memory = torch.randn(1, 2, at.pool.num_pages * 4, KV_HEADS, DIM, generator=at.generator)
    cache = core.KvCache(memory, 4)
    for plan in at.plans(mode):
        q = torch.randn(plan.queries, HEADS, DIM, generator=at.generator)
        want = reference(q, memory[0], at.reads(plan))
        out = torch.zeros_like(q)
        TorchAttention()(cache, 0, plan, q, out, SCALE)
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
