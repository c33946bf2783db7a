"""Drawings as SVG or PNG, by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specrs._specrs import ConfigError
from specrs.drawing.model import Cell, Kind, Strip, TreePicture, folded_pages

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FILL = {
    Kind.PREFIX: "#9ecae1",
    Kind.HOLE: "#fdd0a2",
    Kind.DRAFT: "#a1d99b",
    Kind.FREE: "#ffffff",
    Kind.NUMBER: "#f0f0f0",
    Kind.WRONG: "#fb6a4a",
}
_NAMES = {
    Kind.PREFIX: "prefix",
    Kind.HOLE: "hole: copy of the prefix's tail",
    Kind.DRAFT: "draft: branch.step",
    Kind.FREE: "unused",
    Kind.NUMBER: "entry",
    Kind.WRONG: "the fault",
}
_SLOTS_PER_LINE = 32
_FOLD_ABOVE = 4  # pages
_MAX_LABEL = 14  # characters of a token


def check_path(path: str | Path) -> Path:
    """A path to write to, or an error that names the endings that work."""
    path = Path(path)
    if path.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"output = {str(path)!r}: must end in .svg or .png")
    return path


def save_row(cells: Sequence[Cell], page_size: int, title: str, path: Path) -> None:
    """Write a request's pages; a long prefix is folded."""
    folded = folded_pages(cells, page_size)
    first = folded * page_size if folded > _FOLD_ABOVE else 0
    cells = cells[first:]
    if first:
        title += f"\nnot drawn: {folded} full pages of prefix, positions 0..{first - 1}"
    per_line = max(_SLOTS_PER_LINE // page_size, 1) * page_size
    lines = -(-len(cells) // per_line)
    figure, axes = _axes(0.42 * min(per_line, len(cells)) + 1.2, 0.75 * lines + 1.1)
    from matplotlib.patches import Patch, Rectangle

    for i, cell in enumerate(cells):
        x, y = i % per_line, -(i // per_line) * 1.6
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=_FILL[cell.kind], edgecolor="#bbbbbb", linewidth=0.6))
        label = "" if cell.kind is Kind.PREFIX else cell.label
        size = 7 if len(label) <= 4 else 26 / len(label)  # the size that fits a cell's width
        axes.text(x + 0.5, y + 0.5, label, ha="center", va="center", size=size)
        if i % page_size == 0:
            end = min(page_size, len(cells) - i)
            axes.add_patch(Rectangle((x, y), end, 1, fill=False, edgecolor="#333333", linewidth=1.4, zorder=2))
            axes.text(x, y + 1.08, str(first + i), size=6, color="#666666")
    used = {c.kind for c in cells}
    handles = [Patch(facecolor=_FILL[k], edgecolor="#bbbbbb", label=_NAMES[k]) for k in Kind if k in used]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.02), ncols=4, frameon=False, fontsize=8)
    axes.set_xlim(-0.2, min(per_line, len(cells)) + 0.2)
    axes.set_ylim(-(lines - 1) * 1.6 - 0.2, 1.6)
    _save(figure, axes, title, path)


def save_strips(strips: Sequence[Strip], title: str, path: Path) -> None:
    """Write strips one below the other, a thick line where the room of each ends."""
    from matplotlib.patches import Patch, Rectangle

    longest = max(max(len(s.cells), s.limit or 0) for s in strips)
    figure, axes = _axes(0.55 * longest + 0.6, 0.8 * len(strips) + 0.9)
    for row, strip in enumerate(strips):
        y = -row * 2.1
        axes.text(0, y + 1.3, strip.heading, size=8, color="#333333")
        for x, cell in enumerate(strip.cells):
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=_FILL[cell.kind], edgecolor="#bbbbbb", linewidth=0.6))
            size = 8 if len(cell.label) <= 4 else 34 / len(cell.label)
            axes.text(x + 0.5, y + 0.5, cell.label, ha="center", va="center", size=size)
            if x % strip.group == 0:
                end = min(strip.group, len(strip.cells) - x)
                axes.add_patch(Rectangle((x, y), end, 1, fill=False, edgecolor="#333333", linewidth=1.2, zorder=2))
        if strip.limit is not None:
            axes.plot([strip.limit] * 2, [y - 0.25, y + 1.1], color="#cb181d", linewidth=2.5, zorder=3)
    used = {c.kind for s in strips for c in s.cells}
    handles = [Patch(facecolor=_FILL[k], edgecolor="#bbbbbb", label=_NAMES[k]) for k in Kind if k in used]
    if any(s.limit is not None for s in strips):
        handles.append(Patch(facecolor="#cb181d", label="end of the room"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.02), ncols=3, frameon=False, fontsize=8)
    axes.set_xlim(-0.2, longest + 0.3)
    axes.set_ylim(-(len(strips) - 1) * 2.1 - 0.4, 2)
    _save(figure, axes, title, path)


