"""Packed matrix products on the CPU against oneDNN with a prepacked weight and against ``F.linear``.

The shapes are those of the shipped model (output head, qkv, gate and up, down), 1 to 16 rows, weights rotated through
more memory than the second-level caches hold, as a pass over a model does. oneDNN is called as inductor's freezing
calls it (``torch.ops.mkldnn._reorder_linear_weight``, ``_linear_pointwise``), with a weight packed for each number of
rows; all take turns in one run, on as many threads each, and agree before the clock starts. Medians and, since threads
that wait for each other suffer out of proportion on a busy machine, the best turn; the ratio is that of best turns.

It also records which of them is *row-invariant*: whether row 0 has the same bits alone and among others, which exact
speculation needs. Writes ``results/linear.json``.

``--f16`` times weights of each type against the same weights in f32 instead, where they lie in a cache and where they
come from memory, on one thread by its CPU time (other work on the machine then counts little), and writes
``results/linear_f16.json``: medians and quartiles of the ratios of turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

import specrs._specrs as core
from common import seconds, write_result

SHAPES = {"head": (8192, 320), "qkv": (448, 320), "gate_up": (1792, 320), "down": (320, 896)}
ROWS = (1, 2, 4, 8, 16)
ROTATE_BYTES = 40 << 20

F16_ROWS = (1, 4, 8)
PLACES = {"L2": (192, 320, 1), "L3": (1792, 320, 1), "memory": (1792, 320, 100), "memory, large": (4096, 4096, 4)}
"""Places of f32 weights that are used in turn: n, k, how many. In f16 a hundred are 115 MB."""

Product = Callable[[torch.Tensor, int], torch.Tensor]


def products(n: int, k: int, m: int, copies: int) -> dict[str, Product]:
    """The candidates for a weight [n, k] and m rows: each maps x and the number of a copy to y."""
    weights = [torch.randn(n, k).div_(k**0.5).to(torch.bfloat16).float() for _ in range(copies)]
    onednn = [torch.ops.mkldnn._reorder_linear_weight(w, m) for w in weights]
    bf16 = [core.PackedLinear(w.to(torch.bfloat16), storage="bf16") for w in weights]
    f16 = [core.PackedLinear(w.to(torch.float16), storage="f16") for w in weights]
    f32 = [core.PackedLinear(w, storage="f32") for w in weights]
    out = torch.empty(m, n)

    def packed(layers: list[core.PackedLinear]) -> Product:
        def run(x: torch.Tensor, i: int) -> torch.Tensor:
            target = out if x.shape[0] == m else torch.empty(x.shape[0], n)
            layers[i].forward(x, target)
            return target

        return run

    return {
        "specrs_bf16": packed(bf16),
        "specrs_f16": packed(f16),
        "specrs_f32": packed(f32),
        "onednn": lambda x, i: torch.ops.mkldnn._linear_pointwise(x, onednn[i], None, "none", [], ""),
        "f_linear": lambda x, i: functional.linear(x, weights[i]),
    }


def row_invariant(product: Product, k: int) -> bool:
    """Return whether row 0 has the same bits alone as among 2 to 16 rows."""
    x = torch.randn(16, k)
    alone = product(x[:1].contiguous(), 0)[0].clone()
    return all(torch.equal(product(x[:m].contiguous(), 0)[0], alone) for m in range(2, 17))


def timed(
    product: Product, x: torch.Tensor, copies: int, clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """Microseconds of one call among others, each with the next copy."""
    count = 0

    def call() -> None:
        nonlocal count
        count = (count + 1) % copies
        product(x, count)

    return lambda: seconds(call, 1e-3, clock) * 1e6


def turns(candidates: dict[str, Callable[[], float]], repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median and best of what each candidate returns, the candidates taking turns; one turn each goes to warm up."""
    samples = [{name: sample() for name, sample in candidates.items()} for _ in range(repeats + 1)][1:]
    medians = {c: round(statistics.median(s[c] for s in samples), 1) for c in candidates}
    return medians, {c: round(min(s[c] for s in samples), 1) for c in candidates}


