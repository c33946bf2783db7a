"""GPU time of a steady round by kernel, from torch's profiler."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from specrs.engine import LLM
from specrs.measuring.rounds import rounds, under_way

PROFILED = 3  # rounds
# A round's kernels by the start of their names, or what is in them; the first that fits counts.
MODEL = {
    "products": r"nvjet|gemm|gemv|cublas|cutlass|splitK|xmma|^dot_kernel|^reduce_1Block|^linear_",
    "attention": r"^attention_",
    "rope_kv": r"^rope_kv_",
    "row operations": r"^(add_)?rms_norm|^(silu|gelu)_up",
}
NOT_MODEL = {
    "selection": r"^draft_select",
    "tree build": r"^tree_build",
    "plan": r"^plan_|^table_update",
    "verify, sample": r"^(verify|sample)_",
    "commit": r"^kv_commit",
    "move": r"^kv_(move|remap|list)",
    "round end": r"^round_end|^loop_count",
    "copies": r"^Memcpy|^Memset",
}
# One kernel embeds tokens (model), and gathers features and copies rows between tables (not the model).
GATHERS = {"row gathers": r"^gather_rows"}


def reason(error: BaseException) -> str:
    """An error in a line, for the result."""
    return f"{type(error).__name__}: {error}"[:600]


def attach() -> None:
    """Attach the profiler, which slows whoever comes later: before graphs are made, behind everything that is timed."""
    with contextlib.suppress(Exception):
        traced(lambda: torch.zeros(1, device="cuda"))


def traced(run: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Return the GPU's work meanwhile: name, start and microseconds of every kernel and copy, in order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # events of earlier cycles are gone: there is one cycle
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return sorted(
        ((e["name"], float(e["ts"]), float(e["dur"])) for e in events if e.get("cat") in kinds), key=lambda e: e[1]
    )


def by_class(spent: dict[str, float]) -> dict[str, Any]:
    """Microseconds by kernel, as classes: their time and shares, and the names that none knows."""
    classes = {**MODEL, **NOT_MODEL, **GATHERS}
    time_of, unknown = dict.fromkeys(classes, 0.0), {}
    for name, us in spent.items():
        known = next((c for c, pattern in classes.items() if re.search(pattern, name)), None)
        if known is None:
            unknown[name[:160]] = round(us, 3)
        else:
            time_of[known] += us
    whole = sum(spent.values())
    rest, gathers = sum(time_of[c] for c in NOT_MODEL), sum(time_of[c] for c in GATHERS)
    return {
        "classes": {c: {"us": round(us, 3), "share": round(us / whole, 5)} for c, us in time_of.items()},
        "model_share": round(sum(time_of[c] for c in MODEL) / whole, 5),
        # The gathers are the model's in part: the truth is between these two.
        "non_model_share": {"least": round(rest / whole, 5), "with_all_gathers": round((rest + gathers) / whole, 5)},
        "unknown_share": round(sum(unknown.values()) / whole, 5),
        "unknown_us": unknown,
    }


def profiled(llm: LLM, prompts: list[list[int]], count: int) -> dict[str, Any]:
    """GPU time of a steady round by kernel: means over the profiled rounds."""
    with under_way(llm, prompts, count):
        events = traced(lambda: [llm.step() for _ in range(PROFILED)])
    ran = sum(name.startswith("round_end") for name, _, _ in events)
    if not ran:
        return {"rounds": 0, "error": f"the profiler saw {len(events)} kernels and copies, and no end of a round"}
    spent: dict[str, float] = {}
    launches: dict[str, int] = {}
    busy, until = 0.0, 0.0  # kernels that overlap count their time once
    for name, start, us in events:
        spent[name] = spent.get(name, 0.0) + us / ran
        launches[name] = launches.get(name, 0) + 1
        busy += max(0.0, start + us - max(start, until))
        until = max(until, start + us)
    top = sorted(spent, key=lambda name: -spent[name])
    return {
        "rounds": ran,
        "launches": round(len(events) / ran, 1),
        "sum_us": round(sum(spent.values()), 2),
        "busy_us": round(busy / ran, 2),
        **by_class(spent),
        "top": [
            {"name": n[:160], "launches": round(launches[n] / ran, 2), "us": round(spent[n], 3)} for n in top[:25]
        ],
        "below_top_us": round(sum(spent[n] for n in top[25:]), 3),
    }  # fmt: skip


def kernels(
    opened: Callable[[str, str], LLM], prompts: list[list[int]], count: int, kinds: Iterable[str] = ("plain", "tree")
) -> dict[str, Any]:
    """`profiled` for plain and tree rounds: of graphs, or where those report no kernels, without them.

    Args:
        opened: makes the engine of a kind at a graph level.
        count: tokens that a request may get.
    """
    out: dict[str, Any] = {}
    for kind in kinds:
        missed = []
        for level in ("round", "off"):
            try:
                with opened(kind, level) as llm:
                    rounds(llm, [p[:64] for p in prompts], 8)  # makes the rounds' graphs
                    found = profiled(llm, prompts, count)
            except Exception as error:  # the timed figures stay
                found = {"rounds": 0, "error": reason(error)}
            if found["rounds"]:
                break
            missed.append({"graphs": level, "error": found["error"]})
        out[kind] = {"graphs": level, **found, **({"missed": missed} if missed else {})}
    return out
