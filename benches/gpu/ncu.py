"""What bounds the kernels of each goal by Nsight Compute's counters: shares of the card's peaks, what warps wait for.

`ncu_cases.py` makes the launches, in a process for each group of cases. ncu runs each launch many times over, one at a
time, with memory restored in between, so that its microseconds are no goal's: the goals' own benches have those.
Clocks are as the card has them (``--clock-control none``). In groups whose operands come from memory ncu empties the
caches before each run (``flushed``). In the others it leaves them, so that all is found in the L2, as behind the launch
that writes it (``kept``).

Medians are told of the launches of one kernel with one grid:

* ``*_pct``: shares of the card's peak over the launch (memory, L2, SMs, tensor cores). ``issue_pct`` and pipes
  (``alu_pct``, ``fma_pct``, ``xu_pct``: integers and comparisons; multiplications; exponentials and conversions) are
  shares of the cycles in which an SM has warps, ``busy_sms_pct`` is the mean share of the launch in which one has any;
* ``stalls``: what a warp waits for between two instructions, as shares of that time, the largest first, those of 5% and
  more. ``selected`` is the issue itself.

ncu's lists are kept in a folder (``--raw``), and ``--read`` reads them again without a GPU.

    python benches/gpu/ncu.py --json FILE [--groups attention,logits,metadata,products] [--raw FOLDER [--read]]
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import commit, versions

CASES = Path(__file__).with_name("ncu_cases.py")
CACHES = {"attention": "flushed", "logits": "flushed", "metadata": "kept", "products": "flushed"}
CACHE_CONTROL = {"flushed": "all", "kept": "none"}
SPIN = "spin_kernel"  # stands in front of each case

COUNTERS = {
    "us": "gpu__time_duration.sum",
    "dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm_pct": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue_pct": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "alu_pct": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "fma_pct": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "xu_pct": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "occupancy_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "waves": "launch__waves_per_multiprocessor",
    "registers": "launch__registers_per_thread",
}
CYCLES, BUSY_CYCLES = "sm__cycles_elapsed.max", "sm__cycles_active.avg"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected",
    "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip
METRICS = (*COUNTERS.values(), CYCLES, BUSY_CYCLES, *(STALL.format(name) for name in STALLS))


def launches_of(text: str) -> list[dict[str, str]]:
    """The launches in what ``ncu --csv --page raw`` printed: a line of names, one of units, one for each launch."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 2:
        return []
    names, _, *rows = csv.reader(lines)
    return [dict(zip(names, row, strict=True)) for row in rows]


def number(text: str) -> float | None:
    """A counter's value; ``None`` where ncu has none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def by_case(launches: list[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
    """The launches behind each spin."""
    case: list[dict[str, str]] | None = None
    for launch in launches:
        if SPIN in launch["Kernel Name"]:
            if case is not None:
                yield case
            case = []
        elif case is not None:
            case.append(launch)
    if case is not None:
        yield case


def kernels_of(launches: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Figures of each kernel and grid of a case, in the order of their first launches."""
    same: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for launch in launches:
        key = launch["Kernel Name"], launch["Grid Size"], launch["Block Size"]
        same.setdefault(key, []).append(launch)
    return [_figures(*key, group) for key, group in same.items()]


def _figures(kernel: str, grid: str, block: str, launches: list[dict[str, str]]) -> dict[str, Any]:
    def median(metric: str) -> float | None:
        values = [v for launch in launches if (v := number(launch.get(metric, ""))) is not None]
        return statistics.median(values) if values else None

    found: dict[str, Any] = {"kernel": kernel, "grid": grid, "block": block, "launches": len(launches)}
    for name, metric in COUNTERS.items():
        value = median(metric)
        if name == "us" and value is not None:
            value /= 1e3  # ncu counts nanoseconds
        found[name] = value if value is None else round(value, 2)
    cycles, busy = median(CYCLES), median(BUSY_CYCLES)
    found["busy_sms_pct"] = round(100 * busy / cycles, 2) if cycles and busy is not None else None
    waits = {name: v for name in STALLS if (v := median(STALL.format(name)))}
    whole = sum(waits.values())
    ranked = sorted(waits.items(), key=lambda item: -item[1])
    found["stalls"] = {name: round(v / whole, 3) for name, v in ranked if v / whole >= 0.05}
    return found


def profile(group: str, count: int, limit: float, raw: Path) -> str | None:
    """Run a group's cases under ncu, its list and the cases' names to files; why it ended early, if it did."""
    listed = raw / f"{group}.csv"
    listed.unlink(missing_ok=True)
    command = [
        "ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none",
        "--cache-control", CACHE_CONTROL[CACHES[group]], "--profile-from-start", "off", "--metrics", ",".join(METRICS),
        "--log-file", str(listed), sys.executable, str(CASES), group, str(count),
    ]  # fmt: skip
    with (raw / f"{group}.cases").open("w") as cases:
        process = subprocess.Popen(command, stdout=cases, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            _, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # ncu ends the cases, and lists what it has
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return f"stopped after {limit:.0f} s"
    return errors.strip()[-600:] or f"exit status {process.returncode}" if process.returncode else None


def read(group: str, raw: Path) -> list[dict[str, Any]]:
    """The cases that a group's files hold."""
    lines = (raw / f"{group}.cases").read_text().splitlines()
    cases = [json.loads(line) for line in lines if line.startswith("{")]
    listed = raw / f"{group}.csv"  # which ncu does not write where it could not begin
    launched = by_case(launches_of(listed.read_text() if listed.exists() else ""))
    return [
        {**case, "caches": CACHES[group], "kernels": kernels_of(launches)}
        for case, launches in zip(cases, launched, strict=False)  # ncu may have been stopped
    ]


def machine() -> dict[str, Any]:
    """The commit, the card and the versions of a run."""
    import torch

    from specrs.measuring.machine import driver

    told = subprocess.run(["ncu", "--version"], capture_output=True, text=True, check=True).stdout
    return {
        "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "device": torch.cuda.get_device_name(),
        "driver": driver(), "versions": {**versions(), "ncu": told.split("Version")[-1].split()[0]},
    }  # fmt: skip


def main() -> None:
    """Look at every group, print and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--groups", default=",".join(CACHES))
    parser.add_argument("--launches", type=int, default=2, help="of each case that ncu looks at")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a group")
    parser.add_argument(
        "--raw", type=Path, help="folder that keeps ncu's lists (default: a new one for temporary files)"
    )
    parser.add_argument("--read", action="store_true", help="read the folder's lists, run nothing")
    args = parser.parse_args()
    if args.read and not args.raw:
        parser.error("--read needs --raw")
    if not args.read and shutil.which("ncu") is None:
        raise SystemExit("ncu is not here: Nsight Compute has it")
    raw = args.raw or Path(tempfile.mkdtemp(prefix="ncu_"))
    raw.mkdir(parents=True, exist_ok=True)
    head = raw / "machine.json"
    if not args.read:
        head.write_text(json.dumps(machine()))
    cases: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    result = {**json.loads(head.read_text()), "metrics": list(METRICS), "cases": cases, "failed": failed}
    for group in args.groups.split(","):
        why = None if args.read else profile(group, args.launches, args.limit, raw)
        if why:
            failed[group] = why
        found = read(group, raw)
        cases += found
        for case in found:
            print(json.dumps(case), flush=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(failed))


if __name__ == "__main__":
    main()
