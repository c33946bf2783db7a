"""JSON as responses have it, at once or, where they are long, in pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Event
from typing import Any

_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_PIECE = 32  # items of a list that are encoded at once: with 20 scores each, in a millisecond


def dumps(value: Any) -> bytes:
    """JSON in UTF-8, without spaces."""
    return _JSON.encode(value).encode("utf-8", "replace")


@dataclass(frozen=True)
class Items:
    """A list for `dumps_in_pieces`, which is never there as a whole: making very many small objects has the
    interpreter look through all of them again and again, under its lock.

    Attributes:
        count: number of items.
        of: some of the items, by the first and the end.
    """

    count: int
    of: Callable[[int, int], list[Any]]


def dumps_in_pieces(value: Any, stop: Event | None = None) -> bytes:
    """Return the bytes of `dumps`, in a thread beside the event loop's: json's encoder holds the interpreter's lock
    until it has written a value, so it gets some items of a list at a time. stop: the rest is not wanted."""
    written = []
    for piece in _pieces(value):
        if stop is not None and stop.is_set():
            return b""
        written.append(piece)
    return "".join(written).encode("utf-8", "replace")


def _pieces(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for i, (key, item) in enumerate(value.items()):
            yield f"{',' if i else '{'}{_JSON.encode(key)}:"
            yield from _pieces(item)
        yield "}"
    elif isinstance(value, list) and any(isinstance(item, (dict, Items)) for item in value):  # each may be long
        for i, item in enumerate(value):
            yield "," if i else "["
            yield from _pieces(item)
        yield "]"
    elif isinstance(value, list) and len(value) > _PIECE:
        yield from _pieces(Items(len(value), lambda first, end: value[first:end]))
    elif isinstance(value, Items):
        yield "["
        for at in range(0, value.count, _PIECE):
            yield f"{',' if at else ''}{_JSON.encode(value.of(at, at + _PIECE))[1:-1]}"
        yield "]"
    else:
        yield _JSON.encode(value)
