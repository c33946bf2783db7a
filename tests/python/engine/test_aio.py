"""`AsyncLLM`: the tokens of `LLM.generate`, whatever readers do, and nothing of a request behind it."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from aio_world import OPTIONS, clean, params, prompts, run
from modelzoo import VOCAB, Pair
from specrs import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineBusyError,
    EngineClosedError,
    EngineFailedError,
    EngineOverloadedError,
    LedgerError,
    PoolExhaustedError,
    SamplingParams,
    StepFailedError,
    StreamEvent,
)
from specrs.engine.loops import desk
from specrs.engine.loops.worker import News, Worker
from specrs.engine.rounds.stats import RequestTimes


@pytest.fixture(scope="module")
def llm(tiny: Pair) -> Iterator[LLM]:
    with LLM(tiny.target, tiny.draft, **OPTIONS) as engine:
        yield engine


def tokens(events: list[StreamEvent]) -> list[int]:
    return [t for e in events for t in e.token_ids]


# -- load -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_streams_that_come_go_and_dawdle_get_the_tokens_of_generate(llm: LLM, seed: int) -> None:
    count = 200
    many, each = prompts(count, seed), params(count, seed)
    want = [out.token_ids for out in llm.generate(many, each)]
    fates: dict[str, int] = {}

    async def client(engine: AsyncLLM, i: int) -> None:
        rng = random.Random(f"{seed} {i}")
        await asyncio.sleep(rng.random() * 0.5)
        fate = rng.choice(["read", "read", "read", "slow", "leave", "cancel", "abort"])
        fates[fate] = fates.get(fate, 0) + 1
        got: list[StreamEvent] = []

        async def read() -> None:
            async for event in engine.generate(many[i], each[i]):
                got.append(event)
                if fate == "slow":
                    await asyncio.sleep(rng.random() * 0.1)

        if fate in ("read", "slow"):
            await read()
            assert tokens(got) == want[i] and got[-1].output is not None
            assert got[-1].output.token_ids == want[i] and all(e.output is None for e in got[:-1])
            return
        if fate == "abort":
            stream = await engine.submit(many[i], each[i])
            await asyncio.sleep(rng.random() * 0.2)
            stream.abort()
            output = await stream.output()
            assert output.token_ids == want[i][: len(output.token_ids)]
            assert output.finish_reason == "abort" or output.token_ids == want[i]
            return
        if fate == "cancel":
            task = asyncio.ensure_future(read())
            await asyncio.sleep(rng.random() * 0.3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            events = engine.generate(many[i], each[i])
            async for event in events:
                got.append(event)
                if len(got) > rng.randint(0, 3):
                    break
            await events.aclose()
        assert tokens(got) == want[i][: len(tokens(got))]

    async def main() -> None:
        async with AsyncLLM(llm, max_waiting=1000) as engine:
            await asyncio.gather(*(client(engine, i) for i in range(count)))
            clean(await engine.audit())
            stats = engine.stats()
            assert stats.healthy and stats.submitted == stats.submitted_tokens == 0
            assert stats.engine.running == stats.engine.waiting == stats.engine.used_pages == 0

    run(main)
    assert len(fates) == 5 and llm.unfinished == 0
    clean(llm.audit())
    assert llm.generate(many[:2], each[:2])[1].token_ids == want[1]  # handed back, as good as before


def test_a_small_pool_preempts_and_changes_nothing(tiny: Pair) -> None:
    many, each = prompts(40, 7), params(40, 7, most=60)
    with LLM(tiny.target, tiny.draft, **OPTIONS) as plain:
        want = [out.token_ids for out in plain.generate(many, each)]

    async def main() -> None:
        async with AsyncLLM(tiny.target, tiny.draft, **OPTIONS, num_pages=30) as engine:
            outputs = await asyncio.gather(*(engine.complete(p, s) for p, s in zip(many, each, strict=True)))
            assert [o.token_ids for o in outputs] == want
            clean(await engine.audit())

    run(main)


@pytest.mark.parametrize("when", ["queued", "prefill", "round"])
def test_a_cancelled_request_leaves_no_page(llm: LLM, when: str) -> None:
    """Cancelled in the queue, between two chunks of its prompt, and between two rounds."""

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            others = []
            if when == "queued":
                busy = SamplingParams(max_tokens=150, ignore_eos=True)
                others = [asyncio.ensure_future(engine.complete([i], busy)) for i in range(OPTIONS["max_batch"])]
                while engine.stats().engine.running < OPTIONS["max_batch"]:
                    await asyncio.sleep(0)
            stream = await engine.submit([1] * 120, SamplingParams(max_tokens=100, ignore_eos=True))
            if when == "queued":
                assert stream.times.admitted is None and engine.stats().submitted == 1
            elif when == "prefill":
                assert stream.times.first_token is None
            else:
                await stream.__anext__()
                assert stream.times.first_token is not None and stream.times.to_first_token is not None

            async def read() -> None:
                async for _ in stream:
                    pass

            task = asyncio.ensure_future(read())
            await asyncio.sleep(0)
            task.cancel()
            stream.close()
            await asyncio.gather(task, return_exceptions=True)
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            clean(await engine.audit())
            assert engine.stats().submitted == 0 and [e async for e in stream] == []

    run(main)


# -- readers --------------------------------------------------------------------------------------------------------


def test_a_loop_wakes_few_readers_a_turn_and_keeps_the_order() -> None:
    """A step of hundreds of requests does not hold up what else the loop has to do."""
    count, steps = 200, 5

    async def main() -> None:
        loop, hand = asyncio.get_running_loop(), desk._Hand()
        slots = [desk.Slot(loop, RequestTimes(0.0), i) for i in range(count)]
        got: list[list[int]] = [[] for _ in slots]
        woken, most = [0], 0

        async def read(i: int) -> None:
            while (event := await slots[i].next()) is not None:
                got[i] += event.token_ids
                woken[0] += 1

        tasks = [asyncio.ensure_future(read(i)) for i in range(count)]
        await asyncio.sleep(0)
        for step in range(steps):  # each before the one before it is handed over
            news = [News(i, None, StreamEvent(i, [step], []), done=step == steps - 1) for i in range(count)]
            loop.call_soon_threadsafe(hand.take, list(zip(slots, news, strict=True)))
            before = woken[0]
            await asyncio.sleep(0)
            most = max(most, woken[0] - before)
        while not all(t.done() for t in tasks):
            before = woken[0]
            await asyncio.sleep(0)
            most = max(most, woken[0] - before)
        assert got == [list(range(steps))] * count
        assert 0 < most < count / 4 and not hand._news and not hand._handing

    run(main)


def test_a_reader_that_sleeps_finds_one_event(llm: LLM) -> None:
    each = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    [want] = llm.generate([[1, 2]], each)

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            stream = await engine.submit([1, 2], each)
            most = 0
            while engine.stats().engine.running or stream.times.finished is None:
                most = max(most, sum(map(len, stream._slot._events.values())))
                await asyncio.sleep(0)
            events = [e async for e in stream]
            assert len(events) == 1 and tokens(events) == want.token_ids and events[0].output is not None
            assert events[0].text == want.text and 1 <= most <= 7  # log2 of 60 tokens, not one each

    run(main)


def test_each_loop_is_called_once_a_step(llm: LLM) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        called: list[int] = []
        plain = loop.call_soon_threadsafe

        def counting(callback: Any, *args: Any, **options: Any) -> Any:
            if threading.current_thread().name == "specrs-engine":
                called.append(len(args[0]))
            return plain(callback, *args, **options)

        async with AsyncLLM(llm) as engine:
            loop.call_soon_threadsafe = counting  # type: ignore[method-assign]
            each = SamplingParams(max_tokens=40, ignore_eos=True)
            before = engine.stats().steps
            await asyncio.gather(*(engine.complete([i % VOCAB], each) for i in range(6)))
            steps = engine.stats().steps - before
            loop.call_soon_threadsafe = plain  # type: ignore[method-assign]
        assert len(called) <= steps + 2 and max(called) >= 6  # one call for news before the first step

    run(main)


def test_several_loops_read_at_once(llm: LLM) -> None:
    many, each = prompts(40, 5), params(40, 5)
    want = [out.token_ids for out in llm.generate(many, each)]
    engine = AsyncLLM(llm)
    got: dict[int, list[int]] = {}

    def loop(part: range) -> None:
        async def main() -> None:
            outputs = await asyncio.gather(*(engine.complete(many[i], each[i]) for i in part))
            got.update({i: o.token_ids for i, o in zip(part, outputs, strict=True)})

        run(main)

    threads = [threading.Thread(target=loop, args=(range(k, 40, 4),)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [got[i] for i in range(40)] == want

    async def submit() -> Any:
        return await engine.submit([1], SamplingParams(max_tokens=100, ignore_eos=True))

    async def elsewhere() -> None:
        with pytest.raises(ConfigError, match="belongs to another event loop"):
            await stream.__anext__()
        for _ in range(1000):  # its own loop is closed: nobody can read it, so it ends
            if engine.stats().engine.running == 0:
                break
            await asyncio.sleep(0.01)
        clean(await engine.audit())
        await engine.aclose()

    stream = run(submit)
    run(elsewhere)


def test_a_stream_that_is_dropped_is_aborted(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            each = SamplingParams(max_tokens=200, ignore_eos=True)
            stream = await engine.submit([1], each)
            events = engine.generate([2], each)
            await events.__anext__()
            assert stream.times.finished is None and engine.stats().engine.running == 2
            del stream, events
            gc.collect()
            await asyncio.sleep(0)  # the loop closes generators that nobody has
            for _ in range(500):
                if engine.stats().engine.running == 0:
                    break
                await asyncio.sleep(0.01)
            clean(await engine.audit())
            assert engine.stats().engine.running == 0 and not engine._desk._slots

    run(main)


def test_a_generator_that_was_closed_has_aborted_its_request(llm: LLM) -> None:
    """The request has ended by then, not in a later turn of the loop: an audit that is asked for next comes behind the
    abort."""

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            each = SamplingParams(max_tokens=200, ignore_eos=True)
            for _ in range(20):
                events = engine.generate([1], each)
                await events.__anext__()
                await events.aclose()
                clean(await engine.audit())

    run(main)


def test_prompts_of_every_kind_are_counted_and_read(bytes_pair: Pair) -> None:
    text = "hello there"

    async def main() -> None:
        async with AsyncLLM(bytes_pair.target, max_waiting_tokens=5) as engine:
            few = SamplingParams(max_tokens=3, temperature=0)
            ids = await engine.encode(text)
            want = (await engine.complete(text, few)).token_ids
            kinds: list[Any] = [
                np.array(ids), torch.tensor(ids), iter(ids), {"prompt": text}, {"prompt_token_ids": np.array(ids)},
                {"prompt_token_ids": torch.tensor(ids)}, {"prompt": text, "prompt_token_ids": tuple(ids)},
            ]  # fmt: skip
            for prompt in kinds:
                out = await engine.complete(prompt, few)
                assert (out.prompt_token_ids, out.token_ids) == (ids, want), prompt
            for wrong in (np.array(3), torch.tensor(3), {"prompt_token_ids": 3}, {"prompt": 3}, {}, None):
                with pytest.raises(ConfigError, match="prompt"):
                    await engine.submit(wrong)
            # The tokens of a prompt in any form count among those that wait.
            for made in (lambda: iter(ids), lambda: {"prompt": text}, lambda: {"prompt_token_ids": np.array(ids)}):
                many = [asyncio.ensure_future(engine.submit(made(), few)) for _ in range(30)]
                done = await asyncio.gather(*many, return_exceptions=True)
                assert any(isinstance(d, EngineOverloadedError) and d.what == "prompt tokens" for d in done)
                for stream in done:
                    if not isinstance(stream, BaseException):
                        await stream.output()
            assert engine.stats().submitted == engine.stats().submitted_tokens == 0
            clean(await engine.audit())

    run(main)


def test_text_chats_and_times(bytes_pair: Pair) -> None:
    messages = [{"role": "user", "content": "hello"}]
    template = "{{ messages[0].content | upper }}:"
    each = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM(bytes_pair.target, bytes_pair.draft, tree=(2, 2, 4)) as plain:
        [want] = plain.generate(["HELLO:"], each)
        assert plain.chat(messages, each, chat_template=template)[0].token_ids == want.token_ids

    async def main() -> None:
        async with AsyncLLM(bytes_pair.target, bytes_pair.draft, tree=(2, 2, 4)) as engine:
            for events in (engine.generate("HELLO:", each), engine.chat(messages, each, chat_template=template)):
                texts = [(e.text, e.output) async for e in events]
                assert "".join(text for text, _ in texts) == want.text
                output = texts[-1][1]
                assert output is not None and output.prompt == "HELLO:" and output.token_ids == want.token_ids
            prompt = await engine.chat_prompt(messages, chat_template=template)
            assert prompt.token_ids == await engine.encode("HELLO:")
            stream = await engine.submit(prompt, each)
            await stream.output()
            t = stream.times
            assert t.admitted is not None and t.first_token is not None and t.finished is not None
            assert t.submitted <= t.admitted <= t.first_token <= t.finished and (t.queued or 0) >= 0
            with pytest.raises(ConfigError, match="chat template: no"):
                async for _ in engine.chat(messages, chat_template="{{ raise_exception('no') }}"):
                    pass
            clean(await engine.audit())
            assert engine.stats().submitted == 0

    run(main)


# -- too much, and wrong --------------------------------------------------------------------------------------------


def test_more_than_may_wait_is_refused_before_it_starts(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM(llm, max_waiting=10, max_waiting_tokens=100) as engine:
            long = SamplingParams(max_tokens=200, ignore_eos=True)
            running = [await engine.submit([1], long) for _ in range(OPTIONS["max_batch"])]
            while engine.stats().submitted:
                await asyncio.sleep(0)
            waiting = [await engine.submit([1] * 10, long) for _ in range(9)]
            assert engine.stats().submitted == 9 and engine.stats().submitted_tokens == 90
            with pytest.raises(EngineOverloadedError, match=r"101 prompt tokens would wait.*at most 100") as e:
                await engine.submit([1] * 11, long)
            assert (e.value.what, e.value.got, e.value.limit) == ("prompt tokens", 101, 100)
            waiting.append(await engine.submit([1] * 10, long))
            with pytest.raises(EngineOverloadedError, match="11 requests would wait for this engine; at most 10"):
                await engine.submit([1], long)
            before = engine.stats().engine
            assert before.waiting == 10 and before.waiting_tokens == 100 and before.running == OPTIONS["max_batch"]
            waiting[3].close()
            assert engine.stats().submitted == 9  # at once: somebody else may have the place
            waiting.append(await engine.submit([1], long))
            for stream in [*running, *waiting]:
                stream.close()
            clean(await engine.audit())
            stream = await engine.submit([1] * 150, SamplingParams(max_tokens=2))  # alone, it may always wait
            assert len((await stream.output()).token_ids) == 2
            # All at once, while those that run leave no place for them.
            running = [await engine.submit([1], long) for _ in range(OPTIONS["max_batch"])]
            while engine.stats().submitted:
                await asyncio.sleep(0)
            tasks = [asyncio.ensure_future(engine.complete([1], SamplingParams(max_tokens=5))) for _ in range(100)]
            done = await asyncio.gather(*tasks, return_exceptions=True)
            refused = [d for d in done if isinstance(d, EngineOverloadedError)]
            assert len(refused) == 90 and engine.stats().submitted == 0

    run(main)


def test_bad_requests_are_refused_by_name_and_others_go_on(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            good = asyncio.ensure_future(engine.complete([1, 2], SamplingParams(max_tokens=50, seed=1)))
            bad: list[tuple[Any, Any, type[Exception], str]] = [
                ([], None, ConfigError, "prompt: empty"), ([1, 99], None, ConfigError, r"prompt\[1\] = 99"),
                ("text", None, ConfigError, "no tokenizer"), (3, None, ConfigError, "prompt is a int"),
                ([1], "params", ConfigError, "params is a str"), ([1] * 999, None, ConfigError, "leave no room"),
                ({"a": 1}, None, ConfigError, "prompt"),
            ]  # fmt: skip
            for prompt, some, kind, message in bad:
                with pytest.raises(kind, match=message):
                    await engine.submit(prompt, some)
            assert engine.stats().submitted == 0 and len((await good).token_ids) == 50

    run(main)
    for name in ("max_waiting", "max_waiting_tokens", "pool_threads"):
        for value in (0, -1, True, 1.5, "x"):
            with pytest.raises(ConfigError, match=f"{name} = "):
                AsyncLLM(llm, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="draft, max_batch: the LLM that is handed over has its own"):
        AsyncLLM(llm, "x", max_batch=3)
    request = llm.add([1])
    with pytest.raises(ConfigError, match="has 1 requests of its own"):
        AsyncLLM(llm)
    llm.abort(request)


def test_a_request_that_the_pool_never_holds(tiny: Pair) -> None:
    async def main() -> None:
        async with AsyncLLM(tiny.target, **{**OPTIONS, "num_pages": 4}) as engine:
            with pytest.raises(PoolExhaustedError, match="num_pages = 4"):
                await engine.submit([1] * 10, SamplingParams(max_tokens=100))

    run(main)


# -- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["round", "prefill"])
@pytest.mark.parametrize("error", [RuntimeError("injected"), PoolExhaustedError("injected"), MemoryError()])
def test_a_pass_that_fails_takes_its_requests_and_no_others(
    llm: LLM, where: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, each = prompts(60, 11), params(60, 11)
    want = [out.token_ids for out in llm.generate(many, each)]
    runner, failed, count = llm._runner, set(), iter(range(10**6))
    plain = getattr(runner, where)

    def failing(part: Any, **more: Any) -> Any:
        if next(count) % 9 == 4 and not (isinstance(error, PoolExhaustedError) and len(llm._scheduler.running) > 1):
            failed.update(r.request_id for r in (part if where == "round" else [r for r, _ in part]))
            raise error
        return plain(part, **more)

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            monkeypatch.setattr(runner, where, failing)
            streams = [await engine.submit(p, s) for p, s in zip(many, each, strict=True)]
            broken = 0
            for stream, tokens_ in zip(streams, want, strict=True):
                got = []
                try:
                    async for event in stream:
                        got += event.token_ids
                except StepFailedError as e:
                    broken += 1
                    assert e.__cause__ is error and e.output is not None and e.output.finish_reason == "abort"
                    assert got == e.output.token_ids == tokens_[: len(got)] and e.output.request_id in failed
                else:
                    assert got == tokens_
            assert broken == len(failed) and (broken or isinstance(error, PoolExhaustedError))
            assert engine.healthy and broken < 60
            monkeypatch.undo()
            clean(await engine.audit())
            assert (await engine.complete(many[0], each[0])).token_ids == want[0]

    run(main)


@pytest.mark.parametrize("how", ["ledger", "device", "loop"])
def test_what_cannot_go_on_fails_all_and_says_so(tiny: Pair, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = LedgerError("page 3 has two owners") if how == "ledger" else RuntimeError("illegal memory access")

    async def main() -> None:
        engine = AsyncLLM(tiny.target, tiny.draft, **OPTIONS)
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        streams = [await engine.submit([i], long) for i in range(9)]
        await streams[0].__anext__()

        def raises(*_: Any) -> Any:
            raise broken

        monkeypatch.setattr(engine._llm, "step" if how != "loop" else "_stats", raises)
        if how == "device":
            monkeypatch.setattr(Worker, "_fault", lambda _, error: error)
        for stream in streams:
            with pytest.raises(EngineFailedError, match=type(broken).__name__) as e:
                async for _ in stream:
                    pass
            assert e.value.__cause__ is broken
        assert not engine.healthy and not engine.stats().healthy and engine.stats().submitted == 0
        for _ in range(2):
            with pytest.raises(EngineFailedError):
                await engine.submit([1])
        with pytest.raises(EngineFailedError):
            await engine.audit()
        await engine.aclose(timeout=5)
        assert not engine._worker.thread.is_alive()

    run(main)


def test_scores_that_are_no_numbers_end_one_request(tiny: Pair, tmp_path: Any) -> None:
    """The last event has the error, as in `LLM.stream`."""

    async def main() -> None:
        async with AsyncLLM(tiny.target, **OPTIONS) as engine:
            bias = SamplingParams(max_tokens=9, logit_bias=dict.fromkeys(range(VOCAB), float("-inf")))
            bad, good = await asyncio.gather(engine.complete([1], bias), engine.complete([1], SamplingParams(seed=1)))
            assert bad.finish_reason == "error" and bad.error is not None and good.error is None
            clean(await engine.audit())

    run(main)


# -- ends -----------------------------------------------------------------------------------------------------------


def test_closing_drains_or_aborts(llm: LLM) -> None:
    each = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
    [want] = llm.generate([[1]], each)

    async def main(drain: bool, timeout: float) -> list[Any]:
        engine = AsyncLLM(llm)
        streams = [await engine.submit([1], each) for _ in range(20)]
        closing = asyncio.ensure_future(engine.aclose(drain=drain, timeout=timeout))
        await asyncio.sleep(0)
        for call in (engine.submit([1]), engine.audit(), engine.encode("x")):
            with pytest.raises(EngineClosedError):
                await call
        assert not engine.healthy
        outputs = [await s.output() for s in streams]
        await closing
        await engine.aclose()  # again does nothing
        with pytest.raises(EngineClosedError):
            await engine.submit([1])
        return outputs

    assert all(o.token_ids == want.token_ids for o in run(lambda: main(True, 60.0)))
    for drain, timeout in ((False, 60.0), (True, 0.0)):
        outputs = run(lambda d=drain, t=timeout: main(d, t))  # type: ignore[misc]
        assert {str(o.finish_reason) for o in outputs} <= {"abort", "length"}
        assert any(o.finish_reason == "abort" for o in outputs)
        assert all(o.token_ids == want.token_ids[: len(o.token_ids)] for o in outputs)
    clean(llm.audit())


@pytest.mark.parametrize("timeout", ["x", None, -1, math.nan, True])
def test_a_timeout_that_is_none_closes_nothing(llm: LLM, timeout: Any) -> None:
    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            with pytest.raises(ConfigError, match=f"timeout = {timeout!r}: must be a number of seconds"):
                await engine.aclose(timeout=timeout)
            assert engine.healthy and len((await engine.complete([1], SamplingParams(max_tokens=2))).token_ids) == 2

    run(main)


def test_closing_waits_as_long_as_it_takes(llm: LLM) -> None:
    async def main() -> None:
        engine = AsyncLLM(llm)
        stream = await engine.submit([1], SamplingParams(max_tokens=100, ignore_eos=True))
        await engine.aclose(timeout=math.inf)
        assert len((await stream.output()).token_ids) == 100 and not engine._worker.thread.is_alive()

    run(main)


FORKED = """
import asyncio, os, sys
from specrs import AsyncLLM, EngineFailedError, SamplingParams
few = SamplingParams(max_tokens=2)
async def refused(engine):
    for call in (engine.complete([1], few), engine.audit()):
        try:
            await asyncio.wait_for(call, 20)
        except EngineFailedError as e:
            print("refused", "is a fork of" in str(e), engine.healthy, flush=True)
    await asyncio.wait_for(engine.aclose(), 20)
