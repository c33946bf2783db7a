"""The examples under sglang on a GPU: its attention layer over specrs's plans, specrs's verification as its plugin.

The layer runs `examples/sglang_layer.py`. The plugin's engine runs beside one without drafts, both sglang's real engine
in processes of their own, on the model in the package: greedy tokens of held-out prompts are compared, sampled ones
drawn. An engine's seconds are those of one call that generates all of them, after one that is not counted; the other
engine and what else has the machine at that time are in them. sglang and its packages are on ``PYTHONPATH``
(`peer_sglang/bundle.py` makes a folder of them).

    PYTHONPATH=BUNDLE/site:python python benches/gpu/sglang_examples.py [--json FILE] [--tokens 96] [--requests 4]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import torch

from common import commit, versions
from specrs import assets
from specrs.measuring.machine import driver

ROOT = Path(__file__).parents[2]
MARK, NODES = "MEASURED ", 16
PARTS = ("plain", "plugin")


def engine(part: str, tokens: int, requests: int) -> None:
    """Run one of sglang's engines and print its tokens."""
    import sglang_plugin
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(assets.model_dir() / "tokenizer.json"))
    prompts = [encoder.encode(text).ids for text in assets.heldout_prompts()[:requests]]
    drafts: dict[str, Any] = {
        "port": 31000 + 100 * PARTS.index(part), "max_total_tokens": 32768, "dtype": "bfloat16",
        "cuda_graph_bs_decode": [1, 2, 4, 8], "disable_prefill_cuda_graph": True, "watchdog_timeout": 150,
    }  # fmt: skip
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SGLANG_TRACE"] = str(Path(folder) / "trace")  # the bundle's scheduler writes a line a step
        if part == "plugin":
            sglang_plugin.found_by_sglang(Path(folder))
            drafts |= {"speculative_algorithm": sglang_plugin.NAME, "speculative_num_draft_tokens": NODES}
        outputs, seconds = sglang_plugin.run(str(assets.model_dir()), prompts, tokens, "triton", **drafts)
    rounds = [out["meta_info"].get("spec_verify_ct") for out in outputs]
    row = {"tokens": [out["output_ids"] for out in outputs], "seconds": round(seconds, 4), "rounds": rounds}
    print(MARK + json.dumps({**row, "all_seconds": round(time.perf_counter() - began, 1)}), flush=True)


def parted(want: list[int], got: list[int]) -> int | None:
    """The first position at which tokens differ."""
    return next((i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b), None)


def main() -> None:
    """Run, print and write; an example that fails fails this."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--part", choices=PARTS, help="run one engine alone, as `main` does for each")
    args = parser.parse_args()
    if args.part:
        engine(args.part, args.tokens, args.requests)
        return
    found = versions() | {name: importlib.metadata.version(name) for name in ("triton", "sglang", "sglang-kernel")}
    result: dict[str, Any] = {
        "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "device": torch.cuda.get_device_name(),
        "driver": driver(), "versions": found, "model": "pystdlib-16m", "requests": args.requests,
        "tokens": args.tokens, "nodes": NODES,
    }  # fmt: skip

    def start(*command: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)

    sizes = ["--tokens", str(args.tokens), "--requests", str(args.requests)]
    engines = {part: start(__file__, "--part", part, *sizes) for part in PARTS}
    layer = start(str(ROOT / "examples" / "sglang_layer.py"), "--device", "cuda")
    result["layer"] = layer.communicate()[0].strip()
    print(result["layer"], flush=True)
    failed = ["layer"] if layer.returncode else []
    for part, process in engines.items():
        said = [line for line in process.communicate()[0].splitlines() if line.startswith(MARK)]
        if process.returncode or not said:
            failed.append(part)
        else:
            result[part] = json.loads(said[-1].removeprefix(MARK))
    if not failed:
        plain, plugin = (result[part]["tokens"] for part in PARTS)
        result["parted_at"] = [parted(a, b) for a, b in zip(plain, plugin, strict=True)]
        result["tokens_a_round"] = [round(args.tokens / n, 2) for n in result["plugin"]["rounds"]]
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print({name: of for name, of in result.items() if name not in PARTS})
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
