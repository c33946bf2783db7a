"""Sampling verification on a GPU against the host's: the same tokens, for the same logits, always."""

from __future__ import annotations

import math
import random

import pytest
import torch

import specrs
from gpu_world import CUDA
from operands_world import named
from sample_world import (
    LOGITS,
    POISON,
    Json,
    Outputs,
    check,
    i32,
    launch,
    normal,
    on_device,
    parameters,
    plain,
    sampler,
    stream,
    survives,
)
from specrs import _specrs as core
from specrs import device
from specrs.operands import SamplerArrays, TreeArrays

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

VOCABS = [1, 2, 31, 1000, 32000, 128256, 151936, 262144]

pytestmark = pytest.mark.usefixtures("no_fault_is_left")


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", LOGITS)
def test_single_draws(kind: str, vocab: int) -> None:
    """One node a request: the draw itself, over parameters and their combinations."""
    rng = random.Random(f"{kind} {vocab}")
    batch = 48 if vocab > 50_000 else 96
    logits = LOGITS[kind](rng, batch, vocab)
    samplers = [sampler(rng, vocab, parameters(rng, vocab)) for _ in range(batch)]
    samplers = [s if survives(s, row) else plain(rng, vocab) for s, row in zip(samplers, logits.cpu(), strict=True)]
    lens = [rng.choice([0, 1, 7, 100_000, 2**31 - 2]) for _ in range(batch)]
    check(logits, [[-1]] * batch, [[0]] * batch, lens, samplers)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "temperature"])
