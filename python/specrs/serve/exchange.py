"""One request and its response, over ASGI: the body in, JSON or a stream of events out, and the watch that notices that
the client has gone.

Work runs beside a listener for the disconnect, whatever it is at: waiting in a queue, generating, or sending. So a
client that goes ends its request, streaming or not, on servers of any version of ASGI. One `Watch` for all exchanges
writes keep-alive comments, and ends those whose client has stopped to read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from threading import Event
from typing import Any

from specrs.serve.errors import RequestError, bad
from specrs.serve.record import Record
from specrs.serve.writing import dumps, dumps_in_pieces

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

Pooled = Callable[[Callable[[], Any]], Awaitable[Any]]

_SMALL = 64 << 10  # bytes of JSON that the event loop parses itself, in half a millisecond
_DEEPEST = 100  # levels of JSON: more than any schema of a tool needs
_LINGER = 2.0  # seconds for a client to notice that its body is not wanted
_COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_JSON_KIND = b"application/json"


class Gone(Exception):
    """The client has gone, or does not read."""


class Exchange:
    """A request of HTTP that is being answered.

    Attributes:
        scope: scope of the request, as ASGI has it.
        record: the record that the log line is made of.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, record: Record) -> None:
        self.scope, self.record = scope, record
        self._receive, self._send = receive, send
        self._lock = asyncio.Lock()  # comments come from elsewhere
        self._clock = asyncio.get_running_loop().time
        self._sending: float | None = None  # since when
        self._sent = 0.0  # when last
        self._work: asyncio.Future[None] | None = None
        self._complete = False
        self.started = False
        self.streams = False
        self.stuck = False
        self._last_words: Callable[[RequestError], bytes] = _error_event

    # -- in -----------------------------------------------------------------------------------------------------

    def header(self, name: bytes) -> bytes:
        """The first header of a name; empty where there is none."""
        return next((value for key, value in self.scope["headers"] if key == name), b"")

    async def body(self, most: int, seconds: float, pooled: Pooled) -> dict[str, Any]:
        """The body, a JSON object. pooled: runs a function in a thread: large bodies are parsed there.

        Raises:
            RequestError: 415, 413, 408 or 400.
            Gone: the client went before the body was there.
        """
        kind = self.header(b"content-type").split(b";")[0].strip().lower()
        if kind != b"application/json":
            raise RequestError(415, "Content-Type: must be application/json", code="unsupported_media_type")
        length = self.header(b"content-length")
        if length.isdigit() and (len(length) > 18 or int(length) > most):
            raise self._too_large(most)
        try:
            raw = await asyncio.wait_for(self._whole(most), seconds)
        except asyncio.TimeoutError:
            raise RequestError(
                408, f"the body did not come within body_seconds = {seconds:g}", code="timeout"
            ) from None
        return _parsed(raw) if len(raw) <= _SMALL else await pooled(lambda: _parsed(raw))

    async def _whole(self, most: int) -> bytes:
        parts, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Gone
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise self._too_large(most)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    @staticmethod
    def _too_large(most: int) -> RequestError:
        return RequestError(413, f"the body is larger than max_body_bytes = {most}", code="body_too_large")

    async def _linger(self) -> None:
        """Read on for a moment, though nothing more is wanted: a connection that is closed on a client that still sends
        is reset, and the answer is lost with it."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # -- the work -----------------------------------------------------------------------------------------------

    async def attend(self, work: Awaitable[None]) -> None:
        """Do the work, unless the client goes first. To be called once the body is read.

        Raises:
            Gone: the client went, or does not read. The work was cancelled, and has ended.
        """
        self._work = task = asyncio.ensure_future(work)
        listener = asyncio.ensure_future(self._listen())
        try:
            await asyncio.wait((task, listener), return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self._complete:
                await asyncio.wait((task,))  # servers tell a disconnect behind the response, too
            if not task.done():
                raise Gone
            if task.cancelled() and self.stuck:
                raise Gone
            task.result()
        finally:
            listener.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
                if not task.cancelled():
                    task.exception()  # looked at

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def watch(self, keep_alive: float, patience: float) -> None:
        """Look after the connection; `Watch` calls it now and then."""
        now = self._clock()
        if self._sending is not None:
            if now - self._sending > patience and self._work is not None:
                self.stuck = True
                self._work.cancel()
        elif self.streams and now - self._sent >= keep_alive and not self._lock.locked():
            self._comment = asyncio.ensure_future(self._commented())  # kept, so that it is not collected

    # -- out ----------------------------------------------------------------------------------------------------

    async def json(self, status: int, value: Any, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """A whole response."""
        await self.whole(status, dumps(value), _JSON_KIND, headers)

    async def json_of(self, status: int, make: Callable[[], Any], pooled: Pooled) -> None:
        """A whole response that takes long to make: ``make`` and its encoding run elsewhere, until the client goes."""
        gone = Event()
        try:
            body = await pooled(lambda: dumps_in_pieces(make(), gone))
        finally:
            gone.set()
        await self.whole(status, body, _JSON_KIND)

    async def whole(self, status: int, body: bytes, kind: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """A whole response of any kind."""
        lengths = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *headers]
        await self._start(status, lengths)
        await self._put(body, more=False)

    async def error(self, error: RequestError) -> None:
        """An error: a response, or where one is under way an event."""
        self.record.failed(error)
        if self.streams:
            await self.event(self._last_words(error))
            await self.end()
        elif not self.started and error.status in (408, 413):
            body = dumps(error.body)
            length = (b"content-length", str(len(body)).encode())
            await self._start(error.status, [(b"content-type", b"application/json"), length, (b"connection", b"close")])
            await self._put(body, more=True)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._linger(), _LINGER)
            await self._put(b"", more=False)
        elif not self.started:
            await self.json(error.status, error.body, error.headers)

    async def events(self, last_words: Callable[[RequestError], bytes] | None = None) -> None:
        """Begin a stream of events. last_words: how it ends in an error; ``None``: with data that has ``error``."""
        self._last_words = last_words or _error_event
        await self._start(
            200,
            [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ],
        )
        self.streams = True

    async def event(self, event: bytes) -> None:
        """Send one event, or several, each as it goes over the wire. Waits while the client is slow."""
        await self._put(event, more=True)

    async def _commented(self) -> None:
        async with self._lock:
            if self.streams:  # still
                await self._timed(_COMMENT, more=True)

    async def end(self) -> None:
        """The stream is complete."""
        self.streams = False
        await self._put(b"", more=False)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started, self.record.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _put(self, body: bytes, more: bool) -> None:
        async with self._lock:
            await self._timed(body, more)

    async def _timed(self, body: bytes, more: bool) -> None:
        self._sending, self._complete = self._clock(), not more
        try:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
        finally:
            self._sending, self._sent = None, self._clock()


class Watch:
    """Looks after all exchanges of a server."""

    def __init__(self, keep_alive: float, patience: float) -> None:
        self._keep_alive, self._patience = keep_alive, patience
        self._exchanges: set[Exchange] = set()

    def __len__(self) -> int:
        return len(self._exchanges)

    def add(self, exchange: Exchange) -> None:
        """Look after one more."""
        self._exchanges.add(exchange)

    def discard(self, exchange: Exchange) -> None:
        """Forget an exchange that is over."""
        self._exchanges.discard(exchange)

    async def run(self) -> None:
        """Look at the exchanges again and again, as long as the server lives."""
        pause = max(min(self._keep_alive, self._patience, 4.0) / 4, 0.05)
        while True:
            await asyncio.sleep(pause)
            self.look(self._patience)

    def look(self, patience: float) -> None:
        """Look at all of them now; who has not read for so many seconds is given up."""
        for exchange in list(self._exchanges):
            exchange.watch(self._keep_alive, patience)


def _error_event(error: RequestError) -> bytes:
    return b"data: " + dumps(error.body) + b"\n\n" + DONE


def _parsed(raw: bytes) -> dict[str, Any]:
    """A JSON object, by the letter of RFC 8259, whose texts are Unicode."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=no_constant)
    except UnicodeDecodeError as e:
        raise bad(f"the body is not UTF-8 at byte {e.start}", code="invalid_json") from None
    except RecursionError:
        raise bad(f"the body is deeper than {_DEEPEST} levels", code="invalid_json") from None
    except ValueError as e:  # an integer of thousands of digits raises it too
        raise bad(f"the body is not JSON: {e}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad("the body must be a JSON object", code="invalid_json")
    if not shallow(value, _DEEPEST):
        raise bad(f"the body is deeper than {_DEEPEST} levels", code="invalid_json")
    if b"\\u" in raw:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise bad("the body has half of a surrogate pair, which is no character", code="invalid_json") from None
    return value


def no_constant(name: str) -> Any:
    """Refuse NaN and infinities, which Python's parser takes."""
    raise ValueError(f"{name} is no number of JSON")


def shallow(value: Any, levels: int) -> bool:
    """Return whether a value is no deeper than so many levels; without recursion."""
    layer = [value]
    for _ in range(levels):
        layer = [
            inner
            for one in layer
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, (dict, list))
        ]
        if not layer:
            return True
    return False
