"""Greedy verification and the commit of accepted paths on a GPU, against the host's `verify` and its order of moves."""

from __future__ import annotations

import itertools
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

from gpu_world import CUDA, I32_MAX, I32_MIN, bits, handle, neighbour
from operands_world import named
from specrs.operands import AcceptArrays, MoveArrays, TreeArrays

INF = float("inf")
PROBES = {"NaN": 1, "+inf": 2, "all -inf": 3}

pytestmark = pytest.mark.usefixtures("no_fault_is_left")


def random_trees(rng, requests, max_nodes, vocab, depth=6):
    parents, tokens = [], []
    for _ in range(requests):
        n = rng.randint(1, max_nodes)
        p, d = [-1], [0]
        while len(p) < n:
            j = rng.randrange(len(p))
            if d[j] < depth:
                p.append(j)
                d.append(d[j] + 1)
        parents.append(p)
        tokens.append([rng.randrange(vocab) for _ in p])
    return parents, tokens


def steered_logits(rng, parents, tokens, vocab, dtype):
    """Rows whose argmax is often a child's token, so that walks go far."""
    n = sum(map(len, parents))
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(rng.randrange(2**31))).to(dtype)
    first = 0
    for p, t in zip(parents, tokens, strict=True):
        for j in range(1, len(p)):
            if rng.random() < 0.6:
                logits[first + p[j], t[j]] = 9.0
        first += len(p)
    return logits


class Accepted:
    """Poisoned outputs of a verification between canaries, and what came out."""

    def __init__(self, canaries, requests, max_path, lens=None):
        sizes = (requests + 1, *(requests * max_path,) * 3, requests, requests, requests)
        self.arrays = tuple(canaries.empty(n, dtype=torch.int32) for n in sizes)
        self.requests, self.max_path = requests, max_path
        if lens is not None:  # in place
            self.arrays = (*self.arrays[:5], lens, self.arrays[6])

    def lists(self):
        offsets, paths, tokens, rows, roots, lens, faults = (a.tolist() for a in self.arrays)
        ranges = [range(a, b) for a, b in itertools.pairwise(offsets)]
        end = offsets[-1]
        assert offsets[0] == 0
        assert paths[end:] == rows[end:] == [0] * (len(paths) - end)
        assert tokens[end:] == [-1] * (len(paths) - end)
        part = lambda values: [[values[i] for i in r] for r in ranges]  # noqa: E731
        return part(paths), part(tokens), part(rows), roots, lens, faults


def verify_greedy(logits, trees, lens, live, max_nodes, max_path, accepts, scratch, full):
    core._device_verify_greedy(
        logits=logits, trees=named(TreeArrays, trees), lens=lens, live=live, max_nodes=max_nodes, max_path=max_path,
        accepts=named(AcceptArrays, accepts), scratch=scratch, full=full, stream=handle(),
    )  # fmt: skip


def kv_commit(accepts, table, rows, live, num_pages, page_size, max_nodes, moves):
    offsets, paths, new_lens = accepts
    core._device_kv_commit(
        offsets=offsets, paths=paths, new_lens=new_lens, table=table, rows=rows, live=live, num_pages=num_pages,
        page_size=page_size, max_nodes=max_nodes, moves=None if moves is None else named(MoveArrays, moves),
        stream=handle(),
    )  # fmt: skip


def scratch_for(nodes, requests, max_path):
    return torch.zeros(core._device_verify_scratch(nodes, requests, max_path), dtype=torch.int64, device=CUDA)


