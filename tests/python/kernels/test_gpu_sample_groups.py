"""Blocks that draw a token together on a GPU: what they send one another in cases that most draws do not meet."""

from __future__ import annotations

import math
import random

import pytest
import torch

import specrs
from gpu_world import CUDA
from sample_world import Json, agree, check, i32, launch, normal, on_device
from specrs import _specrs as core
from specrs import device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

# Batches by which an H100 has groups of 16, 8, 4 and 2 blocks, and more than run at once.
BATCHES = [1, 7, 12, 24, 64, 70]

pytestmark = pytest.mark.usefixtures("no_fault_is_left")


def check_chains(rows: torch.Tensor, samplers: list[core.Sampler], times: int) -> None:
    """Walks that go through all rows of their requests draw as the host does, time and again."""
    batch = len(samplers)
    nodes = rows.shape[0] // batch
    host, tokens, lens = rows.cpu(), [], [9 * i for i in range(batch)]
    for i, s in enumerate(samplers):
        path: list[int] = []
        for n in range(nodes):
            path.append(s.draw(host[i * nodes + n], lens[i] + n + 1, path))
        tokens.append([0, *path[:-1]])
    parents = [[n - 1 for n in range(nodes)]] * batch
    arrays = on_device(samplers)
    paths, _ = check(rows, parents, tokens, lens, samplers)
    assert [len(p) for p in paths] == [nodes] * batch
    first = launch(rows, parents, tokens, lens, samplers, arrays=arrays)
    for _ in range(times):
        again = launch(rows, parents, tokens, lens, samplers, arrays=arrays)
        assert torch.equal(again.tokens, first.tokens)
    agree(again, rows, parents, tokens, lens, samplers)


@pytest.mark.parametrize("batch", BATCHES)
def test_a_histogram_right_after_one_that_found_too_few(batch: int) -> None:
    """Fewer tokens have a weight than top-k keeps, by bins, and top-p follows."""
    vocab, nodes = 30_011, 6
    rng = random.Random(batch)
    rows = torch.full((batch * nodes, vocab), -math.inf, device=CUDA)
    at = torch.randint(vocab, (batch * nodes, 90), device=CUDA)
    rows.scatter_(1, at, normal(rng, batch * nodes, 90, 2))
    rows[1::2].clamp_(min=-1000.0)
    ways: list[Json] = [{"top_k": k, "top_p": p} for k in (129, 1000, 20_000) for p in (0.5, 0.95)]
    samplers = [core.Sampler(vocab, [], temperature=1.0, **ways[i % 6], seed=i) for i in range(batch)]
    check_chains(rows, samplers, 100)


@pytest.mark.parametrize("batch", BATCHES)
def test_a_nucleus_that_ends_between_two_bins(batch: int) -> None:
    """The bin is guessed by weights that are about right, and the sums say that it was one of its neighbours."""
    vocab, nodes, levels = 20_011, 6, 24
    generator = torch.Generator(device=CUDA).manual_seed(batch)
    for which in range(4):
        # Levels of many tied tokens, far apart: any bin of log-weight has one of them at most.
        values = torch.arange(levels, device=CUDA) * -0.37 - torch.rand(levels, device=CUDA, generator=generator) * 0.2
        values[0] = 0.0
        rows = torch.full((vocab,), -200.0, device=CUDA)
        order = torch.randperm(vocab, device=CUDA, generator=generator)[: levels * 9]
        rows[order] = values.repeat(9)
        weights = values.double().exp().cpu()
        shares = (weights.cumsum(0) / weights.sum()).tolist()
        off = [0.0, 1e-7, -1e-7, 1e-5, -1e-5, 1e-4, -1e-4]
        samplers = []
        for i in range(batch):
            top_p = shares[(5 * i + 7 * which) % (levels - 1)] * (1 + off[(i + which) % 7])
            samplers.append(core.Sampler(vocab, [], temperature=1.0, top_p=min(top_p, 1.0), seed=i))
        check_chains(rows.repeat(batch * nodes, 1), samplers, 40)


@pytest.mark.parametrize("batch", BATCHES)
def test_nuclei_of_rows_one_after_another(batch: int) -> None:
    """A block goes on to the next row while others still wait for what the last one's nucleus was."""
    vocab, nodes = 40_009, 12
    rows = normal(random.Random(batch), batch * nodes, vocab, 3)
    samplers = [core.Sampler(vocab, [], temperature=0.9, top_p=0.9 + 0.001 * (i % 64), seed=i) for i in range(batch)]
    check_chains(rows, samplers, 100)


