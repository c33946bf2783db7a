"""Packed matrix products on the CPU against oneDNN with a prepacked weight and against ``F.linear``.

The shapes are those of the shipped model (output head, qkv, gate and up, down), 1 to 16 rows, weights rotated through
more memory than the second-level caches hold, as a pass over a model does. oneDNN is called as inductor's freezing
calls it (``torch.ops.mkldnn._reorder_linear_weight``, ``_linear_pointwise``), with a weight packed for each number of
rows; all take turns in one run, on as many threads each, and agree before the clock starts. Medians and, since threads
that wait for each other suffer out of proportion on a busy machine, the best turn; the ratio is that of best turns.

It also records which of them is *row-invariant*: whether row 0 has the same bits alone and among others, which exact
speculation needs. Writes ``results/linear.json``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch.nn import functional

import specrs._specrs as core
from common import seconds, write_result

SHAPES = {"head": (8192, 320), "qkv": (448, 320), "gate_up": (1792, 320), "down": (320, 896)}
ROWS = (1, 2, 4, 8, 16)
ROTATE_BYTES = 40 << 20

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
    """Whether row 0 has the same bits alone as among 2 to 16 rows."""
    x = torch.randn(16, k)
    alone = product(x[:1].contiguous(), 0)[0].clone()
    return all(torch.equal(product(x[:m].contiguous(), 0)[0], alone) for m in range(2, 17))


def timed(product: Product, x: torch.Tensor, copies: int) -> Callable[[], float]:
    """Microseconds of one call among others, each with the next copy."""
    count = 0

    def call() -> None:
        nonlocal count
        count = (count + 1) % copies
        product(x, count)

    return lambda: seconds(call, 1e-3) * 1e6


def turns(candidates: dict[str, Callable[[], float]], repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median and best of what each candidate returns, the candidates taking turns; one turn each goes to warm up."""
    samples = [{name: sample() for name, sample in candidates.items()} for _ in range(repeats + 1)][1:]
    medians = {c: round(statistics.median(s[c] for s in samples), 1) for c in candidates}
    return medians, {c: round(min(s[c] for s in samples), 1) for c in candidates}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    core.set_num_threads(args.threads)
    torch.manual_seed(1)
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
    write_result("linear", {"threads": args.threads, "row_invariant": exact, "results": rows})


if __name__ == "__main__":
    main()