def run(canaries, parents, tokens, logits, lens, *, full, max_path=None, dead=0, capacity=None, scratch=None):
    """Verify on the device with `dead` requests and nodes up to `capacity` behind the live ones."""
    sizes = [len(p) for p in parents]
    nodes = sum(sizes) if capacity is None else capacity
    requests = len(parents) + dead
    max_nodes = max([1, *sizes])
    max_path = max_path or 1 + max([1, *map(len, parents)])
    offsets = [0, *itertools.accumulate(sizes)] + [I32_MAX] * dead
    flat = lambda lists: list(itertools.chain(*lists))  # noqa: E731
    stale = nodes - sum(sizes)
    padded = torch.cat([logits, torch.full((stale, logits.shape[1]), float("nan"), dtype=logits.dtype)])
    trees = (
        canaries.of(flat(tokens) + [I32_MAX] * stale),
        canaries.of(flat(parents) + [I32_MIN] * stale),
        canaries.of(offsets),
    )
    live = canaries.of([len(parents)]) if dead else None
    out = Accepted(canaries, requests, max_path)
    if scratch is None:
        scratch = scratch_for(nodes, requests, max_path)
    verify_greedy(
        canaries.of(padded), trees, canaries.of(lens + [I32_MAX] * dead), live, max_nodes, max_path, out.arrays,
        scratch, full,
    )  # fmt: skip
    return out.lists()


def host(parents, tokens, logits, lens):
    trees = core.TreeBatch.from_parents(parents, tokens)
    samplers = [core.Sampler(logits.shape[1], [0]) for _ in parents]
    return core.verify(trees, logits.float().contiguous(), samplers, lens)


def check(got, want, parents, lens, dead=0):
    paths, tokens, rows, roots, new_lens, faults = got
    firsts = [0, *itertools.accumulate(map(len, parents))]
    none = [[]] * dead
    assert paths == want.paths + none
    for i, error in enumerate(want.errors):
        assert tokens[i] == want.tokens[i] + ([-1] if error else [])
        assert rows[i] == [firsts[i] + n for n in want.paths[i]]
        assert faults[i] == (PROBES[error.value] if error else 0)
        assert roots[i] == tokens[i][-1]
        assert new_lens[i] == lens[i] + len(want.paths[i])
    live = len(parents)
    assert tokens[live:] == rows[live:] == none
    assert roots[live:] == new_lens[live:] == faults[live:] == [0] * dead


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 2, 5, 63, 1000, 1001, 32000])
def test_walks_are_the_hosts(canaries, full, dtype, vocab):
    rng = random.Random(vocab)
    for requests, max_nodes, dead in ((1, 1, 0), (1, 64, 0), (3, 65, 2), (17, 12, 0)):
        parents, tokens = random_trees(rng, requests, max_nodes, vocab)
        logits = steered_logits(rng, parents, tokens, vocab, dtype)
        lens = [rng.randrange(1000) for _ in parents]
        want = host(parents, tokens, logits, lens)
        spare = 7 if dead else 0
        got = run(
            canaries, parents, tokens, logits, lens, full=full, dead=dead, capacity=sum(map(len, parents)) + spare
        )
        check(got, want, parents, lens, dead)


