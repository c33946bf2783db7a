"""The stub says what the Rust module has: names, signatures, defaults, properties, bases and docstrings."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from specrs import _specrs as core
from stub import STUB, STUB_ONLY, Documented, doc, members

TREE = ast.parse(STUB.read_text())
NODES: dict[str, Documented] = {n.name: n for n in members(TREE.body) if n.name not in STUB_ONLY}
CLASSES = {name: node for name, node in NODES.items() if isinstance(node, ast.ClassDef)}
FUNCTIONS = {name: node for name, node in NODES.items() if isinstance(node, ast.FunctionDef)}
NO_CUDA = Path(__file__).parents[3] / "src" / "py" / "no_cuda.rs"
# Beginnings of names that a build without CUDA has in that list alone.
ON_A_DEVICE = ("_device_", "_Device", "_Graph", "_graph_", "_RoundRing")
# Made by the interpreter or by pyo3 for every class, and not worth a line of a stub.
IMPLICIT = {"__doc__", "__module__", "__weakref__", "__repr__", "__lt__", "__le__", "__gt__", "__ge__", "__ne__"}


def arguments(node: ast.FunctionDef) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each argument but self and cls."""
    kinds = inspect.Parameter
    a, none = node.args, inspect.Parameter.empty
    found = []
    positional = [(x, kinds.POSITIONAL_ONLY) for x in a.posonlyargs] + [
        (x, kinds.POSITIONAL_OR_KEYWORD) for x in a.args
    ]
    defaults: list[Any] = [none] * (len(positional) - len(a.defaults)) + [ast.literal_eval(d) for d in a.defaults]
    for (x, kind), default in zip(positional, defaults, strict=True):
        found.append((x.arg, kind, default))
    for x, d in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        found.append((x.arg, kinds.KEYWORD_ONLY, none if d is None else ast.literal_eval(d)))
    return [f for f in found if f[0] not in ("self", "cls")]


def live_arguments(obj: Any) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(obj).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters if p.name != "self"]


def decorators(node: ast.FunctionDef) -> set[str]:
    return {ast.unparse(d) for d in node.decorator_list}


def test_names() -> None:
    live = {n for n in vars(core) if not (n.startswith("__") and n.endswith("__"))}
    assert set(NODES) == live
    variables = {ast.unparse(n.target) for n in TREE.body if isinstance(n, ast.AnnAssign)}
    assert variables == {"__version__", "_Stream"}
    assert core.__version__ == core.version()


def test_a_build_without_cuda_has_the_same_names() -> None:
    listed = re.findall(r'c"(\w+)"', NO_CUDA.read_text())
    assert listed == sorted(name for name in NODES if name.startswith(ON_A_DEVICE))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str) -> None:
    assert arguments(FUNCTIONS[name]) == live_arguments(getattr(core, name))


@pytest.mark.parametrize("name", CLASSES)
def test_class(name: str) -> None:
    node, live = CLASSES[name], getattr(core, name)
    if issubclass(live, Exception):
        assert [ast.unparse(b) for b in node.bases] == [b.__name__ for b in live.__bases__]
        return
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Sub", (live,), {})
    assert {ast.unparse(d) for d in node.decorator_list} == {"final"}
    stubbed = {m.name: m for m in members(node.body) if isinstance(m, ast.FunctionDef)}
    attributes = {ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)}
    assert set(stubbed) | attributes == set(vars(live)) - IMPLICIT
    for member, sig in stubbed.items():
        raw = inspect.getattr_static(live, member)
        if member == "__new__":
            assert arguments(sig) == live_arguments(live)
        elif "property" in decorators(sig):
            assert inspect.isgetsetdescriptor(raw), member
        else:
            assert ("staticmethod" in decorators(sig)) == isinstance(raw, staticmethod), member
            if not inspect.isdatadescriptor(raw) and type(raw).__name__ != "wrapper_descriptor":
                assert arguments(sig) == live_arguments(getattr(live, member)), member
    if "__new__" not in stubbed:
        with pytest.raises(TypeError, match="instances"):
            live()


def test_exceptions_carry_the_stubs_fields() -> None:
    fields: dict[str, set[str]] = {}
    for e in core._error_examples():
        fields.setdefault(type(e).__name__, set()).update(set(vars(e)) - {"kind"})
    for name, live_fields in fields.items():
        assert {ast.unparse(n.target) for n in CLASSES[name].body if isinstance(n, ast.AnnAssign)} == live_fields


def test_docstrings() -> None:
    def same(node: Documented, live: Any) -> None:
        text = ast.get_docstring(node)
        assert text is not None, node.name
        assert not text.startswith("staticmethod("), f"{node.name}: the docstring of its wrapper"
        assert " ".join(text.split()) == " ".join((doc(live) or "").split()), (
            f"{node.name}: python tests/python/stub.py"
        )

    for name, node in NODES.items():
        live = getattr(core, name)
        same(node, live)
        for member in members(node.body):
            if not member.name.startswith("__"):
                same(member, inspect.getattr_static(live, member.name))
