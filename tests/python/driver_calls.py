"""Counts the calls that this process makes of CUDA, by a hook on every one of them (CUPTI's callbacks).

    with driver_calls() as seen:
        ...
    assert not seen.synchronisations, seen.synchronisations

Seen are the calls of every thread and library of the process, torch's among them: those of the driver, and those of the
runtime for what a runtime reaches by other ways than the driver's own functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

DRIVER, RUNTIME = 1, 2  # CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_CB_DOMAIN_RUNTIME_API
ENTER, EXIT = 0, 1  # CUPTI_API_ENTER, CUPTI_API_EXIT
NAMES = ("libcupti.so.13", "libcupti.so.12", "libcupti.so")

# Calls that let the host wait for the device: every copy that is not asynchronous, and memory that is given back.
WAITS = re.compile(
    r"cu(Stream|Ctx|Event)Synchronize|cuMemcpy(?!.*Async).*|cuMemFree(Host)?"
    r"|cuda(Stream|Device|Event|Thread)Synchronize|cudaMemcpy(?!.*Async).*|cudaFree(Host)?"
)
# Versions of a function, and those of the per-thread default stream.
VARIANT = re.compile(r"(_v\d+|_ptsz|_ptds)+$")

Event = tuple[int, int, int, str]  # thread, domain, ENTER or EXIT, function


class CuptiError(RuntimeError):
    """CUPTI cannot be loaded or does not let itself be used: the reason."""


@dataclass
class DriverCalls:
    """Calls by their names without version, such as ``cuMemcpyDtoH``.

    Attributes:
        calls: calls of the driver.
        runtime: calls of the runtime.
        synchronisations: calls of both that let the host wait; if one is made within another, the inner one, which is
            the driver's.
    """

    calls: Counter[str] = field(default_factory=Counter)
    runtime: Counter[str] = field(default_factory=Counter)
    synchronisations: Counter[str] = field(default_factory=Counter)

    def add(self, events: Iterable[Event]) -> None:
        """Count what was seen, in the order of each thread."""
        waits: Counter[int] = Counter()  # waits of the driver, by thread
        within: dict[int, list[int]] = {}  # by thread, the waits before each runtime call under way
        for thread, domain, site, function in events:
            name = VARIANT.sub("", function)
            wait = WAITS.fullmatch(name) is not None
            if domain == DRIVER:
                if site == ENTER:
                    self.calls[name] += 1
                    if wait:
                        self.synchronisations[name] += 1
                        waits[thread] += 1
            elif site == ENTER:
                self.runtime[name] += 1
                within.setdefault(thread, []).append(waits[thread])
            else:
                before = within.get(thread)
                # Without an entry: it was under way when the count began.
                if before and before.pop() == waits[thread] and wait:
                    self.synchronisations[name] += 1


class _Data(ctypes.Structure):
    """The first fields of CUpti_CallbackData."""

    _fields_ = (("site", ctypes.c_int), ("function", ctypes.c_char_p))


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_Data))


def _places() -> Iterator[str]:
    yield from NAMES  # names that the process has, or the loader finds
    roots = [Path(p) / "nvidia" for p in sys.path if p]
    folders = [f for root in roots for f in (root / "cu13" / "lib", root / "cuda_cupti" / "lib")]
    folders += [Path("/usr/local/cuda") / f for f in ("extras/CUPTI/lib64", "lib64")]
    for folder in folders:
        for path in sorted(folder.glob("libcupti.so*")):
            yield str(path)


def load() -> ctypes.CDLL:
    """Load CUPTI. Raises CuptiError with what was tried."""
    tried = []
    for place in _places():
        try:
            return ctypes.CDLL(place)
        except OSError as error:
            tried.append(f"{place}: {error}")
    raise CuptiError("CUPTI cannot be loaded (torch's CUDA wheels bring it): " + "; ".join(tried))


def _call(cupti: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(cupti, name)(*arguments)
    if code == 0:
        return
    text = ctypes.c_char_p()
    cupti.cuptiGetResultString(code, ctypes.byref(text))
    raise CuptiError(f"{name}: {(text.value or b'').decode()} ({code}); a profiler may hold the one subscription")


@contextlib.contextmanager
def driver_calls() -> Iterator[DriverCalls]:
    """Count the calls of CUDA from here to the end of the block, in all threads; the result is complete behind it."""
    cupti = load()
    seen: deque[Event] = deque()  # to append is atomic: a callback may come within another one, or in another thread

    @_CALLBACK
    def callback(_user: int, domain: int, _id: int, data: ctypes._Pointer[_Data]) -> None:
        name = data.contents.function
        if name is not None:
            seen.append((threading.get_ident(), domain, data.contents.site, name.decode()))

    counted = DriverCalls()
    subscriber = ctypes.c_void_p()
    _call(cupti, "cuptiSubscribe", ctypes.byref(subscriber), callback, None)
    try:
        for domain in (DRIVER, RUNTIME):
            _call(cupti, "cuptiEnableDomain", ctypes.c_uint32(1), subscriber, ctypes.c_int(domain))
        yield counted
    finally:
        _call(cupti, "cuptiUnsubscribe", subscriber)
        counted.add(seen)
