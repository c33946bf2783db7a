"""The process of an engine that `AsyncLLM` keeps apart: an `LLM`, the `Worker` that owns it, and a socket.

It ends when it is told to, or when the process that started it is gone, however that ended. Signals that a terminal or
a supervisor sends to all processes of a service are the other one's to answer, which drains first.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch

from specrs._specrs import ConfigError, set_num_threads
from specrs.engine.errors import EngineClosedError
from specrs.engine.llm import LLM
from specrs.engine.loops.wire import Facts, Ready, Refused, Sealed, Start, Told, Turn, dumps, loads, packed
from specrs.engine.loops.worker import Abort, Add, Audit, News, Shutdown, Step, Worker
from specrs.grammar import StructuredOutputs
from specrs.sampling_params import SamplingParams

_GRACE = 30.0  # seconds for the step that runs when the other process is gone
_COMPILERS = 2  # threads


class Child:
    """Passes messages between the socket and the worker.

    Args:
        wire: to the process that started this one.
        llm: the engine that runs the requests from there.
    """

    def __init__(self, wire: Connection, llm: LLM) -> None:
        self._wire, self._llm = wire, llm
        self._sending, self._lock = threading.Lock(), threading.Lock()
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="specrs-grammars")
        self._compiling: set[int] = set()  # keys of requests whose grammar is being compiled
        self._held: dict[int, Any] = {}  # by key: compiled grammars, for requests that the worker has not seen yet
        self._made: list[Step] = []
        self.worker = Worker(llm, self.tell, close=True)
        self.worker.watchers.append(self._made.append)

    def take(self, message: Sealed | Abort | Audit | Shutdown) -> None:
        """Pass a message to the worker, a request once its grammar is there; no step waits for that."""
        if isinstance(message, Sealed):
            try:
                add = message.opened()
            except Exception as error:
                why = f"prompt, params: cannot be read in the engine's process: {type(error).__name__}: {error}"
                self._send([News(message.key, error=ConfigError(why))], [])
                return
            if isinstance(add.params, SamplingParams) and add.params.structured_outputs is not None:
                with self._lock:
                    self._compiling.add(add.key)
                self._compilers.submit(self._compile, add, add.params.structured_outputs)
            else:
                self.worker.inbox.put(add)
            return
        if isinstance(message, Abort):
            with self._lock:
                waited = message.key in self._compiling
                self._compiling.discard(message.key)
            if waited:
                self._send([News(message.key, done=True)], [])
                return
        self.worker.inbox.put(message)

    def _compile(self, message: Add, form: StructuredOutputs) -> None:
        if message.key not in self._compiling:
            return  # no longer wanted
        held, error = None, None
        try:
            held = self._llm._grammars.held(form)
        except Exception as refusal:
            error = refusal
        except BaseException as panic:  # a panic of the compiler
            error = RuntimeError(str(panic))
        with self._lock:
            if message.key not in self._compiling:
                return
            self._compiling.discard(message.key)
            if error is None and self.worker.thread.is_alive():
                self._held[message.key] = held
                self.worker.inbox.put(message)
                return
        self._send([News(message.key, error=error or EngineClosedError())], [])

    def tell(self, news: list[News]) -> None:
        """Send news to the other process; `Worker` calls this."""
        if self._held:
            with self._lock:
                for one in news:
                    self._held.pop(one.key, None)
        made = self._made[:]
        self._made.clear()
        self._send(news, made)

    def _send(self, news: list[News], made: list[Step]) -> None:
        worker = self.worker
        try:
            with self._sending:  # so that news come in order
                fatal = None if worker.fatal is None else Told.of(worker.fatal)
                turn = Turn(packed(news), worker.stats, worker.steps, worker.last_step, fatal, made)
                self._wire.send_bytes(dumps(turn))
        except OSError:
            pass  # the reader is gone, which `_listen` notices


def main(handle: int) -> None:
    """Run the engine at the other end of a socket, until the end."""
    os.set_inheritable(handle, False)
    wire = Connection(handle)
    made: Future[Child] = Future()
    try:
        try:
            data = wire.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)
        threading.Thread(target=_listen, args=(wire, made), name="specrs-wire", daemon=True).start()
        try:
            start: Start = loads(data)
        except Exception as error:
            why = f"options: cannot be read in the engine's process: {type(error).__name__}: {error}"
            raise ConfigError(f"{why}; process = False (engine_process = False) takes them") from None
        torch.set_num_threads(start.torch_threads)
        set_num_threads(start.threads)
        llm = LLM(**start.options)
        child = Child(wire, llm)
        ready = dumps(Ready(Facts.of(llm), child.worker.stats))
    except BaseException as error:
        wire.send_bytes(dumps(Refused(Told.of(error))))
        os._exit(1)
    gc.collect()
    gc.freeze()  # modules and the model stay: a collection that goes through them holds a step up for 0.1 s
    child.worker.thread.start()
    wire.send_bytes(ready)
    made.set_result(child)
    child.worker.thread.join()
    os._exit(0)  # the weights are freed; a compiler that still runs is nobody's


def _listen(wire: Connection, made: Future[Child]) -> None:
    """Take messages until the sender is gone. The process does not outlive this thread."""
    try:
        while True:
            data = wire.recv_bytes()
            made.result().take(loads(data))
    except (EOFError, OSError):
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if not made.done():
        os._exit(1)  # while the model was being loaded
    worker = made.result().worker
    worker.inbox.put(Shutdown(time.monotonic()))
    worker.thread.join(_GRACE)
    os._exit(1)
