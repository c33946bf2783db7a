"""Servers for tests: in a process of their own, or in this one's event loop over an engine that the test has."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from modelzoo import Pair
from specrs import LLM, AsyncLLM

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
NAME = "tiny"  # name of the model, for requests


class Process:
    """``specrs serve`` as a user starts it.

    Attributes:
        port: port at which the server listens.
        url: without a path.
    """

    def __init__(self, folder: Path, *argv: str | Path, env: dict[str, str] | None = None, limit: float = 300) -> None:
        path = os.pathsep.join(p for p in sys.path if p)
        ours = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SPECRS_DEVICE": "cpu", "PYTHONFAULTHANDLER": "1"}
        whole = {**os.environ, **ours, **(env or {})}
        folder.mkdir(parents=True, exist_ok=True)
        self.stdout, self.stderr = folder / "out", folder / "err"
        given = [str(a) for a in argv]
        if "--port" not in given:
            given += ["--port", "0"]
        with self.stdout.open("ab") as out, self.stderr.open("wb") as err:
            command = [sys.executable, "-m", "specrs", "serve", *given]
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=whole)
        began = time.monotonic()
        while not (found := re.search(r"^listening on http://127\.0\.0\.1:(\d+)$", self.errors(), re.M)):
            if self.process.poll() is not None or time.monotonic() - began > limit:
                self.process.send_signal(signal.SIGABRT)  # makes it say where it was
                raise AssertionError(f"no server ({self.process.wait()}):\n{self.errors()}")
            time.sleep(0.02)
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def errors(self) -> str:
        """Return what the server wrote on stderr so far."""
        return self.stderr.read_text(errors="replace")

    def memory(self) -> int:
        """Bytes that it has in memory, and had at most."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.M)
        assert found
        return int(found[1]) << 10

    def end(self, how: int = signal.SIGTERM, limit: float = 60) -> int:
        """Send a signal, and wait for the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(limit)


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


@contextlib.contextmanager
def process(folder: Path, *argv: str | Path, **more: Any) -> Iterator[Process]:
    """A server in a process, killed at the end where it is still there. Where somebody waited for it in vain, it says
    first what each of its threads was at."""
    server = Process(folder, *argv, **more)
    try:
        yield server
    except (TimeoutError, asyncio.TimeoutError):  # one and the same from Python 3.11 on
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.end(signal.SIGABRT, 10)
        print(server.errors()[-20_000:])
        raise
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@contextlib.asynccontextmanager
async def hosted(llm: LLM, limits: dict[str, Any] | None = None, **config: Any) -> AsyncIterator[tuple[int, AsyncLLM]]:
    """A server in this loop, over an engine; its port, and the `AsyncLLM`.

    Args:
        llm: the test's again afterwards.
        limits: options of `AsyncLLM`.
        config: fields of `ServeConfig`.
    """
    from specrs.serve import ServeConfig, server
    from specrs.serve.process import listener

    engine = AsyncLLM(llm, **(limits or {}))
    settings = ServeConfig(**{"served_names": (NAME,), "port": 0, "log": "none", **config})
    sock = listener(settings)
    try:
        http = server(settings, engine)
        task = asyncio.ensure_future(http.serve([sock]))
        while not http.started:
            await asyncio.sleep(0.005)
            if task.done():
                task.result()
                raise AssertionError("the server ended before it began")
        try:
            yield sock.getsockname()[1], engine
        finally:
            http.should_exit = True
            await asyncio.wait_for(task, 60)
    finally:
        sock.close()
        await engine.aclose(drain=False)


def run(work: Callable[[], Coroutine[Any, Any, Any]], limit: float = 240.0) -> Any:
    """Run in a fresh loop; work that hangs fails."""
    return asyncio.run(asyncio.wait_for(work(), limit))


async def idle(engine: AsyncLLM, limit: float = 20.0) -> float:
    """Wait until the engine has nothing to do; returns the seconds that it took."""
    began = time.monotonic()
    while (stats := engine.stats()).submitted or stats.engine.running or stats.engine.waiting:
        assert time.monotonic() - began < limit, f"still at work after {limit} s: {stats}"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


async def clean(engine: AsyncLLM) -> None:
    """Check that no page, no sequence and no lease has an owner."""
    audit = await engine.audit()
    assert audit["sequences"] == audit["leased_sequences"] == audit["held_pages"] == 0, audit


def chatty(pair: Pair) -> Pair:
    """The pair, with a chat template beside the target."""
    (pair.target / "chat_template.jinja").write_text(TEMPLATE)
    return pair
