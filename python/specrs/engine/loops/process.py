"""An engine in a process of its own, as its starter sees it: it stands for a `Worker`, and for the `LLM` where values
never change."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from specrs._specrs import ConfigError, num_threads
from specrs.engine.conversing import Tokenizing
from specrs.engine.errors import EngineProcessError
from specrs.engine.loops.wire import Facts, Ready, Refused, Sealed, Start, Turn, dumps, loads, unpacked
from specrs.engine.loops.worker import Abort, Add, Audit, News, Shutdown, StepWatch
from specrs.engine.prompts import Chats, load_tokenizer
from specrs.models import follow_torch

if TYPE_CHECKING:
    from specrs.engine.rounds.stats import EngineStats

_BOOT = """
import sys
sys.path[:] = {path!r}
import signal
for one in (signal.SIGINT, signal.SIGTERM):
    signal.signal(one, signal.SIG_IGN)
from specrs.engine.loops.child import main
main({handle})
"""
_ENDS = 60.0  # seconds for a process whose engine is closed to be gone; then it is killed

Message = Add | Abort | Audit | Shutdown


class EngineProcess:
    """A process with an engine; to an `AsyncLLM` what a `Worker` is.

    Args:
        options: options as `LLM` takes them, ``model`` and ``draft`` among them.
        tell: called by a thread with news, as a `Worker` calls it.
        lost: called by that thread at the end, with the reason why the process is gone; ``None``: it was told to end.

    Raises:
        What `LLM` raises.
        ConfigError: an option that cannot go to another process.
        EngineProcessError: the process ended while it loaded.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        tell: Callable[[list[News]], None],
        lost: Callable[[BaseException | None], None],
    ) -> None:
        self._tell, self._lost = tell, lost
        self.thread = threading.Thread(target=self._listen, name="specrs-engine", daemon=True)
        follow_torch()
        ours, theirs = socket.socketpair()
        self._wire = Connection(ours.detach())
        try:
            with theirs:
                self._process = _started(theirs.fileno())
        except BaseException:
            self._wire.close()
            raise
        try:
            self._wire.send_bytes(_travels("options", Start(options, num_threads(), torch.get_num_threads())))
            told: Ready | Refused = self._wire.recv()
        except (EOFError, OSError):
            self._wire.close()
            raise EngineProcessError(self._ended()) from None
        except BaseException:  # an option that cannot travel; somebody who does not want to wait
            self.kill()
            raise
        if isinstance(told, Refused):
            self._wire.close()
            self._ended()
            raise told.error.error()
        self.facts: Facts = told.facts
        self.stats: EngineStats = told.stats
        self.steps, self.last_step = 0, 0.0
        #: The error that the engine cannot go on from, as `Worker.fatal`.
        self.fatal: BaseException | None = None
        self.watchers: list[StepWatch] = []
        self._owed: set[int] = set()  # keys of requests and questions that the engine has not ended
        # Time when the process last told something, or was first asked for something, on the monotonic clock.
        self._told_at = 0.0
        #: True once the process is there no more.
        self.gone = False
        self._closing = False
        self.inbox = _Outbox(self)
        me = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forked(me()))

    @property
    def step_began(self) -> float | None:
        """Time, on the monotonic clock, since when the engine has something to do and has told nothing."""
        return self._told_at if self._owed else None

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def _listen(self) -> None:
        """Hand on what the engine tells, until it is gone."""
        self.inbox.start(self._wire)
        try:
            while True:
                self._turn(loads(self._wire.recv_bytes()))
        except (EOFError, OSError):
            pass
        except BaseException as error:  # so that no reader waits for ever
            self.fatal = self.fatal or error
            self._process.kill()
        self.inbox.stop()
        status = self._ended()
        if not self._closing or status:
            self.fatal = self.fatal or EngineProcessError(status)
        self._owed.clear()
        self.gone = True
        self._lost(self.fatal)
        self._wire.close()

    def _turn(self, turn: Turn) -> None:
        self.stats, self.steps, self.last_step = turn.stats, turn.steps, turn.last_step
        if self.fatal is None and turn.fatal is not None:
            self.fatal = turn.fatal.error()
        news = unpacked(turn.news)
        self._owed.difference_update(one.key for one in news if one.last)
        self._told_at = time.monotonic()
        for step in turn.made:
            for watch in self.watchers:
                watch(step)
        self._tell(news)

    def kill(self) -> None:
        """End the process at once, whatever it does. Waits for nothing where there is a reader, which sees the process
        end: the handler of a signal may have interrupted a caller that waits."""
        self._process.kill()
        if self.thread.ident is None:
            self._process.wait()
            self._wire.close()

    def _ended(self) -> int | None:
        """The status of a process that has closed its socket."""
        try:
            return self._process.wait(_ENDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return None

    def sent(self, message: Message) -> None:
        """Note what the engine is about to be told."""
        if isinstance(message, Shutdown):
            self._closing = True
        elif isinstance(message, (Add, Audit)):
            if not self._owed:
                self._told_at = time.monotonic()
            self._owed.add(message.key)


class _Outbox:
    """Messages on their way to the engine, sent by a thread that may wait for the socket. Any thread may call
    ``put``."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def put(self, message: Message) -> None:
        """Send it, after all before it.

        Raises:
            ConfigError: a part of a request cannot go to another process.
        """
        data = _travels("prompt, params", message)
        self._engine.sent(message)
        self._queue.put(data)

    def start(self, wire: Connection) -> None:
        """Begin to send."""
        threading.Thread(target=self._send, args=(wire,), name="specrs-wire", daemon=True).start()

    def stop(self) -> None:
        """Send nothing more."""
        self._queue.put(None)

    def _send(self, wire: Connection) -> None:
        try:
            while (data := self._queue.get()) is not None:
                wire.send_bytes(data)
        except OSError:
            pass  # the process is gone, which `EngineProcess` notices


def _travels(what: str, message: object) -> bytes:
    """Return a message in the form that goes to the process. Raises ConfigError, with the name of the operand, if it
    cannot."""
    try:
        return dumps(Sealed.of(message) if isinstance(message, Add) else message)
    except Exception as error:  # a type may raise errors of its own, too
        why = f"{what}: cannot go to the engine's process: {error}"
        raise ConfigError(f"{why}; process = False (engine_process = False) takes them") from None


def _started(handle: int) -> subprocess.Popen[bytes]:
    """A process that is the engine at the other end of a socket; by this interpreter's flags, over the same modules."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    argv = [sys.executable, *flags, "-c", _BOOT.format(path=path, handle=handle)]
    return subprocess.Popen(argv, pass_fds=[handle], stdin=subprocess.DEVNULL)


def _forked(engine: EngineProcess | None) -> None:
    """Let go of the engine in a fork of this process, which must not keep it alive."""
    if engine is not None and not engine.gone:
        engine._wire.close()


class RemoteLLM(Tokenizing):
    """The part of an engine in another process that is here: its unchanging facts, its tokenizer and its templates.

    Attributes:
        config, vocab_size, default_sampling, stated_sampling, numerics, device, budget, speculative,
        max_tokens_per_round: the same as in `LLM`.
        pid: id of the process.
    """

    def __init__(self, engine: EngineProcess) -> None:
        facts = engine.facts
        self.pid = engine.pid
        self.config, self.vocab_size = facts.config, facts.vocab_size
        self.default_sampling, self.stated_sampling = facts.default_sampling, facts.stated_sampling
        self.numerics, self.device, self.budget = facts.numerics, facts.device, facts.budget
        self.speculative, self.max_tokens_per_round = facts.speculative, facts.max_tokens_per_round
        self.tokenizer = load_tokenizer(facts.directory)
        self._chats = Chats(facts.directory)
        self._engine, self._name = engine, facts.name

    @property
    def closed(self) -> bool:
        """True if the process is gone."""
        return self._engine.gone

    def __repr__(self) -> str:
        return f"{self._name} in process {self.pid}{', gone' if self.closed else ''}"
