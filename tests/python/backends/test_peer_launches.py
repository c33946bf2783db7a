"""How FlashInfer's wrapper and FlashAttention-3's operator are called, on the CPU, where stand-ins do what those do.

The stand-ins follow the kernels' rules (where a plan lies, which rows are written, what a pass without keys gives), so
that what is tested is specrs's part: plans that are kept, rows that are spread and gathered, passes that are merged.
Its kernels in Triton run under the interpreter, in a process that the test at the end starts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch

from pass_world import PHASES, Heads, Layout, Pass, Requests
from specrs import ConfigError
from specrs.backends import FlashAttentionCuda, FlashInferCuda, flash_attention, flashinfer, gather, packages
from specrs.backends.base import Format, Operands, Phase
from specrs.backends.splits import num_splits

if importlib.util.find_spec("triton") is None:
    pytest.skip("the package triton, in which the kernels are written, is not installed", allow_module_level=True)

if (version := importlib.metadata.version("triton")).startswith(("3.6", "3.7", "3.8")):
    pytest.skip(f"triton {version}: its interpreter does not run these kernels; 3.9's does", allow_module_level=True)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HOST = torch.device("cpu")
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_under_the_interpreter starts")
SHAPES: list[tuple[tuple[int, int, int], int, Layout]] = [
    ((1, 1, 2), 1, "dense"), ((1, 4, 5), 16, "dense"), ((4, 3, 9), 1, "dense"), ((4, 3, 17), 16, "dense"),
    ((4, 3, 33), 16, "holey"), ((8, 6, 64), 16, "holey"),
]  # fmt: skip


class Wrapper:
    """FlashInfer's wrapper in graph mode, by what its kernel does with a plan."""

    def __init__(self, workspace: torch.Tensor, layout: str, **given: Any) -> None:
        assert layout == "NHD" and given["use_cuda_graph"] and given["backend"] == "fa2"
        self.rows, self.indptr = given["qo_indptr_buf"], given["paged_kv_indptr_buf"]
        self.indices, self.last = given["paged_kv_indices_buf"], given["paged_kv_last_page_len_buf"]
        self.mask, self.mask_indptr = given.get("custom_mask_buf"), given.get("mask_indptr_buf")
        assert len(self.rows) == len(self.indptr) == len(self.last) + 1
        self.sized = False

    def workspace_size(self, *plan: Any, **how: Any) -> tuple[int, int]:
        assert "sm_scale" not in how
        return 0, 1000

    def reset_workspace_buffer(self, floats: torch.Tensor, ints: torch.Tensor) -> None:
        assert ints.numel() >= 1000
        self.sized = True

    def plan(self, rows: Any, indptr: Any, indices: Any, last: Any, *heads: int, **how: Any) -> None:
        """As there, what is planned for goes into the buffers."""
        assert self.sized and heads[3] == 1 and how["kv_data_type"] == how["q_data_type"]
        self.rows.copy_(rows)
        self.indptr.copy_(indptr)
        self.last.copy_(last)
        self.at, self.how = rows.clone(), how
        self.planned = None if how.get("disable_split_kv") else indptr.clone()
        if "uniform_q_len" in how:
            assert rows.diff().eq(how["uniform_q_len"]).all()

    def run(self, q: torch.Tensor, cache: Any, out: torch.Tensor, enable_pdl: bool) -> None:
        assert len(q) == len(out) == int(self.at[-1])
        assert self.planned is None or torch.equal(self.planned, self.indptr), "keys that are split lie by the lengths"
        keys, values = (half.squeeze(1) for half in cache)
        for i in range(len(self.last)):
            begin, end = int(self.indptr[i]), int(self.indptr[i + 1])
            n, first, at = int(self.rows[i + 1] - self.rows[i]), int(self.rows[i]), int(self.at[i])
            slots, lens = self.indices[begin:end].long()[None], torch.tensor([end - begin])
            mask = None
            if self.mask is not None:
                cells = torch.arange(n * (end - begin)) + int(self.mask_indptr[i]) * 8
                bits = self.mask[cells >> 3].int() >> (cells & 7) & 1
                mask = (bits == 1).view(1, n, end - begin)
            of = gather.groups(
                torch.tensor([first]), torch.tensor([n]), slots, lens, causal=self.how["causal"], mask=mask
            )
            found = gather.attend(of, keys, values, q.float(), self.how["sm_scale"]).out
            out[at : at + n] = found[first : first + n].to(out.dtype)


