"""Clients, operators and engines that do the worst: a server gives the stated answer, and goes on, or ends as it says.

Each test ends with the question whether anything is left behind: a page, a request, memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fault_world import NAME, chatty, children, clean, hosted, idle, process, run
from modelzoo import Pair, write_eagle3, write_target
from serve_client import Answer, BadAnswer, Connection, Reply, complete, follow, start
from specrs import LLM, LedgerError, SamplingParams

pytest.importorskip("uvicorn", reason="the extra specrs[serve] is not installed")

OPTIONS: dict[str, Any] = {"tree": (3, 3, 9), "max_batch": 4, "page_size": 4, "prefill_chunk": 16}
FLAGS = ["--max-batch", "4", "--log", "none", "--served-model-name", NAME]
GREEDY = {"temperature": 0, "ignore_eos": True}
SENSE: list[int] = []  # tokens of a request that must always work
CUT = (BadAnswer, OSError, EOFError)  # errors that a client sees when a connection ends


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("serve")
    target = write_target(root / "target", tokenizer=True, max_position_embeddings=2048)
    return chatty(Pair(target, write_eagle3(root / "draft", target)))


@pytest.fixture(scope="module")
def llm(pair: Pair) -> Iterator[LLM]:
    with LLM(pair.target, pair.draft, **OPTIONS) as engine:
        SENSE[:] = tokens(engine, 8)  # while it is nobody else's
        yield engine


def body(tokens: int, prompt: Any = "ab", stream: bool = True, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": prompt, "max_tokens": tokens, "stream": stream, "return_token_ids": True,
            **GREEDY, **more}  # fmt: skip


def tokens(llm: LLM, count: int, prompt: Any = "ab") -> list[int]:
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    return llm.generate([prompt], params)[0].token_ids


async def ask(port: int, asked: dict[str, Any], path: str = "/v1/completions") -> tuple[Answer, Reply]:
    connection = Connection("127.0.0.1", port)
    try:
        return await complete(connection, path, asked)
    finally:
        connection.drop()


async def read(connection: Connection) -> Answer:
    """An answer whose request is on its way."""
    answer = await connection.head()
    answer.body = b"".join([piece async for piece in connection.pieces(answer)])
    return answer


async def get(port: int, path: str) -> Answer:
    connection = Connection("127.0.0.1", port)
    try:
        return await connection.ask("GET", path)
    finally:
        connection.drop()


async def works(port: int) -> None:
    """A request among what else goes on gets its tokens."""
    answer, reply = await ask(port, body(8))
    assert answer.status == 200, answer.body
    assert reply.outputs[0].token_ids == SENSE


# -- the process ------------------------------------------------------------------------------------------------------


def test_killed_and_started_again(pair: Pair, llm: LLM, tmp_path: Path) -> None:
    """SIGKILL: streams break off without ``[DONE]``, so nobody takes a part for the whole; the port is free at once."""
    serve = [pair.target, "--draft", pair.draft, *FLAGS]
    with process(tmp_path / "1", *serve) as first:

        async def kill() -> None:
            replies = [Reply() for _ in range(6)]

            async def read(i: int) -> None:
                connection = Connection("127.0.0.1", first.port)
                asked = body(1500, stream=i < 4)
                if i >= 4:
                    await connection.ask("POST", "/v1/completions", asked)
                else:
                    answer = await start(connection, "/v1/completions", asked)
                    async for _ in follow(connection, answer, replies[i], time.perf_counter()):
                        pass

            tasks = [asyncio.ensure_future(read(i)) for i in range(4)]  # so many run at once
            while not all(r.outputs for r in replies[:4]):
                await asyncio.sleep(0.01)
            tasks += [asyncio.ensure_future(read(i)) for i in (4, 5)]
            await asyncio.sleep(0.05)
            first.process.kill()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(ended, CUT), ended

        run(kill)
        assert first.process.wait(10) == -signal.SIGKILL
        with process(tmp_path / "2", *serve, "--port", str(first.port)) as second:
            assert second.port == first.port
            run(lambda: works(second.port))
            assert second.end() == 0


def test_an_engine_process_that_is_killed(pair: Pair, llm: LLM, tmp_path: Path) -> None:
    """The engine's requests are told, streaming or not, and the server ends, so that another can be started."""
    with process(tmp_path, pair.target, "--draft", pair.draft, *FLAGS) as server:
        run(lambda: works(server.port))
        (engine,) = children(server.process.pid)

        async def kill() -> None:
            reply, whole = Reply(), Connection("127.0.0.1", server.port)
            connection = Connection("127.0.0.1", server.port)
            answer = await start(connection, "/v1/completions", body(1500))

            async def read() -> None:
                async for _ in follow(connection, answer, reply, time.perf_counter()):
                    pass

            reading = asyncio.ensure_future(read())
            asking = asyncio.ensure_future(whole.ask("POST", "/v1/completions", body(1500, stream=False)))
            while not reply.outputs:
                await asyncio.sleep(0.01)
            os.kill(engine, signal.SIGKILL)
            assert (await asking).status == 503
            await asyncio.gather(reading, return_exceptions=True)
            assert reply.error is not None and reply.error["code"] == "engine_unavailable"

        run(kill)
        assert server.process.wait(20) == 1
        assert "cannot go on" in server.errors()


