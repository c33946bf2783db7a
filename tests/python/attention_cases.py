"""Sequences and trees in a poisoned paged cache, and attention over them: shared by the attention tests of a GPU."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

import torch

from specrs import _specrs as core

CUDA = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
TAIL = 8
"""Nodes that a path may have off the spine; ``ATTENTION_TAIL`` of the kernel."""


@dataclass
class Shape:
    """Heads of a model's attention, the type of its cache, the cache's pages, the cap of scaled scores, and their scale
    where it is not ``dim ** -0.5`` (Granite's multiplier, Gemma's scalar)."""

    kv_heads: int = 2
    group: int = 4
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    page: int = 16
    cap: float | None = None
    scale: float | None = None

    @property
    def factor(self) -> float:
        return self.dim**-0.5 if self.scale is None else self.scale

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclass
class Tokens:
    """Queries [n, heads, dim], keys and values [n, kv_heads, dim] of n tokens."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def __len__(self) -> int:
        return len(self.q)

    def take(self, at: list[int] | slice) -> Tokens:
        return Tokens(self.q[at], self.k[at], self.v[at])

    def then(self, other: Tokens) -> Tokens:
        return Tokens(*(torch.cat(p) for p in zip(self.parts(), other.parts(), strict=True)))

    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v


def tokens(shape: Shape, n: int, seed: int, kind: str = "normal") -> Tokens:
    """Random tokens; `kind` makes their scores hard: huge keys, all keys equal, a sink that takes nearly all weight."""
    g = torch.Generator(device=CUDA).manual_seed(seed)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(n, heads, shape.dim, device=CUDA, generator=g)

    q, k, v = draw(shape.heads), draw(shape.kv_heads), draw(shape.kv_heads)
    if kind == "peaked":
        k *= 8
    elif kind == "equal" and n:
        k[:] = k[:1]
    elif kind == "huge":
        k[5::37] *= 40
    elif kind == "sink" and n:
        q[:, :, ::64] = 6.0
        k *= 0.3
        k[:, :, ::64] = 0.0
        k[0, :, ::64] = 12.0
        v[0] *= 0.02
    elif kind == "zeros":
        v = torch.sign(v) * (v.abs() > 0.7)
    elif kind == "tiny":
        v *= 1e-36 if shape.dtype == torch.bfloat16 else 1e-7
    return Tokens(q.to(shape.dtype), k.to(shape.dtype), v.to(shape.dtype))


