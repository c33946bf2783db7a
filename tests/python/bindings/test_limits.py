"""No number from a caller ends the process or takes memory without a limit: every binding, every number."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hostile_numbers

STUB = Path(__file__).parents[3] / "python" / "specrs" / "_specrs.pyi"
DEVICE = ("_device_", "_Device", "_Graph", "_graph_", "_RoundRing")
"""Beginnings of names that need a GPU: the tests there try their numbers."""
ANYWHERE = {"_device_budget"}
"""Names among these that need none."""
SECONDS = 2.0


def in_the_stub() -> dict[str, list[str]]:
    """Parameters of `_specrs.pyi` that take numbers, by function."""
    found: dict[str, list[str]] = {}
    tree = ast.parse(STUB.read_text())
    scopes = [("", tree.body), *((f"{c.name}.", c.body) for c in tree.body if isinstance(c, ast.ClassDef))]
    for prefix, body in scopes:
        for f in body:
            name = prefix + (f.name if isinstance(f, ast.FunctionDef) else "")
            if not isinstance(f, ast.FunctionDef) or (name.startswith(DEVICE) and name not in ANYWHERE):
                continue
            of = [
                a.arg for a in f.args.args + f.args.kwonlyargs if a.annotation and is_number(ast.unparse(a.annotation))
            ]
            if of:
                found[prefix + f.name] = of
    return found


def is_number(annotation: str) -> bool:
    return any(word in annotation for word in ("SupportsIndex", "float", "int"))


def test_every_number_of_the_bindings_is_tried() -> None:
    tried = {name: set(hostile_numbers.numbers(good)) for name, (_, good) in hostile_numbers.calls().items()}
    assert {name: set(parameters) for name, parameters in in_the_stub().items()} == tried


@pytest.fixture(scope="module")
def tried() -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, hostile_numbers.__file__], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"exit {done.returncode} behind {lines[-1:]}\n{done.stderr}"
    return [json.loads(line) for line in lines]


def test_good_numbers_are_taken(tried: list[dict[str, Any]]) -> None:
    good = [call for call in tried if "name" in call and call["parameter"] is None]
    assert len(good) == len(hostile_numbers.calls())
    assert [call for call in good if call["outcome"] != "done"] == []


def test_hostile_numbers_raise_typed_errors(tried: list[dict[str, Any]]) -> None:
    calls = [call for call in tried if call.get("parameter") is not None]
    assert len(calls) > 1000
    assert [c for c in calls if c["outcome"].startswith("not typed") or "Internal" in c["outcome"]] == []
    assert [c for c in calls if c["seconds"] > SECONDS and c["outcome"] != "done"] == []
    [peak] = [call["peak"] for call in tried if "peak" in call]
    assert peak < 2**28, "bytes"


def test_sizes_that_there_is_no_memory_for(tried: list[dict[str, Any]]) -> None:
    large = {call["large"]: call["outcome"] for call in tried if "large" in call}
    assert large == dict.fromkeys(hostile_numbers.large(), "ConfigError Invalid")
