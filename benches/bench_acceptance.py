"""Goal 11: accepted tokens a round, true ancestors against lanes, with the same weights and prompts.

Lane attention is what sglang's draft path does at topk > 1: a branch sees its own lane's earlier slots, whoever its
parent was. Both decode the same tokens (checked); only the drafts differ.

    python benches/bench_acceptance.py [--prompts 64] [--max-tokens 128]
"""

from __future__ import annotations

import argparse
from typing import Any

from common import write_result
from specrs import LLM, SamplingParams, assets

TREES = [(2, 4, 12), (4, 4, 16), (4, 6, 32), (8, 5, 32), (8, 6, 60)]


def accepted(llm: LLM, prompts: list[str], params: SamplingParams) -> tuple[float, list[int], list[list[int]]]:
    """Tokens a round over all prompts, the histogram, and the tokens."""
    outputs = llm.generate(prompts, params)
    longest = max(len(o.accepted_lengths) for o in outputs)
    histogram = [sum(o.accepted_lengths[n] for o in outputs if n < len(o.accepted_lengths)) for n in range(longest)]
    tokens = sum(n * c for n, c in enumerate(histogram))
    return tokens / sum(histogram), histogram, [o.token_ids for o in outputs]


def main() -> None:
    """Measure and write benches/results/acceptance.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    prompts = assets.heldout_prompts()[: args.prompts]
    rows: list[dict[str, Any]] = []
    for name, options in (
        ("greedy", {"temperature": 0}),
        ("temperature 0.8, top_p 0.9", {"temperature": 0.8, "top_p": 0.9, "seed": 1}),
    ):
        params = SamplingParams(max_tokens=args.max_tokens, **options)
        for topk, steps, draft_tokens in TREES:
            row: dict[str, Any] = {"sampling": name, "topk": topk, "steps": steps, "draft_tokens": draft_tokens}
            tokens = {}
            for mode in ("ancestors", "lane"):
                llm = LLM(tree=(topk, steps, draft_tokens), draft_attention=mode, max_batch=8)
                row[mode], row[f"{mode}_histogram"], tokens[mode] = accepted(llm, prompts, params)
            assert tokens["ancestors"] == tokens["lane"], "drafts must never change the output"
            row["ratio"] = row["ancestors"] / row["lane"]
            rows.append(row)
            print(f"{name:26} K={topk} S={steps} V={draft_tokens:2}: ancestors {row['ancestors']:.3f}, "
                  f"lanes {row['lane']:.3f} tokens a round, {row['ratio']:.3f}x")  # fmt: skip
    write_result("acceptance", {"goal": 11, "prompts": len(prompts), "max_tokens": args.max_tokens, "rows": rows})


if __name__ == "__main__":
    main()
