"""``specrs generate PROMPT``: stream text with accepted draft tokens marked, and tell the gain from speculation.

With ``--prompts-file`` every line of a file is a prompt, and every output a line of JSON on stdout (docs/options.md).

Exit status 1 where ``--compare`` finds that the tokens differ from those of plain decoding, and where a request ended
with an error, such as NaN scores; a line of a file also where the engine refused it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from specrs._specrs import ConfigError
from specrs.cli import comparing, jsonl, options, terminal

if TYPE_CHECKING:
    from specrs.engine import LLM, RequestOutput
    from specrs.sampling_params import SamplingParams

_PROMPT = "def fibonacci(n):"


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    p = commands.add_parser("generate", help="continue a prompt, or a file of prompts", description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("prompt", nargs="?", help=f"text to continue; '-' reads stdin (default: {_PROMPT!r})")
    p.add_argument("--prompts-file", metavar="FILE",
                   help="run every line: a text in quotes, or an object with prompt, prompt_token_ids or messages, and "
                        "sampling parameters of its own; '-' reads stdin")  # fmt: skip
    p.add_argument("--json", action="store_true", help="print the output as a line of JSON")
    options.add_models(p)
    options.add_threads(p)
    p.add_argument("--no-draft", action="store_true", help="decode plainly")
    terminal.add_mark(p)
    p.add_argument("--compare", action="store_true",
                   help=f"also time plain decoding of the same prompt, in {comparing.PAIRS} pairs of runs")  # fmt: skip
    options.add_sampling(p)
    options.add_engine(p)
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate.

    Raises:
        ConfigError: options that contradict each other, prompts that are none; and as `specrs.LLM`.
    """
    from specrs.engine import LLM

    options.set_threads(args)
    params, engine = options.sampling_of(args), options.engine_options(args)
    if args.prompts_file is not None:
        for name, given in (("PROMPT", args.prompt is not None), ("--compare", args.compare)):
            if given:
                raise ConfigError(f"{name} with --prompts-file: one prompt, or the lines of a file")
        asked = jsonl.read(args.prompts_file, args)
        with LLM(args.model, args.draft, speculative=not args.no_draft, **engine) as llm:
            return jsonl.run(llm, asked, sys.stdout, sys.stderr)
    prompt = {None: _PROMPT, "-": None}.get(args.prompt, args.prompt)
    prompt = terminal.read_stdin() if prompt is None else prompt
    engine.setdefault("max_batch", 1)
    with LLM(args.model, args.draft, speculative=not args.no_draft, **engine) as llm:
        output, seconds = _answer(llm, prompt, params, args)
        print(f"[on {llm.device}]\n[{_line(llm, output, seconds)}]", file=sys.stderr)
        found = None
        if output.error is not None:
            print(f"specrs: {output.error}", file=sys.stderr)
        elif args.compare and not llm.speculative:
            why = comparing.why_plain(args.no_draft, args.drafters)
            print(f"[nothing to compare: {why}]", file=sys.stderr)
        elif args.compare:
            with LLM(args.model, args.draft, speculative=False, **engine) as plain:
                found = comparing.compare(llm, plain, prompt, output)
            print(f"[{found.line()}]", file=sys.stderr)
        if args.json:
            print(json.dumps(_record(llm, output, seconds, found), ensure_ascii=False))
    return 1 if output.error is not None or (found is not None and not found.identical) else 0


def _answer(llm: LLM, prompt: str, params: SamplingParams, args: argparse.Namespace) -> tuple[RequestOutput, float]:
    """The prompt's output, streamed as text unless it is to be JSON."""
    marks = terminal.marks_of(args.mark, sys.stdout)
    events = llm.stream([prompt], params)
    if not args.json:
        print(prompt, end="", flush=True)
    started = time.perf_counter()
    output = None
    for event in events:
        if not args.json:
            print(terminal.marked(event.pieces, marks), end="", flush=True)
        output = event.output or output
    seconds = time.perf_counter() - started
    if not args.json:
        print(flush=True)
    assert output is not None
    return output, seconds


def _line(llm: LLM, output: RequestOutput, seconds: float) -> str:
    seed = f", seed {output.seed}" if output.params.temperature else ""
    return f"{terminal.summary(llm, output, seconds)}; {output.params}{seed}"


def _record(llm: LLM, output: RequestOutput, seconds: float, found: comparing.Comparison | None) -> dict[str, Any]:
    record = {"device": llm.device, **jsonl.record_of(output), "seconds": round(seconds, 6)}
    return record if found is None else {**record, "compare": found.record()}
