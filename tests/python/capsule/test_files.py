"""Capsule files: round trips, equal bytes for equal rounds, and for all else an error that says what is wrong."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from modelzoo import VOCAB, Pair
from specrs import LLM, ConfigError, SamplingParams, capsule
from specrs.capsule import Capsule, CapsuleError, container, dumps, load, loads, save

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 9, 8, 7, 6], [3]]
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=5)


def record(pair: Pair, round: int = 2, prompts: list[list[int]] = PROMPTS, **options: Any) -> Capsule:
    options = {"tree": (3, 3, 8), "page_size": 2, "max_context_len": 64, **options}
    llm = LLM(pair.target, pair.draft, **options)
    with llm.recording(round=round) as recorder:
        llm.generate(prompts, PARAMS)
    assert recorder.capsule is not None
    return recorder.capsule


@pytest.fixture(scope="module")
def recorded(tiny: Pair) -> Capsule:
    return record(tiny)


@pytest.fixture(scope="module")
def value(recorded: Capsule) -> dict[str, Any]:
    """The recorded round as JSON; tests change copies of it."""
    return json.loads(json.dumps(recorded.to_json()))


def test_what_a_round_leaves(recorded: Capsule) -> None:
    assert (recorded.round, recorded.kind, recorded.format) == (2, "speculative", "native")
    assert len(recorded.rows) == 3 and len(recorded.steps) == 2
    assert [len(t.parents) for t in recorded.trees] == [8, 8, 8]
    assert [r.reserved - r.committed for r in recorded.rows] == [9, 9, 9]
    assert recorded.rows[0].seed == 5
    for e, r in zip(recorded.extend, recorded.rows, strict=True):
        assert (e.start, e.count) == (r.committed, recorded.kept[e.request])
    # The first two prompts share three full pages, computed twice: the cache keeps one of each.
    assert {owner for _, owner in recorded.others} == {"prefix cache"}
    assert not {"1, 2, 3", "prompt"} & set(json.dumps(recorded.to_json()))


def test_round_trip_and_equal_bytes(recorded: Capsule, tiny: Pair, tmp_path: Path) -> None:
    data = dumps(recorded)
    assert loads(data) == recorded
    assert dumps(loads(data)) == data
    assert dumps(record(tiny)) == data  # another engine, the same round
    assert dumps(record(tiny, round=1)) != data
    assert data.startswith(b"specrs capsule 1\nbody=") and len(data) < 2000
    path = tmp_path / "a.capsule"
    save(recorded, path)
    assert path.read_bytes() == data and load(path) == recorded
    assert [p.name for p in tmp_path.iterdir()] == ["a.capsule"]


def test_a_file_is_written_whole_or_not_at_all(recorded: Capsule, tmp_path: Path, monkeypatch: Any) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    save(recorded, link)
    assert link.is_symlink() and load(file) == recorded
    # A path that is no regular file stays what it is.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as other:
        read = other.submit(pipe.read_bytes)
        save(recorded, pipe)
        assert loads(read.result()) == recorded
    assert pipe.is_fifo()
    for path in (tmp_path, tmp_path / "none" / "file"):
        with pytest.raises(OSError):
            save(recorded, path)

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        save(recorded, file)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link", "pipe"]
    assert load(file) == recorded


def test_prefixes_shared_with_other_requests(tiny: Pair) -> None:
    llm = LLM(tiny.target, tiny.draft, tree=(2, 2, 4), page_size=4, max_context_len=64, max_batch=2)
    llm.generate([[*range(10), 1, 2, 3]], SamplingParams(max_tokens=2))
    with llm.recording(round=1) as recorder:
        llm.generate([[*range(10), 1, 2, 4, 4], [*range(10), 1, 2, 5]], SamplingParams(max_tokens=8))
    c = recorder.capsule
    assert c is not None
    assert c.rows[0].pages[:3] == c.rows[1].pages[:3] and c.rows[0].pages[3:] != c.rows[1].pages[3:]
    assert [page for page, _ in c.others][:3] == sorted(c.rows[0].pages[:3])
    assert loads(dumps(c)) == c


def test_plain_rounds_are_rounds(tiny: Pair) -> None:
    llm = LLM(tiny.target, max_context_len=64, page_size=4)
    with llm.recording(round=3) as recorder:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=6))
    c = recorder.capsule
    assert c is not None and (c.kind, c.steps, c.kept, c.extend) == ("plain", (), (1,), ())
    assert (c.rows[0].committed, c.rows[0].reserved) == (5, 6)
    assert loads(dumps(c)) == c


def test_recording_changes_nothing_of_the_output(tiny: Pair) -> None:
    llm = LLM(tiny.target, tiny.draft, tree=(2, 2, 4), max_context_len=64)
    [want] = llm.generate([[1, 2]], PARAMS)
    with llm.recording(round=2):
        [got] = llm.generate([[1, 2]], PARAMS)
    assert got.token_ids == want.token_ids
    assert not llm._runner.observers
    llm.audit()


def test_a_round_that_fails_is_not_recorded(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny.target, tiny.draft, tree=(2, 2, 4), max_context_len=64)
    llm.add([1, 2], PARAMS)
    llm.step()
    with llm.recording(round=1) as recorder:
        with monkeypatch.context() as patch:
            patch.setattr(llm._runner.executor.target, "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.step()
        assert (recorder.rounds, recorder.capsule) == (0, None)
        llm.step()
    assert recorder.capsule is not None and recorder.capsule.rows[0].committed == 2


def test_too_few_rounds(tiny: Pair, tmp_path: Path) -> None:
    llm = LLM(tiny.target, tiny.draft, tree=(2, 2, 4), max_context_len=64)
    with pytest.raises(ConfigError, match=r"round = 99: only \d ran"), llm.recording(tmp_path / "x", round=99):
        llm.generate([[1, 2]], SamplingParams(max_tokens=4))
    assert list(tmp_path.iterdir()) == []
    for bad in (0, -1, True, "1", 1.0):
        with pytest.raises(ConfigError, match="round = "), llm.recording(round=bad):  # type: ignore[arg-type]
            pass


# -- the container ------------------------------------------------------------------------------------------------


def test_every_flipped_byte_is_seen(recorded: Capsule) -> None:
    data = dumps(recorded)
    for at in range(len(data)):
        for flip in (*(1 << bit for bit in range(8)), 0xFF):
            bad = bytearray(data)
            bad[at] ^= flip
            with pytest.raises(CapsuleError):
                loads(bytes(bad))


def test_every_truncation_is_seen(recorded: Capsule) -> None:
    data = dumps(recorded)
    for n in range(len(data)):
        with pytest.raises(CapsuleError, match="empty" if n == 0 else "truncated"):
            loads(data[:n])
    for more in (b"\n", b"\0", data):
        with pytest.raises(CapsuleError, match="body: followed by something else"):
            loads(data + more)


def packed(raw: bytes, *, version: int = 1, raw_len: int | None = None, body: bytes | None = None) -> bytes:
    """A container with a good checksum around any bytes."""
    body = zlib.compress(raw) if body is None else body
    n = len(raw) if raw_len is None else raw_len
    digest = container._digest(len(body), n, body)
    return b"specrs capsule %d\nbody=%d raw=%d sha256=%s\n" % (version, len(body), n, digest) + body


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "file: empty"), (b"\x89PNG\r\n\x1a\n" + b"\0" * 99, r"not a capsule: it begins with b'\\x89PNG"),
     (b'{"round": 1}', "not a capsule"), (b"specrs capsulf 1\n", "not a capsule"), (b"\0" * 4000, "not a capsule"),
     (b"specrs caps", "truncated: 11 bytes"), (b"specrs capsule 1", "first line is not whole"),
     (b"specrs capsule x\n", "no version number"), (b"specrs capsule " + b"9" * 5000, "no version number"),
     (b"specrs capsule 01\n", "no version number"), (b"specrs capsule 1\n", "header: truncated"),
     (b"specrs capsule 1\nbody=1 raw=1 sha256=0\n", "header: damaged"),
     (b"specrs capsule 1\nbody=-1 raw=1 sha256=" + b"0" * 64 + b"\n", "header: damaged"),
     (b"specrs capsule 1\n" + b"a" * 5000, "header: damaged"),
     (packed(b"{}", version=2), "version: 2: must be 1; a newer specrs wrote it"),
     (packed(b"{}", raw_len=99), "body: inconsistent: 99 bytes stated, 2 found"),
     (packed(b"{}" * 50, raw_len=2), "body: inconsistent: 2 bytes stated, more than 2 found"),
     (packed(b"{}", body=b"no zlib"), "body: not decompressible"),
     (packed(b"{}", body=zlib.compress(b"{}")[:-2]), "body: inconsistent"),
     (packed(b"{}", body=zlib.compress(b"{}") + b"!"), "body: inconsistent"),
     (packed(b"{}", raw_len=2**33), "header: too large"), (packed(b"[1]"), "holds a list"), (packed(b"1"), "a int"),
     (packed(b"nonsense"), "not readable as JSON"), (packed(b"\xff{}"), "not readable as JSON"),
     (packed(b"[" * 100_000), "nested too deeply"), (packed(b"9" * 5000), "not readable as JSON"),
     (packed(b'{"round": NaN}'), "NaN is no JSON number"), (packed(b'{"a": 1, "a": 2}'), "occurs twice"),
     (packed(b'{"a": 1e999}'), "missing"), (packed(b"{}"), "round: missing")],
)  # fmt: skip
def test_foreign_and_broken_files(data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(CapsuleError, match=message) as e:
        loads(data)
    assert isinstance(e.value, ConfigError) and e.value.path is None
    path = tmp_path / "bad.capsule"
    path.write_bytes(data)
    with pytest.raises(CapsuleError, match=f"^{re.escape(str(path))}: ") as e:
        load(path)
    assert e.value.path == str(path) and e.value.where and e.value.why in str(e.value)


def test_bombs_ask_for_no_memory(tmp_path: Path) -> None:
    import tracemalloc

    bomb = zlib.compress(b"0" * (1 << 28), 9)
    tracemalloc.start()
    try:
        for data in (packed(b"", body=bomb, raw_len=1000), packed(b"", body=bomb, raw_len=container.MAX_RAW + 1)):
            with pytest.raises(CapsuleError, match=r"inconsistent|too large"):
                loads(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
    path = tmp_path / "sparse"
    with path.open("wb") as f:
        f.truncate(1 << 40)
    with pytest.raises(CapsuleError, match="too large"):
        load(path)


def test_values_beyond_the_limit_are_not_written(recorded: Capsule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "MAX_RAW", 100)
    with pytest.raises(CapsuleError, match=r"body: \d+ bytes, the limit is 100"):
        dumps(recorded)


# -- the fields ---------------------------------------------------------------------------------------------------


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from leaves(item, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    out = copy.deepcopy(value)
    at = out
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return out


def test_no_value_of_any_field_is_another_error(value: dict[str, Any]) -> None:
    """Every field replaced by values of every kind: refused as a CapsuleError that names a place, or a valid round."""
    accepted = []
    for path in leaves(value):
        for new in (None, True, -1, 0, 3, 2**31, 2**70, -(2**70), 1e300, 0.1, "", "x" * 999, [], [[]], {}, {"a": 1}):
            bad = changed(value, path, new)
            if json.dumps(bad) == json.dumps(value):
                continue
            try:
                c = Capsule.from_json(bad)
            except CapsuleError as e:
                assert len(str(e)) < 400
            else:
                assert Capsule.from_json(c.to_json()) == c
                accepted.append(path)
    # These fields may have another value, since nothing else depends on them: numbers of rounds and sequences, seeds,
    # tokens, scores, pool sizes; a node off the path may hang elsewhere; there may be no draft steps, and no
    # draft_extend.
    free = {"round", "generation", "row", "seed", "tokens", "scores", "num_pages", "max_seqs", "row_pages", "max_batch"}
    assert {next(k for k in reversed(p) if isinstance(k, str)) for p in accepted} <= free | {
        "pages", "others", "kept", "parents", "steps", "extend",
    }  # fmt: skip


def test_missing_and_unknown_fields(value: dict[str, Any]) -> None:
    for path in leaves(value):
        at = value
        for key in path:
            at = at[key]
        if not isinstance(at, dict):
            continue
        for key in at:
            short = {k: v for k, v in at.items() if k != key}
            with pytest.raises(CapsuleError, match=f"{key}: missing"):
                Capsule.from_json(changed(value, path, short))
        with pytest.raises(CapsuleError, match="extra: unknown field"):
            Capsule.from_json(changed(value, path, {**at, "extra": 1}))


Change = Callable[[dict[str, Any]], object]


def put(*path: Any) -> Change:
    """Set the place before the last entry to the last entry."""

    def change(v: dict[str, Any]) -> None:
        at: Any = v
        for key in path[:-2]:
            at = at[key]
        at[path[-2]] = path[-1]

    return change


@pytest.mark.parametrize(
    ("change", "where", "why"),
    [(put("kind", "odd"), "kind", "must be one of speculative, plain"),
     (put("format", "fa9"), "format", "native, flashinfer"),
     (put("shape", "page_size", 3), "shape", "power of two"), (put("shape", "topk", 65), "shape", "topk = 65"),
     (put("shape", "draft_tokens", 99), "shape", "draft_tokens = 99"),
     (put("shape", "max_batch", 2), "rows", "3 requests: must be 1..2"),
     (put("shape", "layout", "spiral"), "shape.layout", "dense, holey"),
     (put("pool", "num_pages", 2**30), "pool", "num_pages * page_size = 2147483648"),
     (put("pool", "num_pages", 5), "rows[0].pages[", "the pool has the pages 1..4"),
     (put("pool", "row_pages", 3), "rows[0].reserved", "a row has 3"),
     (put("pool", "max_seqs", 1), "rows[1].row", "the pool has 1 rows"),
     (put("rows", []), "rows", "0 requests"), (put("rows", 1, "row", 0), "rows[1].row", "rows[0] has it too"),
     (put("rows", 0, "committed", 999), "rows[0].committed", "max_context_len is 64"),
     (put("rows", 0, "reserved", 3), "rows[0].reserved", "must exceed"),
     (put("rows", 0, "generation", 0), "rows[0].generation", "count from 1"),
     (lambda v: v["rows"][0]["pages"].pop(), "rows[0].pages", "must have"),
     (lambda v: v["rows"][0]["pages"].__setitem__(1, v["rows"][0]["pages"][0]), "rows[0].pages[1]", "column 0 too"),
     (lambda v: v["rows"][2]["pages"].__setitem__(0, v["rows"][0]["pages"][-1]), "rows[2].pages[0]", "equal begin"),
     (lambda v: v["rows"][2]["pages"].__setitem__(-1, v["rows"][0]["pages"][-1]), "rows[2].pages[", "equal begin"),
     (put("others", [[2, "prefix cache"], [1, "prefix cache"]]), "others[1]", "must ascend"),
     (put("others", [[1, "nobody"]]), "others[0][1]", "'nobody'"), (put("others", [[1]]), "others[0]", "[page, owner]"),
     (put("others", [[1, "sequence 0.1"]]), "others[0]", "is of the batch"),
     (lambda v: v.update(others=[[v["rows"][0]["pages"][-1], "sequence 7.1"]]), "others[0]", "rows[0] writes it"),
     (lambda v: v.update(others=[[v["rows"][0]["pages"][0], "raw pages"]]), "others[0]", "rows[0] writes it"),
     (put("others", [[30, "prefix cache"], [30, "raw pages"]]), "others[0]", "beside raw callers"),
     (put("steps", 0, "parents", 0, 1), "steps[0].parents[0]", "of request 0 it must be in 0..0"),
     (put("steps", 1, "parents", 3, 0), "steps[1].parents[3]", "of request 1 it must be in 3..5"),
     (put("steps", 1, "ancestors", 0, 1), "steps[1].ancestors[0]", "by the parents it must be"),
     (put("steps", 0, "tokens", [1]), "steps[0].tokens", "1 entries, must have 9"),
     (put("steps", 0, "scores", 0, 0.1), "steps[0].scores[0]", "must be a float32"),
     (lambda v: v.update(steps=v["steps"] * 3), "steps", "6 draft steps: shape.steps is 3"),
     (put("kind", "plain"), "steps", "2 draft steps in a plain round"),
     (put("trees", 0, "parents", 3, 3), "trees[0].parents[3]", "3: must be in 0..2"),
     (put("trees", 0, "parents", 0, 0), "trees[0].parents[0]", "the root has none"),
     (put("trees", 1, "tokens", []), "trees[1].tokens", "must have 8"),
     (lambda v: v["trees"].pop(), "trees", "2 entries, must have 3"),
     (lambda v: [v["trees"][0][k].extend([0] * 9) for k in v["trees"][0]], "trees[0].parents", "17 nodes: must be"),
     (put("rows", 2, "reserved", 13), "rows[2].pages", "must have 7: 13 positions of 2 a page"),
     (lambda v: [v["rows"][1].update(reserved=14), v["rows"][1].update(pages=v["rows"][1]["pages"][:7])], "trees[1]",
      "14 are reserved"),
     (put("shape", "max_context_len", 12), "trees[", "max_context_len is 12"),
     (put("paths", 0, [0, 7, 7]), "paths[0][", "must be a child of node"), (put("paths", 0, []), "paths[0]", "empty"),
     (put("paths", 0, [1]), "paths[0][0]", "must be a child of node -1"),
     (put("kept", 0, 9), "kept[0]", "the path has"),
     (lambda v: v["extend"].reverse(), "extend[1]", "must ascend"),
     (put("extend", 0, [0, 1, 0]), "extend[0]", "end at"),
     (put("extend", 0, [0, 1]), "extend[0]", "2 numbers"), (put("extend", 0, 1, 99), "extend[0]", "must end at")],
)  # fmt: skip
def test_contradictions(value: dict[str, Any], change: Change, where: str, why: str) -> None:
    bad = copy.deepcopy(value)
    change(bad)
    with pytest.raises(CapsuleError) as e:
        loads(packed(json.dumps(bad).encode()))
    assert e.value.where.startswith(where) and why in e.value.why, str(e.value)


def test_a_contradiction_is_not_written(recorded: Capsule) -> None:
    with pytest.raises(CapsuleError, match=r"kept\[0\]"):
        dumps(dataclasses.replace(recorded, kept=(99, 1, 1)))


def test_impossible_drafts_are_minus_infinity(recorded: Capsule) -> None:
    step = dataclasses.replace(recorded.steps[0], scores=(*recorded.steps[0].scores[:-1], float("-inf")))
    c = dataclasses.replace(recorded, steps=(step, *recorded.steps[1:]))
    assert loads(dumps(c)) == c and c.to_json()["steps"][0]["scores"][-1] is None


def test_exports() -> None:
    assert {name for name in capsule.__all__ if not hasattr(capsule, name)} == set()
    assert VOCAB == 10
