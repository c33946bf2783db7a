"""The command line, a module for each subcommand."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from specrs._specrs import SpecrsError, __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; errors of specrs and of files are one line on stderr and exit status 2."""
    from specrs.cli import bench, certify, chat, doctor, generate, layout, record, replay, serve, train_head

    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character gets its code, not an error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    parser = argparse.ArgumentParser(prog="specrs", description="Exact tree speculative decoding.")
    parser.add_argument("--version", action="version", version=f"specrs {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for module in (generate, chat, serve, layout, certify, record, replay, doctor, bench, train_head):
        module.add_parser(commands)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader went, as with `| head`; later output goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (SpecrsError, OSError) as e:
        print(f"specrs: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status
