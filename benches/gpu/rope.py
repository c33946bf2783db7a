"""RoPE with the write of keys and values at Llama-3.1-8B's shape, for builds that run in turns, beside torch's copy of
as many bytes.

One launch reads the rows of a qkv product and writes queries, and keys and values to the pages of a layer. A graph of
32 of them goes through the layers of a cache, as a round does: qkv and queries stay where they are. Bytes count what is
read of qkv plus what is written. A build is a folder with the package ``specrs``; each runs in a process of its own,
and all of them ``--turns`` times. Outputs of all must have equal bits.

    python benches/gpu/rope.py NAME=FOLDER [NAME=FOLDER ...] [--json FILE] [--turns 2]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from timing import graph_of, medians, stream

from common import commit, versions

LAYERS, HEADS, KV_HEADS, DIM = 32, 32, 8, 128
WIDTH = (HEADS + 2 * KV_HEADS) * DIM
POSITIONS, SLOTS = 8192, 8192
ROWS = (1, 8, 64, 1024, 4096)


def measure() -> None:
    """Print a line of JSON for each number of rows."""
    from specrs import _specrs as core
    from specrs import device

    device.init()
    cuda = torch.device("cuda")
    random = torch.Generator(cuda).manual_seed(1)
    table = tuple(torch.randn(POSITIONS, DIM // 2, generator=random, device=cuda) for _ in range(2))
    cache = torch.zeros(LAYERS, 2, SLOTS, KV_HEADS, DIM, dtype=torch.bfloat16, device=cuda)
    for rows in ROWS:
        qkv = torch.randn(rows, WIDTH, generator=random, device=cuda).to(torch.bfloat16)
        q, copy = torch.empty_like(qkv[:, : HEADS * DIM]).contiguous(), torch.empty_like(qkv)
        positions = torch.randint(0, POSITIONS, (rows,), generator=random, device=cuda, dtype=torch.int32)
        slots = (1 + torch.randperm(SLOTS - 1, generator=random, device=cuda)[:rows]).to(torch.int32)
        at = (table, positions, slots, q, cache)

        def launch(layer: int, qkv: torch.Tensor = qkv, at: tuple[object, ...] = at) -> None:
            core._device_rope_kv(qkv, HEADS, KV_HEADS, None, None, None, 0.0, *at, layer, stream())

        calls: list[Callable[[], object]] = [lambda layer=i: launch(layer) for i in range(LAYERS)]  # type: ignore[misc]
        copies: list[Callable[[], object]] = [lambda to=copy, of=qkv: to.copy_(of)] * LAYERS  # type: ignore[misc]
        us = medians({"rope_kv": (graph_of(calls), LAYERS), "copy": (graph_of(copies), LAYERS)}, repeats=30)
        device.check()
        bits = torch.cat([t.flatten() for t in (q, cache[:, :, slots.long()])]).view(torch.int16)
        told = hashlib.sha256(bits.cpu().numpy().tobytes()).hexdigest()[:16]
        bytes_ = 2 * qkv.nbytes
        row = {"rows": rows, "bytes": bytes_, **{name: round(t, 3) for name, t in us.items()}, "bits": told}
        print(json.dumps(row), flush=True)


def main() -> None:
    """Run every build in turns, print and write what each took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("builds", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--measure", action="store_true", help="the package that is imported; for the runs")
    args = parser.parse_args()
    if args.measure:
        measure()
        return
    from specrs.measuring.machine import driver

    us: dict[int, dict[str, list[float]]] = {}
    bits: dict[int, set[str]] = {}
    for _ in range(args.turns):
        for name, folder in (build.split("=", 1) for build in args.builds):
            command = [sys.executable, __file__, "--measure"]
            environment = {**os.environ, "PYTHONPATH": folder}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            for row in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")):
                case = us.setdefault(row["rows"], {})
                case.setdefault(name, []).append(row["rope_kv"])
                case.setdefault("copy", []).append(row["copy"])
                bits.setdefault(row["rows"], set()).add(row["bits"])
                print(name, row, flush=True)

    def shown(rows: int, times: dict[str, list[float]]) -> dict[str, object]:
        bytes_ = 4 * rows * WIDTH
        speed = {name: round(bytes_ / statistics.median(t) / 1e3, 1) for name, t in times.items()}
        return {"rows": rows, "bytes": bytes_, "us": times, "gb_per_s": speed, "same_bits": len(bits[rows]) == 1}

    result = {
        "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "device": torch.cuda.get_device_name(),
        "driver": driver(), "versions": versions(), "rows": [shown(*case) for case in us.items()],
    }  # fmt: skip
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
