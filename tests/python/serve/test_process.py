"""`specrs serve` as a process: what it says, and how it ends."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import socket
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
from specrs.serve import Keys, ServeConfig
from specrs.serve.process import listener
from specrs.serve.service import LAST_WORDS

DEAD = """
import sys
from specrs import LedgerError
from specrs.engine.rounds.scheduler import Scheduler
step = Scheduler.step
def broken(self):
    if any(r.params.seed == 666 for r in self.running + self.waiting):
        raise LedgerError("pages do not add up")
    return step(self)
Scheduler.step = broken
from specrs.cli import main
sys.exit(main(sys.argv[1:]))
"""


SLOW = 25.0  # seconds that a process may take to end beside what it waits for, on a machine with much else to do


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
    held = gc.get_freeze_count() > 0  # true if a server of other tests has frozen them
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


def asked(url: str, **body: Any) -> socket.socket:
    """A connection on which the beginning of a stream has come."""
    data = json.dumps({"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True, **body}).encode()
    sock = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=60)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                 b"Content-Length: %d\r\n\r\n%b" % (len(data), data))  # fmt: skip
    assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
    return sock


def rest_of(sock: socket.socket) -> bytes:
    with sock:
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))


@pytest.mark.parametrize("busy", [True, False])
def test_sigterm_with_an_engine_that_does_not_answer(busy: bool) -> None:
    """The end takes the time to drain and a little more; its client hears an error; nobody reads a traceback."""
    with serving("--log", "none", "--drain-seconds", "1") as (process, url):
        (engine,) = children(process.pid)
        sock = asked(url) if busy else None
        os.kill(engine, signal.SIGSTOP)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - began < 1 + LAST_WORDS + SLOW
        assert process.returncode == 1
        assert err.count("\n") == 1 and "the engine has not answered for 5 seconds" in err
        assert not Path(f"/proc/{engine}").exists()
        if sock is not None:
            told = rest_of(sock)
            assert b'"code":"engine_unavailable"' in told and b"data: [DONE]" in told


@pytest.mark.parametrize("busy", [True, False])
def test_a_second_signal_ends_a_server_whose_engine_hangs(busy: bool) -> None:
    with serving("--log", "none", "--drain-seconds", "60" if busy else "0") as (process, url):
        (engine,) = children(process.pid)
        sock = asked(url) if busy else None
        os.kill(engine, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert process.poll() is None  # the process waits for the engine
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - began < SLOW
        assert process.returncode == 1 and err == ""
        assert not Path(f"/proc/{engine}").exists()
        if sock is not None:
            sock.close()


HANGS = DEAD.replace('raise LedgerError("pages do not add up")', "__import__('time').sleep(3600)")


def test_sigterm_with_an_engine_s_thread_that_hangs() -> None:
    """No thread can be ended from outside: the process goes without it."""
    with serving("--log", "none", "--no-engine-process", "--drain-seconds", "1", code=HANGS) as (process, url):
        sock = asked(url)
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json={"prompt": "x", "seed": 666}, timeout=1)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - began < 1 + LAST_WORDS + 5 + SLOW  # 5: Python's end waits for the thread
        assert process.returncode == 1
        assert err.count("\n") == 1 and "the engine has not answered for 5 seconds" in err
        assert b'"code":"engine_unavailable"' in rest_of(sock)


def test_an_engine_in_a_thread_where_that_is_asked_for() -> None:
    with serving("--log", "none", "--no-engine-process", "--tree", "1,2,3") as (process, url):
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        assert not children(process.pid)


def test_a_template_that_cannot_be_read_is_told_before_anything_is_loaded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specrs.cli import main

    monkeypatch.setattr("specrs.serve.process.make_engine", lambda config: pytest.fail("the model was loaded"))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "wrong.jinja").write_text("{{ bos }}\n{% for %}")
    for path, said in (("/nope", "No such file"), (str(tmp_path), "Is a directory"), (str(tmp_path / "bytes"), "UTF-8"),
                       (str(tmp_path / "wrong.jinja"), "line 2: ")):  # fmt: skip
        assert main(["serve", "--port", "0", "--chat-template", path]) == 2
        err = capfd.readouterr().err
        assert err.startswith("specrs: chat_template = ") and said in err and path in err and err.count("\n") == 1


def test_a_socket_of_this_machine(engine: AsyncLLM, tmp_path: Path) -> None:
    """The socket needs no key, and no name; the file of a server that was killed is replaced, another file is not."""
    path = tmp_path / "socket"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    with running(engine, tmp_path, uds=str(path), host="0.0.0.0") as web:
        assert web.address == f"unix:{path}"
        assert web.complete(prompt="x", max_tokens=1)["usage"]["completion_tokens"] == 1
        with pytest.raises(OSError, match="in use"):
            listener(ServeConfig(uds=str(path)))
    assert not path.exists()
    path.write_text("a file of somebody's")
    with pytest.raises(OSError, match="in use"):
        listener(ServeConfig(uds=str(path)))
    assert path.read_text() == "a file of somebody's"
    for wrong in (tmp_path / "no" / "folder", tmp_path / ("x" * 200)):
        with pytest.raises(OSError, match=wrong.name):
            listener(ServeConfig(uds=str(wrong)))


@pytest.mark.parametrize("root", ["/llm", "/a/b/"])
def test_below_a_path_that_a_proxy_takes_away(engine: AsyncLLM, tmp_path: Path, root: str) -> None:
    with running(engine, tmp_path, root_path=root, keys=Keys.of(["secret"])) as web:
        assert web.post("/v1/completions", prompt="x", max_tokens=1).status_code == 401
        allowed = {"authorization": "Bearer secret"}
        told = web.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=allowed)
        assert told.status_code == 200
        assert web.client.get("/health").status_code == 200
        assert 'specrs:http_responses_total{path="/v1/completions",status="200"} 1.0' in web.client.get("/metrics").text


def test_how_long_a_connection_stays_open(engine: AsyncLLM, tmp_path: Path) -> None:
    for seconds, closes in ((0.2, True), (30.0, False)):
        with running(engine, tmp_path, keep_alive_seconds=seconds) as web:
            sock = socket.create_connection(("127.0.0.1", web.port), timeout=20 if closes else 1)
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
            if closes:
                assert sock.recv(4096) == b""
            else:
                with pytest.raises(TimeoutError):
                    sock.recv(4096)
            sock.close()


@pytest.mark.parametrize("options,said", [
    (["--root-path", "llm"], "root_path"), (["--uds", "/nope/nope"], "/nope/nope"),
    (["--host", "0.0.0.0"], "no API key"), (["--port", "99999"], "port"), (["nowhere/at/all/x"], "nowhere"),
    (["--host", "192.0.2.1", "--allow-public-without-key"], "192.0.2.1"), (["--api-key-file", "/nope"], "nope"),
])  # fmt: skip
def test_what_cannot_start_says_why(options: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    from specrs.cli import main

    assert main(["serve", "--port", "0", *options]) == 2  # the usual port may be taken
    err = capfd.readouterr().err
    assert err.startswith("specrs: ") and said in err and err.count("\n") == 1
