"""FlashInfer's own compilation of the kernels that specrs uses, as an install without compiled ones does it.

Each head size and type is asked for in a process of its own, all beside each other, by attention over a pass of each
phase, whose results are compared with float64. FlashInfer compiles with nvcc and ninja into its cache
(``FLASHINFER_WORKSPACE_BASE``), which has to be empty. ``first`` are the seconds of the first pass, compilation
included; ``again`` those of a new process that finds the module there.

    python benches/gpu/flashinfer_compiles.py [--json FILE] [--only float16:64,float16:128]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "python"))
import torch

from common import commit, versions
from pass_world import PHASES, Heads, Pass, Requests
from specrs.backends.packages import FLASHINFER, TRITON
from specrs.measuring.machine import driver

CASES = [(dtype, dim) for dtype in ("bfloat16", "float16") for dim in (64, 128, 256)]
NEAR = 2**-6  # of a few roundings, near 1


def passes(dtype: str, dim: int) -> None:
    """Run each phase and print how long the first took, and the largest difference from float64."""
    seconds, most = list[float](), 0.0
    for phase in PHASES:
        one = Pass(
            Requests(5, (4, 3, 17), 16, "dense", context=500), phase, Heads(1, 2, dim, getattr(torch, dtype)),
            format="flashinfer",
        )  # fmt: skip
        begun = time.perf_counter()
        got = one.kernels(torch.device("cuda", 0))
        seconds.append(time.perf_counter() - begun)
        most = max(most, float((got - one.reference()).abs().max()))
    assert most < NEAR, most
    print(json.dumps({"seconds": round(seconds[0], 1), "largest_difference": round(most, 5)}), flush=True)


def main() -> None:
    """Measure, print and write; a case that fails fails this."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="cases as TYPE:SIZE, with commas between")
    parser.add_argument("--case", help="one case in this process, as `main` runs each")
    args = parser.parse_args()
    if args.case:
        dtype, dim = args.case.split(":")
        passes(dtype, int(dim))
        return
    cases = args.only.split(",") if args.only else [f"{dtype}:{dim}" for dtype, dim in CASES]
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout.split("release ")[1]
    result: dict[str, Any] = {
        "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "device": torch.cuda.get_device_name(),
        "driver": driver(), "nvcc": nvcc.split(",")[0],
        "versions": versions() | {p.name: p.installed() for p in (FLASHINFER, TRITON)}, "rows": [],
    }  # fmt: skip
    rows: dict[str, dict[str, Any]] = {case: {"case": case} for case in cases}
    for name in ("first", "again"):
        begun = time.perf_counter()
        running = {
            case: subprocess.Popen([sys.executable, __file__, "--case", case], stdout=subprocess.PIPE, text=True)
            for case in cases
        }
        for case, process in running.items():
            said = process.communicate()[0].splitlines()
            if process.returncode:
                sys.exit(f"{case}: failed")
            told = json.loads(said[-1])
            rows[case] |= {name: told["seconds"], "largest_difference": told["largest_difference"]}
        result[f"all_{name}"] = round(time.perf_counter() - begun, 1)
    result["rows"] = list(rows.values())
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
