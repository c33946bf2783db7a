"""Memory that a caller lends for many calls, and may free or follow: looked at again at each use."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from formats_world import Caller, World
from specrs import _specrs as core

# --- the KV cache

SHAPE = (1, 2, 512, 2, 8)


def shrink_storage(t: torch.Tensor) -> None:
    t.untyped_storage().resize_(0)


def shrink_storage_in_part(t: torch.Tensor) -> None:
    t.untyped_storage().resize_(64)


def resize_tensor(t: torch.Tensor) -> None:
    t.resize_(1, 2, 8, 2, 8)


def grow_tensor(t: torch.Tensor) -> None:
    t.resize_(4, 2, 512, 2, 8)


def set_storage(t: torch.Tensor) -> None:
    t.set_(torch.zeros(SHAPE))


def set_data(t: torch.Tensor) -> None:
    t.data = torch.zeros(SHAPE)


def transpose(t: torch.Tensor) -> None:
    t.transpose_(3, 4)


def resize_array(a: Any) -> None:
    a.resize((1, 2, 8, 2, 8), refcheck=False)


def reshape_array(a: Any) -> None:
    a.shape = (1, 2, 256, 4, 8)


def resize_base(a: Any) -> None:
    a.base.resize(8, refcheck=False)


class Round:
    """A cache over `tensor`, and one call of each operation that takes it."""

    def __init__(self, tensor: Any) -> None:
        geometry = core.Geometry(2, 24, 4, core.TreeShape(2, 2, 4))
        pool = core.Pool(16, 4, 2, geometry.row_pages)
        self.planner, seq = core.Planner(geometry, pool), pool.create()
        self.lease = pool.reserve([(seq, 8)])
        self.cache = core.KvCache(tensor, 4)
        self.plan = self.planner.extend([seq], [0], [3])
        self.kv = torch.ones(3, 2, 8)
        self.rope = core.RopeTable(torch.ones(24, 4), torch.zeros(24, 4))

    def calls(self) -> list[Callable[[], None]]:
        c, p, kv = self.cache, self.plan, self.kv
        return [
            lambda: core.kv_write(c, 0, p, kv, kv),
            lambda: core.kv_move(c, core.Moves([5], [6], 512)),
            lambda: core.attention(c, 0, p, kv, torch.empty(3, 2, 8), 1.0),
            lambda: core.attention_reference(c, 0, p, kv, torch.empty(3, 2, 8), 1.0),
            lambda: core.rope_attention(c, 0, p, torch.ones(3, 48), self.rope, 2, torch.empty(3, 16), 1.0),
            lambda: core.rope_write(c, 0, p, torch.ones(3, 32), self.rope),
        ]


@pytest.mark.parametrize(
    ("change", "numpy"),
    [
        (shrink_storage, False),
        (shrink_storage_in_part, False),
        (resize_tensor, False),
        (grow_tensor, False),
        (set_storage, False),
        (set_data, False),
        (transpose, False),
        (resize_array, True),
        (reshape_array, True),
        (resize_base, True),
    ],
)
def test_a_cache_whose_tensor_changed_is_not_touched(change: Callable[[Any], None], numpy: bool) -> None:
    tensor: Any = np.zeros(SHAPE, dtype=np.float32) if numpy else torch.zeros(SHAPE)
    if change is resize_base:
        tensor = np.zeros(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    r = Round(tensor)
    for call in r.calls():
        call()
    where = tensor.ctypes.data if numpy else tensor.data_ptr()
    change(tensor)
    for call in r.calls():
        with pytest.raises(core.ConfigError, match=r"kv cache: .*resized") as e:
            call()
        assert (e.value.kind, e.value.operand) == ("Mismatch", "kv cache")
        assert f"float32 [1, 2, 512, 2, 8] of 65536 bytes at {where:#x}" in e.value.want
        assert e.value.got
    assert r.cache.num_slots == 512  # no memory is read
    core.kv_move(r.cache, core.Moves([], [], 512))


def test_a_cache_names_what_its_tensor_is_now() -> None:
    tensor = torch.zeros(SHAPE)
    r = Round(tensor)
    tensor.resize_(1, 2, 8, 2, 8)
    with pytest.raises(core.ConfigError) as e:
        r.calls()[0]()
    assert e.value.got == f"float32 [1, 2, 8, 2, 8] of 1024 bytes at {tensor.data_ptr():#x}"
    tensor.untyped_storage().resize_(0)
    with pytest.raises(core.ConfigError) as e:
        r.calls()[0]()
    assert e.value.got == "a null pointer"
    assert isinstance(e.value.__cause__, core.ConfigError)


def test_a_tensor_beyond_its_storage_is_no_cache() -> None:
    tensor = torch.zeros(SHAPE)
    tensor.untyped_storage().resize_(64)
    with pytest.raises(core.ConfigError, match=r"kv cache: got .* over a storage of 64 bytes .*, want a tensor within"):
        core.KvCache(tensor, 4)


def test_a_storage_that_shrank_where_it_was_is_seen() -> None:
    """DLPack cannot tell such a storage: pointer and shape are those of before, and the memory behind them is
    another's."""

    class Storage:
        """65536 bytes at an array's address, until the test says fewer."""

        def __init__(self, array: Any) -> None:
            self.array, self.bytes = array, 65536

        def nbytes(self) -> int:
            return self.bytes

        def data_ptr(self) -> int:
            return int(self.array.ctypes.data)

    class Tensor:
        """A tensor with a storage beneath, as torch's."""

        def __init__(self) -> None:
            self.array = np.zeros(SHAPE, dtype=np.float32)
            self.storage = Storage(self.array)

        def untyped_storage(self) -> Storage:
            return self.storage

        def resize_(self) -> None: ...

        def __dlpack__(self, **kwargs: Any) -> Any:
            return self.array.__dlpack__(**kwargs)

    tensor = Tensor()
    r = Round(tensor)
    for call in r.calls():
        call()
    tensor.storage.bytes = 65535
    for call in r.calls():
        with pytest.raises(core.ConfigError, match=r"kv cache: got a storage of 65535 bytes where 65536 were, want"):
            call()


