"""`specrs serve` as a process: what it says, and how it ends."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fault_world import children
from serve_world import running
from specrs.engine import AsyncLLM

DEAD = """
import sys
from specrs import LedgerError
from specrs.engine.scheduler import Scheduler
step = Scheduler.step
def broken(self):
    if any(r.params.seed == 666 for r in self.running + self.waiting):
        raise LedgerError("pages do not add up")
    return step(self)
Scheduler.step = broken
from specrs.cli import main
sys.exit(main(sys.argv[1:]))
"""


@contextmanager
def serving(*options: str, code: str | None = None, **environ: str) -> Iterator[tuple[Any, str]]:
    """A process and its address."""
    start = ["-m", "specrs"] if code is None else ["-c", code]
    argv = [sys.executable, *start, "serve", "--port", "0", "--max-batch", "2", "--no-draft", *options]
    env = {**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p), "SPECRS_DEVICE": "cpu", **environ}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stderr is not None
        told = process.stderr.readline()
        found = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)\n", told)
        assert found, told + process.stderr.read()
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def test_sigterm_drains_and_ends_well(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with serving("--api-key-file", str(keys), "--drain-seconds", "1", "--served-model-name", "m") as (process, url):
        headers = {"authorization": "Bearer secret"}
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 401
        body = {"model": "m", "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 2}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert sum('"finish_reason":"abort"' in line for line in rest) == 2 and "data: [DONE]" in rest
        out, err = process.communicate(timeout=20)
        assert process.returncode == 0, err
        assert 0.9 < time.monotonic() - began < 15 and err == ""
        logged = [json.loads(line) for line in out.splitlines()]
        assert [line["status"] for line in logged] == [401, 200] and logged[1]["finish"] == ["abort", "abort"]


def test_threads_give_way_sooner_while_a_server_runs(engine: AsyncLLM, tmp_path: Path) -> None:
    before = sys.getswitchinterval()
    held = gc.get_freeze_count() > 0  # by a server of other tests
    seen = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with running(engine, tmp_path / "a") as first:
        seen.append(sys.getswitchinterval())
        with running(engine, tmp_path / "b"):
            first.stop()
            seen.append(sys.getswitchinterval())
            assert gc.get_freeze_count() > 10_000  # a collection need not go through modules and models
    assert seen == pytest.approx([min(before, 5e-4)] * 2) and sys.getswitchinterval() == before
    assert (gc.get_freeze_count() > 0) == held


def test_an_engine_that_cannot_go_on_ends_the_process() -> None:
    with serving("--log", "none", "--no-engine-process", code=DEAD) as (process, url):
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        dead = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "seed": 666}, timeout=30)
        assert dead.status_code == 503 and dead.json()["error"]["code"] == "engine_unavailable"
        assert "retry-after" in dead.headers and "pages" not in dead.text
        assert httpx.get(f"{url}/health").status_code == 503
        _, err = process.communicate(timeout=20)
        assert process.returncode == 1 and "cannot go on" in err


def test_a_server_that_is_killed_leaves_no_engine() -> None:
    with serving("--log", "none") as (process, url):
        assert httpx.get(f"{url}/ready").status_code == 200
        (engine,) = children(process.pid)
        process.kill()
        until = time.monotonic() + 30
        while Path(f"/proc/{engine}").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert not Path(f"/proc/{engine}").exists()


def test_a_second_signal_ends_a_server_whose_engine_hangs() -> None:
    with serving("--log", "none") as (process, _):
        (engine,) = children(process.pid)
        os.kill(engine, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert process.poll() is None  # it waits for the engine
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        assert not Path(f"/proc/{engine}").exists()


def test_an_engine_in_a_thread_where_that_is_asked_for() -> None:
    with serving("--log", "none", "--no-engine-process", "--tree", "1,2,3") as (process, url):
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        assert not children(process.pid)


@pytest.mark.parametrize("options,said", [
    (["--host", "0.0.0.0"], "no API key"), (["--port", "99999"], "port"), (["nowhere/at/all/x"], "nowhere"),
    (["--host", "192.0.2.1", "--allow-public-without-key"], "192.0.2.1"), (["--api-key-file", "/nope"], "nope"),
])  # fmt: skip
def test_what_cannot_start_says_why(options: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    from specrs.cli import main

    assert main(["serve", *options]) == 2
    err = capfd.readouterr().err
    assert err.startswith("specrs: ") and said in err and err.count("\n") == 1
