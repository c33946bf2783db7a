"""Drives a server with the cases of a seed and writes what came of each, a line of JSON a case: standard library alone.

    python benches/serve_drive.py --port 8000 --seed 1 --first 0 --count 1000 --streams 256 --out results.jsonl

``--rate`` makes it an open loop: cases come at so many a second, as a Poisson process does, whatever the server does.
Without it, it is a closed loop: each of ``--streams`` readers sends its next case once its last one is done.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from serve_cases import Case, case, plain
from serve_client import Answer, BadAnswer, Connection, Reply, follow, start

TRIES = 200  # after a 429
SLOW_BUFFER = 4096  # bytes that a slow reader's socket takes


class Drive:
    """Runs cases against one server."""

    def __init__(self, host: str, port: int, limit: float = 600.0, headers: dict[str, str] | None = None) -> None:
        self.host, self.port, self.limit, self.headers = host, port, limit, headers or {}
        self.records: list[dict[str, Any]] = []
        self.lags: list[float] = []

    async def closed(self, cases: list[Case], streams: int) -> None:
        """Run so many readers, each with its next case at once."""
        queue = iter(cases)

        async def reader() -> None:
            connection = Connection(self.host, self.port)
            for one in queue:
                await self._case(one, connection)
            connection.drop()

        await self._beside(asyncio.gather(*(reader() for _ in range(streams))))

    async def open(self, cases: list[Case], rate: float, seed: int) -> None:
        """A Poisson process of so many cases a second; connections are used again where one is free."""
        rng, free, tasks = random.Random(f"arrivals {seed}"), list[Connection](), list[asyncio.Task[None]]()

        async def one_of(each: Case) -> None:
            connection = free.pop() if free else Connection(self.host, self.port)
            await self._case(each, connection)
            free.append(connection)

        async def arrivals() -> None:
            due = time.perf_counter()
            for each in cases:
                due += rng.expovariate(rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.append(asyncio.ensure_future(one_of(each)))
            await asyncio.gather(*tasks)

        await self._beside(arrivals())
        for connection in free:
            connection.drop()

    async def _beside(self, work: Any) -> None:
        """Run with a clock beside it that tells how late this process itself is: its figures are no better than
        that."""
        clock = asyncio.ensure_future(lag(self.lags))
        try:
            await work
        finally:
            clock.cancel()

    async def _case(self, one: Case, connection: Connection) -> None:
        record: dict[str, Any] = {"index": one.index, "fate": one.fate, "tries": 0}
        began = time.perf_counter()
        try:
            async with contextlib.AsyncExitStack() as stack:
                if one.fate == "slow":  # a client of its own: a small window is agreed on when it opens
                    connection = Connection(self.host, self.port, receive_buffer=SLOW_BUFFER)
                    stack.callback(connection.drop)
                await asyncio.wait_for(self._run(one, connection, record), self.limit)
        except asyncio.TimeoutError:
            record["fault"] = f"nothing for {self.limit} s"
        except (BadAnswer, OSError, EOFError, KeyError, TypeError, ValueError) as error:
            record["fault"] = f"{type(error).__name__}: {error}"
            connection.drop()
        record["seconds"] = time.perf_counter() - began
        self.records.append(record)

    async def _run(self, one: Case, connection: Connection, record: dict[str, Any]) -> None:
        if one.fate == "vanish":
            await self._vanish(one, connection)
            return
        while True:
            began = time.perf_counter()
            reply = Reply()
            if one.fate == "leave at once":
                await self._send(one, connection)
                await asyncio.sleep(random.Random(one.index).random() * 0.05)
                connection.drop()
                return
            answer = await self._send_and_head(one, connection)
            if answer.status != 429:
                break
            error = answer.error()
            wait = float(answer.headers["retry-after"])  # or KeyError: every 429 owes it
            record["tries"] += 1
            if record["tries"] > TRIES or not 0 <= wait <= 120:
                raise BadAnswer(f"429 once more, Retry-After {wait}: {error}")
            await asyncio.sleep(min(wait, 1.0) * random.random())
        record["status"] = answer.status
        if answer.status != 200:
            record["error"] = answer.error()
            return
        if one.body.get("stream") and one.fate != "bad":
            async for _ in self._paced(one, connection, follow(connection, answer, reply, began)):
                pass
        else:
            reply.whole(answer.json())
        record |= told(reply)

    async def _paced(self, one: Case, connection: Connection, chunks: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Yield chunks at the reader's pace; a reader that leaves hangs up in the midst."""
        count = 0
        async for chunk in chunks:
            yield chunk
            count += 1
            if one.fate == "leave" and count > one.patience:
                connection.drop()
                return
            if one.fate == "slow":
                await asyncio.sleep(one.pause)

    async def _send(self, one: Case, connection: Connection) -> None:
        await connection.send("POST", one.path, one.sent(), {"Content-Type": "application/json", **self.headers})

    async def _send_and_head(self, one: Case, connection: Connection) -> Answer:
        if one.raw is None and one.body.get("stream"):
            return await start(connection, one.path, one.body, self.headers)
        return await connection.ask("POST", one.path, one.sent(), {"Content-Type": "application/json", **self.headers})

    async def _vanish(self, one: Case, connection: Connection) -> None:
        """Announce a body, send half of it, hang up."""
        _, writer = await connection.open()
        body = one.sent()
        writer.write(
            f"POST {one.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body[: len(body) // 2]
        )
        await writer.drain()
        connection.drop()


def told(reply: Reply) -> dict[str, Any]:
    """A reply for a record."""
    return {
        "outputs": {
            str(i): {"token_ids": o.token_ids, "text": o.text, "finish": o.finish} for i, o in reply.outputs.items()
        },
        "usage": reply.usage,
        "prompt_token_ids": reply.prompt_token_ids,
        "stream_error": reply.error,
        "first": reply.first,
        "gaps": reply.gaps,
    }


async def lag(seconds: list[float], every: float = 0.005) -> None:
    """Measure how late a timer of this loop is, again and again until cancelled; ``every``: seconds from one to the
    next."""
    while True:
        due = time.perf_counter() + every  # a loop's own clock may be of whole milliseconds
        await asyncio.sleep(every)
        seconds.append(max(0.0, time.perf_counter() - due))


def main() -> None:
    """Drive, and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--step", type=int, default=1, help="every so many cases: where several processes share them")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--most", type=int, default=64, help="tokens an output, at most")
    parser.add_argument("--fates", type=json.loads, help="JSON: weight of each fate")
    parser.add_argument(
        "--same", type=json.loads, help="JSON: prompts, and the parameters of all, in place of the cases"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    indices = range(args.first, args.first + args.count, args.step)
    if args.same:
        prompts, params = args.same
        cases = [plain(i, prompts[i], params) for i in indices]
    else:
        cases = [case(args.seed, i, args.most, args.fates) for i in indices]
    drive = Drive(args.host, args.port)
    if args.rate:
        asyncio.run(drive.open(cases, args.rate, args.seed + args.first))
    else:
        asyncio.run(drive.closed(cases, args.streams))
    with args.out.open("w") as out:
        for record in drive.records:
            out.write(json.dumps(record) + "\n")
        out.write(json.dumps({"lags": drive.lags}) + "\n")


if __name__ == "__main__":
    main()
