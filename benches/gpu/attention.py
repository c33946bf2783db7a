"""Paged attention at Llama-3.1-8B's shape (8 heads of 128, group 4, bf16): decode, verification of trees, draft steps.

A time is of one call (all kernels) in a CUDA graph of launches over rotating layers of random pages, more bytes than
the L2 holds; medians of interleaved replays. The floor is the larger of two times: the keys' and values' bytes over the
copy bandwidth that was measured in the same run, and the multiplications over 790 TFLOP/s. torch's
scaled_dot_product_attention reads contiguous keys and, for trees, the prefix alone without a mask: less work than the
kernel has. Outputs are compared with it first where both compute the same.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import copy_bandwidth, graph_of, medians

from specrs import _specrs as core
from specrs import device

KV_HEADS, GROUP, DIM, PAGE = 8, 4, 128, 16
HEADS = KV_HEADS * GROUP
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
PEAK_FLOPS = 790e12
ROTATE_BYTES = 400 << 20


def words_of(v: int) -> list[int]:
    """Ancestor words of a tree of `v` nodes with eight children of the root and chains below them."""
    parents = [-1] + [0 if n <= 8 else n - 8 for n in range(1, v)]
    words: list[int] = []
    for n in range(v):
        words.append((words[parents[n]] if n else 0) | 1 << n)
    return [w - 2**64 if w >= 2**63 else w for w in words]


class Launches:
    """Launches of one batch over rotating layers."""

    def __init__(self, batch: int, length: int, nodes: int, draft: tuple[int, int] | None, max_context: int):
        tokens = length + 64
        pages = (tokens + PAGE - 1) // PAGE
        layers = max(2, min(32, ROTATE_BYTES // (batch * length * TOKEN_BYTES) + 1))
        self.layers = layers
        total = batch * pages + 1
        self.cache = torch.empty(layers, 2, total * PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        for layer in self.cache:
            layer.normal_()
        order = random.Random(1).sample(range(1, total), batch * pages)
        width = (max_context + 64 + PAGE - 1) // PAGE
        self.table = torch.zeros(batch, width, dtype=torch.int32)
        self.table[:, :pages] = torch.tensor(order, dtype=torch.int32).view(batch, pages)
        self.table = self.table.cuda()
        self.lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(0, batch * nodes + 1, nodes, dtype=torch.int32, device="cuda")
        words = None
        if draft is not None:
            k, s = draft
            words = [sum(1 << (b * s + t) for t in range(s // 2 + 1)) for b in range(k)] * batch
        elif nodes > 1:
            words = words_of(nodes) * batch
        self.mask = None if words is None else torch.tensor(words, dtype=torch.int64, device="cuda")
        self.q = torch.randn(batch * nodes, HEADS, DIM, device="cuda").bfloat16()
        self.out = torch.empty_like(self.q)
        self.draft, self.nodes, self.batch, self.length = draft, nodes, batch, length
        size = core._device_attention_workspace(
            torch.cuda.current_device(),
            requests=batch,
            max_queries=nodes,
            kv_heads=KV_HEADS,
            group=GROUP,
            head_dim=DIM,
            max_keys=width * PAGE,
        )
        self.workspace = torch.empty(size, dtype=torch.uint8, device="cuda")

    def run(self, layer: int) -> None:
        core._device_attention(
            self.cache,
            layer,
            self.q,
            self.out,
            table=self.table,
            page_size=PAGE,
            rows=None,
            lens=self.lens,
            starts=self.starts,
            mask=self.mask,
            draft=self.draft,
            max_queries=self.nodes,
            scale=DIM**-0.5,
            workspace=self.workspace,
            stream=torch.cuda.current_stream().cuda_stream,
        )

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [B, H, n, D] and the first layer's keys and values [B, KV, L, D], gathered."""
        slots = self.table.long()[:, :, None] * PAGE + torch.arange(PAGE, device="cuda")
        slots = slots.view(self.batch, -1)[:, : self.length]
        k, v = (self.cache[0, i][slots].transpose(1, 2).contiguous() for i in range(2))
        return self.q.view(self.batch, self.nodes, HEADS, DIM).transpose(1, 2), k, v


def measure(what: str, batch: int, length: int, nodes: int, bandwidth: float, a: argparse.Namespace) -> dict[str, Any]:
    draft = (8, 6) if what == "draft" else None
    launches = Launches(batch, length, nodes, draft, a.max_context)
    calls = max(launches.layers, 8)
    graphs = {"specrs": (graph_of([lambda i=i: launches.run(i % launches.layers) for i in range(calls)]), calls)}
    sdpa_layers = 1
    if not a.no_torch:
        q, k, v = launches.contiguous()
        # Rotate here too, where one layer fits the L2.
        sdpa_layers = max(1, min(16, ROTATE_BYTES // (batch * length * TOKEN_BYTES) + 1))
        pairs = [(k, v)] + [(k.clone(), v.clone()) for _ in range(sdpa_layers - 1)]

        def sdpa(i: int) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, *pairs[i % sdpa_layers], enable_gqa=True)

        if what == "decode":
            launches.lens -= 1  # its own key is the last of the first `length`
            launches.run(0)
            want = sdpa(0).transpose(1, 2).reshape(launches.out.shape)
            worst = float((launches.out.float() - want.float()).abs().max())
            if not worst < 2e-2:
                raise SystemExit(f"decode differs from torch by {worst} at batch {batch}, length {length}")
        n = max(sdpa_layers, 8)
        graphs["torch_sdpa"] = (graph_of([lambda i=i: sdpa(i) for i in range(n)]), n)
    us = medians(graphs, a.repeats)
    bytes_ = batch * length * TOKEN_BYTES
    flops = 4.0 * batch * nodes * HEADS * DIM * length
    floor = max(bytes_ / bandwidth, flops / PEAK_FLOPS) * 1e6
    row = {
        "what": what,
        "batch": batch,
        "context": length,
        "queries": nodes,
        "us": {k: round(v, 2) for k, v in us.items()},
        "floor_us": round(floor, 2),
        "of_floor": round(us["specrs"] / floor, 3),
        "gb_per_s": round(bytes_ / us["specrs"] / 1e3),
        "tflop_per_s": round(flops / us["specrs"] / 1e6),
        "workspace_mb": round(len(launches.workspace) / 2**20, 1),
    }
    if "torch_sdpa" in us:
        row["torch_over_specrs"] = round(us["torch_sdpa"] / us["specrs"], 3)
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--max-context", type=int, default=32768, help="what tables and workspaces are sized for")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a third of the cases")
    a = parser.parse_args()
    device.init()
    bandwidth = copy_bandwidth(a.repeats)
    rows = []
    cases = [("decode", 1), ("draft", 8), ("verify", 16), ("verify", 64)]
    for what, nodes in cases:
        for batch in (1, 16, 64):
            for length in (1024, 8192, 32768):
                if a.quick and (batch == 64 or length == 32768):
                    continue
                rows.append(measure(what, batch, length, nodes, bandwidth, a))
                torch.cuda.empty_cache()
    device.check()
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_gb_per_s": round(bandwidth / 1e9),
        "page_size": PAGE,
        "shapes": rows,
    }
    if a.json:
        a.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
