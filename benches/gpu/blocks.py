"""Heads that draft all levels in one pass on a GPU: seconds of their rounds beside plain ones.

Weights are random, and the target has the shape of Llama-3.2-1B. Drafts of a random head are hardly ever accepted: what
is measured is how long a round takes with a block's drafts: with trees that the round makes on the device, and with
trees of the host, of which also the part that drafts is measured (`CudaBlocks.lists` and the making of trees). Tokens
must be those of plain decoding.

    python benches/gpu/blocks.py [--json FILE] [--rounds 24] [--batches 1,8] [--context 1024] [--forms DFlash,DFlash2]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "python"))
import blockzoo
import headzoo
import reference_blocks
import reference_heads
from common import commit, versions
from reference_blocks import Block
from reference_heads import Sizes
from specrs import LLM
from specrs.engine.devices.block_lists import BlockTrees
from specrs.measuring.machine import driver
from specrs.measuring.rounds import random_prompts, rounds, steady
from specrs.measuring.shapes import shape_config
from specrs.models import LlamaModel, ModelConfig

HEAD = Block(
    rows=16, mask=3, hidden=2048, target_hidden=2048, heads=32, kv_heads=8, head_dim=64, inner=8192, vocab=128256,
    layers=5, streams=(2, 5, 8, 11, 14), eps=1e-5, rank=256, state=1024,
)  # fmt: skip
FORMS: dict[str, tuple[str, Block | Sizes]] = {
    "DFlash": ("DFlash", HEAD),
    "JetSpec": ("JetSpec", replace(HEAD, causal=True)),
    "DSpark": ("DSpark", replace(HEAD, rows=7, layers=2, streams=(7, 14), anchor=True, markov="vanilla")),
    "DFlash2": ("DFlash2", replace(HEAD, taps=2, candidates=16)),
    "P-EAGLE": (
        "P-EAGLE",
        Sizes(hidden=2048, target_hidden=2048, heads=32, kv_heads=8, head_dim=64, inner=8192, vocab=128256,
              draft_vocab=None, layers=4, streams=(2, 8, 13), mask=3, levels=8),
    ),
}  # fmt: skip
TREES = {
    "DFlash": (8, 15, 32), "JetSpec": (8, 15, 32), "DSpark": (8, 7, 32), "DFlash2": (8, 8, 32), "P-EAGLE": (8, 8, 32),
}  # fmt: skip


def write_target(directory: Path) -> None:
    """A target of random weights, drawn on the GPU."""
    raw = shape_config("llama-3.2-1b")
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    shapes = LlamaModel.shapes(ModelConfig.from_dict(raw))
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        tensors[name] = (1.0 + 0.1 * drawn if len(shape) == 1 else drawn * shape[-1] ** -0.5).cpu()
    save_file(tensors, directory / "model.safetensors")


def drafting(llm: LLM, batch: int) -> float:
    """Seconds of the pass that drafts for so many requests, as the cost model measures it."""
    executor: Any = llm._runner.executor
    with executor.entered():
        return float(executor._drafting(batch, llm._runner.pages))


def main() -> None:
    """Measure every form and batch, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--forms", default=",".join(FORMS))
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": torch.cuda.get_device_name(), "driver": driver(), "versions": versions(),
        "target": "random weights in the shape of Llama-3.2-1B", "context": args.context, "rows": rows,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_target(root / "target")
        forms = args.forms.split(",")
        for name, (form, sizes) in ((name, FORMS[name]) for name in forms):
            steps = isinstance(sizes, Sizes)
            weights = reference_heads.random_head(sizes, 1) if steps else reference_blocks.random_block(sizes, 1)
            half = {key: value.bfloat16() for key, value in weights.items()}
            (headzoo.save_head if steps else blockzoo.save_block)(root / name, form, sizes, 16, half)
        for batch in map(int, args.batches.split(",")):
            prompts = random_prompts(batch, args.context, 128000)
            options: dict[str, Any] = {
                "device": "cuda", "max_batch": batch, "page_size": 16, "prefill_chunk": 2048, "prefix_cache": False,
                "max_context_len": args.context + 8 * args.rounds + batch * args.context // 2048 + 256,
            }  # fmt: skip
            wanted: list[list[int]] = []
            for name, trees in (("plain", "none"), *((name, made) for name in forms for made in ("device", "host"))):
                extra: dict[str, Any] = {"speculative": False} if name == "plain" else {"tree": TREES[name]}
                made = mock.patch.object(BlockTrees, "of", return_value=None) if trees == "host" else nullcontext()
                with made, LLM(root / "target", None if name == "plain" else root / name, **options, **extra) as llm:
                    rounds(llm, [p[:64] for p in prompts], args.rounds)  # makes the rounds' graphs
                    tokens, figures = steady(llm, prompts, args.rounds)
                    row = {"form": name, "trees": trees, "batch": batch, **figures}
                    if name == "plain":
                        wanted = tokens
                    else:
                        row["tree"] = TREES[name]
                        if trees == "host":
                            row["drafting_ms"] = round(drafting(llm, batch) * 1e3, 3)
                        short = [min(map(len, pair)) for pair in zip(tokens, wanted, strict=True)]
                        row["same_tokens"] = all(a[:n] == b[:n] for a, b, n in zip(tokens, wanted, short, strict=True))
                rows.append(row)
                print(row, flush=True)
                if args.json:
                    args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