@pytest.mark.parametrize("patience", [60, 1])
def test_sigterm_under_load(pair: Pair, llm: LLM, tmp_path: Path, patience: int) -> None:
    """The server drains: requests that run and wait end, whole where there is time, else with a reason and ``[DONE]``;
    status 0."""
    count = 40 if patience > 1 else 1900
    want = tokens(llm, count)
    argv = [pair.target, "--draft", pair.draft, *FLAGS, "--drain-seconds", str(patience)]
    with process(tmp_path, *argv) as server:

        async def load() -> None:
            replies = [Reply() for _ in range(16)]  # 4 of them run

            async def read(i: int) -> Answer:
                connection = Connection("127.0.0.1", server.port)
                asked = body(count, stream=i % 4 != 3)
                if not asked["stream"]:
                    answer = await connection.ask("POST", "/v1/completions", asked)
                    if answer.status == 200:
                        replies[i].whole(answer.json())
                    return answer
                answer = await start(connection, "/v1/completions", asked)
                if answer.status == 200:
                    async for _ in follow(connection, answer, replies[i], time.perf_counter()):
                        pass
                return answer

            tasks = [asyncio.ensure_future(read(i)) for i in range(len(replies))]
            while not any(r.outputs for r in replies):
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.3)  # the others wait by now
            idle_connection = Connection("127.0.0.1", server.port)  # kept alive, with nothing asked
            assert (await idle_connection.ask("GET", "/ready")).status == 200
            server.process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            late = None
            while late is None and time.monotonic() - began < 5:  # waits until the server has noticed
                try:
                    late = await idle_connection.ask("POST", "/v1/completions", body(1, stream=False))
                except CUT:
                    break
                late = late if late.status != 200 else None
            if late is not None:
                assert late.status == 503 and late.error()["message"], late.body
            answers = await asyncio.gather(*tasks)
            for i, (answer, reply) in enumerate(zip(answers, replies, strict=True)):
                assert answer.status == 200, (i, answer.status, answer.body)
                got, finish = reply.outputs[0].token_ids, reply.outputs[0].finish
                assert got == want[: len(got)], i
                assert finish == "length" if len(got) == count else finish == "abort", (i, finish, len(got))
                assert patience == 1 or len(got) == count
            if patience == 1:
                assert any(r.outputs[0].finish == "abort" for r in replies)

        run(load)
        assert server.process.wait(60) == 0, server.errors()
        assert "Traceback" not in server.errors()


def test_sigterm_with_clients_that_never_read(pair: Pair, tmp_path: Path) -> None:
    """Such clients do not hold up the end."""
    argv = [pair.target, *FLAGS, "--drain-seconds", "1"]
    with process(tmp_path, *argv) as server:

        async def load() -> None:
            stuck = [Connection("127.0.0.1", server.port, receive_buffer=2048) for _ in range(4)]
            for connection in stuck:
                asked = body(400, logprobs=20, n=8)
                await connection.send("POST", "/v1/completions", json.dumps(asked).encode(),
                                      {"Content-Type": "application/json"})  # fmt: skip
            await asyncio.sleep(2)
            began = time.monotonic()
            status = await asyncio.get_running_loop().run_in_executor(None, server.end)
            assert status == 0 and time.monotonic() - began < 30, (status, server.errors())
            for connection in stuck:
                connection.drop()

        run(load)


