"""Goal 12: the small model end to end on the CPU with 2 threads.

Speculative against plain decoding of the same engine and kernels, with the tree picked by the cost model; plain
against transformers' eager decoding; and against transformers' assisted generation (prompt lookup, and its
self-speculation by early exit), the faster of which counts. One request at a time, the engines taking turns at each
prompt, medians over repeats summed over the prompts; the tokens of all specrs engines must be equal. Speculative over
plain is of decoding (what follows the first token; both prefill the prompt alike) and of whole requests as well.

    python benches/bench_engine.py [--prompts 16] [--max-tokens 128] [--repeats 5] [--peer-repeats 3]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from common import write_result
from specrs import LLM, SamplingParams, assets
from specrs import _specrs as core

THREADS = 2
Decode = Callable[[list[int]], tuple[list[int], float]]  # tokens, and seconds from start to the first one

ENGLISH = [
    "The history of the printing press begins in",
    "Dear Sir or Madam, I am writing to complain about",
    "Once upon a time, in a village by the sea, there lived",
    "Ingredients: two cups of flour, one cup of sugar,",
]


def prompt_sets(llm: LLM, count: int) -> dict[str, list[list[int]]]:
    """Return sets of prompts, from the end of the held-out ones, since the tree policy was tuned on the first 16.

    What the draft head knows, what it has not seen, and what nobody can predict.
    """
    rng = random.Random(0)
    return {
        "held-out code": [llm.encode(p) for p in assets.heldout_prompts()[-count:]],
        "english": [llm.encode(p) for p in ENGLISH],
        "random tokens": [[rng.randrange(llm.vocab_size) for _ in range(64)] for _ in range(4)],
    }


def specrs_decoder(llm: LLM, max_tokens: int, **options: Any) -> Decode:
    """Greedy (or seeded) decoding by specrs."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0, **options})

    def decode(prompt: list[int]) -> tuple[list[int], float]:
        started = time.perf_counter()
        events = llm.stream([prompt], params)
        tokens = list(next(events).token_ids)
        first = time.perf_counter() - started
        for event in events:
            tokens += event.token_ids
        return tokens, first

    return decode


def transformers_decoder(model: Any, max_tokens: int, **options: Any) -> Decode:
    """Greedy decoding by transformers."""

    def decode(prompt: list[int]) -> tuple[list[int], float]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens,
                                 do_sample=False, **options)  # fmt: skip
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens, 0.0

    return decode


def measure(engines: dict[str, Decode], prompts: list[list[int]], repeats: int) -> dict[str, Any]:
    """Seconds of decoding all prompts, the engines in turn at each prompt: medians over repeats, summed."""
    whole: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in engines}
    after_first: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in engines}
    tokens: dict[str, list[list[int]]] = {name: [[] for _ in prompts] for name in engines}
    for repeat in range(repeats + 1):
        for i, prompt in enumerate(prompts):
            for name, decode in engines.items():
                started = time.perf_counter()
                tokens[name][i], first = decode(prompt)
                seconds = time.perf_counter() - started
                if repeat:  # the first is warm-up
                    whole[name][i].append(seconds)
                    after_first[name][i].append(seconds - first)
    count = sum(len(t) for t in tokens["plain"])
    assert tokens["speculative"] == tokens["plain"], "speculation must not change the tokens"
    total = {name: sum(map(statistics.median, s)) for name, s in whole.items()}
    decoding = {name: sum(map(statistics.median, after_first[name])) for name in ("speculative", "plain")}
    same = {name: sum(a == b for a, b in zip(tokens[name], tokens["plain"], strict=True)) for name in engines}
    return {
        "tokens": count,
        "seconds": total,
        "seconds_after_first_token": decoding,
        "tokens_per_second": {name: count / s for name, s in total.items()},
        "prompts_with_equal_tokens": same,
        "speculative_over_plain": decoding["plain"] / decoding["speculative"],
        "speculative_over_plain_whole_request": total["plain"] / total["speculative"],
    }


def main() -> None:
    """Measure and write benches/results/engine.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer-repeats", type=int, default=3, help="where transformers decodes as well")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    core.set_num_threads(THREADS)
    llm, plain = LLM(max_batch=1, prefix_cache=False), LLM(max_batch=1, prefix_cache=False, speculative=False)
    hf = AutoModelForCausalLM.from_pretrained(assets.model_dir(), dtype=torch.float32)
    hf.generation_config.pad_token_id = 0
    # Has the effect of ignore_eos: min_new_tokens would forbid EOS, and change the text.
    hf.generation_config.eos_token_id = None
    results: dict[str, Any] = {}
    for name, prompts in prompt_sets(llm, args.prompts).items():
        engines = {
            "speculative": specrs_decoder(llm, args.max_tokens),
            "plain": specrs_decoder(plain, args.max_tokens),
        }
        row = measure(engines, prompts, args.repeats)
        print(f"{name}: " + ", ".join(f"{k} {v:.0f} tokens/s" for k, v in row["tokens_per_second"].items()))
        print(f"  speculative over plain {row['speculative_over_plain']:.2f}x, "
              f"of whole requests {row['speculative_over_plain_whole_request']:.2f}x")  # fmt: skip
        if name == "held-out code":
            results["beside transformers"] = beside_transformers(hf, engines, prompts, args)
        results[name] = row
    results["sampled, held-out code"] = sampled(llm, plain, args)
    write_result("engine", {"goal": 12, "threads": THREADS, "max_tokens": args.max_tokens, "sets": results})


def beside_transformers(
    hf: Any, engines: dict[str, Decode], prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, Any]:
    """Compare with transformers, apart from the engines' own comparison: torch's threads spin on for a while and would
    slow the next one."""
    engines = {
        **engines,
        "transformers eager": transformers_decoder(hf, args.max_tokens),
        "transformers prompt lookup": transformers_decoder(hf, args.max_tokens, prompt_lookup_num_tokens=8),
        "transformers early exit": transformers_decoder(hf, args.max_tokens, assistant_early_exit=4),
    }
    row = measure(engines, prompts, args.peer_repeats)
    rates = row["tokens_per_second"]
    assisted = max(rates["transformers prompt lookup"], rates["transformers early exit"])
    row["plain_over_transformers_eager"] = rates["plain"] / rates["transformers eager"]
    row["speculative_over_assisted"] = rates["speculative"] / assisted
    print("  " + ", ".join(f"{k} {v:.0f} tokens/s" for k, v in rates.items()))
    print(f"  plain over transformers eager {row['plain_over_transformers_eager']:.2f}x, "
          f"speculative over assisted {row['speculative_over_assisted']:.2f}x")  # fmt: skip
    return row


def sampled(llm: LLM, plain: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Temperature 0.8, top_p 0.9, seeded: the same tokens, faster."""
    options = {"temperature": 0.8, "top_p": 0.9, "seed": 1}
    engines = {
        "speculative": specrs_decoder(llm, args.max_tokens, **options),
        "plain": specrs_decoder(plain, args.max_tokens, **options),
    }
    row = measure(engines, prompt_sets(llm, args.prompts)["held-out code"], args.repeats)
    print(f"sampled: speculative over plain {row['speculative_over_plain']:.2f}x")
    return row


if __name__ == "__main__":
    main()
