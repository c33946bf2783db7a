"""Goal 2 per format: a round's arrays by specrs against what the peers' own host code does for the same format.

specrs plans the whole round (five draft steps, verify, commit, draft_extend) and lowers it to the format's arrays,
every check included: a release binary (``examples/planner_driver.rs``), the median of single rounds on a live pool,
K = 8, S = 6, V = 64, committed lengths about 8k. The peer is sglang 0.5.23 with FlashInfer 0.7.2 on CPU tensors, in one
thread: `peer_sources` says how its functions come here unchanged, and what stands in for Triton kernels. Both make the
same arrays for the same kind of batch: same slots, lengths and masks, in the layout that the peer has (holey for
P > 1, lanes).

What the peer does not do here, though it does it there: scheduling, `ForwardBatch`, the tree's walk (the cells of its
mask are given), the commit, FlashInfer's GPU scheduler, masks and buffers at the full width of the context. So its
times are lower bounds. On a GPU its kernels take the stand-ins' place, and launching them is its host time:
``gpu/formats.py`` times that beside specrs's planner on one machine.

Two of the formats repeat a request's slots for each branch and a mask row for each query, so their bytes grow with the
context: besides the ratio to the peer, ``over_memcpy`` is the time over that of a memcpy of as many bytes as the round
writes, and ``over_fill`` over that of storing them from one row of 32 KiB that stays in the cache; both are taken in
the same turns.

``--check`` compares instead: the peer's arrays, specrs's (through its Python bindings) and the closed forms of
`peer_checks`; then the peer's Triton kernels themselves, by Triton's interpreter. Writes ``results/formats.json``.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from common import Driver, interleave, release_binary, seconds, write_result
from peer_checks import closed_form, differences
from peer_flashinfer import FlashInfer
from peer_rounds import FlashAttention, Inputs, K, L, Round, S, Triton, V
from peer_sources import FLASHINFER, SGLANG, Sglang
from peer_vllm import VLLM, Pass

FORMATS: dict[str, type[Round]] = {c.name: c for c in (FlashInfer, FlashAttention, Triton)}
BATCHES = (1, 16, 64, 256)
PAGES = (1, 16, 64)
GOAL_US = {1: 1.5, 16: 4.0, 64: 10.0, 256: 35.0}
CHECKS = ((1, 1, 300), (3, 4, 300), (5, 16, 700), (5, 64, 700), (16, 1, 8192), (16, 64, 8192))


def check(stand_ins: bool) -> int:
    """Compare arrays at a few sizes; how many sets differed. Without stand-ins: the Triton kernels themselves."""
    peer, wrong = Sglang(stand_ins), 0
    for batch, page, length in CHECKS if stand_ins else CHECKS[:4]:
        inputs = Inputs.random(batch, page, length)
        session = None
        if stand_ins:
            from peer_specrs import Session

            session = Session(inputs)
            inputs = session.inputs
            Pass(inputs).check()
        for name, kind in FORMATS.items():
            arrays = kind(peer, inputs).arrays()
            found = {"peer, closed form": differences(arrays, closed_form(name, inputs))}
            if session:
                found["specrs, peer"] = differences(session.arrays(name), arrays)
            for sides, said in found.items():
                wrong += bool(said)
                print(f"{name} batch {batch} page {page} length {length}: {sides}: {'; '.join(said) or 'equal'}")
    return wrong


def peer_times(stages: dict[str, Callable[[], object]], samples: dict[str, list[float]]) -> float:
    """Seconds of a round of the peer; each function's own go to ``samples``."""
    for name, call in stages.items():
        samples.setdefault(name, []).append(seconds(call))
    return sum(samples[name][-1] for name in stages)


class Specrs:
    """The driver, asked for one format at a time."""

    def __init__(self, driver: Driver, batch: int, page: int, name: str) -> None:
        layout, mask = ("holey" if page > 1 else "dense", "lanes") if name != "native" else ("dense", "ancestors")
        self.words = (page, batch, 40, name, layout, mask)
        self.driver, self.lows, self.bytes = driver, list[float](), 0

    def __call__(self) -> float:
        answer = self.driver.ask(*self.words)
        self.lows.append(answer["p10_ns"] / 1e3)
        self.bytes = answer["bytes"]
        return float(answer["median_ns"]) / 1e9


def copies(count: int) -> dict[str, Callable[[], object]]:
    """A memcpy of ``count`` bytes, and the same bytes stored from a row of 32 KiB."""
    source, target = np.ones(count, dtype=np.uint8), np.ones(count, dtype=np.uint8)
    row, whole = np.ones(min(32768, count), dtype=np.uint8), count // 32768 * 32768 or count
    rows = target[:whole].reshape(-1, len(row))
    return {"memcpy": lambda: np.copyto(target, source), "fill": lambda: np.copyto(rows, row)}


