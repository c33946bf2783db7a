"""A process that serves: uvicorn as it is set up here, signals, and the status with which the process ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from specrs._specrs import ConfigError
from specrs.serve.app import MISSING, app, make_engine
from specrs.serve.config import ServeConfig, is_loopback
from specrs.serve.heads import protocol
from specrs.serve.seldom import seldom
from specrs.serve.service import LAST_WORDS

if TYPE_CHECKING:
    import uvicorn

    from specrs.engine import AsyncLLM

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE = 3.0  # seconds for connections to close once their responses are complete, or given up
_CUT = 1  # seconds for requests to notice that their connection was cut
_DYING = 1.0  # seconds in which /health says 503, before a process whose engine died ends
_SWITCH = 5e-4  # seconds; Python's own 5e-3 is what an event loop may wait for an engine's thread, and that for it
_LOCAL = ("localhost", "127.0.0.1", "[::1]")


class _GivingWay:
    """Makes threads of this process give way to each other sooner, while servers run, and keeps the garbage collector,
    which stops all of them, from going through earlier objects."""

    def __init__(self) -> None:
        self._lock, self._servers, self._before = threading.Lock(), 0, 0.0
        self._frozen = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._servers:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, _SWITCH))
            self._servers += 1

    def settle(self) -> None:
        """Freeze all present objects, so that the collector skips them: modules and the model, hundreds of thousands of
        objects, 0.1 s a collection."""
        with self._lock:
            if not gc.get_freeze_count():  # else the program around it has frozen what it wants
                self._frozen = True
                gc.collect()
                gc.freeze()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._servers -= 1
            if not self._servers:
                sys.setswitchinterval(self._before)
                if self._frozen:
                    self._frozen = False
                    gc.unfreeze()


_GIVING_WAY = _GivingWay()


def server(config: ServeConfig, engine: AsyncLLM | None = None) -> uvicorn.Server:
    """A uvicorn server, set up as `specrs serve` is: ``server(config).run()`` serves.

    Its ``address`` is known once it is ``started``. SIGTERM and SIGINT, and a call of ``handle_exit``, drain: new
    requests get 503, ``/ready`` says 503, what runs goes on for ``drain_seconds``, and what is left ends with
    ``"abort"``. An engine that does not answer then is given up after `LAST_WORDS` seconds. A second signal ends at
    once. Its ``status`` is that of the process in the end: 0; or 1 where the engine died, was given up, or lost pages,
    or a second signal came.

    Args:
        engine: an engine as `app` takes it.

    Raises:
        ConfigError: the same errors as of `app`; uvicorn is missing; an address that other machines reach, without a
            key.
    """
    try:
        import uvicorn
    except ImportError as e:
        raise ConfigError(f"{MISSING} ({e})") from None
    config.check_address()
    if not config.keys and not config.allowed_hosts and config.uds is None and is_loopback(config.host):
        config = replace(config, allowed_hosts=(*_LOCAL, config.host))
    application = app(config, engine)

    class Server(uvicorn.Server):
        """Drains before it stops to listen, so that ``/ready`` can say so."""

        status = 0
        address = ""
        closes = False  # true if the caller of the server closes the engine that it gave
        _own: socket.socket | None = None

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Listen, once the model is there."""
            self._loop = asyncio.get_running_loop()
            if sockets is None:
                self._own = listener(config)
                sockets = [self._own]
            self.address = _address(sockets[0])  # before it is `started`, which other threads may look at
            await super().startup(sockets)
            if self.should_exit:
                return
            _GIVING_WAY.settle()
            application.state.service.on_death.append(self._died)
            application.state.service.owned |= self.closes
            print(f"listening on {self.address}", file=sys.stderr, flush=True)

        async def serve(self, sockets: list[socket.socket] | None = None) -> None:
            """Serve until the end."""
            with _GIVING_WAY, seldom("uvicorn.error", "specrs.serve", "asyncio"):
                await super().serve(sockets)

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
            """End the server on a signal, or for a caller that wants the server to end as it does on one."""
            if not self.started:
                self.should_exit = True
            elif application.state.service.draining:
                self.should_exit = True
                with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                    self._loop.call_soon_threadsafe(application.state.service.force)
            else:
                application.state.service.draining = True
                self._loop.call_soon_threadsafe(self._drain)

        def _drain(self) -> None:
            self._ends = asyncio.ensure_future(self._drained())

        async def _drained(self) -> None:
            await application.state.service.drain()
            self.should_exit = True

        def _died(self) -> None:
            self._loop.call_later(_DYING, setattr, self, "should_exit", True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Close connections, then the engine."""
            service, state = application.state.service, self.server_state
            for one in self.servers:
                one.close()
            for connection in list(state.connections):
                connection.shutdown()  # now, or once its response is complete
            await service.pause(lambda: not state.connections, _GRACE)
            for connection in list(state.connections):
                connection.transport.abort()  # ends its request as one whose client has gone
            await service.pause(lambda: not state.tasks, _CUT)
            await super().shutdown([self._own] if sockets is None and self._own is not None else sockets)
            _unlink(config)
            if self.lifespan.should_exit or service.unsound:  # the app met an error at its end
                self.status = 1

    return Server(
        uvicorn.Config(
            application, host=config.host, port=config.port, lifespan="on", log_config=None, access_log=False,
            log_level="warning", http=protocol(), ws="none", proxy_headers=False, server_header=False,
            timeout_graceful_shutdown=_CUT, root_path=config.root_path,
            timeout_keep_alive=config.keep_alive_seconds,  # type: ignore[arg-type]  # of an event loop: any number
        )
    )  # fmt: skip


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop of the kind that `run` serves in: uvloop's where it is installed."""
    import uvicorn

    factory = uvicorn.Config("", log_config=None).get_loop_factory() or asyncio.new_event_loop
    return factory()


def run(config: ServeConfig) -> int:
    """Serve until a signal comes; the status for the process.

    Raises:
        ConfigError and others: the same errors as of `server` and `specrs.LLM`.
        OSError: the address cannot be listened at.
    """
    config.check_address()
    config.check_template()
    with listener(config) as sock:  # an address that fails at once fails before the model is loaded
        engine = make_engine(config)
        made: Any = server(config, engine)
        made.closes = True
        try:
            made.run([sock])
        except SystemExit:  # uvicorn's way to say that the application did not start; it has told why
            made.status = 1
        finally:
            with contextlib.suppress(TimeoutError):  # a thread may be in a step: the process ends without it
                asyncio.run(engine.aclose(drain=False, grace=0.0 if made.status else LAST_WORDS))
            _unlink(config)
    return int(made.status)


def listener(config: ServeConfig) -> socket.socket:
    """A socket at the config's address, or the Unix domain socket that it names, for ``server(config).run([socket])``.
    The file of a Unix domain socket whose server is gone is replaced.

    Connections end where a client reads nothing any more: a closed one lives on while the kernel has bytes that the
    client does not take, and TCP_USER_TIMEOUT ends that.

    Raises:
        OSError: the address is no address of this machine, or is taken; the path has no folder, or something else is
            there.
    """
    if config.uds is not None:
        return _local_listener(config.uds)
    host, port = config.host.strip("[]"), config.port
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            patience = int(min(max(config.send_seconds, 1.0), 1e6) * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience)
        sock.bind(address)
        sock.set_inheritable(False)
    except OSError as e:
        sock.close()
        raise OSError(e.errno, f"{config.host}:{port}: {e.strerror}") from None
    return sock


def _local_listener(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left(path):
            os.unlink(path)
        sock.bind(path)
    except OSError as e:
        sock.close()
        raise OSError(e.errno, f"{path}: {e.strerror or e}") from None
    return sock


def _unlink(config: ServeConfig) -> None:
    """Remove the file of a Unix domain socket at which nobody listens any more."""
    if config.uds is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(config.uds)


def _is_left(path: str) -> bool:
    """Return whether a path is a socket's that nobody listens at any more."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def _address(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
