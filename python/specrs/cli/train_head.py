"""``specrs train-head MODEL --out DIR``: train a draft head for a model, on one GPU or the CPU.

It learns from text of yours (``--text``) and from the model's own answers: to your prompts (``--prompts``), and to
beginnings cut from the text. About one document in twenty is held out, and the report is of those. Ctrl-C ends the
training with the report of what there is; ``--resume`` goes on from there. docs/train.md has more.

Exit status 0: the head is faster than plain decoding on this machine. 3: it is not. 1: tokens differ, or ``specrs
doctor`` has a problem with the head. 2: the command is wrong, or the training diverged.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.cli import jsonl, options

if TYPE_CHECKING:
    from specrs.train.documents import Document

_TRAINING: dict[str, tuple[type, str, str]] = {
    "form": (str, "NAME", "eagle3, dspark or dflash (default: eagle3)"),
    "minutes": (float, "N", "train for so long, answers included (default: 10)"),
    "tokens": (int, "N", "train on so many tokens instead"),
    "layers": (int, "N", "decoder layers of the head (default: 1; of dspark and dflash 2)"),
    "length": (int, "N", "tokens of a row of text (default: 1024; on a CPU 256)"),
    "batch": (int, "N", "rows of a step (default: 32; on a CPU 4)"),
    "rate": (float, "R", "highest learning rate (default: 0.003)"),
    "draft_vocab": (int, "N", "tokens that the head can draft (default: a quarter of the model's, 4096 to 32768)"),
    "intermediate": (int, "N", "inner width of the head's MLP (default: the model's)"),
    "block": (int, "N", "of dspark and dflash, levels of a block (default: 7)"),
    "markov_rank": (int, "N", "of dspark, width of its Markov head (default: 128)"),
    "answer_tokens": (int, "N", "most tokens of an answer; 0: learn from the text alone (default: 256)"),
    "seed": (int, "N", "seed of weights, order and answers (default: 0)"),
}


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    p = commands.add_parser("train-head", help="train a draft head for a model", description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    options.add_model(p, positional=True)
    p.add_argument("--out", required=True, metavar="DIR", help="directory of the head, empty or not there")
    p.add_argument("--text", nargs="+", action="extend", default=[], metavar="PATH",
                   help="files, or directories of files: a document each; of .jsonl files one a line")  # fmt: skip
    p.add_argument("--prompts", metavar="FILE.jsonl",
                   help="prompts to answer, a line each, as for `specrs generate --prompts-file`; a line may have a "
                        "kind; '-' reads stdin")  # fmt: skip
    p.add_argument("--resume", action="store_true", help="go on from the checkpoint in DIR, with the same options")
    p.add_argument("--device", metavar="NAME", help="auto, cpu, cuda or cuda:N (default: auto)")
    p.add_argument("--report-prompts", type=int, default=8, metavar="N",
                   help="held-out prompts of each kind of text in the report (default: 8)")  # fmt: skip
    p.add_argument("--progress", action=argparse.BooleanOptionalAction, help="bars (default: on a terminal)")
    group = p.add_argument_group("training")
    for name, (kind, value, about) in _TRAINING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=value, help=about)
    options.add_threads(p)
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, print the report, and look at the head as ``specrs doctor`` does.

    Raises:
        ConfigError: options, files, or a model that will not do.
        TrainingError: the training diverged.
    """
    from specrs.cli import doctor
    from specrs.train.session import Asked, Session

    options.set_threads(args)
    asked = Asked(
        model=args.model,
        out=Path(args.out),
        text=args.text,
        prompts=_prompts(args.prompts),
        device=None if args.device == "auto" else args.device,
        resume=args.resume,
        report_prompts=args.report_prompts,
        options={name: getattr(args, name) for name in _TRAINING},
        progress=args.progress,
    )
    session = Session(asked, lambda line: print(f"[{line}]", file=sys.stderr))
    report = session.run()
    print(report.text())
    examined = doctor.examined(session.model, args.out, {"device": session.measured_on})
    for problem in examined.problems:
        print(f"doctor, {problem.section}, {problem.name}: {problem.problem}; remedy: {problem.remedy}")
    if not examined.problems:
        print("doctor: no problems")
    if not report.record["finished"]:
        print("ended before its time; --resume goes on")
    if examined.problems or not report.found.identical:
        return 1
    return 0 if report.found.pays else 3


def _prompts(name: str | None) -> list[Document[Any]]:
    """Prompts of a file, each with its kind: that of its line, or else the file's name."""
    from specrs.train.documents import Document

    if name is None:
        return []
    usual = "prompts" if name == "-" else Path(name).stem
    return jsonl.each(name, lambda number, kind, said: Document.of(str(said.get("kind") or usual), {kind: said[kind]}))