def operator(*, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, **given: Any) -> list[torch.Tensor]:
    """FlashAttention-3's operator: rows that no request has are not written, and those without keys weigh nothing."""
    assert {"q", "k", "v", "out", *given} == set(packages.FA3_ARGUMENTS)
    assert given["num_splits"] == num_splits(*q.shape)
    lens, table, starts = given["seqused_k"].long(), given["page_table"], given["cu_seqlens_q"]
    assert len(lens) == len(table) == len(starts) - 1 and k.dim() == 4
    assert given["max_seqlen_k"] == table.shape[1] * k.shape[1] >= int(lens.max())
    first, count = gather.rows_of(starts, len(lens))
    assert given["max_seqlen_q"] >= int(count.max())
    slots = gather.paged(table, lens, k.shape[1])
    of = gather.groups(first, count, slots, lens, causal=given["is_causal"])
    found = gather.attend(of, k.flatten(0, 1), v.flatten(0, 1), q.float(), given["softmax_scale"])
    out = torch.full_like(q, torch.nan) if out is None else out
    sums = torch.full((q.shape[1], q.shape[0]), torch.nan)
    live = slice(0, int(starts[-1]))
    out[live], sums[:, live] = found.out[live].to(q.dtype), found.lse.T[:, live].float()
    return [out, sums]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins, which compute in float32."""
    for backend in (FlashInferCuda, FlashAttentionCuda):
        monkeypatch.setattr(backend, "kv_dtypes", ("float32",))
    monkeypatch.setattr(flashinfer, "flashinfer_wrapper", lambda: Wrapper)
    monkeypatch.setattr(flash_attention, "flash_attention_op", lambda: operator)


@inside
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("format", ["flashinfer", "flash_attention"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("shape", "page", "layout"), SHAPES)
def test_every_phase_and_layout(
    format: Format, phase: Phase, shape: tuple[int, int, int], page: int, layout: Layout
) -> None:
    for seed, padded in ((1, True), (2, False)):
        one = Pass(Requests(seed, shape, page, layout, context=150), phase, Heads(2, 3, 64), padded, format=format)
        want = one.reference()
        torch.testing.assert_close(one.kernels(HOST), want, rtol=2e-5, atol=2e-5)
        launch, out = one.planned(HOST)
        launch()
        torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)


@inside
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("phase", PHASES)
def test_a_kept_plan_serves_every_batch_of_its_shape(phase: Phase) -> None:
    """The arrays of another batch in the same memory, shorter and longer, with other dead rows."""
    kernels, heads = flashinfer.kernels(), Heads(1, 2, 64)
    passes = [
        Pass(Requests(n, (4, 3, 17), 16, "dense", context=150), phase, heads, format="flashinfer") for n in (3, 4, 5)
    ]
    most = max(one.requests.most_queries(phase) for one in passes)
    keys = max(one.most_keys for one in passes)
    longest = {name: max(len(one.arrays[name]) for one in passes) for name in passes[0].arrays}
    if phase == "verify":
        longest["packed_custom_mask"] = max(one.sequences for one in passes) * -(-most * keys // 8)
    memory = {name: torch.zeros(n, dtype=passes[0].arrays[name].dtype) for name, n in longest.items()}
    rows = max(one.queries for one in passes)
    for one in (*passes, *passes[::-1]):
        for name, array in one.arrays.items():
            memory[name].fill_(85)
            memory[name][: len(array)] = array
        if phase in ("draft", "decode") and one.queries != rows:
            continue
        out = torch.full_like(one.q, torch.nan)
        kernels.attention(
            Operands(one.q, one.keys, one.values, out, memory, one.scale), phase=phase, lists=one.sequences,
            most_queries=most, most_keys=keys,
        )  # fmt: skip
        torch.testing.assert_close(out, one.reference(), rtol=2e-5, atol=2e-5)
    assert len(kernels._kept) == 1


@inside
@pytest.mark.usefixtures("stand_ins")
def test_a_kept_plan_wants_bits_of_every_row_that_a_request_may_have() -> None:
    one = Pass(Requests(3, (4, 3, 17), 16, "dense", context=150), "verify", Heads(1, 2, 64), format="flashinfer")
    most = one.requests.most_queries("verify")
    need = one.sequences * -(-most * one.most_keys // 8)
    bits = torch.zeros(need, dtype=torch.uint8)
    bits[: len(one.arrays["packed_custom_mask"])] = one.arrays["packed_custom_mask"]
    for short in (True, False):
        arrays, out = {**one.arrays, "packed_custom_mask": bits[: need - short]}, torch.empty_like(one.q)
        launch = partial(
            flashinfer.kernels().attention, Operands(one.q, one.keys, one.values, out, arrays, one.scale),
            phase="verify", lists=one.sequences, most_queries=most, most_keys=one.most_keys,
        )  # fmt: skip
        if short:
            with pytest.raises(ConfigError, match=rf"packed_custom_mask = {need - 1} bytes: .* reads {need}"):
                launch()
            continue
        launch()
        torch.testing.assert_close(out, one.reference(), rtol=2e-5, atol=2e-5)


@inside
@pytest.mark.usefixtures("stand_ins")
def test_reserved_rows_are_shared_and_bounded() -> None:
    passes = [
        Pass(Requests(n, shape, 16, "dense", context=150), "verify", Heads(1, 2, 64), format="flashinfer")
        for n, shape in ((3, (4, 3, 9)), (4, (4, 3, 17)))
    ]
    kernels, most = flashinfer.kernels(), [one.requests.most_queries("verify") for one in passes]
    kernels.reserve(passes[1].sequences * most[1] * 128, torch.float32, HOST)
    for one in (*passes, *passes):
        torch.testing.assert_close(one.kernels(HOST, kernels), one.reference(), rtol=2e-5, atol=2e-5)
    assert len({kept.rows[0].data_ptr() for kept in kernels._kept.values() if kept.rows is not None}) == 1
    kernels.reserve(passes[1].sequences * most[1] * 128 - 1, torch.float32, HOST)
    with pytest.raises(RuntimeError, match="are reserved"):
        passes[1].kernels(HOST, kernels)


@inside
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("phase", PHASES)
def test_a_plan_of_the_host_leaves_the_arrays(phase: Phase) -> None:
    """Those of another length than the host has seen, too."""
    one = Pass(Requests(3, (4, 3, 9), 16, "dense", context=150), phase, Heads(1, 2, 64), format="flashinfer")
    arrays = {name: array.clone() for name, array in one.arrays.items()}
    stale = {name: one.arrays[name].clone() for name in ("kv_indptr", "qo_indptr") if name in one.arrays}
    stale["kv_indptr"] //= 2
    planned = flashinfer.planned(phase, arrays, stale)
    operands = Operands(one.q, one.keys, one.values, torch.empty_like(one.q), arrays, one.scale)
    with pytest.raises(AssertionError, match="lie by the lengths"):
        flashinfer.kernels().attention_of(planned, operands)
    assert all(torch.equal(arrays[name], array) for name, array in one.arrays.items())


@inside
@pytest.mark.parametrize(
    "error",
    [RuntimeError("Ninja build failed. " + "x" * 5000 + "no nvcc"), FileNotFoundError("ninja")],
    ids=["ninja", "nothing"],
)
def test_kernels_that_cannot_be_compiled_are_named(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer compiles at the first call that sizes a plan."""

    def sizes(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(Wrapper, "workspace_size", sizes)
    monkeypatch.setattr(flashinfer, "flashinfer_wrapper", lambda: Wrapper)
    one = Pass(Requests(3, (4, 3, 9), 16, "dense", context=150), "decode", Heads(1, 2, 64), format="flashinfer")
    with pytest.raises(ConfigError, match=r"no compiled kernels for heads of 64 in float32, .*(nvcc|ninja)$") as told:
        one.kernels(HOST)
    assert len(str(told.value)) < 1200 and told.value.__cause__ is error


@inside
def test_no_queries() -> None:
    from specrs.backends.flash_attention_kernels import FlashAttentionKernels
    from specrs.backends.flashinfer_kernels import FlashInferKernels

    nothing = torch.zeros(0, 2, 64)
    operands = Operands(nothing, nothing, nothing, nothing, {}, 1.0)
    for phase in PHASES:
        FlashInferKernels(Wrapper).attention(operands, phase=phase, lists=0, most_queries=1)
        FlashAttentionKernels(operator).attention(operands, page_size=1, expand_page_size=1, most_queries=1)


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", __file__]
    ran = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