def compare_f16(repeats: int) -> None:
    """Products over weights of each type, against f32 in the same turn."""
    rows = []
    for place, (n, k, copies) in PLACES.items():
        weights = [torch.randn(n, k).div_(k**0.5).to(torch.float16).float() for _ in range(copies)]
        halves, brains = ([w.to(dtype) for w in weights] for dtype in (torch.float16, torch.bfloat16))
        packed = {
            "specrs_f32": [core.PackedLinear(w, storage="f32") for w in weights],
            "specrs_f16": [core.PackedLinear(w, storage="f16") for w in halves],
            "specrs_bf16": [core.PackedLinear(w, storage="bf16") for w in brains],
        }
        for m in F16_ROWS:
            out = torch.empty(m, n)
            candidates: dict[str, Product] = {
                name: lambda x, i, layers=layers, out=out: layers[i].forward(x, out) for name, layers in packed.items()
            }
            for name, own in (("torch_f32", weights), ("torch_f16", halves), ("torch_bf16", brains)):
                candidates[name] = lambda x, i, own=own: functional.linear(x.to(own[i].dtype), own[i])
            x = torch.randn(m, k)
            same = [torch.empty(m, n) for _ in range(2)]
            for result, name in zip(same, ("specrs_f32", "specrs_f16"), strict=True):
                packed[name][0].forward(x, result)
            assert torch.equal(*same)
            samples = {name: timed(product, x, copies, time.thread_time) for name, product in candidates.items()}
            taken = [{name: sample() for name, sample in samples.items()} for _ in range(repeats + 1)][1:]
            best = {name: round(min(turn[name] for turn in taken), 1) for name in samples}
            over_f32 = {}
            for name in samples:
                ratios = [turn[name] / turn["specrs_f32"] for turn in taken]
                over_f32[name] = [round(r, 3) for r in statistics.quantiles(ratios, n=4, method="inclusive")]
            rows.append({"weights": place, "n": n, "k": k, "m": m, "best_us": best, "time_over_specrs_f32": over_f32})
            print(f"{place:14} {n} x {k} m {m}  " + "  ".join(f"{c} {over_f32[c][1]:.2f} ({best[c]})" for c in best))
    write_result("linear_f16", {"threads": 1, "repeats": repeats, "results": rows})


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--f16", action="store_true", help="time weights of each type against f32 instead")
    args = parser.parse_args()
    threads = 1 if args.f16 else args.threads
    torch.set_num_threads(threads)
    core.set_num_threads(threads)
    torch.manual_seed(1)
    if args.f16:
        with torch.inference_mode():
            compare_f16(args.repeats)
        return
    rows = []
    exact: dict[str, bool] = {}
    with torch.inference_mode():
        for name, (n, k) in SHAPES.items():
            copies = ROTATE_BYTES // (n * k * 2) + 1
            for m in ROWS:
                x = torch.randn(m, k)
                candidates = products(n, k, m, copies)
                want = candidates["f_linear"](x, 0)
                for label, product in candidates.items():
                    torch.testing.assert_close(product(x, 0), want, rtol=1e-4, atol=1e-4)
                    exact[label] = exact.get(label, True) and row_invariant(product, k)
                median, best = turns({c: timed(p, x, copies) for c, p in candidates.items()}, args.repeats)
                ratio = round(best["onednn"] / best["specrs_bf16"], 2)
                row = {"layer": name, "n": n, "k": k, "m": m, "median_us": median, "best_us": best}
                rows.append({**row, "speedup_over_onednn": ratio})
                print(f"{name:8} {n:5} x {k:3} m {m:2}  " + "  ".join(f"{c} {t:7.1f}" for c, t in best.items()), ratio)
    print("row-invariant:", exact)
    write_result("linear", {"threads": threads, "row_invariant": exact, "results": rows})


if __name__ == "__main__":
    main()