# -- clients ----------------------------------------------------------------------------------------------------------


def test_clients_that_never_read(llm: LLM) -> None:
    """Such clients hold nobody up, pile nothing up, and are ended after ``send_seconds``."""

    async def main() -> None:
        async with hosted(llm, send_seconds=2.0) as (port, engine):
            before = memory()
            stuck = [Connection("127.0.0.1", port, receive_buffer=2048) for _ in range(4)]
            for connection in stuck:  # some 6 MB of events each: more than the sockets of both ends take
                asked = body(500, logprobs=20, n=8)
                await connection.send("POST", "/v1/completions", json.dumps(asked).encode(),
                                      {"Content-Type": "application/json"})  # fmt: skip
            while not engine.stats().engine.running:
                await asyncio.sleep(0.01)
            await works(port)
            await idle(engine, 120)
            await asyncio.sleep(3)
            await works(port)
            await clean(engine)
            assert memory() - before < 200 << 20
            for connection in stuck:
                reader, _ = await connection.open()
                read = b""
                with contextlib.suppress(ConnectionResetError):
                    while piece := await reader.read(1 << 16):
                        read += piece
                assert b"data: " in read and b"[DONE]" not in read  # cut, and not as if it were whole
                connection.drop()

    run(main)


def memory() -> int:
    """Bytes that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_a_gigabyte(pair: Pair, llm: LLM, tmp_path: Path, chunked: bool) -> None:
    """413, at once where the length is announced, else where the limit is passed; memory stays as it was."""
    with process(tmp_path, pair.target, "--draft", pair.draft, *FLAGS) as server:
        run(lambda: works(server.port))
        before = server.memory()

        async def send() -> None:
            connection = Connection("127.0.0.1", server.port)
            _, writer = await connection.open()
            how = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {1 << 30}"
            head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", how, "", ""]
            writer.write("\r\n".join(head).encode())
            piece = b" " * (1 << 20)
            sent, most = 0, before
            answering = asyncio.ensure_future(read(connection))
            try:
                while sent < 1 << 30 and not writer.is_closing():
                    writer.write((b"100000\r\n" + piece + b"\r\n") if chunked else piece)
                    await asyncio.wait_for(writer.drain(), 30)
                    sent += len(piece)
                    most = max(most, server.memory())
            except (OSError, asyncio.TimeoutError):
                pass  # the server has heard enough
            answer = await asyncio.wait_for(answering, 30)
            assert answer.status == 413 and "max_body_bytes" in answer.error()["message"]
            assert most - before < 100 << 20, (before, most)
            connection.drop()

        run(send)
        run(lambda: works(server.port))
        assert server.end() == 0 and "Traceback" not in server.errors()


def test_a_body_that_trickles(llm: LLM) -> None:
    """A byte now and then: 408 once ``body_seconds`` are over. Headers that trickle hold nobody else up."""

    async def main() -> None:
        async with hosted(llm, body_seconds=1.0) as (port, engine):
            many = [Connection("127.0.0.1", port) for _ in range(50)]
            for i, connection in enumerate(many):
                _, writer = await connection.open()
                length = "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{" if i % 2 else "X-"
                writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{length}".encode())
            await works(port)
            for connection in many[1::2]:
                answer = await asyncio.wait_for(read(connection), 20)
                assert answer.status == 408 and answer.error()["code"] == "timeout"
            await works(port)
            for connection in many:
                connection.drop()
            await clean(engine)

    run(main)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("when", ["queued", "prefill", "round"])
def test_who_hangs_up_leaves_nothing(llm: LLM, when: str, n: int, stream: bool) -> None:
    """In the queue, within the prompt, between two rounds: the request ends at once, whoever else runs."""
    busy = {"busy": 0}

    async def main() -> None:
        async with hosted(llm) as (port, engine):
            others: list[asyncio.Task[Any]] = []
            if when == "queued":
                long = SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)
                others = [asyncio.ensure_future(engine.complete([5, 6], long)) for _ in range(OPTIONS["max_batch"])]
                while engine.stats().engine.running < OPTIONS["max_batch"]:
                    await asyncio.sleep(0.001)
                busy["busy"] = OPTIONS["max_batch"]
            connection = Connection("127.0.0.1", port)
            prompt = [7] * (1500 if when == "prefill" else 3)
            asked = body(500, prompt, stream=stream, n=n)
            await connection.send("POST", "/v1/completions", json.dumps(asked).encode(),
                                  {"Content-Type": "application/json"})  # fmt: skip
            due = busy["busy"] + (0 if when == "queued" else 1)
            while (s := engine.stats()).engine.running < due or s.engine.running + s.engine.waiting <= busy["busy"]:
                await asyncio.sleep(0.001)
            if when == "round" and stream:
                answer = await connection.head()
                await connection.pieces(answer).__anext__()
            elif when == "round":
                await asyncio.sleep(0.2)
            assert engine.stats().engine.running + engine.stats().engine.waiting > busy["busy"]
            connection.drop()
            began = time.monotonic()
            while (s := engine.stats()).engine.running + s.engine.waiting > busy["busy"] or s.submitted > busy["busy"]:
                assert time.monotonic() - began < 5, s
                await asyncio.sleep(0.001)
            assert s.engine.running == busy["busy"]  # no other request was hit
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await idle(engine)
            await clean(engine)
            await works(port)

    run(main)


def test_a_storm_of_those_who_hang_up(llm: LLM) -> None:
    """Hundreds, at any moment; those who stay get their tokens."""
    want = {i: tokens(llm, 20, [i, i + 1]) for i in range(1, 9)}

    async def main() -> None:
        async with hosted(llm, limits={"max_waiting": 1000}) as (port, engine):
            rng = random.Random(3)

            async def leaves(i: int) -> None:
                connection = Connection("127.0.0.1", port)
                await asyncio.sleep(rng.random() * 2)
                asked = body(rng.randint(1, 300), [1 + i % 8, 2], stream=rng.random() < 0.5, n=rng.randint(1, 3))
                raw = json.dumps(asked).encode()
                await connection.send("POST", "/v1/completions", raw, {"Content-Type": "application/json"})
                await asyncio.sleep(rng.random() ** 3)
                connection.drop()

            async def stays(i: int) -> None:
                await asyncio.sleep(rng.random() * 2)
                _, reply = await ask(port, body(20, [1 + i % 8, 2 + i % 8], stream=i % 2 == 0))
                assert reply.outputs[0].token_ids == want[1 + i % 8]

            await asyncio.gather(*map(leaves, range(200)), *map(stays, range(40)))
            await idle(engine, 60)
            await clean(engine)

    run(main)


# -- bombs ------------------------------------------------------------------------------------------------------------

BOMBS = [
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{{ range(9999) | sum }}{% endfor %}{% endfor %}",
    "{{ 'x' * 10 ** 10 }}",
    "{% set ns = namespace(s='x' * 1000) %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ '%0999999999d' % 1 }}",
    "{% if %}",
    "(" * 20000,
]


def test_a_template_bomb(llm: LLM) -> None:
    """A request's own template: refused unless allowed; where it is, it ends in time, and holds nobody up meanwhile."""

    async def main() -> None:
        chat = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        async with hosted(llm) as (port, engine):
            for bomb in BOMBS:
                answer, _ = await ask(port, {**chat, "chat_template": bomb}, "/v1/chat/completions")
                assert answer.status == 400 and answer.error()["param"] == "chat_template", answer.body
            await clean(engine)
        async with hosted(llm, trust_request_chat_template=True, max_template_seconds=2.0) as (port, engine):
            answer, _ = await ask(port, {**chat, "chat_template": "ab"}, "/v1/chat/completions")
            assert answer.status == 200, answer.body
            began = time.monotonic()
            asked = [ask(port, {**chat, "chat_template": b}, "/v1/chat/completions") for b in BOMBS]
            bombs = asyncio.gather(*asked)
            served = 0
            while not bombs.done():
                late = time.monotonic()
                await works(port)
                assert time.monotonic() - late < 5, "held up by a template"
                served += 1
            statuses = []
            for bomb, (answer, _) in zip(BOMBS, await bombs, strict=True):
                assert answer.status in (400, 429), (bomb, answer.status, answer.body)  # few wait to be rendered
                assert len(answer.error()["message"]) < 2000
                statuses.append(answer.status)
            assert statuses.count(400) > len(BOMBS) / 2
            for bomb in BOMBS:
                answer, _ = await ask(port, {**chat, "chat_template": bomb}, "/v1/chat/completions")
                assert answer.status == 400, (bomb, answer.status, answer.body)
            assert time.monotonic() - began < 90 and served > 1
            await clean(engine)

    run(main)


