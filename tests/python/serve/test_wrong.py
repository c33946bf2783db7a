"""Requests that are wrong: each has its own answer in OpenAI's form, and none is a fault of the server."""

from __future__ import annotations

import json
import logging
import random
import socket
from pathlib import Path
from typing import Any

import pytest

from serve_world import Running, running, worst_pause
from specrs import SpecrsError
from specrs.engine import AsyncLLM, EngineFailedError, StepFailedError
from specrs.serve import Keys, errors
from specrs.serve.fields import CHAT, COMPLETIONS, TABLE, Kind
from specrs.serve.middleware import host_name
from specrs.serve.seldom import SECONDS, Seldom

PATH = "/v1/completions"
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("name,value", [
    ("temperature", -1), ("temperature", "hot"), ("temperature", True), ("temperature", 1e400), ("top_p", 0),
    ("top_p", 2), ("n", 0), ("n", 129), ("n", 1.5), ("n", "2"), ("max_tokens", -1), ("max_tokens", "x"),
    ("seed", 2**64), ("seed", -(2**63) - 1), ("seed", "x"), ("stop", 3), ("stop", [3]), ("stop", ["x"] * 17),
    ("stop", "x" * 1025), ("logprobs", 21), ("logprobs", True), ("logit_bias", [1]), ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": "x"}), ("logit_bias", {"99999": 1}), ("logit_bias", {"1": 1e31}),
    ("logit_bias", {str(i): 1 for i in range(1025)}), ("stop_token_ids", [99999]), ("stop_token_ids", [-1]),
    ("stop_token_ids", 3), ("allowed_token_ids", []), ("allowed_token_ids", [99999]), ("presence_penalty", "x"),
    ("frequency_penalty", [1]), ("top_k", 1.5), ("top_k", -2), ("min_p", 2), ("repetition_penalty", 0),
    ("ignore_eos", 1), ("min_tokens", 17), ("bad_words", [""]), ("bad_words", 3),
    ("bad_words", ["x" * 1000] * 9), ("prediction", {"type": "content", "content": "x" * 40_000}),
    ("stream", "yes"),
    ("stream_options", True), ("stream_options", {"nonsense": True}), ("stream_options", {"include_usage": 1}),
    ("prediction", "x"), ("prediction", {"type": "content", "content": 3}), ("priority", 2**40), ("echo", 1),
    ("prompt", 3), ("prompt", []), ("prompt", [[]]), ("prompt", [1.5]), ("prompt", ["x", 1]),
    ("prompt", [99999]), ("prompt", [-1]), ("prompt", ["x"] * 33), ("prompt", [[1], ["x"]]), ("best_of", 200),
    ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("model", 3), ("suffix", "x"), ("speculative", 1),
    ("use_beam_search", True), ("cache_salt", ""), ("skip_special_tokens", "no"), ("prompt_logprobs", 21),
    ("logprobs_mode", "raw"), ("user_name", "x"), ("messages", []),
])  # fmt: skip
def test_a_wrong_value_is_refused_by_name(web: Running, name: str, value: Any) -> None:
    body = {"prompt": "x", "max_tokens": 16, name: value}
    answer = web.client.post(PATH, content=json.dumps(body), headers=JSON)
    error = answer.json()["error"]
    if value == 1e400:
        assert answer.status_code == 400 and error["code"] == "invalid_json"
        return
    assert answer.status_code == 400 and error["type"] == "invalid_request_error", answer.text
    assert error["param"] == name or (error["param"] or "").startswith("prompt"), error
    assert name in error["message"] and "SamplingParams" not in error["message"]
    if name != "prompt":
        many = web.client.post(PATH, content=json.dumps({**body, "prompt": ["x", [1]]}), headers=JSON)
        assert many.status_code == 400 and many.json()["error"] == error


@pytest.mark.parametrize("endpoint,path", [(COMPLETIONS, PATH), (CHAT, "/v1/chat/completions")])
def test_every_refused_field_is_refused_and_every_ignored_one_ignored(web: Running, endpoint: str, path: str) -> None:
    base: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
    base |= {"prompt": "x"} if endpoint == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    want = web.post(path, **base).json()["choices"]
    mine = {one.name: one for one in TABLE if endpoint in one.endpoints}
    for name in {one.name for one in TABLE} - set(mine):
        error = web.refused(path, **{**base, name: "x"})
        assert error["param"] == name and error["code"] == "unknown_parameter"
    for name, field in mine.items():
        if field.kind is Kind.REFUSED:
            for value in ("certainly not", 17, {"a": [1]}):
                error = web.refused(path, **base, **{name: value})
                assert error["param"] == name and error["message"].startswith(name)
        elif field.kind is Kind.IGNORED:
            value = True if name == "parallel_tool_calls" else "anything"
            assert web.post(path, **base, **{name: value}).json()["choices"] == want
        if name not in base:
            assert web.post(path, **base, **{name: None}).json()["choices"] == want  # null is absent