def test_a_part_of_a_tensor_is_a_cache() -> None:
    whole = torch.zeros(3, *SHAPE)
    r = Round(whole[1])
    for call in r.calls():
        call()
    assert whole[1].any()
    assert not whole[0].any() and not whole[2].any()


def test_what_cannot_be_resized_is_not_asked_again() -> None:
    class Once:
        """A producer that exports one time."""

        def __init__(self) -> None:
            self.array = np.zeros(SHAPE, dtype=np.float32)
            self.exports = 0

        def __dlpack__(self, **kwargs: Any) -> Any:
            self.exports += 1
            return self.array.__dlpack__(**kwargs)

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    once = Once()
    r = Round(once)
    for call in r.calls():
        call()
    assert once.exports == 1


def test_what_is_made_of_tensors_keeps_none_of_their_memory() -> None:
    """Weights, tables and offsets are copies: the originals may be resized."""
    weight, cos = torch.eye(4), torch.ones(24, 4)
    d2t = torch.arange(4) * 2
    packed, rope = core.PackedLinear(weight, torch.zeros(4), "f32"), core.RopeTable(cos, cos)
    beams = core.DraftBeams(1, core.TreeShape(2, 2, 4), d2t, 16)
    for t in (weight, cos, d2t):
        t.untyped_storage().resize_(0)
    gc.collect()
    x, out = torch.arange(8.0).view(2, 4), torch.empty(2, 4)
    packed.forward(x, out)
    assert torch.equal(x, out)
    assert rope.positions == 24
    beams.start(torch.tensor([[0.0, 1.0, 2.0, 3.0]]))
    assert beams.tokens.tolist() == [9, 6]


# --- a plan's arrays in a caller's tensors


@pytest.mark.parametrize("change", [shrink_storage, lambda t: t.resize_(100 * t.numel())])
def test_an_array_in_a_tensor_that_was_resized_is_not_read(change: Callable[[torch.Tensor], None]) -> None:
    gc.collect()  # buffers of the case before, whose memory the allocator may give again
    w = World("flashinfer")
    tensors = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in Caller(w.planner, "decode").tensors.items()}
    buffers = w.planner.buffers("decode", tensors=tensors)
    plan = w.plan("decode", out=buffers)
    arrays, whole = plan.arrays(), buffers.tensors()
    want = arrays["kv_indptr"].tolist()
    shape, table = arrays["kv_indices"].shape, plan.page_table().tolist()
    change(tensors["kv_indices"])
    for array in (arrays["kv_indices"], whole["kv_indices"]):
        reads: list[Callable[[], object]] = [
            array.tolist,
            array.__repr__,
            array.__dlpack__,
            lambda a=array: a.__dlpack__(copy=True, max_version=(1, 0)),
            lambda a=array: torch.from_dlpack(a),
            lambda a=array: np.from_dlpack(a),
            lambda a=array: core.as_array(a),
            lambda a=array: w.planner.buffers("decode", tensors={"kv_indices": a}),
        ]
        for read in reads:
            with pytest.raises(core.ConfigError, match=r"kv_indices: got .*resized") as e:
                read()
            assert (e.value.kind, e.value.operand) == ("Mismatch", "kv_indices")
    # The others are in other tensors, and what is the plan's own is its own.
    assert arrays["kv_indptr"].tolist() == want
    assert arrays["kv_indices"].shape == shape
    assert plan.page_table().tolist() == table


