"""``specrs generate PROMPT``: stream text with accepted draft tokens marked, and say what speculation was worth.

Exit status 1 where ``--compare`` finds that the tokens differ from those of plain decoding, and where the request ended
with an error, such as NaN scores.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

from specrs._specrs import ConfigError
from specrs.cli import options

if TYPE_CHECKING:
    from specrs.engine import LLM, RequestOutput
    from specrs.sampling_params import SamplingParams

_COLOR = ("\x1b[32m", "\x1b[0m")
_BRACKETS = ("\u27e8", "\u27e9")
_COMPARE_RUNS = 3


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    p = commands.add_parser("generate", help="continue a prompt", description=__doc__)
    p.add_argument("prompt", nargs="?", default="def fibonacci(n):", help="text to continue; '-' reads stdin")
    options.add_models(p)
    options.add_device(p)
    options.add_threads(p)
    p.add_argument("--no-draft", action="store_true", help="decode plainly")
    p.add_argument("--mark", choices=["auto", "color", "brackets", "none"], default="auto",
                   help="how accepted draft tokens are marked; auto: color on a terminal, else none")  # fmt: skip
    p.add_argument("--compare", action="store_true", help="also time plain decoding of the same prompt")
    options.add_sampling(p)
    engine = p.add_argument_group("tree and attention")
    options.add_tree(engine)
    options.add_attention(engine)
    p.set_defaults(run=run)


def _read_stdin() -> str:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as e:
        raise ConfigError(f"stdin: not UTF-8: {e}") from None


def run(args: argparse.Namespace) -> int:
    """Generate."""
    from specrs.engine import LLM

    options.set_threads(args)
    prompt = _read_stdin() if args.prompt == "-" else args.prompt
    params = options.sampling_of(args)
    engine = options.engine_options(args)
    llm = LLM(args.model, args.draft, speculative=not args.no_draft, max_batch=1, **engine)
    output, seconds = _show(llm, prompt, params, _marks(args.mark, sys.stdout))
    rate = len(output.token_ids) / seconds
    line = f"{len(output.token_ids)} tokens, {rate:.0f} tokens/s"
    if output.rounds and llm.speculative:
        line += f", {output.mean_accepted:.2f} tokens a round"
    line += f", finished by {output.finish_reason}"
    if output.stop_reason is not None:
        line += f" {output.stop_reason!r}"
    line += f"; {output.params}" + (f", seed {output.seed}" if output.params.temperature else "")
    print(f"[on {llm.device}]\n[{line}]", file=sys.stderr)
    if output.error is not None:
        print(f"specrs: {output.error}", file=sys.stderr)
        return 1
    if args.compare and not llm.speculative:
        print("[nothing to compare: no draft head is in use]", file=sys.stderr)
    elif args.compare:
        plain = LLM(args.model, args.draft, speculative=False, max_batch=1, **engine)
        if not _compare(llm, plain, prompt, output):
            return 1
    return 0


def _marks(mark: str, out: TextIO) -> tuple[str, str]:
    if mark == "auto":
        mark = "color" if out.isatty() else "none"
    return {"color": _COLOR, "brackets": _BRACKETS, "none": ("", "")}[mark]


def _show(llm: LLM, prompt: str, params: SamplingParams, marks: tuple[str, str]) -> tuple[RequestOutput, float]:
    events = llm.stream([prompt], params)
    print(prompt, end="", flush=True)
    started = time.perf_counter()
    output = None
    for event in events:
        print(_marked(event.pieces, marks), end="", flush=True)
        output = event.output or output
    print(flush=True)
    assert output is not None
    return output, time.perf_counter() - started


def _marked(pieces: Iterable[tuple[str, bool]], marks: tuple[str, str]) -> str:
    """Text with runs of accepted draft tokens between marks."""
    parts: list[str] = []
    last = False
    for text, drafted in pieces:
        if drafted != last:
            parts.append(marks[0] if drafted else marks[1])
            last = drafted
        parts.append(text)
    return "".join(parts) + (marks[1] if last else "")


def _compare(llm: LLM, plain: LLM, prompt: str, output: RequestOutput) -> bool:
    """Both engines on the same prompt and seed, in turn; medians; whether all tokens are the same."""
    times: dict[str, list[float]] = {"speculative": [], "plain": []}
    tokens = []
    for _ in range(_COMPARE_RUNS):
        for name, engine in (("speculative", llm), ("plain", plain)):
            started = time.perf_counter()
            [again] = engine.generate([prompt], output.params)
            times[name].append(time.perf_counter() - started)
            tokens.append(again.token_ids)
    spec, base = statistics.median(times["speculative"]), statistics.median(times["plain"])
    same = all(t == output.token_ids for t in tokens)
    n = len(output.token_ids)
    print(
        f"[plain decoding: {n / base:.0f} tokens/s; speculative: {n / spec:.0f} tokens/s, {base / spec:.2f}x; "
        f"tokens {'identical' if same else 'DIFFERENT'}]",
        file=sys.stderr,
    )
    return same