BODIES = [
    b"", b"{", b"[]", b"null", b"1", b'"x"', b"{'prompt': 1}", b'{"prompt": NaN}', b'{"prompt": Infinity}', b"\xff\xfe",
    b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": "x", "stop": "\\udc00"}', b"[" * 100_000,
    b'{"a":' * 5_000 + b"1" + b"}" * 5_000, b'{"prompt": "x", "seed": ' + b"9" * 5_000 + b"}", b'{"prompt": "x"} y',
    b'{"prompt": "x", "prompt": }', b"{" + b" " * 1000, b'{"metadata": ' + b"[" * 120 + b"]" * 120 + b"}",
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda b: repr(b[:24]))
def test_a_body_that_is_none(web: Running, body: bytes) -> None:
    answer = web.client.post(PATH, content=body, headers=JSON)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json", answer.text


def test_a_body_of_another_type_or_too_large(web: Running, engine: AsyncLLM, tmp_path: Path) -> None:
    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        answer = web.client.post(PATH, content=b'{"prompt": "x"}', headers=headers)
        assert answer.status_code == 415
    with running(engine, tmp_path, max_body_bytes=1000) as small:
        data = b'{"prompt": "' + b"x" * 2000 + b'"}'

        def pieces() -> Any:
            yield data[:900]
            yield data[900:]

        for content in (data, pieces()):
            answer = small.client.post(PATH, content=content, headers=JSON)
            assert answer.status_code == 413 and "max_body_bytes = 1000" in answer.json()["error"]["message"]


def test_nonsense_is_never_a_fault_of_the_server(web: Running) -> None:
    rng = random.Random(5)
    values: list[Any] = [None, True, False, 0, -1, 1, 2**70, -(2**70), 0.5, 1e308, "", "x", "\x00", "é☃", [], [[]], {},
                         [None], ["x"], [1], [[1]], {"type": "x"}, {"1": 1},
                         [{"role": "user", "content": "x"}]]  # fmt: skip
    names = sorted({one.name for one in TABLE} - {"n", "best_of", "max_tokens", "max_completion_tokens"})
    for _ in range(250):
        chat = rng.random() < 0.5
        body: dict[str, Any] = {"max_tokens": 1}
        body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
        body |= {rng.choice(names): rng.choice(values) for _ in range(rng.randint(1, 3))}
        answer = web.client.post("/v1/chat/completions" if chat else PATH, json=body)
        assert answer.status_code in (200, 400, 404), (body, answer.text)
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    web.idle()


def test_keys(engine: AsyncLLM, tmp_path: Path) -> None:
    with running(engine, tmp_path, keys=Keys.of(["secret-1", "secret-2"]), cors_origins=["http://page"]) as web:
        body = {"prompt": "x", "max_tokens": 1}
        for headers in ({}, {"authorization": "Bearer"}, {"authorization": "Bearer secret"},
                        {"authorization": "Basic secret-1"}, {"authorization": "secret-1"}):  # fmt: skip
            for path in (PATH, "/v1/models", "/tokenize", "/v1/nowhere"):
                answer = web.client.post(path, json=body, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer" and "secret" not in answer.text
        for key in ("secret-1", "secret-2"):
            assert web.client.post(PATH, json=body, headers={"authorization": f"bearer {key}"}).status_code == 200
        assert web.client.get("/health").status_code == web.client.get("/metrics").status_code == 200
        asked = {"origin": "http://page", "access-control-request-method": "POST",
                 "access-control-request-headers": "authorization"}  # fmt: skip
        allowed = web.client.options(PATH, headers=asked)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "http://page"
        other = web.client.options(PATH, headers={**asked, "origin": "http://other"})
        assert "access-control-allow-origin" not in other.headers


def test_names_of_other_machines_lead_nowhere(web: Running) -> None:
    for host in ("localhost", f"127.0.0.1:{web.port}", "[::1]:1"):
        assert web.client.get("/health", headers={"host": host}).status_code == 200
    for host in ("page.example", f"page.example:{web.port}", "127.0.0.1.page.example"):
        answer = web.client.post(PATH, json={"prompt": "x"}, headers={"host": host})
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize("host", ["127.0.0.2", "localhost", "127.1.2.3"])
def test_an_address_of_this_machine_may_be_asked_for(engine: AsyncLLM, tmp_path: Path, host: str) -> None:
    with running(engine, tmp_path, host=host) as web:
        assert web.client.get("/health").status_code == 200
        assert web.client.get("/health", headers={"host": f"{host}:{web.port}"}).status_code == 200
        assert web.client.get("/health", headers={"host": "page.example"}).status_code == 403


def test_spellings_of_an_address_are_one() -> None:
    assert len({host_name(one) for one in ("::1", "[::1]", "[0:0:0:0:0:0:0:1]", "[0::1]")}) == 1
    assert host_name("LocalHost") == "localhost" != host_name("localhost.")


def test_unreadable_requests_are_refused_and_told_seldom(web: Running, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(60):
        with socket.create_connection(("127.0.0.1", web.port), timeout=20) as sock:
            sock.sendall(b"nonsense %d\r\n\r\n" % i)
            told = b"".join(iter(lambda: sock.recv(4096), b""))
        assert told.startswith(b"HTTP/1.1 400 ")
        assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"
    assert sum("Invalid HTTP" in one.getMessage() for one in caplog.records) <= 1 + 60 // SECONDS


def test_messages_of_a_kind_go_through_once_in_a_while() -> None:
    now = 0.0
    limit, told = Seldom(10.0, lambda: now), []

    def log(text: str, *args: object, error: BaseException | None = None) -> None:
        info = None if error is None else (type(error), error, None)
        record = logging.LogRecord("x", logging.ERROR, "x", 1, text, args, info)
        if limit.filter(record):
            told.append(record.getMessage())

    for i in range(5):
        log("a %d", i)
        log("b")
        log("a %d", i, error=ValueError())
    now = 9.0
    log("a %d", 7)
    now = 10.5
    log("a %d", 8)
    log("a %d", 9)
    assert told == ["a 0", "b", "a 0", "a 8 (5 more of this kind before)"]
    for i in range(5000):
        log(f"c {i}")
    assert len(limit._told) <= 256


def test_request_ids_come_back(web: Running) -> None:
    assert web.client.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for hostile in ("a b", "x" * 200, "<script>"):
        made = web.client.post(PATH, json={}, headers={"x-request-id": hostile}).headers["x-request-id"]
        assert len(made) == 32 and made != hostile


def test_what_is_wrong_with_one_prompt_names_the_field(web: Running) -> None:
    for prompt in ([[]], [[], [1]], ["a", 1], [True], [1.5]):
        error = web.refused(PATH, prompt=prompt, max_tokens=1)
        assert error["param"] == "prompt" and error["message"].startswith("prompt[")


def test_an_empty_prompt_is_the_token_that_begins_texts(web: Running) -> None:
    begins = web.post("/tokenize", prompt="").json()["tokens"]
    assert begins == [0]
    asked: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    empty = web.complete(prompt="", **asked)
    assert empty["usage"]["prompt_tokens"] == 1 and empty["choices"] == web.complete(prompt=begins, **asked)["choices"]
    both = web.complete(prompt=["", "x"], **asked)["choices"]
    assert both[0] == empty["choices"][0] and len(both) == 2
    assert web.complete(prompt="", echo=True, **asked)["choices"][0]["text"] == empty["choices"][0]["text"]
    for prompt in ("", ["x", ""]):
        error = web.refused(PATH, prompt=prompt, add_special_tokens=False)
        assert error["param"] == "prompt" and "BOS" in error["message"]
        assert error["message"].startswith("prompt = ''" if prompt == "" else "prompt[1] = ''")


def test_options_of_a_stream_need_one(web: Running) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in ((PATH, {"prompt": "x"}), ("/v1/chat/completions", chat)):
        for more in ({}, {"stream": False}, {"stream": None}):
            error = web.refused(path, **body, **more, stream_options={"include_usage": True}, max_tokens=1)
            assert error["param"] == "stream_options" and "stream = true" in error["message"]
        assert web.stream(path, **body, stream_options={"include_usage": True}, max_tokens=1)[-1]["usage"]


@pytest.mark.parametrize("hosts", [[], ["localhost", "localhost"], ["localhost", "page.example"]])
def test_a_request_has_one_host(engine: AsyncLLM, web: Running, tmp_path: Path, hosts: list[str]) -> None:
    with running(engine, tmp_path, keys=Keys.of(["x"])) as open_to_all:
        for one in (web, open_to_all):
            with socket.create_connection(("127.0.0.1", one.port), timeout=20) as sock:
                lines = "".join(f"Host: {host}\r\n" for host in hosts)
                sock.sendall(f"GET /health HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode())
                told = b"".join(iter(lambda: sock.recv(4096), b""))
            assert told.startswith(b"HTTP/1.1 400 ")
            assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_host"


def test_long_texts_hold_nobody_up(web: Running) -> None:
    """The tokenizer works without the interpreter's lock: the event loop and the engine's thread go on meanwhile."""
    most = 64 * web.service.context
    service, text = web.service, " abc" * (most // 4)
    ids = [5] * 300_000
    for work in (lambda: service.encode(text, True, "prompt"), lambda: service.decode(ids, False)):
        took, pause = min((worst_pause(work) for _ in range(5)), key=lambda one: one[1] / one[0])
        assert pause < took / 2, (took, pause)
    assert service.encode("é x", True, "prompt") == list(service.tokenizer.encode("é x").ids)
    assert service.encode("é x", False, "prompt") == list(service.tokenizer.encode("é x", add_special_tokens=False).ids)


def test_faults_of_the_engine_have_their_own_answers() -> None:
    fault = errors.of(ZeroDivisionError("secret path"), 1.0)
    assert fault.status == 500 and "secret" not in fault.message
    assert errors.of(StepFailedError(RuntimeError("x"), None), 1.0).status == 500
    dead = errors.of(EngineFailedError(RuntimeError("/secret")), 2.5)
    assert dead.status == 503 and dead.headers == [(b"retry-after", b"3")] and "secret" not in dead.message
    assert errors.of(SpecrsError("x"), 1.0).status == 500
