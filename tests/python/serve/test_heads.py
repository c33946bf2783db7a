"""Heads of requests: how long they may be, and where the paths in them are looked for."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import httpx
import pytest

from serve_world import Running
from specrs.serve import Keys, ServeConfig, app
from specrs.serve.heads import MOST_HEAD_BYTES

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/v1/nowhere")


@pytest.mark.parametrize("root", ["", "/llm", "/llm/", "/v1", "/a/v1"])
def test_keys_guard_an_application_below_another_path(root: str) -> None:
    """Mounted in another application, behind ``--root-path``, or by Ray Serve with a prefix."""
    made = app(ServeConfig(keys=Keys.of(["secret"])))

    async def ask(path: str) -> int:
        transport = httpx.ASGITransport(made, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.post(root + path, json={})).status_code

    assert {path: asyncio.run(ask(path)) for path in PATHS} == dict.fromkeys(PATHS, 401)
    assert asyncio.run(ask("/nowhere")) == 404


START = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BODY = b"5\r\n" + b'{"a":' + b"\r\n0\r\n"


@pytest.mark.parametrize(
    ("start", "part"),
    [(START + b"a: ", b"x" * 4096), (START, b"a: b\r\n" * 500), (b"GET /", b"x" * 4096),
     (START + b"transfer-encoding: chunked\r\n\r\n" + BODY + b"a: ", b"x" * 4096)],
    ids=["one header", "many headers", "a path", "a trailer"],
)  # fmt: skip
def test_a_head_without_an_end(web: Running, start: bytes, part: bytes) -> None:
    """Such a head is refused long before it costs anything: httptools would join its pieces in quadratic time."""
    with socket.create_connection(("127.0.0.1", web.port), timeout=20) as sock:
        sock.sendall(start)
        sent, most, told = 0, 64 * MOST_HEAD_BYTES, b""
        try:
            while sent < most:
                sock.sendall(part)
                sent += len(part)
                time.sleep(0.001)
        except OSError:
            pass
        assert sent < most
        try:
            while piece := sock.recv(4096):
                told += piece
        except OSError:
            pass  # a connection that is closed on somebody who sends is reset, and the answer may go with it
    if told.startswith(b"HTTP/1.1 431 "):
        assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
    else:
        assert not told
    assert web.complete(prompt="x", max_tokens=1)["choices"][0]["text"]
    web.idle()


def test_long_heads_and_bodies_in_pieces_are_served(web: Running) -> None:
    data = json.dumps({"prompt": "x", "max_tokens": 1, "user": "y" * 3 * MOST_HEAD_BYTES}).encode()
    length = b"content-length: %d\r\n" % len(data)
    with socket.create_connection(("127.0.0.1", web.port), timeout=20) as sock:
        for _ in range(3):  # on one connection: what is counted begins again
            head = START + length + b"a: " + b"x" * (MOST_HEAD_BYTES // 2) + b"\r\n\r\n"
            for piece in (head[:900], head[900:], data[:50000], data[50000:]):
                sock.sendall(piece)
                time.sleep(0.02)
            told = sock.recv(65536)
            assert told.startswith(b"HTTP/1.1 200 ")
            while not told.endswith(b"}"):
                told += sock.recv(65536)
