"""Ctrl-C at any line of a step: it comes at the step's end, and the engine goes on with nothing lost."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import specrs.engine
from modelzoo import Pair
from specrs import LLM, SamplingParams
from specrs.drafters import DraftRequest
from specrs.engine.interrupts import Uninterrupted

ENGINE = str(Path(specrs.engine.__file__).parent)
UNTRACED = f"{ENGINE}/llm.py", "step"  # it returns the events that it has taken: nobody else can have them any more
PROMPT = [3, 1, 4, 1, 5, 2, 0, 5, 3]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Python's handler: jobs in the background of a shell ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Press:
    """Presses Ctrl-C before the n-th line of the engine's code that runs.

    Attributes:
        at: function and line before which it was pressed.
    """

    def __init__(self, n: int) -> None:
        self._left = n
        self.at: tuple[str, int] | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        ours = code.co_filename.startswith(ENGINE) and (code.co_filename, code.co_name) != UNTRACED
        if ours and event == "line":
            self._left -= 1
            if self._left == 0:
                self.at = frame.f_code.co_name, frame.f_lineno
                signal.raise_signal(signal.SIGINT)
        return self if ours else None


@contextmanager
def tracing(press: Press) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(press)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("start", range(8))
def test_ctrl_c_at_any_line_of_a_step_loses_nothing(tiny: Pair, start: int) -> None:
    with LLM(tiny.target, tiny.draft, tree=(2, 2, 5), page_size=4, prefix_cache=False) as llm:
        want = llm.generate([PROMPT], PARAMS)[0].token_ids
        interrupts, n = 0, start + 1
        while True:
            request, press, got, ended = llm.add(PROMPT, PARAMS), Press(n), list[int](), False
            with tracing(press):
                for _ in range(60):
                    if ended:
                        break
                    try:
                        events = llm.step()
                    except KeyboardInterrupt:
                        interrupts += 1
                        continue
                    for event in events:
                        assert event.request_id == request
                        got += event.token_ids
                        ended |= event.output is not None
            assert got == want and ended, press.at
            llm.audit()
            if press.at is None:
                break
            n += 97  # with eight tests, every twelfth line or so
        assert interrupts > 15


def test_an_interrupted_call_leaves_nothing_behind(tiny: Pair) -> None:
    with LLM(tiny.target, tiny.draft, tree=(2, 2, 5), page_size=4) as llm:
        want = llm.generate([PROMPT], PARAMS)[0].token_ids
        for n in range(30, 1500, 61):
            with tracing(Press(n)), pytest.raises(KeyboardInterrupt):
                llm.generate([PROMPT, PROMPT[:4]], PARAMS)
            assert llm.stats().running == llm.stats().waiting == 0
            llm.audit()
        assert llm.generate([PROMPT], PARAMS)[0].token_ids == want


def test_a_second_ctrl_c_ends_what_hangs(tiny: Pair) -> None:
    pressed = 0

    class Hangs:
        name, depth = "hangs", 1

        def begin(self, request: DraftRequest) -> Any:
            nonlocal pressed
            for _ in range(1000):
                pressed += 1
                signal.raise_signal(signal.SIGINT)
            raise AssertionError("nobody heard")

    with LLM(tiny.target, drafters=[Hangs()], tree=(1, 1, 2)) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT], PARAMS)
        assert pressed == 2 and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_block_and_ctrl_c_are_both_seen() -> None:
    with pytest.raises(KeyboardInterrupt) as seen, Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the block")
    assert isinstance(seen.value.__context__, ValueError)


def test_a_handler_that_the_block_installs_stays_and_the_old_one_ends() -> None:
    def handler(*_: object) -> None: ...

    kept: Any = None
    try:
        with Uninterrupted():
            kept = signal.signal(signal.SIGINT, handler)
        assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, kept)  # as a debugger does
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_comes_where_it_is_asked_for() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Uninterrupted() as held:
        held.check()
        signal.raise_signal(signal.SIGINT)
        done.append(1)
        held.check()
        done.append(2)
    assert done == [1]


def test_other_threads_and_other_handlers_are_left_alone() -> None:
    seen: list[object] = []

    def elsewhere() -> None:
        with Uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]

    def handler(*_: object) -> None:
        seen.append("handled")

    signal.signal(signal.SIGINT, handler)
    try:
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert seen[-1] == "handled"
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
