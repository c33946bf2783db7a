"""Goal 9b: the indices of every draft step in a per-branch format, written on the device: K=8, S=6, 8k of context, P=1.

``flashinfer`` wants for each draft step ``kv_indptr`` and ``kv_indices``: of each of K branches the slots of its whole
prefix, then of its own tokens so far (its lane, as the peers' draft path lists them). specrs's device planner makes
them from lengths and a page table in device memory. A time is of all S steps in a CUDA graph, median of replays that
take turns with the ``native`` format's (the plan alone, which both need: it has no such list) and with torch's fill of
as many bytes, which is what writing them takes. Every array of every step is first compared with the host planner's.
"Bytes" are those of the arrays' used parts. Where sglang is installed (`peer_sglang/bundle.py`), its Triton kernel for
the same lists takes turns too, over a table of the same slots; its lists are compared with the host planner's first.

    python benches/gpu/indices.py [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.dlpack import from_dlpack

sys.path.insert(0, str(Path(__file__).parents[1]))
from timing import stream, times

from common import commit, versions
from specrs import _specrs as core
from specrs import device
from specrs.measuring.machine import driver
from specrs.operands import PlanArrays

SHAPE = core.TreeShape(8, 6, 64)
CONTEXT, LENGTH, PAGE = 8192 + 256, 8192, 1
CUDA = torch.device("cuda")
POISON = -0x5A5A
PLAN = ("rows", "versions", "qo_indptr", "prefix_lens", "positions", "out_slots", "mask")
DTYPES = {"int32": torch.int32, "int64": torch.int64}
Format = Literal["native", "flashinfer"]


class World:
    """`batch` requests of `LENGTH` tokens whose pages lie anywhere, with a round's pages reserved."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.geometry = g = core.Geometry(batch, CONTEXT, PAGE, SHAPE)
        pages = 1 + batch * g.row_pages
        self.pool = core.Pool(pages, PAGE, batch, g.row_pages)
        order = self.pool.alloc_pages(pages - 1)
        random.shuffle(order)
        self.pool.free_pages(order)
        self.seqs = [self.pool.create() for _ in range(batch)]
        self.lens = [LENGTH] * batch
        self.pool.reserve([(q, LENGTH) for q in self.seqs]).commit(self.lens)
        self.lease = self.pool.reserve([(q, g.alloc_target(LENGTH, 0)) for q in self.seqs])
        table = torch.zeros(batch, g.row_pages, dtype=torch.int32)
        for q in self.seqs:
            own = torch.tensor(self.pool.pages(q), dtype=torch.int32)
            table[q.row, : len(own)] = own
        self.table = table.to(CUDA)
        self.rows = torch.tensor([q.row for q in self.seqs], dtype=torch.int32, device=CUDA)
        self.device_lens = torch.tensor(self.lens, dtype=torch.int32, device=CUDA)
        self.live = torch.tensor([batch], dtype=torch.int32, device=CUDA)


class Steps:
    """The device planner's work for all draft steps in one format, each step's arrays apart."""

    def __init__(self, world: World, format: Format) -> None:
        self.world, self.format = world, format
        self.planner = core.Planner(world.geometry, world.pool, format)
        batch, queries = world.batch, world.batch * SHAPE.topk
        words = world.geometry.draft_mask_words
        bound = core.DeviceLens(batch, CONTEXT)
        self.plans: list[PlanArrays] = []
        self.arrays: list[dict[str, torch.Tensor]] = []
        self.versions = from_dlpack(self.host(0).versions).to(CUDA)
        for step in range(SHAPE.steps):
            shapes = ([batch], [batch], [batch + 1], [batch], [queries], [queries], [queries, words])
            dtype = {"versions": torch.int64, "mask": torch.int64}
            self.plans.append(PlanArrays(**{
                name: torch.full(size, POISON, dtype=dtype.get(name, torch.int32), device=CUDA)
                for name, size in zip(PLAN, shapes, strict=True)
            }))  # fmt: skip
            self.arrays.append({
                name: torch.full(list(size["shape"]), POISON, dtype=DTYPES[size["dtype"]], device=CUDA)
                for name, size in self.planner.sizes("draft", bound, step).items()
            })  # fmt: skip

    def host(self, step: int) -> core.Plan:
        """The host's plan of a step: each branch and its own lane."""
        return self.planner.draft(self.world.seqs, self.world.lens, step, None, "lane")

    def plan(self, step: int) -> None:
        """Plan a step on the device."""
        w = self.world
        core._device_plan(
            geometry=w.geometry, phase="draft", draft_step=step, table=w.table, num_pages=w.pool.num_pages,
            rows=w.rows, versions=self.versions, lens=w.device_lens, live=w.live, plan=self.plans[step],
            format=self.format, masks="both", arrays=self.arrays[step], stream=stream(),
        )  # fmt: skip

    def launch(self) -> None:
        """Plan every step on the device."""
        for step in range(SHAPE.steps):
            self.plan(step)

    def check(self) -> int:
        """Compare every array with the host's; the bytes that all of them take."""
        total = 0
        for step in range(SHAPE.steps):
            host, case = self.host(step), f"{self.format}, batch {self.world.batch}, draft step {step}"
            pairs = [(name, getattr(self.plans[step], name), from_dlpack(getattr(host, name))) for name in PLAN]
            pairs += [(name, self.arrays[step][name], from_dlpack(array)) for name, array in host.arrays().items()]
            for name, got, want in pairs:
                total += want.numel() * want.element_size()
                used, rest = got.view(-1)[: want.numel()].cpu(), got.view(-1)[want.numel() :]
                if not torch.equal(used, want.reshape(-1).to(used.dtype)):
                    raise SystemExit(f"{case}, {name}: not the host's")
                if not bool((rest == POISON).all()):
                    raise SystemExit(f"{case}, {name}: written behind its end")
        return total


