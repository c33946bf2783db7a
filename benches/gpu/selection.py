"""Times the way from draft logits to beams, and from target logits to accepted tokens: K=8, S=6, V=64, f32 logits.

A time is of one round's launches (six steps of selection; one verification) in a CUDA graph that takes its logits from
rotating sets, more bytes than the L2 holds; medians of interleaved replays. The floor is the bytes that a round has to
read over the copy bandwidth that was measured in the same run: every draft logit once, and the rows that a walk
reaches. torch's softmax and topk (selection) and argmax over all rows (greedy) are what peers launch for it.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import copy_bandwidth, graph_of, medians, stream

from specrs import _specrs as core
from specrs import device
from specrs.operands import AcceptArrays, BeamArrays, SamplerArrays, TreeArrays

K, STEPS, NODES = 8, 6, 64
REACH = 4  # rows that a walk reaches
ROTATE_BYTES = 400 << 20
SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_p 0.95, repetition": {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1},
}


def i32(values: Any) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device="cuda")


def sets_of(rows: int, vocab: int) -> int:
    """Sets of logits that do not fit the L2 together."""
    return max(2, min(24, ROTATE_BYTES // (4 * rows * vocab) + 1))


def result(what: str, batch: int, vocab: int, us: dict[str, float], floor: float) -> dict[str, Any]:
    row = {
        "what": what,
        "batch": batch,
        "vocab": vocab,
        "us": {k: round(v, 2) for k, v in us.items()},
        "floor_us": round(floor * 1e6, 2),
    }
    if "torch" in us:
        row["torch_over_specrs"] = round(us["torch"] / us["specrs"], 2)
    print(json.dumps(row), flush=True)
    return row


def select(batch: int, vocab: int, bandwidth: float, repeats: int) -> dict[str, Any]:
    shape = core.TreeShape(K, STEPS, NODES)
    candidates = K + (STEPS - 1) * K * K
    scores = torch.empty(batch, candidates, device="cuda")
    tables = [torch.empty(n, dtype=torch.int32, device="cuda") for n in [batch * candidates] * 2 + [batch * K] * 3]
    words = -(-K * STEPS // 64)
    ancestors = torch.empty(batch * K, words, dtype=torch.int64, device="cuda")
    sound = torch.empty(batch, dtype=torch.int32, device="cuda")
    beams = BeamArrays(
        scores=scores,
        candidate_tokens=tables[0].view(batch, -1),
        candidate_parents=tables[1].view(batch, -1),
        beams=tables[2].view(batch, -1),
        tokens=tables[3],
        parents=tables[4],
        ancestors=ancestors,
        sound=sound,
    )
    scratch = torch.zeros(core._device_draft_scratch(shape, batch, vocab, 0), dtype=torch.int64, device="cuda")
    sets = sets_of(batch * K, vocab)
    logits = [torch.randn(batch * K, vocab, device="cuda") * 3 for _ in range(sets)]
    rounds = max(1, -(-sets // STEPS))

    def step(i: int) -> None:
        at = i % STEPS
        rows = logits[i % sets][: batch if at == 0 else batch * K]
        core._device_draft_select(
            step=at, logits=rows, to_target=None, vocab=vocab, live=None, shape=shape, beams=beams, scratch=scratch,
            stream=stream(),
        )  # fmt: skip

    def peer(i: int) -> None:
        rows = logits[i % sets][: batch if i % STEPS == 0 else batch * K]
        torch.topk(torch.softmax(rows, -1), K)

    n = rounds * STEPS
    graphs = {
        "specrs": (graph_of([lambda i=i: step(i) for i in range(n)]), rounds),
        "torch": (graph_of([lambda i=i: peer(i) for i in range(n)]), rounds),
    }
    bytes_ = 4 * vocab * batch * (1 + (STEPS - 1) * K)
    return result("draft_select, 6 steps", batch, vocab, medians(graphs, repeats), bytes_ / bandwidth)


class Verify:
    """A batch of trees in which each walk reaches `reach` rows, and its outputs."""

    def __init__(self, batch: int, vocab: int, reach: int, dtype: torch.dtype) -> None:
        sets = sets_of(batch * NODES, vocab)
        self.batch, self.vocab = batch, vocab
        parents = [-1] + [0 if n <= K else n - K for n in range(1, NODES)]
        self.parents = i32(parents * batch)
        self.offsets = i32(range(0, batch * NODES + 1, NODES))
        self.lens = i32([100 + i for i in range(batch)])
        self.logits = [(torch.randn(batch * NODES, vocab, device="cuda") * 3).to(dtype) for _ in range(sets)]
        tokens = torch.full((batch, NODES), vocab - 1, dtype=torch.int32, device="cuda")
        full = lambda n: torch.zeros(n, dtype=torch.int32, device="cuda")  # noqa: E731
        self.accepts = AcceptArrays(
            offsets=full(batch + 1),
            paths=full(batch * NODES),
            tokens=full(batch * NODES),
            rows=full(batch * NODES),
            roots=full(batch),
            new_lens=full(batch),
            faults=full(batch),
        )
        words = core._device_verify_scratch(batch * NODES, batch, NODES)
        self.scratch = torch.zeros(words, dtype=torch.int64, device="cuda")
        self.tokens = tokens.view(-1)
        self.reach, self.paths = reach, [0] + [1 + K * d for d in range(reach - 1)]

    def arrange(self, token_of: Callable[[int], torch.Tensor]) -> None:
        """Make every walk follow `self.paths` to its end; `token_of(depth)` draws with what stands there so far."""
        for depth, node in enumerate(self.paths[1:]):
            self.tokens.view(self.batch, NODES)[:, node] = token_of(depth)

    def reached(self) -> int:
        return int(self.accepts.offsets[-1])


def verification(
    batch: int, vocab: int, how: str, dtype: torch.dtype, full: bool
) -> tuple[Verify, Callable[[int], None]]:
    """A batch whose walks reach `REACH` rows, and its launch on a set of logits."""
    v = Verify(batch, vocab, REACH, dtype)
    # The same drawn tokens in every set: all sets hold the first one's logits of the path.
    for other in v.logits[1:]:
        for node in v.paths:
            other[node::NODES] = v.logits[0][node::NODES]
    trees = TreeArrays(tokens=v.tokens, parents=v.parents, offsets=v.offsets)
    if how == "greedy":

        def call(i: int) -> None:
            logits = v.logits[i % len(v.logits)]
            core._device_verify_greedy(
                logits=logits, trees=trees, lens=v.lens, live=None, max_nodes=NODES, max_path=NODES, accepts=v.accepts,
                scratch=v.scratch, full=full, stream=stream(),
            )  # fmt: skip

    else:
        samplers = [core.Sampler(vocab, [1, 2, 3], seed=i, **SAMPLING[how]) for i in range(batch)]
        by_name = core._device_samplers(samplers).items()
        drawn_by = SamplerArrays(**{name: torch.from_dlpack(a).to("cuda") for name, a in by_name})

        def call(i: int) -> None:
            logits = v.logits[i % len(v.logits)]
            core._device_sample_verify(
                logits=logits, trees=trees, lens=v.lens, live=None, max_nodes=NODES, max_path=NODES, samplers=drawn_by,
                accepts=v.accepts, scratch=v.scratch, stream=stream(),
            )  # fmt: skip

    def drawn(depth: int) -> torch.Tensor:
        call(0)
        torch.cuda.synchronize()
        starts = v.accepts.offsets.long()[:-1]
        return v.accepts.tokens[starts + depth]

    v.arrange(drawn)
    call(0)
    torch.cuda.synchronize()
    if v.reached() != REACH * batch:
        raise SystemExit(f"{how}: {v.reached()} rows reached at batch {batch}, not {REACH * batch}")
    return v, call


def verify(batch: int, vocab: int, how: str, dtype: torch.dtype, full: bool, bandwidth: float, repeats: int) -> Any:
    v, call = verification(batch, vocab, how, dtype, full)
    n = max(len(v.logits), 4)
    graphs = {"specrs": (graph_of([lambda i=i: call(i) for i in range(n)]), n)}
    if how == "greedy":
        graphs["torch"] = (graph_of([lambda i=i: v.logits[i % len(v.logits)].argmax(-1) for i in range(n)]), n)
    name = f"{how}, {'full' if full else 'walk'}, {REACH} rows reached, {str(dtype).removeprefix('torch.')}"
    rows = NODES if full else REACH
    return result(name, batch, vocab, medians(graphs, repeats), dtype.itemsize * vocab * batch * rows / bandwidth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--sampling", action="store_true", help="verification by sampling alone")
    a = parser.parse_args()
    device.init()
    bandwidth = copy_bandwidth(a.repeats)
    rows = [] if a.sampling else [select(b, v, bandwidth, a.repeats) for v in (32000, 128256) for b in (1, 16, 64)]
    ways = [*SAMPLING] if a.sampling else ["greedy", *SAMPLING]
    for how, dtype, batch in itertools.product(ways, (torch.float32, torch.bfloat16), (1, 16, 64)):
        for full in (False, True):
            if not full or (batch == 1 and how == "greedy"):
                rows.append(verify(batch, 128256, how, dtype, full, bandwidth, a.repeats))
                torch.cuda.empty_cache()
    device.check()
    if a.json:
        found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        a.json.write_text(json.dumps({**found, "copy_gb_per_s": round(bandwidth / 1e9), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
