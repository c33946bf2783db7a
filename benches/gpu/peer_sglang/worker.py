"""sglang's engine on Llama-3.1-8B's shape with dummy weights: milliseconds of a plain step, or of a round with drafts.

`peer_engine.py` starts it, with the bundle's packages on ``PYTHONPATH``. Overlap scheduling, CUDA graphs, EAGLE-3. A
round's milliseconds are differences of the times at which the scheduler's process ends steps of the full batch. Drafts
of dummy weights are never accepted: ``SGLANG_SIMULATE_ACC_LEN`` makes sglang take so many tokens a round.

    PYTHONPATH=BUNDLE/site python benches/gpu/peer_sglang/worker.py KIND BACKEND --cases 1x1024,16x8192 --accept 4
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

MARK = "MEASURED "
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}  # fmt: skip
HEAD = {**SHAPE, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}
CONTEXT = 16384  # tokens that a request may have
DECODE = 2  # sglang's ForwardMode of plain steps and of rounds with drafts
FIRST = 8  # steps of the full batch that do not count


def steps_of(trace: str, since: float, until: float, batch: int) -> tuple[list[float], list[int], bool]:
    """Milliseconds between neighbouring steps of the full batch, their accepted drafts, and whether all ran as graphs.

    Args:
        trace: lines of seconds, mode, requests, accepted drafts, and 1 for a graph.
    """
    lines = [line.split() for line in trace.splitlines() if line.count(" ") == 4]
    rows = [(float(at), int(mode), int(n), int(drafts), graph == "1") for at, mode, n, drafts, graph in lines]
    rows = [row for row in rows if since <= row[0] <= until]
    full = [i for i, row in enumerate(rows) if row[1] == DECODE and row[2] == batch][FIRST:]
    pairs = [(a, b) for a, b in itertools.pairwise(full) if b == a + 1]
    ms = [1e3 * (rows[b][0] - rows[a][0]) for a, b in pairs]
    return ms, [rows[i][3] for i in full], all(rows[i][4] for i in full)


def figures(ms: list[float], drafts: list[int], graphs: bool, batch: int) -> dict[str, Any]:
    """The figures of one run of a case; an error where it has too few steps."""
    if len(ms) < 8:
        return {"error": f"{len(ms)} steps of the full batch, at least 8 are timed"}
    ordered = sorted(ms)
    return {
        "ms": round(statistics.median(ms), 4), "p10": round(ordered[len(ms) // 10], 4),
        "p90": round(ordered[len(ms) * 9 // 10], 4), "rounds": len(ms),
        "tokens_a_round": round(1 + statistics.fmean(drafts) / batch, 3), "graphs": graphs,
    }  # fmt: skip


def options(kind: str, backend: str, batches: list[int], root: Path) -> dict[str, Any]:
    """Arguments of sglang's engine for a kind of round: ``plain``, ``tree`` (8, 6, 64) or ``chain`` of 8."""
    for name, config in (("target", SHAPE), ("draft", HEAD)):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    found: dict[str, Any] = {
        "model_path": str(root / "target"), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
        "disable_radix_cache": True, "attention_backend": backend, "sampling_backend": "pytorch",
        "grammar_backend": "none", "page_size": 1, "context_length": CONTEXT, "mem_fraction_static": 0.8,
        "max_total_tokens": 200_000, "max_running_requests": max(64, *batches), "chunked_prefill_size": 8192,
        "disable_prefill_cuda_graph": True, "cuda_graph_bs_decode": sorted(set(batches)), "random_seed": 1,
        "watchdog_timeout": 120,
    }  # fmt: skip
    if kind == "plain":
        return found
    steps, topk, nodes = (6, 8, 64) if kind == "tree" else (7, 1, 8)
    return found | {
        "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(root / "draft"),
        "speculative_num_steps": steps, "speculative_eagle_topk": topk, "speculative_num_draft_tokens": nodes,
    }  # fmt: skip


def say(**row: Any) -> None:
    """Tell whoever started this process."""
    print(MARK + json.dumps(row), flush=True)


def main() -> None:
    """Start the engine, measure every case, tell each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("plain", "tree", "chain"))
    parser.add_argument("backend", choices=("fa3", "triton"))
    parser.add_argument("--cases", required=True)
    parser.add_argument("--accept", type=int, default=4, help="tokens of a round with drafts")
    parser.add_argument("--rounds", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    cases = [(int(b), int(c)) for b, c in (case.split("x") for case in args.cases.split(","))]
    root = Path(tempfile.mkdtemp())
    trace = root / "trace"
    os.environ |= {"SGLANG_TRACE": str(trace), "SGLANG_PAGE_TABLE_WIDTH": str(CONTEXT)}
    accept = 1 if args.kind == "plain" else args.accept
    if args.kind != "plain":
        os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(accept)
    started = time.perf_counter()
    import sglang
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**options(args.kind, args.backend, [b for b, _ in cases], root))
    say(version=sglang.__version__, seconds=round(time.perf_counter() - started, 1))
    generator = random.Random(1)
    sampling = {"max_new_tokens": args.rounds * accept + 1, "temperature": 0.0, "ignore_eos": True}
    for batch, context in cases:
        runs = []
        for _ in range(args.repeats):
            prompts = [[generator.randrange(10, 100_000) for _ in range(context)] for _ in range(batch)]
            since = time.perf_counter()
            engine.generate(input_ids=prompts, sampling_params=sampling)
            until = time.perf_counter()
            time.sleep(0.2)  # the scheduler's last line
            runs.append(figures(*steps_of(trace.read_text(), since, until, batch), batch))
        say(batch=batch, context=context, **runs[-1], earlier_ms=[run.get("ms") for run in runs[:-1]])
    engine.shutdown()


if __name__ == "__main__":
    main()
