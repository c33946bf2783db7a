"""A client of `specrs serve` that trusts nothing: HTTP/1.1 and server-sent events over sockets, standard library alone.

The load (`serve_load`) and the fault tests drive a server with it. It can do what no honest client does: stop reading,
hang up in the middle of a line, send half a request. What it reads it checks: framing, the shape of every chunk, one
finish reason an output, usage behind it, ``[DONE]`` once and nothing after it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

LIMIT = 1 << 22  # bytes of one line that a reader takes


class BadAnswer(Exception):
    """A server sent bytes that break HTTP, the event stream, or the API."""


@dataclass
class Answer:
    """A whole answer. `headers` by lower-case name."""

    status: int
    headers: dict[str, str]
    body: bytes = b""

    def json(self) -> Any:
        """The body as JSON."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise BadAnswer(f"status {self.status}: the body is no JSON: {self.body[:200]!r}") from error

    def error(self) -> dict[str, Any]:
        """OpenAI's error object, checked."""
        body = self.json()
        error = body.get("error") if isinstance(body, dict) else None
        if not isinstance(error, dict) or not {"message", "type", "param", "code"} <= error.keys():
            raise BadAnswer(f"status {self.status}: no error object of OpenAI's form: {self.body[:300]!r}")
        if not isinstance(error["message"], str) or not error["message"]:
            raise BadAnswer(f"status {self.status}: the error has no message: {self.body[:300]!r}")
        return error


class Connection:
    """One TCP connection, kept alive over requests as long as the server keeps it."""

    def __init__(self, host: str, port: int, *, receive_buffer: int | None = None) -> None:
        self.host, self.port, self._buffer = host, port, receive_buffer
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.opened = 0  # connections so far

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The streams, connected."""
        if self._reader is None or self._writer is None:
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            if self._buffer is not None:  # before it connects, or the window is agreed on already
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer)
            try:
                await asyncio.get_running_loop().sock_connect(sock, (self.host, self.port))
                limit = LIMIT if self._buffer is None else max(self._buffer, 1 << 16)
                self._reader, self._writer = await asyncio.open_connection(sock=sock, limit=limit)
            except BaseException:
                sock.close()
                raise
            self.opened += 1
        return self._reader, self._writer

    def drop(self) -> None:
        """Hang up at once, by a reset where anything is unread."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """A request with all of its body."""
        _, writer = await self.open()
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        writer.write("\r\n".join([*lines, "", ""]).encode() + (body or b""))
        await writer.drain()

    async def head(self) -> Answer:
        """Status line and headers of the next answer."""
        reader, _ = await self.open()
        line = await reader.readline()
        if not line:
            raise ConnectionResetError("the server closed the connection before an answer")
        parts = line.decode("latin-1").rstrip("\r\n").split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdecimal():
            raise BadAnswer(f"no status line: {line!r}")
        headers: dict[str, str] = {}
        while (line := await reader.readline()) not in (b"\r\n", b"\n"):
            if not line:
                raise ConnectionResetError("the server closed the connection within the headers")
            name, colon, value = line.decode("latin-1").partition(":")
            if not colon:
                raise BadAnswer(f"no header: {line!r}")
            headers[name.strip().lower()] = value.strip()
        return Answer(int(parts[1]), headers)

    async def pieces(self, answer: Answer) -> AsyncIterator[bytes]:
        """The body as it comes, to its end."""
        reader, _ = await self.open()
        if answer.headers.get("transfer-encoding", "").lower() == "chunked":
            while True:
                line = await reader.readline()
                try:
                    size = int(line.split(b";")[0], 16)
                except ValueError:
                    if not line:
                        raise ConnectionResetError("the server closed the connection within the body") from None
                    raise BadAnswer(f"no size of a chunk: {line!r}") from None
                if size:
                    yield await reader.readexactly(size)
                if await reader.readexactly(2) != b"\r\n":
                    raise BadAnswer("a chunk does not end")
                if not size:
                    break
        elif (length := answer.headers.get("content-length")) is not None:
            if int(length):
                yield await reader.readexactly(int(length))
        elif answer.status not in (204, 304):
            while piece := await reader.read(1 << 16):
                yield piece
            self.drop()
        if answer.headers.get("connection", "").lower() == "close":
            self.drop()

    async def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:  # fmt: skip
        """A request and its whole answer. ``body``: bytes as they are, anything else as JSON."""
        sent = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        try:
            await self.send(method, path, body, sent)
            answer = await self.head()
            answer.body = b"".join([piece async for piece in self.pieces(answer)])
        except BaseException:
            self.drop()
            raise
        return answer

    async def events(self, answer: Answer) -> AsyncIterator[str]:
        """The data of each server-sent event; comments are passed over."""
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            raise BadAnswer(f"no event stream: {answer.headers}")
        rest = b""
        async for piece in self.pieces(answer):
            rest += piece
            while (end := rest.find(b"\n\n")) >= 0:
                event, rest = rest[:end].decode(), rest[end + 2 :]  # UTF-8, or the server cut a character
                data = [line[6:] for line in event.split("\n") if line.startswith("data: ")]
                if any(not line.startswith(("data: ", ":")) for line in event.split("\n")):
                    raise BadAnswer(f"no event: {event!r}")
                if data:
                    yield "\n".join(data)
        if rest:
            raise BadAnswer(f"the stream ends within an event: {rest[:200]!r}")


@dataclass
class Output:
    """An output of a request's ``n``, as far as it came."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    tool_calls: list[Any] = field(default_factory=list)


