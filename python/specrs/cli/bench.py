"""``specrs bench [MODEL]``: what a round takes on this machine, with drafts and without, and what memory allows.

Without MODEL it measures the small model in the package; with ``--shape`` a model of random weights, which needs no
checkpoint. docs/bench.md explains every figure.

Exit status 1 where drafts changed a token, or no case could be measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs._specrs import ConfigError, SpecrsError, __version__
from specrs.cli import options

if TYPE_CHECKING:
    from specrs.measuring.cases import Subject
    from specrs.measuring.report import Report


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    p = commands.add_parser("bench", help="time rounds of a model, or of a shape, on this machine",
                            description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    options.add_models(p, positional=True)
    p.add_argument("--shape", metavar="NAME", help="random weights in a published shape, such as llama-3.1-8b, or in "
                                                   "that of a config.json")  # fmt: skip
    p.add_argument("--layers", type=int, metavar="N", help="layers of the shape to keep (default: all)")
    p.add_argument("--device", metavar="NAME", help="auto, cpu, cuda or cuda:N (default: auto)")
    p.add_argument("--batch", metavar="N[,N]", help="requests at once (default: 1,8; on a CPU 1,4)")
    p.add_argument("--context", metavar="N[,N]", help="tokens of each prompt (default: 1024,8192; on a CPU 256,1024)")
    p.add_argument("--tree", metavar="K,S,V",
                   help="tree of rounds with drafts (default: by batch, 8,6,64 for one; on a CPU 1,4,5)")  # fmt: skip
    p.add_argument("--rounds", type=int, metavar="N",
                   help="rounds that count, of each kind (default: 24; on a CPU 12)")  # fmt: skip
    p.add_argument("--kernels", action="store_true", help="also GPU time of a round by kernel")
    p.add_argument("--json", metavar="FILE", help="write everything as JSON")
    p.add_argument("--plot", metavar="FILE", help="draw the rounds: .svg or .png")
    p.add_argument("--progress", action=argparse.BooleanOptionalAction, help="a bar (default: on a terminal)")
    options.add_threads(p)
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, and print.

    Raises:
        ConfigError: options that contradict each other, or that the model or the device does not have.
    """
    from specrs.drawing import figure

    options.set_threads(args)
    for name, path in (("json", args.json), ("plot", args.plot)):
        if path is not None and not Path(path).parent.is_dir():
            raise ConfigError(f"{name} = {path!r}: no such directory")
    plot = None if args.plot is None else figure.check_path(args.plot)
    with ExitStack() as stack:
        report = _measured(_subject(args, stack), args)
    print(report.text())
    if args.json is not None:
        Path(args.json).write_text(json.dumps(report.record(), indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        figure.save_rounds(
            [(f"{r.case.batch} x {r.case.context}",
              [(t.ms, t.floor_ms) if t is not None else None for t in (r.plain, r.tree)]) for r in report.rows],
            f"{report.model['name']} on {report.machine['device']}", plot,
        )  # fmt: skip
    return 0 if report.identical and any(row.error is None for row in report.rows) else 1


def _subject(args: argparse.Namespace, stack: ExitStack) -> Subject:
    """Return the model that the options name; a shape's weights are random until the stack is closed."""
    from specrs.measuring.cases import Subject
    from specrs.measuring.shapes import directories, random_weights, shape_config

    device = None if args.device == "auto" else args.device
    if args.shape is None:
        if args.layers is not None:
            raise ConfigError(f"layers = {args.layers}: only a --shape can be cut; a MODEL keeps its layers")
        return Subject.of(args.model, args.draft, device)
    for name, value in (("MODEL", args.model), ("--draft", args.draft)):
        if value is not None:
            raise ConfigError(f"{name} {value!r} with --shape {args.shape}: a model, or a shape of random weights")
    config = shape_config(args.shape, args.layers)
    root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    stack.enter_context(random_weights())
    return Subject.of(*directories(root, config), device, name=args.shape, random=True)


def _measured(subject: Subject, args: argparse.Namespace) -> Report:
    from specrs import progress
    from specrs.measuring import cases, kernels, machine
    from specrs.measuring.floors import bandwidth
    from specrs.measuring.report import Report

    tree = None
    if args.tree is not None:
        shape = options.tree_of(args.tree)
        tree = (shape.topk, shape.steps, shape.draft_tokens)
    if args.kernels and subject.on_host:
        raise ConfigError(f"kernels: times of a GPU's kernels; the device is {subject.device}")
    counted = args.rounds if args.rounds is not None else 12 if subject.on_host else 24
    batches, contexts = (_numbers(name, getattr(args, name)) for name in ("batch", "context"))
    todo = cases.cases_of(subject, batches, contexts, tree, counted)
    answers = not subject.random and (subject.model / "tokenizer.json").exists()
    total = len(todo) * (2 if args.kernels else 1) + answers
    report = Report(
        {
            "specrs": __version__, "commit": machine.commit_of(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "device": subject.device, "driver": None if subject.on_host else machine.driver(),
            "versions": machine.versions(),
        },
        {
            "name": subject.name, "random_weights": subject.random, "layers": subject.sizes.num_layers,
            "weights_dtype": f"{8 * subject.weight_size} bits",
            "draft": None if subject.draft is None else "random" if subject.random else subject.draft.name,
            "rounds": counted,
        },
        bandwidth(subject.place.device),
    )  # fmt: skip
    with progress.measurements(total, args.progress) as tell:
        for case in todo:
            tell(f"batch {case.batch}, context {case.context}")
            report.rows.append(cases.measured(subject, case, report.bytes_per_second))
        if answers:
            tell("answers")
            try:
                report.answers = cases.answered(subject)
            except SpecrsError as error:  # what was timed before stays
                report.answers_error = kernels.reason(error)
        if args.kernels:
            kernels.attach()
            for case in todo:
                tell(f"kernels of batch {case.batch}, context {case.context}")
                report.kernels.append(cases.profiled_case(subject, case))
    return report


def _numbers(name: str, text: str | None) -> list[int] | None:
    """The numbers of ``1,8``.

    Raises:
        ConfigError: something else than numbers.
    """
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name} = {text!r}: must be numbers, as 1,8") from None
