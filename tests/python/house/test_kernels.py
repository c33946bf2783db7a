"""Rules on the text of `cuda/` that no compiler knows."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
EARLY = {"attention": "merge", "linear": "linear"}  # launches that ask for it, and the device function


def test_kernels_that_are_launched_early_wait_for_the_launch_in_front_of_them() -> None:
    launches = {p.stem for p in (ROOT / "src/device/kernels").glob("*.rs") if "early_function(" in p.read_text()}
    assert launches == set(EARLY)
    text = "".join(path.read_text() for path in sorted((ROOT / "cuda").glob("*.cu*")))
    for name in EARLY.values():
        body = re.search(rf"^__device__ __forceinline__ void {name}\(.*?^\}}", text, re.DOTALL | re.MULTILINE)
        assert body and "wait_for_previous();" in body[0], name