# --- what autograd follows


def grad(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, requires_grad=True)


def made_without_grad(*shape: int) -> torch.Tensor:
    with torch.no_grad():
        return grad(*shape)[:]


def inference(*shape: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(shape)


def writes(out: torch.Tensor) -> list[Callable[[], None]]:
    """Return one call of each operation that writes to an `out` of 48 elements."""
    r = Round(torch.zeros(SHAPE))
    x, square = torch.ones(3, 16), torch.eye(16)
    packed, gated = core.PackedLinear(square), core.PackedLinear(torch.cat([square, square]), gated=True)
    return [
        lambda: core.rms_norm(x, torch.ones(16), 0.0, out.view(3, 16)),
        lambda: packed.forward(x, out.view(3, 16)),
        lambda: gated.forward_swiglu(x, out.view(3, 16)),
        lambda: core.attention(r.cache, 0, r.plan, r.kv, out.view(3, 2, 8), 1.0),
        lambda: core.attention_reference(r.cache, 0, r.plan, r.kv, out.view(3, 2, 8), 1.0),
        lambda: core.rope_attention(r.cache, 0, r.plan, torch.ones(3, 48), r.rope, 2, out.view(3, 16), 1.0),
    ]


@pytest.mark.parametrize("make", [grad, made_without_grad, lambda *shape: torch.nn.Parameter(torch.zeros(shape))])
@pytest.mark.parametrize("guarded", [False, True])
def test_outputs_that_autograd_follows_are_refused(make: Callable[..., torch.Tensor], guarded: bool) -> None:
    out = make(48)
    with torch.set_grad_enabled(not guarded):
        for write in writes(out):
            with pytest.raises(
                core.ConfigError, match=r"out: got a .*tensor that requires grad, want .*detach\(\)"
            ) as e:
                write()
            assert (e.value.kind, e.value.operand) == ("Mismatch", "out")
            assert "no_grad" in e.value.want
    assert not out.any()


@pytest.mark.parametrize("make", [grad, made_without_grad])
def test_a_cache_that_autograd_follows_is_refused(make: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(core.ConfigError, match=r"kv cache: got a .*tensor that requires grad"):
        core.KvCache(make(*SHAPE), 4)
    r = Round(torch.zeros(SHAPE))
    r.cache.tensor.requires_grad_()
    write, move, attention, reference, rope, rope_write = r.calls()
    for call in (write, move, rope, rope_write):
        with pytest.raises(core.ConfigError, match=r"kv cache: got a tensor that requires grad"):
            call()
    attention()  # reads it
    reference()
    assert not r.cache.tensor.any()


def test_what_works_in_their_place() -> None:
    for out in (grad(48).detach(), inference(48), torch.zeros(96)[48:], torch.zeros(48)):
        for write in writes(out):
            write()
        assert out.any()


def test_a_write_is_a_new_version() -> None:
    """A tensor that backward needs as it was is known to have changed, also through what shares its memory."""
    weight, saved = grad(3, 16), torch.ones(3, 16)
    for out in (saved, saved.detach(), saved[:], saved.view(-1)):
        for write in writes(out.view(-1)):
            loss = (weight * saved).sum()
            before = saved._version
            write()
            assert saved._version > before
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
    r = Round(torch.zeros(SHAPE))
    for call, wrote in zip(r.calls(), (True, True, False, False, True, True), strict=True):
        before = r.cache.tensor._version
        call()
        assert (r.cache.tensor._version > before) == wrote


def test_inputs_may_require_grad() -> None:
    x, weight, out = torch.ones(2, 4, requires_grad=True), torch.nn.Parameter(torch.eye(4)), torch.empty(2, 4)
    core.PackedLinear(weight).forward(x, out)
    assert torch.equal(out, torch.ones(2, 4))
    core.rms_norm(x, torch.ones(4, requires_grad=True), 0.0, out)
    assert out.any()