async def main(options):
    engine = AsyncLLM(sys.argv[1], **options)
    await engine.complete([1], few)
    if (child := os.fork()) == 0:
        asyncio._set_running_loop(None)
        asyncio.set_event_loop(None)
        asyncio.new_event_loop().run_until_complete(refused(engine))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(len((await engine.complete([1], few)).token_ids), flush=True)
    await engine.aclose()
asyncio.run(main({"process": sys.argv[2] == "process"}))
"""


@pytest.mark.parametrize("how", ["thread", "process"])
def test_a_fork_is_refused_and_waits_for_nobody(tiny: Pair, how: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    argv = [sys.executable, "-c", FORKED, str(tiny.target), how]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "refused True False\n" * 2 + "2\n", done.stderr


def test_an_error_in_the_block_aborts(tiny: Pair) -> None:
    async def main() -> None:
        with pytest.raises(KeyError):
            async with AsyncLLM(tiny.target, **OPTIONS) as engine:
                stream = await engine.submit([1], SamplingParams(max_tokens=200, ignore_eos=True))
                raise KeyError
        assert (await stream.output()).finish_reason == "abort"
        with pytest.raises(EngineClosedError):
            _ = engine.llm.unfinished  # an LLM of its own is closed

    run(main)


def test_an_engine_that_nobody_has_ends(tiny: Pair) -> None:
    engine = AsyncLLM(tiny.target, **OPTIONS)
    thread = engine._worker.thread
    assert thread.is_alive()
    del engine
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_a_process_ends_with_an_engine_at_work(tiny: Pair) -> None:
    code = (
        "import asyncio, sys\nfrom specrs import AsyncLLM, SamplingParams\n"
        "async def main():\n    global engine, stream\n    engine = AsyncLLM(sys.argv[1])\n"
        "    stream = await engine.submit([1], SamplingParams(max_tokens=200, ignore_eos=True))\n"
        "    print('submitted')\n"
        "asyncio.run(main())\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    argv = [sys.executable, "-c", code, str(tiny.target)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout == "submitted\n" and done.stderr == ""


def test_a_lent_engine_is_nobody_elses(tiny: Pair) -> None:
    """Two that step one engine take each other's events, and wait for ever."""

    async def main() -> None:
        with LLM(tiny.target, **OPTIONS) as llm:
            async with AsyncLLM(llm) as engine:
                stream = await engine.submit([1], SamplingParams(max_tokens=100, ignore_eos=True))
                with pytest.raises(ConfigError, match="belongs to another AsyncLLM, until that one's aclose"):
                    AsyncLLM(llm)
                for call in (llm.step, lambda: llm.add([1]), lambda: llm.abort(0)):
                    with pytest.raises(EngineBusyError):
                        call()
                assert llm.lent and len((await stream.output()).token_ids) == 100
            assert not llm.lent
            async with AsyncLLM(llm) as engine:
                await engine.complete([1], SamplingParams(max_tokens=2))
            assert llm.add([1]) and llm.step()

    run(main)