@pytest.mark.parametrize("full", [False, True])
def test_walks_over_a_large_vocabulary(canaries, full):
    rng = random.Random(7)
    parents, tokens = random_trees(rng, 2, 33, 128256)
    logits = steered_logits(rng, parents, tokens, 128256, torch.float32)
    check(
        run(canaries, parents, tokens, logits, [5, 6], full=full),
        host(parents, tokens, logits, [5, 6]),
        parents,
        [5, 6],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nodes", [1, 33, 40, 64, 200, 600])
def test_a_row_in_any_number_of_blocks(canaries, nodes, dtype):
    """132 multiprocessors share each row in 16 blocks, 16, 13, 8, 2 and 1."""
    rng, vocab = random.Random(nodes), 5003
    parents = [[-1, *(rng.randrange(max(0, j - 3), j) for j in range(1, nodes))]]
    tokens = [[rng.randrange(vocab) for _ in range(nodes)]]
    logits = steered_logits(rng, parents, tokens, vocab, dtype)
    # The largest logits lie at the ends of parts too.
    for row in range(nodes):
        chunk = (-(-vocab // rng.choice((1, 2, 8, 13, 16))) + 7) // 8 * 8
        logits[row, min(rng.randrange(16) * chunk + rng.choice((0, chunk - 1)), vocab - 1)] = 8.0
    want = host(parents, tokens, logits, [3])
    check(run(canaries, parents, tokens, logits, [3], full=True), want, parents, [3])


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_lower_token_and_the_first_child(canaries, full, dtype):
    vocab = 4099
    parents = [[-1, 0, 0, 1, 2]]
    for a, b in ((0, 1), (5, 4098), (1023, 1024), (3, 2051), (4097, 4098)):
        for high, low in ((2.5, 2.5), (0.0, -0.0), (-0.0, 0.0)):
            logits = torch.full((5, vocab), -1.0, dtype=dtype)
            logits[:, a], logits[:, b] = high, low
            tokens = [[0, a, a, a, b]]  # two children carry the drawn token
            want = host(parents, tokens, logits, [9])
            assert want.paths == [[0, 1, 3]]
            check(run(canaries, parents, tokens, logits, [9], full=full), want, parents, [9])
    logits = torch.zeros(5, vocab, dtype=dtype)
    check(
        run(canaries, parents, [[0] * 5], logits, [9], full=full), host(parents, [[0] * 5], logits, [9]), parents, [9]
    )


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("value", ["NaN", "+inf", "all -inf"])
def test_bad_logits_end_their_walk_alone_and_are_reported(canaries, full, value):
    vocab = 777
    parents, tokens = [[-1, 0, 1], [-1, 0, 1], [-1]], [[1, 2, 3], [1, 2, 3], [4]]
    logits = torch.zeros(7, vocab)
    for row, token in ((0, 2), (1, 3), (2, 9), (3, 2), (4, 3), (5, 9), (6, 8)):
        logits[row, token] = 5.0
    bad = 4  # node 1 of request 1
    if value == "NaN":
        logits[bad, [500, 300, 776]] = float("nan")
        logits[bad, 100] = INF
        logits[2, 5] = float("-inf")  # one of many is fine
    elif value == "+inf":
        logits[bad, [776, 301]] = INF
    else:
        logits[bad] = -INF
    logits = torch.cat([logits])
    want = host(parents, tokens, logits, [10, 20, 30])
    assert [bool(e) for e in want.errors] == [False, True, False] and want.paths[1] == [0, 1]
    got = run(canaries, parents, tokens, logits, [10, 20, 30], full=full)
    check(got, want, parents, [10, 20, 30])
    torch.cuda.synchronize()
    with pytest.raises(specrs.NonFiniteError) as e:
        device.check()
    fields = ("what", "value", "request", "row", "position", "index")
    assert [getattr(e.value, f) for f in fields] == [getattr(want.errors[1], f) for f in fields]
    # A row that no walk reaches may hold anything.
    logits[bad] = 0
    logits[bad, 4], logits[5] = 1.0, float("nan")
    check(
        run(canaries, parents, tokens, logits, [0, 0, 0], full=full),
        host(parents, tokens, logits, [0, 0, 0]),
        parents,
        [0, 0, 0],
    )


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("offsets", "buffer", "index"),
    [
        ([0, 2, 1, 3], "offsets (decreasing)", 1),
        ([0, 2, 9, 9], "nodes of all trees", 9),
        ([0, -3, 2, 3], "nodes of all trees", -3),
    ],
)
def test_offsets_outside_the_arrays_leave_their_request_out(canaries, full, offsets, buffer, index):
    logits, lens = canaries.of(torch.zeros(6, 50)), canaries.of([7, 8, 9])
    trees = (canaries.of([1] * 6), canaries.of([-1] * 6), canaries.of(offsets))
    out = Accepted(canaries, 3, 4)
    verify_greedy(logits, trees, lens, None, 4, 4, out.arrays, scratch_for(6, 3, 4), full)
    paths = out.lists()[0]
    for i, (a, b) in enumerate(itertools.pairwise(offsets)):
        assert paths[i] == ([0] if 0 <= a < b <= 6 else [])
    torch.cuda.synchronize()
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    assert (e.value.kernel, e.value.bound, e.value.step) == ("verify_greedy", 7, -1)
    if e.value.request == (1 if index != -3 else 0):
        assert (e.value.buffer, e.value.index) == (buffer, index)


@pytest.mark.parametrize("full", [False, True])
def test_limits_of_nodes_and_paths(canaries, full):
    parents, tokens = [[-1, 0, 1, 2]], [[0, 0, 0, 0]]
    logits = torch.zeros(4, 9)
    trees = (canaries.of(tokens[0]), canaries.of(parents[0]), canaries.of([0, 4]))
    for max_nodes, max_path, want, buffer, index in (
        (3, 4, [], "nodes of a tree", 3),
        (4, 2, [0, 1], "accepted path", 2),
    ):
        out = Accepted(canaries, 1, max_path)
        verify_greedy(
            canaries.of(logits), trees, canaries.of([3]), None, max_nodes, max_path, out.arrays,
            scratch_for(4, 1, max_path), full,
        )  # fmt: skip
        paths, got, _, _, lens, _ = out.lists()
        assert (paths, got, lens) == ([want], [[0] * len(want)], [3 + len(want)])
        torch.cuda.synchronize()
        with pytest.raises(specrs.OutOfBoundsError) as e:
            device.check()
        assert (e.value.kernel, e.value.buffer, e.value.index) == ("verify_greedy", buffer, index)


@pytest.mark.parametrize("full", [False, True])
def test_verification_replays_in_a_graph_and_repeats(canaries, full):
    rng, vocab, requests, v, path = random.Random(3), 2000, 4, 16, 7
    logits = torch.empty(requests * v, vocab, device=CUDA)
    trees = [torch.zeros(n, dtype=torch.int32, device=CUDA) for n in (requests * v, requests * v, requests + 1)]
    lens, live = torch.zeros(requests, dtype=torch.int32, device=CUDA), torch.zeros(1, dtype=torch.int32, device=CUDA)
    out = Accepted(canaries, requests, path, lens)
    scratch = scratch_for(requests * v, requests, path)

    def launch():
        # Lengths are followed in place, as a loop of rounds wants it.
        arrays = (*out.arrays[:5], new_lens, out.arrays[6])
        verify_greedy(logits, trees, lens, live, v, path, arrays, scratch, full)

    new_lens = canaries.empty(requests, dtype=torch.int32)
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for n in (4, 1, 0, 3, 4):
        parents, tokens = random_trees(rng, n, v, vocab)
        now = [rng.randrange(500) for _ in range(n)]
        flat = lambda lists: torch.tensor(list(itertools.chain(*lists)), dtype=torch.int32)  # noqa: E731
        logits.fill_(float("nan"))
        live.fill_(n)
        sizes = [0, *itertools.accumulate(map(len, parents))]
        trees[2].fill_(0)
        trees[2][: n + 1] = torch.tensor(sizes, dtype=torch.int32)
        lens.fill_(0)
        if n:
            made = steered_logits(rng, parents, tokens, vocab, torch.float32)
            logits[: len(made)] = made
            trees[0][: sizes[-1]], trees[1][: sizes[-1]] = flat(tokens), flat(parents)
            lens[:n] = torch.tensor(now, dtype=torch.int32)
        with neighbour():
            for _ in range(20):
                for a in (*out.arrays[:5], new_lens, out.arrays[6]):
                    a.fill_(I32_MAX)
                graph.replay()
                arrays = (*out.arrays[:5], new_lens, out.arrays[6])
                probe = Accepted.__new__(Accepted)
                probe.arrays = arrays
                got = probe.lists()
                if n:
                    check(got, host(parents, tokens, made, now), parents, now, requests - n)
                else:
                    assert got == ([[]] * 4, [[]] * 4, [[]] * 4, [0] * 4, [0] * 4, [0] * 4)


# --- commit ----------------------------------------------------------------------------------------------------------


def random_paths(rng, requests, v):
    paths = []
    for _ in range(requests):
        path, node = [0], 0
        while len(path) < 7 and rng.random() < 0.8:
            node += rng.choice([1, 1, 2, 5])
            if node >= v:
                break
            path.append(node)
        paths.append(path)
    return paths


def commit_operands(canaries, paths, new_lens, capacity):
    flat = list(itertools.chain(*paths))
    offsets = [0, *itertools.accumulate(map(len, paths))]
    return tuple(canaries.of(x) for x in (offsets, flat + [I32_MAX] * (capacity - len(flat)), new_lens))


def reordered(row, length, path):
    """A row as the pool's remap leaves it: the accepted first, the others in their own order."""
    last = path[-1]
    order = path + [j for j in range(last + 1) if j not in path]
    return row[:length] + [row[length + j] for j in order] + row[length + last + 1 :]


@pytest.mark.parametrize("v", [1, 2, 17, 64, 1024])
def test_a_remap_reorders_rows_as_the_pool_does(canaries, v):
    rng = random.Random(v)
    for requests in (1, 5, 40):
        paths = random_paths(rng, requests, v)
        if v == 1024:
            paths[0] = [0, *range(2, 1024, 3)]
        lens = [rng.randrange(30) for _ in paths]
        width = 30 + v
        rows = rng.sample(range(requests + 3), requests)
        table = torch.randperm((requests + 3) * width, generator=torch.Generator().manual_seed(v)).int()
        table = table.view(requests + 3, width)
        want = table.tolist()
        for i, path in enumerate(paths):
            want[rows[i]] = reordered(want[rows[i]], lens[i], path)
        ids = canaries.of(table)
        accepts = commit_operands(canaries, paths, [n + len(p) for n, p in zip(lens, paths, strict=True)], 2000)
        kv_commit(accepts, ids, canaries.of(rows), None, 10**6, 1, v, None)
        assert ids.tolist() == want
        assert sorted(ids.flatten().tolist()) == list(range(table.numel()))  # no id is lost


def slot(line, page, position):
    return line[position // page] * page + position % page


@pytest.mark.parametrize("page", [2, 16, 64, 256])
def test_moves_bring_the_path_behind_the_prefix(canaries, page):
    rng, v = random.Random(page), 33
    for requests, dead in ((1, 0), (6, 2), (150, 0)):
        paths = random_paths(rng, requests, v)
        lens = [rng.randrange(3 * page) for _ in paths]
        width = -(-(3 * page + v) // page)
        pages = 1 + (requests + dead) * width
        table = (torch.randperm(pages - 1, generator=torch.Generator().manual_seed(page)) + 1).int().view(-1, width)
        rows = rng.sample(range(requests + dead), requests)
        capacity = (requests + dead) * 7
        all_paths = paths + [[]] * dead
        accepts = commit_operands(
            canaries, all_paths, [n + len(p) for n, p in zip(lens, paths, strict=True)] + [0] * dead, capacity
        )
        moves = tuple(canaries.empty(n, dtype=torch.int32) for n in (capacity, capacity, requests + dead + 1))
        live = canaries.of([requests]) if dead else None
        kv_commit(accepts, canaries.of(table), canaries.of(rows + [I32_MAX] * dead), live, pages, page, v, moves)
        src, dst, offsets = [], [], [0]
        lines = [table[r].tolist() for r in rows]
        for i, path in enumerate(paths):
            src += [slot(lines[i], page, lens[i] + n) for d, n in enumerate(path) if n != d]
            dst += [slot(lines[i], page, lens[i] + d) for d, n in enumerate(path) if n != d]
            offsets.append(len(src))
        offsets += [len(src)] * dead
        padding = [0] * (capacity - len(src))
        assert [m.tolist() for m in moves] == [src + padding, dst + padding, offsets]
        # The moves, executed, put what lay at the path's nodes behind the prefix.
        cache = torch.arange(2 * pages * page * 8, dtype=torch.int32, device=CUDA).view(1, 2, pages * page, 1, 8)
        before = cache.clone()
        device.kv_move(cache, *moves)
        for i, path in enumerate(paths):
            for d, n in enumerate(path):
                assert torch.equal(
                    cache[:, :, slot(lines[i], page, lens[i] + d)], before[:, :, slot(lines[i], page, lens[i] + n)]
                )


@pytest.mark.parametrize("remap", [True, False])
@pytest.mark.parametrize(
    ("change", "buffer", "step", "index", "bound"),
    [
        ({"paths": [[0, 2], [0, 2, 2], [0, 1]]}, "accepted path (from the root, increasing)", 2, 2, 8),
        ({"paths": [[0, 2], [0, 8], [0, 1]]}, "accepted path (from the root, increasing)", 1, 8, 8),
        ({"paths": [[0, 2], [1, 2], [0, 1]]}, "accepted path (from the root, increasing)", 0, 1, 8),
        ({"rows": [0, 3, 2]}, "rows of the page table", -1, 3, 3),
        ({"rows": [0, -1, 2]}, "rows of the page table", -1, -1, 3),
        ({"lens": [1, 30, 1]}, "row of the page table", 3, 33, None),
        ({"lens": [1, -5, 1]}, "row of the page table", 3, -5, None),
        ({"offsets": [0, 2, 10, 10]}, "accepted path", -1, 10, 8),
        ({"offsets": [0, 2, 1, 3]}, "offsets (decreasing)", -1, 1, 8),
    ],
)
def test_a_bad_path_or_row_is_recorded_and_left_as_it_is(canaries, remap, change, buffer, step, index, bound):
    page, width = (1, 32) if remap else (4, 8)
    given = {"paths": [[0, 2], [0, 3], [0, 1]], "rows": [0, 1, 2], "lens": [1, 1, 1], **change}
    paths, lens = given["paths"], given["lens"]
    flat = list(itertools.chain(*paths))
    offsets = given.get("offsets", [0, *itertools.accumulate(map(len, paths))])
    sizes = [b - a for a, b in itertools.pairwise(offsets)]
    accepts = (canaries.of(offsets), canaries.of(flat + [0] * (7 - len(flat))),
               canaries.of([n + s for n, s in zip(lens, sizes, strict=True)]))  # fmt: skip
    table = torch.arange(1, 1 + 3 * width, dtype=torch.int32).view(3, width)
    ids = canaries.of(table)
    moves = None if remap else tuple(canaries.empty(n, dtype=torch.int32) for n in (9, 9, 4))
    kv_commit(accepts, ids, canaries.of(given["rows"]), None, 1000, page, 8, moves)
    torch.cuda.synchronize()
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    assert e.value.kernel == "kv_commit"
    if "offsets" not in change or e.value.request == 1:  # bad offsets may spoil the request behind them too
        assert (e.value.buffer, e.value.request, e.value.step, e.value.index) == (buffer, 1, step, index)
        assert e.value.bound == (width * page if bound is None else bound)
    want = table.tolist()
    if remap:
        want[0] = reordered(want[0], 1, [0, 2])
    else:
        src, dst, out = (m.tolist() for m in moves)
        assert (src[0], dst[0], out[:2]) == (7, 6, [0, 1])  # page 1, positions 3 and 2
        assert src[1:] == dst[1:] == [0] * 8
        assert out[3] in (1, 2)
    assert ids.tolist() == want


def test_moves_beyond_their_capacities_are_recorded_and_left_out(canaries):
    """Offsets that decrease give two requests one path; its moves fit the arrays once."""
    path, entries = [0, *range(2, 17)], 16
    accepts = (canaries.of([0, entries, 0, entries]), canaries.of(path), canaries.of([1 + entries, 1, 1 + entries]))
    table = torch.arange(1, 25, dtype=torch.int32).view(3, 8)
    moves = tuple(canaries.empty(n, dtype=torch.int32) for n in (entries, entries, 4))
    kv_commit(accepts, canaries.of(table), canaries.of([0, 1, 2]), None, 25, 4, 32, moves)
    torch.cuda.synchronize()
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    found = (e.value.kernel, e.value.buffer, e.value.request, e.value.step, e.value.index, e.value.bound)
    assert found in {
        ("kv_commit", "offsets (decreasing)", 1, -1, 0, entries + 1),
        ("kv_commit", "src and dst", 2, -1, 29, entries),
    }
    line = table[0].tolist()
    src, dst = ([slot(line, 4, 1 + n) for n in nodes] for nodes in (path[1:], range(1, entries)))
    assert [m.tolist() for m in moves] == [[*src, 0], [*dst, 0], [0, 15, 15, 16]]


@pytest.mark.parametrize("bad", [20, -1, I32_MAX])
def test_a_page_outside_the_pool_is_recorded_and_moves_nothing(canaries, bad):
    accepts = commit_operands(canaries, [[0, 2], [0, 5]], [3, 3], 8)
    ids = canaries.of([[3, 4, 5], [6, bad, 8]])
    moves = tuple(canaries.empty(n, dtype=torch.int32) for n in (8, 8, 3))
    kv_commit(accepts, ids, canaries.of([0, 1]), None, 20, 4, 8, moves)
    torch.cuda.synchronize()
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    found = (e.value.kernel, e.value.buffer, e.value.request, e.value.step, e.value.index, e.value.bound)
    assert found == ("kv_commit", "pages", 1, 5, bad, 20)
    assert [m.tolist() for m in moves] == [[15] + [0] * 7, [14] + [0] * 7, [0, 1, 2]]


def test_a_verified_round_commits_in_one_graph(canaries):
    """Verify, list the moves, move: no host between them."""
    rng, vocab, requests, v, path, page = random.Random(11), 500, 3, 12, 6, 4
    parents, tokens = random_trees(rng, requests, v, vocab, depth=5)
    logits = steered_logits(rng, parents, tokens, vocab, torch.float32)
    lens = [5, 8, 11]
    want = host(parents, tokens, logits, lens)
    sizes = [0, *itertools.accumulate(map(len, parents))]
    trees = tuple(canaries.of(x) for x in (list(itertools.chain(*tokens)), list(itertools.chain(*parents)), sizes))
    on, old, out = canaries.of(logits), canaries.of(lens), Accepted(canaries, requests, path)
    width = 8
    table = canaries.of((torch.randperm(requests * width) + 1).int().view(requests, width))
    rows = canaries.of([2, 0, 1])
    moves = tuple(canaries.empty(n, dtype=torch.int32) for n in (requests * path, requests * path, requests + 1))
    pages = 1 + requests * width
    cache = torch.arange(2 * pages * page * 8, dtype=torch.int32, device=CUDA).view(1, 2, pages * page, 1, 8)
    before, scratch = cache.clone(), scratch_for(sizes[-1], requests, path)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify_greedy(on, trees, old, None, v, path, out.arrays, scratch, False)
        accepts = (out.arrays[0], out.arrays[1], out.arrays[5])
        kv_commit(accepts, table, rows, None, pages, page, v, moves)
        device.kv_move(cache, *moves)
    graph.replay()
    check(out.lists(), want, parents, lens)
    lines = [table[r].tolist() for r in (2, 0, 1)]
    for i, nodes in enumerate(want.paths):
        for d, n in enumerate(nodes):
            assert torch.equal(
                bits(cache[:, :, slot(lines[i], page, lens[i] + d)]),
                bits(before[:, :, slot(lines[i], page, lens[i] + n)]),
            )
