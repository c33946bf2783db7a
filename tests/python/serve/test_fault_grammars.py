"""Grammars that are bombs: each is refused by name, or ends alone; nobody else waits for it, nothing grows."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fault_world import NAME, chatty, process, run
from modelzoo import Pair, write_eagle3, write_target
from serve_client import Connection, complete

pytest.importorskip("uvicorn", reason="the extra specrs[serve] is not installed")

SENSE = {"model": NAME, "prompt": "ab", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"]}
    return found


def doubling(levels: int) -> dict[str, Any]:
    """Each definition holds the one before it twice: 2 ** levels leaves, in a few lines."""
    one = {f"d{i}": {"type": "object", "properties": {k: {"$ref": f"#/$defs/d{i - 1}"} for k in "ab"},
                     "required": ["a", "b"]} for i in range(1, levels)}  # fmt: skip
    return {"$defs": {"d0": {"type": "integer"}, **one}, "$ref": f"#/$defs/d{levels - 1}"}


LONG_LARK = "start: " + " | ".join(f'"{i:05d}"' for i in range(20_000))
BOMBS: dict[str, dict[str, Any]] = {
    "a regex that counts": {"regex": "((((a{1,999}){1,999}){1,999}){1,999}){1,999}"},
    "a regex of many states": {"regex": "(a|b)*a" + "(a|b)" * 400},
    "a regex that backtracks elsewhere": {"regex": "(a*)*b" * 50},
    "a regex that is none": {"regex": "(((("},
    "a regex of classes": {"regex": r"[\p{L}\p{N}]{1,5000}" * 20},
    "a long regex": {"regex": "a" * 300_000},
    "a deep schema": {"json": nested(40)},
    "a schema that doubles": {"json": doubling(60)},
    "a schema that refers to itself": {"json": {"$ref": "#"}},
    "a schema without an end": {"json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
    "a schema of nothing": {"json": {"type": "integer", "minimum": 3, "maximum": 2}},
    "a schema from elsewhere": {"json": {"$ref": "http://127.0.0.1:9/schema.json"}},
    "a file's schema": {"json": {"$ref": "file:///etc/passwd"}},
    "many properties": {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}},
    "many enums": {"json": {"enum": [f"value {i}" for i in range(20_000)]}},
    "a pattern that counts": {"json": {"type": "string", "pattern": "^((a{1,500}){1,500}){1,500}$"}},
    "long strings": {"json": {"type": "string", "minLength": 1 << 30, "maxLength": 1 << 31}},
    "many items": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 1 << 30}},
    "a lark of alternatives": {"grammar": LONG_LARK},
    "a lark without an end": {"grammar": "start: start start | start"},
    "a lark that is ambiguous": {"grammar": 'start: a\na: a a a | "x" | ""'},
    "a lark that is none": {"grammar": "start: %%%"},
    "a lark that refers to nothing": {"grammar": "start: nowhere"},
    "a lark that includes": {"grammar": "%import common.WORD\nstart: WORD"},
    "choices": {"choice": ["x" * 100] * 3000},
    "no choice": {"choice": []},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("grammars")
    target = write_target(root / "target", tokenizer=True, max_position_embeddings=512)
    return chatty(Pair(target, write_eagle3(root / "draft", target)))


@pytest.fixture(scope="module")
def serve(pair: Pair) -> Iterator[list[Any]]:
    yield [pair.target, "--draft", pair.draft, "--served-model-name", NAME, "--max-batch", "4", "--log", "none"]


def test_bombs(serve: list[Any], tmp_path: Path) -> None:
    told: dict[str, str] = {}

    async def ask(port: int, more: dict[str, Any]) -> tuple[int, Any]:
        connection = Connection("127.0.0.1", port)
        asked = {"model": NAME, "prompt": "ab", "max_tokens": 40, "seed": 1, "temperature": 1.0, **more}
        answer = await asyncio.wait_for(connection.ask("POST", "/v1/completions", asked), 120)
        connection.drop()
        return answer.status, answer.error() if answer.status != 200 else answer.json()["choices"][0]

    with process(tmp_path, *serve) as server:

        async def main() -> None:
            connection = Connection("127.0.0.1", server.port)
            _, before = await complete(connection, "/v1/completions", {**SENSE, "return_token_ids": True})
            most = server.memory()
            for name, bomb in BOMBS.items():
                began = time.monotonic()
                task = asyncio.ensure_future(ask(server.port, {"structured_outputs": bomb}))
                slowest = 0.0
                while not task.done():
                    late = time.monotonic()
                    _, reply = await complete(connection, "/v1/completions", {**SENSE, "return_token_ids": True})
                    slowest = max(slowest, time.monotonic() - late)
                    assert reply.outputs == before.outputs, name
                status, got = await task
                took = time.monotonic() - began
                most = max(most, server.memory())
                told[name] = f"{status} in {took:.2f} s, others {slowest:.2f} s: {json.dumps(got)[:150]}"
                print(f"{name}: {told[name]}")
                assert status in (200, 400), told[name]
                if status == 400:
                    assert (got["param"] or got["code"]) and len(got["message"]) < 2000, told[name]
                    assert "/etc" not in got["message"] or "file" in name
                assert took < 30 and slowest < 5, told[name]
            all_at_once = [asyncio.ensure_future(ask(server.port, {"structured_outputs": b})) for b in BOMBS.values()]
            late = time.monotonic()
            await complete(connection, "/v1/completions", SENSE)
            assert time.monotonic() - late < 10
            assert {status for status, _ in await asyncio.gather(*all_at_once)} <= {200, 400, 429}
            assert server.memory() < 2 << 30
            connection.drop()

        run(main, 900)
        assert server.end() == 0 and "Traceback" not in server.errors() and "panicked" not in server.errors()


def test_bombs_that_nobody_waits_for(serve: list[Any], tmp_path: Path) -> None:
    """A client that hangs up while a grammar compiles leaves nothing behind."""
    with process(tmp_path, *serve) as server:

        async def main() -> None:
            for bomb in BOMBS.values():
                connection = Connection("127.0.0.1", server.port)
                asked = {**SENSE, "structured_outputs": bomb}
                await connection.send("POST", "/v1/completions", json.dumps(asked).encode(),
                                      {"Content-Type": "application/json"})  # fmt: skip
                await asyncio.sleep(0.02)
                connection.drop()
            connection = Connection("127.0.0.1", server.port)
            began = time.monotonic()
            while time.monotonic() - began < 60:
                text = (await connection.ask("GET", "/metrics")).body.decode()
                gauges = [line for line in text.splitlines() if line.startswith("vllm:num_requests_")]
                if all(float(line.split()[-1]) == 0 for line in gauges):
                    break
                await asyncio.sleep(0.1)
            assert (await complete(connection, "/v1/completions", SENSE))[0].status == 200
            connection.drop()

        run(main, 300)
        assert server.end() == 0 and "Traceback" not in server.errors()