def test_somebody_else_at_the_engine_is_waited_for(llm: LLM) -> None:
    """An owner who still has the LLM may ask it something."""
    each = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
    [want] = llm.generate([[3]], each)

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            task = asyncio.ensure_future(engine.complete([3], each))
            while not task.done():
                await asyncio.sleep(0)
                if llm._lock.acquire(blocking=False):
                    time.sleep(0.002)
                    llm._lock.release()
            assert (await task).token_ids == want.token_ids

    run(main)


def test_several_outputs_of_a_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    each = SamplingParams(max_tokens=30, n=4, seed=5, temperature=1.2, ignore_eos=True)
    [want] = llm.generate([[1, 2, 3]], each)

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            first, second = await asyncio.gather(engine.complete([1, 2, 3], each), engine.complete([1, 2, 3], each))
            for out in (first, second):
                assert [o.token_ids for o in out.outputs] == [o.token_ids for o in want.outputs]
            got: dict[int, list[int]] = {}
            async for event in engine.generate([1, 2, 3], each):
                got.setdefault(event.index, []).extend(event.token_ids)
                await asyncio.sleep(0.01)
            assert [got[i] for i in range(4)] == [o.token_ids for o in want.outputs]
            for leave in (0, 1, 3):
                stream = await engine.submit([1, 2, 3], SamplingParams(max_tokens=100, n=4, ignore_eos=True))
                for _ in range(leave):
                    await stream.__anext__()
                stream.close()
            clean(await engine.audit())
            stream = await engine.submit([1, 2, 3], SamplingParams(max_tokens=200, n=4, ignore_eos=True))
            stream.abort()
            assert [o.finish_reason for o in (await stream.output()).outputs] == ["abort"] * 4
            plain = llm._runner.round

            def fails(*_: Any, **__: Any) -> Any:
                raise RuntimeError("injected")

            stream = await engine.submit([1, 2, 3], each)
            await stream.__anext__()
            monkeypatch.setattr(llm._runner, "round", fails)
            with pytest.raises(StepFailedError):
                await stream.output()
            monkeypatch.setattr(llm._runner, "round", plain)
            clean(await engine.audit())
            assert (await engine.complete([1, 2, 3], each)).outputs[3].token_ids == want.outputs[3].token_ids

    run(main)
    assert llm.unfinished == 0


@pytest.mark.parametrize("process", [False, True])
def test_a_prediction_is_made_tokens_in_the_pool(bytes_pair: Pair, process: bool) -> None:
    async def main() -> None:
        async with AsyncLLM(bytes_pair.target, process=process, **OPTIONS) as engine:
            asked = SamplingParams(max_tokens=8, temperature=0)
            told = SamplingParams(max_tokens=8, temperature=0, prediction="abcabc")
            out = await engine.complete("abc", told)
            assert out.params.prediction == tuple(await engine.encode("abcabc"))
            assert out.token_ids == (await engine.complete("abc", asked)).token_ids
            with pytest.raises(ConfigError, match=r"prompt: SamplingParams\.prediction: not encodable"):
                await engine.submit("abc", SamplingParams(prediction="\ud800"))
            clean(await engine.audit())

    run(main)
