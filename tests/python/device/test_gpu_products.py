"""Products by cublasLt on a GPU: a row's bits in any batch and at any place, errors against float64, refusals."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

import specrs
from specrs import _specrs as core
from specrs import device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

CUDA = torch.device("cuda", torch.cuda.current_device())
MAX_ROWS = 2048
# outputs, inputs, dtype, float32 output, bias
SHAPES = [
    pytest.param(6144, 4096, torch.bfloat16, False, False, id="qkv"),
    pytest.param(4096, 14336, torch.bfloat16, False, False, id="down"),
    pytest.param(1152, 896, torch.bfloat16, False, True, id="qwen2-qkv-bias"),
    pytest.param(32000, 1024, torch.bfloat16, True, False, id="lm_head-f32"),
    pytest.param(768, 256, torch.float16, False, False, id="small-f16"),
    pytest.param(264, 1032, torch.float16, True, False, id="f16-f32-multiples-of-8"),
]


@pytest.fixture(scope="module")
def products():
    torch.zeros(1, device=CUDA)
    return device.products(cache=None)


@pytest.fixture(autouse=True)
def nothing_is_kept():
    """Memory in which products are tried is given back."""
    before = core._device_memory(CUDA.index)[2:]
    yield
    torch.cuda.synchronize()
    assert core._device_memory(CUDA.index)[2:] == before
    device.check()


def raw(stream=None):
    return (stream or torch.cuda.current_stream()).cuda_stream


def ints(t):
    return t.view(torch.int32 if t.dtype == torch.float32 else torch.int16)


class Case:
    """A weight with its product, its rows, and an output with a canary on either side."""

    def __init__(self, products, n, k, dtype, f32, bias, max_rows=MAX_ROWS, split=None, cancel=False):
        g = torch.Generator(device=CUDA).manual_seed(n * 31 + k)
        self.n, self.k, self.max_rows = n, k, max_rows
        self.out = torch.float32 if f32 else dtype
        self.weight = (torch.randn(n, k, device=CUDA, generator=g) / math.sqrt(k)).to(dtype)
        self.bias = torch.randn(n, device=CUDA, generator=g).to(dtype) if bias else None
        self.x = torch.randn(max_rows + 64, k, device=CUDA, generator=g).to(dtype)
        if cancel:  # every sum is rounding alone, so that two orders of adding differ nearly everywhere
            core._device_fill(self.x, 11, 0, 1, raw())
            core._device_fill(self.weight, 12, 0, 2, raw())
            if bias:
                self.bias.zero_()
        self.linear = products.linear(self.weight, max_rows, bias=self.bias, f32_output=f32, split=split)
        self.workspace = torch.empty(max(1, self.linear.workspace_bytes), dtype=torch.uint8, device=CUDA)

    def __call__(self, x, rows=None):
        """The product of all rows of ``x``; rows behind them, and workspace, are poisoned."""
        rows = x.shape[0] if rows is None else rows
        y = torch.full((rows + 2, self.n), float("nan"), dtype=self.out, device=CUDA)
        self.workspace.fill_(0xFF)
        self.linear.launch(rows, x, y, self.workspace, raw())
        assert y[rows:].isnan().all(), "written behind the rows"
        return y[:rows]


@pytest.mark.parametrize("cancel", [False, True], ids=["normal", "cancelling"])
@pytest.mark.parametrize(("n", "k", "dtype", "f32", "bias"), SHAPES)
def test_a_row_has_the_same_bits_in_every_batch_and_place(products, n, k, dtype, f32, bias, cancel):
    case = Case(products, n, k, dtype, f32, bias, cancel=cancel)
    whole = ints(case(case.x[:MAX_ROWS])).clone()
    rng = random.Random(n)
    borders = [1, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048]
    sizes = {m for b in borders for m in (b - 1, b, b + 1) if 1 <= m <= MAX_ROWS}
    sizes |= {2, 3, 5, 7, 31, 33, 63, 65, 100, 200, 333, 700, 1500} | {rng.randint(1, MAX_ROWS) for _ in range(20)}
    different = []
    for m in sorted(sizes):
        if not torch.equal(ints(case(case.x[:m])), whole[:m]):
            different.append((m, "first rows"))
        first = rng.randint(0, MAX_ROWS - m)
        first -= first % (8 if k % 8 else 1)
        if not torch.equal(ints(case(case.x[first : first + m])), whole[first : first + m]):
            different.append((m, f"rows from {first}"))
        order = torch.randperm(MAX_ROWS, device=CUDA)[:m]
        if not torch.equal(ints(case(case.x[order].contiguous())), whole[order]):
            different.append((m, "rows shuffled"))
    assert not different


@pytest.mark.parametrize(("n", "k", "dtype", "f32", "bias"), SHAPES)
def test_errors_against_float64_are_those_of_one_rounding(products, n, k, dtype, f32, bias):
    case = Case(products, n, k, dtype, f32, bias)
    for m in (1, 17, 130):
        x = case.x[:m]
        want = x.double() @ case.weight.double().T
        scale = x.double().abs() @ case.weight.double().abs().T
        if bias:
            want = want + case.bias.double()
        error = (case(x).double() - want).abs()
        # Summed in float32 whatever the output: 2^-22 of the absolute sum covers any order; then one rounding.
        ulp = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}[case.out]
        # 2^-25: half of the smallest float16.
        assert (error <= scale * k**0.5 * 2**-24 + scale * 2**-22 + want.abs() * ulp + 2**-25).all(), float(error.max())
        # The sum is not rounded to the output's type on the way: torch's own product errs as much.
        torch_error = (torch.nn.functional.linear(x, case.weight, case.bias).double() - want).abs()
        assert error.mean() <= 1.05 * torch_error.mean() + 1e-12


@pytest.mark.parametrize("split", [1, 2])
def test_a_split_can_be_asked_for_and_classes_differ(products, split):
    case = Case(products, 4096, 14336, torch.bfloat16, False, False, max_rows=128, split=split)
    assert case.linear.split == split
    other = Case(products, 4096, 14336, torch.bfloat16, False, False, max_rows=128, split=3 - split)
    assert case.linear.fingerprint != other.linear.fingerprint
    mine, theirs = case(case.x[:128]), other(case.x[:128])
    assert not torch.equal(mine, theirs), "the classes' bits are told apart, so the tests above can fail"
    for c in (case, other):
        core._device_fill(c.x, 11, 0, 1, raw())
        core._device_fill(c.weight, 12, 0, 2, raw())
    assert (case(case.x[:128]) != other(case.x[:128])).float().mean() > 0.9, (
        "cancelling operands show the order of adding"
    )
    case.x.normal_()
    case.weight.normal_(std=case.k**-0.5)
    other.x.copy_(case.x)
    other.weight.copy_(case.weight)
    mine, theirs = case(case.x[:128]), other(case.x[:128])
    assert torch.allclose(mine.float(), theirs.float(), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("n", [8, 64, 7, 33, 1000])
@pytest.mark.parametrize("k", [8, 24, 9, 130, 515])
def test_odd_shapes_work_or_are_refused_with_what_would(products, n, k):
    try:
        case = Case(products, n, k, torch.bfloat16, False, False, max_rows=70)
    except specrs.ConfigError as e:
        assert n % 8 or k % 8, e
        assert "multiples of 8" in str(e)
        return
    for cancel in (False, True):
        if cancel:
            core._device_fill(case.x, 11, 0, 1, raw())
            core._device_fill(case.weight, 12, 0, 2, raw())
        whole = ints(case(case.x[:70])).clone()
        for m in (1, 2, 3, 4, 5, 9, 17, 33, 64, 65, 69):
            for first in range(0, 70 - m + 1, 8):
                assert torch.equal(ints(case(case.x[first : first + m])), whole[first : first + m]), (cancel, m, first)
    case = Case(products, n, k, torch.bfloat16, False, False, max_rows=70)
    want = case.x[:70].double() @ case.weight.double().T
    assert torch.allclose(case(case.x[:70]).double(), want, rtol=2**-7, atol=1e-4)


def test_a_captured_product_replays_with_new_contents(products):
    case = Case(products, 768, 256, torch.bfloat16, False, False, max_rows=256)
    x = torch.zeros(100, 256, dtype=torch.bfloat16, device=CUDA)
    y = torch.zeros(100, 768, dtype=torch.bfloat16, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    y.zero_()
    x.fill_(1)
    with torch.cuda.graph(graph):  # an allocation, or a wait, would break the capture
        case.linear.launch(100, x, y, case.workspace, raw())
    torch.cuda.synchronize()
    assert not y.any(), "captured, not run"
    for i in range(3):
        x.copy_(case.x[i * 50 : i * 50 + 100])
        graph.replay()
        assert torch.equal(ints(y), ints(case(x)))


def test_launches_are_on_the_given_stream_and_repeat(products):
    case = Case(products, 4096, 14336, torch.bfloat16, False, False, max_rows=64)
    want = ints(case(case.x[:64])).clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    y = torch.zeros(64, 4096, dtype=torch.bfloat16, device=CUDA)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
    case.linear.launch(64, case.x, y, case.workspace, raw(side))
    done.record(side)
    assert not done.query(), "the launch waited"
    side.synchronize()
    assert torch.equal(ints(y), want)
    for _ in range(50):  # under another stream's load the bits are the same
        with torch.cuda.stream(side):
            torch.mm(case.weight[:2048, :2048], case.weight[:2048, 2048:4096])
        assert torch.equal(ints(case(case.x[:64])), want)
    torch.cuda.synchronize()


def test_operands_that_do_not_fit_are_refused_before_the_launch(products):
    case = Case(products, 768, 256, torch.bfloat16, False, False, max_rows=64)
    x, y = case.x[:64], torch.full((64, 768), float("nan"), dtype=torch.bfloat16, device=CUDA)
    untouched = y
    space = torch.empty(case.linear.workspace_bytes + 512, dtype=torch.uint8, device=CUDA)

    def refused(text, rows=64, x=x, y=y, workspace=space):
        with pytest.raises(specrs.ConfigError, match=text):
            case.linear.launch(rows, x, y, workspace, raw())
        torch.cuda.synchronize()
        assert untouched.isnan().all()

    refused(r"linear rows = 65 is outside 0\.\.=64", rows=65)
    refused(r"x: need 64 elements, have 63", x=x[:63])
    refused(r"y: need 64 elements, have 63", y=y[:63])
    refused(r"x: got bfloat16 \[64, 255\]", x=torch.zeros(64, 255, dtype=torch.bfloat16, device=CUDA))
    refused(r"y: got float32 \[64, 768\]", y=y.float())
    refused(r"x: got float16 \[64, 256\]", x=x.half())
    refused(r"x: got .*strides", x=torch.zeros(64, 512, dtype=torch.bfloat16, device=CUDA)[:, :256])
    refused(
        r"x: got device address .* want an address aligned to 16", x=case.x.view(-1)[1 : 1 + 64 * 256].view(64, 256)
    )
    refused(r"workspace: got device address .* want an address aligned to 256", workspace=space[1:])
    refused(r"x: got .* on cpu", x=x.cpu())
    both = torch.zeros(64, 768, dtype=torch.bfloat16, device=CUDA)
    refused(r"y: got memory that x uses too", x=both.view(-1)[: 64 * 256].view(64, 256), y=both)
    refused(r"y: got memory that workspace uses too", workspace=both.view(torch.uint8).view(-1), y=both)
    own = case.weight.new_empty(0).set_(case.weight.untyped_storage(), 0, (64, 768), (768, 1))
    refused(r"y: got memory that weight uses too", y=own)
    with pytest.raises(specrs.ConfigError, match=r"workspace: need [0-9]+ elements, have"):
        wide = Case(products, 4096, 14336, torch.bfloat16, False, False, max_rows=64, split=2)
        out = torch.empty(64, 4096, dtype=torch.bfloat16, device=CUDA)
        wide.linear.launch(64, wide.x, out, space[:256], raw())
    case.linear.launch(0, x, y, space, raw())
    torch.cuda.synchronize()
    assert y.isnan().all(), "no rows, nothing written"


def test_nothing_that_is_written_lies_over_anything_else(products):
    n, k, rows = 64, 64, 8
    memory = torch.zeros(64 << 20, dtype=torch.uint8, device=CUDA)

    def at(offset, *shape):
        return memory[offset : offset + 2 * math.prod(shape)].view(torch.bfloat16).view(shape)

    weight, bias = at(0, n, k), at(16384, n)
    weight.copy_(torch.randn(n, k, device=CUDA))
    bias.fill_(1)
    x, y = torch.randn(rows, k, device=CUDA).bfloat16(), torch.empty(rows, n, dtype=torch.bfloat16, device=CUDA)
    linear = products.linear(weight, rows, bias=bias)
    space = torch.empty(max(linear.workspace_bytes, 4096), dtype=torch.uint8, device=CUDA)
    linear.launch(rows, x, y, space, raw())
    good, before = y.clone(), memory.clone()
    over = {
        "y: got memory that bias uses too": {"y": at(16384, rows, n)},
        "y: got memory that weight uses too": {"y": at(2 * n * k - 256, rows, n)},
        "workspace: got memory that weight uses too": {"workspace": memory},
        "workspace: got memory that bias uses too": {"workspace": memory[16384:]},
        "workspace: got memory that x uses too": {"x": space[: 2 * rows * k].view(torch.bfloat16).view(rows, k)},
        "y: got memory that workspace uses too": {"y": at(32768, rows, n), "workspace": memory[32768:]},
    }
    for text, changed in over.items():
        given = {"x": x, "y": y, "workspace": space, **changed}
        with pytest.raises(specrs.ConfigError, match=text):
            linear.launch(rows, given["x"], given["y"], given["workspace"], raw())
    torch.cuda.synchronize()
    assert torch.equal(memory, before), "something was written"
    linear.launch(rows, x, y, space, raw())
    torch.cuda.synchronize()
    assert torch.equal(ints(y), ints(good))


def test_weights_that_cannot_be_are_refused(products):
    weight = torch.zeros(64, 64, dtype=torch.bfloat16, device=CUDA)
    for text, call in [
        (r"weight: got float32", lambda: products.linear(weight.float(), 8)),
        (r"linear max_rows = 0", lambda: products.linear(weight, 0)),
        (r"linear max_rows = 131073", lambda: products.linear(weight, 131073)),
        (r"linear split = 65", lambda: products.linear(weight, 8, split=65)),
        (r"split 17 of K", lambda: products.linear(weight, 8, split=17)),
        (r"bias: got bfloat16 \[1, 63\]", lambda: products.linear(weight, 8, bias=weight[0, :63])),
        (r"linear bias", lambda: products.linear(weight, 8, bias=weight[0], f32_output=True)),
        (r"weight: got .* on cpu", lambda: products.linear(weight.cpu(), 8)),
        (r"linear outputs = 0", lambda: products.linear(weight[:0], 8)),
    ]:
        with pytest.raises(specrs.ConfigError, match=text):
            call()


def test_the_report_names_what_bits_depend_on(products):
    case = Case(products, 768, 256, torch.bfloat16, False, False, max_rows=64)
    report = json.loads(products.numerics())
    assert report["device"] == torch.cuda.get_device_name(CUDA)
    assert report["capability"] == "{}.{}".format(*torch.cuda.get_device_capability(CUDA))
    assert report["cublaslt"] >= 120000 and "cublasLt" in report["cublaslt_path"]
    [mine] = [w for w in report["weights"] if w["shape"] == "768 x 256 bfloat16 -> bfloat16, 64 rows"]
    assert (mine["split"], int(mine["fingerprint"], 16)) == (case.linear.split, case.linear.fingerprint)
    assert [b["rows"] for b in mine["buckets"]] == [1, 4, 8, 16, 32, 64]
    assert all(b["us"] > 0 and f"split {case.linear.split} " in b["config"] for b in mine["buckets"])
    assert mine["measured"] is True and mine["pinned"] is False
    assert mine["dropped"] == 0, "the library's classes are by split alone on this device"


def test_choices_are_kept_checked_and_measured_anew_where_they_do_not_hold(tmp_path):
    weight = torch.randn(512, 4096, device=CUDA).to(torch.bfloat16)
    file = tmp_path / "deep" / "choices.json"

    def choice():
        # With choices of its own, as a new process has: those of `device.products` are known after the first call.
        opened = core._DeviceProducts(CUDA.index, device.cublaslt_folders(), str(file))
        linear = opened.linear(weight, 64)
        [entry] = json.loads(opened.numerics())["weights"]
        return linear.fingerprint, entry

    first, entry = choice()
    assert entry["measured"]
    again, kept = choice()
    assert again == first and not kept["measured"]
    assert kept["buckets"] == entry["buckets"]
    # A file that is broken, and one whose class or algorithms are not what they say.
    whole = file.read_text()
    key = next(iter(json.loads(whole)["choices"]))
    wrong = json.loads(whole)
    wrong["choices"][key]["fingerprint"] = "0x0000000000000001"
    torn = json.loads(whole)
    torn["choices"][key]["buckets"][2]["algorithm"] = ["0x0000000000000000"] * 8
    for text in ("", whole[:100], json.dumps(wrong), json.dumps(torn)):
        file.write_text(text)
        again, entry = choice()
        assert again == first and entry["measured"], text[:40]
        assert json.loads(file.read_text())["choices"][key]["fingerprint"] == f"{first:#018x}"
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_a_choice_holds_for_the_process_and_every_file_gets_it(tmp_path):
    weight = torch.randn(72, 88, device=CUDA).to(torch.bfloat16)
    files = [tmp_path / name for name in ("a.json", "b.json")]
    first, second = (device.products(cache=str(file)).linear(weight, 24) for file in files)
    assert first.fingerprint == second.fingerprint
    assert json.loads(files[0].read_text()) == json.loads(files[1].read_text())
    files[1].write_text("")
    device.products(cache=str(files[1])).linear(weight, 24)
    assert not files[1].read_text(), "asked once for each file"
    # A file that has a choice keeps it: another process may live by it.
    third = tmp_path / "c.json"
    mine = json.loads(files[0].read_text())
    [key] = mine["choices"]
    mine["choices"][key]["candidates"] = 12345
    third.write_text(json.dumps(mine))
    assert device.products(cache=str(third)).linear(weight, 24).fingerprint == first.fingerprint
    assert json.loads(third.read_text())["choices"][key]["candidates"] == 12345


def test_without_the_contract_every_bucket_is_free_and_the_contract_stays_as_it_is(tmp_path):
    weight = (torch.randn(520, 4104, device=CUDA) / 64).to(torch.bfloat16)
    file, other = tmp_path / "kept.json", tmp_path / "never.json"
    exact = device.products(cache=str(file))
    linear, kept = exact.linear(weight, 64), file.read_text()
    free = exact.without_contract()
    fast = free.linear(weight, 64)
    assert free.keeping(str(other)).linear(weight, 64).split == fast.split
    assert file.read_text() == kept and not other.exists(), "no file has a choice without the contract"
    shape = "520 x 4104 bfloat16 -> bfloat16, 64 rows"
    reports = {name: json.loads(opened.numerics()) for name, opened in (("exact", exact), ("free", free))}
    assert {name: report["contract"] for name, report in reports.items()} == {"exact": True, "free": False}
    [mine], [theirs] = ([w for w in report["weights"] if w["shape"] == shape] for report in reports.values())
    assert (int(mine["fingerprint"], 16), int(theirs["fingerprint"], 16)) == (linear.fingerprint, 0)
    assert fast.fingerprint == 0 != linear.fingerprint
    assert [b["rows"] for b in theirs["buckets"]] == [b["rows"] for b in mine["buckets"]]
    # The choice, among the same candidates timed anew, is at most as slow, but for what times differ by from run to
    # run.
    for a, b in zip(theirs["buckets"], mine["buckets"], strict=True):
        assert a["us"] <= 1.5 * b["us"], f"{a} against {b}"
    again = exact.linear(weight, 64)
    assert (again.fingerprint, again.split) == (linear.fingerprint, linear.split)
    with pytest.raises(specrs.ConfigError, match=r"linear split = 2: .*ask for none"):
        free.linear(weight, 64, split=2)
    x = torch.randn(64, 4104, device=CUDA).to(torch.bfloat16)
    for product in (linear, fast):
        space = torch.empty(max(1, product.workspace_bytes), dtype=torch.uint8, device=CUDA)
        for rows in (1, 7, 64):
            y = torch.full((64, 520), math.nan, device=CUDA, dtype=torch.bfloat16)
            product.launch(rows, x, y, space, raw())
            torch.testing.assert_close(y[:rows].double(), x[:rows].double() @ weight.double().t(), rtol=1e-2, atol=2e-2)
            assert y[rows:].isnan().all()


def test_the_users_folder_is_found_by_the_environment(tmp_path, monkeypatch):
    weight = torch.randn(64, 64, device=CUDA).to(torch.bfloat16)
    monkeypatch.setenv("SPECRS_CACHE", str(tmp_path / "mine"))
    device.products().linear(weight, 8)
    assert (tmp_path / "mine" / "cublaslt.json").is_file()
    monkeypatch.delenv("SPECRS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    device.products().linear(weight, 8)
    assert (tmp_path / "xdg" / "specrs" / "cublaslt.json").is_file()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECRS_CACHE", str(tmp_path / "file"))  # no folder: nothing is kept, and all works
    assert device.products().linear(weight, 8).split >= 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_two_devices_stand_apart(products):
    other = torch.device("cuda", 1)
    theirs = device.products(other, cache=None)
    weight = torch.randn(256, 256, device=other).to(torch.bfloat16)
    with pytest.raises(specrs.ConfigError, match="weight: got a tensor on cuda:1, want cuda:0"):
        products.linear(weight, 8)
    linear = theirs.linear(weight, 8)
    x, y = (torch.ones(8, 256, dtype=torch.bfloat16, device=other) for _ in range(2))
    space = torch.empty(linear.workspace_bytes + 1, dtype=torch.uint8, device=other)
    linear.launch(8, x, y, space, torch.cuda.current_stream(other).cuda_stream)
    torch.cuda.synchronize(other)
    assert torch.allclose(y.float(), x.float() @ weight.float().T, rtol=2**-7, atol=2**-5)


M64 = 2**64 - 1


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mirror", [0, 1, 2])
@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_reproducible_values_are_those_of_the_host(dtype, mirror, seed):
    for rows, cols, exponent in [(1, 1, 0), (3, 85, 8), (257, 2, -7), (5, 1000, -2)]:
        count = rows * cols
        flat = torch.full((count + 16,), float("nan"), dtype=dtype, device=CUDA)
        core._device_fill(flat[8 : 8 + count].view(rows, cols), seed, exponent, mirror, raw())
        want = []
        for row in range(rows):
            for column in range(cols):
                opposite = cols - 1 - column
                behind = mirror != 0 and column > opposite
                at = row * cols + (opposite if behind else column)
                z = mix((at + 0x9E3779B97F4A7C15 * (seed + 1)) & M64)
                value = ((z >> 41) + 2**23) * 2.0 ** (((z >> 8) & 15) - 8 + exponent - 23)
                negative = bool(z & 1) != (behind and mirror == 2)
                want.append(0.0 if mirror and column == opposite else -value if negative else value)
        assert torch.equal(ints(flat[8 : 8 + count].cpu()), ints(torch.tensor(want, dtype=torch.float32).to(dtype)))
        assert flat[:8].isnan().all() and flat[8 + count :].isnan().all()


def test_cancelling_rows_have_products_of_zero():
    x, w = (torch.empty(20, 515, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    core._device_fill(x, 1, 0, 1, raw())
    core._device_fill(w, 2, 0, 2, raw())
    products = (x.double()[:, None, :] * w.double()[None, :, :]).cpu()
    assert (products + products.flip(-1) == 0).all()
    assert products.abs().sum(-1).min() > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cols", [1, 3, 255, 257, 1001])
def test_fingerprints_are_those_of_the_host(dtype, cols):
    bytes_ = torch.empty(0, dtype=dtype).element_size()
    x = torch.randint(0, 256, (5, cols * bytes_), dtype=torch.uint8, device=CUDA).view(dtype)
    out = torch.full((6,), -1, dtype=torch.int64, device=CUDA)
    core._device_fingerprint(x, 4, out, raw())
    units = x.cpu().view(torch.int16).to(torch.int64) & 0xFFFF
    want = [sum(mix((i << 16) | int(v)) for i, v in enumerate(row)) & M64 for row in units[:4]]
    assert [v & M64 for v in out.tolist()] == [*want, M64, M64]
    assert len(set(want)) == 4
    with pytest.raises(specrs.ConfigError, match="matrix: need 6"):
        core._device_fingerprint(x, 6, out, raw())
    with pytest.raises(specrs.ConfigError, match="out: need 5"):
        core._device_fingerprint(x, 5, out[:4], raw())
