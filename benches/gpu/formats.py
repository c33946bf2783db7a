"""Goal 2 per format on one machine with a GPU: the host time of sglang's own preparation of a round, its Triton kernels
launched and FlashInfer's ``plan`` called as there, against specrs's planner on that machine's CPU.

The peer runs on CUDA tensors, unchanged (`peer_sources`): ``host_us`` is its time until it returns, the device idle
before; ``wall_us`` until the device is idle again. ``scheduler_us`` is the part of both that FlashInfer's C++ scheduler
takes inside ``plan``: its arrays are no part of the format, and an engine that takes specrs's indices calls it too,
so the ratio is of host time without it. specrs's time is that of a release binary, every check included. Its arrays lie
in host memory; ``h2d_us`` is one copy of as many bytes from pinned memory, which an engine whose kernels read them on
the GPU adds. All take turns in one run; medians. First every array of the peer is compared with the closed forms, and,
where the bindings are built, with specrs's own.

Needs the bundle of ``formats_bundle.py`` in ``.peers`` (or ``$PEERS_DIR``) and the driver's binary::

    PYTHONPATH=benches:python python benches/gpu/formats.py --driver PATH --out FILE.json
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench_formats import BATCHES, FORMATS, GOAL_US, PAGES, Specrs
from common import Driver, commit, machine, peers_dir, unpack, versions, wheel
from peer_checks import closed_form, differences
from peer_flashinfer import Device, FlashInfer
from peer_rounds import Inputs, Round
from peer_sources import FLASHINFER, SGLANG, TVM_FFI, Sglang
from peer_vllm import VLLM, Pass


def prepare() -> tuple[Sglang, Device]:
    """Import the peers from the bundle; nothing may be compiled but Triton kernels."""
    os.environ |= {"FLASHINFER_WORKSPACE_BASE": str(peers_dir() / "workspace"), "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}
    os.environ["FLASHINFER_DISABLE_JIT"] = "1"
    sys.path.insert(0, str(unpack(wheel("apache-tvm-ffi", TVM_FFI), ["*"])))
    sys.path.insert(0, str(unpack(wheel("flashinfer-python", FLASHINFER), ["*"])))
    return Sglang(stand_ins=False), Device()


class Timed:
    """A function, and how long its calls took since it was last asked."""

    def __init__(self, function: Any) -> None:
        self.function, self.took = function, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.took += time.perf_counter() - start

    def take(self) -> float:
        took, self.took = self.took, 0.0
        return took


def time_schedulers(round_: Round) -> list[Timed]:
    """Put a clock around FlashInfer's C++ schedulers."""
    clocks: list[Timed] = []
    if isinstance(round_, FlashInfer):
        for wrapper in (*round_.decoders, round_.verifier, round_.extender):
            module = wrapper._cached_module
            if not isinstance(module.plan, Timed):
                module.plan = Timed(module.plan)
            if module.plan not in clocks:
                clocks.append(module.plan)
    return clocks


