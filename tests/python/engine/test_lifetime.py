"""Turns and the end of an engine: threads, callbacks, close, with, repr."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import specrs
from modelzoo import Pair
from specrs import LLM, EngineBusyError, EngineClosedError, SamplingParams, SpecrsError

PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=2)


def engine(pair: Pair) -> LLM:
    return LLM(pair.target, pair.draft, tree=(2, 2, 4), max_batch=2, page_size=4)


def uses(llm: LLM) -> list[Callable[[], Any]]:
    return [
        lambda: llm.generate([[1]], PARAMS), lambda: llm.stream([[1]]), lambda: llm.add([1]), llm.step,
        lambda: llm.abort(0), llm.audit,
    ]  # fmt: skip


def test_a_second_thread_is_refused_plainly_and_the_first_goes_on(tiny: Pair) -> None:
    llm = engine(tiny)
    [want] = llm.generate([[1, 2]], PARAMS)
    inside, go = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        inside.set()
        assert go.wait(60)

    results: list[Any] = []
    with llm.watching(hold):
        first = threading.Thread(target=lambda: results.append(llm.generate([[1, 2]], PARAMS)))
        first.start()
        assert inside.wait(60)
        for use in [*uses(llm), llm.close]:
            with pytest.raises(EngineBusyError, match="one thread at a time may use an LLM") as e:
                use()
            assert isinstance(e.value, SpecrsError)
        go.set()
        first.join(60)
    assert results[0][0].token_ids == want.token_ids
    [again] = llm.generate([[1, 2]], PARAMS)
    assert again.token_ids == want.token_ids
    assert llm.unfinished == 0 and llm.audit()["sequences"] == 0


def test_a_callback_may_not_use_its_engine(tiny: Pair) -> None:
    llm = engine(tiny)
    with llm.watching(lambda *_: llm.step()), pytest.raises(EngineBusyError):
        llm.generate([[1, 2]], PARAMS)
    assert llm.unfinished == 0 and llm.audit()["sequences"] == 0


def test_a_stream_closed_while_another_thread_works_is_aborted_later(tiny: Pair) -> None:
    llm = engine(tiny)
    stream = llm.stream([[3], [4]], SamplingParams(max_tokens=200))
    next(stream)

    def close_once(*_: Any) -> None:
        stream.close()  # the garbage collector may close it so, in the midst of a step

    with llm.watching(close_once):
        llm.add([1, 2], PARAMS)
        events = llm.step()
        while not any(e.output for e in events):
            events = llm.step()
    while llm.unfinished:
        assert all(e.request_id not in (0, 1) for e in llm.step())
    assert llm.audit()["sequences"] == 0


def test_close_frees_and_is_final(tiny: Pair) -> None:
    llm = engine(tiny)
    stream = llm.stream([[1]], PARAMS)
    next(stream)
    caches, weights = weakref.ref(llm._runner), weakref.ref(llm._runner.executor.target)
    llm.close()
    llm.close()
    assert caches() is None and weights() is None
    checks = [*uses(llm), lambda: llm.encode("x"), lambda: llm.unfinished, lambda: llm.speculative,
              lambda: next(stream), lambda: llm.max_tokens_per_round]  # fmt: skip
    for use in checks:
        with pytest.raises(EngineClosedError, match="this LLM is closed"):
            use()
    stream.close()


def test_a_with_block_closes_after_an_error_too(tiny: Pair) -> None:
    with engine(tiny) as llm:
        assert llm.generate([[1]], PARAMS)[0].token_ids
    with pytest.raises(EngineClosedError):
        llm.step()
    with pytest.raises(ZeroDivisionError), engine(tiny) as other:
        raise ZeroDivisionError
    with pytest.raises(EngineClosedError):
        other.step()


def test_repr_names_what_runs(tiny: Pair) -> None:
    llm = engine(tiny)
    text = repr(llm)
    assert text.startswith("LLM(model='") and str(tiny.target) in text and str(tiny.draft) in text
    assert "device='cpu', tree=(2, 2, 4), pages=" in text and "of 4 tokens)" in text
    assert "draft=None" in repr(LLM(tiny.target)) and "tree=auto" in repr(LLM(tiny.target))
    llm.close()
    assert repr(llm).endswith(", closed)")


def test_what_users_catch_is_exported_at_the_top() -> None:
    from specrs import backends, engine, models

    for name in ("DraftMismatchError", "ModelFileError", "UnsupportedModelError"):
        assert getattr(specrs, name) is getattr(models, name)
    for name in ("LLM", "EngineBusyError", "EngineClosedError", "FinishReason", "RequestOutput", "StreamEvent"):
        assert getattr(specrs, name) is getattr(engine, name)
    assert specrs.UnsupportedCombinationError is backends.UnsupportedCombinationError
    for name in specrs.__all__:
        assert getattr(specrs, name) is not None
