"""`Capsule`: from and to the value that a file holds, with a check of every field.

`Capsule.from_json` accepts only what `Capsule.to_json` can write: each field has its type, its range and its length,
and fields that say the same thing twice must agree (page tables with lengths, ancestor bits with parents, paths with
trees), so that a replay that starts from a capsule cannot meet an impossible round.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from specrs._specrs import ConfigError
from specrs.backends.base import DRAFT_ATTENTIONS, FORMATS, LAYOUTS, DraftAttention, Format, Layout
from specrs.capsule import consistency
from specrs.capsule.container import MAX_VALUES
from specrs.capsule.errors import CapsuleError
from specrs.capsule.parts import DraftStep, Extend, Fields, Kind, PoolSize, Row, Shape, Tree

_INT32 = 2**31 - 1
_OWNER = re.compile(r"sequence (0|[1-9][0-9]{0,9})\.(0|[1-9][0-9]{0,9})|prefix cache|raw pages")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Capsule(Fields):
    """One round's inputs: no weights, no text, no KV. `specrs.capsule.parts.Fields` has its fields."""

    def to_json(self) -> dict[str, Any]:
        """The value that a file holds; ``-inf`` is null."""
        s, p = self.shape, self.pool
        return {
            "round": self.round,
            "kind": self.kind,
            "format": self.format,
            "draft_attention": self.draft_attention,
            "shape": {name: getattr(s, name) for name in s.__dataclass_fields__},
            "pool": {name: getattr(p, name) for name in p.__dataclass_fields__},
            "rows": [{**{name: getattr(r, name) for name in _ROW}, "pages": [*r.pages]} for r in self.rows],
            "others": [[page, owner] for page, owner in self.others],
            "steps": [
                {
                    "tokens": [*step.tokens],
                    "parents": [*step.parents],
                    "scores": _scores_json(step.scores),
                    "ancestors": [*step.ancestors],
                }
                for step in self.steps
            ],
            "trees": [
                {"parents": [*t.parents], "tokens": [*t.tokens], "scores": _scores_json(t.scores)} for t in self.trees
            ],
            "paths": [[*path] for path in self.paths],
            "kept": [*self.kept],
            "extend": [[e.request, e.start, e.count] for e in self.extend],
        }

    @classmethod
    def from_json(cls, value: object) -> Capsule:
        """Check a value field by field.

        Raises:
            CapsuleError: the first field that is missing, unknown, of another type, out of range, or that contradicts
                another; `where` names it.
        """
        top = _object("", value, tuple(cls.__dataclass_fields__))
        shape = _shape(top["shape"])
        batch = f"requests: must be 1..{shape.max_batch}, shape.max_batch"
        rows = _list("rows", top["rows"], _row, _Most(shape.max_batch, batch))
        if not rows:
            raise CapsuleError("rows", f"0 {batch}")
        each, nodes = _Most(len(rows), f"entries, must have {len(rows)}: one a request"), _Most.nodes(shape)
        beams = _Most(len(rows) * shape.topk, f"entries, must have {len(rows) * shape.topk}: requests * topk")
        steps = _Most(shape.steps, f"draft steps: shape.steps is {shape.steps}")
        capsule = cls(
            round=_int("round", top["round"], 1, _INT32),
            kind=cast(Kind, _one_of("kind", top["kind"], ("speculative", "plain"))),
            format=cast(Format, _one_of("format", top["format"], FORMATS)),
            draft_attention=cast(DraftAttention, _one_of("draft_attention", top["draft_attention"], DRAFT_ATTENTIONS)),
            shape=shape,
            pool=_pool(top["pool"]),
            rows=rows,
            others=_list("others", top["others"], _other, _ANY),
            steps=_list("steps", top["steps"], _step(beams), steps),
            trees=_list("trees", top["trees"], _tree(nodes), each),
            paths=_list("paths", top["paths"], lambda where, v: _ints(where, v, 0, _INT32, nodes), each),
            kept=_ints("kept", top["kept"], 0, _INT32, each),
            extend=_list("extend", top["extend"], _extend, each),
        )
        capsule.check()
        return capsule

    def check(self) -> None:
        """Compare the fields with each other.

        Raises:
            CapsuleError: the first contradiction.
        """
        consistency.check(self)


_ROW = ("row", "generation", "committed", "reserved", "seed")


def _scores_json(scores: Sequence[float]) -> list[float | None]:
    return [None if s == -math.inf else s for s in scores]


