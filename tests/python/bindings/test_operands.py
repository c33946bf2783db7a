"""Calls of several tensors: all are taken before any is trusted, and what is written lies apart from the rest."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specrs import _specrs as core


class Shrinking:
    """Hands out `tensor`, once `before` has been called: what the class of a user may do."""

    def __init__(self, tensor: Any, before: Callable[[], object]) -> None:
        self.tensor, self.before = tensor, before

    def __dlpack__(self, **_: Any) -> Any:
        self.before()
        return self.tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class Derived(torch.Tensor):
    """A tensor whose attributes run code of its class."""

    before: Callable[[], object] = staticmethod(lambda: None)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        self.before()
        return False


def storage(t: torch.Tensor) -> Callable[[], object]:
    return lambda: t.untyped_storage().resize_(0)


def part(t: torch.Tensor) -> Callable[[], object]:
    return lambda: t.untyped_storage().resize_(8)


def array(a: Any) -> Callable[[], object]:
    return lambda: a.resize(1, refcheck=False)


TAKES = {"all": storage, "a part": part}


def refused(operand: str, call: Callable[[], object]) -> None:
    with pytest.raises(core.ConfigError, match=f"{operand}: got .*another operand's class resized it"):
        call()


@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
def test_an_operand_that_frees_an_earlier_one_is_seen(take: Callable[[torch.Tensor], Callable[[], object]]) -> None:
    linear = core.PackedLinear(np.ones((6, 5), np.float32))
    n = 1 << 12

    def x() -> torch.Tensor:
        return torch.ones(n, 5)

    def out() -> torch.Tensor:
        return torch.zeros(n, 6)

    a = x()
    refused("x", lambda: linear.forward(a, Shrinking(out(), take(a))))
    a, o = x(), out()
    with pytest.raises(core.ConfigError, match="out: got"):  # gone before it was taken
        linear.forward(Shrinking(a, take(o)), o)
    a, o, norm = x(), out(), torch.ones(5)
    refused("norm", lambda: linear.forward(a, Shrinking(o, take(norm)), norm=norm))
    a, o, residual = x(), out(), out()
    refused("residual", lambda: linear.forward(a, Shrinking(o, take(residual)), residual=residual))
    gated = core.PackedLinear(np.ones((12, 5), np.float32), gated=True)
    a = x()
    refused("x", lambda: gated.forward_swiglu(a, Shrinking(out(), take(a))))
    a = x()
    refused("x", lambda: core.rms_norm(a, torch.ones(5), 0.0, Shrinking(x(), take(a))))
    bias, weight = torch.ones(6), torch.ones(6, 5)
    refused("weight", lambda: core.PackedLinear(weight, Shrinking(bias, take(weight))))
    sampler, logits = core.Sampler(512, [0]), torch.zeros(512)
    refused("logits", lambda: sampler.processed(logits, Shrinking(torch.zeros(512), take(logits))))
    cos = torch.ones(64, 4)
    refused("cos", lambda: core.RopeTable(cos, Shrinking(torch.ones(64, 4), take(cos))))


def test_arrays_of_trees_and_paths_are_taken_together() -> None:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    offsets, scores = ints(0, 2), torch.zeros(2)
    freeing = Shrinking(scores, storage(offsets))
    refused("offsets", lambda: core.TreeBatch.from_arrays(offsets, ints(1, 2), ints(-1, 0), freeing))
    offsets = ints(0, 1)
    freeing = Shrinking(ints(5), storage(offsets))
    refused("offsets", lambda: core.Accepts.from_arrays(offsets, ints(0), freeing))


def test_arrays_of_numpy_and_classes_derived_from_tensors_count() -> None:
    linear = core.PackedLinear(np.ones((6, 5), np.float32))
    a = np.ones((4096, 5), np.float32)
    refused("x", lambda: linear.forward(a, Shrinking(np.zeros((4096, 6), np.float32), array(a))))
    x = torch.ones(4096, 5)
    out = torch.zeros(4096, 6).as_subclass(Derived)
    out.before = storage(x)
    refused("x", lambda: linear.forward(x, out))


def test_objects_that_behave_go_through() -> None:
    linear = core.PackedLinear(np.ones((6, 5), np.float32))
    x, out = torch.ones(3, 5), torch.zeros(3, 6)
    linear.forward(Shrinking(x, lambda: None), Shrinking(out, lambda: None))
    assert (out == 5).all()
    only = torch.zeros(3, 6)
    left = [only]

    class Once:
        """Hands its tensor out once."""

        def __dlpack__(self, **_: Any) -> Any:
            return left.pop().__dlpack__()

    linear.forward(x, Once())
    assert (only == 5).all()


SHAPE = (1, 2, 64, 2, 8)


def planned() -> tuple[core.Plan, core.Lease]:
    """A plan of three queries over pages of four tokens, and the lease that it stands on."""
    geometry = core.Geometry(2, 24, 4, core.TreeShape(2, 2, 4))
    pool = core.Pool(16, 4, 2, geometry.row_pages)
    planner, seq = core.Planner(geometry, pool), pool.create()
    lease = pool.reserve([(seq, 8)])
    return planner.extend([seq], [0], [3]), lease


def test_a_lent_cache_that_an_operand_frees_is_seen() -> None:
    (plan, _lease), k, q = planned(), torch.zeros(3, 2, 8), torch.zeros(3, 2, 8)

    def seen(call: Callable[[core.KvCache, Callable[[], object]], object]) -> None:
        tensor = torch.zeros(SHAPE)
        cache = core.KvCache(tensor, 4)
        with pytest.raises(core.ConfigError, match=r"kv cache: got .* a tensor that was resized has to be lent anew"):
            call(cache, storage(tensor))

    seen(lambda cache, free: core.kv_write(cache, 0, plan, Shrinking(k, free), k))
    seen(lambda cache, free: core.attention(cache, 0, plan, q, Shrinking(torch.zeros(3, 2, 8), free), 1.0))
    seen(lambda cache, free: core.attention_reference(cache, 0, plan, Shrinking(q, free), torch.zeros(3, 2, 8), 1.0))
    rope = core.RopeTable(torch.ones(64, 4), torch.zeros(64, 4))
    qkv, out = torch.zeros(3, 6 * 8), torch.zeros(3, 2 * 8)
    seen(lambda cache, free: core.rope_attention(cache, 0, plan, qkv, rope, 2, Shrinking(out, free), 1.0))
    seen(lambda cache, free: core.rope_write(cache, 0, plan, Shrinking(torch.zeros(3, 32), free), rope))


def test_norms_and_outputs_over_the_cache_are_refused() -> None:
    (plan, _lease), tensor = planned(), torch.zeros(SHAPE)
    cache, flat = core.KvCache(tensor, 4), tensor.view(-1)
    rope = core.RopeTable(torch.ones(64, 4), torch.zeros(64, 4))
    qkv, out = torch.zeros(3, 6 * 8), torch.zeros(3, 2 * 8)

    def shared(operand: str, other: str, call: Callable[[], object]) -> None:
        with pytest.raises(core.ConfigError, match=f"{operand}: got memory that {other} uses too"):
            call()

    shared("kv cache", "q_norm", lambda: core.rope_attention(cache, 0, plan, qkv, rope, 2, out, 1.0, flat[:8]))
    inside = flat[: 3 * 16].view(3, 16)
    shared("out", "kv cache", lambda: core.rope_attention(cache, 0, plan, qkv, rope, 2, inside, 1.0))
    q = torch.zeros(3, 2, 8)
    shared("out", "kv cache", lambda: core.attention(cache, 0, plan, q, flat[: 3 * 16].view(3, 2, 8), 1.0))
    shared("kv cache", "kv", lambda: core.rope_write(cache, 0, plan, flat[: 3 * 32].view(3, 32), rope))


def test_an_empty_output_within_another_operand_shares_nothing() -> None:
    memory = torch.zeros(20)
    linear = core.PackedLinear(np.ones((6, 5), np.float32))
    linear.forward(memory.view(4, 5)[2:2], memory[10:10].view(0, 6))


FREED = """
import resource, numpy as np, torch
from specrs import _specrs as core
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
x = torch.ones(1 << 18, 5)
linear, out = core.PackedLinear(np.ones((6, 5), np.float32)), torch.zeros(1 << 18, 6)
class Out:
    def __dlpack__(self, **_):
        x.untyped_storage().resize_(0)
        return out.__dlpack__()
    def __dlpack_device__(self):
        return (1, 0)
try:
    linear.forward(x, Out())
except core.ConfigError as error:
    print("refused:", error.operand)
"""


def test_freed_memory_is_not_read() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "refused: x"), done.stderr[-500:]
