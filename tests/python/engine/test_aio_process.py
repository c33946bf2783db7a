"""`AsyncLLM(process=True)`: it gives what an engine in a thread gives, and its process ends with its owner."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aio_world import OPTIONS, clean, params, prompts, run
from modelzoo import Pair
from specrs import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineClosedError,
    EngineFailedError,
    EngineOverloadedError,
    EngineProcessError,
    LedgerError,
    NonFiniteError,
    SamplingParams,
    StepFailedError,
    StreamEvent,
)
from specrs.drafters import CorpusDrafter, SuffixDrafter
from specrs.engine.loops import aio, wire
from specrs.engine.loops.worker import News
from specrs.engine.rounds.stats import RequestTimes
from specrs.grammar import GrammarError, StructuredOutputs
from specrs.models import ModelFileError

COMMON = {"max_batch": 8, "max_context_len": 512}


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(**COMMON) as engine:
        yield engine


def gone(pid: int, limit: float = 40.0) -> bool:
    """Return whether a process ends in time."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def process(engine: AsyncLLM) -> int:
    pid = engine.llm.pid  # type: ignore[union-attr]
    assert isinstance(pid, int) and pid != os.getpid()
    return pid


def apart(work: Callable[[AsyncLLM], Coroutine[Any, Any, None]], *model: Any, **options: Any) -> int:
    """Run with an engine in a process, which must be gone behind it; its number."""

    async def main() -> int:
        async with AsyncLLM(*model, process=True, **{**COMMON, **options}) as engine:
            await work(engine)
            return process(engine)

    found: int = run(main)
    assert gone(found, 1.0)
    return found


# -- the same -------------------------------------------------------------------------------------------------------


ASKED = [
    # Each with a seed: one that none asked for is another each time.
    SamplingParams(max_tokens=24, temperature=0, seed=1),
    SamplingParams(max_tokens=24, temperature=1.1, seed=5, top_p=0.9),
    SamplingParams(max_tokens=16, temperature=0.8, seed=6, n=3),
    SamplingParams(max_tokens=12, temperature=0.8, seed=7, logprobs=3, prompt_logprobs=2),
    SamplingParams(max_tokens=40, temperature=0, seed=1, stop=["\n\n"], frequency_penalty=0.5, logit_bias={5: 2.0}),
    SamplingParams(max_tokens=16, temperature=0, seed=2, trace=True),
    SamplingParams(max_tokens=30, temperature=1.0, seed=8, structured_outputs=StructuredOutputs(regex="[a-f]{3,9}=1+")),
    SamplingParams(max_tokens=24, temperature=0, seed=3, prediction="import os\nimport sys\n", speculative=False),
]  # fmt: skip


def test_outputs_and_events_are_those_of_generate(plain: LLM) -> None:
    texts = [f"def f{i}(x):" for i in range(len(ASKED))]
    want = plain.generate(texts, ASKED)

    async def work(engine: AsyncLLM) -> None:
        async def one(text: str, asked: SamplingParams) -> tuple[list[StreamEvent], Any, RequestTimes]:
            stream = await engine.submit(text, asked)
            events = [event async for event in stream]
            return events, await engine.complete(text, asked), stream.times

        for (events, whole, times), w in zip(await asyncio.gather(*map(one, texts, ASKED)), want, strict=True):
            for i, (got, due) in enumerate(zip(whole.outputs, w.outputs, strict=True)):
                mine = [e for e in events if e.index == i]
                assert got.token_ids == due.token_ids == [t for e in mine for t in e.token_ids]
                assert got.text == due.text == "".join(e.text for e in mine)
                assert (got.finish_reason, got.stop_reason, got.usage.completion_tokens) == (
                    due.finish_reason, due.stop_reason, due.usage.completion_tokens)  # fmt: skip
                assert got.logprobs == due.logprobs and got.prompt_logprobs == due.prompt_logprobs
                assert got.prompt_token_ids == due.prompt_token_ids and got.params == due.params
                assert all(e.output is None for e in mine[:-1]) and mine[-1].output is not None
                assert bool(sum(len(e.rounds) for e in mine)) == bool(due.params.trace)
            assert None not in (times.admitted, times.first_token, times.finished)
            assert times.submitted <= times.admitted <= times.first_token <= times.finished  # type: ignore[operator]
        clean(await engine.audit())
        stats = engine.stats()
        assert stats.healthy and stats.steps and stats.last_step > 0 and stats.stepping == stats.submitted == 0
        assert stats.engine.generated > 100 and not stats.engine.running

    apart(work)


