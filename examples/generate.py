"""Continue a prompt with your own model and EAGLE-3 head; accepted draft tokens stand in brackets.

    python examples/generate.py                                   # the model in the package
    python examples/generate.py --model DIR --draft DIR "Once upon a time"

DIR is a Hugging Face directory, or org/name of one that `hf download org/name` has fetched.
"""

from __future__ import annotations

import argparse

from specrs import LLM, SamplingParams, SpecrsError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="def fibonacci(n):")
    parser.add_argument("--model", help="directory or org/name (default: the model in the package)")
    parser.add_argument("--draft", help="directory or org/name of its head (default: plain decoding)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, help="default: as the model's generation_config.json says")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tree", type=int, nargs=3, metavar=("K", "S", "V"), help="drafted in every round (default: as it pays)"
    )
    args = parser.parse_args()
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    try:
        with LLM(args.model, args.draft, max_batch=1, tree=args.tree and tuple(args.tree)) as llm:
            print(args.prompt, end="")
            for event in llm.stream([args.prompt], params):
                for text, drafted in event.pieces:
                    print(f"[{text}]" if drafted else text, end="", flush=True)
                if event.output is not None:
                    o = event.output
                    print(
                        f"\n-- {len(o.token_ids)} tokens in {o.rounds} rounds, ended by {o.finish_reason}; {o.params}"
                    )
    except SpecrsError as e:  # a file, an option or a prompt that does not fit: the message says which
        parser.error(str(e))


if __name__ == "__main__":
    main()
