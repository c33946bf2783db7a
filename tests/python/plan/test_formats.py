"""The arrays of the formats through the bindings: values, capacities, what is refused, batches at the edge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from dlpack_ctypes import Producer
from formats_world import (
    CANARY,
    FORMATS,
    LARGEST,
    LISTS,
    PHASES,
    SHAPE,
    TORCH,
    TREES,
    Caller,
    Format,
    Phase,
    World,
    used,
    values,
)
from specrs import _specrs as core


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_the_same_arrays_wherever_they_are_written(format: Format, phase: Phase, page_size: int, padded: bool) -> None:
    w = World(format, page_size)
    pad = LARGEST[phase] if padded else None
    want_plan = w.plan(phase, pad=pad)
    want = values(want_plan)
    assert want and any(x for x in want.values())
    caller = Caller(w.planner, phase, grow=60)
    numpy = {name: t.numpy().copy() for name, t in Caller(w.planner, phase, grow=60).tensors.items()}
    given: list[tuple[core.FormatBuffers, Any]] = [
        (w.planner.buffers(phase), None),
        (w.planner.buffers(phase, tensors=caller.tensors), caller.tensors),
        (w.planner.buffers(phase, tensors=numpy), numpy),
    ]
    for buffers, tensors in given:
        # A longer prefix first: what it left must not shine through.
        for shorter in [0, 2, 1, 0]:
            plan = w.plan(phase, shorter=shorter, out=buffers, pad=pad)
            assert plan.format == format
            assert values(plan) == values(w.plan(phase, shorter=shorter, pad=pad))
        assert values(plan) == want
        assert {n: (a.shape, a.dtype) for n, a in plan.arrays().items()} == {
            n: (a.shape, a.dtype) for n, a in want_plan.arrays().items()
        }
        for name, array in plan.arrays().items():
            view = torch.from_dlpack(array)
            whole = torch.as_tensor((tensors or buffers.tensors())[name])
            assert view.data_ptr() == whole.data_ptr() or array.shape[0] == 0
            assert torch.equal(used(whole, array.shape), view)
            assert torch.equal(torch.from_numpy(np.from_dlpack(array)), view)
    caller.check_canaries()


@pytest.mark.parametrize("format", FORMATS)
def test_dtypes(format: Format) -> None:
    w = World(format)
    dtypes: dict[str, set[str]] = {}
    for phase in PHASES:
        arrays = w.plan(phase).arrays()
        assert {n: a.dtype for n, a in arrays.items()} == {
            n: c["dtype"] for n, c in w.planner.capacities(phase).items()
        }
        for name, array in arrays.items():
            dtypes.setdefault(name, set()).add(str(torch.from_dlpack(array).dtype))
    assert all(len(d) == 1 for d in dtypes.values())
    if format == "flash_attention":
        assert set().union(*dtypes.values()) == {"torch.int32"}
        return
    index = "torch.int32" if format == "flashinfer" else "torch.int64"
    assert dtypes["kv_indptr"] == {"torch.int32"}
    assert dtypes["kv_indices"] == {index}
    assert dtypes["custom_mask"] == {"torch.bool"}
    assert dtypes["qo_indptr"] == dtypes["mask_indptr"] == {index}
    if format == "flashinfer":
        assert dtypes["packed_custom_mask"] == {"torch.uint8"}


def test_masks_of_flashinfer() -> None:
    names = {mask: set(World("flashinfer", mask=mask).plan("verify").arrays()) for mask in ("both", "bool", "packed")}
    assert names["both"] - names["packed"] == {"custom_mask", "mask_indptr"}
    assert names["both"] - names["bool"] == {"packed_custom_mask", "packed_mask_indptr"}
    w = World("flashinfer")
    arrays = w.plan("verify").arrays()
    bits = np.from_dlpack(arrays["packed_custom_mask"])
    mask = np.from_dlpack(arrays["custom_mask"])
    starts, packed = arrays["mask_indptr"].tolist(), arrays["packed_mask_indptr"].tolist()
    for (a, b), (c, d) in zip(pairwise(starts), pairwise(packed), strict=True):
        assert np.array_equal(np.unpackbits(bits[c:d], bitorder="little")[: b - a], mask[a:b])
    with pytest.raises(core.ConfigError, match='want "both"'):
        World("flashinfer", mask="bits")  # type: ignore[arg-type]


def test_a_caller_may_keep_its_mask_in_bytes() -> None:
    w = World("triton")
    tensors = Caller(w.planner, "verify").tensors
    tensors["custom_mask"] = torch.full(tensors["custom_mask"].shape, 7, dtype=torch.uint8)
    plan = w.plan("verify", out=w.planner.buffers("verify", tensors=tensors))
    array = plan.arrays()["custom_mask"]
    assert array.dtype == "uint8"
    assert [bool(x) for x in array.tolist()] == values(w.plan("verify"))["custom_mask"]
    assert set(array.tolist()) == {0, 1}


# --- capacity


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("format", FORMATS)
def test_memory_below_the_capacity_is_refused_untouched(format: Format, phase: Phase) -> None:
    w = World(format)
    capacities = w.planner.capacities(phase)
    for name, c in capacities.items():
        caller = Caller(w.planner, phase)
        caller.tensors[name] = caller.tensors[name][..., :-1].contiguous()
        with pytest.raises(core.ConfigError) as e:
            w.planner.buffers(phase, tensors=caller.tensors)
        last = c["shape"][-1]
        assert (e.value.kind, e.value.what, e.value.need, e.value.have) == ("Capacity", name, last, last - 1)
        for part in [format, phase, c["formula"], "max_batch 4", "max_context_len 64", "topk 2", "page_size 4"]:
            assert part in e.value.hint, part
        assert caller.untouched()
        assert torch.all(caller.tensors[name].view(torch.uint8) == CANARY)
    # Exactly the capacity is enough.
    caller = Caller(w.planner, phase)
    plan = w.plan(phase, out=w.planner.buffers(phase, tensors=caller.tensors))
    assert values(plan) == values(w.plan(phase))
    caller.check_canaries()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_batch_beyond_its_buffers_changes_nothing(format: Format, phase: Phase) -> None:
    w = World(format)
    need = {n: a.shape for n, a in w.plan(phase).arrays().items()}
    sizes = w.planner.capacities(phase, max_batch=1)
    tensors = {n: torch.zeros(c["shape"], dtype=TORCH[c["dtype"]]) for n, c in sizes.items()}
    buffers = w.planner.buffers(phase, max_batch=1, tensors=tensors)
    assert buffers.max_batch == 1
    both, lens, seqs = TREES, w.lens, w.seqs
    one = core.TreeBatch.from_parents([[-1, 0, 0, 1]], [[5, 6, 7, 8]])
    beams = core.DraftBeams(1, SHAPE, None, 8)
    beams.start(torch.zeros(1, 8))
    p = w.planner
    first = {
        "extend": lambda: p.extend(seqs[:1], lens[:1], [2], out=buffers),
        "decode": lambda: p.decode(seqs[:1], lens[:1], out=buffers),
        "draft": lambda: p.draft(seqs[:1], lens[:1], 0, beams, out=buffers),
        "verify": lambda: p.verify(seqs[:1], lens[:1], one, out=buffers),
    }[phase]()
    del both
    before, held = values(first), {n: t.clone() for n, t in tensors.items()}
    with pytest.raises(core.ConfigError) as e:
        w.plan(phase, out=buffers)
    assert e.value.kind == "Capacity"
    assert (e.value.need, e.value.have) == (need[e.value.what][0], sizes[e.value.what]["shape"][0])
    for part in [format, phase, "2 requests", "max_context_len 64", "topk 2"]:
        assert part in str(e.value), part
    assert buffers.generation == 1
    assert values(first) == before  # not stale: nothing was written
    assert all(torch.equal(t, held[n]) for n, t in tensors.items())


def test_padding_counts() -> None:
    w = World("flashinfer")
    buffers = w.planner.buffers("decode", max_batch=2)
    assert values(w.plan("decode", out=buffers, pad=(2, 2))) == values(w.plan("decode"))
    with pytest.raises(core.ConfigError) as e:
        w.plan("decode", out=buffers, pad=(3, 3))
    assert (e.value.kind, e.value.what, e.value.need, e.value.have) == ("Capacity", "kv_indptr", 4, 3)
    for pad, what in [((1, 2), "bucket requests"), ((2, 1), "bucket queries")]:
        with pytest.raises(core.ConfigError) as e:
            w.plan("decode", pad=pad)
        assert (e.value.kind, e.value.what) == ("Capacity", what)
    with pytest.raises(core.ConfigError, match="pad requests"):
        w.plan("decode", pad=(-1, 2))


@pytest.mark.parametrize("format", FORMATS)
def test_capacities_and_sizes(format: Format) -> None:
    w = World(format)
    for phase in PHASES:
        capacities = w.planner.capacities(phase)
        lens = w.planner.sizes(phase, w.lens)
        device = w.planner.sizes(phase, core.DeviceLens(2, max(w.lens)))
        plan = w.plan(phase)
        assert set(capacities) == set(lens) == set(device) == set(plan.arrays())
        for name, c in capacities.items():
            assert c["bytes"] == np.prod(c["shape"]) * TORCH[c["dtype"]].itemsize
            assert "formula" in c and "formula" not in lens[name]
            got = plan.arrays()[name].shape
            assert all(a <= b <= c for a, b, c in zip(got, lens[name]["shape"], device[name]["shape"], strict=True))
            assert all(a <= b for a, b in zip(device[name]["shape"], c["shape"], strict=True))
        # The buffers that specrs makes are those sizes.
        whole = w.planner.buffers(phase).tensors()
        assert {n: (a.shape, a.dtype) for n, a in whole.items()} == {
            n: (c["shape"], c["dtype"]) for n, c in capacities.items()
        }
    draft = w.planner.capacities("draft")
    if format == "flash_attention":
        assert draft["expand_page_table"]["formula"] == "max_batch 4 * topk 2 * step + 1 3"
        steps = [w.planner.capacities("draft", t)["expand_page_table"]["shape"] for t in range(3)]
        assert steps == [(8, 1), (8, 2), (8, 3)]
    else:
        assert draft["kv_indices"]["formula"] == "max_batch 4 * topk 2 * max_context_len 64"
        assert w.planner.capacities("draft", max_batch=0)["kv_indices"]["shape"] == (0,)


def test_lengths_on_the_device_are_never_read() -> None:
    w = World("flashinfer")
    lens = core.DeviceLens(2, 5)
    assert (lens.batch, lens.at_most) == (2, 5)
    assert lens == core.DeviceLens(2, 5) != core.DeviceLens(2, 6)
    for call in [
        lambda: w.planner.extend(w.seqs, lens, [1, 1]),
        lambda: w.planner.decode(w.seqs, lens),
        lambda: w.planner.draft(w.seqs, lens, 0, w.beams),
        lambda: w.planner.verify(w.seqs, lens, TREES),
        lambda: w.planner.tail_copies(w.seqs, lens),
    ]:
        with pytest.raises(core.ConfigError, match=r"device lengths of 2 requests \(<= 5\)"):
            call()
    with pytest.raises(core.ConfigError, match="length bound"):
        w.planner.sizes("decode", core.DeviceLens(2, 65))
    for many in ([1] * 5, core.DeviceLens(5, 1)):
        with pytest.raises(core.ConfigError, match=r"requests = 5 is outside 0..=4"):
            w.planner.sizes("decode", many)
    for bad in [(-1, 5), (2, -1), (2**32, 1)]:
        with pytest.raises(core.ConfigError):
            core.DeviceLens(*bad)


# --- what is refused


def bad_tensors() -> Iterator[tuple[str, Callable[[torch.Tensor], Any], str]]:
    yield "dtype", lambda t: t.to(torch.int16), "int16.*want int32"
    yield "float", lambda t: t.to(torch.float32), "float32.*want int32"
    yield "wider", lambda t: t.to(torch.int64), "int64.*want int32"
    yield "rank", lambda t: t.unsqueeze(0), "dimension"
    yield "scalar", lambda t: torch.tensor(1, dtype=torch.int32), "dimension"
    yield "strided", lambda t: torch.zeros(2 * t.numel(), dtype=t.dtype)[::2], "contiguous"
    yield "expanded", lambda t: torch.zeros(1, dtype=t.dtype).expand(t.shape), "contiguous|stride 0"
    yield "device", lambda t: Producer([0.0] * t.numel(), code=0, device_type=2), "cuda:0.*on cpu"
    yield "read-only", lambda t: Producer([0.0] * t.numel(), code=0, flags=1), "read-only"
    yield "a copy", lambda t: Producer([0.0] * t.numel(), code=0, flags=2), "a copy"
    yield "misaligned", lambda t: Producer([0.0] * (t.numel() + 1), [t.numel()], code=0, byte_offset=2), "aligned"
    yield "no tensor", lambda t: [0] * t.numel(), "want a tensor"
    yield "nothing", lambda t: None, "want a tensor"


@pytest.mark.parametrize(("make", "match"), [x[1:] for x in bad_tensors()], ids=[x[0] for x in bad_tensors()])
def test_a_tensor_of_another_kind_is_refused_by_name(make: Callable[[torch.Tensor], Any], match: str) -> None:
    w = World("flashinfer")
    caller = Caller(w.planner, "verify")
    tensors = {**caller.tensors, "mask_indptr": make(caller.tensors["mask_indptr"])}
    with pytest.raises(core.ConfigError, match=f"(?s)mask_indptr.*({match})") as e:
        w.planner.buffers("verify", tensors=tensors)
    assert (e.value.kind, e.value.operand) == ("Mismatch", "mask_indptr")
    assert caller.untouched()


def test_tensors_that_share_memory_are_refused() -> None:
    w = World("flashinfer")
    caller = Caller(w.planner, "decode")
    block = torch.full((4096,), CANARY, dtype=torch.int32)
    n = caller.tensors["kv_indices"].numel()
    tensors = {**caller.tensors, "kv_indptr": block[:5], "kv_indices": block[4 : 4 + n]}
    with pytest.raises(core.ConfigError, match=r"kv_indices.*memory that kv_indptr uses"):
        w.planner.buffers("decode", tensors=tensors)
    assert torch.all(block == CANARY)
    tensors["kv_indices"] = block[5 : 5 + n]  # side by side is fine
    plan = w.plan("decode", out=w.planner.buffers("decode", tensors=tensors))
    assert values(plan) == values(w.plan("decode"))
    assert torch.all(block[5 + n :] == CANARY)
    # Nor may two buffers have one memory: what the one knows of its content the other would make false.
    before = block.clone()
    for lent in [tensors, {**caller.tensors, "kv_last_page_len": block[3:7]}]:
        with pytest.raises(core.ConfigError, match="memory that other buffers write"):
            w.planner.buffers("decode", tensors=lent)
    assert torch.equal(block, before)
    view = torch.from_dlpack(plan.arrays()["kv_indptr"])
    del plan
    again = w.planner.buffers("decode", tensors=tensors)  # a view of torch's is no writer
    assert (again.generation, view.tolist()) == (0, [0, 0, 0])
    del again
    w.planner.buffers("decode", tensors=tensors)


def test_missing_and_unknown_names() -> None:
    w = World("flashinfer")
    caller = Caller(w.planner, "verify")
    for name in ["kv_indptr", "kv_indices", "qo_indptr"]:
        tensors = {n: t for n, t in caller.tensors.items() if n != name}
        with pytest.raises(core.ConfigError, match=f"{name}: got none, want a tensor of int32.*flashinfer verify") as e:
            w.planner.buffers("verify", tensors=tensors)
        assert e.value.operand == name
    for extra in ["page_table", "KV_INDPTR", ""]:
        with pytest.raises(core.ConfigError, match="kv_indptr, kv_indices"):
            w.planner.buffers("verify", tensors={**caller.tensors, extra: torch.zeros(4)})
    with pytest.raises(core.ConfigError, match=r"custom_mask.*flashinfer decode.* arrays kv_indptr, kv_indices"):
        decode = Caller(w.planner, "decode")
        w.planner.buffers("decode", tensors={**decode.tensors, "custom_mask": torch.zeros(4)})
    assert caller.untouched() and decode.untouched()
    # One form of the mask may be left out, not both.
    some = {n: t for n, t in caller.tensors.items() if "packed" not in n and n != "kv_last_page_len"}
    plan = w.plan("verify", out=w.planner.buffers("verify", tensors=some))
    assert set(plan.arrays()) == set(some)
    assert values(plan).items() <= values(w.plan("verify")).items()
    del plan
    none = {n: t for n, t in some.items() if "mask" not in n}
    with pytest.raises(core.ConfigError, match="mask"):
        w.plan("verify", out=w.planner.buffers("verify", tensors=none))


def test_buffers_take_the_plans_that_they_were_made_for() -> None:
    w, other = World("flashinfer"), World("triton")
    verify = w.planner.buffers("verify")
    for phase in ["extend", "decode", "draft"]:
        with pytest.raises(core.ConfigError, match=f"phase verify, want {phase}") as e:
            w.plan(phase, out=verify)
        assert e.value.operand == "out"
    with pytest.raises(core.ConfigError, match="format flashinfer, want triton"):
        other.plan("verify", out=verify)
    with pytest.raises(core.ConfigError, match=r"another geometry.*max_batch 4"):
        World("flashinfer", max_batch=8).plan("verify", out=verify)
    assert verify.generation == 0
    # A planner of the same geometry may.
    twin = World("flashinfer")
    assert values(twin.plan("verify", out=verify)) == values(w.plan("verify"))


def test_draft_steps() -> None:
    w = World("flashinfer")
    any_step, first, second = (w.planner.buffers("draft", s) for s in [None, 0, 1])
    assert [b.step for b in (any_step, first, second)] == [None, 0, 1]
    plans = [w.plan("draft", out=any_step)]
    with pytest.raises(core.ConfigError, match="phase draft step 1, want draft step 0"):
        w.plan("draft", out=second)
    assert values(w.plan("draft", out=first)) == values(plans[0])
    w.beams.advance(torch.zeros(4, 8))
    for out in [any_step, second]:
        plan = w.planner.draft(w.seqs, w.lens, 1, w.beams, out=out)
        assert (plan.phase, plan.step) == ("draft", 1)
        assert values(plan) == values(w.planner.draft(w.seqs, w.lens, 1, w.beams))
    for step in [3, -1, 2**70]:
        with pytest.raises(core.ConfigError, match="step"):
            w.planner.buffers("draft", step)
    with pytest.raises(core.ConfigError, match="verify has no steps"):
        w.planner.buffers("verify", 0)
    with pytest.raises(core.ConfigError, match="phase"):
        w.planner.capacities("commit")  # type: ignore[arg-type]
    with pytest.raises(core.ConfigError, match="max_batch"):
        w.planner.buffers("verify", max_batch=5)


def test_formats_by_name() -> None:
    g = core.Geometry(4, 64, 4, SHAPE)
    pool = core.Pool(64, 4, 4, g.row_pages)
    assert core.Planner(g, pool).format == "native"
    for format in ["native", *FORMATS]:
        planner = core.Planner(g, pool, format=format)
        assert planner.format == planner.buffers("verify").format == format
    with pytest.raises(core.ConfigError, match="native, flashinfer"):
        core.Planner(g, pool, "paged")  # type: ignore[arg-type]
    w = World("native")
    plan = w.plan("verify")
    assert (plan.format, plan.arrays(), w.planner.capacities("verify")) == ("native", {}, {})
    assert 'format="native"' in repr(plan)


def test_kernels_refuse_plans_of_another_format() -> None:
    w, native = World("flashinfer"), World("native")
    plan, own = w.plan("decode"), native.plan("decode")
    cache = core.KvCache(torch.zeros(1, 2, 512, 1, 8), 4)
    q, out = torch.zeros(2, 1, 8), torch.full((2, 1, 8), 3.0)
    rope = core.RopeTable(torch.ones(64, 4), torch.zeros(64, 4))
    for kernel in [core.attention, core.attention_reference]:
        with pytest.raises(core.ConfigError, match='plan: got a plan of format "flashinfer", want format "native"'):
            kernel(cache, 0, plan, q, out, 1.0)
        kernel(cache, 0, own, q, out.clone(), 1.0)
    with pytest.raises(core.ConfigError, match="rope_attention reads no arrays"):
        core.rope_attention(cache, 0, plan, torch.zeros(2, 24), rope, 1, out.view(2, 8), 1.0)
    assert torch.all(out == 3.0)
    # Writes and moves know slots alone.
    k = torch.arange(16.0).view(2, 1, 8)
    core.kv_write(cache, 0, plan, k, -k)
    slots = plan.out_slots.tolist()
    assert torch.equal(cache.tensor[0, 0, slots], k)
    assert torch.equal(cache.tensor[0, 1, slots], -k)
    assert plan.page_table().shape[0] == 2


# --- batches at the edge


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("pad", [None, (0, 0), (3, 4)])
def test_empty_batch(format: Format, pad: tuple[int, int] | None) -> None:
    w = World(format)
    beams = core.DraftBeams(0, SHAPE, None, 8)
    beams.start(torch.zeros(0, 8))
    trees = core.TreeBatch.from_parents([], [])
    p = w.planner
    plans: dict[Phase, Callable[..., core.Plan]] = {
        "extend": lambda **k: p.extend([], [], [], **k),
        "decode": lambda **k: p.decode([], [], **k),
        "draft": lambda **k: p.draft([], [], 0, beams, **k),
        "verify": lambda **k: p.verify([], [], trees, **k),
    }
    for phase, make in plans.items():
        caller = Caller(p, phase)
        buffers = p.buffers(phase, tensors=caller.tensors)
        w.plan(phase, out=buffers)  # leaves values that must not show
        plan, own = make(out=buffers, pad=pad), make(pad=pad)
        assert (plan.batch, plan.queries) == (pad or (0, 0))
        assert (plan.live_batch, plan.live_queries) == (0, 0)
        assert values(plan) == values(own)
        assert set(own.arrays()) == set(w.plan(phase).arrays())
        for name in set(values(own)) & {"kv_indptr", "cu_seqlens_q", "cache_seqlens"}:
            assert set(values(own)[name]) <= {0}
        assert values(own).get("kv_indices", []) == []
        for array in plan.arrays().values():
            assert torch.from_dlpack(array).shape == array.shape
        caller.check_canaries()
        zero = p.buffers(phase, max_batch=0)
        if pad is None:
            assert values(make(out=zero)) == values(own)


@pytest.mark.parametrize("format", LISTS)
def test_padded_lists(format: Format) -> None:
    w = World(format)
    live, padded = w.plan("verify"), w.plan("verify", pad=(4, 9))
    assert (padded.batch, padded.queries, padded.live_batch, padded.live_queries) == (4, 9, 2, 6)
    a, b = values(live), values(padded)
    for name in ["kv_indptr", "qo_indptr", "mask_indptr"]:
        assert b[name] == a[name] + [a[name][-1]] * 2, name
    assert b["kv_indices"] == a["kv_indices"]
    assert b["custom_mask"] == a["custom_mask"]
    if format == "triton":
        assert b["extend_slots"] == a["extend_slots"] + [0] * 3
    draft = w.plan("draft", pad=(3, 6))
    indptr = values(draft)["kv_indptr"]
    assert indptr == [*values(w.plan("draft"))["kv_indptr"], *[indptr[-1]] * 2]


def test_padded_tables() -> None:
    w = World("flash_attention")
    live, padded = values(w.plan("verify")), values(w.plan("verify", pad=(4, 9)))
    assert padded["cache_seqlens"] == [5, 3, 0, 0]
    assert padded["page_table"] == live["page_table"] + [[0] * len(live["page_table"][0])] * 2
    assert padded["cu_seqlens_q"] == [0, 4, 6, 6, 6]
    assert padded["expand_cache_seqlens"] == live["expand_cache_seqlens"] + [0] * 3
    assert padded["expand_page_table"] == live["expand_page_table"] + [[0] * 3] * 3  # the deepest node has 3 ancestors
    assert [w.plan(p).expand_page_size for p in PHASES] == [None, None, 1, 1]
    assert World("triton").plan("verify").expand_page_size is None
    # A table in memory that is wider and higher: the rest of it is the sink.
    caller = Caller(w.planner, "verify", grow=7)
    buffers = w.planner.buffers("verify", tensors=caller.tensors)
    plan = w.plan("verify", out=buffers)
    table, whole = plan.arrays()["page_table"], caller.tensors["page_table"]
    assert values(plan) == live
    assert torch.from_dlpack(table).stride() == whole.stride()
    assert whole.count_nonzero() == torch.from_dlpack(table).count_nonzero() > 0
    w.plan("verify", shorter=3, out=buffers)
    assert whole[:2].tolist() == [[w.pool.pages(s)[0], *[0] * (whole.shape[1] - 1)] for s in w.sequences(3)[0][:1]] + [
        [0] * whole.shape[1]
    ]
    with pytest.raises(core.ConfigError, match="rows of") as e:
        few = {n: t[:-1] if n == "expand_page_table" else t for n, t in caller.tensors.items()}
        w.planner.buffers("verify", tensors=few)
    assert (e.value.what, e.value.need, e.value.have) == ("expand_page_table", 20, 19)
    caller.check_canaries()


def test_ancestors_as_a_tensor() -> None:
    w = World("flashinfer")
    w.beams.advance(torch.tensor([[0.0] * 8, [50.0, 49.5, 0, 0, 0, 0, 0, 0]] * 2))
    bits = torch.from_dlpack(w.beams.ancestors)
    assert bits.shape == (4, 1)
    want = w.planner.draft(w.seqs, w.lens, 1, w.beams)
    for given in [bits, bits.numpy(), w.beams.ancestors]:
        plan = w.planner.draft(w.seqs, w.lens, 1, given)
        assert plan.mask.tolist() == want.mask.tolist()
        assert values(plan) == values(want)
    lane = w.planner.draft(w.seqs, w.lens, 1, w.beams, "lane")
    assert lane.mask.tolist() != want.mask.tolist()
    for beams in [None, bits]:
        assert w.planner.draft(w.seqs, w.lens, 1, beams, "lane").mask.tolist() == lane.mask.tolist()
    for bad, match in [
        (None, "beams: got None"),
        (bits[:2], "shape"),
        (bits.flatten(), "shape"),
        (bits.to(torch.int32), "int32"),
        (bits.tolist(), "want a tensor"),
    ]:
        with pytest.raises(core.ConfigError, match=match):
            w.planner.draft(w.seqs, w.lens, 1, bad)
    for stray in [0b100, 1 << 40]:  # a slot that no earlier step wrote
        wrong = bits.clone()
        wrong[0, 0] |= stray
        with pytest.raises(core.ConfigError, match="ancestor bits"):
            w.planner.draft(w.seqs, w.lens, 1, wrong)


def test_tail_copies() -> None:
    w = World("flashinfer", layout="holey")
    moves = w.planner.tail_copies(w.seqs, w.lens)
    src, dst = [], []
    for seq, n in zip(w.seqs, w.lens, strict=True):
        region, pages = w.planner.geometry.draft_region(n), w.pool.pages(seq)

        def slot(i: int, pages: list[int] = pages) -> int:
            return pages[i // 4] * 4 + i % 4

        hole = region.hole(1)
        assert hole is not None
        src += [slot(hole[0] + i) for i in range(hole[2])]
        dst += [slot(hole[1] + i) for i in range(hole[2])]
    assert sorted(zip(moves.src.tolist(), moves.dst.tolist(), strict=True)) == sorted(zip(src, dst, strict=True))
    assert len(moves) == 4  # 5 % 4 + 3 % 4, one hole each
    cache = core.KvCache(torch.arange(512.0).view(1, 1, 512, 1, 1).repeat(1, 2, 1, 1, 1), 4)
    core.kv_move(cache, moves)
    assert cache.tensor[0, 1, dst, 0, 0].tolist() == [float(s) for s in src]
    dense = World("flashinfer")
    assert len(dense.planner.tail_copies(dense.seqs, dense.lens)) == 0