def test_what_never_changes_is_there(plain: LLM) -> None:
    async def work(engine: AsyncLLM) -> None:
        for name in ("vocab_size", "default_sampling", "stated_sampling", "numerics", "device", "budget", "speculative",
                     "max_tokens_per_round", "closed"):  # fmt: skip
            assert getattr(engine.llm, name) == getattr(plain, name), name
        here, there = engine.llm.config, plain.config
        assert here.attention_backend == "native" and here == replace(there, attention_backend="native")
        assert await engine.encode("import os") == plain.encode("import os")
        assert engine.llm.encode("x") == plain.encode("x") and str(process(engine)) in repr(engine)
        chat = [{"role": "user", "content": "x"}]
        with pytest.raises(ConfigError) as due:
            plain.chat_prompt(chat)
        with pytest.raises(type(due.value)) as got:
            await engine.chat_prompt(chat)
        assert str(got.value) == str(due.value)

    apart(work)


def test_streams_that_come_and_go(tiny: Pair) -> None:
    count = 120
    many, each = prompts(count, 11), params(count, 11)
    with LLM(tiny.target, tiny.draft, **OPTIONS) as llm:
        want = [out.token_ids for out in llm.generate(many, each)]

    async def work(engine: AsyncLLM) -> None:
        steps: list[Any] = []

        async def client(i: int) -> None:
            await asyncio.sleep(0.01 * (i % 17))
            if i % 3:
                assert (await engine.complete(many[i], each[i])).token_ids == want[i]
                return
            stream = await engine.submit(many[i], each[i])
            await asyncio.sleep(0.01 * (i % 5))
            if i % 2:
                stream.close()
                return
            stream.abort()
            output = await stream.output()
            assert output.token_ids == want[i][: len(output.token_ids)]

        with engine.watching_steps(steps.append):
            await asyncio.gather(*map(client, range(count)))
            clean(await engine.audit())
        stats = engine.stats()
        assert stats.engine.used_pages == 0 and not engine._desk._slots
        assert sum(s.tokens for s in steps) == stats.engine.prefilled + stats.engine.generated
        assert sorted(s.began for s in steps) == [s.began for s in steps] and all(s.seconds > 0 for s in steps)

    apart(work, tiny.target, tiny.draft, **OPTIONS, max_waiting=500, max_context_len=None)


# -- refusals -------------------------------------------------------------------------------------------------------


def test_refusals_are_the_same_errors(plain: LLM) -> None:
    bad: list[tuple[Any, Any]] = [
        ([], None), ([99999999], None), ([1] * 600, None), ({"text": "x"}, None), ([1, "a"], None), (object, None),
        ("x", "params"), ("x", SamplingParams(logit_bias={10**9: 1.0})), ("\ud800", None),
        ("x", SamplingParams(structured_outputs=StructuredOutputs(regex="("))),
        ("x", SamplingParams(structured_outputs=StructuredOutputs(json={"type": "wrong"}))),
    ]  # fmt: skip

    few = SamplingParams(max_tokens=2)

    async def work(engine: AsyncLLM) -> None:
        for prompt, asked in bad:
            with pytest.raises(ConfigError) as here:
                plain.add(prompt, asked)
            with pytest.raises(ConfigError) as there:
                await engine.submit(prompt, asked)
            if prompt is not object:
                # In a thread the grammar is refused before the request is looked at, which puts no place before it.
                assert str(here.value).endswith(str(there.value)), (str(here.value), str(there.value))
                assert type(there.value) is type(here.value)
        with pytest.raises(ConfigError, match="cannot go to the engine's process"):
            await engine.submit([lambda: None])  # type: ignore[list-item]
        assert (await engine.complete(iter([1, 2]), few)).prompt_token_ids == [1, 2]  # type: ignore[arg-type]
        assert (await engine.complete("x", few)).usage.completion_tokens
        clean(await engine.audit())

    apart(work)


