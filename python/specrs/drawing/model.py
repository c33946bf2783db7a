"""The things to draw, computed from the same geometry that the planner uses."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from specrs._specrs import Geometry


class Kind(enum.Enum):
    """Content of a slot of the row."""

    PREFIX = "prefix"
    HOLE = "hole"  # must hold a copy of the prefix's tail
    DRAFT = "draft"
    FREE = "free"
    NUMBER = "number"  # an entry of an array
    WRONG = "wrong"  # an element that a fault writes where it must not, or leaves


@dataclass(frozen=True)
class Cell:
    """One row position, or one entry of an array. ``branch`` and ``step`` are those of a draft slot; ``source`` the
    position a hole copies; ``text`` stands for the usual label."""

    kind: Kind
    branch: int = -1
    step: int = -1
    source: int = -1
    text: str = ""

    @property
    def label(self) -> str:
        """Short text for the cell."""
        if self.text:
            return self.text
        if self.kind is Kind.DRAFT:
            return f"{self.branch}.{self.step}"
        return {Kind.PREFIX: "#", Kind.HOLE: f"<{self.source}"}.get(self.kind, "")


def row_cells(geometry: Geometry, length: int) -> list[Cell]:
    """Every position of a request's row up to the end of its draft region, in whole pages.

    Args:
        geometry: tree shape, page size and layout.
        length: committed tokens L; the prefix is ``[0, L)``.
    """
    region = geometry.draft_region(length)
    page = geometry.page_size
    cells = [Cell(Kind.PREFIX)] * length + [Cell(Kind.FREE)] * (-(-region.end // page) * page - length)
    for b in range(geometry.shape.topk):
        hole = region.hole(b)
        if hole is not None:
            src, dst, n = hole
            for i in range(n):
                cells[dst + i] = Cell(Kind.HOLE, branch=b, source=src + i)
        for s in range(geometry.shape.steps):
            cells[region.pos(b, s)] = Cell(Kind.DRAFT, branch=b, step=s)
    return cells


def folded_pages(cells: Sequence[Cell], page_size: int) -> int:
    """Return how many pages at the front pictures leave out: those that hold nothing but prefix, without the last of
    them."""
    prefix = next((i for i, c in enumerate(cells) if c.kind is not Kind.PREFIX), len(cells))
    return max(prefix // page_size - 1, 0)


@dataclass(frozen=True)
class Strip:
    """A line of cells under a heading: a row, an array, a row of a table.

    Attributes:
        heading: name of the strip.
        cells: entries of the strip.
        group: cells that belong together (a page, a branch); they get one border.
        limit: cells that there is room for; ``None`` where room is not the matter.
    """

    heading: str
    cells: Sequence[Cell]
    group: int = 1
    limit: int | None = None

    @property
    def fits(self) -> bool:
        """True if there is room for every entry."""
        return self.limit is None or len(self.cells) <= self.limit


@dataclass(frozen=True)
class TreePicture:
    """A verified tree: per node its parent (-1: root), text, draft probability of its path, and whether accepted."""

    parents: Sequence[int]
    texts: Sequence[str]
    probabilities: Sequence[float]
    accepted: frozenset[int]
    bonus: str

    @property
    def depths(self) -> list[int]:
        """Depth of each node."""
        depths: list[int] = []
        for p in self.parents:
            depths.append(0 if p < 0 else depths[p] + 1)
        return depths

    def children(self, node: int) -> list[int]:
        """Children of a node, in order."""
        return [i for i, p in enumerate(self.parents) if p == node]
