"""Plain ASGI callables before every endpoint. They neither buffer a body nor hide a disconnect."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Any

from specrs.serve.errors import RequestError, shown
from specrs.serve.exchange import Exchange, Receive, Scope, Send
from specrs.serve.keys import Keys
from specrs.serve.record import Record, routed

_GUARDED = re.compile(r"/(v1|tokenize|detokenize)(/|$)")


class Recorded:
    """Gives every request a record and an id, and logs it at its end."""

    def __init__(self, app: Any, state: Any) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection, as ASGI calls it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["specrs.record"] = record = Record.of(scope)
        name = (b"x-request-id", record.request_id.encode())

        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), name]}
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            service = getattr(self._state, "service", None)
            if service is not None:
                service.log.write(record)
                service.metrics.answered(record)


class Hosts:
    """Refuses requests that another name led here: a web page can make a name of its own lead to this machine. It also
    refuses requests with two names, since nobody can tell which one counts.

    Args:
        hosts: names and addresses that are allowed; none: any.
    """

    def __init__(self, app: Any, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, frozenset(map(host_name, hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection, as ASGI calls it."""
        if scope["type"] == "http":
            told = self._refused(scope)
            if told is not None:
                await refuse(scope, receive, send, told)
                return
        await self._app(scope, receive, send)

    def _refused(self, scope: Scope) -> RequestError | None:
        asked = [value.decode("latin-1") for key, value in scope["headers"] if key == b"host"]
        if len(asked) > 1 or (not asked and scope["http_version"] == "1.1"):  # RFC 9112, 3.2
            why = f"the request has {len(asked)} Host headers: must be one"
            return RequestError(400, why, code="invalid_host")
        host = re.sub(r":\d*$", "", asked[0]) if asked else ""
        if self._hosts and host_name(host) not in self._hosts:
            return RequestError(403, f"Host {shown(host)}: not one of allowed_hosts", code="host_not_allowed")
        return None


def host_name(host: str) -> str:
    """A name, or an address in its shortest form, whose spellings then compare equal: ``::1`` for ``[0:0::1]``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).compressed
    except ValueError:
        return host.lower()


class Guarded:
    """Asks for an API key, where the request costs something."""

    def __init__(self, app: Any, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection, as ASGI calls it."""
        guarded = scope["type"] == "http" and scope["method"] != "OPTIONS" and _GUARDED.match(routed(scope))
        if guarded and not self._keys.accept(_presented(scope)):
            told = RequestError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
            await refuse(scope, receive, send, told, [(b"www-authenticate", b"Bearer")])
            return
        await self._app(scope, receive, send)


def _presented(scope: Scope) -> bytes:
    header: bytes = next((value for key, value in scope["headers"] if key == b"authorization"), b"")
    scheme, _, key = header.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


async def refuse(
    scope: Scope, receive: Receive, send: Send, told: RequestError, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """Answer with an error, before an endpoint has begun."""
    exchange = Exchange(scope, receive, send, scope.get("specrs.record") or Record.of(scope))
    exchange.record.failed(told)
    await exchange.json(told.status, told.body, [*told.headers, *headers])
