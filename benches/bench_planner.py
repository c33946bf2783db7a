"""Goal 2: the host arrays of one round against what sglang computes on the host.

specrs plans the whole round: the draft steps' slots, positions and ancestor bits, verify's, the commit's moves, and
draft_extend's; every check included. The figure is the median of single rounds on a live pool in a release binary
(``examples/planner_driver.rs``): K = 8, S = 6, V = 64, committed lengths about 8k.

Of sglang 0.5.23, three functions that make a round's arrays on the host, unchanged, on CPU tensors and for the same
batch, in their path for K > 1 and P > 1 (that for P = 1 needs its CPU kernels):

* ``page_aligned_decode_alloc_lens``: what each request allocates for the round;
* ``prepare_for_draft`` (with ``duplicate_prefix_tail_to_draft_branches``, the KV copy itself left out): the draft's
  slots and positions;
* ``draft_decode_set_expand_metadata`` (compiled by ``torch.compile``, as there): lengths and page table of the
  branches, once for each of the S - 1 steps.

The verify's, the commit's and the draft-extend's arrays are device kernels there, so the peer does less than specrs
here. Its draft slots are checked against the closed form of the holey layout. All take turns in one run.
Writes ``results/planner.json``.
"""

from __future__ import annotations

import argparse
import ast
import gc
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from common import Driver, interleave, release_binary, seconds, unpack, wheel, write_result

SGLANG = "0.5.23"
K, S, V, L = 8, 6, 64, 8192
BATCHES = (1, 16, 64, 256)
PAGES = (16, 64)
GOAL_US = {1: 1.5, 16: 4.0, 64: 10.0, 256: 35.0}
NOTE = (
    "Batches of 64 and 256 are over the goal: a request costs about 0.19 us on one thread. By perf samples at P = 64, "
    "batch 256, the trees' positions and bits are a quarter of it, the slots of draft regions and verify a third, "
    "the look-up of rows, twice a round, a tenth. At P = 1 the difference is probably the page table's lines, which "
    "the pool's own work between the plans (130 pages a request) has pushed out of the near cache."
)
FILES = {
    "page_aligned_decode_alloc_lens": "sglang/srt/mem_cache/allocation_sizing.py",
    "duplicate_prefix_tail_to_draft_branches": "sglang/srt/speculative/eagle_worker_common.py",
    "prepare_for_draft": "sglang/srt/speculative/eagle_worker_common.py",
    "draft_decode_set_expand_metadata": "sglang/srt/layers/attention/flashattention_backend.py",
}


def functions() -> SimpleNamespace:
    """sglang's functions by name, each compiled from its file's syntax tree."""
    folder = unpack(wheel("sglang", SGLANG), set(FILES.values()))
    hidden = SimpleNamespace(NULL=0, LAST=1)
    names: dict[str, Any] = {
        "torch": torch,
        "_is_cpu": True,
        "get_compiler_backend": lambda: "inductor",  # sglang's answer on a CPU
        "CaptureHiddenMode": hidden,
        "ForwardBatch": SimpleNamespace(init_new=lambda *_, **__: None),
    }
    future = ast.parse("from __future__ import annotations").body
    for name, file in FILES.items():
        path = folder / file
        found = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef) and n.name == name]
        assert len(found) == 1, f"{name} is not in {file}"
        exec(compile(ast.Module([*future, found[0]], []), str(path), "exec"), names)
    return SimpleNamespace(**{name: names[name] for name in FILES})