def measure(driver: Driver, peer: Sglang, inputs: Inputs, name: str, repeats: int) -> dict[str, Any]:
    """One format's row, the candidates taking turns."""
    batch, page = len(inputs.lens), inputs.page
    ours, parts = Specrs(driver, batch, page, name), dict[str, list[float]]()
    ours()  # tells the bytes
    sides: dict[str, Callable[[], object]] = {}
    candidates: dict[str, Callable[[], float]] = {"specrs": ours}
    if name in FORMATS:
        round_ = FORMATS[name](peer, inputs)
        candidates["peer"] = partial(peer_times, round_.stages(), parts)
        sides |= copies(ours.bytes)
        if isinstance(round_, FlashInfer):
            sides |= {"_build_draft_indptr_host": round_.draft_indptr, "vllm_pass": Pass(inputs).run}
    candidates |= {n: partial(seconds, call) for n, call in sides.items()}
    gc.collect()
    gc.disable()
    us = {n: t * 1e6 for n, t in interleave(candidates, repeats).items()}
    gc.enable()
    row: dict[str, Any] = {
        "format": name,
        "batch": batch,
        "page_size": page,
        "layout": ours.words[4],
        "specrs_us": round(us["specrs"], 2),
        "specrs_p10_us": round(statistics.median(ours.lows), 2),
        "goal_us": GOAL_US[batch],
        "bytes": ours.bytes,
    }
    if name in FORMATS:
        row["peer_us"] = round(us["peer"], 1)
        row["ratio"] = round(us["peer"] / us["specrs"], 1)
        row |= {f"over_{n}": round(us["specrs"] / us[n], 2) for n in ("memcpy", "fill")}
        row |= {f"{n}_us": round(us[n], 2) for n in sides}
        row["peer_parts_us"] = {n: round(statistics.median(t) * 1e6, 1) for n, t in parts.items()}
    print({n: x for n, x in row.items() if n != "peer_parts_us"}, flush=True)
    return row


def measure_all(driver: Driver, peer: Sglang, batch: int, page: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each format; native has no arrays, and no peer but the cheapest of the others."""
    inputs = Inputs.random(batch, page)
    rows = [measure(driver, peer, inputs, name, repeats) for name in ("native", *FORMATS)]
    cheapest = min(r["peer_us"] for r in rows[1:])
    rows[0] |= {"cheapest_peer_us": cheapest, "ratio": round(cheapest / rows[0]["specrs_us"], 1)}
    return rows


def main() -> int:
    """Measure every batch, page size and format, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="turns of each candidate")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--pages", type=int, nargs="+", default=PAGES)
    parser.add_argument("--core", type=int, help="run everything on this core")
    parser.add_argument("--check", action="store_true", help="compare arrays instead")
    parser.add_argument("--check-kernels", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.check_kernels:
        return check(stand_ins=False)
    if args.check:
        wrong = check(stand_ins=True)
        command = [sys.executable, __file__, "--check-kernels"]
        return wrong + subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode
    binary = release_binary("planner_driver")
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    driver, peer = Driver(binary), Sglang(stand_ins=True)
    rows = [row for b in args.batches for p in args.pages for row in measure_all(driver, peer, b, p, args.repeats)]
    driver.close()
    if (tuple(args.batches), tuple(args.pages)) != (BATCHES, PAGES):
        return 0
    peers = f"sglang {SGLANG}, flashinfer-python {FLASHINFER}, vllm {VLLM}"
    shapes = {"topk": K, "steps": S, "draft_tokens": V, "length": f"{L - 500}..{L + 500}", "threads": 1}
    write_result("formats", {"peers": peers, **shapes, "notes": NOTES, "rounds": rows})
    return 0


NOTES = [
    "peer_us: sglang's functions for the same format on CPU tensors, a lower bound of its work: numpy stands in for "
    "its Triton kernels, the tree's walk, the commit and FlashInfer's GPU scheduler are left out, masks and indices "
    "are no wider than the batch needs.",
    "goal_us is for arrays that do not grow with the context: native, and flash_attention at P = 64 nearly so. "
    "flashinfer and triton write K lists of the whole prefix for each draft step and V rows of mask: bytes says how "
    "many, memcpy_us and fill_us what it takes to store as many here.",
    "native has no arrays; its ratio is to the cheapest of the peer's three formats.",
    "_build_draft_indptr_host: sglang's own host copy of the draft's offsets, behind an option and not in peer_us. "
    "vllm_pass: vLLM's FlashInfer metadata for one forward pass over a chain, page by page: no branches and no masks.",
]

if __name__ == "__main__":
    sys.exit(main())
