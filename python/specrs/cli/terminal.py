"""Texts for a terminal: accepted drafts between marks, colours where they are wanted, a request in a line."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

from specrs._specrs import ConfigError

if TYPE_CHECKING:
    from specrs.engine import LLM, RequestOutput

Marks = tuple[str, str]
_COLOR = ("\x1b[32m", "\x1b[0m")
_BRACKETS = ("\u27e8", "\u27e9")
_PIPED_WIDTH = 100


def wants_color(out: TextIO) -> bool:
    """Return whether to write ANSI colours: yes on a terminal, unless ``NO_COLOR`` (https://no-color.org) is set or the
    terminal is dumb."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width(out: TextIO) -> int:
    """Columns of the terminal; ``COLUMNS`` where that is set, and 100 where ``out`` is none."""
    if not out.isatty() and "COLUMNS" not in os.environ:
        return _PIPED_WIDTH
    return shutil.get_terminal_size((_PIPED_WIDTH, 24)).columns


def add_mark(parser: Any) -> None:
    """Declare --mark."""
    parser.add_argument("--mark", choices=["auto", "color", "brackets", "none"], default="auto",
                        help="how accepted draft tokens are marked; auto: color on a terminal without NO_COLOR, "
                             "else none")  # fmt: skip


def marks_of(mark: str, out: TextIO) -> Marks:
    """Return the marks that --mark names: one before and one behind a run of accepted draft tokens."""
    if mark == "auto":
        mark = "color" if wants_color(out) else "none"
    return {"color": _COLOR, "brackets": _BRACKETS, "none": ("", "")}[mark]


def marked(pieces: Iterable[tuple[str, bool]], marks: Marks) -> str:
    """Text with runs of accepted draft tokens between marks."""
    parts: list[str] = []
    last = False
    for text, drafted in pieces:
        if drafted != last:
            parts.append(marks[0] if drafted else marks[1])
            last = drafted
        parts.append(text)
    return "".join(parts) + (marks[1] if last else "")


def summary(llm: LLM, output: RequestOutput, seconds: float) -> str:
    """Return amount and speed of the output in a line: ``64 tokens, 310 tokens/s, 2.10 tokens a round, finished by
    length``."""
    line = f"{len(output.token_ids)} tokens, {len(output.token_ids) / seconds:.0f} tokens/s"
    if output.rounds and llm.speculative:
        line += f", {output.mean_accepted:.2f} tokens a round"
    line += f", finished by {output.finish_reason}"
    return line if output.stop_reason is None else f"{line} {output.stop_reason!r}"


def read_stdin() -> str:
    """All of stdin, as UTF-8 wherever it is.

    Raises:
        ConfigError: the input is not UTF-8.
    """
    try:
        return utf8_stdin().read()
    except UnicodeDecodeError as e:
        raise ConfigError(f"stdin: not UTF-8: {e}") from None


def utf8_stdin() -> TextIO:
    """stdin, read as UTF-8 whatever the locale says."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8")
    return sys.stdin
