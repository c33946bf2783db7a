"""Rows of logits, samplers and launches that tests of sampling on a GPU share, and what the host makes of the same."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import torch

import specrs
from gpu_world import CUDA
from operands_world import named
from specrs import _specrs as core
from specrs.operands import AcceptArrays, SamplerArrays, TreeArrays

POISON = -(2**31) + 0xBAD
SEEDS = [0, 1, 2**32, 2**63, 2**64 - 1]
Json = dict[str, Any]


def i32(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=CUDA)


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def normal(rng: random.Random, rows: int, vocab: int, scale: float) -> torch.Tensor:
    g = torch.Generator(device=CUDA).manual_seed(rng.getrandbits(60))
    return torch.randn(rows, vocab, device=CUDA, generator=g) * scale


def holes(rng, rows, vocab, share):
    x = normal(rng, rows, vocab, 3)
    x[torch.rand(rows, vocab, device=CUDA) < share] = -math.inf
    x[:, rng.randrange(vocab)] = 1.0
    return x


def with_one(rng, rows, vocab, value):
    x = normal(rng, rows, vocab, 2)
    x[torch.arange(rows), torch.randint(vocab, (rows,), device=CUDA)] = value
    return x


def only(rng, rows, vocab):
    x = torch.full((rows, vocab), -math.inf, device=CUDA)
    x[torch.arange(rows), torch.randint(vocab, (rows,), device=CUDA)] = -7.5
    return x


LOGITS = {
    "normal": lambda r, n, v: normal(r, n, v, 3),
    "wide": lambda r, n, v: normal(r, n, v, 20),
    "nearly flat": lambda r, n, v: normal(r, n, v, 1e-3),
    "flat": lambda r, n, v: torch.full((n, v), 0.5, device=CUDA),
    "zeros of both signs": lambda r, n, v: normal(r, n, v, 1) * 0.0,
    "ties": lambda r, n, v: (normal(r, n, v, 3) * 2).round() / 2,
    "slope": lambda r, n, v: -torch.arange(v, device=CUDA, dtype=torch.float32).repeat(n, 1) * 1e-4,
    "rising slope": lambda r, n, v: torch.arange(v, device=CUDA, dtype=torch.float32).repeat(n, 1) * 3e-4,
    "half holes": lambda r, n, v: holes(r, n, v, 0.5),
    "mostly holes": lambda r, n, v: holes(r, n, v, 0.999),
    "one finite": only,
    "peak": lambda r, n, v: with_one(r, n, v, 25.0),
    "huge": lambda r, n, v: with_one(r, n, v, 1e30),
    "tiny": lambda r, n, v: normal(r, n, v, 1e-40),
}


def parameters(rng: random.Random, vocab: int, edits: bool = True) -> Json:
    """Sampling parameters of a request, each of them often off."""
    p: Json = {
        "temperature": rng.choice([0.0, 1e-3, 0.3, 0.7, 1.0, 1.0, 1.0, 1.5, 5.0, 1e-30, 1e30]),
        "top_k": rng.choice([0, 0, 0, 1, 2, 5, 50, 1000, 1024, 1025, 5000, vocab - 1, vocab, 10**12]),
        "top_p": rng.choice([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 2**-53]),
        "min_p": rng.choice([0.0, 0.0, 1e-30, 0.01, 0.05, 0.5, 1.0]),
        "seed": rng.choice([*SEEDS, rng.getrandbits(64)]),
    }
    if edits and rng.random() < 0.5:
        p["repetition_penalty"] = rng.choice([1.0, 1.1, 0.7, 1e6, 1e-6])
        p["presence_penalty"] = rng.choice([0.0, 0.5, -2.0])
        p["frequency_penalty"] = rng.choice([0.0, 0.1, -0.3])
    if edits and rng.random() < 0.4:
        tokens = rng.sample(range(vocab), min(vocab - 1, rng.choice([1, 3, 300])))
        p["logit_bias"] = {t: rng.choice([1.0, -5.0, 8.0, -math.inf]) for t in tokens}
    return p


def sampler(rng: random.Random, vocab: int, p: Json) -> core.Sampler:
    few = min(vocab, rng.choice([3, 50, 3000]))
    s = core.Sampler(vocab, [rng.randrange(few) for _ in range(rng.choice([0, 7, 500]))], **p)
    s.commit([rng.randrange(few) for _ in range(rng.choice([0, 9, 400]))])
    return s


class Outputs:
    """Poisoned arrays of accepted paths."""

    def __init__(self, nodes: int, batch: int, max_path: int) -> None:
        full = lambda n: torch.full((n,), POISON, dtype=torch.int32, device=CUDA)  # noqa: E731
        self.offsets, self.roots, self.new_lens, self.faults = full(batch + 1), full(batch), full(batch), full(batch)
        self.paths, self.tokens, self.rows = (full(batch * max_path) for _ in range(3))
        words = core._device_verify_scratch(nodes, batch, max_path)
        self.scratch = torch.zeros(words, dtype=torch.int64, device=CUDA)

    def accepts(self):
        return AcceptArrays(
            offsets=self.offsets, paths=self.paths, tokens=self.tokens, rows=self.rows, roots=self.roots,
            new_lens=self.new_lens, faults=self.faults,
        )  # fmt: skip


def on_device(samplers) -> list[torch.Tensor]:
    return [torch.from_dlpack(a).to(CUDA) for a in core._device_samplers(samplers).values()]


def launch(logits, parents, tokens, lens, samplers, *, live=None, max_path=None, out=None, arrays=None):
    """Verify on the device; the outputs."""
    sizes = [len(p) for p in parents]
    offsets = i32([0, *itertools.accumulate(sizes)])
    flat = [i32(itertools.chain.from_iterable(a)) for a in (tokens, parents)]
    max_nodes = max(sizes, default=1)
    max_path = max_path or max_nodes
    out = out or Outputs(logits.shape[0], len(sizes), max_path)
    core._device_sample_verify(
        logits=logits,
        trees=TreeArrays(tokens=flat[0], parents=flat[1], offsets=offsets),
        lens=i32(lens),
        live=live,
        max_nodes=max_nodes,
        max_path=max_path,
        samplers=named(SamplerArrays, arrays or on_device(samplers)),
        accepts=out.accepts(),
        scratch=out.scratch,
        stream=stream(),
    )
    return out


def check(logits, parents, tokens, lens, samplers) -> tuple[list[list[int]], list[list[int]]]:
    """Host and device agree in every entry of every output."""
    return agree(launch(logits, parents, tokens, lens, samplers), logits, parents, tokens, lens, samplers)


def agree(out: Outputs, logits, parents, tokens, lens, samplers) -> tuple[list[list[int]], list[list[int]]]:
    trees = core.TreeBatch.from_parents(parents, tokens)
    want = core.verify(trees, logits.float().cpu(), samplers, lens)
    paths, drawn = want.paths, want.tokens
    ended = [t + [-1] * (len(p) - len(t)) for p, t in zip(paths, drawn, strict=True)]
    starts = [0, *itertools.accumulate(len(p) for p in paths)]
    assert out.offsets.tolist() == starts
    entries = starts[-1]
    assert out.tokens[:entries].tolist() == list(itertools.chain.from_iterable(ended))
    assert out.paths[:entries].tolist() == list(itertools.chain.from_iterable(paths))
    assert out.tokens[entries:].eq(-1).all() and out.paths[entries:].eq(0).all() and out.rows[entries:].eq(0).all()
    firsts = [0, *itertools.accumulate(len(p) for p in parents)]
    assert out.rows[:entries].tolist() == [firsts[i] + n for i, path in enumerate(paths) for n in path]
    assert out.roots.tolist() == [t[-1] for t in ended]
    assert out.new_lens.tolist() == [n + len(p) for n, p in zip(lens, paths, strict=True)]
    faults = [0 if e is None else {"NaN": 1, "+inf": 2, "all -inf": 3}[e.value] for e in want.errors]
    assert out.faults.tolist() == faults
    nodes = logits.shape[0]
    # Zeroed as the next launch needs it.
    assert not out.scratch[:nodes].any() and out.scratch[nodes].item() & 0xFFFFFFFF == 0
    return paths, drawn


def survives(s: core.Sampler, row: torch.Tensor) -> bool:
    """Bias and penalties may forbid every token of a row: faults have tests of their own."""
    try:
        s.draw(row, 1)
    except specrs.NonFiniteError:
        return False
    return True


def plain(rng: random.Random, vocab: int) -> core.Sampler:
    return core.Sampler(vocab, [], **parameters(rng, vocab, edits=False))
