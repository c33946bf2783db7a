"""A bad index in a running engine on a GPU: an error at the next boundary, and no request is worse for it.

The index is put into the operands of one launch, into what one round is given, or into the page table on the device, as
damaged memory would have it. The kernel leaves the access out, the step raises, and the next step runs the pass again:
all requests end with the tokens that an engine without the fault gives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from modelzoo import Pair, write_eagle3, write_target
from specrs import LLM, OutOfBoundsError, SamplingParams, SpecrsError, device
from specrs import _specrs as core
from specrs.engine.devices.graphs import Bucket, Graphs

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3], [3]]
PARAMS = [SamplingParams(max_tokens=n, temperature=0.8, seed=n) for n in (24, 9, 17)]
OPTIONS: dict[str, Any] = {"device": "cuda", "max_batch": 3, "max_context_len": 128}
VOCAB = 8

pytestmark = pytest.mark.usefixtures("no_fault_is_left")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("gpu")
    sizes = {"vocab_size": VOCAB, "eos_token_id": None, "bos_token_id": None, "max_position_embeddings": 256}
    target = write_target(root / "target", dtype=torch.bfloat16, head_dim=64, **sizes)
    return Pair(target, write_eagle3(root / "draft", target, draft_vocab_size=VOCAB, dtype=torch.bfloat16, head_dim=64))


class Engines:
    """Engines of a kind, made when they are asked for: what one test leaves behind is what the next one finds."""

    def __init__(self, pair: Pair, kind: str) -> None:
        self._pair, self._kind = pair, kind
        self._kept: dict[str, LLM] = {}

    def make(self, graphs: str) -> LLM:
        options = OPTIONS | {"graphs": graphs, "page_size": 1 if self._kind.endswith("token") else 4}
        if self._kind == "plain":
            return LLM(self._pair.target, speculative=False, **options)
        return LLM(self._pair.target, self._pair.draft, tree=(4, 3, 9), **options)

    def __call__(self, graphs: str = "round") -> LLM:
        if graphs not in self._kept:
            self._kept[graphs] = self.make(graphs)
        return self._kept[graphs]

    def close(self) -> None:
        for llm in self._kept.values():
            llm.audit()
            llm.close()


@pytest.fixture(scope="module", params=["plain", "speculative", "speculative, pages of a token"])
def engine(request: pytest.FixtureRequest, pair: Pair) -> Iterator[Engines]:
    engines = Engines(pair, request.param)
    yield engines
    engines.close()


@pytest.fixture(scope="module")
def want(engine: Engines) -> list[list[int]]:
    return [o.token_ids for o in engine().generate(PROMPTS, PARAMS)]


def changed(tensor: torch.Tensor, at: int, value: int) -> torch.Tensor:
    """Return a copy with one element changed."""
    copy = tensor.clone()
    copy.view(-1)[at] = value
    return copy


def at(number: int, index: int, value: int) -> Callable[..., Any]:
    """Change an element of an operand by its place."""

    def change(args: list[Any], _: dict[str, Any]) -> None:
        args[number] = changed(args[number], index, value)

    return change


def named(name: str, index: int, value: int) -> Callable[..., Any]:
    """Change an element of an operand by its name."""

    def change(_: list[Any], kwargs: dict[str, Any]) -> None:
        kwargs[name] = changed(kwargs[name], index, value)

    return change


# launch, what is changed in its operands; kernel, buffer, index of the record
PLANTS = [
    pytest.param("_device_embed", at(1, 0, 1000), "embed", "embedding table", 1000, id="a token"),
    pytest.param("_device_rope_kv", at(9, 0, 10**6), "rope_kv", "cache (slot)", 10**6, id="a slot"),
    pytest.param("_device_rope_kv", at(8, 0, 5000), "rope_kv", "rope table", 5000, id="a position"),
    pytest.param("_device_attention", named("table", 0, 10**6), "attention", "cache (page)", 10**6, id="a page"),
    pytest.param("_device_attention", named("lens", 0, -7), "attention", "page table row (tokens)", -7, id="a length"),
]


def counts(llm: LLM) -> dict[str, int]:
    """Return the pool's counts, without how often it was asked."""
    return {name: n for name, n in llm.audit().items() if name != "events"}


