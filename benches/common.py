"""Parts that the Python benches share: the machine, peers' wheels at pinned versions, interleaved timing, results as
JSON.

A figure is a ratio of medians, taken in one run with the candidates taking turns, their results checked equal.
Results go to ``benches/results/<name>.json`` with the commit, the machine and the versions they belong to.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("SPECRS_DEVICE", "cpu")  # scripts of benches/gpu name the GPU themselves

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benches" / "results"
VERSIONS = ("torch", "transformers", "numpy")


def peers_dir() -> Path:
    """Return the directory of peers' files: ``$PEERS_DIR`` or the git-ignored ``.peers`` of the repository."""
    path = Path(os.environ.get("PEERS_DIR", ROOT / ".peers"))
    path.mkdir(parents=True, exist_ok=True)
    return path


def wheel(package: str, version: str) -> Path:
    """The wheel of exactly this version, from the package index on the first call.

    The wheel is never installed and its requirements are not fetched. ``$PEERS_PYTHON`` (such as 3.11) asks for
    the wheel of another Python than the running one.
    """
    folder = peers_dir() / "wheels"
    name = package.replace("-", "_")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    if "PEERS_PYTHON" in os.environ:
        command += ["--python-version", os.environ["PEERS_PYTHON"]]
    for attempt in range(2):
        found = sorted(folder.glob(f"{name}-{version}-*.whl"))
        if found:
            return found[0]
        if attempt == 0:
            subprocess.run([*command, "--dest", str(folder), f"{package}=={version}"], check=True)
    raise FileNotFoundError(f"no wheel of {package} {version} in {folder}")


def unpack(archive: Path, patterns: Iterable[str]) -> Path:
    """Unpack the members that match a shell pattern into a folder of the wheel's own, and return that folder."""
    target = peers_dir() / "unpacked" / archive.stem
    wanted = list(patterns)
    with zipfile.ZipFile(archive) as z:
        for member in z.namelist():
            if any(fnmatch.fnmatch(member, p) for p in wanted) and not (target / member).exists():
                z.extract(member, target)
    return target


def machine() -> dict[str, Any]:
    """The machine in words and numbers: CPU model, cores, memory, and how busy it was."""
    model = platform.processor() or platform.machine()
    caches = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        text = cpuinfo.read_text()
        found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        model = found.group(1) if found else model
        family = re.search(r"^cpu family\s*:\s*(\d+)$", text, re.MULTILINE)
        number = re.search(r"^model\s*:\s*(\d+)$", text, re.MULTILINE)
        if family and number:
            model = f"{model} (family {family.group(1)}, model {number.group(1)})"
        found = re.search(r"^cache size\s*:\s*(.+)$", text, re.MULTILINE)
        caches = found.group(1) if found else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "cache": caches,
        "memory_gib": round(memory / 2**30, 1),
        "load": [round(x, 2) for x in os.getloadavg()],
    }


def versions(*more: str) -> dict[str, str]:
    """Versions of Python and of the packages that are there."""
    out = {"python": platform.python_version()}
    for package in (*VERSIONS, *more):
        try:
            out[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out


def commit() -> str:
    """The commit that is checked out, with ``+`` where tracked files differ from it; ``SPECRS_COMMIT`` where it is set,
    for a copy without git."""
    from specrs.measuring.machine import commit_of

    return commit_of(ROOT)


def write_result(name: str, result: Mapping[str, Any]) -> Path:
    """Write ``benches/results/<name>.json``: the result beside commit, date, machine and versions."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    head = {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
    }
    path.write_text(json.dumps({**head, **result}, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")
    return path


def seconds(call: Callable[[], object], least: float = 2e-3, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call: repeated until ``least`` seconds have passed, so that the clock's own time is small."""
    runs = 1
    while True:
        start = clock()
        for _ in range(runs):
            call()
        took = clock() - start
        if took >= least:
            return took / runs
        runs = max(2 * runs, int(runs * 1.2 * least / max(took, 1e-7)))


def interleave(candidates: Mapping[str, Callable[[], float]], repeats: int = 15) -> dict[str, float]:
    """Median of what each candidate returns, the candidates taking turns; one turn each goes to warm up."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(repeats + 1):
        for name, sample in candidates.items():
            value = sample()
            if turn > 0:
                samples[name].append(value)
    return {name: statistics.median(values) for name, values in samples.items()}


def release_binary(name: str) -> Path:
    """Build ``examples/<name>.rs`` in release mode without the Python bindings; path of the executable."""
    command = ["cargo", "build", "--release", "--example", name, "--message-format=json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"cargo build --example {name} failed:\n{done.stderr}")
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message.get("target", {}).get("name") == name:
            return Path(message["executable"])
    raise RuntimeError(f"cargo built no example {name}")


class Driver:
    """A release binary that answers each line on its standard input with a line of JSON.

    It lets the Rust core take its turn between peers in the same run, without Python's call costs.
    """

    def __init__(self, binary: Path) -> None:
        self._process = subprocess.Popen([str(binary)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *words: object) -> Any:
        """Send the words on one line and return the answer."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the driver ended at {words}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{words}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the binary."""
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait()
