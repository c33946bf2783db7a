"""The command line: ``specrs generate``, ``specrs layout``, ``specrs certify``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from specrs._specrs import SpecrsError, __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; errors of specrs are one line on stderr and exit status 2."""
    from specrs.cli import certify, generate, layout

    parser = argparse.ArgumentParser(prog="specrs", description="Exact tree speculative decoding.")
    parser.add_argument("--version", action="version", version=f"specrs {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (generate, layout, certify):
        module.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except SpecrsError as e:
        print(f"specrs: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return 130
    return status
