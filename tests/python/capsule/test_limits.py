"""Capsules held against their limits: bombs cost nothing, and what is large and whole is read."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from specrs.capsule import Capsule, CapsuleError, container, dumps, loads
from specrs.capsule.parts import PoolSize, Row, Shape, Tree

MEASURE = """
import resource, sys, time
from specrs.capsule import CapsuleError, load
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
try:
    load(sys.argv[1])
except CapsuleError as e:
    seconds = time.process_time() - start
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, e)
"""


def packed(raw: bytes) -> bytes:
    """A container with true lengths and checksum around any body."""
    body = zlib.compress(raw, 9)
    digest = container._digest(len(body), len(raw), body)
    return b"specrs capsule 1\nbody=%d raw=%d sha256=%s\n" % (len(body), len(raw), digest) + body


def filled(piece: bytes, before: bytes = b"[", behind: bytes = b"1]") -> bytes:
    """Return as many pieces as a body may be long."""
    room = container.MAX_RAW - len(before) - len(behind)
    return before + piece * (room // len(piece)) + behind


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (filled(b"[],"), "more than 1572864 lists"),
        (filled(b"{},"), "more than 262144 objects"),
        (filled(b'{"a":{"b":0}},'), "more than 262144 objects"),
        (filled(b"0,"), "more than 4194304 values"),
        (filled(b"1000000000,"), "more than 4194304 values"),
        (filled(b'"a":0,', b"{", b'"b":1}'), "more than 4194304 values"),
        (filled(b"["), "more than 1572864 lists"),
        ("😀".encode() + b"0" * 1000, "ASCII"),
    ],
    # pytest hands a test's name to its processes in the environment, which has no room for megabytes.
    ids=["lists", "objects", "objects in objects", "values", "long values", "keys", "depth", "no ASCII"],
)
def test_bombs_are_refused_before_they_are_values(raw: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.capsule"
    path.write_bytes(packed(raw))
    done = subprocess.run([sys.executable, "-c", MEASURE, path], capture_output=True, text=True, check=True)
    seconds, kilobytes, error = done.stdout.split(maxsplit=2)
    assert why in error
    assert float(seconds) < 0.5  # seconds of this process alone
    assert int(kilobytes) < 64 << 10


def test_lists_that_are_too_long_are_seen_before_their_entries() -> None:
    """Just within the limits of a file, and far beyond those of a round."""
    value = plain(1, 16).to_json()
    for field, entry in (("rows", {}), ("steps", {}), ("trees", {}), ("paths", []), ("extend", []), ("kept", None)):
        n = container.MAX_OBJECTS - 100
        start = time.process_time()
        with pytest.raises(CapsuleError) as e:
            Capsule.from_json({**value, field: [entry] * n})
        assert e.value.where == field and f"{n} " in e.value.why
        assert time.process_time() - start < 0.1


def plain(requests: int, tokens: int, page_size: int = 16, shared: int = 0) -> Capsule:
    """A round of plain decoding, each request with so many committed tokens, the first `shared` pages common to all."""
    pages = -(-(tokens + 1) // page_size)
    own, first = pages - shared, shared + 1
    rows = tuple(
        Row(i, 1, tokens, tokens + 1, i, (*range(1, first), *range(first + i * own, first + (i + 1) * own)))
        for i in range(requests)
    )
    return Capsule(
        round=1,
        kind="plain",
        format="native",
        draft_attention="ancestors",
        shape=Shape(requests, tokens + 64, page_size, 1, 1, 2, "dense"),
        pool=PoolSize(1 + shared + requests * own, requests, pages),
        rows=rows,
        others=(),
        steps=(),
        trees=(Tree((-1,), (7,), (0.0,)),) * requests,
        paths=((0,),) * requests,
        kept=(1,) * requests,
        extend=(),
    )


def test_the_largest_round_that_is_promised_is_read() -> None:
    """256 requests of 131072 tokens, 16 a page: the figure behind `MAX_VALUES`, which is twice that."""
    c = plain(256, 131071)
    assert sum(len(r.pages) for r in c.rows) * 2 == container.MAX_VALUES
    assert loads(dumps(c)) == c


def test_long_prefixes_that_all_share_are_read_in_time() -> None:
    """In time that grows with the pages: comparing whole beginnings for each page took minutes."""
    c = plain(64, 131071, shared=8000)
    start = time.process_time()
    c.check()
    assert time.process_time() - start < 5
    other = list(c.rows[5].pages)
    other[100] = other[-2]
    bad = dataclasses.replace(c, rows=(*c.rows[:5], dataclasses.replace(c.rows[5], pages=tuple(other)), *c.rows[6:]))
    with pytest.raises(CapsuleError):
        bad.check()


@pytest.mark.parametrize(
    ("limit", "mark"), [("MAX_VALUES", ","), ("MAX_LISTS", "["), ("MAX_OBJECTS", "{"), ("MAX_RAW", "")]
)
def test_a_capsule_at_a_limit_is_read_and_one_beyond_is_not(limit: str, mark: str, monkeypatch: Any) -> None:
    c = plain(3, 100)
    data = dumps(c)
    text = json.dumps(c.to_json(), separators=(",", ":"))
    n = text.count(mark) if mark else len(text)
    monkeypatch.setattr(container, limit, n)
    assert loads(data) == c
    assert dumps(c) == data
    monkeypatch.setattr(container, limit, n - 1)
    with pytest.raises(CapsuleError, match=f"(more than|the limit is) {n - 1}"):
        loads(data)
    with pytest.raises(CapsuleError, match=f"(more than|the limit is) {n - 1}"):
        dumps(c)
