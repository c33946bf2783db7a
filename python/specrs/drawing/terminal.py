"""Drawings in characters."""

from __future__ import annotations

from collections.abc import Sequence

from specrs.drawing.model import Cell, Kind, Strip, TreePicture, folded_pages

_COLORS = {Kind.PREFIX: "34", Kind.HOLE: "33", Kind.DRAFT: "32", Kind.FREE: "2",
           Kind.NUMBER: "0", Kind.WRONG: "1;31"}  # fmt: skip


def paint(text: str, code: str, color: bool) -> str:
    """``text`` in an ANSI color, where ``color``."""
    return f"\x1b[{code}m{text}\x1b[0m" if color and text.strip() else text


def aligned(rows: Sequence[tuple[str, ...]], align: str) -> list[str]:
    """Lines of a table.

    Args:
        rows: cells, as many in each row as ``align`` has characters.
        align: ``<`` or ``>`` for each column.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(align))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in rows
    ]


def draw_row(cells: Sequence[Cell], page_size: int, color: bool, width: int = 100) -> str:
    """Draw pages as boxes of slots, as many on a line as ``width`` columns hold, and at least one; runs of pages that
    hold nothing but prefix are folded."""
    cell_width = max((len(c.label) for c in cells), default=1)
    pages = [list(cells[i : i + page_size]) for i in range(0, len(cells), page_size)]
    per_line = max(1, (width + 1) // ((cell_width + 1) * page_size + 2))  # a box, and the space behind it
    lines: list[str] = []
    boxes: list[str] = []

    def flush() -> None:
        if boxes:
            lines.append(" ".join(boxes))
            boxes.clear()

    folded = folded_pages(cells, page_size)
    if folded:
        lines.append(f"  {folded} full page(s) of prefix: positions 0..{folded * page_size - 1}")
    for page in pages[folded:]:
        inner = " ".join(paint(f"{c.label or '.':>{cell_width}}", _COLORS[c.kind], color) for c in page)
        boxes.append(f"[{inner}]")
        if len(boxes) == per_line:
            flush()
    flush()
    return "\n".join(lines)


def draw_strips(strips: Sequence[Strip], color: bool) -> str:
    """Draw each strip under its heading; ``||`` is the end of the room, ``!`` marks each wrong cell."""
    lines: list[str] = []
    for strip in strips:
        wrong = [c.kind is Kind.WRONG for c in strip.cells]
        texts = [f"{c.label or '.'}{'!' if bad else ''}" for c, bad in zip(strip.cells, wrong, strict=True)]
        width = max((len(t) for t in texts), default=1)
        line = ""
        for i, (cell, text) in enumerate(zip(strip.cells, texts, strict=True)):
            border = "||" if i == strip.limit else "|" if i % strip.group == 0 else " "
            line += f"{border:<2} {paint(f'{text:>{width}}', _COLORS[cell.kind], color)} "
        end = "||" if strip.limit is not None and len(strip.cells) <= strip.limit else "|"
        lines += [strip.heading, f"  {line}{end}"]
    return "\n".join(lines)


def draw_tree(tree: TreePicture, color: bool) -> str:
    """The tree as an indented listing; accepted nodes are starred."""
    lines = [_node(tree, 0, color)]

    def walk(node: int, indent: str) -> None:
        children = tree.children(node)
        for i, child in enumerate(children):
            last = i == len(children) - 1
            lines.append(f"{indent}{'└─ ' if last else '├─ '}{_node(tree, child, color)}")
            walk(child, indent + ("   " if last else "│  "))

    walk(0, "")
    lines.append(f"accepted {len(tree.accepted) - 1} draft token(s), then drew {tree.bonus!r}")
    return "\n".join(lines)


def _node(tree: TreePicture, node: int, color: bool) -> str:
    accepted = node in tree.accepted
    text = f"{tree.texts[node]!r}"
    if node > 0:
        text += f" {tree.probabilities[node]:.2f}"
    return paint(f"{'* ' if accepted else ''}{text}", "32" if accepted else "2", color)