@dataclass
class Reply:
    """The answer to a completion, or a chat completion.

    Attributes:
        outputs: outputs by index.
        usage: the counts, where they came.
        prompt_token_ids: token ids of the prompts, where they came.
        error: the error object of a stream that failed in its midst.
        first: seconds from the request to its first token; ``None``: none came, or the answer was no stream.
        gaps: seconds between an output's chunks with tokens, and the tokens that the later one brought.
    """

    outputs: dict[int, Output] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None
    error: dict[str, Any] | None = None
    first: float | None = None
    gaps: list[tuple[float, int]] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    _last: dict[int, float] = field(default_factory=dict)

    def whole(self, body: Mapping[str, Any]) -> None:
        """Take the body of an answer that is no stream."""
        self._common(body, "text_completion", "chat.completion")
        for choice in body["choices"]:
            if choice["index"] in self.outputs:
                raise BadAnswer(f"choice {choice['index']} twice")
            text = choice["text"] if "text" in choice else choice["message"].get("content") or ""
            self._prompt(choice)
            self.outputs[choice["index"]] = Output(list(choice.get("token_ids") or ()), text, choice["finish_reason"])
        usage = body["usage"]
        self._usage(usage)

    def chunk(self, body: Mapping[str, Any], began: float) -> None:
        """Take an event of a stream."""
        if "error" in body:
            self.error = dict(body["error"])
            return
        self._common(body, "text_completion", "chat.completion.chunk")
        if self.usage is not None:
            raise BadAnswer("a chunk behind the usage")
        if not body["choices"]:
            if self.open:
                raise BadAnswer("the chunk of the usage comes before every output has ended")
            self._usage(body["usage"])
            return
        now = time.perf_counter()
        for choice in body["choices"]:
            index = choice["index"]
            output = self.outputs.setdefault(index, Output())
            if output.finish is not None:
                raise BadAnswer(f"output {index} goes on behind its end")
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            ids = choice.get("token_ids") or []
            self._prompt(choice)
            output.token_ids += ids
            output.text += text
            output.finish = choice["finish_reason"]
            if ids or text:
                self.first = now - began if self.first is None else self.first
                if index in self._last:
                    self.gaps.append((now - self._last[index], len(ids)))
                self._last[index] = now

    @property
    def open(self) -> list[int]:
        """Outputs that have begun and not ended."""
        return [i for i, o in self.outputs.items() if o.finish is None]

    def _common(self, body: Mapping[str, Any], *kinds: str) -> None:
        if body.get("object") not in kinds:
            raise BadAnswer(f"object = {body.get('object')!r}: not one of {kinds}")
        self.ids.add(body["id"])
        if len(self.ids) > 1:
            raise BadAnswer(f"one stream, several ids: {self.ids}")

    def _prompt(self, choice: Mapping[str, Any]) -> None:
        if choice.get("prompt_token_ids"):
            self.prompt_token_ids = list(choice["prompt_token_ids"])

    def _usage(self, usage: Mapping[str, Any]) -> None:
        self.usage = dict(usage)
        if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
            raise BadAnswer(f"usage does not add up: {usage}")


async def complete(
    connection: Connection, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> tuple[Answer, Reply]:
    """A completion read to its end, streaming where the body says so; of an error, the answer alone counts."""
    reply = Reply()
    if not body.get("stream"):
        answer = await connection.ask("POST", path, body, headers)
        if answer.status == 200:
            reply.whole(answer.json())
        return answer, reply
    began = time.perf_counter()
    answer = await start(connection, path, body, headers)
    if answer.status == 200:
        async for _ in follow(connection, answer, reply, began):
            pass
    return answer, reply


async def start(
    connection: Connection, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Answer:
    """Send a streaming request and read the head of its answer; read an error's body, too."""
    try:
        sent = {"Content-Type": "application/json", **(headers or {})}
        await connection.send("POST", path, json.dumps(body).encode(), sent)
        answer = await connection.head()
        if answer.status != 200:
            answer.body = b"".join([piece async for piece in connection.pieces(answer)])
    except BaseException:
        connection.drop()
        raise
    return answer


async def follow(
    connection: Connection, answer: Answer, reply: Reply, began: float
) -> AsyncIterator[Mapping[str, Any]]:
    """Read a stream into ``reply``, yielding each chunk; raises BadAnswer where it does not end as streams do."""
    done = False
    async for data in connection.events(answer):
        if done:
            raise BadAnswer(f"data behind [DONE]: {data[:200]!r}")
        if data == "[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        reply.chunk(chunk, began)
        yield chunk
    if not done:
        raise BadAnswer("the stream ends without [DONE]")
    if reply.error is None and (reply.open or not reply.outputs):
        raise BadAnswer(f"the stream ends before its outputs: {reply.open or 'none began'}")


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which a share of them lies, 0 to 1, by the nearest rank; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