class Sglang:
    """sglang's kernel for the lists of all draft steps, by which its backends of FlashInfer and Triton read."""

    def __init__(self, world: World) -> None:
        from sglang.srt.speculative.triton_ops.cache_locs import generate_draft_decode_kv_indices

        self.world, self.kernel, queries = world, generate_draft_decode_kv_indices, world.batch * SHAPE.topk
        self.lists = torch.full((SHAPE.steps, queries * CONTEXT), POISON, dtype=torch.int32, device=CUDA)
        self.ends = torch.zeros(SHAPE.steps, queries + 1, dtype=torch.int32, device=CUDA)
        self.positions = world.device_lens.repeat_interleave(SHAPE.topk)

    def launch(self) -> None:
        w, k = self.world, SHAPE.topk
        sizes = (self.world.table.stride(0), self.lists.shape[1], self.ends.shape[1])
        powers = (1 << (n - 1).bit_length() for n in (w.batch, SHAPE.steps, w.batch * k))
        self.kernel[SHAPE.steps, w.batch, k](
            w.rows, w.table, w.device_lens, self.lists, self.ends, self.positions, *sizes, *powers, PAGE
        )

    def check(self, ours: Steps) -> None:
        """Compare the lists of every step with the host planner's."""
        for step in range(SHAPE.steps):
            arrays = {name: from_dlpack(array) for name, array in ours.host(step).arrays().items()}
            for name, got in (("kv_indptr", self.ends[step]), ("kv_indices", self.lists[step])):
                if not torch.equal(got[: arrays[name].numel()].cpu(), arrays[name]):
                    raise SystemExit(f"sglang, batch {self.world.batch}, draft step {step}, {name}: not the host's")


def measure(batch: int, repeats: int, sglang: bool) -> dict[str, Any]:
    """Times and bytes of a batch."""
    world = World(batch)
    made: dict[Format, Steps] = {"flashinfer": Steps(world, "flashinfer"), "native": Steps(world, "native")}
    bytes_: dict[str, int] = {}
    for name, steps in made.items():
        steps.launch()
        torch.cuda.synchronize()
        device.check()
        bytes_[name] = steps.check()
    lists = bytes_["flashinfer"] - bytes_["native"]
    filled = torch.empty(lists // 4, dtype=torch.int32, device=CUDA)
    launches = {name: steps.launch for name, steps in made.items()} | {"fill": lambda: filled.fill_(7)}
    if sglang:
        peer = Sglang(world)
        peer.launch()
        peer.check(made["flashinfer"])
        launches["sglang"] = peer.launch
    us = times(launches, launches=4, repeats=repeats)
    torch.cuda.synchronize()
    device.check()
    for steps in made.values():
        steps.check()  # finds faults of the replays
    return {
        "batch": batch,
        "us": us,
        "bytes": bytes_,
        "flashinfer_tb_per_s": round(bytes_["flashinfer"] / us["flashinfer"] / 1e6, 3),
        # Without the plan, which the native format needs as well.
        "lists_bytes": lists,
        "lists_us": round(us["flashinfer"] - us["native"], 2),
        "fill_tb_per_s": round(lists / us["fill"] / 1e6, 3),
        "flashinfer_over_native": round(us["flashinfer"] / us["native"], 2),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    random.seed(1)
    device.init()
    sglang = importlib.util.find_spec("sglang") is not None
    found = versions() | ({"sglang": importlib.metadata.version("sglang")} if sglang else {})
    rows: list[dict[str, Any]] = []
    result = {
        "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "device": torch.cuda.get_device_name(),
        "driver": driver(), "versions": found, "tree": [SHAPE.topk, SHAPE.steps, SHAPE.draft_tokens],
        "length": LENGTH, "page_size": PAGE, "draft_steps": SHAPE.steps, "checked": "equal to the host planner's",
        "rows": rows,
    }  # fmt: skip
    for batch in (1, 16, 64):
        rows.append(measure(batch, args.repeats, sglang))
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