# Words of a sampler's row (`SamplerRow` of src/device/params/verify.rs), and what no host writes there.
INV_T = 3
NAN, INFINITE, NEGATIVE = 0x7FC00000, 0x7F800000, 0xBF800000
HOSTILE = [
    (INV_T, 0, NAN, 0x7F800000),
    (INV_T, 0, INFINITE, 0x7F800000),
    (INV_T, 0, NEGATIVE, 0x7F800000),
    (1, 1, 2**40 + 1, 2**40 + 1),
    (1, 1, 2**63 - 1, 2**40 + 1),
    (2, 2, 0x7FF8 << 48, (0x3FF << 52) + 1),
    (2, 2, 0x400 << 52, (0x3FF << 52) + 1),
]
MODES: dict[str, Json] = {
    "temperature": {},
    "few best": {"top_k": 40},
    "few best, nucleus": {"top_k": 40, "top_p": 0.9},
    "many best": {"top_k": 700},
    "many best, nucleus": {"top_k": 700, "top_p": 0.9},
    "nucleus": {"top_p": 0.9},
    "nucleus, min-p": {"top_p": 0.99, "min_p": 0.2},
    "min-p": {"min_p": 0.05},
}


@pytest.mark.parametrize("batch", [3, 12, 64])
@pytest.mark.parametrize("mode", MODES)
def test_a_sampler_that_no_host_makes_leaves_its_request_out(mode: str, batch: int) -> None:
    """By a temperature that is no number, or a floor above all weights, no token would have a weight."""
    vocab, bad = 9000, 1
    logits = normal(random.Random(mode), batch, vocab, 2)
    samplers = [core.Sampler(vocab, [], temperature=0.8, **MODES[mode], seed=i) for i in range(batch)]
    want = [samplers[i].draw(logits[i].cpu(), 6 + i) for i in range(batch)]
    for word, field, value, bound in HOSTILE:
        arrays = on_device(samplers)
        if word == INV_T:
            top_k = int(arrays[0][bad, word]) & 0xFFFFFFFF
            arrays[0][bad, word] = top_k | (value - (value >> 31 << 32)) << 32
        else:
            arrays[0][bad, word] = value
        out = launch(logits, [[-1]] * batch, [[0]] * batch, range(5, 5 + batch), samplers, arrays=arrays)
        torch.cuda.synchronize()
        with pytest.raises(specrs.OutOfBoundsError) as e:
            device.check()
        got = (e.value.kernel, e.value.buffer, e.value.request, e.value.step, e.value.index, e.value.bound)
        assert got == ("sample_verify", "samplers", bad, field, value, bound)
        assert out.offsets.tolist() == [0, *range(1, bad + 1), *range(bad, batch)]
        others = want[:bad] + want[bad + 1 :]
        assert out.tokens.tolist() == [*others, -1]
        assert out.roots.tolist() == [*want[:bad], 0, *want[bad + 1 :]]


@pytest.mark.parametrize("batch", [3, 12, 64])
@pytest.mark.parametrize("mode", MODES)
def test_logits_from_which_nothing_can_be_drawn_end_in_every_mode(mode: str, batch: int) -> None:
    """Rows of NaN, infinities and huge numbers, at every place of a group: a fault or the host's token, and no wait."""
    vocab = 9000
    rng = random.Random(mode)
    for value in (math.nan, math.inf, -math.inf, torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max):
        logits = normal(rng, batch, vocab, 2)
        logits[0] = value
        logits[1, rng.randrange(vocab)] = value
        logits[2, vocab // 3 :] = value
        samplers = [core.Sampler(vocab, [], temperature=0.8, **MODES[mode], seed=i) for i in range(batch)]
        check(logits, [[-1]] * batch, [[0]] * batch, list(range(batch)), samplers)
        if not abs(value) < math.inf:
            with pytest.raises(specrs.NonFiniteError):
                device.check()
    launch(normal(rng, 1, 5, 1), [[-1]], [[0]], [1], [core.Sampler(5, [], **MODES[mode])], live=i32([1]))
    device.check()
