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
from specrs import _specrs as core
from specrs import device
from specrs.measuring.machine import driver

LAYERS, HEADS, KV_HEADS, DIM = 32, 32, 8, 128
WIDTH = (HEADS + 2 * KV_HEADS) * DIM
POSITIONS, SLOTS = 8192, 8192
ROWS = (1, 8, 64, 1024, 4096)


class World:
    """A cache of all layers and the tables of angles."""

    def __init__(self) -> None:
        self.random = torch.Generator("cuda").manual_seed(1)
        self.table = tuple(torch.randn(POSITIONS, DIM // 2, generator=self.random, device="cuda") for _ in range(2))
        self.cache = torch.zeros(LAYERS, 2, SLOTS, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")


class Rows:
    """Operands of a launch over `rows` rows of a qkv product."""

    def __init__(self, world: World, rows: int) -> None:
        random = {"generator": world.random, "device": "cuda"}
        self.world = world
        self.qkv = torch.randn(rows, WIDTH, **random).to(torch.bfloat16)
        self.q = torch.empty_like(self.qkv[:, : HEADS * DIM]).contiguous()
        self.positions = torch.randint(0, POSITIONS, (rows,), dtype=torch.int32, **random)
        self.slots = (1 + torch.randperm(SLOTS - 1, **random)[:rows]).to(torch.int32)

    def launch(self, layer: int) -> None:
        core._device_rope_kv(
            self.qkv, HEADS, KV_HEADS, None, None, None, 0.0, self.world.table, self.positions, self.slots, self.q,
            self.world.cache, layer, stream(),
        )  # fmt: skip

    def bits(self) -> str:
        """A hash of what the launches wrote."""
        wrote = (self.q, self.world.cache[:, :, self.slots.long()])
        bits = torch.cat([t.flatten() for t in wrote]).view(torch.int16)
        return hashlib.sha256(bits.cpu().numpy().tobytes()).hexdigest()[:16]


def measure() -> None:
    """Print a line of JSON for each number of rows."""
    device.init()
    world = World()
    for rows in ROWS:
        of = Rows(world, rows)
        copy = torch.empty_like(of.qkv)
        calls: list[Callable[[], object]] = [lambda of=of, i=i: of.launch(i) for i in range(LAYERS)]  # type: ignore[misc]
        copies: list[Callable[[], object]] = [lambda to=copy, of=of: to.copy_(of.qkv)] * LAYERS  # type: ignore[misc]
        us = medians({"rope_kv": (graph_of(calls), LAYERS), "copy": (graph_of(copies), LAYERS)}, repeats=30)
        device.check()
        bytes_ = 2 * of.qkv.nbytes
        row = {"rows": rows, "bytes": bytes_, **{name: round(t, 3) for name, t in us.items()}, "bits": of.bits()}
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