class Peer:
    """A batch as sglang's functions want it."""

    def __init__(self, f: SimpleNamespace, page: int, batch: int) -> None:
        self.f, self.page, self.batch = f, page, batch
        branch = -(-(page - 1 + S) // page) * page  # positions of a branch, at most
        self.reserve = 2 * max(branch * K, V)
        width = -(-(2 * L + max(4 + V, self.reserve + page - 1)) // page) * page
        generator = torch.Generator().manual_seed(batch)
        self.lens = torch.randint(L - 500, L, (batch,), generator=generator)
        order = torch.randperm(batch * width // page, generator=generator)[:, None] + 1
        slots = (order * page + torch.arange(page)).reshape(batch, width)
        self.table = slots.to(torch.int32)
        self.reqs = [
            SimpleNamespace(kv=SimpleNamespace(kv_committed_len=n, kv_allocated_len=-(-n // page) * page))
            for n in self.lens.tolist()
        ]
        allocator = SimpleNamespace(page_size=page)
        self.schedule = SimpleNamespace(
            forward_mode=SimpleNamespace(is_idle=lambda: False),
            seq_lens=self.lens,
            req_pool_indices=torch.arange(batch),
            token_to_kv_pool_allocator=allocator,
            device="cpu",
            multimodal_inputs=[],
            out_cache_loc=torch.empty(0),
        )
        self.pool = SimpleNamespace(req_to_token=self.table)
        self.runner = SimpleNamespace(
            token_to_kv_pool=SimpleNamespace(move_kv_cache=lambda *_: None),
            spec_algorithm=SimpleNamespace(is_standalone=lambda: False),
            model_config=SimpleNamespace(model_is_mrope=False),
        )
        self.steps = [
            (torch.zeros(batch * K, dtype=torch.int32), torch.zeros(batch * K, t + 2, dtype=torch.int32))
            for t in range(S - 1)
        ]

    def alloc_lens(self) -> object:
        """Allocation of the round."""
        return self.f.page_aligned_decode_alloc_lens(self.reqs, reserve=self.reserve, page_size=self.page)

    def prepare(self) -> torch.Tensor:
        """Slots of the draft's branches and steps, flat [batch * K * S]."""
        self.f.prepare_for_draft(SimpleNamespace(), self.pool, self.schedule, None, self.runner, K, S)
        slots: torch.Tensor = self.schedule.out_cache_loc
        return slots

    def expand(self) -> None:
        """Branch metadata of each step."""
        slots = self.schedule.out_cache_loc.view(-1, S)
        for t, (seqlens, table) in enumerate(self.steps):
            self.f.draft_decode_set_expand_metadata(
                seqlens, table, self.lens % self.page, t + 1, slots[:, : t + 1], K, self.page
            )

    def check(self) -> None:
        """Check that the draft's slots are those of the holey layout: ``base + b*n*P + r + s``."""
        got = self.prepare().view(self.batch, K, S)
        for i, n in enumerate(self.lens.tolist()):
            rest = n % self.page
            pages = -(-(rest + S) // self.page)
            for b in range(K):
                first = n - rest + b * pages * self.page + rest
                assert torch.equal(got[i, b], self.table[i, first : first + S].to(got.dtype)), (i, b)


def peer_times(peer: Peer, samples: dict[str, list[float]]) -> float:
    """Seconds of the three functions together; each one's own go to ``samples``."""
    total = 0.0
    calls: dict[str, Callable[[], object]] = {
        "page_aligned_decode_alloc_lens": peer.alloc_lens,
        "prepare_for_draft": peer.prepare,
        "draft_decode_set_expand_metadata": peer.expand,
    }
    for name, call in calls.items():
        took = seconds(call)
        samples.setdefault(name, []).append(took)
        total += took
    return total


def ours(driver: Driver, page: int, batch: int, lows: list[float]) -> float:
    """Seconds of one round of specrs, the median of 40 ms of rounds; the 10th percentile goes to ``lows``."""
    answer = driver.ask(page, batch, 40)
    lows.append(answer["p10_ns"] / 1e3)
    return float(answer["median_ns"]) / 1e9


def main() -> None:
    """Measure every batch and page size and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="turns of each candidate")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the arrays are small; more threads cost more than they bring
    f, driver = functions(), Driver(release_binary("planner_driver"))
    rows: list[dict[str, Any]] = []
    for batch in BATCHES:
        for page in (1, *PAGES):
            lows: list[float] = []
            parts: dict[str, list[float]] = {}
            candidates: dict[str, Callable[[], float]] = {"specrs": partial(ours, driver, page, batch, lows)}
            if page > 1:
                peer = Peer(f, page, batch)
                peer.check()
                candidates["sglang"] = partial(peer_times, peer, parts)
            gc.disable()
            medians = interleave(candidates, args.repeats)
            gc.enable()
            row: dict[str, Any] = {
                "batch": batch,
                "page_size": page,
                "specrs_us": round(medians["specrs"] * 1e6, 2),
                "specrs_p10_us": round(statistics.median(lows), 2),
                "goal_us": GOAL_US[batch],
            }
            if page > 1:
                row["sglang_us"] = round(medians["sglang"] * 1e6, 1)
                row["sglang_parts_us"] = {n: round(statistics.median(t) * 1e6, 1) for n, t in parts.items()}
                row["ratio"] = round(medians["sglang"] / medians["specrs"], 1)
            rows.append(row)
            print(row)
    driver.close()
    shapes = {"topk": K, "steps": S, "draft_tokens": V, "length": f"{L - 500}..{L}"}
    write_result(
        Path(__file__).stem.removeprefix("bench_"), {"peer": f"sglang {SGLANG}", **shapes, "note": NOTE, "rounds": rows}
    )


if __name__ == "__main__":
    main()
