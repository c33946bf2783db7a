"""Products of up to 16 rows on a GPU of compute capability 9.0: the package's own kernel against cublasLt.

For every weight, what the engine measures when it chooses: microseconds of a product in a CUDA graph of such launches,
each behind a small one, as norms and activations stand between a model's products. Both have the same bits (the engine
compares them, and takes its own only where they are equal). The floor is the weight's bytes over a read of 1 GB.

    python benches/gpu/products.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import commit, versions
from specrs import _specrs as core
from specrs import device
from specrs.measuring.machine import driver

# outputs, inputs, float32 output
SHAPES = {
    "8B qkv": (6144, 4096, False), "8B o": (4096, 4096, False), "8B gate_up": (28672, 4096, False),
    "8B down": (4096, 14336, False), "8B lm_head": (128256, 4096, False), "head's lm_head": (32000, 4096, True),
    "1B qkv": (3072, 2048, False), "1B o": (2048, 2048, False), "1B gate_up": (16384, 2048, False),
    "1B down": (2048, 8192, False),
}  # fmt: skip


def bandwidth() -> float:
    """Bytes a second at which 1 GB is read, the best of 20 sums."""
    x = torch.ones(1 << 28, dtype=torch.float32, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = 1e9
    for _ in range(20):
        begin.record()
        x.sum()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return x.nbytes / best * 1e3


def main() -> None:
    """Measure every shape, print and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rate = bandwidth()
    rows: list[dict[str, Any]] = []
    result = {
        "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "device": torch.cuda.get_device_name(),
        "driver": driver(), "versions": versions(), "read_bytes_per_second": round(rate), "shapes": rows,
    }  # fmt: skip
    for name, (n, k, f32) in SHAPES.items():
        weight = (torch.randn(n, k, device="cuda") / k**0.5).to(torch.bfloat16)
        products = core._DeviceProducts(torch.cuda.current_device(), device.cublaslt_folders())
        products.linear(weight, 64, f32_output=f32)
        [entry] = json.loads(products.numerics())["weights"]
        row = {"name": name, "outputs": n, "inputs": k, "split": entry["split"],
               "floor_us": round(weight.nbytes / rate * 1e6, 2)}  # fmt: skip
        for bucket in entry["buckets"]:
            if bucket["own"] is not None:
                us, library = bucket["own"]["us"], bucket["own"]["library_us"]
                row[f"rows_{bucket['rows']}"] = {
                    "own_us": round(us, 2), "cublaslt_us": round(library, 2), "ratio": round(us / library, 3),
                    "cublaslt_alone_us": bucket["us"],
                }  # fmt: skip
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
