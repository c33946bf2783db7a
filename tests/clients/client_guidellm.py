"""`guidellm`: its own benchmark of a server, at fixed concurrency; every request of it must succeed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from common import BASE_URL, MODEL, same

REQUESTS = 40


def main() -> None:
    """Run it as its users do, and read its report."""
    print(f"guidellm {version('guidellm')}")
    out = Path(os.environ["WORK"]) / "guidellm"
    out.mkdir(exist_ok=True)
    command = [
        Path(sys.executable).parent / "guidellm", "run",
        "--backend", f"kind=openai_http,target={BASE_URL.removesuffix('/v1')},model={MODEL}",
        "--tokenizer", f"kind=huggingface_auto,model={os.environ['MODEL_DIR']}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "--profile", "kind=concurrent,streams=8", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--output", f"kind=json,path={out / 'report.json'}", "--disable-console",
    ]  # fmt: skip
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    report = json.loads((out / "report.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    same((totals["successful"], totals["errored"]), (REQUESTS, 0), f"requests: {totals}")


if __name__ == "__main__":
    main()