class Cache:
    """A cache of two layers, NaN wherever nothing was stored. Layer 1 is the one that is read."""

    def __init__(self, shape: Shape, pages: int, rng: random.Random):
        self.shape = shape
        self.data = torch.full(
            (2, 2, pages * shape.page, shape.kv_heads, shape.dim), float("nan"), dtype=shape.dtype, device=CUDA
        )
        self.free = list(range(1, pages))
        rng.shuffle(self.free)

    def store(self, stored: Tokens, more: int = 0) -> list[int]:
        """Pages that hold these tokens in order, and room for `more`."""
        size = self.shape.page
        pages = [self.free.pop() for _ in range((len(stored) + more + size - 1) // size)]
        if len(stored):
            slots = slots_of(pages, size)[: len(stored)]
            self.data[1, 0, slots] = stored.k
            self.data[1, 1, slots] = stored.v
        return pages


def slots_of(pages: list[int], size: int) -> torch.Tensor:
    first = torch.tensor(pages, device=CUDA, dtype=torch.long) * size
    return (first[:, None] + torch.arange(size, device=CUDA)).reshape(-1)


@dataclass
class Request:
    """Queries [n, heads, dim] behind `length` keys that lie in `pages`, and a mask word each in a tree. They attend to
    no page before number `first`."""

    pages: list[int]
    length: int
    q: torch.Tensor
    mask: list[int] | None = None
    first: int = 0


@dataclass
class Launch:
    """A batch as the arrays of the native format, with room to spare that nobody may read."""

    cache: Cache
    requests: list[Request]
    draft: tuple[int, int] | None = None
    dead: int = 0
    f32: bool = True
    max_queries: int | None = None
    slack: int = 3
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)

    def prepare(self) -> Launch:
        shape, reqs = self.cache.shape, self.requests
        n, live = len(reqs) + self.dead, sum(len(r.q) for r in reqs)
        rng = random.Random(n)
        width = max([len(r.pages) for r in reqs], default=1) + 1
        where = rng.sample(range(n + 2), n)
        # Columns and rows that nobody may read hold wild ids.
        table = torch.full((n + 2, width), 2**30 + 7, dtype=torch.int32)
        for i, r in enumerate(reqs):
            table[where[i], r.first : len(r.pages)] = torch.tensor(r.pages[r.first :], dtype=torch.int32)
        starts = [0]
        for r in reqs:
            starts.append(starts[-1] + len(r.q))
        starts += [live] * self.dead
        total = live + self.slack
        q = torch.full((total, shape.heads, shape.dim), float("nan"), dtype=shape.dtype, device=CUDA)
        if live:
            q[:live] = torch.cat([r.q for r in reqs])
        a = self.arrays
        a["q"] = q
        a["out"] = torch.full_like(q, float("nan"), dtype=torch.float32 if self.f32 else shape.dtype)
        a["table"] = table.to(CUDA)
        a["rows"] = torch.tensor(where, dtype=torch.int32, device=CUDA)
        lens = [r.length for r in reqs] + [-5] * self.dead  # a dead lane's length is not read
        a["lens"] = torch.tensor(lens, dtype=torch.int32, device=CUDA)
        a["starts"] = torch.tensor(starts, dtype=torch.int32, device=CUDA)
        if any(r.first for r in reqs):
            first = [r.first for r in reqs] + [-7] * self.dead  # not read, as a dead lane's length
            a["first_pages"] = torch.tensor(first, dtype=torch.int32, device=CUDA)
        if any(r.mask is not None for r in reqs):
            words = [w - 2**64 if w >= 2**63 else w for r in reqs for w in r.mask or []]
            a["mask"] = torch.tensor(words + [-1] * self.slack, dtype=torch.int64, device=CUDA)
        if self.max_queries is None:
            self.max_queries = max([len(r.q) for r in reqs], default=1) or 1
        a["workspace"] = torch.full((self.workspace(),), 255, dtype=torch.uint8, device=CUDA)
        return self

    def workspace(self) -> int:
        shape = self.cache.shape
        return core._device_attention_workspace(
            CUDA.index,
            requests=len(self.requests) + self.dead,
            max_queries=self.max_queries or 1,
            kv_heads=shape.kv_heads,
            group=shape.group,
            head_dim=shape.dim,
            max_keys=self.arrays["table"].shape[1] * shape.page,
        )

    def least_workspace(self) -> torch.Tensor:
        """The smallest that `run` takes, a slot for each block: a batch of more items than blocks folds its splits."""
        try:
            self.run(workspace=torch.zeros(16, dtype=torch.uint8, device=CUDA))
        except core.ConfigError as error:
            found = re.search(r"workspace: got 16 bytes, want at least (\d+)", str(error))
            assert found is not None, error
            return torch.full((int(found[1]),), 255, dtype=torch.uint8, device=CUDA)
        raise AssertionError("16 bytes of workspace are enough")

    def run(self, **other: object) -> torch.Tensor:
        a = self.arrays
        shape = self.cache.shape
        operands = {
            "table": a["table"],
            "page_size": shape.page,
            "rows": a["rows"],
            "lens": a["lens"],
            "starts": a["starts"],
            "mask": a.get("mask"),
            "first_pages": a.get("first_pages"),
            "draft": self.draft,
            "max_queries": self.max_queries,
            "scale": shape.factor,
            "cap": shape.cap,
            "workspace": a["workspace"],
            "stream": torch.cuda.current_stream().cuda_stream,
        } | other
        core._device_attention(self.cache.data, 1, a["q"], a["out"], **operands)
        return a["out"]

    def live(self, out: torch.Tensor) -> list[torch.Tensor]:
        """The output of each request; the rest must be zeros."""
        counts = [len(r.q) for r in self.requests]
        *parts, rest = torch.split(out, [*counts, len(out) - sum(counts)])
        assert torch.equal(rest, torch.zeros_like(rest)), "dead lanes are 0"
        return parts


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits; torch.equal would take -0 for 0 and no NaN for another."""
    assert a.dtype == b.dtype
    assert not a.isnan().any(), "NaN of a slot that nobody may read"
    word = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(word), b.contiguous().view(word))


def folds(workspace: torch.Tensor) -> bool:
    """Return whether the last launch with this workspace folded its splits on the way: the first word of its
    schedule."""
    [word] = workspace[:4].view(torch.int32).tolist()
    assert word in (0, 1), word
    return word == 1


def attend(cache: Cache, requests: list[Request], **options: object) -> list[torch.Tensor]:
    """Outputs of the requests, launched as one batch."""
    launch = Launch(cache, requests, **options).prepare()
    return launch.live(launch.run())


@dataclass
class Tree:
    """Parents (-1: the root), each before its children."""

    parents: list[int]

    def __len__(self) -> int:
        return len(self.parents)

    def path(self, node: int) -> list[int]:
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def words(self) -> list[int]:
        return [sum(1 << a for a in self.path(n)) for n in range(len(self))]

    def leaves(self) -> list[int]:
        return [n for n in range(len(self)) if n not in self.parents]


def beam_tree(rng: random.Random, k: int, s: int, v: int) -> Tree:
    """The v best nodes of s steps of k branches, as the engine builds it."""
    steps, parent, score = [], [], []
    for step in range(s):
        beams = [-1] if step == 0 else sorted(steps[-1], key=lambda n: -score[n])[:k]
        mine = []
        for b in beams:
            base = 0.0 if b < 0 else score[b]
            for _ in range(k):
                base -= rng.expovariate(1.0)
                mine.append(len(parent))
                parent.append(b)
                score.append(base)
        steps.append(mine)
    best = sorted(sorted(range(len(parent)), key=lambda n: -score[n])[: v - 1])
    at = {-1: 0} | {n: i + 1 for i, n in enumerate(best)}
    return Tree([-1] + [at[parent[n]] for n in best])


def random_tree(rng: random.Random, v: int, deepest: int) -> Tree:
    """Any tree of at most `deepest` (up to 7) edges, not in order of depth."""
    parents, depth = [-1], [0]
    for _ in range(v - 1):
        p = rng.choice([n for n in range(len(parents)) if depth[n] < deepest])
        parents.append(p)
        depth.append(depth[p] + 1)
    return Tree(parents)


def spine_tree(rng: random.Random, v: int, spine: int) -> Tree:
    """A deep path stored first, and branches of up to 7 nodes beside it."""
    parents, run = list(range(-1, spine)), [0] * (spine + 1)
    while len(parents) < v:
        p = rng.choice([n for n in range(len(parents)) if run[n] < TAIL - 1])
        parents.append(p)
        run.append(run[p] + 1)
    return Tree(parents[:v])


def two_requests(
    kind: str = "tree", group: int = 4, lengths: tuple[int, ...] = (200, 70)
) -> tuple[Launch, torch.Tensor]:
    """Two requests (or more) of 5 queries behind so many keys, and their outputs."""
    shape = Shape(2, group, 64, torch.bfloat16, 16)
    rng = random.Random(1)
    cache = Cache(shape, 60, rng)
    requests = []
    for i, n in enumerate(lengths):
        stored = tokens(shape, n, i).then(tokens(shape, 5, 10 + i))
        words = Tree([-1, 0, 0, 1, 3]).words() if kind == "tree" else None
        requests.append(Request(cache.store(stored), n, stored.q[n:], words))
    launch = Launch(cache, requests).prepare()
    return launch, launch.run().clone()


def reference(shape: Shape, q: torch.Tensor, keys: Tokens, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Attention of one query [heads, dim] over all `keys`, in float64; in another type as plain torch would do it."""
    k = keys.k.to(dtype).repeat_interleave(shape.group, 1)
    v = keys.v.to(dtype).repeat_interleave(shape.group, 1)
    scores = torch.einsum("hd,khd->hk", q.to(dtype), k) * shape.factor
    if shape.cap is not None:
        scores = torch.tanh(scores / shape.cap) * shape.cap
    weights = torch.softmax(scores.to(torch.float64 if dtype == torch.float64 else torch.float32), -1).to(dtype)
    return torch.einsum("hk,khd->hd", weights, v)