def test_too_much_is_refused_and_an_abort_reaches_a_grammar_that_is_compiled() -> None:
    slow = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputs(regex="(a{1,40}b{1,40}){1,40}"))

    async def work(engine: AsyncLLM) -> None:
        tasks = [asyncio.ensure_future(engine.submit("x", slow)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(EngineOverloadedError):
            await engine.submit("x")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not engine._desk._slots and engine.stats().submitted == 0
        assert (await engine.complete("x", SamplingParams(max_tokens=3))).finish_reason == "length"
        clean(await engine.audit())

    apart(work, max_waiting=3)


@pytest.mark.parametrize("options,kind,said", [
    ({"model": "/nowhere/at/all"}, ModelFileError, "nowhere"), ({"max_batch": 0}, ConfigError, "max_batch"),
    ({"colour": 1}, ConfigError, "colour"), ({"process": 1}, ConfigError, "process = 1"),
])  # fmt: skip
def test_what_cannot_start_says_why(options: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        AsyncLLM(**{"process": True, **options})


def test_models_in_memory_stay_here(plain: LLM) -> None:
    assert not plain.unfinished
    with pytest.raises(ConfigError, match="this process's memory"):
        AsyncLLM(plain, process=True)
    with pytest.raises(ConfigError, match="options: cannot go to the engine's process"):
        AsyncLLM(process=True, drafters=(one for one in ["suffix"]))


def test_one_that_dies_while_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(tmp_path, monkeypatch, "import specrs.engine.llm as m\ndef die(*a, **b): os._exit(7)\nm.load_target = die\n")
    with pytest.raises(EngineProcessError, match="with status 7") as caught:
        AsyncLLM(process=True)
    assert caught.value.status == 7


# -- faults ---------------------------------------------------------------------------------------------------------


def inject(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have processes that start from now on run code first."""
    (folder / "sitecustomize.py").write_text(f"import os, sys\nsys.path[:0] = {sys.path!r}\n{code}")
    monkeypatch.setenv("PYTHONPATH", str(folder))


BROKEN = """
from specrs import LedgerError
from specrs.engine.rounds.scheduler import Scheduler
step = Scheduler.step
def broken(self):
    seeds = {r.params.seed for r in self.running + self.waiting}
    if 666 in seeds:
        raise LedgerError("pages do not add up")
    if 777 in seeds:
        raise RuntimeError("injected")
    return step(self)
Scheduler.step = broken
"""


def test_a_pass_that_fails_and_an_engine_that_cannot_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(tmp_path, monkeypatch, BROKEN)

    async def work(engine: AsyncLLM) -> None:
        with pytest.raises(StepFailedError, match="RuntimeError: injected") as failed:
            await engine.complete("x", SamplingParams(max_tokens=3, seed=777))
        assert isinstance(failed.value.__cause__, RuntimeError) and engine.healthy
        await engine.complete("x", SamplingParams(max_tokens=3))
        with pytest.raises(EngineFailedError, match="do not add up") as dead:
            await engine.complete("x", SamplingParams(max_tokens=3, seed=666))
        assert isinstance(dead.value.__cause__, LedgerError)
        assert not engine.healthy and not engine.stats().healthy
        with pytest.raises(EngineFailedError, match="do not add up"):
            await engine.submit("x")

    apart(work)


def test_a_process_that_is_killed_fails_all_and_says_so() -> None:
    async def main() -> int:
        engine = AsyncLLM(process=True, **COMMON)
        long = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
        streams = [await engine.submit("x", long) for _ in range(4)]
        await anext(streams[0])
        os.kill(process(engine), signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineFailedError, match="by signal 9") as caught:
                async for _ in stream:
                    pass
            assert isinstance(caught.value.__cause__, EngineProcessError) and caught.value.__cause__.status == -9
        assert not engine.healthy and not engine.stats().healthy and engine.stats().stepping == 0
        assert engine.llm.closed and "gone" in repr(engine)
        for asked in (engine.submit("x"), engine.audit()):
            with pytest.raises(EngineFailedError):
                await asked
        await asyncio.wait_for(engine.aclose(), 5)
        with pytest.raises(EngineClosedError):
            await engine.submit("x")
        return process(engine)

    assert gone(run(main), 1.0)


def test_signals_of_a_terminal_are_not_the_engines() -> None:
    async def work(engine: AsyncLLM) -> None:
        stream = await engine.submit("x", SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
        await anext(stream)
        for one in (signal.SIGINT, signal.SIGTERM):
            os.kill(process(engine), one)
        assert (await stream.output()).usage.completion_tokens == 100

    apart(work)


OWNER = """
import asyncio, os, sys
from specrs import AsyncLLM, SamplingParams
async def main():
    engine = AsyncLLM(process=True, max_batch=2)
    stream = await engine.submit("x", SamplingParams(max_tokens=2000, ignore_eos=True))
    await anext(stream)
    print(engine.llm.pid, flush=True)
    if sys.argv[1] == "waits":
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["waits", "ends"])
def test_it_ends_with_its_owner_however_that_ends(how: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, how], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    if how == "waits":
        owner.kill()
    owner.communicate(timeout=60)
    assert owner.returncode == (-9 if how == "waits" else 0)
    assert gone(pid)


@pytest.mark.parametrize("drain", [True, False])
def test_closing_drains_or_aborts(drain: bool) -> None:
    async def main() -> int:
        engine = AsyncLLM(process=True, **COMMON)
        stream = await engine.submit("x", SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
        await engine.aclose(drain=drain)
        output = await stream.output()
        assert (output.finish_reason, len(output.token_ids) == 60) == (("length", True) if drain else ("abort", False))
        assert not engine.healthy
        return process(engine)

    assert gone(run(main), 1.0)


def test_threads_are_those_of_the_owner() -> None:
    code = (
        "import specrs, torch\n"
        "from specrs import AsyncLLM\n"
        "specrs.set_num_threads(3); torch.set_num_threads(2)\n"
        "e = AsyncLLM(process=True, max_batch=1)\n"
        "import pathlib; print(len(list(pathlib.Path(f'/proc/{e.llm.pid}/task').iterdir())))\n"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert told.returncode == 0, told.stderr
    one = code.replace("set_num_threads(3)", "set_num_threads(1)").replace("set_num_threads(2)", "set_num_threads(1)")
    fewer = subprocess.run([sys.executable, "-c", one], capture_output=True, text=True, env=env, timeout=120)
    assert int(told.stdout) > int(fewer.stdout)


# -- what travels ---------------------------------------------------------------------------------------------------


def test_news_come_back_as_they_went() -> None:
    times = RequestTimes(1.0, 2.0, 3.0, 4.0)
    bare = StreamEvent(7, [1, 2], [("a", False), ("b", True)], index=1)
    news = [
        News(1, times), News(2, event=bare), News(2, times, bare), News(3, event=bare, done=True),
        News(4, event=StreamEvent(7, [1], [], logprobs=[{}])), News(5, answer={"a": 1}),
        News(6, event=StreamEvent(1, [], [])),
    ]  # fmt: skip
    there = wire.packed(news)
    assert [isinstance(one, tuple) for one in there] == [False, True, False, False, False, False, True]
    assert wire.unpacked(pickle.loads(wire.dumps(there))) == news


class Odd(ConfigError):
    """An error whose constructor takes arguments that its text does not tell."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def test_errors_travel_or_what_they_are_a_kind_of_does(tmp_path: Path) -> None:
    finite = NonFiniteError("bad")
    finite.position = 3  # type: ignore[attr-defined]
    with pytest.raises(ModelFileError) as file:
        LLM(tmp_path)
    odd_cause = StepFailedError(Odd(3, 4), None)
    for error in (
        ConfigError("x"), finite, EngineFailedError(LedgerError("y")), StepFailedError(RuntimeError("z"), None),
        EngineProcessError(-9), GrammarError("g"), MemoryError(), ValueError("v"), file.value,
        EngineOverloadedError("requests", 2, 1), EngineClosedError(), KeyError("k"), odd_cause,
    ):  # fmt: skip
        back = pickle.loads(wire.dumps(wire.Told.of(error))).error()
        assert (type(back), str(back), back.__dict__) == (type(error), str(error), error.__dict__)
        if error is not odd_cause:
            assert repr(back.__cause__) == repr(error.__cause__)
    assert (type(back.__cause__), str(back.__cause__)) == (ConfigError, "3 and 4")
    odd = wire.Told.of(Odd(1, 2)).error()
    assert type(odd) is ConfigError and str(odd) == "1 and 2"
    local = wire.Told.of(type("Here", (Exception,), {})("x")).error()
    assert type(local) is RuntimeError and "Here: x" in str(local)
    locked = ConfigError("locked")
    locked.lock = threading.Lock()  # type: ignore[attr-defined]
    assert str(wire.Told.of(locked).error()) == "locked"


# -- what a review found ---------------------------------------------------------------------------------------------


class Word(str):
    """A text of the test's own type, which the engine's process does not have."""


class Ids(list[int]):
    """Tokens of the test's own type."""


class Unreadable:
    """Pickles, and cannot be read again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (str, "no such thing")


def test_one_request_that_cannot_be_read_is_one_request() -> None:
    async def work(engine: AsyncLLM) -> None:
        asked = SamplingParams(max_tokens=3, temperature=0)
        want = (await engine.complete("import os", asked)).token_ids
        ids = await engine.encode("import os")
        for prompt in (Word("import os"), {"prompt": Word("import os")}, Ids(ids), {"prompt_token_ids": Ids(ids)}):
            assert (await engine.complete(prompt, asked)).token_ids == want
        with pytest.raises(ConfigError, match="cannot be read in the engine's process"):
            await engine.complete([Unreadable()])  # type: ignore[list-item]
        assert (await engine.complete("import os", asked)).token_ids == want

    apart(work)


WIDE = {"type": "object", "properties": {f"p{i}": {"enum": [f"{i}{j}" for j in range(9)]} for i in range(150)}}


def test_who_leaves_while_its_grammar_is_compiled_leaves_nothing() -> None:
    async def work(engine: AsyncLLM) -> None:
        for i in range(6):
            form = StructuredOutputs(json={**WIDE, "title": str(i)})
            task = asyncio.ensure_future(engine.submit("x", SamplingParams(max_tokens=4, structured_outputs=form)))
            await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for _ in range(100):
            if not engine.stats().stepping:
                break
            await asyncio.sleep(0.05)
        assert engine.stats().stepping == 0 and not engine._worker._owed  # type: ignore[union-attr]
        assert (await engine.complete("x", SamplingParams(max_tokens=3))).usage.completion_tokens == 3

    apart(work)


def test_a_process_that_hangs_is_seen_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "_GRACE", 0.5)

    async def main() -> int:
        engine = AsyncLLM(process=True, **COMMON)
        os.kill(process(engine), signal.SIGSTOP)
        asking = asyncio.ensure_future(engine.complete("x", SamplingParams(max_tokens=3)))
        await asyncio.sleep(0.5)
        assert 0.2 < engine.stats().stepping < 5 and engine.healthy
        await engine.aclose(drain=False)
        with pytest.raises(EngineFailedError):
            await asking
        return process(engine)

    assert gone(run(main), 1.0)


def test_a_watcher_that_raises_ends_the_engine_and_nobody_waits() -> None:
    async def main() -> int:
        engine = AsyncLLM(process=True, **COMMON)

        def bad(step: Any) -> None:
            raise RuntimeError("of a watcher")

        with engine.watching_steps(bad), pytest.raises(EngineFailedError, match="of a watcher"):
            await engine.complete("x", SamplingParams(max_tokens=30))
        assert not engine.healthy
        await engine.aclose()
        return process(engine)

    assert gone(run(main), 1.0)


def test_it_takes_no_module_of_the_folder_that_it_stands_in(tmp_path: Path) -> None:
    for name in ("json", "signal", "pickle"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the folder')\n")
    code = (
        "import sys; sys.path[:] = eval(sys.argv[1])\n"
        "from specrs import AsyncLLM; print(AsyncLLM(process=True).healthy)"
    )
    argv = [sys.executable, "-I", "-c", code, repr(sys.path)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.stdout == "True\n", done.stderr


def test_paths_that_are_no_text_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere")])

    async def work(engine: AsyncLLM) -> None:
        assert engine.healthy

    apart(work)


def test_drafters_travel(tmp_path: Path) -> None:
    with LLM(**COMMON) as llm:
        text = llm.encode("def quicksort(items):\n    return sorted(items)\n" * 4)
        CorpusDrafter.build(tmp_path / "corpus", [text], llm.vocab_size)
        want = llm.generate([text[:9]], SamplingParams(max_tokens=12, temperature=0))[0].token_ids

    async def work(engine: AsyncLLM) -> None:
        assert (await engine.complete(text[:9], SamplingParams(max_tokens=12, temperature=0))).token_ids == want

    apart(work, drafters=["suffix", CorpusDrafter(tmp_path / "corpus")])
    with pytest.raises(ConfigError, match="engine_process = False"):
        AsyncLLM(process=True, drafters=[SuffixDrafter(), lambda: None])


def test_a_fork_does_not_keep_it_alive() -> None:
    code = (
        "import os, signal, sys, time\n"
        "from specrs import AsyncLLM\n"
        "e = AsyncLLM(process=True, max_batch=1)\n"
        "if os.fork() == 0:\n"
        "    os.close(1)\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "print(e.llm.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120)
    assert gone(int(done.stdout), 10.0)