def save_tree(tree: TreePicture, title: str, path: Path) -> None:
    """Write a round's tree."""
    places = _places(tree)
    depth, rows = max(tree.depths), max(y for _, y in places) + 1
    figure, axes = _axes(1.5 * (depth + 1), 0.28 * rows + 0.5)
    for i, (x, y) in enumerate(places):
        p = tree.parents[i]
        on_path = i in tree.accepted
        if p >= 0:
            px, py = places[p]
            color, width = ("#31a354", 2) if on_path else ("#bbbbbb", 1)
            axes.plot([px, px + 0.5, x], [py, y, y], color=color, linewidth=width, zorder=1)
        label = _short(repr(tree.texts[i])) + (f" {tree.probabilities[i]:.2f}" if i else "")
        box = {"boxstyle": "round", "facecolor": "#a1d99b" if on_path else "#f0f0f0", "edgecolor": "#888888"}
        axes.text(x, y, label, ha="center", va="center", size=7, bbox=box, zorder=2, family="monospace",
                  parse_math=False)  # fmt: skip
    axes.set_xlim(-0.5, depth + 0.5)
    axes.set_ylim(rows - 0.4, -0.6)  # the best first, at the top
    _save(figure, axes, f"{title}: accepted {len(tree.accepted) - 1} draft token(s), then drew {tree.bonus!r}", path)


def save_rounds(cases: Sequence[tuple[str, Sequence[tuple[float, float] | None]]], title: str, path: Path) -> None:
    """Write milliseconds of plain rounds and of rounds with trees as bars, a line in each where its floor is.

    Args:
        cases: name of each case; milliseconds and floor of both kinds of rounds, ``None`` where one was not measured.
    """
    figure, axes = _axes(1.4 * len(cases) + 2, 3.6)
    for kind, (name, color, left) in enumerate((("plain round", "#9ecae1", -0.4), ("with a tree", "#a1d99b", 0.0))):
        label: str | None = name
        for x, (_, rounds) in enumerate(cases):
            if (found := rounds[kind]) is None:
                continue
            ms, floor = found
            axes.bar(x + left, ms, 0.38, align="edge", color=color, edgecolor="#888888", label=label)
            axes.plot([x + left, x + left + 0.38], [floor, floor], color="#cb181d", linewidth=2)
            axes.text(x + left + 0.19, ms, f"{ms:.3g}", ha="center", va="bottom", size=7)
            label = None
    axes.plot([], [], color="#cb181d", linewidth=2, label="floor: weights and KV are read")
    axes.set_xticks(range(len(cases)), [name for name, _ in cases], size=8)
    axes.set_xlabel("requests x context", size=8)
    axes.set_ylabel("milliseconds of a round", size=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.15)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=3)
    axes.set_title(title, fontsize=9, parse_math=False)
    _write(figure, path)


def save_head(
    curve: Mapping[str, Sequence[tuple[float, float]]],
    kinds: Mapping[str, Sequence[float]],
    names: Sequence[str],
    title: str,
    path: Path,
) -> None:
    """Write a draft head's loss on held-out text as lines, and beside them tokens a round as bars.

    Args:
        curve: for each kind of text, tokens that were trained on and the loss then.
        kinds: for each kind of text, a bar's height for each of ``names``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 + max(1.1 * len(kinds), 3), 3.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(4, max(1.1 * len(kinds), 3)))
    for kind, points in curve.items():
        left.plot([at for at, _ in points], [loss for _, loss in points], marker=".", label=kind)
    left.set_xlabel("tokens that were trained on", size=8)
    left.set_ylabel("loss on held-out text, first draft", size=8)
    if curve:
        left.legend(frameon=False, fontsize=7)
    wide = 0.8 / len(names)
    for i, (name, color) in enumerate(zip(names, ("#9ecae1", "#a1d99b", "#fdd0a2"), strict=False)):
        heights = [values[i] for values in kinds.values()]
        at = [x - 0.4 + i * wide for x in range(len(kinds))]
        right.bar(at, heights, wide, align="edge", color=color, edgecolor="#888888", label=name)
        for x, height in zip(at, heights, strict=True):
            right.text(x + wide / 2, height, f"{height:.2f}", ha="center", va="bottom", size=7)
    right.axhline(1.0, color="#cb181d", linewidth=1.2, label="plain decoding")
    right.set_xticks(range(len(kinds)), list(kinds), size=7)
    right.set_ylabel("tokens a round", size=8)
    right.margins(y=0.25)
    right.legend(frameon=False, fontsize=7)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7)
    figure.suptitle(title, fontsize=9)
    _write(figure, path)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 2]}\u2026{text[-1]}"


def _places(tree: TreePicture) -> list[tuple[float, float]]:
    """x: depth. y: leaves one below the other, each parent beside the middle of its children."""
    y: dict[int, float] = {}
    free = 0.0

    def place(node: int) -> None:
        nonlocal free
        children = tree.children(node)
        for child in children:
            place(child)
        if children:
            y[node] = (y[children[0]] + y[children[-1]]) / 2
        else:
            y[node] = free
            free += 1

    place(0)
    return [(float(d), y[i]) for i, d in enumerate(tree.depths)]


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(width, 4), height), dpi=150)
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _save(figure: Figure, axes: Axes, title: str, path: Path) -> None:
    axes.set_title(title, fontsize=9, parse_math=False)
    axes.axis("off")
    _write(figure, path)


def _write(figure: Figure, path: Path) -> None:
    if path.suffix.lower() != ".svg":
        figure.savefig(path, bbox_inches="tight")
        return
    from matplotlib import rc_context

    # The same bytes in every run, and text that is text: small files whose changes can be read.
    with rc_context({"svg.hashsalt": "specrs", "svg.fonttype": "none"}):
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Creator": None})