def test_prompts_that_are_too_much(llm: LLM) -> None:
    """Long, many, deep: 400 by name, before anything is tokenised that need not be."""
    chat = {"model": NAME, "max_tokens": 2}
    path = "/v1/chat/completions"
    cases: list[tuple[dict[str, Any], str, tuple[int, ...]]] = [
        (body(2, "a" * 4_000_000, stream=False), "/v1/completions", (400,)),
        (body(2, [5] * 1_000_000, stream=False), "/v1/completions", (400,)),
        (body(2, ["a"] * 100_000, stream=False), "/v1/completions", (400,)),
        (body(2, stream=False, n=10**6), "/v1/completions", (400,)),
        (body(2, stream=False, stop=["x" * 10**6]), "/v1/completions", (400,)),
        (body(2, stream=False, logit_bias={str(i): 1 for i in range(100_000)}), "/v1/completions", (400,)),
        (body(2, stream=False, bad_words=["a" * 9] * 100_000), "/v1/completions", (400,)),
        ({**chat, "messages": [{"role": "user", "content": "a" * 4_000_000}]}, path, (400,)),
        ({**chat, "messages": [{"role": "user", "content": "a"}] * 50_000}, path, (400,)),
        ({**chat, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 90_000}]}, path, (400,)),
    ]

    async def main() -> None:
        async with hosted(llm) as (port, engine):
            for asked, where, statuses in cases:
                began = time.monotonic()
                answer, _ = await ask(port, asked, where)
                assert answer.status in statuses, (where, answer.status, answer.body[:300])
                error = answer.error()
                assert error["param"] and len(error["message"]) < 2000, error
                assert time.monotonic() - began < 10
            await works(port)
            await clean(engine)

    run(main)


