"""The package's own product of a few rows: bits of cublasLt's class, every size and number of rows, refusals."""

from __future__ import annotations

import json
import math

import pytest
import torch

import specrs
from specrs import _specrs as core
from specrs import device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the kernel is for compute capability 9.0", allow_module_level=True)

CUDA = torch.device("cuda", torch.cuda.current_device())
MODEL = {"qkv": (6144, 4096, 1), "o": (4096, 4096, 1), "gate_up": (28672, 4096, 1), "down": (4096, 14336, 2)}


def raw():
    return torch.cuda.current_stream().cuda_stream


def ints(t):
    return t.view(torch.int32 if t.dtype == torch.float32 else torch.int16)


def operands(n, k, cancel=False, rows=64):
    """A weight and rows; where they cancel, every sum is rounding alone, so that two orders of adding differ."""
    g = torch.Generator(device=CUDA).manual_seed(n * 31 + k)
    weight = (torch.randn(n, k, device=CUDA, generator=g) / math.sqrt(k)).to(torch.bfloat16)
    x = torch.randn(rows, k, device=CUDA, generator=g).to(torch.bfloat16)
    if cancel:
        core._device_fill(x, 11, 0, 1, raw())
        core._device_fill(weight, 12, 0, 2, raw())
    return weight, x


def own(weight, x, split=1, dtype=torch.bfloat16):
    """The kernel's product into poison, with rows of poison on either side."""
    m, n = x.shape[0], weight.shape[0]
    y = torch.full((m + 2, n), float("nan"), dtype=dtype, device=CUDA)
    assert core._device_linear(weight, x, y[1 : m + 1], split, raw())
    assert y[0].isnan().all() and y[m + 1 :].isnan().all(), "written outside of the rows"
    return y[1 : m + 1]


@pytest.mark.parametrize("cancel", [False, True], ids=["normal", "cancelling"])
@pytest.mark.parametrize("name", MODEL)
def test_bits_are_those_of_the_librarys_class(name, cancel):
    n, k, split = MODEL[name]
    weight, x = operands(n, k, cancel)
    linear = device.products(cache=None).linear(weight, 64, split=split)
    space = torch.empty(max(1, linear.workspace_bytes), dtype=torch.uint8, device=CUDA)
    want = torch.full((64, n), float("nan"), dtype=torch.bfloat16, device=CUDA)
    linear.launch(64, x, want, space, raw())  # too many rows for the kernel: cublasLt's
    for m in range(1, 17):
        assert torch.equal(ints(own(weight, x[:m], split)), ints(want[:m])), m
        first = 64 - m
        assert torch.equal(ints(own(weight, x[first:], split)), ints(want[first:])), (m, "last rows")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("k", [8, 72, 256, 320, 1024, 1336, 4104])
@pytest.mark.parametrize("n", [8, 24, 64, 72, 136, 1000, 6152, 32000])
def test_any_size_is_summed_in_float32_and_rounded_once_or_refused(n, k, split, dtype):
    weight, x = operands(n, k, rows=16)
    if not core._device_linear(weight, x, torch.empty(16, n, dtype=dtype, device=CUDA), split, raw()):
        assert split == 2 and k % 512, "two parts of K begin at a whole stage"
        return
    whole = own(weight, x, split, dtype)
    want = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T
    ulp = {torch.float32: 2**-24, torch.bfloat16: 2**-8}[dtype]
    error = (whole.double() - want).abs()
    assert (error <= scale * k**0.5 * 2**-24 + scale * 2**-22 + want.abs() * ulp + 2**-25).all(), float(error.max())
    for m in range(1, 16):
        assert torch.equal(ints(own(weight, x[:m], split, dtype)), ints(whole[:m])), m


def test_captured_launches_read_what_the_launch_in_front_wrote():
    """A chain of products, each early, whose rows are the outputs of the one in front; replayed with other rows."""
    n = 4096
    weight, first = operands(n, n, rows=16)
    turns = [torch.empty(16, n, dtype=torch.bfloat16, device=CUDA) for _ in range(2)]

    def chain():
        for i in range(24):
            core._device_linear(weight, turns[i % 2], turns[1 - i % 2], 1, torch.cuda.current_stream().cuda_stream)

    turns[0].copy_(first)
    chain()
    want = turns[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        turns[0].copy_(first)
        turns[1].fill_(float("nan"))
        graph.replay()
        assert torch.equal(ints(turns[0]), ints(want))


def test_what_does_not_fit_is_refused_before_the_launch():
    weight, x = operands(64, 128)
    y = torch.empty(16, 64, dtype=torch.bfloat16, device=CUDA)
    square = x[:, :64].contiguous()
    for text, call in {
        r"linear rows = 17 is outside 1\.\.=16": (weight, x[:17], torch.empty(17, 64, dtype=y.dtype, device=CUDA)),
        "weight": (weight.half(), x[:16], y),
        "x: ": (weight, x[:16].half(), y),
        "y: ": (weight, x[:16], y[:8]),
        "y: got float16": (weight, x[:16], y.half()),
        "overlap": (weight[:, :64].contiguous(), square[:8], square[4:12]),
    }.items():
        with pytest.raises(specrs.ConfigError, match=text):
            core._device_linear(*call, 1, raw())
    for n, k, split in ((60, 128, 1), (64, 124, 1), (64, 128, 3), (64, 64, 2)):
        odd = torch.zeros(n, k, dtype=torch.bfloat16, device=CUDA)
        assert not core._device_linear(odd, odd[:1], torch.empty(1, n, dtype=odd.dtype, device=CUDA), split, raw())


def test_the_report_says_where_the_own_product_is_taken():
    weight, _ = operands(4096, 4096)
    products = core._DeviceProducts(CUDA.index, device.cublaslt_folders())
    products.linear(weight, 64)
    [entry] = json.loads(products.numerics())["weights"]
    buckets = {b["rows"]: b["own"] for b in entry["buckets"]}
    assert set(buckets) == {1, 4, 8, 16, 32, 64} and buckets[32] is None and buckets[64] is None
    assert entry["split"] > 2 or all(buckets[m] is not None for m in (1, 4, 8, 16))
    for some in filter(None, buckets.values()):
        assert some["taken"] == (some["us"] < some["library_us"])
