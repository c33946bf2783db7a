"""The launches that `ncu.py` has Nsight Compute look at: each goal's, at its shapes, from the benches' own cases.

A process of its own under ncu. Each case is launched twice before ncu looks. Then come one spin of torch's, which
tells cases apart in what ncu lists, and the case's launches. A line of JSON on standard output names each case, in
that order.

    ncu [options] --profile-from-start off python benches/gpu/ncu_cases.py GROUP [LAUNCHES]
"""

from __future__ import annotations

import gc
import json
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import attention
import indices
import parts
import rope
import selection

from specrs import device


class Case(NamedTuple):
    goals: str
    name: str
    launch: Callable[[], object]


def attentions() -> Iterator[Case]:
    tables = 32768
    for goals, what, batch, length, max_context in (
        ("7", "verify", 1, 8192, tables),
        ("7", "verify", 16, 8192, tables),
        ("8", "draft", 1, 8192, tables),
        ("8", "draft", 16, 8192, tables),
        ("10", "decode", 1, 8192, tables),
        ("10", "decode", 16, 8192, tables),
        ("7", "verify", 1, 1024, tables),
        ("7", "verify", 16, 1024, tables),
        ("10", "decode", 64, 1024, tables),
        ("10", "decode", 1, 1024, 9000),  # by clusters
        ("8", "draft", 1, 1024, 9000),
    ):
        nodes = {"verify": 64, "draft": 8, "decode": 1}[what]
        draft = (8, 6) if what == "draft" else None
        launches = attention.Launches(batch, length, nodes, draft, max_context)
        yield Case(goals, f"{what}, {batch} x {length}, tables for {max_context}", partial(launches.run, 0))


def first_steps(r: parts.Round, scores: list[torch.Tensor]) -> None:
    """Selection over the target's row, and over those of the beams that it gave."""
    for step in range(2):
        r.select(step, scores[step])


def logits() -> Iterator[Case]:
    """Kernels that read logits which no cache holds."""
    for full in (True, False):
        _, call = selection.verification(1, parts.VOCAB, "greedy", torch.float32, full)
        yield Case("5", f"greedy, {'full' if full else 'walk'}, batch 1, f32", partial(call, 0))
    for how, batch, dtype in (
        ("top_p 0.95", 1, torch.bfloat16),
        ("temperature", 1, torch.bfloat16),
        ("top_p 0.95", 64, torch.bfloat16),
        ("temperature", 64, torch.bfloat16),
        ("top_p 0.95", 64, torch.float32),
    ):
        _, call = selection.verification(batch, parts.VOCAB, how, dtype, False)
        kind = str(dtype).removeprefix("torch.")
        yield Case("6", f"sampled, {how}, batch {batch}, {kind}", partial(call, 0))
    r = parts.Round(64, 1)
    scores = r.draft(parts.DRAFT_VOCAB)
    yield Case("4b", "selection, two steps, batch 64, 32000", partial(first_steps, r, scores))


def metadata() -> Iterator[Case]:
    """Kernels whose operands the launch in front has just written."""
    for batch in (1, 64):
        r = parts.Round(batch, 1)
        r.draft(parts.DRAFT_VOCAB)
        parts.verification(r, parts.steered(r.trees, batch))["greedy_walk"]()
        yield Case("3, 4, 9", f"metadata of a round, batch {batch}", r.metadata)
    for vocab in (parts.DRAFT_VOCAB, parts.VOCAB):
        r = parts.Round(1, 1)
        scores = r.draft(vocab)
        yield Case("4b", f"selection, two steps, batch 1, {vocab}", partial(first_steps, r, scores))
    for batch in (1, 64):
        steps = indices.Steps(indices.World(batch), "flashinfer")
        yield Case(
            "9b",
            f"flashinfer's indices of the last draft step, batch {batch}",
            partial(steps.plan, indices.SHAPE.steps - 1),
        )
    world = rope.World()
    for rows in (1, 64, 1024):
        of = rope.Rows(world, rows)
        yield Case("10", f"RoPE and the KV write, {rows} rows", partial(of.launch, 0))


def products() -> Iterator[Case]:
    for rows in (1, 64, 256):
        layer = parts.Layer(rows, 256)
        for name in parts.LAYER:
            yield Case("10, 13", f"{name}, {rows} rows", partial(layer.ours, name, 0))


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "attention": attentions,
    "logits": logits,
    "metadata": metadata,
    "products": products,
}


def main() -> None:
    """Launch a group's cases where ncu looks."""
    group, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2
    random.seed(1)
    torch.manual_seed(1)
    device.init()
    for case in GROUPS[group]():
        for _ in range(2):
            case.launch()
        torch.cuda.synchronize()
        device.check()
        print(json.dumps({"goals": case.goals, "case": case.name}), flush=True)
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        for _ in range(count):
            case.launch()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        device.check()
        del case
        gc.collect()
        torch.cuda.empty_cache()  # ncu keeps a copy of all memory


if __name__ == "__main__":
    main()
