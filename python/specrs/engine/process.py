"""An engine in a process of its own, as its starter has it: in the place of a `Worker`, and of the `LLM` for what never
changes."""

from __future__ import annotations

import json
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from specrs._specrs import ConfigError, num_threads
from specrs.engine.conversing import Tokenizing
from specrs.engine.errors import EngineProcessError
from specrs.engine.prompts import Chats, load_tokenizer
from specrs.engine.wire import Facts, Ready, Refused, Start, Turn, dumps, loads, unpacked
from specrs.engine.worker import Abort, Add, Audit, News, Shutdown, StepWatch
from specrs.models import follow_torch

if TYPE_CHECKING:
    from specrs.engine.stats import EngineStats

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from specrs.engine.child import main; main(int(sys.argv[2]))"
)
_ENDS = 60.0  # seconds for a process whose engine is closed to be gone; then it is killed

Message = Add | Abort | Audit | Shutdown


class EngineProcess:
    """A process with an engine; to an `AsyncLLM` what a `Worker` is.

    Args:
        options: as `LLM` takes them, ``model`` and ``draft`` among them.
        tell: called by a thread with what is new, as a `Worker` calls it.
        lost: called by that thread at the end, with why the process is gone; ``None``: it was told to end.

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
        follow_torch()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._wire = Connection(ours.detach())
        try:
            self._wire.send_bytes(_travels("options", Start(options, num_threads(), torch.get_num_threads())))
            told: Ready | Refused = self._wire.recv()
        except (EOFError, OSError):
            self._wire.close()
            raise EngineProcessError(self._ended()) from None
        except BaseException:  # an option that cannot travel; somebody who does not want to wait
            self._wire.close()
            self._process.kill()
            self._process.wait()
            raise
        if isinstance(told, Refused):
            self._wire.close()
            self._ended()
            raise told.error
        self.facts: Facts = told.facts
        self.stats: EngineStats = told.stats
        self.steps, self.last_step = 0, 0.0
        #: As `Worker.fatal`.
        self.fatal: BaseException | None = None
        self.watchers: list[StepWatch] = []
        #: Since when the engine has something to do and has told nothing, on the monotonic clock.
        self.step_began: float | None = None
        #: Whether the process is there no more.
        self.gone = False
        self._closing = False
        self.inbox = _Outbox(self)
        self.thread = threading.Thread(target=self._listen, name="specrs-engine", daemon=True)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def _listen(self) -> None:
        """Hand on what the engine tells, until it is gone."""
        self.inbox.start(self._wire)
        try:
            while True:
                turn: Turn = loads(self._wire.recv_bytes())
                self.stats, self.steps, self.last_step = turn.stats, turn.steps, turn.last_step
                self.fatal = self.fatal or turn.fatal
                self.step_began = time.monotonic() if turn.live else None
                for step in turn.made:
                    for watch in self.watchers:
                        watch(step)
                self._tell(unpacked(turn.news))
        except (EOFError, OSError):
            pass
        self.inbox.stop()
        self.step_began = None
        status = self._ended()
        if not self._closing or status:
            self.fatal = self.fatal or EngineProcessError(status)
        self.gone = True
        self._lost(self.fatal)
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
        elif isinstance(message, Add) and self.step_began is None:
            self.step_began = time.monotonic()


class _Outbox:
    """What goes to the engine, by a thread that may wait for the socket. ``put`` may be called from anywhere."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def put(self, message: Message) -> None:
        """Send it, after all before it.

        Raises:
            ConfigError: of a request, what cannot go to another process.
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
    """A message as it goes to the process. Raises ConfigError, by what it is of, where it cannot."""
    try:
        return dumps(message)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(f"{what}: cannot go to the engine's process: {error}") from None


class RemoteLLM(Tokenizing):
    """What there is here of an engine in another process: what never changes of it, its tokenizer and its templates.

    Attributes:
        config, vocab_size, default_sampling, stated_sampling, numerics, device, budget, speculative,
        max_tokens_per_round: as `LLM` has them.
        pid: of the process.
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
        """Whether the process is gone."""
        return self._engine.gone

    def __repr__(self) -> str:
        return f"{self._name} in process {self.pid}{', gone' if self.closed else ''}"
