"""`acceptance.json` of a draft head's directory: how often its drafts were accepted where it was measured.

An engine begins with what the file says, so that a request's first rounds draft as deep as they should; without a file
it begins with `UNKNOWN`. On a GPU it learns the levels from there. `specrs train-head` writes the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrs.models.errors import UnsupportedModelError
from specrs.models.live import model_json

FILE = "acceptance.json"
HEATS = ("greedy", "cool", "hot")
"""Requests alike, by temperature: 0, up to 0.8, above."""


@dataclass(frozen=True)
class Acceptance:
    """Expected acceptance of a head's drafts at one heat.

    Attributes:
        temper: a node to which the head gives cumulative probability p is accepted with probability ``p ** temper``.
        levels: for each level of a tree, from the first on, the share of trees in which a node of the level is
            accepted, among those in which one of the level above is. The last share stands for deeper levels.
    """

    temper: float
    levels: tuple[float, ...] = (0.6,)

    def level(self, index: int) -> float:
        """Return the share of level ``index``, from 0."""
        return self.levels[min(index, len(self.levels) - 1)]


UNKNOWN = (Acceptance(0.7), Acceptance(1.2), Acceptance(1.6))
"""Acceptance of a head without a file, for each of `HEATS`: hopeful, so that drafts are tried. What that may cost is
bounded (`engine.drafting`). The tempers are about those of the head in the package: greedy tokens are likelier than a
head says, sampled ones less likely."""


def read_acceptance(directory: str | Path) -> tuple[Acceptance, ...]:
    """Read the acceptance from a head's directory, one for each of `HEATS`; `UNKNOWN` where the head has no file, or
    the file lacks a heat.

    Raises:
        ModelFileError: a file that is no JSON object.
        UnsupportedModelError: an unknown heat, or a value of a wrong type or out of range, by file and key.
    """
    raw, path = model_json(directory, FILE, optional=True)
    for key in raw:
        if key not in HEATS:
            raise UnsupportedModelError(key, raw[key], f"a heat is one of {', '.join(HEATS)}", path)
    each = zip(HEATS, UNKNOWN, strict=True)
    return tuple(_read(raw[heat], heat, path) if heat in raw else unknown for heat, unknown in each)


def _read(said: Any, heat: str, path: Path) -> Acceptance:
    if not isinstance(said, Mapping) or set(said) != {"temper", "levels"}:
        raise UnsupportedModelError(heat, said, "must be an object with temper and levels", path)
    temper, levels = said["temper"], said["levels"]
    if not _within(temper, 0.2, 2.0):
        raise UnsupportedModelError(f"{heat}.temper", temper, "must be a number from 0.2 to 2", path)
    if not isinstance(levels, list) or not levels or not all(_within(level, 0.0, 1.0) for level in levels):
        raise UnsupportedModelError(f"{heat}.levels", levels, "must be a list of one or more numbers from 0 to 1", path)
    return Acceptance(float(temper), tuple(map(float, levels)))


def _within(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