def once(call: Any) -> tuple[float, float]:
    """Seconds until the call returns, and until the device is idle again."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    return host, time.perf_counter() - start


def measure(driver: Driver, name: str, round_: Round, turns: int) -> dict[str, Any]:
    """Measure one row: the candidates take turns."""
    batch, page, peer = round_.batch, round_.page, round_.peer
    ours = Specrs(driver, batch, page, name)
    ours()
    pinned = torch.empty(max(ours.bytes, 1), dtype=torch.uint8).pin_memory()
    target = torch.empty_like(pinned, device="cuda")
    chain = Pass(round_.inputs, "cuda")
    chain.run()
    clocks = time_schedulers(round_)
    times: dict[str, list[float]] = {}

    def note(**values: float) -> None:
        for key, value in values.items():
            times.setdefault(key, []).append(value * 1e6)

    def host_parts() -> dict[str, float]:
        """Host time of each stage, the device idle before each."""
        return {f"part {stage}": once(call)[0] for stage, call in round_.stages().items()}

    options = (False, True) if isinstance(round_, FlashInfer) else (False,)
    gc.collect()
    gc.disable()
    for turn in range(turns + 3):
        if turn == 3:
            times.clear()
        if turn % 5 == 3:
            note(specrs=ours())
        for option in options:
            peer.host_indptr = option
            for clock in clocks:
                clock.take()
            host, wall = once(round_.run)
            mark = "_host_indptr" if option else ""
            note(**{f"host{mark}": host, f"wall{mark}": wall, f"scheduler{mark}": sum(c.take() for c in clocks)})
        peer.host_indptr = False
        note(**host_parts())
        note(h2d=once(lambda: target.copy_(pinned, non_blocking=True))[1], vllm_pass=once(chain.run)[0])
    gc.enable()
    us = {key: statistics.median(values) for key, values in times.items()}
    fastest = min(us["host"] - us["scheduler"], us.get("host_host_indptr", 1e12) - us.get("scheduler_host_indptr", 0))
    row: dict[str, Any] = {
        "format": name,
        "batch": batch,
        "page_size": page,
        "layout": ours.words[4],
        "specrs_us": round(us["specrs"], 2),
        "goal_us": GOAL_US[batch],
        "bytes": ours.bytes,
        "ratio": round(fastest / us["specrs"], 1),
        "ratio_wall": round(us["wall"] / us["specrs"], 1),
        "ratio_wall_with_h2d": round(us["wall"] / (us["specrs"] + us["h2d"]), 2),
    }
    row |= {f"{key}_us": round(value, 1) for key, value in us.items() if key != "specrs" and not key.startswith("part")}
    row["peer_parts_us"] = {key[5:]: round(value, 1) for key, value in us.items() if key.startswith("part")}
    print({key: value for key, value in row.items() if key != "peer_parts_us"}, flush=True)
    return row


def check(name: str, round_: Round) -> list[str]:
    """Return the peer's arrays that differ from the closed forms."""
    return differences(round_.arrays(), closed_form(name, round_.inputs))


def check_specrs(peer: Sglang, device: Device) -> list[str]:
    """Compare the peer's arrays with specrs's, where the bindings are built, for a few batches in specrs's own pool."""
    from peer_specrs import Session

    said = []
    for batch, page, length in ((1, 1, 300), (5, 16, 700), (16, 64, 8192)):
        inputs = Inputs.random(batch, page, length)
        build(peer, device, "flash_attention", inputs).adopt_tree()
        session = Session(inputs)
        for name in FORMATS:
            arrays = build(peer, device, name, session.inputs).arrays()
            said += [f"{name} batch {batch} page {page}: {d}" for d in differences(session.arrays(name), arrays)]
    return said


def build(peer: Sglang, device: Device, name: str, inputs: Inputs) -> Round:
    """A round on the GPU."""
    extra = {"functions": device} if name == "flashinfer" else {}
    return FORMATS[name](peer, inputs, "cuda", **extra)


def main() -> int:
    """Check, measure every batch, page size and format, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", type=Path, required=True, help="the release binary of examples/planner_driver.rs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="what the driver was built from, where there is no repository")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--pages", type=int, nargs="+", default=PAGES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    peer, device = prepare()
    driver = Driver(args.driver)
    result: dict[str, Any] = {
        "commit": args.commit or commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {**machine(), "gpu": torch.cuda.get_device_name()},
        "versions": versions("triton"),
        "peers": f"sglang {SGLANG}, flashinfer-python {FLASHINFER}, vllm {VLLM}",
        "turns": args.turns,
        "differences": [],
        "rounds": [],
    }
    try:
        result["specrs_checked"] = importlib.util.find_spec("specrs._specrs") is not None
    except ImportError:
        result["specrs_checked"] = False
    if result["specrs_checked"]:
        result["differences"] += check_specrs(peer, device)
    for batch in args.batches:
        for page in args.pages:
            inputs = Inputs.random(batch, page)
            build(peer, device, "flash_attention", inputs).adopt_tree()
            for name in FORMATS:
                round_ = build(peer, device, name, inputs)
                said = check(name, round_)
                result["differences"] += [f"{name} batch {batch} page {page}: {d}" for d in said]
                print(name, batch, page, said or "equal to the closed forms", flush=True)
                result["rounds"].append(measure(driver, name, round_, args.turns))
                del round_
                torch.cuda.empty_cache()
            args.out.write_text(json.dumps(result, indent=1) + "\n")  # after each batch: a run may be cut off
    driver.close()
    print(f"{len(result['rounds'])} rows, {len(result['differences'])} differences")
    return 1 if result["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
