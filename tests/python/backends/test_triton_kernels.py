"""The Triton kernels under triton's interpreter, against attention in float64 over the same arrays.

The interpreter is chosen by a variable of the environment when kernels are defined, so that these tests run in a
process of their own: the test at the end starts it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from pass_world import PHASES, Heads, Layout, Pass, Requests
from specrs.backends import Step, TritonCuda
from specrs.backends.base import Operands, Phase

if importlib.util.find_spec("triton") is None:
    pytest.skip("the package triton, in which the kernels are written, is not installed", allow_module_level=True)

if (version := importlib.metadata.version("triton")).startswith(("3.6", "3.7", "3.8")):
    pytest.skip(f"triton {version}: its interpreter does not run these kernels; 3.9's does", allow_module_level=True)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HOST = torch.device("cpu")
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_under_the_interpreter starts")


def check(one: Pass, tolerance: float) -> None:
    got, want = one.kernels(HOST), one.reference()
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert not got[(want == 0).all(-1)].any()


@inside
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("shape", "page", "layout"),
    [((1, 1, 2), 1, "dense"), ((1, 4, 5), 16, "dense"), ((4, 3, 9), 1, "dense"), ((4, 3, 17), 16, "dense"),
     ((4, 3, 33), 16, "holey"), ((8, 6, 64), 64, "dense"), ((8, 6, 64), 64, "holey"), ((8, 2, 5), 1, "dense")],
)  # fmt: skip
def test_every_phase_and_layout(phase: Phase, shape: tuple[int, int, int], page: int, layout: Layout) -> None:
    requests = Requests(page, shape, page, layout, context=150)
    check(Pass(requests, phase, Heads(1, 3, 64), padded=page == 16), 2e-5)


@inside
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "heads",
    [Heads(1, 1, 64), Heads(2, 4, 96), Heads(1, 7, 128), Heads(1, 17, 64), Heads(1, 2, 256), Heads(3, 1, 96)],
    ids=lambda h: f"{h.kv_heads}x{h.group}x{h.dim}",
)
def test_every_shape_of_heads(phase: Phase, heads: Heads) -> None:
    check(Pass(Requests(5, (4, 3, 17), 16, "dense", context=150), phase, heads), 2e-5)


@inside
@pytest.mark.parametrize("phase", PHASES)
def test_half_precision(phase: Phase) -> None:
    """Of bfloat16 the interpreter multiplies the bits as integers; a GPU's tests have it."""
    check(Pass(Requests(6, (2, 3, 9), 4, "holey", context=150), phase, Heads(2, 4, 64, torch.float16)), 2e-3)


@inside
@pytest.mark.parametrize("programs", [1, 100])
def test_however_the_keys_are_split(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from specrs.backends import triton_kernels

    monkeypatch.setattr(triton_kernels, "_programs", lambda _: programs)
    requests = Requests(7, (2, 3, 9), 4, "dense", context=700)
    for phase in PHASES:
        check(Pass(requests, phase, Heads(1, 2, 64)), 2e-5)


@inside
def test_a_slot_outside_the_pool_is_not_read() -> None:
    one = Pass(Requests(8, (2, 3, 9), 4, "dense", context=150), "decode", Heads(1, 2, 64), padded=False)
    want, last = one.kernels(HOST), int(one.arrays["kv_indptr"][-1]) - 1
    before = one.arrays["kv_indices"][last].clone()
    for wrong in (one.keys.shape[0], 2**40, -1, -(2**40)):
        one.arrays["kv_indices"][last] = wrong
        got = one.kernels(HOST)
        assert torch.equal(got[:-1], want[:-1]) and bool(got.isfinite().all()) and not torch.equal(got[-1], want[-1])
    one.arrays["kv_indices"][last] = before
    assert torch.equal(one.kernels(HOST), want)


@inside
def test_queries_of_another_engine_may_be_a_view() -> None:
    """Those of a fused projection have the width of its row between them."""
    one = Pass(Requests(9, (2, 3, 9), 4, "dense", context=150), "verify", Heads(1, 2, 64), padded=False)
    one.q, one.keys, one.values = one.q.half(), one.keys.half(), one.values.half()
    step = Step(phase="verify", page_size=4, queries=one.queries, arrays=one.arrays)
    fused, backend = torch.cat([one.q, torch.full_like(one.q, 7.0)], dim=1), TritonCuda()
    for q in (one.q, fused[:, : one.q.shape[1]]):
        got = backend.attend(backend.prepare(step), one.keys, one.values, q, one.scale)
        torch.testing.assert_close(got.float(), one.reference(), rtol=2e-3, atol=2e-3)


@inside
def test_no_queries_and_no_keys() -> None:
    from specrs.backends import triton_kernels

    space = torch.zeros(triton_kernels.workspace(HOST, 64), dtype=torch.uint8)
    indptr, nothing = torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    arrays = {"kv_indptr": indptr, "kv_indices": nothing, "qo_indptr": indptr.long(), "extend_slots": nothing,
              "mask_indptr": indptr.long(), "custom_mask": nothing.bool()}  # fmt: skip
    keys = torch.full((8, 1, 64), torch.nan)
    for phase in PHASES:
        for n in (0, 3):
            out = torch.full((n, 2, 64), torch.nan)
            triton_kernels.attention(
                Operands(torch.ones(n, 2, 64), keys, keys, out, arrays, 1.0), phase=phase, sequences=n, most_queries=2,
                space=space,
            )  # fmt: skip
            assert not out.any()


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", __file__]
    ran = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
