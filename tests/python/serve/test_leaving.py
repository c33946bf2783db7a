"""Clients that go, dawdle or never read: their requests end, and nothing of them stays in the pool."""

from __future__ import annotations

import io
import json
import socket
import struct
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_world import Running, events, running, wait
from specrs.engine import AsyncLLM
from specrs.serve.record import Log

LONG: dict[str, Any] = {"prompt": "class Stack:", "max_tokens": 400, "ignore_eos": True, "temperature": 0.9, "seed": 1}
PATH = "/v1/completions"


def reset(sock: socket.socket) -> None:
    """Close at once, as a process does that is killed."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("how", ["reset", "closed"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_ends_its_request(web: Running, how: str, stream: bool, n: int) -> None:
    aborted = web.service.metrics.success["abort"]
    sock = web.raw(PATH, {**LONG, "stream": stream, "n": n})
    wait(lambda: web.engine.stats().engine.running >= n)
    steps = web.engine.stats().steps
    wait(lambda: web.engine.stats().steps > steps + 3)  # in a round
    reset(sock) if how == "reset" else sock.close()
    before = time.monotonic()
    web.idle()
    assert time.monotonic() - before < 3.0  # 400 tokens take longer
    assert aborted is not None


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_goes_while_it_waits(web: Running, stream: bool) -> None:
    running_ = [web.raw(PATH, {**LONG, "n": 8, "seed": 2})]
    wait(lambda: web.engine.stats().engine.running == 8)
    queued = [web.raw(PATH, {**LONG, "stream": stream}) for _ in range(5)]
    wait(lambda: web.engine.stats().submitted >= 5)
    for sock in queued:
        reset(sock)
    wait(lambda: web.engine.stats().submitted == 0)
    assert web.engine.stats().engine.running == 8
    for sock in running_:
        reset(sock)
    web.idle()


def test_one_that_goes_with_many_prompts(web: Running) -> None:
    sock = web.raw(PATH, {**LONG, "prompt": ["a", "b", "c", "d"], "n": 2, "stream": True})
    assert sock.recv(4096).startswith(b"HTTP/1.1 200")
    reset(sock)
    web.idle()


def counted(web: Running) -> dict[str, float]:
    """Metrics of tokens and ends, by their names without labels; of ends, aborts and all."""
    found: dict[str, float] = {}
    for line in web.client.get("/metrics").text.splitlines():
        name, value = line.partition("{")[0], line.rpartition(" ")[2]
        if not line.startswith("#") and name.startswith("vllm:") and "_bucket" not in name:
            found[name] = found.get(name, 0.0) + float(value)
            if name == "vllm:request_success_total" and 'finished_reason="abort"' in line:
                found["abort"] = float(value)
    return found


@pytest.mark.parametrize("body", [
    {"stream": True}, {"stream": False}, {"stream": True, "n": 3}, {"stream": True, "prompt": ["a", "b", "c"], "n": 2},
    {"prompt": ["a", "b", "c"]}, {"stream": True, "logprobs": 2, "echo": True},
])  # fmt: skip
@pytest.mark.parametrize("when", ["early", "late"])
def test_what_was_generated_for_one_who_left_counts(web: Running, body: dict[str, Any], when: str) -> None:
    """In the log's line and in every metric, as if the client had stayed."""
    web.idle()
    before, out = counted(web), io.StringIO()
    old, web.service.log = web.service.log, Log("requests", out)
    try:
        steps = web.engine.stats().steps
        sock = web.raw(PATH, {**LONG, **body})
        wait(lambda: web.engine.stats().engine.running > 0 if when == "early" else web.engine.stats().steps > steps + 9)
        reset(sock)
        web.idle()
        after = counted(web)
        wait(lambda: PATH in out.getvalue())
    finally:
        web.service.log.close()
        web.service.log = old
    grown = {name: after[name] - before[name] for name in after}
    [line] = [one for one in map(json.loads, out.getvalue().splitlines()) if one["path"] == PATH]
    prompts = body["prompt"] if "prompt" in body else [LONG["prompt"]]
    outputs = len(prompts) * body.get("n", 1)
    assert line["client_gone"] is True and line["finish"] == ["abort"] * outputs
    assert grown["abort"] == grown["vllm:request_success_total"] == outputs
    assert grown["vllm:request_generation_tokens_count"] == outputs
    tokens = grown["vllm:generation_tokens_total"]
    assert tokens == grown["vllm:request_generation_tokens_sum"] == line["completion_tokens"]
    assert tokens >= (outputs if when == "late" else 0)
    read = line["prompt_tokens"]
    assert read == grown["vllm:prompt_tokens_total"] == grown["vllm:request_prompt_tokens_sum"] >= 2 * len(prompts)
    assert read == grown["vllm:prefix_cache_queries_total"]
    for name in ("request_prompt_tokens", "request_params_n", "e2e_request_latency_seconds"):
        assert grown[f"vllm:{name}_count"] == len(prompts), name