def steps(llm: LLM) -> tuple[list[list[int]], list[SpecrsError]]:
    """Run all requests to their ends, through any errors; return tokens, and the errors."""
    ids = [llm.add(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
    done: dict[int, list[int]] = {}
    errors: list[SpecrsError] = []
    for _ in range(200):
        try:
            events = llm.step()
        except SpecrsError as e:
            errors.append(e)
            llm.audit()
            continue
        for event in events:
            if event.output is not None:
                assert event.output.error is None
                done[event.request_id] = event.output.token_ids
        if len(done) == len(ids):
            return [done[i] for i in ids], errors
    raise AssertionError("the requests do not end")


@pytest.mark.parametrize(("launch", "change", "kernel", "buffer", "index"), PLANTS)
@pytest.mark.parametrize("nth", [0, 3])
def test_a_bad_index_is_raised_and_every_request_goes_on(
    engine: Engines,
    want: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    launch: str,
    change: Callable[..., Any],
    kernel: str,
    buffer: str,
    index: int,
    nth: int,
) -> None:
    original, calls = getattr(core, launch), 0

    def planted(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        own = list(args)
        if calls == nth:
            change(own, kwargs)
        calls += 1
        original(*own, **kwargs)

    llm = engine("off")  # a graph's launches are none of Python's
    monkeypatch.setattr(core, launch, planted)
    tokens, errors = steps(llm)
    monkeypatch.undo()
    assert calls > nth
    [error] = errors
    assert isinstance(error, OutOfBoundsError)
    assert (error.kernel, error.buffer, error.index) == (kernel, buffer, index)
    assert tokens == want
    llm.audit()
    # The engine is as good as new.
    assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == want


# operands of a round, and the bad value that is put there; kernel and buffer of the record
GIVEN = [
    pytest.param("roots", 1000, "embed", "embedding table", id="a token"),
    pytest.param("lens", 10**6, "plan", "committed lengths", id="a length"),
    pytest.param("rows", 99, "plan", "rows of the page table", id="a row of the table"),
]


@pytest.mark.parametrize("graphs", ["round", "loop", "off"])
@pytest.mark.parametrize(("name", "value", "kernel", "buffer"), GIVEN)
def test_what_a_round_is_given(
    engine: Engines,
    want: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: int,
    kernel: str,
    buffer: str,
    graphs: str,
) -> None:
    """At rounds that begin a flight; the one behind them is in flight already when the host learns of it."""
    original, calls = Bucket.launch, 0

    def planted(self: Bucket, *args: Any) -> int:
        nonlocal calls
        if calls in (0, 2, 3):
            self.given.inputs.host[name][0] = value
        calls += 1
        return original(self, *args)

    llm = engine(graphs)
    monkeypatch.setattr(Bucket, "launch", planted)
    tokens, errors = steps(llm)
    assert len(errors) == 3
    for error in errors:
        assert isinstance(error, OutOfBoundsError)
        assert (error.kernel, error.buffer, error.index) == (kernel, buffer, value)
    assert tokens == want


@pytest.mark.parametrize("bad", [10**6, -1])
@pytest.mark.parametrize("graphs", ["off", "round", "loop"])
def test_a_damaged_page_table_is_written_anew(engine: Engines, want: list[list[int]], bad: int, graphs: str) -> None:
    """The round that reads the row fails; what the device holds is then no longer trusted, and nobody loses a token."""
    llm = engine(graphs)
    ids = [llm.add(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
    done = {e.request_id: e.output for _ in range(2) for e in llm.step() if e.output is not None}
    assert not done
    runner: Any = llm._runner
    requests = {r.request_id: r for r in llm._scheduler._admitted}
    row = requests[ids[0]].seq.row
    torch.cuda.synchronize()  # the engine has a stream of its own
    runner.executor._models.table[row, 0] = bad
    torch.cuda.synchronize()
    raised = []
    for _ in range(100):
        try:
            done |= {e.request_id: e.output for e in llm.step() if e.output is not None}
        except OutOfBoundsError as e:
            raised.append((e.request, e.index))
            llm.audit()
        if len(done) == len(ids):
            break
    assert raised == [(ids[0], bad)]
    assert [done[i].token_ids for i in ids] == want
    llm.audit()
    assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == want


def test_generate_raises_and_leaves_nothing_behind(engine: Engines, want: list[list[int]]) -> None:
    original = core._device_embed
    llm = engine("off")  # a graph of a pass over a prompt calls nothing
    with pytest.MonkeyPatch.context() as m:
        before = counts(llm)
        m.setattr(core, "_device_embed", lambda t, ids, *rest: original(t, changed(ids, 0, -3), *rest))
        with pytest.raises(OutOfBoundsError, match="embedding table") as e:
            llm.generate(PROMPTS, PARAMS)
        assert (e.value.kernel, e.value.index, e.value.bound) == ("embed", -3, VOCAB)
        m.undo()
        assert counts(llm) == before
        assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == want


def test_steps_that_fail_again_and_again_lose_nothing(engine: Engines, want: list[list[int]]) -> None:
    llm = engine("off")
    with pytest.MonkeyPatch.context() as m:
        ids = [llm.add(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
        done = {e.request_id: e.output for _ in range(2) for e in llm.step() if e.output is not None}
        original = core._device_rope_kv
        m.setattr(core, "_device_rope_kv", lambda *a: original(*a[:9], changed(a[9], 0, -1), *a[10:]))
        extra = llm.add([5, 5, 5], SamplingParams(max_tokens=4))
        for _ in range(4):
            with pytest.raises(OutOfBoundsError) as e:
                llm.step()
            assert (e.value.kernel, e.value.index) == ("rope_kv", -1)
            llm.audit()
        llm.abort(extra)
        llm.abort(ids[1])
        m.undo()
        for _ in range(100):
            done |= {e.request_id: e.output for e in llm.step() if e.output is not None}
            if ids[0] in done and ids[2] in done:
                break
        assert [done[i].token_ids for i in (ids[0], ids[2])] == [want[0], want[2]]
        llm.audit()


def test_a_sum_that_a_broken_pass_owes_is_in_no_graph(engine: Engines, want: list[list[int]]) -> None:
    """An interrupt between a product and the norm behind it: a graph that made the sum would write there for ever."""
    total, more = torch.zeros(64, device="cuda"), torch.ones(64, device="cuda")
    original, captured = Graphs._captured, []

    def capture(self: Graphs, *args: Any) -> Any:
        captured.append(args)
        self._models.dense.owe(total, more)
        return original(self, *args)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(Graphs, "_captured", capture)
        with engine.make("round") as llm:
            assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == want
    assert captured
    torch.cuda.synchronize()
    assert torch.equal(total, torch.zeros_like(total))


def test_engines_that_share_a_gpu_do_not_see_each_others_faults(engine: Engines, want: list[list[int]]) -> None:
    """One engine's launches are spoilt from time to time while another runs in its own thread."""
    spoilt, lock = threading.local(), threading.Lock()
    original = core._device_embed
    calls = 0

    def planted(table: Any, ids: Any, *rest: Any) -> None:
        nonlocal calls
        if getattr(spoilt, "yes", False):
            with lock:
                calls += 1
            if calls % 23 == 0:
                ids = changed(ids, 0, 777)
        original(table, ids, *rest)

    found: dict[str, Any] = {}

    def clean() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                found["clean"] = [[o.token_ids for o in second.generate(PROMPTS, PARAMS)] for _ in range(4)]
        except BaseException as e:
            found["clean"] = e

    def dirty() -> None:
        spoilt.yes = True
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                found["dirty"] = [steps(first) for _ in range(4)]
        except BaseException as e:
            found["dirty"] = e

    with engine.make("off") as first, engine.make("off") as second, pytest.MonkeyPatch.context() as m:
        m.setattr(core, "_device_embed", planted)
        torch.cuda.synchronize()
        threads = [threading.Thread(target=run) for run in (clean, dirty)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert found["clean"] == [want] * 4, found["clean"]
        assert not isinstance(found["dirty"], BaseException), found["dirty"]
        assert [tokens for tokens, _ in found["dirty"]] == [want] * 4
        errors = [e for _, errors in found["dirty"] for e in errors]
        assert errors and all(isinstance(e, OutOfBoundsError) and e.index == 777 for e in errors)
        first.audit()
        second.audit()
