"""What builds take for a round, in turns: milliseconds from its end to the next one's, and the host's part of a step.

Plain and tree rounds of one request, and of eight for the model in the package: that model behind 200 tokens, and the
8B shape of `engine.py` with random weights behind 1024. A build is a checkout with its extension built in place: its
own package and its own `engine.py` are measured, so that commits whose engines have other insides can be compared.
Each runs in a process of its own, and all of them ``--turns`` times. ``same_tokens`` tells whether all were equal.

    python benches/gpu/rounds.py NAME=CHECKOUT [NAME=CHECKOUT ...] [--json FILE] [--turns 2]
        [--models 8b,packaged]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

MODELS = ("8b", "packaged")
FIGURES = ("period_ms", "host_ms")


def measure(model: str) -> None:
    """Print a line of JSON for each case of a model."""
    import engine  # of the build, as `benches_of` says
    from specrs import LLM

    def show(case: str, llm: LLM, prompts: list[list[int]], count: int) -> None:
        engine.rounds(llm, [p[:64] for p in prompts], 24)  # makes the rounds' graphs
        for _ in range(2):
            tokens, ms = engine.steady(llm, prompts, count)
            told = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
            figures = {name: ms[name] for name in FIGURES}
            print(json.dumps({"case": case, **figures, "tokens": told}), flush=True)

    if model == "packaged":
        for batch in (1, 8):
            prompts = [
                torch.randint(1, 300, (200,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(batch)
            ]
            options: dict[str, Any] = {
                "device": "cuda",
                "max_batch": batch,
                "max_context_len": 1024,
                "prefix_cache": False,
            }
            for kind, extra in (("plain", {"speculative": False}), ("tree", {"tree": (4, 4, 16)})):
                with LLM(graphs="round", **options, **extra) as llm:  # type: ignore[arg-type]
                    show(f"packaged {batch} x 200 {kind}", llm, prompts, 200)
        return
    engine.draw_weights()
    with tempfile.TemporaryDirectory() as folder:
        models = engine.directories(Path(folder), 32)
        for kind in ("plain", "tree"):
            prompts, options, tree = engine.prepared(1, 1024, 48, "round")
            engine.collect()
            with LLM(*models, **options, **({"tree": tree} if kind == "tree" else {"speculative": False})) as llm:
                show(f"8B 1 x 1024 {kind}", llm, prompts, 48)


def benches_of(checkout: Path) -> str:
    """A ``PYTHONPATH`` that finds a checkout's package and benches; ``-P`` keeps this file's folder out."""
    return os.pathsep.join(str(checkout.resolve() / folder) for folder in ("python", "benches/gpu", "benches"))


def main() -> None:
    """Run every build in turns, print and write what each took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("builds", nargs="*", metavar="NAME=CHECKOUT")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--measure", choices=MODELS, help="one model by the package that is imported; for the runs")
    args = parser.parse_args()
    if args.measure:
        measure(args.measure)
        return
    cases: dict[str, dict[str, dict[str, list[float]]]] = {name: {} for name in FIGURES}
    tokens: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as caches:  # each build has choices of products of its own
        for model in args.models:
            for _ in range(args.turns):
                for name, folder in (build.split("=", 1) for build in args.builds):
                    paths = benches_of(Path(folder))
                    environment = {**os.environ, "PYTHONPATH": paths, "SPECRS_CACHE": f"{caches}/{name}"}
                    command = [sys.executable, "-P", __file__, "--measure", model]
                    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                    for row in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")):
                        for figure, of in cases.items():
                            of.setdefault(row["case"], {}).setdefault(name, []).append(row[figure])
                        tokens.setdefault(row["case"].rsplit(" ", 1)[0], set()).add(row["tokens"])
                        print(name, row, flush=True)
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "python")]
    from common import commit, versions
    from specrs.measuring.machine import driver

    result = {
        "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "device": torch.cuda.get_device_name(),
        "driver": driver(), "versions": versions(), "same_tokens": all(len(t) == 1 for t in tokens.values()),
        **cases,
    }  # fmt: skip
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
