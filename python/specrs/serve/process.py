"""A process that serves: uvicorn as it is set up here, signals, and the status with which the process ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from specrs._specrs import ConfigError
from specrs.serve.app import MISSING, app
from specrs.serve.config import ServeConfig, is_loopback

if TYPE_CHECKING:
    import uvicorn

    from specrs.engine import AsyncLLM

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE = 15  # seconds for uvicorn to let connections go, beyond the drain
_DYING = 1.0  # seconds in which /health says 503, before a process whose engine died ends
_LOCAL = ("localhost", "127.0.0.1", "[::1]")


def server(config: ServeConfig, engine: AsyncLLM | None = None) -> uvicorn.Server:
    """A uvicorn server, set up as `specrs serve` is: ``server(config).run()`` serves.

    Its ``status`` is that of the process in the end: 0, or 1 where the engine died or the pool leaked. SIGTERM and
    SIGINT drain: new requests get 503, ``/ready`` says 503, what runs goes on for ``drain_seconds``, and what is left
    ends with ``"abort"``. A second one ends at once.

    Raises:
        ConfigError: uvicorn is missing; an address that other machines reach, without a key.
        OSError: the address cannot be listened at.
    """
    try:
        import uvicorn
    except ImportError as e:
        raise ConfigError(f"{MISSING} ({e})") from None
    config.check_address()
    if not config.keys and not config.allowed_hosts and is_loopback(config.host):
        from dataclasses import replace

        config = replace(config, allowed_hosts=_LOCAL)
    application = app(config, engine)

    class Server(uvicorn.Server):
        """Drains before it stops to listen, so that ``/ready`` can say so."""

        status = 0
        address = ""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Listen, once the model is there."""
            await super().startup(sockets)
            if self.should_exit:
                return
            self._loop = asyncio.get_running_loop()
            self.address = _address(self.servers[0].sockets[0])
            application.state.service.on_death.append(self._died)
            print(f"listening on {self.address}", file=sys.stderr, flush=True)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Signals drain; afterwards the process goes on as before, and does not die of them."""
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            before = {one: signal.signal(one, self.handle_exit) for one in _SIGNALS}
            try:
                yield
            finally:
                for one, handler in before.items():
                    signal.signal(one, handler)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Of signals, and of whoever wants the server to end as it does by one."""
            if not self.started:
                self.should_exit = True
                raise KeyboardInterrupt
            if application.state.service.draining:
                self.should_exit = self.force_exit = True
                return
            application.state.service.draining = True
            self._loop.call_soon_threadsafe(self._drain)

        def _drain(self) -> None:
            self._ends = asyncio.ensure_future(self._drained())

        async def _drained(self) -> None:
            await application.state.service.drain()
            self.should_exit = True

        def _died(self) -> None:
            self.status = 1
            self._loop.call_later(_DYING, setattr, self, "should_exit", True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Close connections, then the engine."""
            await super().shutdown(sockets)
            if getattr(self.lifespan, "shutdown_failed", False):
                self.status = 1

    return Server(
        uvicorn.Config(
            application, host=config.host, port=config.port, lifespan="on", log_config=None, access_log=False,
            log_level="warning", ws="none", proxy_headers=False, server_header=False,
            timeout_graceful_shutdown=_GRACE, timeout_keep_alive=30,
        )
    )  # fmt: skip


def run(config: ServeConfig) -> int:
    """Serve until a signal comes; the status for the process."""
    made: Any = server(config)
    sock = listener(config)
    try:
        made.run([sock])
    except KeyboardInterrupt:
        return 130
    except SystemExit as e:  # uvicorn's way to say that the application did not start; it has told why
        return int(e.code or 0) if isinstance(e.code, int) else 1
    finally:
        sock.close()
    return int(made.status)


def listener(config: ServeConfig) -> socket.socket:
    """A socket at the config's address, whose connections end where a client reads nothing any more.

    A closed connection lives on while the kernel has bytes that the client does not take; TCP_USER_TIMEOUT ends that.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.create_server((config.host.strip("[]"), config.port), family=family, backlog=2048)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(max(config.send_seconds, 1.0) * 1000))
    return sock


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
