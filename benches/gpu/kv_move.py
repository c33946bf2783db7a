"""KV move at Llama-3.1-8B shapes against torch's copy of the same bytes and torch's indexing.

One launch moves, for each request, the accepted nodes' KV of all 32 layers to the dense prefix (3 moves a request: a
path of 4 nodes whose root is in place). Times are of CUDA graphs of many launches over rotating slots, far more bytes
than the L2 holds; medians of interleaved replays; results checked against torch first. Bytes count what is read plus
what is written.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import graph_of, medians

from specrs import device

LAYERS, HEADS, DIM = 32, 8, 128
ROW_BYTES = LAYERS * 2 * HEADS * DIM * 2  # K and V of one token, bf16: 131072
SLOTS = 65_536
PAGE = 64


def path_moves(rng: random.Random, batch: int, moves: int) -> tuple[list[int], list[int], list[int]]:
    """Each request owns two neighbouring pages; a path's nodes move down to the front of them, in order."""
    pages = rng.sample(range(1, SLOTS // PAGE // 2), batch)
    src, dst, offsets = [], [], [0]
    for page in pages:
        base = page * 2 * PAGE
        nodes = sorted(rng.sample(range(2, 2 * PAGE), moves))
        src += [base + n for n in nodes]
        dst += [base + i + 1 for i in range(moves)]
        offsets.append(len(src))
    return src, dst, offsets


def measure(cache: torch.Tensor, batch: int, moves: int, sets: int, repeats: int) -> dict[str, Any]:
    rng = random.Random(batch * 100 + moves)
    lists = [path_moves(rng, batch, moves) for _ in range(sets)]
    on_gpu = [[torch.tensor(v, dtype=torch.int32, device="cuda") for v in one] for one in lists]
    long = [(s.long(), d.long()) for s, d, _ in on_gpu]

    # torch's order is gather, then scatter: equal where no destination is a later source, as on these paths.
    want = cache.clone()
    want[:, :, long[0][1]] = want[:, :, long[0][0]]
    device.kv_move(cache, *on_gpu[0])
    if not torch.equal(cache, want):
        raise SystemExit(f"kv_move differs from torch at batch {batch}")
    del want

    elements = batch * moves * ROW_BYTES // 2
    flat = cache.view(-1)
    # Copies of the same size between places that rotate over the whole cache.
    stride = flat.numel() // (2 * sets) // 64 * 64
    places = [(flat[2 * i * stride :][:elements], flat[(2 * i + 1) * stride :][:elements]) for i in range(sets)]

    def index(s: torch.Tensor, d: torch.Tensor) -> None:
        cache[:, :, d] = cache[:, :, s]

    graphs = {
        "kv_move": (graph_of([lambda m=m: device.kv_move(cache, *m) for m in on_gpu]), sets),
        "torch_copy": (graph_of([lambda p=p: p[1].copy_(p[0]) for p in places]), sets),
        "torch_index": (graph_of([lambda m=m: index(*m) for m in long]), sets),
    }
    us = medians(graphs, repeats, warm_up=3)
    bytes_ = 2 * batch * moves * ROW_BYTES
    return {
        "batch": batch,
        "moves_per_request": moves,
        "bytes": bytes_,
        "us": {k: round(v, 2) for k, v in us.items()},
        "gb_per_s": round(bytes_ / us["kv_move"] / 1e3, 1),
        "copy_gb_per_s": round(bytes_ / us["torch_copy"] / 1e3, 1),
        "copy_over_kv_move": round(us["torch_copy"] / us["kv_move"], 3),
        "index_over_kv_move": round(us["torch_index"] / us["kv_move"], 3),
    }


def host_us(call: Callable[[], object], n: int = 2000) -> float:
    """Host time of a call, without waiting for the GPU."""
    best = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(n // 5):
            call()
        best.append((time.perf_counter() - start) / (n // 5) * 1e6)
    torch.cuda.synchronize()
    return round(statistics.median(best), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=30)
    a = parser.parse_args()
    device.init()
    cache = torch.empty(LAYERS, 2, SLOTS, HEADS, DIM, dtype=torch.bfloat16, device="cuda")  # 8.6 GB
    for layer in cache:
        layer.normal_()
    rows = [
        measure(cache, b, m, sets, a.repeats)
        for b, m, sets in [(1, 3, 32), (4, 3, 32), (16, 3, 16), (64, 3, 16), (64, 16, 8)]
    ]
    empty = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (192, 192, 65)]
    dead = {"dead": (graph_of([lambda: device.kv_move(cache, *empty)] * 32), 32)}
    small = torch.zeros(16, device="cuda")
    tiny = cache.view(-1)[: 2 * 8 * 64].view(1, 2, 8, 1, 64)
    one = [torch.tensor(v, dtype=torch.int32, device="cuda") for v in ([1], [2], [0, 1])]
    result = {
        "copy_gb_per_s": rows[-1]["copy_gb_per_s"],  # speed of the largest copy below
        "shapes": rows,
        "graph_node_us_of_a_dead_batch_of_64": round(medians(dead, a.repeats, warm_up=3)["dead"], 2),
        "host_us": {
            "kv_move": host_us(lambda: device.kv_move(tiny, *one)),
            "torch_add_": host_us(lambda: small.add_(1)),
        },
    }
    device.check()
    for row in rows:
        row["of_copy_bandwidth"] = round(row["gb_per_s"] / result["copy_gb_per_s"], 3)
    print(json.dumps(result, indent=1))
    if a.json:
        a.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
