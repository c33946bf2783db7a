"""A server on loopback for tests: uvicorn in a thread, over one engine, and clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from specrs.engine import AsyncLLM
from specrs.serve import ServeConfig, new_event_loop, server

TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}
{% endfor %}{% if reasoning_effort is defined %}!{{ reasoning_effort }}
{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"""


class Running:
    """A server that runs; ``client`` asks it, ``service`` is what its requests share."""

    def __init__(self, config: ServeConfig, engine: AsyncLLM) -> None:
        self.engine = engine
        self.server: Any = server(config, engine)
        self._thread = threading.Thread(target=self._run, name="server")
        self._thread.start()
        wait(lambda: self.server.started or not self._thread.is_alive())
        assert self.server.started
        self.address: str = self.server.address
        if self.address.startswith("unix:"):
            transport = httpx.HTTPTransport(uds=self.address.removeprefix("unix:"))
            self.client = httpx.Client(transport=transport, base_url="http://any.example", timeout=60)
        else:
            self.port = int(self.address.rsplit(":", 1)[1])
            self.client = httpx.Client(base_url=self.address, timeout=60)

    @property
    def service(self) -> Any:
        return self.server.config.app.state.service

    def _run(self) -> None:
        self.loop = new_event_loop()
        try:
            self.loop.run_until_complete(self.server.serve())
        finally:
            self.loop.close()

    def stop(self) -> None:
        self.client.close()
        self.server.handle_exit(15, None)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        """A completion that succeeds."""
        answer = self.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def chat(self, text: str, **body: Any) -> dict[str, Any]:
        """A chat that succeeds."""
        answer = self.post("/v1/chat/completions", messages=[{"role": "user", "content": text}], **body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which ends as streams do."""
        answer = self.post(path, **body, stream=True)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events(answer.text)

    def refused(self, path: str, **body: Any) -> dict[str, Any]:
        """The error of a request that is wrong."""
        answer = self.post(path, **body)
        assert answer.status_code == 400, answer.text
        error: dict[str, Any] = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def raw(self, path: str, body: dict[str, Any], **headers: str) -> socket.socket:
        """A connection on which a request has been sent."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        data = json.dumps(body).encode()
        told = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": str(len(data)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
        sock.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        return sock

    def idle(self) -> None:
        """Wait until nothing is left of any request, and check the pool."""
        wait(lambda: not self.service.open_requests and not len(self.service.watch))
        wait(lambda: not (stats := self.engine.stats()).submitted and not stats.engine.running)
        counts = asyncio.run_coroutine_threadsafe(self.engine.audit(), self.loop).result(30)
        assert counts["sequences"] == counts["leased_sequences"] == counts["held_pages"] == 0


def events(text: str) -> list[dict[str, Any]]:
    """Return the events of a whole stream."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert blocks and blocks[-1] == "data: [DONE]" and all(block.startswith("data: ") for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def wait(until: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


@contextmanager
def running(engine: AsyncLLM, tmp: Path, **options: Any) -> Iterator[Running]:
    """A further server over the same engine."""
    template = tmp / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    config = ServeConfig(**{"port": 0, "log": "none", "chat_template": str(template), "drain_seconds": 5, **options})
    made = Running(config, engine)
    try:
        yield made
    finally:
        made.stop()


def worst_pause(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds that the work takes, and the longest pause of another thread."""
    over, pauses = threading.Event(), [0.0]

    def look() -> None:
        last = time.perf_counter()
        while not over.wait(0.001):
            now = time.perf_counter()
            pauses.append(now - last)
            last = now
        pauses.append(time.perf_counter() - last)

    thread = threading.Thread(target=look)
    thread.start()
    began = time.perf_counter()
    try:
        work()
    finally:
        took = time.perf_counter() - began
        over.set()
        thread.join()
    return took, max(pauses)
