"""Lines of a log that say what a test saw to run, with build and machine; `benches/backends_seen.py` reads them.

seen("engine", backend="triton", tree=(4, 3, 12), page_size=16, ...)
"""

from __future__ import annotations

import functools
import json
import time
from typing import Any

import torch

from specrs.backends.packages import PACKAGES
from specrs.measuring.machine import commit_of, driver, versions

MARK = "SEEN "


@functools.cache
def run() -> dict[str, Any]:
    """The build and the machine of this process."""
    return {
        "commit": commit_of(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": torch.cuda.get_device_name(), "driver": driver(),
        "versions": versions() | {package.name: package.installed() for package in PACKAGES},
    }  # fmt: skip


def seen(kind: str, **row: Any) -> None:
    """Print that something ran and was right."""
    print(MARK + json.dumps({"kind": kind, **row, "run": run()}))