@pytest.mark.parametrize("kind", ["normal", "nearly flat", "ties", "slope"])
def test_each_parameter_alone(name: str, kind: str) -> None:
    vocab = 50257
    rng = random.Random(f"{kind} {name}")
    values = {
        "top_k": [1, 2, 3, 31, 32, 33, 512, 1023, 1024, 1025, 2048, 4096, 50000, 50256, 50257, 50258],
        "top_p": [1e-12, 0.001, 0.01, 0.05, 0.2, 0.25, 0.5, 0.75, 0.8, 0.9, 0.95, 0.98, 0.99, 0.9999, 1 - 2**-53],
        "min_p": [1e-12, 1e-9, 1e-5, 0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.999, 1.0],
        "temperature": [1e-300, 1e-6, 0.01, 0.1, 0.2, 0.5, 0.6, 0.8, 1.0, 1.1, 1.3, 2.0, 10.0, 100.0, 1e300],
    }[name]
    batch = 3 * len(values)
    samplers = [core.Sampler(vocab, [], **{"temperature": 1.0, "seed": i, name: values[i // 3]}) for i in range(batch)]
    logits = LOGITS[kind](rng, batch, vocab)
    check(logits, [[-1]] * batch, [[0]] * batch, list(range(batch)), samplers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [2, 31, 32000, 151936])
def test_half_precision(dtype: torch.dtype, vocab: int) -> None:
    rng = random.Random(vocab)
    for kind in ["normal", "nearly flat", "ties", "half holes", "peak"]:
        logits = LOGITS[kind](rng, 24, vocab).to(dtype)
        samplers = [sampler(rng, vocab, parameters(rng, vocab)) for _ in range(24)]
        samplers = [s if survives(s, r) else plain(rng, vocab) for s, r in zip(samplers, logits.float().cpu())]  # noqa: B905
        check(logits, [[-1]] * 24, [[0]] * 24, [rng.randrange(1000) for _ in range(24)], samplers)


def blocks_of(vocab: int) -> list[list[int]]:
    """First and last ids of the parts that a group of 1, 2, 4, 8 or 16 blocks cuts a row into, warp by warp."""
    parts = []
    for blocks in (1, 2, 4, 8, 16):
        size = math.ceil(math.ceil((vocab + 3) / (blocks * 16)) / 128) * 128
        parts.append([*range(0, vocab, size), *range(size - 1, vocab - 1, size)])
    return parts


@pytest.mark.parametrize("batch", [1, 7, 8, 15, 31, 63, 70, 140])
def test_a_row_in_any_number_of_blocks(batch: int) -> None:
    """Groups of every size draw alike; the vocabulary is no multiple of their parts, or smaller than they are many."""
    for vocab in (5, 700, 16411, 100_003):
        rng = random.Random(f"{batch} {vocab}")
        for kind in ("normal", "ties", "nearly flat"):
            logits = LOGITS[kind](rng, batch, vocab)
            samplers = [plain(rng, vocab) for _ in range(batch)]
            check(logits, [[-1]] * batch, [[0]] * batch, [rng.randrange(1000) for _ in range(batch)], samplers)


@pytest.mark.parametrize("batch", [1, 12, 24, 60])
def test_tokens_and_edits_at_the_borders_of_parts(batch: int) -> None:
    """The kept tokens, their ties and their edits lie where one part of a row ends and the next begins."""
    vocab = 32_003
    for edges in blocks_of(vocab):
        rng = random.Random(edges[-1])
        logits = normal(rng, batch, vocab, 1)
        logits[:, edges] = 9.0
        bias = {t: rng.choice([0.5, -0.5, -math.inf]) for t in edges[1::3]}
        ways: list[Json] = [
            {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0, "top_k": len(edges) // 2},
            {"temperature": 1.0, "top_p": 0.7, "logit_bias": bias}, {"temperature": 0.0, "logit_bias": bias},
            {"temperature": 2.0, "top_k": 5, "presence_penalty": 0.3, "logit_bias": bias},
        ]  # fmt: skip
        samplers = [core.Sampler(vocab, edges[:9], **rng.choice(ways), seed=i) for i in range(batch)]
        check(logits, [[-1]] * batch, [[0]] * batch, list(range(batch)), samplers)


@pytest.mark.parametrize("batch", [1, 20, 64])
def test_more_candidates_than_are_sorted(batch: int) -> None:
    """A nucleus, or the k best, of more tokens than the kernel sorts, with few or many of them at its end."""
    vocab = 70_001
    for most in (255, 256, 257, 1024, 20_000):
        rng = random.Random(most)
        for end in (1, 2000):
            logits = normal(rng, batch, vocab, 1e-3) - 20
            logits[:, torch.randperm(vocab, device=CUDA)[:most]] += 20
            logits[:, torch.randperm(vocab, device=CUDA)[:end]] = -0.01
            ways: list[Json] = [{"top_k": most}, {"top_p": 0.999}, {"top_k": most + 1, "top_p": 0.9}, {"top_p": 0.5}]
            samplers = [core.Sampler(vocab, [], temperature=1.0, **ways[i % 4], seed=i + most) for i in range(batch)]
            check(logits, [[-1]] * batch, [[0]] * batch, list(range(batch)), samplers)


@pytest.mark.parametrize("batch", [1, 12, 20, 64])
def test_the_best_tokens_side_by_side(batch: int) -> None:
    """The k best are neighbours, more than a block has room for, tied or not; k is about what bounds allow."""
    vocab = 100_003
    rng = random.Random(batch)
    for first in (0, 3, vocab - 300):
        logits = normal(rng, batch, vocab, 1)
        logits[:, first : first + 300] += 12
        logits[::2, first + 40 : first + 90] = 11.0
        ks = [1, 43, 44, 45, 50, 89, 127, 128, 129, 176, 177, 255, 256, 257]
        ways: list[Json] = [{"top_k": k, "top_p": p} for k in ks for p in (1.0, 0.8)]
        samplers = [
            core.Sampler(vocab, [], temperature=1.0, **ways[(3 * i + first) % 28], seed=i) for i in range(batch)
        ]
        check(logits, [[-1]] * batch, [[0]] * batch, list(range(batch)), samplers)


@pytest.mark.parametrize("batch", [1, 20, 64])
def test_a_mask_of_nearly_all_tokens(batch: int) -> None:
    """Edits of a grammar: all tokens but a few are forbidden."""
    vocab = 50_021
    rng = random.Random(batch)
    logits = normal(rng, batch, vocab, 3)
    samplers = []
    for i in range(batch):
        free = {rng.randrange(vocab) for _ in range(1 + i % 40)}
        bias = {t: -math.inf for t in range(vocab) if t not in free}
        samplers.append(core.Sampler(vocab, [1, 2], temperature=1.0, top_p=0.9, seed=i, logit_bias=bias))
    check(logits, [[-1]] * batch, [[0]] * batch, list(range(batch)), samplers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_begin_anywhere(dtype: torch.dtype) -> None:
    """Rows at any alignment of their elements."""
    vocab, batch = 4099, 9
    rng = random.Random(4)
    wide = normal(rng, 1, batch * vocab + 8, 2)[0].to(dtype)
    samplers = [sampler(rng, vocab, {"temperature": 1.0, "top_p": 0.9, "seed": i}) for i in range(batch)]
    for shift in range(8):
        logits = wide[shift : shift + batch * vocab].view(batch, vocab)
        check(logits, [[-1]] * batch, [[0]] * batch, list(range(batch)), samplers)


def grown_tree(rng: random.Random, s: core.Sampler, rows: torch.Tensor, length: int) -> tuple[list[int], list[int]]:
    """A tree along which the walk goes far: most of the tokens that will be drawn, among others."""
    vocab = rows.shape[1]
    parents, tokens, path, node = [-1], [rng.randrange(vocab)], [], 0
    limit = rows.shape[0]
    while len(parents) < limit:
        token = s.draw(rows[node], length + len(path) + 1, path)
        others = [rng.randrange(vocab) for _ in range(rng.choice([0, 1, 3]))]
        follow = rng.random() < 0.85
        children = [*others, token] if follow else [t for t in others if t != token]
        rng.shuffle(children)
        room = limit - len(parents)
        if follow and token not in children[:room]:
            break
        first = len(parents)
        for child in children[:room]:
            parents.append(node)
            tokens.append(child)
        if not follow:
            break
        node = first + children.index(token)
        path.append(token)
    while len(parents) < limit and rng.random() < 0.9:
        parents.append(rng.randrange(len(parents)))
        tokens.append(rng.randrange(vocab))
    return parents, tokens


@pytest.mark.parametrize("vocab", [31, 1000, 32003])
@pytest.mark.parametrize("kind", ["normal", "ties", "nearly flat"])
def test_trees(kind: str, vocab: int) -> None:
    """Walks along trees, with penalties that depend on the path to each node."""
    rng = random.Random(f"{vocab} {kind}")
    depths = []
    for sizes in ([1], [64], [7, 1, 20, 33], [8] * 16, [40]):
        rows = LOGITS[kind](rng, sum(sizes), vocab)
        host = rows.cpu()
        parents, tokens, lens, samplers, first = [], [], [], [], 0
        exact = []
        for size in sizes:
            p = parameters(rng, vocab)
            p["temperature"] = rng.choice([0.0, 0.5, 1.0])
            s = sampler(rng, vocab, p)
            length = rng.randrange(5000)
            mine = host[first : first + size]
            try:
                tree = grown_tree(rng, s, mine, length)
            except specrs.NonFiniteError:
                s = plain(rng, vocab)
                tree = grown_tree(rng, s, mine, length)
            exact.append(mine[: len(tree[0])])
            first += size
            parents.append(tree[0])
            tokens.append(tree[1])
            lens.append(length)
            samplers.append(s)
        logits = torch.cat(exact).to(CUDA)
        paths, _ = check(logits, parents, tokens, lens, samplers)
        depths += [len(p) for p in paths]
        # Mode: a batch of the same requests alone.
        for i in (0, len(sizes) - 1):
            at = sum(len(p) for p in parents[:i])
            alone, _ = check(
                logits[at : at + len(parents[i])].clone(), [parents[i]], [tokens[i]], [lens[i]], [samplers[i]]
            )
            assert alone[0] == paths[i]
    assert max(depths) > 4


def test_a_chain_of_drafts_is_accepted_as_far_as_plain_decoding_goes() -> None:
    vocab, n = 997, 48
    rng = random.Random(3)
    s = core.Sampler(vocab, [1, 2, 3], temperature=0.8, top_k=40, top_p=0.9, frequency_penalty=0.4, seed=11)
    rows = normal(rng, n, vocab, 2).cpu()
    path: list[int] = []
    for i in range(n):
        path.append(s.draw(rows[i], 100 + i + 1, path))
    parents = [i - 1 for i in range(n)]
    for right in (0, 1, 17, n - 1):
        tokens = [5, *path[: n - 1]]
        for i in range(right + 1, n):
            tokens[i] = (tokens[i] + 1) % vocab
        paths, drawn = check(rows.to(CUDA), [parents], [tokens], [100], [s])
        assert paths == [list(range(right + 1))] and drawn == [path[: right + 1]]


def test_rows_that_no_walk_reaches_decide_nothing() -> None:
    """Rows of NaN beside the path, behind the batch, and of a dead request."""
    vocab = 513
    rng = random.Random(0)
    logits = torch.full((9, vocab), math.nan, device=CUDA)
    logits[0] = normal(rng, 1, vocab, 1)[0]
    s = core.Sampler(vocab, [], temperature=1.0, seed=5)
    token = s.draw(logits[0].cpu(), 8)
    tree = [[-1, 0, 0, 1]], [[0, (token + 1) % vocab, (token + 2) % vocab, 4]]
    out = Outputs(9, 1, 4)
    core._device_sample_verify(
        logits=logits,
        trees=TreeArrays(tokens=i32(tree[1][0] + [0] * 5), parents=i32(tree[0][0] + [-1] * 5), offsets=i32([0, 4])),
        lens=i32([7]),
        live=None,
        max_nodes=4,
        max_path=4,
        samplers=named(SamplerArrays, on_device([s])),
        accepts=out.accepts(),
        scratch=out.scratch,
        stream=stream(),
    )
    assert out.tokens.tolist() == [token, -1, -1, -1]
    assert out.faults.tolist() == [0]


@pytest.mark.parametrize("live", [0, 1, 2, 3])
def test_dead_requests_of_a_static_batch(live: int) -> None:
    vocab = 100
    logits = torch.full((3, vocab), math.nan, device=CUDA)
    logits[:live] = normal(random.Random(live), live, vocab, 1)
    samplers = [core.Sampler(vocab, [], temperature=1.0, seed=i) for i in range(3)]
    out = launch(logits, [[-1]] * 3, [[0]] * 3, [5, 6, 7], samplers, live=i32([9, 9, live]))
    want = [samplers[i].draw(logits[i].cpu(), 6 + i) for i in range(live)]
    assert out.offsets.tolist() == [*range(live), *[live] * (4 - live)]
    assert out.tokens.tolist() == want + [-1] * (3 - live)
    assert out.roots.tolist() == want + [0] * (3 - live)
    assert out.new_lens.tolist() == [6 + i for i in range(live)] + [0] * (3 - live)
    assert out.faults.tolist() == [0, 0, 0]


def test_an_empty_batch_launches_nothing() -> None:
    out = launch(torch.zeros(0, 8, device=CUDA), [], [], [], [])
    assert out.offsets.tolist() == [POISON]


@pytest.mark.parametrize("value", ["NaN", "+inf", "all -inf"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("edited", [False, True])
def test_a_row_that_cannot_be_sampled_ends_its_walk_alone(value: str, temperature: float, edited: bool) -> None:
    vocab = 3000
    rng = random.Random(8)
    logits = normal(rng, 6, vocab, 1)
    p: Json = {"temperature": temperature, "seed": 4}
    if edited:
        p["presence_penalty"] = 0.5
    samplers = [core.Sampler(vocab, [7], **p) for _ in range(3)]
    # Request 1 is a chain of four: its second node cannot be sampled.
    token = samplers[1].draw(logits[1].cpu(), 21)
    column = {"NaN": 2017, "+inf": 1999, "all -inf": 0}[value]
    if value == "all -inf":
        logits[2] = -math.inf
    else:
        logits[2, 2500] = math.inf
        logits[2, column] = math.nan if value == "NaN" else math.inf
        logits[2, 2999] = math.nan if value == "NaN" else 0.0
    check(logits, [[-1], [-1, 0, 1, 2], [-1]], [[0], [0, token, 1, 1], [0]], [10, 20, 30], samplers)
    with pytest.raises(specrs.NonFiniteError) as e:
        device.check()
    got = e.value
    assert (got.what, got.value, got.request, got.row, got.position, got.index) == (
        "target logits",
        value,
        1,
        2,
        22,
        column,
    )
    device.check()


def test_edits_that_leave_nothing_are_named() -> None:
    vocab = 4
    logits = torch.zeros(2, vocab, device=CUDA)
    forbid = dict.fromkeys(range(vocab), -math.inf)
    samplers = [core.Sampler(vocab, [], temperature=1.0, logit_bias=forbid), core.Sampler(vocab, [], temperature=1.0)]
    check(logits, [[-1]] * 2, [[0]] * 2, [3, 4], samplers)
    with pytest.raises(specrs.NonFiniteError, match="target logits after logit_bias and penalties: all -inf") as e:
        device.check()
    assert (e.value.request, e.value.row, e.value.position) == (0, 0, 4)


@pytest.mark.parametrize(
    ("which", "at", "bad", "buffer", "index", "bound"),
    [
        ("begins", 1, -1, "edits", -1, 4),
        ("begins", 1, 3, "edits", 4, 4),
        ("counts", 1, 5, "edits", 6, 4),
        ("counts", 1, -2, "edits", -2, 4),
        ("tokens", 2, 50, "edits (tokens)", 50, 50),
        ("tokens", 3, -1, "edits (tokens)", -1, 50),
    ],
)
def test_edits_outside_their_arrays_leave_their_request_out(which, at, bad, buffer, index, bound) -> None:
    vocab = 50
    logits = normal(random.Random(1), 3, vocab, 1)
    samplers = [core.Sampler(vocab, [], temperature=1.0, seed=i, logit_bias={3: 1.0, 9: 2.0}) for i in range(2)]
    samplers.append(core.Sampler(vocab, [], temperature=1.0, seed=9))
    arrays = on_device(samplers)
    arrays[{"begins": 1, "counts": 2, "tokens": 3}[which]][at] = bad
    out = launch(logits, [[-1]] * 3, [[0]] * 3, [5, 6, 7], samplers, arrays=arrays)
    torch.cuda.synchronize()
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    got = (e.value.kernel, e.value.buffer, e.value.request, e.value.index, e.value.bound)
    assert got == ("sample_verify", buffer, 1, index, bound)
    want = [samplers[i].draw(logits[i].cpu(), 6 + i) for i in (0, 2)]
    assert out.offsets.tolist() == [0, 1, 1, 2]
    assert out.tokens.tolist() == [*want, -1]
    assert out.roots.tolist() == [want[0], 0, want[1]]


def test_a_path_longer_than_its_room_ends_early() -> None:
    vocab = 64
    rng = random.Random(2)
    rows = normal(rng, 4, vocab, 1)
    s = core.Sampler(vocab, [], temperature=1.0, seed=1)
    path: list[int] = []
    for i in range(4):
        path.append(s.draw(rows[i].cpu(), 5 + i, path))
    out = launch(rows, [[-1, 0, 1, 2]], [[0, *path[:3]]], [4], [s], max_path=2)
    torch.cuda.synchronize()
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    assert (e.value.buffer, e.value.request, e.value.index, e.value.bound) == ("accepted path", 0, 2, 2)
    assert out.tokens.tolist() == path[:2] and out.paths.tolist() == [0, 1]


def test_repeats_are_equal_under_a_stream_that_hogs_the_gpu() -> None:
    vocab, batch = 32000, 40
    rng = random.Random(6)
    logits = normal(rng, batch, vocab, 2)
    samplers = [core.Sampler(vocab, [], temperature=1.2, top_p=0.97, seed=i) for i in range(batch)]
    arrays = on_device(samplers)
    first = launch(logits, [[-1]] * batch, [[0]] * batch, [1] * batch, samplers, arrays=arrays).tokens.tolist()
    a = torch.randn(2048, 2048, device=CUDA)
    side = torch.cuda.Stream()
    for _ in range(100):
        with torch.cuda.stream(side):
            a = (a @ a).clamp(-1, 1)
        again = launch(logits, [[-1]] * batch, [[0]] * batch, [1] * batch, samplers, arrays=arrays)
        assert again.tokens.tolist() == first


def test_graph_replays_read_the_contents_of_their_time() -> None:
    vocab, batch = 5000, 3
    rng = random.Random(12)
    logits = torch.zeros(batch, vocab, device=CUDA)
    samplers = [core.Sampler(vocab, [], temperature=1.0, top_k=20, seed=i) for i in range(batch)]
    arrays = on_device(samplers)
    trees = TreeArrays(tokens=i32([0] * batch), parents=i32([-1] * batch), offsets=i32(range(batch + 1)))
    lens = i32([0] * batch)
    out = Outputs(batch, batch, 1)
    device.init()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        core._device_sample_verify(
            logits=logits, trees=trees, lens=lens, live=None, max_nodes=1, max_path=1,
            samplers=named(SamplerArrays, arrays), accepts=out.accepts(), scratch=out.scratch,
            stream=stream(),
        )  # fmt: skip
    assert out.tokens.tolist() == [POISON] * batch
    for step in range(6):
        logits.copy_(normal(rng, batch, vocab, 2))
        lens.fill_(step * 3)
        graph.replay()
        assert out.tokens.tolist() == [samplers[i].draw(logits[i].cpu(), step * 3 + 1) for i in range(batch)]


def test_operands_that_do_not_fit_are_refused() -> None:
    vocab = 8
    s = [core.Sampler(vocab, [], temperature=1.0)]
    good = on_device(s)

    def refused(match: str, **change) -> None:
        arrays = list(good)
        for name, tensor in change.items():
            arrays[int(name[1:])] = tensor
        with pytest.raises(specrs.ConfigError, match=match):
            launch(torch.zeros(1, vocab, device=CUDA), [[-1]], [[0]], [1], s, arrays=arrays)

    refused("sampler rows: got 12 elements, want 6", a0=good[0].repeat(2, 1))
    refused("edit counts: got 2 elements, want 1", a2=good[2].repeat(2))
    refused("edit biases: got 1 elements, want 0", a4=torch.zeros(1, device=CUDA))
    refused("edit_tokens: got int64, want int32", a3=good[3].long())
    with pytest.raises(specrs.ConfigError, match="vocabulary = 262145 is outside 1"):
        launch(torch.zeros(1, 262145, device=CUDA), [[-1]], [[0]], [1], s, arrays=good)