def _object(where: str, value: object, keys: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CapsuleError(where or "body", f"a {type(value).__name__}, must be an object")
    dot = where and f"{where}."
    for key in keys:
        if key not in value:
            raise CapsuleError(f"{dot}{key}", "missing")
    for key in value:
        if key not in keys:
            raise CapsuleError(f"{dot}{str(key)[:64]}", "unknown field")
    return value


def _int(where: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise CapsuleError(where, f"a {type(value).__name__}, must be an integer")
    if not low <= value <= high:
        got, most = (n if abs(n) < 2**70 else f"(a number of {n.bit_length()} bits)" for n in (value, high))
        raise CapsuleError(where, f"{got}: must be in {low}..{most}")
    return value


def _one_of(where: str, value: object, allowed: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise CapsuleError(where, f"{str(value)[:64]!r}: must be one of {', '.join(allowed)}")
    return value


_Item = Callable[[str, object], _T]


@dataclass(frozen=True)
class _Most:
    """Most entries of a list, seen before the first is looked at; what an error says behind their number."""

    entries: int
    why: str

    @classmethod
    def nodes(cls, shape: Shape) -> _Most:
        return cls(shape.draft_tokens, f"nodes: must be 1..{shape.draft_tokens}")


_ANY = _Most(MAX_VALUES, f"entries, must have {MAX_VALUES} at most")


def _entries(where: str, value: object, most: _Most) -> list[Any]:
    if not isinstance(value, list):
        raise CapsuleError(where, f"a {type(value).__name__}, must be a list")
    if len(value) > most.entries:
        raise CapsuleError(where, f"{len(value)} {most.why}")
    return value


def _list(where: str, value: object, item: _Item[_T], most: _Most) -> tuple[_T, ...]:
    return tuple(item(f"{where}[{i}]", v) for i, v in enumerate(_entries(where, value, most)))


def _ints(where: str, value: object, low: int, high: int, most: _Most) -> tuple[int, ...]:
    entries = _entries(where, value, most)
    if set(map(type, entries)) <= {int} and (not entries or (low <= min(entries) and max(entries) <= high)):
        return tuple(entries)
    return tuple(_int(f"{where}[{i}]", v, low, high) for i, v in enumerate(entries))  # names the entry


def _score(where: str, value: object) -> float:
    if value is None:
        return -math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CapsuleError(where, f"a {type(value).__name__}, must be a number or null")
    try:
        exact = struct.unpack("<f", struct.pack("<f", value))[0]
    except (OverflowError, struct.error):
        exact = math.nan
    if exact != value:
        raise CapsuleError(where, f"{value!r}: must be a float32")
    return float(value)


def _shape(value: object) -> Shape:
    v = _object("shape", value, tuple(Shape.__dataclass_fields__))
    numbers = {name: _int(f"shape.{name}", v[name], 0, _INT32) for name in v if name != "layout"}
    layout = cast(Layout, _one_of("shape.layout", v["layout"], LAYOUTS))
    shape = Shape(**numbers, layout=layout)
    try:
        geometry = shape.geometry()
    except ConfigError as e:
        raise CapsuleError("shape", str(e)) from None
    if geometry.layout != layout:
        raise CapsuleError("shape.layout", f"{layout!r}: with these sizes the layout in force is {geometry.layout!r}")
    return shape


def _pool(value: object) -> PoolSize:
    v = _object("pool", value, tuple(PoolSize.__dataclass_fields__))
    lows = {"num_pages": 2, "max_seqs": 1, "row_pages": 1}
    return PoolSize(**{name: _int(f"pool.{name}", v[name], low, _INT32) for name, low in lows.items()})


def _row(where: str, value: object) -> Row:
    v = _object(where, value, (*_ROW, "pages"))
    numbers = {name: _int(f"{where}.{name}", v[name], 0, 2**64 - 1 if name == "seed" else _INT32) for name in _ROW}
    return Row(**numbers, pages=_ints(f"{where}.pages", v["pages"], 1, _INT32, _ANY))


def _other(where: str, value: object) -> tuple[int, str]:
    if not isinstance(value, list) or len(value) != 2:
        raise CapsuleError(where, "must be [page, owner]")
    page, owner = _int(f"{where}[0]", value[0], 1, _INT32), value[1]
    if not isinstance(owner, str) or _OWNER.fullmatch(owner) is None:
        why = "must be 'sequence ROW.GENERATION', 'prefix cache' or 'raw pages'"
        raise CapsuleError(f"{where}[1]", f"{str(owner)[:64]!r}: {why}")
    return page, owner


def _step(beams: _Most) -> _Item[DraftStep]:
    def step(where: str, value: object) -> DraftStep:
        v = _object(where, value, tuple(DraftStep.__dataclass_fields__))
        return DraftStep(
            tokens=_ints(f"{where}.tokens", v["tokens"], 0, _INT32, beams),
            parents=_ints(f"{where}.parents", v["parents"], 0, _INT32, beams),
            scores=_list(f"{where}.scores", v["scores"], _score, beams),
            ancestors=_ints(f"{where}.ancestors", v["ancestors"], 1, 2**4096 - 1, beams),
        )

    return step


def _tree(nodes: _Most) -> _Item[Tree]:
    def tree(where: str, value: object) -> Tree:
        v = _object(where, value, tuple(Tree.__dataclass_fields__))
        return Tree(
            parents=_ints(f"{where}.parents", v["parents"], -1, _INT32, nodes),
            tokens=_ints(f"{where}.tokens", v["tokens"], 0, _INT32, nodes),
            scores=_list(f"{where}.scores", v["scores"], _score, nodes),
        )

    return tree


def _extend(where: str, value: object) -> Extend:
    numbers = _ints(where, value, 0, _INT32, _ANY)
    if len(numbers) != 3:
        raise CapsuleError(where, f"{len(numbers)} numbers, must be [request, start, count]")
    return Extend(*numbers)
