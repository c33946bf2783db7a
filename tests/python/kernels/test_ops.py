"""Host operations through the bindings: values against torch, operand errors, aliasing, threads."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from dlpack_ctypes import Producer
from specrs import _specrs as core

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(3)


# -- matrix products and norms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype: torch.dtype, rng: torch.Generator) -> None:
    weight = torch.randn(40, 24, generator=rng).to(dtype)
    bias, norm = torch.randn(40, generator=rng), torch.rand(24, generator=rng)
    x, residual, out = torch.randn(5, 24, generator=rng), torch.randn(5, 40, generator=rng), torch.empty(5, 40)
    packed = core.PackedLinear(weight, bias, storage=DTYPES[dtype])
    assert (packed.in_features, packed.out_features, packed.storage) == (24, 40, DTYPES[dtype])
    assert packed.nbytes >= 40 * 24 * dtype.itemsize
    packed.forward(x, out)
    assert torch.allclose(out, x @ weight.float().T + bias, atol=1e-5)
    packed.forward(x, out, residual, norm, 1e-5)
    normed = torch.nn.functional.rms_norm(x, (24,), norm, 1e-5)
    want = normed @ weight.float().T + bias + residual
    assert torch.allclose(out, want, atol=1e-5)
    packed.forward(x, residual, residual=residual, norm=norm, eps=1e-5)  # in place
    assert torch.equal(residual, out)
    del weight, bias
    gc.collect()
    alone = torch.empty(1, 40)
    packed.forward(x[2:3], alone, norm=norm, eps=1e-5)
    packed.forward(x, out, norm=norm, eps=1e-5)
    assert torch.equal(alone[0], out[2])  # to the bit


def test_gated_linear(rng: torch.Generator) -> None:
    weight, norm = torch.randn(48, 16, generator=rng), torch.rand(16, generator=rng)
    x, out = torch.randn(3, 16, generator=rng), torch.empty(3, 24)
    packed = core.PackedLinear(weight, storage="f32", gated=True)
    packed.forward_swiglu(x, out, norm, 1e-6)
    gate, up = (torch.nn.functional.rms_norm(x, (16,), norm, 1e-6) @ weight.T).chunk(2, -1)
    assert torch.allclose(out, torch.nn.functional.silu(gate) * up, atol=1e-5)
    with pytest.raises(core.ConfigError, match="gate_up"):
        packed.forward(x, torch.empty(3, 48))
    with pytest.raises(core.ConfigError, match="plain"):
        core.PackedLinear(weight).forward_swiglu(x, torch.empty(3, 48))


def test_rms_norm(rng: torch.Generator) -> None:
    x, weight, out = torch.randn(4, 10, generator=rng), torch.rand(10, generator=rng), torch.empty(4, 10)
    core.rms_norm(x, weight, 1e-5, out)
    assert torch.allclose(out, torch.nn.functional.rms_norm(x, (10,), weight, 1e-5), atol=1e-6)
    core.rms_norm(x.numpy(), weight.numpy(), 1e-5, out.numpy())  # any producer
    for eps in [-1.0, float("nan"), float("inf")]:
        with pytest.raises(core.ConfigError, match="eps"):
            core.rms_norm(x, weight, eps, out)


def test_no_rows() -> None:
    out = torch.empty(0, 8)
    core.PackedLinear(torch.zeros(8, 4)).forward(torch.empty(0, 4), out)
    core.rms_norm(torch.empty(0, 8), torch.ones(8), 0.0, out)


@pytest.mark.parametrize(
    ("x", "out", "operand"),
    [
        (torch.zeros(2, 5), torch.zeros(2, 8), "x"),
        (torch.zeros(4), torch.zeros(2, 8), "x"),
        (torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(2, 8), "x"),
        (torch.zeros(4, 2).t(), torch.zeros(2, 8), "x"),
        ([[0.0] * 4], torch.zeros(1, 8), "x"),
        (torch.zeros(2, 4), torch.zeros(3, 8), "out"),
        (torch.zeros(2, 4), torch.zeros(2, 7), "out"),
        (torch.zeros(2, 4), torch.zeros(2, 8, dtype=torch.float64), "out"),
        (torch.zeros(2, 4), torch.zeros(2, 16)[:, :8], "out"),
        (torch.zeros(2, 4), torch.zeros(1).expand(2, 8), "out"),
        (torch.zeros(2, 4), None, "out"),
    ],
)
def test_operands_of_linear(x: Any, out: Any, operand: str) -> None:
    packed = core.PackedLinear(torch.zeros(8, 4))
    with pytest.raises(core.ConfigError) as e:
        packed.forward(x, out)
    assert e.value.operand == operand
    assert e.value.got
    assert e.value.want


def test_operands_of_packing() -> None:
    for args in [
        (torch.zeros(4),),
        (torch.zeros(2, 2, 2),),
        (torch.zeros(4, 4, dtype=torch.int32),),
        (torch.zeros(4, 4).t()[:2].t(),),
        (torch.zeros(4, 4), torch.zeros(5)),
        (torch.zeros(4, 4), torch.zeros(4, dtype=torch.bfloat16)),
        (torch.zeros(4, 0),),
        (torch.zeros(4, 4), None, "int4"),
        (torch.zeros(3, 4), None, "f32", True),
    ]:
        with pytest.raises(core.ConfigError):
            core.PackedLinear(*args)


# -- aliasing and read-only memory ----------------------------------------------------------------------------------


def test_outputs_overlap_nothing() -> None:
    memory = torch.zeros(64)
    x, overlapping, apart = memory[:8].view(2, 4), memory[7:23].view(2, 8), memory[8:24].view(2, 8)
    packed = core.PackedLinear(torch.zeros(8, 4))
    with pytest.raises(core.ConfigError) as e:
        packed.forward(x, overlapping)
    assert (e.value.operand, e.value.got) == ("out", "memory that x uses too")
    packed.forward(x, apart)
    norm, residual = memory[8:12], memory[20:36].view(2, 8)
    with pytest.raises(core.ConfigError, match="memory that norm uses too"):
        packed.forward(x, apart, norm=norm)
    with pytest.raises(core.ConfigError, match="memory that residual uses too"):
        packed.forward(x, apart, residual)
    square = torch.zeros(2, 4)
    with pytest.raises(core.ConfigError, match="memory that x uses too"):
        core.rms_norm(square, torch.ones(4), 0.0, square)
    with pytest.raises(core.ConfigError, match="memory that x uses too"):
        core.rms_norm(square, torch.ones(4), 0.0, np.from_dlpack(square))  # through another library


def test_read_only_outputs() -> None:
    out = np.zeros((2, 4), dtype=np.float32)
    out.flags.writeable = False
    x = np.ones((2, 4), dtype=np.float32)
    x.flags.writeable = False
    with pytest.raises(core.ConfigError, match="read-only"):
        core.rms_norm(torch.ones(2, 4), torch.ones(4), 0.0, out)
    core.rms_norm(x, torch.ones(4), 0.0, torch.empty(2, 4))  # to read is fine
    producer = Producer([0.0] * 8, [2, 4], flags=1)
    with pytest.raises(core.ConfigError, match="read-only"):
        core.rms_norm(torch.ones(2, 4), torch.ones(4), 0.0, producer)
    assert producer.deleted == 1


def test_a_copy_is_no_output() -> None:
    producer = Producer([0.0] * 8, [2, 4], flags=2)
    with pytest.raises(core.ConfigError, match="copy"):
        core.rms_norm(torch.ones(2, 4), torch.ones(4), 0.0, producer)


def test_outputs_of_other_libraries_are_written() -> None:
    producer = Producer([0.0] * 4, [2, 2])
    core.rms_norm(torch.tensor([[3.0, 3.0], [4.0, 4.0]]), torch.ones(2), 0.0, producer)
    assert list(producer.values) == [1.0, 1.0, 1.0, 1.0]


# -- the cache ------------------------------------------------------------------------------------------------------


def cache_of(page_size: int = 4, dtype: torch.dtype = torch.float32, layers: int = 2) -> core.KvCache:
    return core.KvCache(torch.zeros(layers, 2, 16 * page_size, 2, 8, dtype=dtype), page_size)


def world(page_size: int = 4) -> tuple[core.Pool, core.Planner, core.Sequence, core.Lease]:
    """16 pages and one sequence with 8 positions reserved."""
    g = core.Geometry(2, 24, page_size, core.TreeShape(2, 2, 4))
    pool = core.Pool(16, page_size, 2, g.row_pages)
    seq = pool.create()
    return pool, core.Planner(g, pool), seq, pool.reserve([(seq, 8)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 2, 32, 2, 8, dtype=dtype)
    cache = core.KvCache(tensor, 4)
    assert cache.tensor is tensor
    assert (cache.layers, cache.num_slots, cache.kv_heads, cache.head_dim, cache.page_size) == (3, 32, 2, 8, 4)
    assert cache.dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("tensor", "page_size"),
    [
        (torch.zeros(3, 2, 32, 2, 8), 3),
        (torch.zeros(3, 2, 32, 2, 8), 64),
        (torch.zeros(3, 2, 32, 2, 8), 0),
        (torch.zeros(3, 2, 32, 2, 8), -4),
        (torch.zeros(3, 2, 32, 2, 8), 2**70),
        (torch.zeros(3, 3, 32, 2, 8), 4),
        (torch.zeros(0, 2, 32, 2, 8), 4),
        (torch.zeros(3, 2, 32, 16), 4),
        (torch.zeros(3, 2, 32, 2, 8, dtype=torch.float16), 4),
        (torch.zeros(3, 2, 32, 8, 2).transpose(3, 4), 4),
        (torch.zeros(1).expand(3, 2, 32, 2, 8), 4),
        ("tensor", 4),
    ],
)
def test_tensors_that_are_no_cache(tensor: Any, page_size: int) -> None:
    with pytest.raises(core.ConfigError):
        core.KvCache(tensor, page_size)


def test_cache_keeps_its_memory_alive() -> None:
    _, planner, seq, lease = world()
    cache = core.KvCache(np.zeros((1, 2, 64, 2, 8), dtype=np.float32), 4)
    gc.collect()
    plan = planner.extend([seq], [0], [3])
    k = torch.ones(3, 2, 8)
    core.kv_write(cache, 0, plan, k, 2 * k)
    slots = plan.out_slots.tolist()
    assert cache.tensor[0, 0, slots].sum() == 48
    assert cache.tensor[0, 1, slots].sum() == 96
    assert cache.tensor.sum() == 144
    lease.rollback()


def test_kv_write_and_move(rng: torch.Generator) -> None:
    _, planner, seq, lease = world()
    cache = cache_of()
    plan = planner.extend([seq], [0], [5])
    k, v = torch.randn(5, 2, 8, generator=rng), torch.randn(5, 2, 8, generator=rng)
    core.kv_write(cache, 1, plan, k, v)
    slots = plan.out_slots.tolist()
    assert torch.equal(cache.tensor[1, 0, slots], k)
    assert torch.equal(cache.tensor[1, 1, slots], v)
    assert cache.tensor[0].abs().sum() == 0
    core.kv_move(cache, core.Moves(slots[:2], [40, 41], cache.num_slots))
    assert torch.equal(cache.tensor[:, :, [40, 41]], cache.tensor[:, :, slots[:2]])
    before = cache.tensor.clone()
    with pytest.raises(core.OutOfBoundsError) as e:
        core.kv_move(cache, core.Moves([1, 2], [3, 64], 65))
    assert (e.value.index, e.value.bound) == (64, 64)
    for layer in [2, 2**40]:
        with pytest.raises(core.OutOfBoundsError):
            core.kv_write(cache, layer, plan, k, v)
    with pytest.raises(core.ConfigError):
        core.kv_write(cache, -1, plan, k, v)
    with pytest.raises(core.ConfigError, match="k: got shape"):
        core.kv_write(cache, 0, plan, k[:4], v)
    with pytest.raises(core.ConfigError, match="kv cache: got memory that k uses too"):
        core.kv_write(cache, 0, plan, cache.tensor[0, 0, :5], v)
    with pytest.raises(core.ConfigError, match="plan: got pages of 4 tokens"):
        core.kv_write(cache_of(8), 0, plan, k, v)
    small = core.KvCache(torch.zeros(2, 2, 4, 2, 8), 4)
    with pytest.raises(core.OutOfBoundsError):
        core.kv_write(small, 0, plan, k, v)
    assert small.tensor.abs().sum() == 0
    assert torch.equal(cache.tensor, before)
    lease.rollback()
    with pytest.raises(core.StaleHandleError):
        core.kv_write(cache, 0, plan, k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 4])
def test_attention(page_size: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    _, planner, seq, lease = world(page_size)
    cache = cache_of(page_size, dtype)
    k, v = torch.randn(8, 2, 8, generator=rng), torch.randn(8, 2, 8, generator=rng)
    core.kv_write(cache, 0, planner.extend([seq], [0], [8]), k, v)
    k, v = k.to(dtype).float(), v.to(dtype).float()
    q = torch.randn(3, 4, 8, generator=rng)
    plan = planner.extend([seq], [5], [3])
    out, reference = torch.empty(3, 4, 8), torch.empty(3, 4, 8)
    core.attention(cache, 0, plan, q, out, 0.5)
    core.attention_reference(cache, 0, plan, q, reference, 0.5)
    kk, vv = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, kk) * 0.5
    scores = scores.masked_fill(~torch.ones(3, 8, dtype=torch.bool).tril(5), float("-inf"))
    want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), vv)
    assert torch.allclose(out, want, atol=1e-5)
    assert torch.allclose(reference, want, atol=1e-5)
    lease.rollback()


def test_operands_of_attention() -> None:
    _, planner, seq, lease = world()
    cache = cache_of()
    plan = planner.extend([seq], [0], [3])
    q, out = torch.zeros(3, 4, 8), torch.full((3, 4, 8), 7.0)
    calls: list[tuple[Any, ...]] = [
        (cache, 0, plan, torch.zeros(2, 4, 8), out, 1.0),
        (cache, 0, plan, torch.zeros(3, 3, 8), torch.zeros(3, 3, 8), 1.0),  # 3 heads over 2
        (cache, 0, plan, torch.zeros(3, 4, 16), out, 1.0),
        (cache, 0, plan, q, out[:2], 1.0),
        (cache, 0, plan, q, q, 1.0),
        (cache, 0, plan, q, cache.tensor.view(-1)[: 3 * 4 * 8].view(3, 4, 8), 1.0),
        (cache, 0, plan, q, out, float("nan")),
        (cache, -1, plan, q, out, 1.0),
        (cache_of(8), 0, plan, q, out, 1.0),
    ]
    for call in calls:
        for op in [core.attention, core.attention_reference]:
            with pytest.raises(core.ConfigError):
                op(*call)
    for layer in [2, 2**33]:
        with pytest.raises(core.OutOfBoundsError, match="layers"):
            core.attention(cache, layer, plan, q, out, 1.0)
    assert (out == 7).all()
    assert cache.tensor.abs().sum() == 0
    lease.rollback()
    with pytest.raises(core.StaleHandleError):
        core.attention(cache, 0, plan, q, out, 1.0)


def test_rope_attention_is_its_parts(rng: torch.Generator) -> None:
    _, planner, seq, lease = world()
    fused, parts = cache_of(), cache_of()
    angles = torch.rand(16, 4, generator=rng)
    rope = core.RopeTable(angles.cos(), angles.sin())
    assert (rope.positions, rope.rotary_dim) == (16, 8)
    plan = planner.extend([seq], [0], [6])
    qkv = torch.randn(6, (4 + 2 * 2) * 8, generator=rng)
    q_norm, k_norm = torch.rand(8, generator=rng), torch.rand(8, generator=rng)
    out, want = torch.empty(6, 32), torch.empty(6, 4, 8)
    core.rope_attention(fused, 1, plan, qkv, rope, 4, out, 0.25, q_norm, k_norm, 1e-6)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        cos, sin = angles[:6, None].cos(), angles[:6, None].sin()
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    q, k, v = qkv.view(6, 8, 8).split((4, 2, 2), 1)
    q = rotate(torch.nn.functional.rms_norm(q, (8,), q_norm, 1e-6))
    k = rotate(torch.nn.functional.rms_norm(k, (8,), k_norm, 1e-6))
    core.kv_write(parts, 1, plan, k.contiguous(), v.contiguous())
    core.attention_reference(parts, 1, plan, q.contiguous(), want, 0.25)
    assert torch.allclose(fused.tensor, parts.tensor, atol=1e-5)
    assert torch.allclose(out.view(6, 4, 8), want, atol=1e-4)
    written = cache_of()
    core.rope_write(written, 1, plan, qkv[:, 4 * 8 :].contiguous(), rope, k_norm, 1e-6)
    assert torch.equal(written.tensor, fused.tensor)

    before = fused.tensor.clone()
    calls: list[tuple[Any, ...]] = [
        (qkv, rope, 3, out, 0.25),
        (qkv, rope, 0, out, 0.25),
        (qkv, rope, 2**50, out, 0.25),
        (qkv, rope, 4, torch.empty(6, 4, 8), 0.25),
        (qkv[:5], rope, 4, out, 0.25),
        (qkv, rope, 4, qkv.view(-1)[:192].view(6, 32), 0.25),
        (qkv, rope, 4, out, 0.25, torch.rand(7)),
        (qkv, rope, 4, out, 0.25, None, torch.rand(8), -1.0),
        (qkv, core.RopeTable(torch.ones(16, 5), torch.ones(16, 5)), 4, out, 0.25),
    ]
    for call in calls:
        with pytest.raises(core.ConfigError):
            core.rope_attention(fused, 1, plan, *call)
    short = core.RopeTable(torch.ones(5, 4), torch.ones(5, 4))
    with pytest.raises(core.OutOfBoundsError, match="rope table"):
        core.rope_attention(fused, 1, plan, qkv, short, 4, out, 0.25)
    with pytest.raises(core.OutOfBoundsError, match=r"rope_write.*rope table"):
        core.rope_write(fused, 1, plan, qkv[:, 32:].contiguous(), short)
    rows: list[tuple[Any, ...]] = [(qkv,), (qkv[:5, 32:].contiguous(),), (qkv[:, 32:],), (out[:, :16].double(),)]
    for call in [*((1, plan, *r, rope) for r in rows), (2**40, plan, qkv[:, 32:].contiguous(), rope)]:
        with pytest.raises(core.SpecrsError):
            core.rope_write(fused, *call)
    with pytest.raises(core.ConfigError):
        core.RopeTable(torch.ones(5, 4), torch.ones(4, 4))
    assert torch.equal(fused.tensor, before)
    lease.rollback()


# -- threads --------------------------------------------------------------------------------------------------------


def test_the_gil_is_released() -> None:
    packed = core.PackedLinear(torch.zeros(4096, 4096), storage="f32")
    x, out = torch.ones(64, 4096), torch.empty(64, 4096)
    counted, stop = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1

    thread = threading.Thread(target=count)
    thread.start()
    time.sleep(0.02)
    before, started = counted, time.perf_counter()
    packed.forward(x, out)
    during, spent = counted - before, time.perf_counter() - started
    stop.set()
    thread.join()
    assert during > 100, f"the other thread counted to {during} in {spent:.3f} s"


def test_one_cache_from_many_threads() -> None:
    _, planner, seq, lease = world()
    cache = cache_of()
    plan = planner.extend([seq], [0], [4])
    slots = plan.out_slots.tolist()
    torn: list[int] = []

    def write(value: int) -> None:
        k = torch.full((4, 2, 8), float(value))
        q, out = torch.zeros(4, 4, 8), torch.empty(4, 4, 8)
        for _ in range(200):
            core.kv_write(cache, 0, plan, k, k)
            core.attention(cache, 0, plan, q, out, 1.0)
            # Uniform values whoever wrote last: a torn write would mix them.
            torn.extend(int(u.item() * 100) for u in out.unique() if u.item() not in (1.0, 2.0, 3.0, 4.0))

    threads = [threading.Thread(target=write, args=(i + 1,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not torn
    assert cache.tensor[0, :, slots].unique().numel() == 1
    lease.rollback()


def test_thread_count() -> None:
    before = core.num_threads()
    assert 1 <= before <= 8
    try:
        core.set_num_threads(1)
        assert core.num_threads() == 1
        for n in [0, -1, 2**40, 2**100]:
            with pytest.raises(core.ConfigError, match="threads"):
                core.set_num_threads(n)
        assert core.num_threads() == 1
    finally:
        core.set_num_threads(before)
