"""The stub of the Rust module: `python tests/python/stub.py` takes its docstrings from the built module.

Names, signatures and types in `python/specrs/_specrs.pyi` are written by hand (pyo3's introspection cannot describe
exceptions with two bases or tensor arguments); `bindings/test_stub.py` compares all but the types with the module.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

STUB = Path(__file__).parents[2] / "python" / "specrs" / "_specrs.pyi"
WIDTH = 120
# Classes that only the stub has: protocols for type checkers.
STUB_ONLY = {"_Tensor", "_Proposal"}
Documented = ast.ClassDef | ast.FunctionDef


def members(body: list[ast.stmt]) -> list[Documented]:
    """Classes and functions of a body."""
    return [n for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef))]


def doc(obj: Any) -> str | None:
    """The docstring of a live object, its paragraphs joined to one line each."""
    if isinstance(obj, staticmethod):
        obj = obj.__func__  # pyo3's wrapper has the docstring of the class `staticmethod`
    text = inspect.cleandoc(obj.__doc__) if isinstance(obj.__doc__, str) else None
    return None if text is None else "\n\n".join(" ".join(p.split()) for p in text.split("\n\n"))


def _docstring(text: str, indent: int) -> str:
    """The text wrapped as a docstring at this indentation."""
    if "\n" not in text and len(text) + indent + 6 <= WIDTH:
        return text
    head, *rest = text.split("\n\n")
    # The opening quotes take three columns of the first line; a text of one line must not fit with both quotes.
    wrapped = textwrap.wrap("xxx" + head, WIDTH - indent - (0 if rest else 3), break_long_words=False)
    paragraphs = ["\n".join(wrapped)[3:], *(textwrap.fill(p, WIDTH - indent, break_long_words=False) for p in rest)]
    return textwrap.indent("\n\n".join(paragraphs) + "\n", " " * indent).lstrip() + " " * indent


def _is_doc(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_ellipsis(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...


def _document(node: Documented, text: str, indent: int) -> None:
    body = [n for n in node.body if not (_is_doc(n) or _is_ellipsis(n))]
    node.body = [ast.Expr(ast.Constant(_docstring(text, indent))), *body]


def refresh() -> None:
    """Write the live docstrings into the stub."""
    from specrs import _specrs as core

    tree = ast.parse(STUB.read_text())
    for node in members(tree.body):
        if node.name in STUB_ONLY:
            continue
        live = getattr(core, node.name)
        if text := doc(live):
            _document(node, text, 4)
        for member in members(node.body) if isinstance(node, ast.ClassDef) else []:
            if not member.name.startswith("__") and (text := doc(live.__dict__[member.name])):
                _document(member, text, 8)
    STUB.write_text(ast.unparse(tree) + "\n")
    for command in (["check", "--select", "I", "--fix"], ["format"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, "--quiet", STUB], check=True)


if __name__ == "__main__":
    refresh()