# -- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["round", "prefill"])
def test_a_pass_that_fails(llm: LLM, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass's requests get 500, or an error within their stream, which names no cause; others, and later ones, go
    on."""
    secret = RuntimeError("injected: /secret/path")
    plain, fails = getattr(llm._runner, where), {"left": 0}

    def failing(part: Any, **more: Any) -> Any:
        if fails["left"]:
            fails["left"] -= 1
            raise secret
        return plain(part, **more)

    async def main() -> None:
        async with hosted(llm) as (port, engine):
            monkeypatch.setattr(llm._runner, where, failing)
            for stream in (True, False):
                fails["left"] = 1
                answer, reply = await ask(port, body(30, stream=stream))
                error = reply.error if stream and answer.status == 200 else answer.error()
                assert error is not None and error["code"] == "step_failed", (answer.status, answer.body)
                assert answer.status == (200 if stream and reply.error else 500)
                assert "secret" not in json.dumps(error) and "injected" not in json.dumps(error)
                await works(port)
            many = [asyncio.ensure_future(ask(port, body(40, [3, i], stream=i % 2 == 0))) for i in range(12)]
            await asyncio.sleep(0.05)
            fails["left"] = 1
            done = await asyncio.gather(*many)
            monkeypatch.undo()
            broken = [i for i, (a, r) in enumerate(done) if a.status == 500 or r.error is not None]
            assert 0 < len(broken) <= OPTIONS["max_batch"]
            await idle(engine)
            await clean(engine)
            assert (await get(port, "/health")).status == 200
            whole = {i: r.outputs[0].token_ids for i, (_, r) in enumerate(done) if i not in broken}
        for i, got in whole.items():
            assert got == tokens(llm, 40, [3, i])

    run(main)


def test_an_engine_that_cannot_go_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody gets 503, or an error within the stream; ``/health`` says so, for whoever starts servers again."""

    async def main() -> None:
        with LLM(pair.target, pair.draft, **OPTIONS) as llm:
            engine_error = LedgerError("page 3 has two owners")
            with pytest.raises(LedgerError):
                async with hosted(llm) as (port, engine):
                    tasks = [asyncio.ensure_future(ask(port, body(1500, stream=i % 2 == 0))) for i in range(8)]
                    while not engine.stats().engine.running:
                        await asyncio.sleep(0.005)

                    def raises() -> Any:
                        raise engine_error

                    monkeypatch.setattr(llm, "step", raises)
                    for answer, reply in await asyncio.gather(*tasks):
                        error = reply.error if answer.status == 200 else answer.error()
                        assert answer.status in (200, 503) and error is not None
                        assert error["code"] == "engine_unavailable" and "owners" not in error["message"]
                    answer, _ = await ask(port, body(3))
                    assert answer.status == 503 and answer.error()["code"] == "engine_unavailable"
                    assert (await get(port, "/health")).status == (await get(port, "/ready")).status == 503
                    assert (await get(port, "/metrics")).status == 200
                    raise engine_error  # what the block did not stop at

    run(main)


def test_scores_that_leave_nothing(llm: LLM) -> None:
    """A request whose bans leave no token ends alone, and hears that they are its own."""
    bans = {str(i): -100 for i in range(300)}

    async def main() -> None:
        async with hosted(llm) as (port, engine):
            good = asyncio.ensure_future(ask(port, body(60)))
            for stream in (True, False):
                asked = body(5, stream=stream, bad_words=[], allowed_token_ids=[4], logit_bias={"4": -1e31})
                answer, _ = await ask(port, asked)
                assert answer.status == 400, answer.body
            answer, _ = await ask(port, body(5, stream=False, logit_bias=bans))
            assert answer.status == 200  # -100 is a bias, and no ban
            assert (await good)[1].outputs[0].token_ids == tokens_of_60
            await clean(engine)

    tokens_of_60 = tokens(llm, 60)
    run(main)


def test_a_step_that_hangs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """``/health`` says so after ``stall_seconds``, and again that all is well once it is over."""
    go = threading.Event()
    plain: Callable[..., Any] = llm.step

    def hanging() -> Any:
        go.wait(30)
        return plain()

    async def main() -> None:
        async with hosted(llm, stall_seconds=0.5) as (port, engine):
            monkeypatch.setattr(llm, "step", hanging)
            task = asyncio.ensure_future(ask(port, body(5)))
            await until(lambda: status(port), 503)
            monkeypatch.undo()
            go.set()
            assert (await task)[0].status == 200
            await until(lambda: status(port), 200)
            await clean(engine)

    run(main)


async def status(port: int) -> int:
    return (await get(port, "/health")).status


async def until(call: Callable[[], Awaitable[int]], want: int, limit: float = 20.0) -> None:
    began = time.monotonic()
    while (got := await call()) != want:
        assert time.monotonic() - began < limit, got
        await asyncio.sleep(0.05)


def test_too_many_wait(llm: LLM) -> None:
    """429 with ``Retry-After`` before anything has begun; what was taken is served whole."""
    want = tokens(llm, 100)

    async def main() -> None:
        async with hosted(llm, limits={"max_waiting": 3}) as (port, engine):
            done = await asyncio.gather(*(ask(port, body(100, stream=i % 2 == 0)) for i in range(40)))
            refused = [a for a, _ in done if a.status != 200]
            assert 0 < len(refused) <= 40 - 3
            for answer in refused:
                assert answer.status == 429 and int(answer.headers["retry-after"]) >= 1
                assert answer.error()["code"] == "engine_overloaded"
            assert all(r.outputs[0].token_ids == want for a, r in done if a.status == 200)
            await clean(engine)

    run(main)
