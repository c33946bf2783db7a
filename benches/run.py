"""Every Python bench that runs on a CPU, one after another: ``python benches/run.py [NAME ...]``.

Each writes its figures to ``benches/results/``; ``cargo bench`` has the kernels' and the core's own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ["allocator", "planner", "formats", "calls", "acceptance", "engine", "drafts", "drafters"]


def main() -> int:
    """Run the named benches, or all; the exit status is the number that failed."""
    names = sys.argv[1:] or NAMES
    unknown = [n for n in names if n not in NAMES]
    if unknown:
        print(f"no bench {unknown[0]!r}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    failed = 0
    for name in names:
        print(f"== {name}", flush=True)
        failed += subprocess.run([sys.executable, HERE / f"bench_{name}.py"], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