def test_one_that_goes_before_the_engine_has_its_request_counts_too(web: Running) -> None:
    """The engine may take a request, and read its prompt, in the step in which its client leaves."""
    for _ in range(20):
        web.idle()
        before = counted(web)
        steps = web.engine.stats().steps
        sock = web.raw(PATH, LONG)
        wait(lambda steps=steps: web.engine.stats().submitted or web.engine.stats().steps > steps)
        reset(sock)
        web.idle()
        after = counted(web)
        told = {name: after[f"vllm:{name}"] - before[f"vllm:{name}"] for name in (
            "generation_tokens_total", "request_generation_tokens_sum")}  # fmt: skip
        assert len(set(told.values())) == 1, told


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("behind", ["a request", "a long body", "a body without an end"])
@pytest.mark.parametrize("how", ["reset", "closed"])
def test_one_that_goes_with_requests_behind(
    web: Running, stream: bool, behind: str, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server sees the client leave although a request waits for its turn; and the leaving is no fault of the
    server's."""
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    more = {"a request": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
            "a long body": head % 200_000 + b" " * 200_000,
            "a body without an end": head % 500_000 + b" " * 200_000}  # fmt: skip
    answered = web.engine.stats().engine.generated
    sock = web.raw(PATH, {**LONG, "stream": stream, "max_tokens": 480})
    sock.sendall(more[behind])
    wait(lambda: web.engine.stats().engine.running and web.engine.stats().engine.generated > answered + 4)
    reset(sock) if how == "reset" else sock.close()
    web.idle()
    assert web.engine.stats().engine.generated < answered + 400  # the request was not gone through to its end
    assert capfd.readouterr().err == ""


def test_requests_behind_another_are_answered_in_turn(web: Running) -> None:
    sock = web.raw(PATH, {"prompt": "x", "max_tokens": 3})
    for i in range(40):
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % (b"Connection: close\r\n" * (i == 39)))
    told = read(sock)
    assert told.count(b"HTTP/1.1 200 OK") == 41 and told.index(b"text_completion") < told.index(b'{"status":"ok"}')


def test_one_that_sends_ever_more_ahead_of_its_turn(web: Running) -> None:
    sock = web.raw(PATH, {**LONG, "max_tokens": 480})
    with pytest.raises(ConnectionError):
        for _ in range(20_000):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
    sock.close()
    web.idle()


def test_one_that_goes_within_its_body(web: Running) -> None:
    sock = socket.create_connection(("127.0.0.1", web.port))
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                 b"Content-Length: 1000\r\n\r\n{\"prompt\":")  # fmt: skip
    wait(lambda: len(web.service.watch) == 1)
    sock.close()
    web.idle()


def test_one_that_sends_no_body(engine: AsyncLLM, tmp_path: Path) -> None:
    with running(engine, tmp_path, body_seconds=0.3) as web:
        sock = socket.create_connection(("127.0.0.1", web.port), timeout=10)
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                     b"Content-Length: 1000\r\n\r\n{")  # fmt: skip
        answer = read(sock)
        assert answer.startswith(b"HTTP/1.1 408") and b'"code":"timeout"' in answer
        sock.close()
        web.idle()


def read(sock: socket.socket) -> bytes:
    parts = []
    while part := sock.recv(65536):
        parts.append(part)
    return b"".join(parts)


