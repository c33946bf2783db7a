"""Cost of a call into the Rust core from Python, on operands so small that the work itself is next to nothing.

The engine makes some 70 such calls a decode pass. For comparison: torch's own `mul(out=)` on the same tensors, and
the Python protocol `Tensor.__dlpack__`, which the bindings go around (DLPack's C exchange API).

    python benches/bench_calls.py
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from common import interleave, seconds, write_result
from specrs import _specrs as core


def main() -> None:
    """Measure and write benches/results/calls.json."""
    torch.set_num_threads(1)
    core.set_num_threads(1)
    geometry = core.Geometry(4, 64, 1, core.TreeShape(2, 2, 4))
    pool = core.Pool(256, 1, 4, geometry.row_pages)
    planner, seq = core.Planner(geometry, pool), pool.create()
    pool.reserve([(seq, 3)]).commit([3])
    x, y, out, norm = torch.ones(1, 8), torch.ones(1, 8), torch.zeros(1, 8), torch.ones(8)
    head = torch.zeros(1, 1, 8)
    linear, sampler = core.PackedLinear(torch.ones(8, 8)), core.Sampler(8, [])
    cache = core.KvCache(torch.zeros(1, 2, 256, 1, 8), 1)
    rope = core.RopeTable(torch.ones(64, 4), torch.zeros(64, 4))
    trees = core.TreeBatch.from_parents([[-1, 0, 0, 1]], [[1, 2, 3, 4]])
    tree_logits = torch.zeros(4, 8)
    with pool.reserve([(seq, 11)]):
        plan = planner.extend([seq], [3], [1])
        calls = {
            "rms_norm, 3 torch tensors": lambda: core.rms_norm(x, norm, 1e-5, out),
            "rms_norm, 3 numpy arrays": partial(core.rms_norm, x.numpy(), norm.numpy(), 1e-5, out.numpy()),
            "PackedLinear.forward, 2 tensors": lambda: linear.forward(x, out),
            "PackedLinear.forward, 4 tensors": lambda: linear.forward(x, out, y, norm, 1e-5),
            "kv_write": lambda: core.kv_write(cache, 0, plan, head, head),
            "rope_attention": lambda: core.rope_attention(cache, 0, plan, _QKV, rope, 1, out, 1.0),
            "Planner.extend": lambda: planner.extend([seq], [3], [1]),
            "Planner.verify": lambda: planner.verify([seq], [3], trees),
            "Sampler.draw": lambda: sampler.draw(norm, 3),
            "verify, a tree of 4": lambda: core.verify(trees, tree_logits, [sampler], [3]),
            "Array of a plan": lambda: plan.positions,
            "Array to torch": lambda: torch.utils.dlpack.from_dlpack(plan.positions.__dlpack__()),
            "Array to numpy": lambda: np.from_dlpack(plan.positions),
            "torch.mul(out=), 3 tensors": lambda: torch.mul(x, y, out=out),
            "Tensor.__dlpack__()": x.__dlpack__,
        }
        micros = interleave({name: partial(seconds, call) for name, call in calls.items()})
    rows = {name: round(1e6 * s, 2) for name, s in micros.items()}
    for name, us in rows.items():
        print(f"{name:34s} {us:6.2f} us")
    write_result("calls", {"unit": "microseconds a call, median", "calls": rows})


_QKV = torch.zeros(1, 24)

if __name__ == "__main__":
    main()
