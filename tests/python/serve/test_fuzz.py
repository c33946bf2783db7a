"""Nonsense, seeded: no answer of 500, no traceback, no request left behind, and sense is served afterwards as before.

``SPECRS_FUZZ`` is the number of cases, half of them bodies and half raw requests (2,000; ``make test-long``: 100,000),
``SPECRS_FUZZ_SEED`` the seed. ``SPECRS_FUZZ_RECORD=serve_faults`` keeps counts by status in
``benches/results/serve_faults.json``; several runs of other seeds, of other names, are put together by
``python tests/python/serve_fuzz.py NAME ...``.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common import versions, write_result
from fault_world import NAME, Process, chatty, process, run
from modelzoo import Pair, write_eagle3, write_target
from serve_client import Answer, BadAnswer, Connection, complete
from serve_fuzz import body, request
from specrs import LLM, SamplingParams

pytest.importorskip("uvicorn", reason="the extra specrs[serve] is not installed")

LONG = bool(os.environ.get("SPECRS_TEST_LONG"))
CASES = int(os.environ.get("SPECRS_FUZZ", "100000" if LONG else "2000")) // 2  # cases of each kind
SEED = int(os.environ.get("SPECRS_FUZZ_SEED", "1"))
READERS = 8
SENSE = {"model": NAME, "prompt": "ab", "max_tokens": 12, "temperature": 0, "return_token_ids": True, "stream": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("fuzz")
    target = write_target(root / "target", tokenizer=True, max_position_embeddings=256)
    return chatty(Pair(target, write_eagle3(root / "draft", target)))


@pytest.fixture(scope="module")
def counted() -> Iterator[dict[str, Any]]:
    """Count the outcomes of each kind of case; the counts are kept where the environment says so."""
    kinds: dict[str, Any] = {}
    yield kinds
    name = os.environ.get("SPECRS_FUZZ_RECORD")
    if name and kinds.keys() >= {"bodies", "requests"}:  # a run that was stopped is not recorded
        packages = versions("starlette", "uvicorn", "httptools", "uvloop")
        write_result(name, {"versions": packages, "seeds": [SEED], "cases": 2 * CASES, "fuzz": kinds})


def told(statuses: Counter[int], began: float) -> dict[str, Any]:
    """Counts by status, for the record; status 0: the connection was closed without an answer."""
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "statuses": {str(k): statuses[k] for k in sorted(statuses)},
    }


@pytest.fixture(scope="module")
def want(pair: Pair) -> list[int]:
    with LLM(pair.target, pair.draft) as llm:
        return llm.generate(["ab"], SamplingParams(max_tokens=12, temperature=0))[0].token_ids


@pytest.fixture(scope="module")
def server(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    argv = [pair.target, "--draft", pair.draft, "--served-model-name", NAME, "--max-batch", "8", "--log", "none"]
    with process(tmp_path_factory.mktemp("server"), *argv) as one:
        yield one


def sound(server: Process, want: list[int]) -> None:
    """Check that the server lives, says so, gives the right tokens, and has met no fault of its own."""

    async def asked() -> None:
        connection = Connection("127.0.0.1", server.port)
        for path in ("/health", "/ready"):
            assert (await connection.ask("GET", path)).status == 200
        _, reply = await complete(connection, "/v1/completions", SENSE)
        assert reply.outputs[0].token_ids == want
        text = (await connection.ask("GET", "/metrics")).body.decode()
        for gauge in ("num_requests_running", "num_requests_waiting"):
            [line] = [x for x in text.splitlines() if x.startswith(f"vllm:{gauge}{{")]
            assert float(line.split()[-1]) == 0, line
        connection.drop()

    assert server.process.poll() is None, server.errors()
    run(asked)
    assert "Traceback" not in server.errors() and "Exception in ASGI" not in server.errors(), server.errors()[-3000:]


def test_bodies(server: Process, want: list[int], counted: dict[str, Any]) -> None:
    """Every body is answered: 200, or an error of the client's in OpenAI's form, which names the field."""
    statuses: Counter[int] = Counter()
    began = time.perf_counter()
    nameless = []

    async def reader(first: int) -> None:
        connection = Connection("127.0.0.1", server.port)
        for i in range(first, CASES, READERS):
            path, raw = body(random.Random(f"{SEED} body {i}"))
            try:
                answer = await asyncio.wait_for(
                    connection.ask("POST", path, raw, {"Content-Type": "application/json"}), 60
                )
            except (BadAnswer, OSError, EOFError, asyncio.TimeoutError) as error:
                raise AssertionError(f"case {i}, {path} {raw[:2000]!r}: {error!r}") from error
            statuses[answer.status] += 1
            if answer.status != 200:
                assert 400 <= answer.status < 500, (i, path, raw[:2000], answer.status, answer.body[:500])
                error = answer.error()
                assert len(error["message"]) < 2000, (i, error)
                if answer.status == 400 and error["param"] is None and error["code"] != "invalid_json":
                    nameless.append((i, path, raw[:300], error))
        connection.drop()

    async def all_of_them() -> None:
        await asyncio.gather(*map(reader, range(READERS)))

    run(all_of_them, 3000)
    assert statuses[200] > CASES / 50 and statuses[400] > CASES / 4, statuses
    assert len(nameless) < CASES / 50, nameless[:10]
    sound(server, want)
    counted["bodies"] = {**told(statuses, began), "without the field's name": len(nameless)}


def test_requests(server: Process, want: list[int], counted: dict[str, Any]) -> None:
    """Any bytes get an answer below 500, one that says that this HTTP is not spoken, or a closed connection."""
    statuses: Counter[int] = Counter()
    began = time.perf_counter()

    async def one(i: int) -> None:
        raw = request(random.Random(f"{SEED} request {i}"))
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        answer = Answer(0, {})
        try:
            writer.write(raw)
            await writer.drain()
            writer.write_eof()  # nothing more comes, so no answer waits for more
            answer_line = await asyncio.wait_for(reader.readline(), 20)
            if answer_line:
                assert answer_line.startswith(b"HTTP/1."), (i, raw[:500], answer_line)
                answer.status = int(answer_line.split()[1])
            statuses[answer.status] += 1
        except (OSError, EOFError):
            statuses[0] += 1
        except asyncio.TimeoutError:
            raise AssertionError(f"case {i}: neither an answer nor an end: {raw[:2000]!r}") from None
        finally:
            writer.transport.abort()
        assert answer.status < 500 or answer.status in (501, 505), (i, raw[:2000], answer.status)

    async def reader(first: int) -> None:
        for i in range(first, CASES, READERS):
            await one(i)

    async def all_of_them() -> None:
        await asyncio.gather(*map(reader, range(READERS)))

    run(all_of_them, 3000)
    assert sum(statuses.values()) == CASES and statuses[400] > CASES / 10, statuses
    sound(server, want)
    counted["requests"] = told(statuses, began)


def test_memory_stays(server: Process, want: list[int], tmp_path: Path) -> None:
    """Refused bodies are not kept."""
    sound(server, want)
    before = server.memory()

    async def many() -> None:
        connection = Connection("127.0.0.1", server.port)
        for i in range(200):
            raw = b'{"model": "tiny", "prompt": "' + bytes([97 + i % 26]) * 500_000 + b'"}'
            answer = await connection.ask("POST", "/v1/completions", raw, {"Content-Type": "application/json",
                                                                           "X-Request-Id": f"r{i}"})  # fmt: skip
            assert answer.status == 400
            assert (await connection.ask("POST", f"/v1/nothing/{i}", b"{}")).status == 404
        connection.drop()

    run(many)
    assert server.memory() - before < 64 << 20
    sound(server, want)