def test_one_that_never_reads_is_given_up(engine: AsyncLLM, tmp_path: Path) -> None:
    with running(engine, tmp_path, send_seconds=0.5) as web:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", web.port))
        data = json.dumps({**LONG, "n": 8, "logprobs": 20, "stream": True}).encode()
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                     b"Content-Length: %d\r\n\r\n" % len(data) + data)  # fmt: skip
        wait(lambda: web.service.open_requests == 1)
        web.idle()  # though it still stands there
        sock.close()


def test_slow_readers_lose_nothing(web: Running) -> None:
    body = {**LONG, "max_tokens": 120}
    [want] = web.complete(**body)["choices"]
    with web.client.stream("POST", PATH, json={**body, "stream": True}) as answer:
        parts = []
        for part in answer.iter_raw(chunk_size=None):
            parts.append(part)
            time.sleep(0.02)
    chunks = events(b"".join(parts).decode())
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == want["text"]


def test_comments_keep_a_silent_stream_open(engine: AsyncLLM, tmp_path: Path) -> None:
    with running(engine, tmp_path, comment_seconds=0.1) as web:
        blocker = web.raw(PATH, {**LONG, "n": 8, "max_tokens": 60})
        wait(lambda: engine.stats().engine.running == 8)
        answer = web.post(PATH, **{**LONG, "max_tokens": 2}, stream=True)
        assert answer.text.startswith(": keep-alive\n\n")
        told = [event["choices"][0] for event in events(answer.text)]  # a draft may bring both tokens at once
        assert 1 <= len(told) <= 2 and told[-1]["finish_reason"] == "length"
        reset(blocker)
        web.idle()


def test_a_full_queue_says_so_before_a_stream_begins(engine: AsyncLLM, tmp_path: Path) -> None:
    with running(engine, tmp_path, max_waiting=2, max_prompts=2, retry_after_seconds=3) as web:
        socks = [web.raw(PATH, {**LONG, "n": 8})]
        wait(lambda: engine.stats().engine.running == 8)
        socks += [web.raw(PATH, {**LONG, "n": 8}) for _ in range(2)]
        wait(lambda: engine.stats().submitted == 2)
        for stream in (False, True):
            answer = web.post(PATH, **LONG, stream=stream)
            assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
            error = answer.json()["error"]
            assert error["type"] == "rate_limit_error" and error["code"] == "engine_overloaded"
            assert "3 requests" in error["message"] and "at most 2" in error["message"]
        assert web.client.get("/health").status_code == 200
        assert 'vllm:admission_rejections_total{engine="0",model_name="pystdlib-16m",reason="requests"} 2.0' in (
            web.client.get("/metrics").text
        )
        for sock in socks:
            reset(sock)
        web.idle()


def test_draining_refuses_finishes_and_aborts(engine: AsyncLLM, tmp_path: Path) -> None:
    with running(engine, tmp_path, drain_seconds=1.0) as web:
        before = engine.stats().engine.generated
        quick = web.raw(PATH, {**LONG, "max_tokens": 30})
        wait(lambda: engine.stats().engine.generated > before)  # else it may come behind the others, who fill the batch
        slow = web.raw(PATH, {**LONG, "n": 8, "seed": 3, "max_tokens": 480})
        streamed = web.raw(PATH, {**LONG, "stream": True, "max_tokens": 480})
        wait(lambda: engine.stats().engine.running == 8)
        web.server.handle_exit(15, None)
        wait(lambda: web.service.draining)
        for path in ("/ready", PATH):
            answer = httpx.request("GET" if path == "/ready" else "POST", web.address + path, json={"prompt": "x"})
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "draining", answer.text
        assert httpx.get(web.address + "/health").status_code == 200
        assert b'"finish_reason":"length"' in read(quick)
        ended = read(slow)
        assert ended.startswith(b"HTTP/1.1 200") and ended.count(b'"finish_reason":"abort"') == 8
        text = read(streamed).decode()
        assert '"finish_reason":"abort"' in text and "data: [DONE]" in text
        web._thread.join(20)
        assert web.server.status == 0
