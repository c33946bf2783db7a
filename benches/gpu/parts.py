"""Launches of a round beside the model, and the cost of exactness in the model's products: goals 3 to 6, 9 and 13.

Each part is a CUDA graph of many launches, timed by events; the figure is the median over replays of the time of one.
Where torch has the same work (argmax, topk over softmax, a linear with whatever algorithm cuBLAS likes best), it takes
turns with ours in the same run, and results are compared first. Peers' own kernels are not on this machine; their
figures stand in ``benches/README.md``.

    python benches/gpu/parts.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

sys.path.insert(0, str(Path(__file__).parents[1]))
from timing import stream, times

from common import commit, versions
from specrs import _specrs as core
from specrs import device
from specrs._specrs import Geometry, TreeShape
from specrs.backends.base import Format
from specrs.measuring.machine import driver
from specrs.operands import AcceptArrays, BeamArrays, BuiltTrees, MoveArrays, PlanArrays, SamplerArrays

SHAPE = TreeShape(8, 6, 64)
CONTEXT, LENGTH = 8192 + 256, 8192
VOCAB, DRAFT_VOCAB = 128256, 32000
CUDA = torch.device("cuda")
LAYER = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def i32(*shape: int, fill: int = 0) -> torch.Tensor:
    return torch.full(shape, fill, dtype=torch.int32, device=CUDA)


class Round:
    """Arrays of a round of ``batch`` requests, all live, of `LENGTH` tokens each, planned in a backend's format."""

    def __init__(self, batch: int, page: int, format: Format = "native") -> None:
        k, s, v, c = SHAPE.topk, SHAPE.steps, SHAPE.draft_tokens, SHAPE.candidates
        self.batch, self.page, self.path, self.format = batch, page, s + 1, format
        self.geometry = Geometry(batch, CONTEXT, page, SHAPE)
        pages = self.geometry.row_pages
        self.num_pages = 1 + batch * pages
        self.table = (torch.randperm(batch * pages, device=CUDA, dtype=torch.int32) + 1).view(batch, pages)
        self.rows = torch.arange(batch, dtype=torch.int32, device=CUDA)
        self.versions = torch.zeros(batch, dtype=torch.int64, device=CUDA)
        self.lens, self.live = i32(batch, fill=LENGTH), i32(1, fill=batch)
        self.roots, self.depths, self.nodes = i32(batch), i32(batch, fill=s), i32(batch, fill=v)
        self.beams = BeamArrays(
            scores=torch.zeros(batch * c, device=CUDA), candidate_tokens=i32(batch * c),
            candidate_parents=i32(batch * c), beams=i32(batch * k), tokens=i32(batch * k), parents=i32(batch * k),
            ancestors=torch.zeros(batch * k, dtype=torch.int64, device=CUDA), sound=i32(batch),
        )  # fmt: skip
        self.trees = BuiltTrees(
            offsets=i32(batch + 1), tokens=i32(batch * v), depths=i32(batch * v), parents=i32(batch * v),
            next_child=i32(batch * v), next_sibling=i32(batch * v), scores=torch.zeros(batch * v, device=CUDA),
        )  # fmt: skip
        self.accepts = AcceptArrays(
            offsets=i32(batch + 1), paths=i32(batch * self.path), tokens=i32(batch * self.path),
            rows=i32(batch * self.path), roots=i32(batch), new_lens=i32(batch), faults=i32(batch),
        )  # fmt: skip
        self.moves = MoveArrays(
            src=i32(batch * self.path), dst=i32(batch * self.path), offsets=i32(batch + 1)
        )  # fmt: skip
        self.plans = {
            name: PlanArrays(
                rows=i32(batch), versions=torch.zeros(batch, dtype=torch.int64, device=CUDA),
                qo_indptr=i32(batch + 1), prefix_lens=i32(batch), positions=i32(n), out_slots=i32(n),
                mask=torch.zeros(n * words, dtype=torch.int64, device=CUDA),
            )
            for name, n, words in (("draft", batch * k, 1), ("verify", batch * v, 1), ("extend", batch * self.path, 0))
        }  # fmt: skip
        self.masks = "packed" if format == "flashinfer" else "both"
        planner = core.Planner(self.geometry, core.Pool(self.num_pages, page, batch, pages), format, self.masks)
        bound, passes = core.DeviceLens(batch, CONTEXT), [("draft", step) for step in range(s)]
        self.arrays = {
            (name, step): {
                array: torch.zeros(size["shape"], dtype=getattr(torch, size["dtype"]), device=CUDA)
                for array, size in planner.sizes(name, bound, step).items()
            }
            for name, step in (*passes, ("verify", None), ("extend", None))
        }
        scratch = core._device_draft_scratch(SHAPE, batch, VOCAB, CUDA.index or 0)
        self.selecting = torch.zeros(scratch, dtype=torch.int64, device=CUDA)

    def select(self, step: int, logits: torch.Tensor, to_target: torch.Tensor | None = None) -> None:
        core._device_draft_select(
            step=step, logits=logits, to_target=to_target, vocab=VOCAB, live=self.live, shape=SHAPE, beams=self.beams,
            scratch=self.selecting, stream=stream(),
        )  # fmt: skip

    def build(self) -> None:
        core._device_tree_build(
            shape=SHAPE, beams=self.beams, roots=self.roots, max_depths=self.depths, max_nodes=self.nodes,
            min_score=None, live=self.live, trees=self.trees, masks=None, stream=stream(),
        )  # fmt: skip

    def plan(self, name: Any, number: int | None = None, **step: torch.Tensor) -> None:
        core._device_plan(
            geometry=self.geometry, phase=name, draft_step=number, table=self.table, num_pages=self.num_pages,
            rows=self.rows, versions=self.versions, lens=self.lens, live=self.live, **step, plan=self.plans[name],
            format=self.format, masks=self.masks, arrays=self.arrays[name, number], stream=stream(),
        )  # fmt: skip

    def commit(self) -> None:
        accepts, moves = self.accepts, self.moves if self.page > 1 else None
        core._device_kv_commit(
            offsets=accepts.offsets, paths=accepts.paths, new_lens=accepts.new_lens, table=self.table, rows=self.rows,
            live=self.live, num_pages=self.num_pages, page_size=self.page, max_nodes=SHAPE.draft_tokens, moves=moves,
            stream=stream(),
        )  # fmt: skip

    def draft(self, vocab: int) -> list[torch.Tensor]:
        """Draft a tree; the logits of its steps."""
        rows = [self.batch, *[self.batch * SHAPE.topk] * (SHAPE.steps - 1)]
        logits = [torch.randn(n, vocab, device=CUDA) * 3 for n in rows]
        self.ancestors = []  # bits of the beams after each step
        for step, scores in enumerate(logits):
            self.select(step, scores)
            self.ancestors.append(self.beams.ancestors.clone())
        self.build()
        return logits

    def metadata(self) -> None:
        """Everything of a round but models, scores and KV copies."""
        for step in range(SHAPE.steps - 1):
            self.plan("draft", step, ancestors=self.ancestors[step])
        self.build()
        self.plan("verify", offsets=self.trees.offsets, parents=self.trees.parents)
        self.commit()
        self.plan("extend", offsets=self.accepts.offsets)


