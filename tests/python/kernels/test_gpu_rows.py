"""Row operations on a GPU: gathers, copies, RMSNorm with the residual sum, SiLU * up, RoPE with the KV write.

The references are the same f32 operations in the same order, on the CPU; comparisons are of bits.
"""

from __future__ import annotations

import itertools
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

from gpu_world import CUDA, I32_MAX, I32_MIN, bits, fma, handle, neighbour, same, tree_sum

HALVES = [torch.bfloat16, torch.float16]

pytestmark = pytest.mark.usefixtures("no_fault_is_left")


def fault() -> tuple:
    torch.cuda.synchronize()
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    v = e.value
    return v.kernel, v.buffer, v.request, v.step, v.index, v.bound


def random_rows(*shape, dtype, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * scale).to(dtype)


def at_the_end(values, shift=0):
    """A copy on the GPU whose last byte is the last of its allocation, `shift` bytes behind its start: what is read or
    written behind it, memcheck sees."""
    size = values.numel() * values.element_size()
    raw = torch.empty(shift + size, dtype=torch.uint8, device=CUDA)
    made = raw[shift:].view(values.dtype).view(values.shape)
    made.copy_(values)
    return made


# --- gathers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("columns", [1, 2, 7, 8, 64, 100, 4096, 5000])
def test_gathers_copy_bits(canaries, dtype, columns):
    raw = torch.randint(-(2**15), 2**15, (37, columns * (4 if dtype == torch.float32 else 2) // 2), dtype=torch.int16)
    table = raw.view(dtype)  # NaNs too: bits are bits
    rng = random.Random(columns)
    for rows in (1, 2, 65):
        ids = [rng.randrange(37) for _ in range(rows)]
        ids[rows // 2] = -1
        want = table[ids].clone()
        want[rows // 2] = 0
        out = canaries.empty(rows, columns, dtype=dtype)
        core._device_embed(canaries.of(table), canaries.of(ids), None, out, handle())
        assert same(out, want)
        out = canaries.empty(rows, columns, dtype=dtype, offset=2 if dtype != torch.float32 else 4)
        core._device_gather_rows(canaries.of(table), canaries.of([i + 3 for i in ids]), -3, None, out, handle())
        want[rows // 2] = 0  # 2 - 3 = -1
        assert same(out, want)


def test_a_live_count_leaves_zeros_behind_it(canaries):
    table = random_rows(9, 64, dtype=torch.bfloat16)
    for live in (0, 1, 3, 4):
        out = canaries.empty(4, 64, dtype=torch.bfloat16)
        ids = [5, 8, 0, 7]
        stale = canaries.of([i if n < live else I32_MAX for n, i in enumerate(ids)])
        # The last element counts: the offsets of a ragged batch serve as they are.
        core._device_embed(canaries.of(table), stale, canaries.of([0, 2, live]), out, handle())
        want = table[ids].clone()
        want[live:] = 0
        assert same(out, want)


def test_the_last_rows_of_requests_come_by_their_offsets(canaries):
    source = random_rows(11, 40, dtype=torch.float16)
    offsets = canaries.of([0, 3, 4, 9, 11])
    out = canaries.empty(4, 40, dtype=torch.float16)
    core._device_gather_rows(canaries.of(source), offsets[1:], -1, None, out, handle())
    assert same(out, source[[2, 3, 8, 10]])


@pytest.mark.parametrize("bad", [37, -2, I32_MIN, I32_MAX])
def test_an_index_outside_the_table_is_recorded_and_its_row_is_zeros(canaries, bad):
    table = random_rows(37, 64, dtype=torch.bfloat16)
    out = canaries.empty(3, 64, dtype=torch.bfloat16)
    want = table[[4, 0, 36]].clone()
    want[1] = 0
    core._device_embed(canaries.of(table), canaries.of([4, bad, 36]), None, out, handle())
    assert fault() == ("embed", "embedding table", -1, 1, bad, 37)
    assert same(out, want)
    out = canaries.empty(3, 64, dtype=torch.bfloat16)
    core._device_gather_rows(canaries.of(table), canaries.of([4, bad, 36]), 0, None, out, handle())
    assert fault() == ("gather_rows", "rows", -1, 1, bad, 37)
    assert same(out, want)


@pytest.mark.parametrize("bad", [5, -1, I32_MAX])
def test_a_live_count_outside_the_batch_is_recorded_and_clamped(canaries, bad):
    table = random_rows(9, 64, dtype=torch.bfloat16)
    ids, live = canaries.of([1, 2, 3, 4]), canaries.of([bad])
    out = canaries.empty(4, 64, dtype=torch.bfloat16)
    core._device_embed(canaries.of(table), ids, live, out, handle())
    assert fault() == ("embed", "live", -1, -1, bad, 5)
    assert same(out, table[[1, 2, 3, 4]] if bad > 0 else torch.zeros_like(out).cpu())
    gate_up, half = canaries.of(random_rows(4, 16, dtype=torch.bfloat16)), canaries.empty(4, 8, dtype=torch.bfloat16)
    core._device_gated_up(gate_up, "silu", False, live, half, handle())
    assert fault()[:2] == ("gated_up", "live")
    core._device_add_rms_norm(out, None, canaries.of(torch.ones(64).bfloat16()), 0.0, None, 0, live, None, handle())
    assert fault()[:2] == ("add_rms_norm", "live")


# --- copies from table to table -------------------------------------------------------------------------------------


def copied(src, src_rows, dst, dst_rows, live):
    """The host's copy."""
    out = dst.clone()
    n = len(src_rows or dst_rows or range(len(src)))
    for i in range(n if live is None else live):
        a, b = (i if rows is None else rows[i] for rows in (src_rows, dst_rows))
        if a >= 0 and b >= 0:
            out[b] = src[a]
    return out


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("columns", [1, 7, 64, 100, 4096, 32_000, 128_257])
def test_copies_between_tables_move_bits_and_leave_the_rest(canaries, dtype, columns):
    units = columns * (2 if dtype == torch.float32 else 1)
    raw = lambda rows: torch.randint(-(2**15), 2**15, (rows, units), dtype=torch.int16).view(dtype)  # noqa: E731
    rng = random.Random(columns)
    for n, live in ((1, None), (5, 3), (9, 0), (9, 9)):
        src, dst = raw(11), raw(13)
        there = [rng.randrange(11) for _ in range(n)]
        here = rng.sample(range(13), n)
        if n > 1:
            there[0], here[1] = -1, -1
        for a, b in ((there, here), (None, here), (there, None), (None, None)):
            offset = 0 if a else dst.element_size()
            out = canaries.of(dst, offset=offset)
            lists = [None if rows is None else canaries.of(rows) for rows in (a, b)]
            alive = None if live is None else canaries.of([I32_MAX, live])
            core._device_copy_rows(canaries.of(src), lists[0], out, lists[1], alive, handle())
            assert same(out, copied(src, a, dst, b, live)), (n, live, a is None, b is None)


@pytest.mark.parametrize("bad", [11, -2, I32_MIN, I32_MAX])
def test_a_copy_out_of_a_table_is_recorded_and_left_out(canaries, bad):
    src, dst = random_rows(11, 64, dtype=torch.float32), random_rows(9, 64, dtype=torch.float32, seed=1)
    on = canaries.of(src)
    for a, b, buffer, bound in (
        ([3, bad, 5], [0, 1, 2], "rows", 11),
        ([3, 4, 5], [8, bad, 2], "rows (destination)", 9),
    ):
        out = canaries.of(dst)
        core._device_copy_rows(on, canaries.of(a), out, canaries.of(b), None, handle())
        assert fault() == ("copy_rows", buffer, -1, 1, bad, bound)
        want = dst.clone()
        want[[b[0], b[2]]] = src[[a[0], a[2]]]
        assert same(out, want)


def test_copies_that_do_not_fit_are_refused(canaries):
    src, dst = canaries.of(torch.zeros(4, 8)), canaries.of(torch.zeros(3, 8))
    rows = lambda n: canaries.of(list(range(n)))  # noqa: E731
    for arguments, what in (
        ((src, None, dst, None), "dst"),
        ((src, rows(4), dst, None), "dst"),
        ((dst, None, src, rows(4)), "src"),
        ((src, rows(3), dst, rows(2)), "dst_rows"),
        ((src, None, canaries.of(torch.zeros(3, 7)), rows(2)), "dst"),
        ((src, None, canaries.of(torch.zeros(3, 8).half()), rows(2)), "dst"),
        ((src, None, src, rows(2)), "dst"),
    ):
        with pytest.raises(specrs.ConfigError, match=what):
            core._device_copy_rows(*arguments, None, handle())


# --- RMSNorm ---------------------------------------------------------------------------------------------------------


def rms_scale(squares, columns, eps):
    """1 / sqrt(squares / columns + eps), each operation rounded to float32 once; torch's own root may be an ulp off."""
    mean = (squares.double() / columns).float() + torch.tensor(eps)
    return (1.0 / torch.sqrt(mean.double()).float().double()).float()


def norm_reference(residual, x, weight, eps):
    """(sum, norm), by the threads, vectors and trees of the kernel."""
    dtype, (rows, columns) = residual.dtype, residual.shape
    total = residual if x is None else (residual.float() + x.float()).to(dtype)
    value = total.float()
    threads = min(1024, (-(-columns // 8) + 31) // 32 * 32)
    vectors = -(-columns // (8 * threads))
    padded = torch.zeros(rows, vectors * threads * 8)
    padded[:, :columns] = value
    padded = padded.view(rows, vectors, threads, 8)
    acc = torch.zeros(rows, threads)
    for i in range(vectors):
        for j in range(8):
            acc = acc + padded[:, i, :, j] * padded[:, i, :, j]  # squares of 16-bit floats are exact
    warps = torch.zeros(rows, 32)
    warps[:, : threads // 32] = tree_sum(acc.view(rows, threads // 32, 32))
    scale = rms_scale(tree_sum(warps), columns, eps)
    return total, ((value * scale[:, None]) * weight.float()).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("columns", [1, 5, 8, 64, 100, 576, 1024, 2048, 4096, 5120, 8192, 14336, 32768])
def test_norms_have_the_bits_of_their_order(canaries, dtype, columns):
    rows = 5
    residual = random_rows(rows, columns, dtype=dtype, seed=columns)
    x = random_rows(rows, columns, dtype=dtype, seed=columns + 1, scale=0.1)
    for given, eps, kind in ((x, 1e-5, dtype), (None, 1e-6, dtype), (x, 1e-6, torch.float32)):
        weight = random_rows(columns, dtype=kind, seed=2) + 1
        total, norm = norm_reference(residual, given, weight, eps)
        for offset in (0, 2):  # vectors, or element by element: the same bits
            stream, out = canaries.of(residual, offset=offset), canaries.empty(rows, columns, dtype=dtype)
            features = canaries.empty(rows, 3 * columns, dtype=dtype)
            before = bits(features)
            core._device_add_rms_norm(
                stream,
                None if given is None else canaries.of(given),
                canaries.of(weight),
                eps,
                features,
                columns,
                None,
                out,
                handle(),
            )
            assert same(stream, total)
            assert same(out, norm)
            assert same(features[:, columns : 2 * columns].contiguous(), total)
            features[:, columns : 2 * columns] = torch.tensor(-1, dtype=torch.int16).view(dtype).to(CUDA)
            assert torch.equal(bits(features), before)  # nothing beside its columns


@pytest.mark.parametrize("dtype", HALVES)
def test_norms_agree_with_float64_and_with_the_host(dtype):
    columns = 4096
    residual, weight = random_rows(7, columns, dtype=dtype, scale=3.0), random_rows(columns, dtype=dtype) + 1
    out = torch.empty(7, columns, dtype=dtype, device=CUDA)
    core._device_add_rms_norm(residual.to(CUDA), None, weight.to(CUDA), 1e-5, None, 0, None, out, handle())
    r = residual.double()
    want = r / torch.sqrt((r * r).mean(-1, keepdim=True) + 1e-5) * weight.double()
    ulp = torch.finfo(dtype).eps
    assert ((out.cpu().double() - want).abs() <= want.abs() * ulp * 0.51 + 1e-7).all()
    host = torch.empty(7, columns)
    core.rms_norm(residual.float(), weight.float(), 1e-5, host)
    assert ((out.cpu().float() - host).abs() <= host.abs() * ulp * 0.51 + 1e-7).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_row_does_not_depend_on_its_batch(dtype):
    columns = 2560
    residual, x = (random_rows(300, columns, dtype=dtype, seed=s).to(CUDA) for s in (1, 2))
    weight = random_rows(columns, dtype=dtype, seed=3).to(CUDA)

    def norm(rows):
        stream, out = residual[rows].clone(), torch.empty_like(residual[rows])
        core._device_add_rms_norm(stream, x[rows].clone(), weight, 1e-5, None, 0, None, out, handle())
        return torch.cat([stream, out], -1)

    whole = norm(slice(0, 300))
    for first, count in ((0, 1), (299, 1), (3, 7), (64, 130)):
        assert same(norm(slice(first, first + count)), whole[first : first + count])
    with neighbour():
        for _ in range(100):
            assert torch.equal(norm(slice(0, 300)).view(torch.int16), whole.view(torch.int16))


def test_dead_rows_of_a_norm_are_zeros(canaries):
    columns = 96
    residual, x = (random_rows(6, columns, dtype=torch.bfloat16, seed=s) for s in (1, 2))
    residual[4:], x[4:] = float("nan"), float("inf")
    weight = random_rows(columns, dtype=torch.bfloat16)
    total, norm = norm_reference(residual, x, weight, 1e-5)
    total[4:], norm[4:] = 0, 0
    stream, out = canaries.of(residual), canaries.empty(6, columns, dtype=torch.bfloat16)
    core._device_add_rms_norm(
        stream, canaries.of(x), canaries.of(weight), 1e-5, None, 0, canaries.of([4]), out, handle()
    )
    assert same(stream, total) and same(out, norm)


# --- SiLU * up -------------------------------------------------------------------------------------------------------


def exp_reference(x):
    """The host's `act::exp`."""
    under, over = x < -87.3, x > 88.72
    x = torch.where(under | over, torch.zeros_like(x), x)
    c = lambda v: torch.full_like(x, v)  # noqa: E731
    shifted = fma(x, c(1.44269504), c(12582912.0))
    n = shifted - 12582912.0
    r = fma(n, c(2.1219444e-4), fma(n, c(-0.6933594), x))
    p = c(1.9875691e-4)
    for k in (1.3981999e-3, 8.333452e-3, 4.1665796e-2, 1.6666665e-1, 0.5):
        p = fma(p, r, c(k))
    p = fma(p, r * r, r) + 1.0
    y = (p.double() * torch.exp2(n.double())).float()  # exact but for subnormal results, which are cut off
    return torch.where(over, c(float("inf")), torch.where(under, c(0.0), y))


def gated_reference(gate, up, z):
    """g / (1 + e^-z) * up in float32, rounded once."""
    return ((gate.float() / (exp_reference(-z) + 1.0)) * up.float()).to(gate.dtype)


def gelu_reference(gate, up):
    g = gate.float()
    cubic = fma(g * g * g, torch.full_like(g, 0.044715), g)
    return gated_reference(gate, up, torch.where(g.isinf(), g, cubic) * torch.tensor(1.5957691216057308))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("columns", [1, 4, 8, 12, 100, 1536, 14336])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_up_has_the_bits_of_the_host_exponential(canaries, dtype, columns, interleaved, activation):
    rows = 4
    gate = random_rows(rows, columns, dtype=dtype, seed=columns, scale=4.0)
    up = random_rows(rows, columns, dtype=dtype, seed=columns + 1)
    special = torch.tensor([0.0, -0.0, 87.0, -87.0, 95.0, -95.0, 1e4, -1e4, float("inf"), -3.4]).to(dtype)
    gate[0, : min(columns, 10)] = special[:columns]
    want = gelu_reference(gate, up) if activation == "gelu_tanh" else gated_reference(gate, up, gate.float())
    gate_up = torch.stack([gate, up], -1).view(rows, -1) if interleaved else torch.cat([gate, up], -1)
    for offset in (0, 2):
        out = canaries.empty(rows, columns, dtype=dtype, offset=offset)
        core._device_gated_up(canaries.of(gate_up, offset=offset), activation, interleaved, None, out, handle())
        assert same(out, want)
    if columns > 100:
        g = x = gate.double()
        if activation == "gelu_tanh":  # torch's own adds 1 to a tanh near -1
            x = math.sqrt(8.0 / math.pi) * (x + 0.044715 * x**3)
        exact = g * torch.sigmoid(x) * up.double()
        finite = exact.abs() < torch.finfo(dtype).max
        error = (out.cpu().double() - exact).abs()[finite]
        # The exponential is 0 or infinite where float32 ends: behind 88, a product of 16 * 4 may still be some 1e-37.
        least = max(torch.finfo(dtype).tiny, 1e-36)
        assert (error <= exact[finite].abs() * torch.finfo(dtype).eps * 0.51 + least).all()


def test_dead_rows_of_gated_up_are_zeros(canaries):
    gate_up = random_rows(5, 64, dtype=torch.bfloat16)
    gate_up[2:] = float("nan")
    out = canaries.empty(5, 32, dtype=torch.bfloat16)
    core._device_gated_up(canaries.of(gate_up), "gelu_tanh", False, canaries.of([2]), out, handle())
    assert (out[2:].view(torch.int16) == 0).all() and out[:2].isfinite().all()


# --- convolutions ---------------------------------------------------------------------------------------------------


def convolved(x, base, own, side, starts, out, adds):
    """Tap by tap in f32, from each row's own."""
    (rows, columns), taps = x.shape, len(base)
    factors = own.float().view(rows, 2, taps, -1)[:, side]
    factors = factors.repeat_interleave(columns // factors.shape[2], -1) + base.float()
    want = out.clone() if adds else torch.zeros_like(out)
    for first, end in itertools.pairwise(starts):
        total = torch.zeros(end - first, columns)
        for tap in range(min(taps, end - first)):
            total[tap:] = fma(factors[first + tap : end, tap], x[first : end - tap].float(), total[tap:])
        mine = want[first:end]
        mine.copy_(mine.float() + total if adds else total)
    return want


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("taps,columns,group", [(1, 8, 1), (2, 64, 16), (3, 257, 257), (5, 100, 4), (2, 4096, 16)])
def test_convolutions_stay_within_a_request(canaries, dtype, adds, taps, columns, group):
    groups = columns // group
    for starts in ([0, 1], [0, 5, 5, 6], [0, 16, 32, 48, 48, 48], [0, 0, 3], [0, 0]):
        rows = starts[-1] + 3  # those of nobody, in which there may be anything
        x, own, before = (
            random_rows(rows, n, dtype=dtype, seed=seed) for seed, n in enumerate((columns, 2 * taps * groups, columns))
        )
        x[starts[-1] :] = math.nan
        if starts[1] > 2:
            x[1, 0] = math.nan  # of one request, which another does not see
        base = random_rows(taps, columns, dtype=dtype, seed=3)
        out = canaries.of(before) if adds else canaries.empty(rows, columns, dtype=dtype)
        for side in range(2):
            want = convolved(x, base, own, side, starts, before, adds)
            out.copy_(before)
            core._device_row_conv(
                canaries.of(x), canaries.of(base), canaries.of(own), side, canaries.of(starts), adds, out, handle()
            )
            found = out.cpu()
            assert torch.equal(found.isnan(), want.isnan())  # a NaN's own bits are the machine's
            assert same(found.masked_fill(found.isnan(), 0.0), want.masked_fill(want.isnan(), 0.0))


def test_starts_that_are_none_lead_to_no_row_outside(canaries):
    x, own = random_rows(4, 8, dtype=torch.bfloat16), torch.zeros(4, 6)
    base, out = torch.ones(3, 8).bfloat16(), canaries.empty(4, 8, dtype=torch.bfloat16)
    for starts in ([I32_MIN, I32_MAX], [2, 1, I32_MAX], [-7, -9, 9]):
        core._device_row_conv(
            canaries.of(x), canaries.of(base), canaries.of(own.bfloat16()), 1, canaries.of(starts), False, out, handle()
        )
        assert out.isfinite().all()


def test_operands_of_a_convolution_that_do_not_fit_are_refused(canaries):
    def conv(x=(4, 8), base=(2, 8), own=(4, 8), side=0, starts=2, out=(4, 8)):
        a, b, c, d = (canaries.empty(*shape, dtype=torch.float16) for shape in (x, base, own, out))
        core._device_row_conv(a, b, c, side, canaries.of([0] * starts), False, d, handle())

    conv()
    for wrong in (
        {"base": (2, 7)}, {"own": (4, 12)}, {"own": (4, 9)}, {"own": (3, 8)}, {"own": (4, 2)}, {"out": (4, 9)},
        {"out": (5, 8)}, {"starts": 1}, {"base": (65, 8), "own": (4, 130)}, {"side": 2},
    ):  # fmt: skip
        with pytest.raises(specrs.ConfigError):
            conv(**wrong)


# --- RoPE and the cache ----------------------------------------------------------------------------------------------


def rope_tables(positions, half, theta=10000.0):
    inverse = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
    return angle.cos().float(), angle.sin().float()


def head_reference(x, norm, eps, cos, sin):
    """One kind of heads, float32 [rows, heads, d], biases added: norm by the kernel's lanes, rotation."""
    rows, heads, d = x.shape
    half = cos.shape[1]
    if norm is not None:
        acc = torch.zeros(rows, heads, 32)
        lanes = torch.arange(32)
        for k in range(8):
            i = (k // 2) * 64 + 2 * lanes + k % 2
            live = i < half
            for shift in (0, half):
                v = torch.where(live, x[..., (i + shift).clamp(max=d - 1)], torch.zeros(()))
                acc = fma(v, v, acc)
        for k in range(16):
            i = 2 * half + k * 32 + lanes
            v = torch.where(i < d, x[..., i.clamp(max=d - 1)], torch.zeros(()))
            acc = fma(v, v, acc)
        scale = rms_scale(tree_sum(acc), d, eps)
        x = (x * scale[..., None]) * norm.float()
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    return torch.cat([low * c - high * s, high * c + low * s, rest], -1)


def rope_reference(qkv, heads, kv_heads, bias, q_norm, k_norm, eps, tables, positions):
    rows, d = qkv.shape[0], qkv.shape[1] // (heads + 2 * kv_heads)
    x = qkv.float() if bias is None else qkv.float() + bias.float()
    q, k, v = x.view(rows, -1, d).split([heads, kv_heads, kv_heads], 1)
    cos, sin = (t[positions] for t in tables)
    made = (head_reference(q, q_norm, eps, cos, sin), head_reference(k, k_norm, eps, cos, sin), v)
    return tuple(t.to(qkv.dtype) for t in made)


SHAPES = [  # heads, kv_heads, head_dim, rotary dimensions
    (32, 8, 128, 128),
    (4, 4, 64, 64),
    (14, 2, 64, 64),
    (7, 1, 96, 96),
    (3, 3, 80, 32),
    (2, 1, 2, 2),
    (1, 1, 6, 6),
    (1, 1, 34, 10),
    (2, 2, 80, 80),
    (3, 1, 256, 128),
    (4, 2, 256, 256),
    (1, 1, 512, 512),
    (2, 1, 512, 64),
]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("heads", "kv_heads", "d", "rotary"), SHAPES)
@pytest.mark.parametrize("extra", ["plain", "bias", "norms", "f32 norms"])
def test_rope_and_cache(canaries, dtype, heads, kv_heads, d, rotary, extra):
    rows, slots, layers, layer, table_rows = 9, 40, 3, 1, 50
    width = (heads + 2 * kv_heads) * d
    qkv = random_rows(rows, width, dtype=dtype, seed=d, scale=2.0)
    bias = random_rows(width, dtype=dtype, seed=5) if extra == "bias" else None
    kind = torch.float32 if extra == "f32 norms" else dtype
    q_norm, k_norm = ((random_rows(d, dtype=kind, seed=s) + 1 if "norms" in extra else None) for s in (6, 7))
    tables = rope_tables(table_rows, rotary // 2)
    rng = random.Random(d)
    positions = [0, table_rows - 1, *(rng.randrange(table_rows) for _ in range(rows - 2))]
    targets = rng.sample(range(1, slots), rows)
    targets[4] = 0  # a dead lane
    q, k, v = rope_reference(qkv, heads, kv_heads, bias, q_norm, k_norm, 1e-6, tables, positions)
    cache = canaries.empty(layers, 2, slots, kv_heads, d, dtype=dtype)
    want = cache.cpu().clone()
    for row, slot in enumerate(targets):
        if slot != 0:
            want[layer, 0, slot], want[layer, 1, slot] = k[row], v[row]
    out = canaries.empty(rows, heads * d, dtype=dtype)
    on = [None if t is None else canaries.of(t) for t in (bias, q_norm, k_norm)]
    table = tuple(canaries.of(t) for t in tables)
    args = (table, canaries.of(positions), canaries.of(targets))
    for offset in (0, 2):  # in vectors, or element by element: the same bits
        x = canaries.of(qkv, offset=offset)
        core._device_rope_kv(x, heads, kv_heads, *on, 1e-6, *args, out, cache, layer, handle())
        assert same(out.view(rows, heads, d), q)
        assert same(cache, want)
        out.fill_(float("nan"))
    # Keys and values alone, as a draft head's prefill wants them.
    alone = canaries.empty(layers, 2, slots, kv_heads, d, dtype=dtype)
    on[0] = None if bias is None else canaries.of(bias[heads * d :].contiguous())
    kv = canaries.of(qkv[:, heads * d :].contiguous())
    core._device_rope_kv(kv, 0, kv_heads, *on, 1e-6, *args, None, alone, layer, handle())
    assert same(alone, want)


FAMILY_HEADS = [(2, 1, 256, 256), (2, 1, 256, 64), (1, 1, 128, 128), (3, 1, 80, 32), (1, 1, 6, 6)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("heads", "kv_heads", "d", "rotary"), FAMILY_HEADS)
def test_few_rows_rotate_behind_norms_of_float32(canaries, dtype, heads, kv_heads, d, rotary):
    """Small cases of Gemma's 1 + w, which a sanitizer gets through: whole heads of 256, parts that are not rotated, odd
    halves; the weights at the end of allocated memory, aligned to 4 bytes alone, and the key's norm without the
    query's."""
    rows, slots = 3, 5
    qkv = random_rows(rows, (heads + 2 * kv_heads) * d, dtype=dtype, seed=d, scale=2.0)
    norms = [random_rows(d, dtype=torch.float32, seed=seed) + 1 for seed in (6, 7)]
    tables, positions, targets = rope_tables(7, rotary // 2), [6, 0, 3], [4, 0, 1]
    table = tuple(canaries.of(t) for t in tables)
    for q_norm, k_norm in (norms, (None, norms[1])):
        q, k, v = rope_reference(qkv, heads, kv_heads, None, q_norm, k_norm, 1e-6, tables, positions)
        for offset, shift in ((0, 0), (2, 4)):
            cache = canaries.empty(1, 2, slots, kv_heads, d, dtype=dtype)
            want, out = cache.cpu().clone(), canaries.empty(rows, heads * d, dtype=dtype)
            for row, slot in enumerate(targets):
                if slot != 0:
                    want[0, 0, slot], want[0, 1, slot] = k[row], v[row]
            on = [None if w is None else at_the_end(w, shift) for w in (q_norm, k_norm)]
            x, where = canaries.of(qkv, offset=offset), (canaries.of(positions), canaries.of(targets))
            core._device_rope_kv(x, heads, kv_heads, None, *on, 1e-6, table, *where, out, cache, 0, handle())
            assert same(out.view(rows, heads, d), q)
            assert same(cache, want)


@pytest.mark.parametrize("d", [128, 256])
@pytest.mark.parametrize("operand", ["qkv", "q", "bias", "q_norm", "k_norm", "cos", "sin", "cache"])
def test_any_operand_may_lie_beside_a_multiple_of_16_bytes(canaries, operand, d):
    """One operand alone that vectors of 16 bytes do not reach, and none: the same bits."""
    rows, heads, kv_heads, slots = 3, 3, 2, 6
    width = (heads + 2 * kv_heads) * d
    qkv, bias = (random_rows(n, width, dtype=torch.bfloat16, seed=n) for n in (rows, 1))
    q_norm, k_norm = (random_rows(d, dtype=torch.float32, seed=seed) + 1 for seed in (6, 7))
    tables, positions, targets = rope_tables(7, d // 2), [6, 0, 3], [4, 0, 1]
    q, k, v = rope_reference(qkv, heads, kv_heads, bias, q_norm, k_norm, 1e-6, tables, positions)

    def place(name, values):
        return canaries.of(values, offset=8 if name == operand else 0)

    cache = canaries.empty(1, 2, slots, kv_heads, d, dtype=torch.bfloat16, offset=8 if operand == "cache" else 0)
    want, out = cache.cpu().clone(), canaries.empty(rows, heads * d, dtype=qkv.dtype, offset=8 if operand == "q" else 0)
    for row, slot in enumerate(targets):
        if slot != 0:
            want[0, 0, slot], want[0, 1, slot] = k[row], v[row]
    on = (place("bias", bias[0]), place("q_norm", q_norm), place("k_norm", k_norm))
    table, where = (place("cos", tables[0]), place("sin", tables[1])), (canaries.of(positions), canaries.of(targets))
    core._device_rope_kv(place("qkv", qkv), heads, kv_heads, *on, 1e-6, table, *where, out, cache, 0, handle())
    assert same(out.view(rows, heads, d), q)
    assert same(cache, want)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("columns", [5, 8, 2304])
def test_few_rows_take_a_norm_of_float32(canaries, dtype, columns):
    """Small cases, which a sanitizer gets through: weights of float32 at the end of allocated memory, in vectors or one
    by one."""
    residual, x = (random_rows(3, columns, dtype=dtype, seed=s) for s in (1, 2))
    weight = random_rows(columns, dtype=torch.float32, seed=3) + 1
    total, norm = norm_reference(residual, x, weight, 1e-6)
    for offset, shift in ((0, 0), (2, 4)):
        stream, out = canaries.of(residual, offset=offset), canaries.empty(3, columns, dtype=dtype)
        on = at_the_end(weight, shift)
        core._device_add_rms_norm(stream, canaries.of(x), on, 1e-6, None, 0, None, out, handle())
        assert same(stream, total) and same(out, norm)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("columns", [5, 8, 2304])
@pytest.mark.parametrize("interleaved", [False, True])
def test_few_rows_take_gelu(dtype, columns, interleaved):
    """Small cases, which a sanitizer gets through: gates and ups at the end of allocated memory, in vectors or one by
    one."""
    gate, up = (random_rows(3, columns, dtype=dtype, seed=s, scale=3.0) for s in (1, 2))
    gate[:, :3] = torch.tensor([0.0, 200.0, -200.0]).to(dtype)
    want = gelu_reference(gate, up)
    gate_up = torch.stack([gate, up], -1).view(3, -1) if interleaved else torch.cat([gate, up], -1)
    for shift in (0, 2):
        out = at_the_end(torch.full((3, columns), float("nan"), dtype=dtype), shift)
        core._device_gated_up(at_the_end(gate_up, shift), "gelu_tanh", interleaved, None, out, handle())
        assert same(out, want)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("d", [64, 80, 6])
def test_values_in_the_cache_are_finite(canaries, dtype, d):
    """A value that would poison rows which do not attend to it marks its key, for those that do."""
    rows, heads, kv_heads = 6, 2, 2
    qkv = random_rows(rows, 6 * d, dtype=dtype, seed=3).view(rows, 6, d)
    bias = torch.zeros(6, d, dtype=dtype)
    bias[5, d - 1] = 3e38 if dtype == torch.bfloat16 else 6e4
    qkv[1, 4, d - 1], qkv[2, 5, 0], qkv[3, 4, 1] = float("nan"), float("inf"), -float("inf")
    qkv[4, 5, d - 1] = bias[5, d - 1]  # finite but for the bias
    qkv[5, 3, 1] = float("nan")  # a key: its own affair
    tables = rope_tables(8, d // 2)
    _, k, v = rope_reference(
        qkv.view(rows, -1), heads, kv_heads, bias.view(-1), None, None, 1e-6, tables, list(range(rows))
    )
    cache = canaries.empty(1, 2, rows + 1, kv_heads, d, dtype=dtype)
    core._device_rope_kv(
        canaries.of(qkv.view(rows, -1)), heads, kv_heads, canaries.of(bias.view(-1)), None, None, 1e-6,
        tuple(canaries.of(t) for t in tables), canaries.of(list(range(rows))), canaries.of(list(range(1, rows + 1))),
        canaries.empty(rows, heads * d, dtype=dtype), cache, 0, handle(),
    )  # fmt: skip
    keys, values = cache[0, 0, 1:].cpu(), cache[0, 1, 1:].cpu()
    bad = torch.zeros(rows, kv_heads, dtype=torch.bool)
    bad[1, 0] = bad[2, 1] = bad[3, 0] = bad[4, 1] = True
    assert (values[bad] == 0).all() and keys[bad].isnan().all()
    assert same(values[~bad], v.view(rows, kv_heads, d)[~bad])
    good = ~bad
    good[5, 1] = False
    assert same(keys[good], k.view(rows, kv_heads, d)[good])
    assert keys[5, 1].isnan().any() and not keys[5, 1].isnan().all()


def test_a_head_does_not_depend_on_its_batch():
    rows, heads, kv_heads, d = 200, 8, 2, 128
    qkv = random_rows(rows, 12 * d, dtype=torch.bfloat16).to(CUDA)
    norm = (random_rows(d, dtype=torch.bfloat16) + 1).to(CUDA)
    table = tuple(t.to(CUDA) for t in rope_tables(1000, 64))
    positions = torch.arange(rows, dtype=torch.int32, device=CUDA) * 3
    slots = torch.arange(1, rows + 1, dtype=torch.int32, device=CUDA)

    def run(part):
        cache = torch.zeros(1, 2, rows + 1, kv_heads, d, dtype=torch.bfloat16, device=CUDA)
        x = qkv[part].clone()
        q = torch.empty(len(x), heads * d, dtype=torch.bfloat16, device=CUDA)
        p, s = positions[part].clone(), slots[part].clone()
        core._device_rope_kv(x, heads, kv_heads, None, norm, norm, 1e-6, table, p, s, q, cache, 0, handle())
        return torch.cat([q, cache[0, 0, s].view(len(x), -1), cache[0, 1, s].view(len(x), -1)], -1)

    whole = run(slice(0, rows))
    for first, count in ((0, 1), (199, 1), (13, 5), (64, 64)):
        assert same(run(slice(first, first + count)), whole[first : first + count])
    with neighbour():
        for _ in range(50):
            assert torch.equal(run(slice(0, rows)).view(torch.int16), whole.view(torch.int16))


@pytest.mark.parametrize("bad", [16, -1, I32_MAX, I32_MIN])
@pytest.mark.parametrize("what", ["slot", "position"])
def test_a_slot_or_a_position_outside_is_recorded_and_not_written(canaries, bad, what):
    rows, heads, kv_heads, d, slots, table_rows = 3, 4, 2, 64, 16, 16
    qkv = random_rows(rows, 8 * d, dtype=torch.bfloat16)
    tables = rope_tables(table_rows, 32)
    positions, targets = [3, 4, 5], [7, 8, 9]
    q, k, v = rope_reference(qkv, heads, kv_heads, None, None, None, 0.0, tables, positions)
    cache = canaries.empty(1, 2, slots, kv_heads, d, dtype=torch.bfloat16)
    want = cache.cpu().clone()
    for row in (0, 2):
        want[0, 0, targets[row]], want[0, 1, targets[row]] = k[row], v[row]
    (targets if what == "slot" else positions)[1] = bad
    if what == "position":
        q[1] = 0
    out = canaries.empty(rows, heads * d, dtype=torch.bfloat16)
    table = tuple(canaries.of(t) for t in tables)
    core._device_rope_kv(
        canaries.of(qkv),
        heads,
        kv_heads,
        None,
        None,
        None,
        0.0,
        table,
        canaries.of(positions),
        canaries.of(targets),
        out,
        cache,
        0,
        handle(),
    )
    assert fault() == ("rope_kv", "cache (slot)" if what == "slot" else "rope table", -1, 1, bad, 16)
    assert same(out.view(rows, heads, d), q)
    assert same(cache, want)


# --- graphs and operands ---------------------------------------------------------------------------------------------


def test_a_layers_small_operations_replay_in_a_graph():
    hidden, heads, kv_heads, d, rows, vocab = 256, 4, 2, 64, 8, 50
    dtype = torch.bfloat16
    table, weight = random_rows(vocab, hidden, dtype=dtype).to(CUDA), torch.ones(hidden, dtype=dtype, device=CUDA)
    rope = tuple(t.to(CUDA) for t in rope_tables(64, d // 2))
    tokens, positions, slots = (torch.zeros(rows, dtype=torch.int32, device=CUDA) for _ in range(3))
    live = torch.zeros(1, dtype=torch.int32, device=CUDA)
    x, out, qkv = (torch.empty(rows, n, dtype=dtype, device=CUDA) for n in (hidden, hidden, 2 * hidden))
    q, act = (torch.empty(rows, n, dtype=dtype, device=CUDA) for n in (hidden, hidden))
    cache = torch.zeros(1, 2, 32, kv_heads, d, dtype=dtype, device=CUDA)

    def run():
        core._device_embed(table, tokens, live, x, handle())
        core._device_add_rms_norm(x, None, weight, 1e-5, None, 0, live, out, handle())
        torch.cat([out, x], -1, out=qkv)
        core._device_rope_kv(qkv, heads, kv_heads, None, None, None, 0.0, rope, positions, slots, q, cache, 0, handle())
        core._device_gated_up(qkv, "silu", False, live, act, handle())

    run()  # torch's own warm-up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for n in (1, 8, 0, 5):
        host = random.Random(n)
        tokens.copy_(torch.tensor([host.randrange(vocab) for _ in range(rows)], dtype=torch.int32))
        positions.copy_(torch.tensor([host.randrange(64) if i < n else 0 for i in range(rows)], dtype=torch.int32))
        slots.copy_(torch.tensor([1 + i if i < n else 0 for i in range(rows)], dtype=torch.int32))
        live.fill_(n)
        cache.zero_()
        graph.replay()
        got = [t.clone() for t in (x, out, q, act, cache)]
        for t in (x, out, q, act):
            t.fill_(float("nan"))
        cache.zero_()
        run()
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, (x, out, q, act, cache), strict=True))
        assert (act[n:] == 0).all() and (x[n:] == 0).all() and act.isfinite().all()


def test_operands_that_do_not_fit_are_refused_before_the_launch():
    def rows(*shape, dtype=torch.bfloat16):
        return torch.zeros(*shape, dtype=dtype, device=CUDA)

    ids = torch.zeros(3, dtype=torch.int32, device=CUDA)

    def refused(match, f, *args):
        with pytest.raises(specrs.ConfigError, match=match):
            f(*args, handle())

    embed, norm, silu = core._device_embed, core._device_add_rms_norm, core._device_gated_up
    refused("out: got bfloat16 .3, 9., want bfloat16 .3, 8.", embed, rows(5, 8), ids, None, rows(3, 9))
    refused("out: got float16 .3, 8.", embed, rows(5, 8), ids, None, rows(3, 8, dtype=torch.float16))
    refused("tokens: got int64", embed, rows(5, 8), ids.long(), None, rows(3, 8))
    refused("table: got cpu", embed, rows(5, 8).cpu(), ids, None, rows(3, 8))
    refused("live: got 0 elements, want at least 1", embed, rows(5, 8), ids, ids[:0], rows(3, 8))
    whole = rows(5, 8)
    refused("out: got memory that table uses too", embed, whole, ids, None, whole[:3])
    refused("weight: got bfloat16 .1, 7.", norm, rows(3, 8), None, rows(7), 0.0, None, 0, None, rows(3, 8))
    refused("eps = -1", norm, rows(3, 8), None, rows(8), -1.0, None, 0, None, rows(3, 8))
    refused("columns of a norm = 32769", norm, rows(1, 32769), None, rows(32769), 0.0, None, 0, None, None)
    refused("first column = 8", norm, rows(3, 8), None, rows(8), 0.0, rows(3, 8), 8, None, None)
    refused("residual: got float32", norm, rows(3, 8, dtype=torch.float32), None, rows(8), 0.0, None, 0, None, None)
    refused("gate_up: got bfloat16 .3, 8., want bfloat16 .3, 16.", silu, rows(3, 8), "silu", False, None, rows(3, 8))
    refused('activation = relu: must be "silu" or', silu, rows(3, 16), "relu", False, None, rows(3, 8))
    rope = core._device_rope_kv
    table = (rows(4, 2, dtype=torch.float32), rows(4, 2, dtype=torch.float32))
    cache, q = rows(2, 2, 9, 1, 4), rows(3, 8)

    def call(match, **changed):
        given = {
            "qkv": rows(3, 16),
            "heads": 2,
            "kv_heads": 1,
            "bias": None,
            "q_norm": None,
            "k_norm": None,
            "eps": 0.0,
            "table": table,
            "positions": ids,
            "slots": ids,
            "q": q,
            "cache": cache,
            "layer": 1,
        }
        with pytest.raises(specrs.ConfigError, match=match):
            rope(**{**given, **changed}, stream=handle())

    call("layer = 2 is outside 0..=1", layer=2)
    call("q: got none, want one exactly where there are query heads", q=None)
    call("head_dim = 3: rotary positions turn pairs", qkv=rows(3, 12), q=rows(3, 6))
    call("rotary pairs = 3 is outside 1..=2", table=(rows(4, 3, dtype=torch.float32),) * 2)
    call("cache: got 16 bytes a token and plane, want 8", cache=rows(2, 2, 9, 2, 4))
    call("slots: got 2 elements, want 3", slots=ids[:2])
    call("bias: got bfloat16 .1, 15.", bias=rows(15))
    call("q_norm: got bfloat16 .1, 5.", q_norm=rows(5))
    call("kv_heads = 0", kv_heads=0)
    torch.cuda.synchronize()
