"""``specrs record PROMPT -o FILE``: run the engine and keep one round's inputs, for ``specrs replay``.

The file has limits, page tables, lengths, the drafts' token ids, trees and accepted paths: no weights and no text.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from specrs.cli import options


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    p = commands.add_parser("record", help="keep one round's inputs in a file", description=__doc__)
    p.add_argument("prompt", nargs="*", default=["def fibonacci(n):"], help="texts to continue, one request each")
    p.add_argument("-o", "--output", required=True, metavar="FILE", help="the capsule to write")
    p.add_argument("--round", type=int, default=1, metavar="N", help="which round, plain ones counted (default: 1)")
    options.add_models(p)
    options.add_threads(p)
    options.add_sampling(p)
    options.add_engine(p)
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Record."""
    from specrs.engine import LLM

    options.set_threads(args)
    engine = options.engine_options(args)
    engine.setdefault("max_batch", len(args.prompt))
    llm = LLM(args.model, args.draft, **engine)
    params = options.sampling_of(args)
    with llm.recording(args.output, args.round) as recorder:
        events = llm.stream(args.prompt, params)
        while recorder.capsule is None and next(events, None) is not None:
            pass
        events.close()
    assert recorder.capsule is not None  # `recording` has refused to end without one
    print(f"{args.output}: {os.path.getsize(args.output)} bytes, {describe(recorder.capsule)}")
    return 0


def describe(c: Any) -> str:
    """A capsule in a line."""
    s = c.shape
    nodes = sum(len(t.parents) for t in c.trees)
    lengths = ", ".join(str(r.committed) for r in c.rows)
    return (
        f"{c.kind} round {c.round} of {len(c.rows)} request(s) at {lengths} tokens: "
        f"K={s.topk} S={s.steps} V={s.draft_tokens} P={s.page_size}, {s.layout} layout, {c.draft_attention}, "
        f"{c.format}; {len(c.steps)} draft step(s), {nodes} node(s) verified, {sum(c.kept)} kept"
    )
