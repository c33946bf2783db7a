"""Stage 5: accepted tokens per round on the held-out prompts, the head's accuracy by step, and samples to read."""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .head import Head
from .store import load_head, load_target
from .target import Target
from .tree_decode import Decoded, TreeDecoder, TreeShape, greedy

SAMPLES = ("def fibonacci(n):", "class Stack:", "import os\n", "def read_config(path):\n")
LOOP_WINDOW, LOOP_PERIOD = 32, 64


def loop_onset(tokens: list[int]) -> int:
    """Index from which the text only repeats itself: a period of at most 64 tokens that holds for 32 tokens."""
    for period in range(1, LOOP_PERIOD + 1):
        run = 0
        for i in range(period, len(tokens)):
            run = run + 1 if tokens[i] == tokens[i - period] else 0
            if run == LOOP_WINDOW:
                return i - LOOP_WINDOW + 1
    return len(tokens)


def summary(done: list[Decoded]) -> dict[str, object]:
    """Mean accepted tokens per round, bonus included; also over the rounds that begin before any loop."""
    rounds = [n for d in done for n in d.per_round]
    fresh = []
    loops = 0
    for d in done:
        onset, at = loop_onset(d.tokens), 1
        loops += onset < len(d.tokens)
        for n in d.per_round:
            if at < onset:
                fresh.append(n)
            at += n
    return {
        "mean_accepted": round(sum(rounds) / len(rounds), 3),
        "mean_accepted_before_loops": round(sum(fresh) / len(fresh), 3),
        "prompts_that_loop": loops,
        "rounds": len(rounds),
        "tokens": sum(rounds),
        "histogram": [rounds.count(n) for n in range(1, max(rounds) + 1)],
    }


@torch.no_grad()
def accuracy_by_step(model: Target, head: Head, texts: list[tuple[list[int], list[int]]], steps: int) -> list[float]:
    """Share of the target's own greedy tokens that the head's top-1 names at unrolled steps 1, 2, ..."""
    right, total = torch.zeros(steps), torch.zeros(steps)
    for prompt, answer in texts:
        ids = torch.tensor([prompt + answer], device=model.rope.device)
        _, feats = model(ids)
        outputs = head.unroll(model.model.embed_tokens(ids[:, 1:]), feats[:, :-1], steps)
        for j, hidden in enumerate(outputs):
            guess: Tensor = head.target_ids[head.logits(hidden[0]).argmax(-1)]
            first = len(prompt) - 1 + j  # the chain's step 0 stands at the last committed position at the earliest
            hit = guess[first:-1] == ids[0, first + 2 :]
            right[j] += hit.sum().cpu()
            total[j] += hit.numel()
    return [round(x, 4) for x in (right / total).tolist()]


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--model", type=Path, required=True)
    args.add_argument("--head", type=Path, required=True)
    args.add_argument("--prompts", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True, help="JSON file")
    args.add_argument("--count", type=int, default=64)
    args.add_argument("--new", type=int, default=128)
    args.add_argument("--shapes", default="4,4,16;1,4,5", help="K,S,V; ...")
    opts = args.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_target(opts.model, device)
    head = load_head(opts.head, model.cfg, device)
    tok = Tokenizer.from_file(str(opts.model / "tokenizer.json"))
    prompts = [tok.encode(p["prompt"]).ids for p in json.loads(opts.prompts.read_text())[: opts.count]]
    report: dict[str, object] = {
        "prompts": len(prompts), "new_tokens": opts.new, "arithmetic": "float32 on bfloat16 weights",
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__, "python": platform.python_version(),
    }  # fmt: skip
    start = time.perf_counter()
    with torch.no_grad():
        plain = [greedy(model, p, opts.new) for p in prompts]
    report["greedy_seconds"] = round(time.perf_counter() - start, 1)
    for spec in opts.shapes.split(";"):
        shape = TreeShape(*map(int, spec.split(",")))
        decoder = TreeDecoder(model, head, shape)
        done = [decoder.decode(p, opts.new) for p in prompts]
        result = summary(done)
        result["differs_from_greedy"] = sum(d.tokens[: len(g)] != g for d, g in zip(done, plain, strict=True))
        report[f"K={shape.k},S={shape.s},V={shape.v}"] = result
        print(f"  {shape} {json.dumps(result)}", flush=True)
    pairs = [(p, g) for p, g in zip(prompts, plain, strict=True) if len(g) > 16]
    report["top1_by_step_on_greedy_text"] = accuracy_by_step(model, head, pairs, head.head.ttt_steps)
    print("  top-1 by step", report["top1_by_step_on_greedy_text"])
    with torch.no_grad():
        report["samples"] = {text: tok.decode(greedy(model, tok.encode(text).ids, 160)) for text in SAMPLES}
    report["held_out_samples"] = [tok.decode(p) + " ⟶ " + tok.decode(g) for p, g in pairs[:8]]
    opts.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    samples = report["samples"]
    assert isinstance(samples, dict)
    for text, continuation in samples.items():
        print(f"--- {text}{continuation}")


if __name__ == "__main__":
    main()
