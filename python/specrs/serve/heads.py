"""A limit on the head of a request, which uvicorn and httptools do not have.

httptools joins the pieces of a header as they come, so that the work for a long one grows with its square: 300 MB in
one header, which needs no key, held the event loop for three minutes.
"""

from __future__ import annotations

from typing import Any

from specrs.serve.errors import RequestError
from specrs.serve.writing import dumps

MOST_HEAD_BYTES = 64 << 10  # as h11 has it


def protocol() -> type[Any]:
    """uvicorn's protocol over httptools, which ends a connection that sends more than `MOST_HEAD_BYTES` without an end
    of its head, or a part of its body. That holds for trailers, too."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Bounded(HttpToolsProtocol):
        """One connection."""

        _waits = 0  # bytes that are kept, since nothing of theirs is complete
        _told = False  # whether these bytes were of something that is

        def data_received(self, data: bytes) -> None:
            self._told = False
            super().data_received(data)
            self._waits = 0 if self._told else self._waits + len(data)
            if self._waits > MOST_HEAD_BYTES and not self.transport.is_closing():
                self._refuse()

        def on_headers_complete(self) -> None:
            self._told = True
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._told = True
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._told = True
            super().on_message_complete()

        def _refuse(self) -> None:
            if self.cycle is None or self.cycle.response_complete:  # no other response is under way
                why = f"the headers have more than {MOST_HEAD_BYTES} bytes"
                body = dumps(RequestError(431, why, code="headers_too_large").body)
                self.transport.write(
                    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
                    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
                )
            self.transport.close()

    return Bounded
