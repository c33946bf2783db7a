"""``specrs layout``: draw where a request's drafts live in its pages, and what a round's tree looks like."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from specrs._specrs import ConfigError, Geometry, TreeShape
from specrs.cli import options, terminal

_MAX_LENGTH = 1 << 20


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    p = commands.add_parser("layout", help="draw pages, branches, holes, and a round's tree", description=__doc__)
    p.add_argument("--length", type=int, default=7, help="committed tokens of the request")
    p.add_argument("--page-size", type=int, default=4)
    options.add_tree(p, "3,6", nodes=False)
    p.add_argument("--layout", choices=["holey", "dense"], default="holey")
    p.add_argument("--prompt", metavar="TEXT", help="draw the trees of the greedy rounds that continue TEXT instead")
    p.add_argument("--rounds", type=int, default=1, help="with --prompt: how many rounds; files get the last one's")
    options.add_models(p)
    p.add_argument(
        "--fault", type=int, metavar="ID", help="draw what a historical fault does, instead (see `docs/faults.md`)"
    )
    p.add_argument("-o", "--output", help="also write an .svg or .png")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw."""
    from specrs.drawing.figure import check_path

    output = None if args.output is None else check_path(args.output)
    color = terminal.wants_color(sys.stdout)
    if args.fault is not None:
        return _fault(args.fault, output, color)
    shape = options.tree_of(args.tree, nodes=False)
    if args.rounds < 1:
        raise ConfigError(f"rounds = {args.rounds}: must be at least 1")
    if not 0 <= args.length <= _MAX_LENGTH:
        raise ConfigError(f"length = {args.length}: must be in 0..{_MAX_LENGTH}")
    if args.prompt is not None:
        return _trees(args, shape, output, color)
    from specrs.drawing import figure, row_cells
    from specrs.drawing.terminal import draw_row

    geometry = Geometry(1, max(args.length, 1), args.page_size, shape, args.layout)
    region = geometry.draft_region(args.length)
    cells = row_cells(geometry, args.length)
    branches = f", {region.pages_per_branch} page(s) a branch" if args.layout == "holey" else ""
    title = (
        f"{args.layout}: L={args.length} P={args.page_size} K={shape.topk} S={shape.steps}: "
        f"r={region.remainder}, base={region.base}{branches}, row needs {region.end}"
    )
    print(title)
    print(draw_row(cells, args.page_size, color, terminal.width(sys.stdout)))
    print("#: prefix  b.s: draft slot of branch b, step s  <p: hole, a copy of position p  .: unused")
    if output is not None:
        figure.save_row(cells, args.page_size, title, output)
    return 0


def _fault(fault: int, output: Any, color: bool) -> int:
    from specrs.drawing import fault_story, figure
    from specrs.drawing.terminal import draw_strips

    story = fault_story(fault)
    print(story.title)
    print(draw_strips(story.strips, color))
    print("||: where the room ends  !: what the fault writes, or leaves")
    if output is not None:
        figure.save_strips(story.strips, story.title, output)
    return 0


def _trees(args: argparse.Namespace, shape: TreeShape, output: Any, color: bool) -> int:
    from specrs.cli.tracing import trace_rounds
    from specrs.drawing import figure
    from specrs.drawing.terminal import draw_tree
    from specrs.engine import LLM

    llm = LLM(args.model, args.draft, max_batch=1, tree=shape)
    trees = trace_rounds(llm, args.prompt, args.rounds)
    if not trees:
        print("the request ended with its first token: there was no round to draw", file=sys.stderr)
        return 1
    for i, tree in enumerate(trees, start=1):
        title = f"round {i}: {len(tree.parents)} nodes, depth {max(tree.depths)}"
        print(title)
        print(draw_tree(tree, color))
    if output is not None:
        figure.save_tree(trees[-1], f"round {len(trees)}", output)
    return 0