def steered(trees: BuiltTrees, batch: int) -> torch.Tensor:
    """Logits [batch * V, VOCAB] under which three drafts of each tree are accepted."""
    logits = torch.randn(batch * SHAPE.draft_tokens, VOCAB, device=CUDA)
    offsets, tokens, parents = (t.tolist() for t in (trees.offsets, trees.tokens, trees.parents))
    for first in offsets[:batch]:
        node = 0
        for _ in range(3):
            child = next((j for j in range(1, SHAPE.draft_tokens) if parents[first + j] == node), None)
            if child is None:
                break
            logits[first + node, tokens[first + child]] = 50.0
            node = child
    return logits


def verification(r: Round, logits: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Greedy in both modes, sampled, and torch's argmax over all rows."""
    batch, path = r.batch, r.path
    common: dict[str, Any] = {
        "logits": logits, "trees": r.trees, "lens": r.lens, "live": r.live, "max_nodes": SHAPE.draft_tokens,
        "max_path": path, "accepts": r.accepts,
    }  # fmt: skip
    words = core._device_verify_scratch(logits.shape[0], batch, path)
    scratch = {name: torch.zeros(words, dtype=torch.int64, device=CUDA) for name in ("w", "f", "s")}
    samplers = [core.Sampler(VOCAB, [1, 2, 3], temperature=0.8, top_p=0.9, seed=i) for i in range(batch)]
    drawn = {name: from_dlpack(a).to(CUDA) for name, a in core._device_samplers(samplers).items()}
    by = SamplerArrays(
        **{name: a if a.numel() else torch.zeros(1, dtype=a.dtype, device=CUDA) for name, a in drawn.items()}
    )

    def greedy(name: str, full: bool) -> None:
        core._device_verify_greedy(**common, scratch=scratch[name], full=full, stream=stream())

    def sampled() -> None:
        core._device_sample_verify(**common, samplers=by, scratch=scratch["s"], stream=stream())

    return {
        "sampled": sampled,
        "greedy_full": lambda: greedy("f", True),
        "greedy_walk": lambda: greedy("w", False),
        "torch_argmax": lambda: logits.argmax(1),
    }


class Layer:
    """The products of one layer for `rows` rows, by our classes of bits and by torch."""

    def __init__(self, rows: int, max_rows: int) -> None:
        opened = device.products()
        self.rows = rows
        weights = {n: torch.randn(shape, device=CUDA).mul_(shape[1] ** -0.5).bfloat16() for n, shape in LAYER.items()}
        # Several layers' worth, so that no weight is found in the L2.
        self.sets = [weights, {n: w.clone() for n, w in weights.items()}]
        self.linears = [{n: opened.linear(w, max_rows) for n, w in s.items()} for s in self.sets]
        self.inputs = {n: torch.randn(rows, w.shape[1], device=CUDA).bfloat16() for n, w in weights.items()}
        self.outputs = {n: torch.empty(rows, w.shape[0], device=CUDA, dtype=torch.bfloat16) for n, w in weights.items()}
        space = max(li.workspace_bytes for s in self.linears for li in s.values()) + 16
        self.space = torch.empty(space, dtype=torch.uint8, device=CUDA)

    def ours(self, name: str, at: int) -> None:
        self.linears[at][name].launch(self.rows, self.inputs[name], self.outputs[name], self.space, stream())

    def torchs(self, name: str, at: int) -> None:
        torch.mm(self.inputs[name], self.sets[at][name].t(), out=self.outputs[name])

    def every(self, product: Callable[[str, int], None]) -> None:
        for at, weights in enumerate(self.sets):
            for name in weights:
                product(name, at)


def products(rows: int) -> dict[str, float]:
    """The products of one layer with our classes of bits, and torch's."""
    layer = Layer(rows, 2048)
    layer.every(layer.ours)
    want = {n: y.clone() for n, y in layer.outputs.items()}
    layer.every(layer.torchs)
    for n, y in layer.outputs.items():
        torch.testing.assert_close(y, want[n], rtol=2e-2, atol=2e-2)
    ours, torchs = lambda: layer.every(layer.ours), lambda: layer.every(layer.torchs)
    got = times({"ours": ours, "torch": torchs}, launches=4)
    return {"ours_us": got["ours"] / 2, "torch_us": got["torch"] / 2, "ratio": round(got["ours"] / got["torch"], 4)}


def batch_of(batch: int) -> dict[str, Any]:
    """Goals 3 to 6 and 9 for a batch."""
    r = Round(batch, 1)
    out: dict[str, Any] = {}
    for vocab in (DRAFT_VOCAB, VOCAB):
        logits = r.draft(vocab)[: SHAPE.steps - 1]

        def select(logits: list[torch.Tensor] = logits) -> None:
            for step, scores in enumerate(logits):
                r.select(step, scores)

        def torchs(logits: list[torch.Tensor] = logits) -> None:
            for scores in logits:
                scores.softmax(1).topk(SHAPE.topk)

        got = times({"specrs": select, "torch": torchs}, launches=4)
        out[f"select_5_steps_{vocab}_us"] = got["specrs"]
        out[f"softmax_topk_5_steps_{vocab}_us"] = got["torch"]
    r.draft(DRAFT_VOCAB)
    logits = steered(r.trees, batch)
    parts = verification(r, logits)
    for part in parts.values():
        part()
    tokens = logits.argmax(1)
    last = r.accepts.offsets[1:] - 1
    assert torch.equal(r.accepts.tokens[last.long()], tokens[r.accepts.rows[last.long()].long()].int()), "argmax"
    out["accepted_nodes"] = int(r.accepts.offsets[-1])
    out |= {f"{name}_us": us for name, us in times(parts, launches=4).items()}
    parts["greedy_walk"]()
    out |= {f"{name}_us": us for name, us in times({"metadata_page_1": r.metadata, "tree_build": r.build}).items()}
    out["commit_page_1_us"] = times({"commit": r.commit})["commit"]
    paged = Round(batch, 64)
    paged.draft(DRAFT_VOCAB)
    for name in AcceptArrays.__slots__:
        getattr(paged.accepts, name).copy_(getattr(r.accepts, name))
    out["metadata_page_64_us"] = times({"metadata": paged.metadata})["metadata"]
    torch.cuda.synchronize()
    device.check()
    return out


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    random.seed(1)
    torch.manual_seed(1)
    device.init()
    result: dict[str, Any] = {
        "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "device": torch.cuda.get_device_name(),
        "driver": driver(), "versions": versions(), "length": LENGTH,
        "tree": [SHAPE.topk, SHAPE.steps, SHAPE.draft_tokens],
        "vocabularies": [DRAFT_VOCAB, VOCAB], "metadata_launches": SHAPE.steps - 1 + 4, "batches": {}, "layer": {},
    }  # fmt: skip
    for name, run, cases in (("batches", batch_of, (1, 16, 64)), ("layer", products, (1, 16, 64, 128, 256))):
        for case in cases:
            result[name][case] = run(case)
            print(name, case, json.dumps(result[name][case]), flush=True)
            torch.cuda.empty_cache()
            if args.json:
                args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
