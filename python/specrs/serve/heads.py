"""Limits on what a connection may send, which uvicorn and httptools do not have; and a connection's end, seen in time.

httptools joins the pieces of a header as they come, so that the work for a long one grows with its square: 300 MB in
one header, which needs no key, held the event loop for three minutes. And uvicorn stops to read once a request comes
before the one before it is answered, so that it does not see that the client has gone.
"""

from __future__ import annotations

from collections import deque
from http import HTTPStatus
from typing import Any

from specrs.serve.errors import RequestError
from specrs.serve.writing import dumps

MOST_HEAD_BYTES = 64 << 10  # the limit that h11 has
MOST_AHEAD_BYTES = 256 << 10
"""Limit of the bytes that a client may send of later requests while an earlier one waits for its answer."""


def protocol() -> type[Any]:
    """uvicorn's protocol over httptools, which ends a connection that sends more than `MOST_HEAD_BYTES` without an end
    of its head, or a part of its body, or more than `MOST_AHEAD_BYTES` ahead of its turn. The first holds for trailers,
    too."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Bounded(HttpToolsProtocol):
        """One connection."""

        _waits = 0  # bytes that are kept, since nothing of theirs is complete
        _ahead = 0  # bytes that came while requests wait for their turn
        _told = False  # true if these bytes completed a head, a part of a body, or a message

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self._cycles: deque[Any] = deque()  # in order: requests whose response is not complete, and ones before

        def data_received(self, data: bytes) -> None:
            self._told = False
            super().data_received(data)
            self._waits = 0 if self._told else self._waits + len(data)
            self._ahead = self._ahead + len(data) if self.pipeline else 0
            if self.transport.is_closing():
                return
            if self._waits > MOST_HEAD_BYTES:
                why = f"the headers have more than {MOST_HEAD_BYTES} bytes"
                self._refuse(RequestError(431, why, code="headers_too_large"))
            elif self._ahead > MOST_AHEAD_BYTES:
                self.transport.close()
            elif self.pipeline:
                self.flow.resume_reading()  # an end of the connection is read, too

        def connection_lost(self, exc: Exception | None) -> None:
            for cycle in self._cycles:  # uvicorn tells the last one alone
                if not cycle.response_complete:
                    cycle.disconnected = True
                    cycle.message_event.set()
            self._cycles.clear()
            super().connection_lost(exc)

        def on_headers_complete(self) -> None:
            self._told = True
            super().on_headers_complete()
            while self._cycles and self._cycles[0].response_complete:
                self._cycles.popleft()
            self._cycles.append(self.cycle)

        def on_body(self, body: bytes) -> None:
            self._told = True
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._told = True
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            self._refuse(RequestError(400, "this is no request of HTTP/1.1", code="invalid_request"))

        def _refuse(self, error: RequestError) -> None:
            if not self._cycles or self._cycles[-1].response_complete:  # no other response is under way
                body, status = dumps(error.body), HTTPStatus(error.status)
                head = b"content-type: application/json\r\nconnection: close\r\n"
                line = b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode())
                self.transport.write(line + head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            self.transport.close()

    return Bounded
