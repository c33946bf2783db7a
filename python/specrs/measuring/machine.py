"""The machine and the build that a measurement belongs to."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

CHECKOUT = Path(__file__).resolve().parents[3]


def commit_of(root: Path = CHECKOUT) -> str:
    """Return the commit that is checked out at ``root``, with ``+`` where tracked files differ from it.

    ``SPECRS_COMMIT``, where it is set, names the commit of a copy without git; ``unknown`` without either.
    """
    if given := os.environ.get("SPECRS_COMMIT"):
        return given
    if not (root / ".git").exists():
        return "unknown"

    def git(*args: str) -> str:
        command = ["git", "-C", str(root), *args]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        except OSError:  # a machine without git
            return ""

    head = git("rev-parse", "--short=12", "HEAD") or "unknown"
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def driver() -> str | None:
    """The GPU driver's version, such as ``580.65.06``; where the system does not say, the CUDA version that it has;
    ``None`` without a GPU."""
    if not torch.cuda.is_available():
        return None
    told = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", told.read_text()) if told.exists() else None
    low_level: Any = torch._C
    return found[0] if found else f"CUDA {low_level._cuda_getDriverVersion()}"


def versions() -> dict[str, str]:
    """Versions of Python and torch, and of the CUDA that torch was built for."""
    cuda: Any = torch.version.cuda
    return {"python": platform.python_version(), "torch": torch.__version__, **({"cuda": cuda} if cuda else {})}
