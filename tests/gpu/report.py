"""Collect what run.sh produced into one JSON file: where it ran, what passed, what was measured."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any


def tests(*paths: Path) -> dict[str, Any] | None:
    """Counts of junit files, by file of tests, and the names of what failed; ``None`` where a run left no file."""
    if not paths or not all(path.exists() for path in paths):
        return None
    suites = [suite for path in paths for suite in ET.parse(path).getroot().iter("testsuite")]
    count = {k: sum(int(s.get(k, 0)) for s in suites) for k in ("tests", "failures", "errors", "skipped")}
    cases = [case for s in suites for case in s.iter("testcase")]
    failed = [
        case.get("name", "?") for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    files = Counter(case.get("classname", "?").rpartition(".")[2] for case in cases)
    return {
        "passed": count["tests"] - count["failures"] - count["errors"] - count["skipped"],
        "failed": count["failures"] + count["errors"],
        "skipped": count["skipped"],
        "names": failed,
        "files": dict(sorted(files.items())),
    }


def findings(log: Path) -> int | None:
    """Return the number of findings that a sanitizer counted; ``None`` where it did not get to its summary, or the
    tests not to their end."""
    text = log.read_text(errors="replace") if log.exists() else ""
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    return None if not summary or "process didn't terminate successfully" in text else int(summary[-1])


def sanitizers(work: Path, logs: Path) -> dict[str, dict[str, Any]]:
    """Return the results of each tool, with and without torch's caching allocator: all runs together, and those that
    did not finish."""
    runs: dict[str, list[str]] = {}
    for name in sorted(done.stem for done in work.glob("*.sanitized")):
        runs.setdefault("-".join(name.split("-")[:2]), []).append(name)
    found = {}
    for kind, names in runs.items():
        counts = {name: findings(logs / f"{name}.log") for name in names}
        unfinished = [name for name, count in counts.items() if count is None]
        total = None if unfinished else sum(count or 0 for count in counts.values())
        junit = tests(*(work / f"{name}.xml" for name in names))
        found[kind] = {"findings": total, "unfinished": unfinished, "tests": junit}
    return found


def images(wheel: Path) -> int:
    """Fat binaries of kernels in a wheel, or in the extension alone."""
    extension = wheel.read_bytes()
    if wheel.suffix == ".whl":
        with zipfile.ZipFile(wheel) as z:
            extension = z.read(next(n for n in z.namelist() if n.endswith((".so", ".pyd"))))
    return extension.count(b"\x50\xed\x55\xba")


def command(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def machine() -> dict[str, Any]:
    import torch

    name, driver = (command("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or ", ").split(
        ", "
    )[:2]
    return {
        "device": name,
        "driver": driver.splitlines()[0] if driver else "",
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "kernel": platform.release(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("work", "logs", "wheel", "root", "json"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    a = parser.parse_args()
    commit = os.environ.get("SPECRS_COMMIT") or command("git", "-C", str(a.root), "rev-parse", "HEAD")
    bench = a.work / "bench.json"
    report = {
        "commit": commit,
        "wheel": {
            "name": a.wheel.name,
            "bytes": a.wheel.stat().st_size,
            "sha256": hashlib.sha256(a.wheel.read_bytes()).hexdigest(),
            "images": images(a.wheel),
        },
        "machine": machine(),
        "tests": tests(*(rc.with_suffix(".xml") for rc in sorted(a.work.glob("tests-*.rc")))),
        "sanitizers": sanitizers(a.work, a.logs),
        "measurements": json.loads(bench.read_text()) if bench.exists() else None,
    }
    control = a.logs / "control.log"
    report["memcheck_control"] = {"findings": findings(control), "want": "more than 0"} if control.exists() else None
    main_run = report["tests"]
    ok = (
        main_run is not None
        and all(rc.read_text().strip() == "0" for rc in a.work.glob("tests-*.rc"))
        and main_run["failed"] == 0
        and main_run["passed"] > 0
        and report["measurements"] is not None
    )
    for run in report["sanitizers"].values():  # none where this machine has no compute-sanitizer
        inner = run["tests"]
        ok = ok and run["findings"] == 0 and inner is not None and inner["failed"] == 0 and inner["passed"] > 0
    if report["memcheck_control"] is not None:
        ok = ok and bool(report["memcheck_control"]["findings"])
    report["ok"] = ok
    a.json.write_text(json.dumps(report, indent=2) + "\n")
    print(
        json.dumps(
            {k: report[k] for k in ("ok", "tests", "sanitizers", "memcheck_control", "machine", "wheel")}, indent=1
        )
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
