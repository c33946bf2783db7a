"""The layout that CONTRIBUTING describes: files that it names exist, and imports run one way."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "python/specrs"
FLOORS = [  # a module imports from its own floor and those before it
    {"_specrs", "assets", "backends", "chat", "device", "drafters"}
    | {"engine_options", "grammar", "graph", "marked", "operands", "progress", "sampling_params"},
    {"drawing", "capsule", "models", "tools"},
    {"engine"},
    {"measuring", "serve"},
    {"train"},
    {"cli", "hf"},
]
ENGINE = [  # folders and top files of the engine, likewise
    {"request"},
    {"drafting"},
    {"config"},
    {"rounds"},
    {"devices"},
    {"errors", "interrupts", "prompts", "conversing"},
    {"llm"},
    {"loops"},
]


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: set[str]) -> set[str]:
    """Modules of the package that a file imports: when it is loaded, in a function, or for types.

    The package's face, ``specrs`` itself, does not count: it shows names that other files define.
    """
    seen: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            seen |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{name}: relative import"
            # `from package import module` names the module; `from module import name` the module that has it.
            seen |= {m if (m := f"{node.module}.{a.name}") in known else node.module for a in node.names}
    return {m for m in seen if m in known and m not in (name, PACKAGE.name)}


def test_no_file_of_the_package_imports_in_a_circle() -> None:
    found = modules()
    graph = {name: imports(name, path, set(found)) for name, path in found.items()}
    assert len(graph) > 50 and sum(map(len, graph.values())) > 100
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


def test_imports_run_from_floor_to_floor() -> None:
    found = modules()
    floor = {name: i for i, names in enumerate(FLOORS) for name in names}
    for name, path in found.items():
        if name.count(".") == 0 or name.endswith("__main__"):
            continue  # the package's face
        own = floor[name.split(".")[1]]
        for other in imports(name, path, set(found)):
            if other.count("."):
                assert floor[other.split(".")[1]] <= own, f"{name} imports {other}"


def test_imports_within_the_engine_run_from_floor_to_floor() -> None:
    found = {name: path for name, path in modules().items() if name.startswith("specrs.engine.")}
    floor = {name: i for i, names in enumerate(ENGINE) for name in names}
    assert {name.split(".")[2] for name in found} == set(floor)
    for name, path in found.items():
        for other in imports(name, path, set(found)):
            assert floor[other.split(".")[2]] <= floor[name.split(".")[2]], f"{name} imports {other}"


def test_contributing_has_the_order_of_the_floors() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    order = re.search(r"^Python: (.*?)^```", text, re.M | re.S)
    assert order is not None
    assert [set(re.split(r"\s*\|\s*", floor.strip())) for floor in order[1].split("->")] == FLOORS


def test_contributing_names_every_folder_of_the_package_and_every_file_of_the_engine() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = "\n".join(line for line in text.splitlines() if line.startswith("| "))
    for name in set().union(*FLOORS) - {"_specrs", "sampling_params"}:
        assert f"`{name}/`" in rows or f"specrs/{name}/`" in rows or f"specrs/{name}.py`" in rows, name
    for path in sorted((PACKAGE / "engine").rglob("*.py")):
        place = path.parent.relative_to(PACKAGE.parent).as_posix()
        row = next((line for line in rows.splitlines() if line.startswith(f"| `python/{place}/` |")), "")
        assert path.stem in ("__init__", "errors") or f"`{path.stem}`" in row, path


def test_files_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:src|cuda|tests|benches|python|engine|models)/[\w/.]*\.(?:rs|py|cu|cuh|sh))`", text)
    assert len(set(named)) > 25
    for name in named:
        path = PACKAGE / name if name.startswith(("engine/", "models/")) else ROOT / name
        assert path.is_file(), name


def test_tests_of_texts_and_of_the_layout_start_without_torch() -> None:
    files = sorted(set(Path(__file__).parent.glob("test_*.py")) - {Path(__file__).with_name("test_examples.py")})
    assert len(files) > 3
    code = "import sys, pytest; code = pytest.main(sys.argv[1:]); print('torch' in sys.modules); sys.exit(code)"
    done = subprocess.run(
        [sys.executable, "-c", code, "--collect-only", "-q", "-p", "no:cacheprovider", *map(str, files)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.endswith("\nFalse\n"), done.stdout[-2000:] + done.stderr
