"""The log of a request: one line of JSON, never a word of a prompt or of an output."""

from __future__ import annotations

import json
import queue
import re
import sys
import threading
import time
import uuid
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specrs.engine import RequestOutput
    from specrs.engine.rounds.stats import RequestTimes
    from specrs.serve.errors import RequestError

_ID = re.compile(rb"[\w.:+/=-]{1,128}", re.ASCII)
_QUEUED = 10_000  # lines that wait to be written


@dataclass
class Record:
    """Record of one request, as far as the request got.

    Attributes:
        request_id: the client's ``X-Request-Id`` where it is one, else made here.
        id: id of the response's object.
        finish: finish reason of each of the request's outputs.
    """

    request_id: str
    method: str
    path: str
    began: float = field(default_factory=time.perf_counter)
    status: int = 0
    id: str | None = None
    model: str | None = None
    stream: bool | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    rounds: int | None = None
    mean_accepted: float | None = None
    draft_tokens: int | None = None
    accepted_draft_tokens: int | None = None
    finish: list[str] = field(default_factory=list)
    queued: float | None = None
    first_token: float | None = None
    error: str | None = None
    param: str | None = None
    gone: bool = False

    @classmethod
    def of(cls, scope: Any) -> Record:
        """Begin the record of a request."""
        asked = next((value for key, value in scope["headers"] if key == b"x-request-id"), b"")
        name = asked.decode("ascii") if _ID.fullmatch(asked) else uuid.uuid4().hex
        return cls(name, scope["method"], routed(scope))

    def failed(self, error: RequestError) -> None:
        """Record that the request is answered with an error."""
        self.error, self.param = error.code or error.type, error.param
        self.status = self.status or error.status

    def ended(self, outputs: list[RequestOutput], times: list[RequestTimes]) -> None:
        """Record the ends of the request's outputs."""
        firsts = [one for one in outputs if not one.index]
        self.prompt_tokens = sum(one.usage.prompt_tokens for one in firsts)
        self.cached_tokens = sum(one.usage.cached_tokens for one in firsts)
        self.completion_tokens = sum(one.usage.completion_tokens for one in outputs)
        self.rounds = sum(one.rounds for one in outputs)
        yielded = sum(one.mean_accepted * one.rounds for one in outputs)
        self.mean_accepted = round(yielded / self.rounds, 3) if self.rounds else None
        self.draft_tokens = sum(one.proposed for one in outputs)
        self.accepted_draft_tokens = sum(sum(one.drafted) for one in outputs)
        self.finish = [str(one.finish_reason) for one in outputs]
        queued = [one.queued for one in times if one.queued is not None]
        first = [one.to_first_token for one in times if one.to_first_token is not None]
        self.queued = max(queued, default=None)
        self.first_token = min(first, default=None)

    def line(self) -> dict[str, Any]:
        """Return the record for JSON, without the fields that are not known."""
        found: dict[str, Any] = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "request_id": self.request_id, "method": self.method, "path": self.path, "status": self.status,
            "seconds": round(time.perf_counter() - self.began, 4), "id": self.id, "model": self.model,
            "stream": self.stream, "prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens, "finish": self.finish or None, "rounds": self.rounds,
            "mean_accepted": self.mean_accepted, "num_draft_tokens": self.draft_tokens,
            "num_accepted_draft_tokens": self.accepted_draft_tokens, "queued_seconds": _rounded(self.queued),
            "first_token_seconds": _rounded(self.first_token), "error": self.error, "param": self.param,
            "client_gone": self.gone or None,
        }  # fmt: skip
        return {name: value for name, value in found.items() if value is not None}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def routed(scope: Any) -> str:
    """The path that routes are found by: where the application stands below another's path, without that."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    rest = path[len(root) :]
    return rest if root and path.startswith(root) and rest.startswith("/") else path


class Log:
    """Writes lines from a thread of its own, so that a slow reader of them stops no request.

    Args:
        which: the setting of `specrs.serve.ServeConfig.log`.
        out: ``None``: stdout.
    """

    def __init__(self, which: str, out: IO[str] | None = None) -> None:
        self._which, self._out = which, out
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(_QUEUED)
        self._lost = 0
        self._thread: threading.Thread | None = None

    def write(self, record: Record) -> None:
        """Log a request that is over."""
        failed = record.status >= 400 or record.error is not None
        if self._which == "none" or (self._which == "errors" and not failed):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="specrs-log", daemon=True)
            self._thread.start()
        line = record.line()
        if self._lost:
            line["lines_lost"] = self._lost
        try:
            self._lines.put_nowait(line)
            self._lost = 0
        except queue.Full:
            self._lost += 1

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            out = self._out or sys.stdout
            try:
                out.write(json.dumps(line, ensure_ascii=True) + "\n")
                if self._lines.empty():
                    out.flush()
            except (OSError, ValueError):
                self._lost += 1

    def close(self, seconds: float = 2.0) -> None:
        """Write what waits."""
        if self._thread is not None:
            try:
                self._lines.put(None, timeout=seconds)
            except queue.Full:
                return
            self._thread.join(seconds)
            self._thread = None
